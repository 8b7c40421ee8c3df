"""The four claims of arXiv:2605.06446's simulation, each with what counts as showing it.

(a) h_lambda(Phi^t) falls at rho = 0 without ever rising, and at the largest rho first falls by
    5 % and later rises by half a percent of its least value. This is about the mean over seeds,
    in which one that still falls can hide others that rise; ``a1`` asks for the rise in more
    than half of the seeds instead.
(b) FedFrozen's final loss over FedAvg's falls with E, at the largest rho: by 0.02 from the least
    to the largest E, to below 0.98, and from no E to the next does it rise by more than 0.01.
(c) At the largest rho the best warm-up beats both T_warm = 0 and T by 1 % in mean final loss, and
    it is 0.05 T away from the best one at the middle rho.
(d) From rho = 0 to the largest, FedFrozen's final loss grows least (or falls most) of all, and
    at the largest rho it is the least by 1 %.

FedFrozen's warm-up is chosen by held-out loss (:mod:`.methods`); FedProx has mu = 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedfrozen_app.theory.analysis import oracle_warmup

OTHERS = ("FedAvg", "FedProx", "SCAFFOLD")


@dataclass(frozen=True)
class Claims:
    """What one setting measures for each claim, and which it shows.

    Attributes
    ----------
    largest_rise : float
        (a) at rho = 0: the largest rise of h between two rounds over its first value.
    rise : float
        (a) at the largest rho: last h over least h, minus 1.
    rising : str
        (a) at the largest rho: in how many seeds h rises by half a percent, of how many.
    ratios : list of float
        (b) FedFrozen's final loss over FedAvg's by rising E.
    best : list of float
        (c) the best T_warm / T by rising rho.
    gain : float
        (c) at the largest rho: 1 - best final loss over the better end's.
    against : dict of str to float
        (d) at the largest rho: FedFrozen's final loss over each other method's.
    growth : dict of str to float
        (d) final loss at the largest rho over that at rho = 0, by method.
    shown : dict of str to bool
        By claim; ``d1`` is (d) against FedAvg alone.
    """

    largest_rise: float
    rise: float
    rising: str
    ratios: list[float]
    best: list[float]
    gain: float
    against: dict[str, float]
    growth: dict[str, float]
    shown: dict[str, bool]


def judge(
    profiles: Tensor, losses: Tensor, ratios: Sequence[float], final: Mapping[str, Tensor]
) -> Claims:
    """Judge a setting by means over seeds; rho runs from 0 to the largest.

    Parameters
    ----------
    profiles : Tensor
        h of every round, [T + 1, rhos, seeds].
    losses : Tensor
        Mean final loss of every freezing round, [T + 1, rhos].
    ratios : sequence of float
        Final loss of FedFrozen over FedAvg at the largest rho, by rising E.
    final : mapping of str to Tensor
        Final loss by method, [rhos].
    """
    rounds, profile = len(profiles) - 1, profiles.mean(2)
    rising, seeds = rises(profiles[:, -1]), profiles.shape[2]
    steady = float(profile[:, 0].diff().max() / profile[0, 0])
    far = profile[:, -1]
    least = far.min()
    rise = float(far[-1] / least - 1)
    best = [float(tau) / rounds for tau in oracle_warmup(losses)]
    far_losses = torch.where(losses[:, -1].isfinite(), losses[:, -1], torch.inf)
    ends = min(float(far_losses[0]), float(far_losses[-1]))
    gain = 1 - float(far_losses.min()) / ends
    growth = {name: float(values[-1] / values[0]) for name, values in final.items()}
    ours = final["FedFrozen"][-1]
    against = {name: float(ours / final[name][-1]) for name in OTHERS}

    def least_of(names: Sequence[str]) -> bool:
        # a diverged method is nan: FedFrozen is not said to beat what was not given a fair step
        return all(against[name] < 0.99 and growth["FedFrozen"] < growth[name] for name in names)

    steps = [later - earlier for earlier, later in zip(ratios, ratios[1:], strict=False)]
    falls = steady < 1e-4 and float(least) < 0.95 * float(far[0])
    shown = {
        "a": falls and rise > 0.005,
        "a1": falls and 2 * rising > seeds,
        "b": ratios[-1] < 0.98 and ratios[-1] < ratios[0] - 0.02 and max(steps) < 0.01,
        "c": gain > 0.01 and 0 < best[-1] < 1 and abs(best[-1] - best[len(best) // 2]) > 0.049,
        "d": least_of(OTHERS),
        "d1": least_of(OTHERS[:1]),
    }
    return Claims(
        steady, rise, f"{rising}/{seeds}", list(ratios), best, gain, against, growth, shown
    )


def table(rows: Mapping[str, Claims]) -> str:
    """Return the settings and what each shows, as a Markdown table with a row of counts."""
    head = (
        "| setting | (a) h rises by | in seeds | (b) ratio by E | (c) best T_warm/T by rho | "
        "gain | (d) against FedAvg | FedProx | SCAFFOLD | shows |"
    )
    lines = [head, "|---|---:|---:|---|---|---:|---:|---:|---:|---|"]
    for name, claims in rows.items():
        cells: list[Any] = [
            name,
            f"{claims.rise:.1%}",
            claims.rising,
            " ".join(f"{ratio:.2f}" for ratio in claims.ratios),
            " ".join(f"{share:.2f}" for share in claims.best),
            f"{claims.gain:.1%}",
            *(f"{claims.against[other]:.2f}" for other in OTHERS),
            " ".join(_letters(claims.shown)) or "-",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", counts(rows)]
    return "\n".join(lines)


def _letters(shown: Mapping[str, bool]) -> list[str]:
    weaker = {"a": "a1", "d": "d1"}
    return [
        letter if shown[letter] else f"({letter})"
        for letter in "abcd"
        if shown[letter] or shown.get(weaker.get(letter, ""))
    ]


def rises(profile: Tensor) -> int:
    """Return in how many seeds h ends half a percent above its least, from h [T + 1, seeds]."""
    return int((profile[-1] > 1.005 * profile.min(dim=0).values).sum())


def counts(rows: Mapping[str, Claims]) -> str:
    """Return in how many settings each claim shows."""
    total = {
        claim: sum(claims.shown[claim] for claims in rows.values())
        for claim in ("a", "a1", "b", "c", "d", "d1")
    }
    return (
        f"Of {len(rows)} settings, (a) shows in {total['a']}, and by seeds, written "
        f"(a), in {total['a1']}; (b) in {total['b']}, "
        f"(c) in {total['c']}, (d) in {total['d']}; against FedAvg alone, "
        f"written (d), in {total['d1']}."
    )
