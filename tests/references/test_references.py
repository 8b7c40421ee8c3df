"""The references, checked against numbers worked out by hand and the laws of each rule."""

import math

import numpy as np
import pytest

from tests.references.mlp import init_params, loss_and_grads
from tests.references.rules import (
    effective_steps,
    fedadagrad,
    fedadam,
    fedavg,
    fedavgm,
    fednova,
    fedprox,
    fedyogi,
    local_sgd,
    proximal_steps,
    scaffold,
)

INPUTS, HIDDEN, CLASSES, ROWS = 5, 7, 3, 11
EXAMPLES = {0: 13, 1: 29, 2: 3}
SGD = {"lr": 0.13, "momentum": 0.7, "weight_decay": 0.03}
ADAPTIVE = {"server_lr": 0.3, "b1": 0.9, "b2": 0.99, "tau": 0.01}


def batch(rng):
    return rng.normal(size=(ROWS, INPUTS)), rng.integers(0, CLASSES, size=ROWS)


def make_rounds(*cohorts, seed=17):
    """One round per {client: steps}."""
    rng = np.random.default_rng(seed)
    return [{i: [batch(rng) for _ in range(n)] for i, n in steps.items()} for steps in cohorts]


def network(seed=2):
    return init_params(INPUTS, HIDDEN, CLASSES, seed)


UNEVEN = make_rounds({0: 2, 1: 5, 2: 1}, {0: 3, 2: 4}, {0: 1, 1: 2, 2: 3})
EVEN = make_rounds({0: 3, 1: 3, 2: 3}, {1: 2, 2: 2}, {0: 5, 1: 5, 2: 5})


def assert_same(one, other, tol=1e-12):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        for k in a:
            np.testing.assert_allclose(a[k], b[k], rtol=tol, atol=tol, err_msg=k)


def differ(one, other):
    return max(np.abs(one[-1][k] - other[-1][k]).max() for k in one[-1])


# A network that is all zeros, fed zeros, is two logits (s, -s) of which only `2.bias` moves.
# For label 0 the gradient at s is -sigmoid(-2 s), for label 1 +sigmoid(2 s): -1/2 and +1/2 at 0.
LABEL_0 = (np.zeros((1, 1)), np.array([0]))
LABEL_1 = (np.zeros((1, 1)), np.array([1]))


def zero_network():
    return {
        "0.weight": np.zeros((1, 1)),
        "0.bias": np.zeros(1),
        "2.weight": np.zeros((2, 1)),
        "2.bias": np.zeros(2),
    }


def logit(model):
    """s, after checking that nothing else has moved."""
    s, minus_s = model["2.bias"]
    assert minus_s == pytest.approx(-s, abs=1e-15)
    assert not any(model[k].any() for k in ("0.weight", "0.bias", "2.weight"))
    return s


def sigmoid(z):
    return 1 / (1 + math.exp(-z))


# ---- the network


def test_gradient_agrees_with_finite_differences():
    params, (X, y) = network(), batch(np.random.default_rng(5))
    _, grads = loss_and_grads(params, X, y)
    h = 1e-6
    for k, value in params.items():
        assert grads[k].shape == value.shape
        for at in np.ndindex(value.shape):
            up, down = {**params, k: value.copy()}, {**params, k: value.copy()}
            up[k][at] += h
            down[k][at] -= h
            slope = (loss_and_grads(up, X, y)[0] - loss_and_grads(down, X, y)[0]) / (2 * h)
            assert grads[k][at] == pytest.approx(slope, abs=1e-8)


def test_zero_network_has_loss_log_2_and_gradient_one_half():
    loss, grads = loss_and_grads(zero_network(), *LABEL_0)
    assert loss == pytest.approx(math.log(2))
    np.testing.assert_allclose(grads["2.bias"], [-0.5, 0.5])


def test_loss_of_a_huge_logit_does_not_overflow():
    params = {**zero_network(), "2.bias": np.array([1000.0, 0.0])}
    assert loss_and_grads(params, *LABEL_1)[0] == 1000.0


# ---- the client


