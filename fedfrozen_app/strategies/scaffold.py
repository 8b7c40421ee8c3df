"""SCAFFOLD, option II (Karimireddy et al. 2020, arXiv:1910.06378, Algorithm 1).

Client i, with the server's control c and its own c_i, both zero at the start:

    y   <- y - eta_l (g_i(y) - c_i + c)              tau_i optimiser steps, y = x at first
    c_i+ = c_i - c + (x - y) / (tau_i eta_l)
    sends y and Delta c_i = c_i+ - c_i, keeps c_i+

Server, with S the clients that replied, N all clients:

    x <- x + eta mean_S (y_i - x)                    a uniform mean, whatever n_i
    c <- c + (|S| / N) mean_S Delta c_i

With SGD momentum rho, tau_i eta_l is replaced by the sum of effective step sizes,
eta_l ||a_i||_1 (:mod:`.effective_steps`), which makes c_i+ a mean of gradients again.

A client's c_i+ counts once the server has used the reply it came with (:mod:`.versions`), so c
stays the mean of all c_i when replies are lost or refused. What froze loses its control, and
what trains again starts at zero, on a client that was away as on the server.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from fedfrozen_app.models.selection import Selection
from fedfrozen_app.strategies.base import ServerRule, State, Update, check_number
from fedfrozen_app.strategies.mean import Mean, Tensors
from fedfrozen_app.training.hooks import Hook, Parameters
from fedfrozen_app.transport.payload import CONTROL


@dataclass(frozen=True)
class ScaffoldConfig:
    """The server's half.

    Attributes
    ----------
    server_lr : float
        eta > 0.
    num_clients : int
        N, all clients that may ever take part; 0 = those the server knows in the round.
    """

    server_lr: float = 1.0
    num_clients: int = 0

    def __post_init__(self) -> None:
        check_number("server_lr", self.server_lr, above=0, remedy="use 1 for the mean itself")
        check_number("num_clients", self.num_clients, least=0, remedy="use 0 for as connected")


@dataclass(frozen=True)
class ScaffoldState(State):
    """x and the server's control c by parameter name; a missing c is zero."""

    c: Tensors = field(default_factory=dict)


def aggregate(
    state: ScaffoldState, updates: Iterator[Update], config: ScaffoldConfig
) -> ScaffoldState:
    """Return the state with x moved by the mean update and c by its share of the clients."""
    eta, y, delta_c, replied = config.server_lr, Mean(), Mean(), 0
    for update in updates:
        y.add(update.arrays)
        delta_c.add(update.extra.get(CONTROL, {}))  # none where only buffers are active
        replied += 1
        del update  # before the next client trains
    share = replied / config.num_clients
    return ScaffoldState(
        x={name: x + eta * (y.value[name] - x) for name, x in state.x.items()},
        c={name: state.c.get(name, 0.0) + share * d for name, d in delta_c.value.items()},
    )


class Correction(Hook):
    """The client's steps: c - c_i is added to every gradient.

    Parameters
    ----------
    c, c_i : mapping of str to Tensor
        The server's and the client's control by entry, in the shapes of the active half.
    selection : Selection
        What the model is frozen by, which says how the controls lie in its parameters.
    """

    def __init__(
        self,
        c: Mapping[str, torch.Tensor],
        c_i: Mapping[str, torch.Tensor],
        selection: Selection,
    ) -> None:
        self._shift = selection.parts({name: c[name] - c_i[name] for name in c})

    def begin(self, params: Parameters) -> None:
        """Move the correction to where the parameters are."""
        self._shift = {
            name: self._shift[name].to(param.device, param.dtype)
            for name, param in params.items()
            if name in self._shift
        }

    def correct(self, params: Parameters) -> None:
        """Add c - c_i to the gradients; that of a parameter the loss does not use is zero."""
        for name, shift in self._shift.items():
            if params[name].grad is None:
                params[name].grad = shift.clone()
            else:
                params[name].grad.add_(shift)  # type: ignore[union-attr]


def next_control(
    c: Mapping[str, torch.Tensor],
    c_i: Mapping[str, torch.Tensor],
    x: Mapping[str, torch.Tensor],
    y: Mapping[str, torch.Tensor],
    step_sizes: float,
) -> Tensors:
    """Return c_i+ = c_i - c + (x - y) / step_sizes, option II.

    ``step_sizes`` is tau_i eta_l, or the sum of effective step sizes.
    """
    return {name: c_i[name] - c[name] + (x[name] - y[name]) / step_sizes for name in c}


class Scaffold(ServerRule[ScaffoldConfig, ScaffoldState]):
    """SCAFFOLD; c travels beside x as ``control/NAME``, and Delta c_i beside y_i.

    Clients need no metric beyond the weight, which plays no part in x and c. They must train
    with SGD: the steps of an adaptive optimiser are not gradients times a step size. Wrap it
    in ``FedFrozen`` only: other wrappers do not know the controls in its messages.
    """

    config_type, state_type = ScaffoldConfig, ScaffoldState
    any_entries = False

    @property
    def keeps_on_clients(self) -> bool:
        """Whether clients keep something between rounds: they do, their controls."""
        return True

    @property
    def answers(self) -> list[str]:
        """What clients answer with beyond a model and its weight: Delta c_i, and codecs'."""
        return ["controls", *super().answers]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample the round's clients and address a train message to each.

        Raises
        ------
        ValueError
            If there are more clients than ``num_clients``.
        """
        messages = super().configure_train(server_round, arrays, config, grid)
        if 0 < self.config.num_clients < self.num_members:
            raise ValueError(
                f"num_clients must be all clients there are, got {self.config.num_clients} and "
                f"{self.num_members} are connected; raise it, or use 0 for as connected"
            )
        return messages

    def extra_arrays(self, x: Tensors) -> dict[str, Tensors]:
        """Return c for every trained entry, in its dtype."""
        zero = {name: torch.zeros_like(tensor) for name, tensor in x.items()}
        sent = {name: self.state.c.get(name, zero[name]).to(x[name].dtype) for name in x}
        return {CONTROL: sent}

    def aggregate(self, state: ScaffoldState, updates: Iterator[Update]) -> ScaffoldState:
        """Return the next state."""
        everyone = self.config.num_clients or self.num_members
        return aggregate(state, updates, replace(self.config, num_clients=everyone))
