"""Which replies may enter the model, and what happened to the others."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from logging import WARNING
from typing import Any

import torch
from flwr.app import Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore import log

from fedfrozen_app.strategies.norm_bound import ImplausibleError
from fedfrozen_app.transport.arrays import to_record, to_tensors
from fedfrozen_app.transport.codec import PACKED, Layout
from fedfrozen_app.transport.payload import (
    CLIENT_APP,
    NAMESPACES,
    first_arrays,
    is_extra,
    missing_digest,
    round_and_client,
)
from fedfrozen_app.transport.records import array_records, metric_records

NON_FINITE = "non-finite values"
ENCODED = "encoded arrays"  # among what clients answer with
SECURE_AGGREGATION = (
    "secure aggregation cannot be used here: Flower drives its mods (secagg_mod, secaggplus_mod) "
    "from its legacy workflow alone, which sends and sums one flat vector, and no strategy of "
    "flwr.serverapp has that protocol; take them out of ClientApp(mods=[...])"
)
MODS_OUTSIDE = (
    "; mods that look at arrays come after active_entries: "
    "ClientApp(mods=[active_entries(), fixedclipping_mod])"
)
LONGEST_REASON = 400  # characters
MAX_COUNT = 10**7  # of what a client says it counted
ANSI_STYLE = re.compile(r"\x1b\[[0-9;]*m")
Decode = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


@dataclass
class RoundReport:
    """What happened to a round's replies."""

    cohort: int = 0
    clients: int = 0
    metrics: list[MetricRecord] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)  # why clients can never take part

    @property
    def dropped(self) -> int:
        """Number of sampled clients whose reply did not enter the model."""
        return self.cohort - self.clients

    @property
    def diverged(self) -> bool:
        """Whether a reply had values that are not finite."""
        return any(NON_FINITE in reason for reason in self.refused)

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
    """Too few usable replies to go on with.

    ``diverges`` says that some were not finite, which another cohort would not change.
    """

    def __init__(self, message: str, *, diverges: bool = False) -> None:
        super().__init__(message)
        self.diverges = diverges


class UnfitClientsError(ValueError):
    """No client can ever answer: its mods and the strategy do not go together."""


def any_float(layout: Layout) -> Layout:
    """Return a layout in which a float may have any width."""
    return {
        name: (shape, "float*" if dtype.startswith("float") else dtype)
        for name, (shape, dtype) in layout.items()
    }


def refusal(
    reply: Message,
    expected: Layout,
    weight_key: str,
    server_round: int,
    required_metrics: Sequence[str] = (),
) -> str | None:
    """Return why a train reply must not enter the model, or None if it may.

    Checked: an error reply, one array and one metric record, exactly the expected
    entries with their shapes and dtypes, all values finite, a positive finite weight and
    required metrics, and the round, where the reply names it.
    """
    if reply.has_error():
        return last_line(reply)
    if missing_digest(reply) is not None:
        return "lacks the frozen block"
    content = reply.content
    if len(array_records(content)) != 1 or len(metric_records(content)) != 1:
        return (
            f"expected one array and one metric record, got {len(array_records(content))} "
            f"and {len(metric_records(content))}"
        )
    group = round_and_client(reply)
    if group is not None and group[0] != server_round:
        return f"reply of round {group[0]} came in round {server_round}"
    metrics = next(iter(metric_records(content).values()))
    if metrics.get(weight_key) == 0:
        return "no training examples"
    if reason := _number_refusal(metrics, weight_key):
        return reason
    for key in required_metrics:
        if reason := _number_refusal(metrics, key) or _count_refusal(metrics, key):
            return reason
    return _array_refusal(content, expected)


def last_line(reply: Message) -> str:
    """Return what an error reply says happened.

    Flower's runtime gives a whole traceback in colour, whose last line that is.
    """
    lines = ANSI_STYLE.sub("", reply.error.reason or "").strip().splitlines()
    return lines[-1].strip() if lines else f"error code {reply.error.code}"


