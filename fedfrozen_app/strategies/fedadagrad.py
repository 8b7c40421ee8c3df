"""FedAdagrad (Reddi et al. 2020, arXiv:2003.00295, Algorithm 2).

FedAdam, but for v <- v + Delta^2          v = 0 at the start
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fedfrozen_app.strategies.base import ServerRule, Update
from fedfrozen_app.strategies.fedadam import AdaptiveConfig, AdaptiveState, adaptive


@dataclass(frozen=True)
class FedAdagradConfig(AdaptiveConfig):
    """No parameters beyond the shared ones; the paper's experiments take b1 = 0."""


def aggregate(
    state: AdaptiveState, updates: Iterator[Update], config: FedAdagradConfig
) -> AdaptiveState:
    """Return the state after one step of Adagrad on the server."""

    def second_moment(v: torch.Tensor | float, squared: torch.Tensor) -> torch.Tensor:
        return v + squared

    return adaptive(state, updates, config, second_moment)


class FedAdagrad(ServerRule[FedAdagradConfig, AdaptiveState]):
    """Adagrad on the server."""

    config_type, state_type = FedAdagradConfig, AdaptiveState

    def aggregate(self, state: AdaptiveState, updates: Iterator[Update]) -> AdaptiveState:
        """Return the next state."""
        return aggregate(state, updates, self.config)
