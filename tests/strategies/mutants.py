"""Faults that people really put into these rules, each of which some fast test must notice.

``tests/test_mutants.py`` applies them one by one to a copy of the package.
"""

from typing import NamedTuple

from tests.strategies.mutants_of_codecs import CODECS
from tests.strategies.mutants_of_latents import LATENTS

RULES = "fedfrozen_app/strategies/"
AVERAGE, MEAN, BASE = RULES + "fedavg.py", RULES + "mean.py", RULES + "base.py"
PROX, NOVA, STEPS = RULES + "fedprox.py", RULES + "fednova.py", RULES + "effective_steps.py"
SCAFFOLD, ENTRIES = RULES + "scaffold.py", "fedfrozen_app/models/entries.py"
MOMENTUM, ADAM = RULES + "fedavgm.py", RULES + "fedadam.py"
YOGI, ADAGRAD = RULES + "fedyogi.py", RULES + "fedadagrad.py"
CLIENT, CLIENT_RULES = "fedfrozen_app/client_app.py", "fedfrozen_app/training/client_rules.py"
VERSIONS, KEPT = RULES + "versions.py", "fedfrozen_app/training/kept.py"


class Mutant(NamedTuple):
    """Replace ``old``, which is there once, by ``new``; ``test_file`` must then fail."""

    rule: str
    what: str
    file: str
    old: str
    new: str
    test_file: str


# One list per rule, so that a line is: what, file, old, new[, test file if not the rule's own, from
# the folder of the tests if it has a slash]
Fault = tuple[str, ...]

FEDAVG: list[Fault] = [
    (
        "uniform for weighted mean",
        AVERAGE,
        "1.0 if uniform else update.num_examples",
        "1.0",
    ),
    (
        "every reply weighs the same",
        BASE,
        "weight = float(metrics[self.weighted_by_key])",
        "weight = 1.0",
    ),
    ("only the last weight counts", MEAN, "self.total += weight", "self.total = weight"),
    (
        "weight over the total before it",
        MEAN,
        "weight / self.total)",
        "weight / (self.total + weight))",
    ),
    (
        "the first reply is written to",
        MEAN,
        "{name: wide(tensor).clone() for",
        "{name: wide(tensor) for",
    ),
    (
        "a mean in half precision",
        ENTRIES,
        "torch.promote_types(tensor.dtype, torch.float32)",
        "tensor.dtype",
    ),
    (
        "positions for names",
        MEAN,
        "targets = [self.value[name] for name in tensors]",
        "targets = list(self.value.values())[: len(tensors)]",
        "test_parity.py",
    ),
]

FEDPROX: list[Fault] = [
    ("sign of the pull", PROX, "alpha=self.proximal_mu)", "alpha=-self.proximal_mu)"),
    (
        "gradient of the un-squared norm",
        PROX,
        "drift = param.detach() - self._received[name]",
        "drift = param.detach() - self._received[name]\n"
        "            drift = drift / drift.norm().clamp(min=1e-12)",
    ),
    ("anchor is not a copy", PROX, "param.detach().clone() for", "param.detach() for"),
    (
        "anchor at zero, as weight decay",
        PROX,
        "param.detach().clone() for",
        "param.detach() * 0 for",
    ),
    (
        "mu without the square's factor 2",
        PROX,
        "alpha=self.proximal_mu)",
        "alpha=self.proximal_mu / 2)",
    ),
    ("gradient 2 mu (w - w_t)", PROX, "alpha=self.proximal_mu)", "alpha=2 * self.proximal_mu)"),
    ("mu is not sent", PROX, "return {PROXIMAL_MU: self.config.proximal_mu}", "return {}"),
    (
        "uniform for weighted mean",
        PROX,
        "x=weighted_mean(updates))",
        "x=weighted_mean(replace(one, num_examples=1) for one in updates))",
    ),
]

