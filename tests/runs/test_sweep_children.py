"""The runs of a sweep: which start, what a second start repeats, how failures and Ctrl-C end."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedfrozen_app.cli import app, load_config
from fedfrozen_app.config import ConfigError
from fedfrozen_app.runs import sweep_children
from fedfrozen_app.runs.store import RunFolder
from fedfrozen_app.runs.sweep import Sweep, read_sweep
from fedfrozen_app.runs.sweep_children import (
    locked,
    make_way,
    run_cells,
    seconds_left,
    start,
    words,
)
from fedfrozen_app.runs.sweep_cost import payload
from fedfrozen_app.runs.sweep_progress import clock, shown
from tests.runs.fake_run import DIVERGES, FAILS_BEFORE, FAILS_LATER, HANGS

FAKE = (sys.executable, "-m", "tests.runs.fake_run")
CHECKOUT = Path(__file__).resolve().parents[2]
BASE = """
rounds = 5
dataset = "digits"
weights = "none"
public-fraction = 0
max-train-examples = 100
"""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_children, "COMMAND", FAKE)
    monkeypatch.chdir(CHECKOUT)


def grid(tmp_path: Path, *seeds: int, lrs: str = "[0.5]") -> Path:
    path = tmp_path / "grid.toml"
    path.write_text(f"{BASE}\n[sweep]\nlr = {lrs}\nseed = {list(seeds)}\n")
    return path


def sweep_of(tmp_path: Path, *seeds: int, **options: Any) -> Sweep:
    return read_sweep(grid(tmp_path, *seeds, **options), out=tmp_path / "out")


def started(out: Path) -> list[str]:
    """The runs that started since this was last asked."""
    file = out / "started.txt"
    names = [line.split()[0] for line in file.read_text().splitlines()] if file.exists() else []
    file.unlink(missing_ok=True)
    return sorted(names)


def fedfrozen(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "60"})
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


# --- which runs start -----------------------------------------------------------------------
def test_a_second_start_runs_exactly_what_is_missing(tmp_path: Path, fake: None) -> None:
    sweep = sweep_of(tmp_path, 1, 2, lrs="[0.5, 0.25]")
    out = sweep.out
    assert run_cells(sweep.cells, out, jobs=2) == {}
    names = [cell.name for cell in sweep.cells]
    assert started(out) == sorted(names) and list(sweep.finished()) == names
    RunFolder(out / names[1]).go_back_to(0)  # as one that was killed
    (out / names[0] / "model.safetensors").unlink()  # to make room: it is done all the same
    (out / names[2]).rename(out / "elsewhere")  # done is done whatever its name
    kept = [out / names[0], out / names[3], out / "elsewhere"]
    before = [path.stat() for folder in kept for path in [folder, *sorted(folder.iterdir())]]
    code, text, _ = fedfrozen("sweep", str(grid(tmp_path, 1, 2, lrs="[0.5, 0.25]")),
                              "--out", str(out))  # fmt: skip
    assert code == 0 and "3 of 4 runs are done, 1 to run" in text
    assert started(out) == [names[1]]
    after = [path.stat() for folder in kept for path in [folder, *sorted(folder.iterdir())]]
    assert [(s.st_ino, s.st_mtime_ns) for s in after] == [(s.st_ino, s.st_mtime_ns) for s in before]
    assert f"[4/4] {names[1]}  accuracy 0.5000" in text
    assert not (out / names[2]).exists()
    code, text, _ = fedfrozen("sweep", str(grid(tmp_path, 1, 2, lrs="[0.5, 0.25]")),
                              "--out", str(out))  # fmt: skip
    assert code == 0 and "4 of 4 runs are done\n" in text and started(out) == []


def test_an_unfinished_run_is_replaced_and_anything_else_is_moved_aside(tmp_path: Path) -> None:
    from tests.runs.test_sweep import make_run

    cell = sweep_of(tmp_path, 1).cells[0]
    folder = RunFolder(Path(cell.config.run_dir) / cell.name)
    assert make_way(folder, cell.config) is None
    make_run(cell.config).go_back_to(0)
    assert make_way(folder, cell.config) is None and not folder.path.exists()
    for number in (1, 2):  # finished, of another config
        make_run(cell.config.model_copy(update={"lr": 0.125 * number}))
        aside = make_way(folder, cell.config)
        assert aside == folder.path.with_name(f"{cell.name}.old-{number}")
        assert (aside / "model.safetensors").exists() and not folder.path.exists()
    folder.path.mkdir()
    (folder.path / "notes.txt").write_text("not a run")
    assert make_way(folder, cell.config) == folder.path.with_name(f"{cell.name}.old-3")
    make_run(cell.config.model_copy(update={"lr": 0.75})).go_back_to(0)  # unfinished, but not ours
    assert make_way(folder, cell.config) == folder.path.with_name(f"{cell.name}.old-4")
    make_run(cell.config)  # finished since it was looked for
    assert make_way(folder, cell.config) == folder.path.with_name(f"{cell.name}.old-5")


def test_a_sweep_that_changed_says_where_the_old_run_went(tmp_path: Path, fake: None) -> None:
    first = sweep_of(tmp_path, 1)
    run_cells(first.cells, first.out)
    code, text, _ = fedfrozen("sweep", str(grid(tmp_path, 1)), "rounds=7", "--out", str(first.out))
    name = first.cells[0].name
    assert code == 0 and f"moved to {first.out / name}.old-1" in text
    assert list(sweep_of(tmp_path, 1).finished().values())[0].path.name == f"{name}.old-1"


# --- failures ---------------------------------------------------------------------------------
def test_failures_are_listed_at_the_end_and_stop_nobody(tmp_path: Path, fake: None) -> None:
    path = grid(tmp_path, FAILS_BEFORE, FAILS_LATER, DIVERGES, 1)
    out = tmp_path / "out"
    code, text, err = fedfrozen("sweep", str(path), "--out", str(out), "--jobs", "2")
    assert code == 1
    assert err.splitlines()[-3:] == [
        "error: 2 runs failed; the same command tries again:",
        f"  lr=0.5-seed={FAILS_BEFORE}: error: no such data",
        f"  lr=0.5-seed={FAILS_LATER}: RuntimeError: no power",
    ]
    assert f"lr=0.5-seed={DIVERGES}  accuracy 0.5000 (diverged)" in text
    rows = [line.split() for line in text.splitlines() if line.strip().startswith("0.5 ")]
    assert rows[0][-2:] == ["2/4", "1/2"]  # finished of all, diverged of those
    assert (out / f"lr=0.5-seed={FAILS_BEFORE}.log").read_text() == "loading\nerror: no such data\n"
    assert len(started(out)) == 4
    fedfrozen("sweep", str(path), "--out", str(out))
    assert started(out) == sorted(f"lr=0.5-seed={seed}" for seed in (FAILS_BEFORE, FAILS_LATER))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "takes one file with a [sweep], got none"),
        (["grid.toml", "b.toml"], "takes one file with a [sweep], got ['grid.toml', 'b.toml']"),
        (["grid.toml", "seed=4"], "seed is swept by sweep.seed"),
        (["grid.toml", "--only", "seed=4"], "no value of sweep.seed"),
        (["grid.toml", "-c", "batch-size=0"], "2 of 2 runs cannot be:\n  lr=0.5-seed=1: batch"),
        (["grid.toml", "weights=/not/there"], "these runs cannot be:\n  lr=0.5-seed=1: weights"),
        (["grid.toml", "model=resnet18-gn", "weights=pretrained"], "no weights on the hub"),
    ],
)
def test_what_cannot_be_ends_with_code_2_before_anything_runs(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid(tmp_path, 1, 2)
    monkeypatch.chdir(tmp_path)
    code, out, err = fedfrozen("sweep", "--out", "o", *arguments)
    assert code == 2 and "Traceback" not in out + err
    if arguments:
        assert words in err
    assert not (tmp_path / "o").exists()


def test_a_dry_run_says_what_it_would_do(tmp_path: Path, fake: None) -> None:
    sweep = sweep_of(tmp_path, 1, 2, 3)
    run_cells(sweep.cells[1:2], sweep.out)
    code, text, _ = fedfrozen("sweep", str(grid(tmp_path, 1, 2, 3)), "--out", str(sweep.out),
                              "--only", "seed=1,2", "--dry-run")  # fmt: skip
    assert code == 0 and started(sweep.out) == ["lr=0.5-seed=2"]
    rows = [" ".join(line.split()) for line in text.splitlines()]
    # 10 clients, both ways: 2 rounds of the whole model, 3 of what is not frozen
    assert payload(sweep.cells[0].config) == 10 * 2 * (2 * 810_280 + 3 * 677_160)
    assert "lr=0.5-seed=1 to run 5 10 200 73.0 MB -" in rows
    assert "lr=0.5-seed=2 done 5 10 200 73.0 MB -" in rows
    assert "1 of 2 runs are done, 1 to run: 5 rounds, 50 trainings of a client, " in text


# --- jobs, the lock, the end ------------------------------------------------------------------
def test_a_childs_words_are_its_config(tmp_path: Path) -> None:
    cell = sweep_of(tmp_path, 1).cells[0]
    assert load_config(words(cell.config, 1), None) == cell.config
    assert words(cell.config, 2) == [*words(cell.config, 1)[:-2], "threads=1",
                                     *words(cell.config, 1)[-2:]]  # fmt: skip


def test_runs_at_once_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedfrozen_app.config.available_cores", lambda: 8)
    config = (
        sweep_of(tmp_path, 1)
        .cells[0]
        .config.model_copy(update={"dataset": "cifar10", "model": "resnet20-gn"})
    )
    assert not any(word.startswith("threads") for word in words(config, 1))
    assert "threads=4" in words(config, 2) and "threads=1" in words(config, 16)
    assert "threads=2" in words(config.model_copy(update={"jobs": 2}), 2)
    assert "threads=3" in words(config.model_copy(update={"threads": 3}), 2)


def test_a_folder_takes_one_sweep_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path / "out"):
        with pytest.raises(ConfigError, match="another sweep, .* is at work in"):
            run_cells([], tmp_path / "out")
    assert run_cells([], tmp_path / "out") == {}


def alive(name: str) -> list[int]:
    """Processes that run a cell of that name."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if name in (entry / "cmdline").read_text() and "Z" not in _state(entry):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _state(entry: Path) -> str:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0]


