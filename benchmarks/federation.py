"""Time and memory of a federation beside a plain loop, stock Flower and other libraries.

    python benchmarks/federation.py --out results
    python benchmarks/federation.py --workloads digits --contenders plain fedfrozen --jobs

Each contender is a process of its own with the same model, first weights, batches and optimiser
steps. They take turns round by round, in an order that rotates, so that a busy machine slows all
of them alike; "times plain" is the median over repetitions of the ratio to the plain loop in the
same repetition, with its quartiles. Peak memory is of the whole process. Weights must agree with
the plain loop's after the last round: "difference" is the largest absolute one, and shows who
averages something else. Stock Flower is timed by whole runs, in turn with runs of this project.

Writes OUT.json and OUT.md. Other libraries live in an environment of their own:

    python -m venv peers && peers/bin/pip install -r benchmarks/peers.txt
    python benchmarks/federation.py --peers peers/bin/python
"""

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from children import Child, Contender, ContenderError
from tables import difference, markdown, summary
from whole import JOBS, LEAN, RUNS, measure_job
from workloads import WORKLOADS, Unavailable, Workload, config_of, write_task_apart

WARMUP_ROUNDS = 1
PLAIN = "plain"
CONTENDERS = {
    PLAIN: Contender("plain"),
    "fedfrozen": Contender("fedfrozen", LEAN),
    "fedfrozen, tests and checkpoints": Contender("fedfrozen"),
    "fedfrozen, 2 jobs": Contender("fedfrozen", (*LEAN, "jobs=2", "threads=1")),
    "pfl": Contender("pfl", is_peer=True),
    "fluke": Contender("fluke", is_peer=True),
    "fedlab": Contender("fedlab", is_peer=True),
    "fluke, as it comes": Contender("fluke", ("defaults",), is_peer=True),
    "fedlab, as it comes": Contender("fedlab", ("defaults",), is_peer=True),
}


@dataclass
class Group:
    """Contenders that take turns: the plain loop and those measured beside it."""

    children: dict[str, Child] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, args: argparse.Namespace, task: Path) -> None:
        """Start a contender; note the reason where it cannot start."""
        contender = CONTENDERS[name]
        python = args.peers if contender.is_peer else sys.executable
        if not python:
            self.failed[name] = "no environment that has it, see --peers"
            return
        try:
            self.children[name] = Child(name, contender, task, python, args.threads)
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
            | {
                "start_mb": child.start["peak_mb"],
                "difference": difference(weights[name], weights[PLAIN]),
            }
            for name, child in self.children.items()
        ]
        return rows + [{"contender": name, "failed": why} for name, why in self.failed.items()]


def measure(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the table of one workload."""
    workload: Workload = WORKLOADS[name]
    config = config_of(workload, folder, threads=args.threads, examples=args.examples)
    task = folder / name / "task.pt"
    task.parent.mkdir()
    write_task_apart(config, task)
    others = [one for one in args.contenders if one != PLAIN]
    groups = [[one] for one in others] if workload.pairwise else [others]
    rows: list[dict[str, Any]] = []
    for members in groups:
        group = Group()
        try:
            for member in [PLAIN, *members]:
                group.add(member, args, task)
            group.run(args.repetitions or workload.repetitions)
            found = group.rows()
        finally:
            for child in group.children.values():
                child.end()
        rows += found[1:] if rows else found  # the plain loop of the first group
    return {"workload": name, "title": workload.title, "rows": rows}


def tables(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return all tables asked for, each printed as soon as it is there."""
    found: list[dict[str, Any]] = []
    for name in [*args.workloads, *args.jobs]:
        workload = WORKLOADS[name] if name in WORKLOADS else JOBS[name].workload
        try:
            if name in WORKLOADS:
                found.append(measure(name, args, folder))
            else:
                found.append(measure_job(name, folder, args.runs, args))
        except Unavailable as error:
            found.append({"workload": name, "title": workload.title, "skipped": str(error)})
        print(markdown({"threads": args.threads, "tables": found[-1:]}), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = [name for name in WORKLOADS if name != "tiny"]
    every = list(CONTENDERS)
    parser.add_argument("--workloads", nargs="*", default=default, choices=list(WORKLOADS))
    parser.add_argument("--contenders", nargs="*", default=every, choices=every)
    parser.add_argument("--jobs", nargs="*", default=list(JOBS), choices=list(JOBS))
    flower = [run for run in RUNS if run.startswith("flower")]
    parser.add_argument("--runs", nargs="*", default=flower, choices=RUNS[1:], help="in --jobs")
    parser.add_argument("--at-once", type=int, default=1, help="clients at once in --jobs")
    parser.add_argument("--repetitions", type=int, default=0, help="0 = the workload's own")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of every contender")
    parser.add_argument("--examples", type=int, default=500, help="per client of vit-s-14")
    parser.add_argument("--peers", default="", help="python of the other libraries' environment")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = tables(args, Path(folder))
    document = {"threads": args.threads, "examples": args.examples, "tables": found}
    if args.out:
        args.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(markdown(document))


if __name__ == "__main__":
    main()
