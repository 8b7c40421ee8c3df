"""A bound on the norm of a client's update: one reply must not carry the model away.

An update is y_i - x over the entries that train, its norm ||y_i - x||_2 over all of them
together (of a latent, that of z_i - z). The bound is a number, or a multiple of what is usual,

    bound = factor * median_j ||y_j - x||_2      over the updates that counted in the round before,

which needs no idea of the scale and, as a median, is moved by few liars only. The first round
after a start or after a change of the selection has nothing to compare with and no such bound.
What travels beside the model (SCAFFOLD's controls) has its own median and no bound in numbers.

What is longer is refused or clipped: x + (y_i - x) bound / ||y_i - x||_2, as norm clipping against
backdoors does (arXiv:1911.07963, section 4).
"""

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fedfrozen_app.norm_limit import NONE, read_limit
from fedfrozen_app.strategies.buffers import trained
from fedfrozen_app.strategies.mean import Tensors
from fedfrozen_app.transport.payload import from_namespaces, to_namespaces

ACTIONS = ("refuse", "clip")
MODEL = "model"  # the model's own entries, beside the namespaces


class ImplausibleError(ValueError):
    """An update is longer than the bound."""


@dataclass
class NormBound:
    """The bound of a run, and the norms it goes by.

    Attributes
    ----------
    limit : str
        ``none``, ``5.0`` or ``10x``; see ``fedfrozen_app.norm_limit``.
    action : str
        ``refuse`` or ``clip``.
    medians : dict of str to float
        Of the last round that counted, by namespace.
    """

    limit: str = NONE
    action: str = ACTIONS[0]
    medians: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._value, self._relative = read_limit(self.limit)
        if self.action not in ACTIONS:
            raise ValueError(
                f"oversized-updates must be {' or '.join(ACTIONS)}, got {self.action!r}"
            )
        self._norms: dict[str, list[float]] = {}

    @property
    def is_on(self) -> bool:
        """Whether anything is bounded."""
        return math.isfinite(self._value)

    def begin(self) -> None:
        """Begin a round, or try one again."""
        self._norms = {}

    def accept(self) -> None:
        """Take the norms of a round that counted as what is usual."""
        for name, norms in self._norms.items():
            self.medians[name] = statistics.median(norms)

    def forget(self) -> None:
        """Forget what is usual: other entries train from now on."""
        self.medians = {}

    def checked(self, y: Tensors, x: Tensors, buffers: Collection[str]) -> Tensors:
        """Return a reply's entries as they may enter the model.

        Parameters
        ----------
        y : dict of str to Tensor
            What the client sent, with what lies in namespaces.
        x : dict of str to Tensor
            What it was sent.
        buffers : collection of str
            Entries that no optimiser trains; they are no part of the norm.

        Raises
        ------
        ImplausibleError
            Where the action is to refuse and a norm is beyond its bound.
        """
        own, extra = from_namespaces(y)
        norms = {MODEL: _norm(trained(own, buffers), x)}
        norms |= {name: _norm(tensors, {}) for name, tensors in extra.items()}
        too_long = {name: norm for name, norm in norms.items() if norm > self._bound(name)}
        if too_long and self.action == "refuse":
            name, norm = next(iter(too_long.items()))
            raise ImplausibleError(
                f"the {'update' if name == MODEL else name} has norm {norm:.4g}, more than "
                f"{self._bound(name):.4g} (max-update-norm={self.limit})"
            )
        for name, norm in norms.items():
            self._norms.setdefault(name, []).append(min(norm, self._bound(name)))
        if not too_long:
            return y
        scales = {name: self._bound(name) / norm for name, norm in too_long.items()}
        if MODEL in scales:
            own = _clipped(own, x, buffers, scales.pop(MODEL))
        for name, scale in scales.items():
            extra[name] = {key: tensor * scale for key, tensor in extra[name].items()}
        return {**own, **to_namespaces(extra)}

    def _bound(self, name: str) -> float:
        if self._relative:
            median = self.medians.get(name, 0.0)
            return self._value * median if median > 0 else math.inf
        return self._value if name == MODEL else math.inf

    def state_dict(self) -> dict[str, Any]:
        """Return what is usual."""
        return dict(self.medians)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        self.medians = {name: float(value) for name, value in state.items()}


def _norm(y: Tensors, x: Tensors) -> float:
    """Return ||y - x||_2 over all entries of y, in fp64; a missing x is zero."""
    squares = 0.0
    for name, tensor in y.items():
        delta = tensor.double() - x[name].double() if name in x else tensor.double()
        squares += float(delta.square().sum())
    return math.sqrt(squares)


def _clipped(y: Tensors, x: Tensors, buffers: Collection[str], scale: float) -> Tensors:
    """Return x + scale (y - x) on what trains, and y on the rest."""
    moved = trained(y, buffers)
    return {
        name: torch.lerp(x[name].to(tensor.dtype), tensor, scale) if name in moved else tensor
        for name, tensor in y.items()
    }
