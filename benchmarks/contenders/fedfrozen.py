"""The in-process engine of this project, as ``fedfrozen run`` drives it.

Further arguments are config keys, such as ``eval-every=0``. The rounds are those of
``Federation.run`` itself; only where it reports a round does it wait for the next command.
"""

import logging
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from contenders.conductor import Conductor
from fedfrozen_app.config import RunConfig
from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.engine.rounds import CLIENT_APP, run_federation
from fedfrozen_app.engine.start import prepare
from fedfrozen_app.runs.store import MODEL, RoundMetrics


class Stopped(Exception):
    """The driver wants no more rounds."""


def main() -> None:
    keys = torch.load(sys.argv[1], weights_only=True)["config"]
    given = dict(word.split("=", 1) for word in sys.argv[2:])
    config = RunConfig.from_mapping(keys, given, {"run-name": f"run-{os.getpid()}"})
    logging.getLogger("flwr").setLevel(logging.WARNING)
    worker, _ = prepare(config)
    conductor = Conductor()

    def on_round(metrics: RoundMetrics) -> None:
        if not conductor.next():
            raise Stopped

    with LocalGrid(CLIENT_APP, worker.num_clients, config.to_mapping(), jobs=config.jobs) as grid:
        try:
            run_federation(config, grid, on_round)
        except Stopped:
            conductor.save(load_file(Path(config.run_dir) / config.run_name / MODEL))


if __name__ == "__main__":
    main()
