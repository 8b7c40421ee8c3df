"""Uploads and broadcasts by codec: under the rules, around stock strategies, across a freeze."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping
from flwr.serverapp.strategy import FedAdam as StockFedAdam
from flwr.serverapp.strategy import FedAvg as StockFedAvg

from fedfrozen_app.models.selection import Selection
from fedfrozen_app.strategies import (
    FedAdam,
    FedAvg,
    FedFrozen,
    FedNova,
    FreezeSchedule,
    Scaffold,
    ServerRule,
)
from fedfrozen_app.training.local import LocalTraining
from fedfrozen_app.training.upload import FEEDBACK
from fedfrozen_app.transport.arrays import to_tensor, to_tensors
from fedfrozen_app.transport.codec import Codec, layout_of_tensors
from fedfrozen_app.transport.codecs import Codecs
from fedfrozen_app.transport.compression import parse_codec, payload_bytes
from fedfrozen_app.transport.payload import PARTITION_ID, SERVER_ROUND
from tests.strategies.learners import Learners, Tensors, sequences, small_transformer

QKV, BIAS, HEAD = "blocks.0.attn.qkv.weight", "blocks.0.attn.qkv.bias", "head.weight"
KERNEL, VALUE = slice(0, 14), slice(14, 21)  # query and key rows, value rows
SCHEDULE = FreezeSchedule(((1, "all"), (3, "query-key"), (5, "all")))
SETTINGS = LocalTraining(batch_size=4, lr=0.1, momentum=0.5)
Rule = ServerRule[Any, Any]
RULES: dict[str, tuple[type[Rule], dict[str, Any]]] = {
    "fedavg": (FedAvg, {}),
    "scaffold": (Scaffold, {}),
    "fedadam": (FedAdam, {}),
    "fednova": (FedNova, {"momentum": 0.5}),
}


def build(name: str, **more: Any) -> Rule:
    kind, options = RULES[name]
    return kind(**options, **more)


def learners(root: Path, **options: Any) -> Learners:
    """Return clients that take 2, 3, 4 and 5 steps."""
    options = {"settings": SETTINGS, "steps": lambda i: i + 2, **options}
    return Learners(root, small_transformer, sequences(), **options)


def codec_of(text: str) -> Codec:
    codec = parse_codec(text)
    assert codec is not None
    return codec


def gap(one: ArrayRecord, other: ArrayRecord) -> float:
    left, right = to_tensors(one), to_tensors(other)
    assert left.keys() == right.keys()
    return max(float((left[name].double() - right[name]).abs().max()) for name in left)


def half(arrays: ArrayRecord, spec: str) -> Tensors:
    tensors = to_tensors(arrays)
    return Selection.build(spec, tensors).split(tensors)[0]


# --- what must not change, and what must ----------------------------------------------------
@pytest.mark.parametrize("name", RULES)
def test_without_codecs_messages_carry_what_they_did(tmp_path: Path, name: str) -> None:
    clients, rule = learners(tmp_path), build(name)
    arrays = clients.initial()
    messages = list(rule.configure_train(1, arrays, ConfigRecord(), clients.grid))
    keys = {SERVER_ROUND, PARTITION_ID}
    if name == "scaffold":
        keys |= {f"ff.{key}" for key in ("run", "version", "accepted", "path")}
    for message in messages:
        assert set(message.content["config"]) == keys
        sent = message.content["arrays"]
        for entry, array in arrays.items():
            one, other = to_tensor(sent[entry]), to_tensor(array)  # not so much as a copy
            assert one.dtype == other.dtype and one.data_ptr() == other.data_ptr()


@pytest.mark.parametrize("name", RULES)
def test_all_values_of_the_updates_give_the_model_of_no_compression(
    tmp_path: Path, name: str
) -> None:
    plain, packed = (
        learners(tmp_path / text).run(
            FedFrozen(build(name, compression=text), schedule=SCHEDULE), 6
        )
        for text in ("none", "topk:1")
    )
    assert gap(plain, packed) < (2e-5 if name == "fedadam" else 1e-5)


@pytest.mark.parametrize("name", ["fedavg", "fedadam"])  # controls have ranks of their own
def test_powersgd_of_the_rank_of_the_updates_gives_the_model_of_no_compression(
    tmp_path: Path, name: str
) -> None:
    # one example of 3 tokens and one step: updates of qkv have rank 3 at most
    one = {"examples": sequences((1, 1, 1)), "settings": LocalTraining(steps=1, lr=0.5)}
    runs = {}
    for text in ("none", "powersgd:3", "powersgd:1"):
        clients = Learners(tmp_path / text, small_transformer, **one)  # type: ignore[arg-type]
        runs[text] = clients.run(FedFrozen(build(name, compression=text), warmup_rounds=3), 4)
    assert "packed/left" in clients.sent[4][0]
    assert gap(runs["none"], runs["powersgd:3"]) < 1e-5
    assert gap(runs["none"], runs["powersgd:1"]) > 1e-3


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("text", ["int8", "int4", "topk:0.1", "powersgd:2"])
def test_each_rule_takes_each_codec_and_the_ledger_counts_it(
    tmp_path: Path, name: str, text: str
) -> None:
    clients = learners(tmp_path)
    strategy = FedFrozen(build(name, compression=text), warmup_rounds=2)
    arrays = start = clients.initial()
    for server_round, spec in ((1, "all"), (2, "all"), (3, "query-key"), (4, "query-key")):
        layout = layout_of_tensors(half(arrays, spec))
        arrays = clients.round(strategy, server_round, arrays)
        assert strategy.report.clients == 4
        control = payload_bytes(layout, None) if name == "scaffold" else 0
        expected = 4 * (payload_bytes(layout, codec_of(text)) + control)
        assert clients.grid.take().bytes_up == expected
    assert gap(arrays, start) > 1e-2


def test_integers_of_eight_bits_are_near_the_model_of_no_compression(tmp_path: Path) -> None:
    runs = {
        text: learners(tmp_path / text).run(FedAvg(compression=text), 4)
        for text in ("none", "int8", "int4")
    }
    assert 0 < gap(runs["none"], runs["int8"]) < 0.02
    assert gap(runs["none"], runs["int4"]) > 0.05


# --- broadcast --------------------------------------------------------------------------------
def stock(**options: Any) -> FedFrozen:
    return FedFrozen(StockFedAvg(fraction_evaluate=0.0), schedule=SCHEDULE, **options)


@pytest.mark.parametrize("wrapped", ["ours", "stock"])
@pytest.mark.parametrize("upload", ["none", "topk:0.1"])
def test_the_server_goes_on_from_what_the_clients_were_sent(
    tmp_path: Path, wrapped: str, upload: str
) -> None:
    clients = learners(tmp_path, settings=LocalTraining(steps=1, lr=0.0), steps=None)
    codecs = {"compression": upload, "broadcast": "int8"}
    strategy = (
        FedFrozen(FedAvg(**codecs), schedule=SCHEDULE) if wrapped == "ours" else stock(**codecs)
    )
    x = clients.initial()
    for server_round, spec in ((1, "all"), (2, "all"), (3, "query-key")):
        sent, codec = half(x, spec), codec_of("int8")
        wire = codec.encode(sent)
        arrived = codec.decode(wire, layout_of_tensors(sent))
        following = clients.round(strategy, server_round, x)
        # nobody moves, so the mean is what arrived; the frozen rows have not travelled
        for name, tensor in half(following, spec).items():
            torch.testing.assert_close(tensor, arrived[name], rtol=0, atol=1e-7)
            assert wrapped == "stock" or torch.equal(tensor, arrived[name])
        assert (server_round > 1) or gap(following, x) > 1e-4
        down = payload_bytes(layout_of_tensors(sent), codec)
        block = 4 * (14 * 7 + 14) if spec == "query-key" else 0
        assert clients.grid.take().bytes_down == 4 * (down + block)
        assert torch.equal(to_tensors(following)[QKV][KERNEL], to_tensors(x)[QKV][KERNEL]) or (
            spec == "all"
        )
        x = following


def test_evaluation_is_sent_the_same_model(tmp_path: Path) -> None:
    clients = learners(tmp_path)
    wrapped = FedFrozen(StockFedAvg(), warmup_rounds=1, broadcast="int4")
    for strategy in (FedAvg(broadcast="int4"), wrapped):
        message, *_ = strategy.configure_evaluate(
            1, clients.initial(), ConfigRecord(), clients.grid
        )
        config, sent = message.content["config"], to_tensors(message.content["arrays"])
        assert sorted(sent) == ["packed/q"]
        assert "int4" not in str(config["ff.codecs"]).split(maxsplit=1)[0]
        opened = Codecs.of_message(config).open(sent, config)
        codec, x = codec_of("int4"), to_tensors(clients.initial())
        expected = codec.decode(codec.encode(x), layout_of_tensors(x))
        assert all(torch.equal(opened[name], expected[name]) for name in x)


def test_codecs_may_change_between_rounds(tmp_path: Path) -> None:
    clients, rule = learners(tmp_path), FedAvg(compression="topk:0.1")
    arrays = clients.run(rule, 2)
    assert sorted(clients.sent[2][0]) == ["packed/indices", "packed/values"]
    rule.compress("int4", "int8")
    arrays = clients.run(rule, 1, arrays, first=3)
    assert sorted(clients.sent[3][0]) == ["packed/q"]
    assert sorted(clients.received[3][0]) == ["packed/q"]
    rule.compress("none", "none")
    clients.run(rule, 1, arrays, first=4)
    assert clients.sent[4][0].keys() == to_tensors(arrays).keys()


def test_a_rules_own_buffers_are_no_codecs_business() -> None:
    rule = FedAvg(compression="topk:0.1", broadcast="int8", buffers=["layer.table"])
    assert rule.codecs.untrained == {"layer.table"}
    rule.compress("int4", "none")
    assert rule.codecs.untrained == {"layer.table"} and rule.codecs.upload == "int4"
    FedFrozen(FedAvg(buffers=["layer.table"]), warmup_rounds=1)  # names alone encode nothing


# --- error feedback ---------------------------------------------------------------------------
def residual(clients: Learners, strategy: FedFrozen, client: int) -> Tensors:
    if isinstance(rule := strategy.strategy, ServerRule):
        kept = clients.kept(rule.versions, client, FEEDBACK)
    else:
        kept = clients.kept(strategy.versions, client, FEEDBACK, node=client + 1)
    return {} if kept is None else kept.tensors


def used(clients: Learners, strategy: FedFrozen, client: int, at: int, text: str) -> Tensors:
    """The residual a client went on from: e = kept + what arrived - (y - x)."""
    x, y = clients.received[at][client], clients.trained[at][client]
    x = {name: tensor for name, tensor in x.items() if not name.startswith("control/")}
    wire = {n: t for n, t in clients.sent[at][client].items() if not n.startswith("control/")}
    arrived = codec_of(text).decode(wire, layout_of_tensors(x))
    after = residual(clients, strategy, client)
    return {name: after[name] + arrived[name] - (y[name] - x[name]) for name in x}


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.allclose(one, other, rtol=0, atol=1e-6))


@pytest.mark.parametrize("text", ["topk:0.1", "powersgd:2"])
@pytest.mark.parametrize("kind", ["fedavg", "scaffold", "stock"])
def test_what_is_left_out_is_sent_later(tmp_path: Path, kind: str, text: str) -> None:
    clients = learners(tmp_path)
    strategy = (
        stock(compression=text)
        if kind == "stock"
        else FedFrozen(build(kind, compression=text), schedule=SCHEDULE)
    )
    arrays = clients.run(strategy, 1)
    for client in range(4):
        assert all(
            close(e, torch.zeros(())) for e in used(clients, strategy, client, 1, text).values()
        )
    first = [residual(clients, strategy, client) for client in range(4)]
    assert all(float(one[QKV].abs().max()) > 1e-3 for one in first)
    clients.run(strategy, 1, arrays, first=2)
    for client in range(4):
        before = used(clients, strategy, client, 2, text)
        assert all(close(before[name], first[client][name]) for name in before)


@pytest.mark.parametrize("kind", ["fedavg", "scaffold", "stock"])
def test_feedback_counts_only_with_the_reply_it_came_with(tmp_path: Path, kind: str) -> None:
    def damage(server_round: int, client: int, arrays: Tensors) -> None:
        if (server_round, client) == (2, 1):
            arrays["packed/values"] = torch.full_like(arrays["packed/values"], float("nan"))

    text = "topk:0.1"
    clients = learners(tmp_path, tamper=damage)
    strategy = (
        stock(compression=text)
        if kind == "stock"
        else FedFrozen(build(kind, compression=text), schedule=FreezeSchedule(((1, "all"),)))
    )
    arrays = clients.run(strategy, 1)
    first = residual(clients, strategy, 1)
    arrays = clients.run(strategy, 1, arrays, first=2)
    known = "client 2" if kind == "stock" else "client 1"  # or its node
    assert strategy.report.refused == [f"{known}: packed/values has non-finite values"]
    again = residual(clients, strategy, 1)
    assert all(torch.equal(again[name], first[name]) for name in first)
    strategy._schedule = FreezeSchedule(((1, "all"),))
    clients.run(strategy, 1, arrays, first=3)
    before = used(clients, strategy, 1, 3, text)
    assert all(close(before[name], first[name]) for name in before)
    assert not close(residual(clients, strategy, 1)[QKV], first[QKV])


@pytest.mark.parametrize("text", ["topk:0.1", "powersgd:2"])
def test_feedback_follows_freeze_and_thaw_for_clients_that_were_away_too(
    tmp_path: Path, text: str
) -> None:
    clients = learners(tmp_path)
    rule = FedAvg(compression=text, fraction_train=0.5, min_train_nodes=1, seed=4)
    strategy = FedFrozen(rule, schedule=SCHEDULE)
    arrays = clients.initial()
    last: dict[int, tuple[int, Tensors]] = {}
    seen = set()
    for server_round in range(1, 10):
        arrays = clients.round(strategy, server_round, arrays)
        for client in clients.sent[server_round]:
            now = used(clients, strategy, client, server_round, text)
            if client in last:
                since, old = last[client]
                stages = [SCHEDULE.spec(number) for number in range(since, server_round + 1)]
                expected = {name: old[name].clone() for name in (QKV, BIAS, HEAD)}
                for before, after in zip(stages, stages[1:], strict=False):
                    if (before, after) == ("all", "query-key"):
                        expected = {n: t if n == HEAD else t[VALUE] for n, t in expected.items()}
                    if (before, after) == ("query-key", "all"):
                        for name in (QKV, BIAS):
                            rows = expected[name]
                            expected[name] = torch.zeros(21, *rows.shape[1:])
                            expected[name][VALUE] = rows
                assert all(close(now[name], expected[name]) for name in expected)
                seen.add((stages[0], "query-key" in stages, stages[-1]))
            kept = residual(clients, strategy, client)
            last[client] = (server_round, {name: t.clone() for name, t in kept.items()})
    # went into the freeze, out of it, and was away for all of it
    assert {("all", True, "query-key"), ("query-key", True, "all"), ("all", True, "all")} <= seen


def test_powersgd_drops_the_factors_of_entries_that_change_shape(tmp_path: Path) -> None:
    clients = learners(tmp_path)
    strategy = FedFrozen(FedAvg(compression="powersgd:1"), schedule=SCHEDULE)
    arrays = clients.run(strategy, 2)
    kept = residual(clients, strategy, 0)
    assert {f"start/{QKV}", f"start/{HEAD}"} <= kept.keys()
    clients.run(strategy, 1, arrays, first=3)
    wire = clients.sent[3][0]
    x, y = clients.received[3][0], clients.trained[3][0]
    total = {n: y[n] - x[n] + (kept[n][VALUE] if n in (QKV, BIAS) else kept[n]) for n in x}
    goes_on = {HEAD: kept[f"start/{HEAD}"]}
    expected = codec_of("powersgd:1").encode(total, goes_on)
    torch.testing.assert_close(wire["packed/right"], expected["packed/right"], atol=1e-6, rtol=0)
    other = codec_of("powersgd:1").encode(total, {**goes_on, QKV: kept[f"start/{QKV}"]})
    assert not close(other["packed/right"], expected["packed/right"])


def test_a_client_that_lost_its_feedback_goes_on_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clients, strategy = learners(tmp_path), stock(compression="topk:0.1")
    arrays = clients.run(strategy, 1)
    for path in clients.folder.rglob("feedback-1.safetensors"):
        if path.parent.name == "2" or str(2) in path.parts:
            path.unlink()
    caplog.clear()
    clients.run(strategy, 1, arrays, first=2)
    lost = [r.getMessage() for r in caplog.records if "error feedback" in r.getMessage()]
    assert lost == ["client 2 has lost its error feedback of version 1 and goes on without"]
    assert strategy.report.clients == 4


@pytest.mark.parametrize("at", [2, 4])
@pytest.mark.parametrize("kind", ["fedavg", "scaffold", "stock"])
def test_a_restored_run_goes_on_with_the_feedback_that_counts(
    tmp_path: Path, kind: str, at: int
) -> None:
    def strategy() -> FedFrozen:
        if kind == "stock":
            return stock(compression="topk:0.1", broadcast="int8")
        rule = build(kind, compression="topk:0.1", broadcast="int8", fraction_train=0.5)
        return FedFrozen(rule, schedule=SCHEDULE)

    random.seed(5)  # by which stock strategies draw the order of their clients
    straight = learners(tmp_path / "a").run(strategy(), 6)
    random.seed(5)
    clients, first, second = learners(tmp_path / "b"), strategy(), strategy()
    arrays = clients.run(first, at)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert gap(clients.run(second, 6 - at, arrays, first=at + 1), straight) == 0


# --- stock strategies ---------------------------------------------------------------------------
@pytest.mark.parametrize("text", ["int8", "topk:0.1", "powersgd:2"])
def test_a_stock_strategy_sees_what_our_rule_sees(tmp_path: Path, text: str) -> None:
    codecs = {"compression": text, "broadcast": "int8"}
    ours = learners(tmp_path / "ours").run(FedFrozen(FedAvg(**codecs), schedule=SCHEDULE), 6)
    theirs = learners(tmp_path / "stock").run(stock(**codecs), 6)
    assert gap(ours, theirs) < (5e-2 if text == "powersgd:2" else 5e-3)  # of the last bits
    one = learners(tmp_path / "one").run(FedFrozen(FedAvg(**codecs), schedule=SCHEDULE), 1)
    other = learners(tmp_path / "other").run(stock(**codecs), 1)
    assert gap(one, other) < 1e-6


def test_a_stock_optimiser_works_with_codecs(tmp_path: Path) -> None:
    inner = StockFedAdam(fraction_evaluate=0.0)
    strategy = FedFrozen(inner, schedule=SCHEDULE, compression="topk:0.5", broadcast="int8")
    clients = learners(tmp_path)
    arrays = clients.run(strategy, 6)
    assert strategy.report.clients == 4 and gap(arrays, clients.initial()) > 1e-2


# --- replies that must not enter ------------------------------------------------------------------
def raw(arrays: Tensors) -> None:
    arrays.clear()
    arrays.update({name: t.detach() for name, t in small_transformer().state_dict().items()})


def many(arrays: Tensors) -> None:
    arrays["packed/q"] = torch.zeros(10**6, dtype=torch.uint8)


def floats(arrays: Tensors) -> None:
    arrays["packed/q"] = arrays["packed/q"].float()


def huge(arrays: Tensors) -> None:
    for key in ("packed/left", "packed/right"):
        arrays[key] = torch.full_like(arrays[key], 3e38)


def more(arrays: Tensors) -> None:
    arrays["packed/more"] = torch.zeros(3)


def put(key: str, index: int, value: float) -> Any:
    def change(arrays: Tensors) -> None:
        arrays[key] = arrays[key].clone()
        arrays[key].view(-1)[index] = value

    return change


def last_scale(value: float) -> Any:
    """Change the scale of the last tensor: of the array's last two numbers the first."""

    def change(arrays: Tensors) -> None:
        changed = arrays["packed/q"].clone()
        changed[-8:].numpy().view("<f4")[0] = value
        arrays["packed/q"] = changed

    return change


