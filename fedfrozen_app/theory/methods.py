"""The methods that the figures compare, with one rule for choosing what a method leaves open.

FedFrozen leaves its warm-up open, FedProx its mu. As arXiv:2605.06446 says of the warm-up, each
is chosen by held-out loss over a small set, run by run. With tuned steps the step joins what is
chosen, for every method alike.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import TypeVar

import torch
from torch import Tensor

from fedfrozen_app.theory.algorithms import (
    FEDAVG,
    SCAFFOLD,
    Federation,
    Rule,
    Run,
    freeze_values,
    held_out_losses,
    simulate,
)
from fedfrozen_app.theory.problem import Setting

RATIOS = (0.2, 0.4, 0.6, 0.8)  # candidates for T_warm / T; 1 would be FedAvg itself
MUS = (0.1, 1.0)  # candidates for FedProx
STEPS = (0.5, 1.0, 2.0)  # tuned steps, relative to the figure's one
RULES: dict[str, tuple[Rule, ...]] = {
    "FedAvg": (FEDAVG,),
    "FedProx": tuple(Rule(proximal_mu=mu) for mu in MUS),
    "SCAFFOLD": (SCAFFOLD,),
}
A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class Outcome:
    """Final losses of everything a method can choose from, [choices, cells, seeds] each."""

    loss: Tensor
    held_out: Tensor

    def chosen(self) -> Tensor:
        """Return the final loss of the choice with the least held-out loss, [cells, seeds].

        What diverged is never chosen unless everything did.
        """
        held_out = torch.where(self.held_out.isfinite(), self.held_out, torch.inf)
        return self.loss.gather(0, held_out.argmin(0, keepdim=True))[0]

    def at_step(self, index: int, factors: int) -> "Outcome":
        """Return the outcome at one of the steps: cells are [factors, rest]."""
        return Outcome(*(part[:, index] for part in self._by_step(factors)))

    def joined(self, factors: int) -> "Outcome":
        """Return the outcome with the step among the choices: cells are [factors, rest]."""
        return Outcome(*(part.flatten(0, 1) for part in self._by_step(factors)))

    def _by_step(self, factors: int) -> list[Tensor]:
        parts = (self.loss, self.held_out)
        return [part.reshape(len(part), factors, -1, part.shape[-1]) for part in parts]


def outcomes(
    method: str,
    cells: Sequence[Setting],
    seeds: Sequence[int],
    dtype: torch.dtype = torch.float64,
) -> dict[str, Outcome]:
    """Run a method in all cells; FedAvg's run also holds FedFrozen's."""
    fed = Federation.build(cells, seeds, dtype)
    runs = [simulate(fed, rule) for rule in RULES[method]]
    found = {method: ends(fed, runs, len(cells))}
    if method == "FedAvg":
        found["FedFrozen"] = frozen_outcome(fed, runs[0], len(cells))
    return found


def ends(fed: Federation, runs: Sequence[Run], cells: int) -> Outcome:
    """Return how runs of one method end, one choice each."""
    last = [fed.rounds]
    loss = torch.cat([run.loss[last] for run in runs])
    held_out = torch.cat([held_out_losses(fed, run, last, run.values) for run in runs])
    return Outcome(*(part.view(len(runs), cells, -1) for part in (loss, held_out)))


def frozen_outcome(fed: Federation, run: Run, cells: int) -> Outcome:
    """Return how FedFrozen ends for every candidate warm-up, from a run of FedAvg."""
    freeze = [round(ratio * fed.rounds) for ratio in RATIOS]
    values = freeze_values(fed, run)
    loss = run.quadratic.loss(values)[freeze]
    held_out = held_out_losses(fed, run, freeze, values)
    return Outcome(*(part.view(len(freeze), cells, -1) for part in (loss, held_out)))


def with_steps(cells: Sequence[Setting], factors: Sequence[float]) -> list[Setting]:
    """Return the cells at every multiple of their step, multiples running slowest."""
    return [replace(cell, lr=factor * cell.lr) for factor in factors for cell in cells]


def spread(function: Callable[[A], B], items: Sequence[A], jobs: int) -> list[B]:
    """Return ``function`` of every item, in ``jobs`` processes of one thread each."""
    if jobs == 1:
        return [function(item) for item in items]
    context = get_context("spawn")
    with ProcessPoolExecutor(
        min(jobs, len(items)), mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        return list(pool.map(function, items))
