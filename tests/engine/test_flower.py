import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from flwr.cli.build import build_fab_from_disk

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.engine import flower, flower_app
from fedfrozen_app.engine.flower import run_app, run_with_flower
from fedfrozen_app.engine.flower_app import (
    Resources,
    resolved_config,
    runtime_environment,
    simulation_resources,
    write_app,
)
from fedfrozen_app.engine.processes import end_processes, find_processes

PACKAGE = Path(flower.__file__).parents[1]

SERVER_APP = """
import json, os, time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    config = context.run_config
    report = Path(config["report"])
    seen = {"home": os.environ["FLWR_HOME"], "pid": os.getpid(), "config": config}
    report.write_text(json.dumps(seen))
    if config["ending"] == "raise":
        raise RuntimeError("the server app fails on purpose")
    print("ServerApp is running", flush=True)
    if config["ending"] == "sleep":
        time.sleep(600)
    while len(nodes := list(grid.get_node_ids())) < 3:
        time.sleep(0.05)
    content = RecordDict({"ask": ConfigRecord({"x": 1})})
    messages = [Message(content, dst_node_id=node, message_type="query") for node in nodes]
    replies = [dict(r.content["answer"]) for r in grid.send_and_receive(messages, timeout=60)]
    report.write_text(json.dumps({**seen, "replies": replies}))
"""
CLIENT_APP = """
import json, os, sys
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.query()
def query(message, context):
    answer = {
        "partition": context.node_config["partition-id"],
        "partitions": context.node_config["num-partitions"],
        "config": json.dumps(context.run_config),
        "file": __file__,
        "cwd": os.getcwd(),
    }
    return Message(RecordDict({"answer": ConfigRecord(answer)}), reply_to=message)
"""
# Values that a command line or a careless serialiser would bend.
DELICATE = {
    "text": "two words, \"double\" and 'single' quotes, = \\ # ü\nsecond line",
    "integer": 7,
    "float": 1.0,
    "tiny": 1e-05,
    "flag": True,
    "empty": "",
}


def write_package(folder: Path, client_app: str = CLIENT_APP) -> Path:
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "server_app.py").write_text(SERVER_APP)
    (folder / "client_app.py").write_text(client_app)
    return folder


def run_tiny(tmp_path: Path, ending: str, on_line=lambda line: None) -> tuple[int, dict]:
    """Run the tiny app; return the exit code and what its ServerApp reported."""
    package = write_package(tmp_path / "source" / "tiny_app")
    report = tmp_path / "report.json"
    config = {"report": str(report), "ending": ending, **DELICATE}
    code = run_app(package, config, Resources(nodes=3), on_line)
    return code, json.loads(report.read_text())


def assert_nothing_is_left(home: str) -> None:
    assert find_processes(f"FLWR_HOME={home}") == set()
    assert not Path(home).parent.exists()


