"""Top-k sparsification: the largest values of an update and where they were.

Of each tensor of n values the k = ceil(F n) largest by magnitude are sent, the rest is zero
to the receiver and stays with the sender as error feedback. Selection is per tensor, as in Deep
Gradient Compression (Lin et al. 2018, arXiv:1712.01887, Algorithm 1), not over the whole
update: layers whose updates are small on average are heard each round, positions fit into
int32, and the size of a message follows from the model's layout.

Sent are ``packed/values``, fp32 [sum_l k_l], and ``packed/indices``, int32 [sum_l k_l],
ascending in each flattened tensor: 8 bytes a value. Of equal magnitudes the first ones are taken.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch

from fedfrozen_app.transport.codec import PACKED, Codec, Layout, Shapes, Tensors, concatenated

VALUES, INDICES = f"{PACKED}/values", f"{PACKED}/indices"
_MOST = 2**31 - 1  # int32


def largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Return the ascending indices, int64 [k], of the k largest magnitudes of a vector."""
    if k == 0:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    magnitudes = values.abs()
    # which of several equal values topk returns is not laid down, the smallest value is
    threshold = magnitudes.topk(k, sorted=False).values.min()
    above = (magnitudes > threshold).nonzero().reshape(-1)
    equal = (magnitudes == threshold).nonzero().reshape(-1)
    return torch.cat([above, equal[: k - len(above)]]).sort().values


@dataclass(frozen=True)
class TopK(Codec):
    """The largest values of updates; ``fraction`` F of each tensor's, 0 < F <= 1."""

    fraction: Fraction
    of_update: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be > 0 and <= 1, got {self.fraction}")

    def _kept(self, shape: tuple[int, ...]) -> int:
        return math.ceil(self.fraction * math.prod(shape))  # exact: no rounding of 0.07 * 100

    def _packed_layout(self, shapes: Shapes) -> Layout:
        for name, shape in shapes.items():
            if math.prod(shape) > _MOST:
                raise ValueError(f"{name!r} must have at most {_MOST} values to be sparsified")
        total = sum(map(self._kept, shapes.values()))
        return {VALUES: ((total,), "float32"), INDICES: ((total,), "int32")}

    def _pack(self, tensors: Tensors, start: Mapping[str, torch.Tensor]) -> Tensors:
        values, indices = [], []
        for tensor in tensors.values():
            flat = tensor.reshape(-1)
            indices.append(largest(flat, self._kept(tuple(tensor.shape))))
            values.append(flat[indices[-1]])
        return {
            VALUES: concatenated(values, torch.float32),
            INDICES: concatenated(indices, torch.int32),
        }

    def _unpack(self, packed: Tensors, shapes: Shapes) -> Iterator[tuple[str, torch.Tensor]]:
        sizes = [self._kept(shape) for shape in shapes.values()]
        parts = zip(*(torch.split(packed[key], sizes) for key in (VALUES, INDICES)), strict=True)
        for (name, shape), (values, indices) in zip(shapes.items(), parts, strict=True):
            numel = math.prod(shape)
            _check_indices(name, indices, numel)
            flat = values.new_zeros(numel)
            flat[indices.long()] = values
            yield name, flat


def _check_indices(name: str, indices: torch.Tensor, numel: int) -> None:
    if len(indices) == 0:
        return
    if not bool((indices[1:] > indices[:-1]).all()):
        raise ValueError(f"{INDICES!r} must ascend in {name!r} without duplicates, they do not")
    if int(indices[0]) < 0 or int(indices[-1]) >= numel:
        raise ValueError(
            f"{INDICES!r} must be in [0, {numel}) in {name!r}, "
            f"got {int(indices[0])} to {int(indices[-1])}"
        )
