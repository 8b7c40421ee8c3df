"""Claims about the tables and pictures of finished runs."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedfrozen_app.cli import app
from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.report.curves import curve, end_point
from fedfrozen_app.report.settings import read_settings
from fedfrozen_app.report.tables import markdown
from fedfrozen_app.report.write import draw_all, write_report
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
    assert not is_finished(whole) and has_result(whole)
    assert markdown(read_settings([tmp_path / "runs"])) == row
    whole.go_back_to(1)
    with pytest.raises(ConfigError, match="holds no finished run"):
        read_settings([tmp_path / "runs"])


def test_runs_that_differ_in_more_than_the_seed_are_never_one_setting(tmp_path: Path) -> None:
    for sweep, rounds in (("one", [0.1, 0.9]), ("two", [0.1, 0.2, 0.3])):
        run = write_run(tmp_path / sweep, "fedavg", 1, rounds)
        (tmp_path / sweep / LABELS_FILE).write_text(json.dumps({run.path.name: {"method": "A"}}))
    one, two = read_settings([tmp_path / "one", tmp_path / "two"])
    assert one.labels == (("method", "A"), ("rounds", "1")) and len(one.runs) == len(two.runs) == 1
    single = [tmp_path / "one" / "fedavg-1", tmp_path / "two" / "fedavg-1"]
    assert [setting.labels for setting in read_settings(single)] == [
        (("rounds", "1"),),
        (("rounds", "2"),),
    ]
    (twice,) = read_settings([single[0], tmp_path / "one" / ".." / "one" / "fedavg-1"])
    assert len(twice.runs) == 1  # the same folder given twice is one run


def test_what_is_no_run_of_the_sweep_or_has_not_finished_is_left_out_and_said(
    tmp_path: Path,
) -> None:
    names = {}
    for strategy, seed in (("fedavg", 1), ("fedavg", 2), ("fedprox", 1)):
        run = write_run(tmp_path / "runs", strategy, seed, [0.1, 0.5])
        names[run.path.name] = {"method": strategy, "seed": str(seed)}
    run.go_back_to(0)
    run.write_failure("QuorumError: 1 of 10 replies\nand more")
    (tmp_path / "runs" / LABELS_FILE).write_text(json.dumps(names))
    write_run(tmp_path / "runs", "scaffold", 1, [0.1, 0.5]).path.rename(
        tmp_path / "runs" / "fedavg-1.old-1"
    )
    (setting,) = read_settings([tmp_path / "runs"])
    assert setting.labels == (("method", "fedavg"),) and len(setting.runs) == 2
    write_report([tmp_path / "runs"], tmp_path / "out")
    said = (tmp_path / "out" / "table.md").read_text().splitlines()[-1]
    assert said.endswith(
        "Left out: fedprox-1 (QuorumError: 1 of 10 replies), "
        "fedavg-1.old-1 (not of the sweep as it is now)."
    )


def test_a_file_that_was_cut_off_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path, "fedavg", 1, [0.1, 0.5])
    (run.path / "clients.jsonl").write_text('{"round": 1, "cli')
    with pytest.raises(ConfigError, match=r"clients.jsonl' cannot be read .*leave that run out"):
        read_settings([tmp_path])


@pytest.mark.parametrize("last", [0, 1])
def test_runs_that_broke_off_are_drawn_as_far_as_they_came(tmp_path: Path, last: int) -> None:
    for seed in (1, 2):
        run = write_run(tmp_path / "runs", "fedavg", seed, [0.1, 0.2, 0.3])
        run.go_back_to(last)
        run.write_failure(f"DivergedError: round {last + 1}")
    (setting,) = read_settings([tmp_path / "runs"])
    assert setting.has_diverged and end_point(setting) is None
    assert curve(setting)["round"] == list(range(last + 1))
    draw_all([setting], tmp_path)
    assert (tmp_path / "pareto.png").exists()


def test_an_end_point_is_where_each_run_ended(tmp_path: Path) -> None:
    keys = {"rounds": 4, "byte-budget": 10**9, "run-dir": str(tmp_path)}
    for seed, accuracies in ((1, [0.1, 0.5]), (2, [0.1, 0.5, 0.9])):
        config = RunConfig.from_mapping({**keys, "seed": seed, "run-name": f"s{seed}"})
        folder = RunFolder.create(config)
        for index, accuracy in enumerate(accuracies):
            folder.append(line(index, accuracy))
        folder.save_model({})
        folder.write_early_end("byte-budget")
    (setting,) = read_settings([tmp_path])
    # rounds of 4 kB and 8 kB up and 6 kB down, over four clients: 2.5 kB and 2.5 + 3.5 kB
    assert end_point(setting) == (
        pytest.approx(4250.0),
        pytest.approx(0.7),
        pytest.approx(0.2828, abs=1e-4),
    )


def test_a_diverged_language_model_has_no_accuracy_among_perplexities(tmp_path: Path) -> None:
    keys = {"rounds": 2, "run-dir": str(tmp_path), "run-name": "text"}
    folder = RunFolder.create(RunConfig.from_mapping(keys))
    for index, perplexity in enumerate((400.0, 90.0, None)):
        folder.append(line(index, 0.01, test_perplexity=perplexity))
    folder.save_model({})
    (setting,) = read_settings([tmp_path])
    assert setting.is_text and curve(setting)["mean"] == [400.0, 90.0]
    assert "| perplexity |" in markdown([setting]).splitlines()[0]
