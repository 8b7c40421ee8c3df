"""From a run config to its rule, and what a rule keeps."""

import logging
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from fedfrozen_app.config import RunConfig
from fedfrozen_app.strategies import FedAdam, FedAvg, FedAvgM, FedFrozen, Scaffold, ServerRule
from fedfrozen_app.strategies.rules import RULES, build_rule
from fedfrozen_app.transport.payload import PROXIMAL_MU
from tests.strategies.learners import Learners, sequences, small_transformer


def build(**keys: Any) -> ServerRule[Any, Any]:
    values = {key.replace("_", "-"): value for key, value in keys.items()}
    return build_rule(RunConfig.from_mapping(values), num_clients=13, seed=5)


def test_every_strategy_of_the_config_has_a_rule() -> None:
    names = get_args(RunConfig.model_fields["strategy"].annotation)
    assert set(RULES) == set(names)


def test_every_field_of_a_rules_config_is_a_config_key() -> None:
    for name, rule in RULES.items():
        for field in fields(rule.config_type):
            assert field.name in RunConfig.model_fields, (name, field.name)


DEFAULTS: dict[str, dict[str, Any]] = {
    "fedavg": {"weighting": "examples"},
    "fedfrozen": {"weighting": "examples"},
    "latent": {"weighting": "uniform"},
    "fedprox": {"proximal_mu": 0.01},
    "scaffold": {"server_lr": 1.0, "num_clients": 13},
    "fednova": {"momentum": 0.9, "proximal_mu": 0.0, "lr": 0.01},
    "fedavgm": {"server_lr": 1.0, "server_momentum": 0.9, "nesterov": False},
    "fedadam": {
        "server_lr": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3, "bias_correction": "none",
    },
    "fedyogi": {"server_lr": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3},
    "fedadagrad": {"server_lr": 0.01, "beta1": 0.9, "tau": 1e-3},
}  # fmt: skip


@pytest.mark.parametrize("strategy", RULES)
def test_the_defaults_of_a_rule_are_those_of_the_config(strategy: str) -> None:
    rule = build(strategy=strategy)
    assert type(rule) is RULES[strategy]
    assert vars(rule.config) == DEFAULTS[strategy]
    assert rule.seed == 5


SET: dict[str, dict[str, Any]] = {
    "fedprox": {"proximal_mu": 0.25},
    "scaffold": {"server_lr": 0.5},
    "fednova": {"momentum": 0.5, "proximal_mu": 0.125, "lr": 0.3},
    "fedavgm": {"server_lr": 0.5, "server_momentum": 0.25, "nesterov": True},
    "fedadam": {
        "server_lr": 0.5, "beta1": 0.25, "beta2": 0.75, "tau": 0.5, "bias_correction": "adam",
    },
    "fedyogi": {"server_lr": 0.5, "beta1": 0.25, "beta2": 0.75, "tau": 0.5},
    "fedadagrad": {"server_lr": 0.5, "beta1": 0.25, "tau": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("strategy", SET)
def test_every_key_of_a_rule_reaches_it(strategy: str) -> None:
    config = vars(build(strategy=strategy, **SET[strategy]).config)
    assert {key: config[key] for key in SET[strategy]} == SET[strategy]
    assert config.keys() == DEFAULTS[strategy].keys()


def test_a_proximal_mu_of_zero_is_kept() -> None:
    rule = build(strategy="fedprox", proximal_mu=0.0)
    assert rule.instructions(0) == {PROXIMAL_MU: 0.0}
    assert build(strategy="fednova").instructions(0) == {}
    assert build(strategy="fednova", proximal_mu=0.5).instructions(0) == {PROXIMAL_MU: 0.5}


def test_the_share_of_clients_that_have_no_data_does_not_dilute_c(tmp_path: Path) -> None:
    # N is what the rule is told, or else the clients it knows in the round
    ends = {}
    for everyone in (0, 3, 12):
        clients = Learners(tmp_path / str(everyone), small_transformer, sequences((11, 5, 7)))
        rule = Scaffold(num_clients=everyone, fraction_train=0.7, min_train_nodes=1)
        clients.run(rule, 1)
        ends[everyone] = rule.state.c["head.weight"]
    assert torch.equal(ends[0], ends[3])
    torch.testing.assert_close(ends[12], ends[3] / 4)


def test_a_state_of_another_rule_is_an_error() -> None:
    with pytest.raises(ValueError, match="the state of FedAdam, not of FedAvgM; restore"):
        FedAvgM().load_state_dict(FedAdam().state_dict())
    with pytest.raises(ValueError, match="the state of None, not of FedAvg; restore"):
        FedAvg().load_state_dict({})


def test_a_restored_rule_is_the_same_run_and_a_new_one_is_not() -> None:
    one, other = Scaffold(), Scaffold()
    assert one.versions.run != other.versions.run and len(one.versions.run) == 32
    other.load_state_dict(one.state_dict())
    assert other.versions.run == one.versions.run


def test_a_saved_state_does_not_move_with_the_rule(tmp_path: Path) -> None:
    for name in ("scaffold", "fedavgm", "fedadam"):
        clients = Learners(tmp_path / name, small_transformer, sequences((11, 5)))
        rule = RULES[name]()
        strategy = FedFrozen(rule, warmup_rounds=5)
        arrays = clients.run(strategy, 1)
        saved = strategy.state_dict()["inner"]
        values = {
            (field, key): tensor.clone()
            for field, tensors in saved["moments"].items()
            for key, tensor in tensors.items()
        }
        about = repr({key: value for key, value in saved.items() if key != "moments"})
        clients.run(strategy, 2, arrays, first=2)
        assert values
        for (field, key), value in values.items():
            assert torch.equal(saved["moments"][field][key], value)
            assert not torch.equal(getattr(rule.state, field)[key], value)
        assert repr({key: value for key, value in saved.items() if key != "moments"}) == about


def test_a_rule_holds_no_model_between_rounds(tmp_path: Path) -> None:
    for name in ("fedavg", "scaffold", "fedadam"):
        clients = Learners(tmp_path / name, small_transformer, sequences((11, 5)))
        rule = RULES[name]()
        clients.run(rule, 2)
        assert rule.state.x == {} and rule._global == {} and rule._sent == []


@pytest.mark.parametrize("name", sorted(set(RULES) - {"fedfrozen"}))
def test_every_rule_says_what_it_is_in_its_summary(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="flwr")  # a run in this process may have raised it
    RULES[name]().summary()
    assert any(f"{RULES[name].config_type.__name__}(" in r.getMessage() for r in caplog.records)
