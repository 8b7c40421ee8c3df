"""FedLab: ``StandalonePipeline`` with its FedAvg handler and serial trainer.

Its trainer keeps one optimiser, so momentum goes on from client to client, and its handler
takes uniform means: with the argument ``defaults`` as it comes, else with both mended by the
methods that its documentation says to override.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler
from fedlab.core.standalone import StandalonePipeline
from fedlab.utils import Aggregators, SerializationTool

from contenders.conductor import Conductor
from contenders.task import Task


class Data:
    """What FedLab asks for batches."""

    def __init__(self, task: Task) -> None:
        self.task, self.server_round = task, 1

    def get_dataloader(self, client: int, batch_size: int) -> Any:
        """Return a client's batches of the round."""
        return self.task.batches(self.server_round, client)


class Trainer(FedAvgSerialClientTrainer):
    """A trainer with the task's optimiser and precision."""

    fresh = True

    def setup_optim(self, epochs: int, batch_size: int, lr: float) -> None:
        """Make the optimiser that all clients share."""
        super().setup_optim(epochs, batch_size, lr)
        self.optimizer = self.dataset.task.optimizer(self._model)

    def train(self, model_parameters: torch.Tensor, train_loader: Any) -> list[torch.Tensor]:
        """Train on one client, as the base class does but for the precision."""
        task = self.dataset.task
        self.set_model(model_parameters)
        self._model.train()
        if self.fresh:
            self.optimizer = task.optimizer(self._model)
        for x, y in train_loader:
            loss = task.loss(self._model, x, y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return [self.model_parameters]


class Handler(FedAvgServerHandler):
    """A handler that weighs clients by their examples."""

    weights: list[int]

    def global_update(self, buffer: list[list[torch.Tensor]]) -> None:
        """Average the clients' parameters."""
        mean = Aggregators.fedavg_aggregate([one[0] for one in buffer], list(self.weights))
        SerializationTool.deserialize_model(self._model, mean)


class Pipeline(StandalonePipeline):
    """FedLab's loop, which waits where it would evaluate."""

    def evaluate(self) -> None:
        """Wait for the next round, or end."""
        self.trainer.dataset.server_round += 1
        if not self.conductor.next():
            self.handler.global_round = 0


def main() -> None:
    task = Task(Path(sys.argv[1]))
    number = len(task.clients)
    defaults = "defaults" in sys.argv[2:]
    trainer = Trainer(task.model(), number)
    trainer.fresh = not defaults
    trainer.setup_dataset(Data(task))
    trainer.setup_optim(1, task.settings["batch_size"], task.settings["lr"])
    handler = (FedAvgServerHandler if defaults else Handler)(task.model(), 10**6, 1.0)
    handler.weights = task.num_examples
    pipeline = Pipeline(handler, trainer)
    pipeline.conductor = Conductor()
    if pipeline.conductor.next():
        pipeline.main()
    pipeline.conductor.save(handler._model.state_dict())


if __name__ == "__main__":
    main()
