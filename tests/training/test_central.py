"""Claims about central training of a base: its schedule, its files, and going on after a stop."""

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from fedfrozen_app.cli import app
from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.models.registry import create_model
from fedfrozen_app.models.weights import load_weights
from fedfrozen_app.tensor_file import read_metadata
from fedfrozen_app.training import central
from fedfrozen_app.training.central import Epoch, learning_rate, pretrain, pretraining_config
from fedfrozen_app.training.worker import Worker

SMALL: dict[str, Any] = {
    "dataset": "digits",
    "max-train-examples": 211,
    "max-test-examples": 53,
    "batch-size": 17,
    "device": "cpu",
    "threads": 1,
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def config(cache: str) -> Any:
    def build(**keys: Any) -> RunConfig:
        own = {key.replace("_", "-"): value for key, value in keys.items()}
        return pretraining_config(SMALL, {"cache-dir": cache}, own)

    return build


class Stopped(Exception):
    pass


def stop_after(last: int) -> Any:
    def on_epoch(epoch: Epoch) -> None:
        if epoch.epoch == last:
            raise Stopped

    return on_epoch


def measured(history: list[Epoch]) -> list[tuple[float, ...]]:
    return [(e.epoch, e.train_loss, e.test_loss, e.test_accuracy) for e in history]


# --- the recipe -------------------------------------------------------------------------
def test_the_recipe_is_the_papers_unless_the_config_says_otherwise() -> None:
    plain = pretraining_config({"dataset": "cifar100", "model": "resnet18-gn"})
    assert (plain.optimizer, plain.lr, plain.momentum) == ("sgd", 0.05, 0.9)
    assert (plain.weight_decay, plain.batch_size) == (5e-4, 128)
    assert (plain.head, plain.resolved_weights) == ("frozen-orthogonal", "none")
    assert (central.EPOCHS, central.WARMUP_EPOCHS) == (100, 3)
    other = pretraining_config({"lr": 0.3, "batch-size": 7}, {"lr": 0.7, "head": "trainable"})
    assert (other.lr, other.batch_size, other.head) == (0.7, 7, "trainable")
    text = pretraining_config({"dataset": "wikitext2"})
    assert (text.optimizer, text.head, text.partitioner) == ("adamw", "trainable", "iid")


def test_the_rate_rises_to_its_peak_and_falls_to_zero_by_a_cosine() -> None:
    steps = {"steps_per_epoch": 5, "epochs": 13, "warmup_epochs": 3}
    rates = [learning_rate(step, peak=0.05, **steps) for step in range(65)]
    assert rates[:15] == pytest.approx([0.05 * (step + 1) / 15 for step in range(15)])
    assert rates[15] == 0.05 and rates[40] == pytest.approx(0.025)  # half of 50 steps later
    assert rates[15:] == sorted(rates[15:], reverse=True)
    assert 0 < rates[-1] == pytest.approx(0.025 * (1 + math.cos(math.pi * 49 / 50)))
    # a training as long as its warm-up only rises
    short = [
        learning_rate(s, peak=1.0, steps_per_epoch=2, epochs=2, warmup_epochs=3) for s in range(4)
    ]
    assert short == [0.25, 0.5, 0.75, 1.0]


def test_every_step_takes_its_own_rate(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    step = torch.optim.SGD.step

    def recording(self: torch.optim.SGD, *rest: Any) -> Any:
        seen.append(self.param_groups[0]["lr"])
        return step(self, *rest)

    monkeypatch.setattr(torch.optim.SGD, "step", recording)
    pretrain(config(lr=0.02), tmp_path / "base.safetensors", epochs=3, warmup_epochs=1)
    per_epoch = math.ceil(211 / 17)
    expected = [
        learning_rate(s, peak=0.02, steps_per_epoch=per_epoch, epochs=3, warmup_epochs=1)
        for s in range(3 * per_epoch)
    ]
    assert seen == expected


# --- stopping and going on --------------------------------------------------------------
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_resumed_training_ends_with_the_bits_of_one_that_was_not_stopped(
    config: Any, tmp_path: Path, optimizer: str
) -> None:
    one = config(optimizer=optimizer, lr=0.003)
    whole = tmp_path / "whole.safetensors"
    straight = pretrain(one, whole, epochs=4, warmup_epochs=1)
    parts = tmp_path / "parts.safetensors"
    for last in (1, 3):
        with pytest.raises(Stopped):
            pretrain(
                one, parts, epochs=4, warmup_epochs=1, resume=last > 1, on_epoch=stop_after(last)
            )
        assert not parts.exists()
    torch.manual_seed(23)
    resumed = pretrain(one, parts, epochs=4, warmup_epochs=1, resume=True)
    one_go, in_parts = (safetensors.torch.load_file(path) for path in (whole, parts))
    assert all(torch.equal(tensor, in_parts[name]) for name, tensor in one_go.items())
    assert read_metadata(parts) == read_metadata(whole)
    assert measured(resumed) == measured(straight)
    assert {path.name for path in tmp_path.iterdir()} == {whole.name, parts.name}


def test_one_optimizer_goes_through_all_epochs(config: Any, tmp_path: Path) -> None:
    one = config(optimizer="adamw", lr=0.003)
    training = central.Pretraining(one, tmp_path / "b.safetensors", epochs=3, warmup_epochs=1)
    training.run(lambda epoch: None)
    steps = {int(state["step"]) for state in training.optimizer.state.values()}
    assert steps == {3 * math.ceil(211 / 17)}


def test_a_checkpoint_of_another_recipe_or_a_damaged_one_is_refused(
    config: Any, tmp_path: Path
) -> None:
    out = tmp_path / "base.safetensors"
    with pytest.raises(Stopped):
        pretrain(config(), out, epochs=3, on_epoch=stop_after(1))
    with pytest.raises(ConfigError, match="checkpoint of a training that stopped; go on with --re"):
        pretrain(config(), out, epochs=3)
    with pytest.raises(ConfigError, match=r"made with lr=0.05 and this training has lr=0.3"):
        pretrain(config(lr=0.3), out, epochs=3, resume=True)
    with pytest.raises(ConfigError, match="made with epochs=3 and this training has epochs=5"):
        pretrain(config(), out, epochs=5, resume=True)
    central.checkpoint_path(out).write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigError, match="cannot be read"):
        pretrain(config(), out, epochs=3, resume=True)


def test_a_finished_file_is_neither_overwritten_nor_resumed(config: Any, tmp_path: Path) -> None:
    out = tmp_path / "base.safetensors"
    out.write_bytes(b"mine")
    for resume, remedy in ((False, "choose another out"), (True, "nothing to resume")):
        with pytest.raises(ConfigError, match=remedy):
            pretrain(config(), out, epochs=1, resume=resume)
    assert out.read_bytes() == b"mine"
    with pytest.raises(ConfigError, match="does not exist; make it"):
        pretrain(config(), tmp_path / "nowhere" / "base.safetensors", epochs=1)


def test_a_diverged_training_stops_before_its_checkpoint(config: Any, tmp_path: Path) -> None:
    out = tmp_path / "base.safetensors"
    with pytest.raises(RuntimeError, match="training loss of epoch 1 is nan; use a smaller lr"):
        pretrain(config(lr=1e30), out, epochs=2, warmup_epochs=0)
    assert not list(tmp_path.iterdir())


# --- what comes of it -------------------------------------------------------------------
def test_a_base_is_good_and_federations_of_any_seed_keep_its_head(
    config: Any, tmp_path: Path, cache: str
) -> None:
    out = tmp_path / "base.safetensors"
    history = pretrain(config(max_train_examples=997, lr=0.02), out, epochs=6, warmup_epochs=1)
    assert history[-1].test_accuracy > 0.7
    head = create_model(config(), 10).state_dict()["head.weight"]
    assert torch.equal(safetensors.torch.load_file(out)["head.weight"], head)
    said = read_metadata(out)
    assert (said["head"], said["model"], said["epochs"]) == (
        "frozen-orthogonal",
        "vit-digits",
        "6",
    )
    assert float(said["test_accuracy"]) == history[-1].test_accuracy
    one = RunConfig.from_mapping(
        {
            **SMALL,
            "cache-dir": cache,
            "weights": str(out),
            "head": "frozen-orthogonal",
            "seed": 7,
            "num-clients": 2,
        }
    )
    worker = Worker(one)
    worker.load_whole(worker.initial_weights())
    assert torch.equal(worker.entries["head.weight"], head)
    assert worker.test()[1] > 0.6  # the test examples of another seed


def test_only_the_public_share_is_used_where_there_is_one(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(
        central.Pretraining, "run", lambda self, on_epoch: sizes.append(len(self.examples))
    )
    pretrain(config(), tmp_path / "all.safetensors")
    pretrain(config(public_fraction=0.2), tmp_path / "public.safetensors")
    assert sizes == [211, 42]


def test_it_starts_from_a_file_but_not_from_a_base(config: Any, tmp_path: Path) -> None:
    first = tmp_path / "first.safetensors"
    pretrain(config(), first, epochs=1)
    one = config(weights=str(first))
    model = create_model(one, 10)
    load_weights(model, str(first), one)
    training = central.Pretraining(one, tmp_path / "second.safetensors", epochs=1, warmup_epochs=0)
    assert all(
        torch.equal(tensor, model.state_dict()[name])
        for name, tensor in training.model.state_dict().items()
    )
    with pytest.raises(ConfigError, match="weights=base is a base itself"):
        config(weights="base")


def test_the_perplexity_of_a_language_model_falls(tmp_path: Path, cache: str) -> None:
    lines = [" the north wind and the sun were at odds , and the sun was in the right \n"] * 60
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "test"):
        pq.write_table(pa.table({"text": lines}), folder / f"{split}.parquet")
    one = pretraining_config(
        {"dataset": "wind", "data-dir": str(folder), "model": "tinygpt-mini", "cache-dir": cache},
        {"context-length": 13, "batch-size": 7, "device": "cpu", "threads": 1},
    )
    lines_printed: list[str] = []
    history = pretrain(
        one,
        tmp_path / "base.safetensors",
        epochs=3,
        warmup_epochs=1,
        on_epoch=lambda epoch: lines_printed.append(epoch.describe()),
    )
    perplexities = [epoch.test_perplexity for epoch in history]
    assert all(p is not None for p in perplexities)
    assert perplexities[0] > 1.5 * perplexities[-1] > 1.5
    assert f"perplexity {perplexities[-1]:.2f}" in lines_printed[-1]


# --- the command ------------------------------------------------------------------------
def test_the_command_prints_a_line_an_epoch_and_writes_the_file(tmp_path: Path, cache: str) -> None:
    out = tmp_path / "base.safetensors"
    keys = [f"{key}={value}" for key, value in {**SMALL, "cache-dir": cache}.items()]
    words = ["pretrain", *keys, "-c", "lr=0.02", "--epochs", "2", "--out", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "vit-digits on 211 examples of digits: sgd, lr 0.02 (3 epochs of warm-up" in done.output
    for epoch in (1, 2):
        assert f"epoch {epoch}/2  loss " in done.output
    assert done.output.count("accuracy") == 2
    assert out.exists()
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 2
