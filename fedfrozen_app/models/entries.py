"""What an entry of a state dict is, told by its name and dtype alone."""

from collections.abc import Collection

import torch

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def is_trained(name: str, tensor: torch.Tensor, buffers: Collection[str] = ()) -> bool:
    """Whether an optimiser trains an entry; if not, it is a buffer, as are the names given."""
    is_statistic = name.rpartition(".")[2] in STATISTICS
    if is_statistic or name in buffers:
        return False
    return tensor.is_floating_point() and tensor.ndim > 0


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a float tensor in the precision that is computed in, at least fp32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
