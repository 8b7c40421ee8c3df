"""Claims about ``--resume``: a run that died and went on ends like one that never died."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.engine.rounds import Federation, run_federation
from fedfrozen_app.runs.checkpoint import read_checkpoint, rounds
from fedfrozen_app.runs.store import RoundMetrics, RunFolder
from fedfrozen_app.training.worker import resident
from tests.engine.run import Run, small_config

QUICK: dict[str, Any] = {
    "num_clients": 3, "rounds": 5, "local_steps": 3, "batch_size": 16, "max_train_examples": 120,
    "max_test_examples": 23, "weights": "none", "lr": 0.05, "run_name": "run",
    "fraction_train": 0.67,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "fedavg": {"strategy": "fedavg"},
    "fedfrozen": {"strategy": "fedfrozen", "warmup_rounds": 2, "frozen": "query-key"},
    "fedadam": {"strategy": "fedadam", "warmup_rounds": 4, "frozen": "query-key"},
    "scaffold": {"strategy": "scaffold", "warmup_rounds": 2, "frozen": "query-key"},
    "feedback": {"strategy": "fedavg", "compression": "powersgd:1", "broadcast": "int8"},
    "latent": {"strategy": "latent", "generator": "sketch", "warmup_rounds": 2, "latent_bits": 4},
    "work": {"strategy": "fednova", "work": "random", "local_steps": "1-5"},
}


class Died(Exception):
    """What stands for a death that nobody can catch."""


def resume(root: Path, cache: str, **keys: Any) -> tuple[RunFolder, list[RoundMetrics]]:
    """Go on in what could be another process: a worker, a grid and a strategy of its own."""
    resident.cache_clear()
    config = small_config(root, cache, **{**QUICK, **keys, "resume": True})
    seen: list[RoundMetrics] = []
    with LocalGrid("fedfrozen_app.client_app:app", 3, config.to_mapping()) as grid:
        return run_federation(config, grid, seen.append), seen


def die(root: Path, cache: str, at: int, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> RunFolder:
    """Run until a round is trained and its line written, and no further: no clean-up, no save."""
    config = small_config(root, cache, **{**QUICK, **keys})
    real = Federation._checkpoint

    def checkpoint(self: Federation, server_round: int, arrays: Any) -> None:
        if server_round == at:
            raise Died
        real(self, server_round, arrays)

    with monkeypatch.context() as patch:
        patch.setattr(Federation, "_checkpoint", checkpoint)
        patch.setattr(Federation, "_save_after", lambda *_: None)
        patch.setattr(Federation, "_forget_clients", lambda _: None)
        with (
            LocalGrid("fedfrozen_app.client_app:app", 3, config.to_mapping()) as grid,
            pytest.raises(Died),
        ):
            run_federation(config, grid, lambda metrics: None)
    return RunFolder(root / "run")


def comparable(folder: RunFolder) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in vars(line).items() if not k.startswith("seconds")}
        for line in folder.metrics()
    ]


def model_of(folder: RunFolder) -> bytes:
    return (folder.path / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("name", "at"),
    [*((name, 3) for name in VARIANTS), ("scaffold", 1), ("scaffold", 4), ("latent", 4)],
)
def test_a_run_that_died_ends_like_one_that_never_did_bit_for_bit(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch, name: str, at: int
) -> None:
    keys = VARIANTS[name]
    whole = Run(tmp_path / "whole", cache, **{**QUICK, **keys})
    dead = die(tmp_path / "dead", cache, at, monkeypatch, **keys)
    # the line of the round that had no checkpoint is there, and is written again
    assert [line.round for line in dead.metrics()] == list(range(at + 1))
    assert sorted(rounds(dead.path)) == [number for number in (at - 2, at - 1) if number > 0]
    folder, seen = resume(tmp_path / "dead", cache, **keys)
    assert seen[0].round == (at if at > 1 else 0)
    assert comparable(folder) == whole.comparable()
    assert model_of(folder) == model_of(whole.folder)
    assert not (folder.path / "checkpoint").exists()


def test_large_states_of_clients_come_back_from_the_checkpoint(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = VARIANTS["scaffold"]
    whole = Run(tmp_path / "whole", cache, **{**QUICK, **keys})
    monkeypatch.setattr(
        "fedfrozen_app.transport.client_state.ClientState.__init__.__kwdefaults__",
        {"own_node": True, "limit_bytes": 0},
    )
    dead = die(tmp_path / "dead", cache, 3, monkeypatch, **keys)
    found = read_checkpoint(dead.path)
    assert found is not None and found.clients is not None and found.state["contexts"] == {}
    assert list(found.clients.glob("*/*.safetensors"))
    for left in (Path(cache) / "clients").glob("*/*/*"):
        left.unlink()  # as after a week: only the checkpoint knows
    folder, _ = resume(tmp_path / "dead", cache, **keys)
    assert comparable(folder) == whole.comparable() and model_of(folder) == model_of(whole.folder)


@pytest.mark.parametrize(
    "harm",
    [
        "flip",
        pytest.param("cut", marks=pytest.mark.slow),
        "no manifest",
        pytest.param("empty manifest", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_checkpoint_is_left_for_the_one_before(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    keys = VARIANTS["scaffold"]
    whole = Run(tmp_path / "whole", cache, **{**QUICK, **keys})
    dead = die(tmp_path / "dead", cache, 4, monkeypatch, **keys)
    assert sorted(rounds(dead.path)) == [2, 3]
    last = dead.path / "checkpoint" / "3"
    content = bytearray((last / "state.pt").read_bytes())
    if harm == "flip":
        content[len(content) // 2] ^= 1
        (last / "state.pt").write_bytes(content)
    elif harm == "cut":
        (last / "state.pt").write_bytes(content[:1000])
    elif harm == "no manifest":
        (last / "manifest.json").unlink()
    else:
        (last / "manifest.json").write_text("")
    folder, seen = resume(tmp_path / "dead", cache, **keys)
    assert seen[0].round == 3
    assert comparable(folder) == whole.comparable() and model_of(folder) == model_of(whole.folder)


def test_what_was_interrupted_goes_on_and_what_is_over_stays(tmp_path: Path, cache: str) -> None:
    keys = {**QUICK, **VARIANTS["fedfrozen"]}
    whole = Run(tmp_path / "whole", cache, **keys)

    def interrupt(metrics: RoundMetrics) -> None:
        if metrics.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Run(tmp_path / "cut", cache, **keys, on_round=interrupt)
    folder = RunFolder(tmp_path / "cut" / "run")
    assert folder.failure() is not None and (folder.path / "model.safetensors").exists()
    _, seen = resume(tmp_path / "cut", cache, **VARIANTS["fedfrozen"])
    assert [line.round for line in seen] == [3, 4, 5]
    assert folder.failure() is None and model_of(folder) == model_of(whole.folder)
    before = (folder.path / "metrics.jsonl").stat().st_mtime_ns
    _, seen = resume(tmp_path / "cut", cache, **VARIANTS["fedfrozen"])
    assert seen == [] and (folder.path / "metrics.jsonl").stat().st_mtime_ns == before


def test_a_run_of_that_name_may_not_exist_yet(tmp_path: Path, cache: str) -> None:
    folder, seen = resume(tmp_path, cache, strategy="fedavg", rounds=1)
    assert [line.round for line in seen] == [0, 1]
    whole = Run(tmp_path / "whole", cache, **{**QUICK, "strategy": "fedavg", "rounds": 1})
    assert model_of(folder) == model_of(whole.folder)


def test_another_config_is_refused_with_the_key_that_differs(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = die(tmp_path, cache, 2, monkeypatch, strategy="fedavg")
    lines = dead.metrics()
    with pytest.raises(ConfigError, match="made with lr=0.05 and cannot go on with lr=0.1; use"):
        resume(tmp_path, cache, strategy="fedavg", lr=0.1)
    assert dead.metrics() == lines  # nothing is lost by asking
    resume(tmp_path, cache, strategy="fedavg", checkpoint_every=2)


def test_checkpoints_are_as_many_as_asked_for(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = die(tmp_path / "two", cache, 5, monkeypatch, strategy="fedavg", checkpoint_every=2)
    assert sorted(rounds(dead.path)) == [2, 4]
    dead = die(tmp_path / "none", cache, 5, monkeypatch, strategy="fedavg", checkpoint_every=0)
    assert rounds(dead.path) == []


def test_clients_states_that_flowers_runtime_keeps_cannot_be_resumed() -> None:
    keys = {"resume": True, "engine": "flwr", "strategy": "scaffold", "optimizer": "sgd"}
    with pytest.raises(ConfigError, match="resume=true cannot go on here: with engine=flwr"):
        RunConfig.from_mapping(keys)
    RunConfig.from_mapping({**keys, "strategy": "fedadam"})


# Imports everything once and forks for each start, so that fifty starts take a minute.
STARTS = """
import os, sys
import timm
from fedfrozen_app.cli import main
import fedfrozen_app.engine.rounds
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.argv = ["fedfrozen", *line.split()]
        main()
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
KILLS = 50


