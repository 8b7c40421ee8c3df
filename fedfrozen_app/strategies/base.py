"""What our server rules share: cohort, checked replies, streaming aggregation, quorum.

A rule subclasses :class:`ServerRule` and gives ``aggregate(global_arrays, updates)``.
Replies come in as a stream in client order; each is checked, turned into an
:class:`Update` and can be let go of once it is added up, so memory does not grow with the
number of clients. Every rule works on the entries it is given, whole models or the active
half of one.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from logging import INFO
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.supercore import log

from fedfrozen_app.models.selection import Selection
from fedfrozen_app.strategies.replies import (
    Layout,
    RoundReport,
    accepted,
    check_quorum,
    check_share,
    in_client_order,
    layout_of,
)
from fedfrozen_app.strategies.sampling import Members, nodes_in_order, sample_cohort
from fedfrozen_app.transport.arrays import to_record, to_tensors
from fedfrozen_app.transport.payload import PARTITION_ID, SERVER_ROUND, Addressees, first_arrays

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Update:
    """One client's accepted reply: y_i on the active entries, and its weight n_i."""

    client: int
    num_examples: float
    arrays: Tensors
    metrics: MetricRecord


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
        check_share(min_replies)
        self.seed = seed
        self.members = members
        self.min_replies = min_replies
        self.report = RoundReport()
        self._grid: Grid | None = None
        self._sent: list[Message] = []
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
        self._sent = list(self._messages(server_round, arrays, config, grid, MessageType.TRAIN))
        self.report = RoundReport(cohort=len(self._sent))
        return list(self._sent)

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
        client = Addressees(self._sent)
        good = accepted(
            in_client_order(self._grid, replies, client),
            self._expected,
            self.weighted_by_key,
            server_round,
            self.report,
            client,
        )
        updates = (self._update(reply, client(reply)) for reply in good)
        arrays = self.aggregate(self._global, updates)
        self._sent, self._global = [], {}  # they hold the old model in memory
        check_quorum(self.report, self.min_replies, server_round)
        if arrays is None:
            return None, None
        contents = [RecordDict({"metrics": metrics}) for metrics in self.report.metrics]
        return to_record(arrays), self.train_metrics_aggr_fn(contents, self.weighted_by_key)

    def _update(self, reply: Message, client: int) -> Update:
        _, record = first_arrays(reply.content)
        metrics = next(iter(reply.content.metric_records.values()))
        weight = float(metrics[self.weighted_by_key])  # type: ignore[arg-type]
        return Update(client, weight, to_tensors(record), metrics)
