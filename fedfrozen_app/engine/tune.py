"""Choose how long to warm up: several freezes from one shared warm-up.

Until its freeze a run is the run that never freezes. So one trajectory without a freeze is
trained, and at each candidate round a branch goes on from it with the freeze in force. Every
branch ends with the bits of a run of its own, and the sum of the warm-ups is trained once.
What is compared is the loss at the end on the validation share, which no client holds and no
test sees (``validation-fraction``).
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord

from fedfrozen_app.config import ConfigError, RunConfig, rounds_of_ratio
from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.engine.rounds import finish_round, forget_clients
from fedfrozen_app.engine.snapshot import Snapshot
from fedfrozen_app.engine.start import checked_strategy, initial_model
from fedfrozen_app.strategies.fedfrozen import FedFrozen
from fedfrozen_app.training.local import perplexity
from fedfrozen_app.training.worker import Worker, resident
from fedfrozen_app.transport.arrays import to_tensors
from fedfrozen_app.transport.ledger import LedgerGrid

VALIDATION_FRACTION = 0.1


@dataclass(frozen=True)
class Candidate:
    """What a warm-up of ``warmup_rounds`` came to; ``num_bytes`` is payload, both ways, all rounds.

    ``steps`` are local optimiser steps of the whole run, its warm-up included.
    """

    ratio: float
    warmup_rounds: int
    validation_loss: float
    validation_accuracy: float
    num_bytes: int
    steps: int


@dataclass(frozen=True)
class Tuning:
    """All candidates, in the order of their warm-ups, and the steps that were really trained."""

    candidates: tuple[Candidate, ...]
    trained_steps: int
    is_text: bool

    @property
    def best(self) -> Candidate:
        """The candidate of the lowest validation loss, of equals the earliest freeze."""
        return min(self.candidates, key=lambda one: (one.validation_loss, one.warmup_rounds))

    @property
    def separate_steps(self) -> int:
        """Local steps that a run of its own for every candidate would have trained."""
        return sum(one.steps for one in self.candidates)

    def quality(self, one: Candidate) -> str:
        """Return accuracy, of text perplexity, on the validation share."""
        if self.is_text:
            return f"{perplexity(one.validation_loss):.2f}"
        return f"{one.validation_accuracy:.4f}"


def warmups_of(ratios: Sequence[float], rounds: int) -> dict[int, float]:
    """Return the warm-up rounds of ratios, ascending, with the ratio each stands for.

    Raises
    ------
    ConfigError
        If a ratio is not in [0, 1], or fewer than two different warm-ups come out.
    """
    if wrong := [ratio for ratio in ratios if not 0 <= ratio <= 1]:
        raise ConfigError(f"ratios must be in [0, 1], got {wrong[0]}; 1 never freezes")
    found = {rounds_of_ratio(ratio, rounds): ratio for ratio in sorted(ratios, reverse=True)}
    if len(found) < 2:
        raise ConfigError(
            f"ratios={','.join(map(str, ratios))} of {rounds} rounds are "
            f"{len(found)} warm-up; give ratios further apart, or more rounds"
        )
    return dict(sorted(found.items()))


def tuning_config(config: RunConfig) -> RunConfig:
    """Return the config that is trained: no warm-up of its own, and a validation share.

    Raises
    ------
    ConfigError
        Where there is nothing to choose.
    """
    if max(config.warmup_rounds, config.warmup_ratio) >= 0:
        raise ConfigError("the warm-up is what tune-warmup chooses; leave out warmup-* keys")
    if config.engine != "local":
        raise ConfigError(
            f"tune-warmup runs in this process; use engine=local, got {config.engine}"
        )
    if config.resolved_frozen == "all" and config.strategy != "latent":
        raise ConfigError(
            f"strategy={config.strategy} freezes nothing here; name what to freeze, for example "
            "frozen=query-key"
        )
    share = config.validation_fraction or VALIDATION_FRACTION
    return config.model_copy(update={"validation_fraction": share})


class _Run:
    """One federation that can be taken back to an earlier round."""

    def __init__(self, config: RunConfig, worker: Worker, grid: LocalGrid, copies: Path) -> None:
        self.config, self.worker, self.local, self.copies = config, worker, grid, copies
        self.grid = LedgerGrid(grid)
        self.strategy = self.strategy_of(config.rounds)
        self.steps = self.num_bytes = 0  # of the run so far, from round 1
        self.trained_steps = 0  # of all branches

    def strategy_of(self, warmup_rounds: int) -> FedFrozen:
        chosen = self.config.model_copy(update={"warmup_rounds": warmup_rounds})
        strategy = checked_strategy(chosen, self.worker)
        strategy.timeout = self.config.round_timeout
        return strategy

    def train(self, arrays: ArrayRecord, first: int, last: int) -> ArrayRecord:
        """Run rounds ``first`` to ``last`` (inclusive)."""
        for server_round in range(first, last + 1):
            sent = self.strategy.configure_train(server_round, arrays, ConfigRecord(), self.grid)
            arrays = finish_round(self.strategy, self.grid, server_round, arrays, sent)
            steps = int(self.strategy.report.total("steps"))
            traffic = self.grid.take()
            self.steps += steps
            self.trained_steps += steps
            self.num_bytes += traffic.bytes_up + traffic.bytes_down
        return arrays

    def snapshot(self, arrays: ArrayRecord, name: str) -> tuple[Snapshot, int, int]:
        states, copy_to = self.worker.client_states, self.copies / name
        taken = Snapshot.take(arrays, self.strategy, self.local, states, copy_to)
        return taken, self.steps, self.num_bytes

    def go_back(self, kept: tuple[Snapshot, int, int], warmup_rounds: int) -> ArrayRecord:
        """Be where a snapshot was taken, with another freeze ahead."""
        snapshot, self.steps, self.num_bytes = kept
        self.strategy = self.strategy_of(warmup_rounds)
        return snapshot.restore(self.strategy, self.local, self.worker.client_states)

    def candidate(self, ratio: float, warmup_rounds: int, arrays: ArrayRecord) -> Candidate:
        self.worker.load_whole(to_tensors(arrays), self.strategy.digest)
        found = self.worker.validate()
        assert found is not None  # for the type checker; see tuning_config
        return Candidate(ratio, warmup_rounds, *found, self.num_bytes, self.steps)


def tune_warmup(
    config: RunConfig,
    grid: LocalGrid,
    ratios: Sequence[float],
    on_candidate: Callable[[Candidate], None] = lambda one: None,
) -> Tuning:
    """Train the shared warm-up and all branches; return what they came to.

    Parameters
    ----------
    config : RunConfig
        From :func:`tuning_config`.
    grid : LocalGrid
        Of the same config.
    ratios : sequence of float
        Candidates, T_warm / T in [0, 1]; 1 never freezes.
    on_candidate : callable
        Is shown every candidate when it is done, the longest warm-up first.

    Raises
    ------
    ConfigError
        For whatever the config asks that cannot be done.
    """
    warmups = warmups_of(ratios, config.rounds)
    worker = resident(config)
    done: list[Candidate] = []
    with tempfile.TemporaryDirectory(prefix="fedfrozen-tune-") as copies:
        run = _Run(config, worker, grid, Path(copies))
        try:
            arrays, at = initial_model(worker, run.strategy_of(min(warmups))), 0
            kept: dict[int, tuple[Snapshot, int, int]] = {}
            for warmup in warmups:
                arrays = run.train(arrays, at + 1, warmup)
                kept[warmup], at = run.snapshot(arrays, str(warmup)), warmup
            for warmup, ratio in reversed(warmups.items()):
                arrays = run.go_back(kept.pop(warmup), warmup)
                arrays = run.train(arrays, warmup + 1, config.rounds)
                done.append(run.candidate(ratio, warmup, arrays))
                on_candidate(done[-1])
        finally:
            forget_clients(run.strategy, worker)
    return Tuning(tuple(reversed(done)), run.trained_steps, config.reads_text)
