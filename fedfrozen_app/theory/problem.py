"""The data of the simulation: token embeddings of heterogeneous clients and their targets.

Example j of client k holds n tokens H_kj ~ N(mu_k, I_d), mu_k ~ N(0, rho^2 I_d), as in
arXiv:2605.06446, section 4.1. That text does not say what the targets are; a :class:`Setting`
says which of several teachers, the same for all clients, makes them. All seeds of a setting are
one tensor [S, K, m, n, d]. The same seed has the same draws at every rho: only mu_k is scaled.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fedfrozen_app.seeds import torch_generator

Teacher = Literal["linear", "softmax", "tanh", "none"]
FeatureMap = Literal["sigmoid", "softmax"]


@dataclass(frozen=True)
class Setting:
    """One simulated federation, all of what decides its numbers except the seed.

    Attributes
    ----------
    rho : float
        Standard deviation of the clients' means mu_k, per coordinate.
    teacher : {"linear", "softmax", "tanh", "none"}
        What makes the targets Y [n, d]: linear attention (inside the model class), softmax
        attention, a tanh layer on softmax attention, or nothing but noise.
    noise : float
        Standard deviation of what is added to Y, which has standard deviation 1 before.
    dim, key_dim, tokens, examples, clients : int
        d (also of the values), d_k, n, m examples a client, K.
    phi : {"sigmoid", "softmax"}
        The positive feature map: sigmoid by element, or softmax over each row of d_k.
    init_scale : float
        The initial W_Q and W_K are N(0, init_scale^2 / d).
    value_scale : float
        W_V starts at N(0, value_scale^2 / d); by default at zero.
    value_l2 : float
        lambda of (lambda / 2) ||W_V||^2.
    lr : float
        The step of every local gradient step.
    rounds, local_steps : int
        T and E.
    """

    rho: float = 1.0
    teacher: Teacher = "softmax"
    noise: float = 0.0
    dim: int = 8
    key_dim: int = 4
    tokens: int = 8
    examples: int = 32
    clients: int = 10
    phi: FeatureMap = "sigmoid"
    init_scale: float = 1.0
    value_scale: float = 0.0
    value_l2: float = 1e-3
    lr: float = 0.05
    rounds: int = 50
    local_steps: int = 10

    def __post_init__(self) -> None:
        for name in ("dim", "key_dim", "tokens", "examples", "clients", "rounds", "local_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}; use 1 or more")
        for name in ("rho", "noise", "value_l2"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be >= 0, got {value}; use 0 to leave it out")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise ValueError(f"lr must be > 0, got {self.lr}; try 0.05")
        for name, choices in (("teacher", get_args(Teacher)), ("phi", get_args(FeatureMap))):
            if getattr(self, name) not in choices:
                known = ", ".join(choices)
                raise ValueError(f"{name} must be one of {known}, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class Data:
    """Embeddings and targets of all seeds and clients.

    Attributes
    ----------
    inputs, targets : Tensor
        H and Y, [S, K, m, n, d].
    """

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Weights:
    """The parameters w = (Phi, theta); the server's have K = 1.

    Attributes
    ----------
    kernel : Tensor
        Phi = [W_Q, W_K] side by side, [S, K, d, 2 d_k].
    value : Tensor
        theta = W_V, [S, K, d, d].
    """

    kernel: Tensor
    value: Tensor

    def each(self) -> tuple[Tensor, Tensor]:
        """Return (Phi, theta)."""
        return self.kernel, self.value


def _normal(seed: int, purpose: str, *shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch_generator(seed, f"theory-{purpose}")
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def make_data(
    setting: Setting, seeds: Sequence[int], dtype: torch.dtype = torch.float64
) -> tuple[Data, Data]:
    """Return the training data of every seed, and held-out data of the same clients and size."""
    drawn = [_one_seed(setting, seed, dtype) for seed in seeds]
    inputs, targets = (torch.stack(parts) for parts in zip(*drawn, strict=True))
    m = setting.examples
    return tuple(Data(inputs[:, :, s], targets[:, :, s]) for s in (slice(m), slice(m, 2 * m)))  # type: ignore[return-value]


def _one_seed(setting: Setting, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return H and Y [K, 2 m, n, d] of a seed."""
    k, m, n, d = setting.clients, 2 * setting.examples, setting.tokens, setting.dim
    means = setting.rho * _normal(seed, "means", k, 1, 1, d, dtype=dtype)
    inputs = means + _normal(seed, "tokens", k, m, n, d, dtype=dtype)
    targets = _teach(setting, seed, inputs)
    if setting.teacher != "none":
        targets = targets / targets.std()  # so that losses at different rho can be compared
    return inputs, targets + setting.noise * _normal(seed, "noise", k, m, n, d, dtype=dtype)


def _teach(setting: Setting, seed: int, inputs: Tensor) -> Tensor:
    """Return the teacher's Y [K, 2 m, n, d], before it is scaled."""
    if setting.teacher == "none":
        return torch.zeros_like(inputs)
    d, dk, dtype = setting.dim, setting.key_dim, inputs.dtype
    query, key = _normal(seed, "teacher-kernel", 2, d, dk, dtype=dtype) / math.sqrt(d)
    value = _normal(seed, "teacher-value", d, d, dtype=dtype) / math.sqrt(d)
    if setting.teacher == "linear":
        features = [_feature_map(setting, inputs @ part) for part in (query, key)]
        attention = features[0] @ features[1].mT / setting.tokens
    else:
        scores = (inputs @ query) @ (inputs @ key).mT / math.sqrt(dk)
        attention = scores.softmax(dim=-1)
    out = attention @ inputs @ value
    return out.tanh() if setting.teacher == "tanh" else out


def _feature_map(setting: Setting, pre: Tensor) -> Tensor:
    return pre.sigmoid() if setting.phi == "sigmoid" else pre.softmax(dim=-1)


def initial_weights(
    setting: Setting, seeds: Sequence[int], dtype: torch.dtype = torch.float64
) -> Weights:
    """Return the server's first weights, K = 1."""
    d, dk = setting.dim, setting.key_dim
    kernel = torch.stack([_normal(s, "kernel", 1, d, 2 * dk, dtype=dtype) for s in seeds])
    value = torch.stack([_normal(s, "value", 1, d, d, dtype=dtype) for s in seeds])
    return Weights(
        setting.init_scale * kernel / math.sqrt(d), setting.value_scale * value / math.sqrt(d)
    )
