"""The client's half of upload compression."""

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, RecordDict

from fedfrozen_app.models.selection import Selection
from fedfrozen_app.training.client_rules import ClientRules
from fedfrozen_app.training.upload import FEEDBACK, follow
from fedfrozen_app.transport.client_state import ClientState
from fedfrozen_app.transport.codec import layout_of_tensors
from fedfrozen_app.transport.codecs import CODECS, SEED
from fedfrozen_app.transport.compression import parse_codec
from fedfrozen_app.transport.low_rank import PowerSGD
from fedfrozen_app.transport.payload import ACCEPTED, CONTROL, PATH, RUN, VERSION, Payload

TOKEN = "0123456789abcdef" * 2
Tensors = dict[str, torch.Tensor]


def randn(*shape: int, index: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(index))


X = {"w": randn(13, 11), "b": randn(7, index=1), "bn.running_mean": torch.zeros(3)}
Y = {"w": X["w"] + randn(13, 11, index=2), "b": X["b"] + 1, "bn.running_mean": torch.ones(3)}


def rules(folder: Path, text: str, *, x: Tensors = X, c: Tensors | None = None, **more: Any) -> Any:
    said: dict[str, Any] = {CODECS: f"{text} none", RUN: TOKEN, VERSION: 1, ACCEPTED: 0, PATH: []}
    options = {"own_node": False, "state": RecordDict()}
    options |= {key: more.pop(key) for key in list(more) if key in options}
    extra = {} if c is None else {CONTROL: c}
    one = Payload(x, None, "all", "", ConfigRecord({**said, **more}), extra)
    selection = Selection.build("all", x)
    return ClientRules(one, x, selection, partition_id=3, folder=folder, **options)


def kept(folder: Path, state: RecordDict | None = None) -> ClientState:
    own = state is not None
    return ClientState(state or RecordDict(), folder, TOKEN, 3, FEEDBACK, own_node=own)


@pytest.mark.parametrize("text", ["int8", "int4"])
def test_integers_are_of_the_weights_and_keep_nothing(tmp_path: Path, text: str) -> None:
    codec = parse_codec(text)
    assert codec is not None
    sent, expected = rules(tmp_path, text).reply(Y, 0.5), codec.encode(Y)
    assert sent.keys() == expected.keys()
    assert all(torch.equal(sent[key], expected[key]) for key in sent)
    assert list(tmp_path.iterdir()) == []


def test_updates_leave_out_the_model_and_buffers_travel_as_they_are(tmp_path: Path) -> None:
    sent = rules(tmp_path, "topk:1").reply(Y, 0.5)
    assert sorted(sent) == ["bn.running_mean", "packed/indices", "packed/values"]
    assert torch.equal(sent["bn.running_mean"], Y["bn.running_mean"])
    delta = torch.cat([Y["b"] - X["b"], (Y["w"] - X["w"]).reshape(-1)])
    assert torch.equal(sent["packed/values"], delta)
    (first,) = tmp_path.rglob("*.safetensors")
    assert first.name == "feedback-1.safetensors"
    left = kept(tmp_path).get(1)
    assert left is not None and left.tensors.keys() == {"w", "b"}
    assert all((tensor == 0).all() for tensor in left.tensors.values())


@pytest.mark.parametrize("own_node", [True, False])
def test_what_was_left_out_is_added_to_the_next_update(tmp_path: Path, own_node: bool) -> None:
    state = RecordDict()
    options: dict[str, Any] = {"own_node": own_node, "state": state}
    first = rules(tmp_path, "topk:0.2", **options).reply(Y, 0.5)
    second = rules(tmp_path, "topk:1", **options, **{VERSION: 2, ACCEPTED: 1}).reply(X, 0.5)
    codec = parse_codec("topk:0.2")
    assert codec is not None
    arrived = codec.decode(first, layout_of_tensors(X))
    rest = {name: Y[name] - X[name] - arrived[name] for name in ("b", "w")}
    assert 0 < int((rest["w"] == 0).sum()) < 143 / 2
    expected = torch.cat([rest["b"].reshape(-1), rest["w"].reshape(-1)])
    assert torch.equal(second["packed/values"], expected)
    assert bool(list(tmp_path.rglob("*.safetensors"))) is not own_node
    found = kept(tmp_path, state if own_node else None)
    assert found.get(1) is not None and found.get(2) is not None


def test_a_version_that_does_not_count_is_not_gone_on_from(tmp_path: Path) -> None:
    rules(tmp_path, "topk:0.2").reply(Y, 0.5)
    again = rules(tmp_path, "topk:1", **{VERSION: 2}).reply(Y, 0.5)
    assert torch.equal(again["packed/values"][7:], (Y["w"] - X["w"]).reshape(-1))


def test_the_seed_of_the_message_is_that_of_the_first_factors(tmp_path: Path) -> None:
    sent = [
        rules(tmp_path / str(seed), "powersgd:1", **{SEED: seed}).reply(Y, 0.5) for seed in (0, 5)
    ]
    assert not torch.equal(sent[0]["packed/right"], sent[1]["packed/right"])
    expected = PowerSGD(1, 5).encode({name: Y[name] - X[name] for name in ("w", "b")})
    assert torch.equal(sent[1]["packed/right"], expected["packed/right"])


@pytest.mark.parametrize("text", ["int8", "topk:0.2"])
def test_controls_travel_beside_as_they_are(tmp_path: Path, text: str) -> None:
    c = {name: torch.zeros_like(X[name]) for name in ("w", "b")}
    plain = rules(tmp_path / "plain", "none", c=c).reply(Y, 0.5)
    sent = rules(tmp_path / "packed", text, c=c).reply(Y, 0.5)
    for name in ("w", "b"):
        assert torch.equal(sent[f"control/{name}"], plain[f"control/{name}"])
    assert plain.keys() == {*X, "control/w", "control/b"}
    assert "packed/q" in sent or "packed/values" in sent


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_replies_have_the_dtypes_of_what_came(tmp_path: Path, dtype: torch.dtype) -> None:
    x = {name: tensor.to(dtype) for name, tensor in X.items()}
    for text in ("int8", "topk:0.2", "powersgd:1"):
        codec = parse_codec(text)
        assert codec is not None
        sent = rules(tmp_path / text, text, x=x).reply(Y, 0.5)
        codec.decode(sent, layout_of_tensors(x))  # which checks them


def test_nothing_is_written_to_the_model_that_came(tmp_path: Path) -> None:
    before = {name: tensor.clone() for name, tensor in {**X, **Y}.items()}
    for text in ("int8", "topk:0.2", "powersgd:1"):
        rules(tmp_path / text, text).reply(Y, 0.5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in {**X, **Y}.items())


def test_factors_stay_with_entries_that_keep_their_shape() -> None:
    entries = {"a.weight": randn(7, 5), "head.weight": randn(5, 3)}
    residual = {**entries, "start/a.weight": randn(5, 2), "start/head.weight": randn(3, 2)}
    selection = Selection.build("a.weight[0:3]", entries)
    after = follow(residual, "all", selection)
    assert after.keys() == {"a.weight", "head.weight", "start/head.weight"}
    assert torch.equal(after["a.weight"], entries["a.weight"][3:])
    same = follow(residual, "all", Selection.build("all", entries))
    assert same.keys() == residual.keys()
