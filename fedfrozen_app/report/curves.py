"""What the rounds of a setting came to, as numbers to draw."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from fedfrozen_app.report.settings import Setting
from fedfrozen_app.runs.store import RoundMetrics, RunFolder

Curve = dict[str, list[float]]
Pick = Callable[[RoundMetrics], float | None]
NOT_FROZEN = ("start", "warmup", "full")


def curve(setting: Setting, pick: Pick | None = None) -> Curve:
    """Return a measure of a setting's rounds over its runs.

    Keys: ``round``; ``bytes``, the payload that one client sent and received so far; ``mean`` and
    ``std`` of the measure, by default accuracy, of text perplexity. Rounds that one of the runs
    lacks are left out.
    """
    runs = [_measured(lines, pick or setting.quality) for lines in setting.metrics]
    rounds = sorted(set.intersection(*(set(run) for run in runs)))
    values = [[run[index][1] for run in runs] for index in rounds]
    return {
        "round": [float(index) for index in rounds],
        "bytes": [statistics.mean(run[index][0] for run in runs) for index in rounds],
        "mean": [statistics.mean(each) for each in values],
        "std": [statistics.stdev(each) if len(each) > 1 else 0.0 for each in values],
    }


def end_point(setting: Setting) -> tuple[float, float, float] | None:
    """Return bytes of one client, mean and std of the quality where each run ended.

    None where a run diverged, was not tested after its first bytes, or came to no number.
    """
    if setting.has_diverged:
        return None
    ends = [list(_measured(lines, setting.quality).values())[-1:] for lines in setting.metrics]
    points = [end[0] for end in ends if end and end[0][0] > 0 and math.isfinite(end[0][1])]
    if len(points) < len(ends):
        return None
    spent, qualities = zip(*points, strict=True)
    std = statistics.stdev(qualities) if len(points) > 1 else 0.0
    return statistics.mean(spent), statistics.mean(qualities), std


def _measured(lines: list[RoundMetrics], pick: Pick) -> dict[int, tuple[float, float]]:
    """Return, by measured round, a client's bytes up to then and the measure."""
    spent, found = 0.0, {}
    for line in lines:
        asked = line.clients + line.dropped
        spent += (line.bytes_up + line.bytes_down) / max(1, asked)
        if (value := pick(line)) is not None:
            found[line.round] = (spent, value)
    return found


def freeze_round(setting: Setting) -> int | None:
    """Return the first round in which something was frozen, None where nothing was."""
    frozen = [line.round for line in setting.metrics[0] if line.phase not in NOT_FROZEN]
    return min(frozen) if frozen and min(frozen) > 1 else None


def timing(setting: Setting) -> dict[str, float]:
    """Return the seconds of a run by phase, mean over the runs: name of the phase to seconds."""
    totals: Counter[str] = Counter()
    for lines in setting.metrics:
        for line in lines:
            totals[line.phase] += line.seconds_total  # type: ignore[assignment]
    return {phase: total / len(setting.runs) for phase, total in totals.items()}


def client_measures(setting: Setting, measure: str) -> list[float]:
    """Return a measure of every client that tested in the last round, of all runs; [] if none.

    ``measure``: ``accuracy`` or ``loss`` of the model as it is, ``accuracy_after`` or
    ``loss_after`` a round of local training.
    """
    return [test[measure] for test in setting.client_tests if test.get(measure) is not None]


def class_shares(run: RunFolder) -> Mapping[str, Any] | None:
    """Return ``counts`` [client][class] and ``names`` of a run's partition, None if unknown."""
    try:
        report = json.loads((run.path / "partition.json").read_text())
        return {"counts": report["class_counts"], "names": report["class_names"]}
    except (OSError, ValueError, KeyError):
        return None
