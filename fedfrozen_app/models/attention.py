"""Which rows of which state-dict entry are query, key and value.

FedFrozen (arXiv:2605.06446) splits the parameters into the attention kernel
``Phi = {W_Q, W_K and their biases}`` and the rest, so the split needs to know where each
library keeps them. Entries are told by name AND shape, never by running the model:

====================================  ===========================================  ==============
library                               entries                                      layout
====================================  ===========================================  ==============
timm, torchvision Swin, HF SAM/BLIP   ``attn.qkv.weight`` [3d, n], ``.bias`` [3d]  rows q; k; v
timm BEiT, EVA, Swin V2               ``attn.qkv.weight``, ``q_bias``, ``v_bias``  rows q; k; v
timm PVT v2, Twins, VOLO              ``attn.q``, ``attn.kv`` [2d, n]              rows k; v
torch ``nn.MultiheadAttention``       ``in_proj_weight`` [3d, d], ``in_proj_bias``   rows q; k; v
HF GPT-2 (``Conv1D``)                 ``c_attn.weight`` [d, 3d], ``.bias`` [3d]    columns q, k, v
HF BERT, ViT; Llama; T5; ...          ``query/key/value``, ``q_proj/...``, ``q/k/v``  whole entries
====================================  ===========================================  ==============

Layouts that names and shapes do not settle are refused with the reason: GPT-NeoX, Bloom and
Falcon (``query_key_value``) and the LeViT family interleave q, k and v by head.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

ROLES = ("query", "key", "value")


class HasShape(Protocol):
    """Anything with a shape: a tensor (meta too), an ndarray, a safetensors slice."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the sizes by dimension."""
        ...


class Rows(NamedTuple):
    """The slice ``start:stop`` of one entry along ``dim`` (0 = rows, 1 = columns)."""

    dim: int
    start: int
    stop: int


@dataclass
class Attention:
    """Where query, key and value lie.

    Attributes
    ----------
    rows : dict[str, dict[str, Rows]]
        By entry name, then by role. Biases and query/key norms are in it too.
    value_weights : dict[str, Rows]
        W_V by entry name: matrices only, no biases.
    refused : dict[str, str]
        Entries that hold q, k and v in a layout that cannot be told, with the reason.
    modules : set[str]
        Prefixes of the attention modules that were found.
    """

    rows: dict[str, dict[str, Rows]] = field(default_factory=dict)
    value_weights: dict[str, Rows] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)


# Siblings of separate projections; all three must exist beside each other.
_SEPARATE = (
    ("q", "k", "v"),
    ("query", "key", "value"),
    ("q_proj", "k_proj", "v_proj"),
    ("q_lin", "k_lin", "v_lin"),
    ("query_proj", "key_proj", "value_proj"),
    ("q_proj_weight", "k_proj_weight", "v_proj_weight"),
    ("query_global", "key_global", "value_global"),
    ("to_q", "to_k", "to_v"),
    ("linear_q", "linear_k", "linear_v"),
    ("wq", "wk", "wv"),
)
_THIRDS = ("qkv", "to_qkv", "qkv_linear", "Wqkv", "in_proj_weight", "in_proj_bias")
# Fused pairs: name, roles of its halves, name of the missing third beside it and its role.
_HALVES = (
    ("kv", ("key", "value"), "q", "query"),
    ("to_kv", ("key", "value"), "to_q", "query"),
    ("qk", ("query", "key"), "v", "value"),
    ("c_attn", ("key", "value"), "q_attn", "query"),  # GPT-2 cross-attention
)
# Small entries beside a projection that shape the queries, keys or values too.
_EXTRAS = {
    "query": ("q_bias", "q_norm", "norm_q", "pool_q", "pos_query_proj"),
    "key": ("k_bias", "bias_k", "k_norm", "norm_k", "pool_k", "pos_key_proj"),
    "value": ("v_bias", "bias_v", "v_norm", "norm_v", "pool_v"),
}
_OUTPUT_PROJECTIONS = ("proj", "out_proj", "o_proj", "projection", "Wo", "to_out.0")
_FUSED_NAME = re.compile(r"(^|_)w?qkv|(^|_)kv(_|$)|^query_key_value$|^c_attn$|^att_proj$", re.I)
_LIKE = re.compile(r"atte?n|quer(y|ies)|qkv|(?<![a-z])(w?[qkv]|qk|kv|keys?|values?)(?![a-z])", re.I)

_BY_HEAD = "GPT-NeoX, Bloom and Falcon interleave query, key and value by head"
_LEVIT = "the LeViT family interleaves query, key and value by head"
_MAXVIT = "timm's MaxViT interleaves them by head or not depending on its configuration"
_UNKNOWN = "it fuses them in a layout that its name and shape do not settle"


def is_like_attention(name: str) -> bool:
    """Whether an entry's name, or a pattern's text, sounds like a part of attention."""
    return _LIKE.search(name) is not None


def find_attention(entries: Mapping[str, HasShape]) -> Attention:
    """Return where query, key and value lie in a state dict's entries.

    Parameters
    ----------
    entries : Mapping[str, HasShape]
        Every entry of the state dict by name.
    """
    shapes = {name: tuple(entry.shape) for name, entry in entries.items()}
    tree: dict[str, set[str]] = defaultdict(set)
    for name in shapes:
        for parent, child, _ in _splits(name):
            tree[parent].add(child)
    found = Attention()
    for name in shapes:
        _place(found, name, shapes, tree)
    _place_extras(found, shapes)
    return found


