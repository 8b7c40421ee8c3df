"""Time and memory of a federation beside a plain loop, stock Flower and other libraries.

    python benchmarks/federation.py --out results
    python benchmarks/federation.py --workloads digits --contenders plain fedfrozen

Each contender is a process of its own with the same model, first weights, batches and optimiser
steps. They take turns round by round, in an order that rotates, so that a busy machine slows all
of them alike; "times plain" is the median over repetitions of the ratio to the plain loop in the
same repetition, with its quartiles. Peak memory is of the whole process. Weights must agree with
the plain loop's after the last round: "difference" is the largest absolute one, and shows who
averages something else.

Writes OUT.json and OUT.md. Other libraries live in an environment of their own:

    python -m venv peers && peers/bin/pip install -r benchmarks/peers.txt
    python benchmarks/federation.py --peers peers/bin/python
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from workloads import WORKLOADS, Unavailable, Workload, config_of, write_task

HERE = Path(__file__).resolve().parent
WARMUP_ROUNDS = 1


@dataclass(frozen=True)
class Contender:
    """A file of ``contenders``, its arguments, and whether it needs the peers' environment."""

    module: str
    arguments: tuple[str, ...] = ()
    is_peer: bool = False


LEAN = ("eval-every=0", "checkpoint-every=0")
CONTENDERS = {
    "plain": Contender("plain"),
    "fedfrozen": Contender("fedfrozen", LEAN),
    "fedfrozen, tests and checkpoints": Contender("fedfrozen"),
    "fedfrozen, 2 jobs": Contender("fedfrozen", (*LEAN, "jobs=2", "threads=1")),
    "pfl": Contender("pfl", is_peer=True),
    "fluke": Contender("fluke", is_peer=True),
    "fedlab": Contender("fedlab", is_peer=True),
}
PLAIN = "plain"


class ContenderError(RuntimeError):
    """A contender cannot do the work; the message is the last line it said."""


class Child:
    """A running contender."""

    def __init__(
        self, name: str, contender: Contender, task: Path, python: str, threads: int
    ) -> None:
        self.name = name
        self.weights = task.with_name(f"{name}.pt")
        self.rounds: list[dict[str, float]] = []
        self._log = task.with_name(f"{name}.log")
        command = [python, "-m", f"contenders.{contender.module}", str(task), *contender.arguments]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                cwd=HERE,
                env=_environment(threads),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.start = self._read()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None  # for the type checker
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            said = self._log.read_text().strip().splitlines() or ["it said nothing"]
            raise ContenderError(said[-1][:300])
        report: dict[str, float] = json.loads(line)
        return report

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def round(self) -> dict[str, float]:
        """Have one round done and return its report."""
        self._say("round")
        return self._read()

    def finish(self) -> dict[str, torch.Tensor]:
        """End it and return its weights."""
        self._say(f"stop {self.weights}")
        if self._process.wait(timeout=120) != 0:
            raise ContenderError(self._log.read_text().strip().splitlines()[-1][:300])
        weights: dict[str, torch.Tensor] = torch.load(self.weights, weights_only=True)
        return weights

    def end(self) -> None:
        """End it, whatever it is at."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def _environment(threads: int) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH", "")]))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
    }


@dataclass
class Group:
    """Contenders that take turns: the plain loop and those measured beside it."""

    children: dict[str, Child] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, *args: Any) -> None:
        """Start a contender; note the reason where it cannot start."""
        try:
            self.children[name] = Child(name, *args)
        except ContenderError as error:
            self.failed[name] = str(error)

    def run(self, repetitions: int) -> None:
        """Let everybody do a round in turn, many times; the first ones do not count."""
        for repetition in range(-WARMUP_ROUNDS, repetitions):
            order = list(self.children)
            shift = repetition % len(order)
            for name in order[shift:] + order[:shift]:
                try:
                    report = self.children[name].round()
                except ContenderError as error:
                    self.failed[name] = str(error)
                    self.children.pop(name).end()
                    continue
                if repetition >= 0:
                    self.children[name].rounds.append(report)

    def rows(self) -> list[dict[str, Any]]:
        """End everybody and return one row each."""
        weights = {name: child.finish() for name, child in self.children.items()}
        base = self.children[PLAIN].rounds
        rows = [
            summary(name, child.rounds, base)
            | {"difference": difference(weights[name], weights[PLAIN])}
            for name, child in self.children.items()
        ]
        return rows + [{"contender": name, "failed": why} for name, why in self.failed.items()]


def difference(own: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> float:
    """Return the largest absolute difference between two sets of weights, inf if names differ."""
    if own.keys() != plain.keys():
        return float("inf")
    return max(float((own[name] - value).abs().max()) for name, value in plain.items())


def summary(
    name: str, rounds: list[dict[str, float]], base: list[dict[str, float]]
) -> dict[str, Any]:
    """Return one row: medians, and quartiles of the ratio to the plain loop."""
    row: dict[str, Any] = {"contender": name, "repetitions": len(rounds)}
    row["peak_mb"] = max(report["peak_mb"] for report in rounds)
    for key in ("seconds", "cpu_seconds"):
        own = [report[key] for report in rounds]
        row[key] = statistics.median(own)
        ratios = [a / b[key] for a, b in zip(own, base, strict=True)]
        low, middle, high = quartiles(ratios)
        row[f"{key}_times_plain"] = middle
        row[f"{key}_times_plain_quartiles"] = [low, high]
    row["rounds"] = rounds
    return row


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return the quartiles of one or more values."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, method="inclusive")
    return low, middle, high


def measure(name: str, workload: Workload, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the table of one workload."""
    config = config_of(workload, folder, threads=args.threads, examples=args.examples)
    task = folder / name / "task.pt"
    task.parent.mkdir()
    write_task(config, task)
    others = [one for one in args.contenders if one != PLAIN]
    groups = [[one] for one in others] if workload.pairwise else [others]
    rows: list[dict[str, Any]] = []
    for members in groups:
        group = Group()
        for member in [PLAIN, *members]:
            contender = CONTENDERS[member]
            python = args.peers if contender.is_peer else sys.executable
            if not python:
                group.failed[member] = "no environment with it; see --peers"
                continue
            group.add(member, contender, task, python, args.threads)
        try:
            group.run(args.repetitions or workload.repetitions)
            rows += [
                row for row in group.rows() if row["contender"] != PLAIN or members == groups[0]
            ]
        finally:
            for child in group.children.values():
                child.end()
    return {"workload": name, "title": workload.title, "rows": rows}


