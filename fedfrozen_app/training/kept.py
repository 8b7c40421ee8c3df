"""What a client keeps between rounds, in the version that the server says counts."""

from collections.abc import Callable, Mapping
from logging import WARNING

import torch
from flwr.supercore import log

from fedfrozen_app.models.selection import Selection
from fedfrozen_app.transport.client_state import ClientState
from fedfrozen_app.transport.payload import ACCEPTED, PATH, VERSION, Payload

Tensors = dict[str, torch.Tensor]
# state, what its selection was built from, the next selection
Follow = Callable[[Tensors, str, Selection], Tensors]


class KeptByVersion:
    """One client's state in one round: taken up through the selections since, and put away.

    Parameters
    ----------
    payload : Payload
        The server's message.
    selection : Selection
        What the model is frozen by in this round.
    kept : ClientState
        Where the state lies between rounds.
    """

    def __init__(self, payload: Payload, selection: Selection, kept: ClientState) -> None:
        self._selection, self._kept = selection, kept
        self._version = int(payload.config[VERSION])  # type: ignore[arg-type]
        self._accepted = int(payload.config[ACCEPTED])  # type: ignore[arg-type]
        self._path: list[str] = payload.config.get(PATH, [])  # type: ignore[assignment]

    def take(self, follow: Follow, lost: str, *args: object) -> Tensors | None:
        """Return the version that counts, as it is now: {} if there is none yet.

        Parameters
        ----------
        follow : callable
            Carries state from one selection to the next.
        lost, *args
            Format and arguments of the warning where the version is lost; None is returned.
            The version follows as the last argument.
        """
        kept = self._kept.get(self._accepted)
        if kept is None:
            if self._accepted == 0:
                return {}
            log(WARNING, lost, *args, self._accepted)
            return None
        tensors, before = kept.tensors, kept.selection
        entries = {e.name: torch.empty(e.shape, device="meta") for e in self._selection.entries}
        for spec in self._path:
            tensors = follow(tensors, before, Selection.build(spec, entries))
            before = spec
        return tensors

    def put(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep the version of this round; it counts if the server uses the reply."""
        self._kept.put(self._version, self._accepted, tensors, self._selection.spec)
