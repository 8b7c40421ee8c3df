"""Which finished runs belong together.

Runs that differ in nothing but the seed are one setting: its figures are mean and standard
deviation (n - 1) over them. Of a sweep, settings have the sweep's own labels; of other runs, the
config keys in which they differ.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedfrozen_app.config import ConfigError
from fedfrozen_app.runs.finished import has_result, stored_config
from fedfrozen_app.runs.provenance import NOT_OF_THE_RESULT
from fedfrozen_app.runs.store import RoundMetrics, RunFolder
from fedfrozen_app.runs.sweep import LABELS_FILE
from fedfrozen_app.runs.sweep_table import SEED, Result, read_result

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
        """Return the labels as one text, all but some of them."""
        return " ".join(value for label, value in self.labels if label not in without) or "run"

    @cached_property
    def metrics(self) -> list[list[RoundMetrics]]:
        """What the rounds of each run came to."""
        return [run.metrics() for run in self.runs]

    @cached_property
    def results(self) -> list[Result]:
        """What each run came to."""
        return [read_result(run) for run in self.runs]

    @cached_property
    def client_tests(self) -> list[dict[str, float]]:
        """The clients' own tests in the last round, of all runs."""
        found: list[dict[str, float]] = []
        for run, lines in zip(self.runs, self.metrics, strict=True):
            found += [test for test in run.client_tests() if test["round"] == lines[-1].round]
        return found

    @property
    def is_text(self) -> bool:
        """Whether perplexity is measured, and less is better."""
        return self.results[0].is_text


def read_settings(paths: Sequence[Path]) -> list[Setting]:
    """Return the settings of run folders, or of folders full of them, in the order found.

    Raises
    ------
    ConfigError
        If there is no finished run in one of the paths.
    """
    labelled: list[tuple[dict[str, str], RunFolder]] = []
    for path in paths:
        runs = [folder for folder in _folders(path) if has_result(folder)]
        if not runs:
            raise ConfigError(f"{str(path)!r} holds no finished run; give a run or sweep folder")
        labelled += zip(_labels(path, runs), runs, strict=True)
    settings: dict[Labels, list[RunFolder]] = {}
    for labels, folder in labelled:
        key = tuple((label, text) for label, text in labels.items() if label != SEED)
        settings.setdefault(key, []).append(folder)
    return [Setting(labels, tuple(runs)) for labels, runs in settings.items()]


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


def _folders(path: Path) -> list[RunFolder]:
    if (path / "config.json").exists():
        return [RunFolder(path)]
    return [RunFolder(found.parent) for found in sorted(path.glob("*/config.json"))]


def _labels(path: Path, runs: Sequence[RunFolder]) -> list[dict[str, str]]:
    """Return every run's labels: those its sweep gave, else the keys that differ."""
    said = path / LABELS_FILE
    known: dict[str, dict[str, str]] = json.loads(said.read_text()) if said.exists() else {}
    if all(folder.path.name in known for folder in runs):
        return [known[folder.path.name] for folder in runs]
    configs = [config.to_mapping() if (config := stored_config(run)) else {} for run in runs]
    keys = {key for config in configs for key in config if key not in NOT_OF_THE_RESULT}
    differ = sorted(key for key in keys if len({str(config.get(key)) for config in configs}) > 1)
    return [{key: str(config.get(key)) for key in differ} for config in configs]
