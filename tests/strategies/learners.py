"""A federation of small models that really train, under the rules' own clients' half."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy
from torch import nn

from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.models.freeze import freeze_
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.strategies import FedFrozen
from fedfrozen_app.strategies.effective_steps import effective_steps
from fedfrozen_app.strategies.scaffold import Scaffold
from fedfrozen_app.strategies.versions import ClientVersions
from fedfrozen_app.training.client_rules import ClientRules
from fedfrozen_app.training.local import LocalTraining, train
from fedfrozen_app.transport.arrays import to_record, to_tensors
from fedfrozen_app.transport.client_state import ClientState, Kept
from fedfrozen_app.transport.frozen_cache import FrozenCache
from fedfrozen_app.transport.ledger import LedgerGrid
from fedfrozen_app.transport.payload import (
    ACCEPTED,
    CONTROL,
    MissingFrozenBlock,
    missing_reply,
    open_payload,
    train_reply,
)

Tensors = dict[str, torch.Tensor]
Tamper = Callable[[int, int, Tensors], None]
ONE_STEP = LocalTraining(steps=1, batch_size=1000, lr=0.1, momentum=0.0)


class Points:
    """Examples in memory."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, positions: torch.Tensor, generator: object) -> tuple[torch.Tensor, ...]:
        return self.x[positions], self.y[positions]


@dataclass
class Learners:
    """Clients 0..n-1 with ``examples[i]`` each; ``sent`` is what they replied, by round.

    ``steps(i)`` is how many steps client i takes. Controls are in files, so that a test can
    read them, unless ``own_node``.
    """

    root: Path
    build: Callable[[], nn.Module]
    examples: list[Points]
    settings: LocalTraining = ONE_STEP
    steps: Callable[[int], int] | None = None
    own_node: bool = False
    tamper: Tamper | None = None
    sent: dict[int, dict[int, Tensors]] = field(default_factory=dict)
    received: dict[int, dict[int, Tensors]] = field(default_factory=dict)
    trained: dict[int, dict[int, Tensors]] = field(default_factory=dict)  # y, before encoding
    selections: list[tuple[int, int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        app = ClientApp()
        app.train()(self.train)
        self.grid = LedgerGrid(LocalGrid(app, len(self.examples)))

    @property
    def folder(self) -> Path:
        return self.root / "clients"

    def train(self, message: Message, context: Context) -> Message:
        try:
            payload = open_payload(message, FrozenCache(self.root / "cache"))
        except MissingFrozenBlock as missing:
            return missing_reply(message, str(missing))
        server_round = int(payload.config["server-round"])  # type: ignore[arg-type]
        own = context.node_config["partition-id"]  # stock strategies do not name it
        client = int(payload.config.get("partition-id", own))  # type: ignore[arg-type]
        settings = self.settings
        if self.steps is not None:
            settings = replace(settings, steps=self.steps(client))
        model = self.build()
        selection = Selection.build(payload.selection, model.state_dict())
        model.load_state_dict(selection.merge(payload.active, payload.frozen or {}))
        freeze_(model, selection)
        rules = ClientRules(
            payload,
            model.state_dict(),
            selection,
            partition_id=client,
            state=context.state,
            folder=self.folder,
            own_node=self.own_node,
        )
        result = train(
            model,
            self.examples[client],  # type: ignore[arg-type]
            settings,
            seed=11,
            server_round=server_round,
            partition_id=client,
            hooks=rules.hooks,
        )
        whole = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        active, _ = selection.split(whole)
        step_sizes = settings.lr * effective_steps(result.steps, momentum=settings.momentum)
        arrays = rules.reply(active, step_sizes)
        if self.tamper is not None:
            self.tamper(server_round, client, arrays)
        self.received.setdefault(server_round, {})[client] = to_tensors(message.content["arrays"])
        self.sent.setdefault(server_round, {})[client] = arrays
        self.trained.setdefault(server_round, {})[client] = active
        self.selections.append((server_round, client, payload.selection))
        metrics = {"num-examples": result.num_examples, "steps": result.steps}
        return train_reply(message, arrays, metrics)

    def initial(self) -> ArrayRecord:
        whole = self.build().state_dict()
        return to_record({name: tensor.clone() for name, tensor in whole.items()})

    def round(self, strategy: Strategy, server_round: int, arrays: ArrayRecord) -> ArrayRecord:
        if isinstance(strategy, FedFrozen):
            strategy.check(arrays)
        messages = strategy.configure_train(server_round, arrays, ConfigRecord(), self.grid)
        replies = self.grid.send_and_receive(messages)
        aggregated, _ = strategy.aggregate_train(server_round, replies)
        return arrays if aggregated is None else aggregated

    def run(
        self, strategy: Strategy, rounds: int, arrays: ArrayRecord | None = None, first: int = 1
    ) -> ArrayRecord:
        arrays = self.initial() if arrays is None else arrays
        for server_round in range(first, first + rounds):
            arrays = self.round(strategy, server_round, arrays)
        return arrays

    def control(self, rule: Scaffold, client: int) -> Kept | None:
        """The control on a client's disk that the server would have it go on from."""
        return self.kept(rule.versions, client, CONTROL)

    def kept(
        self, versions: ClientVersions, client: int, name: str, *, node: int | None = None
    ) -> Kept | None:
        """The state on a client's disk that counts; a stock strategy knows nodes only."""
        said = versions.instructions(client if node is None else node)
        kept = ClientState(RecordDict(), self.folder, versions.run, client, name, own_node=False)
        return kept.get(said[ACCEPTED])  # type: ignore[arg-type]


class Attention(nn.Module):
    """One head of attention over [B, n, d]; rows of qkv are [q; k; v]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return nn.functional.scaled_dot_product_attention(q, k, v)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn = Attention(width)


class SmallTransformer(nn.Module):
    """Attention and a head: blocks.0.attn.qkv [21, 7] and head [5, 7]."""

    def __init__(self, width: int = 7, classes: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width)])
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block.attn(x)
        return self.head(x.mean(dim=1))


def small_transformer() -> SmallTransformer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return SmallTransformer()


def sequences(sizes: tuple[int, ...] = (11, 5, 17, 7)) -> list[Points]:
    """Clients whose examples [n, 3, 7] differ in number, place and labels."""
    generator = torch.Generator().manual_seed(5)
    return [
        Points(
            2 * torch.randn(n, 3, 7, generator=generator) + torch.randn(7, generator=generator),
            torch.randint(0, 5, (n,), generator=generator),
        )
        for n in sizes
    ]
