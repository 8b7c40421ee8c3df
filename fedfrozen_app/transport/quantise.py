"""Uniform affine integers, 8 or 4 bits a value.

Per tensor, with b bits and L = 2^b - 1 steps between its smallest and largest value:

    scale = (max - min) / L     zero = min
    q     = round((x - min) / scale)  in 0 .. L, halves to even
    x^    = zero + scale q

so |x^ - x| <= scale / 2 up to the rounding of x^ itself, and a constant tensor comes back
exactly (scale 0). Scale and zero point are fp32; q, x^ are computed in fp64.

Sent are two arrays: ``packed/codes``, uint8 [sum_l ceil(n_l b / 8)], and ``packed/scales``, fp32
[l, 2] with rows (scale, zero). Of two 4-bit codes the first is the low half of the byte; the last
byte of an odd number of them has a zero above. A vector sent alone, like a latent of D entries,
takes ceil(D b / 8) + 8 bytes.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedfrozen_app.transport.codec import PACKED, Codec, Layout, Shapes, Tensors, concatenated

CODES, SCALES = f"{PACKED}/codes", f"{PACKED}/scales"
_SMALLEST = 2.0**-149  # of fp32


def quantise(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the packed codes of a tensor, and its scale and zero point.

    Parameters
    ----------
    values : Tensor
        Of any shape, finite.
    bits : int
        8 or 4.

    Returns
    -------
    codes : Tensor
        uint8 [ceil(n bits / 8)].
    scale : Tensor
        fp32 [2]: scale and zero point.
    """
    levels = 2**bits - 1
    low, high = map(float, values.aminmax()) if values.numel() else (0.0, 0.0)
    scale = torch.tensor([(high - low) / levels, low], dtype=torch.float32)
    if high > low and scale[0] == 0:  # below what fp32 has
        scale[0] = _SMALLEST
    step, zero = scale.tolist()
    steps = values.reshape(-1).to(torch.float64, copy=True).sub_(zero).div_(step or 1.0)
    codes = steps.round_().clamp_(0, levels).to(torch.uint8)
    return (_pack_nibbles(codes) if bits == 4 else codes), scale.to(values.device)


def dequantise(codes: torch.Tensor, scale: torch.Tensor, numel: int, bits: int) -> torch.Tensor:
    """Return the fp64 vector [numel] of what :func:`quantise` returned."""
    steps = _unpack_nibbles(codes)[:numel] if bits == 4 else codes
    step, zero = scale.tolist()
    return steps.to(torch.float64).mul_(step).add_(zero)


def _pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    low, high = codes[0::2], codes[1::2]
    packed = low.clone()
    packed[: len(high)] |= high << 4
    return packed


def _unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack([packed & 15, packed >> 4], dim=1).reshape(-1)


@dataclass(frozen=True)
class Integers(Codec):
    """The weights themselves as integers of 8 or 4 bits."""

    bits: int
    of_update: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits must be 8 or 4, got {self.bits}")

    def _packed_size(self, numel: int) -> int:
        return -(-numel * self.bits // 8)

    def _packed_layout(self, shapes: Shapes) -> Layout:
        size = sum(self._packed_size(math.prod(shape)) for shape in shapes.values())
        return {CODES: ((size,), "uint8"), SCALES: ((len(shapes), 2), "float32")}

    def _pack(self, tensors: Tensors, start: Mapping[str, torch.Tensor]) -> Tensors:
        pairs = [quantise(tensor, self.bits) for tensor in tensors.values()]
        return {
            CODES: concatenated([codes for codes, _ in pairs], torch.uint8),
            SCALES: concatenated([scale for _, scale in pairs], torch.float32).reshape(-1, 2),
        }

    def _unpack(self, packed: Tensors, shapes: Shapes) -> Iterator[tuple[str, torch.Tensor]]:
        if bool((packed[SCALES][:, 0] < 0).any()):
            raise ValueError(f"{SCALES!r} must have scales >= 0, got a negative one")
        numels = [math.prod(shape) for shape in shapes.values()]
        parts = torch.split(packed[CODES], [self._packed_size(numel) for numel in numels])
        for name, numel, codes, scale in zip(shapes, numels, parts, packed[SCALES], strict=True):
            if self.bits == 4 and numel % 2 and int(codes[-1]) > 15:
                raise ValueError(
                    f"{CODES!r} must end {name!r} with an empty half byte, it does not"
                )
            yield name, dequantise(codes, scale, numel, self.bits)
