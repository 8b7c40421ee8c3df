import pytest
import torch
from torch import nn

from fedfrozen_app.strategies.effective_steps import effective_steps
from fedfrozen_app.strategies.fedprox import Proximal

TAUS = (0, 1, 2, 3, 7, 29)


@pytest.mark.parametrize(
    ("tau", "options", "expected"),
    [
        (7, {}, 7),
        # the buffers of a constant gradient of 1 are 1, 3/2, 7/4
        (1, {"momentum": 0.5}, 1),
        (2, {"momentum": 0.5}, 2.5),
        (3, {"momentum": 0.5}, 4.25),
        # a gradient loses a quarter in every later step: 1 + 3/4 + 9/16
        (3, {"lr": 0.5, "proximal_mu": 0.5}, 2.3125),
        # eta mu = 3/2 overshoots: a = (-1/2, 1), and the norm takes the length of both
        (2, {"lr": 0.5, "proximal_mu": 3}, 1.5),
        # both, rho = 1/2, eta mu = 1/4: an impulse makes w = 1 and then 1 + (1/2 - 1/4) = 5/4
        (2, {"lr": 0.5, "proximal_mu": 0.5, "momentum": 0.5}, 2.25),
        (0, {"lr": 0.5, "proximal_mu": 0.5, "momentum": 0.5}, 0),
    ],
)
def test_by_hand(tau: int, options: dict[str, float], expected: float) -> None:
    assert effective_steps(tau, **options) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("rho", [0.0, 0.3, 0.9])
def test_momentum_has_the_papers_closed_form(tau: int, rho: float) -> None:
    expected = (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
    assert effective_steps(tau, momentum=rho) == pytest.approx(expected, rel=1e-13, abs=1e-13)


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize(("lr", "mu"), [(0.1, 0.7), (0.01, 1.0), (1.0, 0.99)])
def test_the_proximal_term_has_the_papers_closed_form(tau: int, lr: float, mu: float) -> None:
    expected = (1 - (1 - lr * mu) ** tau) / (lr * mu)
    assert effective_steps(tau, lr=lr, proximal_mu=mu) == pytest.approx(expected, rel=1e-13)


def test_without_momentum_and_proximal_term_they_are_the_steps_whatever_the_rate() -> None:
    assert [effective_steps(tau, lr=0.3) for tau in TAUS] == list(TAUS)


@pytest.mark.parametrize("rho", [0.0, 0.9])
@pytest.mark.parametrize("mu", [0.0, 0.7, 15.0])
def test_they_are_the_weights_of_the_gradients_in_torch_sgd(rho: float, mu: float) -> None:
    """a_k is how far a gradient of 1 in step k alone has moved w at the end, in units of -lr."""
    lr, tau = 0.1, 7
    weights = []
    for impulse in range(tau):
        params = {"w": nn.Parameter(torch.full((1,), 3.0, dtype=torch.float64))}
        optimizer = torch.optim.SGD(params.values(), lr=lr, momentum=rho)
        hook = Proximal(mu)
        hook.begin(params)
        for step in range(tau):
            params["w"].grad = torch.full_like(params["w"], float(step == impulse))
            hook.correct(params)
            optimizer.step()
        weights.append((3.0 - params["w"].item()) / lr)
    total = effective_steps(tau, lr=lr, momentum=rho, proximal_mu=mu)
    assert total == pytest.approx(sum(map(abs, weights)), rel=1e-12)