def test_two_steps_with_momentum_decay_and_proximal_term_by_hand():
    lr, rho, wd, mu, s0 = 0.4, 0.5, 0.1, 0.3, 0.2
    g1 = -sigmoid(-2 * s0) + wd * s0  # no proximal pull yet
    s1 = s0 - lr * g1
    g2 = -sigmoid(-2 * s1) + mu * (s1 - s0) + wd * s1
    s2 = s1 - lr * (rho * g1 + g2)
    x = {**zero_network(), "2.bias": np.array([s0, -s0])}
    y = local_sgd(x, [LABEL_0, LABEL_0], lr=lr, momentum=rho, weight_decay=wd, mu=mu)
    assert logit(y) == pytest.approx(s2, abs=1e-14)
    assert logit(x) == s0


def test_correction_is_added_to_the_gradient():
    correction = {**zero_network(), "2.bias": np.array([0.2, -0.2])}
    y = local_sgd(zero_network(), [LABEL_0], lr=1.0, correction=correction)
    assert logit(y) == pytest.approx(0.3)


def test_a_client_without_steps_is_refused():
    with pytest.raises(ValueError, match="at least one step"):
        fedavg(zero_network(), [{0: []}], {0: 1}, lr=1.0)


@pytest.mark.parametrize(
    ("tau", "rho", "expected"), [(1, 0.5, 1.0), (2, 0.5, 2.5), (3, 0.5, 4.25), (7, 0.0, 7.0)]
)
def test_effective_steps_by_hand(tau, rho, expected):
    # rho 1/2: buffers of a constant gradient are 1, 1.5, 1.75
    assert effective_steps(tau, rho) == pytest.approx(expected)


def test_proximal_steps_by_hand():
    # lr mu = 1/4: 1 + 3/4 + 9/16
    assert proximal_steps(3, lr=0.5, mu=0.5) == pytest.approx(2.3125)
    assert proximal_steps(3, lr=0.5, mu=1e-9) == pytest.approx(3)


# ---- every rule at once


@pytest.mark.parametrize(
    "rule",
    [
        fedavg,
        lambda *a, **k: fedprox(*a, mu=0.2, **k),
        lambda *a, **k: scaffold(*a, num_clients=5, **k).models,
        fednova,
        lambda *a, **k: fedavgm(*a, server_lr=0.7, beta=0.9, **k),
        lambda *a, **k: fedadam(*a, **ADAPTIVE, **k),
        lambda *a, **k: fedyogi(*a, **ADAPTIVE, **k),
        lambda *a, **k: fedadagrad(*a, **ADAPTIVE, **k),
    ],
    ids="fedavg fedprox scaffold fednova fedavgm fedadam fedyogi fedadagrad".split(),
)
def test_rule_leaves_its_inputs_alone_and_ignores_the_order_of_clients(rule):
    x, before = network(), network()
    turned = [dict(reversed(cohort.items())) for cohort in UNEVEN]
    models = rule(x, UNEVEN, EXAMPLES, **SGD)
    assert_same([x], [before], tol=0)
    assert_same(models, rule(x, turned, EXAMPLES, **SGD))
    assert all(v.dtype == np.float64 for model in models for v in model.values())
    # a round sees only the rounds before it
    assert_same(models[:2], rule(x, UNEVEN[:2], EXAMPLES, **SGD), tol=0)


# ---- FedAvg and FedProx


def test_fedavg_weighs_by_examples_by_hand():
    # y = (+0.2, -0.2), p = (3/4, 1/4)
    (model,) = fedavg(zero_network(), [{0: [LABEL_0], 1: [LABEL_1]}], {0: 3, 1: 1}, lr=0.4)
    assert logit(model) == pytest.approx(0.1)


def test_fedavg_weighs_only_the_clients_that_replied():
    (model,) = fedavg(zero_network(), [{0: [LABEL_0]}], {0: 3, 1: 1}, lr=0.4)
    assert logit(model) == pytest.approx(0.2)


def test_fedprox_with_mu_0_equals_fedavg():
    plain = fedavg(network(), UNEVEN, EXAMPLES, **SGD)
    assert_same(fedprox(network(), UNEVEN, EXAMPLES, mu=0.0, **SGD), plain, tol=0)
    assert differ(fedprox(network(), UNEVEN, EXAMPLES, mu=0.5, **SGD), plain) > 1e-3


