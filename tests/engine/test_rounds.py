"""The whole app on the bundled digits, in this process: the laws hold for real models."""

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.engine import start
from fedfrozen_app.engine.start import prepare
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.runs.store import RunFolder
from fedfrozen_app.strategies import QuorumError
from fedfrozen_app.training.worker import resident
from fedfrozen_app.transport.arrays import TensorArray
from tests.engine.run import Run, equal, frozen_half


def test_a_warmup_as_long_as_the_run_equals_fedavg_bit_for_bit(tmp_path: Path, cache: str) -> None:
    plain = Run(tmp_path, cache, strategy="fedavg")
    ours = Run(tmp_path, cache, strategy="fedfrozen", warmup_rounds=3)
    assert equal(ours.model, plain.model)
    drop = ("strategy",)
    assert [{k: v for k, v in line.items() if k not in drop} for line in ours.comparable()] == [
        {k: v for k, v in line.items() if k not in drop} for line in plain.comparable()
    ]


def test_without_a_warmup_no_query_or_key_row_moves(tmp_path: Path, cache: str) -> None:
    run = Run(tmp_path, cache, warmup_rounds=0)
    start = resident(run.config).initial_weights()
    selection = Selection.build("query-key", start)
    assert equal(frozen_half(run), selection.split(start)[1])
    active = selection.split(run.model)[0]
    before = selection.split(start)[0]
    assert all(not torch.equal(active[name], before[name]) for name in active)


def test_frozen_rows_keep_the_bits_of_the_freeze_with_momentum_and_decay(
    tmp_path: Path, cache: str
) -> None:
    # a run that stops at the freeze ends with the kernel that the longer one freezes
    at_freeze = Run(tmp_path, cache, rounds=1, warmup_rounds=1, frozen="query-key")
    after = Run(tmp_path, cache, rounds=3, warmup_rounds=1)
    assert equal(frozen_half(after), frozen_half(at_freeze))
    worker = resident(after.config)
    on_client = worker.model.state_dict()
    assert equal(Selection.build("query-key", on_client).split(on_client)[1], frozen_half(after))


def test_the_final_model_loads_into_plain_timm(tmp_path: Path, cache: str) -> None:
    run = Run(tmp_path, cache, model="vit_tiny_patch16_224", image_size=32, local_steps=1, rounds=2)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
    model.load_state_dict(run.model, strict=True)
    assert equal(model.state_dict(), run.model)


def test_the_same_seed_gives_the_same_run_and_another_does_not(tmp_path: Path, cache: str) -> None:
    one, same = (Run(tmp_path, cache, run_name=name) for name in ("one", "same"))
    other = Run(tmp_path, cache, run_name="other", seed=2)
    assert equal(one.model, same.model)
    assert one.comparable() == same.comparable()
    assert not equal(one.model, other.model)


def test_the_run_folder_holds_what_a_report_needs(tmp_path: Path, cache: str) -> None:
    run = Run(tmp_path, cache, warmup_rounds=1)
    assert sorted(path.name for path in run.folder.path.iterdir()) == [
        "config.json",
        "metrics.jsonl",
        "model.safetensors",
        "partition.json",
        "start.json",
    ]
    assert run.metrics == run.reported
    assert [line.round for line in run.metrics] == [0, 1, 2, 3]
    assert [line.phase for line in run.metrics] == ["start", "warmup", "frozen", "frozen"]
    assert {(line.clients, line.num_examples, line.dropped) for line in run.metrics[1:]} == {
        (3, 251, 0)
    }
    written = json.loads((run.folder.path / "config.json").read_text())
    assert RunConfig.from_mapping(written["config"]) == run.config
    assert written["resolved"]["warmup-rounds"] == 1
    assert written["versions"]["flwr"].startswith("1.42")
    assert written["machine"]["cores"] == os.cpu_count() and written["machine"]["processor"]
    begun = datetime.fromisoformat(written["started"])
    assert timedelta(0) <= datetime.now(UTC) - begun < timedelta(minutes=5)
    assert sum(json.loads((run.folder.path / "partition.json").read_text())["sizes"]) == 251
    start = json.loads((run.folder.path / "start.json").read_text())
    assert start["model"]["numbers"] == sum(tensor.numel() for tensor in run.model.values())
    assert start["preprocessing"]["augment"] == "none"
    other = Run(tmp_path, cache, strategy="scaffold", run_name="other")
    assert json.loads((other.folder.path / "start.json").read_text()) == start


