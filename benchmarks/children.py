"""Contenders as processes that are asked for one round after the other."""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Contender:
    """A file of ``contenders``, its arguments, and whether it needs the peers' environment."""

    module: str
    arguments: tuple[str, ...] = ()
    is_peer: bool = False


class ContenderError(RuntimeError):
    """A contender cannot do the work; the message is the last line it said."""


def environment(threads: int) -> dict[str, str]:
    """Return what all contenders see: this checkout first, and as many threads."""
    places = [str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
    }


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
                env=environment(threads),
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
            raise ContenderError(self._last_word())
        report: dict[str, float] = json.loads(line)
        return report

    def _last_word(self) -> str:
        said = self._log.read_text().strip().splitlines() or ["it said nothing"]
        return said[-1][:300]

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
            raise ContenderError(self._last_word())
        weights: dict[str, torch.Tensor] = torch.load(self.weights, weights_only=True)
        return weights

    def end(self) -> None:
        """End it, whatever it is at."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
