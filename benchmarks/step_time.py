"""Seconds per training step under each selection, on one Vision Transformer.

python benchmarks/step_time.py [--image-size 96] [--batch-size 32] [--steps 5] [--json FILE]

The selections take turns within one process, so that a busy machine slows all of them alike;
"times faster" is the median over rounds of the ratio to ``all`` within the same round. Frozen
rows must cost nothing: query-key may never be slower than all.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfrozen_app.models.freeze import freeze_, train_mode_
from fedfrozen_app.models.selection import PRESETS, Selection
from fedfrozen_app.seeds import torch_generator

NUM_CLASSES = 10


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


class Trainee:
    """One model under one selection with its own optimiser and step times in seconds."""

    def __init__(self, frozen: str, args: argparse.Namespace, dtype: torch.dtype | None) -> None:
        torch.manual_seed(1)
        self.model: nn.Module = timm.create_model(
            args.model, img_size=args.image_size, num_classes=NUM_CLASSES
        ).to(args.device)
        self.selection = Selection.build(frozen, self.model.state_dict())
        freeze_(self.model, self.selection)
        train_mode_(self.model)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4
        )
        self.device, self.dtype = args.device, dtype
        self.seconds: list[float] = []

    def step(self, x: Tensor, y: Tensor) -> None:
        """Take one optimiser step and keep its duration."""
        synchronize(self.device)
        start = time.perf_counter()
        kind = self.device.partition(":")[0]
        with torch.autocast(kind, self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        synchronize(self.device)
        self.seconds.append(time.perf_counter() - start)


def measure(args: argparse.Namespace, dtype: torch.dtype | None) -> list[dict[str, Any]]:
    """Return one row per selection: seconds per step and how many times faster than ``all``."""
    generator = torch_generator(1, "benchmark")
    shape = (args.batch_size, 3, args.image_size, args.image_size)
    x = torch.randn(shape, generator=generator).to(args.device)
    y = torch.randint(NUM_CLASSES, (args.batch_size,), generator=generator).to(args.device)
    trainees = {frozen: Trainee(frozen, args, dtype) for frozen in PRESETS}
    for i in range(args.warmup + args.steps):
        order = list(trainees.values())
        for trainee in order[i % len(order) :] + order[: i % len(order)]:
            trainee.step(x, y)
    seconds = {name: t.seconds[args.warmup :] for name, t in trainees.items()}
    return [
        {
            "precision": "fp32" if dtype is None else "bf16",
            "frozen": name,
            "num_active": trainees[name].selection.num_active,
            "seconds": statistics.median(times),
            "fastest": min(times),
            "speedup": statistics.median(
                all_ / own for all_, own in zip(seconds["all"], times, strict=True)
            ),
            "speedup_of_fastest": min(seconds["all"]) / min(times),
        }
        for name, times in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--image-size", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="also write the table here")
    args = parser.parse_args()
    rows = [row for dtype in (None, torch.bfloat16) for row in measure(args, dtype)]
    print(f"{args.model} at {args.image_size} px, batch {args.batch_size}, on {args.device}, ")
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("precision  frozen       trained numbers  seconds/step  times faster (of fastest)")
    for row in rows:
        print(
            f"{row['precision']:<10} {row['frozen']:<12} {row['num_active']:>15,}  "
            f"{row['seconds']:>12.3f}  {row['speedup']:>12.2f} ({row['speedup_of_fastest']:.2f})"
        )
    document = {"settings": {**vars(args), "json": None}, "rows": rows}
    print("\n" + json.dumps(document))
    if args.json:
        args.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
