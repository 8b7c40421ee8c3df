"""fluke: its ``Server`` and ``Client`` in the order of ``CentralizedFL.run``.

Weighted means and optimisers that are made anew have to be asked for. With the argument
``defaults`` they are not: uniform means, and every client's momentum goes on in the next round.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from fluke import FlukeENV
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.server import Server

from contenders.conductor import Conductor
from contenders.task import Task


class Batches(FastDataLoader):
    """A client's training set: the batches of the task."""

    server_round = 0

    def __init__(self, task: Task, client: int) -> None:
        super().__init__(*task.raw[client], num_labels=task.kwargs["num_classes"])
        self._task, self._client = task, client

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the batches of the round."""
        return self._task.batches(Batches.server_round, self._client)

    def __len__(self) -> int:
        """Return how many batches there are."""
        return sum(1 for _ in self._task.positions(Batches.server_round, self._client))


class Autocast(torch.nn.Module):
    """A model that computes in the task's precision."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits in fp32."""
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(x).float()


def main() -> None:
    defaults = "defaults" in sys.argv[2:]
    task = Task(Path(sys.argv[1]))
    FlukeENV().set_device("cpu")
    names = ("lr", "momentum", "weight_decay")
    sgd: dict[str, Any] = {"name": "SGD", **{name: task.settings[name] for name in names}}
    clients = [
        Client(
            index=client,
            train_set=Batches(task, client),
            test_set=None,
            optimizer_cfg=OptimizerConfigurator(sgd),
            loss_fn=torch.nn.CrossEntropyLoss(),
            local_epochs=1,  # the batches are those of all steps
            persistency=defaults,
        )
        for client in range(len(task.clients))
    ]
    model = task.model()
    bf16 = task.settings["precision"] == "bf16"
    server = Server(Autocast(model) if bf16 else model, None, clients, weighted=not defaults)
    for client in clients:
        client.set_channel(server.channel)
    conductor = Conductor()
    while conductor.next():
        Batches.server_round += 1
        eligible = server.get_eligible_clients(1)
        server.broadcast_model(eligible)
        for client in eligible:
            client.local_update(Batches.server_round)
        server.aggregate(eligible, server.receive_client_models(eligible, state_dict=False))
    conductor.save((server.model.model if bf16 else server.model).state_dict())


if __name__ == "__main__":
    main()
