"""Checkpoints of a run: the state after a round, each of them whole, on the disk, or not there.

``checkpoint/<round>/state.pt`` holds the state (no code: it is read with ``weights_only``),
``clients/`` what clients keep in files, and ``manifest.json``, written last, the SHA-256 of every
file. A checkpoint appears under its name by a rename; the one before it stays, for the case that
the disk damages the last.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path
from typing import Any

import torch
from flwr.supercore import log

from fedfrozen_app.disk import save_state
from fedfrozen_app.transport.client_files import sync

FOLDER, STATE, CLIENTS, MANIFEST = "checkpoint", "state.pt", "clients", "manifest.json"
KEPT = 2  # the last one, and the one before
_ROUND = re.compile(r"0|[1-9][0-9]*")


@dataclass(frozen=True)
class Checkpoint:
    """A state that was read, and where its files of clients are, None where it has none."""

    server_round: int
    state: dict[str, Any]
    clients: Path | None


def write_checkpoint(
    run_folder: Path, server_round: int, make: Callable[[Path], dict[str, Any]]
) -> None:
    """Write the checkpoint of a round, and remove those that are not needed any more.

    Parameters
    ----------
    run_folder : Path
        The run's folder.
    server_round : int
        The round that is over.
    make : callable
        Is given the path of a folder that it may create for files of clients, and returns the
        state: nested containers of tensors, numbers, strings and None.

    Raises
    ------
    OSError
        If the disk does not take it; the checkpoints before are still there.
    """
    parent = run_folder / FOLDER
    parent.mkdir(exist_ok=True)
    _remove_unfinished(parent)
    temporary = Path(tempfile.mkdtemp(dir=parent, prefix="."))
    try:
        save_state(temporary / STATE, make(temporary / CLIENTS))
        sync(temporary / STATE)
        manifest = _manifest(temporary, server_round)
        (temporary / MANIFEST).write_text(json.dumps(manifest))
        sync(temporary / MANIFEST)
        target = parent / str(server_round)
        shutil.rmtree(target, ignore_errors=True)  # a damaged one, before a resume
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    with contextlib.suppress(OSError):  # not every file system can do that to a folder
        sync(parent)
    for old in sorted(rounds(run_folder))[:-KEPT]:
        shutil.rmtree(parent / str(old), ignore_errors=True)


def rounds(run_folder: Path) -> list[int]:
    """Return the rounds there are checkpoints of, damaged ones included."""
    parent = run_folder / FOLDER
    names = [path.name for path in parent.iterdir()] if parent.is_dir() else []
    return [int(name) for name in names if _ROUND.fullmatch(name)]


def read_checkpoint(run_folder: Path) -> Checkpoint | None:
    """Return the last checkpoint that is not damaged; None where there is none."""
    for server_round in sorted(rounds(run_folder), reverse=True):
        path = run_folder / FOLDER / str(server_round)
        try:
            return _read(path, server_round)
        except Exception as error:  # whatever a damaged file makes json or torch raise
            log(WARNING, "checkpoint %s is damaged and not used: %s", path, error)
    return None


def remove_checkpoints(run_folder: Path) -> None:
    """Remove what a finished run does not need any more."""
    shutil.rmtree(run_folder / FOLDER, ignore_errors=True)


def _read(path: Path, server_round: int) -> Checkpoint:
    manifest = json.loads((path / MANIFEST).read_text())
    if manifest != _manifest(path, server_round):
        raise ValueError("its content is not what the manifest says")
    state: dict[str, Any] = torch.load(path / STATE, map_location="cpu", weights_only=True)
    clients = path / CLIENTS
    return Checkpoint(server_round, state, clients if clients.is_dir() else None)


def _manifest(path: Path, server_round: int) -> dict[str, Any]:
    """Return round and SHA-256 by file of what lies in a checkpoint's folder."""
    files = sorted(file for file in path.rglob("*") if file.is_file() and file != path / MANIFEST)
    digests = {file.relative_to(path).as_posix(): _sha256(file) for file in files}
    return {"round": server_round, "sha256": digests}


def _remove_unfinished(parent: Path) -> None:
    for path in parent.glob(".*"):
        shutil.rmtree(path, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
