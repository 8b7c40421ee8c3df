"""Claims about disks that are full or read-only: what is said, what stays, what goes on."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedfrozen_app.cli import app
from fedfrozen_app.engine import handover
from fedfrozen_app.engine.rounds import Federation
from fedfrozen_app.runs import checkpoint, store
from fedfrozen_app.runs.store import RoundMetrics, RunFolder
from fedfrozen_app.training.worker import resident
from fedfrozen_app.transport.client_files import StateFiles
from tests.engine.test_resume import comparable, model_of

QUICK = ["rounds=4", "warmup-rounds=1", "local-steps=1", "max-train-examples=60",
         "max-test-examples=20", "num-clients=2", "weights=none", "public-fraction=0",
         "threads=1", "run-name=run"]  # fmt: skip
FULL = os.strerror(errno.ENOSPC)
MODEL_MB = 0.81  # of QUICK


def run(root: Path, cache: Path | str, *words: str) -> tuple[int, str]:
    """Run the command; return its code and what it says on stderr, the log left out."""
    resident.cache_clear()
    where = [f"run-dir={root}", f"cache-dir={cache}"]
    result = CliRunner().invoke(app, ["run", *QUICK, *where, *words], env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    return result.exit_code, result.stderr


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, cache: str) -> RunFolder:
    """What the run is that no disk disturbs."""
    root = tmp_path_factory.mktemp("whole")
    assert run(root, cache) == (0, "")
    return RunFolder(root / "run")


def assert_same(folder: RunFolder, whole: RunFolder) -> None:
    assert comparable(folder) == comparable(whole) and model_of(folder) == model_of(whole)
    names = [sorted(path.name for path in each.path.iterdir()) for each in (folder, whole)]
    assert names[0] == names[1]


def fails_at(number: int, real: Callable[..., Any], after: bool = False) -> Callable[..., Any]:
    """Return a call that raises ENOSPC the ``number``-th time and from then on."""
    calls = 0

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < number:
            return real(*arguments, **options)
        if after:  # some bytes are on the disk
            real(*arguments, **options)
        raise OSError(errno.ENOSPC, FULL)

    return call


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_disk_full_at_the_start_is_code_2_and_leaves_no_folder(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    # config.json, partition.json and start.json
    with monkeypatch.context() as patch:
        patch.setattr(store.os, "replace", fails_at(number, os.replace))
        code, said = run(tmp_path, cache)
    assert code == 2 and said.count("\n") == 1
    assert f"cannot be written: {FULL}; make room, or choose another" in said
    assert list(tmp_path.iterdir()) == []


def test_a_disk_with_less_room_than_the_run_takes_is_known_at_the_start(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"total": 10**9, "free": 2 * 10**6})
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: usage)
    code, said = run(tmp_path / "not" / "yet", cache)
    assert code == 2 and said.count("\n") == 1
    assert "has 2.0 MB left, and the model with its checkpoints (checkpoint-every=1)" in said
    assert f"takes {3 * MODEL_MB:.1f} MB; make room" in " ".join(said.split())
    assert run(tmp_path, cache, "checkpoint-every=0")[0] == 0  # the model alone fits


@pytest.mark.parametrize(
    ("place", "name", "number", "lines", "file"),
    [
        (store.os, "fsync", 1, 0, "metrics.jsonl"),  # the start's line
        (store.os, "fsync", 6, 2, "metrics.jsonl"),  # round 2's, after 1 + (1 + 3)
        (checkpoint, "save_state", 2, 3, "checkpoint"),
        (store, "write_tensors", 1, 5, "model.safetensors"),
    ],
)
def test_a_disk_full_in_mid_run_is_one_line_and_resume_goes_on(
    tmp_path: Path, cache: str, whole: RunFolder, monkeypatch: pytest.MonkeyPatch,
    place: Any, name: str, number: int, lines: int, file: str,
) -> None:  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(place, name, fails_at(number, getattr(place, name), after=name == "fsync"))
        code, said = run(tmp_path, cache)
    folder = RunFolder(tmp_path / "run")
    reason = f"OSError: [Errno {errno.ENOSPC}] {FULL}; {store.GO_ON}: '{folder.path / file}'"
    assert code == 1 and said.splitlines()[-1] == f"error: {reason}"
    assert comparable(folder) == comparable(whole)[:lines]  # and no half line
    assert not folder.is_over() and folder.failure() == reason
    assert run(tmp_path, cache, "--resume")[0] == 0
    assert_same(folder, whole)


def test_a_resume_that_finds_no_room_takes_nothing_away(
    tmp_path: Path, cache: str, whole: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_state", fails_at(3, checkpoint.save_state))
        run(tmp_path, cache)
    folder = RunFolder(tmp_path / "run")

    def content() -> dict[str, bytes]:
        files = (path for path in folder.path.rglob("*") if path.is_file())
        return {str(path): path.read_bytes() for path in files}

    before = content()
    with monkeypatch.context() as patch:
        patch.setattr(store.os, "replace", fails_at(1, os.replace))
        code, said = run(tmp_path, cache, "--resume")
    assert code == 1 and store.GO_ON in said
    assert content() == before
    assert run(tmp_path, cache, "--resume")[0] == 0
    assert_same(folder, whole)


def test_a_folder_without_a_first_file_is_made_again_by_a_resume(
    tmp_path: Path, cache: str, whole: RunFolder
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.json-x").touch()
    assert run(tmp_path, cache, "--resume")[0] == 0
    assert_same(RunFolder(tmp_path / "run"), whole)


# --- the cache ------------------------------------------------------------------------------


def test_a_client_that_cannot_keep_its_state_is_dropped_and_the_run_goes_on(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "fedfrozen_app.transport.client_state.ClientState.__init__.__kwdefaults__",
        {"own_node": True, "limit_bytes": 0},
    )
    words = ["strategy=scaffold", "frozen=query-key"]
    with monkeypatch.context() as patch:
        patch.setattr(StateFiles, "write", fails_at(8, StateFiles.write))
        assert run(tmp_path / "one", cache, *words)[0] == 0  # the eighth is the last round's last
        patch.setattr(StateFiles, "write", fails_at(1, StateFiles.write))
        code, said = run(tmp_path / "all", cache, *words)
    assert [line.dropped for line in RunFolder(tmp_path / "one" / "run").metrics()][-1] == 1
    assert code == 1 and "client state cannot be kept" in said and FULL in said
    assert "make room, or set cache-dir" in said


def test_arrays_that_fit_nowhere_are_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    def write(views: list[memoryview], folder: Path) -> str:
        raise OSError(errno.ENOSPC, FULL)

    monkeypatch.setattr(handover, "_write", write)
    with pytest.raises(OSError, match=f"{FULL}; processes hand over arrays there: make room, or"):
        handover.pack({"w": np.arange(13.0)}, tmp_path)


# --- real file systems ----------------------------------------------------------------------


class Disk:
    """A file system in memory with room for some MB, mounted at ``path``."""

    def __init__(self, path: Path, megabytes: float) -> None:
        self.path = path
        path.mkdir()
        self._mount("-t", "tmpfs", "-o", f"size={int(megabytes * 1e6)}", "tmpfs", str(path))

    def _mount(self, *words: str) -> None:
        done = subprocess.run(["mount", *words], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"no file system may be mounted here: {done.stderr.strip()}")

    def set(self, options: str) -> None:
        self._mount("-o", f"remount,{options}", str(self.path))

    def end(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.path)], capture_output=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[float], Disk]]:
    disks: list[Disk] = []

    def make(megabytes: float) -> Disk:
        disks.append(Disk(tmp_path / f"disk-{len(disks)}", megabytes))
        return disks[-1]

    yield make
    for one in disks:
        one.end()


def test_a_real_disk_fills_up_and_the_run_goes_on_when_there_is_room(
    disk: Callable[[float], Disk], cache: str, whole: RunFolder
) -> None:
    small = disk(3 * MODEL_MB + 0.2)  # what is known at the start fits
    code, said = run(small.path, cache)
    folder = RunFolder(small.path / "run")
    done = len(folder.metrics())
    assert code == 1 and said.splitlines()[-1].startswith(f"error: OSError: [Errno 28] {FULL}")
    assert store.GO_ON in said and 1 < done <= 5
    assert comparable(folder) == comparable(whole)[:done] and not folder.is_over()
    small.set("size=20m")
    assert run(small.path, cache, "--resume")[0] == 0
    assert_same(folder, whole)


def test_a_real_disk_that_becomes_read_only_stops_the_run_and_harms_nothing(
    disk: Callable[[float], Disk], cache: str, whole: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, words = disk(20), os.strerror(errno.EROFS)
    real = Federation._record

    def record(self: Federation, server_round: int, *arguments: Any) -> None:
        if server_round == 3:
            one.set("ro")
        real(self, server_round, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Federation, "_record", record)
        code, said = run(one.path, cache)
    folder = RunFolder(one.path / "run")
    assert code == 1 and f"{words}; {store.GO_ON}" in said.splitlines()[-1]
    assert comparable(folder) == comparable(whole)[:3] and not folder.is_over()
    code, said = run(one.path, cache, "run-name=other")
    assert code == 2 and f"cannot be written: {words}; make room, or choose another" in said
    one.set("rw")
    assert run(one.path, cache, "--resume")[0] == 0
    assert_same(folder, whole)


def test_a_real_cache_that_is_full_is_code_2_and_a_read_only_one_is_done_without(
    disk: Callable[[float], Disk], tmp_path: Path, whole: RunFolder
) -> None:
    code, said = run(tmp_path / "full", disk(0.05).path)
    assert code == 2 and "no space left for the cache in" in said and "set cache-dir to" in said
    assert not (tmp_path / "full").exists()
    cache = disk(20)
    words = ["strategy=fedavg", "frozen=all", "warmup-rounds=-1"]
    assert run(tmp_path / "before", cache.path, *words)[0] == 0  # decodes the data
    assert not (cache.path / "frozen").exists()
    cache.set("ro")
    code, _ = run(tmp_path / "read-only", cache.path)  # it cannot keep the frozen block
    assert code == 0
    assert_same(RunFolder(tmp_path / "read-only" / "run"), whole)


def test_a_line_is_there_as_a_whole_or_not_at_all(
    disk: Callable[[float], Disk],
) -> None:
    small = disk(0.012)  # three pages
    folder = RunFolder(small.path)
    line = RoundMetrics(0, "p" * 3000, "s", None, None, None, 1, 1, 1, 1, 1, 1, 0.0, 0.0, 0)
    with pytest.raises(OSError, match=FULL):
        for _ in range(9):
            folder.append(line)
    assert 1 <= len(folder.metrics()) < 9