def _splits(name: str) -> Iterator[tuple[str, str, str]]:
    """Yield every reading of a name as (parent, child, rest): a.b.c -> ('', a, b.c), (a, b, c)."""
    parts = name.split(".")
    for i, child in enumerate(parts):
        yield ".".join(parts[:i]), child, ".".join(parts[i + 1 :])


def _place(
    found: Attention,
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    tree: Mapping[str, set[str]],
) -> None:
    shape = shapes[name]
    for parent, child, rest in _splits(name):
        siblings = tree[parent]
        if role := _separate(parent, child, shapes, siblings):
            _add(found, name, shape, 0, (role,))
            found.modules.add(parent)
            return
        is_tensor = rest in ("weight", "bias") or child.startswith("in_proj_")
        if is_tensor and (layout := _fused(parent, child, shapes, siblings)):
            dim, roles = layout
            _add(found, name, shape, dim if len(shape) == 2 else 0, roles)
            found.modules.add(parent)
            return
        if reason := _refusal(parent, child, siblings):
            found.refused[name] = reason
            return


def _add(
    found: Attention, name: str, shape: tuple[int, ...], dim: int, roles: tuple[str, ...]
) -> None:
    """Give each role its equal share of the entry along ``dim``."""
    size = shape[dim] // len(roles) if shape else 1
    rows = {role: Rows(dim, i * size, (i + 1) * size) for i, role in enumerate(roles)}
    found.rows[name] = rows
    if "value" in rows and len(shape) >= 2:
        found.value_weights[name] = rows["value"]


def _separate(
    parent: str, child: str, shapes: Mapping[str, tuple[int, ...]], siblings: set[str]
) -> str | None:
    """Return the role of a projection that holds only one of q, k and v."""
    for names in _SEPARATE:
        if child in names and siblings.issuperset(names):
            return ROLES[names.index(child)]
    for pair, _, third, role in _HALVES:
        if child == third and pair in siblings and _fused(parent, pair, shapes, siblings):
            return role
    return None


def _fused(
    parent: str, child: str, shapes: Mapping[str, tuple[int, ...]], siblings: set[str]
) -> tuple[int, tuple[str, ...]] | None:
    """Return (dim, roles in storage order) of a fused projection whose layout is sure."""
    path = f"{parent}.{child}" if parent else child
    prefix = f"{parent}." if parent else ""
    if child == "in_proj_bias":
        weight = shapes.get(f"{prefix}in_proj_weight")
        size = shapes[path][0]
        return (0, ROLES) if size % 3 == 0 and (not weight or weight[0] == size) else None
    weight = shapes.get(path if child == "in_proj_weight" else f"{path}.weight")
    if weight is None or len(weight) != 2:
        return None
    rows, columns = weight
    if child == "c_attn":
        # Only Conv1D: a Linear c_attn [3d, d] is thirds in nanoGPT, by head in GPTBigCode.
        if columns == 3 * rows:
            return 1, ROLES
        is_pair = columns == 2 * rows and "q_attn" in siblings
        return (1, ("key", "value")) if is_pair else None
    if child in _THIRDS:
        if rows % 3 or _refusal(parent, child, siblings) != _UNKNOWN:
            return None
        outputs = (shapes.get(f"{prefix}{out}.weight") for out in _OUTPUT_PROJECTIONS)
        # The output projection reads what the values wrote: d columns beside 3d rows.
        expected = next((out[1] for out in outputs if out and len(out) == 2), columns)
        return (0, ROLES) if rows == 3 * expected else None
    for name, roles, third, _ in _HALVES:
        other = shapes.get(f"{prefix}{third}.weight")
        if child == name and other and rows == 2 * other[0]:
            return 0, roles
    return None


def _refusal(parent: str, child: str, siblings: set[str]) -> str | None:
    """Return why an entry that fuses q, k and v cannot be told apart; None if it fuses none."""
    if child == "in_proj" and "q_bias" in siblings:
        return "DeBERTa interleaves query, key and value by head"
    # Norms of fused projections (kv_norm, kv_a_layernorm) hold no rows to tell apart.
    if "norm" in child or not (_FUSED_NAME.search(child) or child in _THIRDS):
        return None
    if child == "query_key_value":
        return _BY_HEAD
    if "attention_biases" in siblings:
        return _LEVIT
    if {"attn_block", "attn_grid"} & set(parent.split(".")):
        return _MAXVIT
    return _UNKNOWN


def _place_extras(found: Attention, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Add biases and norms of queries, keys and values that lie beside a projection."""
    for name, shape in shapes.items():
        if name in found.rows or name in found.refused or not shape:
            continue
        for parent, child, _ in _splits(name):
            for role, extras in _EXTRAS.items():
                if child in extras and parent in found.modules:
                    found.rows[name] = {role: Rows(0, 0, shape[0])}


def value_rows(entries: Mapping[str, HasShape]) -> dict[str, Rows]:
    """Return where W_V lies, by entry: weights only, no biases.

    Raises
    ------
    ValueError
        Where no entry holds values, or one holds them in an unknown layout.
    """
    found = find_attention(entries)
    if found.refused:
        name, reason = next(iter(found.refused.items()))
        raise ValueError(
            f"cannot tell the value rows of {name!r} {list(entries[name].shape)}: {reason}; "
            "set value-l2=0"
        )
    if not found.value_weights:
        raise ValueError(
            f"no value weights (W_V) among the {len(entries)} entries; set value-l2=0 or use "
            "a model with attention"
        )
    return found.value_weights
