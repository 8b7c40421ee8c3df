"""Run the app through Flower's own simulation runtime (SuperLink, SuperExec, Ray).

What ``flwr run`` leaves to chance is fixed here: a SuperLink of our own on a free port with
a Flower home of its own, so that neither the user's files nor a SuperLink that already runs
is touched; a neutral working directory, because Ray puts the SuperLink's directory ahead of
the app; an app folder made of this very package, whichever checkout or wheel it came from;
no dependency installation and no calls home; success read from the run's final status, as
the exit code of ``flwr run`` says nothing; and the end of every process, whatever happens.
"""

import json
import re
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

import tomli_w

from fedfrozen_app.config import ConfigValue, RunConfig
from fedfrozen_app.engine.flower_app import (
    Resources,
    resolved_config,
    runtime_environment,
    simulation_resources,
    write_app,
)
from fedfrozen_app.engine.interrupts import handled, signals_ignored
from fedfrozen_app.engine.processes import end_processes

OnLine = Callable[[str], None]

CONNECTION = "fedfrozen"
COMPLETED = "finished:completed"
START_SECONDS = 90.0
# A Unix socket's path has 107 bytes (103 on macOS) and Ray adds 68 to the scratch folder's.
LONGEST_TEMP_ROOT = 16
ANSI_STYLE = re.compile(r"\x1b\[[0-9;]*m")


def run_with_flower(config: RunConfig, on_line: OnLine) -> int:
    """Run ``config`` on Flower's simulation runtime and wait for its end.

    Parameters
    ----------
    config
        The run; relative paths mean the current directory's.
    on_line
        Called in this thread with every line of the run's log, without the line end.

    Returns
    -------
    int
        0 when the run's final status is ``finished:completed``, else 1.

    Raises
    ------
    ConfigError
        If Flower's programs are missing or ``device`` asks for a GPU that is not there.
    """
    package = Path(__file__).resolve().parents[1]
    run_config = resolved_config(config).to_mapping()
    return run_app(package, run_config, simulation_resources(config), on_line)


def run_app(
    package: Path, run_config: Mapping[str, ConfigValue], resources: Resources, on_line: OnLine
) -> int:
    """Run any package that holds a ServerApp and a ClientApp; see :func:`run_with_flower`."""
    with _signals_as_exceptions(), _scratch_folder() as scratch:
        environment = runtime_environment(scratch, resources.environment)
        write_app(scratch / "app", package, run_config)
        runtime = _Runtime(scratch, environment)
        try:
            runtime.start_superlink()
            runtime.run(scratch / "app", resources.federation_config(), on_line)
            status = runtime.final_status()
        except _RuntimeFailure as failure:
            status = str(failure)
        finally:
            with signals_ignored():
                runtime.end()
    if status == COMPLETED:
        return 0
    for line in f"The Flower run did not complete: {status}".splitlines():
        on_line(line)
    return 1


class _RuntimeFailure(Exception):
    """Flower's runtime itself did not come up or did not answer."""


class _Runtime:
    """One SuperLink of our own and the ``flwr`` commands sent to it."""

    def __init__(self, scratch: Path, environment: Mapping[str, str]) -> None:
        self.home = Path(environment["FLWR_HOME"])
        self.neutral = scratch / "empty"
        self.log = scratch / "superlink.log"
        self.environment = environment
        self.processes: list[subprocess.Popen[str]] = []

    def start_superlink(self) -> None:
        """Start a SuperLink that keeps its state in memory; wait until it answers."""
        self.home.mkdir()
        self.neutral.mkdir()
        port = _free_port()
        connection = {"address": f"127.0.0.1:{port}", "insecure": True}
        config = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
        (self.home / "config.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
        command = ["flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--database", ":flwr-in-memory:"]
        with self.log.open("w") as log:
            superlink = self._start(command, log)
        deadline = time.monotonic() + START_SECONDS
        while not _is_healthy(port):
            if superlink.poll() is not None or time.monotonic() > deadline:
                tail = self.log.read_text(errors="replace")[-2000:]
                raise _RuntimeFailure(f"flower-superlink did not start\n{tail}")
            time.sleep(0.2)

    def run(self, app: Path, federation_config: str, on_line: OnLine) -> None:
        """Submit the app and pass on the lines of its log until the run has ended."""
        command = ["flwr", "run", str(app), CONNECTION, "--stream"]
        submission = self._start(
            [*command, "--federation-config", federation_config], subprocess.PIPE
        )
        for line in submission.stdout or ():
            on_line(ANSI_STYLE.sub("", line).rstrip())

    def final_status(self) -> str:
        """Return ``finished:completed``, or what else this SuperLink's one run came to."""
        listing = self._start(["flwr", "list", CONNECTION, "--format", "json"], subprocess.PIPE)
        output, _ = listing.communicate()
        try:
            runs = json.loads(output[output.index("{") :])["runs"]
            status, details = str(runs[0]["status"]), runs[0]["status-details"]
        except (ValueError, LookupError):
            raise _RuntimeFailure(f"its status is unknown\n{output}") from None
        return status if status == COMPLETED else f"{status}, {details}"

    def end(self) -> None:
        """End every process of the run and reap our own children."""
        mark = f"FLWR_HOME={self.home}"
        end_processes(mark, [process.pid for process in self.processes])
        for process in self.processes:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _start(self, command: list[str], output: int | IO[Any]) -> subprocess.Popen[str]:
        # A session of its own: Ctrl-C in a terminal is for us to handle, not for the child.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=self.neutral,
            env=dict(self.environment),
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        self.processes.append(process)
        return process


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    """Yield a new folder whose path is short enough for Ray's sockets; remove it after."""
    root = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(
        prefix="fedfrozen-", dir=root if len(root) <= LONGEST_TEMP_ROOT else "/tmp"
    ) as folder:
        yield Path(folder)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_healthy(port: int) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/health", timeout=1.0) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _raise_exit(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


@contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """Let SIGTERM and a closed terminal unwind the stack, as Ctrl-C does, and not just kill."""
    with handled(_raise_exit, signal.SIGTERM, signal.SIGHUP):
        yield
