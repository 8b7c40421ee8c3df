"""Whether runs may be compared: the same data, first model, preprocessing and budgets.

Read from run folders alone. Runs whose ``partition.json`` has the same settings, seed included,
are one comparison; what else differs among them than their method is said, never assumed.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedfrozen_app.runs.store import RunFolder

LOCAL_WORK = ("local-epochs", "local-steps", "work", "batch-size", "precision")
COMMUNICATION = ("rounds", "byte-budget", "fraction-train")
FEW = 3  # names that are said in full
UNKNOWN = {"null", "{}"}  # of a run that is older than the file
ROWS = ("clients", "public", "validation", "test")


@dataclass(frozen=True)
class Facts:
    """What a run folder says of where a run began and how much it was allowed."""

    path: Path

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The run's config keys."""
        return dict(self._read("config.json").get("config", {}))

    @cached_property
    def partition(self) -> Mapping[str, Any]:
        """Settings and rows of the partition."""
        return self._read("partition.json")

    @cached_property
    def start(self) -> Mapping[str, Any]:
        """First model and preprocessing."""
        return self._read("start.json")

    def _read(self, name: str) -> dict[str, Any]:
        try:
            return dict(json.loads((self.path / name).read_text()))
        except OSError:
            return {}

    @property
    def comparison(self) -> str:
        """Return what the runs of one comparison have in common."""
        asked = [self.partition.get(key) for key in ("dataset_key", "settings", "num_clients")]
        return json.dumps([*asked, self.config.get("seed")], sort_keys=True)


def _same(*keys: str) -> Callable[[Facts], Any]:
    return lambda facts: {key: facts.config.get(key) for key in keys}


CHECKS: dict[str, Callable[[Facts], Any]] = {
    "partition": lambda facts: facts.partition and [facts.partition.get(key) for key in ROWS],
    "first model": lambda facts: facts.start.get("model"),
    "preprocessing": lambda facts: facts.start.get("preprocessing"),
    "local work": _same(*LOCAL_WORK),
    "communication": _same(*COMMUNICATION),
}


def comparisons(runs: Sequence[RunFolder]) -> list[list[Facts]]:
    """Return the runs that have data, settings of the partition and seed in common, by these."""
    groups: dict[str, list[Facts]] = {}
    for run in runs:
        facts = Facts(run.path)
        groups.setdefault(facts.comparison, []).append(facts)
    return list(groups.values())


def differences(runs: Sequence[RunFolder]) -> list[str]:
    """Return in what the runs of each comparison differ, beside their method; [] = in nothing."""
    return _differences(comparisons(runs))


def _differences(groups: Iterable[Sequence[Facts]]) -> list[str]:
    found: dict[str, None] = {}
    for group in groups:
        for what, read in CHECKS.items():
            kinds: dict[str, list[Facts]] = {}
            for facts in group:
                kinds.setdefault(json.dumps(read(facts), sort_keys=True), []).append(facts)
            if len(kinds) > 1 or UNKNOWN & kinds.keys():
                found[_said(what, kinds)] = None
    return list(found)


def _said(what: str, kinds: Mapping[str, Sequence[Facts]]) -> str:
    """Name a difference by one run of each kind."""
    names = [members[0].path.name for members in kinds.values()]
    if unknown := UNKNOWN & kinds.keys():
        return f"{what} is not known of {kinds[min(unknown)][0].path.name}"
    if what in ("local work", "communication"):
        contents = [json.loads(text) for text in kinds]
        keys = [key for key in contents[0] if len({str(each[key]) for each in contents}) > 1]
        parts = [
            f"{name} has {', '.join(f'{key}={each[key]}' for key in keys)}"
            for name, each in zip(names, contents, strict=True)
        ]
        return f"{what} differs: {'; '.join(parts)}"
    return f"{what} differs between {' and '.join(names)}"


def statement(runs: Sequence[RunFolder]) -> str:
    """Return what all runs share, or in what they differ, and which have nothing to be held to."""
    groups = comparisons(runs)
    if found := _differences(groups):
        return "Not one comparison: " + "; ".join(found) + "."
    alone = [group[0].path.name for group in groups if len(group) == 1]
    if len(alone) == len(runs):
        return "Nothing to check: no two runs have data, partition settings and seed in common."
    said = (
        "Checked: the runs of a partition have its rows, the first model, preprocessing, local "
        "work and communication budget in common."
    )
    if not alone:
        return said
    names = ", ".join(alone[:FEW]) + (f" and {len(alone) - FEW} more" if len(alone) > FEW else "")
    return f"{said} With data, partition settings or a seed of its own: {names}."
