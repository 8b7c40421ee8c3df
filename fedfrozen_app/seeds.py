"""Random streams named by what they are for, never taken from global state.

Every draw in a run comes from ``(seed, purpose, indices...)``: the same numbers in
every engine, process and order of execution, and two purposes never share a stream.
"""

import hashlib

import numpy as np
import torch


def derive_seed(seed: int, purpose: str, *indices: int) -> int:
    """Return a 63-bit seed for one purpose, for example ``("batches", round, partition)``."""
    name = ":".join([str(seed), purpose, *map(str, indices)])
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def torch_generator(
    seed: int, purpose: str, *indices: int, device: str | torch.device = "cpu"
) -> torch.Generator:
    """Return a torch generator on ``device`` for one purpose."""
    return torch.Generator(device=device).manual_seed(derive_seed(seed, purpose, *indices))


def numpy_generator(seed: int, purpose: str, *indices: int) -> np.random.Generator:
    """Return a NumPy generator for one purpose."""
    return np.random.default_rng(derive_seed(seed, purpose, *indices))
