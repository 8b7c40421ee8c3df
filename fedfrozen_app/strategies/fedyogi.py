"""FedYogi (Reddi et al. 2020, arXiv:2003.00295, Algorithm 2).

FedAdam, but for v <- v - (1 - b2) Delta^2 sign(v - Delta^2)          v = 0 at the start
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fedfrozen_app.strategies.base import ServerRule, Update
from fedfrozen_app.strategies.fedadam import AdaptiveConfig, AdaptiveState, adaptive


@dataclass(frozen=True)
class FedYogiConfig(AdaptiveConfig):
    """beta2 : float, b2 in [0, 1), how fast v follows."""

    beta2: float = 0.99


def aggregate(
    state: AdaptiveState, updates: Iterator[Update], config: FedYogiConfig
) -> AdaptiveState:
    """Return the state after one step of Yogi on the server."""

    def second_moment(v: torch.Tensor | float, squared: torch.Tensor) -> torch.Tensor:
        return v - (1 - config.beta2) * squared * torch.sign(v - squared)

    return adaptive(state, updates, config, second_moment)


class FedYogi(ServerRule[FedYogiConfig, AdaptiveState]):
    """Yogi on the server."""

    config_type, state_type = FedYogiConfig, AdaptiveState

    def aggregate(self, state: AdaptiveState, updates: Iterator[Update]) -> AdaptiveState:
        """Return the next state."""
        return aggregate(state, updates, self.config)
