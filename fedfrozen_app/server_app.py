"""The Flower ServerApp: config -> parts -> run."""

import os
from logging import INFO
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore import log

from fedfrozen_app.config import RunConfig
from fedfrozen_app.engine.rounds import run_federation
from fedfrozen_app.runs.store import RoundMetrics
from fedfrozen_app.runs.summary import quality

app = ServerApp()


def home() -> Path:
    """Return where runs of Flower's runtime go: its working directory is not the app's."""
    return Path(os.environ.get("FEDFROZEN_HOME", "~/.fedfrozen")).expanduser()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation that the run config describes."""
    config = RunConfig.from_mapping(context.run_config, {"engine": "flwr"})
    run_dir = str(home() / config.run_dir)  # an absolute run-dir stands for itself
    config = config.model_copy(update={"run_dir": run_dir})
    folder = run_federation(config, grid, log_round)
    log(INFO, "run folder: %s", folder.path)


def log_round(metrics: RoundMetrics) -> None:
    """Log one line for a round."""
    tested = "" if metrics.test_accuracy is None else f" {quality(metrics)}"
    log(
        INFO,
        "round %d (%s):%s up %d B down %d B, %d clients, %d dropped",
        metrics.round,
        metrics.phase,
        tested,
        metrics.bytes_up,
        metrics.bytes_down,
        metrics.clients,
        metrics.dropped,
    )
