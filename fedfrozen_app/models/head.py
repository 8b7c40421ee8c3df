"""Classification heads that never train (arXiv:2607.18343, section 3.5).

``frozen-orthogonal`` draws a weight [classes, width] with orthonormal rows (columns where there
are more classes than features), ``frozen-kaiming`` what ``nn.Linear`` starts with, uniform
within 1/sqrt(width) (arXiv:1502.01852); biases are zero. The head is drawn once from the run's
seed and is frozen from the first round on: it belongs to the frozen block, so that it is never
trained, never sent back and never seen by a server rule.

A body only fits the head that it was trained with. Weights files therefore say by their
metadata entry ``head`` how theirs was made: a run with the same ``head`` keeps the file's, bit
for bit and whatever its own seed, and any other run with a frozen head draws a new one.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedfrozen_app.models.attention import HasShape
from fedfrozen_app.models.patterns import ALL, HEADS
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.seeds import torch_generator

if TYPE_CHECKING:  # the strategies need this module, and no configuration
    from fedfrozen_app.config import RunConfig

TRAINABLE = "trainable"
METADATA_KEY = "head"  # of a weights file


def head_entries(names: Iterable[str]) -> list[str]:
    """Return the state-dict names of the head, in the order given."""
    return [name for name in names if name.split(".")[0] in HEADS]


def never_trained(head: str, entries: Mapping[str, HasShape]) -> str:
    """Return the selection of what no round trains: the head if it is frozen, else ``all``.

    Parameters
    ----------
    head : str
        The config key.
    entries : Mapping[str, HasShape]
        The whole state dict.

    Raises
    ------
    ValueError
        When the head is frozen and no entry belongs to a head.
    """
    if head == TRAINABLE:
        return ALL
    prefixes = dict.fromkeys(name.split(".")[0] for name in head_entries(entries))
    if not prefixes:
        raise ValueError(
            f"head={head} found no entry of a head ({', '.join(HEADS)}); use head=trainable"
        )
    return ", ".join(f"{prefix}.*" for prefix in prefixes)


def central_selection(config: "RunConfig", model: nn.Module) -> Selection:
    """Return what central training of the run's model freezes: the head, if it is frozen."""
    state = model.state_dict()
    return Selection.build(never_trained(config.head, state), state)


def draw_head_(model: nn.Module, config: "RunConfig") -> None:
    """Draw the head in place where the config freezes it; a trainable one is left alone.

    The numbers depend on ``seed`` and the weight's shape alone; they are drawn in fp32.
    """
    if config.head == TRAINABLE:
        return
    state = model.state_dict()
    for index, name in enumerate(head_entries(state)):
        drawn = torch.zeros(state[name].shape)
        if drawn.ndim > 1:
            _fill(drawn, config.head, torch_generator(config.seed, "head", index))
        state[name].copy_(drawn)


def _fill(weight: Tensor, head: str, generator: torch.Generator) -> None:
    if head == "frozen-orthogonal":
        nn.init.orthogonal_(weight, generator=generator)
    else:
        nn.init.kaiming_uniform_(weight, a=5**0.5, generator=generator)  # as nn.Linear starts
