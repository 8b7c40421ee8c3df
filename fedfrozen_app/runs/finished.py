"""Which runs are done, and which result each of them is."""

import json
from pathlib import Path

from fedfrozen_app.config import RunConfig
from fedfrozen_app.runs.provenance import NOT_OF_THE_RESULT
from fedfrozen_app.runs.store import MODEL, RunFolder
from fedfrozen_app.strategies.base import DivergedError
from fedfrozen_app.strategies.replies import NON_FINITE

TWICE, ONE_NAT, FEW_POINTS = 2.0, 1.0, 0.05
DIVERGED = (NON_FINITE, DivergedError.__name__)  # as a run's failure says it


def identity(config: RunConfig) -> str:
    """Return what two configs have in common exactly if they ask for the same result."""
    resolved = config.resolved()
    del resolved["local-steps"]  # the upper end of a range only
    values = {**config.to_mapping(), **resolved, "warmup-ratio": -1}  # as resolved warm-up rounds
    return json.dumps(
        {key: values[key] for key in values if key not in NOT_OF_THE_RESULT}, sort_keys=True
    )


def finished_runs(out: Path) -> dict[str, RunFolder]:
    """Return the finished runs in a folder by what :func:`identity` says of their configs."""
    found: dict[str, RunFolder] = {}
    for path in sorted(out.glob("*/config.json")):
        folder = RunFolder(path.parent)
        if has_result(folder) and (config := stored_config(folder)) is not None:
            found.setdefault(identity(config), folder)
    return found


def stored_config(folder: RunFolder) -> RunConfig | None:
    """Return the config a folder was made with; None where this version cannot read it."""
    try:
        return RunConfig.from_mapping(folder.config()["config"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_finished(folder: RunFolder) -> bool:
    """Whether a run came to its end, or stopped because it diverged, and left its model."""
    return (folder.path / MODEL).exists() and has_result(folder)


def has_result(folder: RunFolder) -> bool:
    """Whether a run's numbers are final; its model may have been removed to make room."""
    failure, has_model = folder.failure(), (folder.path / MODEL).exists()
    if failure is None:
        return has_model or is_through(folder) or folder.early_end() is not None
    # a failure after the last round was one to save the model
    return any(word in failure for word in DIVERGED) or (has_model and is_through(folder))


def is_through(folder: RunFolder) -> bool:
    """Whether the last round was reached."""
    try:
        return bool(folder.metrics()[-1].round == folder.config()["config"]["rounds"])
    except (OSError, ValueError, LookupError, TypeError):  # cut off in the middle of a line
        return False


def has_diverged(folder: RunFolder) -> bool:
    """Whether a finished run broke off, or ended far worse than it began.

    That is at twice the loss and a nat more, without more than five points of accuracy for it. A
    run from a good base that ends a little below it has not diverged.
    """
    if folder.failure() is not None and not is_through(folder):
        return True
    tested = [line for line in folder.metrics() if line.test_accuracy is not None]
    if not tested or tested[-1].test_loss is None:
        return True
    start, end = tested[0].test_loss or 0.0, tested[-1].test_loss
    gained = (tested[-1].test_accuracy or 0.0) - (tested[0].test_accuracy or 0.0)
    return end > max(TWICE * start, start + ONE_NAT) and gained <= FEW_POINTS
