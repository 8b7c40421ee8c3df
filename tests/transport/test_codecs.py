"""What messages say of codecs, and what a client makes of an encoded broadcast."""

from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict

from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.transport.arrays import to_record
from fedfrozen_app.transport.codec import layout_of_tensors
from fedfrozen_app.transport.codecs import (
    CODECS,
    SEED,
    Codecs,
    layout_from_text,
    layout_to_text,
)
from fedfrozen_app.transport.frozen_cache import FrozenCache
from fedfrozen_app.transport.payload import open_payload

X = {
    "w": torch.linspace(-1, 1, 35).reshape(7, 5),
    "layers/0/b": torch.linspace(0, 2, 11, dtype=torch.float64),
    "norm.num_batches_tracked": torch.tensor(5),
    "norm.running_mean": torch.ones(3),
}


def test_a_layout_is_the_same_after_a_way_as_text() -> None:
    layout = layout_of_tensors(X)
    text = layout_to_text(layout)
    assert layout_from_text(text) == layout
    assert list(layout_from_text(text)) == list(layout)
    assert layout_to_text({"z": ((1280,), "float32")}) == '{"z":[1280]}'


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"w":3}', '{"w":[-1]}', '{"w":[1.5]}', '{"w":["int99",2]}', '{"w":[2,"int8"]}'],
)
def test_what_is_no_layout_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="ff.codecs must end with a layout in JSON, got"):
        layout_from_text(text)


def test_messages_say_no_more_than_they_must() -> None:
    assert Codecs().instructions(X) == {}
    assert Codecs("int8").instructions(X) == {CODECS: "int8 none"}
    assert Codecs("powersgd:2", seed=3).instructions(X) == {
        CODECS: "powersgd:2 none",
        SEED: 3,
    }
    flat = {"z": torch.zeros(1280)}
    assert Codecs("int8", "int4").instructions(flat) == {CODECS: 'int8 int4 {"z":[1280]}'}
    assert Codecs("int8", "int4").instructions(flat, train=False) == {
        CODECS: 'none int4 {"z":[1280]}'
    }


@pytest.mark.parametrize("upload", ["int4", "topk:0.01", "powersgd:1"])
def test_entries_named_as_untrained_travel_as_they_are(upload: str) -> None:
    x = {"w": X["w"], "table": torch.linspace(-1, 1, 77).reshape(7, 11)}
    server = Codecs(upload, "int4", untrained=frozenset({"table", "of another model"}))
    said = ConfigRecord(dict(server.instructions(x)))
    assert said["ff.untrained"] == ["table"]
    client = Codecs.of_message(said)
    wire, kept = server.send(x)
    opened = client.open(wire, said)
    for seen in (kept, opened):
        assert torch.equal(seen["table"], x["table"]) and not torch.equal(seen["w"], x["w"])
    y = {name: tensor + 0.125 for name, tensor in x.items()}
    assert client.up is not None
    sent = client.up.encode(y)
    assert torch.equal(sent["table"], y["table"]) and "w" not in sent
    assert torch.equal(server.receive(sent, x)["table"], y["table"])
    assert "table" not in Codecs(upload, "int4").send(x)[0]  # unnamed, it is a weight
    assert "ff.untrained" not in Codecs("none", untrained=frozenset({"table"})).instructions(x)


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 5, 2**70])
def test_a_client_has_the_codecs_of_the_server(seed: int) -> None:
    said = ConfigRecord(dict(Codecs("powersgd:2", "int8", seed).instructions(X)))
    client = Codecs.of_message(ConfigRecord(dict(said)))
    assert (client.upload, client.broadcast, client.seed) == ("powersgd:2", "int8", seed % 2**63)
    assert Codecs.of_message(ConfigRecord()) == Codecs()


@pytest.mark.parametrize("broadcast", ["none", "int8", "int4"])
def test_the_client_opens_what_the_server_goes_on_from(tmp_path: Path, broadcast: str) -> None:
    from flwr.clientapp import ClientApp

    LocalGrid(ClientApp(), 1)  # gives this process the identity that messages need
    codecs = Codecs(broadcast=broadcast)
    wire, x = codecs.send(X)
    beside = {"control/w": torch.ones(7, 5)}
    config = ConfigRecord(dict(codecs.instructions(X)))
    content = RecordDict({"arrays": to_record({**wire, **beside}), "config": config})
    payload = open_payload(Message(content, 3, "train"), FrozenCache(tmp_path))
    assert list(payload.active) == list(X)
    for name, tensor in payload.active.items():
        assert tensor.dtype == X[name].dtype and torch.equal(tensor, x[name])
        assert torch.equal(tensor, X[name]) or name in ("w", "layers/0/b")
    steps = {"none": 0.0, "int8": 2 / 255, "int4": 2 / 15}[broadcast]
    error = float((payload.active["w"] - X["w"]).abs().max())
    assert error <= steps / 2 + 1e-6 and (error > 0) is (broadcast != "none")
    assert payload.extra["control"].keys() == {"w"}


def test_a_broadcast_that_does_not_fit_its_layout_is_an_error(tmp_path: Path) -> None:
    codecs = Codecs(broadcast="int8")
    wire, _ = codecs.send(X)
    config = ConfigRecord(dict(codecs.instructions({**X, "w": torch.zeros(7, 7)})))
    with pytest.raises(ValueError, match=r"'packed/q' must be uint8\[76\], got uint8\[62\]"):
        codecs.open(wire, config)
