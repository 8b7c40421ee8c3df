"""The rounds of a run, the same in every engine: send, aggregate, test, record."""

import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.supercore import log

from fedfrozen_app.config import RunConfig
from fedfrozen_app.disk import explained
from fedfrozen_app.engine.client_tests import ClientTests
from fedfrozen_app.engine.snapshot import Snapshot
from fedfrozen_app.engine.start import begin, initial_model, prepare, smallest_bytes
from fedfrozen_app.models.head import METADATA_KEY
from fedfrozen_app.runs.checkpoint import (
    FOLDER,
    Checkpoint,
    read_checkpoint,
    remove_checkpoints,
    write_checkpoint,
)
from fedfrozen_app.runs.store import GO_ON, OnRound, RoundMetrics, RunFolder, check_room
from fedfrozen_app.runs.trackers import tracked
from fedfrozen_app.strategies import FedFrozen, QuorumError
from fedfrozen_app.strategies.base import ServerRule
from fedfrozen_app.strategies.latent import FedFrozenLatent
from fedfrozen_app.training.local import perplexity
from fedfrozen_app.training.worker import Worker
from fedfrozen_app.transport.arrays import to_tensors
from fedfrozen_app.transport.client_state import forget
from fedfrozen_app.transport.ledger import LedgerGrid, payload_bytes
from fedfrozen_app.transport.payload import PERSONALISE, client_of

CLIENT_APP = "fedfrozen_app.client_app:app"
Quality = tuple[float | None, float | None]  # loss and accuracy
UNTESTED: Quality = (None, None)


def finish_round(
    strategy: FedFrozen,
    grid: Grid,
    server_round: int,
    arrays: ArrayRecord,
    messages: Iterable[Message],
) -> ArrayRecord:
    """Send a round's messages, aggregate the replies, return the next model."""
    replies = grid.send_and_receive(messages, timeout=strategy.timeout)
    aggregated, _ = strategy.aggregate_train(server_round, replies)
    return arrays if aggregated is None else aggregated


def forget_clients(strategy: FedFrozen, worker: Worker) -> None:
    """Remove what clients of this machine have kept in files for a run."""
    if isinstance(rule := strategy.strategy, ServerRule):
        forget(worker.client_states, rule.versions.run)


