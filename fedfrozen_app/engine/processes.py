"""End every process of a run, also those that left its process group or lost their parent.

Flower and Ray put their processes in sessions of their own, and a parent that dies first
leaves orphans. What all of them keep is the environment they were started with, so a run
marks its environment and is searched for by that mark.
"""

import os
import signal
import subprocess
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
POLL_SECONDS = 0.1


class Process(NamedTuple):
    """One living process; ``started`` tells it from a later one with the same pid."""

    pid: int
    started: str


def _parents() -> dict[Process, int]:
    """Return the living processes, zombies left out, with their parents' pids."""
    if not PROC.is_dir():
        return _parents_from_ps()
    found = {}
    for folder in PROC.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # "pid (name) state parent ..."; the name may hold spaces and brackets.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # ended since it was listed
            continue
        if fields[0] not in "ZX":
            found[Process(int(folder.name), fields[19])] = int(fields[1])
    return found


def _parents_from_ps() -> dict[Process, int]:
    """Return the same where there is no ``/proc`` (macOS)."""
    command = ["ps", "-A", "-o", "pid=,ppid=,stat=,lstart="]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=3) for line in listing.splitlines()]
    return {
        Process(int(pid), started): int(parent)
        for pid, parent, state, started in rows
        if not state.startswith("Z")
    }


def _is_marked(pid: int, mark: bytes) -> bool:
    try:
        return mark in (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # ended, somebody else's, or closed to reading as flower-superexec is
        return False


def find_processes(mark: str, roots: Collection[int] = ()) -> set[Process]:
    """Return the living processes of a run.

    Parameters
    ----------
    mark
        ``NAME=value`` as it stands in the environment of the run's processes.
    roots
        Process ids that belong to the run whatever their environment says.

    Returns
    -------
    set[Process]
        The roots, the marked processes and the descendants of both, never this process.
    """
    parents = _parents()
    found = {
        process
        for process in parents
        if process.pid in roots or _is_marked(process.pid, mark.encode())
    }
    size = -1
    while size != len(found):
        size = len(found)
        pids = {process.pid for process in found}
        found |= {process for process, parent in parents.items() if parent in pids}
    return {process for process in found if process.pid != os.getpid()}


def end_processes(
    mark: str, roots: Collection[int] = (), grace_seconds: float = 3.0, limit_seconds: float = 20.0
) -> None:
    """Ask a run's processes to end, then kill what is left after ``grace_seconds``.

    Raises
    ------
    RuntimeError
        If some of them still live after ``limit_seconds``, with their process ids.
    """
    begin = time.monotonic()
    seen: set[Process] = set()
    asked: set[Process] = set()
    while True:
        seen |= find_processes(mark, roots)
        # An orphan that hides its environment is known from an earlier turn only.
        left = seen & _parents().keys()
        if not left:
            return
        waited = time.monotonic() - begin
        if waited > limit_seconds:
            pids = ", ".join(str(process.pid) for process in sorted(left))
            raise RuntimeError(f"processes of the Flower run could not be ended: {pids}")
        kill = waited >= grace_seconds
        for process in left if kill else left - asked:
            _send(process.pid, signal.SIGKILL if kill else signal.SIGTERM)
        asked |= left
        time.sleep(POLL_SECONDS)


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
