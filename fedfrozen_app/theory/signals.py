"""When to freeze, from what a server sees anyway: candidates for an automatic warm-up.

After round t the server holds every client's update of the kernel, delta_k, and, if clients
report the training loss of the model they were sent, the loss of the averaged model. It reads

    agreement   K ||mean_k delta_k||^2 / mean_k ||delta_k||^2     K if all move alike, 1 if the
                                                                  updates are independent noise,
                                                                  0 if they cancel
    movement    ||mean_k delta_k|| / its largest so far           1 while the kernel still moves
    loss        f(Phi^t, theta^t) over its least so far

Agreement and movement, as means of the last WINDOW rounds, freeze when they fall below a
threshold; the loss freezes when it has stayed above 1 + threshold for WINDOW rounds. All freeze
after ``latest`` T rounds at the latest. Nothing but that loss is sent in addition.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

WINDOW = 3
Reads = Literal["agreement", "movement", "loss", "nothing"]


@dataclass(frozen=True)
class Readings:
    """What a server saw in rounds 1..T, [T, S] each, and the loss also before them, [T + 1, S]."""

    agreement: Tensor
    movement: Tensor
    loss: Tensor


@dataclass(frozen=True)
class Signal:
    """A freeze rule.

    Attributes
    ----------
    reads : {"agreement", "movement", "loss", "nothing"}
        What it looks at; ``nothing`` freezes at ``latest`` T, a fixed warm-up.
    threshold : float
        Below which agreement or movement freezes, or by how much the loss is too high.
    latest : float
        The longest warm-up, as a share of T.
    """

    reads: Reads
    threshold: float = 0.0
    latest: float = 1.0

    @property
    def name(self) -> str:
        """Return a short name, for tables."""
        if self.reads == "nothing":
            return "never" if self.latest == 1 else f"fixed {self.latest:.0%}"
        if self.reads == "loss":
            return f"loss {self.threshold:.0%} above its least"
        return f"{self.reads} < {self.threshold:g}"

    def warmup(self, seen: Readings) -> Tensor:
        """Return T_warm of every run, [S]."""
        latest = max(1, round(self.latest * len(seen.agreement)))
        ready = self._ready(seen)
        ready[latest - 1 :] = True
        return ready.to(torch.uint8).argmax(dim=0) + 1

    def _ready(self, seen: Readings) -> Tensor:
        """Return after which rounds it would freeze, [T, S]."""
        if self.reads == "loss":
            high = seen.loss > (1 + self.threshold) * seen.loss.cummin(dim=0).values
            ready = _mean_of_last(high[1:].to(seen.loss.dtype)) == 1
        elif self.reads == "movement":
            smooth = _mean_of_last(seen.movement)
            ready = smooth < self.threshold * smooth.cummax(dim=0).values
        elif self.reads == "agreement":
            ready = _mean_of_last(seen.agreement) < self.threshold
        else:
            ready = torch.zeros_like(seen.agreement, dtype=torch.bool)
        ready[: WINDOW - 1] = False
        return ready


def _mean_of_last(readings: Tensor) -> Tensor:
    """Return the mean of each round and the WINDOW - 1 before it, of fewer at the start."""
    padded = torch.cat([readings.new_zeros(WINDOW - 1, readings.shape[1]), readings])
    counts = torch.arange(1, len(readings) + 1).clamp(max=WINDOW)
    return padded.unfold(0, WINDOW, 1).sum(-1) / counts[:, None]


def losses_at(losses: Tensor, warmup: Tensor) -> Tensor:
    """Return the final loss at each run's T_warm, [S], from those of all, [T + 1, S]."""
    return losses.gather(0, warmup[None])[0]
