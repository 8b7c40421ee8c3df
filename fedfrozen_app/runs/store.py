"""The run folder: everything a report needs, and nothing outside it.

``config.json`` resolved config, versions, seed, git revision, machine, date and command;
``metrics.jsonl`` one line a round, round 0 = before training; ``clients.jsonl`` one line for every
test of a client on its own examples, if there are any; ``partition.json``; ``start.json`` the first
model's digest and the preprocessing, by which runs can be seen to be comparable;
``model.safetensors`` the whole final model under the library's own names; ``failure.txt`` only if
the run failed, ``end.txt`` only if it ended as it should before its last round.
"""

import errno
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

import torch

from fedfrozen_app.config import ConfigError, RunConfig
from fedfrozen_app.disk import explained
from fedfrozen_app.runs.provenance import NOT_OF_THE_RESULT, describe_run
from fedfrozen_app.tensor_file import write_tensors

METRICS, CLIENTS = "metrics.jsonl", "clients.jsonl"
GO_ON = "make room there and go on with --resume (resume=true)"
FAILURE, EARLY_END, MODEL = "failure.txt", "end.txt", "model.safetensors"


@dataclass(frozen=True)
class RoundMetrics:
    """One line of ``metrics.jsonl``. ``None`` = not measured in this round.

    ``bytes_*`` are tensor payloads and ``wire_bytes_*`` message contents in Flower's wire
    form, both summed over the round's clients. ``seconds_train`` sums the clients' local
    training, so it exceeds the clock where clients train at once; ``seconds_total`` is the
    round on the clock, central test included.
    ``dropped`` counts sampled clients whose reply did not enter the model. Of text, loss and
    accuracy are per token and ``test_perplexity`` = exp(``test_loss``); of images it is None.
    ``identity_error`` is max |mean_k theta(z_k) - theta(mean_k z_k)| over the mapped weights, in
    the first round of latents. ``validation_*`` are of the validation share, where there is one.
    """

    round: int
    phase: str
    strategy: str
    train_loss: float | None
    test_loss: float | None
    test_accuracy: float | None
    clients: int
    num_examples: int
    bytes_up: int
    bytes_down: int
    wire_bytes_up: int
    wire_bytes_down: int
    seconds_train: float
    seconds_total: float
    dropped: int
    test_perplexity: float | None = None
    identity_error: float | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    # payload of the clients' own tests, both directions, frozen blocks that first go out then
    # included; not in bytes_*
    bytes_evaluate: int = 0
    attempts: int = 1  # cohorts that were asked; bytes count all, the rest the last


