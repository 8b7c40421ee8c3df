"""Pictures of settings, one panel each, so that they can be read on a telephone, too."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedfrozen_app.report.curves import (
    Curve,
    class_shares,
    client_measures,
    curve,
    end_point,
    freeze_round,
    timing,
)
from fedfrozen_app.report.settings import Setting
from fedfrozen_app.runs.store import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (4.6, 3.4)  # inches of one panel
LEGEND_WIDTH = 1.4  # inches, where it lies beside
MOST_CLIENTS = 60  # bars that can be told apart; beyond, the partition is an image
FAR_APART = 10.0  # from this ratio on an axis of bytes is logarithmic
BYTES_LABEL = "payload of one client, both directions [MB]"


def quality_name(settings: Sequence[Setting]) -> str:
    """Return what is measured."""
    return "test perplexity" if settings[0].is_text else "test accuracy"


def new_figure(columns: int = 1) -> "tuple[Figure, Any]":
    """Return a figure and its axes [1][columns], without a window."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rc("text", parse_math=False)  # a label may hold a dollar sign

    size = SIZE if columns == 1 else (1.0 + 4.6 * columns, 4.0)
    return plt.subplots(1, columns, figsize=size, sharey=True, squeeze=False, layout="constrained")


def save(figure: "Figure", paths: Iterable[Path]) -> None:
    """Write a figure by the endings of the paths and close it."""
    import matplotlib.pyplot as plt

    for path in paths:
        figure.savefig(path, dpi=150)
    plt.close(figure)


# --- curves -----------------------------------------------------------------------------
def draw_bandwidth(
    settings: Sequence[Setting], paths: Iterable[Path], panels: str = ""
) -> dict[str, Any]:
    """Draw quality against the bytes of one client, a curve for every setting.

    Parameters
    ----------
    settings : sequence of Setting
        What to draw.
    paths : iterable of Path
        The picture's files, by their endings PNG or SVG.
    panels : str
        Label whose values get a panel each, side by side.

    Returns
    -------
    dict
        What was drawn: :func:`.curves.curve` by panel and curve.
    """
    drawn: dict[str, dict[str, Curve]] = {}
    for setting in settings:
        drawn.setdefault(setting.label(panels), {})[setting.name(panels)] = curve(setting)
    figure, axes = new_figure(len(drawn))
    for axis, (panel, curves) in zip(axes[0], drawn.items(), strict=True):
        _draw_by_bytes(axis, curves)
        axis.set_title(panel)
    axes[0][0].set_ylabel(quality_name(settings))
    _legend(axes[0][-1], loc="center left", bbox_to_anchor=(1.0, 0.5))
    width, height = figure.get_size_inches()
    entries = 1 + max(map(len, drawn.values()))  # of the legend, beside the last panel
    figure.set_size_inches(width + LEGEND_WIDTH, max(height, 0.22 * entries + 0.6))
    save(figure, paths)
    return drawn


def draw_curves(
    settings: Sequence[Setting], name: Callable[[Setting], str], measure: str, by: str
) -> "Figure":
    """Draw ``quality`` or ``loss`` of the test ``by`` ``round`` or ``bytes``.

    A dashed line in a curve's colour, or by bytes a diamond on it, says where it was frozen.
    """
    curves = {
        name(setting): curve(setting, (lambda line: line.test_loss))
        if measure == "loss"
        else curve(setting)
        for setting in settings
    }
    figure, axes = new_figure()
    axis = axes[0][0]
    colours = _draw_by_bytes(axis, curves) if by == "bytes" else _draw_by_round(axis, curves)
    for setting in settings:
        at, colour = freeze_round(setting), colours.get(name(setting))
        if at is None or colour is None:
            continue
        if by == "round":
            axis.axvline(at - 0.5, color=colour, linestyle="--", linewidth=1)
        else:
            _mark_freeze(axis, curves[name(setting)], at, colour)
    axis.set_ylabel("test loss" if measure == "loss" else quality_name(settings))
    _legend(axis, fontsize="small")
    return figure


def _mark_freeze(axis: "Axes", values: Curve, at: int, colour: Any) -> None:
    before = [i for i, index in enumerate(values["round"]) if index < at and values["bytes"][i] > 0]
    if before:
        point = values["bytes"][before[-1]] / 1e6, values["mean"][before[-1]]
        axis.plot(*point, marker="D", markersize=7, color=colour, markeredgecolor="black")


def _draw_by_round(axis: "Axes", curves: Mapping[str, Curve]) -> dict[str, Any]:
    from matplotlib.ticker import MaxNLocator

    colours = {}
    for name, values in curves.items():
        colours[name] = _line(axis, name, values["round"], values["mean"], values["std"])
    axis.set_xlabel("round")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)
    return colours


def _draw_by_bytes(axis: "Axes", curves: Mapping[str, Curve]) -> dict[str, Any]:
    colours = {}
    for name, values in curves.items():
        # a logarithmic axis has no place for the round before the first byte
        points = [index for index, spent in enumerate(values["bytes"]) if spent > 0]
        if not points:  # broke off before
            continue
        x, mean, std = ([values[key][i] for i in points] for key in ("bytes", "mean", "std"))
        colours[name] = _line(axis, name, [each / 1e6 for each in x], mean, std)
    starts = [values["mean"][0] for values in curves.values() if values["bytes"][:1] == [0.0]]
    if starts:
        axis.axhline(float(np.mean(starts)), color="0.5", linestyle=":", linewidth=1, label="start")
    _by_megabytes(axis, anything=bool(colours))
    return colours


