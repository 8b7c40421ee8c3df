from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch

from fedfrozen_app.strategies import FedAdagrad, FedAdam, FedAvg, FedYogi
from fedfrozen_app.strategies.fedadam import AdaptiveState, FedAdamConfig, aggregate
from tests.strategies.clients import Clients, MlpWorker, gap, numbers, play, random_deltas

HAND = {"server_lr": 2.0, "beta1": 0.5, "beta2": 0.75, "tau": 1.0}
# m = (2, -1) and then (-2, 1);  v = (4, 1) and then (3/4 * 4 + 36/4, 3/4 + 9/4) = (12, 3)
DELTAS = [numbers(4, -2), numbers(-6, 3)]


def zero(size: int = 2) -> AdaptiveState:
    return AdaptiveState({"w": torch.zeros(size, dtype=torch.float64)})


def test_two_rounds_of_two_clients_by_hand() -> None:
    start = zero()
    states = play(aggregate, start, FedAdamConfig(**HAND), DELTAS)
    assert states[0].m["w"].tolist() == [2, -1] and states[0].v["w"].tolist() == [4, 1]
    assert states[1].m["w"].tolist() == pytest.approx([-2, 1], rel=1e-14)
    assert states[1].v["w"].tolist() == pytest.approx([12, 3], rel=1e-14)
    # x + eta m / (sqrt(v) + 1) with eta = 2
    first = [2 * 2 / 3, -2 * 1 / 2]
    assert states[0].x["w"].tolist() == pytest.approx(first, rel=1e-15)
    second = [first[0] - 2 * 2 / (sqrt(12) + 1), first[1] + 2 * 1 / (sqrt(3) + 1)]
    assert states[1].x["w"].tolist() == pytest.approx(second, rel=1e-14)
    assert (start.m, start.v) == ({}, {})  # a round that does not count must not leave a trace
    assert states[1].t == {}  # without a correction nothing needs counting


def test_two_rounds_with_adams_bias_correction_by_hand() -> None:
    states = play(aggregate, zero(), FedAdamConfig(**HAND, bias_correction="adam"), DELTAS)
    # the kept moments are the raw ones
    assert states[1].m["w"].tolist() == pytest.approx([-2, 1], rel=1e-14)
    assert states[1].v["w"].tolist() == pytest.approx([12, 3], rel=1e-14)
    # t = 1: m / (1/2) = (4, -2), v / (1/4) = (16, 4)
    first = [2 * 4 / 5, -2 * 2 / 3]
    assert states[0].x["w"].tolist() == pytest.approx(first, rel=1e-15)
    # t = 2: m / (3/4), v / (7/16)
    second = [
        first[0] - 2 * (2 / 0.75) / (sqrt(12 / 0.4375) + 1),
        first[1] + 2 * (1 / 0.75) / (sqrt(3 / 0.4375) + 1),
    ]
    assert states[1].x["w"].tolist() == pytest.approx(second, rel=1e-14)
    assert states[1].t["w"].tolist() == [2, 2]


def test_with_the_correction_it_equals_torch_adam_on_the_pseudo_gradient() -> None:
    x = torch.nn.Parameter(torch.zeros(13, dtype=torch.float64))
    optimizer = torch.optim.Adam([x], lr=0.02, betas=(0.9, 0.99), eps=1e-3)
    config = FedAdamConfig(server_lr=0.02, bias_correction="adam")
    assert (config.beta1, config.beta2, config.tau) == (0.9, 0.99, 1e-3)
    deltas = random_deltas(rounds=29)
    states = play(aggregate, zero(13), config, deltas)
    for state, delta in zip(states, deltas, strict=True):
        x.grad = -delta
        optimizer.step()
        torch.testing.assert_close(state.x["w"], x.detach(), rtol=0, atol=1e-13)
    assert float(x.detach().abs().min()) > 1e-3  # every entry has moved


def test_the_first_step_has_the_papers_length_and_not_flowers() -> None:
    # none: m = 0.1 Delta, sqrt(v) = 0.1 |Delta|: eta in length, as with Adam's correction;
    # with the exponents t + 1 it would be 0.1 / 0.19 * sqrt(0.0199 / 0.01) = 0.742 of that
    for correction in ("none", "adam"):
        config = FedAdamConfig(server_lr=1.0, tau=1e-12, bias_correction=correction)
        state = play(aggregate, zero(), config, [numbers(3, -0.5)])[0]
        assert state.x["w"].tolist() == pytest.approx([1, -1], rel=1e-9)


@pytest.mark.parametrize("rule", [FedAdam, FedYogi, FedAdagrad])
def test_with_a_huge_tau_and_no_momentum_the_adaptive_rules_are_fedavg(
    tmp_path: Path, rule: type[FedAdam]
) -> None:
    # sqrt(v) vanishes beside tau, and eta = tau makes the step m = Delta
    cohort = {"seed": 3, "fraction_train": 3 / 7}
    clients = Clients(MlpWorker(tmp_path, momentum=0.9))
    x = clients.worker.initial_weights()
    plain = clients.run(FedAvg(**cohort), 3, x)[-1]
    wide = rule(server_lr=1e9, tau=1e9, beta1=0.0, **cohort)
    assert gap(clients.run(wide, 3, x)[-1], plain) < 1e-8
    narrow = rule(server_lr=1.0, tau=1.0, beta1=0.0, **cohort)
    assert gap(clients.run(narrow, 3, x)[-1], plain) > 1e-3


def test_a_second_object_starts_without_moments(tmp_path: Path) -> None:
    clients = Clients(MlpWorker(tmp_path))
    x = clients.worker.initial_weights()
    first, second = clients.run(FedAdam(), 2, x), clients.run(FedAdam(), 2, x)
    assert gap(first[-1], second[-1]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server_lr": 0.0}, r"server_lr must be > 0, got 0\.0"),
        ({"tau": 0.0}, r"tau must be > 0, got 0\.0"),
        ({"tau": -1.0}, r"tau must be > 0, got -1\.0"),
        ({"beta1": 1.0}, r"beta1 must be in \[0, 1\), got 1\.0"),
        ({"beta1": -0.1}, r"beta1 must be in \[0, 1\), got -0\.1"),
        ({"beta2": 1.0}, r"beta2 must be in \[0, 1\), got 1\.0"),
        ({"bias_correction": "flwr"}, "bias_correction must be 'none' or 'adam', got 'flwr'"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FedAdam(**options)
