"""Which node trains which client's partition, in every engine.

In this process node i holds partition i - 1. Elsewhere each node is asked once. A
simulation may have fewer nodes than the run has clients, since ``flwr run`` starts two
by default: its nodes share the data, so client p is then trained by node p modulo nodes.
"""

import time
from collections.abc import Collection
from logging import INFO
from typing import Any

from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore import log

from fedfrozen_app.transport.payload import PARTITION_ID, REPLY
from fedfrozen_app.transport.records import config_records

QUERY_PARTITION = "query.partition"
NUM_PARTITIONS = "num-partitions"
# once enough nodes are there, wait this long for the rest of them
STRAGGLER_SECONDS = 60.0
# errors of the way there and back: the node may answer when it is asked again
PASSING = (
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.CLIENT_APP_CRASHED,
)


class Roster:
    """Assign the clients 0..num_clients-1 to nodes; see ``strategies.sampling.Members``.

    Parameters
    ----------
    num_clients : int
        Clients of the run.
    with_data : collection of int, optional
        The clients that hold examples; the others are never sampled. By default all.
    timeout : float
        Seconds to wait for nodes to connect and to answer.
    """

    def __init__(
        self,
        num_clients: int,
        with_data: Collection[int] | None = None,
        *,
        timeout: float = 600.0,
    ) -> None:
        self.num_clients = num_clients
        self.clients = range(num_clients) if with_data is None else with_data
        self.timeout = timeout
        self._answers: dict[int, tuple[int, int]] = {}  # node -> its partition, of how many
        self._silent: set[int] = set()  # nodes that could not say
        self._waited = False  # for the nodes that are missing; once is enough

    def __call__(self, grid: Grid, at_least: int) -> dict[int, int]:
        """Return node id by client id.

        Raises
        ------
        TimeoutError
            If fewer than ``at_least`` clients have a node after ``timeout`` seconds.
        """
        if getattr(grid, "num_clients", None) == self.num_clients:  # in this process
            return {client: client + 1 for client in self.clients}
        started = time.monotonic()
        while True:
            members = self._assign(grid)
            waited = time.monotonic() - started
            patient = not self._waited and waited <= STRAGGLER_SECONDS
            if len(members) >= at_least and (self._complete() or not patient):
                self._waited = True
                return members
            if waited > self.timeout:
                raise TimeoutError(
                    f"{len(members)} of {at_least} required clients have a node after "
                    f"{self.timeout:g} s; start the missing SuperNodes or lower num-clients"
                )
            time.sleep(1.0)

    def _complete(self) -> bool:
        """Whether every partition the nodes speak of has its node."""
        return len(self._answers) >= max((total for _, total in self._answers.values()), default=1)

    def _assign(self, grid: Grid) -> dict[int, int]:
        online = set(grid.get_node_ids())
        self._ask(grid, sorted(online - self._answers.keys() - self._silent))
        answers = {node: self._answers[node] for node in online if node in self._answers}
        own = {own: node for node, (own, total) in answers.items() if total == self.num_clients}
        if own:
            return {client: own[client] for client in self.clients if client in own}
        in_order = [node for node, _ in sorted(answers.items(), key=lambda item: item[1])]
        if not in_order:
            return {}
        return {client: in_order[client % len(in_order)] for client in self.clients}

    def _ask(self, grid: Grid, nodes: list[int]) -> None:
        if not nodes:
            return
        log(INFO, "asking %d nodes for their partition", len(nodes))
        questions = [Message(RecordDict(), node, QUERY_PARTITION) for node in nodes]
        for reply in grid.send_and_receive(questions, timeout=self.timeout):
            if reply.has_error():
                log(INFO, "node %d: %s", reply.metadata.src_node_id, reply.error.reason)
                if reply.error.code not in PASSING:
                    self._silent.add(reply.metadata.src_node_id)
                continue
            answer: dict[str, Any] = dict(config_records(reply.content)[REPLY])
            partition, total = int(answer[PARTITION_ID]), int(answer[NUM_PARTITIONS])
            self._answers[reply.metadata.src_node_id] = partition, total
