"""PowerSGD: a matrix of updates as a product of two thin ones.

Vogels, Karimireddy & Jaggi 2019, arXiv:1905.13727, Algorithm 1 on one client. A tensor of
d_0 x ... is the matrix M [d_0, d_1 d_2 ...], and Q [d_1 d_2 ..., R] the right factor this
client sent last, at first a Gaussian draw:

    P <- M Q     P <- orthonormalise(P)     Q <- M^T P     M^ = P Q^T

Sent are ``packed/left`` with all P and ``packed/right`` with all Q, fp32, end to end:
4 R (d_0 + d_1) bytes a matrix. Vectors, and matrices that this would not make smaller, travel
as they are. What one client dropped stays with it as error feedback (Algorithm 2).

Unlike in Algorithm 1, P is not averaged over the workers before Q is computed: that takes two
exchanges. So each client's update is a product of its own, and the server averages those.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedfrozen_app.seeds import torch_generator
from fedfrozen_app.transport.codec import (
    PACKED,
    Codec,
    Layout,
    Shapes,
    Tensors,
    concatenated,
)

LEFT, RIGHT = f"{PACKED}/left", f"{PACKED}/right"
# less than this share of a column outside the span of those before it is rounding of fp32 updates
DEPENDENT = 1e-6


def orthonormalise(matrix: torch.Tensor) -> torch.Tensor:
    """Return orthonormal columns, fp64 [d, R], of the same span; dependent ones are zero.

    Gram-Schmidt, each column twice. Matrix products only: unlike sums and LAPACK's QR, they
    gave the same bits for every number of threads.
    """
    basis = matrix.to(torch.float64, copy=True)
    for j in range(basis.shape[1]):
        before, column = basis[:, :j], basis[:, j : j + 1]
        length = (column.T @ column).sqrt()
        for _ in range(2):
            column = column - before @ (before.T @ column)
        rest = (column.T @ column).sqrt()
        basis[:, j : j + 1] = torch.where(rest > DEPENDENT * length, column / rest, 0.0)
    return basis


def power_iteration(matrix: torch.Tensor, start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return P [d_0, R] and Q [d_1, R], fp32, of M [d_0, d_1] and the Q [d_1, R] before.

    Computed in fp64: in fp32, columns of M Q that point almost the same way would lose digits.
    """
    matrix = matrix.to(torch.float64)
    left = orthonormalise(matrix @ start.to(torch.float64)).to(torch.float32)
    return left, (matrix.T @ left.to(torch.float64)).to(torch.float32)


@dataclass(frozen=True)
class PowerSGD(Codec):
    """Updates of rank ``rank`` R >= 1; ``seed`` is that of the first Q."""

    rank: int
    seed: int = 0
    of_update: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be >= 1, got {self.rank}")

    def _packs(self, shape: tuple[int, ...]) -> bool:
        return len(shape) > 1 and self.rank * sum(_matrix(shape)) < math.prod(shape)

    def _packed_layout(self, shapes: Shapes) -> Layout:
        matrices = [_matrix(shape) for shape in shapes.values()]
        rows, columns = sum(d0 for d0, _ in matrices), sum(d1 for _, d1 in matrices)
        return {
            LEFT: ((self.rank * rows,), "float32"),
            RIGHT: ((self.rank * columns,), "float32"),
        }

    def _pack(self, tensors: Tensors, start: Mapping[str, torch.Tensor]) -> Tensors:
        factors = []
        for name, tensor in tensors.items():
            matrix = tensor.reshape(_matrix(tuple(tensor.shape)))
            before = self._start(name, matrix.shape[1], start.get(name))
            factors.append(power_iteration(matrix, before.to(matrix.device)))
        return {
            LEFT: concatenated([left for left, _ in factors], torch.float32),
            RIGHT: concatenated([right for _, right in factors], torch.float32),
        }

    def _start(self, name: str, columns: int, before: torch.Tensor | None) -> torch.Tensor:
        """Return Q [d_1, R] to go on from, its columns of length 1.

        Columns that are zero would stay so, and a Q of another shape belongs to another
        selection: both are drawn anew.
        """
        shape = (columns, self.rank)
        if before is None or tuple(before.shape) != shape:
            before = torch.zeros(shape)
        before = before.to("cpu", torch.float64)
        lengths = _lengths(before)
        usable = (lengths > 0) & lengths.isfinite()
        if not bool(usable.all()):
            generator = torch_generator(self.seed, f"powersgd:{name}")
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            before = torch.where(usable, before, drawn)
            lengths = _lengths(before)
        return before / lengths

    def _unpack(self, packed: Tensors, shapes: Shapes) -> Iterator[tuple[str, torch.Tensor]]:
        lefts, rights = (
            self._factors(packed[key], shapes, i) for i, key in enumerate((LEFT, RIGHT))
        )
        for name in shapes:
            yield name, lefts[name] @ rights[name].T

    def _factors(self, flat: torch.Tensor, shapes: Shapes, side: int) -> Tensors:
        """Return the factors [d_side, R] by entry."""
        sizes = [self.rank * _matrix(shape)[side] for shape in shapes.values()]
        parts = zip(shapes, torch.split(flat, sizes), strict=True)
        return {name: part.reshape(-1, self.rank) for name, part in parts}

    def memory(self, wire: Mapping[str, torch.Tensor], layout: Layout) -> Tensors:
        """Return the right factors, which the next round's iteration starts from."""
        shapes = self._packed_shapes(layout)
        return self._factors(wire[RIGHT], shapes, 1) if shapes else {}


def _lengths(columns: torch.Tensor) -> torch.Tensor:
    """Return the lengths [1, R] of columns, as a matrix product: see :func:`orthonormalise`."""
    return (columns.new_ones(1, len(columns)) @ columns.square()).sqrt()


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of a tensor as a matrix."""
    return shape[0], math.prod(shape[1:])
