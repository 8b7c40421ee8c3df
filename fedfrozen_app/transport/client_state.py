"""What a client keeps between rounds, committed only by the server's word.

A state that a client computes in round r counts only if the server used the reply of
round r. So every version is kept under its round, and the server names with each message
the client's last reply that entered the model. What is newer than that reply never
happened (the reply was lost, or the server was rolled back to a checkpoint), and what is
older than the version of that reply is not needed any more: two versions stay at most.

Small states lie in Flower's ``context.state``, large ones in files, because Flower sends
the context along with every message and loses one of 350 MB or more.
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
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.supercore import log
from safetensors import SafetensorError, safe_open

from fedfrozen_app.tensor_file import write_tensors
from fedfrozen_app.transport.arrays import to_record, to_tensors
from fedfrozen_app.transport.frozen_cache import digest

LIMIT_BYTES = 4 * 2**20
STALE_RUN_SECONDS = 7 * 24 * 3600.0
STALE_WRITING_SECONDS = 24 * 3600.0

_RUN = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


@dataclass(frozen=True)
class Kept:
    """One version: tensors by name, to read (CPU, in no particular order), and selection."""

    tensors: dict[str, torch.Tensor]
    selection: str


class ClientState:
    """Tensors one client keeps between rounds under a name, the last versions by server round.

    Parameters
    ----------
    state : RecordDict
        The node's ``context.state``; only records named ``fedfrozen.<name>.`` are touched.
    folder : Path
        Where the runs' folders of files are; created when the first file is written.
    run : str
        The server's token of the run, 32 lowercase hex digits.
    partition_id : int
        Whose state it is; each partition has files of its own.
    name : str
        What is kept: lowercase letters, digits and underscores.
    own_node : bool
        Whether the node serves this partition only. If not, ``state`` is left alone.
    limit_bytes : int
        The largest state that is put into ``state``, all its tensors together.

    Raises
    ------
    ValueError
        If ``run``, ``partition_id`` or ``name`` is not of the stated form: what comes from
        the network never becomes a path unchecked.
    """

    def __init__(
        self,
        state: RecordDict,
        folder: Path,
        run: str,
        partition_id: int,
        name: str,
        *,
        own_node: bool = True,
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        if not isinstance(partition_id, int) or partition_id < 0:
            raise ValueError(f"partition_id must be an integer >= 0, got {partition_id!r}")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"a client state's name must match {_NAME.pattern}, got {name!r}")
        self._limit_bytes = limit_bytes
        self._files = _Files(_run_folder(folder, run), int(partition_id), name)
        self._records = _Records(state, run, int(partition_id), name) if own_node else None

    @property
    def _places(self) -> "list[_Records | _Files]":
        return [self._files] if self._records is None else [self._records, self._files]

    def get(self, server_round: int) -> Kept | None:
        """Return the version of exactly that round; None if it is missing or damaged.

        Round 0 stands for a client of which no reply was ever used: None.

        Raises
        ------
        OSError
            If the file is there and cannot be read (permissions, for example).
        """
        for place in self._places:
            if server_round in place.rounds():
                return place.read(server_round)
        return None

    def put(
        self,
        server_round: int,
        accepted_round: int,
        tensors: Mapping[str, torch.Tensor],
        selection: str,
    ) -> None:
        """Add the version of a round, and remove those that are not needed any more.

        Parameters
        ----------
        server_round : int
            The round of the version, from 1.
        accepted_round : int
            The round of the client's last reply that entered the model, 0 if none did.
        tensors : Mapping[str, torch.Tensor]
            Shared, not copied, while they are in ``state``: do not write to them afterwards.
        selection : str
            What the tensors belong to; comes back from :meth:`get`.

        Raises
        ------
        ValueError
            If not 0 <= accepted_round < server_round.
        OSError
            If the disk does not take the files; the accepted version is still there.
        """
        if not 0 <= accepted_round < server_round:
            raise ValueError(
                "a client state is put with 0 <= accepted_round < server_round, "
                f"got accepted_round={accepted_round}, server_round={server_round}"
            )
        with self._files.explained(f"the client state of round {server_round} cannot be kept"):
            self._prune(accepted_round)
            if self._records is not None and (record := self._small(tensors)) is not None:
                self._records.write(server_round, record, selection)
            else:
                self._files.write(server_round, tensors, selection)
                _sweep(self._files.run_folder)

    def _prune(self, accepted_round: int) -> None:
        """Remove all but the newest version that the model has used."""
        rounds = set().union(*(place.rounds() for place in self._places))
        used = max((number for number in rounds if number <= accepted_round), default=0)
        for place in self._places:
            for number in place.rounds() - {used}:
                place.remove(number)

    def _small(self, tensors: Mapping[str, torch.Tensor]) -> ArrayRecord | None:
        """Return the tensors as a record; None if they are too large or of a dtype of torch's."""
        if sum(tensor.nbytes for tensor in tensors.values()) > self._limit_bytes:
            return None
        try:
            return to_record({name: tensor.cpu() for name, tensor in tensors.items()})
        except TypeError:  # bfloat16 and the like, which NumPy does not have
            return None


