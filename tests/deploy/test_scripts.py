"""The scripts of deploy/ one by one, with stand-ins for Flower's programs."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SCRIPTS = sorted(DEPLOY.glob("*.sh"))
Start = Callable[..., subprocess.Popen[str]]

pytestmark = pytest.mark.skipif(shutil.which("flock") is None, reason="flock is not installed")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a script in an empty folder; programs in its folder `bin` come first."""
    started: list[subprocess.Popen[str]] = []
    (tmp_path / "bin").mkdir()

    def start(script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        process = subprocess.Popen(
            ["bash", str(DEPLOY / script), *arguments],
            cwd=tmp_path,
            env={"PATH": path, "HOME": str(tmp_path), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def program(tmp_path: Path, name: str, body: str) -> None:
    path = tmp_path / "bin" / name
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_may_be_run_and_is_sound(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "set -euo pipefail" in script.read_text()


# --- claim.sh ---------------------------------------------------------------------------------


def claim(start: Start, folder: Path, count: int, owner: str) -> subprocess.Popen[str]:
    body = 'echo "$0"; exec sleep 60'
    return start("claim.sh", str(folder), str(count), "bash", "-c", body, CLAIMANT=owner)


def test_claimants_have_each_a_number_and_one_too_many_waits(start: Start, tmp_path: Path) -> None:
    held = [line(claim(start, tmp_path, 3, f"host-{i}")) for i in range(3)]
    assert sorted(held) == ["0", "1", "2"]
    assert line(claim(start, tmp_path, 3, "host-3")).startswith("claim: all 3 numbers are taken")


def test_a_claimant_that_was_killed_gets_its_number_back(start: Start, tmp_path: Path) -> None:
    claimants = [claim(start, tmp_path, 3, f"host-{i}") for i in range(3)]
    held = [line(process) for process in claimants]
    for process in claimants[:2]:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert line(claim(start, tmp_path, 3, "host-1")) == held[1]
    assert line(claim(start, tmp_path, 3, "another")) == held[0]  # the only one left


# --- supernode.sh -----------------------------------------------------------------------------

FAST = {"RESTART_SECONDS": "0.2", "KILLED_SECONDS": "0.7", "NUM_NODES": "5"}
RECORD = 'echo "$@" >> "$HOME/calls"; date +%s.%N >> "$HOME/times"; '


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_a_node_is_told_its_key_partition_data_and_cache(start: Start, tmp_path: Path) -> None:
    program(tmp_path, "python", 'printf "%s\\n" "${@:2}"; exec sleep 60')
    (tmp_path / "data" / "node-3").mkdir(parents=True)
    environment = {"DATA": "data", "DEVICE": "cpu", "THREADS": "1", "KEYS": "/k", **FAST}
    node = start("supernode.sh", "3", SUPERLINK="there:8000", **environment)
    said = [line(node) for _ in range(12)]
    told = dict(zip(said[::2], said[1::2], strict=True))
    assert told == {
        "--root-certificates": "/k/ca.crt",
        "--superlink": "there:8000",
        "--auth-supernode-private-key": "/k/nodes/node-3",
        "--node-config": f'partition-id=3 num-partitions=5 cache-dir="{tmp_path}/state/node-3/'
        f'cache" data-dir="{tmp_path}/data/node-3" device="cpu" threads=1',
        "--host": "127.0.0.1",
        "--port": "9103",
    }
    assert (tmp_path / "state" / "node-3" / "cache").is_dir()


def test_flower_reads_the_node_config_as_it_is_meant() -> None:
    from flwr.common.config import parse_config_args

    text = 'partition-id=3 num-partitions=5 cache-dir="/a b/c" device="cpu" threads=1'
    assert parse_config_args([text]) == {
        "partition-id": 3,
        "num-partitions": 5,
        "cache-dir": "/a b/c",
        "device": "cpu",
        "threads": 1,
    }


@pytest.mark.parametrize("data", [None, "empty"])
def test_a_node_without_data_of_its_own_leaves_it_to_the_run(
    data: str | None, start: Start, tmp_path: Path
) -> None:
    program(tmp_path, "python", RECORD + "exec sleep 60")
    (tmp_path / "empty").mkdir()
    start("supernode.sh", "0", **FAST, **({"DATA": data} if data else {}))
    wait_for(lambda: len(lines(tmp_path / "calls")) == 1)
    assert "data-dir" not in lines(tmp_path / "calls")[0]


@pytest.mark.parametrize(
    ("ending", "pause"),
    [("exit 1", 0.2), ("exit 0", 0.2), ("exit 200", 0.7), ("kill -KILL $$", 0.7)],
)
def test_a_node_comes_back_and_later_if_it_was_killed(
    ending: str, pause: float, start: Start, tmp_path: Path
) -> None:
    program(tmp_path, "python", RECORD + ending)
    start("supernode.sh", "0", **FAST)
    wait_for(lambda: len(lines(tmp_path / "times")) >= 3)
    first, second, third = map(float, lines(tmp_path / "times")[:3])
    assert second - first >= pause and third - second >= pause
    if pause < 0.7:
        assert (third - first) / 2 < 0.7


def test_a_node_whose_host_went_down_waits_until_it_counts_as_offline(
    start: Start, tmp_path: Path
) -> None:
    program(tmp_path, "python", RECORD + "exec sleep 60")
    first = start("supernode.sh", "0", **FAST)
    wait_for(lambda: len(lines(tmp_path / "calls")) == 1)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    again = time.time()
    assert line(start("supernode.sh", "0", **FAST)).endswith("was killed; starting again in 0.7 s")
    wait_for(lambda: len(lines(tmp_path / "times")) == 2)
    assert float(lines(tmp_path / "times")[1]) - again >= 0.7


def test_a_node_that_is_asked_to_stop_says_goodbye_and_starts_at_once_next_time(
    start: Start, tmp_path: Path
) -> None:
    goodbye = "trap 'sleep 0.3; echo goodbye; exit 0' TERM; while :; do sleep 0.05; done"
    program(tmp_path, "python", RECORD + goodbye)
    node = start("supernode.sh", "0", **FAST)
    wait_for(lambda: len(lines(tmp_path / "calls")) == 1)
    time.sleep(0.1)  # until the stand-in has set its trap
    node.terminate()
    out, _ = node.communicate(timeout=60)
    assert node.returncode == 0 and "goodbye" in out
    assert not (tmp_path / "state" / "node-0" / "running").exists()
    started = time.time()
    start("supernode.sh", "0", RESTART_SECONDS="5", KILLED_SECONDS="5")
    wait_for(lambda: len(lines(tmp_path / "times")) == 2)
    assert float(lines(tmp_path / "times")[1]) - started < 5


def test_a_pause_ends_at_once_when_the_node_is_asked_to_stop(start: Start, tmp_path: Path) -> None:
    program(tmp_path, "python", "exit 1")
    node = start("supernode.sh", "0", RESTART_SECONDS="60", KILLED_SECONDS="60")
    assert "starting again in 60 s" in line(node)
    node.terminate()
    node.communicate(timeout=60)
    assert node.returncode == 0


# --- supernode.py: Flower's SuperNode with stand-ins for its insides -----------------------------


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("return", 200),  # the main loop ended after an error; the HTTP server's thread lives
        ("raise RuntimeError('x')", 200),
        ("raise SystemExit(0)", 0),
        ("raise SystemExit(1)", 1),
        ("threading.Thread(target=int, args=['x']).start(); time.sleep(60)", 200),
    ],
)
def test_a_supernode_that_has_stopped_working_ends(body: str, code: int, tmp_path: Path) -> None:
    package = tmp_path / "flwr" / "supernode"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "cli.py").write_text(
        "import threading, time\n"
        "def flower_supernode():\n"
        "    threading.Thread(target=time.sleep, args=[60]).start()\n"
        f"    {body}\n"
    )
    done = subprocess.run(
        [sys.executable, str(DEPLOY / "supernode.py")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        timeout=30,
    )
    assert done.returncode == code, done.stderr


@pytest.mark.slow
def test_the_superlinks_database_waits_a_minute_for_a_lock(tmp_path: Path) -> None:
    code = f"""
import runpy
from flwr.superlink import cli
cli.flower_superlink = lambda: 0
try:
    runpy.run_path({str(DEPLOY / "superlink.py")!r}, run_name="__main__")
except SystemExit:
    pass
from sqlalchemy import text
from flwr.superlink.config_loader import get_federation_manager, get_objectstore_linkstate_factories
manager = get_federation_manager(is_simulation=False)
_, factory = get_objectstore_linkstate_factories({str(tmp_path / "x.db")!r}, manager)
state = factory.state()
with state.session() as session:
    print(*[session.scalar(text(f"PRAGMA {{name}}")) for name in ("busy_timeout", "journal_mode")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["60000 wal"], done.stdout + done.stderr


def test_a_server_app_process_that_ends_is_started_again(start: Start, tmp_path: Path) -> None:
    program(tmp_path, "flower-superexec", RECORD + "exit 1")
    start("serverapp.sh", RESTART_SECONDS="0.2", SUPERLINK="there:8000", HEALTH="here:1")
    wait_for(lambda: len(lines(tmp_path / "times")) >= 2)
    assert lines(tmp_path / "calls")[0] == (
        "--root-certificates keys/ca.crt --superexec-auth-secret-file keys/server/superexec.secret "
        "--runtime-api-address there:8000 --health-server-address here:1"
    )


# --- flwr.sh and register.sh ------------------------------------------------------------------


def test_the_connection_is_added_once_and_others_stay(start: Start, tmp_path: Path) -> None:
    import tomllib

    program(tmp_path, "flwr", 'echo "$@"')
    (tmp_path / "keys").mkdir()
    home = tmp_path / "flower home"
    home.mkdir()
    (home / "config.toml").write_text('[superlink]\ndefault = "mine"\n[superlink.mine]\nx = 1')
    for _ in range(2):
        process = start("flwr.sh", "run", ".", "prod", FLWR_HOME=str(home), SUPERLINK="a:1")
        assert line(process) == "run . prod" and process.wait() == 0
    config = tomllib.loads((home / "config.toml").read_text())["superlink"]
    assert config["default"] == "mine" and config["mine"] == {"x": 1}
    assert config["prod"] == {
        "address": "a:1",
        "root-certificates": str(tmp_path / "keys" / "ca.crt"),
    }


def test_registering_goes_on_past_a_key_that_is_known_and_fails_for_any_other_reason(
    start: Start, tmp_path: Path
) -> None:
    nodes = tmp_path / "keys" / "nodes"
    nodes.mkdir(parents=True)
    for index in range(3):
        (nodes / f"node-{index}.pub").touch()
    program(
        tmp_path,
        "flwr",
        'case "$*" in *node-1.pub*) echo "Public key already in use" >&2; exit 1;; '
        "*node-2.pub*) echo no luck; exit ${FAIL:-0};; esac",
    )
    process = start("register.sh")
    out, _ = process.communicate()
    assert process.returncode == 0
    assert out.splitlines() == [
        "registered node-0",
        "node-1 is registered already",
        "registered node-2",
    ]
    failing = start("register.sh", FAIL="1")
    out, _ = failing.communicate()
    assert failing.returncode == 1 and out.splitlines()[-1] == "node-2: no luck"


# --- files that must agree with each other ----------------------------------------------------


def test_the_image_installs_what_the_package_depends_on() -> None:
    import tomllib

    done = subprocess.run(
        [sys.executable, str(DEPLOY / "requirements.py"), str(ROOT / "pyproject.toml")],
        capture_output=True,
        text=True,
        check=True,
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert done.stdout.splitlines() == project["dependencies"]


def test_every_script_that_compose_runs_is_there_and_the_image_takes_it() -> None:
    named = set(re.findall(r"\b([a-z]+\.(?:sh|py))\b", (ROOT / "docker-compose.yml").read_text()))
    assert named >= {"superlink.sh", "serverapp.sh", "supernode.sh", "claim.sh", "health.py"}
    assert {path.name for path in DEPLOY.iterdir()} >= named
    assert "!deploy" in (ROOT / ".dockerignore").read_text().splitlines()


COMPOSE = shutil.which("docker-compose")


@pytest.mark.skipif(COMPOSE is None, reason="docker-compose is not installed")
@pytest.mark.parametrize(
    ("files", "services"),
    [
        (["docker-compose.yml"], {"superlink", "serverapp", "register", "supernode"}),
        (
            ["docker-compose.yml", "docker-compose.gpu.yml"],
            {"superlink", "serverapp", "register", "supernode"},
        ),
        (["deploy/server.yml"], {"superlink", "serverapp", "register"}),
        (["deploy/node.yml"], {"supernode"}),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else None,
)
def test_docker_compose_takes_the_files(files: list[str], services: set[str]) -> None:
    import yaml

    environment = {"PATH": os.environ["PATH"], "NUM_NODES": "5", "NODE_INDEX": "2"}
    options = [word for name in files for word in ("-f", str(ROOT / name))]
    done = subprocess.run(
        [str(COMPOSE), *options, "config"],
        capture_output=True,
        text=True,
        env={**environment, "SUPERLINK": "fl.example.org:8000"},
    )
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load(done.stdout)["services"]
    assert config.keys() - {"flwr"} == services
    for name, service in config.items():
        assert service["user"] == "10001:10001" and service["cap_drop"] == ["ALL"]
        mounts = [str(volume) for volume in service["volumes"]]
        assert not any("ca.key" in mount or mount.endswith("keys:/keys:ro") for mount in mounts)
        if name in ("superlink", "serverapp", "supernode"):
            assert {"healthcheck", "mem_limit", "cpus", "restart"} <= service.keys()
    if "supernode" in config and files[0] == "docker-compose.yml":
        node = config["supernode"]
        assert node["scale"] == 5
        assert node["command"] == ["claim.sh", "/claims", "5", "supernode.sh"]
        assert node["environment"]["DEVICE"] == ("cuda" if len(files) == 2 else "")
    if files == ["deploy/node.yml"]:
        assert config["supernode"]["command"] == ["supernode.sh", "2"]
        assert config["supernode"]["environment"]["SUPERLINK"] == "fl.example.org:8000"
