"""Every rule in the real app on the bundled digits, with and without the freeze."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from flwr.app import ArrayRecord
from typer.testing import CliRunner

from fedfrozen_app.cli import app
from fedfrozen_app.config import RunConfig
from fedfrozen_app.engine.flower import run_with_flower
from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.engine.rounds import Federation
from fedfrozen_app.engine.start import prepare
from fedfrozen_app.runs.store import RunFolder
from fedfrozen_app.strategies import FedFrozen, QuorumError, Scaffold
from fedfrozen_app.strategies.rules import RULES
from fedfrozen_app.training.local import local_work
from fedfrozen_app.training.worker import Worker
from fedfrozen_app.transport.arrays import to_record, to_tensors
from fedfrozen_app.transport.client_state import ClientState
from tests.engine.run import Run, equal, frozen_half, small_config

QUICK: dict[str, Any] = {
    "local_steps": 2,
    "batch_size": 5,
    "eval_every": 0,
    "max_train_examples": 101,
    "max_test_examples": 53,
}
ON_WEIGHTS = [name for name in RULES if name != "latent"]
FREEZE: dict[str, Any] = {"frozen": "query-key", "warmup_rounds": 1}


@pytest.fixture(scope="module")
def frozen_run(tmp_path_factory: pytest.TempPathFactory, cache: str) -> Callable[[str], Run]:
    """A run of each strategy with one round of warm-up and two after it."""
    runs: dict[str, Run] = {}

    def of(strategy: str) -> Run:
        if strategy not in runs:
            root = tmp_path_factory.mktemp(strategy)
            runs[strategy] = Run(root, cache, strategy=strategy, **FREEZE, **QUICK)
        return runs[strategy]

    return of


# --- every strategy -------------------------------------------------------------------------
@pytest.mark.parametrize("strategy", ON_WEIGHTS)
def test_each_strategy_runs_and_its_freeze_keeps_the_bits_of_the_kernel(
    tmp_path: Path, cache: str, strategy: str, frozen_run: Callable[[str], Run]
) -> None:
    freezes = strategy == "fedfrozen"  # which cannot do without
    keys = {"warmup_rounds": 1} if freezes else {}
    plain = Run(tmp_path, cache, strategy=strategy, rounds=1, **keys, **QUICK)
    run = frozen_run(strategy)
    assert equal(frozen_half(run), frozen_half(plain))
    assert [line.phase for line in plain.metrics] == ["start", "full"]
    assert [line.phase for line in run.metrics] == ["start", "warmup", "frozen", "frozen"]
    assert {line.strategy for line in run.metrics} == {strategy}
    assert [(line.clients, line.dropped) for line in run.metrics[1:]] == [(3, 0)] * 3
    assert run.metrics[-1].test_loss != run.metrics[0].test_loss
    assert all(torch.isfinite(tensor).all() for tensor in run.model.values())
    moved = [name for name in run.model if not torch.equal(run.model[name], plain.model[name])]
    assert len(moved) == len(run.model)  # of a fused weight the value rows


def test_the_strategies_differ_and_fedfrozen_is_fedavg_with_the_freeze(
    frozen_run: Callable[[str], Run],
) -> None:
    models = {name: frozen_run(name).model["head.weight"] for name in ON_WEIGHTS}
    assert torch.equal(models["fedfrozen"], models["fedavg"])
    # with equal steps FedNova is FedAvg, but for rounding
    torch.testing.assert_close(models["fednova"], models["fedavg"], rtol=0, atol=1e-6)
    others = [name for name in ON_WEIGHTS if name not in ("fedfrozen", "fednova")]
    for i, one in enumerate(others):
        for other in others[:i]:
            assert (models[one] - models[other]).abs().max() > 1e-6, (one, other)


def test_scaffold_sends_exactly_twice_and_the_others_the_bytes_of_fedavg(
    frozen_run: Callable[[str], Run],
) -> None:
    plain = frozen_run("fedavg")
    whole = sum(tensor.numel() * 4 for tensor in plain.model.values())
    frozen = sum(tensor.numel() * 4 for tensor in frozen_half(plain).values())
    # vit-digits has no buffers: every entry has a control
    active = 3 * (whole - frozen)
    for strategy in ON_WEIGHTS:
        times = 2 if strategy == "scaffold" else 1
        lines = frozen_run(strategy).metrics
        assert [line.bytes_up for line in lines] == [
            0,
            3 * times * whole,
            times * active,
            times * active,
        ]
        assert [line.bytes_down for line in lines] == [
            0,
            3 * times * whole,
            times * active + 3 * frozen,  # the block, once
            times * active,
        ]


@pytest.mark.parametrize("strategy", ["scaffold", "fedadam"])
def test_the_same_seed_gives_the_same_run_and_another_does_not(
    tmp_path: Path, cache: str, strategy: str, frozen_run: Callable[[str], Run]
) -> None:
    one = frozen_run(strategy)
    same, other = (
        Run(tmp_path, cache, strategy=strategy, seed=seed, **FREEZE, **QUICK) for seed in (1, 2)
    )
    assert equal(one.model, same.model) and one.comparable() == same.comparable()
    assert not equal(one.model, other.model)


# --- SCAFFOLD's controls ------------------------------------------------------------------
PARTIAL: dict[str, Any] = {
    "strategy": "scaffold",
    "fraction_train": 0.7,
    "rounds": 5,
    "frozen": "query-key",
    "warmup_rounds": 2,
    **QUICK,
}


@pytest.fixture(scope="module")
def partial(tmp_path_factory: pytest.TempPathFactory, cache: str) -> Run:
    """Two of three clients a round, controls in context.state."""
    return Run(tmp_path_factory.mktemp("partial"), cache, **PARTIAL)


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every client state is too large for context.state."""
    monkeypatch.setitem(ClientState.__init__.__kwdefaults__, "limit_bytes", 0)


