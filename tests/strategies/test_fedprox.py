from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord
from torch import nn

from fedfrozen_app.strategies import FedAvg, FedProx, State
from fedfrozen_app.strategies.fedprox import FedProxConfig, Proximal, aggregate
from fedfrozen_app.transport.arrays import to_record
from tests.strategies.clients import (
    Clients,
    LossWorker,
    MlpWorker,
    equal,
    gap,
    numbers,
    play,
    quadratic,
    update,
)


def parameter(*values: float) -> dict[str, nn.Parameter]:
    return {"w": nn.Parameter(numbers(*values))}


def test_two_clients_by_hand() -> None:
    state = State({"w": numbers(0, 0)})
    # (1 * 4 + 3 * -8) / 4 = -5 and (1 * -8 + 3 * 4) / 4 = 1; mu is the clients' affair
    replies = iter([update(1, numbers(4, -8)), update(3, numbers(-8, 4))])
    assert aggregate(state, replies, FedProxConfig(0.5)).x["w"].tolist() == [-5, 1]
    deltas = [numbers(2, -3), numbers(-1, 5)]
    states = play(aggregate, state, FedProxConfig(0.5), deltas)
    assert [s.x["w"].tolist() for s in states] == [[2, -3], [1, 2]]


def test_two_rounds_of_two_clients_by_hand(tmp_path: Path) -> None:
    # F_i = (w - b_i)^2 / 2, two steps with eta = mu = 1/2 from x:
    #   w = x + (b - x) / 2,  then the gradient is -(b - x) / 2 + (b - x) / 4
    #   y = x + 5/8 (b - x)   (3/4 without the proximal term)
    # mean b = (4 - 3 * 8, -8 + 3 * 8) / 4 = (-5, 4); the clients pull every entry both ways
    losses = [quadratic(1, numbers(4, -8)), quadratic(1, numbers(-8, 8))]
    worker = LossWorker(tmp_path, losses, [2, 2], size=2, num_examples=[1, 3], lr=0.5)
    models = Clients(worker).run(FedProx(proximal_mu=0.5), 2, {"w": numbers(0, 0)})
    assert models[0]["w"].tolist() == [-3.125, 2.5]
    # the second round is anchored at its own start: x + 5/8 (mean b - x)
    assert models[1]["w"].tolist() == [-4.296875, 3.4375]


def test_mu_0_equals_fedavg_bit_for_bit(tmp_path: Path) -> None:
    settings = {"momentum": 0.9, "weight_decay": 0.03}
    cohort = {"seed": 3, "fraction_train": 3 / 7}
    clients = Clients(MlpWorker(tmp_path, **settings))
    x = clients.worker.initial_weights()
    plain = clients.run(FedAvg(**cohort), 3, x)
    zero = clients.run(FedProx(proximal_mu=0.0, **cohort), 3, x)
    assert all(equal(one, other) for one, other in zip(zero, plain, strict=True))
    assert gap(clients.run(FedProx(proximal_mu=0.5, **cohort), 3, x)[-1], plain[-1]) > 1e-3


def test_one_local_step_equals_fedavg_whatever_mu(tmp_path: Path) -> None:
    clients = Clients(MlpWorker(tmp_path, steps=1))
    x = clients.worker.initial_weights()
    plain = clients.run(FedAvg(), 2, x)
    assert equal(clients.run(FedProx(proximal_mu=9.0), 2, x)[-1], plain[-1])


def test_many_local_steps_end_at_the_minimum_of_loss_and_proximal_term(tmp_path: Path) -> None:
    # (a / 2)(w - b)^2 + (mu / 2)(w - x)^2 is smallest at (a b + mu x) / (a + mu)
    a, b, x, mu = 2.0, numbers(3, -7, 11), numbers(1, 2, -5), 0.5
    worker = LossWorker(tmp_path, [quadratic(a, b)] * 2, [300] * 2, size=3, lr=0.1)
    after = Clients(worker).run(FedProx(proximal_mu=mu), 1, {"w": x})[0]
    torch.testing.assert_close(after["w"], (a * b + mu * x) / (a + mu), rtol=0, atol=1e-12)


def test_the_gradient_is_mu_times_the_drift_and_not_a_unit_vector() -> None:
    params = parameter(1, -2)
    hook = Proximal(0.5)
    hook.begin(params)
    with torch.no_grad():
        params["w"] += numbers(4, -8)  # the anchor is a copy: this does not move it
    for scale in (1, 2, 4):
        params["w"].grad = numbers(1, 1)
        hook.correct(params)
        assert params["w"].grad.tolist() == [1 + 2 * scale, 1 - 4 * scale]
        with torch.no_grad():
            params["w"] += scale * numbers(4, -8)


def test_a_parameter_that_the_loss_does_not_use_is_still_held() -> None:
    params = parameter(1, -2)
    hook = Proximal(0.5)
    hook.begin(params)
    params["w"].data += 3  # as an earlier batch may have done
    hook.correct(params)
    assert params["w"].grad is not None and params["w"].grad.tolist() == [1.5, 1.5]
    assert hook.extra_loss(params) is None


def test_clients_are_told_mu_as_flowers_own_fedprox_tells_them(tmp_path: Path) -> None:
    grid = Clients(MlpWorker(tmp_path)).grid
    record = to_record({"w": numbers(0.0)})
    messages = FedProx(proximal_mu=0.3).configure_train(1, record, ConfigRecord(), grid)
    assert [message.content["config"]["proximal-mu"] for message in messages] == [0.3] * 7


def test_a_negative_mu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"proximal_mu must be >= 0, got -0\.1; use 0 for FedAvg"):
        FedProx(proximal_mu=-0.1)
