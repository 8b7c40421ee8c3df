"""Carry state that is keyed by parameter name from one selection to the next."""

from collections.abc import Mapping

import torch

from fedfrozen_app.models.selection import Selection


def reselect(
    tensors: Mapping[str, torch.Tensor], before: str, selection: Selection
) -> dict[str, torch.Tensor]:
    """Return the state of a new selection: what froze is dropped, what came starts at zero.

    Parameters
    ----------
    tensors : mapping of str to Tensor
        State by entry (a momentum, a control) in the shapes of the active half under
        ``before``. Entries may be missing, which stands for zero.
    before : str
        What the old selection was built from.
    selection : Selection
        The new one. Slices of an entry that it adds are zero; entries that it adds whole
        stay missing.
    """
    shapes = {entry.name: torch.empty(entry.shape, device="meta") for entry in selection.entries}
    old = Selection.build(before, shapes)
    if old == selection:
        return dict(tensors)
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        entry = old[name]
        if entry.is_active:
            whole[name] = tensor
            continue
        whole[name] = tensor.new_zeros(entry.shape)
        offset = 0
        for start, stop in entry.active:
            part = tensor.narrow(entry.dim, offset, stop - start)
            whole[name].narrow(entry.dim, start, stop - start).copy_(part)
            offset += stop - start
    return {name: tensor.clone() for name, tensor in selection.restrict(whole).items()}