def test_clients_in_worker_processes_give_the_same_run(
    tmp_path: Path, cache: str, partial: Run
) -> None:
    two = Run(tmp_path, cache, jobs=2, **PARTIAL)
    assert equal(two.model, partial.model)
    assert two.comparable() == partial.comparable()


def files_by_round(root: Path) -> tuple[list[int], Callable[[Any], None]]:
    counts: list[int] = []

    def count(metrics: Any) -> None:
        counts.append(len(list((root / "clients").rglob("control-*.safetensors"))))

    return counts, count


@pytest.mark.usefixtures("no_room")
def test_controls_in_files_give_the_same_run_and_are_gone_afterwards(
    tmp_path: Path, partial: Run
) -> None:
    own = tmp_path / "cache"
    counts, count = files_by_round(own)
    run = Run(tmp_path / "runs", str(own), on_round=count, **PARTIAL)
    assert equal(run.model, partial.model)
    assert run.comparable() == partial.comparable()
    assert counts[:2] == [0, 2] and all(2 < number <= 6 for number in counts[2:])
    assert list((own / "clients").iterdir()) == []


def test_nodes_that_share_the_data_give_the_same_run(tmp_path: Path, partial: Run) -> None:
    own = tmp_path / "cache"
    counts, count = files_by_round(own)
    run = Run(tmp_path / "runs", str(own), nodes=2, on_round=count, **PARTIAL)
    assert equal(run.model, partial.model)
    lines, expected = run.comparable(), partial.comparable()
    for line in (*lines, *expected):  # the nodes are asked for their partition in round 1
        del line["wire_bytes_up"], line["wire_bytes_down"]
    assert lines == expected
    assert counts[1] == 2  # a node of two clients keeps each one's control in a file
    assert list((own / "clients").iterdir()) == []


def test_controls_in_context_state_leave_no_file(tmp_path: Path) -> None:
    own = tmp_path / "cache"
    counts, count = files_by_round(own)
    Run(tmp_path / "runs", str(own), on_round=count, strategy="scaffold", rounds=1, **QUICK)
    assert counts == [0, 0]


