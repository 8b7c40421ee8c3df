"""FedAvg (McMahan et al. 2017, arXiv:1602.05629, Algorithm 1).

x <- sum_i p_i y_i with p_i = n_i / sum_j n_j over the clients that replied.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from fedfrozen_app.strategies.base import ServerRule, State, Update
from fedfrozen_app.strategies.mean import Mean, Tensors


@dataclass(frozen=True)
class FedAvgConfig:
    """weighting : {"examples", "uniform"}, what p_i is: n_i's share, or the same for all."""

    weighting: Literal["examples", "uniform"] = "examples"

    def __post_init__(self) -> None:
        if self.weighting not in ("examples", "uniform"):
            raise ValueError(f"weighting must be examples or uniform, got {self.weighting!r}")


def weighted_mean(updates: Iterable[Update], *, uniform: bool = False) -> Tensors:
    """Return sum_i p_i y_i, with p_i by examples or the same for all."""
    mean = Mean()
    for update in updates:
        mean.add(update.arrays, 1.0 if uniform else update.num_examples)
        del update  # let go of it before the next client trains
    return mean.value


def aggregate(state: State, updates: Iterator[Update], config: FedAvgConfig) -> State:
    """Return the state with x the mean of the clients' models."""
    return replace(state, x=weighted_mean(updates, uniform=config.weighting == "uniform"))


class FedAvg(ServerRule[FedAvgConfig, State]):
    """FedAvg that streams: memory for one reply and one mean, whatever the cohort."""

    config_type, state_type = FedAvgConfig, State

    def aggregate(self, state: State, updates: Iterator[Update]) -> State:
        """Return the next state."""
        return aggregate(state, updates, self.config)