def test_the_bytes_of_a_run_follow_from_the_shapes(tmp_path: Path, cache: str) -> None:
    run = Run(tmp_path, cache, warmup_rounds=1)
    whole = sum(tensor.numel() * 4 for tensor in run.model.values())
    frozen = sum(tensor.numel() * 4 for tensor in frozen_half(run).values())
    # 4 blocks, 64 wide: 2 * 64 * 64 weights and 2 * 64 biases each
    assert frozen == 4 * 4 * (2 * 64 * 64 + 2 * 64)
    assert [line.bytes_up for line in run.metrics] == [
        0,
        3 * whole,
        3 * (whole - frozen),
        3 * (whole - frozen),
    ]
    assert [line.bytes_down for line in run.metrics] == [
        0,
        3 * whole,
        3 * whole,
        3 * (whole - frozen),
    ]
    assert all(line.wire_bytes_up > line.bytes_up for line in run.metrics[1:])


def test_a_run_in_this_process_serialises_nothing(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: TensorArray) -> bytes:
        raise AssertionError("somebody asked for bytes")

    monkeypatch.setattr(TensorArray, "data", property(refuse))
    run = Run(tmp_path, cache, warmup_rounds=1, local_steps=1)
    assert [line.dropped for line in run.metrics] == [0, 0, 0, 0]


@pytest.mark.parametrize("every", [0, 2])
def test_the_central_test_runs_when_due_and_always_at_both_ends(
    tmp_path: Path, cache: str, every: int
) -> None:
    run = Run(tmp_path, cache, eval_every=every, local_steps=1)
    tested = [line.round for line in run.metrics if line.test_accuracy is not None]
    assert tested == ([0, 3] if every == 0 else [0, 2, 3])


def test_value_l2_shrinks_the_value_rows_and_nothing_else_directly(
    tmp_path: Path, cache: str
) -> None:
    keys: dict[str, Any] = {"warmup_rounds": 0, "weight_decay": 0.0, "local_steps": 2, "rounds": 1}
    plain = Run(tmp_path, cache, **keys)
    penalised = Run(tmp_path, cache, value_l2=5.0, **keys)
    value = slice(128, 192)
    name = "blocks.0.attn.qkv.weight"
    assert penalised.model[name][value].norm() < 0.9 * plain.model[name][value].norm()
    assert torch.equal(penalised.model[name][:128], plain.model[name][:128])


def test_a_natural_partition_may_have_fewer_clients_than_asked_for(
    tmp_path: Path, cache: str, shared: Path
) -> None:
    run = Run(
        tmp_path,
        cache,
        dataset="femnist",
        data_dir=str(shared / "data" / "femnist"),
        partitioner="natural",
        model="vit-digits",
        num_clients=120,
        max_train_examples=0,
        max_test_examples=200,
        fraction_train=0.03,
        local_steps=1,
        rounds=1,
    )
    assert resident(run.config).num_clients == 105
    assert run.metrics[1].clients == 3


