import multiprocessing
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp.strategy import FedAvg

from fedfrozen_app.engine import handover
from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.transport.arrays import to_record, to_tensors
from fedfrozen_app.transport.ledger import LedgerGrid

app = ClientApp()
calls: list[int] = []


@app.train()
def train(message: Message, context: Context) -> Message:
    """Add the partition id to every array; count the visits in the state."""
    partition = int(context.node_config["partition-id"])
    calls.append(partition)
    config = message.content["config"]
    if config.get("raise") == partition:
        raise RuntimeError("no power")
    if config.get("die") == partition:
        os._exit(9)
    if config.get("forget"):
        context.state.pop("visits", None)
        return Message(RecordDict(), reply_to=message)
    visits = context.state.metric_records.get("visits", MetricRecord({"n": 0}))
    context.state["visits"] = MetricRecord({"n": int(visits["n"]) + 1})
    message.content["config"]["seen"] = partition
    arrays = to_tensors(message.content["arrays"])
    out = to_record({name: tensor + partition for name, tensor in arrays.items()})
    metrics = MetricRecord(
        {"num-examples": partition + 1, "visits": context.state["visits"]["n"], "pid": os.getpid()}
    )
    return Message(RecordDict({"arrays": out, "metrics": metrics}), reply_to=message)


@app.query("silent")
def silent(message: Message, context: Context) -> Message:
    return Message(RecordDict(), reply_to=message)


def messages(grid: LocalGrid, nodes: list[int], **config: int) -> list[Message]:
    content = RecordDict(
        {"arrays": to_record({"w": torch.zeros(3)}), "config": ConfigRecord(dict(config))}
    )
    return [Message(content, node, "train") for node in nodes]


def means(replies: list[Message]) -> list[float]:
    return [float(to_tensors(reply.content["arrays"])["w"].mean()) for reply in replies]


def test_replies_come_in_message_order_and_only_when_asked_for() -> None:
    grid = LocalGrid(app, 7)
    calls.clear()
    replies = iter(grid.send_and_receive(messages(grid, [5, 2, 7])))
    assert calls == []
    first = next(replies)
    assert calls == [4] and means([first]) == [4.0]
    assert means(list(replies)) == [1.0, 6.0]


def test_state_stays_with_its_node() -> None:
    grid = LocalGrid(app, 3)
    for _ in range(2):
        list(grid.send_and_receive(messages(grid, [1, 3])))
    last = list(grid.send_and_receive(messages(grid, [1, 2, 3])))
    assert [reply.content["metrics"]["visits"] for reply in last] == [3, 1, 3]


def test_a_client_cannot_change_what_the_next_one_gets() -> None:
    grid = LocalGrid(app, 2)
    sent = messages(grid, [1, 2])
    list(grid.send_and_receive(sent))
    assert "seen" not in sent[0].content["config"]


def test_an_exception_becomes_an_error_reply_that_names_it() -> None:
    grid = LocalGrid(app, 3)
    replies = list(grid.send_and_receive(messages(grid, [1, 2, 3], **{"raise": 1})))
    assert [reply.has_error() for reply in replies] == [False, True, False]
    assert replies[1].error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    assert "RuntimeError: no power" in (replies[1].error.reason or "")
    assert replies[1].metadata.src_node_id == 2


def test_a_message_to_nobody_is_an_error_reply() -> None:
    grid = LocalGrid(app, 3)
    (reply,) = grid.send_and_receive(messages(grid, [4]))
    assert reply.error.code == ErrorCode.NODE_UNAVAILABLE
    assert "nodes are 1..3" in (reply.error.reason or "")


def test_push_and_pull_match_send_and_receive() -> None:
    grid = LocalGrid(app, 3)
    keys = grid.push_messages(messages(grid, [3, 1]))
    pulled = grid.pull_messages(keys)
    assert [reply.metadata.reply_to_message_id for reply in pulled] == keys
    assert means(pulled) == [2.0, 0.0]
    assert grid.pull_messages(keys) == []


def test_stock_fedavg_runs_on_the_grid() -> None:
    grid = LocalGrid(app, 3)
    start = to_record({"w": torch.zeros(3)})
    result = FedAvg(fraction_evaluate=0.0).start(grid, start, num_rounds=2)
    # partitions 0, 1, 2 add 0, 1, 2 with weights 1, 2, 3: 8/6 a round
    np.testing.assert_allclose(result.arrays["w"].numpy(), 2 * 8 / 6, rtol=1e-6)


def test_worker_processes_give_the_same_replies_in_the_same_order() -> None:
    with LocalGrid("tests.engine.test_local_grid:app", 5, jobs=2) as grid:
        first = list(grid.send_and_receive(messages(grid, [5, 1, 4, 2, 9], **{"raise": 3})))
        second = list(grid.send_and_receive(messages(grid, [5, 1])))
    assert [reply.has_error() for reply in first] == [False, False, True, False, True]
    assert means([first[0], first[1], first[3]]) == [4.0, 0.0, 1.0]
    assert [reply.content["metrics"]["visits"] for reply in second] == [2, 2]
    pids = {reply.content["metrics"]["pid"] for reply in [*first[:2], *second]}
    assert os.getpid() not in pids


