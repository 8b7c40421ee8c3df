"""Uniform affine integers, 8 or 4 bits a value.

Per tensor, with b bits and L = 2^b - 1 steps between its smallest and largest value:

    scale = (max - min) / L     zero = min
    q     = round((x - min) / scale)  in 0 .. L, halves to even
    x^    = zero + scale q

so |x^ - x| <= scale / 2 up to the rounding of x^ itself, and a constant tensor comes back
exactly (scale 0). Scale and zero point are fp32; q, x^ are computed in fp64.

Sent is one array, ``packed/q``, uint8 [sum_l ceil(n_l b / 8) + 8 L] of L tensors: the codes
of all of them, then (scale, zero) of each as little-endian fp32. Of two 4-bit codes the first is
the low half of the byte; the last byte of an odd number of them has a zero above. A vector sent
alone, like a latent of D entries, takes ceil(D b / 8) + 8 bytes.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedfrozen_app.transport.codec import PACKED, Codec, Layout, Shapes, Tensors, concatenated

INTEGERS = f"{PACKED}/q"
SCALE_BYTES = 8  # of a tensor: scale and zero point
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


def _to_bytes(values: torch.Tensor) -> torch.Tensor:
    """Return fp32 values as bytes, little-endian."""
    raw = values.cpu().numpy().astype("<f4").tobytes()
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(values.device)


def _from_bytes(raw: torch.Tensor) -> torch.Tensor:
    """Return the fp32 values of :func:`_to_bytes`."""
    values = raw.cpu().numpy().view("<f4").astype("f4")
    return torch.from_numpy(values).to(raw.device)


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
        codes = sum(self._packed_size(math.prod(shape)) for shape in shapes.values())
        return {INTEGERS: ((codes + SCALE_BYTES * len(shapes),), "uint8")}

    def _pack(self, tensors: Tensors, start: Mapping[str, torch.Tensor]) -> Tensors:
        pairs = [quantise(tensor, self.bits) for tensor in tensors.values()]
        for name, (_, scale) in zip(tensors, pairs, strict=True):
            if not bool(torch.isfinite(scale).all()):
                raise ValueError(f"{name!r} has values beyond float32, which its scale is sent in")
        parts = [codes for codes, _ in pairs] + [_to_bytes(scale) for _, scale in pairs]
        return {INTEGERS: concatenated(parts, torch.uint8)}

    def _unpack(self, packed: Tensors, shapes: Shapes) -> Iterator[tuple[str, torch.Tensor]]:
        numels = [math.prod(shape) for shape in shapes.values()]
        sizes = [self._packed_size(numel) for numel in numels]
        *parts, last = torch.split(packed[INTEGERS], [*sizes, SCALE_BYTES * len(shapes)])
        scales = _from_bytes(last).reshape(-1, 2)
        if not bool(torch.isfinite(scales).all()):
            raise ValueError(f"{INTEGERS!r} has non-finite scales; all must be finite")
        if bool((scales[:, 0] < 0).any()):
            raise ValueError(f"{INTEGERS!r} must have scales >= 0, got a negative one")
        for name, numel, codes, scale in zip(shapes, numels, parts, scales, strict=True):
            if self.bits == 4 and numel % 2 and int(codes[-1]) > 15:
                raise ValueError(
                    f"{INTEGERS!r} must end {name!r} with an empty half byte, it does not"
                )
            yield name, dequantise(codes, scale, numel, self.bits)
