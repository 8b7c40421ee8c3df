"""A Flower Grid that runs the ClientApp in this process.

No Ray, no serialisation: a message's arrays are the server's tensors. Replies are
computed when they are asked for, one after the other in the order of the messages, so
the server adds up one reply while the next does not exist yet. With ``jobs`` several
worker processes compute ahead, each by one message beside the one that it is at.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedfrozen_app.engine.worker_pool import Pending, WorkerPool, call, load_app

AHEAD = 2  # messages under way for each worker process
UserConfig = dict[str, bool | float | int | str]


def _own_content(content: RecordDict) -> RecordDict:
    """Return a content whose records a client may change; arrays are shared, read-only."""
    own = RecordDict()
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            own[name] = record.copy()
        elif isinstance(record, ConfigRecord):
            own[name] = ConfigRecord(dict(record))
        elif isinstance(record, MetricRecord):
            own[name] = MetricRecord(dict(record))
    return own


class LocalGrid(Grid):
    """Run a federation of ``num_clients`` in this process.

    Parameters
    ----------
    client_app : ClientApp or str
        The app, or ``module:attribute`` to import it from; worker processes need the latter.
    num_clients : int
        Nodes 1..num_clients; node i has ``partition-id`` i - 1 in its node config.
    run_config : dict, optional
        Run config in every client's context.
    jobs : int
        Clients computed at once; above 1 in that many worker processes. Small models are
        often fastest with ``torch.set_num_threads(1)``.
    node_config : dict, optional
        Further entries of every client's node config.
    """

    ordered = True  # replies come in the order of the messages

    def __init__(
        self,
        client_app: ClientApp | str,
        num_clients: int,
        run_config: UserConfig | None = None,
        *,
        jobs: int = 1,
        node_config: UserConfig | None = None,
    ) -> None:
        if num_clients < 1:
            raise ValueError(f"num_clients must be >= 1, got {num_clients}")
        if jobs < 1:
            raise ValueError(f"jobs must be >= 1, got {jobs}")
        if jobs > 1 and not isinstance(client_app, str):
            raise ValueError(
                f"jobs={jobs} runs clients in other processes, which must import the app: give "
                "client_app as 'module:attribute'"
            )
        self.num_clients = num_clients
        self.jobs = jobs
        self._reference = client_app if isinstance(client_app, str) else ""
        self._app = load_app(client_app) if isinstance(client_app, str) else client_app
        self._run_config = dict(run_config or {})
        self._node_config = dict(node_config or {})
        self._states: dict[int, RecordDict] = {}
        self._run = Run.create_empty(run_id=1)
        self._ids = itertools.count(1)
        self._pushed: dict[str, Message] = {}
        self._pool: WorkerPool | None = None
        if TaskIdentity._run_id is None:  # outside `flwr run` nobody else sets it
            TaskIdentity.run_id = self._run.run_id
            TaskIdentity.task_id = 1
            TaskIdentity.node_id = SUPERLINK_NODE_ID

    def state_dict(self) -> dict[int, RecordDict]:
        """Return what the clients keep in their contexts, by node id."""
        return dict(self._states)

    def load_state_dict(self, states: Mapping[int, RecordDict]) -> None:
        """Take over states returned by :meth:`state_dict`, for a server that starts again."""
        self._states = dict(states)

    def close(self, *, at_once: bool = False) -> None:
        """End the worker processes, ``at_once`` without waiting for their clients."""
        if self._pool is not None:
            self._pool.close(at_once=at_once)
            self._pool = None

    def __enter__(self) -> "LocalGrid":
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        self.close(at_once=kind is not None)

    # --- running clients --------------------------------------------------------------
    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Yield each message's reply when it is asked for, in the order of the messages.

        ``timeout`` has no meaning here: a client runs to its end, in this process.
        """
        return self._replies([self._number(message) for message in messages])

    def _replies(self, messages: list[Message]) -> Iterator[Message]:
        return self._in_processes(messages) if self.jobs > 1 else self._in_turn(messages)

    def _number(self, message: Message) -> Message:
        message.metadata.__dict__["_message_id"] = str(next(self._ids))
        return message

    def _in_turn(self, messages: list[Message]) -> Iterator[Message]:
        for message in messages:
            context = self._context(message.metadata.dst_node_id)
            if context is None:
                yield self._no_such_node(message)
                continue
            own = Message(_own_content(message.content), metadata=message.metadata)  # type: ignore[call-overload]
            reply = call(self._app, own, context)
            self._keep(context)
            yield self._number(reply)

    def _in_processes(self, messages: list[Message]) -> Iterator[Message]:
        if self._pool is None:
            self._pool = WorkerPool(self._reference, self.jobs)
        pool, todo = self._pool, iter(messages)
        try:
            ahead = itertools.islice(todo, AHEAD * self.jobs)
            waiting = deque(self._submit(pool, one) for one in ahead)
            while waiting:
                reply = waiting.popleft()
                if isinstance(reply, Pending):
                    reply, context = pool.result(reply)
                    self._keep(context)
                waiting.extend(self._submit(pool, later) for later in itertools.islice(todo, 1))
                yield self._number(reply)
        finally:
            pool.clear()

    def _submit(self, pool: WorkerPool, message: Message) -> "Pending | Message":
        """Hand a message to the pool, or return the error reply of one that nobody can run."""
        context = self._context(message.metadata.dst_node_id)
        return self._no_such_node(message) if context is None else pool.submit(message, context)

    def _context(self, node_id: int) -> Context | None:
        """Return a node's context; only a state that holds something is kept."""
        if not 1 <= node_id <= self.num_clients:
            return None
        ids: UserConfig = {"partition-id": node_id - 1, "num-partitions": self.num_clients}
        return Context(
            run_id=self._run.run_id,
            node_id=node_id,
            node_config={**self._node_config, **ids},
            state=self._states.get(node_id, RecordDict()),
            run_config=dict(self._run_config),
        )

    def _keep(self, context: Context) -> None:
        if context.state:
            self._states[context.node_id] = context.state
        else:
            self._states.pop(context.node_id, None)

    def _no_such_node(self, message: Message) -> Message:
        reason = f"there is no node {message.metadata.dst_node_id}; nodes are 1..{self.num_clients}"
        return Message(Error(ErrorCode.NODE_UNAVAILABLE, reason), reply_to=message)

    # --- the rest of the Grid interface -----------------------------------------------
    def get_node_ids(self) -> Iterable[int]:
        """Return the node ids, 1..num_clients."""
        return range(1, self.num_clients + 1)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Take messages; they run when their replies are pulled."""
        pushed = [self._number(message) for message in messages]
        self._pushed.update({message.metadata.message_id: message for message in pushed})
        return [message.metadata.message_id for message in pushed]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Run pushed messages and return their replies."""
        found = [self._pushed.pop(key) for key in message_ids if key in self._pushed]
        return list(self._replies(found))

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def set_run(self, run: Run) -> None:
        """Set the run."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run; empty but for its id."""
        return self._run
