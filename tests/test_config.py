import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.config_input import parse_overrides, read_experiment

FILES = sorted((Path(__file__).parents[1] / "experiments").glob("*.toml"))
EXPERIMENTS = [path for path in FILES if "[sweep]" not in path.read_text()]
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"

# the keys that scripts and papers' experiment files rely on
DESIGNED = """
dataset data-dir public-fraction max-train-examples max-test-examples partitioner alpha
num-clients min-partition-size model weights image-size strategy rounds fraction-train
local-epochs local-steps batch-size optimizer lr momentum weight-decay clip-norm
warmup-rounds warmup-ratio frozen value-l2 proximal-mu server-lr server-momentum beta1 beta2
tau latent-dim latent-rank generator latent-bits compression head precision device seed
eval-every run-name run-dir engine
""".split()


def config(**values: Any) -> RunConfig:
    return RunConfig.from_mapping({key.replace("_", "-"): value for key, value in values.items()})


def test_every_designed_key_exists_with_a_description() -> None:
    assert set(DESIGNED) <= set(RunConfig.keys())
    assert all(field.description for field in RunConfig.model_fields.values())


def test_flower_defaults_in_pyproject_are_the_config_defaults() -> None:
    app = tomllib.loads(PYPROJECT.read_text())["tool"]["flwr"]["app"]
    defaults = RunConfig().to_mapping()
    assert app["config"] == defaults
    # an int default must not reach Flower where a float is meant, nor the other way round
    assert [type(app["config"][key]) for key in defaults] == [*map(type, defaults.values())]


