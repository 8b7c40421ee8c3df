"""A module of which some tensors are partly frozen: active slices that view whole buffers.

:func:`split_module` turns ``weight`` [m, n] into a buffer ``weight`` and Parameters
``weight_active`` that view its trained rows, and mixes :class:`PartlyFrozen` into the module's
class; :func:`join_module` undoes it. The views break when a module is moved, copied, unpickled
or given new ``param.data``: they are found broken by their address before the next forward or
``state_dict()`` and tied again from whichever side is newer.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fedfrozen_app.models.fused import Fused, PartialLinear
from fedfrozen_app.models.patterns import Ranges
from fedfrozen_app.models.selection import Entry

_CLASSES: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}


@dataclass
class _Tie:
    """How the active slices of one tensor are held: parameter names by range."""

    dim: int
    ranges: Ranges
    keys: tuple[str, ...]
    storage: int = 0  # address of the buffer's memory when the views were last made


class PartlyFrozen(nn.Module):
    """Mixed into a module's class while some of its tensors are partly frozen."""

    _ties: dict[str, _Tie]
    _plain_names: tuple[str, ...]

    def _fused(self, name: str) -> Tensor:
        """Return what library code gets for ``module.weight``."""
        full, ranges, active = self._piece(name)
        whole = cast(Tensor, full)
        if torch.is_grad_enabled() and any(part.requires_grad for part in active):
            return Fused.of(whole, self._ties[name].dim, ranges, active)
        return whole

    def _linear(self, input: Tensor) -> Tensor:
        """``nn.Linear.forward``, straight to the GEMM that skips the frozen rows' gradient."""
        weight, weight_ranges, weight_active = self._piece("weight")
        bias, bias_ranges, bias_active = self._piece("bias")
        if not torch.is_grad_enabled():
            return F.linear(input, cast(Tensor, weight), bias)
        out: Tensor = PartialLinear.apply(
            input, weight, bias, False, weight_ranges, bias_ranges, *weight_active, *bias_active
        )
        return out

    def _piece(self, name: str) -> tuple[Tensor | None, Ranges, tuple[Tensor, ...]]:
        """Return a tensor with its trained ranges and slices, none if it is not partly frozen."""
        if name not in self._ties:
            return self._parameters[name], (), ()
        full, tie = self._tied(name), self._ties[name]
        return full, tie.ranges, tuple(cast(Tensor, self._parameters[key]) for key in tie.keys)

    def _tied(self, name: str) -> Tensor:
        """Return the whole tensor after tying its active slices to it again where needed."""
        full, tie = cast(Tensor, self._buffers[name]), self._ties[name]
        address, step = full.data_ptr(), full.stride(tie.dim) * full.element_size()
        for key, (start, stop) in zip(tie.keys, tie.ranges, strict=True):
            part = cast(Tensor, self._parameters[key])
            if part.data_ptr() == address + start * step and part.dtype == full.dtype:
                continue
            view = full.detach().narrow(tie.dim, start, stop - start)
            # A parameter off the old memory was assigned, so it is newer than the buffer.
            if part.untyped_storage().data_ptr() != tie.storage:
                _check_shape(name, part, view)
                view.copy_(part.detach())
            part.data = view
        tie.storage = full.untyped_storage().data_ptr()
        return full

    def _tie_to_buffers(self) -> None:
        """Make the active slices views of the buffers, whose values count."""
        for name, tie in self._ties.items():
            full = cast(Tensor, self._buffers[name]).detach()
            self._buffers[name] = full
            for key, (start, stop) in zip(tie.keys, tie.ranges, strict=True):
                part = cast(Tensor, self._parameters[key])
                part.data = full.narrow(tie.dim, start, stop - start)
            tie.storage = full.untyped_storage().data_ptr()

    def __setattr__(self, name: str, value: Any) -> None:
        """Take ``module.weight = tensor`` as new values for the whole tensor."""
        if name in self.__dict__.get("_ties", ()) and isinstance(value, Tensor):
            _check_shape(name, value, cast(Tensor, self._buffers[name]))
            self._buffers[name] = value.detach()
        else:
            super().__setattr__(name, value)

    def tie_all(self) -> None:
        """Tie every active slice again where needed."""
        for name in self._ties:
            self._tied(name)

    def _active_keys(self) -> list[str]:
        return [key for tie in self._ties.values() for key in tie.keys]

    # --- moving, copying, pickling ------------------------------------------------------
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.tie_all()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._tie_to_buffers()
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the plain class, because the mixed class has no importable name."""
        self.tie_all()
        reduced: Any = super().__reduce_ex__(protocol)
        plain_class = type(self).__bases__[1]
        return new_partly_frozen, (plain_class, tuple(self._ties)), *reduced[2:]

    # --- state dict ---------------------------------------------------------------------
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Write the library's entries in the library's order."""
        self.tie_all()
        before = set(destination)
        super()._save_to_state_dict(destination, prefix, keep_vars)
        own = {key: destination.pop(key) for key in [*destination] if key not in before}
        for key in self._active_keys():
            del own[prefix + key]
        for name in (*self._plain_names, *own):
            key = prefix + name if name in self._plain_names else name
            if key in own:
                destination[key] = own[key]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load the whole tensors; their active slices are views and follow."""
        parts = {key: self._parameters.pop(key) for key in self._active_keys()}
        try:
            super()._load_from_state_dict(*args, **kwargs)
        finally:
            self._parameters.update(parts)
            self._tie_to_buffers()


def _check_shape(name: str, new: Tensor, old: Tensor) -> None:
    if new.shape != old.shape:
        raise ValueError(
            f"partly frozen {name!r} must keep shape {list(old.shape)}, got {list(new.shape)}; "
            "call unfreeze_(model) before changing a weight's shape"
        )


def _partly_frozen_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Return ``base`` with properties in the place of its partly frozen tensors, cached."""
    if (base, names) in _CLASSES:
        return _CLASSES[base, names]

    def reader(name: str) -> property:
        return property(lambda self: self._fused(name))

    namespace: dict[str, Any] = {name: reader(name) for name in names}
    if base.forward is nn.Linear.forward and "weight" in names:
        namespace["forward"] = PartlyFrozen._linear
    cls = type(f"PartlyFrozen{base.__name__}", (PartlyFrozen, base), namespace)
    return _CLASSES.setdefault((base, names), cls)


