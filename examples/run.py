"""Run a Flower project of this folder in this process, and show what its clients send.

    python examples/run.py examples/plugged
    python examples/run.py examples/transformers_text warmup-rounds=1 --num-clients 3

The project is untouched: its ServerApp and its ClientApp come from its pyproject.toml, as
`flwr run` would take them.
"""

import argparse
import importlib
import json
import logging
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict

from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.transport.ledger import LedgerGrid

NUM_EXAMPLES = "num-examples"


@dataclass
class Line:
    """What one round's training or evaluation sent, and the means of its metrics."""

    round: int
    kind: str
    bytes_up: int = 0
    bytes_down: int = 0
    clients: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


class TableGrid(LedgerGrid):
    """A ledger by round and kind of message."""

    def __init__(self, grid: LocalGrid) -> None:
        super().__init__(grid)
        self.lines: list[Line] = []
        self._examples = 0.0

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages; count them and their replies on the round's line."""
        sent = list(messages)
        meta, config = sent[0].metadata, next(iter(sent[0].content.config_records.values()))
        key = int(config["server-round"]), meta.message_type
        if not self.lines or (self.lines[-1].round, self.lines[-1].kind) != key:
            self.lines.append(Line(*key))
            self._examples = 0.0
        return self._heard(self.lines[-1], super().send_and_receive(sent, timeout=timeout))

    def _heard(self, line: Line, replies: Iterable[Message]) -> Iterable[Message]:
        for reply in replies:
            traffic = self.take()
            line.bytes_up += traffic.bytes_up
            line.bytes_down += traffic.bytes_down
            if reply.has_content() and reply.content.metric_records:
                self._average(line, next(iter(reply.content.metric_records.values())))
            yield reply

    def _average(self, line: Line, metrics: Any) -> None:
        weight = float(metrics.get(NUM_EXAMPLES, 1))
        self._examples += weight
        line.clients += 1
        for name, value in metrics.items():
            if name != NUM_EXAMPLES:
                mean = line.metrics.get(name, 0.0)
                line.metrics[name] = mean + (float(value) - mean) * weight / self._examples


def run(project: Path, changes: dict[str, Any], num_clients: int) -> list[Line]:
    """Run a project's ServerApp against its ClientApp and return the lines."""
    settings = tomllib.loads((project / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    if unknown := [key for key in changes if key not in settings["config"]]:
        raise ValueError(f"{unknown[0]!r} is no key of {project.name}: {[*settings['config']]}")
    config = {**settings["config"], **changes}
    sys.path.insert(0, str(project.resolve()))
    server, client = (_load(settings["components"][part]) for part in ("serverapp", "clientapp"))
    grid = TableGrid(LocalGrid(client, num_clients, config))
    server(grid, Context(1, 0, {}, RecordDict(), config))
    return grid.lines


def _load(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def show(lines: list[Line]) -> None:
    """Print one line by round and kind: bytes of one client on average, and metrics."""
    print(f"{'round':>5} {'':8} {'up each':>12} {'down each':>12}")
    for line in lines:
        each = max(line.clients, 1)
        said = "  ".join(f"{name} {value:.4f}" for name, value in sorted(line.metrics.items()))
        up, down = f"{line.bytes_up // each:,}", f"{line.bytes_down // each:,}"
        print(f"{line.round:>5} {line.kind:8} {up:>12} {down:>12}  {said}")


def _change(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    return key, tomllib.loads(f"value = {value}")["value"]


def main() -> None:
    """Read the command line, run, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("project", type=Path)
    parser.add_argument("changes", nargs="*", type=_change, metavar="KEY=VALUE")
    parser.add_argument("--num-clients", type=int, default=4)
    parser.add_argument("--out", type=Path, help="also write the lines as JSON")
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    lines = run(arguments.project, dict(arguments.changes), arguments.num_clients)
    show(lines)
    if arguments.out:
        arguments.out.write_text(json.dumps([asdict(line) for line in lines], indent=1) + "\n")


if __name__ == "__main__":
    main()
