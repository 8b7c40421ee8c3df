"""What a client keeps between rounds, committed only by the server's word.

A state that a client computes counts only if the server used the reply it came with. So the
server numbers the versions, upwards, and names with each message the one that came with the
client's last reply that entered the model. What is newer than that reply never
happened (the reply was lost, or the server was rolled back to a checkpoint), and what is
older than the version of that reply is not needed any more: two versions stay at most.

Small states lie in Flower's ``context.state``, large ones in files, because Flower sends
the context along with every message and loses one of 350 MB or more.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedfrozen_app.transport.arrays import to_record, to_tensors
from fedfrozen_app.transport.client_files import Kept, StateFiles, forget, run_folder, sweep

LIMIT_BYTES = 4 * 2**20
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")

__all__ = ["ClientState", "Kept", "forget"]


class ClientState:
    """Tensors one client keeps between rounds under a name, the last versions by number.

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
        self._files = StateFiles(run_folder(folder, run), int(partition_id), name)
        self._records = _Records(state, run, int(partition_id), name) if own_node else None

    @property
    def _places(self) -> "list[_Records | StateFiles]":
        return [self._files] if self._records is None else [self._records, self._files]

    def get(self, version: int) -> Kept | None:
        """Return exactly that version; None if it is missing or damaged.

        Version 0 stands for a client of which no reply was ever used: None.

        Raises
        ------
        OSError
            If the file is there and cannot be read (permissions, for example).
        """
        for place in self._places:
            if version in place.versions():
                return place.read(version)
        return None

    def put(
        self,
        version: int,
        accepted: int,
        tensors: Mapping[str, torch.Tensor],
        selection: str,
    ) -> None:
        """Add a version, and remove those that are not needed any more.

        Parameters
        ----------
        version : int
            Its number, from 1.
        accepted : int
            The version of the client's last reply that entered the model, 0 if none did.
        tensors : Mapping[str, torch.Tensor]
            Shared, not copied, while they are in ``state``: do not write to them afterwards.
        selection : str
            What the tensors belong to; comes back from :meth:`get`.

        Raises
        ------
        ValueError
            If not 0 <= accepted < version.
        OSError
            If the disk does not take the files; the accepted version is still there.
        """
        if not 0 <= accepted < version:
            raise ValueError(
                "a client state is put with 0 <= accepted < version, "
                f"got accepted={accepted}, version={version}"
            )
        with self._files.explained(f"version {version} of the client state cannot be kept"):
            self._prune(accepted)
            if self._records is not None and (record := self._small(tensors)) is not None:
                self._records.write(version, record, selection)
            else:
                self._files.write(version, tensors, selection)
                sweep(self._files.run_folder)

    def _prune(self, accepted: int) -> None:
        """Remove all but the newest version that the model has used."""
        numbers = set().union(*(place.versions() for place in self._places))
        used = max((number for number in numbers if number <= accepted), default=0)
        for place in self._places:
            for number in place.versions() - {used}:
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
        own = {self._key(number) for number in self.versions()}
        own |= {self._about} if own else set()
        for key in [key for key in state if key.startswith(self._prefix) and key not in own]:
            del state[key]  # another run's, or damaged

    def _key(self, version: int) -> str:
        return f"{self._prefix}version-{version}"

    def _selections(self) -> dict[int, str]:
        """Return the selection of each version by number."""
        about = self._state.get(self._about)
        if not isinstance(about, ConfigRecord):
            return {}
        if (about.get("run"), about.get("partition")) != (self._run, self._partition_id):
            return {}
        numbers, selections = about.get("numbers"), about.get("selections")
        if not isinstance(numbers, list) or not isinstance(selections, list):
            return {}
        pairs = zip(numbers, selections, strict=False)
        return {k: v for k, v in pairs if isinstance(k, int) and isinstance(v, str)}

    def _describe(self, selections: dict[int, str]) -> None:
        if selections:
            about = ConfigRecord({"run": self._run, "partition": self._partition_id})
            about["numbers"], about["selections"] = list(selections), list(selections.values())
            self._state[self._about] = about
        elif self._about in self._state:
            del self._state[self._about]

    def versions(self) -> set[int]:
        return set(self._selections())

    def read(self, version: int) -> Kept | None:
        record = self._state.get(self._key(version))
        if not isinstance(record, ArrayRecord):
            self.remove(version)
            return None
        return Kept(to_tensors(record), self._selections()[version])

    def write(self, version: int, record: ArrayRecord, selection: str) -> None:
        self._state[self._key(version)] = record
        self._describe({**self._selections(), version: selection})

    def remove(self, version: int) -> None:
        if (key := self._key(version)) in self._state:
            del self._state[key]
        selections = self._selections()
        selections.pop(version, None)
        self._describe(selections)
