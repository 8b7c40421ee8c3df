from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict

from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.transport.arrays import to_record
from fedfrozen_app.transport.frozen_cache import FrozenCache, digest
from fedfrozen_app.transport.payload import (
    MissingFrozenBlock,
    attach_frozen,
    client_of,
    freeze_of,
    group_of,
    mark,
    missing_digest,
    missing_reply,
    open_payload,
    round_and_client,
    train_reply,
)

WHOLE = {
    "blocks.0.attn.qkv.weight": torch.arange(75, dtype=torch.float32).reshape(15, 5),
    "head.bias": torch.ones(3),
}
SELECTION = Selection.build("query-key", WHOLE)
ACTIVE, FROZEN = SELECTION.split(WHOLE)
KEY = digest(FROZEN)


@pytest.fixture(autouse=True)
def identity() -> None:
    from flwr.clientapp import ClientApp

    LocalGrid(ClientApp(), 1)  # gives this process the identity that messages need


def message(marked: bool = True, block: bool = False) -> Message:
    config = ConfigRecord({"server-round": 5, "partition-id": 2})
    content = RecordDict({"arrays": to_record(ACTIVE), "config": config})
    made = Message(content, 3, "train", group_id=group_of(5, 2))
    if marked:
        mark(made, SELECTION.spec, KEY, value_l2=0.25)
    if block:
        attach_frozen(made, to_record(FROZEN))
    return made


def test_a_message_without_a_mark_is_everything(tmp_path: Path) -> None:
    payload = open_payload(message(marked=False), FrozenCache(tmp_path))
    assert (payload.selection, payload.digest, payload.frozen) == ("all", "", None)
    assert payload.active.keys() == ACTIVE.keys()
    assert not list(tmp_path.iterdir())


def test_the_block_comes_from_the_message_then_the_cache_then_the_model(tmp_path: Path) -> None:
    cache = FrozenCache(tmp_path)
    with pytest.raises(MissingFrozenBlock, match=KEY):
        open_payload(message(), cache)
    first = open_payload(message(block=True), cache)
    second = open_payload(message(), cache)
    for payload in (first, second):
        assert payload.frozen is not None
        assert payload.selection == "query-key" and payload.digest == KEY
        assert payload.config["ff.value-l2"] == 0.25
        whole = SELECTION.merge(payload.active, payload.frozen)
        assert all(torch.equal(whole[name], WHOLE[name]) for name in WHOLE)
    assert open_payload(message(), FrozenCache(tmp_path / "none"), loaded=KEY).frozen is None


def test_a_block_that_is_not_the_named_one_is_refused_and_not_kept(tmp_path: Path) -> None:
    wrong = message()
    attach_frozen(wrong, to_record({name: tensor + 1 for name, tensor in FROZEN.items()}))
    with pytest.raises(ValueError, match=f"the message names {KEY}"):
        open_payload(wrong, FrozenCache(tmp_path))
    assert not list(tmp_path.iterdir())


def test_marking_one_message_leaves_others_with_the_same_content_alone() -> None:
    shared = RecordDict({"arrays": to_record(ACTIVE), "config": ConfigRecord({"server-round": 1})})
    one, other = (Message(shared, node, "train") for node in (1, 2))
    mark(one, SELECTION.spec, KEY)
    assert freeze_of(one.content["config"]) == ("query-key", KEY)
    assert freeze_of(other.content["config"]) == ("all", "")
    assert "ff.freeze" not in other.content["config"]


@pytest.mark.parametrize("said", ["query-key", b"query-key", bytes(32), 3])
def test_a_freeze_that_is_no_digest_and_selection_is_refused(said: Any) -> None:
    config = ConfigRecord({"ff.freeze": said})
    with pytest.raises(ValueError, match="ff.freeze must be a SHA-256 and a selection, got"):
        freeze_of(config)


def test_replies_say_who_they_are_from_and_what_they_lack() -> None:
    lacking = missing_reply(message(), KEY)
    assert missing_digest(lacking) == KEY and client_of(lacking, 99) == 2
    assert len(lacking.content.array_records) == 0
    done = train_reply(message(), ACTIVE, {"num-examples": 7})
    assert missing_digest(done) is None and client_of(done, 99) == 2
    assert round_and_client(done) == (5, 2) and list(done.content) == ["arrays", "metrics"]
    # Flower's own strategies want exactly one array and one metric record
    assert len(done.content.array_records) == len(done.content.metric_records) == 1
    assert client_of(Message(RecordDict(), 3, "train"), 99) == 99