OnRound = Callable[[RoundMetrics], None]


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` that replaces it when the block succeeds."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class RunFolder:
    """One run's folder; see the module's description."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(
        cls, config: RunConfig, begin: "Callable[[RunFolder], None]" = lambda folder: None
    ) -> Self:
        """Create the folder of a new run, write ``config.json`` and what ``begin`` writes.

        Raises
        ------
        ConfigError
            If a run of that name exists (nothing is overwritten) or the folder cannot be
            written; there is no folder then.
        """
        parent = Path(config.run_dir).expanduser().resolve()
        path: Path | None = None
        try:
            parent.mkdir(parents=True, exist_ok=True)
            folder = cls(path := _new_folder(parent, config))
            folder._write_json("config.json", describe_run(config))
            begin(folder)
        except OSError as error:
            if path is not None:  # it holds no result yet
                shutil.rmtree(path, ignore_errors=True)
            raise ConfigError(
                f"run-dir={config.run_dir!r} cannot be written: "
                f"{os.strerror(error.errno or errno.EIO)}; make room, or choose another"
            ) from None
        return folder

    @classmethod
    def reopen(cls, config: RunConfig) -> Self:
        """Open the folder of a run that stopped, or create it if there is none.

        Raises
        ------
        ConfigError
            As :meth:`create`, and if the folder was made by another config.
        """
        folder = cls(Path(config.run_dir).expanduser().resolve() / config.resolved_run_name)
        if not (folder.path / "config.json").exists():
            folder._remove_unused()
            return cls.create(config.model_copy(update={"run_name": config.resolved_run_name}))
        known = folder.config()["config"]
        for key, value in config.to_mapping().items():
            if key not in NOT_OF_THE_RESULT and known.get(key) != value:
                raise ConfigError(
                    f"run {folder.path.name!r} was made with {key}={known.get(key)} and cannot go "
                    f"on with {key}={value}; use the same values, or another run-name"
                )
        return folder

    def _remove_unused(self) -> None:
        """Remove the folder if whoever made it was killed before the first file was there."""
        for unfinished in self.path.glob(".config.json-*"):
            unfinished.unlink()
        with suppress(OSError):  # none, or not empty
            self.path.rmdir()

    def is_over(self) -> bool:
        """Whether the run came to its end as it should."""
        return (self.path / MODEL).exists() and self.failure() is None

    def go_back_to(self, server_round: int) -> None:
        """Take back what was written after a round, -1 for all, and the end of the run."""
        for name in (CLIENTS, METRICS):
            path = self.path / name
            lines = path.read_text().splitlines() if path.exists() else []
            kept = takewhile(lambda line: _round_of(line) <= server_round, lines)
            if path.exists() or name == METRICS:
                with explained(path, GO_ON), atomic_path(path) as temporary:
                    temporary.write_text("".join(f"{line}\n" for line in kept))
        for name in (MODEL, EARLY_END, FAILURE):  # a model without a failure is the end of a run
            (self.path / name).unlink(missing_ok=True)

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        path = self.path / name
        with explained(path, GO_ON), atomic_path(path) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n")

    def write_partition(self, report: Mapping[str, Any]) -> None:
        """Write ``partition.json``."""
        self._write_json("partition.json", report)

    def write_start(self, report: Mapping[str, Any]) -> None:
        """Write ``start.json``."""
        self._write_json("start.json", report)

    def append(self, metrics: RoundMetrics) -> None:
        """Append a round to ``metrics.jsonl`` and make it durable; a whole line or none."""
        self._append(METRICS, [asdict(metrics)])

    def append_clients(self, server_round: int, tests: Iterable[Mapping[str, float]]) -> None:
        """Append what clients' own tests came to in a round to ``clients.jsonl``."""
        self._append(CLIENTS, [{"round": server_round, **test} for test in tests])

    def _append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        path = self.path / name
        lines = [json.dumps({key: _finite(value) for key, value in row.items()}) for row in rows]
        size = path.stat().st_size if path.exists() else 0
        with explained(path, GO_ON):
            try:
                with path.open("a") as file:
                    file.write("".join(f"{line}\n" for line in lines))
                    file.flush()
                    os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):
                    os.truncate(path, size)
                raise

    def save_model(
        self, arrays: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Write the whole model to ``model.safetensors``, with metadata for its header."""
        path = self.path / MODEL
        with explained(path, GO_ON), atomic_path(path) as temporary:
            write_tensors(temporary, arrays, metadata)

    def write_failure(self, reason: str) -> None:
        """Write why the run stopped to ``failure.txt``."""
        (self.path / FAILURE).write_text(reason + "\n")

    def failure(self) -> str | None:
        """Return why the run stopped, None if it did not say."""
        return self._read(FAILURE)

    def write_early_end(self, reason: str) -> None:
        """Write to ``end.txt`` why no more rounds were to be run."""
        (self.path / EARLY_END).write_text(reason + "\n")

    def early_end(self) -> str | None:
        """Return why a run that went well ended before its last round, None if it did not."""
        return self._read(EARLY_END)

    def _read(self, name: str) -> str | None:
        path = self.path / name
        return path.read_text().strip() if path.exists() else None

    def config(self) -> dict[str, Any]:
        """Read ``config.json``."""
        return dict(json.loads((self.path / "config.json").read_text()))

    def metrics(self) -> list[RoundMetrics]:
        """Read ``metrics.jsonl``."""
        lines = (self.path / METRICS).read_text().splitlines()
        return [RoundMetrics(**json.loads(line)) for line in lines]

    def client_tests(self) -> list[dict[str, float]]:
        """Read ``clients.jsonl``, [] where no client tested: round, client and its measures."""
        path = self.path / CLIENTS
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _new_folder(parent: Path, config: RunConfig) -> Path:
    while True:
        path = parent / free_name(config)
        try:
            path.mkdir()
            return path
        except FileExistsError:
            if config.run_name != "auto":
                raise ConfigError(_taken(config, path)) from None


def _taken(config: RunConfig, path: Path) -> str:
    return (
        f"run-name={config.run_name!r}: {str(path)!r} exists and is not overwritten; choose "
        "another run-name or remove that folder"
    )


def free_name(config: RunConfig) -> str:
    """Return the run's name; an automatic one gets a number if it is taken."""
    name = config.resolved_run_name
    if config.run_name != "auto":
        return name
    parent, number, free = Path(config.run_dir).expanduser(), 1, name
    while (parent / free).exists():
        number += 1
        free = f"{name}-{number}"
    return free


def check_free(config: RunConfig) -> None:
    """Raise ConfigError if a run of the config's name exists."""
    path = Path(config.run_dir).expanduser() / config.resolved_run_name
    if config.run_name != "auto" and path.exists():
        raise ConfigError(_taken(config, path))


def check_room(config: RunConfig, needed_bytes: int) -> None:
    """Raise ConfigError if the disk of ``run-dir`` has less room than a run takes at least."""
    path = Path(config.run_dir).expanduser().resolve()
    usage = shutil.disk_usage(next(one for one in (path, *path.parents) if one.exists()))
    if usage.total and usage.free < needed_bytes:  # a file system without numbers says 0
        raise ConfigError(
            f"run-dir={config.run_dir!r} has {usage.free / 1e6:.1f} MB left, and the model with "
            f"its checkpoints (checkpoint-every={config.checkpoint_every}) takes "
            f"{needed_bytes / 1e6:.1f} MB; make room, or choose another"
        )


def _round_of(line: str) -> float:
    """Return a line's round; what was cut off by a kill comes after every round."""
    try:
        return int(json.loads(line)["round"])
    except ValueError:
        return math.inf


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: a diverged loss is written as null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
