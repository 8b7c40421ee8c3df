"""Watch a run live: every round's numbers to TensorBoard, Weights & Biases or MLflow.

The run folder stays the record; a tracker is a copy of ``metrics.jsonl`` that somebody watches.
Packages are imported when a tracker is asked for, and where they write is theirs to configure
(``WANDB_*``, ``MLFLOW_*`` variables); without that TensorBoard writes to ``tensorboard/`` in the
run folder and MLflow to ``mlruns/`` beside it.
"""

import importlib
import importlib.util
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Protocol

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.runs.store import OnRound, RoundMetrics, RunFolder

logger = logging.getLogger(__name__)
EXPERIMENT = "fedfrozen"


class Tracker(Protocol):
    """What is told of every round."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Take a round's numbers."""
        ...

    def close(self, *, failed: bool) -> None:
        """Write what is left, and whether the run stopped before its end."""
        ...


class TensorBoard:
    """Scalars in event files; ``tensorboard --logdir runs`` shows all runs."""

    def __init__(self, config: RunConfig, folder: RunFolder, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # rounds that a resumed run repeats are taken back
        self._writer = SummaryWriter(str(folder.path / "tensorboard"), purge_step=first)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Write a scalar for every number."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        """Close the event file."""
        self._writer.close()


class WandB:
    """A run of Weights & Biases, called like the run folder."""

    def __init__(self, config: RunConfig, folder: RunFolder, first: int) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", EXPERIMENT),
            name=folder.path.name,
            id=folder.path.name,
            dir=str(folder.path),
            config=config.to_mapping(),
            resume="allow" if first else None,
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        """Send a round."""
        self._run.log(values, step=step)

    def close(self, *, failed: bool) -> None:
        """Finish the run."""
        self._run.finish(exit_code=int(failed))


class MLflow:
    """A run of MLflow, called like the run folder; a resumed one goes on with it."""

    def __init__(self, config: RunConfig, folder: RunFolder, first: int) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI") or (folder.path.parent / "mlruns").as_uri()
        if uri.startswith("file:"):  # MLflow wants to hear that files are meant
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = MlflowClient(uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        known = folder.path / "mlflow.txt"
        if first and known.exists():
            self._id = known.read_text().strip()
            self._client.update_run(self._id, "RUNNING")
            return
        self._id = self._client.create_run(experiment, run_name=folder.path.name).info.run_id
        known.write_text(self._id + "\n")
        params = [Param(key, str(value)) for key, value in config.to_mapping().items()]
        self._client.log_batch(self._id, params=params)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Write a round."""
        for name, value in values.items():
            self._client.log_metric(self._id, name, value, step=step)

    def close(self, *, failed: bool) -> None:
        """End the run."""
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


TRACKERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def check_tracker(config: RunConfig) -> None:
    """Raise ConfigError if the tracker's package, which has its name, is not installed."""
    if config.tracker == "none" or importlib.util.find_spec(config.tracker) is not None:
        return
    raise ConfigError(
        f"tracker={config.tracker} needs the package {config.tracker}, which is not "
        f"installed; run `pip install 'fedfrozen[{config.tracker}]'` or take tracker=none"
    )


def numbers(metrics: RoundMetrics) -> dict[str, float]:
    """Return what a tracker shows of a round: whatever is a number, but for the round itself."""
    values = asdict(metrics)
    del values["round"]
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


@contextmanager
def tracked(
    config: RunConfig, folder: RunFolder, on_round: OnRound, first: int = 0
) -> Iterator[OnRound]:
    """Yield ``on_round`` that a tracker hears, too; one that fails later does not end the run.

    Parameters
    ----------
    config : RunConfig
        Says which tracker.
    folder : RunFolder
        The run's folder.
    on_round : callable
        What takes a round's metrics without a tracker.
    first : int
        The first round that is going to come, above 0 in a resumed run.

    Raises
    ------
    ConfigError
        If the tracker cannot begin.
    """
    if config.tracker == "none":
        yield on_round
        return
    try:
        tracker: Tracker = TRACKERS[config.tracker](config, folder, first)
    except Exception as error:
        if first == 0:  # the folder holds no result yet, and its name is free again
            shutil.rmtree(folder.path, ignore_errors=True)
        raise ConfigError(
            f"tracker={config.tracker} cannot begin: {error}; mend that or take tracker=none"
        ) from error

    def take(metrics: RoundMetrics) -> None:
        with _warned(config.tracker):
            tracker.log(metrics.round, numbers(metrics))
        on_round(metrics)

    failed = True
    try:
        yield take
        failed = False
    finally:
        with _warned(config.tracker):
            tracker.close(failed=failed)


@contextmanager
def _warned(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a network that is gone, a full quota
        logger.warning("tracker=%s missed something: %s", name, error)
