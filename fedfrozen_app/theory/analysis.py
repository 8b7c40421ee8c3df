"""What arXiv:2605.06446 proves about FedFrozen, as numbers measured along a run.

Freezing at round tau and running S = T - tau rounds on theta alone ends at

    f(Phi^tau, theta_{tau,S}) - min h = B_tau + left,   B_tau = h_lambda(Phi^tau) - min h
    left = f(Phi^tau, theta_{tau,S}) - h_lambda(Phi^tau)        (Proposition 1, an identity)

and with E = 1 the part left over is at most q^(2 S) R_tau, R_tau = f(Phi^tau, theta^tau) -
h_lambda(Phi^tau), q = max |1 - lr eig(A)| (Theorem 2). With E > 1 and unlike clients a frozen
round is still a contraction, but to a fixed point that is not theta*(Phi): the value block
drifts too. :func:`fixed_point` says where to. min h over all kernels is not known; the least h
of the run stands for it, which shifts B_tau by a constant and moves no oracle.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedfrozen_app.theory.algorithms import Federation, Run, freeze_values
from fedfrozen_app.theory.linear_attention import Quadratic


@dataclass(frozen=True)
class Decomposition:
    """Proposition 1 for every freezing round tau = 0..T, each [T + 1, S].

    Attributes
    ----------
    bias : Tensor
        B_tau, against the least h of the run.
    residual : Tensor
        R_tau, how far theta^tau is from the best for its kernel.
    left : Tensor
        What is left of it after the T - tau frozen rounds.
    """

    bias: Tensor
    residual: Tensor
    left: Tensor

    @property
    def total(self) -> Tensor:
        """The final loss above the least h."""
        return self.bias + self.left


def decompose(fed: Federation, run: Run) -> Decomposition:
    """Measure Proposition 1 on a run of FedAvg."""
    left = run.quadratic.loss(freeze_values(fed, run)) - run.profile
    least = run.profile.min(dim=0).values
    return Decomposition(run.profile - least, run.loss - run.profile, left)


def oracle_warmup(losses: Tensor) -> Tensor:
    """Return the best T_warm of every seed, from the final loss of each [T + 1, S].

    A loss that is not finite is never the best.
    """
    return torch.where(losses.isfinite(), losses, torch.inf).argmin(dim=0)


def contraction(quadratic: Quadratic, lr: Tensor, local_steps: int) -> Tensor:
    """Return by how much a frozen round brings theta nearer to its fixed point at least, [...].

    The mean over clients of max |1 - lr eig(A_k)|^E: below 1 if every lr A_k lies in (0, 2).
    """
    eigenvalues = torch.linalg.eigvalsh(quadratic.curvature)
    steps = (1 - lr.squeeze(-1) * eigenvalues).abs().amax(-1)
    rates: Tensor = (steps**local_steps).mean(-1)
    return rates


def fixed_point(quadratic: Quadratic, lr: Tensor, local_steps: int) -> Tensor:
    """Return the theta that frozen rounds of FedAvg converge to, [..., 1, d, d]."""
    power, shift = quadratic.round_map(lr, local_steps)
    eye = torch.eye(power.shape[-1], dtype=power.dtype)
    point: Tensor = torch.linalg.solve(eye - power, shift)
    return point
