"""The one local loop: every algorithm's client runs ``train``, with hooks where it differs.

Random numbers come from ``(seed, purpose, server_round, partition_id)``: which examples form a
batch, their augmentation, and what layers draw (dropout, stochastic depth). The same arguments
on the same machine with the same number of threads give bit-equal weights, and the global
generators are left as they were.
"""

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.models.freeze import train_mode_, trainable_parameters
from fedfrozen_app.models.latent import LatentTraining
from fedfrozen_app.seeds import derive_seed, numpy_generator, torch_generator
from fedfrozen_app.training.hooks import Hook

Precision = Literal["fp32", "bf16"]

EVALUATION_BATCH_SIZE = 256
TEXT_EVALUATION_BATCH_SIZE = 32  # a block has a logit for every token at every position


class Examples(Protocol):
    """A client's data: any batch of it by position, ready for the model."""

    def __len__(self) -> int:
        """Return the number of distinct examples."""
        ...

    def batch(self, positions: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Return inputs and targets on the device; ``generator`` None = no augmentation.

        An image has one target, its class: [B]. A block of text has as many as the model has
        outputs for it, the next tokens: [B, T].
        """
        ...


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains; the fields are the run config's keys without ``local-``."""

    epochs: int = 2
    steps: int = 0
    batch_size: int = 32
    optimizer: Literal["sgd", "adamw", "adam"] = "sgd"
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    clip_norm: float = 0.0
    precision: Precision = "fp32"

    @classmethod
    def from_config(cls, config: RunConfig) -> Self:
        """Take the local training keys of a run."""
        return cls(
            epochs=config.local_epochs,
            steps=config.resolved_local_steps,
            batch_size=config.batch_size,
            optimizer=config.optimizer,
            lr=config.lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            clip_norm=config.clip_norm,
            precision=config.precision,
        )


def local_work(
    config: RunConfig, server_round: int, partition_id: int, *, latent: bool = False
) -> LocalTraining:
    """Return how a client trains in a round, its weights or (arXiv:2607.18343) a latent.

    With ``work=random`` the number of steps (or, without ``local-steps``, of epochs) is drawn
    uniformly from its range by (seed, server_round, partition_id): clients differ in how much
    they can do (arXiv:2007.07481, Sec. 5).
    """
    settings = LocalTraining.from_config(config)
    if latent:
        settings = replace(
            settings,
            optimizer="adam",
            lr=config.latent_lr,
            weight_decay=config.latent_weight_decay,
            clip_norm=config.latent_clip_norm,
        )
    if config.work == "fixed":
        return settings
    low, high = config.work_range
    drawn = numpy_generator(config.seed, "work", server_round, partition_id)
    amount = int(drawn.integers(low, high, endpoint=True))
    if settings.steps:
        return replace(settings, steps=amount)
    return replace(settings, epochs=amount)


@dataclass(frozen=True)
class LocalResult:
    """What local training did.

    ``num_examples`` counts distinct examples held (images, or blocks of text), FedAvg's weight
    n_i; ``steps`` the optimiser steps really taken, tau_i; ``train_loss`` is the mean
    cross-entropy over the examples seen, of text per token, without the hooks' terms;
    ``seconds`` is wall time.
    """

    num_examples: int
    steps: int
    train_loss: float
    seconds: float


def resolve_device(name: str) -> torch.device:
    """Return the device of the config key ``device``; auto = the first GPU if there is one.

    Raises
    ------
    ConfigError
        When the device asked for does not exist.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda", 0) if count else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    index = device.index or 0
    if index >= count:
        raise ConfigError(
            f"device must be cpu or one of the {count} visible CUDA devices, got "
            f"{name!r}; use device=auto"
        )
    return torch.device("cuda", index)


def train(
    model: nn.Module,
    examples: Examples,
    settings: LocalTraining,
    *,
    seed: int,
    server_round: int,
    partition_id: int,
    hooks: Sequence[Hook] = (),
    latent: LatentTraining | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    learning_rate: Callable[[int], float] | None = None,
    forward: nn.Module | None = None,
) -> LocalResult:
    """Train the trainable parameters of ``model`` in place, with a fresh optimiser.

    With ``latent`` that latent is trained in their place, and the weights follow it.

    Runs ``settings.epochs`` passes over the examples, or exactly ``settings.steps`` optimiser
    steps over as many reshuffled passes as it takes. A client without examples leaves the model
    as it is and its hooks uncalled.

    Central training gives its own ``optimizer``, which goes on from call to call, and a
    ``learning_rate`` by step of the call (0, 1, ...). Clients give neither: SCAFFOLD and FedNova
    reckon with a fresh optimiser and one rate.

    ``forward`` gives the logits of what the examples give, where that is not the model's own
    input: its head, for examples given as features.
    """
    started = time.perf_counter()
    if len(examples) == 0:
        return LocalResult(0, 0, 0.0, time.perf_counter() - started)
    where = (server_round, partition_id)
    params = trainable_parameters(model) if latent is None else latent.parameters()
    device = next(model.parameters()).device
    optimizer = optimizer or make_optimizer(params.values(), settings)
    train_mode_(model)
    for hook in hooks:
        hook.begin(params)
    augmentation = torch_generator(seed, "augmentation", *where)
    shuffles = torch_generator(seed, "batches", *where)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    seen = steps = 0
    with _layer_randomness(device, derive_seed(seed, "layers", *where)):
        for positions in _batches(len(examples), settings, shuffles, _has_batchnorm(model)):
            if learning_rate is not None:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(steps)
            x, y = examples.batch(positions, augmentation)
            loss = cross_entropy(_logits(forward or model, x, settings.precision), y)
            # No .item() here: on a GPU it would wait for every step.
            loss_sum += loss.detach() * len(y)
            for hook in hooks:
                if (extra := hook.extra_loss(params)) is not None:
                    loss = loss + extra
            loss.backward()  # type: ignore[no-untyped-call]
            if latent is not None:
                latent.gather()
            for hook in hooks:
                hook.correct(params)
            if settings.clip_norm > 0:
                nn.utils.clip_grad_norm_(params.values(), settings.clip_norm, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
            if latent is not None:
                latent.scatter()
            seen += len(y)
            steps += 1
    train_loss = float(loss_sum) / seen
    return LocalResult(len(examples), steps, train_loss, time.perf_counter() - started)


@torch.inference_mode()
def evaluate(
    model: nn.Module, examples: Examples, *, batch_size: int, precision: Precision = "fp32"
) -> tuple[float, float]:
    """Return mean cross-entropy and accuracy in [0, 1]; the model is left in eval mode.

    Both are per target: per image, and for text per token.

    Raises
    ------
    ValueError
        When there are no examples.
    """
    if len(examples) == 0:
        raise ValueError("evaluate needs at least one example, got 0; use a test set that has some")
    model.eval()
    device = next(model.parameters()).device
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    correct = torch.zeros((), dtype=torch.int64, device=device)
    targets = 0
    for positions in torch.split(torch.arange(len(examples)), batch_size):
        x, y = examples.batch(positions, None)
        logits = _logits(model, x, precision)
        loss_sum += cross_entropy(logits, y, reduction="sum")
        correct += (logits.argmax(dim=-1) == y).sum()
        targets += y.numel()
    return float(loss_sum) / targets, float(correct) / targets


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy over every target: logits [B, C] with [B], or [B, T, C] with [B, T].

    All examples have equally many targets, so the mean over targets is that over examples.
    """
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)


