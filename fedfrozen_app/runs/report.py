"""Tables and pictures of finished runs, from their run folders alone.

Runs that differ in nothing but the seed are one setting: its figures are mean and standard
deviation (n - 1) over them. Of a sweep, settings have the sweep's own labels; of other runs, the
config keys in which they differ.
"""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfrozen_app.config import ConfigError
from fedfrozen_app.runs.comparison import statement
from fedfrozen_app.runs.finished import is_finished, stored_config
from fedfrozen_app.runs.store import NOT_OF_THE_RESULT, RunFolder
from fedfrozen_app.runs.sweep import LABELS_FILE
from fedfrozen_app.runs.sweep_table import COLUMNS, SEED, read_result, result_row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Labels = tuple[tuple[str, str], ...]  # name and value, without the seed


@dataclass(frozen=True)
class Setting:
    """The finished runs that differ in nothing but the seed."""

    labels: Labels
    runs: tuple[RunFolder, ...]

    def name(self, without: str = "") -> str:
        """Return the labels as one text, all but one of them."""
        return " ".join(value for label, value in self.labels if label != without) or "run"


def read_settings(paths: Sequence[Path]) -> list[Setting]:
    """Return the settings of run folders, or of folders full of them, in the order found.

    Raises
    ------
    ConfigError
        If there is no finished run in one of the paths.
    """
    labelled: list[tuple[dict[str, str], RunFolder]] = []
    for path in paths:
        runs = [folder for folder in _folders(path) if is_finished(folder)]
        if not runs:
            raise ConfigError(f"{str(path)!r} holds no finished run; give a run or sweep folder")
        labelled += zip(_labels(path, runs), runs, strict=True)
    settings: dict[Labels, list[RunFolder]] = {}
    for labels, folder in labelled:
        key = tuple((label, text) for label, text in labels.items() if label != SEED)
        settings.setdefault(key, []).append(folder)
    return [Setting(labels, tuple(runs)) for labels, runs in settings.items()]


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


# --- tables -----------------------------------------------------------------------------
def markdown(settings: Sequence[Setting]) -> str:
    """Return one row for every setting; the columns are those of ``fedfrozen sweep``."""
    names = list(dict.fromkeys(label for setting in settings for label, _ in setting.labels))
    head = [*(names or ["run"]), *COLUMNS]
    lines = [_row(head), _row(["---"] * len(names or ["run"]) + ["---:"] * len(COLUMNS))]
    for setting in settings:
        labels = dict(setting.labels)
        texts = [labels.get(name, "") for name in names] or ["run"]
        lines.append(_row([*texts, *result_row([read_result(run) for run in setting.runs])]))
    return "\n".join(lines) + "\n"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


# --- curves -----------------------------------------------------------------------------
def curve(setting: Setting) -> dict[str, list[float]]:
    """Return what a setting's tested rounds came to, over its runs.

    Keys: ``round``; ``bytes``, the payload that one client sent and received so far; ``mean`` and
    ``std`` of accuracy, of text of perplexity. Rounds that one of the runs lacks are left out.
    """
    runs = [_tested(folder) for folder in setting.runs]
    rounds = sorted(set.intersection(*(set(run) for run in runs)))
    values = [[run[index][1] for run in runs] for index in rounds]
    return {
        "round": [float(index) for index in rounds],
        "bytes": [statistics.mean(run[index][0] for run in runs) for index in rounds],
        "mean": [statistics.mean(each) for each in values],
        "std": [statistics.stdev(each) if len(each) > 1 else 0.0 for each in values],
    }


def _tested(folder: RunFolder) -> dict[int, tuple[float, float]]:
    """Return, by tested round, a client's bytes up to then and the quality."""
    spent, found = 0.0, {}
    for line in folder.metrics():
        asked = line.clients + line.dropped
        spent += (line.bytes_up + line.bytes_down) / max(1, asked)
        if (value := line.quality) is not None:
            found[line.round] = (spent, value)
    return found


def draw_bandwidth(settings: Sequence[Setting], path: Path, panels: str = "") -> dict[str, Any]:
    """Draw quality against the bytes of one client, a curve for every setting.

    Parameters
    ----------
    settings : sequence of Setting
        What to draw.
    path : Path
        The picture, by its ending PNG or SVG.
    panels : str
        Label whose values get a picture each, side by side.

    Returns
    -------
    dict
        What was drawn: :func:`curve` by panel and curve.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn: dict[str, dict[str, dict[str, list[float]]]] = {}
    for setting in settings:
        panel = dict(setting.labels).get(panels, "")
        drawn.setdefault(panel, {})[setting.name(panels)] = curve(setting)
    size = (1.0 + 4.6 * len(drawn), 4.0)
    figure, axes = plt.subplots(
        1, len(drawn), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    for axis, (panel, curves) in zip(axes[0], drawn.items(), strict=True):
        _draw(axis, curves)
        axis.set_title(panel)
    axes[0][0].set_ylabel("test perplexity" if _is_text(settings) else "test accuracy")
    axes[0][-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return drawn


def _draw(axis: "Axes", curves: Mapping[str, Mapping[str, list[float]]]) -> None:
    for name, values in curves.items():
        # a logarithmic axis has no place for the round before the first byte
        points = [index for index, spent in enumerate(values["bytes"]) if spent > 0]
        x, mean, std = ([values[key][i] for i in points] for key in ("bytes", "mean", "std"))
        (line,) = axis.plot([each / 1e6 for each in x], mean, marker="o", markersize=3, label=name)
        low = [m - s for m, s in zip(mean, std, strict=True)]
        high = [m + s for m, s in zip(mean, std, strict=True)]
        axis.fill_between([each / 1e6 for each in x], low, high, alpha=0.15, color=line.get_color())
    starts = [values["mean"][0] for values in curves.values() if values["bytes"][:1] == [0.0]]
    if starts:
        axis.axhline(
            statistics.mean(starts), color="0.5", linestyle=":", linewidth=1, label="start"
        )
    axis.set_xscale("log")
    axis.set_xlabel("payload of one client, both directions [MB]")
    axis.grid(alpha=0.3)


def _is_text(settings: Sequence[Setting]) -> bool:
    lines = settings[0].runs[0].metrics()
    return any(line.test_perplexity is not None for line in lines)


def write_report(paths: Sequence[Path], out: Path, panels: str = "") -> list[Path]:
    """Write ``table.md``, ``bandwidth.png``, ``bandwidth.svg`` and ``bandwidth.json`` to a folder.

    Raises
    ------
    ConfigError
        If there is no finished run, or no setting has the label ``panels``.
    """
    settings = read_settings(paths)
    labels = {label for setting in settings for label, _ in setting.labels}
    if panels and panels not in labels:
        raise ConfigError(
            f"panels must be a label of the runs, got {panels!r}; they have {sorted(labels)}"
        )
    out.mkdir(parents=True, exist_ok=True)
    runs = [run for setting in settings for run in setting.runs]
    (out / "table.md").write_text(f"{markdown(settings)}\n{statement(runs)}\n")
    for ending in ("png", "svg"):
        drawn = draw_bandwidth(settings, out / f"bandwidth.{ending}", panels)
    (out / "bandwidth.json").write_text(json.dumps(drawn, indent=1) + "\n")
    names = ("table.md", "bandwidth.png", "bandwidth.svg", "bandwidth.json")
    return [out / name for name in names]
