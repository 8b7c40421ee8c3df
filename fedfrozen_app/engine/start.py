"""What a run starts from: data, model and strategy, checked before a run folder is made."""

from dataclasses import asdict
from typing import Any

from flwr.app import ArrayRecord

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.data.partition import partition_report
from fedfrozen_app.engine.client_tests import ClientTests
from fedfrozen_app.engine.roster import Roster
from fedfrozen_app.models.head import never_trained
from fedfrozen_app.models.registry import model_spec
from fedfrozen_app.models.weights import check_weights
from fedfrozen_app.runs.checkpoint import KEPT
from fedfrozen_app.runs.store import RunFolder, check_free
from fedfrozen_app.runs.trackers import check_tracker
from fedfrozen_app.strategies import FedFrozen, FreezeSchedule
from fedfrozen_app.strategies.latent import FedFrozenLatent, LatentConfig
from fedfrozen_app.strategies.rules import build_rule
from fedfrozen_app.training.worker import Worker, resident
from fedfrozen_app.transport.arrays import to_record, to_tensors
from fedfrozen_app.transport.frozen_cache import digest


def prepare(config: RunConfig) -> tuple[Worker, FedFrozen]:
    """Check what can be checked at once, load data and model, check the stages of the freeze.

    Raises
    ------
    ConfigError
        For whatever the config asks that cannot be done.
    """
    model_spec(config)
    check_weights(config)
    check_tracker(config)
    if not config.resume:
        check_free(config)
    worker = resident(config)
    if not worker.dataset.has_test:
        raise ConfigError(
            f"data-dir={config.data_dir!r} has no test split, and the server tests the model; add "
            "test*.parquet (or valid*.parquet) there"
        )
    return worker, checked_strategy(config, worker)


def checked_strategy(config: RunConfig, worker: Worker) -> FedFrozen:
    """Return the config's strategy; raise ConfigError if a stage cannot work with the model."""
    strategy = build_strategy(config, worker)
    try:
        strategy.check(to_record(worker.model.state_dict()))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return strategy


def build_strategy(config: RunConfig, worker: Worker) -> FedFrozen:
    """Return the config's rule inside the config's freeze (none = a warm-up without end)."""
    with_data = {
        client: len(rows) for client, rows in enumerate(worker.partition.clients) if len(rows)
    }
    rule = build_rule(
        config,
        num_clients=len(with_data),
        seed=config.seed,
        members=Roster(worker.num_clients, with_data),
        work={} if config.resolved_local_steps else with_data,
        min_replies=config.min_replies,
        buffers=worker.buffers,
        compression=config.compression,
        broadcast=config.broadcast,
        max_update_norm=config.max_update_norm,
        oversized_updates=config.oversized_updates,
        fraction_train=config.fraction_train,
        # Flower warns of a 0, and nobody is asked then
        fraction_evaluate=config.fraction_evaluate or 1.0,
        min_evaluate_nodes=1,
        evaluate_metrics_aggr_fn=ClientTests(),
        min_train_nodes=1,
        min_available_nodes=1,
    )
    schedule = FreezeSchedule.warmup(
        config.resolved_warmup_rounds,
        config.resolved_frozen,
        always=never_trained(config.head, worker.entries),
    )
    if config.strategy != "latent":
        return FedFrozen(rule, schedule=schedule, value_l2=config.value_l2)
    latent = LatentConfig(
        dim=config.latent_dim,
        rank=config.latent_rank,
        generator=config.generator,
        memory=config.generator_memory,
        seed=config.seed,
    )
    return FedFrozenLatent(rule, schedule=schedule, latent=latent, bits=config.latent_bits)


def initial_model(worker: Worker, strategy: FedFrozen) -> ArrayRecord:
    """Return the model a run starts from; raise ConfigError if latents cannot begin there."""
    initial = worker.initial_weights()
    if isinstance(strategy, FedFrozenLatent) and strategy.is_frozen(1):
        try:
            strategy.check_head(initial)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    return to_record(initial)


def start_report(worker: Worker, arrays: ArrayRecord) -> dict[str, Any]:
    """Return what ``start.json`` holds: SHA-256 and size of the first model, the preprocessing."""
    tensors = to_tensors(arrays)
    size = sum(tensor.numel() for tensor in tensors.values())
    return {
        "model": {"sha256": digest(tensors), "entries": len(tensors), "numbers": size},
        "preprocessing": {**asdict(worker.spec), "augment": worker.dataset.augment},
    }


def begin(folder: RunFolder, worker: Worker, arrays: ArrayRecord) -> None:
    """Write down what a run starts from."""
    folder.write_partition(partition_report(worker.partition, worker.dataset))
    folder.write_start(start_report(worker, arrays))


def smallest_bytes(config: RunConfig, arrays: ArrayRecord) -> int:
    """Return what a run folder holds at once at the least: the model, and checkpoints of it."""
    checkpoints = (
        0 if config.checkpoint_every == 0 else (config.rounds - 1) // config.checkpoint_every
    )
    size = sum(tensor.nbytes for tensor in to_tensors(arrays).values())
    return size * (1 + min(checkpoints, KEPT))