# --- tables -----------------------------------------------------------------------------
def markdown(document: dict[str, Any]) -> str:
    """Return all tables."""
    lines = [f"{document['threads']} torch threads each, torch {torch.__version__}"]
    for table in document["tables"]:
        lines += ["", f"### {table['workload']}: {table['title']}", ""]
        if "skipped" in table:
            lines.append(f"skipped: {table['skipped']}")
            continue
        lines += [
            "| contender | s a round | times plain (quartiles) | CPU s, times plain | peak MB "
            "| difference |",
            "|---|---:|---:|---:|---:|---:|",
            *map(_line, table["rows"]),
        ]
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"| {row['contender']} | - | - | - | - | {row['failed']} |"
    low, high = row["seconds_times_plain_quartiles"]
    return (
        f"| {row['contender']} | {row['seconds']:.3f} | {row['seconds_times_plain']:.3f} "
        f"({low:.3f}-{high:.3f}) | {row['cpu_seconds_times_plain']:.3f} | {row['peak_mb']:,.0f} "
        f"| {row['difference']:.1e} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = [name for name in WORKLOADS if name != "tiny"]
    parser.add_argument("--workloads", nargs="*", default=default, choices=list(WORKLOADS))
    parser.add_argument(
        "--contenders", nargs="*", default=list(CONTENDERS), choices=list(CONTENDERS)
    )
    parser.add_argument("--repetitions", type=int, default=0, help="0 = the workload's own")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of every contender")
    parser.add_argument("--examples", type=int, default=500, help="per client of vit-s-14")
    parser.add_argument("--peers", default="", help="python of the other libraries' environment")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    args = parser.parse_args()
    tables: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.workloads:
            try:
                tables.append(measure(name, WORKLOADS[name], args, Path(folder)))
            except Unavailable as error:
                skipped = {"workload": name, "title": WORKLOADS[name].title, "skipped": str(error)}
                tables.append(skipped)
            print(markdown({"threads": args.threads, "tables": tables[-1:]}), flush=True)
    document = {"threads": args.threads, "examples": args.examples, "tables": tables}
    if args.out:
        args.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(markdown(document))


if __name__ == "__main__":
    main()
