"""Codecs in the real app on the bundled digits: bytes, accuracy, places where feedback lies."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from fedfrozen_app.cli import app
from fedfrozen_app.engine.flower import run_with_flower
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.runs.store import RunFolder
from fedfrozen_app.training.worker import resident
from fedfrozen_app.transport.codec import layout_of_tensors
from fedfrozen_app.transport.compression import parse_codec, payload_bytes
from tests.engine.run import Run, equal, small_config

QUICK: dict[str, Any] = {
    "local_steps": 2,
    "batch_size": 5,
    "eval_every": 0,
    "max_train_examples": 101,
    "max_test_examples": 53,
}
FREEZE: dict[str, Any] = {"frozen": "query-key", "warmup_rounds": 1}
RUNS = [
    ("fedavg", "int8", "int8"),
    ("fedavg", "int4", "none"),
    ("fedavg", "topk:0.01", "none"),
    ("fedavg", "powersgd:2", "int4"),
    ("scaffold", "topk:0.01", "int8"),
    ("fedadam", "int8", "none"),
    ("fednova", "powersgd:2", "none"),
]


@pytest.mark.parametrize(("strategy", "upload", "broadcast"), RUNS)
def test_the_ledger_counts_what_the_codecs_say(
    tmp_path: Path, cache: str, strategy: str, upload: str, broadcast: str
) -> None:
    codecs = {"compression": upload, "broadcast": broadcast}
    run = Run(tmp_path, cache, strategy=strategy, **codecs, **FREEZE, **QUICK)
    whole = layout_of_tensors(run.model)
    active, frozen = (
        layout_of_tensors(half) for half in Selection.build("query-key", run.model).split(run.model)
    )
    up, down = parse_codec(upload), parse_codec(broadcast)
    for line, layout, block in (
        (run.metrics[1], whole, 0),
        (run.metrics[2], active, payload_bytes(frozen, None)),
        (run.metrics[3], active, 0),
    ):
        control = payload_bytes(layout, None) if strategy == "scaffold" else 0
        assert line.bytes_up == 3 * (payload_bytes(layout, up) + control)
        assert line.bytes_down == 3 * (payload_bytes(layout, down) + block + control)
        assert (line.clients, line.dropped) == (3, 0)
        assert line.wire_bytes_up > line.bytes_up
    assert all(torch.isfinite(tensor).all() for tensor in run.model.values())


def test_int8_uploads_of_the_digits_by_hand(tmp_path: Path, cache: str) -> None:
    run = Run(tmp_path, cache, strategy="fedavg", rounds=1, compression="int8", **QUICK)
    numbers = sum(tensor.numel() for tensor in run.model.values())
    # a byte a number, and scale and zero point for each tensor
    assert run.metrics[1].bytes_up == 3 * (numbers + 8 * len(run.model))
    assert run.metrics[1].bytes_down == 3 * 4 * numbers


@pytest.mark.slow
def test_eight_bits_lose_little_and_feedback_most_of_the_bytes(tmp_path: Path, cache: str) -> None:
    keys: dict[str, Any] = {
        "strategy": "fedavg",
        "partitioner": "iid",
        "weights": "base",
        "public_fraction": -1.0,
        "rounds": 2,
        "lr": 0.01,
        "local_epochs": 1,
        "max_train_examples": 0,
        "max_test_examples": 0,
        "eval_every": 0,
    }
    runs = {
        text: Run(tmp_path / text, cache, compression=text, **keys).metrics
        for text in ("none", "int8", "topk:0.1")
    }
    start, end = (runs["none"][at].test_loss for at in (0, -1))
    assert start is not None and end is not None and start - end > 0.15
    for text, lost in (("int8", 0.05), ("topk:0.1", 0.2)):
        loss = runs[text][-1].test_loss
        assert loss is not None and loss - end < lost * (start - end)
    assert runs["topk:0.1"][-1].bytes_up < 0.21 * runs["none"][-1].bytes_up


@pytest.mark.parametrize(
    ("strategy", "more"),
    [("fedavg", {"nodes": 2}), pytest.param("scaffold", {"jobs": 2}, marks=pytest.mark.slow)],
)
def test_feedback_is_the_same_on_shared_nodes_and_in_worker_processes(
    tmp_path: Path, cache: str, strategy: str, more: dict[str, int]
) -> None:
    keys: dict[str, Any] = {"strategy": strategy, "compression": "topk:0.05", **FREEZE, **QUICK}
    alone, other = Run(tmp_path / "1", cache, **keys), Run(tmp_path / "2", cache, **more, **keys)
    assert equal(other.model, alone.model)
    assert [line.bytes_up for line in other.metrics] == [line.bytes_up for line in alone.metrics]
    left = Path(cache) / "clients"
    assert not left.exists() or list(left.iterdir()) == []


def test_a_run_with_codecs_from_the_command_line(tmp_path: Path, cache: str) -> None:
    config = small_config(tmp_path, cache, strategy="fedavg", rounds=2, **QUICK).to_mapping()
    keys = {**config, "compression": "topk:0.01", "broadcast": "int8", "run-name": "one"}
    words = [
        word for key, value in keys.items() if value != "" for word in ("-c", f"{key}={value}")
    ]
    done = CliRunner().invoke(app, ["run", *words])
    assert done.exit_code == 0, done.output
    folder = RunFolder(tmp_path / "one")
    assert [line.dropped for line in folder.metrics()] == [0, 0, 0]
    written = json.loads((folder.path / "config.json").read_text())["config"]
    assert (written["compression"], written["broadcast"]) == ("topk:0.01", "int8")
    model = safetensors.torch.load_file(folder.path / "model.safetensors")
    sent = sum(8 * math.ceil(tensor.numel() / 100) for tensor in model.values())
    assert [line.bytes_up for line in folder.metrics()] == [0, 3 * sent, 3 * sent]


@pytest.mark.slow
def test_flowers_own_runtime_has_the_same_model(tmp_path: Path, cache: str) -> None:
    codecs = {"compression": "topk:0.05", "broadcast": "int8"}
    keys: dict[str, Any] = {"strategy": "scaffold", **codecs, **FREEZE, **QUICK}
    here = Run(tmp_path / "here", cache, **keys)
    config = small_config(tmp_path / "flwr", cache, engine="flwr", device="cpu", **keys)
    lines: list[str] = []
    assert run_with_flower(config, lines.append) == 0, "\n".join(lines[-30:])
    (path,) = (tmp_path / "flwr").iterdir()
    assert equal(safetensors.torch.load_file(path / "model.safetensors"), here.model)
    sent = [(line.bytes_up, line.bytes_down) for line in RunFolder(path).metrics()]
    assert sent == [(line.bytes_up, line.bytes_down) for line in here.metrics]


@pytest.mark.parametrize(
    "keys",
    [
        {"strategy": "scaffold", "compression": "topk:0.1", **FREEZE},
        {"strategy": "latent", "latent_bits": 4, "warmup_rounds": 1},
    ],
)
def test_a_bound_on_updates_acts_on_what_uploads_stand_for(
    tmp_path: Path, cache: str, keys: dict[str, Any]
) -> None:
    plain = Run(tmp_path, cache, **keys, **QUICK)
    far = Run(tmp_path, cache, max_update_norm="1e9", **keys, **QUICK)
    assert equal(plain.model, far.model) and plain.comparable() == far.comparable()
    near = Run(tmp_path, cache, max_update_norm="1e-3", oversized_updates="clip", **keys, **QUICK)
    start = resident(near.config).initial_weights()
    assert near.metrics[1].clients == 3
    squares = sum(float((near.model[n] - start[n]).square().sum()) for n in start)
    if keys["strategy"] == "scaffold":  # three rounds of at most 1e-3, server-lr 1
        assert 0 < squares**0.5 <= 3.001e-3