def test_a_config_survives_the_way_through_flower() -> None:
    one = config(dataset="cifar10", lr=0.3, warmup_rounds=3, frozen="a.* !b", rounds=7)
    assert RunConfig.from_mapping(one.to_mapping()) == one
    assert hash(RunConfig.from_mapping(one.to_mapping())) == hash(one)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("alpah", "alpha"), ("num_clients", "num-clients"), ("learning-rate", "server-lr")],
)
def test_an_unknown_key_names_the_nearest_one(key: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown config key '{key}'; did you mean '") as caught:
        RunConfig.from_mapping({key: 1})
    if key != "learning-rate":
        assert f"'{nearest}'" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"warmup-rounds": 3, "warmup-ratio": 0.5}, ["warmup-rounds=3", "warmup-ratio=0.5", "one"]),
        ({"warmup-rounds": 13, "rounds": 12}, ["warmup-rounds", "<= rounds=12", "got 13"]),
        ({"warmup-ratio": 1.5}, ["warmup-ratio", "less than or equal to 1", "got 1.5"]),
        ({"warmup-ratio": -0.5}, ["warmup-ratio", "[0, 1]", "got -0.5"]),
        ({"batch-size": 0}, ["batch-size", "greater than or equal to 1", "got 0"]),
        ({"alpha": 0}, ["alpha", "greater than 0", "got 0"]),
        ({"alpha": float("nan")}, ["alpha", "finite"]),
        ({"lr": float("inf")}, ["lr", "finite"]),
        ({"alpha": "small"}, ["alpha", "number", "'small'"]),
        ({"rounds": 2.5}, ["rounds", "integer", "2.5"]),
        ({"fraction-train": 0}, ["fraction-train", "greater than 0"]),
        ({"fraction-train": 1.1}, ["fraction-train", "less than or equal to 1"]),
        ({"partitioner": "random"}, ["partitioner", "'iid'", "'random'"]),
        ({"device": "tpu"}, ["device", "cuda", "'tpu'"]),
        ({"run-name": "../up"}, ["run-name", "'../up'"]),
        ({"strategy": "fedavg", "proximal-mu": 0.1}, ["proximal-mu=0.1", "fedavg", "no effect"]),
        ({"strategy": "fedavg", "beta1": 0.5}, ["beta1=0.5", "no effect", "leave it at 0.9"]),
        ({"strategy": "latent", "compression": "int8"}, ["compression=int8", "use latent-bits"]),
        ({"strategy": "latent", "broadcast": "int4"}, ["broadcast=int4", "use latent-bits"]),
        ({"strategy": "latent", "latent-bits": 5}, ["latent-bits", "32, 8 or 4", "got 5"]),
        ({"strategy": "latent", "latent-rank": 65}, ["latent-rank", "<= latent-dim=64", "got 65"]),
        ({"strategy": "latent", "value-l2": 0.1}, ["value-l2=0.1", "latent-weight-decay"]),
        (
            {"strategy": "latent", "generator": "sketch", "generator-memory": "regenerated"},
            ["generator-memory=regenerated", "no effect", "generator=gaussian-qr"],
        ),
        ({"strategy": "fedprox", "proximal-mu": -0.1}, ["proximal-mu", ">= 0", "-0.1", "use 0"]),
        ({"strategy": "fedavgm", "server-lr": 0}, ["server-lr", "> 0", "got 0"]),
        ({"strategy": "fedprox", "server-lr": 0.5}, ["server-lr=0.5", "fedprox", "no effect"]),
        ({"nesterov": True}, ["nesterov=True", "no effect", "strategy=fedavgm"]),
        ({"strategy": "scaffold", "optimizer": "adamw"}, ["scaffold", "optimizer=sgd", "adamw"]),
        ({"strategy": "fednova", "optimizer": "adamw"}, ["fednova", "optimizer=sgd", "adamw"]),
        ({"local-steps": "2-9"}, ["local-steps=2-9", "work=fixed", "work=random"]),
        ({"local-steps": "9-2", "work": "random"}, ["local-steps", "range", "'9-2'"]),
        ({"local-steps": "0-2", "work": "random"}, ["local-steps", "range", "'0-2'"]),
        ({"local-steps": -1}, ["local-steps", "integer >= 0", "got -1"]),
        ({"local-steps": 1.5}, ["local-steps", "integer >= 0", "got 1.5"]),
        ({"local-steps": 1, "work": "random"}, ["work=random", "1 to 1", "raise local-steps"]),
        ({"local-steps": "2-9", "local-epochs": 5}, ["local-steps=2-9", "both"]),
        ({"compression": "int3"}, ["compression must be", "int8", "got 'int3'", "topk:0.01"]),
        ({"compression": "topk:0"}, ["compression=topk:F", "0 < F <= 1", "got 'topk:0'"]),
        ({"compression": "topk:1.5"}, ["compression=topk:F", "0 < F <= 1", "got 'topk:1.5'"]),
        ({"compression": "powersgd"}, ["compression must be", "got 'powersgd'"]),
        ({"compression": "powersgd:0"}, ["compression=powersgd:R", "R >= 1", "powersgd:2"]),
        ({"compression": ""}, ["compression must be", "got ''"]),
        ({"broadcast": "topk:0.1"}, ["broadcast", "'none', 'int8' or 'int4'", "'topk:0.1'"]),
        ({"strategy": "fedavg", "frozen": "all", "warmup-rounds": 2}, ["frozen=all", "warm-up"]),
        ({"frozen": "all"}, ["strategy=fedfrozen", "fedavg"]),
        ({"strategy": "fedavg", "value-l2": 0.1}, ["value-l2=0.1", "freeze"]),
        ({"public-fraction": 0.0}, ["weights=base", "public-fraction=0"]),
        ({"public-fraction": 1.0}, ["public-fraction", "less than 1"]),
        ({"engine": "flwr", "jobs": 2}, ["jobs=2", "engine=flwr"]),
        ({"partitioner": "iid", "alpha": 0.1}, ["alpha=0.1", "partitioner=iid", "dirichlet"]),
        ({"classes-per-client": 3}, ["classes-per-client=3", "dirichlet", "shard"]),
        ({"optimizer": "adamw", "momentum": 0.5}, ["momentum=0.5", "adamw", "sgd"]),
        ({"local-steps": 3, "local-epochs": 5}, ["local-steps=3", "local-epochs=5", "both"]),
        ({"data-dir": "here"}, ["dataset=digits is bundled", "data-dir"]),
        ({"label-column": "y"}, ["dataset=digits is bundled", "label-column"]),
        ({"public-fraction": -2.0}, ["public-fraction", "greater than or equal to -1"]),
        ({"batch-size": 10**20}, ["batch-size", "less than or equal to"]),
        ({"rounds": True}, ["rounds", "should not be true or false"]),
    ],
)
def test_what_cannot_work_is_an_error_that_says_what_to_change(
    values: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_mapping(values)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("latent-dim", 32),
        ("latent-rank", 16),
        ("latent-bits", 4),
        ("latent-lr", 0.1),
        ("latent-weight-decay", 0.0),
        ("latent-clip-norm", 0.0),
        ("generator", "sketch"),
        ("generator-memory", "regenerated"),
    ],
)
def test_a_key_of_latents_acts_with_them_alone(key: str, value: Any) -> None:
    assert RunConfig.from_mapping({"strategy": "latent", key: value}).freezes
    for strategy in ("fedavg", "fedfrozen"):
        with pytest.raises(ConfigError, match=f"{key}={value} has no effect with strategy="):
            RunConfig.from_mapping({"strategy": strategy, key: value})


