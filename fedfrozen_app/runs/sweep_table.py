"""What a sweep is going to do and what came out, as tables."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from fedfrozen_app.runs.finished import has_diverged
from fedfrozen_app.runs.store import RoundMetrics, RunFolder
from fedfrozen_app.runs.summary import format_bytes
from fedfrozen_app.runs.sweep import Cell, Sweep
from fedfrozen_app.runs.sweep_cost import (
    cohort,
    examples_per_round,
    examples_per_second,
    payload,
    threads_of,
    total_examples,
)
from fedfrozen_app.runs.sweep_progress import clock

SEED = "seed"  # what results are averaged over
PADDING = (0, 1, 0, 0)
MEASURES = ("best", "loss", "kB up", "kB down", "MB up", "MB down", "s", "runs", "diverged")
COLUMNS = ("accuracy", *MEASURES)  # of result_row; of text the first is the perplexity


@dataclass(frozen=True)
class Result:
    """What one finished run came to; bytes are tensor payload.

    ``quality`` is the perplexity of a language model and the accuracy of any other, of the last
    test; ``best`` is that of the best one. ``up_each`` and ``down_each`` are the bytes of a client
    in the last round: what goes out once, a frozen block or a base, is in the sums only. ``loss``
    is None where it is not finite.
    """

    is_text: bool
    quality: float
    best: float
    loss: float | None
    up_each: float
    down_each: float
    up: float
    down: float
    seconds: float
    diverged: bool


def read_result(folder: RunFolder) -> Result:
    """Return what a finished run came to."""
    lines = folder.metrics()
    tested = [line for line in lines if line.test_accuracy is not None] or lines[:1]
    is_text = any(line.test_perplexity is not None for line in tested)
    values = [_quality(line, is_text) for line in tested]
    last = lines[-1]
    sent = max(1, last.clients + last.dropped)
    up, down = sum(line.bytes_up for line in lines), sum(line.bytes_down for line in lines)
    return Result(
        is_text=is_text,
        quality=values[-1],
        best=min(values) if is_text else max(values),
        loss=tested[-1].test_loss,
        up_each=last.bytes_up / sent,
        down_each=last.bytes_down / sent,
        up=up,
        down=down,
        seconds=sum(line.seconds_total for line in lines),
        diverged=has_diverged(folder),
    )


def _quality(line: RoundMetrics, is_text: bool) -> float:
    if is_text:
        return float("inf") if line.test_perplexity is None else line.test_perplexity
    return line.test_accuracy or 0.0


def group(cells: Sequence[Cell]) -> dict[tuple[str, ...], list[Cell]]:
    """Return the cells that differ in nothing but the seed, by their other labels."""
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        labels = tuple(text for label, text in cell.labels.items() if label != SEED)
        groups.setdefault(labels, []).append(cell)
    return groups


def result_table(sweep: Sweep, finished: Mapping[str, RunFolder]) -> Table:
    """Return a row for every setting, mean +- standard deviation over its finished seeds."""
    results = {name: read_result(folder) for name, folder in finished.items()}
    text = {result.is_text for result in results.values()}
    measure = "perplexity" if text == {True} else "ppl or acc" if len(text) > 1 else "accuracy"
    caption = "kB: of a client in the last round, MB: of the run; tensor payload"
    table = Table(
        title=str(sweep.out.name),
        caption=caption,
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=PADDING,
    )
    for label in [axis.label for axis in sweep.axes if axis.label != SEED]:
        table.add_column(label, no_wrap=True)
    for column in (measure, *MEASURES):
        table.add_column(column, justify="right", no_wrap=True)
    for labels, cells in group(sweep.cells).items():
        table.add_row(*labels, *result_row([results.get(cell.name) for cell in cells]))
    return table


def result_row(results: Sequence[Result | None]) -> list[str]:
    """Return the figures of one setting's runs; None stands for a run that is not finished."""
    done = [result for result in results if result is not None]
    digits = 2 if any(result.is_text for result in done) else 4
    losses = [result.loss for result in done if result.loss is not None]

    def mean(pick: Callable[[Result], float], scale: float = 1.0) -> str:
        return short(statistics.mean(map(pick, done)) / scale) if done else "-"

    return [
        spread([result.quality for result in done], digits),
        spread([result.best for result in done], digits),
        spread(losses, 3),
        mean(lambda result: result.up_each, 1e3),
        mean(lambda result: result.down_each, 1e3),
        mean(lambda result: result.up, 1e6),
        mean(lambda result: result.down, 1e6),
        mean(lambda result: result.seconds),
        f"{len(done)}/{len(results)}",
        f"{sum(result.diverged for result in done)}/{len(done)}",
    ]


def spread(values: Sequence[float], digits: int) -> str:
    """Return mean +- standard deviation, of a single value the value."""
    if not values:
        return "-"
    if not all(map(math.isfinite, values)):
        return "inf"
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} +- {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def short(value: float) -> str:
    """Return about three digits, never with an exponent."""
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2 if value >= 0.9995 else 3
    return f"{value:,.{digits}f}"


# --- before it runs -----------------------------------------------------------------------
def plan_table(sweep: Sweep, finished: Mapping[str, RunFolder]) -> Table:
    """Return a row for every cell: whether it is done, and how much training it is."""
    table = Table(title=str(sweep.out), box=box.SIMPLE_HEAD, pad_edge=False, padding=PADDING)
    for column in ("run", "state"):
        table.add_column(column, no_wrap=True)
    for column in ("rounds", "clients", "examples a round", "payload", "bytes of a client"):
        table.add_column(column, justify="right", no_wrap=True)
    for cell in sweep.cells:
        examples = examples_per_round(cell.config)
        budget = cell.config.byte_budget
        table.add_row(
            cell.name,
            state(finished.get(cell.name)),
            str(cell.config.rounds),
            str(cohort(cell.config)),
            f"all, {cell.config.local_epochs} x" if examples is None else f"{examples:,}",
            "-" if (sent := payload(cell.config)) is None else format_bytes(sent),
            f"<= {format_bytes(budget)}" if budget else "-",
        )
    return table


def state(folder: RunFolder | None) -> str:
    """Return ``to run``, ``done`` or ``diverged``."""
    if folder is None:
        return "to run"
    return "diverged" if has_diverged(folder) else "done"


def plan_summary(cells: Sequence[Cell], finished: Iterable[RunFolder] = (), jobs: int = 1) -> str:
    """Return how much there is to do in cells that are not done, and how long that may take.

    The time is what it takes ``jobs`` at once, at the speed of the runs that are done.
    """
    configs = [cell.config for cell in cells]
    trainings = sum(config.rounds * cohort(config) for config in configs)
    parts = [
        f"{len(configs)} to run: {sum(config.rounds for config in configs):,} rounds",
        f"{trainings:,} trainings of a client",
    ]
    if (total := total_examples(configs)) is not None:
        parts.append(f"up to {total:,} examples")
        if (speed := examples_per_second(finished)) is not None:
            speed *= min(threads_of(config, jobs) for config in configs)
            parts.append(f"{clock(total / speed)} at the {speed:,.0f} a second of the runs done")
    sent = [payload(config) for config in configs]
    if None not in sent:
        parts.append(f"up to {format_bytes(sum(each or 0 for each in sent))} of payload")
    return ", ".join(parts)
