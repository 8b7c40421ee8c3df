"""What the in-process engine costs per client beyond training, and whether memory stays flat.

1,000 clients, 10 sampled a round, 20 rounds of digits. Overhead is the round on the clock
less the clients' own local training, per client; the central test is left out. Run it on an
idle machine:

    python benchmarks/client_overhead.py --out overhead.json
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from fedfrozen_app.config import RunConfig
from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.engine.rounds import run_federation
from fedfrozen_app.runs.store import RoundMetrics
from fedfrozen_app.training.worker import resident


def resident_mb() -> float:
    """Return this process's resident memory in MB (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def measure(num_clients: int, rounds: int) -> dict[str, float | list[float]]:
    """Run the federation and return milliseconds per client fit and memory by round."""
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig.from_mapping(
            {
                "num-clients": num_clients,
                "fraction-train": 10 / num_clients,
                "rounds": rounds,
                "partitioner": "iid",
                "eval-every": 0,
                "run-dir": folder,
            }
        )
        memory: list[float] = []
        overheads: list[float] = []

        def on_round(line: RoundMetrics) -> None:
            memory.append(round(resident_mb(), 1))
            if 0 < line.round < rounds:  # the last round also tests the model
                overheads.append(1e3 * (line.seconds_total - line.seconds_train) / line.clients)

        grid = LocalGrid(
            "fedfrozen_app.client_app:app", resident(config).num_clients, config.to_mapping()
        )
        run_federation(config, grid, on_round)
    return {
        "num_clients": num_clients,
        "overhead_ms_median": round(statistics.median(overheads), 2),
        "overhead_ms_max": round(max(overheads), 2),
        "memory_mb_by_round": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments.num_clients, arguments.rounds)
    print(json.dumps(result))
    if arguments.out:
        arguments.out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