def test_fedprox_with_one_step_equals_fedavg_whatever_mu():
    rounds = make_rounds({0: 1, 1: 1}, {1: 1, 2: 1})
    plain = fedavg(network(), rounds, EXAMPLES, **SGD)
    assert_same(fedprox(network(), rounds, EXAMPLES, mu=9.0, **SGD), plain, tol=0)


# ---- SCAFFOLD


def test_scaffold_two_rounds_by_hand():
    """N = 4, both clients in round 1, only client 0 in round 2; signs of everything."""
    rounds = [{0: [LABEL_0, LABEL_0], 1: [LABEL_1]}, {0: [LABEL_0]}]
    lr, eta = 0.4, 0.5
    # round 1, zero controls: y_0 = lr (1/2 + sigmoid(-2 * 0.2)), y_1 = -0.2
    y_0, y_1 = lr * (0.5 + sigmoid(-0.4)), -0.2
    x1 = eta * (y_0 + y_1) / 2
    c_0, c_1 = -y_0 / (2 * lr), -y_1 / lr
    assert c_0 < 0 and c_1 == 0.5
    c = 2 / 4 * (c_0 + c_1) / 2
    # round 2: one step along g - c_0 + c
    y = x1 - lr * (-sigmoid(-2 * x1) - c_0 + c)
    x2 = x1 + eta * (y - x1)
    new = c_0 - c + (x1 - y) / lr
    c2 = c + 1 / 4 * (new - c_0)

    result = scaffold(zero_network(), rounds, {0: 9, 1: 1}, lr=lr, num_clients=4, server_lr=eta)
    assert [logit(m) for m in result.models] == pytest.approx([x1, x2], abs=1e-14)
    assert logit(result.control) == pytest.approx(c2, abs=1e-14)
    assert logit(result.client_controls[0]) == pytest.approx(new, abs=1e-14)
    assert logit(result.client_controls[1]) == pytest.approx(c_1, abs=1e-14)
    # plain SGD: the new control is the mean gradient of the round
    assert new == pytest.approx(-sigmoid(-2 * x1), abs=1e-14)


def test_scaffold_from_zero_controls_equals_fedavg_with_equal_weights_for_one_round():
    equal = dict.fromkeys(EXAMPLES, 1)
    plain = fedavg(network(), UNEVEN[:1], equal, **SGD)
    # the numbers of examples weigh nothing
    result = scaffold(network(), UNEVEN[:1], EXAMPLES, num_clients=3, **SGD)
    assert_same(result.models, plain)
    longer = scaffold(network(), UNEVEN, EXAMPLES, num_clients=3, **SGD).models
    assert differ(longer, fedavg(network(), UNEVEN, equal, **SGD)) > 1e-3


@pytest.mark.parametrize("momentum", [0.0, 0.8])
@pytest.mark.parametrize(
    ("rounds", "num_clients"),
    [(make_rounds({0: 2, 1: 5, 2: 1}, {0: 1, 1: 2, 2: 3}), 3), (UNEVEN, 7)],
)
def test_scaffold_control_is_the_mean_of_all_client_controls(rounds, num_clients, momentum):
    # with partial participation too: a client that stays away keeps its control
    for seen in range(1, len(rounds) + 1):
        result = scaffold(
            network(), rounds[:seen], EXAMPLES, lr=0.1, momentum=momentum, num_clients=num_clients
        )
        mean = {
            k: sum(c[k] for c in result.client_controls.values()) / num_clients
            for k in result.control
        }
        assert_same([mean], [result.control])
        assert all(v.any() for v in mean.values())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_scaffold_control_has_the_length_of_a_gradient_with_and_without_momentum(momentum):
    # steps too small to change the gradient: each c_i+ is the gradient at x, whatever momentum
    x, data = network(), batch(np.random.default_rng(3))
    result = scaffold(x, [{0: [data] * 6}] * 2, {0: 1}, lr=1e-7, momentum=momentum, num_clients=2)
    assert_same([result.client_controls[0]], [loss_and_grads(x, *data)[1]], tol=1e-5)