def unfitness(reply: Message) -> str | None:
    """Return why a client's mods can never answer such a message, None if nothing says so."""
    if not reply.has_error():
        return None
    if "secaggplus" in (reply.error.reason or ""):  # in the traceback's paths
        return SECURE_AGGREGATION
    reason = last_line(reply)
    if CLIENT_APP in reason:
        return reason
    if reply.error.code != ErrorCode.MOD_FAILED_PRECONDITION:
        return None
    return reason + (MODS_OUTSIDE if "exactly one ArrayRecord" in reason else "")


def _number_refusal(metrics: MetricRecord, key: str) -> str | None:
    value = metrics.get(key)
    if value is None:
        return f"metric {key!r} is missing"
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        return f"metric {key!r} must be a finite number > 0, got {value!r}"
    return None


def _count_refusal(metrics: MetricRecord, key: str) -> str | None:
    value = float(metrics[key])  # type: ignore[arg-type]
    if value == int(value) and value <= MAX_COUNT:
        return None
    return f"metric {key!r} must be a whole number <= {MAX_COUNT}, got {value!r}"


def _metric_refusal(reply: Message, report: RoundReport) -> str | None:
    kinds = _metric_kinds(next(iter(metric_records(reply.content).values())))
    if not report.metrics or kinds == (first := _metric_kinds(report.metrics[0])):
        return None
    differ = sorted(key for key in kinds.keys() | first.keys() if kinds.get(key) != first.get(key))
    return f"metrics {differ} are not those of the round's first reply"


def _metric_kinds(record: MetricRecord) -> dict[str, int]:
    """Return -1 for a number and the length of a list, by key."""
    return {key: len(value) if isinstance(value, list) else -1 for key, value in record.items()}


def _array_refusal(content: RecordDict, expected: Layout) -> str | None:
    record = next(iter(array_records(content).values()))
    if missing := [name for name in expected if name not in record]:
        special = is_extra(missing[0], (*NAMESPACES, PACKED))
        hint = "; clients of this rule answer with ClientRules" if special else ""
        return f"{len(missing)} entries are missing, first {missing[0]!r}{hint}"
    if extra := [name for name in record if name not in expected]:
        return f"{len(extra)} unexpected entries, first {extra[0]!r}"
    for name, (shape, dtype) in expected.items():
        array = record[name]
        if tuple(array.shape) != shape or not fnmatchcase(array.dtype, dtype):
            return f"{name} is {array.dtype}{list(array.shape)}, expected {dtype}{list(shape)}"
    try:
        tensors = to_tensors(record)
    except Exception as error:  # numpy has many ways to say that bytes are no array
        return f"arrays cannot be read: {type(error).__name__}: {error}"
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != expected[name][0]:
            return f"{name} holds {list(tensor.shape)}, but says {list(expected[name][0])}"
        if (held := str(tensor.dtype).removeprefix("torch.")) != record[name].dtype:
            return f"{name} holds {held}, but says {record[name].dtype}"
        if not is_finite(tensor):
            return f"{name} has {NON_FINITE}"
    return None


