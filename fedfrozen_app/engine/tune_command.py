"""What ``fedfrozen tune-warmup`` does, beside reading its command line."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.engine.rounds import CLIENT_APP
from fedfrozen_app.engine.tune import Candidate, Tuning, tune_warmup, tuning_config
from fedfrozen_app.models.registry import model_spec
from fedfrozen_app.models.weights import check_weights
from fedfrozen_app.runs.summary import format_bytes
from fedfrozen_app.training.worker import resident


def read_ratios(text: str) -> list[float]:
    """Return the numbers of a comma-separated list; raise ConfigError for anything else."""
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"ratios must be numbers such as 0.2,0.4,1, got {text!r}") from None


def print_tuning(
    config: RunConfig, ratios: Sequence[float], console: Console, out: Path | None = None
) -> Tuning:
    """Try the ratios, print the table, the choice and what was saved; write JSON to ``out``."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    config = tuning_config(config)
    model_spec(config)
    check_weights(config)

    def show(one: Candidate) -> None:
        console.print(f"warm-up {one.warmup_rounds}: validation loss {one.validation_loss:.4f}")

    clients = resident(config).num_clients
    with LocalGrid(CLIENT_APP, clients, config.to_mapping(), jobs=config.jobs) as grid:
        tuning = tune_warmup(config, grid, ratios, show)
    console.print(table_of(tuning))
    best = tuning.best
    share = tuning.trained_steps / max(1, tuning.separate_steps)
    console.print(
        f"choose warmup-rounds={best.warmup_rounds} of {config.rounds} "
        f"(warmup-ratio={best.ratio:g}); trained {tuning.trained_steps:,} local steps instead of "
        f"{tuning.separate_steps:,} in separate runs ({share:.0%})",
        soft_wrap=True,
        highlight=False,
    )
    if out is not None:
        out.write_text(json.dumps({**asdict(tuning), "best": asdict(best)}, indent=1) + "\n")
    return tuning


def table_of(tuning: Tuning) -> Table:
    """Return one row for every candidate; the choice is marked."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    measure = "val ppl" if tuning.is_text else "val accuracy"
    for column in ("ratio", "warm-up", "val loss", measure, "bytes", "steps", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for one in tuning.candidates:
        table.add_row(
            f"{one.ratio:g}",
            str(one.warmup_rounds),
            f"{one.validation_loss:.4f}",
            tuning.quality(one),
            format_bytes(one.num_bytes),
            f"{one.steps:,}",
            "<- choose" if one is tuning.best else "",
        )
    return table
