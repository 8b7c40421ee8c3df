"""Federated rounds beside a plain loop on a GPU: images a second, seconds a round, peak memory.

    python benchmarks/gpu.py --out gpu
    python benchmarks/gpu.py --models vit-s-16 --batch-sizes 64 --clients 10 --examples 512
    python benchmarks/gpu.py --dry-run                  (a small one on the CPU)

Needs torch, torchvision, timm and flwr, no Ray and no data set: the images are noise, in uint8 on
the device. Both sides have the same model, first weights, batches and optimiser steps under bf16;
the plain loop loads a state dict for every client, trains it, copies the state dict and averages.
They take turns round by round; "of the plain loop" is the median of the ratio of images a second
in the same repetition. Writes OUT.json and OUT.md.
"""

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord
from torch import Tensor, nn

from fedfrozen_app.config import RunConfig
from fedfrozen_app.data.datasets import ImageDataset, ImageSplit
from fedfrozen_app.engine import rounds
from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.engine.start import checked_strategy
from fedfrozen_app.models.registry import create_model
from fedfrozen_app.seeds import torch_generator
from fedfrozen_app.training import worker as workers
from fedfrozen_app.transport.arrays import to_record, to_tensors

CLASSES = 10
LR, MOMENTUM = 0.01, 0.9
WARMUP_ROUNDS = 1


@dataclass
class Side:
    """One of the two that take turns, and what its rounds cost."""

    run: Callable[[int], None]
    device: torch.device
    seconds: list[float] = field(default_factory=list)
    peak_mb: float = 0.0

    def round(self, server_round: int, *, counts: bool) -> None:
        """Do a round, and keep its time and the device's peak memory if it counts."""
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        started = time.perf_counter()
        self.run(server_round)
        if on_gpu:
            torch.cuda.synchronize(self.device)
        if counts:
            self.seconds.append(time.perf_counter() - started)
            if on_gpu:
                peak = torch.cuda.max_memory_allocated(self.device) / 1e6
            else:
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
            self.peak_mb = max(self.peak_mb, peak)


def noise(examples: int, pixels: int) -> ImageDataset:
    """Return a data set of uint8 noise, ``examples`` to train on and as many as classes to test."""
    generator = torch_generator(1, "noise")

    def split(count: int) -> ImageSplit:
        shape = (count, pixels, pixels, 3)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        return ImageSplit(images, torch.arange(count) % CLASSES)

    names = tuple(map(str, range(CLASSES)))
    return ImageDataset("noise", split(examples), split(CLASSES), names, "none", "noise")


def config_of(args: argparse.Namespace, model: str, batch_size: int, folder: str) -> RunConfig:
    """Return the run of one row: FedAvg, one epoch a round, bf16."""
    return RunConfig.from_mapping(
        {
            "dataset": "digits",  # stands for what noise() makes
            "model": model,
            "weights": "none",
            "image-size": args.image_size,
            "strategy": "fedavg",
            "partitioner": "iid",
            "public-fraction": 0.0,
            "num-clients": args.clients,
            "rounds": WARMUP_ROUNDS + args.rounds,
            "local-epochs": 1,
            "batch-size": batch_size,
            "lr": LR,
            "momentum": MOMENTUM,
            "precision": "bf16",
            "device": args.device,
            "eval-every": 0,
            "checkpoint-every": 0,
            "cache-dir": folder,
            "run-dir": folder,
        }
    )


def federated(config: RunConfig, worker: workers.Worker, grid: LocalGrid) -> tuple[Any, list[Any]]:
    """Return what does a round of the engine, and where its model lies."""
    strategy = checked_strategy(config, worker)
    model: list[ArrayRecord] = [to_record(worker.initial_weights())]

    def run(server_round: int) -> None:
        arrays = model.pop()
        sent = strategy.configure_train(server_round, arrays, ConfigRecord(), grid)
        model.append(rounds.finish_round(strategy, grid, server_round, arrays, sent))

    return run, model


def batches(worker: workers.Worker, server_round: int, client: int) -> Iterator[tuple[Any, Any]]:
    """Yield the batches that the engine's client takes."""
    examples = worker._examples("train", worker.partition.clients[client])
    shuffles = torch_generator(worker.config.seed, "batches", server_round, client)
    order = torch.randperm(len(examples), generator=shuffles)
    for positions in torch.split(order, worker.config.batch_size):
        yield examples.batch(positions, None)


