"""What a message asks of a client: hooks for the loop, and what goes back."""

from collections.abc import Mapping
from pathlib import Path

import torch
from flwr.app import RecordDict

from fedfrozen_app.models.reselect import reselect
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.strategies.fedprox import Proximal
from fedfrozen_app.strategies.scaffold import Correction, next_control
from fedfrozen_app.training.hooks import Hook, ValueL2
from fedfrozen_app.training.kept import KeptByVersion, Tensors
from fedfrozen_app.training.upload import FEEDBACK, Upload
from fedfrozen_app.transport.client_state import ClientState
from fedfrozen_app.transport.codecs import Codecs
from fedfrozen_app.transport.payload import CONTROL, RUN, Payload, to_namespaces

LOST_CONTROL = "client %d has lost its SCAFFOLD control of version %d and takes the server's"


class ClientControl:
    """SCAFFOLD's c_i on one client in one round: taken up, used, and put away.

    Parameters
    ----------
    payload : Payload
        The server's message, with c in it.
    selection : Selection
        What the model is frozen by in this round.
    kept : ClientState
        Where c_i lies between rounds.
    partition_id : int
        The client, for what is logged.
    """

    def __init__(
        self, payload: Payload, selection: Selection, kept: ClientState, partition_id: int
    ) -> None:
        self._payload, self._selection = payload, selection
        self._kept = KeptByVersion(payload, selection, kept)
        self.c = payload.extra[CONTROL]
        zero = {name: torch.zeros_like(c) for name, c in self.c.items()}
        stored = self._kept.take(reselect, LOST_CONTROL, partition_id)
        if stored is None:
            stored = self.c  # the mean of all: this round it is not corrected
        self.c_i = {**zero, **{name: stored[name] for name in stored.keys() & self.c.keys()}}

    @property
    def hook(self) -> Correction:
        """The correction c - c_i of the local steps."""
        return Correction(self.c, self.c_i, self._selection)

    def finish(self, y: Mapping[str, torch.Tensor], step_sizes: float) -> Tensors:
        """Keep c_i+ and return Delta c_i; ``step_sizes`` is the sum of effective step sizes."""
        if step_sizes == 0:  # a client without examples
            return {name: torch.zeros_like(c) for name, c in self.c.items()}
        x, y = (
            {name: tensors[name].to(c.device) for name, c in self.c.items()}
            for tensors in (self._payload.active, y)
        )
        following = next_control(self.c, self.c_i, x, y, step_sizes)
        self._kept.put(following)
        return {name: following[name] - self.c_i[name] for name in following}


class ClientRules:
    """What one message asks for, put together from what it carries.

    Parameters
    ----------
    payload : Payload
        The server's message.
    entries : mapping of str to Tensor
        The whole state dict of the model.
    selection : Selection
        What the model is frozen by.
    partition_id : int
        The client.
    state : RecordDict
        The node's ``context.state``.
    folder : Path
        Where clients keep what is too large for that.
    own_node : bool
        Whether the node serves this client only.
    """

    def __init__(
        self,
        payload: Payload,
        entries: Mapping[str, torch.Tensor],
        selection: Selection,
        *,
        partition_id: int,
        state: RecordDict,
        folder: Path,
        own_node: bool,
    ) -> None:
        self.hooks: list[Hook] = []
        self._control: ClientControl | None = None
        self._upload: Upload | None = None
        if payload.value_l2 > 0:
            self.hooks.append(ValueL2(payload.value_l2, entries, selection))
        if payload.proximal_mu > 0:
            self.hooks.append(Proximal(payload.proximal_mu))

        def kept(name: str) -> ClientState:
            run = str(payload.config.get(RUN, ""))
            return ClientState(state, folder, run, partition_id, name, own_node=own_node)

        if CONTROL in payload.extra:
            self._control = ClientControl(payload, selection, kept(CONTROL), partition_id)
            self.hooks.append(self._control.hook)
        if (codec := Codecs.of_message(payload.config).up) is not None:
            feedback = kept(FEEDBACK) if codec.of_update else None
            self._upload = Upload(payload, selection, codec, feedback, partition_id)

    def reply(self, y: Mapping[str, torch.Tensor], step_sizes: float) -> Tensors:
        """Return all arrays that go back.

        Parameters
        ----------
        y : mapping of str to Tensor
            The active entries after training.
        step_sizes : float
            The sum of the effective step sizes taken, 0 for a client without examples.
        """
        arrays = dict(y) if self._upload is None else self._upload.encode(y)
        if self._control is not None:
            arrays |= to_namespaces({CONTROL: self._control.finish(y, step_sizes)})
        return arrays