HOSTILE: dict[str, tuple[str, Any, str]] = {
    "not encoded": ("topk:0.1", raw, "first 'packed/values'; clients of this rule answer with"),
    "an index too large": ("topk:0.1", put("packed/indices", 14, 2**31 - 1), "cannot be decoded"),
    "an index twice": ("topk:0.1", put("packed/indices", 1, 0), "cannot be decoded: 'packed/in"),
    "an index below zero": ("topk:0.1", put("packed/indices", 0, -1), "cannot be decoded"),
    "not a number": ("topk:0.1", put("packed/values", 3, float("nan")), "has non-finite values"),
    "a negative scale": ("int8", last_scale(-1.0), "cannot be decoded: 'packed/q' must"),
    "a scale beyond fp32": ("int8", last_scale(3e38), "has non-finite values"),
    "more codes": ("int4", many, "is uint8[1000000], expected"),
    "another dtype": ("int8", floats, "is float32"),
    "a further entry": ("int8", more, "1 unexpected"),
    "factors too large": ("powersgd:1", huge, "cannot be decoded"),
}  # fmt: skip


@pytest.mark.parametrize("wrapped", ["ours", "stock"])
@pytest.mark.parametrize("what", HOSTILE)
def test_a_reply_that_cannot_be_decoded_is_refused_with_the_reason(
    tmp_path: Path, what: str, wrapped: str
) -> None:
    text, change, words = HOSTILE[what]

    def tamper(server_round: int, client: int, arrays: Tensors) -> None:
        if client == 2:
            change(arrays)

    def strategy() -> FedFrozen:
        if wrapped == "stock":
            return stock(compression=text)
        return FedFrozen(FedAvg(compression=text), schedule=SCHEDULE)

    clients, one = learners(tmp_path / "a", tamper=tamper), strategy()
    arrays = clients.run(one, 1)
    (reason,) = one.report.refused
    assert reason.startswith(f"client {3 if wrapped == 'stock' else 2}: ") and words in reason
    assert (one.report.clients, one.report.dropped) == (3, 1)
    # the model is that of the three others
    x = {name: tensor.double() for name, tensor in to_tensors(clients.initial()).items()}
    sizes, codecs = {0: 11, 1: 5, 3: 7}, Codecs(text)
    start = to_tensors(clients.initial())
    for name in x:
        y = {i: codecs.receive(clients.sent[1][i], start)[name].double() for i in sizes}
        mean = sum(n * y[i] for i, n in sizes.items()) / sum(sizes.values())
        torch.testing.assert_close(to_tensors(arrays)[name].double(), mean, rtol=0, atol=1e-6)


