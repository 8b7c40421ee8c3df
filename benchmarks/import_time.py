"""How long `import fedfrozen_app.strategies` takes beside torch and Flower's strategies.

Fresh processes, both in turn, so that a busy machine slows both; the ratio of the medians is
what counts. The processes measure their own CPU time, which waits for nobody:

    python benchmarks/import_time.py --repeats 10 --out import-time.json
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

BASE = "import torch; import flwr.serverapp.strategy"
OURS = "import fedfrozen_app.strategies"
MOD = "import fedfrozen_app.mods"
CLOCK = """
import time
wall, cpu = time.perf_counter(), time.process_time()
{statement}
print(time.perf_counter() - wall, time.process_time() - cpu)
"""


def seconds(statement: str) -> tuple[float, float]:
    """Return wall-clock and CPU seconds of an import in a process of its own."""
    code = CLOCK.format(statement=statement)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    wall, cpu = done.stdout.split()
    return float(wall), float(cpu)


def measure(repeats: int) -> dict[str, float]:
    """Return medians in seconds, and the ratios to torch and Flower alone."""
    statements = {"torch_and_flower": BASE, "strategies": OURS, "mods": MOD}
    for statement in statements.values():
        seconds(statement)  # files into the page cache, bytecode onto the disk
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in statements}
    for _ in range(repeats):
        for name, statement in statements.items():
            found[name].append(seconds(statement))
    result = {}
    for index, clock in enumerate(("wall", "cpu")):
        medians = {
            n: statistics.median(pair[index] for pair in pairs) for n, pairs in found.items()
        }
        for name, median in medians.items():
            result[f"{name}_{clock}_s"] = round(median, 3)
            if name != "torch_and_flower":
                result[f"{name}_{clock}_ratio"] = round(median / medians["torch_and_flower"], 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments.repeats)
    print(json.dumps(result, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
