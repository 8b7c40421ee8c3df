"""What our server rules share: cohort, checked replies, streaming aggregation, quorum.

A rule is one file: a frozen config dataclass, a state dataclass keyed by parameter name, a
pure function ``aggregate(state, updates, config) -> state``, and a :class:`ServerRule` that
names them. Replies come in as a stream in client order; each is checked, turned into an
:class:`Update` and can be let go of once it is added up, so memory does not grow with the
number of clients. Rules see the trained entries only, whole models or the active half of
one; buffers are put together here, by the policy of :mod:`.buffers`.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from logging import ERROR, INFO
from typing import Any, ClassVar, Generic, Self, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.supercore import log

from fedfrozen_app.models.entries import wide
from fedfrozen_app.models.patterns import ALL
from fedfrozen_app.models.reselect import reselect
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.strategies.buffers import BufferMean, trained
from fedfrozen_app.strategies.mean import Tensors
from fedfrozen_app.strategies.norm_bound import NormBound
from fedfrozen_app.strategies.replies import (
    ENCODED,
    Decode,
    RoundReport,
    accepted,
    check_quorum,
    check_share,
    in_order,
    is_finite,
    needs_of,
)
from fedfrozen_app.strategies.sampling import Members, NodesAsTheyCome, sample_cohort
from fedfrozen_app.strategies.versions import ClientVersions
from fedfrozen_app.transport.arrays import to_record, to_tensors
from fedfrozen_app.transport.codec import Layout, dtype_of, layout_of_tensors
from fedfrozen_app.transport.codecs import Codecs
from fedfrozen_app.transport.payload import (
    PARTITION_ID,
    SERVER_ROUND,
    STEPS,
    Addressees,
    Instructions,
    first_arrays,
    from_namespaces,
    group_of,
    to_namespaces,
)
from fedfrozen_app.transport.records import metric_records


@dataclass(frozen=True)
class Update:
    """One client's accepted reply: y_i on the trained entries, and its weight n_i.

    ``extra`` holds what else a rule's clients send, by namespace and parameter name.
    """

    client: int
    num_examples: float
    arrays: Tensors
    metrics: MetricRecord
    extra: Mapping[str, Tensors] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """tau_i, the optimiser steps the client took."""
        return int(self.metrics[STEPS])  # type: ignore[arg-type]


@dataclass(frozen=True)
class State:
    """What goes from round to round, each field a mapping from parameter names to tensors.

    ``x`` is the global model on the entries that train, as sent out this round; a rule's
    subclass adds its moments. A name that a moment lacks stands for zero.
    """

    x: Tensors = field(default_factory=dict)

    def moments(self) -> dict[str, Tensors]:
        """Return every field but x."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "x"}

    def follow(self, before: str, selection: Selection) -> Self:
        """Return the state for a new selection: what froze leaves, what came is zero."""
        moments = self.moments().items()
        return replace(self, **{name: reselect(t, before, selection) for name, t in moments})


def check_number(
    name: str,
    value: float,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    remedy: str,
) -> None:
    """Raise ValueError unless a field is a finite number in its range."""
    if isinstance(value, int | float) and math.isfinite(value):
        if value >= least and value > above and value < below:
            return
    low = f"> {above:g}" if above > -math.inf else f">= {least:g}"
    rule = f"in [{least:g}, {below:g})" if below < math.inf else low
    raise ValueError(f"{name} must be {rule}, got {value!r}; {remedy}")


def _chained(first: list[Update], others: Iterator[Update]) -> Iterator[Update]:
    """Yield the one update of a list, emptied then, and the others; itertools.chain keeps it."""
    yield first.pop()
    yield from others


class DivergedError(RuntimeError):
    """The aggregated model is not finite; the model before it stands."""


C = TypeVar("C")
S = TypeVar("S", bound=State)


