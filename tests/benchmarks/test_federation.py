import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedfrozen_app.config import RunConfig
from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.engine.rounds import CLIENT_APP, run_federation

ROUNDS = 2


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    """The config and the task file of the tiny workload."""
    from workloads import WORKLOADS, config_of, write_task

    folder = tmp_path_factory.mktemp("tiny")
    config = config_of(WORKLOADS["tiny"], folder)
    write_task(config, folder / "task.pt")
    return config, folder / "task.pt"


def plain_loop(path: Path, *, uniform: bool = False) -> dict[str, torch.Tensor]:
    from contenders.plain import one_round
    from contenders.task import Task

    task = Task(path)
    assert len(set(task.num_examples)) == len(task.num_examples) == 3
    if uniform:
        task.num_examples = [1, 1, 1]
        task.positions = Task(path).positions  # type: ignore[method-assign]
    model, weights = task.model(), task.weights
    for server_round in range(1, ROUNDS + 1):
        weights = one_round(task, model, weights, server_round)
    return weights


def federated(config: RunConfig, tmp_path: Path) -> dict[str, torch.Tensor]:
    keys = {"rounds": ROUNDS, "eval-every": 0, "run-dir": str(tmp_path)}
    config = RunConfig.from_mapping(config.to_mapping(), keys)
    with LocalGrid(CLIENT_APP, config.num_clients, config.to_mapping()) as grid:
        folder = run_federation(config, grid, lambda metrics: None)
    return load_file(folder.path / "model.safetensors")


def test_a_federation_ends_with_the_weights_of_the_plain_loop(
    tiny: tuple[RunConfig, Path], tmp_path: Path
) -> None:
    from tables import difference

    config, task = tiny
    start = torch.load(task, weights_only=True)["weights"]
    own, plain = federated(config, tmp_path), plain_loop(task)
    assert difference(plain, start) > 1e-3  # it has trained
    assert difference(own, plain) < 2e-6


def test_uniform_means_show_in_the_difference(tiny: tuple[RunConfig, Path]) -> None:
    from tables import difference

    assert difference(plain_loop(tiny[1], uniform=True), plain_loop(tiny[1])) > 1e-4


def test_weights_of_other_names_differ_without_bound() -> None:
    from tables import difference

    assert difference({"a": torch.zeros(2)}, {"b": torch.zeros(2)}) == float("inf")


def test_ratios_are_taken_repetition_by_repetition() -> None:
    from tables import summary

    def rounds(*seconds: float) -> list[dict[str, float]]:
        return [{"seconds": s, "cpu_seconds": s, "peak_mb": 100 * s} for s in seconds]

    row = summary("own", rounds(2.0, 6.0, 3.0), rounds(1.0, 2.0, 3.0))
    assert row["seconds"] == 3.0
    assert row["seconds_times_plain"] == 2.0  # of 2, 3 and 1, not 3 / 2
    assert row["seconds_times_plain_quartiles"] == [1.5, 2.5]
    assert row["peak_mb"] == 600.0


@pytest.mark.slow
def test_the_command_writes_one_table_and_says_who_is_missing(
    benchmarks: Path, tmp_path: Path
) -> None:
    words = ["--workloads", "tiny", "--jobs", "--contenders", "plain", "fedfrozen", "pfl"]
    command = [sys.executable, "benchmarks/federation.py", *words, "--out", str(tmp_path / "out")]
    subprocess.run(command, cwd=benchmarks.parent, check=True, capture_output=True)
    (table,) = json.loads((tmp_path / "out.json").read_text())["tables"]
    rows = {row["contender"]: row for row in table["rows"]}
    assert list(rows) == ["plain", "fedfrozen", "pfl"]
    assert rows["plain"]["seconds_times_plain"] == 1.0
    assert rows["plain"]["difference"] == 0.0
    assert rows["fedfrozen"]["difference"] < 2e-6
    assert len(rows["fedfrozen"]["rounds"]) == 2
    assert rows["pfl"]["failed"] == "no environment that has it, see --peers"
    assert "| fedfrozen |" in (tmp_path / "out.md").read_text()
