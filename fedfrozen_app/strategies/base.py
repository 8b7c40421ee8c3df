"""What our server rules share: cohort, checked replies, streaming aggregation, quorum.

A rule subclasses :class:`ServerRule` and gives ``aggregate(updates)``. Replies come in as
a stream in client order; each is checked, turned into an :class:`Update` and can be let
go of once it is added up, so memory does not grow with the number of clients. Every rule
works on the entries it is given, whole models or the active half of one.
"""

import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from logging import INFO, WARNING
from typing import Any

import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.supercore import log

from fedfrozen_app.models.selection import Selection
from fedfrozen_app.strategies.sampling import Members, nodes_in_order, sample_cohort
from fedfrozen_app.transport.arrays import to_record, to_tensors
from fedfrozen_app.transport.payload import (
    PARTITION_ID,
    SERVER_ROUND,
    client_of,
    first_arrays,
    missing_digest,
)

Tensors = dict[str, torch.Tensor]
ANSI_STYLE = re.compile(r"\x1b\[[0-9;]*m")
Layout = dict[str, tuple[tuple[int, ...], str]]  # shape and dtype (a glob) by entry


@dataclass(frozen=True)
class Update:
    """One client's accepted reply: y_i on the active entries, and its weight n_i."""

    client: int
    num_examples: float
    arrays: Tensors
    metrics: MetricRecord


@dataclass
class RoundReport:
    """What happened to a round's replies."""

    cohort: int = 0
    clients: int = 0
    metrics: list[MetricRecord] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    @property
    def dropped(self) -> int:
        """Number of sampled clients whose reply did not enter the model."""
        return self.cohort - self.clients

    def total(self, key: str) -> float:
        """Return a metric summed over the accepted replies."""
        return float(sum(map(_number(key), self.metrics)))

    def mean(self, key: str) -> float | None:
        """Return a metric's mean over the accepted replies by their weight, None if none."""
        if not self.weights:
            return None
        terms = zip(self.weights, map(_number(key), self.metrics), strict=True)
        return sum(weight * value for weight, value in terms) / sum(self.weights)

    @property
    def num_examples(self) -> float:
        """Sum of the accepted replies' weights."""
        return sum(self.weights)


def _number(key: str) -> Callable[[MetricRecord], float]:
    """Return a reader of one scalar metric; absent or a list reads as 0."""

    def read(record: MetricRecord) -> float:
        value = record.get(key, 0.0)
        return float(value) if isinstance(value, int | float) else 0.0

    return read


class QuorumError(RuntimeError):
    """Too few usable replies to go on with."""


def layout_of(record: ArrayRecord, *, any_float: bool = False) -> Layout:
    """Return shape and dtype by entry; with ``any_float`` a float may have any width."""

    def dtype(array: Array) -> str:
        return "float*" if any_float and array.dtype.startswith("float") else array.dtype

    return {name: (tuple(array.shape), dtype(array)) for name, array in record.items()}


def refusal(reply: Message, expected: Layout, weight_key: str, server_round: int) -> str | None:
    """Return why a train reply must not enter the model, or None if it may.

    Checked: an error reply, one array and one metric record, exactly the expected
    entries with their shapes and dtypes, all values finite, a positive finite weight,
    and the round, where the reply names it.
    """
    if reply.has_error():
        # Flower's runtime gives a whole traceback in colour; its last line says what happened
        lines = ANSI_STYLE.sub("", reply.error.reason or "").strip().splitlines()
        return lines[-1].strip() if lines else f"error code {reply.error.code}"
    if missing_digest(reply) is not None:
        return "lacks the frozen block"
    content = reply.content
    if len(content.array_records) != 1 or len(content.metric_records) != 1:
        return (
            f"expected one array and one metric record, got {len(content.array_records)} "
            f"and {len(content.metric_records)}"
        )
    for record in content.config_records.values():
        if (said := record.get(SERVER_ROUND, server_round)) != server_round:
            return f"reply of round {said!r} came in round {server_round}"
    return _weight_refusal(content, weight_key) or _array_refusal(content, expected)


def _weight_refusal(content: RecordDict, key: str) -> str | None:
    weight = next(iter(content.metric_records.values())).get(key)
    if weight is None:
        return f"metric {key!r} is missing"
    if not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
        return f"metric {key!r} must be a finite number >= 0, got {weight!r}"
    return "no training examples" if weight == 0 else None


