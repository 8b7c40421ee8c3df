"""A small GPT on the real WikiText-2, through whole runs."""

import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from rich.console import Console

from fedfrozen_app.config import RunConfig
from fedfrozen_app.data.datasets import load_dataset
from fedfrozen_app.data.text import TextDataset
from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.engine.rounds import run_federation
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.runs.store import RunFolder
from fedfrozen_app.runs.summary import closing_table, quality
from fedfrozen_app.training.worker import resident

SMALL: dict[str, Any] = {
    "dataset": "wikitext2",
    "model": "tinygpt-mini",
    "weights": "none",
    "partitioner": "natural",
    "context-length": 61,
    "num-clients": 3,
    "rounds": 3,
    "warmup-rounds": 2,
    "local-epochs": 1,
    "max-train-examples": 457,
    "max-test-examples": 53,
    "batch-size": 7,
    "optimizer": "adamw",
    "lr": 0.003,
    "threads": 1,
}


@pytest.fixture(scope="module")
def folders(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    data = shared / "data" / "wikitext2"
    if not data.is_dir():
        pytest.skip("no WikiText-2 beside the checkout")
    root = tmp_path_factory.mktemp("language")
    return {
        "data-dir": str(data),
        "cache-dir": str(root / "cache"),
        "run-dir": str(root / "runs"),
    }


def config(folders: dict[str, str], **keys: Any) -> RunConfig:
    own = {key.replace("_", "-"): value for key, value in keys.items()}
    return RunConfig.from_mapping({**SMALL, **folders, **own})


def run(one: RunConfig) -> tuple[RunFolder, dict[str, torch.Tensor]]:
    with LocalGrid("fedfrozen_app.client_app:app", 3, one.to_mapping()) as grid:
        folder = run_federation(one, grid, lambda metrics: None)
    return folder, safetensors.torch.load_file(folder.path / "model.safetensors")


def test_wikitext2_has_its_600_articles_and_3_5_million_tokens(folders: dict[str, str]) -> None:
    dataset = load_dataset(config(folders, context_length=128))
    assert isinstance(dataset, TextDataset)
    assert dataset.vocabulary == 2048
    assert len(dataset.train.tokens) == 3_518_567
    assert len(dataset.train) == 27_488  # (3,518,567 - 1) // 128
    assert len(dataset.titles) == 600 and dataset.titles[0] == "Valkyria Chronicles III"
    assert len(dataset.test.article_starts) == 60


@pytest.mark.slow
def test_perplexity_falls_and_queries_and_keys_stay_after_the_freeze(
    folders: dict[str, str],
) -> None:
    one = config(folders)
    folder, model = run(one)
    metrics = folder.metrics()
    perplexities = [line.test_perplexity for line in metrics]
    assert all(p is not None for p in perplexities)
    # untrained, every one of the 2,048 tokens is about as likely as any other
    assert perplexities[0] == pytest.approx(2048, rel=0.05)
    assert perplexities == sorted(perplexities, reverse=True)
    assert perplexities[-1] < 700
    for line in metrics:
        assert line.test_loss is not None
        assert line.test_perplexity == pytest.approx(math.exp(line.test_loss))
    assert metrics[1].num_examples == 457  # blocks, not tokens
    kernel = Selection.build("query-key", model)
    total = sum(tensor.numel() for tensor in model.values())
    assert [line.bytes_up for line in metrics[1:]] == [
        3 * 4 * total,
        3 * 4 * total,
        3 * 4 * (total - kernel.num_frozen),
    ]
    stopped, at_freeze = run(config(folders, rounds=2))
    assert stopped.path != folder.path
    frozen, before = kernel.split(model)[1], kernel.split(at_freeze)[1]
    assert all(torch.equal(frozen[name], before[name]) for name in frozen)
    report = Console(record=True, width=100, file=None)
    with report.capture() as shown:
        report.print(closing_table(metrics, "wikitext2"))
    assert "ppl" in shown.get() and f"{perplexities[-1]:.2f}" in shown.get()
    assert quality(metrics[-1]) == f"perplexity {perplexities[-1]:.2f}"


def test_bf16_learns_as_fp32_does(folders: dict[str, str]) -> None:
    keys: dict[str, Any] = {"rounds": 1, "warmup_rounds": -1, "max_train_examples": 97}
    exact = run(config(folders, **keys))[0].metrics()
    rounded = run(config(folders, **keys, precision="bf16"))[0].metrics()
    assert rounded[1].test_loss != exact[1].test_loss
    assert rounded[1].test_loss == pytest.approx(exact[1].test_loss, rel=0.01)
    assert exact[1].test_loss < exact[0].test_loss - 0.3


def test_an_iid_run_is_the_same_again(folders: dict[str, str]) -> None:
    keys: dict[str, Any] = {"rounds": 1, "warmup_rounds": -1, "max_train_examples": 97}
    one, same = (run(config(folders, **keys, partitioner="iid"))[1] for _ in range(2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    worker = resident(config(folders, **keys, partitioner="iid"))
    assert [len(rows) for rows in worker.partition.clients] == [33, 32, 32]
