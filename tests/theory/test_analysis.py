"""Theorem 2 and Proposition 1 on examples with numbers."""

from dataclasses import replace

import pytest
import torch

from fedfrozen_app.theory.algorithms import Federation, freeze_losses, simulate
from fedfrozen_app.theory.analysis import (
    contraction,
    decompose,
    fixed_point,
    oracle_warmup,
)
from fedfrozen_app.theory.linear_attention import Quadratic
from fedfrozen_app.theory.problem import Setting

SETTING = Setting(
    rho=1.0, teacher="tanh", dim=3, key_dim=2, tokens=5, examples=4, clients=5, rounds=30,
    local_steps=1, lr=0.1, value_l2=0.1, value_scale=1.0,
)  # fmt: skip


def two_clients() -> tuple[Quadratic, torch.Tensor]:
    """A_1 = diag(1, 2), A_2 = diag(3, 2); C is zero, so theta* = 0; lr = 0.1."""
    curvature = torch.diag_embed(torch.tensor([[1.0, 2.0], [3.0, 2.0]]).double())[None]
    linear = torch.zeros(1, 2, 2, 2).double()
    return Quadratic(curvature, linear, torch.zeros(1, 2).double()), torch.full(
        (1, 1, 1, 1), 0.1
    ).double()


def test_a_frozen_round_contracts_by_the_rate_worked_out_by_hand() -> None:
    quadratic, lr = two_clients()
    # E = 2: ((1 - .1)^2 + (1 - .3)^2) / 2 = .65 in the first direction, .8^2 = .64 in the second
    power, shift = quadratic.round_map(lr, 2)
    torch.testing.assert_close(power[0, 0], torch.diag(torch.tensor([0.65, 0.64]).double()))
    assert not shift.any()
    # the bound takes each client's slowest direction: (.9^2 + .8^2) / 2
    assert contraction(quadratic, lr, 2).item() == pytest.approx(0.725)


def test_with_one_local_step_the_loss_above_the_profile_falls_by_theorem_2s_rate() -> None:
    fed = Federation.build([SETTING], range(4))
    run = simulate(fed)
    mean = run.quadratic.mean()
    eigenvalues = torch.linalg.eigvalsh(mean.curvature)[:, :, 0]
    rate = (1 - SETTING.lr * eigenvalues).abs().amax(-1)  # [T + 1, S]
    assert (eigenvalues[..., 0] >= SETTING.value_l2).all() and (rate < 1).all()
    parts = decompose(fed, run)
    rounds_left = (SETTING.rounds - torch.arange(SETTING.rounds + 1))[:, None]
    bound = rate ** (2 * rounds_left) * parts.residual
    assert (parts.left <= bound * (1 + 1e-9) + 1e-13).all()
    # tight where theta starts along the flattest direction
    at = Quadratic(*(part[0, :1] for part in vars(mean).values()))
    flat = torch.linalg.eigh(at.curvature)[1][..., :1]
    start = at.minimizer() + flat @ torch.ones(1, 1, 1, 3).double()
    power, shift = at.round_map(fed.lr[:1], 1)
    gaps = [at.loss(theta) - at.profile() for theta in (start, power @ start + shift)]
    assert (gaps[1] / gaps[0]).item() == pytest.approx(rate[0, 0].item() ** 2, rel=1e-9)


def test_with_many_local_steps_the_value_contracts_to_a_fixed_point_beside_the_best() -> None:
    fed = Federation.build([replace(SETTING, local_steps=20, rho=2.0, lr=0.01)], range(4))
    run = simulate(fed)
    at = Quadratic(*(part[3] for part in vars(run.quadratic).values()))
    target, rate = fixed_point(at, fed.lr, 20), contraction(at, fed.lr, 20)
    power, shift = at.round_map(fed.lr, 20)
    theta = run.values[3]
    assert (rate < 1).all()
    for _ in range(5):
        before, theta = theta, power @ theta + shift
        distance = [(t - target).flatten(1).norm(dim=1) for t in (before, theta)]
        assert (distance[1] <= rate * distance[0] * (1 + 1e-9)).all()
    assert (at.loss(target) - at.profile() > 1e-4).all()  # unlike clients pull theta apart, too


def test_with_like_clients_the_fixed_point_is_the_ridge_solution_whatever_e() -> None:
    fed = Federation.build([replace(SETTING, clients=1, local_steps=20)], range(4))
    at = Quadratic(*(part[0] for part in vars(simulate(fed).quadratic).values()))
    torch.testing.assert_close(fixed_point(at, fed.lr, 20), at.minimizer(), rtol=0, atol=1e-10)


def test_bias_and_what_is_left_add_up_to_the_final_loss() -> None:
    fed = Federation.build([replace(SETTING, local_steps=5, lr=0.03, rho=2.0)], range(4))
    run = simulate(fed)
    parts, losses = decompose(fed, run), freeze_losses(fed, run)
    torch.testing.assert_close(parts.total, losses - run.profile.min(0).values, rtol=0, atol=1e-12)
    assert (parts.bias >= 0).all() and (parts.residual >= 0).all() and (parts.left >= 0).all()
    torch.testing.assert_close(parts.left[-1], parts.residual[-1])  # no frozen round
    best = oracle_warmup(losses)
    assert torch.equal(best, parts.total.argmin(dim=0))
    assert (best > 0).all()


def test_the_oracle_passes_over_what_diverged() -> None:
    losses = torch.tensor([[float("nan"), 1.0], [2.0, float("inf")], [3.0, 0.5]])
    assert oracle_warmup(losses).tolist() == [1, 2]
