from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.strategies import FedAvg, FedFrozen, QuorumError, UnfitClientsError
from fedfrozen_app.strategies.replies import (
    in_order,
    is_finite,
    refusal,
)
from fedfrozen_app.transport.arrays import to_record, to_tensors
from fedfrozen_app.transport.codec import layout_of_tensors
from fedfrozen_app.transport.payload import (
    Addressees,
    group_of,
    missing_reply,
    round_and_client,
    train_reply,
)
from tests.strategies.federation import Federation, initial


def reply_of(root: Path, client: int = 1, **metrics: Any) -> Message:
    """A good reply of round 4, with some metrics changed; None takes one away."""
    federation = Federation(root)
    messages = FedAvg().configure_train(4, to_record(initial()), ConfigRecord(), federation.grid)
    (message,) = [one for one in messages if one.content["config"]["partition-id"] == client]
    values = {"num-examples": 7, "train_loss": 0.5, **metrics}
    return train_reply(message, initial(), {k: v for k, v in values.items() if v is not None})


def reason(reply: Message, server_round: int = 4) -> str | None:
    return refusal(reply, layout_of_tensors(initial()), "num-examples", server_round)


def test_a_good_reply_is_accepted(tmp_path: Path) -> None:
    assert reason(reply_of(tmp_path)) is None


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (0, "no training examples"),
        (-3, "must be a finite number > 0, got -3"),
        (float("nan"), "must be a finite number > 0, got nan"),
        (float("inf"), "must be a finite number > 0, got inf"),
        ([1, 2], "must be a finite number > 0, got [1, 2]"),
        (None, "metric 'num-examples' is missing"),
    ],
)
def test_a_weight_that_is_none_is_refused(tmp_path: Path, weight: Any, words: str) -> None:
    assert words in (reason(reply_of(tmp_path, **{"num-examples": weight})) or "")


def test_a_late_reply_of_another_round_is_refused(tmp_path: Path) -> None:
    assert reason(reply_of(tmp_path), server_round=5) == "reply of round 4 came in round 5"


def test_a_second_array_or_metric_record_is_refused(tmp_path: Path) -> None:
    more = reply_of(tmp_path)
    more.content["more"] = to_record(initial())
    assert reason(more) == "expected one array and one metric record, got 2 and 1"
    metrics = reply_of(tmp_path)
    metrics.content["more"] = MetricRecord({"x": 1})
    assert reason(metrics) == "expected one array and one metric record, got 1 and 2"


def test_arrays_that_lie_about_their_shape_or_cannot_be_read_are_refused(tmp_path: Path) -> None:
    reply = reply_of(tmp_path)
    record = reply.content["arrays"]
    good = record["head.bias"]
    from flwr.app import Array

    record["head.bias"] = Array("float32", (5,), "numpy.ndarray", Array(torch.zeros(7)).data)
    assert reason(reply) == "head.bias holds [7], but says [5]"
    record["head.bias"] = Array("float32", (5,), "numpy.ndarray", good.data[:-3])
    assert "arrays cannot be read" in (reason(reply) or "")
    record["head.bias"] = Array("float32", (5,), "pickle", good.data)
    assert "arrays cannot be read" in (reason(reply) or "")
    huge = good.data.replace(b"(5,)", b"(5000000000000,)".ljust(4))
    for data in (b"PK\x03\x04" + good.data, good.data[:20], huge, b""):
        record["head.bias"] = Array("float32", (5,), "numpy.ndarray", data)
        assert "arrays cannot be read" in (reason(reply) or ""), data[:30]


def test_large_finite_values_are_finite_although_their_sum_is_not() -> None:
    assert is_finite(torch.full((7,), 3e38))
    assert not is_finite(torch.tensor([1.0, float("nan"), 2.0]))
    assert not is_finite(torch.tensor([3e38, float("-inf")]))
    assert is_finite(torch.tensor([1, 2])) and is_finite(torch.zeros(0))


def test_replies_of_an_unordered_grid_are_sorted_by_client(tmp_path: Path) -> None:
    replies = [reply_of(tmp_path, client) for client in (2, 0, 1)]
    client = Addressees([])
    ordered = in_order(None, replies, client)
    assert [round_and_client(reply) for reply in ordered] == [(4, 0), (4, 1), (4, 2)]
    grid = Federation(tmp_path).grid
    assert in_order(grid, replies, client) is replies