class ServerRule(FlowerFedAvg, Generic[C, S]):
    """Base of our server rules; takes every argument of Flower's ``FedAvg``.

    An object is one run: its state is kept over several calls of ``start``.

    Parameters
    ----------
    seed : int
        Seed of the cohort stream.
    members : Members
        Which node trains which client's partition; by default the nodes as they come.
    work : mapping of int to float
        How long clients train, in any unit, as far as it is known: the longest are asked first, so
        that no worker waits for them at the end of a round. It changes no cohort, but the order
        in which replies are added, alike in every engine.
    min_replies : float
        Share of the cohort, in [0, 1], that must reply usably; fewer end the run.
    buffers : collection of str
        Names of further entries that no optimiser trains; see :mod:`.buffers`.
    compression : str
        Codec of uploads: ``none``, ``int8``, ``int4``, ``topk:F`` or ``powersgd:R``.
    broadcast : str
        Codec of what is sent out: ``none``, ``int8`` or ``int4``.
    max_update_norm, oversized_updates : str
        Bound on the norm of an update and what happens to a longer one; see :mod:`.norm_bound`.
    **options : Any
        The fields of the rule's config, and arguments of
        ``flwr.serverapp.strategy.FedAvg``.
    """

    config_type: ClassVar[type[Any]]
    state_type: ClassVar[type[Any]]
    required_metrics: ClassVar[tuple[str, ...]] = ()  # positive numbers every reply must bring
    any_entries: ClassVar[bool] = True  # whether it also averages what is no weight, as latents

    def __init__(
        self,
        *,
        seed: int = 0,
        members: Members | None = None,
        work: Mapping[int, float] | None = None,
        min_replies: float = 0.0,
        buffers: Collection[str] = (),
        compression: str = "none",
        broadcast: str = "none",
        max_update_norm: str = "none",
        oversized_updates: str = "refuse",
        **options: Any,
    ) -> None:
        own = [f.name for f in fields(self.config_type) if f.name in options]
        self.config: C = self.config_type(**{name: options.pop(name) for name in own})
        super().__init__(**options)
        check_share(min_replies)
        self.seed = seed
        self.buffers = frozenset(buffers)
        self.codecs = Codecs(compression, broadcast, seed, self.buffers)
        self.norm_bound = NormBound(max_update_norm, oversized_updates)
        self.members = members or NodesAsTheyCome()
        self.work = dict(work or {})
        self.min_replies = min_replies
        self.report = RoundReport()
        self.state: S = self.state_type()
        self.versions = ClientVersions()  # of what clients keep for this run
        self.num_members = 0  # clients there are in the round
        self.attempt = 0  # at the round; each has a cohort of its own
        self._selected = ALL  # what the names and shapes of the state belong to
        self.watch: Callable[[Tensors], None] | None = None  # is shown every accepted y_i
        self._heard = False  # whether a reply of this run was used
        self._grid: Grid | None = None
        self._sent: list[Message] = []
        self._global: Tensors = {}
        self._expected: Layout = {}
        self._decode: Decode | None = None

    # --- what a rule says -------------------------------------------------------------
    @abstractmethod
    def aggregate(self, state: S, updates: Iterator[Update]) -> S:
        """Return the next state, with x the next global model.

        Parameters
        ----------
        state : State
            x and the moments before the round.
        updates : iterator of Update
            At least one, in client order, in fp32 or wider; each may be let go of before
            the next is asked for.
        """

    @property
    def keeps_on_clients(self) -> bool:
        """Whether clients keep something between rounds, whose version a message must name."""
        return self.codecs.has_feedback

    def instructions(self, client: int) -> Instructions:
        """Return what the train message to a client says beyond its round and partition."""
        return {}

    def extra_arrays(self, x: Tensors) -> dict[str, Tensors]:
        """Return what is sent beside x, by namespace; clients answer with the same entries."""
        return {}

    @property
    def answers(self) -> list[str]:
        """What clients answer with beyond a model and its weight."""
        metrics = [f"the metric {name!r}" for name in self.required_metrics]
        return metrics + ([ENCODED] if self.codecs.are_used else [])

    @property
    def needs(self) -> str:
        """What clients have to do that plain handlers do not, empty for nothing."""
        if not self.answers:
            return ""
        return needs_of(type(self).__name__, self.answers)

    @property
    def reply_bytes(self) -> int:
        """Payload of a reply in the round that :meth:`configure_train` has begun."""
        said = self._expected.items()
        return sum(
            math.prod(shape) * dtype_of(name, dtype).itemsize for name, (shape, dtype) in said
        )

    def compress(self, upload: str, broadcast: str) -> None:
        """Change the codecs, from the next message on."""
        self.codecs = Codecs(upload, broadcast, self.seed, self.buffers)

    def summary(self) -> None:
        """Log the rule's config and what Flower's strategies log."""
        log(INFO, "\t├──> Rule: %s", self.config)
        log(INFO, "\t├──> Uploads: %s, broadcasts: %s", self.codecs.upload, self.codecs.broadcast)
        super().summary()

    # --- state ------------------------------------------------------------------------
    def select(self, selection: Selection) -> None:
        """Follow a new selection: drop the state of what left, start what came at zero."""
        if selection.spec != self._selected:
            self.norm_bound.forget()
        self.state = self.state.follow(self._selected, selection)
        self._selected = selection.spec
        self.versions.select(selection.spec)

    def forget_moments(self) -> None:
        """Begin afresh: what is averaged from now on has nothing to do with what was."""
        self.state = self.state_type()
        self.norm_bound.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return what crosses rounds beside the model: the moments by field and name."""
        moments = {name: dict(tensors) for name, tensors in self.state.moments().items()}
        return {
            "rule": type(self).__name__,
            "selection": self._selected,
            "moments": moments,
            "update_norms": self.norm_bound.state_dict(),
            **self.versions.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state returned by :meth:`state_dict` of the same rule."""
        if state.get("rule") != type(self).__name__:
            raise ValueError(
                f"this is the state of {state.get('rule')}, not of {type(self).__name__}; restore "
                "it into the same rule"
            )
        self.state, self._heard = self.state_type(**state["moments"]), True
        self._selected = state["selection"]
        self.norm_bound.load_state_dict(state["update_norms"])
        self.versions.load_state_dict(state)

    # --- down -------------------------------------------------------------------------
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
            members,
            fraction,
            minimum,
            seed=self.seed,
            server_round=server_round,
            attempt=self.attempt,
        )
        log(INFO, "%s: sampled %d of %d clients", kind, len(cohort), len(members))
        messages = []
        if train:
            self.num_members = len(members)
        for client in sorted(cohort, key=self._turn):
            said = self._said(client) if train else {}
            own = ConfigRecord({**config, **said, SERVER_ROUND: server_round, PARTITION_ID: client})
            content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: own})
            group = group_of(server_round, client)
            messages.append(Message(content, members[client], kind, group_id=group))
        return messages

    def _turn(self, client: int) -> tuple[float, int]:
        """Return a client's place in a round; replies are added in this order in every engine."""
        return -self.work.get(client, 0.0), client

    def _said(self, client: int) -> Instructions:
        kept = self.versions.instructions(client) if self.keeps_on_clients else {}
        return {**self.instructions(client), **kept}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample the round's clients and address a train message to each."""
        self._grid, codecs = grid, self.codecs
        wire, whole = self._encoded(arrays)
        x = trained(whole, self.buffers)
        self._check_moments(x)
        extra = to_namespaces(self.extra_arrays(x))
        sent = to_record({**to_tensors(wire), **extra}) if extra else wire
        said = ConfigRecord({**config, **codecs.instructions(whole)})
        self._global = whole
        self._decode = self._receive(whole)
        self._expected = {**codecs.expected(whole), **layout_of_tensors(extra)}
        self._sent = list(self._messages(server_round, sent, said, grid, MessageType.TRAIN))
        self.report = RoundReport(cohort=len(self._sent))
        return list(self._sent)

    def _receive(self, x: Tensors) -> Decode | None:
        """Return what makes of a reply's arrays those that may enter the model."""
        decode: Decode | None = None
        if self.codecs.up is not None:
            decode = partial(self.codecs.receive, x=x)
        if not self.norm_bound.is_on:
            return decode
        self.norm_bound.begin()
        return lambda arrays: self.norm_bound.checked(
            arrays if decode is None else decode(arrays), x, self.buffers
        )

    def _encoded(self, arrays: ArrayRecord) -> tuple[ArrayRecord, Tensors]:
        """Return what is sent of a model, and what clients make of it."""
        tensors = to_tensors(arrays)
        wire, x = self.codecs.send(tensors)
        return (arrays if wire is tensors else to_record(wire)), x

    def _check_moments(self, x: Tensors) -> None:
        """Raise ValueError where a moment is not of this model; it would be broadcast."""
        for field_name, tensors in self.state.moments().items():
            for name, tensor in tensors.items():
                if name not in x or x[name].shape != tensor.shape:
                    shape = list(x[name].shape) if name in x else None
                    raise ValueError(
                        f"{type(self).__name__} keeps {field_name} of {name!r} as "
                        f"{list(tensor.shape)}, but the model has {shape}; restore the state of "
                        "this model, or begin with a new object"
                    )

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample clients for federated evaluation."""
        wire, x = self._encoded(arrays)
        said = ConfigRecord({**config, **self.codecs.instructions(x, train=False)})
        return self._messages(server_round, wire, said, grid, MessageType.EVALUATE)

    # --- up ---------------------------------------------------------------------------
    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add up the replies as they come; the state moves on only if the round counts.

        Raises
        ------
        QuorumError
            If fewer than ``min_replies`` of the cohort replied usably.
        """
        client = Addressees(self._sent)
        good = accepted(
            in_order(self._grid, replies, lambda reply: self._turn(client(reply))),
            self._expected,
            self.weighted_by_key,
            server_round,
            self.report,
            client,
            self.required_metrics,
            self._decode,
        )
        buffers, clients = BufferMean(self.buffers), list[int]()
        updates = self._updates(good, client, buffers, clients)
        first = next(updates, None)
        following: S | None = None
        if first is not None:
            x = {name: wide(tensor) for name, tensor in trained(self._global, self.buffers).items()}
            held = [first]
            del first  # one reply at a time is held, this one too
            following = self.aggregate(replace(self.state, x=x), _chained(held, updates))
        # they hold the old model
        sent, self._sent, self._global, self._decode = self._global, [], {}, None
        check_quorum(self.report, self.min_replies, server_round, "" if self._heard else self.needs)
        self._heard = self._heard or self.report.clients > 0
        if following is None:
            reason = self.report.refused[0] if self.report.refused else "no client replied"
            log(
                ERROR,
                "round %d: no reply could be used (%s); the model stays",
                server_round,
                reason,
            )
            return None, None
        entries = {**following.x, **buffers.value}
        arrays = {name: entries[name].to(tensor.dtype) for name, tensor in sent.items()}
        self._check_finite(arrays, server_round)
        self.state = replace(following, x={})
        self.norm_bound.accept()
        if self.keeps_on_clients:
            self.versions.accept(clients)
        contents = [RecordDict({"metrics": metrics}) for metrics in self.report.metrics]
        return to_record(arrays), self.train_metrics_aggr_fn(contents, self.weighted_by_key)

    def _check_finite(self, arrays: Tensors, server_round: int) -> None:
        for name, tensor in arrays.items():
            if not is_finite(tensor):
                raise DivergedError(
                    f"round {server_round}: {type(self).__name__} with {self.config} made {name!r} "
                    "non-finite; lower the server's or the clients' learning rate"
                )

    def _updates(
        self,
        replies: Iterable[Message],
        client_of_reply: Addressees,
        buffers: BufferMean,
        clients: list[int],
    ) -> Iterator[Update]:
        """Yield the trained entries of each reply; note its client, take in its buffers."""
        for reply in replies:
            content = reply.content
            reply.content = RecordDict()  # whoever still holds the message holds no model
            _, record = first_arrays(content)
            entries, extra = from_namespaces(to_tensors(record))
            metrics = next(iter(metric_records(content).values()))
            weight = float(metrics[self.weighted_by_key])  # type: ignore[arg-type]
            clients.append(client_of_reply(reply))
            buffers.add(entries, weight)
            arrays = {name: wide(tensor) for name, tensor in trained(entries, self.buffers).items()}
            if self.watch is not None:
                self.watch(arrays)
            del content, entries, record
            yield Update(clients[-1], weight, arrays, metrics, extra)
            del arrays, extra  # before the next client trains
