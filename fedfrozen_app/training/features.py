"""Features of a backbone that does not train, computed once and reused.

Where one module alone trains, and it is the one whose output is the model's (``frozen=head``),
an example reaches it as the same features in every pass: f(x) = head(backbone(x)), backbone
constant. :class:`FeatureExamples` keeps backbone(x) by example and gives it in place of x, so a
step costs the head alone. The features of an example come from the first batch that asks for it;
until then nothing is computed that plain training would not compute.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from fedfrozen_app.models.freeze import trainable_parameters
from fedfrozen_app.training.local import Examples

MEMORY_BYTES = 1024**3  # of all features of a process


class _Reached(Exception):
    """The head is about to be called: what comes after it is not needed."""


@dataclass(frozen=True)
class Backbone:
    """A model up to its head, the one module that trains."""

    model: nn.Module
    head: nn.Module

    @classmethod
    def of(cls, model: nn.Module, x: Tensor) -> Self | None:
        """Return the backbone of a model in the mode it trains in, or None.

        None where what trains is more than one module of its own, where the model's output for
        inputs ``x`` [B, ...] is not that module's output of one call with one tensor [B, ...],
        and where something before it draws random numbers or normalises by the batch.
        """
        owners = {name.rpartition(".")[0] for name in trainable_parameters(model)}
        if len(owners) != 1 or "" in owners:
            return None
        found = cls(model, model.get_submodule(owners.pop()))
        inner = set(found.head.modules())
        if any(_varies(module) for module in model.modules() if module not in inner):
            return None
        return found if found._is_last(x) else None

    @torch.no_grad()
    def _is_last(self, x: Tensor) -> bool:
        calls: list[tuple[tuple[Any, ...], Any]] = []

        def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            calls.append((args, output))

        handle = self.head.register_forward_hook(keep)
        try:
            output = self.model(x)
        finally:
            handle.remove()
        if len(calls) != 1 or calls[0][1] is not output or len(calls[0][0]) != 1:
            return False
        (features,) = calls[0][0]
        return isinstance(features, Tensor) and len(features) == len(x)

    @torch.no_grad()
    def features(self, x: Tensor, bf16: bool) -> Tensor:
        """Return what the head is called with for inputs x [B, ...]: [B, ...]."""
        found: list[Tensor] = []

        def stop(head: nn.Module, args: tuple[Any, ...]) -> None:
            found.append(args[0])
            raise _Reached

        handle = self.head.register_forward_pre_hook(stop)
        try:
            with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
                self.model(x)
        except _Reached:
            pass
        finally:
            handle.remove()
        return found[0]


def _varies(module: nn.Module) -> bool:
    """Whether a module gives one input different outputs, or one that the batch decides."""
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return module.training or not module.track_running_stats
    rate = getattr(module, "p", getattr(module, "drop_prob", 0.0))
    is_dropout = "drop" in type(module).__name__.lower()
    return is_dropout and bool(rate)


class FeatureExamples:
    """Examples as their features, each computed when it is first asked for.

    Parameters
    ----------
    examples
        The examples themselves; they must be fixed.
    backbone
        What makes features of them.
    bf16
        Whether it computes under bf16 autocast.
    """

    def __init__(self, examples: Examples, backbone: Backbone, bf16: bool) -> None:
        self._examples: Examples | None = examples  # until all features are known
        self._backbone, self._bf16 = backbone, bf16
        self._features: Tensor | None = None
        self._targets: Tensor | None = None
        self._known = torch.zeros(len(examples), dtype=torch.bool)

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self._known)

    @property
    def nbytes(self) -> int:
        """Bytes of the features, all of them."""
        return 0 if self._features is None else self._features.nbytes

    def batch(self, positions: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Return features [B, ...] and targets of the examples at ``positions`` [B]."""
        positions = positions.cpu()
        missing = positions[~self._known[positions]]
        if len(missing):
            self._learn(missing)
        assert self._features is not None and self._targets is not None  # for the type checker
        at = positions.to(self._features.device)
        return self._features.index_select(0, at), self._targets.index_select(0, at)

    def _learn(self, positions: Tensor) -> None:
        assert self._examples is not None  # for the type checker: something is missing
        x, y = self._examples.batch(positions, None)
        features = self._backbone.features(x, self._bf16)
        if self._features is None or self._targets is None:
            self._features = features.new_empty((len(self), *features.shape[1:]))
            self._targets = y.new_empty((len(self), *y.shape[1:]))
        at = positions.to(features.device)
        self._features[at], self._targets[at] = features, y
        self._known[positions] = True
        if bool(self._known.all()):
            self._examples = None  # the inputs are many times as large


class FeatureStore:
    """The features that a process keeps, the least recently used leaving first."""

    def __init__(self, limit_bytes: int = MEMORY_BYTES) -> None:
        self._limit = limit_bytes
        self._kept: OrderedDict[Hashable, FeatureExamples] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], FeatureExamples]) -> FeatureExamples:
        """Return what is kept under ``key``, or make it."""
        found = self._kept.pop(key, None) or make()
        while self._kept and sum(one.nbytes for one in self._kept.values()) > self._limit:
            self._kept.popitem(last=False)
        self._kept[key] = found
        return found

    def clear(self) -> None:
        """Forget all of them."""
        self._kept.clear()
