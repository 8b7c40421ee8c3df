"""Which finished runs belong together.

Runs that differ in nothing but the seed are one setting: its figures are mean and standard
deviation (n - 1) over them. Of a sweep, settings have the sweep's own labels; of other runs, and
of runs of several sweeps with the same labels, the config keys in which they differ.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.runs.finished import has_result
from fedfrozen_app.runs.provenance import NOT_OF_THE_RESULT
from fedfrozen_app.runs.store import CLIENTS, METRICS, RoundMetrics, RunFolder
from fedfrozen_app.runs.sweep import LABELS_FILE
from fedfrozen_app.runs.sweep_table import SEED, Result, read_result

T = TypeVar("T")
Labels = tuple[tuple[str, str], ...]  # name and value, without the seed
COMPARED = ("method", "strategy")  # labels that say what is compared, the first one there


@dataclass(frozen=True)
class Setting:
    """The finished runs that differ in nothing but the seed."""

    labels: Labels
    runs: tuple[RunFolder, ...]

    def label(self, name: str) -> str:
        """Return the value of a label, "" where there is none."""
        return dict(self.labels).get(name, "")

    def name(self, *without: str) -> str:
        """Return the labels as one text, all but some of them; numbers with what they are of."""
        parts = [
            f"{label}={value}" if is_number(value) else value
            for label, value in self.labels
            if label not in without
        ]
        return " ".join(parts) or "run"

    @cached_property
    def metrics(self) -> list[list[RoundMetrics]]:
        """What the rounds of each run came to."""
        return [_read(run, METRICS, run.metrics) for run in self.runs]

    @cached_property
    def results(self) -> list[Result]:
        """What each run came to."""
        return [read_result(run) for run in self.runs]

    @cached_property
    def client_tests(self) -> list[dict[str, float]]:
        """The clients' own tests in the last round, of all runs."""
        found: list[dict[str, float]] = []
        for run, lines in zip(self.runs, self.metrics, strict=True):
            tests = _read(run, CLIENTS, run.client_tests)
            found += [test for test in tests if test["round"] == lines[-1].round]
        return found

    @property
    def is_text(self) -> bool:
        """Whether perplexity is measured, and less is better."""
        return any(result.is_text for result in self.results)

    @property
    def has_diverged(self) -> bool:
        """Whether one of the runs did."""
        return any(result.diverged for result in self.results)

    def quality(self, line: RoundMetrics) -> float | None:
        """Return what a round's test says: perplexity of text, accuracy of anything else."""
        return line.test_perplexity if self.is_text else line.test_accuracy


def read_settings(paths: Sequence[Path]) -> list[Setting]:
    """Return the settings of run folders, or of folders full of them, in the order found.

    Raises
    ------
    ConfigError
        If there is no finished run in one of the paths, or a file of a run cannot be read.
    """
    groups: dict[Labels, dict[Path, RunFolder]] = {}
    for path in paths:
        found = 0
        for folder, labels in _labelled(path):
            if labels is not None and has_result(folder):
                key = tuple(pair for pair in labels.items() if pair[0] != SEED)
                groups.setdefault(key, {})[folder.path.resolve()] = folder
                found += 1
        if not found:
            raise ConfigError(f"{str(path)!r} holds no finished run; give a run or sweep folder")
    settings = [
        Setting(tuple(labels), tuple(runs))
        for key, group in groups.items()
        for labels, runs in _by_config(key, list(group.values())).items()
    ]
    for setting in settings:  # read and kept now, so that a bad file is known before any is written
        _ = setting.metrics, setting.client_tests
    return settings


def left_out(paths: Sequence[Path]) -> list[str]:
    """Return the run folders in the paths that are no part of a report, each with the reason."""
    found = {}
    for path in paths:
        for folder, labels in _labelled(path):
            if labels is None:
                found[folder.path.name] = "not of the sweep as it is now"
            elif not has_result(folder):
                reason = (folder.failure() or "not finished").splitlines()[0]
                found[folder.path.name] = reason
    return [f"{name} ({reason})" for name, reason in found.items()]


def is_number(text: str) -> bool:
    """Whether a label's value is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def label_names(settings: Sequence[Setting]) -> list[str]:
    """Return the names of all labels, in the order in which they come."""
    return list(dict.fromkeys(label for setting in settings for label, _ in setting.labels))


def compared_label(settings: Sequence[Setting]) -> str:
    """Return the label that says what is compared: ``method``, ``strategy`` or the first one."""
    names = label_names(settings)
    return next((name for name in COMPARED if name in names), names[0] if names else "")


def panels_of(settings: Sequence[Setting], compared: str) -> dict[str, list[Setting]]:
    """Return the settings that are compared with each other, by what they have in common."""
    panels: dict[str, list[Setting]] = {}
    for setting in settings:
        common = [f"{name}={value}" for name, value in setting.labels if name != compared]
        panels.setdefault(", ".join(common), []).append(setting)
    return panels


def _read(run: RunFolder, name: str, read: Callable[[], T]) -> T:
    """Return what a file of a run holds; raise ConfigError if it was cut off or changed by hand."""
    try:
        return read()
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{str(run.path / name)!r} cannot be read ({type(error).__name__}: {error}); "
            "restore it, or leave that run out"
        ) from None


def _config(run: RunFolder) -> dict[str, Any]:
    """Return a run's config keys."""
    return _read(run, "config.json", lambda: dict(run.config()["config"]))


def _labelled(path: Path) -> list[tuple[RunFolder, dict[str, str] | None]]:
    """Return run folders, in their sweep's order, with the labels that it gave: {} without a sweep.

    None for what lies in a sweep's folder and is none of its runs.
    """
    if (path / "config.json").exists():
        return [(RunFolder(path), {})]
    said = path / LABELS_FILE
    known: dict[str, dict[str, str]] = json.loads(said.read_text()) if said.exists() else {}
    names = sorted(found.parent.name for found in path.glob("*/config.json"))
    place = {name: index for index, name in enumerate(known)}
    names.sort(key=lambda name: place.get(name, len(place)))
    return [(RunFolder(path / name), known.get(name) if known else {}) for name in names]


def _by_config(key: Labels, runs: Sequence[RunFolder]) -> dict[Labels, list[RunFolder]]:
    """Divide runs of the same labels by the config keys in which they differ, beside the seed."""
    defaults = RunConfig().to_mapping()
    configs = [{**defaults, **_config(run)} for run in runs]
    keys = {name for config in configs for name in config} - {SEED, *NOT_OF_THE_RESULT}
    differ = sorted(name for name in keys if len({str(each.get(name)) for each in configs}) > 1)
    found: dict[Labels, list[RunFolder]] = {}
    for run, config in zip(runs, configs, strict=True):
        own = tuple((name, str(config.get(name, ""))) for name in differ)
        found.setdefault((*key, *own), []).append(run)
    return found
