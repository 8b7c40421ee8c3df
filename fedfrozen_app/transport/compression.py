"""Upload compression: ``none | int8 | int4 | topk:F | powersgd:R``, and error feedback.

What a trained tensor of n values takes, in bytes; d_0 d_1 = n as a matrix:

========== ======= ========================= ===================
codec      of      bytes                     where
========== ======= ========================= ===================
int8       weights n + 8                     :mod:`.quantise`
int4       weights ceil(n / 2) + 8           :mod:`.quantise`
topk:F     update  8 ceil(F n)               :mod:`.top_k`
powersgd:R update  4 R (d_0 + d_1), or as is :mod:`.low_rank`
========== ======= ========================= ===================

Buffers that are not trained always travel as they are.
"""

import math
from collections.abc import Mapping

import torch

from fedfrozen_app.models.entries import wide
from fedfrozen_app.transport.codec import (
    NOTHING,
    Codec,
    Layout,
    Tensors,
    dtype_of,
    layout_of_tensors,
)
from fedfrozen_app.transport.codec_name import read_codec_name
from fedfrozen_app.transport.low_rank import PowerSGD
from fedfrozen_app.transport.payload import from_namespaces, to_namespaces
from fedfrozen_app.transport.quantise import Integers
from fedfrozen_app.transport.top_k import TopK

__all__ = ["Codec", "Integers", "PowerSGD", "TopK", "parse_codec", "payload_bytes", "with_feedback"]

START = "start"  # the namespace, in a client's state, of what the next encode goes on from


def parse_codec(
    text: str, *, seed: int = 0, untrained: frozenset[str] = frozenset()
) -> Codec | None:
    """Return the codec that a value of ``compression`` names, None for ``none``.

    ``seed`` is that of PowerSGD's first factors; entries named in ``untrained`` travel as they are.

    Raises
    ------
    ValueError
        As :func:`.codec_name.read_codec_name`.
    """
    kind, number = read_codec_name(text)
    if kind == "topk":
        return TopK(number, untrained=untrained)
    if kind == "powersgd":
        return PowerSGD(int(number), seed, untrained=untrained)
    return Integers(int(number), untrained=untrained) if kind == "int" else None


def with_feedback(
    codec: Codec,
    delta: Mapping[str, torch.Tensor],
    residual: Mapping[str, torch.Tensor] = NOTHING,
    layout: Layout | None = None,
) -> tuple[Tensors, Tensors]:
    """Encode an update and what earlier ones left over: e <- delta + e - decode(encode(delta + e)).

    Parameters
    ----------
    codec : Codec
        One of updates.
    delta : mapping of str to Tensor
        y - x of the trained entries, and y of the others.
    residual : mapping of str to Tensor
        What the sender's previous call returned: e by entry, and under ``start/NAME`` what the
        codec goes on from. What is missing is zero.
    layout : Layout, optional
        Of the model, where ``delta`` is wider; the receiver decodes with it.

    Returns
    -------
    wire : dict of str to Tensor
        What to send; what is not packed may share the memory of ``delta``.
    residual : dict of str to Tensor
        What to keep; e has the precision of ``delta``, and fp32 at least.

    Raises
    ------
    ValueError
        If a residual has another shape than its entry, and as :meth:`Codec.encode`.
    """
    layout = layout_of_tensors(delta) if layout is None else layout
    errors, extra = from_namespaces(residual, (START,))
    total = {
        name: _sum(name, delta[name].detach(), errors.get(name))
        for name in codec.trained_names(layout)
    }
    sent = {
        name: total.get(name, tensor).to(dtype_of(name, layout[name][1]))
        for name, tensor in delta.items()
    }
    wire = codec.encode(sent, extra.get(START, {}))
    arrived = codec.decode(wire, layout)
    left = {name: value - arrived[name] for name, value in total.items()}
    return wire, {**left, **to_namespaces({START: codec.memory(wire, layout)})}


def _sum(name: str, delta: torch.Tensor, error: torch.Tensor | None) -> torch.Tensor:
    if error is None:
        return wide(delta)
    if error.shape != delta.shape:
        raise ValueError(
            f"the residual of {name!r} must have the shape {list(delta.shape)} of its update, "
            f"got {list(error.shape)}; carry it through the selection first"
        )
    return wide(delta) + error.to(delta.device)


def payload_bytes(layout: Layout, codec: Codec | None) -> int:
    """Return the bytes of the arrays that entries of a layout are sent as, framing not counted."""
    wire = layout if codec is None else codec.wire_layout(layout)
    return sum(
        math.prod(shape) * dtype_of(name, dtype).itemsize for name, (shape, dtype) in wire.items()
    )
