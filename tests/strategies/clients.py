"""Small federations that run the package's own client: real messages, models of a few numbers.

The worker that holds model and data is replaced, everything else is the app's: ``client_app``,
the rules' hooks, the client's state, the in-process grid.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy
from torch import nn

from fedfrozen_app import client_app
from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.models.freeze import trainable_parameters
from fedfrozen_app.strategies import FedFrozen, Scaffold, ServerRule, State, Update
from fedfrozen_app.training.hooks import Hook
from fedfrozen_app.training.local import LocalResult, LocalTraining, train
from fedfrozen_app.training.worker import Worker
from fedfrozen_app.transport.arrays import to_record, to_tensors
from fedfrozen_app.transport.client_state import ClientState
from fedfrozen_app.transport.frozen_cache import FrozenCache
from fedfrozen_app.transport.payload import CONTROL, STEPS, train_reply
from tests.references.mlp import init_params

Tensors = dict[str, torch.Tensor]
INPUTS, HIDDEN, CLASSES = 5, 7, 3
EXAMPLES = (3, 5, 7, 11, 13, 17, 23)  # n_i: 1, 2, 2, 3, 4, 5, 6 steps an epoch in batches of 4


# ---- pure aggregation


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def update(
    num_examples: float, w: torch.Tensor, *, steps: int = 1, control: torch.Tensor | None = None
) -> Update:
    extra = {} if control is None else {CONTROL: {"w": control}}
    return Update(0, num_examples, {"w": w}, MetricRecord({STEPS: steps}), extra)


def two_clients(x: torch.Tensor, delta: torch.Tensor) -> Iterator[Update]:
    """Replies with n = (1, 3) that pull every entry both ways and its mean by ``delta``."""
    pull = 1 + delta.abs()
    yield update(1, x + delta + 3 * pull)
    yield update(3, x + delta - pull)


def play(
    aggregate: Callable[[Any, Iterator[Update], Any], Any],
    state: State,
    config: object,
    deltas: Iterable[torch.Tensor],
) -> list[Any]:
    """Return the state after each round of two clients whose mean moves by a delta."""
    states = []
    for delta in deltas:
        state = aggregate(state, two_clients(state.x["w"], delta), config)
        states.append(state)
    return states


def random_deltas(rounds: int = 11, size: int = 13) -> torch.Tensor:
    """Deltas [rounds, size] of both signs and of sizes from 1e-4 to 10."""
    generator = torch.Generator().manual_seed(5)
    scale = torch.logspace(-4, 1, size, dtype=torch.float64)
    return scale * torch.randn(rounds, size, generator=generator, dtype=torch.float64)


def exchange(
    rule: ServerRule[Any, Any],
    server_round: int,
    arrays: Tensors,
    replies: Sequence[tuple[Tensors, dict[str, Any]]],
) -> Tensors | None:
    """Run a round whose clients, all sampled, reply with given arrays and metrics."""
    grid = LocalGrid(ClientApp(), len(replies))
    messages = rule.configure_train(server_round, to_record(arrays), ConfigRecord(), grid)
    answers = [train_reply(m, *reply) for m, reply in zip(messages, replies, strict=True)]
    record, _ = rule.aggregate_train(server_round, answers)
    return None if record is None else to_tensors(record)


# ---- the client's half


def sgd(
    params: dict[str, nn.Parameter],
    loss: Callable[[int], torch.Tensor],
    steps: int,
    settings: LocalTraining,
    hooks: Sequence[Hook] = (),
) -> None:
    """The local loop in the model's own precision: the package's hooks at their three moments."""
    optimizer = torch.optim.SGD(
        params.values(),
        lr=settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
    )
    for hook in hooks:
        hook.begin(params)
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(step)
        for hook in hooks:
            if (extra := hook.extra_loss(params)) is not None:
                value = value + extra
        value.backward()
        for hook in hooks:
            hook.correct(params)
        optimizer.step()


class SmallWorker(Worker):
    """A worker with a model of its own in place of the one a config names."""

    def __init__(self, root: Path, model: nn.Module, settings: LocalTraining, clients: int) -> None:
        self.root, self.model, self._clients = root, model, clients
        self.config = settings  # type: ignore[assignment]  # the client reads lr and momentum
        self.cache, self.digest = FrozenCache(root / "frozen"), ""
        self._state, self._selections = model.state_dict(), {}
        self.selection = self._selection_of("all")

    @property
    def num_clients(self) -> int:
        return self._clients

    @property
    def client_states(self) -> Path:
        return self.root / "clients"


class LossWorker(SmallWorker):
    """Client i descends ``losses[i]``, a function of the entry ``w``, in ``steps[i]`` steps."""

    def __init__(
        self,
        root: Path,
        losses: Sequence[Callable[[torch.Tensor], torch.Tensor]],
        steps: Sequence[int],
        *,
        size: int,
        num_examples: Sequence[int] | None = None,
        lr: float,
        momentum: float = 0.0,
    ) -> None:
        model = nn.Module()
        model.w = nn.Parameter(torch.zeros(size, dtype=torch.float64))
        super().__init__(root, model, LocalTraining(lr=lr, momentum=momentum), len(losses))
        self.losses, self.steps = losses, steps
        self.examples = num_examples or [1] * len(losses)

    def train(
        self, partition_id: int, server_round: int, hooks: Sequence[Hook] = ()
    ) -> LocalResult:
        params, steps = trainable_parameters(self.model), self.steps[partition_id]
        loss = self.losses[partition_id]
        sgd(params, lambda _: loss(params["w"]), steps, self.config, hooks)
        return LocalResult(self.examples[partition_id], steps, 0.0, 0.0)


def quadratic(curvature: float, optimum: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """(a / 2) ||w - b||^2"""
    return lambda w: curvature / 2 * (w - optimum).square().sum()


class ClientData:
    """One client's examples; keeps the batches it has handed out."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size, INPUTS, generator=generator, dtype=torch.float64)
        self.y = torch.randint(CLASSES, (size,), generator=generator)
        self.given: list[tuple[np.ndarray, np.ndarray]] = []

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, positions: torch.Tensor, generator: object) -> tuple[torch.Tensor, ...]:
        x, y = self.x[positions], self.y[positions]
        self.given.append((x.numpy(), y.numpy()))
        return x, y


