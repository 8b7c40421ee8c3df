from pathlib import Path
from typing import Any

import pytest
import torch

from fedfrozen_app.strategies import FedAvg, FedAvgM
from fedfrozen_app.strategies.fedavgm import FedAvgMConfig, FedAvgMState, aggregate
from tests.strategies.clients import Clients, MlpWorker, gap, numbers, play, random_deltas


# beta = eta = 1/2, x = 0, Delta = (-1, 2) and then (1, -1), so d = (1, -2) and then (-1, 1)
@pytest.mark.parametrize(
    ("nesterov", "first", "second"),
    [
        # v = (1, -2), then (1/2 - 1, -1 + 1):  x - v / 2
        (False, [-0.5, 1.0], [-0.25, 1.0]),
        # d + v / 2 = (3/2, -3), then (-1 - 1/4, 1)
        (True, [-0.75, 1.5], [-0.125, 1.0]),
    ],
)
def test_two_rounds_of_two_clients_by_hand(
    nesterov: bool, first: list[float], second: list[float]
) -> None:
    config = FedAvgMConfig(server_lr=0.5, server_momentum=0.5, nesterov=nesterov)
    start = FedAvgMState({"w": numbers(0, 0)})
    states = play(aggregate, start, config, [numbers(-1, 2), numbers(1, -1)])
    assert [state.x["w"].tolist() for state in states] == [first, second]
    assert [state.v["w"].tolist() for state in states] == [[1, -2], [-0.5, 0]]
    assert start.v == {} and start.x["w"].tolist() == [0, 0]


# torch does not take Nesterov without momentum
@pytest.mark.parametrize(("beta", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_equals_torch_sgd_on_the_pseudo_gradient(beta: float, nesterov: bool) -> None:
    x = torch.nn.Parameter(torch.zeros(13, dtype=torch.float64))
    optimizer = torch.optim.SGD([x], lr=0.3, momentum=beta, nesterov=nesterov)
    config = FedAvgMConfig(server_lr=0.3, server_momentum=beta, nesterov=nesterov)
    deltas = random_deltas()
    states = play(aggregate, FedAvgMState({"w": x.detach().clone()}), config, deltas)
    for state, delta in zip(states, deltas, strict=True):
        x.grad = -delta
        optimizer.step()
        torch.testing.assert_close(state.x["w"], x.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_beta_0_and_eta_1_equal_fedavg(tmp_path: Path, nesterov: bool) -> None:
    cohort = {"seed": 3, "fraction_train": 3 / 7}
    clients = Clients(MlpWorker(tmp_path, momentum=0.9))
    x = clients.worker.initial_weights()
    plain = clients.run(FedAvg(**cohort), 3, x)[-1]
    ours = clients.run(FedAvgM(server_momentum=0.0, nesterov=nesterov, **cohort), 3, x)[-1]
    assert gap(ours, plain) < 1e-14
    assert gap(clients.run(FedAvgM(server_momentum=0.5, **cohort), 3, x)[-1], plain) > 1e-3
    assert gap(clients.run(FedAvgM(server_lr=0.5, **cohort), 1, x)[-1], plain) > 1e-3


def test_the_velocity_is_found_by_name_and_not_by_position() -> None:
    state = FedAvgMState({"w": numbers(0)}, {"b": numbers(8), "w": numbers(-4)})
    config = FedAvgMConfig(server_lr=1.0, server_momentum=0.5)
    after = play(aggregate, state, config, [numbers(0)])[0]
    assert after.x["w"].tolist() == [2]  # 0 - 1/2 * -4
    assert after.v.keys() == {"w"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server_lr": 0.0}, r"server_lr must be > 0, got 0\.0"),
        ({"server_momentum": 1.0}, r"server_momentum must be in \[0, 1\), got 1\.0; use 0"),
        ({"server_momentum": -0.1}, r"server_momentum must be in \[0, 1\), got -0\.1; use 0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FedAvgM(**options)
