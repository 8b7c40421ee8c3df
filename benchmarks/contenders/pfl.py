"""Apple's pfl: ``FederatedAveraging`` on its ``SimulatedBackend``, weighted by data points."""

import asyncio
import functools
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel

from contenders.conductor import Conductor
from contenders.task import Task

ROUNDS = 10**6


class Rounds(TrainingProcessCallback):
    """Waits after every central iteration; counts rounds from 1."""

    def __init__(self, conductor: Conductor) -> None:
        self.conductor, self.server_round = conductor, 1

    def on_train_begin(self, *, model: Any) -> Metrics:
        """Wait for the first round."""
        self.conductor.next()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Say whether to stop."""
        self.server_round += 1
        return not self.conductor.next(), Metrics()


class Client(Dataset):
    """A client's data: the batches of the task."""

    def __init__(self, task: Task, client: int, rounds: Rounds) -> None:
        super().__init__(raw_data=list(task.raw[client]), user_id=str(client))
        self._task, self._client, self._rounds = task, client, rounds

    def iter(self, batch_size: int | None) -> Iterable[list[torch.Tensor]]:
        """Return the batches of the round."""
        batches = self._task.batches(self._rounds.server_round, self._client)
        return map(list, batches)


def main() -> None:
    task = Task(Path(sys.argv[1]))
    module = task.model()
    module.loss = lambda x, y: task.loss(module, x, y)  # type: ignore[assignment]
    module.metrics = lambda x, y: {"loss": Weighted(0.0, len(y))}  # type: ignore[assignment]
    settings = task.settings
    sgd = functools.partial(
        torch.optim.SGD, momentum=settings["momentum"], weight_decay=settings["weight_decay"]
    )
    central = torch.optim.SGD(module.parameters(), lr=1.0)
    model = PyTorchModel(module, sgd, central)
    rounds = Rounds(Conductor())
    number = len(task.clients)
    turns = itertools.cycle(range(number))
    data = FederatedDataset(lambda client: Client(task, client, rounds), lambda: next(turns))
    # pfl evaluates in iteration 0, the warm-up round, and then not again
    params = NNAlgorithmParams(ROUNDS, ROUNDS, number, None)
    train = NNTrainHyperParams(
        local_batch_size=settings["batch_size"],
        local_num_epochs=1,  # the batches are those of all steps
        local_learning_rate=settings["lr"],
    )
    asyncio.set_event_loop(asyncio.new_event_loop())
    FederatedAveraging().run(
        params,
        SimulatedBackend(data, data, [WeightByDatapoints()]),
        model,
        train,
        NNEvalHyperParams(local_batch_size=None),
        [rounds],
    )
    rounds.conductor.save(module.state_dict())


if __name__ == "__main__":
    main()
