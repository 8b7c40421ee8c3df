"""Freeze a module so that frozen rows cost nothing: no gradient, no optimiser state, no copy.

- A wholly frozen parameter gets ``requires_grad=False``; a wholly active one is left alone.
- Of a partly frozen weight the active slices become Parameters that VIEW its memory, and the
  whole tensor becomes a buffer of the same name (:mod:`fedfrozen_app.models.partly_frozen`).
  Forward stays the one fused GEMM (:mod:`fedfrozen_app.models.fused`), and an optimiser over
  ``model.parameters()`` cannot touch a frozen row: no momentum, no weight decay.
- ``state_dict()`` and ``load_state_dict()`` keep the library's names, shapes and order.

Modules that can be partly frozen: ``nn.Linear``, ``nn.MultiheadAttention``, HF ``Conv1D``.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from fedfrozen_app.models.partly_frozen import PartlyFrozen, join_module, split_module
from fedfrozen_app.models.selection import Entry, Selection

_RECORD = "_freeze_record"


@dataclass
class _Record:
    """What a frozen model remembers: its selection, and requires_grad as it was before."""

    selection: Selection
    requires_grad: dict[str, bool]


# --- freezing ---------------------------------------------------------------------------
def freeze_(model: nn.Module, selection: Selection) -> None:
    """Stop training what ``selection`` freezes, in place.

    A second call with an equal selection does nothing; with another one it refreezes.

    Raises
    ------
    ValueError
        Where the selection is another model's, a partly frozen entry lies in a module
        without an adapter, or a tied parameter is active and frozen. The model is unchanged.
    """
    record = _record(model)
    if record is not None and record.selection == selection:
        return
    _check_fit(model, selection)
    owners = _owners(model, selection)
    unfreeze_(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    requires_grad = {name: p.requires_grad for name, p in parameters.items()}
    for name, parameter in parameters.items():
        if selection[name].is_frozen:
            parameter.requires_grad_(False)
            parameter.grad = None  # else an optimiser would still apply it
    for module, entries in owners.items():
        split_module(module, entries)
    setattr(model, _RECORD, _Record(selection, requires_grad))


def unfreeze_(model: nn.Module) -> None:
    """Give back the plain module: classes, parameters and requires_grad as before."""
    record = _record(model)
    if record is None:
        return
    for module in list(model.modules()):
        if isinstance(module, PartlyFrozen):
            join_module(module)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in record.requires_grad:
            parameter.requires_grad_(record.requires_grad[name])
    delattr(model, _RECORD)


def frozen_selection(model: nn.Module) -> Selection | None:
    """Return the selection a model is frozen by; None for a plain one."""
    record = _record(model)
    return None if record is None else record.selection


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return what trains by state-dict name, in the library's order.

    A partly active entry is under its own name with its active rows only; one with several
    active ranges is under ``name#0``, ``name#1``, as :meth:`Selection.parts` names them. A
    parameter tied under several names is there once.
    """
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, parameter in _library_parameters(module):
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                found[dot + name] = parameter
    return found


def train_mode_(model: nn.Module) -> None:
    """Call ``model.train()``, but leave modules in eval whose running statistics are frozen."""
    model.train()
    selection = frozen_selection(model)
    if selection is None:
        return
    for prefix, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            name = f"{prefix}.running_mean" if prefix else "running_mean"
            if module.running_mean is not None and selection[name].is_frozen:
                module.eval()


def _record(model: nn.Module) -> _Record | None:
    return cast("_Record | None", getattr(model, _RECORD, None))


def _library_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return a module's own parameters; active slices under their entry's name."""
    if not isinstance(module, PartlyFrozen):
        return [(name, p) for name, p in module._parameters.items() if p is not None]
    module.tie_all()
    found = []
    for name in module._plain_names:
        keys = module._ties[name].keys if name in module._ties else (name,)
        for i, key in enumerate(keys):
            if (parameter := module._parameters[key]) is not None:
                found.append((f"{name}#{i}" if len(keys) > 1 else name, parameter))
    return found


# --- checks -----------------------------------------------------------------------------
def _check_fit(model: nn.Module, selection: Selection) -> None:
    """Raise unless the selection is over this model's entries and agrees on tied ones."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, shape in shapes.items():
        if selection[name].shape != shape:
            raise ValueError(
                f"entry {name!r} has shape {list(shape)} in the model and "
                f"{list(selection[name].shape)} in the selection; build it from this model"
            )
    if missing := [entry.name for entry in selection.entries if entry.name not in shapes]:
        raise ValueError(f"the model has no entry {missing[0]!r}; build the selection from it")
    _check_tied(model, selection)


def _check_tied(model: nn.Module, selection: Selection) -> None:
    """Raise where one parameter under several names is not wholly active or wholly frozen."""
    tied: dict[int, list[tuple[str, nn.Module]]] = defaultdict(list)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name in _plain_names(module):
            key = f"{prefix}.{name}" if prefix else name
            tied[id(_whole(module, name))].append((key, module))
    for (first, owner), *others in tied.values():
        for other, module in others:
            entry = selection[first]
            if entry.active != selection[other].active:
                raise ValueError(
                    f"{first!r} and {other!r} are one tied parameter, but only one is frozen; "
                    f"freeze both, or train both with '!{first}, !{other}'"
                )
            if entry.is_partial and module is not owner:
                raise ValueError(
                    f"{first!r} and {other!r} are one tied parameter of two modules and cannot "
                    "be partly frozen; freeze it whole or not at all"
                )


def _plain_names(module: nn.Module) -> list[str]:
    """Return the names of a module's own parameters as they are without a freeze."""
    names = module._plain_names if isinstance(module, PartlyFrozen) else module._parameters
    return [name for name in names if _whole(module, name) is not None]


def _whole(module: nn.Module, name: str) -> Tensor | None:
    if isinstance(module, PartlyFrozen) and name in module._ties:
        return module._buffers[name]
    return module._parameters[name]


def _owners(model: nn.Module, selection: Selection) -> dict[nn.Module, dict[str, Entry]]:
    """Return the partly frozen entries by the module that holds them, checked for adapters."""
    owners: dict[nn.Module, dict[str, Entry]] = defaultdict(dict)
    modules = dict(model.named_modules(remove_duplicate=False))
    for entry in selection.entries:
        if not entry.is_partial:
            continue
        prefix, _, name = entry.name.rpartition(".")
        module = modules.get(prefix)
        if module is None or name not in _plain_names(module) or not _adapts(module, name, entry):
            kind = "no module" if module is None else type(module).__name__
            raise ValueError(
                f"entry {entry.name!r} {list(entry.shape)} cannot be partly frozen: {kind} has "
                "no adapter for it (nn.Linear, nn.MultiheadAttention and HF Conv1D have); "
                "freeze the whole entry or none of it"
            )
        owners[module][name] = entry
    return owners


def _adapts(module: nn.Module, name: str, entry: Entry) -> bool:
    """Whether the fused GEMM of a module can skip slices of this tensor."""
    if any(base.__name__ == "Conv1D" for base in type(module).__mro__):
        return name in ("weight", "bias") and entry.dim == len(entry.shape) - 1
    if isinstance(module, nn.MultiheadAttention):
        return entry.dim == 0 and (name.startswith("in_proj_") or name.endswith("_proj_weight"))
    return isinstance(module, nn.Linear) and entry.dim == 0
