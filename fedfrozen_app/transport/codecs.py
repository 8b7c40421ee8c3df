"""The codecs of a run's two directions, and what messages say of them.

Down, the server encodes x and goes on from what the clients make of it. A message with an
encoded x names the codec and the layout, so a client reads it without knowing the model. Up,
clients encode their weights y or their update y - x (:mod:`fedfrozen_app.training.upload`); the
server knows what must come from the layout of x, and has y again before any rule sees it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from flwr.app import ConfigRecord

from fedfrozen_app.models.entries import wide
from fedfrozen_app.transport.codec import (
    Codec,
    Layout,
    Tensors,
    dtype_of,
    layout_of_tensors,
)
from fedfrozen_app.transport.codec_name import check_broadcast
from fedfrozen_app.transport.compression import parse_codec
from fedfrozen_app.transport.payload import Instructions, from_namespaces, to_namespaces

# keys of the config record of a message to a client
CODECS = "ff.codecs"  # upload, broadcast and, if that is encoded, the layout of x
SEED = "ff.seed"  # of PowerSGD's first factors
UNTRAINED = "ff.untrained"  # names of entries that travel as they are
_FLOAT = "float32"  # what a layout in words does not mention


@dataclass(frozen=True)
class Codecs:
    """How models travel.

    Attributes
    ----------
    upload : str
        ``none``, ``int8``, ``int4``, ``topk:F`` or ``powersgd:R``.
    broadcast : str
        ``none``, ``int8`` or ``int4``.
    seed : int
        Of PowerSGD's first factors.
    untrained : frozenset of str
        Names of further entries that travel as they are.

    Raises
    ------
    ValueError
        If a name is none of these.
    """

    upload: str = "none"
    broadcast: str = "none"
    seed: int = 0
    untrained: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        parse_codec(self.upload)
        check_broadcast(self.broadcast)

    @cached_property
    def up(self) -> Codec | None:
        """The codec of uploads."""
        return parse_codec(self.upload, seed=self.seed, untrained=self.untrained)

    @cached_property
    def down(self) -> Codec | None:
        """The codec of broadcasts."""
        return parse_codec(self.broadcast, untrained=self.untrained)

    @property
    def are_used(self) -> bool:
        """Whether anything is encoded."""
        return self.up is not None or self.down is not None

    @property
    def has_feedback(self) -> bool:
        """Whether clients keep from round to round what their uploads left out."""
        return self.up is not None and self.up.of_update

    # --- the server -------------------------------------------------------------------
    def send(self, x: Tensors) -> tuple[Tensors, Tensors]:
        """Return what to send of x, and what clients make of it: with no codec, x twice."""
        if self.down is None:
            return x, x
        wire = self.down.encode(x)
        return wire, self.down.decode(wire, layout_of_tensors(x))

    def instructions(self, x: Mapping[str, torch.Tensor], *, train: bool = True) -> Instructions:
        """Return what a message with x must say."""
        up = self.upload if train else "none"
        words = [up, self.broadcast]
        if words == ["none", "none"]:
            return {}
        if self.down is not None:
            words.append(layout_to_text(layout_of_tensors(x)))
        said: Instructions = {CODECS: " ".join(words)}
        if named := sorted(self.untrained & x.keys()):
            said[UNTRAINED] = named
        if train and self.has_feedback:
            said[SEED] = self.seed % 2**63  # what a message can hold
        return said

    def expected(self, x: Mapping[str, torch.Tensor]) -> Layout:
        """Return the layout of replies to x."""
        layout = layout_of_tensors(x)
        return layout if self.up is None else self.up.wire_layout(layout)

    def receive(self, entries: Tensors, x: Mapping[str, torch.Tensor]) -> Tensors:
        """Return y of a reply to x, with what came beside it.

        Raises
        ------
        ValueError
            If it cannot be decoded, or y is not finite.
        """
        own, extra = from_namespaces(entries)
        return {**self._model(own, x), **to_namespaces(extra)}

    def _model(self, own: Tensors, x: Mapping[str, torch.Tensor]) -> Tensors:
        if self.up is None:
            return own
        layout = layout_of_tensors(x)
        decoded = self.up.decode(own, layout)
        if self.up.of_update:
            for name in self.up.trained_names(layout):
                decoded[name] = wide(x[name]) + wide(decoded[name])
                if not bool(torch.isfinite(decoded[name]).all()):
                    raise ValueError(f"the update of {name!r} leads to non-finite values")
        return decoded

    # --- the client -------------------------------------------------------------------
    @classmethod
    def of_message(cls, config: ConfigRecord) -> Self:
        """Return the codecs that a message to a client names."""
        upload, broadcast, _ = _words(config)
        seed, named = config.get(SEED, 0), config.get(UNTRAINED, [])
        untrained = frozenset(map(str, named)) if isinstance(named, list) else frozenset()
        return cls(upload, broadcast, seed if isinstance(seed, int) else 0, untrained)

    def open(self, entries: Tensors, config: ConfigRecord) -> Tensors:
        """Return x of a message's own entries.

        Raises
        ------
        ValueError
            If they cannot be decoded.
        """
        if self.down is None:
            return entries
        return self.down.decode(entries, layout_from_text(_words(config)[2]))


def _words(config: ConfigRecord) -> tuple[str, str, str]:
    """Return upload, broadcast and layout of a message, whose codecs are none without a word."""
    said = str(config.get(CODECS, "none none")).split(" ", maxsplit=2)
    upload, broadcast, layout = [*said, "", ""][:3]
    return upload, broadcast, layout


def layout_to_text(layout: Layout) -> str:
    """Return a layout as compact JSON: NAME: [dtype unless float32, d_0, d_1, ...]."""
    said = {
        name: [*([dtype] if dtype != _FLOAT else []), *shape]
        for name, (shape, dtype) in layout.items()
    }
    return json.dumps(said, separators=(",", ":"))


def layout_from_text(text: str) -> Layout:
    """Read what :func:`layout_to_text` wrote.

    Raises
    ------
    ValueError
        If it is not a layout.
    """
    try:
        said = json.loads(text)
        layout: Layout = {}
        for name, words in said.items():
            named = bool(words) and isinstance(words[0], str)
            dtype, *shape = words if named else [_FLOAT, *words]
            if not all(isinstance(size, int) and size >= 0 for size in shape):
                raise ValueError(f"{name!r} has the shape {shape!r}")
            dtype_of(name, dtype)
            layout[name] = (tuple(shape), dtype)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{CODECS} must end with a layout in JSON, got {text[:80]!r}: {error}"
        ) from None
    return layout
