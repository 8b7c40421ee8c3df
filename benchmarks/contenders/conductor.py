"""The line protocol between ``benchmarks/federation.py`` and a contender.

Down, on stdin: ``round``, or ``stop PATH`` where PATH takes the weights. Up, on stdout: a line of
JSON when a contender is ready, and one after each round, with its seconds. Whatever else a
library prints goes to stderr.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor


def _status(pid: int, key: str) -> float:
    """Return VmRSS or VmHWM (the peak) of a process in MB (Linux); 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1e3 for line in lines if line.startswith(key)), 0.0)


def _family(pid: int) -> list[int]:
    """Return a process and its descendants."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        children = []
    return [pid, *(one for child in children for one in _family(int(child)))]


def peak_mb(pid: int) -> float:
    """Return the sum of the peaks of a process and its living descendants in MB."""
    return round(sum(_status(one, "VmHWM") for one in _family(pid)), 1)


class Conductor:
    """Asks for the next round and reports how long the one before took."""

    def __init__(self) -> None:
        self._up = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._started: tuple[float, float] | None = None
        self.out: Path | None = None

    def next(self) -> bool:
        """Report the round that has ended, wait, and say whether another one follows."""
        report: dict[str, float] = {"peak_mb": peak_mb(os.getpid())}
        if self._started is None:
            report["cpu_seconds"] = time.process_time()  # since the process began
        else:
            wall, cpu = self._started
            report["seconds"] = time.perf_counter() - wall
            report["cpu_seconds"] = time.process_time() - cpu
        self._up.write(json.dumps(report) + "\n")
        self._up.flush()
        word, _, path = sys.stdin.readline().strip().partition(" ")
        if word != "round":
            self.out = Path(path) if path else None
            return False
        self._started = (time.perf_counter(), time.process_time())
        return True

    def save(self, weights: Mapping[str, Tensor]) -> None:
        """Write the weights after the last round to where the driver wants them."""
        if self.out is not None:
            torch.save(
                {name: tensor.detach().clone() for name, tensor in weights.items()}, self.out
            )
