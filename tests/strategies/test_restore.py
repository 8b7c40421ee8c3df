"""A rule that is restored in mid-run goes on bit for bit as if nothing had happened."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.serverapp.strategy import Strategy

from fedfrozen_app.strategies import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedFrozen,
    FedNova,
    FedProx,
    FedYogi,
    FreezeSchedule,
    Scaffold,
    ServerRule,
)
from tests.strategies.clients import Clients, MlpWorker, equal, gap

COHORT = {"seed": 1, "fraction_train": 3 / 7}
ROUNDS = 5
RULES: dict[str, Callable[[], ServerRule[Any, Any]]] = {
    "fedavg": lambda: FedAvg(**COHORT),
    "fedprox": lambda: FedProx(proximal_mu=0.5, **COHORT),
    "scaffold": lambda: Scaffold(server_lr=0.7, **COHORT),
    "fednova": lambda: FedNova(momentum=0.9, **COHORT),
    "fedavgm": lambda: FedAvgM(nesterov=True, **COHORT),
    "fedadam": lambda: FedAdam(**COHORT),
    "fedadam-corrected": lambda: FedAdam(bias_correction="adam", **COHORT),
    "fedyogi": lambda: FedYogi(**COHORT),
    "fedadagrad": lambda: FedAdagrad(**COHORT),
}
HAVE_MOMENTS = ("scaffold", "fedavgm", "fedadam", "fedadam-corrected", "fedyogi", "fedadagrad")


def frozen(rule: ServerRule[Any, Any]) -> FedFrozen:
    """Freeze part of a weight and a whole bias in rounds 3 and 4."""
    stages = ((1, "all"), (3, "0.weight[0:4], 2.bias"), (5, "all"))
    return FedFrozen(rule, schedule=FreezeSchedule(stages))


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state as a later process finds it: plain data, nothing shared."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize(
    ("wrap", "at"),
    [(None, 2), (frozen, 2), (frozen, 3), (frozen, 4)],
    ids=["plain", "freeze-next", "frozen", "thaw-next"],
)
@pytest.mark.parametrize("name", RULES)
def test_a_new_object_with_the_restored_state_goes_on_bit_for_bit(
    tmp_path: Path, name: str, wrap: Callable[[ServerRule[Any, Any]], FedFrozen] | None, at: int
) -> None:
    def strategy() -> Strategy:
        return RULES[name]() if wrap is None else wrap(RULES[name]())

    def clients() -> Clients:
        return Clients(MlpWorker(tmp_path, momentum=0.9, weight_decay=0.03))

    x = MlpWorker(tmp_path).initial_weights()
    whole = clients().run(strategy(), ROUNDS, x)

    same_clients, before = clients(), strategy()  # SCAFFOLD's keep what they have
    x = same_clients.run(before, at, x)[-1]
    state = through_a_file(before.state_dict())
    after = strategy()
    after.load_state_dict(state)
    rest = same_clients.run(after, ROUNDS - at, x, first=at + 1)
    assert len(rest) == ROUNDS - at
    assert all(equal(one, other) for one, other in zip(rest, whole[at:], strict=True))
    if wrap is not None:  # the freeze was on, and ended
        for entry, rows in (("2.bias", slice(None)), ("0.weight", slice(4))):
            bits = [model[entry][rows] for model in whole]
            assert torch.equal(bits[3], bits[1])
            assert not torch.equal(bits[4], bits[3])
        assert gap(whole[3], whole[1]) > 1e-3


@pytest.mark.parametrize("name", HAVE_MOMENTS)
def test_without_the_state_the_run_goes_on_otherwise(tmp_path: Path, name: str) -> None:
    clients = Clients(MlpWorker(tmp_path, momentum=0.9))
    x = clients.worker.initial_weights()
    whole = clients.run(RULES[name](), 3, x)
    forgetful = clients.run(RULES[name](), 1, whole[1], first=3)
    assert gap(forgetful[-1], whole[-1]) > 1e-4


@pytest.mark.parametrize(
    ("saved", "restored"),
    [
        ("fedavgm", "fedadam"),
        ("fedadam", "fedavgm"),
        ("scaffold", "fedavgm"),
        ("fedavg", "scaffold"),
        ("fedyogi", "fedavg"),
        ("fedadam", "fedyogi"),  # moments of the same names
        ("fedadam", "fedadagrad"),
    ],
)
def test_the_state_of_another_rule_is_refused(saved: str, restored: str) -> None:
    rule = RULES[restored]()
    kept = sorted(rule.state.moments())
    other = RULES[saved]()
    words = f"the state of {type(other).__name__}, not of {type(rule).__name__}; restore it into"
    with pytest.raises(ValueError, match=words):
        rule.load_state_dict(other.state_dict())
    assert sorted(rule.state.moments()) == kept