def test_an_update_that_leads_out_of_fp32_is_refused() -> None:
    x = {"w": torch.full((3,), 3e38)}
    wire = codec_of("topk:1").encode({"w": torch.full((3,), 3e38)})
    with pytest.raises(ValueError, match="the update of 'w' leads to non-finite values"):
        Codecs("topk:1").receive(wire, x)


# --- options ----------------------------------------------------------------------------------
def test_codecs_are_set_where_the_rule_is_ours() -> None:
    with pytest.raises(ValueError, match="set compression on the wrapped FedAvg instead"):
        FedFrozen(FedAvg(), compression="int8", warmup_rounds=1)
    with pytest.raises(ValueError, match="set broadcast on the wrapped Scaffold instead"):
        FedFrozen(Scaffold(), broadcast="int8", warmup_rounds=1)
    inner = FedFrozen(warmup_rounds=1, compression="int8", broadcast="int4").strategy
    assert isinstance(inner, FedAvg) and inner.codecs == Codecs("int8", "int4")


def test_encoded_models_inside_a_foreign_wrapper_are_refused_at_once() -> None:
    private = DifferentialPrivacyServerSideFixedClipping(FedAvg(compression="int8"), 0.1, 1.0, 3)
    with pytest.raises(ValueError, match="FixedClipping does not know encoded .* on FedFrozen"):
        FedFrozen(private, warmup_rounds=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compression": "zip"}, "compression must be none, int8, int4, topk:F or powersgd:R"),
        ({"broadcast": "topk:0.1"}, "broadcast must be none, int8 or int4, got 'topk:0.1'"),
    ],
)
def test_names_of_no_codec_are_errors(options: dict[str, str], words: str) -> None:
    for make in (FedAvg, lambda **o: FedFrozen(StockFedAvg(), warmup_rounds=1, **o)):
        with pytest.raises(ValueError, match=words):
            make(**options)
    with pytest.raises(ValueError, match=words):
        FedAvg().compress(options.get("compression", "none"), options.get("broadcast", "none"))


def test_a_rule_holds_no_model_between_rounds(tmp_path: Path) -> None:
    rule = FedAvg(compression="topk:0.1", broadcast="int8")
    learners(tmp_path / "ours").run(rule, 2)
    assert rule._global == {} and rule._sent == [] and rule._decode is None
    wrapped = stock(compression="topk:0.1", broadcast="int8")
    learners(tmp_path / "stock").run(wrapped, 2)
    assert wrapped._x == {} and wrapped._sent == []