class Federation:
    """One run: its strategy, its traffic, its folder."""

    def __init__(
        self, config: RunConfig, grid: Grid, worker: Worker, strategy: FedFrozen, folder: RunFolder
    ) -> None:
        self.config = config
        self.grid = LedgerGrid(grid)
        self.worker = worker
        self.strategy = strategy
        self.strategy.timeout = config.round_timeout
        self.folder = folder

    def run(self, arrays: ArrayRecord, on_round: OnRound, first: int = 0) -> None:
        """Run rounds from ``first`` on, 0 being the test of the start.

        The model of the last finished round is saved whatever happens.
        """
        try:
            if first == 0:
                self._record(0, arrays, time.perf_counter(), on_round)
            for server_round in range(max(1, first), self.config.rounds + 1):
                started = time.perf_counter()
                messages = self._messages(server_round, arrays)
                if reason := self._beyond_budget(server_round, messages):
                    log(INFO, reason)
                    self.folder.write_early_end(reason)
                    break
                arrays = self._train(server_round, arrays, messages)
                self._record(server_round, arrays, started, on_round)
                self._checkpoint(server_round, arrays)
            self._save_model(arrays)
        except BaseException as error:  # Ctrl-C too: the folder must not look finished
            self._forget_clients()
            self._save_after(error, arrays)
            raise
        self._forget_clients()
        remove_checkpoints(self.folder.path)

    def _checkpoint(self, server_round: int, arrays: ArrayRecord) -> None:
        every = self.config.checkpoint_every
        if every == 0 or server_round % every or server_round == self.config.rounds:
            return
        states = self.worker.client_states

        def make(copy_to: Path) -> dict[str, Any]:
            taken = Snapshot.take(arrays, self.strategy, self.grid, states, copy_to)
            return {
                "model": taken.model,
                "strategy": taken.strategy,
                "contexts": taken.contexts,
                "spent": dict(self.grid.spent),
            }

        with explained(self.folder.path / FOLDER, GO_ON):
            write_checkpoint(self.folder.path, server_round, make)

    def restore(self, checkpoint: Checkpoint) -> ArrayRecord:
        """Be where a checkpoint was written; return the model."""
        state = checkpoint.state
        model, strategy, contexts = (state[key] for key in ("model", "strategy", "contexts"))
        snapshot = Snapshot(model, strategy, contexts, checkpoint.clients)
        self.grid.spent.update(state["spent"])
        return snapshot.restore(self.strategy, self.grid, self.worker.client_states)

    def _save_model(self, arrays: ArrayRecord) -> None:
        self.folder.save_model(to_tensors(arrays), {METADATA_KEY: self.config.head})

    def _save_after(self, error: BaseException, arrays: ArrayRecord) -> None:
        """Save what there is; a disk that fails then does not hide why the run stopped."""
        reason = f"{type(error).__name__}: {error}"
        try:
            self.folder.write_failure(reason)
            self._save_model(arrays)
        except OSError as second:
            log(ERROR, "the model of the last round is not saved: %s", second)

    def _forget_clients(self) -> None:
        forget_clients(self.strategy, self.worker)

    def train_round(self, server_round: int, arrays: ArrayRecord) -> ArrayRecord:
        """Send the model out, aggregate the replies, return the next model."""
        return self._train(server_round, arrays, self._messages(server_round, arrays))

    @property
    def _rule(self) -> ServerRule[Any, Any]:
        rule = self.strategy.strategy
        assert isinstance(rule, ServerRule)  # for the type checker; see build_strategy
        return rule

    def _messages(self, server_round: int, arrays: ArrayRecord, attempt: int = 0) -> list[Message]:
        self._rule.attempt = attempt
        made = self.strategy.configure_train(server_round, arrays, ConfigRecord(), self.grid)
        return list(made)

    def _train(
        self, server_round: int, arrays: ArrayRecord, messages: list[Message]
    ) -> ArrayRecord:
        """Finish a round; with too few replies, try again with a fresh cohort, not for ever."""
        attempt, retries = 0, self.config.round_retries
        while True:
            try:
                return finish_round(self.strategy, self.grid, server_round, arrays, messages)
            except QuorumError as error:
                attempt += 1
                if attempt > retries or error.diverges:
                    raise
                log(WARNING, "%s; trying again, %d of %d", error, attempt, retries)
                messages = self._messages(server_round, arrays, attempt)
                if reason := self._beyond_budget(server_round, messages):
                    raise QuorumError(f"{error}; {reason}") from error

    def _beyond_budget(self, server_round: int, messages: list[Message]) -> str | None:
        """Return which client a round would take beyond ``byte-budget``, None if none."""
        budget = self.config.byte_budget
        for message in messages if budget else ():
            client = client_of(message, message.metadata.dst_node_id)
            needed = payload_bytes(message.content) + self._rule.reply_bytes
            if (spent := self.grid.spent[client]) + needed > budget:
                return (
                    f"byte-budget={budget}: client {client} has spent {spent} bytes and round "
                    f"{server_round} takes {needed}"
                )
        return None

    def _record(
        self, server_round: int, arrays: ArrayRecord, started: float, on_round: OnRound
    ) -> None:
        """Test the model, if it is due, and write the round's line."""
        (loss, accuracy), validation = self._test(server_round, arrays)
        report, traffic = self.strategy.report, self.grid.take()
        text = self.config.reads_text
        metrics = RoundMetrics(
            round=server_round,
            phase=self._phase(server_round),
            strategy=self.config.strategy,
            train_loss=report.mean("train_loss"),
            test_loss=loss,
            test_accuracy=accuracy,
            clients=report.clients,
            num_examples=int(report.num_examples),
            bytes_up=traffic.bytes_up,
            bytes_down=traffic.bytes_down,
            wire_bytes_up=traffic.wire_bytes_up,
            wire_bytes_down=traffic.wire_bytes_down,
            seconds_train=round(report.total("train_seconds"), 4),
            seconds_total=round(time.perf_counter() - started, 4),
            dropped=report.dropped,
            test_perplexity=None if loss is None or not text else perplexity(loss),
            identity_error=self._identity_error(server_round),
            validation_loss=validation[0],
            validation_accuracy=validation[1],
            attempts=self._rule.attempt + 1,
        )
        if server_round > 0 and accuracy is not None and self.config.fraction_evaluate > 0:
            self._test_clients(server_round, arrays)
            traffic = self.grid.take()
            metrics = replace(metrics, bytes_evaluate=traffic.bytes_up + traffic.bytes_down)
        self.folder.append(metrics)
        on_round(metrics)

    def _test(self, server_round: int, arrays: ArrayRecord) -> tuple[Quality, Quality]:
        """Return loss and accuracy on the test and the validation examples, if a test is due."""
        every, last = self.config.eval_every, self.config.rounds
        if server_round not in (0, last) and (every == 0 or server_round % every):
            return UNTESTED, UNTESTED
        self.worker.load_whole(to_tensors(arrays), self.strategy.digest)
        return self.worker.test(), self.worker.validate() or UNTESTED

    def _test_clients(self, server_round: int, arrays: ArrayRecord) -> None:
        """Let clients test the model on examples of their own; write down each one's result."""
        said = ConfigRecord({PERSONALISE: server_round == self.config.rounds})
        messages = self.strategy.configure_evaluate(server_round, arrays, said, self.grid)
        replies = self.grid.send_and_receive(messages, timeout=self.strategy.timeout)
        self.strategy.aggregate_evaluate(server_round, replies)
        tests = self._rule.evaluate_metrics_aggr_fn
        assert isinstance(tests, ClientTests)  # for the type checker; see build_strategy
        self.folder.append_clients(server_round, tests.take())

    def _identity_error(self, server_round: int) -> float | None:
        """Return how exactly latents average, in the round that measured it."""
        strategy = self.strategy
        if isinstance(strategy, FedFrozenLatent) and strategy.identity_round == server_round:
            return strategy.identity_error
        return None

    def _phase(self, server_round: int) -> str:
        if server_round == 0:
            return "start"
        if not self.config.freezes:
            return "full"
        if not self.strategy.is_frozen(server_round):
            return "warmup"
        return "latent" if self.config.strategy == "latent" else "frozen"


