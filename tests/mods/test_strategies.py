"""FedFrozen around Flower's own strategies, with the mod and an unchanged handler."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.clientapp.typing import Mod
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from fedfrozen_app.strategies import FedFrozen
from tests.mods.project import Project, check_frozen, classifier

NO_EVALUATION = {"fraction_evaluate": 0.0}


def around(wrapper: Callable[..., Strategy], **options: float) -> Callable[..., Strategy]:
    """A wrapper of Flower's for differential privacy, around its FedAvg."""
    return lambda: wrapper(flower.FedAvg(**NO_EVALUATION), num_sampled_clients=3, **options)


def named(name: str, **options: float) -> Callable[..., Strategy]:
    return lambda: getattr(flower, name)(**NO_EVALUATION, **options)


DP = "DifferentialPrivacy"
STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "FedAvg": named("FedAvg"),
    "FedProx": named("FedProx", proximal_mu=0.1),
    "FedAvgM": named("FedAvgM", server_learning_rate=0.5, server_momentum=0.9),
    "FedAdagrad": named("FedAdagrad", eta=0.01),
    "FedAdam": named("FedAdam", eta=0.01),
    "FedYogi": named("FedYogi", eta=0.01),
    "FedMedian": named("FedMedian"),
    "FedTrimmedAvg": named("FedTrimmedAvg", beta=0.2),
    "Krum": named("Krum", num_malicious_nodes=1),
    "MultiKrum": named("MultiKrum", num_malicious_nodes=1, num_nodes_to_select=3),
    "Bulyan": named("Bulyan", num_malicious_nodes=1),
    "QFedAvg": named("QFedAvg", client_learning_rate=0.1),
    "ServerSideFixedClipping": around(
        flower.DifferentialPrivacyServerSideFixedClipping, noise_multiplier=0.1, clipping_norm=0.5
    ),
    "ServerSideAdaptiveClipping": around(
        flower.DifferentialPrivacyServerSideAdaptiveClipping, noise_multiplier=0.1
    ),
    "ClientSideFixedClipping": around(
        flower.DifferentialPrivacyClientSideFixedClipping, noise_multiplier=0.1, clipping_norm=0.5
    ),
    "ClientSideAdaptiveClipping": around(
        flower.DifferentialPrivacyClientSideAdaptiveClipping, noise_multiplier=0.1
    ),
}
MODS: dict[str, list[Mod]] = {
    "ClientSideFixedClipping": [fixedclipping_mod],
    "ClientSideAdaptiveClipping": [adaptiveclipping_mod],
}
SLOW = ("Bulyan", "QFedAvg", "MultiKrum", "FedTrimmedAvg")  # each like another one
CLIENTS = {"Krum": 5, "MultiKrum": 5, "Bulyan": 7}  # what they need for one malicious node
SAME_AS_FEDAVG = {"FedProx"}  # on the server; mu is for the handler


@pytest.fixture(scope="module")
def fedavg(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    project = Project(tmp_path_factory.mktemp("fedavg"))
    project.run(FedFrozen(strategy=STRATEGIES["FedAvg"](), warmup_rounds=1))
    return project.models[-1]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in STRATEGIES],
)
def test_three_rounds_around_a_strategy_of_flower(
    name: str, tmp_path: Path, fedavg: dict[str, torch.Tensor]
) -> None:
    project = Project(tmp_path, num_clients=CLIENTS.get(name, 3), mods=MODS.get(name, []))
    strategy = FedFrozen(strategy=STRATEGIES[name](), warmup_rounds=1)
    project.run(strategy)
    check_frozen(project, strategy)
    gap = max(
        float((tensor - fedavg[key]).abs().max()) for key, tensor in project.models[-1].items()
    )
    assert (gap < 1e-6) is (name in {"FedAvg", *SAME_AS_FEDAVG})  # each does what it does


def test_a_strategy_of_the_legacy_api_is_refused_where_it_is_wrapped() -> None:
    from flwr.server.strategy import FedAvg as LegacyFedAvg

    with pytest.raises(ValueError, match=r"got flwr\.server\.strategy\.fedavg\.FedAvg; .*secure"):
        FedFrozen(strategy=LegacyFedAvg())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name.endswith("Clipping")])
def test_a_wrapper_of_flower_around_fedfrozen_is_refused_before_any_training(
    name: str, tmp_path: Path
) -> None:
    wrapper = STRATEGIES[name]()
    wrapper.strategy = FedFrozen(strategy=flower.FedAvg(), warmup_ratio=0.5)  # type: ignore[attr-defined]
    project = Project(tmp_path)
    with pytest.raises(ValueError, match=r"whole models .*FedFrozen\(strategy=DifferentialPriv"):
        project.run(wrapper)
    assert project.seen == [] and project.grid.take().bytes_down == 0


def test_a_loop_of_ones_own_checks_the_model_first(tmp_path: Path) -> None:
    arrays, grid = ArrayRecord(classifier().state_dict()), Project(tmp_path).grid
    strategy = FedFrozen(warmup_rounds=1)
    with pytest.raises(ValueError, match=r"A loop of your own calls check\(arrays\) first"):
        strategy.configure_train(1, arrays, ConfigRecord(), grid)
    strategy.check(arrays)
    assert len(list(strategy.configure_train(1, arrays, ConfigRecord(), grid))) == 3


def test_fedfrozen_around_fedfrozen_is_refused() -> None:
    inner = flower.DifferentialPrivacyServerSideFixedClipping(FedFrozen(), 0.1, 0.5, 3)
    for strategy in (FedFrozen(), inner):
        with pytest.raises(ValueError, match=r"freezes already; .*schedule=FreezeSchedule"):
            FedFrozen(strategy=strategy)