def test_latents_begin_at_once_unless_a_warmup_is_asked_for() -> None:
    flite = config(strategy="latent", rounds=10)
    assert (flite.resolved_frozen, flite.resolved_warmup_rounds) == ("all", 0)
    assert flite.resolved_weighting == "uniform" and flite.freezes
    assert config(strategy="latent", rounds=10, warmup_ratio=0.4).resolved_warmup_rounds == 4
    assert config(strategy="latent", rounds=10, warmup_rounds=3).resolved_warmup_rounds == 3
    assert not config(strategy="latent", rounds=10, warmup_rounds=10).freezes
    assert config(strategy="latent", weighting="examples").resolved_weighting == "examples"


def test_fedfrozen_freezes_query_key_after_four_tenths_of_the_rounds_by_default() -> None:
    default = config(rounds=12)
    assert (default.resolved_frozen, default.resolved_warmup_rounds) == ("query-key", 5)
    assert default.freezes


def test_a_plain_strategy_freezes_only_when_asked_to() -> None:
    plain = config(strategy="fedavg", rounds=7)
    assert (plain.resolved_frozen, plain.resolved_warmup_rounds, plain.freezes) == ("all", 7, False)
    assert not config(strategy="fedavg", rounds=7, warmup_rounds=3).freezes
    asked = config(strategy="fedavg", rounds=7, warmup_rounds=3, frozen="query-key")
    assert (asked.resolved_frozen, asked.resolved_warmup_rounds) == ("query-key", 3)
    named = config(strategy="fedavg", rounds=10, frozen="head")
    assert (named.resolved_frozen, named.resolved_warmup_rounds) == ("head", 4)


@pytest.mark.parametrize(
    ("ratio", "rounds", "warmup"),
    [(0, 7, 0), (1, 7, 7), (0.3, 10, 3), (0.9, 4, 3), (0.05, 5, 1), (0.4, 1, 0), (0.6, 2, 1)],
)
def test_a_warmup_ratio_is_a_share_of_the_rounds(ratio: float, rounds: int, warmup: int) -> None:
    one = config(rounds=rounds, warmup_ratio=ratio)
    assert one.resolved_warmup_rounds == warmup
    assert one.freezes == (warmup < rounds)


