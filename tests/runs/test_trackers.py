"""Trackers hold what ``metrics.jsonl`` holds, and never stand in a run's way."""

import logging
from pathlib import Path
from typing import Any

import pytest

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.runs import trackers
from fedfrozen_app.runs.store import RoundMetrics, RunFolder
from fedfrozen_app.runs.trackers import check_tracker, numbers, tracked
from tests.report.test_report import line

HEARD: list[int] = []


def hear(metrics: RoundMetrics) -> None:
    HEARD.append(metrics.round)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    HEARD.clear()
    return RunFolder.create(RunConfig.from_mapping({"run-dir": str(tmp_path), "run-name": "a"}))


def config(name: str) -> RunConfig:
    return RunConfig.from_mapping({"tracker": name})


def scalars(folder: RunFolder) -> dict[str, list[tuple[int, float]]]:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = events.EventAccumulator(str(folder.path / "tensorboard"))
    found.Reload()
    return {
        name: [(event.step, event.value) for event in found.Scalars(name)]
        for name in found.Tags()["scalars"]
    }


def test_tensorboard_holds_every_round_and_takes_back_what_a_resumed_run_repeats(
    run: RunFolder,
) -> None:
    pytest.importorskip("tensorboard")
    with tracked(config("tensorboard"), run, hear) as take:
        for index, accuracy in enumerate([0.25, 0.5, None, 0.75]):
            take(line(index, accuracy))
    found = scalars(run)
    assert found["test_accuracy"] == [(0, 0.25), (1, 0.5), (3, 0.75)]
    assert found["bytes_up"] == [(0, 0), (1, 4000), (2, 8000), (3, 12000)]
    assert "phase" not in found and HEARD == [0, 1, 2, 3]
    with tracked(config("tensorboard"), run, hear, first=2) as take:
        take(line(2, 0.625))
    assert scalars(run)["test_accuracy"] == [(0, 0.25), (1, 0.5), (2, 0.625)]


def test_mlflow_goes_on_with_the_run_that_was_stopped(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.delenv(name, raising=False)
    with tracked(config("mlflow"), run, hear) as take:
        take(line(0, 0.25))
    with tracked(config("mlflow"), run, hear, first=1) as take:
        take(line(1, 0.5))
    client = tracking.MlflowClient((run.path.parent / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("fedfrozen")
    (only,) = client.search_runs([experiment.experiment_id])
    assert only.info.run_name == "a" and only.info.status == "FINISHED"
    assert only.data.params["num-clients"] == "10"
    history = client.get_metric_history(only.info.run_id, "test_accuracy")
    assert [(each.step, each.value) for each in history] == [(0, 0.25), (1, 0.5)]


def test_a_tracker_that_is_not_installed_is_missed_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    check_tracker(config("none"))
    with pytest.raises(
        ConfigError, match=r"tracker=wandb needs .*pip install 'fedfrozen\[wandb\]'"
    ):
        check_tracker(config("wandb"))


class Broken:
    """A tracker that fails once it has begun, or at once."""

    at_once = False

    def __init__(self, *_: Any) -> None:
        if self.at_once:
            raise OSError("no such project")

    def log(self, step: int, values: dict[str, float]) -> None:
        raise ConnectionError("gone")

    def close(self, *, failed: bool) -> None:
        raise ConnectionError("still gone")


def test_a_tracker_that_fails_is_said_and_the_run_goes_on(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Broken)
    with caplog.at_level(logging.WARNING), tracked(config("wandb"), run, hear) as take:
        take(line(0, 0.5))
    assert HEARD == [0]
    assert [record.getMessage() for record in caplog.records] == [
        "tracker=wandb missed something: gone", "tracker=wandb missed something: still gone",
    ]  # fmt: skip
    monkeypatch.setattr(Broken, "at_once", True)
    with (
        pytest.raises(ConfigError, match="tracker=wandb cannot begin: no such project"),
        tracked(config("wandb"), run, hear),
    ):
        pass
    assert not run.path.exists()  # or the run's name would be taken


def test_only_numbers_are_tracked() -> None:
    values = numbers(line(1, None))
    assert values["clients"] == 3.0 and "phase" not in values and "test_accuracy" not in values
