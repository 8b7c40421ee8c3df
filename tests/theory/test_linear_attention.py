"""The model, its gradients and the profile objective."""

import math

import pytest
import torch

from fedfrozen_app.theory.linear_attention import Attention
from fedfrozen_app.theory.problem import FeatureMap, Setting, Weights, initial_weights, make_data

PRIMES = Setting(
    rho=1.3, teacher="tanh", noise=0.2, dim=5, key_dim=3, tokens=7, examples=2, clients=3,
    value_scale=1.0, value_l2=0.07,
)  # fmt: skip
SEEDS = (3, 11)


def client_weights(setting: Setting = PRIMES) -> Weights:
    """Different weights for every client."""
    start = initial_weights(setting, SEEDS)
    clients = torch.arange(1.0, 1 + setting.clients, dtype=torch.float64).view(1, -1, 1, 1)
    return Weights(start.kernel * (0.5 + 0.3 * clients), start.value * clients)


def loss_by_loops(setting: Setting, weights: Weights) -> torch.Tensor:
    """f_k [S, K] written out example by example, from the formula."""
    data, _ = make_data(setting, SEEDS)
    s, k, m, n, _ = data.inputs.shape
    result = torch.zeros(s, k, dtype=torch.float64)
    phi = torch.sigmoid if setting.phi == "sigmoid" else lambda pre: torch.softmax(pre, -1)
    for i in range(s):
        for j in range(k):
            query, key = weights.kernel[i, j].chunk(2, dim=-1)
            for h, y in zip(data.inputs[i, j], data.targets[i, j], strict=True):
                out = phi(h @ query) @ phi(h @ key).T @ h @ weights.value[i, j] / n
                result[i, j] += (out - y).square().sum() / (2 * m * n)
            result[i, j] += setting.value_l2 / 2 * weights.value[i, j].square().sum()
    return result


@pytest.mark.parametrize("phi", ["sigmoid", "softmax"])
def test_the_gradient_is_that_of_autograd_and_of_finite_differences(phi: FeatureMap) -> None:
    setting = Setting(**{**PRIMES.__dict__, "phi": phi})
    weights = client_weights(setting)
    data, _ = make_data(setting, SEEDS)
    gradient = Attention(phi, setting.value_l2).gradient(data, weights)
    parts = [part.clone().requires_grad_() for part in weights.each()]
    expected = torch.autograd.grad(loss_by_loops(setting, Weights(*parts)).sum(), parts)
    for ours, theirs in zip(gradient.each(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)

    generator = torch.Generator().manual_seed(5)
    along = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in weights.each()]
    step = 1e-5

    def loss_at(distance: float) -> torch.Tensor:
        moved = (p + distance * a for p, a in zip(weights.each(), along, strict=True))
        return loss_by_loops(setting, Weights(*moved))

    slope = (loss_at(step) - loss_at(-step)) / (2 * step)
    ours = sum((g * a).sum((-2, -1)) for g, a in zip(gradient.each(), along, strict=True))
    torch.testing.assert_close(ours, slope, rtol=1e-7, atol=1e-9)


def test_the_quadratic_is_the_loss_at_a_held_kernel() -> None:
    data, _ = make_data(PRIMES, SEEDS)
    start = initial_weights(PRIMES, SEEDS)
    quadratic = Attention("sigmoid", PRIMES.value_l2).quadratic(data, start.kernel)
    everywhere = Weights(*(part.expand(-1, 3, -1, -1) for part in start.each()))
    expected = loss_by_loops(PRIMES, everywhere).mean(1)
    torch.testing.assert_close(quadratic.loss(start.value), expected, rtol=1e-12, atol=0)


def test_the_profile_objective_is_where_long_gradient_descent_ends() -> None:
    data, _ = make_data(PRIMES, SEEDS)
    kernel = initial_weights(PRIMES, SEEDS).kernel
    model = Attention("sigmoid", PRIMES.value_l2)
    value = torch.zeros(len(SEEDS), 1, 5, 5, dtype=torch.float64)
    quadratic = model.quadratic(data, kernel)
    lr = 1 / torch.linalg.eigvalsh(quadratic.mean().curvature).max()
    for _ in range(4000):
        everywhere = Weights(*(part.expand(-1, 3, -1, -1) for part in (kernel, value)))
        value = value - lr * model.gradient(data, everywhere, frozen=True).value.mean(1, True)
    torch.testing.assert_close(quadratic.loss(value), quadratic.profile(), rtol=0, atol=1e-8)
    torch.testing.assert_close(value, quadratic.minimizer(), rtol=0, atol=1e-6)
    # and nothing is below it
    for other in (0.9, 1.1):
        assert (quadratic.loss(other * quadratic.minimizer()) > quadratic.profile() + 1e-3).all()


def test_a_frozen_gradient_is_zero_in_the_kernel_and_unchanged_in_the_value() -> None:
    data, _ = make_data(PRIMES, SEEDS)
    model, weights = Attention("sigmoid", PRIMES.value_l2), client_weights()
    frozen, whole = model.gradient(data, weights, frozen=True), model.gradient(data, weights)
    assert frozen.kernel.shape == whole.kernel.shape and not frozen.kernel.any()
    assert torch.equal(frozen.value, whole.value)


def test_the_clients_means_spread_by_rho_and_the_draws_are_those_of_every_rho() -> None:
    one, two = (
        make_data(Setting(rho=rho, examples=211, clients=101), [7])[0].inputs for rho in (1.0, 2.0)
    )
    means = [inputs.mean((2, 3)) for inputs in (one, two)]
    assert means[0].std().item() == pytest.approx(1.0, abs=0.05)
    # the same tokens around means that are twice as far apart
    shift = (two - one)[0, :, 0, 0]
    torch.testing.assert_close(two - one, shift.view(1, 101, 1, 1, 8).expand_as(one))
    assert shift.std().item() == pytest.approx(1.0, abs=0.05)
    assert (one - means[0][:, :, None, None]).std().item() == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("teacher", ["linear", "softmax", "tanh"])
def test_targets_have_unit_variance_before_noise(teacher: str) -> None:
    setting = Setting(teacher=teacher, rho=2.0, examples=3)  # type: ignore[arg-type]
    train, held_out = make_data(setting, [1])
    both = torch.cat([train.targets, held_out.targets], dim=2)
    assert both.std().item() == pytest.approx(1.0, abs=1e-12)
    assert not torch.equal(train.inputs, held_out.inputs)


def test_the_linear_teacher_is_in_the_model_class() -> None:
    setting = Setting(teacher="linear", value_l2=0.0, dim=5, key_dim=3, examples=11)
    from fedfrozen_app.theory.problem import _normal

    query, key = _normal(2, "teacher-kernel", 2, 5, 3, dtype=torch.float64) / math.sqrt(5)
    kernel = torch.cat([query, key], dim=-1)[None, None]
    data, _ = make_data(setting, [2])
    profile = Attention("sigmoid", 0.0).quadratic(data, kernel).profile()
    assert profile.abs().item() < 1e-12


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rounds": 0}, "rounds must be >= 1, got 0"),
        ({"rho": -1.0}, "rho must be >= 0, got -1.0"),
        ({"lr": math.nan}, "lr must be > 0, got nan"),
        ({"teacher": "oracle"}, "teacher must be one of linear, softmax, tanh, none"),
        ({"phi": "relu"}, "phi must be one of sigmoid, softmax, got 'relu'"),
    ],
)
def test_a_wrong_setting_is_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Setting(**wrong)  # type: ignore[arg-type]
