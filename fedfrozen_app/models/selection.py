"""Who trains and who is frozen: a :class:`Selection` over the entries of a state dict.

FedFrozen (arXiv:2605.06446) stops training the attention kernel (query and key weights)
after a warm-up. Libraries keep queries, keys and values in one fused weight, so a selection
works on slices: for timm's ``attn.qkv.weight`` [3d, n] under ``frozen="query-key"`` the
active part is rows 2d:3d [d, n] and the frozen part rows 0:2d [2d, n].

>>> selection = Selection.build("query-key", model.state_dict())
>>> active, frozen = selection.split(model.state_dict())
>>> selection.merge(active, frozen)  # bit-identical to the state dict

``split`` works for anything keyed by the same names with the same shapes: weights, server
momentum, controls. In both halves an entry keeps its state-dict name, and both are in the
library's key order. The language of ``frozen`` is in :mod:`fedfrozen_app.models.patterns`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from fedfrozen_app.models.attention import HasShape, Rows, value_rows
from fedfrozen_app.models.patterns import PRESETS, Ranges, complement, resolve

__all__ = ["PRESETS", "Entry", "Rows", "Selection", "value_rows"]

Array: TypeAlias = npt.NDArray[Any] | torch.Tensor
A = TypeVar("A", npt.NDArray[Any], torch.Tensor)


@dataclass(frozen=True)
class Entry:
    """One state-dict entry and the slices of it that train.

    Attributes
    ----------
    name : str
        State-dict name.
    shape : tuple[int, ...]
        Whole shape.
    dim : int
        Dimension the slices lie along: 0 = rows, 1 = columns (GPT-2's ``Conv1D``).
    active : Ranges
        Sorted, disjoint ``(start, stop)`` along ``dim``; empty = frozen.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    active: Ranges

    @property
    def size(self) -> int:
        """Return the length along ``dim``; 1 for a scalar."""
        return self.shape[self.dim] if self.shape else 1

    @property
    def frozen(self) -> Ranges:
        """Return the ranges that do not train."""
        return complement(self.active, self.size)

    @property
    def is_active(self) -> bool:
        """Whether the whole entry trains (an empty entry counts as trained)."""
        return not self.frozen

    @property
    def is_frozen(self) -> bool:
        """Whether nothing of the entry trains."""
        return not self.active and not self.is_active

    @property
    def is_partial(self) -> bool:
        """Whether some slices train and some do not."""
        return not (self.is_active or self.is_frozen)

    def part_shape(self, ranges: Ranges) -> tuple[int, ...]:
        """Return the shape of the given slices put together."""
        length = sum(stop - start for start, stop in ranges)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    @property
    def keys(self) -> tuple[str, ...]:
        """Return one key per active range: the name, or ``name#0``, ``name#1`` for several."""
        if not self.is_partial or len(self.active) == 1:
            return () if self.is_frozen else (self.name,)
        return tuple(f"{self.name}#{i}" for i in range(len(self.active)))


@dataclass(frozen=True)
class Selection:
    """The trainable entries of a state dict, immutable; equal if the same slices train.

    Attributes
    ----------
    entries : tuple[Entry, ...]
        Every entry of the state dict in the library's order.
    spec : str
        What it was built from; not part of equality.
    """

    entries: tuple[Entry, ...]
    spec: str = field(compare=False)

    @classmethod
    def build(cls, frozen: str, entries: Mapping[str, HasShape], *, head: str = "") -> Self:
        """Build from a preset or patterns that name what is frozen.

        Parameters
        ----------
        frozen : str
            ``all`` (nothing), ``query-key``, ``value-head``, ``head`` or name patterns.
        entries : Mapping[str, HasShape]
            The whole state dict: tensors (meta too), arrays or anything with a shape.
        head : str
            Prefix of the head's names, where it is not a usual one.

        Raises
        ------
        ValueError
            Where the spec matches nothing or cannot be told; names the closest entries.
        """
        for name, entry in entries.items():
            if not hasattr(entry, "shape"):
                raise ValueError(f"entry {name!r} has no shape; pass the model's tensors only")
        active = resolve(frozen, entries, head)
        return cls(
            tuple(
                Entry(name, tuple(map(int, entry.shape)), *active[name])
                for name, entry in entries.items()
            ),
            frozen.strip(),
        )

    @cached_property
    def _by_name(self) -> dict[str, Entry]:
        return {entry.name: entry for entry in self.entries}

    def __getitem__(self, name: str) -> Entry:
        """Return one entry.

        Raises
        ------
        ValueError
            For a name that the state dict does not have.
        """
        if name not in self._by_name:
            raise ValueError(
                f"entry {name!r} is not in the selection of {len(self.entries)} entries; it "
                "must be built from the same model"
            )
        return self._by_name[name]

    # --- what trains --------------------------------------------------------------------
    @property
    def is_all(self) -> bool:
        """Whether nothing is frozen."""
        return all(entry.is_active for entry in self.entries)

    def active_rows(self, name: str) -> tuple[Rows, ...]:
        """Return the slices of an entry that train."""
        entry = self[name]
        return tuple(Rows(entry.dim, *pair) for pair in entry.active)

    def frozen_rows(self, name: str) -> tuple[Rows, ...]:
        """Return the slices of an entry that do not train."""
        entry = self[name]
        return tuple(Rows(entry.dim, *pair) for pair in entry.frozen)

    def active_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the active half by entry."""
        return {
            e.name: e.shape if e.is_active else e.part_shape(e.active)
            for e in self.entries
            if not e.is_frozen
        }

    def frozen_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the frozen half by entry."""
        return {
            e.name: e.shape if e.is_frozen else e.part_shape(e.frozen)
            for e in self.entries
            if not e.is_active
        }

    @property
    def num_active(self) -> int:
        """Return how many numbers train, buffers included."""
        return sum(map(math.prod, self.active_shapes().values()))

    @property
    def num_frozen(self) -> int:
        """Return how many numbers are frozen, buffers included."""
        return sum(map(math.prod, self.frozen_shapes().values()))

    def describe(self) -> str:
        """Return one line: spec, active and total numbers, partly frozen entries."""
        total = self.num_active + self.num_frozen
        partial = sum(entry.is_partial for entry in self.entries)
        return (
            f"frozen={self.spec}: {self.num_active:,} of {total:,} numbers train "
            f"({self.num_active / max(total, 1):.1%}), {partial} entries partly"
        )

    # --- splitting ----------------------------------------------------------------------
    def split(self, arrays: Mapping[str, A]) -> tuple[dict[str, A], dict[str, A]]:
        """Return ``(active, frozen)``: views, except where a half has several ranges.

        Raises
        ------
        ValueError
            For missing or unknown entries or wrong shapes.
        """
        self._check("split", arrays, {e.name: e.shape for e in self.entries})
        frozen = {
            e.name: _take(arrays[e.name], e, e.frozen) for e in self.entries if not e.is_active
        }
        return self.restrict(arrays), frozen

    def restrict(self, arrays: Mapping[str, A]) -> dict[str, A]:
        """Return the active half of any subset of the entries, in the library's order.

        For state that has no value for some entries, such as server momentum without
        buffers. Unknown names and wrong shapes are errors as in :meth:`split`.
        """
        self._check("restrict", arrays, {n: self[n].shape for n in arrays})
        return {
            e.name: _take(arrays[e.name], e, e.active)
            for e in self.entries
            if e.name in arrays and not e.is_frozen
        }

    def merge(self, active: Mapping[str, A], frozen: Mapping[str, A]) -> dict[str, A]:
        """Return whole arrays: whole entries by reference, partly frozen ones put together.

        Raises
        ------
        ValueError
            For missing or unknown entries, wrong shapes, or halves of different types.
        """
        self._check("merge: active", active, self.active_shapes())
        self._check("merge: frozen", frozen, self.frozen_shapes())
        return {
            e.name: _join(e, active[e.name], frozen[e.name])
            if e.is_partial
            else (active if e.is_active else frozen)[e.name]
            for e in self.entries
        }

    def parts(self, active: Mapping[str, A]) -> dict[str, A]:
        """Return an active half under the keys of ``trainable_parameters``, as views.

        The same mapping, except that an entry with several active ranges becomes
        ``name#0``, ``name#1``. Entries may be missing.
        """
        shapes = self.active_shapes()
        known = {name: shapes[name] for name in active if name in shapes}
        self._check("parts", active, known)
        parts: dict[str, A] = {}
        for entry in self.entries:
            if entry.name not in known:
                continue
            start = 0
            for key, (low, high) in zip(entry.keys, entry.active or ((0, 0),), strict=True):
                parts[key] = _slice(active[entry.name], entry.dim, start, start + high - low)
                start += high - low
        return parts

    def views(self, arrays: Mapping[str, A]) -> dict[str, A]:
        """Return the active slices of whole arrays under the keys of :meth:`parts`, as views.

        Writing an active half into whole arrays is one copy per key:
        ``views(arrays)[key].copy_(part)`` for each item of ``parts(active)``.
        """
        self._check("views", arrays, {e.name: e.shape for e in self.entries})
        return {
            key: arrays[e.name] if e.is_active else _slice(arrays[e.name], e.dim, *pair)
            for e in self.entries
            for key, pair in zip(e.keys, e.active or ((0, 0),), strict=False)
        }

    def locate(self, rows: Mapping[str, Rows]) -> dict[str, Rows]:
        """Return where slices of whole entries lie in ``trainable_parameters``, by key.

        Frozen slices have no place and are left out: ``locate(value_rows(entries))`` is
        where W_V trains.
        """
        found: dict[str, Rows] = {}
        for name, (dim, start, stop) in rows.items():
            entry = self[name]
            if entry.is_active:
                found[name] = Rows(dim, start, stop)
                continue
            if dim != entry.dim:
                raise ValueError(f"entry {name!r} is sliced along dim {entry.dim}, not {dim}")
            for key, (low, high) in zip(entry.keys, entry.active, strict=True):
                if max(start, low) < min(stop, high):
                    found[key] = Rows(dim, max(start, low) - low, min(stop, high) - low)
        return found

    def _check(
        self, what: str, arrays: Mapping[str, A], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Raise naming the first entry that is missing, unknown or has a wrong shape."""
        if missing := [name for name in shapes if name not in arrays]:
            raise ValueError(f"{what}: entry {missing[0]!r} is missing; give every entry")
        if extra := [name for name in arrays if name not in shapes]:
            raise ValueError(f"{what}: entry {extra[0]!r} does not belong here; leave it out")
        for name, shape in shapes.items():
            if tuple(arrays[name].shape) != shape:
                raise ValueError(
                    f"{what}: entry {name!r} must have shape {list(shape)}, got "
                    f"{list(arrays[name].shape)}; use the selection the arrays were split with"
                )


def _slice(array: A, dim: int, start: int, stop: int) -> A:
    if array.ndim == 0:
        return array
    return array[(slice(None),) * dim + (slice(start, stop),)]


def _take(array: A, entry: Entry, ranges: Ranges) -> A:
    """Return slices of one array: itself if whole, a view if contiguous, else a copy."""
    if not entry.is_partial:
        return array
    pieces = [_slice(array, entry.dim, *pair) for pair in ranges]
    if len(pieces) == 1:
        return pieces[0]
    if isinstance(array, torch.Tensor):
        return torch.cat(pieces, dim=entry.dim)
    return np.concatenate(pieces, axis=entry.dim)


def _join(entry: Entry, active: A, frozen: A) -> A:
    """Return one array from the active and the frozen slices of a partly frozen entry."""
    same_kind = isinstance(active, torch.Tensor) == isinstance(frozen, torch.Tensor)
    if not same_kind or active.dtype != frozen.dtype:
        raise ValueError(
            f"merge: entry {entry.name!r} is {type(active).__name__} {active.dtype} in the active "
            f"half and {type(frozen).__name__} {frozen.dtype} in the frozen half; convert one"
        )
    pieces: list[tuple[int, A]] = []
    for half, ranges in ((active, entry.active), (frozen, entry.frozen)):
        offset = 0
        for start, stop in ranges:
            pieces.append((start, _slice(half, entry.dim, offset, offset + stop - start)))
            offset += stop - start
    ordered = [piece for _, piece in sorted(pieces, key=lambda pair: pair[0])]
    if isinstance(active, torch.Tensor):
        return torch.cat(ordered, dim=entry.dim)
    return np.concatenate(ordered, axis=entry.dim)