class Starts:
    """Runs of the command line, each in a process of its own that can be killed."""

    def __init__(self, log: Path) -> None:
        command = [sys.executable, "-c", STARTS]
        self.log = log.open("w")
        self.server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
        )

    def run(self, words: list[str], kill_when: Callable[[], bool] = lambda: False) -> int:
        """Return the exit status of one start; kill it as soon as ``kill_when`` says so."""
        server = self.server
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(" ".join(words) + "\n")
        server.stdin.flush()
        pid = int(server.stdout.readline())
        while not select.select([server.stdout], [], [], 0.002)[0]:
            if kill_when():
                os.kill(pid, signal.SIGKILL)
                break
        return int(server.stdout.readline())

    def end(self) -> None:
        assert self.server.stdin is not None and self.server.stdout is not None
        self.server.stdin.close()
        self.server.wait(60)
        self.server.stdout.close()
        self.log.close()


class Kill:
    """Says when to kill: ``seconds`` after a start, or after the run has one more line."""

    def __init__(self, path: Path, further: bool, seconds: float) -> None:
        self.path, self.further, self.seconds = path, further, seconds
        self.before, self.at = self.lines(), 0.0

    def lines(self) -> int:
        return self.path.read_text().count("\n") if self.path.exists() else 0

    def __call__(self) -> bool:
        now = time.perf_counter()
        if self.at == 0.0 and (not self.further or self.lines() > self.before):
            self.at = now + self.seconds
        return 0.0 < self.at <= now


