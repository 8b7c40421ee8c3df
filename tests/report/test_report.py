"""Claims about the tables and pictures of finished runs."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedfrozen_app.cli import app
from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.report.curves import curve
from fedfrozen_app.report.settings import read_settings
from fedfrozen_app.report.tables import markdown
from fedfrozen_app.report.write import write_report
from fedfrozen_app.runs.finished import has_result, is_finished
from fedfrozen_app.runs.store import MODEL, RoundMetrics, RunFolder
from fedfrozen_app.runs.sweep import LABELS_FILE

ACCURACIES = {("fedavg", 1): [0.1, 0.5, 0.7], ("fedavg", 2): [0.1, 0.4, 0.9]}
ACCURACIES |= {("fedprox", 1): [0.1, None, 0.6]}


def line(index: int, accuracy: float | None, **more: Any) -> RoundMetrics:
    up, down = (0, 0) if index == 0 else (4000 * index, 6000)
    values: dict[str, Any] = {
        "round": index, "phase": "full" if index else "start", "strategy": "fedavg",
        "train_loss": 0.5, "test_loss": None if accuracy is None else 1 - accuracy,
        "test_accuracy": accuracy, "clients": 3 if index else 0, "num_examples": 30,
        "bytes_up": up, "bytes_down": down, "wire_bytes_up": up, "wire_bytes_down": down,
        "seconds_train": 1.0, "seconds_total": 2.0, "dropped": 1 if index else 0,
    }  # fmt: skip
    return RoundMetrics(**{**values, **more})


def write_run(out: Path, strategy: str, seed: int, accuracies: list[float | None]) -> RunFolder:
    keys = {"strategy": strategy, "seed": seed, "rounds": len(accuracies) - 1}
    name = {"run-dir": str(out), "run-name": f"{strategy}-{seed}"}
    folder = RunFolder.create(RunConfig.from_mapping({**keys, **name}))
    for index, accuracy in enumerate(accuracies):
        folder.append(line(index, accuracy))
    folder.save_model({})
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for (strategy, seed), accuracies in ACCURACIES.items():
        write_run(tmp_path, strategy, seed, accuracies)
    unfinished = RunConfig.from_mapping({"run-dir": str(tmp_path), "run-name": "unfinished"})
    RunFolder.create(unfinished).append(line(0, 0.2))
    return tmp_path


def test_seeds_of_a_setting_are_one_row_of_mean_and_deviation(runs: Path) -> None:
    one, other = read_settings([runs])
    assert one.labels == (("strategy", "fedavg"),) and len(one.runs) == 2
    assert other.labels == (("strategy", "fedprox"),) and len(other.runs) == 1
    head, _, first, second = (row.split(" | ") for row in markdown([one, other]).splitlines())
    assert head[:3] == ["| strategy", "accuracy", "best"]
    # of .7 and .9: mean .8, deviation sqrt(2 * .1^2 / 1)
    assert first[:2] == ["| fedavg", f"**0.8000 +- {math.sqrt(0.02):.4f}**"]
    assert second[:2] == ["| fedprox", "0.6000"]
    # kB of each of the round's four clients, MB of the run: 4000 + 8000 up, 2 x 6000 down
    assert first[4:8] == ["2.00", "1.50", "0.012", "0.012"]
    assert first[-2:] == ["2/2", "0/2 |"]


def test_a_curve_is_over_the_rounds_that_all_runs_tested(runs: Path) -> None:
    one, other = read_settings([runs])
    found = curve(one)
    assert found["round"] == [0, 1, 2]
    assert found["bytes"] == [0, 2500, 2500 + 3500]
    assert found["mean"] == pytest.approx([0.1, 0.45, 0.8])
    assert found["std"] == pytest.approx([0, math.sqrt(0.005), math.sqrt(0.02)])
    assert curve(other)["round"] == [0, 2] and curve(other)["bytes"] == [0, 6000]
    assert curve(other)["std"] == [0, 0]


def test_a_sweeps_own_labels_name_its_runs_and_panels(runs: Path, tmp_path: Path) -> None:
    labels = {
        f"{strategy}-{seed}": {"seed": str(seed), "data": "iid", "method": strategy.upper()}
        for strategy, seed in ACCURACIES
    }
    (runs / LABELS_FILE).write_text(json.dumps(labels))
    settings = read_settings([runs])
    assert [setting.labels for setting in settings] == [
        (("data", "iid"), ("method", "FEDAVG")),
        (("data", "iid"), ("method", "FEDPROX")),
    ]
    paths = write_report([runs], tmp_path / "out", "data")
    assert [path.name for path in paths] == [
        "table.md", "table.tex", "table.csv", "pivot.md", "pivot.tex",
        "provenance.md", "bandwidth.png", "bandwidth.svg", "bandwidth.json", "report.html",
    ]  # fmt: skip
    drawn = json.loads(paths[8].read_text())
    assert drawn.keys() == {"iid"} and drawn["iid"].keys() == {"FEDAVG", "FEDPROX"}
    assert drawn["iid"]["FEDAVG"]["mean"] == pytest.approx([0.1, 0.45, 0.8])
    assert paths[6].read_bytes()[:4] == b"\x89PNG" and b"<svg" in paths[7].read_bytes()
    with pytest.raises(ConfigError, match=r"panels must be a label .*'x'; they have \['data', 'me"):
        write_report([runs], tmp_path / "out", "x")


def test_the_perplexity_of_text_takes_the_place_of_accuracy(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fedavg", 1, [0.1, 0.1])
    (folder.path / "metrics.jsonl").unlink()
    for index in (0, 1):
        folder.append(line(index, 0.1, test_perplexity=90.0 - index))
    (setting,) = read_settings([folder.path])
    assert setting.labels == () and setting.name() == "run"
    assert curve(setting)["mean"] == [90.0, 89.0]
    assert markdown([setting]).splitlines()[2].startswith("| run | 89.00 | 89.00 |")


def test_the_command_prints_the_table_and_refuses_a_folder_without_runs(
    runs: Path, tmp_path: Path
) -> None:
    done = CliRunner().invoke(app, ["report", str(runs), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0 and "| fedprox | 0.6000 |" in done.output
    (tmp_path / "empty").mkdir()
    done = CliRunner().invoke(app, ["report", str(tmp_path / "empty")])
    assert done.exit_code == 2 and "holds no finished run" in done.output


def test_a_run_whose_model_was_removed_to_make_room_still_reports(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "runs", "fedavg", 1, [0.1, 0.5, 0.6])
    row = markdown(read_settings([tmp_path / "runs"]))
    (whole.path / MODEL).unlink()
    assert not is_finished(whole) and has_result(whole)  # a sweep makes the model again
    assert markdown(read_settings([tmp_path / "runs"])) == row
    whole.go_back_to(1)
    with pytest.raises(ConfigError, match="holds no finished run"):
        read_settings([tmp_path / "runs"])
