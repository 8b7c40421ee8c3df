from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode

from fedfrozen_app.engine import roster as module
from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.engine.roster import QUERY_PARTITION, Roster
from fedfrozen_app.transport.ledger import LedgerGrid


class Nodes(LocalGrid):
    """Nodes with ids of their own that answer with (partition, number of partitions)."""

    ordered = False

    def __init__(self, answers: dict[int, tuple[int, int] | None], error: int = 2) -> None:
        from flwr.clientapp import ClientApp

        super().__init__(ClientApp(), 1)
        self.num_clients = -1
        self.answers, self.error = answers, error
        self.asked: list[int] = []

    def get_node_ids(self) -> list[int]:
        return list(self.answers)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        for message in messages:
            assert message.metadata.message_type == QUERY_PARTITION
            node = message.metadata.dst_node_id
            self.asked.append(node)
            answer = self.answers[node]
            if answer is None:
                yield Message(Error(self.error, "no answer"), reply_to=message)
                continue
            record = ConfigRecord({"partition-id": answer[0], "num-partitions": answer[1]})
            yield Message(RecordDict({"reply": record}), reply_to=message)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(module, "STRAGGLER_SECONDS", 0.05)


def members(grid: Any, num_clients: int, at_least: int = 1, timeout: float = 0.2) -> dict[int, int]:
    return Roster(num_clients, timeout=timeout)(grid, at_least)


def test_in_this_process_node_and_partition_are_known_without_asking() -> None:
    from flwr.clientapp import ClientApp

    assert members(LedgerGrid(LocalGrid(ClientApp(), 3)), 3) == {0: 1, 1: 2, 2: 3}


def test_one_node_for_each_client_is_taken_by_its_own_word() -> None:
    grid = Nodes({71: (2, 3), 13: (0, 3), 97: (1, 3)})
    assert members(grid, 3) == {0: 13, 1: 97, 2: 71}
    assert sorted(grid.asked) == [13, 71, 97]


def test_fewer_nodes_than_clients_take_turns() -> None:
    assert members(Nodes({71: (1, 2), 13: (0, 2)}), 5) == {0: 13, 1: 71, 2: 13, 3: 71, 4: 13}


def test_a_node_is_asked_once_and_a_new_one_when_it_joins() -> None:
    grid = Nodes({13: (0, 3), 97: (1, 3)})
    roster = Roster(3, timeout=0.2)
    assert roster(grid, 1) == {0: 13, 1: 97}
    grid.answers[71] = (2, 3)
    assert roster(grid, 1) == {0: 13, 1: 97, 2: 71}
    del grid.answers[13]
    assert roster(grid, 1) == {1: 97, 2: 71}
    assert grid.asked == [13, 97, 71]


def test_nodes_that_cannot_answer_are_left_out() -> None:
    grid = Nodes({13: (0, 2), 97: None})
    roster = Roster(2, timeout=0.5)
    assert roster(grid, 1) == roster(grid, 1) == {0: 13}
    assert grid.asked == [13, 97]  # nobody is asked twice


def test_a_node_that_was_lost_while_it_was_asked_is_asked_again() -> None:
    grid = Nodes({13: (0, 2), 97: None}, error=ErrorCode.NODE_UNAVAILABLE)
    roster = Roster(2, timeout=0.5)
    assert roster(grid, 1) == {0: 13}
    grid.answers[97] = (1, 2)  # it came back
    assert roster(grid, 1) == {0: 13, 1: 97}


def test_too_few_nodes_end_in_an_error_that_counts_them() -> None:
    with pytest.raises(TimeoutError, match="1 of 2 required clients have a node"):
        members(Nodes({13: (0, 2)}), 2, at_least=2)
