"""What the messages of a federation carry, and the frozen-block protocol.

Before the freeze a train message of ``FedFrozen`` carries the model and an empty frozen block: mods
before ``active_entries`` that cannot bear the block then say so at once, and not at the freeze.
After it a message to a client carries the active entries, the name of the
selection and the digest of the frozen block; the block itself only to a client that has
not confirmed it yet. A client without the block answers *missing* and is sent it in the
same round. Replies carry active entries only.

Down: ``{"arrays": active, "frozen": block?, "config": {server-round, partition-id, ...}}``
Up: ``{"arrays": active, "metrics": {num-examples, ...}}``

A message's group id, which Flower copies into every reply and every error, names the round and
the client (:func:`group_of`), so a reply says nothing of it. Keys of our own are short: they are
in every message, and beside a latent every byte shows.

Flower allows one array record in a reply, so what travels beside the model has keys of its
own in it: ``control/NAME`` next to ``NAME``.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedfrozen_app.transport.arrays import to_record, to_tensors
from fedfrozen_app.transport.frozen_cache import FrozenCache, digest
from fedfrozen_app.transport.records import array_records, config_records

ARRAYS, FROZEN, CONFIG, METRICS, REPLY = "arrays", "frozen", "config", "metrics", "reply"
# keys of the config record of a message to a client
SERVER_ROUND, PARTITION_ID = "server-round", "partition-id"
PERSONALISE = "personalise"  # in an evaluate message: test after local training, too
VALUE_L2 = "ff.value-l2"
FREEZE = "ff.freeze"  # the frozen block's SHA-256 [32 bytes], then the name of the selection
DIGEST_BYTES = 32
ORDER = "ff.order"  # of the whole model, see transport.order
# what the mod of fedfrozen_app.mods has to be in
CLIENT_APP = "ClientApp(mods=[active_entries()])"
# key of the reply record of a client that lacks the frozen block
MISSING = "ff.missing"
# the one flat array of a latent, and what fixes its map
LATENT, LATENT_MAPPING = "z", "ff.latent"
NUM_EXAMPLES, STEPS = "num-examples", "steps"
# of FedProx, as Flower's own spells it
PROXIMAL_MU = "proximal-mu"
# the namespace of SCAFFOLD's controls
CONTROL = "control"
NAMESPACES = (CONTROL,)
# of what clients keep: the run, which version a client makes now, the one it goes on from, and
# the selections since that
RUN, VERSION, ACCEPTED, PATH = "ff.run", "ff.version", "ff.accepted", "ff.path"

# of a server to one client
Instructions = dict[str, str | bytes | int | float | list[str] | list[int]]


class MissingFrozenBlock(LookupError):
    """The client does not have the frozen block the message names; it asks for it."""


@dataclass(frozen=True)
class Payload:
    """A message to a client, understood: what to load and what to train.

    ``frozen`` is None where nothing is frozen or the block is loaded already. ``extra`` is
    what came beside the model, by namespace and entry.
    """

    active: dict[str, torch.Tensor]
    frozen: dict[str, torch.Tensor] | None
    selection: str
    digest: str
    config: ConfigRecord
    extra: Mapping[str, dict[str, torch.Tensor]] = field(default_factory=dict)

    @property
    def latent(self) -> str:
        """What fixes the map of a latent, as text; empty where weights travel."""
        return str(self.config.get(LATENT_MAPPING, ""))

    @property
    def value_l2(self) -> float:
        """Lambda of (lambda/2) ||W_V||^2 that the client adds to its loss, 0 for none."""
        return self._number(VALUE_L2)

    @property
    def proximal_mu(self) -> float:
        """Mu of FedProx's (mu/2) ||w - w_t||^2 that the client adds to its loss, 0 for none."""
        return self._number(PROXIMAL_MU)

    def _number(self, key: str) -> float:
        value = self.config.get(key, 0.0)
        return float(value) if isinstance(value, int | float) else 0.0


def is_extra(key: str, namespaces: Collection[str] = NAMESPACES) -> bool:
    """Whether a key belongs to a namespace; names of models may have slashes of their own."""
    namespace, slash, _ = key.partition("/")
    return bool(slash) and namespace in namespaces


