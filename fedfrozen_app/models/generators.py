"""Frozen factors U with orthonormal columns, made from a seed, that turn r numbers into weights.

FLITE (arXiv:2607.18343, Eq. 3) moves a layer's weights by ``U V^T z`` with frozen factors
U [P, r] and V [d, r] that every client makes again from one seed (Sec. 3.4). ``gaussian-qr``
is the paper's U, a Gaussian draw G [P, r] orthonormalised by QR:

    G = U R,  G^T G = R^T R (Cholesky),  U = G R^-1

R is taken with a positive diagonal, which makes U unique, and only R^-1 [r, r] is kept: both
``U w = G (R^-1 w)`` and ``U^T g = R^-T (G^T g)`` stream over blocks of G, which are either
stored or drawn again each time. Entries of G are 16-bit quantiles of the normal distribution
scaled to integers: sums of their products are exact in float64 in whatever order a BLAS adds
them, and what follows is element by element, so the factors have the same bits on every
machine, for any number of threads.

``sketch`` replaces G by a random assignment of each weight to ONE of the r columns with a
sign. Columns with disjoint support are orthogonal however it is drawn, so U is exactly
orthonormal after scaling by 1/sqrt(count), costs one pass over the weights instead of r, and
is never stored. It has a structure that makes the pass fast. For weights [d0, d1]

    column(i, j) = (h_i + k_j) mod r,  sign(i, j) = a_i b_j,  (U w)_ij = B[rows_i, columns_j]

with B [2r, 2r] a small signed circulant of w. With pi and rho random permutations,
``k_j = rho_j mod r`` and ``h_i = (pi_i d1 + floor(pi_i gcd(d1, r) / r)) mod r``: rows in the
order of pi continue each other's columns cyclically, and each time they have come round they
shift by one. Hence every column holds floor(P/r) or ceil(P/r) weights, and rows differ even
where r divides d1. Signs and columns are not independent between the corners of a rectangle
of weights, which orthonormality and the averaging identity do not ask for.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedfrozen_app.seeds import numpy_generator, torch_generator

Generator = Literal["gaussian-qr", "sketch"]
Memory = Literal["stored", "regenerated"]

# Entries of G drawn at once, a block that a core's cache can hold. Blocks have random streams
# of their own: another size would make other factors of the same seed.
BLOCK_ENTRIES = 2**19
# Entries worked on at once within a block, a multiple of 4; changes no factor.
BLOCK_WEIGHTS = 2**16
QUANTILE_SCALE = 4096


class Columns(ABC):
    """A frozen factor U [P, r] with orthonormal columns for weights of one shape.

    Parameters
    ----------
    shape : tuple[int, ...]
        Shape of the weights; P is their number.
    rank : int
        r, at most P.

    Raises
    ------
    ValueError
        For a rank outside 1..P.
    """

    def __init__(self, shape: tuple[int, ...], rank: int) -> None:
        self.size = math.prod(shape)
        if not 1 <= rank <= self.size:
            raise ValueError(
                f"rank must be 1..{self.size} for {self.size} weights {list(shape)}, got {rank}; "
                "orthonormal columns cannot be more than their entries"
            )
        self.shape, self.rank = shape, rank
        self.num_rows = shape[0]
        self.row_size = self.size // self.num_rows

    @abstractmethod
    def expand(self, coefficients: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield U w [rows, P / d0] by blocks of rows of the weights, for w [r]."""

    @abstractmethod
    def contract(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Return U^T g [r] for g in the shape of the weights."""

    @torch.no_grad()
    def write_(self, out: Tensor, base: Tensor, coefficients: Tensor) -> None:
        """Set ``out`` to ``base + U w``, both in the shape of the weights and of any strides.

        With w = 0 it is a copy bit for bit: blocks of zeros are -0.0, and x + -0.0 is x for
        every x, while -0.0 + 0.0 would be 0.0.
        """
        for rows, block in self.expand(coefficients):
            torch.add(base[rows], block.view(-1, *self.shape[1:]), out=out[rows])

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return U [P, r] as a matrix, for looking at it."""
        units = torch.eye(self.rank, dtype=dtype)
        return torch.stack(
            [torch.cat([block.flatten() for _, block in self.expand(unit)]) for unit in units],
            dim=1,
        )


def make_columns(
    generator: Generator,
    shape: tuple[int, ...],
    rank: int,
    *,
    seed: int,
    name: str,
    memory: Memory = "stored",
    device: str | torch.device = "cpu",
) -> Columns:
    """Return the factor U of one tensor, the same bits for the same seed, name and shape."""
    if generator == "sketch":
        return SketchColumns(shape, rank, seed=seed, name=name, device=device)
    return GaussianColumns(shape, rank, seed=seed, name=name, memory=memory, device=device)


# --- gaussian-qr ------------------------------------------------------------------------
class GaussianColumns(Columns):
    """U = G R^-1 of a Gaussian G [P, r]; ``regenerated`` draws G again in every pass.

    Stored, G takes 2 P r bytes. Regenerated, a pass needs about 10 MB, or 14 r times the
    weights of one row where that is more. Both do the same arithmetic on the same blocks.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        rank: int,
        *,
        seed: int,
        name: str,
        memory: Memory = "stored",
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__(shape, rank)
        self.seed, self.purpose, self.device = seed, f"latent-columns/{name}", device
        self.block_rows = max(1, BLOCK_ENTRIES // (rank * self.row_size))
        self.stored: list[Tensor] | None = None
        gram = torch.zeros(rank, rank, dtype=torch.float64)
        blocks = []
        for _, block in self._draws():
            for part in torch.split(block, max(1, BLOCK_WEIGHTS // rank)):
                exact = part.double()
                gram += exact.t() @ exact
            if memory == "stored":
                blocks.append(block.to(device, copy=True))
        self.stored = blocks if memory == "stored" else None
        self.inverse_t = whiten(gram, torch.eye(rank, dtype=torch.float64)).to(device)

    def _draws(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield G by blocks of rows of the weights, int16 [weights, r], in one buffer."""
        buffer = np.empty(self._buffer_size, np.int16)
        for i, start in enumerate(range(0, self.num_rows, self.block_rows)):
            stop = min(start + self.block_rows, self.num_rows)
            drawn = buffer[: (stop - start) * self.row_size * self.rank]
            draw_normal_(drawn, self.seed, self.purpose, i)
            yield slice(start, stop), torch.from_numpy(drawn).view(-1, self.rank)

    def _blocks(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Yield G by blocks of rows of the weights [weights, r] in ``dtype``, in one buffer."""
        buffer = torch.empty(self._buffer_size, dtype=dtype, device=self.device)
        starts = range(0, self.num_rows, self.block_rows)
        slices = (slice(start, start + self.block_rows) for start in starts)
        blocks = self._draws() if self.stored is None else zip(slices, self.stored, strict=True)
        for rows, block in blocks:
            yield rows, buffer[: block.numel()].view(block.shape).copy_(block)

    @property
    def _buffer_size(self) -> int:
        # Of one size for all tensors: holes of many sizes would add up in the heap.
        return max(BLOCK_ENTRIES, self.row_size * self.rank)

    def expand(self, coefficients: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield G (R^-1 w) by blocks."""
        mixed = (self.inverse_t.t() @ coefficients.double()).to(coefficients.dtype)
        for rows, block in self._blocks(mixed.dtype):
            weights = block @ mixed
            yield rows, weights.masked_fill_(weights == 0, -0.0).view(-1, self.row_size)

    def contract(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Return R^-T (G^T g)."""
        total = torch.zeros(self.rank, dtype=torch.float64, device=gradient.device)
        for rows, block in self._blocks(dtype):
            total += block.t() @ gradient[rows].reshape(-1).to(dtype)
        return (self.inverse_t @ total).to(dtype)


@functools.cache
def quantiles() -> npt.NDArray[np.int16]:
    """Return 2^16 equally likely values of the normal distribution times 4096, rounded."""
    middles = (torch.arange(2**16, dtype=torch.float64) + 0.5) / 2**16
    values: npt.NDArray[np.int16] = (
        (QUANTILE_SCALE * torch.special.ndtri(middles)).round().short().numpy()
    )
    return values


def draw_normal_(out: npt.NDArray[np.int16], seed: int, purpose: str, index: int = 0) -> None:
    """Fill ``out`` [n] with normal draws times 4096 from a generator's raw 64-bit words."""
    words = numpy_generator(seed, purpose, index).bit_generator
    for start in range(0, len(out), BLOCK_WEIGHTS):
        part = out[start : start + BLOCK_WEIGHTS]
        drawn = words.random_raw(-(-len(part) // 4))
        # Least significant 16 bits first, on machines of either byte order.
        halves = drawn.astype("<u8", copy=False).view("<u2")[: len(part)]
        quantiles().take(halves, out=part, mode="clip")


def whiten(gram: Tensor, rows: Tensor) -> Tensor:
    """Return R^-T ``rows`` [r, m] for gram = R^T R [r, r] with R upper, its diagonal positive.

    Elimination instead of LAPACK: products, differences, quotients and square roots of single
    elements round alike everywhere.

    Raises
    ------
    ValueError
        When the columns that ``gram`` belongs to are linearly dependent.
    """
    table = torch.cat([gram, rows], dim=1)
    for j in range(len(gram)):
        pivot = float(table[j, j])
        if not pivot > 1e-12 * float(gram[j, j]):
            raise ValueError(f"column {j} of {len(gram)} drawn is dependent; use another seed")
        table[j, j:] /= math.sqrt(pivot)
        table[j + 1 :, j:] -= table[j, j + 1 : len(gram), None] * table[j, j:]
    return table[:, len(gram) :]


def orthonormal_rows(rank: int, dim: int, *, seed: int, name: str) -> Tensor:
    """Return V^T [r, d] in fp32, V = Q of the QR of a Gaussian [d, r]; needs d >= r."""
    if not 1 <= rank <= dim:
        raise ValueError(f"rank must be 1..{dim} for latents of {dim} entries, got {rank}")
    integers = np.empty(dim * rank, np.int16)
    draw_normal_(integers, seed, f"latent-basis/{name}")
    drawn = torch.from_numpy(integers).view(dim, rank).double()
    return whiten(drawn.t() @ drawn, drawn.t()).float()


# --- sketch -----------------------------------------------------------------------------
class SketchColumns(Columns):
    """U with one entry +-1/sqrt(count) in every row; it keeps d0 + d1 positions."""

    def __init__(
        self,
        shape: tuple[int, ...],
        rank: int,
        *,
        seed: int,
        name: str,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__(shape, rank)
        generator = torch_generator(seed, f"latent-sketch/{name}")
        row_places = torch.randperm(self.num_rows, generator=generator)
        places = torch.randperm(self.row_size, generator=generator)
        row_signs = torch.randint(2, (self.num_rows,), generator=generator)
        signs = torch.randint(2, (self.row_size,), generator=generator)
        period = rank // math.gcd(self.row_size, rank)
        shifts = (row_places * self.row_size + row_places // period) % rank
        counts = torch.bincount(shifts, minlength=rank)[None] * torch.bincount(
            places % rank, minlength=rank
        ).unsqueeze(1)
        sums = torch.arange(rank)[:, None] + torch.arange(rank)
        sizes = torch.zeros(rank, dtype=torch.int64)
        sizes.index_add_(0, (sums % rank).flatten(), counts.flatten())
        self.sums = (sums % rank).to(device)
        self.scale = sizes.double().sqrt().reciprocal().to(device)
        self.rows = (shifts + rank * row_signs).to(device)
        self.columns = (places % rank + rank * signs).to(device)

    def expand(self, coefficients: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield B[rows_i, columns_j] by blocks."""
        scaled = coefficients * self.scale.to(coefficients.dtype)
        circulant = scaled[self.sums]
        signed = torch.cat([torch.cat([circulant, -circulant], 1)] * 2)
        signed[self.rank :].neg_()
        signed.masked_fill_(signed == 0, -0.0)
        table = signed.index_select(1, self.columns)
        step = max(1, BLOCK_WEIGHTS // self.row_size)
        for start in range(0, self.num_rows, step):
            rows = slice(start, start + step)
            yield rows, table.index_select(0, self.rows[rows])

    def contract(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Return U^T g: rows of one kind are added up, then columns of one kind."""
        r = self.rank
        flat = gradient.reshape(self.num_rows, self.row_size).to(dtype)
        by_row = flat.new_zeros(2 * r, self.row_size).index_add_(0, self.rows, flat)
        folded = by_row[:r] - by_row[r:]
        kinds = self.columns.expand(r, -1)
        by_column = flat.new_zeros(r, 2 * r).scatter_add_(1, kinds, folded)
        corners = by_column[:, :r] - by_column[:, r:]
        total = flat.new_zeros(r).index_add_(0, self.sums.flatten(), corners.flatten())
        return total * self.scale.to(dtype)
