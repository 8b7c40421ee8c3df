from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord

from fedfrozen_app.strategies import FedAvg, FedNova, FedProx, State
from fedfrozen_app.strategies.fednova import FedNovaConfig, aggregate
from fedfrozen_app.transport.arrays import to_record, to_tensors
from tests.strategies.clients import Clients, LossWorker, MlpWorker, gap, numbers, update


def test_two_clients_by_hand() -> None:
    # d_1 = -(4, -2) / 2 = (-2, 1), d_2 = -(-8, 8) / 4 = (2, -2), p = (3/4, 1/4)
    # sum p_i d_i = (-1, 1/4), tau_eff = 3/4 * 2 + 1/4 * 4 = 5/2;  FedAvg would be at (1, 1/2)
    replies = [
        update(3, numbers(4, -2), steps=2),
        update(1, numbers(-8, 8), steps=4),
    ]
    state = aggregate(State({"w": numbers(0, 0)}), iter(replies), FedNovaConfig())
    assert state.x["w"].tolist() == [2.5, -0.625]
    # one client alone, whatever its steps: p is renormalised, x is its model
    state = aggregate(state, iter([update(3, numbers(7, -3), steps=5)]), FedNovaConfig())
    assert state.x["w"].tolist() == [7, -3]


@pytest.mark.parametrize(
    ("config", "lengths"),
    [
        # momentum 1/2: a = (1) and (7/4, 3/2, 1)
        (FedNovaConfig(momentum=0.5), (1, 4.25)),
        # eta mu = 1/4: a = (1) and (9/16, 3/4, 1)
        (FedNovaConfig(proximal_mu=0.5, lr=0.5), (1, 2.3125)),
    ],
    ids=["momentum", "proximal"],
)
def test_momentum_and_the_proximal_term_change_the_steps_by_hand(
    config: FedNovaConfig, lengths: tuple[float, float]
) -> None:
    first, second = lengths
    replies = [update(3, numbers(4, -2), steps=1), update(1, numbers(-8, 8), steps=3)]
    x = aggregate(State({"w": numbers(0, 0)}), iter(replies), config).x["w"]
    tau_eff = (3 * first + second) / 4
    mean = numbers(3 * 4 / first - 8 / second, 3 * -2 / first + 8 / second) / 4
    torch.testing.assert_close(x, tau_eff * mean, rtol=1e-14, atol=0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_with_equal_steps_it_is_fedavg(tmp_path: Path, mu: float, momentum: float) -> None:
    x = MlpWorker(tmp_path).initial_weights()
    cohort = {"seed": 3, "fraction_train": 3 / 7}
    plain_rule = FedProx(proximal_mu=mu, **cohort) if mu > 0 else FedAvg(**cohort)

    def models(rule: FedAvg | FedProx | FedNova, steps: int) -> list[dict[str, torch.Tensor]]:
        worker = MlpWorker(tmp_path, lr=0.13, momentum=momentum, steps=steps)  # n_i differ
        return Clients(worker).run(rule, 3, x)

    nova = FedNova(momentum=momentum, proximal_mu=mu, lr=0.13, **cohort)
    assert gap(models(nova, 3)[-1], models(plain_rule, 3)[-1]) < 1e-14
    # an epoch each is another number of steps for each client
    assert gap(models(nova, 0)[-1], models(plain_rule, 0)[-1]) > 1e-3


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_on_linear_losses_it_moves_along_the_weighted_gradient_exactly(
    tmp_path: Path, mu: float, momentum: float
) -> None:
    # gradients do not change on the way: x - lr tau_eff sum p_i g_i, where FedAvg would weigh
    # client i's gradient by its steps
    g = [numbers(2, -3, 5), numbers(-7, 1, 4), numbers(3, 3, -1)]
    losses = [lambda w, slope=slope: (slope * w).sum() for slope in g]
    worker = LossWorker(
        tmp_path, losses, [1, 9, 4], size=3, num_examples=[3, 5, 2], lr=0.1, momentum=momentum
    )
    rule = FedNova(momentum=momentum, proximal_mu=mu, lr=0.1)
    moved = Clients(worker).run(rule, 1, {"w": numbers(0, 0, 0)})[0]["w"]
    mean = (3 * g[0] + 5 * g[1] + 2 * g[2]) / 10
    torch.testing.assert_close(moved / moved.norm(), -mean / mean.norm(), rtol=1e-13, atol=0)
    if momentum == mu == 0:
        tau_eff = (3 * 1 + 5 * 9 + 2 * 4) / 10
        torch.testing.assert_close(moved, -0.1 * tau_eff * mean, rtol=1e-13, atol=0)


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (None, "metric 'steps' is missing"),
        (0, "metric 'steps' must be a finite number > 0, got 0"),
        (-3, "metric 'steps' must be a finite number > 0, got -3"),
        (float("nan"), "metric 'steps' must be a finite number > 0, got nan"),
    ],
)
def test_a_reply_without_its_steps_is_dropped_and_the_reason_said(
    tmp_path: Path, steps: float | None, reason: str
) -> None:
    worker = MlpWorker(tmp_path)
    clients, rule, x = Clients(worker), FedNova(), worker.initial_weights()
    replies = clients.replies(rule, 1, x)
    metrics = replies[4].content["metrics"]
    if steps is None:
        del metrics["steps"]
    else:
        metrics["steps"] = steps
    record, _ = rule.aggregate_train(1, replies)
    assert (rule.report.clients, rule.report.dropped) == (6, 1)
    assert rule.report.refused == [f"client 4: {reason}"]
    # as if client 4 had not been asked
    other = FedNova()
    remaining = [r for i, r in enumerate(clients.replies(other, 1, x)) if i != 4]
    expected, _ = other.aggregate_train(1, remaining)
    assert record is not None and expected is not None
    assert gap(to_tensors(record), to_tensors(expected)) == 0


@pytest.mark.parametrize(("mu", "told"), [(0.3, 0.3), (0.0, None)])
def test_clients_are_told_a_proximal_mu_that_is_not_0(
    tmp_path: Path, mu: float, told: float | None
) -> None:
    grid = Clients(MlpWorker(tmp_path)).grid
    record = to_record({"w": numbers(0.0)})
    messages = FedNova(proximal_mu=mu).configure_train(1, record, ConfigRecord(), grid)
    assert [message.content["config"].get("proximal-mu") for message in messages] == [told] * 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1\.0"),
        ({"momentum": -0.1}, r"momentum must be in \[0, 1\), got -0\.1"),
        ({"proximal_mu": -0.1}, r"proximal_mu must be >= 0, got -0\.1; use 0 for none"),
        ({"lr": 0.0}, r"lr must be > 0, got 0\.0; give the clients' learning rate"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FedNova(**options)
