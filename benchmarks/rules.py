"""All rules side by side, with and without the freeze: accuracy, bytes and seconds.

Every run is `fedfrozen run` with the given file and keys; finished ones are not run again, so
an interrupted table goes on where it stopped.

    python benchmarks/rules.py --out rules-digits
    python benchmarks/rules.py experiments/cifar10-small.toml data-dir=FOLDER weights=FILE \
        optimizer=sgd lr=0.01 --out rules-cifar --seeds 1
"""

import argparse
import itertools
import math
import statistics
import subprocess
import sys
from pathlib import Path

from fedfrozen_app.runs.store import RoundMetrics, RunFolder

RULES = (
    "fedavg",
    "fedprox",
    "scaffold",
    "fednova",
    "fedavgm",
    "fedadam",
    "fedyogi",
    "fedadagrad",
)
# without a freeze the name says so: a rule freezes only what it is told to
FREEZES = {"none": ["frozen=all", "warmup-ratio=-1"], "query-key": ["frozen=query-key"]}
HEADER = "| alpha | rule | frozen | accuracy | loss | GB up | GB down | s |\n" + "|---" * 8 + "|"


def run_once(name: str, out: Path, words: list[str]) -> RunFolder:
    """Run one cell of the grid, unless it is there."""
    folder = RunFolder(out / name)
    if not (folder.path / "model.safetensors").exists():
        command = [sys.executable, "-m", "fedfrozen_app.cli", "run", *words]
        with (out / f"{name}.log").open("w") as log:
            subprocess.run([*command, f"run-dir={out}", f"run-name={name}"], stdout=log, stderr=log)
    return folder


def diverged(folder: RunFolder, lines: list[RoundMetrics]) -> bool:
    """Whether a run stopped, or ended with a loss that is not finite or above the start's."""
    start, end = lines[0].test_loss, lines[-1].test_loss
    return folder.failure() is not None or end is None or start is None or end > start


def spread(values: list[float], digits: int) -> str:
    """Return mean +- standard deviation over seeds."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} +- {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def row(alpha: float, rule: str, frozen: str, folders: list[RunFolder]) -> str:
    """Return one line of the table, over the seeds."""
    runs = [(folder, folder.metrics()) for folder in folders]
    bad = sum(diverged(folder, lines) for folder, lines in runs)
    if bad:
        return f"| {alpha} | {rule} | {frozen} | diverged in {bad} of {len(runs)} | | | | |"
    ends = [lines[-1] for _, lines in runs]
    accuracy = spread([end.test_accuracy or 0.0 for end in ends], 4)
    loss = spread([end.test_loss or math.nan for end in ends], 3)
    up, down, seconds = (
        statistics.mean(sum(getattr(line, key) for line in lines) for _, lines in runs)
        for key in ("bytes_up", "bytes_down", "seconds_total")
    )
    return (
        f"| {alpha} | {rule} | {frozen} | {accuracy} | {loss} | {up / 1e9:.4g} | {down / 1e9:.4g} "
        f"| {seconds:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="experiment file and key=value for every run")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run folders")
    parser.add_argument("--rules", nargs="+", default=RULES)
    parser.add_argument("--alphas", nargs="+", type=float, default=[0.1, 0.5])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    print(HEADER, flush=True)
    for alpha, rule, frozen in itertools.product(arguments.alphas, arguments.rules, FREEZES):
        folders = []
        for seed in arguments.seeds:
            keys = [f"strategy={rule}", f"alpha={alpha}", f"seed={seed}", *FREEZES[frozen]]
            name = f"{rule}-{frozen}-alpha{alpha}-seed{seed}"
            folders.append(run_once(name, out, [*arguments.words, *keys]))
        print(row(alpha, rule, frozen, folders), flush=True)


if __name__ == "__main__":
    main()
