"""Claims about what a run leaves behind, however it ends: its folder and its cache, no more."""

import getpass
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from fedfrozen_app.engine.processes import Process, _parents, find_processes

SHARED_MEMORY, TCP_LISTEN = "/dev/shm/", "0A"
TORCHS = {f"torchinductor_{getpass.getuser()}"}  # made at its import, one for all processes
SMALL = ["warmup-rounds=1", "local-steps=1", "max-train-examples=200", "max-test-examples=50",
         "num-clients=3", "weights=none", "public-fraction=0", "threads=1",
         "run-name=run"]  # fmt: skip
LONG = ["rounds=500", "strategy=scaffold", "frozen=query-key"]
# with jobs=1 clients keep their states in files, as those of larger models do
MAIN = """
from fedfrozen_app.cli import main
from fedfrozen_app.transport.client_state import ClientState
if __name__ == "__main__":
    ClientState.__init__.__kwdefaults__["limit_bytes"] = 0
    main()
"""
ENDINGS = {  # what is run, the signal it is sent, its exit codes: of engine=local, of engine=flwr
    "normal": (["rounds=2"], None, 0, 0),
    "error": (["rounds=2", "lr=1e30"], None, 1, 1),
    "Ctrl-C": (LONG, signal.SIGINT, 130, 130),
    "SIGTERM": (LONG, signal.SIGTERM, 130, 143),
    "SIGKILL": (LONG, signal.SIGKILL, -signal.SIGKILL, None),
}

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")


