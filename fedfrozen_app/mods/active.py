"""A client mod: the handler sees whole models, the network active entries only.

    app = ClientApp(mods=[active_entries()])

Down, the mod decodes what a message brings, adds the frozen block that the client keeps, and
hands on the whole state dict in the library's order. A client without the block says so and is
sent it in the same round. Up, it takes the active entries out of the whole state dict that the
handler returns, and encodes them where the strategy asks for that. Train and evaluate messages
alike; before the freeze, and without codecs, models pass as they are.

Frozen rows that a handler trains all the same are dropped on the way back, and training them
was work for nothing. One line before the optimiser is made ends that:

    freeze_(model, selection_of(message))
"""

from dataclasses import dataclass
from logging import WARNING
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.constant import ErrorCode
from flwr.supercore import log

from fedfrozen_app.models.selection import Selection
from fedfrozen_app.training.client_rules import ClientRules
from fedfrozen_app.transport.arrays import to_record, to_tensors
from fedfrozen_app.transport.codecs import CODECS, Codecs
from fedfrozen_app.transport.frozen_cache import (
    DEFAULT_CAPACITY_BYTES,
    FrozenCache,
    user_cache,
)
from fedfrozen_app.transport.order import whole_shapes
from fedfrozen_app.transport.payload import (
    CLIENT_APP,
    FREEZE,
    FROZEN,
    LATENT_MAPPING,
    ORDER,
    PARTITION_ID,
    MissingFrozenBlock,
    Payload,
    first_arrays,
    first_config,
    freeze_of,
    is_extra,
    missing_reply,
    open_payload,
)
from fedfrozen_app.transport.records import array_records, config_records

_SAID = "fedfrozen.mod"  # the record of context.state with the warnings a client has given
_said: set[str] = set()  # and those that this process has

WASTED = (
    "active_entries: %d frozen entries came back changed, first %r; they are set back. If the "
    "handler trains them, that is work for nothing: call freeze_(model, selection_of(message)) "
    "before the optimiser is made. If a mod after active_entries adds noise, all is well"
)
NO_FEDFROZEN = (
    "active_entries: the server's strategy is not in a FedFrozen, so nothing freezes and the mod "
    "does nothing; wrap it: fedfrozen_app.strategies.FedFrozen(strategy=..., warmup_rounds=..., "
    'frozen="query-key"), or take active_entries() out of ClientApp(mods=[...])'
)
NOT_CALLED = (
    "active_entries makes a mod and takes no message: call it: active_entries(), so "
    f"{CLIENT_APP}; by position it takes cache_dir alone"
)
VALUE_L2_IGNORED = (
    "active_entries: the strategy asks for value_l2=%g in the loss, which a mod cannot add; add "
    "it in the handler (fedfrozen_app.training.hooks.ValueL2), or set value_l2=0"
)
CONTROLS = (
    "SCAFFOLD corrects every gradient of the client's training, which a mod cannot; take "
    "active_entries() out of ClientApp(mods=[...]) and answer with "
    "fedfrozen_app.training.client_rules.ClientRules in the handler as the README shows, or take "
    "another rule, for example FedFrozen(strategy=FedAvg())"
)
LATENTS = (
    "FedFrozenLatent trains a latent in place of weights, which a handler of whole models cannot; "
    "take active_entries() out of ClientApp(mods=[...]) and use fedfrozen_app.models.latent."
    "LatentTraining in the handler, or take FedFrozen on the server"
)


def active_entries(
    cache_dir: str | Path | None = None,
    *more: object,
    capacity_bytes: int = DEFAULT_CAPACITY_BYTES,
    own_node: bool = True,
) -> "ActiveEntries":
    """Return the mod for ``ClientApp(mods=[active_entries(), ...])``.

    Mods that look at arrays (clipping, noise) come after it in the list: they see whole models
    in both directions.

    Parameters
    ----------
    cache_dir : str or Path, optional
        Where the frozen block is kept, and error feedback too large for ``context.state``; by
        default ``fedfrozen`` in the user's cache folder. Any number of clients may share it.
    *more : object
        Nothing: what a mod that was not called is given lands here, and is told so.
    capacity_bytes : int
        Upper bound of all kept blocks together.
    own_node : bool
        Whether a node always serves the same client; if not, error feedback lies in files.

    Raises
    ------
    TypeError
        In the first message to ``ClientApp(mods=[active_entries])``, without parentheses.
    """
    if more:
        raise TypeError(NOT_CALLED)
    folder = user_cache() if cache_dir is None else Path(cache_dir).expanduser().absolute()
    return ActiveEntries(folder, capacity_bytes, own_node)


def selection_of(message: Message) -> Selection:
    """Return what the model of a message is to be frozen by; nothing before the freeze.

    Raises
    ------
    ValueError
        If the message has not passed ``active_entries``.
    """
    config = first_config(message)
    if ORDER in config or FROZEN in array_records(message.content):
        raise ValueError(
            f"no active_entries() has opened the message of FedFrozen; make it {CLIENT_APP}"
        )
    return Selection.build(freeze_of(config)[0], first_arrays(message.content)[1])


