"""FedFrozen's experiment files: seven methods that differ in nothing but their method."""

from functools import cache
from pathlib import Path

import pytest

from fedfrozen_app.config import ConfigValue, RunConfig
from fedfrozen_app.config_input import read_toml
from fedfrozen_app.models.registry import model_spec
from fedfrozen_app.runs.sweep import Sweep, read_sweep

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "experiments" / "fedfrozen").glob("*.toml"))
METHODS = {"fedavg", "fedprox", "scaffold", "fedavgm", "fedadam", "fednova", "fedfrozen"}
SIZES = {
    "femnist-small": 12,
    "table-4-2-cifar10": 63,
    "table-4-2-cifar100": 63,
    "table-4-2-femnist": 63,
    "table-4-2-small": 63,
    "table-4-2-small-tuning": 27,
    "warmup": 42,
    "warmup-small": 21,
}
# a method may differ from the others in these keys and in no other
DATA_AND_SEED = ("partition", "alpha", "seed")
OF_METHOD = {"strategy", "lr", "server-lr", "warmup-ratio", "run-name"}


@cache
def sweep_of(path: Path) -> Sweep:
    given: dict[str, ConfigValue] = {"data-dir": "data"}
    if "-small" in path.stem:
        given["weights"] = "weights.safetensors"
    return read_sweep(path, given)


def test_the_files_are_the_ones_counted_here() -> None:
    assert {path.stem: len(sweep_of(path).cells) for path in FILES} == SIZES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_methods_differ_in_nothing_but_their_method(path: Path) -> None:
    sweep = sweep_of(path)
    others: dict[tuple[str, ...], list[dict[str, ConfigValue]]] = {}
    for cell in sweep.cells:
        kept = {label: text for label, text in cell.labels.items() if label in DATA_AND_SEED}
        others.setdefault(tuple(kept.values()), []).append(cell.config.to_mapping())
    for mappings in others.values():
        differing = {key for key in RunConfig.keys() if len({m[key] for m in mappings}) > 1}
        assert differing <= OF_METHOD
    if path.stem.startswith("table"):
        assert {cell.config.strategy for cell in sweep.cells} == METHODS


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_header_gives_the_command(path: Path) -> None:
    assert f"fedfrozen sweep experiments/fedfrozen/{path.name}" in path.read_text()


def test_the_full_files_have_the_papers_models_and_alphas() -> None:
    """arXiv:2605.06446, section 4.2."""
    models = {"cifar10": "vit-b-32", "cifar100": "vit-b-32", "femnist": "vit-s-16"}
    for dataset, model in models.items():
        cells = sweep_of(ROOT / "experiments" / "fedfrozen" / f"table-4-2-{dataset}.toml").cells
        assert {cell.config.alpha for cell in cells} == {0.1, 0.3, 0.5}
        assert {(cell.config.dataset, cell.config.model) for cell in cells} == {(dataset, model)}
        assert {cell.config.resolved_weights for cell in cells} == {"pretrained"}
        assert model_spec(cells[0].config).image_size == 224
    ratios = read_toml(ROOT / "experiments" / "fedfrozen" / "warmup.toml")["sweep"]["warmup-ratio"]
    assert ratios == [0.0, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0]