SCAFFOLD_FAULTS: list[Fault] = [
    (
        "sign of option II",
        SCAFFOLD,
        "(x[name] - y[name]) / step_sizes",
        "(y[name] - x[name]) / step_sizes",
    ),
    (
        "sign of the correction",
        SCAFFOLD,
        "parts({name: c[name] - c_i[name] for",
        "parts({name: c_i[name] - c[name] for",
    ),
    ("c left out of option II", SCAFFOLD, "c_i[name] - c[name] + (x", "c_i[name] + (x"),
    ("|S|/N left out", SCAFFOLD, "share = replied / config.num_clients", "share = 1.0"),
    (
        "planned for real cohort",
        SCAFFOLD,
        "return aggregate(state, updates, replace(self.config, num_clients=everyone))",
        "got = list(updates)\n"
        "        everyone = everyone * len(got) / self.report.cohort  # type: ignore[assignment]\n"
        "        return aggregate(state, iter(got), replace(self.config, num_clients=everyone))",
    ),
    (
        "weighted for uniform mean of y",
        SCAFFOLD,
        "y.add(update.arrays)",
        "y.add(update.arrays, update.num_examples)",
    ),
    (
        "weighted for uniform mean of Delta c",
        SCAFFOLD,
        "delta_c.add(update.extra.get(CONTROL, {}))",
        "delta_c.add(update.extra.get(CONTROL, {}), update.num_examples)",
    ),
    ("the server's rate on c", SCAFFOLD, "+ share * d for", "+ eta * share * d for"),
    ("epochs for steps", CLIENT, "effective_steps(result.steps, ", "effective_steps(1, "),
    (
        "momentum left out of the step sizes",
        CLIENT,
        "effective_steps(result.steps, momentum=worker.config.momentum)",
        "effective_steps(result.steps)",
    ),
    (
        "c_i starts with the weights",
        CLIENT_RULES,
        "zero = {name: torch.zeros_like(c) for name, c in self.c.items()}",
        "zero = dict(self._payload.active)",
    ),
    (
        "c_i is never stored",
        CLIENT_RULES,
        "self._kept.put(following)",
        "pass",
    ),
    (
        "c_i+ sent for Delta c_i",
        CLIENT_RULES,
        "following[name] - self.c_i[name] for",
        "following[name] for",
    ),
    (
        "c_i of the round before, used or not",
        KEPT,
        "self._kept.get(self._accepted)",
        "self._kept.get(self._version - 1)",
    ),
    (
        "a restored server has forgotten which c_i count",
        VERSIONS,
        'for c, pair in state["clients"].items()}',
        "for c, pair in ()}",
        "test_restore.py",
    ),
]

FEDNOVA: list[Fault] = [
    ("sign of d_i", NOVA, "(state.x[name] - y) / a_norm", "(y - state.x[name]) / a_norm"),
    ("epochs for steps", NOVA, "            update.steps,\n", "            1,\n"),
    ("tau_eff left out", NOVA, "tau_eff = effective / total", "tau_eff = 1.0"),
    (
        "tau_eff of uniform p",
        NOVA,
        "        effective += update.num_examples * a_norm\n        total += update.num_examples",
        "        effective += a_norm\n        total += 1",
    ),
    (
        "uniform for weighted mean of d_i",
        NOVA,
        "direction.add(normalised, update.num_examples)",
        "direction.add(normalised)",
    ),
    ("momentum left out of ||a||", NOVA, "momentum=config.momentum,", "momentum=0.0,"),
    ("mu left out of ||a||", NOVA, "proximal_mu=config.proximal_mu,", "proximal_mu=0.0,"),
    (
        "a reply without steps is taken",
        NOVA,
        "required_metrics = (STEPS,)",
        "required_metrics = ()",
    ),
    ("mu is not sent", NOVA, "if self.config.proximal_mu > 0 else {}", "if False else {}"),
    (
        "sign of the proximal term in ||a||",
        STEPS,
        "momentum * velocity - lr",
        "momentum * velocity + lr",
        "test_effective_steps.py",
    ),
    (
        "||a|| of signed weights",
        STEPS,
        "total += abs(moved)",
        "total += moved",
        "test_effective_steps.py",
    ),
]

FEDAVGM: list[Fault] = [
    ("sign of d", MOMENTUM, "d = x - average[name]", "d = average[name] - x"),
    ("velocity forgotten", MOMENTUM, "next_v[name] = v\n", "next_v[name] = d\n"),
    (
        "dampening",
        MOMENTUM,
        "v = beta * state.v.get(name, 0.0) + d",
        "v = beta * state.v.get(name, 0.0) + (1 - beta) * d",
    ),
    (
        "positions for names",
        MOMENTUM,
        "beta * state.v.get(name, 0.0)",
        "beta * (list(state.v.values())[len(next_v)] if state.v else 0.0)",
    ),
    (
        "Nesterov along the old velocity",
        MOMENTUM,
        "(d + beta * v if",
        "(d + beta * state.v.get(name, 0.0) if",
    ),
    ("Nesterov without d", MOMENTUM, "(d + beta * v if", "(beta * v if"),
    ("eta left out", MOMENTUM, "x - eta * (d", "x - (d"),
    (
        "momentum leaks into the state before",
        MOMENTUM,
        "next_x, next_v = {}, {}",
        "next_x, next_v = {}, state.v",
    ),
    (
        "the velocity is not restored",
        BASE,
        'self.state_type(**state["moments"])',
        "self.state_type()",
        "test_restore.py",
    ),
    (
        "the restored velocity belongs to whole entries",
        BASE,
        '"selection": self._selected,',
        '"selection": "all",',
        "test_restore.py",
    ),
    (
        "running statistics in the optimiser",
        ENTRIES,
        "if is_statistic or name in buffers:",
        "if name in buffers:",
        "test_buffers.py",
    ),
]

