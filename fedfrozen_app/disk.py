"""Files on a disk that may be full or read-only: written with errors that say what to do."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch


@contextmanager
def explained(path: Path, remedy: str) -> Iterator[None]:
    """Name the file and the remedy where the system says only that there is no space.

    Raises
    ------
    OSError
        For each one of the block, with its number.
    """
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror or error}; {remedy}"
        raise OSError(error.errno or errno.EIO, reason, str(path)) from error


class _Sink:
    """Passes bytes on to a file and remembers its error, which torch's writer does not tell."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def save_state(path: Path, state: Any) -> None:
    """Write what ``torch.load`` reads; raise OSError, and no other, when the disk fails."""
    with path.open("wb") as file:
        sink = _Sink(file)
        try:
            torch.save(state, sink)  # type: ignore[arg-type]
        except RuntimeError:
            if sink.error is None:
                raise
            raise sink.error from None


def save_array(path: Path, array: npt.NDArray[Any]) -> None:
    """Write a ``.npy`` file; ``np.save`` raises an OSError without a number on a full disk."""
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(np.ascontiguousarray(array).data)