@pytest.fixture
def foreign_superlink(tmp_path, monkeypatch) -> Iterator[list[str]]:
    """Another SuperLink where `flwr run` looks for one; yields the requests it gets."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            self.send_response(200)
            self.end_headers()

        do_POST = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    port = str(server.server_address[1])
    home = tmp_path / "users-flwr-home"
    home.mkdir()
    connection = f'[superlink]\ndefault = "mine"\n[superlink.mine]\naddress = "127.0.0.1:{port}"\n'
    (home / "config.toml").write_text(connection + "insecure = true\n")
    monkeypatch.setenv("FLWR_HOME", str(home))
    monkeypatch.setenv("FLWR_LOCAL_SUPERLINK_HTTP_API_PORT", port)
    yield requests
    server.shutdown()
    server.server_close()
    assert [path.name for path in home.rglob("*")] == ["config.toml"]


# --- end to end, through SuperLink, SuperExec and Ray ---------------------------------------


def test_a_completed_run_returns_0_and_leaves_nothing(tmp_path, monkeypatch, foreign_superlink):
    decoy = write_package(tmp_path / "elsewhere" / "tiny_app", "raise ImportError('decoy')")
    monkeypatch.chdir(decoy.parent)
    lines: list[str] = []

    code, report = run_tiny(tmp_path, "complete", lines.append)

    assert code == 0
    assert "ServerApp is running" in lines
    expected = {"report": str(tmp_path / "report.json"), "ending": "complete", **DELICATE}
    assert report["config"] == expected
    replies = sorted(report["replies"], key=lambda reply: reply["partition"])
    assert [(reply["partition"], reply["partitions"]) for reply in replies] == [
        (0, 3),
        (1, 3),
        (2, 3),
    ]
    for reply in replies:
        received = json.loads(reply["config"])
        assert received == expected
        assert {key: type(received[key]) for key in expected} == {
            key: type(value) for key, value in expected.items()
        }
        assert Path(reply["file"]).is_relative_to(report["home"])
        assert Path(reply["cwd"]) == Path(report["home"]).parent / "empty"
    assert_nothing_is_left(report["home"])
    assert foreign_superlink == []


@pytest.mark.slow
def test_a_server_app_that_raises_returns_1_and_leaves_nothing(tmp_path):
    lines: list[str] = []

    code, report = run_tiny(tmp_path, "raise", lines.append)

    assert code == 1
    assert any("the server app fails on purpose" in line for line in lines)
    assert lines[-1].startswith("The Flower run did not complete: finished:failed")
    assert_nothing_is_left(report["home"])


def test_an_interrupt_ends_everything_and_is_passed_on(tmp_path, monkeypatch):
    homes: list[str] = []
    environment = runtime_environment

    def spy(scratch, extra):
        homes.append(str(scratch / "flwr"))
        return environment(scratch, extra)

    def interrupt(line):
        raise KeyboardInterrupt

    monkeypatch.setattr(flower, "runtime_environment", spy)
    with pytest.raises(KeyboardInterrupt):
        run_tiny(tmp_path, "sleep", interrupt)
    assert_nothing_is_left(homes[0])


def test_a_superlink_that_cannot_start_is_a_failure_with_its_log(tmp_path, monkeypatch):
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "flower-superlink").write_text("#!/bin/sh\necho no luck today\nexit 3\n")
    (programs / "flower-superlink").chmod(0o755)
    path = f"{programs}{os.pathsep}{flower_app._search_path()}"
    monkeypatch.setattr(flower_app, "_search_path", lambda: path)
    package = write_package(tmp_path / "source" / "tiny_app")
    lines: list[str] = []

    code = run_app(package, {"x": 1}, Resources(nodes=1), lines.append)

    assert code == 1
    assert lines == [
        "The Flower run did not complete: flower-superlink did not start",
        "no luck today",
    ]


@pytest.mark.slow
def test_a_killed_simulation_returns_1(tmp_path):
    def kill(line):
        if line == "ServerApp is running":
            report = json.loads((tmp_path / "report.json").read_text())
            os.kill(report["pid"], signal.SIGKILL)

    code, report = run_tiny(tmp_path, "sleep", kill)

    assert code == 1
    assert_nothing_is_left(report["home"])


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_a_signal_ends_everything(tmp_path, number, code):
    package = write_package(tmp_path / "source" / "tiny_app")
    config = {"report": str(tmp_path / "report.json"), "ending": "sleep"}
    program = (
        "from pathlib import Path\n"
        "from fedfrozen_app.engine.flower import Resources, run_app\n"
        f"run_app(Path({str(package)!r}), {config!r}, Resources(nodes=3), print)"
    )
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if line.strip() == "ServerApp is running":
                process.send_signal(number)
    assert process.returncode == code
    assert_nothing_is_left(json.loads((tmp_path / "report.json").read_text())["home"])


# --- what the runtime is given ----------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # in flwr
def test_bundle_holds_every_module_of_this_package_and_nothing_else(tmp_path):
    write_app(tmp_path / "app", PACKAGE, RunConfig().to_mapping())
    bundle = zipfile.ZipFile(io.BytesIO(build_fab_from_disk(tmp_path / "app")))
    modules = {str(path.relative_to(PACKAGE.parent)) for path in PACKAGE.rglob("*.py")}
    assert {"fedfrozen_app/config.py", "fedfrozen_app/engine/flower.py"} <= modules
    assert set(bundle.namelist()) == modules | {"pyproject.toml", ".info/CONTENT"}


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # in flwr
def test_bundle_keeps_every_config_value_and_its_type(tmp_path):
    config = {**RunConfig().to_mapping(), **DELICATE}
    write_app(tmp_path / "app", PACKAGE, config)
    bundle = zipfile.ZipFile(io.BytesIO(build_fab_from_disk(tmp_path / "app")))
    app = tomllib.loads(bundle.read("pyproject.toml").decode())["tool"]["flwr"]["app"]
    kept = {key: (type(value), value) for key, value in app["config"].items()}
    assert kept == {key: (type(value), value) for key, value in config.items()}


def test_run_with_flower_runs_this_package_with_the_resolved_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = []
    monkeypatch.setattr(flower, "run_app", lambda *arguments: calls.append(arguments) or 5)
    config = RunConfig(
        num_clients=3, run_dir="out", dataset="cifar10", data_dir="~/data", device="cpu"
    )

    assert run_with_flower(config, print) == 5

    package, run_config, resources, on_line = calls[0]
    assert package == PACKAGE and resources.nodes == 3 and on_line is print
    assert run_config == {
        **config.to_mapping(),
        "engine": "flwr",
        "run-dir": str(tmp_path / "out"),
        "data-dir": str(Path.home() / "data"),
    }


@pytest.mark.parametrize("weights", ["auto", "pretrained", "base", "none"])
def test_names_of_weights_are_not_taken_for_files(weights):
    assert resolved_config(RunConfig(weights=weights)).weights == weights


def test_a_weights_file_becomes_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    resolved = resolved_config(RunConfig(weights="w/base.safetensors"))
    assert resolved.weights == str(tmp_path / "w" / "base.safetensors")


def test_jobs_are_refused_because_threads_decide():
    with pytest.raises(ConfigError, match="jobs=2 is for engine=local"):
        resolved_config(RunConfig(jobs=2))


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, (10, 7, 7)),  # threads=0: one client at a time with all cores
        ({"threads": 3}, (10, 3, 6)),  # two clients at a time, one core left over
        ({"threads": 1}, (10, 1, 7)),
        ({"threads": 1, "fraction-train": 0.25}, (10, 1, 3)),  # a round has 3 clients
        ({"threads": 11}, (10, 7, 7)),  # more than there are: Ray would refuse
        ({"num-clients": 1009}, (1000, 7, 7)),
        ({"model": "vit-digits"}, (10, 1, 7)),  # too small to gain from threads
    ],
)
def test_cores_are_divided_without_oversubscription(monkeypatch, settings, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)))
    common = {"device": "cpu", "model": "vit-s-16"}
    resources = simulation_resources(RunConfig.from_mapping(common, settings))
    assert (resources.nodes, resources.cpus, resources.total_cpus) == expected
    assert resources.gpus == 0.0


@pytest.mark.parametrize(
    "gpus, threads, share",
    [
        (1, 0, 1.0),  # one client at a time
        (1, 2, 0.3333),  # three share one GPU
        (2, 2, 0.5),  # three on two GPUs: at most two on either
        (4, 2, 1.0),
        (0, 2, 0.0),
    ],
)
def test_clients_share_the_gpus(monkeypatch, gpus, threads, share):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    config = RunConfig(threads=threads, model="vit-s-16")
    assert simulation_resources(config).gpus == share


def test_a_numbered_gpu_is_the_only_one_shown(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 3")
    config = RunConfig(device="cuda:1")
    assert simulation_resources(config).environment == {"CUDA_VISIBLE_DEVICES": "3"}
    assert resolved_config(config).device == "cuda"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert simulation_resources(config).environment == {"CUDA_VISIBLE_DEVICES": "1"}


def test_a_gpu_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="device=cuda:1 needs .* shows 1; use device=auto"):
        simulation_resources(RunConfig(device="cuda:1"))


def test_the_users_flower_and_ray_settings_stay_out(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_DATABASE", "/home/me/state.db")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("RAY_TMPDIR", "/home/me/ray")
    monkeypatch.setenv("no_proxy", "example.org")
    environment = runtime_environment(tmp_path, {})
    assert "FLWR_DATABASE" not in environment
    assert environment["RAY_ADDRESS"] == "local"
    assert environment["RAY_TMPDIR"] == environment["TMPDIR"] == str(tmp_path)
    assert environment["NO_PROXY"] == environment["no_proxy"] == "example.org,127.0.0.1"
    assert environment["FLWR_HOME"] == str(tmp_path / "flwr")


def test_programs_are_found_without_an_activated_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    path = runtime_environment(tmp_path, {})["PATH"]
    assert shutil.which("flower-superexec", path=path) is not None


def test_a_missing_program_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(flower_app, "PROGRAMS", ("flwr", "flower-absent"))
    with pytest.raises(ConfigError, match="'flower-absent', which is not installed"):
        runtime_environment(tmp_path, {})


# --- processes --------------------------------------------------------------------------------

MARK = "FLOWER_TEST_MARK=17"
linux = pytest.mark.skipif(not Path("/proc").is_dir(), reason="environments are read in /proc")


@pytest.fixture
def start() -> Iterator:
    """Start a shell script in a session of its own; wait for its first line of output."""
    started: list[subprocess.Popen] = []

    def start(script: str, mark: str) -> str:
        process = subprocess.Popen(
            ["sh", "-c", script],
            env={**os.environ, **dict([mark.split("=")])},
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        started.append(process)
        return process.stdout.readline()

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def is_alive(pid: int) -> bool:
    # Read anew rather than through the code under test; an unreaped zombie is not alive.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@linux
def test_processes_are_ended_by_their_mark_and_no_others(start):
    ours = int(start("echo $$; exec sleep 60", MARK))
    stubborn = int(start("trap '' TERM; echo $$; while :; do sleep 0.1; done", MARK))
    others = int(start("echo $$; exec sleep 60", MARK + "7"))

    assert {process.pid for process in find_processes(MARK)} >= {ours, stubborn}
    end_processes(MARK, grace_seconds=0.3)

    assert not is_alive(ours) and not is_alive(stubborn)
    assert is_alive(others)


@linux
def test_an_orphan_without_the_mark_is_ended_too(start):
    # The parent heeds SIGTERM, the child does not, and its environment is empty.
    child = "env -i /bin/sh -c 'trap \"\" TERM; echo $$; while :; do sleep 0.1; done'"
    orphan = int(start(f"{child} & wait", MARK))

    end_processes(MARK, grace_seconds=0.5)

    assert not is_alive(orphan)


@linux
def test_roots_count_whatever_their_environment(start):
    root = int(start("echo $$; exec sleep 60", "OTHER=1"))
    end_processes(MARK, roots=[root])
    assert not is_alive(root)


@linux
def test_a_process_that_cannot_be_ended_is_named(start, monkeypatch):
    pid = int(start("echo $$; exec sleep 60", MARK))
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    with pytest.raises(RuntimeError, match=rf"could not be ended: .*{pid}"):
        end_processes(MARK, grace_seconds=0.1, limit_seconds=0.2)
