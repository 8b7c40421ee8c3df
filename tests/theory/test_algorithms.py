"""The federated rules on linear attention: their laws, and agreement with the package's rules."""

from dataclasses import replace

import pytest
import torch
from flwr.app import MetricRecord

from fedfrozen_app.strategies.base import State, Update
from fedfrozen_app.strategies.fedavg import FedAvgConfig
from fedfrozen_app.strategies.fedavg import aggregate as fedavg
from fedfrozen_app.strategies.fedprox import Proximal
from fedfrozen_app.strategies.scaffold import ScaffoldConfig, ScaffoldState, next_control
from fedfrozen_app.strategies.scaffold import aggregate as scaffold
from fedfrozen_app.theory.algorithms import (
    SCAFFOLD,
    Federation,
    Rule,
    Run,
    freeze_losses,
    freeze_values,
    local_round,
    next_controls,
    server_mean,
    simulate,
)
from fedfrozen_app.theory.problem import Data, Setting, Weights

SMALL = Setting(
    rho=1.5, teacher="tanh", dim=5, key_dim=3, tokens=7, examples=2, clients=3, rounds=4,
    local_steps=6, lr=0.03, value_scale=1.0,
)  # fmt: skip
SEEDS = (2, 5)
NAMES = ("kernel", "value")


def built(**changes: object) -> Federation:
    return Federation.build([replace(SMALL, **changes)], SEEDS)  # type: ignore[arg-type]


def assert_same_run(one: Run, two: Run, atol: float = 1e-12) -> None:
    torch.testing.assert_close(one.kernels, two.kernels, rtol=0, atol=atol)
    torch.testing.assert_close(one.values, two.values, rtol=0, atol=atol)


def test_fedavg_with_one_step_at_rho_0_is_centralised_gradient_descent() -> None:
    fed = built(rho=0.0, local_steps=1)
    s, k, m, n, d = fed.train.inputs.shape
    pooled = Data(
        *(part.reshape(s, 1, k * m, n, d) for part in (fed.train.inputs, fed.train.targets))
    )
    x = fed.start
    for _ in range(fed.rounds):
        gradient = fed.model.gradient(pooled, x)
        x = Weights(x.kernel - fed.lr * gradient.kernel, x.value - fed.lr * gradient.value)
    run = simulate(fed)
    torch.testing.assert_close(run.kernels[-1], x.kernel, rtol=0, atol=1e-12)
    torch.testing.assert_close(run.values[-1], x.value, rtol=0, atol=1e-12)
    assert (run.kernels[-1] - run.kernels[0]).abs().max() > 1e-3


def test_scaffold_with_one_step_is_fedavg_and_with_more_is_not() -> None:
    assert_same_run(simulate(built(local_steps=1), SCAFFOLD), simulate(built(local_steps=1)))
    several = simulate(built(), SCAFFOLD).kernels - simulate(built()).kernels
    assert several[1].abs().max() < 1e-12 < 1e-4 < several[2].abs().max()


def test_fedprox_with_mu_0_is_fedavg_and_with_more_moves_less() -> None:
    plain = simulate(built())
    assert_same_run(simulate(built(), Rule(proximal_mu=0.0)), plain, atol=0)
    held = simulate(built(), Rule(proximal_mu=5.0))
    moved = [(run.kernels[1] - run.kernels[0]).norm() for run in (held, plain)]
    assert moved[0] < 0.9 * moved[1]


@pytest.mark.parametrize(
    "rule", [Rule(), Rule(0.3), SCAFFOLD], ids=["fedavg", "fedprox", "scaffold"]
)
def test_seeds_and_settings_at_once_are_those_one_by_one(rule: Rule) -> None:
    cells = [replace(SMALL, rho=0.5, lr=0.01), replace(SMALL, rho=2.0, teacher="softmax")]
    together = simulate(Federation.build(cells, SEEDS), rule)
    for row, (cell, seed) in enumerate((cell, seed) for cell in cells for seed in SEEDS):
        alone = simulate(Federation.build([cell], [seed]), rule)
        torch.testing.assert_close(
            together.kernels[:, row], alone.kernels[:, 0], rtol=0, atol=1e-12
        )
        torch.testing.assert_close(
            together.profile[:, row], alone.profile[:, 0], rtol=0, atol=1e-12
        )


def test_settings_of_unlike_shapes_do_not_run_together() -> None:
    with pytest.raises(ValueError, match="local_steps must be the same in all settings"):
        Federation.build([SMALL, replace(SMALL, local_steps=1)], SEEDS)


