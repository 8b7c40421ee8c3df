"""FedAvg (McMahan et al. 2017, arXiv:1602.05629, Algorithm 1).

x <- sum_i p_i y_i with p_i = n_i / sum_j n_j over the clients that replied.

The sum runs as a weighted mean, m <- m + (n_i / N_i) (y_i - m) with N_i = n_1 + ... + n_i:
replies are let go of one by one, and an entry on which all clients agree keeps its value
bit for bit.
"""

from collections.abc import Iterable, Iterator

import torch

from fedfrozen_app.strategies.base import ServerRule, Tensors, Update


def weighted_mean(updates: Iterable[Update]) -> Tensors | None:
    """Return sum_i p_i y_i, or None without updates.

    Floating-point entries are averaged, at least in fp32, and keep their dtype. Integer
    and boolean entries (step counters, masks) are taken from the first client.
    """
    mean: Tensors = {}
    dtypes: dict[str, torch.dtype] = {}
    total = 0.0
    for update in updates:
        total += update.num_examples
        if not mean:
            dtypes = {name: tensor.dtype for name, tensor in update.arrays.items()}
            mean = {name: _accumulator(tensor) for name, tensor in update.arrays.items()}
            continue
        for name, tensor in update.arrays.items():
            if tensor.is_floating_point():
                target = mean[name]
                target.lerp_(tensor.to(target.dtype), update.num_examples / total)
    return {name: tensor.to(dtypes[name]) for name, tensor in mean.items()} if mean else None


def _accumulator(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.to(wide if tensor.is_floating_point() else tensor.dtype, copy=True)


class FedAvg(ServerRule):
    """FedAvg that streams: memory for one reply and one mean, whatever the cohort."""

    def aggregate(self, global_arrays: Tensors, updates: Iterator[Update]) -> Tensors | None:
        """Return the mean of the clients' models, weighted by their examples."""
        return weighted_mean(updates)
