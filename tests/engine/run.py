"""A whole run of the app on the bundled digits, in this process, and what it left."""

from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from fedfrozen_app.config import RunConfig
from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.engine.rounds import run_federation
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.runs.store import OnRound, RoundMetrics
from fedfrozen_app.training.worker import resident

SMALL: dict[str, Any] = {
    "num-clients": 3,
    "rounds": 3,
    "max-train-examples": 251,
    "max-test-examples": 97,
    "weights": "none",
    "public-fraction": 0.0,
    "weight-decay": 0.05,
    "momentum": 0.9,
    "lr": 0.05,
    "threads": 1,
}


def small_config(root: Path, cache: str, **keys: Any) -> RunConfig:
    values = {**SMALL, "run-dir": str(root), "cache-dir": cache}
    values.update({key.replace("_", "-"): value for key, value in keys.items()})
    return RunConfig.from_mapping(values)


class Run:
    """A finished run; ``nodes`` fewer than its clients make the nodes share the data."""

    def __init__(
        self,
        root: Path,
        cache: str,
        *,
        nodes: int = 0,
        on_round: OnRound = lambda metrics: None,
        **keys: Any,
    ) -> None:
        self.config = small_config(root, cache, **keys)
        self.reported: list[RoundMetrics] = []

        def report(metrics: RoundMetrics) -> None:
            self.reported.append(metrics)
            on_round(metrics)

        grid = LocalGrid(
            "fedfrozen_app.client_app:app",
            nodes or resident(self.config).num_clients,
            self.config.to_mapping(),
            jobs=self.config.jobs,
        )
        with grid:
            self.folder = run_federation(self.config, grid, report)
        self.model = safetensors.torch.load_file(self.folder.path / "model.safetensors")
        self.metrics = self.folder.metrics()

    def comparable(self) -> list[dict[str, Any]]:
        """The metrics without what a clock measures."""
        return [
            {k: v for k, v in vars(line).items() if not k.startswith("seconds")}
            for line in self.metrics
        ]


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def frozen_half(run: Run) -> dict[str, torch.Tensor]:
    return Selection.build("query-key", run.model).split(run.model)[1]
