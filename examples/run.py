"""Run a Flower project of this folder in this process, and show what its clients send.

    python examples/run.py examples/plugged
    python examples/run.py examples/transformers_text frozen=head warmup-rounds=1 --num-clients 3

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
from flwr.serverapp import Grid

from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.strategies.replies import last_line
from fedfrozen_app.transport.ledger import LedgerGrid

NUM_EXAMPLES = "num-examples"


@dataclass
class Line:
    """What one round's training or evaluation sent, and the means of its metrics.

    ``asked`` clients were sent something, ``clients`` of them answered with metrics; ``failed``
    is what the first of the others said.
    """

    round: int
    kind: str
    bytes_up: int = 0
    bytes_down: int = 0
    asked: int = 0
    clients: int = 0
    failed: str = ""
    metrics: dict[str, float] = field(default_factory=dict)


class TableGrid(LedgerGrid):
    """A ledger by round and kind of message."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self.lines: list[Line] = []
        self._nodes: set[int] = set()
        self._examples = 0.0

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages; count them and their replies on the round's line."""
        sent = list(messages)
        if not sent:
            return []
        meta, config = sent[0].metadata, next(iter(sent[0].content.config_records.values()))
        key = int(config["server-round"]), meta.message_type
        if not self.lines or (self.lines[-1].round, self.lines[-1].kind) != key:
            self.lines.append(Line(*key))
            self._nodes, self._examples = set(), 0.0
        line, replies = self.lines[-1], super().send_and_receive(sent, timeout=timeout)
        self._nodes |= {message.metadata.dst_node_id for message in sent}
        line.asked = len(self._nodes)
        line.bytes_down += self.take().bytes_down
        return self._heard(line, replies)

    def _heard(self, line: Line, replies: Iterable[Message]) -> Iterable[Message]:
        for reply in replies:
            line.bytes_up += self.take().bytes_up
            if reply.has_error():
                line.failed = line.failed or last_line(reply)
            elif reply.content.metric_records:
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


def load(project: Path, changes: dict[str, str]) -> tuple[Any, Any, dict[str, Any]]:
    """Return a project's ServerApp, its ClientApp and its run config with some changes.

    Raises
    ------
    ValueError
        If the folder holds no such project, or its config has no such key or other values.
    """
    file = project / "pyproject.toml"
    if not file.is_file():
        raise ValueError(f"there is no {file}; give the folder of a Flower project")
    settings = tomllib.loads(file.read_text()).get("tool", {}).get("flwr", {}).get("app", {})
    parts = settings.get("components", {})
    if not {"serverapp", "clientapp"} <= parts.keys():
        raise ValueError(f"{file} names no serverapp and clientapp in [tool.flwr.app.components]")
    config = dict(settings.get("config", {}))
    for key, text in changes.items():
        if key not in config:
            raise ValueError(f"{key!r} is no key of {project.name}, which has {', '.join(config)}")
        config[key] = _value(key, text, config[key])
    sys.path.insert(0, str(project.resolve()))
    return _load(parts["serverapp"]), _load(parts["clientapp"]), config


def _value(key: str, text: str, present: Any) -> Any:
    """Return a value as TOML has it, of the type of the present one; strings need no quotes."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    if isinstance(present, str) and not isinstance(value, str):
        value = text
    if isinstance(present, float) and type(value) is int:
        value = float(value)
    if type(value) is not type(present):
        kind = type(present).__name__
        raise ValueError(f"{key} must be of type {kind}, as {present!r} is, got {text!r}")
    return value


def _load(reference: str) -> Any:
    module, _, name = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{reference} needs the module {error.name!r}: install what the project depends on, "
            "or correct the name in its pyproject.toml"
        ) from error
    except AttributeError as error:
        raise ValueError(f"{reference} cannot be loaded: {error}") from error


def run(server: Any, client: Any, config: dict[str, Any], num_clients: int) -> list[Line]:
    """Run a ServerApp against a ClientApp and return the lines."""
    grid = TableGrid(LocalGrid(client, num_clients, config))
    server(grid, Context(1, 0, {}, RecordDict(), config))
    return grid.lines


def show(lines: list[Line]) -> None:
    """Print one line by round and kind: bytes of one client on average, and metrics."""
    print(f"{'round':>5} {'':8} {'up each':>12} {'down each':>12}")
    for line in lines:
        up = f"{line.bytes_up // line.clients:,}" if line.clients else "-"
        down = f"{line.bytes_down // line.asked:,}"
        said = [f"{name} {value:.4f}" for name, value in sorted(line.metrics.items())]
        if line.clients < line.asked:
            reason = line.failed or "no metrics came"
            said.append(f"({line.asked - line.clients} of {line.asked} failed: {reason})")
        print(f"{line.round:>5} {line.kind:8} {up:>12} {down:>12}  {'  '.join(said)}")


def _change(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"changes are KEY=VALUE, got {text!r}")
    return key, value


def main() -> None:
    """Read the command line, run, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("project", type=Path, help="folder of a Flower project")
    parser.add_argument(
        "changes", nargs="*", type=_change, metavar="KEY=VALUE", help="of the project's run config"
    )
    parser.add_argument("--num-clients", type=int, default=4)
    parser.add_argument("--out", type=Path, help="also write the lines as JSON")
    arguments = parser.parse_intermixed_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    try:
        if arguments.out and not arguments.out.parent.is_dir():
            raise ValueError(f"there is no folder {arguments.out.parent} to write --out in")
        if arguments.num_clients < 1:
            raise ValueError(f"--num-clients must be >= 1, got {arguments.num_clients}")
        project = load(arguments.project, dict(arguments.changes))
    except ValueError as error:
        parser.error(str(error))
    lines = run(*project, arguments.num_clients)
    show(lines)
    if arguments.out:
        arguments.out.write_text(json.dumps([asdict(line) for line in lines], indent=1) + "\n")


if __name__ == "__main__":
    main()
