"""An existing Flower project: its handler knows whole state dicts and nothing of freezing."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.serverapp.strategy import Result, Strategy
from torch import nn

from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.models.freeze import trainable_parameters
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.mods import active_entries, freeze_, selection_of
from fedfrozen_app.strategies import FedFrozen
from fedfrozen_app.transport.ledger import LedgerGrid, Traffic

Tensors = dict[str, torch.Tensor]
Step = Callable[[nn.Module, torch.Generator], torch.Tensor]


class Classifier(nn.Module):
    """A Transformer over 11 tokens of width 8; rows of in_proj_weight are [q; k; v]."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.encoder(tokens).mean(dim=1))
        return out


KERNEL = "encoder.layers.0.self_attn.in_proj_weight"


def classifier() -> Classifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Classifier()


def loss_of(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    """A batch of 7 and its loss."""
    tokens = torch.randn(7, 11, 8, generator=generator)
    labels = torch.randint(0, 3, (7,), generator=generator)
    return nn.functional.cross_entropy(model(tokens), labels)


@dataclass
class Project:
    """``num_clients`` clients that train ``build()`` for two steps of SGD with momentum.

    ``freeze`` adds the one line; ``mods`` come after ``active_entries`` unless ``outer``.
    ``seen`` and ``evaluated`` are the names, in order, of what the handlers were given.
    """

    root: Path
    build: Callable[[], nn.Module] = classifier
    step: Step = loss_of
    num_clients: int = 3
    freeze: bool = True
    mods: list[Mod] = field(default_factory=list)
    outer: list[Mod] = field(default_factory=list)
    caches: bool = False  # a cache for every client, as on machines of their own
    seen: list[list[str]] = field(default_factory=list)
    evaluated: list[list[str]] = field(default_factory=list)
    given: dict[int, Tensors] = field(default_factory=dict)
    trained: list[int] = field(default_factory=list)  # numbers that an optimiser could move
    rounds: list[Traffic] = field(default_factory=list)
    models: list[Tensors] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.app = ClientApp(mods=[*self.outer, self.active, *self.mods])
        self.app.train()(self.train)
        self.app.evaluate()(self.evaluate)
        self.grid = LedgerGrid(LocalGrid(self.app, self.num_clients))

    def active(self, message: Message, context: Context, call_next: Any) -> Message:
        """The mod as a new process would make it: nothing is kept in memory."""
        folder = self.root / str(context.node_id) if self.caches else self.root
        return active_entries(folder)(message, context, call_next)

    def loaded(self, message: Message) -> nn.Module:
        model = self.build()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=True)
        return model

    def train(self, message: Message, context: Context) -> Message:
        model = self.loaded(message)
        self.seen.append(list(message.content["arrays"]))
        self.given[context.node_id] = message.content["arrays"].to_torch_state_dict()
        if self.freeze:
            freeze_(model, selection_of(message))
        self.trained.append(sum(p.numel() for p in trainable_parameters(model).values()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        generator = torch.Generator().manual_seed(int(context.node_id))
        for _ in range(2):
            loss = self.step(model, generator)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        arrays = ArrayRecord(model.state_dict())
        metrics = {"num-examples": 7 + context.node_id, "train_loss": float(loss.detach())}
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)})
        return Message(content, reply_to=message)

    def evaluate(self, message: Message, context: Context) -> Message:
        model = self.loaded(message)
        self.evaluated.append(list(message.content["arrays"]))
        with torch.no_grad():
            loss = float(self.step(model.eval(), torch.Generator().manual_seed(5)))
        metrics = MetricRecord({"num-examples": 7, "eval_loss": loss})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    def run(self, strategy: Strategy, rounds: int = 3) -> Result:
        """Run a federation; ``rounds`` and ``models`` then hold traffic and model by round."""
        self.rounds, self.models = [], []

        whole = self.build().state_dict()
        start = ArrayRecord(whole)

        def after_round(number: int, arrays: ArrayRecord) -> MetricRecord:
            self.rounds.append(self.grid.take())
            model = arrays.copy().to_torch_state_dict()  # some strategies return fp64
            self.models.append({name: t.to(whole[name].dtype) for name, t in model.items()})
            return MetricRecord()

        return strategy.start(self.grid, start, num_rounds=rounds, evaluate_fn=after_round)


def check_frozen(project: Project, strategy: FedFrozen, spec: str = "query-key") -> None:
    """What every combination must show after 3 rounds, the first of them the warm-up.

    Nobody was dropped; the handlers saw whole state dicts in the library's order; the result
    loads; frozen entries are bit-identical to the freeze and the others moved; bytes after the
    freeze are the active entries only, and the block went out once.
    """
    whole = project.build().state_dict()
    selection = Selection.build(spec, whole)
    clients = project.num_clients
    assert strategy.report.dropped == 0
    assert project.seen == [list(whole)] * 3 * clients

    _, first, second, last = project.models
    project.build().load_state_dict(last, strict=True)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in last.values())
    active, frozen = selection.split(last)
    for one, same in ((first, True), (whole, False)):
        before, kept = selection.split(one)
        assert all(torch.equal(frozen[name], kept[name]) for name in frozen) is same
        assert not all(torch.equal(active[name], before[name]) for name in active)
    assert not all(torch.equal(a, b) for a, b in zip(last.values(), second.values(), strict=True))

    size = {"whole": nbytes(whole), "active": nbytes(active), "block": nbytes(frozen)}
    assert size["active"] + size["block"] == size["whole"] and size["block"] > 0
    assert [r.bytes_up for r in project.rounds[1:]] == [
        clients * size["whole"],
        clients * size["active"],
        clients * size["active"],
    ]
    if project.evaluated:
        return  # what evaluation costs is another test's
    down = [clients * size["whole"], clients * size["whole"], clients * size["active"]]
    assert [r.bytes_down for r in project.rounds[1:]] == down
    if project.freeze:
        trainable = dict(project.build().named_parameters())
        numbers = [
            sum(t.numel() for n, t in half.items() if n in trainable) for half in (whole, frozen)
        ]
        assert project.trained == [numbers[0]] * clients + [numbers[0] - numbers[1]] * 2 * clients


def len_of(tensors: Tensors) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


def nbytes(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