# --- failures ---------------------------------------------------------------------------
def test_a_run_below_the_quorum_stops_with_everything_saved(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedfrozen_app.training import worker as module

    real = module.Worker.train

    def fails_in_round_two(self: Any, partition_id: int, server_round: int, *rest: Any) -> Any:
        if server_round == 2 and partition_id != 0:
            raise RuntimeError("no power")
        return real(self, partition_id, server_round, *rest)

    monkeypatch.setattr(module.Worker, "train", fails_in_round_two)
    with pytest.raises(QuorumError, match="round 2: 1 of 3.*no power"):
        Run(tmp_path, cache, run_name="broken", warmup_rounds=2)
    folder = RunFolder(tmp_path / "broken")
    assert (folder.failure() or "").startswith("QuorumError: round 2: 1 of 3")
    assert [line.round for line in folder.metrics()] == [0, 1]
    saved = safetensors.torch.load_file(folder.path / "model.safetensors")
    monkeypatch.undo()
    whole = Run(tmp_path, cache, rounds=1, warmup_rounds=1, frozen="query-key")
    assert equal(saved, whole.model)


class Failing:
    """Local training that fails while ``broken`` of (round, its call in that round) holds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, broken: Callable[[int, int], bool]) -> None:
        from fedfrozen_app.training import worker as module

        self.asked: dict[int, list[int]] = {}
        real = module.Worker.train

        def train(worker: Any, partition_id: int, server_round: int, *rest: Any) -> Any:
            asked = self.asked.setdefault(server_round, [])
            asked.append(partition_id)
            if broken(server_round, len(asked)):
                raise RuntimeError("no power")
            return real(worker, partition_id, server_round, *rest)

        monkeypatch.setattr(module.Worker, "train", train)


QUICK: dict[str, Any] = {
    "num_clients": 7, "fraction_train": 0.3, "rounds": 3, "local_steps": 1, "min_replies": 1.0,
    "warmup_rounds": 2, "strategy": "scaffold", "frozen": "query-key",
}  # fmt: skip


def test_a_round_below_the_quorum_is_tried_again_with_a_fresh_cohort(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(monkeypatch, lambda server_round, call: server_round == 2 and call in (1, 4))
    run = Run(tmp_path, cache, **QUICK)
    first, second, third = (failing.asked[2][i : i + 2] for i in (0, 2, 4))
    assert first != second != third  # of 21 pairs
    assert [line.attempts for line in run.metrics] == [1, 1, 3, 1]
    assert [line.clients for line in run.metrics] == [0, 2, 2, 2]
    full, retried, frozen = (line.bytes_down for line in run.metrics[1:])
    assert retried == 3 * full > frozen  # all that was sent is counted
    # two of the six never answered, whatever they had trained
    assert run.metrics[2].bytes_up == 2 * run.metrics[1].bytes_up
    assert len(failing.asked[2]) == 6 and len(failing.asked[3]) == 2


def test_a_round_is_not_tried_again_for_ever_nor_where_training_diverges(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        failing = Failing(patched, lambda server_round, call: server_round == 2)
        with pytest.raises(QuorumError, match="round 2: 0 of 2 replies"):
            Run(tmp_path, cache, run_name="dead", round_retries=1, **QUICK)
        assert len(failing.asked[2]) == 4
    assert [line.round for line in RunFolder(tmp_path / "dead").metrics()] == [0, 1]
    failing = Failing(monkeypatch, lambda server_round, call: False)
    with pytest.raises(QuorumError, match="training diverges"):
        Run(tmp_path, cache, run_name="high", lr=1e30, **{**QUICK, "local_steps": 3})
    assert all(len(asked) == 2 for asked in failing.asked.values())


def test_an_existing_run_is_never_overwritten(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {"rounds": 1, "local_steps": 1, "warmup_rounds": 1, "eval_every": 0}
    first = Run(tmp_path, cache, run_name="mine", **keys)
    with pytest.raises(ConfigError, match=r"run-name='mine'.*exists.*choose another run-name"):
        Run(tmp_path, cache, run_name="mine", **keys)
    assert len(first.folder.metrics()) == 2
    with monkeypatch.context() as patch:  # it is refused before any data is read
        patch.setattr(start, "resident", lambda config: pytest.fail("loaded"))
        with pytest.raises(ConfigError, match="run-name='mine'"):
            prepare(first.config)
    names = [Run(tmp_path, cache, **keys).folder.path.name for _ in range(2)]
    assert names == ["digits-fedfrozen-seed1", "digits-fedfrozen-seed1-2"]


def test_a_run_dir_that_cannot_be_made_is_an_error_before_training(
    tmp_path: Path, cache: str
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="run-dir=.*cannot be written"):
        Run(tmp_path / "file" / "runs", cache)


def test_a_frozen_pattern_that_matches_nothing_is_an_error_before_training(
    tmp_path: Path, cache: str
) -> None:
    with pytest.raises(ValueError, match="blocks.9"):
        Run(tmp_path, cache, frozen="blocks.9.*", warmup_rounds=2)
    assert list(tmp_path.iterdir()) == []


def test_clients_without_data_are_never_sampled(tmp_path: Path, cache: str) -> None:
    run = Run(
        tmp_path, cache, num_clients=60, alpha=0.01, min_partition_size=0, local_steps=1, rounds=1,
        warmup_rounds=0, frozen="query-key",
    )  # fmt: skip
    empty = sum(len(rows) == 0 for rows in resident(run.config).partition.clients)
    assert empty > 20
    assert (run.metrics[1].clients, run.metrics[1].dropped) == (60 - empty, 0)
