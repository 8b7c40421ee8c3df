"""FedProx (Li et al. 2020, arXiv:1812.06127, Algorithm 2).

Client i minimises F_i(w) + (mu / 2) ||w - w_t||^2 over its trainable parameters, w_t being
the model it was sent: mu (w - w_t) is added to every gradient.
Server: x <- sum_i p_i y_i, as in FedAvg. mu = 0 is FedAvg.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from fedfrozen_app.strategies.base import ServerRule, State, Update, check_number
from fedfrozen_app.strategies.fedavg import weighted_mean
from fedfrozen_app.training.hooks import Hook, Parameters
from fedfrozen_app.transport.payload import PROXIMAL_MU, Instructions


@dataclass(frozen=True)
class FedProxConfig:
    """proximal_mu : float, mu >= 0, the weight of the proximal term."""

    proximal_mu: float = 0.01

    def __post_init__(self) -> None:
        check_number("proximal_mu", self.proximal_mu, least=0, remedy="use 0 for FedAvg")


def aggregate(state: State, updates: Iterator[Update], config: FedProxConfig) -> State:
    """Return the state with x the mean of the clients' models, weighted by their examples."""
    return replace(state, x=weighted_mean(updates))


class Proximal(Hook):
    """The client's half: the gradient mu (w - w_t) of (mu / 2) ||w - w_t||^2."""

    def __init__(self, proximal_mu: float) -> None:
        self.proximal_mu = proximal_mu
        self._received: dict[str, Tensor] = {}

    def begin(self, params: Parameters) -> None:
        """Keep w_t, a detached copy of the parameters as received."""
        self._received = {name: param.detach().clone() for name, param in params.items()}

    def correct(self, params: Parameters) -> None:
        """Add mu (w - w_t) to the gradients."""
        for name, param in params.items():
            drift = param.detach() - self._received[name]
            if param.grad is None:  # the loss does not use it, the term does
                param.grad = self.proximal_mu * drift
            else:
                param.grad.add_(drift, alpha=self.proximal_mu)


class FedProx(ServerRule[FedProxConfig, State]):
    """FedProx; tells its clients mu as ``proximal-mu``, as Flower's own FedProx does."""

    config_type, state_type = FedProxConfig, State

    def instructions(self, client: int) -> Instructions:
        """Return mu for a client."""
        return {PROXIMAL_MU: self.config.proximal_mu}

    def aggregate(self, state: State, updates: Iterator[Update]) -> State:
        """Return the next state."""
        return aggregate(state, updates, self.config)