class MlpWorker(SmallWorker):
    """A tanh network in fp64; ``loop`` is the package's (which has logits in fp32) or ``sgd``.

    ``rounds`` says which batches each client saw in each round.
    """

    def __init__(
        self,
        root: Path,
        examples: Sequence[int] = EXAMPLES,
        *,
        loop: str = "fp64",
        **settings: Any,
    ) -> None:
        model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))
        values = {"epochs": 1, "batch_size": 4, "lr": 0.13, "momentum": 0.0, **settings}
        super().__init__(root, model.double(), LocalTraining(**values), len(examples))
        self.data = [ClientData(size, seed) for seed, size in enumerate(examples)]
        self.loop = loop
        self.rounds: dict[int, dict[int, list[tuple[np.ndarray, np.ndarray]]]] = {}

    def initial_weights(self) -> Tensors:
        start = init_params(INPUTS, HIDDEN, CLASSES, seed=2)
        return {name: torch.from_numpy(start[name].copy()) for name in self._state}

    def train(
        self, partition_id: int, server_round: int, hooks: Sequence[Hook] = ()
    ) -> LocalResult:
        data = self.data[partition_id]
        data.given = []
        where = {"seed": 7, "server_round": server_round, "partition_id": partition_id}
        if self.loop == "package":
            result = train(self.model, data, self.config, hooks=hooks, **where)
        else:
            result = self._train_wide(data, hooks, 1000 * server_round + partition_id)
        self.rounds.setdefault(server_round, {})[partition_id] = data.given
        return result

    def _train_wide(self, data: ClientData, hooks: Sequence[Hook], seed: int) -> LocalResult:
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
        batches = list(torch.split(order, self.config.batch_size))
        steps = self.config.steps or len(batches)

        def loss(step: int) -> torch.Tensor:
            x, y = data.batch(batches[step % len(batches)], None)
            return nn.functional.cross_entropy(self.model(x), y)

        sgd(trainable_parameters(self.model), loss, steps, self.config, hooks)
        return LocalResult(len(data), steps, 0.0, 0.0)


class Clients:
    """The clients of a worker, behind a grid, as a server's strategy meets them."""

    def __init__(self, worker: SmallWorker) -> None:
        self.worker = worker
        self.grid = LocalGrid(client_app.app, worker.num_clients)

    def replies(self, strategy: Strategy, server_round: int, arrays: Tensors) -> list[Message]:
        """Return what the round's clients answer."""
        record, config = to_record(arrays), ConfigRecord()
        if isinstance(strategy, FedFrozen):
            strategy.check(record)
        messages = strategy.configure_train(server_round, record, config, self.grid)
        with mock.patch.object(client_app, "resident", lambda _: self.worker):
            return list(self.grid.send_and_receive(messages))

    def round(self, strategy: Strategy, server_round: int, arrays: Tensors) -> Tensors:
        replies = self.replies(strategy, server_round, arrays)
        record, _ = strategy.aggregate_train(server_round, replies)
        assert record is not None, strategy.report
        return to_tensors(record)

    def run(
        self, strategy: Strategy, rounds: int, arrays: Tensors, first: int = 1
    ) -> list[Tensors]:
        """Return the model after each round."""
        models = []
        for server_round in range(first, first + rounds):
            arrays = self.round(strategy, server_round, arrays)
            models.append(arrays)
        return models

    def control(self, rule: Scaffold, client: int) -> Tensors:
        """Return the c_i that counts; empty for a client that no reply was used of."""
        accepted = rule.state_dict()["clients"].get(client, [0])[0]
        state = self.grid._states.get(client + 1)
        if state is None:
            return {}
        kept = ClientState(state, self.worker.client_states, rule.versions.run, client, CONTROL)
        version = kept.get(accepted)
        return {} if version is None else version.tensors


def gap(one: Tensors, other: Tensors) -> float:
    """Return the largest difference between two models of the same entries."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def equal(one: Tensors, other: Tensors) -> bool:
    """Whether two models are the same bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
