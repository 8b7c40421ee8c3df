"""The same federation in containers: `pytest -m docker tests/deploy`; 20 minutes on two cores.

The image is built from BASE_IMAGE (environment; python:3.11-slim-bookworm unless set).
"""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedfrozen_app.deploy.keys import KeyRequest, make_keys
from tests.deploy.processes import ROOT, call, comparable, run_config_text
from tests.deploy.test_loopback import CONFIG, run_here

HOSTS = ("superlink", "localhost", "127.0.0.1")
OWNER = 10001  # whom the image runs as

pytestmark = [
    pytest.mark.docker,
    pytest.mark.skipif(
        shutil.which("docker-compose") is None
        or subprocess.run(["docker", "info"], capture_output=True).returncode != 0,
        reason="no Docker engine, or no docker-compose",
    ),
]


class Compose:
    """A federation of containers; volumes and all are removed at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "COMPOSE_PROJECT_NAME": "fedfrozen-test",
            "COMPOSE_FILE": str(ROOT / "docker-compose.yml"),
            "IMAGE": os.environ.get("IMAGE", "fedfrozen:test"),
            "KEYS": str(folder / "keys"),
            "DATA": str(folder / "data"),
            "SUPERLINK_PORT": "18432",
            "NUM_NODES": "3",
        }
        make_keys(KeyRequest(folder / "keys", 3, HOSTS))
        (folder / "data").mkdir()
        for path in [folder / "keys", *(folder / "keys").rglob("*")]:
            os.chown(path, OWNER, OWNER)

    def call(self, *command: str, check: bool = True, seconds: float = 1800) -> str:
        return call(command, self.folder, self.environment, check=check, seconds=seconds)

    def compose(self, *arguments: str, **options: Any) -> str:
        return self.call("docker-compose", *arguments, **options)

    def ids(self, service: str) -> list[str]:
        return self.compose("ps", "-q", service).split()

    def node(self, index: int) -> str:
        """Return the container that has a node's number."""
        for container in self.ids("supernode"):
            found = self.call("docker", "exec", container, "hostname").strip()
            owner = self.call("docker", "exec", container, "cat", f"/claims/{index}").strip()
            if found == owner:
                return container
        raise LookupError(f"no container is node {index}")

    def submit(self, name: str, **keys: Any) -> None:
        """Submit a run and return at once."""
        text = run_config_text({**CONFIG, "run-name": name, **keys})
        self.compose("run", "--rm", "-T", "flwr", "run", "/opt/fedfrozen", "prod", "-c", text)

    def status(self) -> str:
        (server,) = self.ids("serverapp")
        words = ("docker", "exec", server, "flwr.sh", "list", "prod", "--format", "json")
        output = self.call(*words, check=False)
        if '"runs"' not in output:  # the SuperLink is away, or starting
            return "unknown"
        runs = json.loads(output[output.index("{") : output.rindex("}") + 1])["runs"]
        return str(max(runs, key=lambda run: run["pending-at"])["status"])

    def rounds(self, name: str) -> int:
        """Return how many lines of metrics a run has, round 0 included."""
        (server,) = self.ids("serverapp")
        path = f"/runs/runs/{name}/metrics.jsonl"
        return len(self.call("docker", "exec", server, "cat", path, check=False).split("\n{"))

    def finish(self, name: str, seconds: float = 1200) -> str:
        """Wait for the end of the newest run; return its status."""
        wait_until(lambda: self.status().startswith("finished"), f"the end of {name}", seconds, 10)
        return self.status()

    def fetch(self, name: str) -> Path:
        """Copy a run folder from the server's volume."""
        (server,) = self.ids("serverapp")
        target = self.folder / name
        self.call("docker", "cp", f"{server}:/runs/runs/{name}", str(target))
        return target