@dataclass(frozen=True)
class _Opened:
    """A message's model put together, and what it froze."""

    payload: Payload
    selection: Selection
    whole: dict[str, torch.Tensor]


class ActiveEntries:
    """See :func:`active_entries`.

    Parameters
    ----------
    folder : Path
        Of everything that is kept.
    capacity_bytes : int
        Of the frozen blocks.
    own_node : bool
        Whether the node serves one client.
    """

    def __init__(self, folder: Path, capacity_bytes: int, own_node: bool) -> None:
        self.cache = FrozenCache(folder / "frozen", capacity_bytes)
        self.client_states = folder / "clients"
        self.own_node = own_node

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Open a message, let the handler answer it, and close the answer."""
        if not array_records(message.content):
            return call_next(message, context)
        config = first_config(message)
        if reason := _impossible(message, config):
            return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, reason), reply_to=message)
        train = message.metadata.message_type.partition(".")[0] == MessageType.TRAIN
        if FREEZE not in config and CODECS not in config:
            if train and FROZEN not in array_records(message.content):
                _warn_once(context, "no-fedfrozen", NO_FEDFROZEN)
            return call_next(_without_block(message), context)
        try:
            opened = self._open(message)
        except MissingFrozenBlock as missing:
            return missing_reply(message, str(missing))
        if opened.payload.value_l2 > 0:
            _warn_once(context, "value-l2", VALUE_L2_IGNORED, opened.payload.value_l2)
        reply = call_next(_shown(message, opened.whole), context)
        if train and not reply.has_error() and len(array_records(reply.content)) == 1:
            self._close(reply, opened, message, context)
        return reply

    def _open(self, message: Message) -> _Opened:
        payload = open_payload(message, self.cache)
        if not payload.digest:
            return _Opened(payload, Selection.build("all", payload.active), payload.active)
        frozen = payload.frozen or {}
        order: list[int] = payload.config[ORDER]  # type: ignore[assignment]
        shapes = whole_shapes(order, payload.active, frozen)
        selection = Selection.build(payload.selection, shapes)
        return _Opened(payload, selection, selection.merge(payload.active, frozen))

    def _close(self, reply: Message, opened: _Opened, message: Message, context: Context) -> None:
        """Put the active entries, encoded where that is asked for, in place of the whole model."""
        name, record = first_arrays(reply.content)
        y, frozen = opened.selection.split(to_tensors(record))
        sent = opened.payload.frozen or {}
        if moved := [entry for entry, tensor in frozen.items() if not _same(tensor, sent[entry])]:
            _warn_once(context, "wasted", WASTED, len(moved), moved[0])
        config, state = opened.payload.config, context.state
        client = config.get(PARTITION_ID, message.metadata.dst_node_id)
        if Codecs.of_message(config).up is not None:
            rules = ClientRules(
                opened.payload,
                opened.whole,
                opened.selection,
                partition_id=int(client),  # type: ignore[arg-type]
                state=state,
                folder=self.client_states,
                own_node=self.own_node,
            )
            y = rules.reply(y, 0.0)  # steps count only for controls
        reply.content = RecordDict({**reply.content, name: to_record(y)})


def _impossible(message: Message, config: ConfigRecord) -> str | None:
    """Return why no handler behind a mod could answer a message, None if one can."""
    if LATENT_MAPPING in config:
        return LATENTS
    if any(is_extra(key) for record in array_records(message.content).values() for key in record):
        return CONTROLS
    if FREEZE in config and ORDER not in config:
        return (
            f"the message does not say {ORDER}; install the same version of fedfrozen on the "
            "server as on the clients"
        )
    return None


def _shown(message: Message, whole: dict[str, torch.Tensor]) -> Message:
    """Return the message that the handler expects: one whole model, one config."""
    name, _ = first_arrays(message.content)
    shown = _without_block(message)
    shown.content[name] = to_record(whole)
    for key, config in config_records(message.content).items():
        shown.content[key] = ConfigRecord({k: value for k, value in config.items() if k != ORDER})
    return shown


def _without_block(message: Message) -> Message:
    """Return a message of its own with all of a message's records but the frozen block."""
    content = RecordDict({key: value for key, value in message.content.items() if key != FROZEN})
    return Message(content, metadata=message.metadata)  # type: ignore[call-overload, no-any-return]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.to(other.dtype), other)


def _warn_once(context: Context, key: str, text: str, *args: object) -> None:
    """Log a warning, once by process and, where every message has a new one, by client."""
    said = context.state.get(_SAID)
    before = dict(said) if isinstance(said, ConfigRecord) else {}
    if key in _said or key in before:
        return
    _said.add(key)
    context.state[_SAID] = ConfigRecord({**before, key: True})
    log(WARNING, text, *args)
