"""The four figures of arXiv:2605.06446's simulation, as numbers and as pictures.

Each takes a base setting and returns a :class:`Figure`: a mean and a spread over seeds for every
series. Inside a figure every method takes the same step.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedfrozen_app.theory.algorithms import Federation, freeze_losses, simulate
from fedfrozen_app.theory.analysis import oracle_warmup
from fedfrozen_app.theory.claims import rises
from fedfrozen_app.theory.methods import MUS, RATIOS, RULES, STEPS, outcomes, spread, with_steps
from fedfrozen_app.theory.problem import Setting

DTYPE = torch.float32  # differs from float64 in the fifth digit, at two thirds of its time
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


@dataclass(frozen=True)
class Figure:
    """A figure's numbers.

    Attributes
    ----------
    name, title, x_label, y_label : str
        File name and what the axes show, with units.
    x : list of float
        The abscissa.
    series : dict of str to Tensor
        Values by series, [len(x), seeds].
    settings : dict
        Everything that decides the numbers, and what else was measured.
    log_x : bool
        Whether x is drawn logarithmically.
    lower_label, lower : str, dict of str to Tensor
        A second panel over the same x, if any.
    """

    name: str
    title: str
    x: list[float]
    x_label: str
    y_label: str
    series: dict[str, Tensor]
    settings: dict[str, Any] = field(default_factory=dict)
    log_x: bool = False
    lower_label: str = ""
    lower: dict[str, Tensor] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form: mean and standard deviation over seeds, null where one diverged."""
        lower = {"y_label": self.lower_label, "series": _summaries(self.lower)}
        return {
            "x": self.x,
            "x_label": self.x_label,
            "y_label": self.y_label,
            "series": _summaries(self.series),
            "settings": self.settings,
            **({"lower": lower} if self.lower else {}),
        }

    def write(self, folder: Path) -> None:
        """Write NAME.json and NAME.png."""
        folder.mkdir(parents=True, exist_ok=True)
        numbers = self.to_json()
        text = json.dumps(numbers, indent=1, allow_nan=False)
        (folder / f"{self.name}.json").write_text(text + "\n")
        draw(numbers, self.title, folder / f"{self.name}.png", log_x=self.log_x)


def _summaries(series: Mapping[str, Tensor]) -> dict[str, dict[str, list[float | None]]]:
    summaries = {}
    for name, values in series.items():
        std = values.std(dim=1) if values.shape[1] > 1 else torch.zeros(len(values))
        summaries[name] = {"mean": _finite(values.mean(dim=1)), "std": _finite(std)}
    return summaries


def _finite(values: Tensor) -> list[float | None]:
    return [float(f"{v:.8g}") if math.isfinite(v) else None for v in values.tolist()]


def draw(numbers: Mapping[str, Any], title: str, path: Path, *, log_x: bool = False) -> None:
    """Draw a figure's JSON: lines are means, bands one standard deviation over seeds."""
    from matplotlib.figure import Figure as Canvas

    panels = [numbers, numbers["lower"]] if "lower" in numbers else [numbers]
    canvas = Canvas(figsize=(6.4, 1.6 + 2.6 * len(panels)), layout="constrained")
    rows = canvas.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, panel in zip(rows, panels, strict=True):
        _draw_panel(axes, numbers["x"], panel)
    if log_x:
        axes.set_xscale("log")
        axes.set_xticks(numbers["x"], [f"{x:g}" for x in numbers["x"]])
        axes.minorticks_off()
    axes.set_xlabel(numbers["x_label"])
    rows[0].set_title(title, fontsize="medium")
    rows[0].legend(fontsize="small")
    canvas.savefig(path, dpi=120)


def _draw_panel(axes: Any, x: list[float], panel: Mapping[str, Any]) -> None:
    colours: dict[str, str] = {}  # a method has one colour, whatever its step
    for name, values in panel["series"].items():
        mean, std = (
            torch.tensor([math.nan if v is None else v for v in values[key]])
            for key in ("mean", "std")
        )
        marks = {"marker": "o", "markersize": 4} if len(mean) < 15 else {}
        style = "--" if name.endswith("tuned step") else "-"
        method = name.removesuffix(", tuned step")
        colour = colours.setdefault(method, COLOURS[len(colours) % len(COLOURS)])
        axes.plot(x, mean.numpy(), style, color=colour, label=name, **marks)
        low, high = (mean - std).numpy(), (mean + std).numpy()
        axes.fill_between(x, low, high, color=colour, alpha=0.1, linewidth=0)
    axes.set_ylabel(panel["y_label"])
    axes.grid(alpha=0.25)


def profile(base: Setting, seeds: Sequence[int], rhos: Sequence[float], *, jobs: int = 1) -> Figure:
    """Return h_lambda(Phi^t) during a warm-up that is never ended, for several rho."""
    cells = [replace(base, rho=rho) for rho in rhos]
    found = spread(partial(_profile, seeds=seeds), cells, jobs)
    series = {f"rho={rho:g}": values for rho, values in zip(rhos, found, strict=True)}
    return Figure(
        "profile",
        "Best loss that a kernel allows, during warm-up",
        list(range(base.rounds + 1)),
        "warm-up round t",
        "profile objective h(Phi^t)",
        series,
        _settings(base, seeds, rho=list(rhos))
        | {"seeds_where_h_rises_again": {name: rises(h) for name, h in series.items()}},
        lower_label="h above its least so far (%)",
        lower={name: above_least(h) for name, h in series.items()},
    )


