"""What a message's rule asks of a client: hooks for the loop, and what goes back beside y."""

from collections.abc import Mapping
from logging import WARNING
from pathlib import Path

import torch
from flwr.app import RecordDict
from flwr.supercore import log

from fedfrozen_app.models.reselect import reselect
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.strategies.fedprox import Proximal
from fedfrozen_app.strategies.scaffold import Correction, next_control
from fedfrozen_app.training.hooks import Hook, ValueL2
from fedfrozen_app.transport.client_state import ClientState
from fedfrozen_app.transport.payload import (
    CONTROL,
    CONTROL_ACCEPTED,
    CONTROL_PATH,
    CONTROL_VERSION,
    RUN,
    Payload,
    to_namespaces,
)

Tensors = dict[str, torch.Tensor]


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
        self._payload, self._selection, self._kept = payload, selection, kept
        self._version = int(payload.config[CONTROL_VERSION])  # type: ignore[arg-type]
        self._accepted = int(payload.config[CONTROL_ACCEPTED])  # type: ignore[arg-type]
        self.c = payload.extra[CONTROL]
        zero = {name: torch.zeros_like(c) for name, c in self.c.items()}
        stored = self._stored(partition_id)
        self.c_i = {**zero, **{name: stored[name] for name in stored.keys() & self.c.keys()}}

    @property
    def hook(self) -> Correction:
        """The correction c - c_i of the local steps."""
        return Correction(self.c, self.c_i, self._selection)

    def _stored(self, partition_id: int) -> Tensors:
        """Return c_i as kept, carried through the selections since then."""
        kept = self._kept.get(self._accepted)
        if kept is None:
            if self._accepted > 0:
                log(
                    WARNING,
                    "client %d has lost version %d of its SCAFFOLD control and takes the server's",
                    partition_id,
                    self._accepted,
                )
                return self.c  # the mean of all: this round it is not corrected
            return {}
        control, before = kept.tensors, kept.selection
        entries = {e.name: torch.empty(e.shape, device="meta") for e in self._selection.entries}
        path: list[str] = self._payload.config.get(CONTROL_PATH, [])  # type: ignore[assignment]
        for spec in path:
            control = reselect(control, before, Selection.build(spec, entries))
            before = spec
        return control

    def finish(self, y: Mapping[str, torch.Tensor], step_sizes: float) -> Tensors:
        """Keep c_i+ and return Delta c_i; ``step_sizes`` is the sum of effective step sizes."""
        if step_sizes == 0:  # a client without examples
            return {name: torch.zeros_like(c) for name, c in self.c.items()}
        x, y = (
            {name: tensors[name].to(c.device) for name, c in self.c.items()}
            for tensors in (self._payload.active, y)
        )
        following = next_control(self.c, self.c_i, x, y, step_sizes)
        self._kept.put(self._version, self._accepted, following, self._selection.spec)
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
        if payload.value_l2 > 0:
            self.hooks.append(ValueL2(payload.value_l2, entries, selection))
        if payload.proximal_mu > 0:
            self.hooks.append(Proximal(payload.proximal_mu))
        if CONTROL in payload.extra:
            run = str(payload.config.get(RUN, ""))
            kept = ClientState(state, folder, run, partition_id, CONTROL, own_node=own_node)
            self._control = ClientControl(payload, selection, kept, partition_id)
            self.hooks.append(self._control.hook)

    def finish(self, y: Mapping[str, torch.Tensor], step_sizes: float) -> Tensors:
        """Return what goes back beside y, under keys of its own."""
        if self._control is None:
            return {}
        return to_namespaces({CONTROL: self._control.finish(y, step_sizes)})