def to_namespaces(extra: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return entries of several namespaces under the keys ``namespace/NAME``."""
    return {
        f"{namespace}/{name}": tensor
        for namespace, tensors in extra.items()
        for name, tensor in tensors.items()
    }


def from_namespaces(
    entries: Mapping[str, torch.Tensor], namespaces: Collection[str] = NAMESPACES
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """Return the model's own entries, and the others by namespace and name."""
    own: dict[str, torch.Tensor] = {}
    extra: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in entries.items():
        namespace, _, name = key.partition("/")
        if is_extra(key, namespaces):
            extra.setdefault(namespace, {})[name] = tensor
        else:
            own[key] = tensor
    return own, extra


def mark(
    message: Message, selection: str, key: str, value_l2: float = 0.0, order: Sequence[int] = ()
) -> None:
    """Write the selection and the digest of the frozen block, in hex, into a message's config."""
    said: Instructions = {FREEZE: bytes.fromhex(key) + selection.encode()}
    if value_l2 > 0:
        said[VALUE_L2] = value_l2
    if order:
        said[ORDER] = list(order)
    instruct(message, said)


def freeze_of(config: ConfigRecord) -> tuple[str, str]:
    """Return the selection and the digest that :func:`mark` wrote: ``all`` and none without it.

    Raises
    ------
    ValueError
        If it is not what ``mark`` writes.
    """
    said = config.get(FREEZE, b"")
    if said == b"":
        return "all", ""
    if not isinstance(said, bytes) or len(said) <= DIGEST_BYTES:
        raise ValueError(f"{FREEZE} must be a SHA-256 and a selection, got {said!r:.80}")
    return said[DIGEST_BYTES:].decode(), said[:DIGEST_BYTES].hex()


def instruct(message: Message, said: Instructions) -> None:
    """Add to a message's config, in a copy of its own."""
    config = ConfigRecord({**first_config(message), **said})
    name = next(iter(config_records(message.content)), CONFIG)
    message.content = RecordDict({**message.content, name: config})


def mark_latent(message: Message, mapping: str) -> None:
    """Write into a message's config that its arrays are a latent, and of which map."""
    first_config(message)[LATENT_MAPPING] = mapping


def attach_frozen(message: Message, block: ArrayRecord) -> None:
    """Add the frozen block to a message."""
    message.content = RecordDict({**message.content, FROZEN: block})


def first_config(message: Message) -> ConfigRecord:
    """Return the config record of a message, empty if it has none."""
    return next(iter(config_records(message.content).values()), ConfigRecord())


def first_arrays(content: RecordDict) -> tuple[str, ArrayRecord]:
    """Return name and value of the array record that is not the frozen block.

    Raises
    ------
    ValueError
        If there is not exactly one.
    """
    found = [(name, value) for name, value in array_records(content).items() if name != FROZEN]
    if len(found) != 1:
        raise ValueError(f"a message carries one array record, got {[name for name, _ in found]}")
    return found[0]


def open_payload(message: Message, cache: FrozenCache, loaded: str = "") -> Payload:
    """Read a message to a client; find the frozen block it names.

    Parameters
    ----------
    message : Message
        From the server.
    cache : FrozenCache
        Where blocks are kept; a block that comes with the message is verified and stored.
    loaded : str
        Digest of the block the caller's model holds already.

    Raises
    ------
    MissingFrozenBlock
        If the block is neither loaded, nor in the message, nor in the cache.
    ValueError
        If the block in the message does not have the digest the message names, or an encoded
        model cannot be decoded.
    """
    from fedfrozen_app.transport.codecs import Codecs  # it imports this module

    config = first_config(message)
    _, record = first_arrays(message.content)
    own, extra = from_namespaces(to_tensors(record))
    active = Codecs.of_message(config).open(own, config)
    selection, key = freeze_of(config)
    if not key or key == loaded:
        return Payload(active, None, selection, key, config, extra)
    if FROZEN in array_records(message.content):
        frozen = to_tensors(array_records(message.content)[FROZEN])
        if (actual := digest(frozen)) != key:
            raise ValueError(f"frozen block has digest {actual}, the message names {key}")
        cache.put(key, frozen)
    elif (cached := cache.get(key)) is not None:
        frozen = cached
    else:
        raise MissingFrozenBlock(key)
    return Payload(active, frozen, selection, key, config, extra)


def missing_reply(message: Message, key: str) -> Message:
    """Return the reply of a client that lacks the frozen block ``key``."""
    return Message(RecordDict({REPLY: ConfigRecord({MISSING: key})}), reply_to=message)


def train_reply(
    message: Message,
    arrays: Mapping[str, torch.Tensor],
    metrics: Mapping[str, int | float],
) -> Message:
    """Return the reply to a train message; ``arrays`` are shared, not copied."""
    content = RecordDict({ARRAYS: to_record(arrays), METRICS: MetricRecord(dict(metrics))})
    return Message(content, reply_to=message)


def missing_digest(reply: Message) -> str | None:
    """Return the digest a reply asks for, or None if it asks for none."""
    if not reply.has_content() or REPLY not in config_records(reply.content):
        return None
    value = config_records(reply.content)[REPLY].get(MISSING)
    return value if isinstance(value, str) else None


def group_of(server_round: int, client: int) -> str:
    """Return the group id of a message to a client, and so of its reply."""
    return f"{server_round}/{client}"


def round_and_client(message: Message) -> tuple[int, int] | None:
    """Return round and client of a message or reply, None where its group does not say."""
    server_round, slash, client = message.metadata.group_id.partition("/")
    if slash and server_round.isdecimal() and client.isdecimal():
        return int(server_round), int(client)
    return None


def client_of(message: Message, default: int) -> int:
    """Return the client of a message or reply, ``default`` if its group does not say."""
    known = round_and_client(message)
    return default if known is None else known[1]


class Addressees:
    """Which client a reply belongs to, error replies included, from the messages sent.

    The group says so, where a rule of ours addressed the message. Elsewhere, and of an error
    that Flower makes without a group, the message it answers does, or the node where that
    serves one client of the round.
    """

    def __init__(self, sent: Iterable[Message]) -> None:
        self._by_message: dict[str, int] = {}
        self._by_node: dict[int, set[int]] = {}
        for message in sent:
            meta = message.metadata
            client = client_of(message, meta.dst_node_id)
            self._by_node.setdefault(meta.dst_node_id, set()).add(client)
            if meta.message_id:  # set when the message went out
                self._by_message[meta.message_id] = client

    def __call__(self, reply: Message) -> int:
        """Return the client's id, or the node's where nothing else is known."""
        meta = reply.metadata
        known = self._by_message.get(meta.reply_to_message_id)
        if known is None:
            clients = self._by_node.get(meta.src_node_id, set())
            known = next(iter(clients)) if len(clients) == 1 else meta.src_node_id
        return client_of(reply, known)
