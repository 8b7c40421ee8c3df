"""Seconds from the start of a process to its first training step, with and without the cache.

    python benchmarks/start_up.py [--dataset cifar100] [--repeats 3]

Runs one client for one step, first with an empty cache of decoded data and then again. Reads the
parquet files of the folder ``shared`` beside the checkout.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from children import HERE, environment
from workloads import SHARED

STEPS = """
import json, os, sys, time
ticks = os.sysconf("SC_CLK_TCK")
born = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19]) / ticks
def age():
    return time.clock_gettime(time.CLOCK_BOOTTIME) - born, time.process_time()
marks = {"python": age()}
import torch
marks["torch"] = age()
import logging
logging.getLogger("flwr").setLevel(logging.WARNING)
from fedfrozen_app.cli import load_config
from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.engine import rounds, start
marks["fedfrozen"] = age()
config = load_config(None, sys.argv[1:])
worker, _ = start.prepare(config)
marks["data and model"] = age()
def first(*args, **kwargs):
    marks["first step"] = age()
    print(json.dumps(marks), flush=True)
    os._exit(0)
torch.optim.SGD.step = first
with LocalGrid(rounds.CLIENT_APP, worker.num_clients, config.to_mapping()) as grid:
    rounds.run_federation(config, grid, lambda metrics: None)
"""


def marks(dataset: str, scratch: Path, threads: int) -> dict[str, list[float]]:
    """Return the age of a process at each of its marks: seconds, and CPU seconds used."""
    pairs = [
        f"dataset={dataset}",
        f"data-dir={SHARED / 'data' / dataset}",
        "model=vit-digits",
        "weights=none",
        "max-test-examples=100",
        "rounds=1",
        "local-steps=1",
        f"threads={threads}",
        f"run-dir={scratch / 'runs'}",
        f"cache-dir={scratch / 'cache'}",
    ]
    command = [sys.executable, "-c", STEPS, *pairs]
    done = subprocess.run(
        command, cwd=HERE, env=environment(threads), check=True, capture_output=True, text=True
    )
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="cifar100")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if not (SHARED / "data" / args.dataset).is_dir():
        sys.exit(f"{SHARED / 'data' / args.dataset} is not there")
    with tempfile.TemporaryDirectory() as folder:
        cold = marks(args.dataset, Path(folder), args.threads)
        warm = [marks(args.dataset, Path(folder), args.threads) for _ in range(args.repeats)]
    found = {
        "empty cache": cold,
        "again": {
            name: [statistics.median(one[name][clock] for one in warm) for clock in (0, 1)]
            for name in cold
        },
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
