"""All rules side by side, with and without the freeze: accuracy, bytes and seconds.

Every run is `fedfrozen run` with the given file and keys; finished ones are not run again, so
an interrupted table goes on where it stopped.

    python benchmarks/rules.py --out rules-digits
    python benchmarks/rules.py experiments/cifar10-small.toml data-dir=FOLDER weights=FILE \
        optimizer=sgd lr=0.01 --out rules-cifar --seeds 1
"""

import argparse
import itertools
import json
import math
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from fedfrozen_app.runs.store import RunFolder
from fedfrozen_app.strategies.base import DivergedError
from fedfrozen_app.strategies.replies import NON_FINITE
from fedfrozen_app.strategies.rules import RULES

# without a freeze the name says so: a rule freezes only what it is told to
FREEZES = {"none": ["frozen=all", "warmup-ratio=-1"], "query-key": ["frozen=query-key"]}
DIVERGED = (NON_FINITE, DivergedError.__name__)
SMALLER = (1, 2, 4, 8)  # the local learning rate is divided by these until no run diverges
HEADER = "| alpha | rule | frozen | accuracy | loss | GB up | GB down | s |\n" + "|---" * 8 + "|"


def config_of(folder: RunFolder) -> dict[str, float]:
    """Return the run config that a folder was made with."""
    content: dict[str, float] = json.loads((folder.path / "config.json").read_text())["config"]
    return content


def is_finished(folder: RunFolder) -> bool:
    """Whether a run went through all its rounds, or stopped because it diverged."""
    if not (folder.path / "model.safetensors").exists():
        return False
    return is_through(folder) or any(word in (folder.failure() or "") for word in DIVERGED)


def is_through(folder: RunFolder) -> bool:
    """Whether the last round was reached."""
    return folder.metrics()[-1].round == config_of(folder)["rounds"]


def run_once(name: str, out: Path, words: list[str]) -> RunFolder:
    """Run one cell of the grid, unless it is finished; what was interrupted begins again."""
    folder = RunFolder(out / name)
    if folder.path.exists() and is_finished(folder):
        return folder
    shutil.rmtree(folder.path, ignore_errors=True)
    command = [sys.executable, "-m", "fedfrozen_app.cli", "run", *words]
    log = out / f"{name}.log"
    with log.open("w") as file:
        subprocess.run([*command, f"run-dir={out}", f"run-name={name}"], stdout=file, stderr=file)
    if not folder.path.exists() or not is_finished(folder):
        sys.exit(f"{name} did not run: {log.read_text().strip().splitlines()[-1]}")
    return folder


def diverged(folder: RunFolder) -> bool:
    """Whether a run broke off, or ended worse than it began in loss and in accuracy."""
    start, end = folder.metrics()[0], folder.metrics()[-1]
    if not is_through(folder) or end.test_loss is None:
        return True
    return end.test_loss > (start.test_loss or 0) and end.test_accuracy < start.test_accuracy  # type: ignore[operator]


def spread(values: list[float], digits: int) -> str:
    """Return mean +- standard deviation over seeds."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} +- {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def row(head: str, folders: list[RunFolder]) -> str:
    """Return one line of the table, over the seeds."""
    runs = [folder.metrics() for folder in folders]
    ends = [lines[-1] for lines in runs]
    accuracy = spread([end.test_accuracy or 0.0 for end in ends], 4)
    loss = spread([math.nan if end.test_loss is None else end.test_loss for end in ends], 3)
    up, down, seconds = (
        statistics.mean(sum(getattr(line, key) for line in lines) for lines in runs)
        for key in ("bytes_up", "bytes_down", "seconds_total")
    )
    bad = sum(map(diverged, folders))
    mark = f" (diverged in {bad} of {len(folders)})" if bad else ""
    return f"{head} {accuracy}{mark} | {loss} | {up / 1e9:.4g} | {down / 1e9:.4g} | {seconds:.1f} |"


def cell(alpha: float, rule: str, frozen: str, arguments: argparse.Namespace) -> None:
    """Run and print one setting; where it diverges, again at smaller local learning rates."""
    lr = 0.0
    for divisor in SMALLER:
        folders = []
        for seed in arguments.seeds:
            keys = [f"strategy={rule}", f"alpha={alpha}", f"seed={seed}", *FREEZES[frozen]]
            name = f"{rule}-{frozen}-alpha{alpha}-seed{seed}"
            if divisor > 1:
                keys, name = [*keys, f"lr={lr / divisor:g}"], f"{name}-lr{lr / divisor:g}"
            folders.append(run_once(name, arguments.out, [*arguments.words, *keys]))
        lr = lr or config_of(folders[0])["lr"]
        at = f", lr={lr / divisor:g}" if divisor > 1 else ""
        print(row(f"| {alpha} | {rule}{at} | {frozen} |", folders), flush=True)
        if not any(map(diverged, folders)):
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="experiment file and key=value for every run")
    parser.add_argument("--out", type=lambda path: Path(path).resolve(), required=True)
    parser.add_argument(
        "--rules", nargs="+", default=[name for name in RULES if name != "fedfrozen"]
    )
    parser.add_argument("--alphas", nargs="+", type=float, default=[0.1, 0.5])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(HEADER, flush=True)
    for alpha, rule, frozen in itertools.product(arguments.alphas, arguments.rules, FREEZES):
        cell(alpha, rule, frozen, arguments)


if __name__ == "__main__":
    main()