@pytest.mark.usefixtures("no_room")
def test_a_run_that_fails_leaves_no_control_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Worker.train

    def fails_in_round_two(self: Any, partition_id: int, server_round: int, *rest: Any) -> Any:
        if server_round == 2:
            raise RuntimeError("no power")
        return real(self, partition_id, server_round, *rest)

    monkeypatch.setattr(Worker, "train", fails_in_round_two)
    own = tmp_path / "cache"
    counts, count = files_by_round(own)
    with pytest.raises(QuorumError, match="no power"):
        Run(tmp_path / "runs", str(own), on_round=count, strategy="scaffold", **QUICK)
    assert counts == [0, 3]
    assert list((own / "clients").iterdir()) == []


def go_on(
    config: RunConfig,
    arrays: ArrayRecord,
    rounds: range,
    saved: dict[str, Any] | None,
    contexts: dict[int, Any] | None = None,
) -> tuple[ArrayRecord, dict[str, Any], FedFrozen]:
    """Run some rounds with a rule, a grid and a model of their own; fill ``contexts`` if given."""
    worker, strategy = prepare(config)
    if saved is not None:
        strategy.load_state_dict(saved)
    grid = LocalGrid("fedfrozen_app.client_app:app", worker.num_clients, config.to_mapping())
    grid.load_state_dict(contexts or {})
    federation = Federation(config, grid, worker, strategy, RunFolder(Path(config.run_dir)))
    for server_round in rounds:
        arrays = federation.train_round(server_round, arrays)
    if contexts is not None:
        contexts.update(grid.state_dict())
    return arrays, strategy.state_dict(), strategy


@pytest.mark.usefixtures("no_room")
@pytest.mark.parametrize("stop", [1, 3])
def test_a_restarted_server_goes_on_from_controls_in_files(
    tmp_path: Path, partial: Run, stop: int
) -> None:
    config = small_config(tmp_path / "runs", str(tmp_path / "cache"), **PARTIAL)
    start = to_record(prepare(config)[0].initial_weights())
    arrays, saved, _ = go_on(config, start, range(1, stop + 1), None)
    held = {name: tensor.clone() for name, tensor in to_tensors(arrays).items()}
    rest, _, strategy = go_on(config, to_record(held), range(stop + 1, 6), saved)
    assert equal(to_tensors(rest), partial.model)
    assert strategy.report.dropped == 0


def test_a_restarted_grid_goes_on_from_the_contexts_it_is_given(
    tmp_path: Path, partial: Run
) -> None:
    config = small_config(tmp_path / "runs", str(tmp_path / "cache"), **PARTIAL)
    start, contexts = to_record(prepare(config)[0].initial_weights()), dict[int, Any]()
    arrays, saved, _ = go_on(config, start, range(1, 4), None, contexts)
    assert contexts  # the controls are small, so they are here and not in files
    rest, _, _ = go_on(config, arrays, range(4, 6), saved, contexts)
    assert equal(to_tensors(rest), partial.model)


def test_a_server_that_lost_its_clients_controls_is_told(
    tmp_path: Path, partial: Run, caplog: pytest.LogCaptureFixture
) -> None:
    # a grid that is given no contexts has no controls either: the run says so
    config = small_config(tmp_path / "runs", str(tmp_path / "cache"), **PARTIAL)
    start = to_record(prepare(config)[0].initial_weights())
    arrays, saved, _ = go_on(config, start, range(1, 4), None)
    rest, _, _ = go_on(config, arrays, range(4, 6), saved)
    assert not equal(to_tensors(rest), partial.model)
    assert any("has lost its SCAFFOLD control" in record.getMessage() for record in caplog.records)


