"""A two-layer tanh network with hand-written gradients, in float64 NumPy.

The entries are named and shaped as `torch.nn.Sequential(Linear(I, H), Tanh(), Linear(H, C))`
names and shapes them: `0.weight` [H, I], `0.bias` [H], `2.weight` [C, H], `2.bias` [C].
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, Array]


def init_params(inputs: int, hidden: int, classes: int, seed: int) -> Params:
    """Gaussian entries, weights scaled by 1/sqrt(fan-in)."""
    rng = np.random.default_rng(seed)
    return {
        "0.weight": rng.normal(size=(hidden, inputs)) / np.sqrt(inputs),
        "0.bias": rng.normal(size=hidden),
        "2.weight": rng.normal(size=(classes, hidden)) / np.sqrt(hidden),
        "2.bias": rng.normal(size=classes),
    }


def loss_and_grads(
    params: Params, X: NDArray[np.floating], y: NDArray[np.integer]
) -> tuple[float, Params]:
    """Mean softmax cross-entropy over the batch and its gradient for every entry.

    `X` is [n, I], `y` is [n] with labels in 0..C-1.
    """
    X = np.asarray(X, dtype=np.float64)
    n = len(X)
    rows = np.arange(n)

    h = np.tanh(X @ params["0.weight"].T + params["0.bias"])  # [n, H]
    logits = h @ params["2.weight"].T + params["2.bias"]  # [n, C]
    shifted = logits - logits.max(axis=1, keepdims=True)  # exp cannot overflow
    log_softmax = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    loss = -log_softmax[rows, y].mean()

    d_logits = np.exp(log_softmax)
    d_logits[rows, y] -= 1.0
    d_logits /= n
    d_pre = (d_logits @ params["2.weight"]) * (1.0 - h**2)  # tanh' = 1 - tanh^2
    return float(loss), {
        "0.weight": d_pre.T @ X,
        "0.bias": d_pre.sum(axis=0),
        "2.weight": d_logits.T @ h,
        "2.bias": d_logits.sum(axis=0),
    }
