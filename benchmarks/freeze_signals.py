"""Freeze signals in real federations, against the warm-up that turns out best.

The signals of :mod:`fedfrozen_app.theory.signals` read what a server sees of a run that never
freezes: the clients' updates of the query and key weights and the training loss they report.
Every warm-up is then measured as ``fedfrozen tune-warmup`` does, from that one run, and each
signal's freeze is judged by its validation loss over that of the best:

    python benchmarks/freeze_signals.py --out signals.json [EXPERIMENT.toml] [key=value ...]

Lists of ``--seeds`` and ``--alphas`` make the runs.
"""

import argparse
import itertools
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message

from fedfrozen_app.config import RunConfig
from fedfrozen_app.config_input import parse_overrides, read_experiment
from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.engine.rounds import CLIENT_APP
from fedfrozen_app.engine.tune import tune_warmup, tuning_config
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.theory.map import FIXED, SIGNALS
from fedfrozen_app.theory.signals import Readings
from fedfrozen_app.training.worker import resident
from fedfrozen_app.transport.arrays import to_tensors
from fedfrozen_app.transport.payload import first_arrays


class WatchedGrid(LocalGrid):
    """Reads the first ``rounds`` rounds as a server could, which are those that never freeze."""

    rounds = 0

    def watch(self, rounds: int) -> None:
        """Begin with empty readings."""
        self.rounds, self.agreement, self.norm, self.loss = rounds, [], [], []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Yield the replies, and read them on the way."""
        sent = list(messages)
        replies = super().send_and_receive(sent, timeout=timeout)
        return self._read(sent, replies) if len(self.loss) < self.rounds else replies

    def _read(self, sent: list[Message], replies: Iterator[Message]) -> Iterator[Message]:
        start = to_tensors(first_arrays(sent[0].content)[1])
        selection = Selection.build("query-key", start)
        kernel = _flat(selection.split(start)[1])
        total, squares, losses, examples = torch.zeros_like(kernel), [], [], []
        for reply in replies:
            ended = _flat(selection.split(to_tensors(first_arrays(reply.content)[1]))[1])
            delta = ended - kernel
            total += delta
            squares.append(float(delta @ delta))
            metrics = next(iter(reply.content.metric_records.values()))
            losses.append(float(metrics["train_loss"]) * float(metrics["num-examples"]))
            examples.append(float(metrics["num-examples"]))
            yield reply
        mean = total / len(squares)
        square = float(mean @ mean)
        self.agreement.append(len(squares) * square / (sum(squares) / len(squares)))
        self.norm.append(math.sqrt(square))
        self.loss.append(sum(losses) / sum(examples))

    def readings(self) -> Readings:
        """Return what was seen, of one run, [T, 1] each."""
        norm = torch.tensor(self.norm, dtype=torch.float64)
        return Readings(
            torch.tensor(self.agreement, dtype=torch.float64)[:, None],
            (norm / norm.cummax(0).values)[:, None],
            torch.tensor([self.loss[0], *self.loss], dtype=torch.float64)[:, None],
        )


def _flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten().double() for tensor in tensors.values()])


def measure(config: RunConfig, step: int) -> dict[str, Any]:
    """Return validation loss by warm-up, in rounds, and where each signal freezes."""
    rounds = config.rounds
    warmups = sorted({*range(0, rounds + 1, step), rounds, round(0.9 * rounds)})
    with WatchedGrid(CLIENT_APP, resident(config).num_clients, config.to_mapping()) as grid:
        grid.watch(rounds)
        tuning = tune_warmup(config, grid, [warmup / rounds for warmup in warmups])
        seen = grid.readings()
    loss = {one.warmup_rounds: one.validation_loss for one in tuning.candidates}
    best = min(loss.values())
    chosen = {one.name: int(one.warmup(seen)[0]) for one in (*SIGNALS, *FIXED)}
    return {
        "loss": loss,
        "accuracy": {one.warmup_rounds: one.validation_accuracy for one in tuning.candidates},
        "agreement": seen.agreement.flatten().tolist(),
        "movement": seen.movement.flatten().tolist(),
        "train_loss": seen.loss.flatten().tolist(),
        "freeze": chosen,
        "over_best": {name: loss[_nearest(loss, at)] / best for name, at in chosen.items()},
    }


def _nearest(measured: Iterable[int], warmup: int) -> int:
    """Return the measured warm-up nearest to one, of two the longer."""
    return min(measured, key=lambda one: (abs(one - warmup), -one))


def main() -> None:
    """Measure, print the mean over all runs, write everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("keys", nargs="*", help="an experiment file, then config keys")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--alphas", default="0.1,0.5")
    parser.add_argument("--step", type=int, default=1, help="rounds between measured warm-ups")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    keys, runs = list(args.keys), {}
    base = read_experiment(Path(keys.pop(0))) if keys and keys[0].endswith(".toml") else {}
    for alpha, seed in itertools.product(args.alphas.split(","), args.seeds.split(",")):
        given = {**base, **parse_overrides([*keys, f"alpha={alpha}", f"seed={seed}"])}
        for key in ("warmup-rounds", "warmup-ratio"):
            given.pop(key, None)
        config = tuning_config(RunConfig.from_mapping(given))
        runs[f"alpha={alpha} seed={seed}"] = measure(config, args.step)
        args.out.write_text(json.dumps(runs, indent=1) + "\n")
        print(f"alpha={alpha} seed={seed}", flush=True)
    print("| freeze | over the best | worst | rounds |\n|---|---:|---:|---|")
    for one in (*FIXED, *SIGNALS):
        over = [run["over_best"][one.name] for run in runs.values()]
        at = " ".join(str(run["freeze"][one.name]) for run in runs.values())
        print(f"| {one.name} | {sum(over) / len(over):.3f} | {max(over):.3f} | {at} |")


if __name__ == "__main__":
    main()
