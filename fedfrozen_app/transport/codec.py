"""What every codec has in common: which entries it changes, the arrays it sends, its checks.

Entries that no optimiser trains (:func:`fedfrozen_app.models.entries.is_trained`, and those that
a codec is told of by name) and those a codec cannot make smaller travel as they are, under their
own names. All others are packed, in name order, into a few flat arrays named ``packed/...``.
Shapes and dtypes of all of them follow from the layout of the model, so a receiver knows them
before it reads anything.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

import torch

from fedfrozen_app.models.entries import is_trained

Tensors = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]
Layout = dict[str, tuple[tuple[int, ...], str]]  # shape and dtype's name by entry

PACKED = "packed"  # the namespace of packed arrays
NOTHING: Mapping[str, torch.Tensor] = MappingProxyType({})


def layout_of_tensors(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """Return shape and dtype by entry."""
    return {name: (tuple(t.shape), _dtype_name(t)) for name, t in tensors.items()}


def dtype_of(name: str, dtype: str) -> torch.dtype:
    """Return the dtype that a layout states by name; raise ValueError if there is none."""
    if isinstance(found := getattr(torch, dtype, None), torch.dtype):
        return found
    raise ValueError(f"{_quoted(name)} must have the dtype of a tensor, got {dtype!r}")


@dataclass(frozen=True)
class Codec(ABC):
    """A way to send tensors in fewer bytes.

    Attributes
    ----------
    untrained : frozenset of str
        Names of further entries that travel as they are; see :mod:`..strategies.buffers`.
    of_update : bool
        Whether it is made for updates y - x, with error feedback
        (:func:`~fedfrozen_app.transport.compression.with_feedback`), or for weights y.
    """

    untrained: frozenset[str] = field(default=frozenset(), kw_only=True)
    of_update: ClassVar[bool]

    def trained_names(self, layout: Layout) -> list[str]:
        """Return the entries that may be changed on their way, in name order."""
        like = {
            name: torch.empty(shape, dtype=dtype_of(name, dtype), device="meta")
            for name, (shape, dtype) in layout.items()
            if name not in self.untrained
        }
        return sorted(name for name, tensor in like.items() if is_trained(name, tensor))

    def encode(
        self, tensors: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor] = NOTHING
    ) -> Tensors:
        """Return the arrays to send, the same ones for the same tensors.

        Parameters
        ----------
        tensors : mapping of str to Tensor
            Entries by name; what is not packed is shared, not copied.
        start : mapping of str to Tensor
            What :meth:`memory` returned of the previous arrays of the same sender.

        Raises
        ------
        ValueError
            If an entry has non-finite values, or larger ones than float32 has.
        """
        tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        layout = layout_of_tensors(tensors)
        for name, tensor in tensors.items():
            _check_finite(name, tensor)
        shapes = self._packed_shapes(layout)
        packed = self._pack({name: tensors[name] for name in shapes}, start)
        raw = {name: tensor for name, tensor in tensors.items() if name not in shapes}
        for name, tensor in packed.items():
            _check_finite(name, tensor)
        return {**raw, **{name: t for name, t in packed.items() if t.numel() > 0}}

    def decode(self, wire: Mapping[str, torch.Tensor], layout: Layout) -> Tensors:
        """Return the tensors that were sent, in the order, shapes and dtypes of the layout.

        Nothing is believed of ``wire``. What is allocated depends on ``layout`` alone: the
        tensors returned, and intermediate values of one of them at a time.

        Raises
        ------
        ValueError
            If the arrays are not exactly :meth:`wire_layout`, have non-finite values or
            break a rule of the codec.
        """
        _check_layout(wire, self.wire_layout(layout))
        for name, tensor in wire.items():
            _check_finite(name, tensor)
        shapes = self._packed_shapes(layout)
        packed = {
            key: wire[key] if key in wire else torch.empty(shape, dtype=dtype_of(key, dtype))
            for key, (shape, dtype) in self._packed_layout(shapes).items()
        }
        decoded = {name: wire[name] for name in layout if name not in shapes}
        for name, values in self._unpack(packed, shapes):
            shape, dtype = layout[name]
            decoded[name] = values.to(dtype_of(name, dtype)).reshape(shape)
            _check_finite(name, decoded[name])
        return {name: decoded[name] for name in layout}

    def wire_layout(self, layout: Layout) -> Layout:
        """Return what :meth:`encode` makes of entries of a layout."""
        shapes = self._packed_shapes(layout)
        raw = {name: said for name, said in layout.items() if name not in shapes}
        packed = self._packed_layout(shapes).items()
        return {**raw, **{key: said for key, said in packed if math.prod(said[0]) > 0}}

    def memory(self, wire: Mapping[str, torch.Tensor], layout: Layout) -> Tensors:
        """Return what the sender's next :meth:`encode` goes on from, by entry."""
        return {}

    def _packed_shapes(self, layout: Layout) -> Shapes:
        """Return the shapes of the entries that are packed, in name order."""
        shapes = {name: layout[name][0] for name in self.trained_names(layout)}
        return {name: shape for name, shape in shapes.items() if self._packs(shape)}

    def _packs(self, shape: tuple[int, ...]) -> bool:
        """Whether trained entries of a shape are packed."""
        return True

    @abstractmethod
    def _packed_layout(self, shapes: Shapes) -> Layout:
        """Return the layout of the packed arrays; an array without values is not sent."""

    @abstractmethod
    def _pack(self, tensors: Tensors, start: Mapping[str, torch.Tensor]) -> Tensors:
        """Return the packed arrays of entries in name order."""

    @abstractmethod
    def _unpack(self, packed: Tensors, shapes: Shapes) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and values of each entry, in name order and any shape.

        The arrays have the right shapes and dtypes and are finite; the rest is to be checked.
        """


def concatenated(tensors: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return tensors end to end as one vector; of none, an empty one."""
    return torch.cat([t.reshape(-1).to(dtype) for t in tensors] or [torch.empty(0, dtype=dtype)])


def _check_layout(wire: Mapping[str, torch.Tensor], expected: Layout) -> None:
    if missing := [name for name in expected if name not in wire]:
        raise ValueError(f"{len(missing)} arrays are missing, first {_quoted(missing[0])}")
    if extra := [name for name in wire if name not in expected]:
        raise ValueError(f"{len(extra)} unexpected arrays, first {_quoted(extra[0])}")
    for name, (shape, dtype) in expected.items():
        if (tuple(wire[name].shape), _dtype_name(wire[name])) != (shape, dtype):
            actual = f"{_dtype_name(wire[name])}{list(wire[name].shape)}"
            raise ValueError(f"{_quoted(name)} must be {dtype}{list(shape)}, got {actual}")


def _check_finite(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{_quoted(name)} has non-finite values; all must be finite")


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _quoted(name: str) -> str:
    """Return a name that may come from anybody, fit for one line of a log."""
    return repr(name if len(name) <= 80 else name[:77] + "...")