def test_momentum_counts_in_the_control_as_the_steps_it_makes(tmp_path: Path, cache: str) -> None:
    # at a tiny rate gradients hardly change, so the control is their mean, momentum or not
    controls = []
    for momentum in (0.0, 0.9):
        config = small_config(
            tmp_path, cache, strategy="scaffold", lr=1e-5, batch_size=251, local_steps=4,
            momentum=momentum, weight_decay=0.0, min_partition_size=2,
        )  # fmt: skip
        start = to_record(prepare(config)[0].initial_weights())
        _, _, strategy = go_on(config, start, range(1, 2), None)
        rule = strategy.strategy
        assert isinstance(rule, Scaffold)
        controls.append(rule.state.c["head.weight"])
    # 4 steps of momentum .9 count 9.049: taken as 4, c would be 2.3 times as large
    ratio = controls[1].norm() / controls[0].norm()
    assert abs(float(ratio) - 1) < 0.02
    assert controls[0].norm() > 0.01


# --- the amount of work -----------------------------------------------------------------------
def test_fednova_with_random_work_takes_the_steps_that_were_drawn(
    tmp_path: Path, cache: str
) -> None:
    few = {"max_train_examples": 101, "max_test_examples": 53}

    def run(strategy: str, **keys: Any) -> tuple[list[list[int]], dict[str, torch.Tensor]]:
        config = small_config(
            tmp_path, cache, strategy=strategy, work="random", batch_size=20, **few, **keys
        )
        arrays = to_record(prepare(config)[0].initial_weights())
        taken, saved = [], None
        for server_round in (1, 2):
            arrays, saved, frozen = go_on(
                config, arrays, range(server_round, server_round + 1), saved
            )
            taken.append([int(metrics["steps"]) for metrics in frozen.report.metrics])  # type: ignore[arg-type]
            work = [local_work(config, server_round, client) for client in range(3)]
            sizes = map(len, prepare(config)[0].partition.clients)
            assert taken[-1] == [
                one.steps or one.epochs * -(-size // 20)
                for one, size in zip(work, sizes, strict=True)
            ]
        return taken, to_tensors(arrays)

    taken, model = run("fednova", local_steps="1-6")
    assert len({steps for row in taken for steps in row}) >= 3
    again, same = run("fednova", local_steps="1-6")
    assert again == taken and equal(model, same)
    _, averaged = run("fedavg", local_steps="1-6")
    assert (averaged["head.weight"] - model["head.weight"]).abs().max() > 1e-4
    run("fednova", local_epochs=3)


# --- from the outside -------------------------------------------------------------------------
def test_the_command_line_runs_scaffold_inside_the_freeze(tmp_path: Path) -> None:
    reduced = ["rounds=6", "local-steps=1", "max-train-examples=101", "max-test-examples=53",
               "num-clients=2", "weights=none", "public-fraction=0", "eval-every=0",
               f"run-dir={tmp_path}/runs", f"cache-dir={tmp_path}/cache"]  # fmt: skip
    arguments = ["run", "-c", "strategy=scaffold", "frozen=query-key", "warmup-rounds=5"]
    result = CliRunner().invoke(app, [*arguments, *reduced], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    folder = tmp_path / "runs" / "digits-scaffold-seed1"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["phase"] for line in lines] == ["start", *["warmup"] * 5, "frozen"]
    assert lines[6]["bytes_up"] < lines[5]["bytes_up"] == lines[1]["bytes_up"]
    written = json.loads((folder / "config.json").read_text())["config"]
    keys = ("strategy", "frozen", "warmup-rounds", "rounds")
    assert [written[key] for key in keys] == ["scaffold", "query-key", 5, 6]


@pytest.mark.slow
def test_scaffold_in_flowers_runtime_equals_the_run_in_this_process(
    tmp_path: Path, partial: Run
) -> None:
    config = small_config(tmp_path / "runs", str(tmp_path / "cache"), **PARTIAL, device="cpu")
    lines: list[str] = []
    assert run_with_flower(config, lines.append) == 0, "\n".join(lines[-30:])
    folder = RunFolder(tmp_path / "runs" / "digits-scaffold-seed1")
    model = safetensors.torch.load_file(folder.path / "model.safetensors")
    assert equal(model, partial.model)
    phases = [(line.phase, line.clients, line.bytes_up) for line in folder.metrics()]
    assert phases == [(line.phase, line.clients, line.bytes_up) for line in partial.metrics]