class Child:
    """``fedfrozen run`` in a session of its own, and what it has been seen to use."""

    def __init__(self, root: Path, *words: str) -> None:
        self.root, self.runs, self.temporary = root, root / "runs", root / "tmp"
        self.temporary.mkdir()
        self.mark = f"FEDFROZEN_TEST={os.getpid()}-{time.time_ns()}"
        self.processes: set[Process] = set()
        self.ports: set[int] = set()
        self.paths: set[str] = set()
        where = [f"run-dir={self.runs}", f"cache-dir={root / 'cache'}"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", MAIN, "run", *SMALL, *where, *words],
            env={**os.environ, **dict([self.mark.split("=")]), "TMPDIR": str(self.temporary)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # whoever runs the tests in the background ignores it, and children would, too
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        if self.process.stderr is not None:
            self.process.stderr.close()

    def watch(self, lines: int) -> None:
        """Note what the run uses until it has so many lines of metrics or has ended."""
        metrics, deadline = self.runs / "run" / "metrics.jsonl", time.monotonic() + 200
        while self.process.poll() is None and time.monotonic() < deadline:
            self._look()
            if metrics.exists() and metrics.read_text().count("\n") >= lines:
                return
            time.sleep(0.3)

    def _look(self) -> None:
        found = find_processes(self.mark, [self.process.pid])
        self.processes |= found
        pids = [process.pid for process in found]
        self.ports |= listening(pids)
        for pid in pids:
            self.paths |= mapped(pid) | {str(path) for path in own_folders(pid)}

    def end(self, number: signal.Signals | None, seconds: float = 120) -> str:
        """Send a signal as a terminal or a service manager does; return what the run says."""
        if number == signal.SIGINT:
            os.killpg(self.process.pid, number)
        elif number is not None:
            self.process.send_signal(number)
        return self.process.communicate(timeout=seconds)[1]

    def left_over(self, seconds: float = 10) -> dict[str, list[object]]:
        """Return what is left; processes whose parent was killed may take some seconds."""
        deadline = time.monotonic() + seconds
        while any((left := self._left()).values()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def _left(self) -> dict[str, list[object]]:
        unfinished = [*self.runs.rglob(".*"), *(self.root / "cache").rglob(".*")]
        states = (self.root / "cache" / "clients").glob("*")
        parcels = Path(SHARED_MEMORY).glob(f"fedfrozen-{self.process.pid}-*")
        return {
            "processes": sorted((self.processes & _parents().keys()) | find_processes(self.mark)),
            "ports": sorted(self.ports & listening(None)),
            "mapped or owned": sorted(path for path in self.paths if os.path.exists(path)),
            "parcels": sorted(map(str, parcels)),
            "temporary": [name for name in os.listdir(self.temporary) if name not in TORCHS],
            "unfinished": sorted(map(str, unfinished)),
            "states": sorted(map(str, states)),
        }


def listening(pids: Iterable[int] | None) -> set[int]:
    """Return the TCP ports that some processes listen on, None for anybody's."""
    inodes = None if pids is None else {one for pid in pids for one in sockets(pid)}
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in (Path("/proc/net") / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == TCP_LISTEN and (inodes is None or fields[9] in inodes):
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def sockets(pid: int) -> set[str]:
    """Return the inodes of a process's sockets."""
    found = set()
    try:
        for number in os.listdir(f"/proc/{pid}/fd"):
            name = os.readlink(f"/proc/{pid}/fd/{number}")
            if name.startswith("socket:["):
                found.add(name[8:-1])
    except OSError:  # ended meanwhile
        pass
    return found


def mapped(pid: int) -> set[str]:
    """Return the files in shared memory that a process has mapped and that have a name."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    paths = {line.split(maxsplit=5)[5] for line in lines if SHARED_MEMORY in line}
    return {path for path in paths if not path.endswith("(deleted)")}


def own_folders(pid: int) -> Iterable[Path]:
    """Return Flower's home of a process, and the scratch folder that it lies in."""
    try:
        names = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return
    for name in names:
        if name.startswith(b"FLWR_HOME="):
            home = Path(os.fsdecode(name[len(b"FLWR_HOME=") :]))
            yield home
            yield home.parent


def check(root: Path, ending: str, engine: str, *words: str) -> None:
    keys, number, *codes = ENDINGS[ending]
    with Child(root, f"engine={engine}", *keys, *words) as child:
        child.watch(lines=3 if number is not None else 10**9)
        said = child.end(number)
        assert child.process.returncode == codes[engine == "flwr"], said
        nothing = {kind: [] for kind in child._left()}
        left = child.left_over()
    if number == signal.SIGKILL:  # nobody was there to remove them; the next run does
        left["states"] = left["unfinished"] = []
    assert left == nothing
    assert child.processes, "nothing was watched"
    assert bool(child.ports) == (engine == "flwr")
    if number != signal.SIGKILL:
        assert "Traceback" not in said or engine == "flwr"
        assert (child.runs / "run" / "model.safetensors").exists() or engine == "flwr"
    if codes[engine == "flwr"] == 130:
        assert "interrupted" in said


FAST = [("SIGTERM", 2)]


@pytest.mark.parametrize(
    ("ending", "jobs"),
    [
        pytest.param(ending, jobs, marks=[] if (ending, jobs) in FAST else pytest.mark.slow)
        for ending in ENDINGS
        for jobs in (1, 2)
    ],
)
def test_a_run_of_this_machine_leaves_its_folder_and_no_more(
    tmp_path: Path, ending: str, jobs: int
) -> None:
    check(tmp_path, ending, "local", f"jobs={jobs}")


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["normal", "error", "Ctrl-C", "SIGTERM"])
def test_a_run_of_flowers_runtime_leaves_its_folder_and_no_more(
    tmp_path: Path, ending: str
) -> None:
    check(tmp_path, ending, "flwr")


@pytest.mark.slow
def test_an_impatient_second_interrupt_leaves_no_more(tmp_path: Path) -> None:
    with Child(tmp_path, *LONG, "jobs=2") as child:
        child.watch(lines=3)
        os.killpg(child.process.pid, signal.SIGINT)
        time.sleep(0.02)
        said = child.end(signal.SIGINT)
        assert child.process.returncode == 130 and "Traceback" not in said
        left = child.left_over()
    left["states"] = []  # a week later, by the next run
    assert left == {kind: [] for kind in left}
