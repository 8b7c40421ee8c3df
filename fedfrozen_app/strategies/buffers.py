"""Entries that clients send but no optimiser trains, under one policy for all rules.

Untrained are, by name and dtype, since a server sees a state dict and no module: integers and
booleans (step counters, masks), 0-d tensors, and the running statistics of normalisation
layers; a rule's option ``buffers`` adds names. They never enter a server optimiser, a control
or a normalised step:

- floating-point ones become the mean of the clients' values, weighted by their examples;
- integers and booleans are taken from the first client of the round, in client order.
"""

from collections.abc import Collection, Mapping

import torch

from fedfrozen_app.models.entries import is_trained
from fedfrozen_app.strategies.mean import Mean, Tensors


def trained(tensors: Mapping[str, torch.Tensor], buffers: Collection[str] = ()) -> Tensors:
    """Return the entries the rules act on."""
    return {name: t for name, t in tensors.items() if is_trained(name, t, buffers)}


class BufferMean:
    """The buffers of a round's replies, put together by the policy."""

    def __init__(self, buffers: Collection[str] = ()) -> None:
        self._named = buffers
        self._mean = Mean()
        self._first: Tensors | None = None
        self._dtypes: dict[str, torch.dtype] = {}

    def add(self, tensors: Mapping[str, torch.Tensor], num_examples: float) -> None:
        """Take in one client's entries; trained ones are passed over."""
        buffers = {name: t for name, t in tensors.items() if not is_trained(name, t, self._named)}
        floats = {name: t for name, t in buffers.items() if t.is_floating_point()}
        self._mean.add(floats, num_examples)
        if self._first is None:
            self._dtypes = {name: t.dtype for name, t in floats.items()}
            self._first = {name: t.clone() for name, t in buffers.items() if name not in floats}

    @property
    def value(self) -> Tensors:
        """Return every buffer in its own dtype."""
        means = {name: t.to(self._dtypes[name]) for name, t in self._mean.value.items()}
        return {**means, **(self._first or {})}
