"""The federated rules written from their equations, in float64 NumPy.

They are what the package is checked against, so nothing here comes from it: every client's
model y_i is kept, then the server's equation is written down once. x is the global model, S the
clients of the round, tau_i the number of steps client i took, p_i = n_i / sum of n over S.

Every rule is called `rule(x, rounds, num_examples, *, lr, momentum=0, weight_decay=0, ...)` and
returns the global model after each round (`scaffold` its controls as well).

- `x`: the initial entries by name.
- `rounds`: for each round, client id -> its batches (X, y), one per optimiser step. The ids are
  those of the clients that replied.
- `num_examples`: client id -> n_i.

Sources: FedAvg arXiv:1602.05629, FedProx arXiv:1812.06127, SCAFFOLD arXiv:1910.06378 (option II),
FedNova arXiv:2007.07481, FedAvgM arXiv:1909.06335, FedAdam/FedYogi/FedAdagrad arXiv:2003.00295.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.references.mlp import Array, Params, loss_and_grads

Client = Hashable
Batch = tuple[Any, Any]
Round = Mapping[Client, Sequence[Batch]]
SecondMoment = Callable[[Array, Array, float], Array]


# ---- the client


def local_sgd(
    x: Params,
    batches: Sequence[Batch],
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    mu: float = 0.0,
    correction: Params | None = None,
) -> Params:
    """One client's model y after a step per batch, as `torch.optim.SGD` steps.

    `mu (w - x)` (FedProx) and `correction` (SCAFFOLD's c - c_i) are added to the gradient of the
    loss, so weight decay and momentum act after them. The momentum buffer starts anew.
    """
    if not batches:
        raise ValueError("a client that replied took at least one step, got no batches")
    w = x  # never written to: each step makes new arrays
    buf: Params = {}
    for X, y in batches:
        _, grads = loss_and_grads(w, X, y)
        for k in w:
            g = grads[k] + mu * (w[k] - x[k])
            if correction is not None:
                g = g + correction[k]
            g = g + weight_decay * w[k]
            buf[k] = momentum * buf[k] + g if k in buf else g
        # a step moves the entries only once every gradient is known
        w = {k: w[k] - lr * buf[k] for k in w}
    return w


def effective_steps(tau: int, momentum: float) -> float:
    """Step sizes of tau momentum steps, summed, in units of lr.

    Gradient j of tau is stepped along (1 - rho^(tau - j + 1)) / (1 - rho) times in all; their sum
    is [tau - rho (1 - rho^tau) / (1 - rho)] / (1 - rho), which is tau without momentum.
    """
    rho = momentum
    return (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)


def proximal_steps(tau: int, lr: float, mu: float) -> float:
    """Sum of (1 - lr mu)^j over j = 0..tau-1: each gradient shrinks by every later step."""
    return (1 - (1 - lr * mu) ** tau) / (lr * mu)


# ---- arithmetic on models


def start(x: Params) -> Params:
    """A float64 copy that the rounds may replace."""
    return {k: np.array(v, dtype=np.float64) for k, v in x.items()}


def zeros(x: Params) -> Params:
    return {k: np.zeros_like(v) for k, v in x.items()}


def shares(cohort: Round, num_examples: Mapping[Client, int]) -> dict[Client, float]:
    """p_i = n_i / sum of n over the clients that replied."""
    total = sum(num_examples[i] for i in cohort)
    return {i: num_examples[i] / total for i in cohort}


def weighted_sum(weights: Mapping[Client, float], models: Mapping[Client, Params]) -> Params:
    names = next(iter(models.values())).keys()
    return {k: np.sum([weights[i] * models[i][k] for i in models], axis=0) for k in names}


def average(x: Params, cohort: Round, num_examples: Mapping[Client, int], **local: Any) -> Params:
    """Sum of p_i y_i: FedAvg's next model, and what the server optimisers start from."""
    y = {i: local_sgd(x, batches, **local) for i, batches in cohort.items()}
    return weighted_sum(shares(cohort, num_examples), y)


# ---- rules without a server optimiser


def fedavg(
    x: Params,
    rounds: Sequence[Round],
    num_examples: Mapping[Client, int],
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> list[Params]:
    """x <- sum p_i y_i."""
    x, models = start(x), []
    for cohort in rounds:
        x = average(x, cohort, num_examples, lr=lr, momentum=momentum, weight_decay=weight_decay)
        models.append(x)
    return models


def fedprox(
    x: Params,
    rounds: Sequence[Round],
    num_examples: Mapping[Client, int],
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    mu: float,
) -> list[Params]:
    """FedAvg of clients that minimise F_i(w) + (mu/2) ||w - x||^2."""
    local = dict(lr=lr, momentum=momentum, weight_decay=weight_decay, mu=mu)
    x, models = start(x), []
    for cohort in rounds:
        x = average(x, cohort, num_examples, **local)
        models.append(x)
    return models


@dataclass
class ScaffoldResult:
    """The model after each round; the controls after the last.

    `client_controls` holds the clients sampled at least once; every other control is zero.
    """

    models: list[Params]
    control: Params
    client_controls: dict[Client, Params]


def scaffold(
    x: Params,
    rounds: Sequence[Round],
    num_examples: Mapping[Client, int],
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    num_clients: int,
    server_lr: float = 1.0,
) -> ScaffoldResult:
    """Option II.  c_i+ = c_i - c + (x - y_i) / (lr A_i), A_i = tau_i without momentum.

    x <- x + eta mean_S (y_i - x);  c <- c + (|S|/N) mean_S (c_i+ - c_i).
    The means are uniform: `num_examples` weighs nothing.
    """
    x, models = start(x), []
    c, c_i = zeros(x), {i: zeros(x) for cohort in rounds for i in cohort}
    if len(c_i) > num_clients:
        raise ValueError(f"num_clients must count all clients, got {num_clients} < {len(c_i)}")
    for cohort in rounds:
        delta_y, delta_c = {}, {}
        for i, batches in cohort.items():
            correction = {k: c[k] - c_i[i][k] for k in x}
            y = local_sgd(
                x,
                batches,
                lr=lr,
                momentum=momentum,
                weight_decay=weight_decay,
                correction=correction,
            )
            path = lr * effective_steps(len(batches), momentum)
            new = {k: c_i[i][k] - c[k] + (x[k] - y[k]) / path for k in x}
            delta_y[i] = {k: y[k] - x[k] for k in x}
            delta_c[i] = {k: new[k] - c_i[i][k] for k in x}
            c_i[i] = new
        uniform = {i: 1 / len(cohort) for i in cohort}
        mean_y, mean_c = weighted_sum(uniform, delta_y), weighted_sum(uniform, delta_c)
        x = {k: x[k] + server_lr * mean_y[k] for k in x}
        c = {k: c[k] + len(cohort) / num_clients * mean_c[k] for k in x}
        models.append(x)
    return ScaffoldResult(models, c, c_i)


def fednova(
    x: Params,
    rounds: Sequence[Round],
    num_examples: Mapping[Client, int],
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    mu: float = 0.0,
) -> list[Params]:
    """d_i = (x - y_i) / ||a_i||_1;  x <- x - (sum p_i ||a_i||_1) sum p_i d_i."""
    if momentum != 0 and mu != 0:
        raise NotImplementedError("no closed form here for momentum and mu together")
    x, models = start(x), []
    local = dict(lr=lr, momentum=momentum, weight_decay=weight_decay, mu=mu)
    for cohort in rounds:
        norm: dict[Client, float] = {}
        d: dict[Client, Params] = {}
        for i, batches in cohort.items():
            tau = len(batches)
            norm[i] = effective_steps(tau, momentum) if mu == 0 else proximal_steps(tau, lr, mu)
            y = local_sgd(x, batches, **local)
            d[i] = {k: (x[k] - y[k]) / norm[i] for k in x}
        p = shares(cohort, num_examples)
        tau_eff = sum(p[i] * norm[i] for i in cohort)
        direction = weighted_sum(p, d)
        x = {k: x[k] - tau_eff * direction[k] for k in x}
        models.append(x)
    return models


# ---- server optimisers


def fedavgm(
    x: Params,
    rounds: Sequence[Round],
    num_examples: Mapping[Client, int],
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    server_lr: float,
    beta: float,
    nesterov: bool = False,
) -> list[Params]:
    """d = x - avg;  v <- beta v + d;  x <- x - eta v, with Nesterov x - eta (d + beta v)."""
    x, models = start(x), []
    v = zeros(x)
    for cohort in rounds:
        avg = average(x, cohort, num_examples, lr=lr, momentum=momentum, weight_decay=weight_decay)
        d = {k: x[k] - avg[k] for k in x}
        v = {k: beta * v[k] + d[k] for k in x}
        step = {k: d[k] + beta * v[k] for k in x} if nesterov else v
        x = {k: x[k] - server_lr * step[k] for k in x}
        models.append(x)
    return models


def adam_moment(v: Array, delta: Array, b2: float) -> Array:
    return b2 * v + (1 - b2) * delta**2


def yogi_moment(v: Array, delta: Array, b2: float) -> Array:
    return v - (1 - b2) * delta**2 * np.sign(v - delta**2)


def adagrad_moment(v: Array, delta: Array, b2: float) -> Array:
    return v + delta**2


def _adaptive(
    second_moment: SecondMoment,
    x: Params,
    rounds: Sequence[Round],
    num_examples: Mapping[Client, int],
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    server_lr: float,
    b1: float,
    b2: float,
    tau: float,
    bias_correction: str = "none",
) -> list[Params]:
    """Delta = avg - x;  m <- b1 m + (1-b1) Delta;  x <- x + eta m / (sqrt(v) + tau)."""
    if bias_correction not in ("none", "adam"):
        raise ValueError(f"bias_correction must be none or adam, got {bias_correction!r}")
    x, models = start(x), []
    m, v = zeros(x), zeros(x)
    for t, cohort in enumerate(rounds, start=1):
        avg = average(x, cohort, num_examples, lr=lr, momentum=momentum, weight_decay=weight_decay)
        delta = {k: avg[k] - x[k] for k in x}
        m = {k: b1 * m[k] + (1 - b1) * delta[k] for k in x}
        v = {k: second_moment(v[k], delta[k], b2) for k in x}
        m_scale, v_scale = 1.0, 1.0
        if bias_correction == "adam":
            m_scale, v_scale = 1 - b1**t, 1 - b2**t
        x = {k: x[k] + server_lr * (m[k] / m_scale) / (np.sqrt(v[k] / v_scale) + tau) for k in x}
        models.append(x)
    return models


def fedadam(
    x: Params, rounds: Sequence[Round], num_examples: Mapping[Client, int], **options: Any
) -> list[Params]:
    """v <- b2 v + (1-b2) Delta^2.  Options: those of `_adaptive`."""
    return _adaptive(adam_moment, x, rounds, num_examples, **options)


def fedyogi(
    x: Params, rounds: Sequence[Round], num_examples: Mapping[Client, int], **options: Any
) -> list[Params]:
    """v <- v - (1-b2) Delta^2 sign(v - Delta^2).  Options: those of `_adaptive`."""
    return _adaptive(yogi_moment, x, rounds, num_examples, **options)


def fedadagrad(
    x: Params, rounds: Sequence[Round], num_examples: Mapping[Client, int], **options: Any
) -> list[Params]:
    """v <- v + Delta^2; b2 is not used.  Options: those of `_adaptive`.

    v is a sum, not a decayed mean, so it has no bias for `bias_correction="adam"` to undo.
    """
    if options.get("bias_correction", "none") == "adam":
        raise NotImplementedError("FedAdagrad's v is a sum: there is no bias to correct")
    return _adaptive(adagrad_moment, x, rounds, num_examples, **options)