def test_auto_values_follow_the_data_set() -> None:
    digits, cifar, femnist = config(), config(dataset="cifar10"), config(dataset="femnist")
    assert (digits.resolved_model, digits.resolved_weights) == ("vit-digits", "base")
    assert digits.resolved_public_fraction == 0.15
    assert (cifar.resolved_model, cifar.resolved_weights) == ("vit-b-32", "pretrained")
    assert cifar.resolved_public_fraction == 0
    assert femnist.resolved_model == "vit-s-16"


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ({}, [2, 2]),
        ({"work": "random", "local-epochs": 5}, [1, 5]),
        ({"local-steps": 7}, [7, 7]),
        ({"local-steps": 7, "work": "random"}, [1, 7]),
        ({"local-steps": "3-7", "work": "random"}, [3, 7]),
        ({"local-steps": " 3 - 7 ", "work": "random"}, [3, 7]),
        ({"local-steps": "5"}, [5, 5]),
    ],
)
def test_the_work_of_a_client_is_a_number_or_a_range(
    values: dict[str, Any], drawn: list[int]
) -> None:
    config = RunConfig.from_mapping(values)
    assert config.work_range == drawn
    assert config.resolved_local_steps == (drawn[1] if "local-steps" in values else 0)


def test_a_rate_of_minus_one_stands_for_what_suits_the_rule() -> None:
    def rates(strategy: str, **keys: Any) -> tuple[float, float]:
        config = RunConfig.from_mapping({"strategy": strategy, **keys})
        return config.resolved_server_lr, config.resolved_proximal_mu

    assert rates("scaffold") == rates("fedavgm") == rates("fednova") == (1.0, 0.0)
    assert rates("fedadam") == rates("fedyogi") == rates("fedadagrad") == (0.01, 0.0)
    assert rates("fedprox") == (1.0, 0.01)
    assert rates("fedprox", **{"proximal-mu": 0.0}) == (1.0, 0.0)
    assert rates("fednova", **{"proximal-mu": 0.3}) == (1.0, 0.3)
    assert rates("fedadam", **{"server-lr": 0.5}) == (0.5, 0.0)


def test_overrides_are_read_as_toml_and_else_as_text() -> None:
    assert parse_overrides(["lr=0.1 rounds=3", "strategy=fedavg", 'frozen="a.* !b"', "x=true"]) == {
        "lr": 0.1,
        "rounds": 3,
        "strategy": "fedavg",
        "frozen": "a.* !b",
        "x": True,
    }
    assert parse_overrides(["data-dir=/my data/it's here", "run-name=1"]) == {
        "data-dir": "/my data/it's here",
        "run-name": "1",
    }
    assert parse_overrides(["lr=0.1 data-dir='/my data' seed=3"]) == {
        "lr": 0.1,
        "data-dir": "/my data",
        "seed": 3,
    }
    with pytest.raises(ConfigError, match="expected key=value, got 'rounds'"):
        parse_overrides(["rounds"])
    with pytest.raises(ConfigError, match="string, number or boolean"):
        parse_overrides(["rounds=[1,2]"])


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.name)
def test_every_experiment_of_the_project_is_a_config(path: Path) -> None:
    experiment = RunConfig.from_mapping(read_experiment(path))
    assert experiment.freezes
    # the obvious comparison: the same file with plain FedAvg freezes nothing
    assert not RunConfig.from_mapping(read_experiment(path), {"strategy": "fedavg"}).freezes


def test_an_experiment_file_is_flat_keys_of_one_run(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    path.write_text('dataset = "cifar10"\nlr = 0.1\n')
    assert read_experiment(path) == {"dataset": "cifar10", "lr": 0.1}
    path.write_text("lr = ")
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_experiment(path)
    with pytest.raises(ConfigError, match="does not exist"):
        read_experiment(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_experiment(tmp_path)
    path.write_text("lr = 0.1\n[sweep]\nseed = [1, 2]\n")
    with pytest.raises(ConfigError, match="a grid of runs, and this is one run"):
        read_experiment(path)
    path.write_text("[data]\nlr = 1\n")
    with pytest.raises(ConfigError, match="unknown config key 'data'"):
        RunConfig.from_mapping(read_experiment(path))