def test_scaffold_refuses_more_clients_than_there_are():
    with pytest.raises(ValueError, match="num_clients"):
        scaffold(network(), UNEVEN, EXAMPLES, lr=0.1, num_clients=2)


# ---- FedNova


def test_fednova_by_hand():
    # d = (-y_0 / 2, +0.2 / 1), p = (3/4, 1/4), tau_eff = 7/4
    y_0 = 0.4 * (0.5 + sigmoid(-0.4))
    rounds = [{0: [LABEL_0, LABEL_0], 1: [LABEL_1]}]
    (model,) = fednova(zero_network(), rounds, {0: 3, 1: 1}, lr=0.4)
    assert logit(model) == pytest.approx(1.75 * (0.75 * y_0 / 2 - 0.25 * 0.2), abs=1e-14)


@pytest.mark.parametrize("options", [SGD, {"lr": 0.13}, {"lr": 0.13, "mu": 0.4}])
def test_fednova_with_equal_steps_equals_fedavg_of_the_same_clients(options):
    plain = fedprox if "mu" in options else fedavg
    nova = fednova(network(), EVEN, EXAMPLES, **options)
    assert_same(nova, plain(network(), EVEN, EXAMPLES, **options))
    uneven = fednova(network(), UNEVEN, EXAMPLES, **options)
    assert differ(uneven, plain(network(), UNEVEN, EXAMPLES, **options)) > 1e-3


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"mu": 1e6}])
def test_fednova_moves_along_the_weighted_gradient_whatever_the_numbers_of_steps(options):
    # steps too small to change the gradient: the direction is sum p_i g_i exactly
    x, lr, rng = network(), 1e-7, np.random.default_rng(23)
    data = {i: batch(rng) for i in EXAMPLES}
    rounds = [{0: [data[0]] * 2, 1: [data[1]] * 9, 2: [data[2]]}]
    (model,) = fednova(x, rounds, EXAMPLES, lr=lr, **options)
    total = sum(EXAMPLES.values())
    grads = {i: loss_and_grads(x, *data[i])[1] for i in data}
    moved = np.concatenate([(x[k] - model[k]).ravel() for k in x])
    mean = np.concatenate([sum(EXAMPLES[i] / total * grads[i][k] for i in data).ravel() for k in x])
    np.testing.assert_allclose(
        moved / np.linalg.norm(moved), mean / np.linalg.norm(mean), atol=1e-5
    )


def test_fednova_has_no_closed_form_for_momentum_and_mu_together():
    with pytest.raises(NotImplementedError, match="together"):
        fednova(network(), UNEVEN, EXAMPLES, mu=0.1, **SGD)


# ---- server optimisers

TWO = [{0: [LABEL_0], 1: [LABEL_1]}, {0: [LABEL_0], 1: [LABEL_1, LABEL_1]}]
WEIGHTS = {0: 3, 1: 1}


def average_from(x, cohort):
    """The weighted mean of the models of two clients, by hand for one and two steps."""
    y_0 = x + 0.4 * sigmoid(-2 * x)
    y_1 = x
    for _ in cohort[1]:
        y_1 -= 0.4 * sigmoid(2 * y_1)
    return 0.75 * y_0 + 0.25 * y_1


@pytest.mark.parametrize("nesterov", [False, True])
def test_fedavgm_two_rounds_by_hand(nesterov):
    eta, beta = 0.5, 0.9
    # round 1: d = v = -0.1
    x1 = eta * (0.19 if nesterov else 0.1)
    d = x1 - average_from(x1, TWO[1])
    v = -0.09 + d
    x2 = x1 - eta * (d + beta * v if nesterov else v)
    models = fedavgm(
        zero_network(), TWO, WEIGHTS, lr=0.4, server_lr=eta, beta=beta, nesterov=nesterov
    )
    assert [logit(m) for m in models] == pytest.approx([x1, x2], abs=1e-14)


@pytest.mark.parametrize("nesterov", [False, True])
def test_fedavgm_with_beta_0_and_eta_1_equals_fedavg(nesterov):
    plain = fedavg(network(), UNEVEN, EXAMPLES, **SGD)
    got = fedavgm(network(), UNEVEN, EXAMPLES, server_lr=1.0, beta=0.0, nesterov=nesterov, **SGD)
    assert_same(got, plain)


