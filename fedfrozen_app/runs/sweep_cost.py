"""What a sweep is going to cost: payload from the shapes of the models, time from finished runs."""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from fedfrozen_app.config import RunConfig, available_cores
from fedfrozen_app.models.head import never_trained
from fedfrozen_app.models.latent import mapped_entries
from fedfrozen_app.models.registry import create_model
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.runs.finished import stored_config
from fedfrozen_app.runs.store import RunFolder
from fedfrozen_app.strategies.sampling import cohort_size
from fedfrozen_app.strategies.schedule import FreezeSchedule

# a head is a small part of a model, so that a data set that is not named here changes little
OUTPUTS = {"cifar100": 100, "femnist": 62, "tinyimagenet": 200}
SOME_OUTPUTS = 10
FLOAT_BYTES = 4


def cohort(config: RunConfig) -> int:
    """Return how many clients a round asks, if all hold data."""
    return cohort_size(config.num_clients, config.fraction_train, 1)


def examples_per_round(config: RunConfig) -> int | None:
    """Return the most examples that a round's clients train on; None: as many as there are."""
    if config.resolved_local_steps:
        return cohort(config) * config.resolved_local_steps * config.batch_size
    if not config.max_train_examples:
        return None
    held = config.max_train_examples * (1 - config.resolved_public_fraction)
    return round(held * config.local_epochs * cohort(config) / config.num_clients)


def payload(config: RunConfig) -> int | None:
    """Return the bytes of all clients of a run, both directions, before any compression.

    What is sent once to each client (a frozen block, a base) is not counted. None for text, whose
    vocabulary nobody knows before the data is there.
    """
    if config.reads_text:
        return None
    warm, cold = _sizes(
        config.model_copy(
            # what the shapes do not depend on, so that models are built once
            update={"seed": 1, "alpha": 0.5, "lr": 0.01, "run_name": "auto", "run_dir": "runs"}
        )
    )
    rounds = config.resolved_warmup_rounds * warm
    rounds += (config.rounds - config.resolved_warmup_rounds) * cold
    twice = 2 if config.strategy == "scaffold" else 1  # the controls
    return 2 * cohort(config) * rounds * twice


@lru_cache(maxsize=64)
def _sizes(config: RunConfig) -> tuple[int, int]:
    """Return the bytes of a message's arrays during the warm-up and after it."""
    outputs = OUTPUTS.get(config.dataset, SOME_OUTPUTS)
    state = create_model(config, outputs, init=False).state_dict()
    always = never_trained(config.head, state)
    schedule = FreezeSchedule.warmup(1, config.resolved_frozen, always=always)
    whole, frozen = (Selection.build(schedule.spec(at), state) for at in (1, 2))
    if config.strategy != "latent":
        return _active_bytes(whole), _active_bytes(frozen)
    entries = len(mapped_entries(frozen))
    return _active_bytes(whole), entries * config.latent_dim * config.latent_bits // 8


def _active_bytes(selection: Selection) -> int:
    return FLOAT_BYTES * selection.num_active


def examples_per_second(finished: Iterable[RunFolder]) -> float | None:
    """Return the examples that finished runs trained on in a second of one thread, tests and all.

    None where nothing is known.
    """
    examples, seconds = 0, 0.0
    for folder in finished:
        config = stored_config(folder)
        each = examples_per_round(config) if config is not None else None
        if config is None or each is None:
            continue
        lines = folder.metrics()
        examples += each * (len(lines) - 1)
        seconds += threads_of(config) * sum(line.seconds_total for line in lines)
    return examples / seconds if seconds > 0 else None


def threads_of(config: RunConfig, jobs: int = 1) -> int:
    """Return the threads that ``jobs`` runs at once keep busy."""
    return min(available_cores(), max(jobs, config.resolved_threads * config.jobs))


def total_examples(configs: Sequence[RunConfig]) -> int | None:
    """Return the most examples that all runs train on, None where one is not known."""
    each = [(config.rounds, examples_per_round(config)) for config in configs]
    if any(count is None for _, count in each):
        return None
    return sum(rounds * (count or 0) for rounds, count in each)