@pytest.mark.slow
def test_a_process_that_is_killed_fifty_times_goes_on_to_the_same_end(
    tmp_path: Path, cache: str
) -> None:
    """SIGKILL at random moments of SCAFFOLD with a freeze and error feedback, then to the end."""
    values = {
        **QUICK, "strategy": "scaffold", "frozen": "query-key", "warmup_rounds": 8, "rounds": 20,
        "compression": "topk:0.1", "run_dir": str(tmp_path), "cache_dir": cache, "threads": 1,
        "public_fraction": 0.0,
    }  # fmt: skip
    words = [f"{key.replace('_', '-')}={value}" for key, value in values.items()]
    starts = Starts(tmp_path / "log")
    generator = torch.Generator().manual_seed(7)
    path = tmp_path / "killed" / "metrics.jsonl"
    died_in: list[int] = []
    try:
        assert starts.run(["run", *words, "run-name=whole"]) == 0, (tmp_path / "log").read_text()
        for further in (torch.rand(KILLS, generator=generator) < 0.3).tolist():
            # either somewhere in the next round, or after it has left its line
            kill = Kill(path, further, 0.4 * float(torch.rand(1, generator=generator)))
            if kill.before > 16:  # a fast machine must not reach the end before the last kill
                kill.further, kill.seconds = False, kill.seconds / 4
            if starts.run(["run", *words, "run-name=killed", "--resume"], kill) == 0:
                break
            died_in.append(kill.lines())
        ended = starts.run(["run", *words, "run-name=killed", "--resume"])
        assert ended == 0, (tmp_path / "log").read_text()
    finally:
        starts.end()
    assert len(died_in) == KILLS and len(set(died_in)) >= 8, died_in
    one, other = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "killed")
    assert [line.round for line in other.metrics()] == list(range(21))
    assert comparable(other) == comparable(one) and model_of(other) == model_of(one)
    assert not (other.path / "checkpoint").exists()
