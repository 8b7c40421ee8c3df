"""The running weighted mean, in which every rule adds up its replies.

m <- m + (w_i / W_i) (y_i - m) with W_i = w_1 + ... + w_i: replies are let go of one by one,
and an entry on which all clients agree keeps its value bit for bit.
"""

from collections.abc import Mapping

import torch

from fedfrozen_app.models.entries import wide

Tensors = dict[str, torch.Tensor]


class Mean:
    """sum_i w_i y_i / sum_i w_i by name, over any number of ``add``."""

    def __init__(self) -> None:
        self.total = 0.0
        self.value: Tensors = {}

    def add(self, tensors: Mapping[str, torch.Tensor], weight: float = 1.0) -> None:
        """Take in y_i with weight w_i > 0; the tensors are not kept."""
        self.total += weight
        if not self.value:
            self.value = {name: wide(tensor).clone() for name, tensor in tensors.items()}
            return
        targets = [self.value[name] for name in tensors]
        pairs = zip(tensors.values(), targets, strict=True)
        wide_ones = [tensor.to(target.dtype) for tensor, target in pairs]
        if targets:
            torch._foreach_lerp_(targets, wide_ones, weight / self.total)
