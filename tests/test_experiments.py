"""Every run of FLITE's experiment files can be, and compares what it says it compares."""

import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest

from fedfrozen_app.config import ConfigError, ConfigValue, RunConfig
from fedfrozen_app.config_input import parse_overrides, read_toml
from fedfrozen_app.models.registry import model_spec
from fedfrozen_app.models.weights import check_weights
from fedfrozen_app.runs.sweep import Sweep, read_sweep
from fedfrozen_app.training.central import pretraining_config

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "experiments").glob("flite/*.toml"))
SIZES = {
    "flite-byte-budget": 6,
    "flite-byte-budget-small": 6,
    "flite-clients": 24,
    "flite-clients-small": 16,
    "flite-dimension": 15,
    "flite-dimension-small": 10,
    "flite-from-scratch": 21,
    "flite-from-scratch-small": 12,
    "flite-head": 9,
    "flite-head-small": 9,
    "flite-methods": 42,
    "flite-head-to-head-cifar10": 12,
    "flite-head-to-head-cifar100": 12,
    "flite-head-to-head-small": 12,
    "flite-headline": 6,
    "flite-headline-small": 6,
    "flite-noniid": 18,
    "flite-noniid-small": 18,
    "flite-pareto": 21,
    "flite-pareto-small": 14,
    "flite-quantisation": 18,
    "flite-quantisation-small": 18,
    "flite-rank": 12,
    "flite-rank-small": 8,
    "flite-tinyimagenet": 12,
    "flite-tinyimagenet-small": 8,
    "flite-wikitext2": 6,
    "flite-wikitext2-small": 6,
}
METHOD = "method"  # the label of what is compared
# a method may differ from the others in these keys and in no other
OF_METHOD = {"strategy", "latent-dim", "latent-rank", "latent-bits", "generator", "compression",
             "broadcast", "head", "run-name"}  # fmt: skip
SHARED = ("dataset", "model", "rounds", "num-clients", "partitioner", "alpha", "local-epochs",
          "batch-size", "max-train-examples", "max-test-examples")  # fmt: skip


@pytest.mark.parametrize(("name", "size"), [("digits-sweep", 8), ("digits-rules", 96)])
def test_the_grids_of_the_bundled_data_need_nothing(name: str, size: int) -> None:
    sweep = read_sweep(ROOT / "experiments" / f"{name}.toml")
    assert len(sweep.cells) == size and {cell.config.dataset for cell in sweep.cells} == {"digits"}


@cache
def sweep_of(path: Path) -> Sweep:
    own = read_toml(path).get("weights")
    given: dict[str, ConfigValue] = {} if own else {"weights": "base.safetensors"}
    return read_sweep(path, given | {"data-dir": "data"})


def header(path: Path) -> str:
    """The comment at the head of a file, its continued lines joined."""
    lines = path.read_text().splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(line.lstrip("# ") for line in lines[:end]).replace("\\\n", " ")


