from math import sqrt
from typing import Any

import pytest
import torch

from fedfrozen_app.strategies import FedAdagrad
from fedfrozen_app.strategies.fedadagrad import FedAdagradConfig, aggregate
from fedfrozen_app.strategies.fedadam import AdaptiveState
from tests.strategies.clients import numbers, play, random_deltas


def test_two_rounds_of_two_clients_by_hand() -> None:
    config = FedAdagradConfig(server_lr=2.0, beta1=0.5, tau=1.0)
    state = AdaptiveState({"w": numbers(0, 0)})
    states = play(aggregate, state, config, [numbers(3, -2), numbers(-4, 2)])
    assert [state.m["w"].tolist() for state in states] == [[1.5, -1], [-1.25, 0.5]]
    assert [state.v["w"].tolist() for state in states] == [[9, 4], [25, 8]]
    first = [2 * 1.5 / 4, -2 * 1 / 3]
    assert states[0].x["w"].tolist() == pytest.approx(first, rel=1e-15)
    second = [first[0] - 2 * 1.25 / 6, first[1] + 2 * 0.5 / (sqrt(8) + 1)]
    assert states[1].x["w"].tolist() == pytest.approx(second, rel=1e-14)


def test_without_momentum_it_equals_torch_adagrad_on_the_pseudo_gradient() -> None:
    x = torch.nn.Parameter(torch.zeros(13, dtype=torch.float64))
    optimizer = torch.optim.Adagrad([x], lr=0.05, eps=1e-3)
    config = FedAdagradConfig(server_lr=0.05, beta1=0.0, tau=1e-3)
    deltas = random_deltas(rounds=29)
    states = play(aggregate, AdaptiveState({"w": x.detach().clone()}), config, deltas)
    for state, delta in zip(states, deltas, strict=True):
        x.grad = -delta
        optimizer.step()
        torch.testing.assert_close(state.x["w"], x.detach(), rtol=0, atol=1e-13)
    assert float(x.detach().abs().min()) > 1e-3


def test_momentum_is_a_decayed_mean_of_the_deltas() -> None:
    # a constant Delta = 1: m = 1 - (3/4)^t, v = t
    config = FedAdagradConfig(server_lr=1.0, beta1=0.75, tau=0.5)
    states = play(aggregate, AdaptiveState({"w": numbers(0)}), config, [numbers(1)] * 7)
    steps = [(1 - 0.75**t) / (sqrt(t) + 0.5) for t in range(1, 8)]
    assert states[-1].x["w"].item() == pytest.approx(sum(steps), rel=1e-14)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"server_lr": 0.0}, ValueError, r"server_lr must be > 0, got 0\.0"),
        ({"tau": -0.1}, ValueError, r"tau must be > 0, got -0\.1"),
        ({"beta1": 1.5}, ValueError, r"beta1 must be in \[0, 1\), got 1\.5"),
        # a sum does not decay
        ({"beta2": 0.99}, TypeError, "beta2"),
    ],
)
def test_options_out_of_range_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        FedAdagrad(**options)