def test_an_error_reply_is_known_by_its_message_or_its_node(tmp_path: Path) -> None:
    grid = LocalGrid(ClientApp(), 3)  # this app answers everything with an error
    sent = [
        Message(RecordDict(), node, "train", group_id=group_of(7, client))
        for node, client in ((3, 40), (3, 50), (2, 60))
    ]
    replies = list(grid.send_and_receive(sent))
    assert all(reply.has_error() for reply in replies)
    assert [round_and_client(reply) for reply in replies] == [(7, 40), (7, 50), (7, 60)]
    assert [Addressees([])(reply) for reply in replies] == [40, 50, 60]
    for reply in replies:
        reply.metadata.__dict__["_group_id"] = ""  # as in errors of the SuperLink itself
    assert [Addressees(sent)(reply) for reply in replies] == [40, 50, 60]
    for reply in replies:
        reply.metadata.__dict__["_reply_to_message_id"] = "unknown"
    # node 3 serves two clients, so only its own id is left to say
    assert [Addressees(sent)(reply) for reply in replies] == [3, 3, 60]


def test_whoever_asks_for_another_block_than_the_one_in_force_gets_none(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    strategy = FedFrozen(warmup_rounds=0)
    arrays = to_record(initial())
    strategy.check(arrays)
    messages = list(strategy.configure_train(1, arrays, ConfigRecord(), federation.grid))
    federation.grid.take()
    asking = [missing_reply(message, "0" * 64) for message in messages]
    with pytest.raises(UnfitClientsError, match="client 0: lacks the frozen block"):
        strategy.aggregate_train(1, asking)
    assert federation.grid.take().bytes_down == 0
    assert strategy.report.refused == [f"client {c}: lacks the frozen block" for c in range(3)]


@pytest.mark.parametrize("kind", [FedAvg, FlowerFedAvg])
@pytest.mark.parametrize("odd", [{"train_loss": [0.5, 0.5]}, {"more": 1}, {"train_loss": None}])
def test_metrics_that_differ_from_the_first_replys_are_refused(
    tmp_path: Path, kind: type[FedAvg], odd: dict[str, Any]
) -> None:
    strategy = FedFrozen(kind(), warmup_rounds=0)
    arrays, metrics = to_record(initial()), {"num-examples": 7, "train_loss": 0.5}
    strategy.check(arrays)
    sent = list(strategy.configure_train(1, arrays, ConfigRecord(), Federation(tmp_path).grid))
    replies = []
    for i, message in enumerate(sorted(sent, key=lambda m: m.metadata.dst_node_id)):
        values = {k: v for k, v in {**metrics, **(odd if i == 1 else {})}.items() if v is not None}
        active = to_tensors(message.content["arrays"])
        replies.append(train_reply(message, active, values))
    whole, _ = strategy.aggregate_train(1, replies)
    assert whole is not None
    assert (strategy.report.clients, strategy.report.dropped) == (2, 1)
    assert "not those of the round's first reply" in strategy.report.refused[0]


def test_half_precision_replies_to_a_stock_rule_are_widened(tmp_path: Path) -> None:
    def half(server_round: int, client: int, arrays: dict[str, torch.Tensor]) -> Any:
        return {name: t.half() if client == 1 else t for name, t in arrays.items()}

    strategy = FedFrozen(FlowerFedAvg(), warmup_rounds=0)
    after, _ = Federation(tmp_path, tamper=half).run(strategy, 2)
    assert strategy.report.dropped == 0
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}


def test_a_stock_rule_has_a_quorum_too(tmp_path: Path) -> None:
    def fail(server_round: int, client: int, arrays: object) -> None:
        if client != 1:
            raise RuntimeError("no power")

    strategy = FedFrozen(FlowerFedAvg(), warmup_rounds=0, min_replies=0.5)
    with pytest.raises(QuorumError, match="1 of 3 replies are usable"):
        Federation(tmp_path, tamper=fail).run(strategy, 1)
    with pytest.raises(ValueError, match="set min_replies on the wrapped FedAvg"):
        FedFrozen(FedAvg(), min_replies=0.5)


def test_a_reply_without_anything_is_refused(tmp_path: Path) -> None:
    reply = reply_of(tmp_path)
    reply.content = RecordDict()
    assert reason(reply) == "expected one array and one metric record, got 0 and 0"
