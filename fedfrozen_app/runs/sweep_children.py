"""The runs of a sweep as child processes, some at once; what was cut off begins again."""

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.config_input import format_override
from fedfrozen_app.runs.finished import has_result, identity, is_finished, stored_config
from fedfrozen_app.runs.store import RunFolder
from fedfrozen_app.runs.sweep import Cell

COMMAND = (sys.executable, "-m", "fedfrozen_app.cli", "run")
LOCK = ".sweep.lock"
POLL_SECONDS = 0.2
GRACE_SECONDS = 30.0  # for a child to save its last round and end its own workers


@dataclass
class Child:
    """One run that is going on; ``folder`` may not exist yet."""

    cell: Cell
    process: "subprocess.Popen[bytes]"
    folder: RunFolder
    log: Path
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Return for how long it has been running."""
        return time.monotonic() - self.started

    @property
    def rounds_done(self) -> int:
        """Return the rounds on record."""
        try:
            return max(0, (self.folder.path / "metrics.jsonl").read_bytes().count(b"\n") - 1)
        except OSError:
            return 0

    def failure(self) -> str | None:
        """Return why an ended run is no result, None if it is one."""
        if is_finished(self.folder):
            return None
        reason = self.folder.failure() or self.log.read_text(errors="replace").strip()
        if self.folder.failure() is None and reason:
            reason = reason.splitlines()[-1]
        return " ".join(reason.split()) or f"exit status {self.process.returncode}"


class Watch:
    """What is told of a sweep while it runs; this one stays silent."""

    def poll(self, children: Sequence[Child], waiting: int) -> None:
        """Be told, several times a second, what runs and how many cells have yet to start."""

    def moved(self, path: Path) -> None:
        """Be told where a folder that stood in the way is now."""

    def ended(self, child: Child, failure: str | None) -> None:
        """Be told of a run that has just ended."""


def run_cells(
    cells: Sequence[Cell], out: Path, *, jobs: int = 1, watch: Watch | None = None
) -> dict[str, str]:
    """Run cells, ``jobs`` at once, and return why some of them failed, by name.

    Whatever ends this function ends the children, as Ctrl-C would end them.

    Raises
    ------
    ConfigError
        Where another sweep is at work in ``out``.
    OSError
        Where ``out`` cannot be written.
    """
    watch, failures = watch or Watch(), {}
    waiting, children = list(cells), list[Child]()
    with locked(out) as lock:
        try:
            while waiting or children:
                while waiting and len(children) < jobs:
                    cell = waiting.pop(0)
                    if aside := make_way(RunFolder(out / cell.name), cell.config):
                        watch.moved(aside)
                    children.append(start(cell, out, jobs, lock))
                watch.poll(children, len(waiting))
                for child in [child for child in children if child.process.poll() is not None]:
                    children.remove(child)
                    if failure := child.failure():
                        failures[child.cell.name] = failure
                    watch.ended(child, failure)
                if children:
                    time.sleep(POLL_SECONDS)
        finally:
            end([child.process for child in children])
    return {cell.name: failures[cell.name] for cell in cells if cell.name in failures}


@contextmanager
def locked(out: Path) -> Iterator[int]:
    """Hold a folder for one sweep and its children: they inherit the lock, and keep it."""
    out.mkdir(parents=True, exist_ok=True)
    handle = os.open(out / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another sweep, or a run that one left behind, is at work in {str(out)!r}; wait "
                "for it, end it, or choose another --out"
            ) from None
        yield handle
    finally:
        os.close(handle)


def start(cell: Cell, out: Path, jobs: int, lock: int) -> Child:
    """Start the run of a cell, in a session of its own, so that Ctrl-C is left to the sweep."""
    log = out / f"{cell.name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*COMMAND, *words(cell.config, jobs)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[lock],
        )
    return Child(cell, process, RunFolder(out / cell.name), log)


def words(config: RunConfig, jobs: int) -> list[str]:
    """Return the ``key=value`` words of a run, ``jobs`` of which share the cores."""
    if jobs > 1 and not config.threads:
        share = max(1, config.resolved_threads // jobs)
        config = config.model_copy(update={"threads": share})
    fields = RunConfig.model_fields.values()
    pairs = zip(config.to_mapping().items(), fields, strict=True)
    return [format_override(key, value) for (key, value), field in pairs if value != field.default]


def make_way(folder: RunFolder, config: RunConfig) -> Path | None:
    """Free a run's folder: its own unfinished run is removed, anything else is moved aside."""
    path = folder.path
    if not path.exists() and not path.is_symlink():
        return None
    stored = stored_config(folder)
    if stored is not None and identity(stored) == identity(config) and not has_result(folder):
        shutil.rmtree(path)
        return None
    number = 1
    while (aside := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    path.rename(aside)
    return aside


def end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Ask children to end as after Ctrl-C; a second Ctrl-C, or a long wait, kills them."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    try:
        for process in processes:
            process.wait(max(0.0, deadline - time.monotonic()))
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        for process in processes:
            process.kill()
            process.wait()


def seconds_left(
    durations: Sequence[float], running: Sequence[tuple[float, float]], waiting: int, jobs: int
) -> float | None:
    """Estimate the seconds to a sweep's end, None while nothing is known.

    Parameters
    ----------
    durations : Sequence[float]
        Seconds of the runs that have ended.
    running : Sequence[tuple[float, float]]
        Of each run going on, the seconds so far and the share of it that is done.
    waiting : int
        Runs that have yet to start.
    jobs : int
        Runs at once.
    """
    known = [*durations] or [seconds / share for seconds, share in running if share > 0]
    if not known:
        return None
    mean = sum(known) / len(known)
    work = waiting * mean
    for seconds, share in running:
        whole = seconds / share if share > 0 else mean
        work += max(0.0, whole - seconds)
    return work / max(1, min(jobs, waiting + len(running)))
