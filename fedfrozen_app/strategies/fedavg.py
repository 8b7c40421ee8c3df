"""FedAvg (McMahan et al. 2017, arXiv:1602.05629, Algorithm 1).

x <- sum_i p_i y_i with p_i = n_i / sum_j n_j over the clients that replied.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from fedfrozen_app.strategies.base import ServerRule, State, Update
from fedfrozen_app.strategies.mean import Mean, Tensors


@dataclass(frozen=True)
class FedAvgConfig:
    """FedAvg has no parameters of its own."""


def weighted_mean(updates: Iterable[Update]) -> Tensors:
    """Return sum_i p_i y_i."""
    mean = Mean()
    for update in updates:
        mean.add(update.arrays, update.num_examples)
    return mean.value


def aggregate(state: State, updates: Iterator[Update], config: FedAvgConfig) -> State:
    """Return the state with x the mean of the clients' models, weighted by their examples."""
    return replace(state, x=weighted_mean(updates))


class FedAvg(ServerRule[FedAvgConfig, State]):
    """FedAvg that streams: memory for one reply and one mean, whatever the cohort."""

    config_type, state_type = FedAvgConfig, State

    def aggregate(self, state: State, updates: Iterator[Update]) -> State:
        """Return the next state."""
        return aggregate(state, updates, self.config)
