"""The map: which of the four claims show in which settings, and how freeze signals do there."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedfrozen_app.theory.algorithms import SCAFFOLD, Federation, Rule, freeze_losses, simulate
from fedfrozen_app.theory.analysis import oracle_warmup
from fedfrozen_app.theory.claims import Claims, judge, table
from fedfrozen_app.theory.methods import ends, frozen_outcome, spread
from fedfrozen_app.theory.problem import Setting
from fedfrozen_app.theory.signals import Readings, Reads, Signal, losses_at

RULES = {"FedProx": Rule(proximal_mu=1.0), "SCAFFOLD": SCAFFOLD}
SHARES_OF_E = (10, 3, 1)  # E of the setting divided by these
LATEST = 0.9
READINGS: dict[Reads, tuple[float, ...]] = {
    "agreement": (0.1, 0.3, 1.0, 2.0),
    "movement": (0.03, 0.1, 0.3),
    "loss": (0.0, 0.01, 0.05, 0.1),
}
SIGNALS = tuple(
    Signal(reads, threshold, LATEST)
    for reads, thresholds in READINGS.items()
    for threshold in thresholds
)
FIXED = tuple(Signal("nothing", latest=share) for share in (0.2, 0.4, 0.6, 0.8, 0.9, 1.0))
DIVERGED = 100.0  # times the oracle's loss


@dataclass(frozen=True)
class Region:
    """What the runs of one setting give.

    Attributes
    ----------
    claims : Claims
        Measured and judged.
    signals : dict of str to Tensor
        Final loss over the oracle's by signal, of every run: E x rho x seed, [runs].
    groups : list of str
        What E and rho each run has.
    """

    claims: Claims
    signals: dict[str, Tensor]
    groups: list[str]


def explore(base: Setting, seeds: Sequence[int], rhos: Sequence[float]) -> Region:
    """Measure a setting at every rho; (b) and the signals also at smaller E."""
    ratios, parts, groups = [], [], []
    for share in SHARES_OF_E:
        steps = max(1, base.local_steps // share)
        cells = [replace(base, rho=rho, local_steps=steps) for rho in rhos]
        fed = Federation.build(cells, seeds, torch.float32)
        run = simulate(fed)
        losses, cut = freeze_losses(fed, run), (-1, len(cells), len(seeds))
        frozen = frozen_outcome(fed, run, len(cells)).chosen().mean(1)
        plain = losses[-1].view(cut).mean(2)[0]
        ratios.append(float(frozen[-1] / plain[-1]))
        seen = Readings(base.clients * run.agreement, run.movement, run.loss)
        parts.append(_over_oracle(losses, seen))
        groups += [f"E={steps} rho={rho:g}" for rho in rhos for _ in seeds]
    final = {"FedAvg": plain, "FedFrozen": frozen}
    for method, rule in RULES.items():
        final[method] = ends(fed, [simulate(fed, rule)], len(cells)).chosen().mean(1)
    claims = judge(run.profile.view(cut), losses.view(cut).mean(2), ratios, final)
    signals = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return Region(claims, signals, groups)


def _over_oracle(losses: Tensor, seen: Readings) -> dict[str, Tensor]:
    """Return by signal the final loss over that of the run's best warm-up, [runs]."""
    best = losses_at(losses, oracle_warmup(losses))
    return {
        signal.name: losses_at(losses, signal.warmup(seen)) / best for signal in (*SIGNALS, *FIXED)
    }


def signal_table(regions: Mapping[str, Region]) -> tuple[str, dict[str, Any]]:
    """Return how fixed warm-ups and signals do over all runs, as Markdown and as numbers.

    The last column is of every other setting, for what was best on the rest: a threshold is not
    judged where it was chosen.
    """
    halves = [_joined(list(regions.values())[i::2]) for i in (0, 1)]
    everything = _joined(list(regions.values()))
    fixed, signals = ([signal.name for signal in group] for group in (FIXED, SIGNALS))
    picked = [min(names, key=lambda name: _mean(halves[0][name])) for names in (fixed, signals)]
    lines = [
        "| freeze | mean | worst tenth | diverged | picked on one half, on the other |",
        "|---|---:|---:|---:|---:|",
    ]
    numbers: dict[str, Any] = {}
    for name in [*fixed, *signals]:
        values = everything[name].sort().values
        row = numbers[name] = {
            "mean": _mean(values),
            "tenth": float(values[int(0.9 * len(values))]),
            "diverged": int((values == DIVERGED).sum()),
        }
        other = f"{_mean(halves[1][name]):.3f}" if name in picked else ""
        lines.append(
            f"| {name} | {row['mean']:.3f} | {row['tenth']:.3f} | {row['diverged']} | {other} |"
        )
    lines += [
        "",
        f"Final loss over that of the run's own best warm-up, in {len(everything['never'])} runs; "
        f"signals freeze at {LATEST:.0%} of T at the latest. Means leave out what diverged.",
    ]
    return "\n".join(lines), numbers


def _joined(regions: Sequence[Region]) -> dict[str, Tensor]:
    """Return the runs of several settings, with DIVERGED for every ratio beyond it."""
    names = regions[0].signals
    joined = {name: torch.cat([region.signals[name] for region in regions]) for name in names}
    return {name: v.nan_to_num(DIVERGED).clamp(max=DIVERGED) for name, v in joined.items()}


def _mean(values: Tensor) -> float:
    return float(values[values < DIVERGED].mean())


def make_map(
    settings: Mapping[str, Setting],
    seeds: Sequence[int],
    rhos: Sequence[float],
    folder: Path,
    *,
    jobs: int = 1,
) -> str:
    """Measure all settings, write map.md and map.json, and return the Markdown."""
    found = spread(partial(explore, seeds=seeds, rhos=rhos), list(settings.values()), jobs)
    regions = dict(zip(settings, found, strict=True))
    claims = {name: region.claims for name, region in regions.items()}
    signals, numbers = signal_table(regions)
    text = table(claims) + "\n\n" + signals + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "map.md").write_text(text)
    written = {
        "settings": {name: asdict(setting) for name, setting in settings.items()},
        "seeds": list(seeds),
        "rhos": list(rhos),
        "claims": {name: asdict(claim) for name, claim in claims.items()},
        "signals": numbers,
    }
    (folder / "map.json").write_text(json.dumps(_plain(written), indent=1, allow_nan=False) + "\n")
    return text


def _plain(value: Any) -> Any:
    """Return the value with null for numbers that JSON lacks."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None
