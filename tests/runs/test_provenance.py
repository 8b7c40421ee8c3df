"""Claims about what is kept of where results come from."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedfrozen_app.config import RunConfig
from fedfrozen_app.runs import provenance
from fedfrozen_app.runs.provenance import (
    COMMAND_VARIABLE,
    config_hash,
    describe_run,
    remember_command,
)

CONFIG = RunConfig().to_mapping()


def test_the_hash_of_configs_follows_every_key_that_bears_on_a_result() -> None:
    known = config_hash([CONFIG])
    for key, value in (("lr", 0.5), ("seed", 9), ("weights", "other.safetensors")):
        assert config_hash([{**CONFIG, key: value}]) != known, key
    for key, value in (("run-name", "x"), ("run-dir", "y"), ("threads", 3), ("jobs", 2)):
        assert config_hash([{**CONFIG, key: value}]) == known, key
    assert len(known) == 12 and set(known) <= set("0123456789abcdef")


def test_the_hash_of_configs_does_not_know_the_machine_nor_the_order() -> None:
    one, two = {**CONFIG, "data-dir": "/a/cifar10"}, {**CONFIG, "data-dir": "/b/c/cifar10"}
    assert config_hash([one]) == config_hash([two]) != config_hash([CONFIG])
    assert config_hash([CONFIG, one]) == config_hash([one, CONFIG]) != config_hash([one])


def test_a_run_keeps_the_command_it_was_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMAND_VARIABLE, "x")  # is restored, whatever is set below
    monkeypatch.delenv(COMMAND_VARIABLE)
    assert describe_run(RunConfig())["command"] is None  # not by our command line
    remember_command(["sweep", "a b.toml", "lr=1"])
    remember_command(["run"])  # by a child of the sweep
    assert describe_run(RunConfig())["command"] == "fedfrozen sweep 'a b.toml' lr=1"


def test_a_revision_says_whether_the_package_was_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(provenance.REVISION_VARIABLE, raising=False)
    top = Path(provenance.__file__).resolve().parents[2]
    status = ""

    def git(folder: Path, *words: str) -> str:
        return f"0123abcd\n{top}\n" if words[0] == "rev-parse" else status

    monkeypatch.setattr(provenance, "_git", git)
    assert provenance.git_revision() == "0123abcd"
    status = " M fedfrozen_app/seeds.py\n"
    assert provenance.git_revision() == "0123abcd+changed"
    top = top.parent  # installed inside somebody else's checkout
    assert provenance.git_revision() is None


def test_the_command_line_knows_the_machine_without_loading_torch() -> None:
    code = (
        "import sys, fedfrozen_app.cli, fedfrozen_app.runs.provenance; "
        "import json; print(json.dumps('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) is False
