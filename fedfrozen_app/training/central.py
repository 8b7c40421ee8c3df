"""Central training of the base that clients share, by the FLITE paper's recipe.

arXiv:2607.18343, section 4 and appendix C: SGD with momentum 0.9, learning rate 0.05 after a
linear warm-up of 3 epochs, then a cosine down to zero, weight decay 5e-4, batches of 128, crop
and flip, 100 epochs, with an orthogonal head that is frozen from the first step. The recipe is
what the config's keys default to here; the paper gives none for text, so that of a language
model is ours (AdamW, gradients clipped at 1, a trainable embedding).

The local loop does the training, one epoch a call, so ``batch-size``, ``optimizer``, ``lr``,
``momentum``, ``weight-decay``, ``clip-norm``, ``precision``, ``augment`` and ``head`` mean what
they mean for a client. Training data is the public share (``public-fraction``) or, without one,
all of it. Keys of the federation change nothing.

After each epoch a checkpoint is written beside the weights file. Random numbers come from
(seed, epoch), so a run that was stopped and resumed ends with the bits of one that was not.
"""

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.config_rules import LANGUAGE_MODELS, TEXT_DATASETS
from fedfrozen_app.data.datasets import load_dataset
from fedfrozen_app.data.partition import central_rows
from fedfrozen_app.disk import save_state
from fedfrozen_app.models.freeze import freeze_, trainable_parameters
from fedfrozen_app.models.head import METADATA_KEY, central_selection
from fedfrozen_app.models.registry import create_model, model_spec
from fedfrozen_app.models.weights import check_weights, load_weights
from fedfrozen_app.runs.store import atomic_path
from fedfrozen_app.tensor_file import write_tensors
from fedfrozen_app.training.local import (
    Examples,
    LocalTraining,
    evaluate,
    evaluation_batch_size,
    make_optimizer,
    perplexity,
    resolve_device,
    train,
)
from fedfrozen_app.training.pretrain import PUBLIC_PARTITION

EPOCHS, WARMUP_EPOCHS = 100, 3
RECIPE: Mapping[str, Any] = {
    "weights": "none",
    "head": "frozen-orthogonal",
    "optimizer": "sgd",
    "lr": 0.05,
    "momentum": 0.9,
    "weight-decay": 5e-4,
    "batch-size": 128,
}
TEXT_RECIPE: Mapping[str, Any] = {
    "weights": "none",
    "partitioner": "iid",
    "optimizer": "adamw",
    "lr": 1e-3,
    "weight-decay": 0.1,
    "clip-norm": 1.0,
    "batch-size": 32,
}


@dataclass(frozen=True)
class Epoch:
    """What one epoch came to; ``seconds`` is its wall time, test included."""

    epoch: int
    train_loss: float
    test_loss: float
    test_accuracy: float
    test_perplexity: float | None
    seconds: float

    def describe(self) -> str:
        """Return losses, accuracy (of text: perplexity) and seconds as one line."""
        text = self.test_perplexity
        measure = f"accuracy {self.test_accuracy:.4f}" if text is None else f"perplexity {text:.2f}"
        return (
            f"loss {self.train_loss:.4f}  test {self.test_loss:.4f}  {measure}  "
            f"{self.seconds:.1f} s"
        )


OnEpoch = Callable[[Epoch], None]


def pretraining_config(*mappings: Mapping[str, Any]) -> RunConfig:
    """Build a config as :meth:`RunConfig.from_mapping` does, over the recipe's values.

    Raises
    ------
    ConfigError
        As there, and for ``weights=base``.
    """
    merged: dict[str, Any] = {}
    for mapping in mappings:
        merged.update(mapping)
    model, dataset = merged.get("model", "auto"), merged.get("dataset")
    text = model in LANGUAGE_MODELS or (model == "auto" and dataset in TEXT_DATASETS)
    config = RunConfig.from_mapping(TEXT_RECIPE if text else RECIPE, merged)
    if config.resolved_weights == "base":
        raise ConfigError(
            "weights=base is a base itself; give what pretraining starts from: weights=none, "
            "pretrained or a file"
        )
    return config


