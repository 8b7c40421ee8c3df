"""Hand an object to another process of this machine, its large buffers by shared memory.

Parcels lie in one folder, so that removing it frees whatever was never unpacked.
"""

import os
import pickle
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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
    """Make a folder for parcels; its maker removes it."""
    return Path(tempfile.mkdtemp(prefix="fedfrozen-", dir=_ROOT))


def pack(content: Any, folder: Path) -> Parcel:
    """Pickle an object; its buffers wait in ``folder`` until the parcel is unpacked."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(content, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    if not views:
        return Parcel(pickled, "", ())
    try:
        path = _write(views, folder)
    except OSError:  # shared memory is full, as in a container with little of it
        path = _write(views, Path(tempfile.gettempdir()))
    return Parcel(pickled, path, tuple(view.nbytes for view in views))


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
    if not parcel.path:
        return pickle.loads(parcel.pickled)
    starts = np.cumsum([0, *(size + _padding(size) for size in parcel.sizes)])
    whole = np.empty(0, np.uint8)
    if starts[-1]:  # an empty file cannot be mapped
        whole = np.memmap(parcel.path, np.uint8, "c", shape=(int(starts[-1]),))
    os.unlink(parcel.path)  # the mapping stays
    buffers = [
        whole[start : start + size] for start, size in zip(starts, parcel.sizes, strict=False)
    ]
    return pickle.loads(parcel.pickled, buffers=buffers)


def _padding(size: int) -> int:
    """Return how many bytes bring a buffer of ``size`` bytes to the alignment."""
    return -size % _ALIGNMENT