def new_partly_frozen(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """Return an empty module for unpickling."""
    cls = _partly_frozen_class(base, names)
    return cls.__new__(cls)


# --- surgery ----------------------------------------------------------------------------
def split_module(module: nn.Module, entries: Mapping[str, Entry]) -> None:
    """Turn partly frozen parameters into a whole buffer and Parameters that view it."""
    plain_names = tuple(module._parameters)
    ties: dict[str, _Tie] = {}
    for name, entry in entries.items():
        parameter = cast(nn.Parameter, module._parameters.pop(name))
        full = parameter.detach()
        keys = tuple(f"{name}_active{i or ''}" for i in range(len(entry.active)))
        for key, (start, stop) in zip(keys, entry.active, strict=True):
            view = full.narrow(entry.dim, start, stop - start)
            module._parameters[key] = nn.Parameter(view, requires_grad=parameter.requires_grad)
            if not view.is_contiguous():
                _guard_optimizers()
        module._buffers[name] = full
        ties[name] = _Tie(entry.dim, entry.active, keys, full.untyped_storage().data_ptr())
    module.__class__ = _partly_frozen_class(type(module), tuple(entries))
    frozen = cast(PartlyFrozen, module)
    frozen._ties, frozen._plain_names = ties, plain_names


def join_module(module: PartlyFrozen) -> None:
    """Undo :func:`split_module`; the whole tensors keep their memory."""
    module.tie_all()
    parameters = dict(module._parameters)
    for name in module._ties:
        parameters[name] = nn.Parameter(cast(Tensor, module._buffers.pop(name)))
    for key in list(module._parameters):
        del module._parameters[key]
    for name in module._plain_names:
        module._parameters[name] = parameters[name]
    plain_class = type(module).__bases__[1]
    del module._ties, module._plain_names
    module.__class__ = plain_class


@functools.cache
def _guard_optimizers() -> None:
    """Refuse fused optimisers on column slices, once some exist.

    PyTorch's fused CPU kernels walk a parameter as if it were dense: on a slice of columns
    they would write into the frozen columns beside it without a word.
    """
    register_optimizer_step_pre_hook(_refuse_fused)


def _refuse_fused(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        if group.get("fused") and any(_has_gaps(p) for p in group["params"]):
            raise ValueError(
                f"{type(optimizer).__name__}(fused=True) cannot update column slices of a "
                "partly frozen Conv1D weight; use fused=False"
            )


def _has_gaps(parameter: Tensor) -> bool:
    return not torch.ops.aten.is_non_overlapping_and_dense(parameter)
