"""The order of a whole model, so that its two halves become what the library gave.

After the freeze a message has the active half, a cache the frozen one. A client that knows its
model needs no more. One that does not (:mod:`fedfrozen_app.mods`) is told, in every message, where
each entry stands and which are sliced: one number by entry, a byte or two of the message.
"""

from collections.abc import Mapping, Sequence

import torch

from fedfrozen_app.models.attention import HasShape
from fedfrozen_app.models.selection import Selection

_KINDS = 3  # of entries: whole in one half, in both along dimension 0, in both along dimension 1


def order_of(selection: Selection) -> list[int]:
    """Return a number for every entry in the library's order: 3 i + k.

    ``i`` is the place of its name among all names sorted; ``k`` is 0 for an entry of one half
    and 1 + dim for one that is sliced along dim.
    """
    names = sorted(entry.name for entry in selection.entries)
    places = {name: i for i, name in enumerate(names)}
    return [_KINDS * places[e.name] + (1 + e.dim) * e.is_partial for e in selection.entries]


def whole_shapes(
    order: Sequence[int], active: Mapping[str, HasShape], frozen: Mapping[str, HasShape]
) -> dict[str, torch.Tensor]:
    """Return the entries of the whole model in the library's order, without values.

    Raises
    ------
    ValueError
        If the order is not that of these two halves.
    """
    names = sorted(active.keys() | frozen.keys())
    if sorted(number // _KINDS for number in order) != list(range(len(names))):
        raise ValueError(
            f"the order of a model with {len(order)} entries does not fit halves with "
            f"{len(names)}; both must come from one message"
        )
    whole: dict[str, torch.Tensor] = {}
    for number in order:
        name, kind = names[number // _KINDS], number % _KINDS
        halves = [tuple(half[name].shape) for half in (active, frozen) if name in half]
        if len(halves) != (2 if kind else 1):
            raise ValueError(f"entry {name!r} is in {len(halves)} halves; its order says otherwise")
        shape = list(halves[0])
        if kind:
            shape[kind - 1] += halves[1][kind - 1]
        whole[name] = torch.empty(shape, device="meta")
    return whole
