"""The work of a contender, read from a task file: model, batches, one client's training.

Needs torch and timm only, so that other libraries' environments can run it. The parts of the
product used here turn images into model input, and are the same for everybody.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from fedfrozen_app.data.images import ImageExamples, Preprocessor
from fedfrozen_app.seeds import torch_generator

State = dict[str, Tensor]


class Task:
    """A workload: the clients' data and how they train."""

    def __init__(self, path: Path) -> None:
        made = torch.load(path, weights_only=True)
        self.architecture: str = made["architecture"]
        self.kwargs: dict[str, Any] = made["kwargs"]
        self.weights: State = made["weights"]
        self.settings: dict[str, Any] = made["settings"]
        self.input: list[Any] = made["input"]
        self.config: dict[str, Any] = made["config"]
        self.raw: list[tuple[Tensor, Tensor]] = made["clients"]
        self.test: tuple[Tensor, Tensor] = made["test"]
        size, mean, std, channels, augment = self.input
        preprocessor = Preprocessor(size, mean, std, channels, augment, "cpu")
        self.clients = [
            ImageExamples(images, labels, torch.arange(len(labels)), preprocessor)
            for images, labels in self.raw
        ]
        self.num_examples = [len(client) for client in self.clients]

    def model(self) -> nn.Module:
        """Return the model with the weights that the first round starts from."""
        model: nn.Module = (
            timm.create_model(self.architecture, **self.kwargs)
            if self.architecture
            else VisionTransformer(**self.kwargs)
        )
        model.load_state_dict(self.weights)
        return model.train()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the local optimiser, as a client makes it anew in every round."""
        names = ("lr", "momentum", "weight_decay")
        return torch.optim.SGD(model.parameters(), **{name: self.settings[name] for name in names})

    def positions(self, server_round: int, client: int) -> Iterator[Tensor]:
        """Yield which of its examples [B] a client takes in each step of a round."""
        steps, passes = self.settings["local_steps"], 0
        shuffles = torch_generator(self.settings["seed"], "batches", server_round, client)
        done = 0
        while done < steps if steps else passes < self.settings["local_epochs"]:
            order = torch.randperm(self.num_examples[client], generator=shuffles)
            for batch in torch.split(order, self.settings["batch_size"]):
                if steps and done == steps:
                    return
                yield batch
                done += 1
            passes += 1

    def batches(self, server_round: int, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield model input [B, C, S, S] and labels [B] of a client's steps in a round."""
        draws = torch_generator(self.settings["seed"], "augmentation", server_round, client)
        for positions in self.positions(server_round, client):
            yield self.clients[client].batch(positions, draws)

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross-entropy of a batch, in the task's precision."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.settings["precision"] == "bf16"):
            logits: Tensor = model(x)
        return F.cross_entropy(logits.float(), y)

    def train(self, model: nn.Module, server_round: int, client: int) -> float:
        """Train a model on a client as in a round; return the mean loss over its steps."""
        optimizer, losses = self.optimizer(model), []
        for x, y in self.batches(server_round, client):
            loss = self.loss(model, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return float(torch.stack(losses).mean())