def _array_refusal(content: RecordDict, expected: Layout) -> str | None:
    record = next(iter(content.array_records.values()))
    if missing := [name for name in expected if name not in record]:
        return f"{len(missing)} entries are missing, first {missing[0]!r}"
    if extra := [name for name in record if name not in expected]:
        return f"{len(extra)} unexpected entries, first {extra[0]!r}"
    for name, (shape, dtype) in expected.items():
        array = record[name]
        if tuple(array.shape) != shape or not fnmatchcase(array.dtype, dtype):
            return f"{name} is {array.dtype}{list(array.shape)}, expected {dtype}{list(shape)}"
    try:
        tensors = to_tensors(record)
    except (ValueError, TypeError, EOFError, OSError) as error:
        return f"arrays cannot be read: {error}"
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != expected[name][0]:
            return f"{name} holds {list(tensor.shape)}, but says {list(expected[name][0])}"
        if not is_finite(tensor):
            return f"{name} has non-finite values"
    return None


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite; one pass, and a second only if the sum is not."""
    if not tensor.is_floating_point() or math.isfinite(float(tensor.sum())):
        return True
    return bool(torch.isfinite(tensor).all())


def in_client_order(grid: Grid | None, replies: Iterable[Message]) -> Iterable[Message]:
    """Return replies in client order: as they come from an ordered grid, else sorted."""
    if getattr(grid, "ordered", False):
        return replies
    return sorted(replies, key=lambda reply: client_of(reply, reply.metadata.src_node_id))


def accepted(
    replies: Iterable[Message],
    expected: Layout,
    weight_key: str,
    server_round: int,
    report: RoundReport,
) -> Iterator[Message]:
    """Yield the replies that may enter the model; count and log the others in ``report``."""
    for reply in replies:
        client = client_of(reply, reply.metadata.src_node_id)
        if reason := refusal(reply, expected, weight_key, server_round):
            report.refused.append(f"client {client}: {reason}")
            log(WARNING, "round %d: reply of client %d dropped: %s", server_round, client, reason)
            continue
        metrics = next(iter(reply.content.metric_records.values()))
        report.clients += 1
        report.weights.append(float(metrics[weight_key]))  # type: ignore[arg-type]
        report.metrics.append(metrics)
        yield reply


class ServerRule(FlowerFedAvg):
    """Base of our server rules; takes every argument of Flower's ``FedAvg``.

    Parameters
    ----------
    seed : int
        Seed of the cohort stream.
    members : Members
        Which node trains which client's partition; by default the nodes in id order.
    min_replies : float
        Share of the cohort, in [0, 1], that must reply usably; fewer end the run.
    **flower : Any
        Arguments of ``flwr.serverapp.strategy.FedAvg``.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        members: Members = nodes_in_order,
        min_replies: float = 0.0,
        **flower: Any,
    ) -> None:
        super().__init__(**flower)
        if not 0 <= min_replies <= 1:
            raise ValueError(
                f"min_replies must be in [0, 1], got {min_replies}; it is a share of the cohort"
            )
        self.seed = seed
        self.members = members
        self.min_replies = min_replies
        self.report = RoundReport()
        self._grid: Grid | None = None
        self._global: Tensors = {}
        self._expected: Layout = {}

    @abstractmethod
    def aggregate(self, global_arrays: Tensors, updates: Iterator[Update]) -> Tensors | None:
        """Return the next global model, or None if there was no update.

        Parameters
        ----------
        global_arrays : dict of str to Tensor
            x, the entries that were sent out this round.
        updates : iterator of Update
            In client order; each may be let go of before the next is asked for.
        """

    def select(self, selection: Selection) -> None:  # noqa: B027 - optional
        """Follow a new selection; a rule with state drops what left and starts what came."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that crosses rounds; a stateless rule has none."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state returned by :meth:`state_dict`."""
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, got {sorted(state)}")

    def _messages(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
        kind: str,
    ) -> Iterable[Message]:
        """Return one message per sampled client; all share the array record."""
        train = kind == MessageType.TRAIN
        fraction = self.fraction_train if train else self.fraction_evaluate
        minimum = self.min_train_nodes if train else self.min_evaluate_nodes
        if fraction == 0.0:
            return []
        members = self.members(grid, max(self.min_available_nodes, minimum))
        cohort = sample_cohort(
            members, fraction, minimum, seed=self.seed, server_round=server_round
        )
        log(INFO, "%s: sampled %d of %d clients", kind, len(cohort), len(members))
        messages = []
        for client in cohort:
            own = ConfigRecord({**config, SERVER_ROUND: server_round, PARTITION_ID: client})
            content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: own})
            messages.append(Message(content, members[client], kind, group_id=str(server_round)))
        return messages

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample the round's clients and address a train message to each."""
        self._grid = grid
        self._global, self._expected = to_tensors(arrays), layout_of(arrays)
        messages = list(self._messages(server_round, arrays, config, grid, MessageType.TRAIN))
        self.report = RoundReport(cohort=len(messages))
        return messages

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample clients for federated evaluation."""
        return self._messages(server_round, arrays, config, grid, MessageType.EVALUATE)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add up the replies as they come.

        Raises
        ------
        QuorumError
            If fewer than ``min_replies`` of the cohort replied usably.
        """
        good = accepted(
            in_client_order(self._grid, replies),
            self._expected,
            self.weighted_by_key,
            server_round,
            self.report,
        )
        arrays = self.aggregate(self._global, map(self._update, good))
        check_quorum(self.report, self.min_replies, server_round)
        if arrays is None:
            return None, None
        contents = [RecordDict({"metrics": metrics}) for metrics in self.report.metrics]
        return to_record(arrays), self.train_metrics_aggr_fn(contents, self.weighted_by_key)

    def _update(self, reply: Message) -> Update:
        _, record = first_arrays(reply.content)
        metrics = next(iter(reply.content.metric_records.values()))
        weight = float(metrics[self.weighted_by_key])  # type: ignore[arg-type]
        client = client_of(reply, reply.metadata.src_node_id)
        return Update(client, weight, to_tensors(record), metrics)


def check_quorum(report: RoundReport, min_replies: float, server_round: int) -> None:
    """Raise QuorumError if a round has too few usable replies, naming the first reasons."""
    needed = math.ceil(min_replies * report.cohort - 1e-9)
    if report.clients >= needed:
        return
    unheard = report.cohort - report.clients - len(report.refused)
    reasons = report.refused[:3] + ([f"{unheard} gave no reply"] if unheard > 0 else [])
    raise QuorumError(
        f"round {server_round}: {report.clients} of {report.cohort} replies are usable, "
        f"{needed} are required (min-replies={min_replies}); " + "; ".join(reasons)
    )
