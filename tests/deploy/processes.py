"""A federation of processes on loopback, started by the scripts of deploy/ as a user would."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fedfrozen_app.deploy.keys import KeyRequest, make_keys
from fedfrozen_app.engine.processes import end_processes, find_processes

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
ANSI_STYLE = re.compile(r"\x1b\[[0-9;]*m")
HOSTS = ("localhost", "127.0.0.1")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {seconds:g} s still not: {what}")
        time.sleep(0.2)


def command(name: str) -> str:
    """Return a script of deploy/, or the program of that name."""
    return str(DEPLOY / name) if (DEPLOY / name).exists() else name


def call(
    words: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    *,
    check: bool = True,
    seconds: float = 900.0,
    on_failure: Callable[[], str] = lambda: "",
) -> str:
    """Run a program to its end and return its output; fail with the end of it if it fails."""
    done = subprocess.run(
        words,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    output = ANSI_STYLE.sub("", done.stdout + done.stderr)
    if check and done.returncode != 0:
        raise AssertionError(f"{shlex.join(words)}\n{output[-5000:]}\n{on_failure()}")
    return output


def run_config_text(config: dict[str, Any]) -> str:
    """Return keys as `flwr run -c` takes them: strings in quotes."""
    return " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())


class Federation:
    """SuperLink, server app and SuperNodes below ``folder``, all on ports of their own."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.nodes = folder, nodes
        self.port = free_port()
        self.node_ports = [free_port() for _ in range(nodes)]
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        kept = {key: value for key, value in os.environ.items() if not key.startswith("FLWR_")}
        self.environment = {
            **kept,
            "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            "HOME": str(folder),
            "TMPDIR": str(self.temporary),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "FEDFROZEN_HOME": str(folder / "server"),
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "KEYS": str(folder / "keys"),
            "STATES": str(folder / "nodes"),
            "SUPERLINK": f"127.0.0.1:{self.port}",
            "NUM_NODES": str(nodes),
        }

    def __enter__(self) -> Self:
        make_keys(KeyRequest(self.folder / "keys", self.nodes, HOSTS))
        try:
            self.start_superlink()
            self.start("serverapp", "serverapp.sh")
            self.call("register.sh")
            for index in range(self.nodes):
                self.start_node(index)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.end()

    @property
    def mark(self) -> str:
        """What every process of the federation has in its environment."""
        return f"FLWR_HOME={self.environment['FLWR_HOME']}"

    def end(self) -> None:
        end_processes(self.mark, [process.pid for process in self.processes.values()])
        for process in self.processes.values():
            process.wait()

    def start(self, name: str, program: str, *arguments: str, **environment: str) -> None:
        """Start a script of deploy/, or a program; its log is added to NAME.log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [command(program), *arguments],
                cwd=self.folder,
                env={**self.environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def start_superlink(self) -> None:
        self.start("superlink", "superlink.sh", STATE=str(self.folder), PORT=str(self.port))
        health = [
            sys.executable,
            str(DEPLOY / "health.py"),
            f"https://localhost:{self.port}/health",
        ]
        health.append(str(self.folder / "keys" / "ca.crt"))
        wait_until(
            lambda: subprocess.run(health, capture_output=True).returncode == 0, "a SuperLink"
        )

    def start_node(self, index: int, **environment: str) -> None:
        port = str(self.node_ports[index])
        self.start(f"node-{index}", "supernode.sh", str(index), PORT=port, **environment)

    def call(self, *words: str, seconds: float = 900.0) -> str:
        """Run a script of deploy/, or a program, to its end; return its output."""
        words = (command(words[0]), *words[1:])
        return call(words, self.folder, self.environment, seconds=seconds, on_failure=self.logs)

    def run(self, config: dict[str, Any], seconds: float = 900.0) -> str:
        """Submit a run and follow its log to the end; return the log."""
        text = run_config_text(config)
        return self.call(
            "flwr.sh", "run", str(ROOT), "prod", "--stream", "-c", text, seconds=seconds
        )

    def status(self) -> str:
        """Return the status of the newest run."""
        output = self.call("flwr.sh", "list", "prod", "--format", "json")
        runs = json.loads(output[output.index("{") :])["runs"]
        return str(max(runs, key=lambda run: run["pending-at"])["status"])

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return ANSI_STYLE.sub("", path.read_text(errors="replace")) if path.exists() else ""

    def logs(self) -> str:
        """The end of every log, for the message of a failed test."""
        return "\n".join(f"--- {name}\n{self.log(name)[-2000:]}" for name in self.processes)

    def run_folder(self, name: str) -> Path:
        return self.folder / "server" / "runs" / name

    def left_over(self) -> dict[str, list[Any]]:
        """Return what is still there after the end."""
        ports = [port for port in (self.port, *self.node_ports) if is_open(port)]
        return {
            "processes": sorted(find_processes(self.mark)),
            "ports": ports,
            "files": sorted(path.name for path in self.temporary.iterdir()),
        }


def comparable(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run folder without what a clock measures or the wire adds."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    varying = ("seconds", "wire_bytes")
    return [{k: v for k, v in line.items() if not k.startswith(varying)} for line in lines]


def forget_cache(folder: Path) -> None:
    """Remove the frozen blocks that a node keeps."""
    shutil.rmtree(folder / "cache" / "frozen")
