"""docs/results.md says what the kept run folders say, and those are runs of experiments/."""

import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType

import pytest

from fedfrozen_app.config_input import read_toml
from fedfrozen_app.report.settings import read_settings
from fedfrozen_app.runs.provenance import config_hash
from fedfrozen_app.runs.sweep import read_sweep
from tests.report.test_report import write_run

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS, DOCS = ROOT / "experiments" / "fedfrozen", ROOT / "docs"
KEPT = sorted((DOCS / "results" / "runs").glob("*"))


@pytest.fixture(scope="module")
def results() -> ModuleType:
    spec = importlib.util.spec_from_file_location("results", DOCS / "results.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def configs(sweep: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text())["config"] for path in sorted(sweep.glob("*/config.json"))]


def test_the_page_is_what_its_command_writes(results: ModuleType, tmp_path: Path) -> None:
    page = results.write_page(DOCS / "results" / "runs", tmp_path)
    assert page.read_text() == (DOCS / "results.md").read_text()
    pictures = sorted(path.name for path in (tmp_path / "results").glob("*.png"))
    assert pictures == sorted(path.name for path in (DOCS / "results").glob("*.png"))


@pytest.mark.parametrize("sweep", KEPT, ids=lambda path: path.name)
def test_what_was_run_is_what_the_experiment_file_says(sweep: Path) -> None:
    labels = json.loads((sweep / "labels.json").read_text())
    kept = configs(sweep)
    given = {key: str(kept[0][key]) for key in ("data-dir", "weights")}
    cells = read_sweep(EXPERIMENTS / f"{sweep.name}.toml", given).cells
    asked = {config_hash([cell.config.to_mapping()]) for cell in cells}
    assert {config_hash([config]) for config in kept} <= asked
    assert set(labels) == {path.parent.name for path in sweep.glob("*/config.json")}


def test_nothing_of_the_machine_is_kept_but_its_hardware() -> None:
    for sweep in KEPT:
        for path in sweep.rglob("*.json*"):
            assert "/work" not in (text := path.read_text()) and "/home" not in text, path


def test_the_tables_step_sizes_are_the_best_of_their_grid(results: ModuleType) -> None:
    """Recomputed here from the metrics, for each method of the table."""
    best: dict[str, tuple[float, float]] = {}
    for path in (DOCS / "results" / "runs" / "table-4-2-small-tuning").glob("*/metrics.jsonl"):
        last = json.loads(path.read_text().splitlines()[-1])
        config = json.loads((path.parent / "config.json").read_text())["config"]
        found = (last["validation_accuracy"] or 0.0, -config["lr"])
        best[config["strategy"]] = max(best.get(config["strategy"], (-1.0, 0.0)), found)
    methods = read_toml(EXPERIMENTS / "table-4-2-small.toml")["sweep"]["method"]
    assert {each["strategy"]: each["lr"] for each in methods} == {
        strategy: -lr for strategy, (_, lr) in best.items()
    }
    ours = next(each["lr"] for each in methods if each["name"] == "fedfrozen")
    assert read_toml(EXPERIMENTS / "warmup-small.toml")["lr"] == ours
    femnist = read_toml(EXPERIMENTS / "femnist-small.toml")["sweep"]["method"]
    for each in femnist:
        assert each["lr"] == next(one["lr"] for one in methods if one["name"] == each["name"])


def test_noise_is_two_standard_errors(results: ModuleType, tmp_path: Path) -> None:
    for strategy, seed, last in (("fedavg", 1, 0.5), ("fedavg", 2, 0.7), ("fedprox", 1, 0.8)):
        write_run(tmp_path, strategy, seed, [0.1, last]).write_partition({"num_test_examples": 400})
    (tmp_path / "other").mkdir()
    for seed, last in ((1, 0.6), (2, 0.9)):
        write_run(tmp_path / "other", "fedprox", seed, [0.1, last])
    plain, one = read_settings([tmp_path])
    (two,) = read_settings([tmp_path / "other"])
    # of seeds: variances .02 and .045, two runs each
    assert results.noise_of(plain, two) == pytest.approx(2 * math.sqrt(0.01 + 0.0225))
    # of one seed: the test images
    expected = 2 * math.sqrt((0.6 * 0.4 + 0.8 * 0.2) / 400)
    assert results.noise_of(plain, one) == pytest.approx(expected)
