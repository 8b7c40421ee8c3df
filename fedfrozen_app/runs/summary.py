"""The closing table of a run, read from its metrics."""

from collections.abc import Sequence
from itertools import groupby

from rich import box
from rich.table import Table

from fedfrozen_app.runs.store import RoundMetrics

PHASES = {
    "start": "start",
    "warmup": "warm-up",
    "frozen": "frozen",
    "latent": "latent",
    "full": "all",
}


def format_bytes(count: float) -> str:
    """Return bytes in three digits with a decimal unit, for example ``1.23 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            break
        count /= 1000
    digits = 0 if unit == "B" or count >= 100 else 1 if count >= 10 else 2
    return f"{count:.{digits}f} {unit}"


def closing_table(metrics: Sequence[RoundMetrics], title: str) -> Table:
    """Return one row per phase and one for the whole run.

    Bytes are tensor payload. Those of a client are of the phase's last round: its first
    frozen round also carries the frozen block down.
    """
    caption = "each: one client in the phase's last round, tensor payload"
    table = Table(
        title=title, caption=caption, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    table.add_column("phase", no_wrap=True)
    text = any(line.test_perplexity is not None for line in metrics)
    measure = "ppl" if text else "accuracy"
    columns = ("rounds", measure, "loss", "up each", "down each", "all up", "all down", "s")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for phase, group in groupby(metrics, key=lambda line: line.phase):
        lines = list(group)
        sent = max(1, lines[-1].clients + lines[-1].dropped)
        client = [
            format_bytes(lines[-1].bytes_up / sent),
            format_bytes(lines[-1].bytes_down / sent),
        ]
        table.add_row(PHASES.get(phase, phase), *_row(lines, client))
    trained = [line for line in metrics if line.round > 0]
    if trained:
        table.add_section()
        table.add_row("run", *_row(trained, ["", ""]), style="bold")
    return table


def quality(line: RoundMetrics) -> str:
    """Return what a round's test says, for example ``accuracy 0.8750`` or ``perplexity 91.07``."""
    name = "accuracy" if line.test_perplexity is None else "perplexity"
    return f"{name} {_measure(line)}"


def _row(lines: list[RoundMetrics], client: list[str]) -> list[str]:
    first, last = lines[0].round, lines[-1].round
    tested = [line for line in lines if line.test_accuracy is not None][-1:]
    return [
        str(first) if first == last else f"{first}-{last}",
        _measure(tested[0]) if tested else "-",
        _number(tested[0].test_loss if tested else None),
        *client,
        format_bytes(sum(line.bytes_up for line in lines)),
        format_bytes(sum(line.bytes_down for line in lines)),
        _seconds(sum(line.seconds_total for line in lines)),
    ]


def _measure(line: RoundMetrics) -> str:
    """Return the perplexity of a language model, the accuracy of any other."""
    value = line.test_perplexity
    return _number(line.test_accuracy) if value is None else f"{value:.2f}"


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
