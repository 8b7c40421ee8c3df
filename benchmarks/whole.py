"""Whole runs of what cannot be stepped: stock Flower beside this project, from start to exit.

Each run is a process of its own with as many rounds; the two take turns. A later round is
every one but the first, in which Flower starts Ray, by each one's own clock.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from children import HERE, ContenderError, environment
from contenders.conductor import peak_mb
from safetensors.torch import load_file
from tables import difference, quartiles
from workloads import WORKLOADS, Workload, config_of, write_task_apart

from fedfrozen_app.config import RunConfig

POLL_SECONDS = 0.2
LEAN = ("eval-every=0", "checkpoint-every=0")


@dataclass(frozen=True)
class Job:
    """A run of some rounds; ``tests`` = with the central tests that the product's defaults have."""

    workload: Workload
    rounds: int
    repetitions: int
    tests: bool = False


JOBS = {
    "digits-job": Job(
        Workload("the default job: 0.2 M ViT on digits, 10 clients, 12 rounds", {}, 1),
        rounds=12,
        repetitions=3,
        tests=True,
    ),
    "vit-b-32-job": Job(replace(WORKLOADS["vit-b-32"], pairwise=False), rounds=4, repetitions=2),
}
ON_RAY = {
    "fedfrozen, on Ray": {},
    "fedfrozen, on Ray, query-key": {"frozen": "query-key", "warmup-rounds": 1},
    "fedfrozen, on Ray, head": {"frozen": "head", "warmup-rounds": 1},
}  # two clients at once, as Flower's runtime takes all cores
RUNS = ("fedfrozen", "flower", "flower, model kept", *ON_RAY, "nvflare")


def run_measured(command: list[str], log: Path, threads: int) -> tuple[float, float]:
    """Run a command and return its seconds and the peak of all its processes in MB."""
    started, peak = time.perf_counter(), 0.0
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=HERE, env=environment(threads), stdout=out, stderr=out
        )
        while process.poll() is None:
            peak = max(peak, peak_mb(process.pid))
            time.sleep(POLL_SECONDS)
    if process.returncode != 0:
        raise ContenderError(log.read_text().strip().splitlines()[-1][:300])
    return time.perf_counter() - started, peak


def run_fedfrozen(
    config: RunConfig, job: Job, folder: Path, keys: Mapping[str, Any]
) -> dict[str, Any]:
    """Run ``fedfrozen run`` with some keys of its own and return what it took."""
    name = f"whole-{time.monotonic_ns()}"
    extra = {"rounds": job.rounds, "run-name": name, **keys}
    extra |= {} if job.tests else dict(word.split("=") for word in LEAN)
    pairs = [f"{key}={value}" for key, value in (config.to_mapping() | extra).items()]
    pairs = [pair for pair in pairs if not pair.endswith(("=", "=False", "=True"))]
    command = [sys.executable, "-m", "fedfrozen_app.cli", "run"]
    command += [word for pair in pairs for word in ("-c", pair)]
    seconds, peak = run_measured(command, folder / "fedfrozen.log", config.resolved_threads)
    run = Path(config.run_dir) / name
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "seconds": seconds,
        "peak_mb": peak,
        "later": [line["seconds_total"] for line in lines[2:]],
        "accuracy": lines[-1]["test_accuracy"],
        "weights": load_file(run / "model.safetensors"),
    }


def run_flower(config: RunConfig, job: Job, folder: Path, jobs: int, *words: str) -> dict[str, Any]:
    """Run stock Flower's simulation and return what it took."""
    task, threads = folder / "task.pt", config.resolved_threads
    words = (*words, "test") if job.tests else words
    command = [sys.executable, "-m", "contenders.flower", str(task), str(job.rounds)]
    command += [str(threads), str(jobs), *words]
    seconds, peak = run_measured(command, folder / "flower.log", threads)
    report = json.loads(Path(f"{task}.report").read_text())
    ended = report["ended"]
    return {
        "seconds": seconds,
        "peak_mb": peak,
        "later": [b - a for a, b in zip(ended, ended[1:], strict=False)],
        "accuracy": report["accuracy"],
        "weights": torch.load(f"{task}.flower", weights_only=True),
    }


