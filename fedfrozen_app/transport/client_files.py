"""Versions of a client's state as files, each of them whole, on the disk, or not there.

``<folder>/<run>/<partition id>/<name>-<version>.safetensors``, sealed by a digest over what a
file says and where it says it.
"""

import contextlib
import errno
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path

import torch
from flwr.supercore import log

from fedfrozen_app.tensor_file import read_tensors, write_tensors
from fedfrozen_app.transport.frozen_cache import digest

STALE_RUN_SECONDS = 7 * 24 * 3600.0
STALE_WRITING_SECONDS = 24 * 3600.0

_RUN = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Kept:
    """One version: tensors by name, to read (CPU, in no particular order), and selection."""

    tensors: dict[str, torch.Tensor]
    selection: str


class StateFiles:
    """The versions of one partition's state of a name, by number."""

    def __init__(self, run_folder: Path, partition_id: int, name: str) -> None:
        self.run_folder, self._name = run_folder, name
        self._folder = run_folder / str(partition_id)
        self._pattern = re.compile(rf"{name}-([1-9][0-9]*)\.safetensors")

    def _path(self, version: int) -> Path:
        return self._folder / f"{self._name}-{version}.safetensors"

    def _leads_elsewhere(self) -> bool:
        return self.run_folder.is_symlink() or self._folder.is_symlink()

    @contextlib.contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Say what could not be done and where, in place of the system's bare error."""
        try:
            yield
        except OSError as error:
            raise OSError(
                error.errno or errno.EIO,
                f"{what} ({error.strerror or error}); make room, or set cache-dir to a folder "
                "that this user may write to",
                str(self._folder),
            ) from error

    def versions(self) -> set[int]:
        """Return the versions there are ordinary files of."""
        if self._leads_elsewhere():
            return set()
        try:
            with os.scandir(self._folder) as entries:
                names = [one.name for one in entries if one.is_file(follow_symlinks=False)]
        except (FileNotFoundError, NotADirectoryError):
            return set()
        return {int(match[1]) for name in names if (match := self._pattern.fullmatch(name))}

    def _seal(self, path: Path, tensors: Mapping[str, torch.Tensor], selection: str) -> str:
        """Return the digest of all that a file says, and of where it says it."""
        parts = "|".join([*path.parts[-3:], selection, digest(tensors)])
        return hashlib.sha256(parts.encode()).hexdigest()

    def read(self, version: int) -> Kept | None:
        """Return a version, None (and no file any more) if it is missing or damaged."""
        path = self._path(version)
        about: dict[str, str] = {}
        tensors: dict[str, torch.Tensor] = {}
        with self.explained(f"version {version} of the client state cannot be read"):
            try:
                tensors, about = read_tensors(path)
            except FileNotFoundError:  # another process has swept it away
                return None
            except ValueError:
                about = {}  # without a digest: damaged
        selection = about.get("selection", "")
        if about.get("digest") != self._seal(path, tensors, selection):
            with contextlib.suppress(OSError):  # what cannot be removed is noticed again
                path.unlink(missing_ok=True)
            return None
        return Kept(tensors, selection)

    def write(self, version: int, tensors: Mapping[str, torch.Tensor], selection: str) -> None:
        """Write a version; it is there as a whole, on the disk, or not at all."""
        if self._leads_elsewhere():
            raise OSError(errno.ELOOP, "it is a symbolic link")
        path = self._path(version)
        about = {"selection": selection, "digest": self._seal(path, tensors, selection)}
        self._folder.mkdir(parents=True, exist_ok=True)
        self._remove_unfinished()
        handle, temporary = tempfile.mkstemp(dir=self._folder, prefix=f".{self._name}-")
        os.close(handle)
        try:
            write_tensors(Path(temporary), tensors, about)
            sync(Path(temporary))
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not every file system can do that to a folder
            sync(self._folder)

    def _remove_unfinished(self) -> None:
        """Remove what processes that were killed have left."""
        for path in self._folder.glob(f".{self._name}-*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.lstat().st_mtime > STALE_WRITING_SECONDS:
                    path.unlink()

    def remove(self, version: int) -> None:
        """Remove a version, if it is there."""
        self._path(version).unlink(missing_ok=True)


def forget(folder: Path, run: str) -> None:
    """Remove the files of a run that has ended; what cannot be removed is a warning.

    Raises
    ------
    ValueError
        If ``run`` is not 32 lowercase hex digits.
    """
    path = run_folder(folder, run)
    if path.is_symlink():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        log(WARNING, "the client states of the ended run cannot be removed: %s", path)


def run_folder(folder: Path, run: str) -> Path:
    """Return where a run's files lie; raise ValueError for what is no token of a run."""
    if not isinstance(run, str) or not _RUN.fullmatch(run):
        raise ValueError(f"a run's token is 32 lowercase hex digits, got {str(run)[:80]!r}")
    return folder / run


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep(own: Path) -> None:
    """Remove the folders of other runs in which nothing has been written for long."""
    since = time.time() - STALE_RUN_SECONDS
    with contextlib.suppress(OSError):  # other runs' leftovers do not stop this one
        for path in own.parent.iterdir():
            if path == own or path.is_symlink() or not _RUN.fullmatch(path.name):
                continue
            if not _written(path, since):
                shutil.rmtree(path, ignore_errors=True)


def _written(folder: Path, since: float) -> bool:
    """Return whether anything in a folder, or itself, was written after a time in seconds."""
    for parent, _, files in os.walk(folder):
        for path in (parent, *(os.path.join(parent, name) for name in files)):
            with contextlib.suppress(OSError):  # gone meanwhile
                if os.lstat(path).st_mtime > since:
                    return True
    return False
