"""Tensors in Flower messages, serialised only when something asks for their bytes."""

import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from flwr.common.constant import SType


@cache
def _numpy_dtype(dtype: torch.dtype) -> str:
    """Return NumPy's name of a torch dtype; bfloat16 has none and raises TypeError."""
    return str(torch.empty(0, dtype=dtype).numpy().dtype)


def _from_numpy(values: np.ndarray[Any, Any]) -> torch.Tensor:
    """Wrap an ndarray without copying; Ray hands out read-only ones, which we never write."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(values)


def _unpickle(values: np.ndarray[Any, Any]) -> "TensorArray":
    return TensorArray(_from_numpy(values))


class TensorArray(Array):
    """A Flower ``Array`` that holds a tensor and makes the ``.npy`` bytes on demand.

    Object ids and wire form are those of a plain ``Array`` of the same values, so a
    receiver needs nothing of this package. Pickling (Ray) carries an ndarray, which
    pickle protocol 5 moves out of band. The tensor is shared, not copied: whoever makes
    a ``TensorArray`` must not write to the tensor afterwards.
    """

    # Flower writes the class name into an object's header and looks it up when inflating.
    __qualname__ = "Array"

    def __init__(self, tensor: torch.Tensor) -> None:
        detached = tensor.detach()
        self.__dict__.update(
            tensor=detached,
            dtype=_numpy_dtype(detached.dtype),
            shape=tuple(detached.shape),
            stype=SType.NUMPY,
        )

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """Return the array as ``.npy`` bytes; built at each call, nothing is kept."""
        return Array(self.numpy()).data

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return a fresh ndarray, as Flower does: a client may write to it."""
        return np.array(self.__dict__["tensor"].cpu().numpy(), order="C")

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (np.asarray(self.__dict__["tensor"].cpu().numpy(), order="C"),)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Array):
            return NotImplemented
        return (self.dtype, self.shape, self.data) == (other.dtype, other.shape, other.data)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TensorArray(dtype={self.dtype!r}, shape={self.shape})"


def to_record(tensors: Mapping[str, torch.Tensor]) -> ArrayRecord:
    """Return a record that shares the given tensors, keys in the given order."""
    record = ArrayRecord()
    for name, tensor in tensors.items():
        record[name] = TensorArray(tensor)
    return record


def to_tensor(array: Array) -> torch.Tensor:
    """Return an array's values as a tensor to read, without a copy where possible."""
    if isinstance(array, TensorArray):
        tensor: torch.Tensor = array.__dict__["tensor"]
        return tensor
    return _from_numpy(array.numpy())


def to_tensors(record: ArrayRecord) -> dict[str, torch.Tensor]:
    """Return a record's values by name, to read; see :func:`to_tensor`."""
    return {name: to_tensor(array) for name, array in record.items()}
