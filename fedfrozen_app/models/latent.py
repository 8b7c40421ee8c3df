"""Weights as a frozen base plus a fixed linear image of a few trainable latents (FLITE).

For every mapped weight tensor l (arXiv:2607.18343, Eq. 3)

    theta_l = theta_l^pre + U_l V_l^T z_l,   U_l [P_l, r], V_l [d, r] frozen and orthonormal

only z_l [d] trains and travels. With the same base and factors everywhere the map is affine,
so averaging latents IS averaging weights (Eq. 4): ``mean_k theta(z_k) = theta(mean_k z_k)``.

>>> mapping = LatentMapping(Selection.build("query-key", state_dict), seed=1)
>>> freeze_(model, mapping.selection)  # biases, norms and the head stop training too
>>> training = LatentTraining(mapping, model, mapping.flat_zero())
>>> optimizer = torch.optim.Adam(training.parameters().values(), lr=1e-2)
>>> loss.backward(); training.gather(); optimizer.step(); training.scatter()

Gradients are projected, ``dF/dz_l = V_l U_l^T dF/dtheta_l`` (the chain rule for Eq. 3), so the
model runs on plain weights and no graph leads through U. The factors are in
:mod:`fedfrozen_app.models.generators`.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedfrozen_app.models.freeze import trainable_parameters
from fedfrozen_app.models.generators import (
    Columns,
    Generator,
    Memory,
    make_columns,
    orthonormal_rows,
)
from fedfrozen_app.models.patterns import HEADS
from fedfrozen_app.models.selection import Entry, Selection

_NO_LAYER = re.compile(r"norm|^ln|^bn")
_LOOKUP = re.compile(r"emb|^wte$|^wpe$|^shared$|^relative_attention_bias$")


@dataclass(frozen=True)
class MappedTensor:
    """One mapped weight: the active slice of an entry.

    Attributes
    ----------
    key : str
        As in ``trainable_parameters``: the entry's name, or ``name#1`` for a further slice.
    entry : Entry
        The entry it is a slice of.
    start, stop : int
        The slice, along ``entry.dim``.
    latent : slice
        Where z_l lies in the flat latent.
    columns : Columns
        U_l [P_l, r].
    basis_t : Tensor
        V_l^T [r, d].
    """

    key: str
    entry: Entry
    start: int
    stop: int
    latent: slice
    columns: Columns
    basis_t: Tensor

    def view(self, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return the slice of whole arrays, or the active tensor under its key.

        Raises
        ------
        ValueError
            Where neither is there in the right shape and a floating-point type.
        """
        found = arrays.get(self.key)
        if found is None or found.shape != self.columns.shape:
            found = arrays.get(self.entry.name)
            if found is None or found.shape != self.entry.shape:
                raise ValueError(
                    f"mapped weight {self.key!r} must be there as {list(self.columns.shape)} or "
                    f"within {self.entry.name!r} {list(self.entry.shape)}, got "
                    f"{None if found is None else list(found.shape)}; use the mapping's own model"
                )
            found = found.narrow(self.entry.dim, self.start, self.stop - self.start)
        if not found.is_floating_point():
            raise ValueError(
                f"mapped weight {self.key!r} must be floating point, got {found.dtype}"
            )
        return found.detach()

    def write_(self, out: Tensor, base: Tensor, latent: Tensor) -> None:
        """Set ``out`` to base + U_l V_l^T z_l for the flat latent z."""
        part = latent.detach()[self.latent]
        self.columns.write_(out, base, self.basis_t.to(part.dtype) @ part)

    def project(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Return V_l U_l^T g [d]."""
        return self.basis_t.to(dtype).t() @ self.columns.contract(gradient, dtype)


class LatentMapping:
    """The fixed affine map from one flat latent z [D] to the mapped weights of a model.

    Mapped are the weight tensors of linear, convolution and attention layers, as far as they
    train under ``selection``; told by name and shape, so that a server without the model maps
    the same ones. Biases, norms, embeddings and the head are not. Each tensor has ``dim``
    latents, in the library's order. A weight with several active ranges counts as several
    tensors. The rank of a tensor with fewer weights than ``rank`` is their number.

    Parameters
    ----------
    selection : Selection
        What trains; a weight that is partly frozen is mapped on its active slices only.
    dim : int
        d, latents per mapped tensor.
    rank : int
        r, columns of the factors.
    generator : {"gaussian-qr", "sketch"}
        How U is made.
    seed : int
        Any integer, usually of 64 bits; with the same one the factors have the same bits.
    memory : {"stored", "regenerated"}
        Whether gaussian-qr keeps its draws (2 P r bytes) or draws again in every pass. The
        sketch keeps nothing to speak of either way.
    head : str
        Prefix of the head's names, where it is not a usual one.
    device : str or torch.device
        Where the weights are.

    Raises
    ------
    ValueError
        For dim or rank below 1, rank above dim, or a selection that leaves nothing to map.
    """

    def __init__(
        self,
        selection: Selection,
        *,
        dim: int = 64,
        rank: int = 32,
        generator: Generator = "gaussian-qr",
        seed: int = 0,
        memory: Memory = "stored",
        head: str = "",
        device: str | torch.device = "cpu",
    ) -> None:
        if not 1 <= rank <= dim:
            raise ValueError(
                f"latent-rank must be 1..latent-dim, got rank {rank} and dim {dim}; a factor V "
                f"of {dim} rows has at most {dim} orthonormal columns"
            )
        entries = mapped_entries(selection, head)
        self.dim, self.rank, self.seed = dim, rank, seed
        self.generator, self.memory = generator, memory
        self.device = torch.device(device)
        self.tensors = tuple(self._tensor(i, *s) for i, s in enumerate(_slices(entries)))
        self.selection = _only(selection, entries)

    def _tensor(self, index: int, key: str, entry: Entry, start: int, stop: int) -> MappedTensor:
        shape = entry.part_shape(((start, stop),))
        rank = min(self.rank, math.prod(shape))
        columns = make_columns(
            self.generator,
            shape,
            rank,
            seed=self.seed,
            name=key,
            memory=self.memory,
            device=self.device,
        )
        basis_t = orthonormal_rows(rank, self.dim, seed=self.seed, name=key).to(self.device)
        latent = slice(index * self.dim, (index + 1) * self.dim)
        return MappedTensor(key, entry, start, stop, latent, columns, basis_t)

    @property
    def size(self) -> int:
        """Return D, the length of the flat latent."""
        return self.dim * len(self.tensors)

    @property
    def num_weights(self) -> int:
        """Return how many weights the latent moves."""
        return sum(tensor.columns.size for tensor in self.tensors)

    def describe(self) -> str:
        """Return one line: weights, tensors, latents and how many times fewer they are."""
        return (
            f"{self.num_weights:,} weights in {len(self.tensors)} tensors by {self.size:,} "
            f"latents ({self.num_weights / self.size:,.0f}x fewer), generator={self.generator}"
        )

    def flat_zero(self) -> Tensor:
        """Return the latent of the base itself, fp32 [D]."""
        return torch.zeros(self.size, device=self.device)

    def views(self, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mapped slices by key, as views of whole arrays or of active ones."""
        return {tensor.key: tensor.view(arrays) for tensor in self.tensors}

    def apply_(self, arrays: Mapping[str, Tensor], base: Mapping[str, Tensor], z: Tensor) -> None:
        """Write theta(z) into ``arrays``: the mapped weights, nothing else.

        Both mappings are a whole state dict or what ``trainable_parameters`` gives, and may
        not share memory. With z = 0 the weights are the base's bit for bit.

        Raises
        ------
        ValueError
            For a latent of the wrong shape or mapped weights that are missing.
        """
        self._check(z)
        for tensor in self.tensors:
            tensor.write_(tensor.view(arrays), tensor.view(base), z)

    def delta(self, z: Tensor) -> dict[str, Tensor]:
        """Return U_l V_l^T z_l by key, in the shapes of the weights and the type of z."""
        self._check(z)
        deltas = {t.key: z.new_zeros(t.columns.shape) for t in self.tensors}
        for tensor in self.tensors:
            tensor.write_(deltas[tensor.key], deltas[tensor.key], z)
        return deltas

    def project(self, gradients: Mapping[str, Tensor | None], dtype: torch.dtype) -> Tensor:
        """Return dF/dz [D] for dF/dtheta by key; None, for an unused weight, is zero."""
        parts = [
            torch.zeros(self.dim, dtype=dtype, device=self.device)
            if (gradient := gradients[tensor.key]) is None
            else tensor.project(gradient, dtype)
            for tensor in self.tensors
        ]
        return torch.cat(parts)

    def _check(self, z: Tensor) -> None:
        if z.shape != (self.size,) or not z.is_floating_point():
            raise ValueError(
                f"latent must be floating point [{self.size}], got {z.dtype} {list(z.shape)}; use "
                "the mapping it was trained with"
            )


class LatentTraining:
    """What a local loop trains instead of a model's weights: the one flat latent.

    ``gather`` after the backward pass, ``scatter`` after the optimiser's step; in between the
    latent is a parameter like any other, for hooks, clipping and the optimiser.

    Parameters
    ----------
    mapping : LatentMapping
        The map.
    model : nn.Module
        Frozen by ``mapping.selection``. Its weights are set to theta(z).
    z : Tensor
        Where to start, [D].
    base : Mapping[str, Tensor] or None
        theta^pre, read only: a whole state dict that does not share the model's memory. Without
        one the model's present weights are the base, and a copy of them is kept.

    Raises
    ------
    ValueError
        When the model trains anything else than the mapped weights.
    """

    def __init__(
        self,
        mapping: LatentMapping,
        model: nn.Module,
        z: Tensor,
        base: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.mapping = mapping
        self.weights = trainable_parameters(model)
        keys = [tensor.key for tensor in mapping.tensors]
        if wrong := set(keys) ^ set(self.weights):
            raise ValueError(
                f"{min(wrong)!r} is mapped or trains, but not both; freeze the model by the "
                "mapping's selection, and freeze tied weights"
            )
        if base is None:
            base = {key: self.weights[key].detach().clone() for key in keys}
        self.base = mapping.views(base)
        self.latent = nn.Parameter(z.detach().clone())
        self.scatter()

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return what trains, by name."""
        return {"latent": self.latent}

    def gather(self) -> None:
        """Add the projected gradients of the weights to the latent's and free them."""
        gradients = {key: weight.grad for key, weight in self.weights.items()}
        gradient = self.mapping.project(gradients, self.latent.dtype)
        for weight in self.weights.values():
            weight.grad = None
        self.latent.grad = gradient if self.latent.grad is None else self.latent.grad + gradient

    def scatter(self) -> None:
        """Set the model's weights to theta(z)."""
        self.mapping.apply_(self.weights, self.base, self.latent)


def identity_error(
    mapping: LatentMapping, base: Mapping[str, Tensor], zs: Sequence[Tensor]
) -> float:
    """Return max |mean_k theta(z_k) - theta(mean_k z_k)| over all mapped weights.

    Weights are made in the base's type, as clients and server hold them, and the mean over the
    K clients is taken in float64. What is left is the rounding of theta itself, at most one
    unit in the last place: 6e-8 for fp32 weights of magnitude 0.5 to 1, twice that up to 2. One
    tensor at a time, in the memory of a few copies of the largest one and K + 1 passes over
    the factors.

    Raises
    ------
    ValueError
        For no latents, or latents of the wrong shape.
    """
    if not len(zs):
        raise ValueError("identity_error needs the latents of at least one client, got none")
    for z in zs:
        mapping._check(z)
    center = torch.stack([*zs]).double().mean(0).to(zs[0].dtype)
    worst = 0.0
    for tensor in mapping.tensors:
        base_view = tensor.view(base)
        theta = torch.empty_like(base_view)
        mean = torch.zeros(theta.shape, dtype=torch.float64, device=theta.device)
        for z in zs:
            tensor.write_(theta, base_view, z)
            mean += theta
        tensor.write_(theta, base_view, center)
        worst = max(worst, float((mean.div_(len(zs)) - theta).abs().max()))
    return worst


# --- what is mapped ---------------------------------------------------------------------
def mapped_entries(selection: Selection, head: str = "") -> list[Entry]:
    """Return the entries that a map over a selection moves.

    Raises
    ------
    ValueError
        If there are none.
    """
    entries = [entry for entry in selection.entries if _is_mapped(entry, head)]
    if not entries:
        raise ValueError(
            f"frozen={selection.spec!r} leaves no weight of a linear or convolution layer to "
            "map; freeze less, for example frozen=query-key"
        )
    return entries


def _is_mapped(entry: Entry, head: str) -> bool:
    """Whether an entry is a layer's weight that trains, by its name and shape."""
    *path, name = entry.name.split(".")
    owner = path[-1] if path else ""
    prefix = head.removesuffix(".")
    in_head = (
        f"{entry.name}.".startswith(f"{prefix}.") if prefix else entry.name.split(".")[0] in HEADS
    )
    is_weight = name == "weight" or name.endswith("_proj_weight")
    return (
        is_weight
        and len(entry.shape) >= 2
        and math.prod(entry.shape) > 0
        and not entry.is_frozen
        and not in_head
        and not _NO_LAYER.search(owner)
        # A convolution that embeds patches may bear such a name; tables have two dimensions.
        and not (len(entry.shape) == 2 and _LOOKUP.search(owner))
    )


def _slices(entries: Sequence[Entry]) -> Iterator[tuple[str, Entry, int, int]]:
    """Yield (key, entry, start, stop) of every active slice."""
    for entry in entries:
        for key, (start, stop) in zip(entry.keys, entry.active, strict=True):
            yield key, entry, start, stop


def _only(selection: Selection, entries: Sequence[Entry]) -> Selection:
    """Return the selection under which only the given entries' active slices train."""
    kept = [f"!{e.name}" for e in entries if e.is_active]
    kept += [f"!{e.name}[{a}:{b}]" for e in entries if e.is_partial for a, b in e.active]
    shapes = {e.name: torch.empty(e.shape, device="meta") for e in selection.entries}
    if {e.name for e in entries if e.is_active} == set(shapes):
        return Selection.build("all", shapes)
    return Selection.build(", ".join(["*", *kept]), shapes)