def _logits(model: nn.Module, x: Tensor, precision: Precision) -> Tensor:
    """Return logits [..., classes] in fp32, whatever the forward pass computes in."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bf16"):
        logits: Tensor = model(x)
    return logits.float()


def perplexity(loss: float) -> float:
    """Return exp(loss) of a loss per token in nats; infinity beyond the range of floats."""
    return math.exp(loss) if loss < math.log(sys.float_info.max) else math.inf


def evaluation_batch_size(config: RunConfig) -> int:
    """Return how many examples are tested at once."""
    return TEXT_EVALUATION_BATCH_SIZE if config.reads_text else EVALUATION_BATCH_SIZE


def make_optimizer(
    params: Iterable[nn.Parameter], settings: LocalTraining
) -> torch.optim.Optimizer:
    """Return the optimiser of the settings over parameters, in its fastest safe form.

    On a GPU all parameters move in a few kernels (``foreach``), on a CPU in one pass (``fused``):
    the same numbers up to rounding. The kernel of that pass writes beside parameters that are not
    contiguous, such as columns of a partly frozen weight, so those go one by one.
    """
    params = list(params)
    lr, weight_decay = settings.lr, settings.weight_decay
    on_gpu = any(parameter.is_cuda for parameter in params)
    fused = not on_gpu and all(parameter.is_contiguous() for parameter in params)
    foreach = None if fused else on_gpu
    if settings.optimizer == "sgd":
        return torch.optim.SGD(
            params,
            lr=lr,
            momentum=settings.momentum,
            weight_decay=weight_decay,
            fused=fused,
            foreach=foreach,
        )
    kind = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam
    return kind(params, lr=lr, weight_decay=weight_decay, fused=fused, foreach=foreach)


def _batches(
    num_examples: int, settings: LocalTraining, shuffles: torch.Generator, merge_single: bool
) -> Iterator[Tensor]:
    """Yield positions [B] of each step's batch; every pass is a new permutation."""
    passes: Iterable[int] = itertools.count() if settings.steps else range(settings.epochs)
    batches = (
        positions
        for _ in passes
        for positions in _one_pass(num_examples, settings.batch_size, shuffles, merge_single)
    )
    return itertools.islice(batches, settings.steps or None)


def _one_pass(
    num_examples: int, batch_size: int, shuffles: torch.Generator, merge_single: bool
) -> list[Tensor]:
    order = torch.randperm(num_examples, generator=shuffles)
    batches = list(torch.split(order, batch_size))
    if merge_single and len(batches) > 1 and len(batches[-1]) == 1 < batch_size:
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches


def _has_batchnorm(model: nn.Module) -> bool:
    """Whether some BatchNorm uses the batch's own statistics, which one example has not."""
    return any(isinstance(module, _BatchNorm) and module.training for module in model.modules())


@contextmanager
def _layer_randomness(device: torch.device, seed: int) -> Iterator[None]:
    """Seed what layers draw from the global generators, and put those back afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