def plain(config: RunConfig, worker: workers.Worker) -> tuple[Any, list[dict[str, Tensor]]]:
    """Return what does a round of the plain loop, and where its model lies."""
    device = worker.device
    model = create_model(config, CLASSES).to(device).train()
    start = {name: tensor.to(device) for name, tensor in worker.initial_weights().items()}
    state: list[dict[str, Tensor]] = [start]
    shares = [len(rows) for rows in worker.partition.clients]

    def train(server_round: int, client: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        for x, y in batches(worker, server_round, client):
            with torch.autocast(device.type, torch.bfloat16):
                logits: Tensor = model(x)
            F.cross_entropy(logits.float(), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    def run(server_round: int) -> None:
        total, mean = sum(shares), dict[str, Tensor]()
        for client, share in enumerate(shares):
            model.load_state_dict(state[0])
            train(server_round, client)
            own = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
            for name, tensor in own.items():
                part = tensor * (share / total)
                mean[name] = part if client == 0 else mean[name] + part
        state[0] = mean

    return run, state


def measure(args: argparse.Namespace, model: str, batch_size: int) -> dict[str, Any]:
    """Return one row."""
    workers.resident.cache_clear()
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(args, model, batch_size, folder)
        data = noise(args.clients * args.examples, config.image_size or 224)
        workers.load_dataset = lambda _: data  # type: ignore[assignment]
        worker = workers.resident(config)
        with LocalGrid(rounds.CLIENT_APP, args.clients, config.to_mapping()) as grid:
            run, own = federated(config, worker, grid)
            run_plain, reference = plain(config, worker)
            sides = {"fedfrozen": Side(run, worker.device), "plain": Side(run_plain, worker.device)}
            for server_round in range(1, 1 + WARMUP_ROUNDS + args.rounds):
                order = list(sides.values())[:: 1 if server_round % 2 else -1]
                for side in order:
                    side.round(server_round, counts=server_round > WARMUP_ROUNDS)
        mine = to_tensors(own[0])
        apart = max(float((mine[n] - t.cpu()).abs().max()) for n, t in reference[0].items())
        moved = max(float((mine[n] - t).abs().max()) for n, t in worker.initial_weights().items())
    images = args.clients * args.examples
    pairs = zip(sides["plain"].seconds, sides["fedfrozen"].seconds, strict=True)
    seconds = statistics.median(sides["fedfrozen"].seconds)
    return {
        "model": model,
        "batch_size": batch_size,
        "images_per_second": images / seconds,
        "tokens_per_second": images * tokens(worker.model) / seconds,
        "share_of_plain": statistics.median(slow / fast for slow, fast in pairs),
        "seconds_a_round": seconds,
        "peak_mb": sides["fedfrozen"].peak_mb,
        "peak_mb_plain": sides["plain"].peak_mb,
        "difference": apart,
        "moved": moved,
    }


def tokens(model: nn.Module) -> int:
    """Return how many tokens a ViT makes of an image."""
    return int(model.pos_embed.shape[1])  # type: ignore[union-attr, index]


def table(rows: list[dict[str, Any]], device: str) -> str:
    """Return the rows as Markdown."""
    lines = [
        f"{device}, torch {torch.__version__}, bf16",
        "",
        "| model | batch | images/s | tokens/s | of the plain loop | s a round | peak MB (plain) "
        "| difference |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['model']} | {row['batch_size']} | {row['images_per_second']:,.0f} "
        f"| {row['tokens_per_second']:,.0f} | {row['share_of_plain']:.3f} "
        f"| {row['seconds_a_round']:.3f} | {row['peak_mb']:,.0f} ({row['peak_mb_plain']:,.0f}) "
        f"| {row['difference']:.1e} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure every model at every batch size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["vit-b-32", "vit-s-16"])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[32, 64, 128])
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--examples", type=int, default=512, help="of each client")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="OUT.json and OUT.md")
    parser.add_argument("--dry-run", action="store_true", help="ViT-Ti/16 at 32 px on the CPU")
    args = parser.parse_args()
    if args.dry_run:
        args.models, args.batch_sizes, args.device = ["vit_tiny_patch16_224"], [2], "cpu"
        args.clients, args.examples, args.rounds, args.image_size = 2, 3, 1, 32
    elif args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("no CUDA device here; try --dry-run")
    rows = [measure(args, model, size) for model in args.models for size in args.batch_sizes]
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    text = table(rows, name)
    print(text)
    if args.out:
        args.out.with_suffix(".md").write_text(text)
        args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
