"""docs/results.md says what the kept run folders say, and those are runs of experiments/."""

import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType

import pytest

from fedfrozen_app.config_input import read_toml
from fedfrozen_app.report.settings import Setting, read_settings
from fedfrozen_app.runs.provenance import config_hash
from fedfrozen_app.runs.sweep import read_sweep
from tests.report.test_report import write_run

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS, DOCS = ROOT / "experiments" / "fedfrozen", ROOT / "docs"
KEPT = sorted((DOCS / "results" / "runs").glob("*/"))


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


def test_the_tables_step_sizes_are_the_best_of_their_grid() -> None:
    """Recomputed here from the metrics, for each method of the table."""
    best: dict[str, tuple[float, float, float]] = {}
    for path in (DOCS / "results" / "runs" / "table-4-2-small-tuning").glob("*/metrics.jsonl"):
        last = json.loads(path.read_text().splitlines()[-1])
        config = json.loads((path.parent / "config.json").read_text())["config"]
        found = (last["validation_loss"], config["lr"], config["server-lr"])
        best[config["strategy"]] = min(best.get(config["strategy"], found), found)
    methods = read_toml(EXPERIMENTS / "table-4-2-small.toml")["sweep"]["method"]
    assert {each["strategy"]: (each["lr"], each.get("server-lr", -1.0)) for each in methods} == {
        strategy: (lr, server_lr) for strategy, (_, lr, server_lr) in best.items()
    }
    ours = next(each["lr"] for each in methods if each["name"] == "fedfrozen")
    assert read_toml(EXPERIMENTS / "warmup-small.toml")["lr"] == ours
    for each in read_toml(EXPERIMENTS / "femnist-small.toml")["sweep"]["method"]:
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


def grid(folder: Path, accuracies: dict[tuple[str, str], float], label: str) -> list[Setting]:
    """Return settings of one run each: method, value of ``label`` and last accuracy."""
    labels = {}
    for seed, ((method, value), last) in enumerate(accuracies.items()):
        run = write_run(folder, "fedavg", seed, [0.1, last])
        run.write_partition({"num_test_examples": 10_000})
        path = run.path.with_name(f"{method}-{value}")
        run.path.rename(path)
        config = json.loads((path / "config.json").read_text())
        config["seed"] = config["config"]["seed"] = 1
        (path / "config.json").write_text(json.dumps(config))
        labels[path.name] = {"method": method, label: value}
    (folder / "labels.json").write_text(json.dumps(labels))
    return read_settings([folder])


def test_the_claims_of_the_table_are_computed(results: ModuleType, tmp_path: Path) -> None:
    accuracies = {
        ("fedavg", "0.1"): 0.50, ("fedprox", "0.1"): 0.56, ("fedfrozen", "0.1"): 0.55,
        ("fedavg", "0.5"): 0.60, ("fedprox", "0.5"): 0.66, ("fedfrozen", "0.5"): 0.62,
    }  # fmt: skip
    settings = grid(tmp_path / "one", accuracies, "alpha")
    # of 10,000 images: 2 sqrt((.55 x .45 + .56 x .44) / 10,000) = .014
    said = results.comparable(settings)
    assert said.startswith("**not shown**: alpha 0.1: 1.0 points below fedprox (noise: 1.4); ")
    assert "alpha 0.5: 4.0 points below fedprox" in said and said.endswith("every alpha: fedprox")
    # losses .10, .10 and .07; of four accuracies .014 sqrt(2) = .020
    lost = results.degradation(settings)
    assert lost.startswith(
        "shows: points lost from alpha 0.5 to 0.1: fedfrozen 7.0, fedavg 10.0, fedprox 10.0; "
    )
    assert " 2.0 points (noise) less" in lost
    accuracies |= {("fedfrozen", "0.5"): 0.67}
    settings = grid(tmp_path / "two", accuracies, "alpha")
    assert results.comparable(settings).startswith("shows: ")
    assert results.degradation(settings).startswith("**not shown**: ")  # loses most
    near = accuracies | {("fedfrozen", "0.1"): 0.58}  # loses .09, which is no less beyond noise
    settings = grid(tmp_path / "near", near, "alpha")
    assert results.degradation(settings).startswith("**not shown**: ")
    accuracies |= {("fedavg", "0.1"): 0.56, ("fedavg", "0.5"): 0.67, ("fedprox", "0.5"): 0.67}
    alike = grid(tmp_path / "three", accuracies, "alpha")  # nobody is told from anybody
    assert results.comparable(alike).startswith("**not shown**: ")


def test_a_warm_up_is_best_only_if_it_beats_both_ends(results: ModuleType, tmp_path: Path) -> None:
    for folder, last, verdict in (("one", 0.50, "shows"), ("two", 0.559, "**not shown**")):
        found = {("x", "0.0"): 0.40, ("x", "0.4"): 0.56, ("x", "1.0"): last}
        settings = grid(tmp_path / folder, found, "warmup-ratio")
        said = results.interior(settings)
        assert said.startswith(f"{verdict}: the best ratio is 0.4, 16.0 points over no warm-up")
