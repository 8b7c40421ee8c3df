"""Latents and error feedback in Flower's own runtime: SuperLink, SuperExec and Ray.

Clients there are processes that a message may or may not find again, so what they keep lies in
``context.state``, and the factors of the map are made anew from the seed wherever they are not.
"""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from fedfrozen_app.engine.flower import run_with_flower
from fedfrozen_app.runs.store import RunFolder
from tests.engine.run import Run, equal, small_config

pytestmark = pytest.mark.slow

QUICK: dict[str, Any] = {
    "local_steps": 3,
    "batch_size": 5,
    "max_train_examples": 101,
    "max_test_examples": 53,
}


def comparable(folder: RunFolder) -> list[dict[str, Any]]:
    """The metrics without what a clock measures."""
    return [
        {k: v for k, v in vars(line).items() if not k.startswith(("seconds", "wire"))}
        for line in folder.metrics()
    ]


def in_flower(root: Path, cache: str, **keys: Any) -> RunFolder:
    """Run in Flower's runtime; return the folder of the run."""
    config = small_config(root, cache, engine="flwr", device="cpu", **keys)
    lines: list[str] = []
    assert run_with_flower(config, lines.append) == 0, "\n".join(lines[-30:])
    (path,) = root.iterdir()
    return RunFolder(path)


def model_of(folder: RunFolder) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder.path / "model.safetensors")


def test_latents_of_4_bits_after_a_warmup_are_those_of_the_run_in_this_process(
    tmp_path: Path, cache: str
) -> None:
    keys: dict[str, Any] = {
        "strategy": "latent", "frozen": "query-key", "warmup_rounds": 1, "rounds": 3,
        "latent_bits": 4, "latent_lr": 0.1,
    }  # fmt: skip
    here = Run(tmp_path / "here", cache, **keys, **QUICK)
    there = in_flower(tmp_path / "flwr", str(tmp_path / "cache"), **keys, **QUICK)
    assert [line.phase for line in here.metrics] == ["start", "warmup", "latent", "latent"]
    assert comparable(there) == comparable(here.folder)
    assert equal(model_of(there), here.model)
    last = here.metrics[-1]
    assert (last.clients, last.dropped, last.bytes_up) == (3, 0, 3 * (17 * 32 + 8))
    assert last.test_loss != here.metrics[-2].test_loss


def test_feedback_of_top_k_is_kept_by_each_client_of_flowers_runtime(
    tmp_path: Path, cache: str
) -> None:
    # two of three clients a round, so that some are away while others go on
    keys: dict[str, Any] = {
        "strategy": "fedavg", "frozen": "query-key", "warmup_rounds": 2, "rounds": 4,
        "compression": "topk:0.05", "fraction_train": 0.67,
    }  # fmt: skip
    here = Run(tmp_path / "here", cache, **keys, **QUICK)
    own = tmp_path / "cache"
    there = in_flower(tmp_path / "flwr", str(own), **keys, **QUICK)
    assert comparable(there) == comparable(here.folder)
    assert equal(model_of(there), here.model)
    assert [(line.clients, line.dropped) for line in here.metrics[1:]] == [(2, 0)] * 4
    # small as it is, it lies in context.state, not in files
    assert not (own / "clients").exists()
