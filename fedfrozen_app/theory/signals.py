"""When to freeze, from what a server sees anyway: candidates for an automatic warm-up.

After round t the server holds every client's update of the kernel, delta_k. With the mean of the
last WINDOW rounds of

    agreement   K ||mean_k delta_k||^2 / mean_k ||delta_k||^2     K if all move alike, 1 if the
                                                                  updates are independent noise,
                                                                  0 if they cancel
    movement    ||mean_k delta_k|| / its largest so far           1 while the kernel still moves

a rule freezes after the first round that falls below its threshold, and at the latest after
``latest`` T rounds. Nothing is computed on clients and nothing more is sent.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

WINDOW = 3
Reads = Literal["agreement", "movement", "nothing"]


@dataclass(frozen=True)
class Signal:
    """A freeze rule.

    Attributes
    ----------
    reads : {"agreement", "movement", "nothing"}
        What it looks at; ``nothing`` freezes at ``latest`` T, a fixed warm-up.
    below : float
        The threshold.
    latest : float
        The longest warm-up, as a share of T.
    """

    reads: Reads
    below: float = 0.0
    latest: float = 1.0

    @property
    def name(self) -> str:
        """Return a short name, for tables."""
        if self.reads == "nothing":
            return "never" if self.latest == 1 else f"fixed {self.latest:.0%}"
        return f"{self.reads} < {self.below:g}, at most {self.latest:.0%}"

    def warmup(self, agreement: Tensor, movement: Tensor) -> Tensor:
        """Return T_warm of every run, [S], from the readings of rounds 1..T, [T, S].

        ``agreement`` is K times that of :class:`.algorithms.Run`.
        """
        rounds = len(agreement)
        latest = round(self.latest * rounds)
        if self.reads == "nothing":
            return torch.full(agreement.shape[1:], latest)
        if self.reads == "movement":
            smooth = _smooth(movement)
            reading = smooth / smooth.cummax(dim=0).values
        else:
            reading = _smooth(agreement)
        low = reading < self.below
        low[: WINDOW - 1] = False
        low[max(latest, 1) - 1 :] = True
        return low.to(torch.uint8).argmax(dim=0) + 1


def _smooth(readings: Tensor) -> Tensor:
    """Return the mean of each round and the WINDOW - 1 before it, fewer at the start."""
    total = readings.cumsum(dim=0)
    earlier = torch.cat([torch.zeros_like(total[:WINDOW]), total[:-WINDOW]])
    counts = torch.arange(1, len(readings) + 1).clamp(max=WINDOW)
    return (total - earlier) / counts[:, None]


def losses_at(losses: Tensor, warmup: Tensor) -> Tensor:
    """Return the final loss at each run's T_warm, [S], from those of all, [T + 1, S]."""
    return losses.gather(0, warmup[None])[0]