class _Records:
    """Versions in a ``RecordDict``: an ArrayRecord each and one ConfigRecord about them."""

    def __init__(self, state: RecordDict, run: str, partition_id: int, name: str) -> None:
        self._state, self._prefix = state, f"fedfrozen.{name}."
        self._about = f"{self._prefix}versions"
        self._run, self._partition_id = run, partition_id
        own = {self._key(number) for number in self.rounds()}
        own |= {self._about} if own else set()
        for key in [key for key in state if key.startswith(self._prefix) and key not in own]:
            del state[key]  # another run's, or damaged

    def _key(self, server_round: int) -> str:
        return f"{self._prefix}round-{server_round}"

    def _selections(self) -> dict[int, str]:
        """Return the selection of each version by round."""
        about = self._state.get(self._about)
        if not isinstance(about, ConfigRecord):
            return {}
        if (about.get("run"), about.get("partition")) != (self._run, self._partition_id):
            return {}
        rounds, selections = about.get("rounds"), about.get("selections")
        if not isinstance(rounds, list) or not isinstance(selections, list):
            return {}
        pairs = zip(rounds, selections, strict=False)
        return {k: v for k, v in pairs if isinstance(k, int) and isinstance(v, str)}

    def _describe(self, selections: dict[int, str]) -> None:
        if selections:
            about = ConfigRecord({"run": self._run, "partition": self._partition_id})
            about["rounds"], about["selections"] = list(selections), list(selections.values())
            self._state[self._about] = about
        elif self._about in self._state:
            del self._state[self._about]

    def rounds(self) -> set[int]:
        return set(self._selections())

    def read(self, server_round: int) -> Kept | None:
        record = self._state.get(self._key(server_round))
        if not isinstance(record, ArrayRecord):
            self.remove(server_round)
            return None
        return Kept(to_tensors(record), self._selections()[server_round])

    def write(self, server_round: int, record: ArrayRecord, selection: str) -> None:
        self._state[self._key(server_round)] = record
        self._describe({**self._selections(), server_round: selection})

    def remove(self, server_round: int) -> None:
        if (key := self._key(server_round)) in self._state:
            del self._state[key]
        selections = self._selections()
        selections.pop(server_round, None)
        self._describe(selections)


class _Files:
    """Versions as ``<run folder>/<partition id>/<name>-<round>.safetensors``."""

    def __init__(self, run_folder: Path, partition_id: int, name: str) -> None:
        self.run_folder, self._name = run_folder, name
        self._folder = run_folder / str(partition_id)
        self._pattern = re.compile(rf"{name}-([1-9][0-9]*)\.safetensors")

    def _path(self, server_round: int) -> Path:
        return self._folder / f"{self._name}-{server_round}.safetensors"

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

    def rounds(self) -> set[int]:
        """Return the rounds there are ordinary files of."""
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

    def read(self, server_round: int) -> Kept | None:
        path = self._path(server_round)
        about: dict[str, str] = {}
        tensors: dict[str, torch.Tensor] = {}
        with self.explained(f"the client state of round {server_round} cannot be read"):
            try:
                with safe_open(path, framework="pt") as file:
                    about = file.metadata() or {}
                    tensors = {name: file.get_tensor(name) for name in file.keys()}
            except FileNotFoundError:  # another process has swept it away
                return None
            except SafetensorError:
                about = {}  # without a digest: damaged
        selection = about.get("selection", "")
        if about.get("digest") != self._seal(path, tensors, selection):
            with contextlib.suppress(OSError):  # what cannot be removed is noticed again
                path.unlink(missing_ok=True)
            return None
        return Kept(tensors, selection)

    def write(self, server_round: int, tensors: Mapping[str, torch.Tensor], selection: str) -> None:
        """Write a version; it is there as a whole, on the disk, or not at all."""
        if self._leads_elsewhere():
            raise OSError(errno.ELOOP, "it is a symbolic link")
        path = self._path(server_round)
        about = {"selection": selection, "digest": self._seal(path, tensors, selection)}
        self._folder.mkdir(parents=True, exist_ok=True)
        self._remove_unfinished()
        handle, temporary = tempfile.mkstemp(dir=self._folder, prefix=f".{self._name}-")
        os.close(handle)
        try:
            write_tensors(Path(temporary), tensors, about)
            _sync(Path(temporary))
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not every file system can do that to a folder
            _sync(self._folder)

    def _remove_unfinished(self) -> None:
        """Remove what processes that were killed have left."""
        for path in self._folder.glob(f".{self._name}-*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.lstat().st_mtime > STALE_WRITING_SECONDS:
                    path.unlink()

    def remove(self, server_round: int) -> None:
        self._path(server_round).unlink(missing_ok=True)


def forget(folder: Path, run: str) -> None:
    """Remove the files of a run that has ended; what cannot be removed is a warning.

    Raises
    ------
    ValueError
        If ``run`` is not 32 lowercase hex digits.
    """
    run_folder = _run_folder(folder, run)
    if run_folder.is_symlink():
        with contextlib.suppress(OSError):
            run_folder.unlink()
    else:
        shutil.rmtree(run_folder, ignore_errors=True)
    if os.path.lexists(run_folder):
        log(WARNING, "the client states of the ended run cannot be removed: %s", run_folder)


def _run_folder(folder: Path, run: str) -> Path:
    if not isinstance(run, str) or not _RUN.fullmatch(run):
        raise ValueError(f"a run's token is 32 lowercase hex digits, got {str(run)[:80]!r}")
    return folder / run


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sweep(own: Path) -> None:
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
