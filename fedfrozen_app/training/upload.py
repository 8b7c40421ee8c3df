"""The client's half of upload compression: y or y - x encoded, what is left out kept."""

from collections.abc import Mapping

import torch

from fedfrozen_app.models.entries import wide
from fedfrozen_app.models.reselect import reselect
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.training.kept import KeptByVersion, Tensors
from fedfrozen_app.transport.client_state import ClientState
from fedfrozen_app.transport.codec import Codec, layout_of_tensors
from fedfrozen_app.transport.compression import START, with_feedback
from fedfrozen_app.transport.payload import Payload, from_namespaces, to_namespaces

FEEDBACK = "feedback"  # the name of the client state
LOST = "client %d has lost its error feedback of version %d and goes on without"


def follow(residual: Tensors, before: str, selection: Selection) -> Tensors:
    """Carry error feedback to another selection.

    What froze is dropped, what came starts at zero, and what a codec goes on from is dropped
    with every entry whose shape changes.
    """
    errors, extra = from_namespaces(residual, (START,))
    following = reselect(errors, before, selection)
    start = {
        name: tensor
        for name, tensor in extra.get(START, {}).items()
        if name in following and following[name].shape == errors[name].shape
    }
    return {**following, **to_namespaces({START: start})}


class Upload:
    """One client's model on its way back in one round.

    Parameters
    ----------
    payload : Payload
        The server's message, with x.
    selection : Selection
        What the model is frozen by in this round.
    codec : Codec
        What the message asks for.
    kept : ClientState, optional
        Where error feedback lies between rounds; needed for codecs of updates.
    partition_id : int
        The client, for what is logged.
    """

    def __init__(
        self,
        payload: Payload,
        selection: Selection,
        codec: Codec,
        kept: ClientState | None,
        partition_id: int,
    ) -> None:
        self._x, self._codec = payload.active, codec
        self._kept = None if kept is None else KeptByVersion(payload, selection, kept)
        self._partition_id = partition_id

    def encode(self, y: Mapping[str, torch.Tensor]) -> Tensors:
        """Return what to send of y, the active entries after training."""
        layout = layout_of_tensors(self._x)
        names = set(self._codec.trained_names(layout))
        # what is not packed travels in the dtype that it came in
        own = {n: t if n in names else t.to(self._x[n].dtype) for n, t in y.items()}
        if self._kept is None:
            return self._codec.encode(own)
        delta = {
            n: wide(t) - wide(self._x[n]).to(t.device) if n in names else t for n, t in own.items()
        }
        residual = self._kept.take(follow, LOST, self._partition_id) or {}
        wire, residual = with_feedback(self._codec, delta, residual, layout)
        self._kept.put(residual)
        return wire