def learning_rate(
    step: int, *, peak: float, steps_per_epoch: int, epochs: int, warmup_epochs: int
) -> float:
    """Return the rate of a step (0, 1, ...): linear up to ``peak``, then a cosine to zero."""
    warmup = min(warmup_epochs, epochs) * steps_per_epoch
    if step < warmup:
        return peak * (step + 1) / warmup
    rest = epochs * steps_per_epoch - warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / rest))


def checkpoint_path(out: Path) -> Path:
    """Return where the checkpoint of a weights file lies."""
    return out.with_name(f"{out.name}.checkpoint")


def check_out(out: Path, *, resume: bool) -> None:
    """Raise ConfigError where something would be overwritten or cannot be written."""
    if not out.parent.is_dir():
        raise ConfigError(f"the folder of out, {str(out.parent)!r}, does not exist; make it")
    if out.exists():
        remedy = "there is nothing to resume" if resume else "choose another out or remove it"
        raise ConfigError(f"out={str(out)!r} is finished and is not overwritten; {remedy}")
    if not resume and (checkpoint := checkpoint_path(out)).exists():
        raise ConfigError(
            f"{str(checkpoint)!r} is the checkpoint of a training that stopped; go on with "
            "--resume, or remove it"
        )


class Pretraining:
    """One central training: model, optimiser, data, and what has been done so far.

    Parameters
    ----------
    config : RunConfig
        From :func:`pretraining_config`.
    out : Path
        The weights file to make; its checkpoint lies beside it.
    epochs, warmup_epochs : int
        Length of the schedule.

    Raises
    ------
    ConfigError
        For whatever the config asks that cannot be done.
    """

    def __init__(self, config: RunConfig, out: Path, *, epochs: int, warmup_epochs: int) -> None:
        self.config, self.out, self.epochs = config, out, epochs
        self.warmup_epochs = warmup_epochs
        self.checkpoint = checkpoint_path(out)
        self.history: list[Epoch] = []
        torch.set_num_threads(config.resolved_threads)
        spec = model_spec(config)
        check_weights(config)
        device = resolve_device(config.device)
        dataset = load_dataset(config)
        rows, test_rows = central_rows(config, dataset)
        self.examples: Examples = dataset.examples("train", rows, spec, device)
        self.test_examples: Examples = dataset.examples("test", test_rows, spec, device)
        self.model: nn.Module = create_model(config, dataset.num_outputs)
        load_weights(self.model, config.resolved_weights, config)
        self.model.to(device)
        freeze_(self.model, central_selection(config, self.model))
        self.settings = replace(LocalTraining.from_config(config), epochs=1, steps=0)
        self.optimizer = make_optimizer(trainable_parameters(self.model).values(), self.settings)
        self.recipe = {
            "model": spec.name,
            "image-size": spec.image_size,
            "context-length": spec.context_length,
            "outputs": dataset.num_outputs,
            "dataset": dataset.key,
            "augment": dataset.augment,
            "examples": hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest(),
            "weights": config.resolved_weights,
            "head": config.head,
            "seed": config.seed,
            **{key.replace("_", "-"): value for key, value in asdict(self.settings).items()},
            "epochs": epochs,  # the settings' own is that of one call
            "warmup-epochs": warmup_epochs,
        }

    def describe(self) -> str:
        """Return the recipe in one line."""
        s = self.settings
        return (
            f"{self.recipe['model']} on {len(self.examples):,} examples of {self.config.dataset}: "
            f"{s.optimizer}, lr {s.lr:g} ({self.warmup_epochs} epochs of warm-up, then a cosine), "
            f"weight decay {s.weight_decay:g}, batches of {s.batch_size}, {self.epochs} epochs, "
            f"head {self.config.head}"
        )

    def run(self, on_epoch: OnEpoch) -> None:
        """Train the epochs that are left, then write the weights file.

        Raises
        ------
        RuntimeError
            When the loss is no longer finite; the last checkpoint stays.
        """
        for epoch in range(len(self.history) + 1, self.epochs + 1):
            self.history.append(self._epoch(epoch))
            if not math.isfinite(self.history[-1].train_loss):
                raise RuntimeError(
                    f"the training loss of epoch {epoch} is {self.history[-1].train_loss}; use a "
                    "smaller lr or clip-norm"
                )
            self._save()
            on_epoch(self.history[-1])
        self._write()
        self.checkpoint.unlink(missing_ok=True)

    def _epoch(self, epoch: int) -> Epoch:
        started = time.perf_counter()
        per_epoch = math.ceil(len(self.examples) / self.settings.batch_size)

        def rate(step: int) -> float:
            return learning_rate(
                (epoch - 1) * per_epoch + step,
                peak=self.settings.lr,
                steps_per_epoch=per_epoch,
                epochs=self.epochs,
                warmup_epochs=self.warmup_epochs,
            )

        result = train(
            self.model,
            self.examples,
            self.settings,
            seed=self.config.seed,
            server_round=epoch,
            partition_id=PUBLIC_PARTITION,
            optimizer=self.optimizer,
            learning_rate=rate,
        )
        loss, accuracy = evaluate(
            self.model,
            self.test_examples,
            batch_size=evaluation_batch_size(self.config),
            precision=self.config.precision,
        )
        text = perplexity(loss) if self.config.reads_text else None
        seconds = time.perf_counter() - started
        return Epoch(epoch, result.train_loss, loss, accuracy, text, seconds)

    # --- files ------------------------------------------------------------------------
    def resume(self) -> None:
        """Take over the checkpoint, if there is one.

        Raises
        ------
        ConfigError
            When the checkpoint is damaged or of another recipe.
        """
        if not self.checkpoint.exists():
            return
        try:
            saved = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
            recipe = dict(saved["recipe"])
        except Exception as error:  # whatever a damaged file makes torch raise
            raise ConfigError(
                f"checkpoint {str(self.checkpoint)!r} cannot be read ({error}); remove it and "
                "start again"
            ) from None
        for key, value in self.recipe.items():
            if recipe.get(key) != value:
                raise ConfigError(
                    f"checkpoint {str(self.checkpoint)!r} was made with {key}={recipe.get(key)} "
                    f"and this training has {key}={value}; use the same settings, or remove it"
                )
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.history = [Epoch(**epoch) for epoch in saved["history"]]

    def _save(self) -> None:
        content = {
            "recipe": self.recipe,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "history": [asdict(epoch) for epoch in self.history],
        }
        with atomic_path(self.checkpoint) as temporary:
            save_state(temporary, content)

    def _write(self) -> None:
        """Write the weights, and in their header which head they fit and how good they are."""
        last = self.history[-1]
        metadata = {
            METADATA_KEY: self.config.head,
            "model": str(self.recipe["model"]),
            "dataset": self.config.dataset,
            "epochs": str(last.epoch),
            "test_loss": repr(last.test_loss),
            "test_accuracy": repr(last.test_accuracy),
        }
        with atomic_path(self.out) as temporary:
            write_tensors(temporary, self.model.state_dict(), metadata)


def pretrain(
    config: RunConfig,
    out: Path,
    *,
    epochs: int = EPOCHS,
    warmup_epochs: int = WARMUP_EPOCHS,
    resume: bool = False,
    on_start: Callable[[str], None] = lambda line: None,
    on_epoch: OnEpoch = lambda epoch: None,
) -> list[Epoch]:
    """Train a base, or go on with a stopped training, and write it to ``out``.

    Returns
    -------
    list of Epoch
        Every epoch, those before a resume included.
    """
    check_out(out, resume=resume)
    training = Pretraining(config, out, epochs=epochs, warmup_epochs=warmup_epochs)
    if resume:
        training.resume()
    on_start(training.describe())
    training.run(on_epoch)
    return training.history