def test_a_worker_that_dies_is_an_error_reply_and_the_rest_goes_on() -> None:
    with LocalGrid("tests.engine.test_local_grid:app", 9, jobs=2) as grid:
        nodes = [1, 2, 3, 4, 5, 6, 7, 8, 9]
        replies = list(grid.send_and_receive(messages(grid, nodes, die=4)))
        after = list(grid.send_and_receive(messages(grid, nodes)))
    lost = [reply for reply in replies if reply.has_error()]
    # the dead client and what was under way with it, four messages at the most
    assert replies[4].has_error() and 1 <= len(lost) <= 4
    assert all("worker process died" in (reply.error.reason or "") for reply in lost)
    assert not any(reply.has_error() for reply in after)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_client_may_empty_its_state(jobs: int) -> None:
    with LocalGrid("tests.engine.test_local_grid:app", 2, jobs=jobs) as grid:
        list(grid.send_and_receive(messages(grid, [1, 2])))
        list(grid.send_and_receive(messages(grid, [1], forget=1)))
        last = list(grid.send_and_receive(messages(grid, [1, 2])))
    assert [reply.content["metrics"]["visits"] for reply in last] == [1, 2]


def test_full_shared_memory_falls_back_to_an_ordinary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    parcel = handover.pack({"w": np.arange(13.0)}, tmp_path / "full")
    assert Path(parcel.path).parent == tmp_path
    assert np.array_equal(handover.unpack(parcel)["w"], np.arange(13.0))
    assert list(tmp_path.iterdir()) == []


def test_processes_need_an_importable_app() -> None:
    with pytest.raises(ValueError, match="jobs=2.*module:attribute"):
        LocalGrid(app, 3, jobs=2)


@pytest.mark.parametrize("name", ["num_clients", "jobs"])
def test_counts_below_one_are_refused(name: str) -> None:
    arguments = {"num_clients": 1, "jobs": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
        LocalGrid(app, **arguments)


def test_a_parcel_brings_arrays_across_and_leaves_no_file(tmp_path: Path) -> None:
    content = {"odd": np.arange(7, dtype=np.uint8), "w": np.arange(13.0), "empty": np.zeros(0)}
    parcel = handover.pack(content, tmp_path)
    assert os.path.exists(parcel.path)
    back = handover.unpack(parcel)
    assert not os.path.exists(parcel.path)
    assert all(np.array_equal(back[name], values) for name, values in content.items())
    assert back["w"].ctypes.data % 64 == 0 and back["w"].flags.writeable
    assert handover.unpack(handover.pack("no arrays", tmp_path)) == "no arrays"


def test_the_arrays_that_messages_share_are_handed_over_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[int] = []
    write = handover._write

    def counting(views: list[memoryview], folder: Path) -> str:
        written.append(sum(view.nbytes for view in views))
        return write(views, folder)

    monkeypatch.setattr(handover, "_write", counting)
    with LocalGrid("tests.engine.test_local_grid:app", 5, jobs=2) as grid:
        for repetition in (1, 2):  # a round's arrays go when it is over
            replies = list(grid.send_and_receive(messages(grid, [1, 2, 3, 4, 5])))
            assert means(replies) == [0.0, 1.0, 2.0, 3.0, 4.0]
            assert written == [3 * 4] * repetition
            assert grid._pool is not None and list(grid._pool.folder.iterdir()) == []


def test_a_shelf_is_cleared_while_its_arrays_are_in_use(tmp_path: Path) -> None:
    shelf = handover.Shelf(np.ndarray, tmp_path)
    values = np.arange(13.0)
    parcels = [handover.pack({"w": values, "n": n}, tmp_path, shelf) for n in (1, 2)]
    assert len(list(tmp_path.iterdir())) == 1
    first = handover.unpack(parcels[0])
    first["w"] += 1  # a copy of its own
    second = handover.unpack(parcels[1])
    shelf.clear()
    assert list(tmp_path.iterdir()) == []
    assert np.array_equal(second["w"], values) and np.array_equal(first["w"], values + 1)
    assert (first["n"], second["n"]) == (1, 2)


def test_closing_frees_what_was_never_read() -> None:
    grid = LocalGrid("tests.engine.test_local_grid:app", 5, jobs=2)
    replies = iter(grid.send_and_receive(messages(grid, [1, 2, 3, 4, 5])))
    next(replies)
    assert grid._pool is not None
    folder = grid._pool.folder
    assert folder.is_dir()
    grid.close()
    assert not folder.exists()


def test_the_ledger_counts_both_directions_and_resets() -> None:
    grid = LedgerGrid(LocalGrid(app, 3))
    list(grid.send_and_receive(messages(grid, [1, 2, 3], **{"raise": 0})))  # type: ignore[arg-type]
    traffic = grid.take()
    assert (traffic.bytes_down, traffic.bytes_up) == (3 * 12, 2 * 12)
    assert traffic.wire_bytes_down > 36 and traffic.wire_bytes_up > 24
    assert grid.take().bytes_down == 0
    assert grid.ordered  # what the grid inside can do shows through