@pytest.mark.parametrize(
    ("rule", "correction", "expected"),
    [
        # Delta = 0.1: m = 0.01, sqrt(v) = 0.01
        (fedadam, "none", 0.3 * 0.5),
        (fedyogi, "none", 0.3 * 0.5),
        # sqrt(v) = 0.1
        (fedadagrad, "none", 0.3 * 0.01 / 0.11),
        # m = sqrt(v) = 0.1
        (fedadam, "adam", 0.3 * 0.1 / 0.11),
        (fedyogi, "adam", 0.3 * 0.1 / 0.11),
    ],
)
def test_first_adaptive_step_by_hand_on_both_signs(rule, correction, expected):
    for examples, sign in [({0: 3, 1: 1}, 1), ({0: 1, 1: 3}, -1)]:
        (model,) = rule(
            zero_network(), TWO[:1], examples, lr=0.4, bias_correction=correction, **ADAPTIVE
        )
        assert logit(model) == pytest.approx(sign * expected, abs=1e-14)


@pytest.mark.parametrize("correction", ["none", "adam"])
@pytest.mark.parametrize(("b2", "shrinks"), [(0.99, False), (0.1, True)])
@pytest.mark.parametrize("rule", [fedadam, fedyogi])
def test_second_adaptive_step_by_hand(rule, b2, shrinks, correction):
    eta, b1, tau = 0.05, 0.9, 0.01
    m, v, x, expected = 0.0, 0.0, 0.0, []
    for t, cohort in enumerate(TWO, start=1):
        delta = average_from(x, cohort) - x
        if t == 2:
            assert (v > delta**2) == shrinks  # both branches of Yogi's sign are met
        m = b1 * m + 0.1 * delta
        if rule is fedadam:
            v = b2 * v + (1 - b2) * delta**2
        else:
            v = v - (1 - b2) * delta**2 if v > delta**2 else v + (1 - b2) * delta**2
        m_hat, v_hat = (m / (1 - b1**t), v / (1 - b2**t)) if correction == "adam" else (m, v)
        x += eta * m_hat / (math.sqrt(v_hat) + tau)
        expected.append(x)
    options = dict(server_lr=eta, b1=b1, b2=b2, tau=tau, bias_correction=correction)
    models = rule(zero_network(), TWO, WEIGHTS, lr=0.4, **options)
    assert [logit(model) for model in models] == pytest.approx(expected, abs=1e-14)


def test_second_adagrad_step_by_hand():
    x1 = 0.3 * 0.01 / 0.11
    delta = average_from(x1, TWO[1]) - x1
    x2 = x1 + 0.3 * (0.009 + 0.1 * delta) / (math.sqrt(0.01 + delta**2) + 0.01)
    models = fedadagrad(zero_network(), TWO, WEIGHTS, lr=0.4, **ADAPTIVE)
    assert [logit(m) for m in models] == pytest.approx([x1, x2], abs=1e-14)


@pytest.mark.parametrize("rule", [fedadam, fedyogi, fedadagrad])
def test_adaptive_rules_with_a_huge_tau_equal_fedavg(rule):
    # sqrt(v) vanishes beside tau, and eta = tau makes the step m = Delta
    plain = fedavg(network(), UNEVEN, EXAMPLES, **SGD)
    options = {"server_lr": 1e9, "tau": 1e9, "b1": 0.0, "b2": 0.99}
    assert_same(rule(network(), UNEVEN, EXAMPLES, **options, **SGD), plain, tol=1e-8)


def test_adaptive_rules_refuse_a_bias_correction_they_do_not_have():
    with pytest.raises(ValueError, match="none or adam"):
        fedadam(network(), UNEVEN, EXAMPLES, bias_correction="flwr", **ADAPTIVE, **SGD)
    with pytest.raises(NotImplementedError, match="sum"):
        fedadagrad(network(), UNEVEN, EXAMPLES, bias_correction="adam", **ADAPTIVE, **SGD)
