"""FedNova (Wang et al. 2020, arXiv:2007.07481, Eq. 6 and Algorithm 1).

Clients that take more steps must not count for more. With tau_i steps of client i,

    d_i     = (x - y_i) / ||a_i||_1          the normalised gradient
    tau_eff = sum_i p_i ||a_i||_1
    x      <- x - tau_eff sum_i p_i d_i

with p_i = n_i / sum_j n_j over the clients that replied, and ||a_i||_1 the steps that
momentum and the proximal term make of tau_i (:mod:`.effective_steps`). Local momentum starts
at zero in each round. With equal tau_i it is FedAvg.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fedfrozen_app.strategies.base import ServerRule, State, Update, check_number
from fedfrozen_app.strategies.effective_steps import effective_steps
from fedfrozen_app.strategies.mean import Mean
from fedfrozen_app.transport.payload import PROXIMAL_MU, STEPS, Instructions


@dataclass(frozen=True)
class FedNovaConfig:
    """How the clients take their steps.

    Attributes
    ----------
    momentum : float
        rho of the clients' SGD, in [0, 1).
    proximal_mu : float
        mu >= 0 of a FedProx term, sent to the clients.
    lr : float
        eta of the clients' SGD, > 0; it matters only with ``proximal_mu``.
    """

    momentum: float = 0.0
    proximal_mu: float = 0.0
    lr: float = 0.01

    def __post_init__(self) -> None:
        check_number("momentum", self.momentum, least=0, below=1, remedy="use 0 for plain SGD")
        check_number("proximal_mu", self.proximal_mu, least=0, remedy="use 0 for none")
        check_number("lr", self.lr, above=0, remedy="give the clients' learning rate")


def aggregate(state: State, updates: Iterator[Update], config: FedNovaConfig) -> State:
    """Return the state with x moved by tau_eff times the mean normalised gradient."""
    direction, effective, total = Mean(), 0.0, 0.0
    for update in updates:
        a_norm = effective_steps(
            update.steps,
            lr=config.lr,
            momentum=config.momentum,
            proximal_mu=config.proximal_mu,
        )
        normalised = {name: (state.x[name] - y) / a_norm for name, y in update.arrays.items()}
        direction.add(normalised, update.num_examples)
        effective += update.num_examples * a_norm
        total += update.num_examples
        del update, normalised  # before the next client trains
    tau_eff = effective / total
    return replace(
        state, x={name: x - tau_eff * direction.value[name] for name, x in state.x.items()}
    )


class FedNova(ServerRule[FedNovaConfig, State]):
    """FedNova; its clients report tau_i, the optimiser steps they took, as metric ``steps``."""

    config_type, state_type = FedNovaConfig, State
    any_entries = False
    required_metrics = (STEPS,)

    def instructions(self, client: int) -> Instructions:
        """Return mu for a client."""
        return {PROXIMAL_MU: self.config.proximal_mu} if self.config.proximal_mu > 0 else {}

    def aggregate(self, state: State, updates: Iterator[Update]) -> State:
        """Return the next state."""
        return aggregate(state, updates, self.config)