def _by_megabytes(axis: "Axes", *, anything: bool) -> None:
    """Give the x axis plain numbers, and a logarithmic scale where they lie far apart."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    axis.set_xlabel(BYTES_LABEL)
    axis.grid(alpha=0.3)
    if not anything:
        return
    low, high = axis.dataLim.intervalx
    if high < FAR_APART * low:
        axis.xaxis.set_major_locator(MaxNLocator(nbins=5))
        return
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))


def _legend(axis: "Axes", **more: Any) -> None:
    """Say which colour is what, if there is any."""
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, **more)


def _line(
    axis: "Axes", name: str, x: Sequence[float], mean: Sequence[float], std: Sequence[float]
) -> Any:
    marker = "o" if len(x) <= 60 else ""
    (line,) = axis.plot(x, mean, marker=marker, markersize=3, label=name)
    low, high = np.subtract(mean, std), np.add(mean, std)
    axis.fill_between(x, low, high, alpha=0.15, color=line.get_color())
    return line.get_color()


# --- the rest ---------------------------------------------------------------------------
def draw_pareto(settings: Sequence[Setting], name: Callable[[Setting], str]) -> "Figure":
    """Draw each setting's last quality against a client's bytes, and who nobody beats in both.

    What diverged is not drawn.
    """
    figure, axes = new_figure()
    axis = axes[0][0]
    points: list[tuple[float, float]] = []
    for setting in settings:
        if (end := end_point(setting)) is None:
            continue
        spent, quality, std = end[0] / 1e6, *end[1:]
        points.append((spent, quality))
        axis.errorbar(spent, quality, yerr=std, marker="o", capsize=3, linestyle="",
                      label=name(setting))  # fmt: skip
    if front := pareto_front(points, smaller_is_better=settings[0].is_text):
        axis.step(*zip(*front, strict=True), where="post", color="0.5", linewidth=1, zorder=0)
    _by_megabytes(axis, anything=bool(points))
    axis.set_ylabel(quality_name(settings))
    _legend(axis, fontsize="small")
    return figure


def pareto_front(
    points: Sequence[tuple[float, float]], *, smaller_is_better: bool = False
) -> list[tuple[float, float]]:
    """Return the (bytes, quality) that no other beats in both, by bytes."""
    sign = -1 if smaller_is_better else 1
    front: list[tuple[float, float]] = []
    for spent, quality in sorted(points, key=lambda point: (point[0], -sign * point[1])):
        if not front or sign * quality > sign * front[-1][1]:
            front.append((spent, quality))
    return front


def draw_timing(settings: Sequence[Setting]) -> "Figure":
    """Draw the seconds of a run by phase, tests included."""
    figure, axes = new_figure()
    axis = axes[0][0]
    split = [timing(setting) for setting in settings]
    phases = list(dict.fromkeys(phase for each in split for phase in each))
    left = np.zeros(len(settings))
    for phase in phases:
        width = np.array([each.get(phase, 0.0) for each in split])
        axis.barh(range(len(settings)), width, left=left, label=phase)
        left += width
    axis.set_yticks(range(len(settings)), [setting.name() for setting in settings])
    axis.tick_params(axis="y", labelsize="x-small")
    axis.invert_yaxis()
    axis.set_xlabel("seconds of a run")
    _legend(axis, fontsize="small", loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4)
    figure.set_size_inches(SIZE[0], max(SIZE[1], 0.22 * len(settings) + 1.2))
    return figure


def draw_clients(settings: Sequence[Setting], name: Callable[[Setting], str]) -> "Figure | None":
    """Draw the accuracies of the clients' own tests, before and after local training."""
    shown = [one for one in settings if client_measures(one, "accuracy")]
    if not shown:
        return None
    figure, axes = new_figure()
    axis = axes[0][0]
    for offset, measure, said in (
        (-0.18, "accuracy", "the model"),
        (0.18, "accuracy_after", "after local training"),
    ):
        values = [client_measures(one, measure) for one in shown]
        places = [index + offset for index, each in enumerate(values) if each]
        if not places:
            continue
        colour = "C0" if measure == "accuracy" else "C1"
        boxes = axis.boxplot(
            [each for each in values if each],
            positions=places,
            widths=0.3,
            orientation="horizontal",
            whis=(0, 100),
            manage_ticks=False,
            patch_artist=True,
            medianprops={"color": "black"},
        )
        for box in boxes["boxes"]:
            box.set_facecolor(colour)
        axis.plot([], [], color=colour, linewidth=6, label=said)
    axis.set_yticks(range(len(shown)), [name(one) for one in shown])
    axis.invert_yaxis()
    axis.set_xlabel("accuracy on a client's own examples (whiskers: worst and best)")
    _legend(axis, fontsize="small")
    return figure


def draw_partition(run: RunFolder) -> "Figure | None":
    """Draw how many examples of which class the clients hold; None where it is not known."""
    found = class_shares(run)
    if found is None or not found["counts"]:
        return None
    counts = np.array(found["counts"], dtype=float)
    figure, axes = new_figure()
    axis = axes[0][0]
    if len(counts) <= MOST_CLIENTS and counts.shape[1] <= 20:
        left = np.zeros(len(counts))
        for index, name in enumerate(found["names"]):
            axis.barh(range(len(counts)), counts[:, index], left=left, label=name)
            left += counts[:, index]
        axis.set_xlim(0, 1.05 * max(1.0, left.max()))
        axis.set_xlabel("examples")
        _legend(axis, fontsize="x-small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    else:
        shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
        image = axis.imshow(shares, aspect="auto", cmap="viridis", interpolation="nearest")
        axis.set_xlabel("class")
        figure.colorbar(image, label="share of the client's examples")
    axis.set_ylabel("client")
    return figure
