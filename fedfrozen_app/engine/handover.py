"""Hand an object to another process of this machine, its large buffers by shared memory.

Parcels lie in one folder, so that removing it frees whatever was never unpacked. What goes into
many parcels, as a round's model does, is written once and put on a :class:`Shelf`.
"""

import io
import os
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedfrozen_app.disk import explained

_ALIGNMENT = 64  # bytes; vector loads want aligned arrays
# /dev/shm is memory; elsewhere a temporary file does the same, through the page cache
_ROOT = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None


@dataclass(frozen=True)
class Parcel:
    """A pickled object whose buffers lie one after the other in ``path``, if there are any."""

    pickled: bytes
    path: str
    sizes: tuple[int, ...]


def new_folder() -> Path:
    """Make a folder for parcels, named by the process that is to remove it."""
    return Path(tempfile.mkdtemp(prefix=f"fedfrozen-{os.getpid()}-", dir=_ROOT))


class Shelf:
    """Objects of one type that many parcels hold, each written once and kept until cleared."""

    def __init__(self, kind: type, folder: Path) -> None:
        self.kind, self._folder = kind, folder
        self._kept: dict[int, tuple[Any, Parcel]] = {}

    def parcel(self, content: Any) -> Parcel:
        """Return the parcel of an object, the same one for the same object."""
        if id(content) not in self._kept:  # kept alive here, so that no other gets its id
            self._kept[id(content)] = content, pack(content, self._folder)
        return self._kept[id(content)][1]

    def clear(self) -> None:
        """Free the memory of all parcels; those that were unpacked stay as they are."""
        for _, parcel in self._kept.values():
            if parcel.path:
                Path(parcel.path).unlink(missing_ok=True)
        self._kept.clear()


class _Pickler(pickle.Pickler):
    """Puts objects on a shelf, and where they lie into the pickle."""

    def __init__(self, file: io.BytesIO, shelf: Shelf | None, callback: Callable[..., Any]) -> None:
        super().__init__(file, protocol=5, buffer_callback=callback)
        self._shelf = shelf

    def reducer_override(self, content: Any) -> Any:
        if self._shelf is None or not isinstance(content, self._shelf.kind):
            return NotImplemented
        return _unpack_shelved, (self._shelf.parcel(content),)


def pack(content: Any, folder: Path, shelf: Shelf | None = None) -> Parcel:
    """Pickle an object; its buffers wait in ``folder`` until the parcel is unpacked.

    Parts of it that go on ``shelf`` wait until that is cleared.
    """
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    _Pickler(file, shelf, buffers.append).dump(content)
    pickled = file.getvalue()
    views = [buffer.raw() for buffer in buffers]
    if not views:
        return Parcel(pickled, "", ())
    try:
        path = _write(views, folder)
    except OSError:  # shared memory is full, as in a container with little of it
        path = _write_elsewhere(views)
    return Parcel(pickled, path, tuple(view.nbytes for view in views))


def _write_elsewhere(views: list[memoryview]) -> str:
    folder = Path(tempfile.gettempdir())
    with explained(folder, "processes hand over arrays there: make room, or use jobs=1"):
        return _write(views, folder)


def _write(views: list[memoryview], folder: Path) -> str:
    """Write buffers one after the other, aligned; a file that does not fit is removed."""
    with tempfile.NamedTemporaryFile(prefix="fedfrozen-", dir=folder, delete=False) as file:
        try:
            for view in views:
                file.write(view)
                file.write(bytes(_padding(view.nbytes)))
        except OSError:
            os.unlink(file.name)
            raise
    return file.name


def unpack(parcel: Parcel) -> Any:
    """Return the object; its arrays map the shared memory, which is freed with them."""
    content = _unpack_shelved(parcel)
    if parcel.path:
        os.unlink(parcel.path)  # the mapping stays
    return content


def _unpack_shelved(parcel: Parcel) -> Any:
    if not parcel.path:
        return pickle.loads(parcel.pickled)
    starts = np.cumsum([0, *(size + _padding(size) for size in parcel.sizes)])
    whole = np.empty(0, np.uint8)
    if starts[-1]:  # an empty file cannot be mapped
        whole = np.memmap(parcel.path, np.uint8, "c", shape=(int(starts[-1]),))
    buffers = [
        whole[start : start + size] for start, size in zip(starts, parcel.sizes, strict=False)
    ]
    return pickle.loads(parcel.pickled, buffers=buffers)


def _padding(size: int) -> int:
    """Return how many bytes bring a buffer of ``size`` bytes to the alignment."""
    return -size % _ALIGNMENT
