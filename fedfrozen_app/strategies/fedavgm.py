"""FedAvgM, server momentum (Hsu et al. 2019, arXiv:1909.06335, Sec. 4.3).

    d  = x - sum_i p_i y_i         the pseudo-gradient
    v <- beta v + d                v = 0 at the start
    x <- x - eta v                 or x - eta (d + beta v) with Nesterov

beta = 0 with eta = 1 is FedAvg.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from fedfrozen_app.strategies.base import ServerRule, State, Update, check_number
from fedfrozen_app.strategies.fedavg import weighted_mean
from fedfrozen_app.strategies.mean import Tensors


@dataclass(frozen=True)
class FedAvgMConfig:
    """The server's optimiser.

    Attributes
    ----------
    server_lr : float
        eta > 0.
    server_momentum : float
        beta in [0, 1).
    nesterov : bool
        Look ahead along the new velocity.
    """

    server_lr: float = 1.0
    server_momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_number("server_lr", self.server_lr, above=0, remedy="use 1 for the mean itself")
        check_number(
            "server_momentum", self.server_momentum, least=0, below=1, remedy="use 0 for none"
        )


@dataclass(frozen=True)
class FedAvgMState(State):
    """x and the velocity v by parameter name; a missing v is zero."""

    v: Tensors = field(default_factory=dict)


def aggregate(
    state: FedAvgMState, updates: Iterator[Update], config: FedAvgMConfig
) -> FedAvgMState:
    """Return the state after one step of server momentum."""
    eta, beta = config.server_lr, config.server_momentum
    average = weighted_mean(updates)
    next_x, next_v = {}, {}
    for name, x in state.x.items():
        d = x - average[name]
        v = beta * state.v.get(name, 0.0) + d
        next_x[name] = x - eta * (d + beta * v if config.nesterov else v)
        next_v[name] = v
    return FedAvgMState(next_x, next_v)


class FedAvgM(ServerRule[FedAvgMConfig, FedAvgMState]):
    """FedAvg with momentum on the server."""

    config_type, state_type = FedAvgMConfig, FedAvgMState

    def aggregate(self, state: FedAvgMState, updates: Iterator[Update]) -> FedAvgMState:
        """Return the next state."""
        return aggregate(state, updates, self.config)
