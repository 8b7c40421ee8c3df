"""A federation of processes with TLS and registered nodes, on loopback, to the end."""

from pathlib import Path
from typing import Any

import pytest

from fedfrozen_app.config import RunConfig
from fedfrozen_app.deploy.keys import KeyRequest, make_keys
from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.engine.rounds import CLIENT_APP, run_federation
from tests.deploy.processes import DEPLOY, HOSTS, Federation, comparable, free_port

CONFIG: dict[str, Any] = {
    "rounds": 3,
    "warmup-rounds": 1,
    "num-clients": 3,
    "max-train-examples": 251,
    "max-test-examples": 97,
    "weights": "none",
    "public-fraction": 0.0,
    "lr": 0.05,
    "threads": 1,
}
NODES = 2
SMALL = {"rounds": 2, "num-clients": NODES}  # each training is a new process of some seconds


def run_here(folder: Path, **keys: Any) -> Path:
    """Run the same config in this process; return the run folder."""
    config = RunConfig.from_mapping(
        CONFIG, {"run-dir": str(folder), "cache-dir": str(folder)}, keys
    )
    with LocalGrid(CLIENT_APP, config.num_clients, config.to_mapping()) as grid:
        return run_federation(config, grid, lambda metrics: None).path


@pytest.mark.slow
def test_nodes_with_their_keys_train_as_in_one_process(tmp_path: Path) -> None:
    with Federation(tmp_path, NODES) as federation:
        log = federation.run({**CONFIG, **SMALL, "run-name": "deployed"})
        assert federation.status() == "finished:completed", log + federation.logs()
        deployed = federation.run_folder("deployed")
    assert federation.left_over() == {"processes": [], "ports": [], "files": []}
    here = run_here(tmp_path / "here", **SMALL)
    assert comparable(deployed) == comparable(here)
    assert [line["phase"] for line in comparable(here)] == ["start", "warmup", "frozen"]
    model = "model.safetensors"
    assert (deployed / model).read_bytes() == (here / model).read_bytes()


@pytest.mark.slow
def test_others_are_turned_away(tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_keys(KeyRequest(other, 1, HOSTS))
    (tmp_path / "federation").mkdir()
    with Federation(tmp_path / "federation", 1) as federation:
        ca, node = (federation.folder / "keys" / name for name in ("ca.crt", "nodes/node-0"))
        strangers = {
            "a key that is not registered": (ca, other / "nodes" / "node-0", "[code: 2004]"),
            "another CA": (other / "ca.crt", node, "CERTIFICATE_VERIFY_FAILED"),
            "no key": (ca, None, "Failed to initialize the connection"),
            "no TLS": (None, None, "Failed to initialize the connection"),
        }
        for name, (certificate, key, _) in strangers.items():
            start_stranger(federation, name, certificate, key)
        for name, (_, _, reason) in strangers.items():
            assert federation.processes[name].wait(timeout=120) == 1, name
            assert reason in federation.log(name) and "SuperNode ID" not in federation.log(name)
    assert federation.left_over() == {"processes": [], "ports": [], "files": []}


def start_stranger(
    federation: Federation, name: str, certificate: Path | None, key: Path | None
) -> None:
    """Start a SuperNode that should not be let in."""
    options = ["--superlink", federation.environment["SUPERLINK"], "--max-retries", "1"]
    options += ["--insecure"] if certificate is None else ["--root-certificates", str(certificate)]
    options += [] if key is None else ["--auth-supernode-private-key", str(key)]
    program = str(DEPLOY / "supernode.py")
    federation.start(name, "python", program, *options, "--port", str(free_port()))