def _decode(reply: Message, decode: Decode) -> str | None:
    """Put what a reply's arrays stand for in their place; return why that cannot be done."""
    name, record = first_arrays(reply.content)
    try:
        arrays = decode(to_tensors(record))
    except ImplausibleError as error:
        return str(error)
    except ValueError as error:
        return f"cannot be decoded: {error}"
    reply.content = RecordDict({**reply.content, name: to_record(arrays)})
    return None


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite; one pass, and a second only if the sum is not."""
    if not tensor.is_floating_point() or math.isfinite(float(tensor.sum())):
        return True
    return bool(torch.isfinite(tensor).all())


def in_order(
    grid: Grid | None, replies: Iterable[Message], place: Callable[[Message], Any]
) -> Iterable[Message]:
    """Return replies by their place: as they come from an ordered grid, else sorted.

    An ordered grid answers in the order of the messages, so places must follow that: sums of
    floats depend on it, and all engines are to give the same bits.
    """
    return replies if getattr(grid, "ordered", False) else sorted(replies, key=place)


def accepted(
    replies: Iterable[Message],
    expected: Layout,
    weight_key: str,
    server_round: int,
    report: RoundReport,
    client: Callable[[Message], int],
    required_metrics: Sequence[str] = (),
    decode: Decode | None = None,
) -> Iterator[Message]:
    """Yield the replies that may enter the model; count and log the others in ``report``.

    With ``decode``, their arrays are replaced by what it makes of them; where it raises
    ValueError the reply may not enter.

    All metrics of a round have the keys of the first good reply, each a number or a list:
    Flower's aggregation wants that, and ends the run where it is not so.
    """
    for reply in replies:
        reason = refusal(reply, expected, weight_key, server_round, required_metrics)
        reason = reason or _metric_refusal(reply, report)
        if decode is not None:
            reason = reason or _decode(reply, decode)
        if reason:
            unfit = unfitness(reply)
            report.refused.append(f"client {client(reply)}: {_one_line(unfit or reason)}")
            report.unfit += [unfit] if unfit else []
            log(WARNING, "round %d: reply of %s dropped", server_round, report.refused[-1])
            continue
        metrics = next(iter(metric_records(reply.content).values()))
        report.clients += 1
        report.weights.append(float(metrics[weight_key]))  # type: ignore[arg-type]
        report.metrics.append(metrics)
        yield reply


def _one_line(reason: str) -> str:
    """Return what may hold anything a client sent as one short line of a log."""
    line = "".join(c if c.isprintable() else " " for c in reason)
    return line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 3] + "..."


def needs_of(rule: str, answers: Sequence[str]) -> str:
    """Return what to write in a handler whose clients answer with more than a model."""
    return (
        f"clients of {rule} answer with {' and '.join(answers)}: use fedfrozen_app.training."
        "client_rules.ClientRules in the handler as the README shows, or take another rule"
        + (f"; for encoded arrays alone {CLIENT_APP} will do" if ENCODED in answers else "")
    )


def check_share(min_replies: float) -> None:
    """Raise ValueError if ``min_replies`` is no share of a cohort."""
    if not 0 <= min_replies <= 1:
        raise ValueError(
            f"min_replies must be in [0, 1], got {min_replies}; it is a share of the cohort"
        )


def check_quorum(
    report: RoundReport, min_replies: float, server_round: int, needs: str = ""
) -> None:
    """Raise QuorumError if a round has too few usable replies, naming the first reasons.

    ``needs`` is what clients have to do that plain handlers do not, empty where a reply was used
    before.

    Raises
    ------
    UnfitClientsError
        If there is none because of how the clients are set up.
    """
    if report.unfit and report.clients == 0:
        raise UnfitClientsError(f"round {server_round}: {report.unfit[0]}")
    nobody = report.clients == 0 < report.cohort == len(report.refused)
    if needs and nobody and not report.diverged:
        raise UnfitClientsError(
            f"round {server_round}: no reply could be used; {needs}; {report.refused[0]}"
        )
    needed = math.ceil(min_replies * report.cohort - 1e-9)
    if report.clients >= needed:
        return
    unheard = report.cohort - report.clients - len(report.refused)
    reasons = report.refused[:3] + ([f"{unheard} gave no reply"] if unheard > 0 else [])
    if report.diverged:
        reasons.append("training diverges: lower lr or set clip-norm")
    raise QuorumError(
        f"round {server_round}: {report.clients} of {report.cohort} replies are usable, "
        f"{needed} are required (min-replies={min_replies}); " + "; ".join(reasons),
        diverges=report.diverged,
    )
