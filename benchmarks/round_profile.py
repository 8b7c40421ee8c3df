"""Where the seconds of a federated round go, by stage.

    python benchmarks/round_profile.py --workload vit-b-32 --rounds 5

Runs the in-process engine with a stopwatch around each stage; a stage's seconds are its own,
without those of stages inside it. "training" is what a plain loop needs, too.
"""

import argparse
import functools
import json
import logging
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from workloads import WORKLOADS, config_of

from fedfrozen_app.config import RunConfig
from fedfrozen_app.data.images import ImageExamples
from fedfrozen_app.engine import local_grid, rounds
from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.engine.start import prepare
from fedfrozen_app.runs.store import RoundMetrics, RunFolder
from fedfrozen_app.strategies import replies
from fedfrozen_app.strategies.base import ServerRule
from fedfrozen_app.strategies.mean import Mean
from fedfrozen_app.training import local
from fedfrozen_app.training import worker as workers
from fedfrozen_app.training.worker import Worker
from fedfrozen_app.transport import ledger

# stage: where it is looked up, and its name there
STAGES: dict[str, list[tuple[Any, str]]] = {
    "training: loop": [(workers, "train")],
    "training: make a batch": [(ImageExamples, "batch")],
    "training: forward": [(local, "_logits")],
    "training: backward": [(torch.Tensor, "backward")],
    "training: optimiser": [(torch.optim.SGD, "step")],
    "gather a client's images": [(Worker, "_examples")],
    "Flower's ClientApp and our handler": [(local_grid, "call")],
    "load the model": [(Worker, "load")],
    "copy the active entries": [(Worker, "active")],
    "check a reply": [(replies, "refusal")],
    "add a reply": [(Mean, "add")],
    "check the mean": [(ServerRule, "_check_finite")],
    "other of aggregation": [(ServerRule, "aggregate_train")],
    "address messages": [(ServerRule, "configure_train")],
    "count bytes": [(ledger, "payload_bytes"), (ledger, "wire_bytes")],
    "test": [(rounds.Federation, "_test")],
    "write the round's line": [(RunFolder, "append")],
    "checkpoint": [(rounds.Federation, "_checkpoint")],
}
UNDIVIDED = ("test", "checkpoint")


class Stopwatch:
    """Seconds by stage."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[float] = []
        self._whole = False  # within a stage that is not divided

    def wrap(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call that counts its own time."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._whole:
                return call(*args, **kwargs)
            self._whole = stage in UNDIVIDED
            self._inside.append(0.0)
            started = self._clock()
            try:
                return call(*args, **kwargs)
            finally:
                took = self._clock() - started
                self._whole = False
                self.seconds[stage] += took - self._inside.pop()
                if self._inside:
                    self._inside[-1] += took

        return timed


def profile(
    config: RunConfig, skipped: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return milliseconds a round by stage, without the first rounds."""
    watch = Stopwatch(clock)
    for stage, places in STAGES.items():
        for owner, name in places:
            setattr(owner, name, watch.wrap(stage, getattr(owner, name)))
    begun = [0.0]

    def on_round(metrics: RoundMetrics) -> None:
        if metrics.round == skipped:
            watch.seconds.clear()
            begun[0] = clock()
        ended[0] = clock()

    ended = [0.0]
    worker, _ = prepare(config)
    with LocalGrid(rounds.CLIENT_APP, worker.num_clients, config.to_mapping()) as grid:
        rounds.run_federation(config, grid, on_round)
    counted = config.rounds - skipped
    total = ended[0] - begun[0]
    found = {stage: watch.seconds[stage] for stage in STAGES}
    found["everything else"] = total - sum(found.values())
    return {stage: 1e3 * seconds / counted for stage, seconds in found.items()} | {
        "a round": 1e3 * total / counted
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default="digits", choices=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip", type=int, default=2, help="first rounds that do not count")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--examples", type=int, default=100, help="per client of vit-s-14")
    parser.add_argument("--cpu", action="store_true", help="CPU seconds, on a busy machine")
    parser.add_argument("--set", nargs="*", default=["eval-every=0", "checkpoint-every=0"])
    args = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        made = config_of(
            WORKLOADS[args.workload], Path(folder), threads=args.threads, examples=args.examples
        )
        given = dict(pair.split("=", 1) for pair in args.set)
        keys = {"rounds": args.skip + args.rounds, **given}
        config = RunConfig.from_mapping(made.to_mapping(), keys)
        clock = time.process_time if args.cpu else time.perf_counter
        found = profile(config, args.skip, clock)
    print(f"{WORKLOADS[args.workload].title}: {' '.join(args.set)}\n")
    print("| stage | ms a round | share |\n|---|---:|---:|")
    for stage, ms in sorted(found.items(), key=lambda item: -item[1]):
        print(f"| {stage} | {ms:,.2f} | {ms / found['a round']:.1%} |")
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
