from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch

from fedfrozen_app.strategies import FedYogi
from fedfrozen_app.strategies.fedadam import AdaptiveState
from fedfrozen_app.strategies.fedyogi import FedYogiConfig, aggregate
from tests.strategies.clients import numbers, play, random_deltas


def test_two_rounds_of_two_clients_by_hand() -> None:
    config = FedYogiConfig(server_lr=2.0, beta1=0.5, beta2=0.75, tau=1.0)
    state = AdaptiveState({"w": numbers(0, 0, 0)})
    states = play(aggregate, state, config, [numbers(4, -2, 2), numbers(1, 3, -1)])
    # from v = 0: Delta^2 / 4;  then v is above Delta^2, below it, and equal to it
    assert states[0].v["w"].tolist() == [4, 1, 1]
    assert states[1].v["w"].tolist() == [4 - 1 / 4, 1 + 9 / 4, 1]
    assert states[0].m["w"].tolist() == [2, -1, 1]
    assert states[1].m["w"].tolist() == [1.5, 1, 0]
    first = [2 * 2 / 3, -2 * 1 / 2, 2 * 1 / 2]
    assert states[0].x["w"].tolist() == pytest.approx(first, rel=1e-15)
    second = [
        first[0] + 2 * 1.5 / (sqrt(3.75) + 1),
        first[1] + 2 * 1 / (sqrt(3.25) + 1),
        first[2],
    ]
    assert states[1].x["w"].tolist() == pytest.approx(second, rel=1e-14)


def test_equals_the_papers_formula_in_numpy() -> None:
    eta, b1, b2, tau = 0.02, 0.9, 0.9, 1e-3
    config = FedYogiConfig(server_lr=eta, beta1=b1, beta2=b2, tau=tau)
    deltas = random_deltas(rounds=29)
    states = play(aggregate, AdaptiveState({"w": torch.zeros_like(deltas[0])}), config, deltas)
    x = m = v = np.zeros(13)
    shrank = grew = 0
    for state, delta in zip(states, deltas.numpy(), strict=True):
        shrank, grew = shrank + (v > delta**2).sum(), grew + (v < delta**2).sum()
        m = b1 * m + (1 - b1) * delta
        v = np.where(v > delta**2, v - (1 - b2) * delta**2, v + (1 - b2) * delta**2)
        x = x + eta * m / (np.sqrt(v) + tau)
        np.testing.assert_allclose(state.x["w"].numpy(), x, rtol=0, atol=1e-13)
    assert shrank > 50 and grew > 50


def test_v_stays_at_0_or_above_so_that_its_root_is_a_number() -> None:
    deltas = random_deltas(rounds=53) * torch.tensor([1.0, 1e-3] * 27)[:53, None]
    config = FedYogiConfig(beta2=0.0)
    states = play(aggregate, AdaptiveState({"w": torch.zeros_like(deltas[0])}), config, deltas)
    assert all(bool((state.v["w"] >= 0).all()) for state in states)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server_lr": -1.0}, r"server_lr must be > 0, got -1\.0"),
        ({"tau": 0.0}, r"tau must be > 0, got 0\.0"),
        ({"beta1": 1.0}, r"beta1 must be in \[0, 1\), got 1\.0"),
        ({"beta2": -0.5}, r"beta2 must be in \[0, 1\), got -0\.5"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FedYogi(**options)
