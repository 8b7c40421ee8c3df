"""FedAvg, FedProx, SCAFFOLD and FedFrozen on linear attention, full batch, all clients.

A round sends x = (Phi, theta), every client takes E gradient steps of one size lr on its f_k,

    FedAvg     y <- y - lr grad f_k(y)
    FedProx    y <- y - lr (grad f_k(y) + mu (y - x))
    SCAFFOLD   y <- y - lr (grad f_k(y) - c_k + c),  c_k <- c_k - c + (x - y) / (E lr), c = mean c_k

and x becomes the mean of the y. FedFrozen is FedAvg for T_warm rounds and then FedAvg on theta
alone. One run of FedAvg therefore holds the warm-up of every T_warm at once, and what follows a
freeze is an affine map of theta (:meth:`.linear_attention.Quadratic.round_map`), so all freezing
rounds together cost little more than the run itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fedfrozen_app.theory.linear_attention import Attention, Quadratic
from fedfrozen_app.theory.problem import Data, Setting, Weights, initial_weights, make_data


@dataclass(frozen=True)
class Rule:
    """A federated rule: FedAvg with a proximal term or with SCAFFOLD's controls.

    Attributes
    ----------
    proximal_mu : float
        FedProx's mu.
    controls : bool
        Whether SCAFFOLD's controls correct the gradients.
    """

    proximal_mu: float = 0.0
    controls: bool = False


FEDAVG = Rule()
SCAFFOLD = Rule(controls=True)
SHAPES = ("dim", "key_dim", "tokens", "examples", "clients", "phi", "value_l2", "rounds",
          "local_steps")  # fmt: skip


@dataclass(frozen=True)
class Federation:
    """Every seed of one or more settings, as one tensor program.

    Attributes
    ----------
    model : Attention
        phi and lambda.
    train, held_out : Data
        The clients' data, S = settings x seeds, seeds running fastest.
    start : Weights
        The server's first weights.
    lr : Tensor
        The local step of every row, [S, 1, 1, 1].
    local_steps, rounds : int
        E and T.
    """

    model: Attention
    train: Data
    held_out: Data
    start: Weights
    lr: Tensor
    local_steps: int
    rounds: int

    @classmethod
    def build(
        cls, cells: Sequence[Setting], seeds: Sequence[int], dtype: torch.dtype = torch.float64
    ) -> Self:
        """Lay out settings that differ in nothing but rho, teacher, noise, init and lr.

        Raises
        ------
        ValueError
            If they differ in more.
        """
        first = cells[0]
        for name in SHAPES:
            if len({getattr(cell, name) for cell in cells}) > 1:
                raise ValueError(f"{name} must be the same in all settings that run together")
        pairs = [make_data(cell, seeds, dtype) for cell in cells]
        train, held_out = (
            Data(torch.cat([p.inputs for p in part]), torch.cat([p.targets for p in part]))
            for part in zip(*pairs, strict=True)
        )
        starts = [initial_weights(cell, seeds, dtype) for cell in cells]
        lr = torch.tensor([cell.lr for cell in cells for _ in seeds], dtype=dtype)
        return cls(
            Attention(first.phi, first.value_l2),
            train,
            held_out,
            Weights(torch.cat([w.kernel for w in starts]), torch.cat([w.value for w in starts])),
            lr.view(-1, 1, 1, 1),
            first.local_steps,
            first.rounds,
        )


@dataclass(frozen=True)
class Run:
    """What a run leaves, round 0 being before training.

    Attributes
    ----------
    kernels, values : Tensor
        Phi^t and theta^t, [T + 1, S, 1, d, 2 d_k] and [T + 1, S, 1, d, d].
    quadratic : Quadratic
        The clients' losses in theta at every Phi^t, [T + 1, S, K, ...].
    loss, profile : Tensor
        f(Phi^t, theta^t) and h_lambda(Phi^t), [T + 1, S].
    agreement, movement : Tensor
        What the freeze signals read in rounds 1..T, [T, S]; see :mod:`.signals`.
    """

    kernels: Tensor
    values: Tensor
    quadratic: Quadratic
    loss: Tensor
    profile: Tensor
    agreement: Tensor
    movement: Tensor


def local_round(fed: Federation, x: Weights, rule: Rule, c_k: Weights | None) -> Weights:
    """Return every client's y [S, K, ...] after E local steps from the server's x [S, 1, ...]."""
    clients = fed.train.inputs.shape[1]
    kernel, value = (part.expand(-1, clients, -1, -1) for part in x.each())
    shift_k, shift_v = (None, None)
    if c_k is not None:
        shift_k, shift_v = (c.mean(1, keepdim=True) - c for c in c_k.each())
    for _ in range(fed.local_steps):
        grad = fed.model.gradient(fed.train, Weights(kernel, value))
        kernel = kernel - fed.lr * _corrected(grad.kernel, kernel, x.kernel, rule, shift_k)
        value = value - fed.lr * _corrected(grad.value, value, x.value, rule, shift_v)
    return Weights(kernel, value)


def _corrected(grad: Tensor, y: Tensor, x: Tensor, rule: Rule, shift: Tensor | None) -> Tensor:
    """Return the gradient with what the rule adds to it."""
    if rule.proximal_mu:
        grad = grad + rule.proximal_mu * (y - x)
    return grad if shift is None else grad + shift


def next_controls(c_k: Weights, x: Weights, y: Weights, step_sizes: Tensor) -> Weights:
    """Return c_k - c + (x - y) / (E lr) for every client, option II."""
    kernel, value = (
        c - c.mean(1, keepdim=True) + (before - after) / step_sizes
        for c, before, after in zip(c_k.each(), x.each(), y.each(), strict=True)
    )
    return Weights(kernel, value)


def server_mean(y: Weights) -> Weights:
    """Return the mean over clients: all hold the same number of examples."""
    return Weights(y.kernel.mean(1, keepdim=True), y.value.mean(1, keepdim=True))


@torch.no_grad()
def simulate(fed: Federation, rule: Rule = FEDAVG) -> Run:
    """Run T rounds of a rule, nothing frozen."""
    x, c_k = fed.start, None
    if rule.controls:
        clients = fed.train.inputs.shape[1]
        c_k = Weights(*(torch.zeros_like(p).expand(-1, clients, -1, -1) for p in x.each()))
    trace, signals = [x], []
    for _ in range(fed.rounds):
        y = local_round(fed, x, rule, c_k)
        if c_k is not None:
            c_k = next_controls(c_k, x, y, fed.local_steps * fed.lr)
        signals.append(torch.stack(_signals(y.kernel - x.kernel)))
        x = server_mean(y)
        trace.append(x)
    return _record(fed, trace, signals)


def _signals(delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return ||mean_k delta_k||^2 / mean_k ||delta_k||^2 and ||mean_k delta_k|| of a round, [S]."""
    moved = delta.mean(1).square().sum((-2, -1))
    spread = delta.square().sum((-2, -1)).mean(1)
    return moved / spread, moved.sqrt()


