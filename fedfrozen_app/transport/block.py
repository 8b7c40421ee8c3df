"""The server's half of the frozen-block protocol; the client's is ``payload.open_payload``.

A block goes to a client with the first message after the freeze and is taken as held once
that client has replied to it. A later stage that freezes other entries has a block of its
own, which goes out whole. A client that has lost it answers *missing*, is sent it
again in the same round, and the reply to that takes the place of the first.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO
from typing import Any, Self

import torch
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore import log

from fedfrozen_app.transport.arrays import to_record
from fedfrozen_app.transport.frozen_cache import digest
from fedfrozen_app.transport.payload import (
    Addressees,
    attach_frozen,
    client_of,
    mark,
    missing_digest,
)


@dataclass
class FrozenBlock:
    """A frozen block, its digest and the clients that hold it.

    ``holders`` are client ids, not node ids: what is sent must not depend on which node of
    a simulation happened to serve a client.
    """

    tensors: dict[str, torch.Tensor]
    digest: str
    holders: set[int] = field(default_factory=set)
    _sent: dict[int, Message] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, tensors: dict[str, torch.Tensor]) -> Self:
        """Make a block that no client holds yet."""
        return cls(tensors, digest(tensors))

    def dress(
        self,
        messages: Iterable[Message],
        selection: str,
        value_l2: float,
        order: Sequence[int] = (),
    ) -> None:
        """Name the selection and the block in a round's messages; add it for who lacks it.

        ``order`` is that of the whole model (:mod:`.order`), none where weights do not travel.
        """
        block = to_record(self.tensors)
        self._sent = {}
        for message in messages:
            mark(message, selection, self.digest, value_l2, order)
            client = client_of(message, message.metadata.dst_node_id)
            self._sent[client] = message
            if client not in self.holders:
                attach_frozen(message, block)

    def complete(self, replies: Iterable[Message], grid: Grid, timeout: float) -> Iterator[Message]:
        """Yield the replies; where one asks for the block, send it and yield the next reply.

        On an ordered grid a client is asked again before the next one is heard, so that the
        order holds; elsewhere all are asked at once, after the other replies.
        """
        client_of_reply = Addressees(self._sent.values())
        if getattr(grid, "ordered", False):
            for reply in replies:
                yield from self._answer([reply], client_of_reply, grid, timeout)
        else:
            yield from self._answer(replies, client_of_reply, grid, timeout)
        self._sent = {}  # they hold the old model in memory

    def _answer(
        self, replies: Iterable[Message], client_of_reply: Addressees, grid: Grid, timeout: float
    ) -> Iterator[Message]:
        again = []
        for reply in replies:
            client = client_of_reply(reply)
            if missing_digest(reply) == self.digest and client in self._sent:
                log(INFO, "client %d lacks the frozen block; it is sent again", client)
                self.holders.discard(client)
                again.append(self._with_block(self._sent.pop(client)))
            else:
                yield self._confirm(reply, client)
        if again:
            for reply in grid.send_and_receive(again, timeout=timeout):
                yield self._confirm(reply, client_of_reply(reply))

    def _with_block(self, sent: Message) -> Message:
        meta = sent.metadata
        message = Message(sent.content, meta.dst_node_id, meta.message_type, group_id=meta.group_id)
        attach_frozen(message, to_record(self.tensors))
        return message

    def _confirm(self, reply: Message, client: int) -> Message:
        """Note that a client which replied to the message has the block."""
        if reply.has_content() and missing_digest(reply) is None:
            self.holders.add(client)
        return reply

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart of the server."""
        return {
            "tensors": dict(self.tensors),
            "digest": self.digest,
            "holders": sorted(self.holders),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Take over a state returned by :meth:`state_dict`."""
        return cls(dict(state["tensors"]), state["digest"], set(state["holders"]))
