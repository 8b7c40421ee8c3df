"""FedAdam (Reddi et al. 2020, arXiv:2003.00295, Algorithm 2).

    Delta = sum_i p_i y_i - x
    m <- b1 m + (1 - b1) Delta          m = 0 at the start
    v <- b2 v + (1 - b2) Delta^2        v = 0 at the start
    x <- x + eta m / (sqrt(v) + tau)

The paper asks for v >= tau^2 at the start and takes a uniform mean; here v starts at zero,
since tau bounds the step as well, and clients weigh by their examples as in FedAvg. The paper
has no bias correction. With ``bias_correction="adam"`` the step uses
m / (1 - b1^t) and v / (1 - b2^t), as Adam does (arXiv:1412.6980, Algorithm 1), where t counts
the steps of an entry since it began to train: 1 in the first.

:func:`adaptive` is what FedAdam, FedYogi and FedAdagrad share; they differ in v alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

from fedfrozen_app.strategies.base import ServerRule, State, Update, check_number
from fedfrozen_app.strategies.fedavg import weighted_mean
from fedfrozen_app.strategies.mean import Tensors


@dataclass(frozen=True)
class AdaptiveConfig:
    """An adaptive server optimiser.

    Attributes
    ----------
    server_lr : float
        eta > 0.
    beta1 : float
        b1 in [0, 1), decay of the first moment.
    tau : float
        > 0, adaptivity: the larger, the more the step is a plain momentum step.
    """

    server_lr: float = 0.01
    beta1: float = 0.9
    tau: float = 1e-3

    def __post_init__(self) -> None:
        check_number("server_lr", self.server_lr, above=0, remedy="try 0.01")
        check_number("tau", self.tau, above=0, remedy="try 0.001")
        for name in ("beta1", "beta2"):
            value = getattr(self, name, 0.0)
            check_number(name, value, least=0, below=1, remedy="use 0 for no memory")


@dataclass(frozen=True)
class FedAdamConfig(AdaptiveConfig):
    """An adaptive server optimiser.

    Attributes
    ----------
    beta2 : float
        b2 in [0, 1), decay of the second moment.
    bias_correction : {"none", "adam"}
        none = the paper.
    """

    beta2: float = 0.99
    bias_correction: Literal["none", "adam"] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bias_correction not in ("none", "adam"):
            raise ValueError(
                f"bias_correction must be 'none' or 'adam', got {self.bias_correction!r}"
            )


@dataclass(frozen=True)
class AdaptiveState(State):
    """x and the moments m and v by parameter name; missing ones are zero.

    ``t`` counts steps element by element, and only where a bias correction asks for it: rows
    of a fused weight may begin to train at different times.
    """

    m: Tensors = field(default_factory=dict)
    v: Tensors = field(default_factory=dict)
    t: Tensors = field(default_factory=dict)


SecondMoment = Callable[[torch.Tensor | float, torch.Tensor], torch.Tensor]


def adaptive(
    state: AdaptiveState,
    updates: Iterator[Update],
    config: AdaptiveConfig,
    second_moment: SecondMoment,
    decays: tuple[float, float] | None = None,
) -> AdaptiveState:
    """Return the state after one adaptive step.

    ``second_moment(v, Delta^2)`` is the next v; ``decays`` (b1, b2) corrects the bias of m and
    v, None leaves it.
    """
    eta, b1, tau = config.server_lr, config.beta1, config.tau
    average = weighted_mean(updates)
    following = AdaptiveState({}, {}, {}, {})
    for name, x in state.x.items():
        delta = average[name] - x
        m = b1 * state.m.get(name, 0.0) + (1 - b1) * delta
        v = second_moment(state.v.get(name, 0.0), delta.square())
        following.m[name], following.v[name] = m, v
        if decays is not None:
            t = state.t.get(name, 0.0) + torch.ones_like(x)
            following.t[name] = t
            m, v = (s / _mass(decay, t) for s, decay in zip((m, v), decays, strict=True))
        following.x[name] = x + eta * m / (v.sqrt() + tau)
    return following


def _mass(decay: float, t: torch.Tensor) -> torch.Tensor:
    """Return 1 - decay^t; in fp64, since it is a small difference of numbers close to 1."""
    return (1 - decay ** t.double()).to(t.dtype)


def aggregate(
    state: AdaptiveState, updates: Iterator[Update], config: FedAdamConfig
) -> AdaptiveState:
    """Return the state after one step of Adam on the server."""
    b2 = config.beta2

    def second_moment(v: torch.Tensor | float, squared: torch.Tensor) -> torch.Tensor:
        return b2 * v + (1 - b2) * squared

    decays = (config.beta1, b2) if config.bias_correction == "adam" else None
    return adaptive(state, updates, config, second_moment, decays)


class FedAdam(ServerRule[FedAdamConfig, AdaptiveState]):
    """Adam on the server."""

    config_type, state_type = FedAdamConfig, AdaptiveState

    def aggregate(self, state: AdaptiveState, updates: Iterator[Update]) -> AdaptiveState:
        """Return the next state."""
        return aggregate(state, updates, self.config)
