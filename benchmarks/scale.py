"""Whether memory and time stay flat as clients grow.

    python benchmarks/scale.py memory --clients 10 100
    python benchmarks/scale.py clients --clients 100 10000

``memory``: the peak of a process that trains ViT-B/32 by SGD with momentum, one round of all
clients, against model + gradients + momentum + two further copies + 1 GB. ``clients``: 20
sampled clients a round of few or many registered ones, in turn, the ratio round by round; and
the seconds from the start of a process to its first round, the partition not drawn before.
Prints JSON.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch
from children import Child, Contender
from tables import quartiles
from whole import LEAN
from workloads import WORKLOADS, Images, Workload, config_of

SAMPLED = 20
EXAMPLES = 2  # per client


def start(workload: Workload, folder: Path, threads: int) -> tuple[Child, float]:
    """Start the in-process engine on a workload; return the child and its seconds until ready."""
    folder.mkdir()
    config = config_of(workload, folder, threads=threads)
    task = folder / "task.pt"
    torch.save({"config": config.to_mapping()}, task)  # all that it reads of a task
    started = time.perf_counter()
    child = Child("fedfrozen", Contender("fedfrozen", LEAN), task, sys.executable, threads)
    return child, time.perf_counter() - started


def memory(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Return peak MB by number of clients, and the bound."""
    model = timm.create_model("vit_base_patch32_224", num_classes=Images.classes)
    active = sum(p.nbytes for p in model.parameters()) / 1e6
    del model
    found: dict[str, Any] = {"bound_mb": round(5 * active + 1000), "model_mb": round(active)}
    for number in args.clients:
        base = WORKLOADS["vit-b-32"]
        images = Images(train=max(32, EXAMPLES * number))
        keys = {**base.keys, "num-clients": number, "partitioner": "iid"}
        child, _ = start(
            replace(base, keys=keys, images=images), scratch / str(number), args.threads
        )
        ready = child.start["peak_mb"]
        peaks = [child.round()["peak_mb"] for _ in range(args.rounds)]
        child.finish()
        found[f"{number} clients"] = {"ready_mb": ready, "peak_mb_by_round": peaks}
    return found


def clients(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Return seconds a round and to start by number of registered clients."""
    children, found = {}, dict[int, dict[str, Any]]()
    few = min(args.clients)
    for number in args.clients:
        keys = {
            "dataset": "noise",
            "model": "vit-digits",
            "weights": "none",
            "augment": "none",
            "partitioner": "iid",
            "num-clients": number,
            "fraction-train": SAMPLED / number,
            "local-steps": 4,
            "batch-size": EXAMPLES,
        }
        images = Images(train=EXAMPLES * max(args.clients), test=20, pixels=8)
        workload = Workload(f"{number} clients", keys, 1, images=images)
        children[number], seconds = start(workload, scratch / str(number), args.threads)
        found[number] = {
            "start_seconds": round(seconds, 2),
            "start_cpu_seconds": round(children[number].start["cpu_seconds"], 2),
        }
    rounds: dict[int, list[dict[str, float]]] = {number: [] for number in children}
    for _ in range(args.rounds):
        for number, child in children.items():
            rounds[number].append(child.round())
    for number, child in children.items():
        child.finish()
        for key in ("seconds", "cpu_seconds"):
            own = [report[key] for report in rounds[number]]
            pairs = zip(own, (report[key] for report in rounds[few]), strict=True)
            found[number][key] = round(statistics.median(own), 4)
            found[number][f"{key}_times_fewest"] = quartiles([a / b for a, b in pairs])
        found[number]["peak_mb"] = rounds[number][-1]["peak_mb"]
    return {str(number): row for number, row in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["memory", "clients"])
    parser.add_argument("--clients", type=int, nargs="+", required=True)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = memory if args.what == "memory" else clients
        print(json.dumps(measured(args, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