def run_nvflare(
    config: RunConfig, job: Job, folder: Path, jobs: int, python: str
) -> dict[str, Any]:
    """Run NVIDIA FLARE's simulator and return what it took; a round begins with its clients."""
    task, threads = folder / "task.pt", config.resolved_threads
    log = Path(f"{task}.nvflare.log")
    log.unlink(missing_ok=True)
    command = [python, "-m", "contenders.nvflare", str(task), str(job.rounds), str(jobs)]
    seconds, peak = run_measured(command, folder / "nvflare.log", threads)
    began: dict[int, float] = {}
    for server_round, _, at, _ in map(json.loads, log.read_text().splitlines()):
        began[server_round] = min(at, began.get(server_round, at))
    times = [began[server_round] for server_round in sorted(began)]
    return {
        "seconds": seconds,
        "peak_mb": peak,
        "later": [b - a for a, b in zip(times, times[1:], strict=False)],
        "accuracy": None,
        "weights": torch.load(f"{task}.nvflare", weights_only=True),
    }


def measure_job(
    name: str, scratch: Path, runs: Sequence[str], args: argparse.Namespace
) -> dict[str, Any]:
    """Return the table of one job: "fedfrozen" and the other runs, in turn."""
    job = JOBS[name]
    jobs = args.at_once
    config = config_of(job.workload, scratch, threads=args.threads)
    if name == "digits-job":
        config = config.model_copy(update={"strategy": "fedfrozen"})
    folder = scratch / f"{name}-{jobs}"
    folder.mkdir()
    write_task_apart(config.model_copy(update={"rounds": job.rounds}), folder / "task.pt")
    calls: dict[str, Callable[[], dict[str, Any]]] = {
        "fedfrozen": lambda: run_fedfrozen(config, job, folder, {"jobs": jobs}),
        "flower": lambda: run_flower(config, job, folder, jobs),
        "flower, model kept": lambda: run_flower(config, job, folder, jobs, "keep-model"),
        "nvflare": lambda: run_nvflare(config, job, folder, jobs, args.peers),
    }
    for run, keys in ON_RAY.items():
        calls[run] = partial(run_fedfrozen, config, job, folder, {"engine": "flwr", **keys})
    found: dict[str, list[dict[str, Any]]] = {run: [] for run in ("fedfrozen", *runs)}
    failed: dict[str, str] = {}
    for _ in range(args.repetitions or job.repetitions):
        for run in [run for run in found if run not in failed]:
            try:
                found[run].append(calls[run]())
            except ContenderError as error:
                failed[run] = str(error)
    if "fedfrozen" in failed:
        raise ContenderError(f"fedfrozen, which others are compared with: {failed['fedfrozen']}")
    rows = [_row(run, found[run], found["fedfrozen"]) for run in found if run not in failed]
    rows += [{"contender": run, "failed": why} for run, why in failed.items()]
    title = f"{job.workload.title}, {jobs} at once"
    return {"workload": name, "title": title, "kind": "whole", "rows": rows}


def _row(name: str, runs: list[dict[str, Any]], base: list[dict[str, Any]]) -> dict[str, Any]:
    pairs = list(zip(runs, base, strict=True))
    row: dict[str, Any] = {
        "contender": name,
        "repetitions": len(runs),
        "seconds": statistics.median(run["seconds"] for run in runs),
        "seconds_later_round": statistics.median(s for run in runs for s in run["later"]),
        "peak_mb": max(run["peak_mb"] for run in runs),
        "accuracy": runs[-1]["accuracy"],
        "difference": difference(runs[-1]["weights"], base[-1]["weights"]),
    }
    ratios = {
        "seconds": [run["seconds"] / own["seconds"] for run, own in pairs],
        "later": [statistics.median(r["later"]) / statistics.median(o["later"]) for r, o in pairs],
    }
    for key, values in ratios.items():
        low, middle, high = quartiles(values)
        row |= {f"{key}_times_fedfrozen": middle, f"{key}_quartiles": [low, high]}
    return row