FEDADAM: list[Fault] = [
    ("sign of Delta", ADAM, "delta = average[name] - x", "delta = x - average[name]"),
    ("missing square", ADAM, "delta.square()", "delta.abs()"),
    ("tau inside the root", ADAM, "(v.sqrt() + tau)", "(v + tau).sqrt()"),
    ("exponent t + 1", ADAM, "1 - decay ** t.double()", "1 - decay ** (t.double() + 1)"),
    ("m without 1 - b1", ADAM, "(1 - b1) * delta", "delta"),
    ("v without 1 - b2", ADAM, "b2 * v + (1 - b2) * squared", "b2 * v + squared"),
    ("b2 corrects m", ADAM, "decays = (config.beta1, b2) if", "decays = (b2, b2) if"),
    (
        "v forgotten",
        ADAM,
        "second_moment(state.v.get(name, 0.0), ",
        "second_moment(0.0, ",
    ),
    (
        "the corrected moments are kept",
        ADAM,
        "following.x[name] = x + eta",
        "following.m[name], following.v[name] = m, v\n        following.x[name] = x + eta",
    ),
    (
        "moments leak into the state before",
        ADAM,
        "following = AdaptiveState({}, {}, {}, {})",
        "following = AdaptiveState({}, state.m, state.v, state.t)",
    ),
    (
        "counters in the optimiser",
        ENTRIES,
        "return tensor.is_floating_point() and tensor.ndim > 0",
        "return tensor.is_floating_point()",
        "test_buffers.py",
    ),
]

YOGI_SIGN = "v - (1 - config.beta2) * squared * torch.sign(v - squared)"
FEDYOGI: list[Fault] = [
    ("sign of the step in v", YOGI, "return v - (1", "return v + (1"),
    ("Adam's v", YOGI, YOGI_SIGN, "config.beta2 * v + (1 - config.beta2) * squared"),
    ("no sign", YOGI, "torch.sign(v - squared)", "(v - squared)"),
    (
        "missing square in the sign",
        YOGI,
        "torch.sign(v - squared)",
        "torch.sign(v - squared.sqrt())",
    ),
    ("b2 for 1 - b2", YOGI, "(1 - config.beta2) *", "config.beta2 *"),
    (
        "equality counts as below",
        YOGI,
        "torch.sign(v - squared)",
        "torch.where(torch.as_tensor(v) > squared, 1.0, -1.0)",
    ),
    ("sign of Delta", ADAM, "delta = average[name] - x", "delta = x - average[name]"),
    ("tau inside the root", ADAM, "(v.sqrt() + tau)", "(v + tau).sqrt()"),
]

FEDADAGRAD: list[Fault] = [
    ("v decays", ADAGRAD, "return v + squared", "return 0.99 * v + 0.01 * squared"),
    ("v forgotten", ADAGRAD, "return v + squared", "return 0 * v + squared"),
    ("missing square", ADAGRAD, "return v + squared", "return v + squared.sqrt()"),
    ("sign in v", ADAGRAD, "return v + squared", "return v - squared"),
    ("sign of Delta", ADAM, "delta = average[name] - x", "delta = x - average[name]"),
    ("tau inside the root", ADAM, "(v.sqrt() + tau)", "(v + tau).sqrt()"),
    ("m without 1 - b1", ADAM, "(1 - b1) * delta", "delta"),
]

FAULTS: dict[str, list[Fault]] = {
    "fedavg": FEDAVG,
    "fedprox": FEDPROX,
    "scaffold": SCAFFOLD_FAULTS,
    "fednova": FEDNOVA,
    "fedavgm": FEDAVGM,
    "fedadam": FEDADAM,
    "fedyogi": FEDYOGI,
    "fedadagrad": FEDADAGRAD,
    "compression": CODECS,
    "latent_strategy": LATENTS,
}


def _test_file(rule: str, said: tuple[str, ...]) -> str:
    name = said[0] if said else f"test_{rule}.py"
    return f"tests/{name}" if "/" in name else f"tests/strategies/{name}"


MUTANTS = [
    Mutant(rule, *fault[:4], _test_file(rule, fault[4:]))
    for rule, faults in FAULTS.items()
    for fault in faults
]
