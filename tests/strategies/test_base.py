"""What every rule gets from its base: names, numbers, buffers, and what must not go on."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping

from fedfrozen_app.strategies import (
    FedAdam,
    FedAvg,
    FedAvgM,
    FedFrozen,
    FedNova,
    FedProx,
    Scaffold,
    ServerRule,
    UnfitClientsError,
)
from fedfrozen_app.strategies.base import DivergedError
from fedfrozen_app.strategies.sampling import NodesAsTheyCome
from fedfrozen_app.transport.arrays import to_record, to_tensors
from fedfrozen_app.transport.payload import from_namespaces
from tests.strategies.federation import HEAD, Federation, initial


class Nodes:
    """A grid of which only the connected nodes matter."""

    def __init__(self, *nodes: int) -> None:
        self.nodes = list(nodes)

    def get_node_ids(self) -> list[int]:
        return self.nodes


def test_a_node_keeps_its_number_when_others_leave_and_join() -> None:
    members, grid = NodesAsTheyCome(), Nodes(33, 11, 22)
    assert members(grid, 3) == {0: 11, 1: 22, 2: 33}  # type: ignore[arg-type]
    grid.nodes = [22, 33, 5]
    assert members(grid, 3) == {1: 22, 2: 33, 3: 5}  # type: ignore[arg-type]
    grid.nodes = [11, 5]
    assert members(grid, 1) == {0: 11, 3: 5}  # type: ignore[arg-type]


def test_the_longest_trainings_are_asked_first(tmp_path: Path) -> None:
    federation = Federation(tmp_path, num_clients=8)
    record, config = to_record(initial()), ConfigRecord()

    def asked(rule: FedAvg) -> list[int]:
        messages = rule.configure_train(1, record, config, federation.grid)
        return [int(message.content["config"]["partition-id"]) for message in messages]

    drawn = asked(FedAvg(seed=3, fraction_train=0.5, min_train_nodes=2))
    assert drawn == sorted(drawn)
    work = {client: 1.0 + client for client in drawn[1:]}  # of the first nothing is known
    ordered = asked(FedAvg(seed=3, fraction_train=0.5, min_train_nodes=2, work=work))
    assert ordered == [*drawn[:0:-1], drawn[0]] and len(drawn) > 1


def test_the_order_of_asking_is_that_of_adding_up_in_every_engine(tmp_path: Path) -> None:
    # 2^24 + 1 - 2^24 is 1 or 0 in float32: the sum says in which order it was made
    large = {0: 2.0**24, 1: 1.0, 2: -(2.0**24)}

    def tamper(_: int, client: int, arrays: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: torch.full_like(value, large[client]) for name, value in arrays.items()}

    def after(work: dict[int, float], in_this_process: bool) -> torch.Tensor:
        federation = Federation(tmp_path, tamper=tamper)
        rule = FedAvg(weighted_by_key="one", work=work)
        federation.metrics = {"one": 1.0}
        messages = rule.configure_train(1, to_record(initial()), ConfigRecord(), federation.grid)
        replies = list(federation.grid.send_and_receive(messages))
        if not in_this_process:
            rule._grid, replies = None, replies[::-1]  # they come as they like
        arrays, _ = rule.aggregate_train(1, replies)
        assert arrays is not None
        return to_tensors(arrays)[HEAD]

    longest_last = {0: 3.0, 1: 1.0, 2: 2.0}
    for work in ({}, longest_last):
        assert torch.equal(after(work, True), after(work, False)), work
    assert not torch.equal(after({}, True), after(longest_last, True))


def test_names_with_slashes_are_names(tmp_path: Path) -> None:
    own, extra = from_namespaces(
        {name: torch.zeros(1) for name in ("layers/0/kernel", "control/layers/0/kernel", "w")}
    )
    assert list(own) == ["layers/0/kernel", "w"]
    assert {key: list(value) for key, value in extra.items()} == {"control": ["layers/0/kernel"]}


def test_an_average_without_trained_entries_is_that_of_the_buffers(tmp_path: Path) -> None:
    record = to_record({"bn.running_mean": torch.zeros(3), "scale": torch.tensor(1.0)})
    grid = Federation(tmp_path).grid
    rule = Scaffold()
    (message, *_) = rule.configure_train(1, record, ConfigRecord(), grid)
    assert list(message.content["arrays"]) == ["bn.running_mean", "scale"]


def test_entries_named_as_buffers_stay_out_of_the_optimiser(tmp_path: Path) -> None:
    rule = FedAvgM(server_lr=3.0, server_momentum=0.5, buffers=[HEAD])
    after, _ = Federation(tmp_path).run(rule, 2)
    mean = 1.4 / 6  # of the steps .1, .2, .3 by the weights 1, 2, 3
    torch.testing.assert_close(after[HEAD], initial()[HEAD] + 2 * mean)
    moved = after["head.bias"] - initial()["head.bias"]
    torch.testing.assert_close(moved, torch.full_like(moved, 3 * mean * (1 + 1.5)))
    assert HEAD not in rule.state.v


def test_a_model_that_overflows_ends_the_run_and_leaves_the_state(tmp_path: Path) -> None:
    rule = FedAvgM(server_lr=1.0)
    federation = Federation(tmp_path)
    arrays, _ = federation.round(rule, 1, to_record(initial()))
    before = {name: v.clone() for name, v in rule.state.v.items()}
    rule.config = replace(rule.config, server_lr=1e39)
    with pytest.raises(DivergedError, match="round 2: FedAvgM with .*1e\\+39.* non-finite; lower"):
        federation.round(rule, 2, arrays)
    assert all(torch.equal(before[name], v) for name, v in rule.state.v.items())


def test_a_moment_of_another_model_is_refused_before_it_is_broadcast(tmp_path: Path) -> None:
    saved = FedAvgM()
    Federation(tmp_path).run(saved, 1)
    state = saved.state_dict()
    state["moments"]["v"][HEAD] = torch.ones(1)
    rule = FedAvgM()
    rule.load_state_dict(state)
    with pytest.raises(ValueError, match=r"keeps v of 'head.weight' as \[1\], .* has \[5, 7\]"):
        Federation(tmp_path).run(rule, 1)


@pytest.mark.parametrize(
    ("rule", "option"),
    [
        (FedProx, "proximal_mu"),
        (Scaffold, "server_lr"),
        (FedNova, "momentum"),
        (FedNova, "lr"),
        (FedAvgM, "server_lr"),
        (FedAvgM, "server_momentum"),
        (FedAdam, "tau"),
        (FedAdam, "beta2"),
    ],
)
@pytest.mark.parametrize("value", [math.nan, math.inf, "0.1", -1.0])
def test_what_is_no_number_in_range_is_refused_with_a_remedy(
    rule: type[ServerRule[Any, Any]], option: str, value: Any
) -> None:
    with pytest.raises(ValueError, match=rf"{option} must be .*, got {value!r}; \w+"):
        rule(**{option: value})


def test_fewer_clients_than_are_connected_cannot_be_all(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_clients must be all clients there are, got 2 and 3"):
        Federation(tmp_path).run(Scaffold(num_clients=2), 1)


def test_scaffold_inside_a_foreign_wrapper_is_refused_at_once() -> None:
    private = DifferentialPrivacyServerSideFixedClipping(Scaffold(), 0.1, 1.0, 3)
    with pytest.raises(ValueError, match="FixedClipping does not know .* wrap Scaffold in FedFro"):
        FedFrozen(private, warmup_rounds=1)
    FedFrozen(DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.1, 1.0, 3), warmup_rounds=1)


def test_a_restored_run_does_not_start_at_round_one(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    saved = FedFrozen(warmup_rounds=1)
    federation.run(saved, 2)
    restored = FedFrozen(warmup_rounds=1)
    restored.load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match=r"cannot go on with start\(\).* would thaw"):
        restored.start(federation.grid, to_record(initial()), num_rounds=1)


def test_the_control_that_a_reply_lacks_is_named_with_what_to_do(tmp_path: Path) -> None:
    rule = Scaffold()
    with pytest.raises(UnfitClientsError, match="round 1: .*answer with controls"):
        Federation(tmp_path).round(rule, 1, to_record(initial()))
    assert (
        "first 'control/norm.weight'; clients of this rule answer with ClientRules"
        in (rule.report.refused[0])
    )


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (0.5, "'steps' must be a whole number <= 10000000, got 0.5"),
        (10**12, "'steps' must be a whole number <= 10000000, got 1000000000000.0"),
        (0, "'steps' must be a finite number > 0, got 0"),
        (-3, "'steps' must be a finite number > 0, got -3"),
    ],
)
def test_steps_are_counted_in_whole_numbers(tmp_path: Path, steps: float, words: str) -> None:
    federation = Federation(tmp_path, num_clients=1)
    federation.metrics = {"steps": steps}
    rule = FedNova(min_train_nodes=1, min_available_nodes=1)
    with pytest.raises(UnfitClientsError, match=f"answer with the metric 'steps'.*{words}"):
        federation.run(rule, 1)
    assert rule.report.refused == [f"client 0: metric {words}"]
