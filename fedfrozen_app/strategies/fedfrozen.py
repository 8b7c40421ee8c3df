"""FedFrozen (arXiv:2605.06446): train everything, then freeze the attention kernel.

Phi = the query and key weights and biases of every attention layer, theta = the rest.

Rounds 1..T_warm: any federated rule on (Phi, theta) together.
Freeze: Phi_bar = Phi at the end of round T_warm, broadcast once.
Rounds T_warm+1..T: clients minimise F_k(Phi_bar, theta) + (lambda/2) ||theta_V||^2 with
Phi_bar constant; only theta travels, in both directions.

``FedFrozen`` wraps any Flower strategy, as Flower's own differential-privacy wrappers do.
Our own rules see the active entries only. A stock strategy is shown whole models, since
some break when the set of entries changes, and the frozen entries of what it returns are
set back to their exact values.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from logging import ERROR, INFO, WARNING
from typing import Any, ClassVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore import log

from fedfrozen_app.models.selection import Selection, value_rows
from fedfrozen_app.strategies.base import ServerRule
from fedfrozen_app.strategies.fedavg import FedAvg
from fedfrozen_app.strategies.mean import Tensors
from fedfrozen_app.strategies.replies import (
    ENCODED,
    RoundReport,
    UnfitClientsError,
    accepted,
    any_float,
    check_quorum,
    check_share,
    in_order,
    needs_of,
)
from fedfrozen_app.strategies.scaffold import Scaffold
from fedfrozen_app.strategies.schedule import FreezeSchedule, in_words
from fedfrozen_app.strategies.versions import ClientVersions
from fedfrozen_app.transport.arrays import to_record, to_tensors
from fedfrozen_app.transport.block import FrozenBlock
from fedfrozen_app.transport.codec import layout_of_tensors
from fedfrozen_app.transport.codecs import Codecs
from fedfrozen_app.transport.order import order_of
from fedfrozen_app.transport.payload import (
    CLIENT_APP,
    NUM_EXAMPLES,
    Addressees,
    attach_frozen,
    client_of,
    first_arrays,
    instruct,
)

NOBODY = "no reply could be used, so the model stays; once something is frozen, clients "

INSIDE = (
    "FedFrozen is driven by something else: neither its start() nor its check() was called. In a "
    "wrapper, it would clip and noise whole models beside replies of active entries only; wrap "
    "the other way round: FedFrozen(strategy=DifferentialPrivacyServerSideFixedClipping(FedAvg(), "
    "...)). A loop of your own calls check(arrays) first"
)


def weight_key(strategy: Any) -> str:
    """Return the metric a strategy weights replies by, looking into wrappers of wrappers."""
    while strategy is not None:
        if isinstance(key := getattr(strategy, "weighted_by_key", None), str):
            return key
        strategy = getattr(strategy, "strategy", None)
    return NUM_EXAMPLES


def warmup_of_ratio(ratio: float | None, num_rounds: int) -> int:
    """Return T_warm; the default where there is no ratio."""
    # here, so that a Flower project that only imports the strategies does not wait for pydantic
    from fedfrozen_app.config import DEFAULT_WARMUP_RATIO, rounds_of_ratio

    return rounds_of_ratio(DEFAULT_WARMUP_RATIO if ratio is None else ratio, num_rounds)


def check_wrapped(strategy: Any) -> None:
    """Raise ValueError for a rule that sends more or less than a model in a foreign wrapper.

    And for what is no strategy of Flower's message API.
    """
    if strategy is not None and not isinstance(strategy, Strategy):
        kind = strategy if isinstance(strategy, type) else type(strategy)
        raise ValueError(
            f"FedFrozen wraps a strategy of flwr.serverapp.strategy, got {kind.__module__}."
            f"{kind.__qualname__}; Flower's legacy strategies, and with them its secure "
            "aggregation, speak another protocol"
        )
    while strategy is not None:
        if isinstance(strategy, FedFrozen):
            raise ValueError(
                "FedFrozen wraps a strategy that freezes already; write all stages into one, "
                "FedFrozen(schedule=FreezeSchedule(...))"
            )
        inner = getattr(strategy, "strategy", None)
        if isinstance(inner, Scaffold):
            raise ValueError(
                f"{type(strategy).__name__} does not know the controls in SCAFFOLD's messages; "
                "wrap Scaffold in FedFrozen alone"
            )
        if isinstance(inner, ServerRule) and inner.codecs.are_used:
            raise ValueError(
                f"{type(strategy).__name__} does not know encoded models, as the inner "
                f"{type(inner).__name__} has them; set compression and broadcast on FedFrozen"
            )
        strategy = inner


def check_value_rows(value_l2: float, arrays: ArrayRecord, selection: Selection) -> None:
    """Raise ValueError if no value row trains under a selection."""
    if not selection.locate(value_rows(arrays)):
        raise ValueError(
            f"value-l2={value_l2} has no effect with frozen={selection.spec}: all value rows are "
            "frozen; set value-l2=0 or freeze something else, for example frozen=query-key"
        )


@dataclass
class FreezeState:
    """What crosses rounds: the selection in force and the block it freezes, None = nothing."""

    spec: str = ""
    block: FrozenBlock | None = None


class FedFrozen(Strategy):
    """Wrap a strategy so that part of the model is frozen, and stays home, after a warm-up.

    Parameters
    ----------
    strategy : Strategy, optional
        The rule that averages; by default our streaming ``FedAvg`` with ``**fedavg``.
    warmup_rounds : int, optional
        T_warm, rounds that train everything; 0 freezes from round 1.
    warmup_ratio : float, optional
        T_warm as a share of ``num_rounds`` of :meth:`start`, in [0, 1]; 0.4 if neither is
        given.
    frozen : str
        What the freeze stops: ``query-key`` (the paper), ``value-head``, ``head`` or name
        patterns, see :class:`fedfrozen_app.models.selection.Selection`.
    schedule : FreezeSchedule, optional
        Any number of stages instead of one warm-up.
    value_l2 : float
        lambda of (lambda/2) ||W_V||^2 on the value rows after the freeze. It is sent to the
        clients, which read it as ``Payload.value_l2`` and add it to their loss.
    min_replies : float
        Share of the cohort, in [0, 1], that must reply usably; fewer end the run. For a
        wrapped rule of ours, set it there.
    compression, broadcast : str
        Codecs of uploads and of what is sent out, as in :class:`ServerRule`, for a stock
        strategy, which sees decoded models. For a wrapped rule of ours, set them there.
    **fedavg : Any
        Arguments of the default inner strategy.
    """

    frozen_clients: ClassVar[str] = (  # what clients do once something is frozen
        f"need {CLIENT_APP} of fedfrozen_app.mods, or read messages with open_payload and reply "
        "with the active entries"
    )

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        warmup_rounds: int | None = None,
        warmup_ratio: float | None = None,
        frozen: str = "query-key",
        schedule: FreezeSchedule | None = None,
        value_l2: float = 0.0,
        min_replies: float = 0.0,
        compression: str = "none",
        broadcast: str = "none",
        **fedavg: Any,
    ) -> None:
        if strategy is not None and fedavg:
            raise ValueError(
                f"{sorted(fedavg)} belong to the default inner FedAvg; set them on the wrapped "
                f"{type(strategy).__name__} instead"
            )
        if (warmup_rounds, warmup_ratio, schedule).count(None) < 2:
            raise ValueError("give one of warmup_rounds, warmup_ratio and schedule, not several")
        if warmup_ratio is not None and not 0 <= warmup_ratio <= 1:
            raise ValueError(f"warmup_ratio must be in [0, 1], got {warmup_ratio}")
        if value_l2 < 0:
            raise ValueError(f"value_l2 must be >= 0, got {value_l2}")
        check_share(min_replies)
        codecs: dict[str, Any] = {"compression": compression, "broadcast": broadcast}
        given = [key for key, value in codecs.items() if value != "none"]
        given += ["min_replies"] if min_replies > 0 else []
        if given and isinstance(strategy, ServerRule):
            raise ValueError(f"set {given[0]} on the wrapped {type(strategy).__name__} instead")
        check_wrapped(strategy)
        self.codecs = Codecs(compression, broadcast)  # of a stock strategy
        self.versions = ClientVersions()  # of what its clients keep
        self.strategy = strategy or FedAvg(min_replies=min_replies, **codecs, **fedavg)
        self.value_l2, self.min_replies = value_l2, min_replies
        self.timeout = 3600.0  # seconds for the replies of clients that are sent the block again
        self.state = FreezeState()
        self._frozen_spec = frozen
        self._schedule, self._warmup_ratio = schedule, warmup_ratio
        self._by_ratio = warmup_rounds is None and schedule is None
        if warmup_rounds is not None:
            self._schedule = FreezeSchedule.warmup(warmup_rounds, frozen)
        self._selection: Selection | None = None  # None: everything is trained
        self._selected = ""  # spec of _selection
        self._heard = False  # whether a reply was used since the selection came into force
        self._heard_before = False  # whether one was used in an earlier stage
        self._sent: list[Message] = []
        self._report = RoundReport()
        self._grid: Grid | None = None
        self._x: Tensors = {}  # the active entries that a stock strategy's clients start from
        self._dtypes: dict[str, torch.dtype] = {}  # of the model as the run started
        self._restored = False
        self._checked = False  # whether whoever drives the rounds knows this for a FedFrozen

    # --- the rounds -------------------------------------------------------------------
    @property
    def schedule(self) -> FreezeSchedule:
        """The stages.

        Raises
        ------
        ValueError
            If only a ratio is known and not the number of rounds.
        """
        if self._schedule is None:
            raise ValueError(
                "warmup_ratio needs the number of rounds: call start(num_rounds=...), or give "
                "warmup_rounds"
            )
        return self._schedule

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the federation as Flower's ``Strategy.start`` does.

        A second run with the same object freezes afresh; a wrapped strategy that keeps
        state of its own, such as a server momentum, still has it.

        Raises
        ------
        ValueError
            After ``load_state_dict``: this would begin at round 1 and thaw the model. Go on
            with ``configure_train`` and ``aggregate_train`` from the round after the saved one.
        """
        if self._restored:
            raise ValueError(
                "a restored run cannot go on with start(), which begins at round 1 and would thaw "
                "the model; call configure_train and aggregate_train for the rounds that are left"
            )
        if self._by_ratio:
            warmup = warmup_of_ratio(self._warmup_ratio, num_rounds)
            self._schedule = FreezeSchedule.warmup(warmup, self._frozen_spec)
        self.check(initial_arrays)
        if not self.is_frozen(num_rounds):
            log(WARNING, "nothing is frozen in any of the %d rounds", num_rounds)
        self.state, self._selection, self._selected = FreezeState(), None, ""
        self._dtypes, self.timeout = {}, timeout
        return super().start(
            grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn
        )

    def check(self, arrays: ArrayRecord) -> None:
        """Raise ValueError, before any training, if a stage cannot work with this model.

        ``start`` calls this; a loop of one's own does so before its first ``configure_train``.
        """
        for spec in self.schedule.specs():
            selection = Selection.build(spec, arrays)
            if self.value_l2 > 0 and spec != self.schedule.always:
                check_value_rows(self.value_l2, arrays, selection)
        self._checked = True

    def is_frozen(self, server_round: int) -> bool:
        """Whether more is frozen in a round than what the schedule never trains."""
        return self.schedule.spec(server_round) != self.schedule.always

    @property
    def report(self) -> RoundReport:
        """What happened to the last round's replies."""
        inner = self.strategy
        return inner.report if isinstance(inner, ServerRule) else self._report

    def summary(self) -> None:
        """Log the stages and the inner strategy."""
        if self._schedule is None:  # a ratio, and start() has not said of how many rounds
            said = f"nothing; after the warm-up: {in_words(self._frozen_spec)}"
        else:
            said = self._schedule.describe()
        log(INFO, "\t├──> Frozen: %s", said)
        self.strategy.summary()

    def _enter(self, server_round: int, tensors: Tensors) -> None:
        """Take up the selection of a round; at a change, fix the block it freezes."""
        spec = self.schedule.spec(server_round)
        if spec == self.state.spec and self._selected == spec:
            return
        selection = Selection.build(spec, tensors)
        if spec != self.state.spec:  # else the state was restored
            _, frozen = selection.split(tensors)
            self.state = FreezeState(spec, FrozenBlock.of(frozen) if frozen else None)
            self._heard_before, self._heard = self._heard_before or self._heard, False
            if isinstance(self.strategy, ServerRule):
                self.strategy.select(selection)
            else:
                self.versions.select(selection.spec)
        self._selected, self._selection = spec, None if selection.is_all else selection

    def _tensors(self, arrays: ArrayRecord) -> Tensors:
        """Return entries in the dtypes of the start: stock strategies may return fp64."""
        tensors = to_tensors(arrays)
        if not self._dtypes:
            self._dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        return {name: t.to(self._dtypes.get(name, t.dtype)) for name, t in tensors.items()}

    # --- down -------------------------------------------------------------------------
    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the inner strategy address the clients; send active entries only.

        Raises
        ------
        ValueError
            If none of ``start``, ``check`` and ``load_state_dict`` was called before, as in
            another strategy's hands.
        """
        if not (self._checked or self._restored):
            raise ValueError(INSIDE)
        shown, active = self._shown(server_round, arrays)
        messages = self.strategy.configure_train(server_round, shown, config, grid)
        dressed = self._dress(messages, active, grid)
        self._instruct(dressed)
        self._report = RoundReport(cohort=len(dressed))
        return dressed

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the inner strategy address the clients; send active entries only."""
        shown, active = self._shown(server_round, arrays)
        messages = self.strategy.configure_evaluate(server_round, shown, config, grid)
        dressed = self._dress(messages, active, grid, train=False)
        self._instruct(dressed, train=False)
        return dressed

    def _instruct(self, messages: Iterable[Message], *, train: bool = True) -> None:
        """Tell a stock strategy's clients of the codecs."""
        if isinstance(self.strategy, ServerRule):
            return
        said = self.codecs.instructions(self._x, train=train)
        for message in messages if said else ():
            client = client_of(message, message.metadata.dst_node_id)
            has_feedback = train and self.codecs.has_feedback
            instruct(
                message, {**said, **(self.versions.instructions(client) if has_feedback else {})}
            )

    def _shown(self, server_round: int, arrays: ArrayRecord) -> tuple[ArrayRecord, ArrayRecord]:
        """Return what the inner strategy sees and what travels."""
        tensors = self._tensors(arrays)
        self._enter(server_round, tensors)
        if not isinstance(self.strategy, ServerRule):
            half = tensors if self._selection is None else self._selection.split(tensors)[0]
            wire, self._x = self.codecs.send(half)
            if wire is not self._x:
                return to_record(self._whole(self._x)), to_record(wire)
        if self._selection is not None:
            active = to_record(self._selection.split(tensors)[0])
            return (active if isinstance(self.strategy, ServerRule) else arrays), active
        whole = to_record(tensors)
        same = all(whole[name].dtype == array.dtype for name, array in arrays.items())
        return arrays, arrays if same else whole

    def _dress(
        self, messages: Iterable[Message], active: ArrayRecord, grid: Grid, *, train: bool = True
    ) -> list[Message]:
        stock = not isinstance(self.strategy, ServerRule)
        self._grid = grid
        self._sent = list(messages)
        for message in self._sent:
            name, record = first_arrays(message.content)
            if stock and record is not active:  # our own rules were shown what travels
                message.content = RecordDict({**message.content, name: active})
        if self.state.block is not None:
            value_l2 = self.value_l2 if self.state.spec != self.schedule.always else 0.0
            order = () if self._selection is None else order_of(self._selection)
            self.state.block.dress(self._sent, self.state.spec, value_l2, order)
        elif train:
            for message in self._sent:  # what cannot bear the block is to say so now
                attach_frozen(message, ArrayRecord())
        return list(self._sent)

    # --- up ---------------------------------------------------------------------------
    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Let the inner strategy average; return whole models, frozen entries untouched."""
        stream = self._complete(replies)
        if isinstance(self.strategy, ServerRule):
            arrays, metrics = self.strategy.aggregate_train(server_round, stream)
        else:
            arrays, metrics = self._aggregate_stock(server_round, stream)
        self._sent = []  # they hold the old model in memory
        self._check_heard(server_round)
        if arrays is None or self._selection is None or self.state.block is None:
            return arrays, metrics
        active = to_tensors(arrays)
        if not isinstance(self.strategy, ServerRule):
            active, _ = self._selection.split(self._tensors(arrays))
        return to_record(self._selection.merge(active, self.state.block.tensors)), metrics

    def _check_heard(self, server_round: int) -> None:
        """Raise UnfitClientsError if a freeze leaves nobody who could answer."""
        report = self.report
        self._heard = self._heard or report.clients > 0
        if report.clients > 0 or self.state.block is None:
            return
        said = f"round {server_round}: {NOBODY}{self.frozen_clients}"
        log(ERROR, said)
        if not self._heard and 0 < report.cohort == len(report.refused) and not report.diverged:
            raise UnfitClientsError(f"{said}; {report.refused[0]}")

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Let the inner strategy average the metrics."""
        return self.strategy.aggregate_evaluate(server_round, list(self._complete(replies)))

    def _aggregate_stock(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Show a stock strategy the usable replies in client order, as whole models."""
        client, key, report = Addressees(self._sent), weight_key(self.strategy), self._report
        ordered = in_order(self._grid, replies, client)
        decode = None
        expected = any_float(layout_of_tensors(self._x))
        if self.codecs.up is not None:
            expected = self.codecs.expected(self._x)
            decode = partial(self.codecs.receive, x=self._x)
        good = list(accepted(ordered, expected, key, server_round, report, client, decode=decode))
        self._x = {}
        new = self.codecs.are_used and not (self._heard or self._heard_before)
        needs = needs_of("FedFrozen(compression=..., broadcast=...)", [ENCODED]) if new else ""
        check_quorum(report, self.min_replies, server_round, needs)
        for reply in good:
            name, record = first_arrays(reply.content)
            whole = self._whole(self._tensors(record))
            reply.content = RecordDict({**reply.content, name: to_record(whole)})
        arrays, metrics = self.strategy.aggregate_train(server_round, good)
        if arrays is not None and self.codecs.has_feedback:
            self.versions.accept(map(client, good))
        return arrays, metrics

    def _whole(self, active: Tensors) -> Tensors:
        """Return the whole model of an active half."""
        if self._selection is None or self.state.block is None:
            return active
        return self._selection.merge(active, self.state.block.tensors)

    def _complete(self, replies: Iterable[Message]) -> Iterable[Message]:
        """Return replies, those that asked for the block replaced by what they said next."""
        if self.state.block is None or self._grid is None:
            return replies
        return self.state.block.complete(replies, self._grid, self.timeout)

    # --- state ------------------------------------------------------------------------
    @property
    def digest(self) -> str:
        """Digest of the frozen block in force, empty if nothing is frozen."""
        return self.state.block.digest if self.state.block is not None else ""

    def state_dict(self) -> dict[str, Any]:
        """Return the freeze state and, for our own rules, the inner state."""
        inner = self.strategy.state_dict() if isinstance(self.strategy, ServerRule) else {}
        block = self.state.block.state_dict() if self.state.block is not None else {}
        dtypes = {name: str(dtype).removeprefix("torch.") for name, dtype in self._dtypes.items()}
        return {
            "spec": self.state.spec,
            "block": block,
            "inner": inner,
            "dtypes": dtypes,
            "versions": self.versions.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state returned by :meth:`state_dict`."""
        self._restored = self._heard = True
        block = FrozenBlock.from_state_dict(state["block"]) if state["block"] else None
        self.state = FreezeState(state["spec"], block)
        self._dtypes = {name: getattr(torch, dtype) for name, dtype in state["dtypes"].items()}
        if isinstance(self.strategy, ServerRule):
            self.strategy.load_state_dict(state["inner"])
        self.versions.load_state_dict(state["versions"])