@pytest.mark.parametrize("warmup", [0, 1, 3, 4])
def test_fedfrozen_by_round_maps_is_fedavg_on_the_value_alone_step_by_step(warmup: int) -> None:
    fed = built()
    run = simulate(fed)
    x = Weights(run.kernels[warmup], run.values[warmup])
    for _ in range(fed.rounds - warmup):
        value = x.value.expand(-1, 3, -1, -1)
        for _ in range(fed.local_steps):
            at = Weights(x.kernel.expand(-1, 3, -1, -1), value)
            value = value - fed.lr * fed.model.gradient(fed.train, at, frozen=True).value
        x = Weights(x.kernel, value.mean(1, keepdim=True))
    torch.testing.assert_close(freeze_values(fed, run)[warmup], x.value, rtol=0, atol=1e-12)
    loss = run.quadratic.loss(freeze_values(fed, run))
    assert torch.equal(freeze_losses(fed, run), loss)
    assert torch.equal(loss[-1], run.loss[-1])


def updates_of(y: Weights, extra: list[dict[str, torch.Tensor]] | None = None) -> list[Update]:
    """One seed's clients as the package's server sees them."""
    return [
        Update(
            client,
            7,
            {name: getattr(y, name)[0, client] for name in NAMES},
            MetricRecord(),
            extra={"control": extra[client]} if extra else {},
        )
        for client in range(y.kernel.shape[1])
    ]


def test_the_server_agrees_with_the_packages_fedavg() -> None:
    fed = built()
    y = local_round(fed, fed.start, Rule(), None)
    ours, theirs = server_mean(y), fedavg(State(), iter(updates_of(y)), FedAvgConfig()).x
    for name in NAMES:
        torch.testing.assert_close(getattr(ours, name)[0, 0], theirs[name], rtol=0, atol=1e-12)


def test_the_local_steps_agree_with_the_packages_proximal_hook() -> None:
    fed, mu = built(), 0.7
    y = local_round(fed, fed.start, Rule(proximal_mu=mu), None)
    everywhere = [part.expand(-1, 3, -1, -1).clone() for part in fed.start.each()]
    params = {n: torch.nn.Parameter(p) for n, p in zip(NAMES, everywhere, strict=True)}
    hook = Proximal(mu)
    hook.begin(params)
    for _ in range(fed.local_steps):
        now = Weights(*(params[name].detach() for name in NAMES))
        gradient = fed.model.gradient(fed.train, now)
        for name in NAMES:
            params[name].grad = getattr(gradient, name).clone()
        hook.correct(params)
        with torch.no_grad():
            for param in params.values():
                param -= fed.lr * param.grad
    for name in NAMES:
        torch.testing.assert_close(getattr(y, name), params[name].detach(), rtol=0, atol=1e-12)


def test_scaffold_agrees_with_the_packages_over_rounds() -> None:
    """Controls and model of three rounds, with the server's c kept by the package's rule."""
    fed = built()
    x, c_k = (
        fed.start,
        Weights(*(torch.zeros(2, 3, *p.shape[2:]).double() for p in fed.start.each())),
    )
    state = ScaffoldState(
        x={name: getattr(x, name)[0, 0] for name in NAMES},
        c={name: torch.zeros_like(getattr(x, name)[0, 0]) for name in NAMES},
    )
    for _ in range(3):
        y = local_round(fed, x, SCAFFOLD, c_k)
        following = next_controls(c_k, x, y, fed.local_steps * fed.lr)
        deltas = []
        for client in range(3):
            mine = {name: getattr(c_k, name)[0, client] for name in NAMES}
            at = {name: getattr(y, name)[0, client] for name in NAMES}
            new = next_control(state.c, mine, state.x, at, fed.local_steps * SMALL.lr)
            for name in NAMES:
                ours = getattr(following, name)[0, client]
                torch.testing.assert_close(ours, new[name], rtol=0, atol=1e-12)
            deltas.append({name: new[name] - mine[name] for name in NAMES})
        state = scaffold(state, iter(updates_of(y, deltas)), ScaffoldConfig(num_clients=3))
        x, c_k = server_mean(y), following
        for name in NAMES:
            mean = getattr(c_k, name)[0].mean(0)
            torch.testing.assert_close(mean, state.c[name], rtol=0, atol=1e-12)
            torch.testing.assert_close(getattr(x, name)[0, 0], state.x[name], rtol=0, atol=1e-12)
    assert state.c["kernel"].abs().max() > 1e-3


def test_agreement_is_1_for_one_client_and_between_0_and_1_for_several() -> None:
    alone = simulate(built(clients=1))
    torch.testing.assert_close(alone.agreement, torch.ones_like(alone.agreement))
    several = simulate(built(rho=3.0)).agreement
    assert ((several > 0) & (several < 1)).all()
    moved = (simulate(built()).kernels.diff(dim=0)[:, :, 0]).square().sum((-2, -1)).sqrt()
    torch.testing.assert_close(simulate(built()).movement, moved, rtol=1e-9, atol=0)
