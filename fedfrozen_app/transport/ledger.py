"""Byte-exact accounting of what a federation sends.

``payload`` is the tensors themselves: elements times bytes per element. ``wire`` is the
message content in Flower's wire form: the record tree, each ``Array`` with its ``.npy``
header cut into 5 MiB chunks, each object with its own header. Wire sizes are computed
from shapes, so counting never serialises an array.
"""

import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE, SType
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedfrozen_app.transport.arrays import TensorArray
from fedfrozen_app.transport.payload import client_of
from fedfrozen_app.transport.records import array_records

OBJECT_ID_LENGTH = 64  # SHA-256 in hex
_SOME_ID = "0" * OBJECT_ID_LENGTH


@dataclass
class Traffic:
    """Bytes in both directions, as seen from the clients: up = to the server."""

    bytes_up: int = 0
    bytes_down: int = 0
    wire_bytes_up: int = 0
    wire_bytes_down: int = 0


def payload_bytes(content: RecordDict) -> int:
    """Return the tensor bytes of a message: values only, no framing."""
    records = array_records(content).values()
    return sum(_values_bytes(array) for record in records for array in record.values())


def _values_bytes(array: Array) -> int:
    try:
        return math.prod(array.shape) * np.dtype(array.dtype).itemsize
    except TypeError:  # a dtype NumPy does not know: count what was sent
        return len(array.data)


def wire_bytes(content: RecordDict) -> int:
    """Return the size of a message's content in Flower's wire form, in bytes.

    The sum of the sizes of all objects of the tree. An object that occurs twice is
    counted twice, although a connection that has it already may skip it.
    """
    total = _object_bytes("RecordDict", len(content), _references(content))
    for record in content.values():
        if isinstance(record, ArrayRecord):
            total += _object_bytes("ArrayRecord", len(record), _references(record))
            total += sum(map(_array_bytes, record.values()))
        else:
            total += len(record.deflate())
    return total


def _references(names: Iterable[str]) -> int:
    """Return the size of the JSON that maps names to object ids."""
    return len(json.dumps({name: _SOME_ID for name in names}))


def _object_bytes(kind: str, num_children: int, body: int) -> int:
    ids = num_children * OBJECT_ID_LENGTH + max(0, num_children - 1)
    return len(f"{kind} ") + ids + len(f" {body}") + 1 + body


def _array_bytes(array: Array) -> int:
    """Return the size of one ``Array`` object and its chunks."""
    if isinstance(array, TensorArray):
        return _tensor_bytes(array.dtype, array.shape)
    return _stored_bytes(array.dtype, array.shape, array.stype, len(array.data))


@cache
def _tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the size of an ``Array`` that has not been serialised."""
    values = np.broadcast_to(np.zeros((), dtype), shape)
    header = np.lib.format.header_data_from_array_1_0(values)
    buffer = io.BytesIO()
    # broadcast values are not contiguous; what is sent always is, in C order
    np.lib.format.write_array_header_1_0(buffer, {**header, "fortran_order": False})
    return _stored_bytes(dtype, shape, SType.NUMPY, buffer.tell() + values.nbytes)


def _stored_bytes(dtype: str, shape: tuple[int, ...], stype: str, size: int) -> int:
    full, rest = divmod(size, FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE)
    chunks = [FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE] * full + ([rest] if rest else [])
    ids = list(range(len(chunks)))
    meta = {"dtype": dtype, "shape": shape, "stype": stype, "arraychunk_ids": ids}
    total = _object_bytes("Array", len(chunks), len(json.dumps(meta)))
    return total + sum(_object_bytes("ArrayChunk", 0, chunk) for chunk in chunks)


class LedgerGrid(Grid):
    """A ``Grid`` that counts what passes through another one.

    Every message counts, also one sent again within a round or a reply that is dropped
    afterwards: it was sent. ``take()`` returns the traffic since the last call; ``spent`` is
    of the whole run. Clients are told apart as in :func:`.payload.client_of`, else by node.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._traffic = Traffic()
        self.spent: Counter[int] = Counter()  # payload of both directions so far, by client

    def take(self) -> Traffic:
        """Return the traffic since the last call and start again at zero."""
        traffic, self._traffic = self._traffic, Traffic()
        return traffic

    def _count_down(self, messages: Iterable[Message]) -> Iterator[Message]:
        for message in messages:
            if message.has_content():
                payload = payload_bytes(message.content)
                self._traffic.bytes_down += payload
                self.spent[client_of(message, message.metadata.dst_node_id)] += payload
                self._traffic.wire_bytes_down += wire_bytes(message.content)
            yield message

    def _count_up(self, replies: Iterable[Message]) -> Iterator[Message]:
        for reply in replies:
            if reply.has_content():
                payload = payload_bytes(reply.content)
                self._traffic.bytes_up += payload
                self.spent[client_of(reply, reply.metadata.src_node_id)] += payload
                self._traffic.wire_bytes_up += wire_bytes(reply.content)
            yield reply

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages, count both directions, yield replies as the grid gives them."""
        sent = list(self._count_down(messages))
        return self._count_up(self._grid.send_and_receive(sent, timeout=timeout))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push messages and count them."""
        return self._grid.push_messages(list(self._count_down(messages)))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pull replies and count them."""
        return self._count_up(self._grid.pull_messages(message_ids))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def set_run(self, run: Run) -> None:
        """Set the run of the inner grid."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """Run of the inner grid."""
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message with the inner grid."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Get node ids of the inner grid."""
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Get nodes of the inner grid."""
        return self._grid.get_nodes()
