"""A federation without a model: clients add known numbers to the entries they are sent."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy

from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.strategies import FedFrozen
from fedfrozen_app.transport.arrays import to_record, to_tensors
from fedfrozen_app.transport.frozen_cache import FrozenCache
from fedfrozen_app.transport.ledger import LedgerGrid, Traffic, wire_bytes
from fedfrozen_app.transport.payload import (
    ARRAYS,
    CONFIG,
    FROZEN,
    MissingFrozenBlock,
    missing_reply,
    open_payload,
    train_reply,
)

WIDTH = 7
SHAPES = {
    "norm.weight": (WIDTH,),
    "blocks.0.attn.qkv.weight": (3 * WIDTH, WIDTH),
    "blocks.0.attn.qkv.bias": (3 * WIDTH,),
    "head.weight": (5, WIDTH),
    "head.bias": (5,),
}
QKV, HEAD = "blocks.0.attn.qkv.weight", "head.weight"
COUNTER = "norm.num_batches_tracked"
WHOLE_BYTES = 4 * (7 + 147 + 21 + 35 + 5)
FROZEN_BYTES = 4 * (2 * 7 * 7 + 2 * 7)
ACTIVE_BYTES = WHOLE_BYTES - FROZEN_BYTES


def initial(seed: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


Tamper = Callable[[int, int, dict[str, torch.Tensor]], Message | dict[str, torch.Tensor] | None]


@dataclass
class Federation:
    """Clients 0..n-1; client i adds ``step(i, round)`` to every entry it is sent, n_i = i + 1.

    ``caches`` gives each client its own folder, as on machines of their own; ``tamper`` may
    change a client's arrays before they are sent, or raise.
    """

    root: Path
    num_clients: int = 3
    tamper: Tamper | None = None
    shared_cache: bool = False
    counter: bool = False  # the model has an integer entry
    metrics: dict[str, float] = field(default_factory=dict)  # further ones of every reply
    seen: list[tuple[int, int, str]] = field(default_factory=list)
    whole: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        app = ClientApp()
        app.train()(self.train)
        self.grid = LedgerGrid(LocalGrid(app, self.num_clients))

    def cache(self, client: int) -> FrozenCache:
        return FrozenCache(self.root / ("all" if self.shared_cache else str(client)))

    def train(self, message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        try:
            payload = open_payload(message, self.cache(client))
        except MissingFrozenBlock as missing:
            self.seen.append((int(message.content["config"]["server-round"]), client, "missing"))
            return missing_reply(message, str(missing))
        server_round = int(payload.config["server-round"])
        self.seen.append((server_round, client, payload.selection))
        # a client's model is fp32 and int64, whatever it is sent
        active = {k: v.long() if k == COUNTER else v.float() for k, v in payload.active.items()}
        payload = replace(payload, active=active)
        selection = Selection.build(payload.selection, _shapes(self.counter))
        whole = selection.merge(payload.active, payload.frozen or {})
        self.whole[client] = {name: tensor.clone() for name, tensor in whole.items()}
        step = 0.1 * (client + 1)
        arrays = {k: v + (2 if k == COUNTER else step) for k, v in payload.active.items()}
        if self.tamper is not None:
            arrays = self.tamper(server_round, client, arrays) or arrays  # type: ignore[assignment]
        metrics = {"num-examples": client + 1, "train_loss": 0.5 * client, **self.metrics}
        return train_reply(message, arrays, metrics)

    def round(
        self, strategy: Strategy, server_round: int, arrays: ArrayRecord
    ) -> tuple[ArrayRecord, Traffic]:
        """Run one round as ``Strategy.start`` does and return model and traffic."""
        if isinstance(strategy, FedFrozen):
            strategy.check(arrays)
        messages = strategy.configure_train(server_round, arrays, ConfigRecord(), self.grid)
        replies = self.grid.send_and_receive(messages)
        aggregated, _ = strategy.aggregate_train(server_round, replies)
        return (arrays if aggregated is None else aggregated), self.grid.take()

    def run(
        self, strategy: Strategy, rounds: int, arrays: ArrayRecord | None = None, first: int = 1
    ) -> tuple[dict[str, torch.Tensor], list[Traffic]]:
        arrays = to_record(initial()) if arrays is None else arrays
        traffic = []
        for server_round in range(first, first + rounds):
            arrays, sent = self.round(strategy, server_round, arrays)
            traffic.append(sent)
        return to_tensors(arrays), traffic


def _shapes(counter: bool) -> dict[str, torch.Tensor]:
    shapes = {**SHAPES, COUNTER: ()} if counter else SHAPES
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def without_empty_block(traffic: Traffic, messages: int) -> Traffic:
    """What is left of a warm-up's round without the empty block in its train messages."""
    empty = ArrayRecord()
    both = wire_bytes(RecordDict({ARRAYS: empty, CONFIG: empty, FROZEN: empty}))
    size = both - wire_bytes(RecordDict({ARRAYS: empty, CONFIG: empty}))
    assert size == 160
    return replace(traffic, wire_bytes_down=traffic.wire_bytes_down - messages * size)