def _record(fed: Federation, trace: list[Weights], signals: list[Tensor]) -> Run:
    at = [fed.model.quadratic(fed.train, x.kernel) for x in trace]
    quadratic = Quadratic(
        torch.stack([q.curvature for q in at]),
        torch.stack([q.linear for q in at]),
        torch.stack([q.constant for q in at]),
    )
    values = torch.stack([x.value for x in trace])
    agreement, movement = torch.stack(signals, 1)
    return Run(
        torch.stack([x.kernel for x in trace]),
        values,
        quadratic,
        quadratic.loss(values),
        quadratic.profile(),
        agreement,
        movement,
    )


@torch.no_grad()
def freeze_values(fed: Federation, run: Run) -> Tensor:
    """Return theta at the end of FedFrozen for every T_warm = 0..T, [T + 1, S, 1, d, d].

    The last entry, T_warm = T, is the run itself.
    """
    power, shift = run.quadratic.round_map(fed.lr, fed.local_steps)
    value = run.values.clone()
    for rounds_after in range(fed.rounds):
        still = fed.rounds - rounds_after  # these froze early enough to have such a round
        value[:still] = power[:still] @ value[:still] + shift[:still]
    return value


def freeze_losses(fed: Federation, run: Run) -> Tensor:
    """Return f at the end of FedFrozen for every T_warm = 0..T, [T + 1, S]."""
    return run.quadratic.loss(freeze_values(fed, run))


def held_out_losses(fed: Federation, run: Run, rounds: Sequence[int], values: Tensor) -> Tensor:
    """Return the clients' mean held-out loss, with its ridge term, of (Phi^t, values[t]).

    Parameters
    ----------
    rounds : sequence of int
        The rounds t to evaluate.
    values : Tensor
        theta by round, [T + 1, S, 1, d, d].

    Returns
    -------
    Tensor
        [len(rounds), S].
    """
    return torch.stack(
        [fed.model.quadratic(fed.held_out, run.kernels[t]).loss(values[t]) for t in rounds]
    )
