"""Two clients with F_i(w) = (a_i / 2) ||w - b_i||^2, where every fixed point has a closed form.

From x, tau_i steps of size eta lead client i to y_i = b_i + r_i (x - b_i) with
r_i = (1 - eta a_i)^tau_i, since each step shortens w - b_i by the same factor.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from fedfrozen_app.strategies import FedAvg, FedNova, Scaffold, ServerRule
from tests.strategies.clients import Clients, LossWorker, numbers, quadratic

B = [numbers(4, -8, 1), numbers(-2, 5, 3)]
START = {"w": numbers(9, 9, 9)}


def weighted(weights: list[float]) -> torch.Tensor:
    """Return sum_i q_i b_i / sum_i q_i."""
    return sum(q * b for q, b in zip(weights, B, strict=True)) / sum(weights)  # type: ignore[no-any-return]


def limit(
    root: Path,
    rule: ServerRule[Any, Any],
    curvatures: tuple[float, float],
    steps: tuple[int, int],
    *,
    rounds: int,
    **local: Any,
) -> torch.Tensor:
    """Return where the rounds end; the last one no longer moves the model."""
    losses = [quadratic(a, b) for a, b in zip(curvatures, B, strict=True)]
    worker = LossWorker(root, losses, steps, size=3, **local)
    models = Clients(worker).run(rule, rounds, START)
    assert float((models[-1]["w"] - models[-2]["w"]).abs().max()) < 1e-12
    return models[-1]["w"]


# ---- different curvatures: SCAFFOLD


def test_fedavg_stays_at_a_biased_point_and_scaffold_reaches_the_optimum(tmp_path: Path) -> None:
    a, tau, eta = (1.0, 4.0), (5, 5), 0.1
    optimum = weighted(list(a))  # the mean of a_i (w - b_i) is zero
    # x = mean y_i: the mean of (1 - r_i)(x - b_i) is zero
    biased = weighted([1 - (1 - eta * a_i) ** 5 for a_i in a])
    # a = (1, 4) weighs as (0.41, 0.92)
    assert float((biased - optimum).abs().min()) > 0.2

    plain = limit(tmp_path, FedAvg(), a, tau, rounds=40, lr=eta)
    torch.testing.assert_close(plain, biased, rtol=0, atol=1e-11)
    corrected = limit(tmp_path, Scaffold(), a, tau, rounds=100, lr=eta)
    torch.testing.assert_close(corrected, optimum, rtol=0, atol=1e-11)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_scaffold_reaches_it_with_unequal_steps_and_weights_too(
    tmp_path: Path, momentum: float, server_lr: float
) -> None:
    a = (1.0, 4.0)
    reached = limit(
        tmp_path,
        Scaffold(server_lr=server_lr),
        a,
        (7, 2),
        rounds=120,
        lr=0.1,
        momentum=momentum,
        num_examples=[1, 9],
    )
    # the optimum of the mean of the F_i, each client counting once
    torch.testing.assert_close(reached, weighted(list(a)), rtol=0, atol=1e-10)


def test_at_the_optimum_scaffolds_controls_are_the_clients_gradients(tmp_path: Path) -> None:
    a = (1.0, 4.0)
    losses = [quadratic(a_i, b) for a_i, b in zip(a, B, strict=True)]
    clients = Clients(LossWorker(tmp_path, losses, [5, 5], size=3, lr=0.1))
    rule, optimum = Scaffold(), weighted(list(a))
    clients.run(rule, 100, START)
    assert float(rule.state.c["w"].abs().max()) < 1e-11
    for client in range(2):
        gradient = a[client] * (optimum - B[client])
        torch.testing.assert_close(clients.control(rule, client)["w"], gradient, rtol=0, atol=1e-10)


# ---- tau = (1, 9): FedNova


def fedavg_point(eta: float, a: float = 1.0) -> torch.Tensor:
    # sum p_i (1 - r_i)(x - b_i) = 0
    return weighted([1 - (1 - eta * a) ** tau for tau in (1, 9)])


def fednova_point(eta: float, a: float = 1.0) -> torch.Tensor:
    # sum p_i (1 - r_i)(x - b_i) / tau_i = 0
    return weighted([(1 - (1 - eta * a) ** tau) / tau for tau in (1, 9)])


@pytest.mark.parametrize(("eta", "rounds"), [(0.1, 80), (0.05, 160)])
def test_the_fixed_points_of_fedavg_and_fednova_are_the_closed_forms(
    tmp_path: Path, eta: float, rounds: int
) -> None:
    a, tau = (1.0, 1.0), (1, 9)
    plain = limit(tmp_path, FedAvg(), a, tau, rounds=rounds, lr=eta)
    torch.testing.assert_close(plain, fedavg_point(eta), rtol=0, atol=1e-11)
    nova = limit(tmp_path, FedNova(), a, tau, rounds=rounds, lr=eta)
    torch.testing.assert_close(nova, fednova_point(eta), rtol=0, atol=1e-11)
    optimum = weighted([1, 1])
    bias = {"fedavg": (plain - optimum).norm(), "fednova": (nova - optimum).norm()}
    # eta = .1: FedAvg weighs b_2 with .86, FedNova with .41
    assert bias["fednova"] < 0.3 * bias["fedavg"]


def test_fednova_is_at_the_optimum_as_eta_goes_to_0_and_fedavg_is_not(tmp_path: Path) -> None:
    """(1 - r_i) / tau_i = eta a (1 - eta a (tau_i - 1) / 2 + ...): FedNova's bias is O(eta).

    So it halves with eta, while FedAvg's goes to that of the weights p_i tau_i. Each closed
    form is checked by a round that does not leave it.
    """
    optimum, by_steps = weighted([1, 1]), weighted([1, 9])
    losses = [quadratic(1, b) for b in B]
    for rule, point in ((FedAvg(), fedavg_point), (FedNova(), fednova_point)):
        for eta in (1e-3, 5e-4):
            worker = LossWorker(tmp_path, losses, [1, 9], size=3, lr=eta)
            after = Clients(worker).run(rule, 1, {"w": point(eta)})[0]["w"]
            torch.testing.assert_close(after, point(eta), rtol=0, atol=1e-14)
    bias = [(fednova_point(eta) - optimum).norm() for eta in (1e-3, 5e-4)]
    assert float(bias[0] / bias[1]) == pytest.approx(2, abs=2e-2)
    # |b_1 - b_2| / 2 * eta * (9 - 1) / 4 in first order
    assert float(bias[0]) == pytest.approx(float((B[0] - B[1]).norm()) * 1e-3, rel=1e-2)
    assert float((fedavg_point(1e-3) - by_steps).norm()) < 0.02
    assert float((fedavg_point(1e-3) - optimum).norm()) > 5


def test_with_equal_steps_and_curvature_both_end_exactly_at_the_optimum(tmp_path: Path) -> None:
    for rule in (FedAvg(), FedNova()):
        reached = limit(tmp_path, rule, (1.0, 1.0), (3, 3), rounds=100, lr=0.1)
        torch.testing.assert_close(reached, weighted([1, 1]), rtol=0, atol=1e-11)
