"""Stock Flower: its simulation on Ray, its FedAvg, and a client as its tutorials write them.

    python -m contenders.flower TASK ROUNDS CPUS ACTORS [keep-model] [test]

A client builds its model and loads a whole state dict from every message, reads its images one
by one through torchvision transforms and a ``DataLoader``, and returns a whole state dict;
``keep-model`` builds the model once per process instead. ``test`` adds a central test before
the first and after every round. Prints the times at which rounds ended, as JSON.
"""

import json
import os
import sys
import time
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from contenders.conductor import peak_mb
from contenders.task import Task

client_app, server_app = ClientApp(), ServerApp()
TASK, WORDS = "FEDERATION_TASK", "FEDERATION_WORDS"  # Ray's processes inherit the environment


class Images(Dataset[tuple[torch.Tensor, int]]):
    """One image at a time, through torchvision's transforms."""

    def __init__(self, task: Task, images: torch.Tensor, labels: torch.Tensor) -> None:
        size, mean, std, channels, _ = task.input
        self.images, self.labels = images, labels
        self.transform = transforms.Compose(
            [
                transforms.ToPILImage(),
                transforms.Grayscale(channels) if images.shape[-1] != channels else _same,
                transforms.Resize(size),
                transforms.CenterCrop(size),
                transforms.ToTensor(),
                transforms.Normalize(mean, std),
            ]
        )

    def __len__(self) -> int:
        """Return how many images there are."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return an image and its label."""
        return self.transform(self.images[index].numpy()), int(self.labels[index])


def _same(image: Any) -> Any:
    return image


@lru_cache(maxsize=1)
def data() -> Task:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return Task(Path(os.environ[TASK]))


@lru_cache(maxsize=1)
def kept_model() -> nn.Module:
    return data().model()


def new_model() -> nn.Module:
    return kept_model() if "keep-model" in os.environ[WORDS] else data().model()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    task, model = data(), new_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    client = int(context.node_config["partition-id"])
    server_round = int(message.content["config"]["server-round"])
    images = Images(task, *task.raw[client])
    # the batches of the other contenders, so that the weights can be compared
    order = [positions.tolist() for positions in task.positions(server_round, client)]
    optimizer, total = task.optimizer(model), 0.0
    model.train()
    for x, y in DataLoader(images, batch_sampler=order):
        optimizer.zero_grad()
        loss = task.loss(model, x, y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    metrics = MetricRecord({"train_loss": total / len(order), "num-examples": len(images)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


def test(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Test the global model."""
    task, model = data(), new_model()
    model.load_state_dict(arrays.to_torch_state_dict())
    model.eval()
    correct, number = 0, 0
    with torch.no_grad():
        for x, y in DataLoader(Images(task, *task.test), batch_size=32):
            correct += int((model(x).argmax(dim=1) == y).sum())
            number += len(y)
    return MetricRecord({"accuracy": correct / number})


class Timed(FedAvg):
    """Flower's FedAvg, which notes when a round's replies are aggregated."""

    ended: list[float] = []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate and look at the clock."""
        result = super().aggregate_train(server_round, replies)
        Timed.ended.append(time.time())
        return result


@server_app.main()
def main_server(grid: Grid, context: Context) -> None:
    task, words = data(), os.environ[WORDS].split()
    result = Timed(fraction_evaluate=0.0).start(
        grid=grid,
        initial_arrays=ArrayRecord(task.weights),
        num_rounds=int(words[0]),
        train_config=ConfigRecord({}),
        evaluate_fn=test if "test" in words else None,
    )
    torch.save(result.arrays.to_torch_state_dict(), os.environ[TASK] + ".flower")
    accuracy = result.evaluate_metrics_serverapp.get(int(words[0]), {}).get("accuracy")
    report = {"ended": Timed.ended, "accuracy": accuracy, "peak_mb": peak_mb(os.getpid())}
    Path(os.environ[TASK] + ".report").write_text(json.dumps(report))


def main() -> None:
    from flwr.simulation import run_simulation

    from contenders import flower  # by this name Ray's processes find the app

    os.environ[TASK], os.environ[WORDS] = sys.argv[1], " ".join([sys.argv[2], *sys.argv[5:]])
    cpus, actors = int(sys.argv[3]), int(sys.argv[4])
    run_simulation(
        flower.server_app,
        flower.client_app,
        num_supernodes=len(Task(Path(sys.argv[1])).clients),
        backend_config={
            "client_resources": {"num_cpus": cpus, "num_gpus": 0.0},
            "init_args": {"num_cpus": cpus * actors},
        },
    )


if __name__ == "__main__":
    main()
