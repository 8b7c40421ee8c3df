"""What the latent mapping costs: seconds to build and per step, peak memory, share of a step.

python benchmarks/latent.py [--models resnet18-gn vit-b-32] [--rank 32] [--rounds 5]

Ways to make the factors take turns within one process, so that a busy machine slows all of
them alike; "times sketch" is the median over rounds of the ratio within the same round. A
step's cost is one gather (gradients to latents) and one scatter (latents to weights). Peak
memory is of a process of its own (Linux), beside the model, its gradients and the base: the
factors and the buffers of building, one gather and one scatter. Prints Markdown.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from torch import nn

from fedfrozen_app.models.freeze import freeze_, train_mode_
from fedfrozen_app.models.latent import LatentMapping, LatentTraining
from fedfrozen_app.models.resnet import create_resnet
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.seeds import torch_generator

NUM_CLASSES = 100
WAYS = [("gaussian-qr", "stored"), ("gaussian-qr", "regenerated"), ("sketch", "stored")]
SKETCH = WAYS[-1]
CLEAR_REFS = Path("/proc/self/clear_refs")


def vit(name: str, **kwargs: int) -> nn.Module:
    model: nn.Module = timm.create_model(name, num_classes=NUM_CLASSES, **kwargs)
    return model


def linear() -> nn.Module:
    """Return a small model, for libraries to load what they load once."""
    return nn.Sequential(nn.Linear(997, 499, bias=False))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18-gn": partial(create_resnet, "resnet18-gn", NUM_CLASSES),
    "vit-b-32": partial(vit, "vit_base_patch32_224"),
}


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Trainee:
    """A frozen model with its base and drawn gradients, and trainings that share them."""

    def __init__(self, build: Callable[[], nn.Module], args: argparse.Namespace) -> None:
        self.model = build()
        selection = Selection.build("all", self.model.state_dict())
        self.mapping = partial(LatentMapping, selection, dim=args.dim, rank=args.rank, seed=1)
        mapped = self.mapping(generator="sketch").selection
        freeze_(self.model, mapped)
        self.base = {key: tensor.clone() for key, tensor in self.model.state_dict().items()}
        self.gradients = {k: torch.randn_like(p) for k, p in mapped.restrict(self.base).items()}

    def training(self, way: tuple[str, str]) -> LatentTraining:
        """Return the latents of a way to make the factors."""
        mapping = self.mapping(generator=way[0], memory=way[1])
        return LatentTraining(mapping, self.model, mapping.flat_zero(), self.base)

    def step(self, training: LatentTraining) -> float:
        """Return the seconds of one gather and one scatter."""
        for key, weight in training.weights.items():
            weight.grad = self.gradients[key]
        return timed(training.gather) + timed(training.scatter)


# --- memory -----------------------------------------------------------------------------
def resident(key: str) -> int:
    """Return VmRSS or VmHWM (the peak) of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def print_peak(args: argparse.Namespace) -> None:
    """Print the peak bytes of one way on one model, as a process of its own."""
    way = WAYS[args.peak]
    small = Trainee(linear, args)
    small.step(small.training(way))
    trainee = Trainee(MODELS[args.models[0]], args)
    CLEAR_REFS.write_text("5")
    before = resident("VmRSS")
    trainee.step(trainee.training(way))
    print(resident("VmHWM") - before)


def peak_of(name: str, way: tuple[str, str]) -> float:
    """Return peak bytes above model, gradients and base; NaN where Linux does not count them."""
    if not CLEAR_REFS.exists():
        return float("nan")
    # Big allocations of their own pages leave no holes in a heap: what is resident is in use.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    arguments = [*sys.argv[1:], "--models", name, "--peak", str(WAYS.index(way))]
    command = [sys.executable, __file__, *arguments]
    return float(subprocess.run(command, env=env, check=True, capture_output=True).stdout)


# --- tables -----------------------------------------------------------------------------
def compare(name: str, args: argparse.Namespace) -> None:
    """Print one table: every way to make the factors on one model."""
    peaks = {way: peak_of(name, way) for way in WAYS}
    trainee = Trainee(MODELS[name], args)
    built, trainings = {}, {}
    for way in WAYS:
        start = time.perf_counter()
        trainings[way] = trainee.training(way)
        built[way] = time.perf_counter() - start
    seconds: dict[tuple[str, str], list[float]] = {way: [] for way in WAYS}
    for i in range(args.rounds + 1):
        for way in WAYS:
            if way[1] != "regenerated" or i <= args.slow_rounds:
                seconds[way].append(trainee.step(trainings[way]))
    mapping = trainings[SKETCH].mapping
    print(f"\n### {name}: {mapping.describe().rpartition(',')[0]}, rank {args.rank}\n")
    print("| factors | seconds to build | ms per step | times sketch | peak extra MB |")
    print("|---|---:|---:|---:|---:|")
    dense = sum(4 * t.columns.size * args.dim for t in mapping.tensors)
    factors = sum(4 * t.columns.rank * (t.columns.size + args.dim) for t in mapping.tensors)
    print(f"| dense P x d, fp32 (computed) | - | - | - | {dense / 1e6:,.0f} |")
    print(f"| U and V, fp32 (computed) | - | - | - | {factors / 1e6:,.0f} |")
    for way in WAYS:
        pairs = zip(seconds[way][1:], seconds[SKETCH][1:], strict=False)
        print(
            f"| {'sketch' if way == SKETCH else ' '.join(way)} | {built[way]:.2f} | "
            f"{statistics.median(seconds[way][1:]) * 1e3:,.1f} | "
            f"{statistics.median(own / sketch for own, sketch in pairs):,.1f} | "
            f"{peaks[way] / 1e6:,.1f} |"
        )


def share_of_a_step(args: argparse.Namespace) -> None:
    """Print what the sketch adds to a training step of ViT-S/14 at 56 px, batches of 32."""
    trainee = Trainee(partial(vit, "vit_small_patch14_dinov2", img_size=56), args)
    model, training = trainee.model, trainee.training(SKETCH)
    x = torch.randn(32, 3, 56, 56, generator=torch_generator(1, "benchmark"))
    y = torch.randint(NUM_CLASSES, (32,), generator=torch_generator(1, "benchmark-labels"))
    train_mode_(model)
    optimizer = torch.optim.Adam(training.parameters().values(), lr=1e-2)
    rows = []

    def backward() -> None:
        F.cross_entropy(model(x), y).backward()

    for _ in range(args.rounds + 1):
        parts = [timed(call) for call in (backward, training.gather, optimizer.step)]
        optimizer.zero_grad()
        rows.append([*parts, timed(training.scatter)])
    medians = [statistics.median(column) for column in zip(*rows[1:], strict=True)]
    share = statistics.median((row[1] + row[3]) / (row[0] + row[2]) for row in rows[1:])
    print(f"\n### ViT-S/14 at 56 px, batch 32: {training.mapping.describe()}\n")
    print("| forward and backward ms | gather ms | Adam ms | scatter ms | the sketch adds |")
    print("|---:|---:|---:|---:|---:|")
    print("| " + " | ".join(f"{m * 1e3:,.1f}" for m in medians) + f" | {share:.1%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slow-rounds", type=int, default=2, help="of regenerated gaussian-qr")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.peak is not None:
        print_peak(args)
        return
    share_of_a_step(args)
    for name in args.models:
        compare(name, args)


if __name__ == "__main__":
    main()
