"""Every command of the README runs as it is written there."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sysconfig
from pathlib import Path

import pytest

from fedfrozen_app.engine.processes import end_processes

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
# the two commands that do all the set-up are run by .ci/run, in a fresh environment; so are
# these tests, although they are slow
SETUP = [block for block in BLOCKS if re.match(r"# (run|test)\n", block)]
LINES = [line for block in BLOCKS if block not in SETUP for line in block.splitlines()]
FLOWER = [line for line in LINES if "flwr" in line.lower()]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files git knows or would add, as a fresh clone has them."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    target = tmp_path_factory.mktemp("readme") / "fedfrozen"
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)
    return target


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A home, caches and ports of their own; this Python's programs first."""
    home = tmp_path_factory.mktemp("home")
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith("FLWR_")},
        "PATH": path,
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "FLWR_HOME": str(home / "flwr"),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
        "FLWR_LOCAL_CONTROL_API_PORT": str(free_port()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "COLUMNS": "100",
    }


def run(line: str, checkout: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", line],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_readme_has_the_two_setup_commands_and_others() -> None:
    assert [block.splitlines()[0] for block in SETUP] == ["# run", "# test"]
    assert all(len(block.splitlines()) == 2 for block in SETUP)
    assert len(LINES) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in LINES if line not in FLOWER])
def test_a_command_of_the_readme_runs(
    line: str, checkout: Path, environment: dict[str, str]
) -> None:
    out = run(line, checkout, environment)
    if line.startswith("fedfrozen run"):
        assert "run folder:" in out
    elif line.startswith("fedfrozen keys"):
        assert (checkout / "keys" / "server" / "server.pem").exists()
    elif line.startswith("fedfrozen config"):
        assert "warmup-rounds" in out
    elif line.startswith("fedfrozen pretrain"):
        assert (checkout / shlex.split(line)[-1]).exists()
    elif line.startswith("fedfrozen tune-warmup"):
        assert "<- choose" in out and "in separate runs (60%)" in out
    elif line.startswith("fedfrozen sweep"):
        assert out.count(" 2/2 ") == 4  # every setting has both its seeds
    elif line.startswith("fedfrozen report"):
        assert (checkout / shlex.split(line)[-1] / "bandwidth.png").exists()
        assert out.count("2/2 | 0/2 |") == 4
    else:
        assert (checkout / shlex.split(line)[-1] / "partition.png").exists()


@pytest.mark.slow
def test_the_same_run_through_flowers_own_runtime_has_the_same_metrics(
    checkout: Path, environment: dict[str, str]
) -> None:
    """`fedfrozen run --engine flwr` and `flwr run .` against the in-process engine."""
    (own,) = [line for line in FLOWER if line.startswith("fedfrozen run --engine flwr")]
    exports = [line for line in FLOWER if line.startswith("export ")]
    (plain,) = [line for line in FLOWER if line.startswith("flwr run")]
    assert len(FLOWER) == 2 + len(exports)
    run(own.replace(" --engine flwr", "") + " run-name=local", checkout, environment)
    run(own + " run-name=flower", checkout, environment)
    home = Path(environment["HOME"])
    try:
        out = run("; ".join([*exports, plain]), checkout, environment)
        (folder,) = (home / ".fedfrozen" / "runs").iterdir()
        assert str(folder) in out
    finally:
        end_processes(f"FLWR_HOME={environment['FLWR_HOME']}")
    runs = [checkout / "runs" / "local", checkout / "runs" / "flower", folder]
    local, in_flower, on_two_nodes = (comparable(path) for path in runs)
    assert len(local) == 4
    assert in_flower == local
    assert on_two_nodes == local
    models = {(path / "model.safetensors").read_bytes() for path in runs}
    assert len(models) == 1
    assert not (home / ".flwr").exists()


def comparable(folder: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    varying = ("seconds", "wire_bytes")
    return [
        {key: value for key, value in line.items() if not key.startswith(varying)} for line in lines
    ]