def test_the_files_are_the_ones_counted_here() -> None:
    assert sorted(path.stem for path in FILES) == sorted(SIZES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_cell_is_a_run_and_their_number_is_as_meant(path: Path) -> None:
    cells = sweep_of(path).cells
    assert len(cells) == SIZES[path.stem]
    assert [model_spec(cell.config).name for cell in cells] == [cells[0].config.model] * len(cells)
    assert {cell.config.seed for cell in cells} in ({1, 2, 3}, {1, 2})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_methods_are_compared_on_the_same_data_and_rounds(path: Path) -> None:
    sweep = sweep_of(path)
    others: dict[tuple[str, ...], list[dict[str, ConfigValue]]] = {}
    for cell in sweep.cells:
        rest = tuple(text for label, text in cell.labels.items() if label != METHOD)
        others.setdefault(rest, []).append(cell.config.to_mapping())
    for mappings in others.values():
        differing = {key for key in RunConfig.keys() if len({m[key] for m in mappings}) > 1}
        assert differing <= OF_METHOD
    swept = {key for axis in sweep.axes for option in axis.options for key in option.keys}
    for key in SHARED:
        values = {cell.config.to_mapping()[key] for cell in sweep.cells}
        assert key in swept or len(values) == 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_header_says_the_claim_the_command_and_the_base(path: Path) -> None:
    text = header(path)
    assert text.startswith("FLITE") and re.search(r"Table \d|Figure \d|section 5\.\d", text)
    command = f"fedfrozen sweep {path.relative_to(ROOT)} data-dir=FOLDER"
    assert command in text.splitlines() or f"{command} weights=FILE" in text.splitlines()
    from_scratch = read_toml(path).get("weights") == "none"
    assert from_scratch == (f"{command} weights=FILE" not in text)
    if from_scratch:
        return
    (line,) = (line for line in text.splitlines() if "fedfrozen pretrain" in line)
    words = shlex.split(line.partition("fedfrozen pretrain ")[2])
    base = pretraining_config(parse_overrides(word for word in words if "=" in word))
    for cell in sweep_of(path).cells:
        for key in ("dataset", "model", "image_size", "context_length"):
            assert getattr(base, key) == getattr(cell.config, key)
        if not cell.config.reads_text and cell.config.strategy == "latent":
            assert base.head == cell.config.head


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_base_that_was_not_given_is_missed_before_anything_runs(path: Path) -> None:
    if read_toml(path).get("weights"):
        pytest.skip("starts without a base")
    for cell in read_sweep(path).cells:
        with pytest.raises(ConfigError, match="fedfrozen pretrain"):
            check_weights(cell.config)


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.stem.endswith("-small")], ids=lambda path: path.stem
)
def test_a_small_variant_sweeps_what_the_full_one_sweeps(path: Path) -> None:
    name = path.stem.removesuffix("-small")
    full = path.with_name(f"{name if name in SIZES else f'{name}-cifar10'}.toml")
    assert [axis.label for axis in sweep_of(path).axes] == [
        axis.label for axis in sweep_of(full).axes
    ]
    config = sweep_of(path).cells[0].config
    assert config.precision == "bf16" and 0 < config.max_train_examples <= 4000
    assert config.model in ("resnet20-gn", "tinygpt-mini")


def test_the_grid_in_the_readme_is_the_one_that_its_command_runs() -> None:
    section = (ROOT / "README.md").read_text().partition("## Sweeps")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```toml\n(.*?)```", section, re.S)
    (name,) = re.findall(r"^fedfrozen sweep (\S+)", section, re.M)
    assert tomllib.loads(block)["sweep"] == read_toml(ROOT / name)["sweep"]
    cells = read_sweep(ROOT / name).cells
    assert len(cells) == 8 and f"`runs/{Path(name).stem}/{cells[0].name}`" in section


def test_the_papers_settings_are_those_of_the_full_files() -> None:
    """arXiv:2607.18343, sections 4 and 5."""
    by_name = {path.stem: sweep_of(path) for path in FILES}
    headline = by_name["flite-headline"].cells[0].config
    assert (headline.latent_dim, headline.latent_rank, headline.generator) == (
        64,
        32,
        "gaussian-qr",
    )
    assert (headline.latent_lr, headline.latent_weight_decay, headline.latent_clip_norm) == (
        1e-2, 1e-4, 1.0)  # fmt: skip
    assert (headline.num_clients, headline.partitioner, headline.head) == (
        8, "iid", "frozen-orthogonal")  # fmt: skip
    tiny = by_name["flite-tinyimagenet"].cells[0].config
    assert (tiny.model, tiny.latent_dim, tiny.rounds, tiny.local_epochs) == (
        "resnet34-gn", 1024, 20, 2)  # fmt: skip
    text = by_name["flite-wikitext2"].cells[0].config
    assert (text.latent_dim, text.rounds, text.local_epochs) == (1024, 20, 1)
    bits = {cell.config.latent_bits for cell in by_name["flite-quantisation"].cells}
    assert bits == {32, 8, 4}
    assert {c.config.num_clients for c in by_name["flite-clients"].cells} == {4, 8, 16, 32}
    assert {c.config.latent_rank for c in by_name["flite-rank"].cells} == {8, 32, 128, 256}
    assert {c.config.alpha for c in by_name["flite-noniid"].cells} == {0.5, 0.1}
    for sweep in by_name.values():  # "the unweighted mean of client latents or client payloads"
        assert {cell.config.resolved_weighting for cell in sweep.cells} == {"uniform"}
