"""A head that never trains, through whole runs on the bundled digits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from fedfrozen_app.config import RunConfig
from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.engine.rounds import run_federation
from fedfrozen_app.engine.start import build_strategy
from fedfrozen_app.models.head import METADATA_KEY
from fedfrozen_app.models.registry import create_model
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.runs.store import RunFolder
from fedfrozen_app.tensor_file import read_metadata
from fedfrozen_app.training import pretrain
from fedfrozen_app.training.worker import resident

SMALL: dict[str, Any] = {
    "num-clients": 3,
    "rounds": 3,
    "max-train-examples": 149,
    "max-test-examples": 53,
    "weights": "none",
    "public-fraction": 0.0,
    "weight-decay": 0.05,
    "lr": 0.05,
    "threads": 1,
    "strategy": "fedavg",
    "local-epochs": 1,
    "head": "frozen-orthogonal",
}
HEAD_NUMBERS = 10 * 64 + 10


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def run(root: Path, cache: str, **keys: Any) -> tuple[RunConfig, RunFolder, dict[str, Any]]:
    own = {key.replace("_", "-"): value for key, value in keys.items()}
    config = RunConfig.from_mapping({**SMALL, "run-dir": str(root), "cache-dir": cache, **own})
    with LocalGrid("fedfrozen_app.client_app:app", 3, config.to_mapping()) as grid:
        folder = run_federation(config, grid, lambda metrics: None)
    return config, folder, safetensors.torch.load_file(folder.path / "model.safetensors")


def drawn(config: RunConfig) -> torch.Tensor:
    return create_model(config, 10).state_dict()["head.weight"]


@pytest.mark.parametrize("strategy", ["fedavg", "scaffold", "fedadam"])
def test_the_head_keeps_its_bits_and_travels_once(
    tmp_path: Path, cache: str, strategy: str
) -> None:
    config, folder, model = run(tmp_path, cache, strategy=strategy)
    assert torch.equal(model["head.weight"], drawn(config))
    assert model["head.bias"].count_nonzero() == 0
    start = create_model(config, 10).state_dict()
    body = [name for name in model if not name.startswith("head.")]
    assert all(not torch.equal(model[name], start[name]) for name in body)
    trained = sum(model[name].numel() for name in body)
    sent = 4 * trained * (2 if strategy == "scaffold" else 1)  # with a control beside each number
    metrics = folder.metrics()
    assert [line.bytes_up for line in metrics[1:]] == [3 * sent] * 3
    assert [line.bytes_down for line in metrics[1:]] == [
        3 * (sent + 4 * HEAD_NUMBERS),
        3 * sent,
        3 * sent,
    ]
    assert {line.phase for line in metrics[1:]} == {"full"}


def test_the_phases_of_a_freeze_hold_the_head_still_in_both(tmp_path: Path, cache: str) -> None:
    config, folder, model = run(tmp_path, cache, strategy="fedfrozen", warmup_rounds=1)
    assert [line.phase for line in folder.metrics()] == ["start", "warmup", "frozen", "frozen"]
    assert torch.equal(model["head.weight"], drawn(config))
    kernel = Selection.build("query-key", model).num_frozen
    frozen = 4 * (kernel + HEAD_NUMBERS)
    total = 4 * sum(tensor.numel() for tensor in model.values())
    assert [line.bytes_up for line in folder.metrics()[1:]] == [
        3 * (total - 4 * HEAD_NUMBERS),
        3 * (total - frozen),
        3 * (total - frozen),
    ]
    worker = resident(config)
    strategy = build_strategy(config, worker)
    assert strategy.schedule.specs() == ["head.*", "query-key, head.*"]
    assert [strategy.is_frozen(server_round) for server_round in (1, 2)] == [False, True]


def test_the_value_penalty_waits_for_the_freeze(tmp_path: Path, cache: str) -> None:
    keys: dict[str, Any] = {"strategy": "fedfrozen", "warmup_rounds": 2}
    plain = run(tmp_path, cache, **keys, rounds=3)[1].metrics()
    _, folder, _ = run(tmp_path, cache, **keys, value_l2=0.5)
    penalised = folder.metrics()
    assert [line.test_loss for line in penalised[:3]] == [line.test_loss for line in plain[:3]]
    assert penalised[3].test_loss != plain[3].test_loss


def test_base_weights_are_trained_with_the_head_that_the_run_freezes(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrain, "RECIPE", replace(pretrain.RECIPE, epochs=4))
    keys: dict[str, Any] = {"weights": "base", "public_fraction": 0.3, "max_train_examples": 997}
    config, folder, model = run(tmp_path, cache, **keys, rounds=1)
    assert torch.equal(model["head.weight"], drawn(config))
    assert read_metadata(folder.path / "model.safetensors")[METADATA_KEY] == "frozen-orthogonal"
    start = create_model(config, 10).state_dict()
    base = resident(config).initial_weights()
    assert torch.equal(base["head.weight"], drawn(config))
    assert not torch.equal(base["blocks.0.mlp.fc1.weight"], start["blocks.0.mlp.fc1.weight"])
    assert folder.metrics()[0].test_accuracy is not None
    assert folder.metrics()[0].test_accuracy > 0.3  # the body fits this head and no other