def above_least(profile: Tensor) -> Tensor:
    """Return by how many percent h is above its least until then, of [T + 1, seeds]."""
    return 100 * (profile / profile.cummin(dim=0).values - 1)


def _profile(cell: Setting, seeds: Sequence[int]) -> Tensor:
    return simulate(Federation.build([cell], seeds, DTYPE)).profile


def local_steps(
    base: Setting, seeds: Sequence[int], rhos: Sequence[float], steps: Sequence[int], *, jobs: int
) -> Figure:
    """Return FedFrozen's final loss over FedAvg's against E, with its warm-up by held-out loss."""
    many = sorted(steps, reverse=True)  # the longest first, so that processes end together
    cells = [[replace(base, rho=rho, local_steps=e) for rho in rhos] for e in many]
    found = dict(zip(many, spread(partial(_ratio, seeds=seeds), cells, jobs), strict=True))
    series = {
        f"rho={rho:g}": torch.stack([found[e][i] for e in steps]) for i, rho in enumerate(rhos)
    }
    return Figure(
        "local-steps",
        "FedFrozen against FedAvg (below 1: FedFrozen is better)",
        [float(e) for e in steps],
        "local steps E per round",
        "final loss, FedFrozen / FedAvg",
        series,
        _settings(base, seeds, rho=list(rhos), local_steps=list(steps), ratios=list(RATIOS)),
        log_x=True,
    )


def _ratio(cells: Sequence[Setting], seeds: Sequence[int]) -> Tensor:
    """Return FedFrozen's final loss over FedAvg's, [cells, seeds]."""
    found = outcomes("FedAvg", cells, seeds, DTYPE)
    return found["FedFrozen"].chosen() / found["FedAvg"].chosen()


def warmup(
    base: Setting,
    seeds: Sequence[int],
    rhos: Sequence[float],
    ratios: Sequence[float],
    *,
    jobs: int,
) -> Figure:
    """Return the final loss against T_warm / T; 1 is FedAvg."""
    cells = [replace(base, rho=rho) for rho in rhos]
    found = spread(partial(_all_warmups, seeds=seeds), cells, jobs)
    at = [round(ratio * base.rounds) for ratio in ratios]
    best = {
        f"rho={rho:g}": float(oracle_warmup(losses.mean(1)[:, None])) / base.rounds
        for rho, losses in zip(rhos, found, strict=True)
    }
    series = {f"rho={rho:g}": losses[at] for rho, losses in zip(rhos, found, strict=True)}
    return Figure(
        "warmup",
        "When to freeze (1: never, which is FedAvg)",
        list(ratios),
        "warm-up share T_warm / T",
        "final loss f",
        series,
        _settings(base, seeds, rho=list(rhos)) | {"best_ratio_of_the_mean": best},
    )


def _all_warmups(cell: Setting, seeds: Sequence[int]) -> Tensor:
    fed = Federation.build([cell], seeds, DTYPE)
    return freeze_losses(fed, simulate(fed))


def heterogeneity(
    base: Setting, seeds: Sequence[int], rhos: Sequence[float], *, jobs: int = 1
) -> Figure:
    """Return every method's final loss against rho, with one step for all and with tuned steps."""
    slowest_first = ("FedProx", "SCAFFOLD", "FedAvg")
    items = [(method, replace(base, rho=rho)) for method in slowest_first for rho in rhos]
    found: dict[str, list[Tensor]] = {}
    for part in spread(partial(_method, seeds=seeds), items, jobs):
        for name, losses in part.items():
            found.setdefault(name, []).append(losses)
    names = [f"{name}{how}" for how in ("", ", tuned step") for name in (*RULES, "FedFrozen")]
    series = {name: torch.stack(found[name]) for name in names}
    return Figure(
        "heterogeneity",
        "Final loss against heterogeneity",
        list(rhos),
        "heterogeneity rho (std of client means)",
        "final loss f",
        series,
        _settings(base, seeds, rho=list(rhos), ratios=list(RATIOS), mus=list(MUS))
        | {"tuned_steps": [factor * base.lr for factor in STEPS]},
    )


def _method(item: tuple[str, Setting], seeds: Sequence[int]) -> dict[str, Tensor]:
    """Return a method's final losses in a cell, at the one step and at tuned steps, [seeds]."""
    method, cell = item
    result = {}
    for name, outcome in outcomes(method, with_steps([cell], STEPS), seeds, DTYPE).items():
        steps = len(STEPS)
        result[name] = outcome.at_step(STEPS.index(1.0), steps).chosen()[0]
        result[f"{name}, tuned step"] = outcome.joined(steps).chosen()[0]
    return result


def _settings(base: Setting, seeds: Sequence[int], **swept: Any) -> dict[str, Any]:
    return {**asdict(base), **swept, "seeds": list(seeds)}