def run_federation(config: RunConfig, grid: Grid, on_round: OnRound) -> RunFolder:
    """Run a config on a grid and return its run folder.

    Data, model, weights and every stage's selection are loaded and checked before the run
    folder is made.

    Raises
    ------
    ConfigError
        For whatever the config asks that cannot be done.
    QuorumError
        When too few clients of a round reply usably.
    """
    worker, strategy = prepare(config)
    if not config.resume:
        start = [initial_model(worker, strategy)]
        check_room(config, smallest_bytes(config, start[0]))
        folder = RunFolder.create(config, partial(begin, worker=worker, arrays=start[0]))
        with tracked(config, folder, on_round) as watched:
            # popped, or the first model would stay in memory until the run ends
            Federation(config, grid, worker, strategy, folder).run(start.pop(), watched)
        return folder
    return _resume(config, grid, worker, strategy, on_round)


def _resume(
    config: RunConfig, grid: Grid, worker: Worker, strategy: FedFrozen, on_round: OnRound
) -> RunFolder:
    """Go on after the last checkpoint; without one, begin; do nothing if the run is over."""
    folder = RunFolder.reopen(config)
    if folder.is_over():
        return folder
    federation = Federation(config, grid, worker, strategy, folder)
    checkpoint = read_checkpoint(folder.path)
    done = -1 if checkpoint is None else checkpoint.server_round
    folder.go_back_to(done)
    if checkpoint is None:
        start = [initial_model(worker, strategy)]
        begin(folder, worker, start[0])
    else:
        log(INFO, "going on after round %d", done)
        start = [federation.restore(checkpoint)]
        del checkpoint
    with tracked(config, folder, on_round, first=done + 1) as watched:
        federation.run(start.pop(), watched, first=done + 1)
    return folder