def wait_until(
    condition: Callable[[], bool], what: str, seconds: float = 300, pause: float = 1
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"after {seconds:g} s still not: {what}"
        time.sleep(pause)


def is_healthy(compose: Compose, service: str) -> bool:
    health = "{{.State.Health.Status}}"
    states = compose.call("docker", "inspect", "-f", health, *compose.ids(service)).split()
    return set(states) == {"healthy"}


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    federation = Compose(tmp_path_factory.mktemp("docker"))
    try:
        federation.compose("build", "--quiet")
        federation.compose("up", "-d")
        for service in ("superlink", "serverapp", "supernode"):
            wait_until(lambda s=service: is_healthy(federation, s), f"a healthy {service}", 600)  # type: ignore[misc]
        yield federation
    finally:
        print(federation.compose("logs", "--no-color", "--tail=60", check=False))
        federation.compose("down", "--volumes", "--timeout", "10", check=False)


def test_the_image_runs_without_root_and_without_tools_to_build(compose: Compose) -> None:
    (server,) = compose.ids("serverapp")
    assert compose.call("docker", "exec", server, "id", "-u").strip() == str(OWNER)
    look = "command -v gcc cc make git || true"
    assert compose.call("docker", "exec", server, "sh", "-c", look) == ""
    assert "No module named pip" in compose.call(
        "docker", "exec", server, "python", "-m", "pip", check=False
    )
    for service in ("superlink", "serverapp", "supernode"):
        for container in compose.ids(service):
            keys = compose.call("docker", "exec", container, "find", "/keys", "-type", "f")
            assert "ca.key" not in keys
            assert ("server.key" in keys) == (service == "superlink")


def test_a_run_ends_with_the_metrics_of_one_process(compose: Compose, tmp_path: Path) -> None:
    compose.submit("clean")
    assert compose.finish("clean") == "finished:completed"
    fetched, here = compose.fetch("clean"), run_here(tmp_path)
    assert comparable(fetched) == comparable(here)
    assert [line["phase"] for line in comparable(here)] == ["start", "warmup", "frozen", "frozen"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--root-certificates /keys/ca.crt --auth-supernode-private-key /tmp/k", "[code: 2004]"),
        ("--insecure", "Failed to initialize the connection"),
    ],
)
def test_a_node_with_another_key_and_one_without_tls_are_turned_away(
    options: str, reason: str, compose: Compose
) -> None:
    other = "ssh-keygen -q -t ecdsa -b 384 -N '' -f /tmp/k || fedfrozen keys --out /tmp/o --nodes 1"
    script = (
        f"({other}) >/dev/null 2>&1; test -e /tmp/k || cp /tmp/o/nodes/node-0 /tmp/k; "
        "python /opt/fedfrozen/deploy/supernode.py "
        f"--superlink superlink:8000 --max-retries 1 {options}"
    )
    out = compose.compose("run", "--rm", "-T", "--entrypoint", "sh", "supernode", "-c", script,
                          check=False)  # fmt: skip
    assert reason in out and "SuperNode ID" not in out


def test_a_node_killed_in_mid_round_comes_back_and_takes_part_again(compose: Compose) -> None:
    compose.submit("killed", rounds=8)
    wait_until(lambda: compose.rounds("killed") >= 3, "two rounds", 900)
    node = compose.node(1)
    before = compose.call("docker", "exec", node, "ls", "/cache/node-1/cache/frozen")
    assert before.strip()  # it has the frozen block
    wait_until(lambda: "train message" in last_lines(compose, node), "work for the node", 120)
    compose.call("docker", "kill", node)
    compose.compose("run", "--rm", "-T", "--entrypoint", "rm", "supernode", "-r",
                    "/cache/node-1/cache/frozen")  # fmt: skip
    compose.call("docker", "start", node)
    assert compose.finish("killed", 2400) == "finished:completed"
    assert compose.node(1) == node
    lines = comparable(compose.fetch("killed"))
    assert len(lines) == 9
    (lost,) = [line["round"] for line in lines if line["dropped"]]
    clients = [line["clients"] for line in lines]
    assert clients[lost] == 2 and clients[1] == clients[-1] == 3
    back = next(r for r in range(lost + 1, 9) if clients[r] == 3)
    whole, active = (lines[r]["bytes_down"] / 3 for r in (1, 8))
    # the round in which it is back sends the frozen block again, to this one node
    assert lines[back]["bytes_down"] == 3 * active + whole
    assert lines[back]["bytes_up"] == lines[-1]["bytes_up"]


def last_lines(compose: Compose, container: str) -> str:
    out = compose.call("docker", "logs", "--since", "3s", container)
    return "\n".join(re.findall(r"Receiving: .*", out))


def received(compose: Compose, container: str) -> int:
    """Return how many messages a node has taken in."""
    return compose.call("docker", "logs", container).count("Received successfully")


def test_a_superlink_that_comes_back_at_once_costs_the_run_nothing(
    compose: Compose, tmp_path: Path
) -> None:
    nodes = compose.ids("supernode")
    before = [received(compose, node) for node in nodes]
    compose.submit("short", **{"round-timeout": 600.0})
    # a message that is on its way to a node in that moment would be lost: docs/deployment.md
    wait_until(
        lambda: all(
            received(compose, node) >= b + 3 for node, b in zip(nodes, before, strict=True)
        ),
        "the question for its partition and two rounds' messages at every node",
        900,
    )
    (superlink,) = compose.ids("superlink")
    compose.call("docker", "kill", superlink)
    compose.call("docker", "start", superlink)
    assert compose.finish("short") == "finished:completed"
    assert comparable(compose.fetch("short")) == comparable(run_here(tmp_path))


def test_a_superlink_that_stays_away_fails_the_run_and_resume_goes_on(
    compose: Compose, tmp_path: Path
) -> None:
    compose.submit("long")
    wait_until(lambda: compose.rounds("long") >= 2, "a round", 900)
    (superlink,) = compose.ids("superlink")
    compose.call("docker", "kill", superlink)
    time.sleep(90)
    compose.call("docker", "start", superlink)
    wait_until(lambda: is_healthy(compose, "superlink"), "a healthy SuperLink")
    assert compose.finish("long") == "finished:failed"
    compose.submit("long", resume=True)
    assert compose.finish("long") == "finished:completed"
    assert comparable(compose.fetch("long")) == comparable(run_here(tmp_path))