def sweep_process(path: Path, out: Path, jobs: int) -> "subprocess.Popen[str]":
    """A sweep of fake runs in a process of its own."""
    script = (
        "import sys; from fedfrozen_app.runs import sweep_children; "
        f"sweep_children.COMMAND = {FAKE!r}; "
        "from fedfrozen_app.cli import app; app(sys.argv[1:])"
    )
    command = [sys.executable, "-c", script, "sweep", str(path), "--out", str(out)]
    return subprocess.Popen(
        [*command, "--jobs", str(jobs)],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_ctrl_c_ends_the_children_as_ctrl_c_and_the_next_start_goes_on(
    tmp_path: Path, fake: None
) -> None:
    if not Path("/proc/self/cmdline").exists():
        pytest.skip("needs /proc to see processes")
    path, out = grid(tmp_path, 1, HANGS, 3), tmp_path / "out"
    hanging = f"lr=0.5-seed={HANGS}"
    process = sweep_process(path, out, 1)
    deadline = time.monotonic() + 60
    while not (out / hanging / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(f"run-dir={out}")
    with pytest.raises(ConfigError, match="at work"):
        run_cells([], out)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command goes on" in err
    assert "Traceback" not in err and alive(f"run-dir={out}") == []
    assert (out / hanging / "failure.txt").read_text() == "KeyboardInterrupt: \n"
    assert started(out) == sorted([hanging, "lr=0.5-seed=1"])
    sweep = read_sweep(path, out=out, only={"seed": ["1", "3"]})
    assert list(sweep.finished()) == ["lr=0.5-seed=1"]
    assert not (out / "lr=0.5-seed=3").exists()


def test_an_orphan_keeps_the_folder_to_itself(tmp_path: Path, fake: None) -> None:
    """A sweep that is killed leaves its children; nobody may remove what they write."""
    sweep = sweep_of(tmp_path, HANGS)
    with locked(sweep.out) as lock:
        child = start(sweep.cells[0], sweep.out, 1, lock)
    try:
        assert os.getsid(child.process.pid) == child.process.pid  # a terminal's Ctrl-C is not its
        with pytest.raises(ConfigError, match="a run that one left behind"):
            run_cells([], sweep.out)
    finally:
        child.process.kill()
        child.process.wait()
    assert run_cells([], sweep.out) == {}


# --- progress ---------------------------------------------------------------------------------
def test_the_time_left_comes_from_what_ended_and_what_is_under_way() -> None:
    assert seconds_left([], [], 3, 1) is None
    assert seconds_left([], [(5.0, 0.0)], 3, 1) is None
    assert seconds_left([], [(5.0, 0.25)], 2, 1) == 15 + 2 * 20
    assert seconds_left([10.0, 30.0], [(5.0, 0.25)], 2, 1) == 15 + 2 * 20
    assert seconds_left([20.0], [(5.0, 0.0), (30.0, 0.0)], 3, 2) == (15 + 3 * 20) / 2
    assert seconds_left([20.0], [(5.0, 0.25)], 0, 4) == 15
    assert [clock(s) for s in (44.6, 300, 12_600)] == ["45 s", "5 min", "3.5 h"]


def test_on_a_terminal_there_are_bars(tmp_path: Path, fake: None) -> None:
    sweep = sweep_of(tmp_path, 1, FAILS_LATER)
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120)
    with shown(console, 2, 0, 1) as watch:
        failures = run_cells(sweep.cells, sweep.out, watch=watch)
    text = file.getvalue()
    assert list(failures) == [f"lr=0.5-seed={FAILS_LATER}"]
    assert "sweep" in text and "1/2" in text and "[1/2] lr=0.5-seed=1  accuracy 0.5000" in text
    assert "failed: RuntimeError: no power" in text


# --- real runs --------------------------------------------------------------------------------
REAL = """
dataset = "digits"
weights = "none"
public-fraction = 0
rounds = 1
num-clients = 3
local-steps = 1
max-train-examples = 97
max-test-examples = 41
[sweep]
method = [{name = "frozen", strategy = "fedfrozen", warmup-rounds = 0}, {strategy = "fedavg"}]
seed = [1, 2]
"""


def comparable(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in lines]


@pytest.mark.slow
def test_real_runs_at_once_have_the_metrics_of_one_after_the_other(tmp_path: Path) -> None:
    path = tmp_path / "real.toml"
    path.write_text(REAL)
    cache = f"cache-dir={tmp_path / 'cache'}"
    one, two = tmp_path / "one", tmp_path / "two"
    code, out, err = fedfrozen("sweep", str(path), cache, "--out", str(one))
    assert code == 0, out + err
    names = [f"{method}-seed={seed}" for method in ("frozen", "fedavg") for seed in (1, 2)]
    assert [name for name in names if f"{name}  accuracy" in out] == names
    code, *_ = fedfrozen("sweep", str(path), cache, "--out", str(two), "--jobs", "2")
    assert code == 0
    assert [comparable(two / name) for name in names] == [comparable(one / name) for name in names]
    models = [[(out / name / "model.safetensors").read_bytes() for name in names]
              for out in (one, two)]  # fmt: skip
    assert models[0] == models[1]
    RunFolder(one / names[0]).go_back_to(0)  # as one that was killed
    before = [(one / name / "config.json").stat() for name in names]
    code, out, _ = fedfrozen("sweep", str(path), cache, "--out", str(one))
    after = [(one / name / "config.json").stat() for name in names]
    assert code == 0 and "3 of 4 runs are done, 1 to run" in out
    again = [a.st_mtime_ns != b.st_mtime_ns for a, b in zip(after, before, strict=True)]
    assert again == [True, False, False, False]
    assert comparable(one / names[0]) == comparable(two / names[0])


@pytest.mark.slow
def test_a_real_sweep_that_is_stopped_goes_on(tmp_path: Path) -> None:
    path, out = tmp_path / "real.toml", tmp_path / "out"
    path.write_text(REAL.replace("rounds = 1", "rounds = 3"))
    command = [sys.executable, "-m", "fedfrozen_app.cli", "sweep", str(path), "--out", str(out)]
    command += [f"cache-dir={tmp_path / 'cache'}", "--only", "method=frozen"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 400
    second = out / "frozen-seed=2" / "metrics.jsonl"
    while not second.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    assert alive(f"run-dir={out}") == []
    first = (out / "frozen-seed=1" / "model.safetensors").stat().st_ino
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 2 runs are done, 1 to run" in done.stdout
    assert (out / "frozen-seed=1" / "model.safetensors").stat().st_ino == first
    assert len(read_sweep(path, out=out).finished()) == 2
