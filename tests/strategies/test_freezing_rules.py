"""What the rules keep across freeze and thaw, and across rounds that do not count."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord

from fedfrozen_app.strategies import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedFrozen,
    FedNova,
    FedProx,
    FedYogi,
    FreezeSchedule,
    QuorumError,
    Scaffold,
    ServerRule,
)
from fedfrozen_app.training.local import LocalTraining
from fedfrozen_app.transport.arrays import to_tensors
from fedfrozen_app.transport.payload import ACCEPTED, PATH
from tests.strategies.learners import Learners, Tensors, sequences, small_transformer

QKV, BIAS, HEAD = "blocks.0.attn.qkv.weight", "blocks.0.attn.qkv.bias", "head.weight"
KERNEL, VALUE = slice(0, 14), slice(14, 21)  # query and key rows, value rows
SHAPES = {QKV: (21, 7), BIAS: (21,), HEAD: (5, 7), "head.bias": (5,)}
ACTIVE = {**SHAPES, QKV: (7, 7), BIAS: (7,)}
SCHEDULE = FreezeSchedule(((1, "all"), (3, "query-key"), (5, "all")))
SETTINGS = LocalTraining(batch_size=4, lr=0.1, momentum=0.5)

Rule = ServerRule[Any, Any]
KINDS: dict[str, tuple[type[Rule], dict[str, Any]]] = {
    "fedavg": (FedAvg, {}),
    "fedprox": (FedProx, {"proximal_mu": 0.3}),
    "scaffold": (Scaffold, {}),
    "fednova": (FedNova, {"momentum": 0.5}),
    "fedavgm": (FedAvgM, {"server_momentum": 0.7}),
    "nesterov": (FedAvgM, {"server_momentum": 0.7, "nesterov": True}),
    "fedadam": (FedAdam, {"beta1": 0.6, "beta2": 0.8}),
    "corrected": (FedAdam, {"beta1": 0.6, "beta2": 0.8, "bias_correction": "adam"}),
    "fedyogi": (FedYogi, {"beta1": 0.6, "beta2": 0.8}),
    "fedadagrad": (FedAdagrad, {"beta1": 0.6}),
}
MOMENTS = {
    "scaffold": ["c"],
    "fedavgm": ["v"],
    "nesterov": ["v"],
    "fedadam": ["m", "v"],
    "corrected": ["m", "v", "t"],
    "fedyogi": ["m", "v"],
    "fedadagrad": ["m", "v"],
}
# in the frozen stage, and SCAFFOLD in the others too
WITH_STAGES = [(name, 4) for name in ("fedavg", "scaffold", "fedavgm", "corrected")]
WITH_STAGES += [("scaffold", 2), ("scaffold", 6)]


def build(name: str, **more: Any) -> Rule:
    kind, options = KINDS[name]
    return kind(**options, **more)


def learners(root: Path, **options: Any) -> Learners:
    """Return clients that take 2, 3, 4 and 5 steps."""
    options = {"settings": SETTINGS, "steps": lambda i: i + 2, **options}
    return Learners(root, small_transformer, sequences(), **options)


def moments(rule: Rule) -> dict[str, Tensors]:
    """The moments that hold something, copied."""
    return {
        field: {name: tensor.clone() for name, tensor in tensors.items()}
        for field, tensors in rule.state.moments().items()
        if tensors
    }


def shapes(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def bits(state: Any) -> Any:
    """A state dict with its tensors as numbers that compare."""
    if isinstance(state, torch.Tensor):
        return (str(state.dtype), tuple(state.shape), state.flatten().tolist())
    if isinstance(state, dict):
        return {key: bits(value) for key, value in state.items()}
    return [bits(value) for value in state] if isinstance(state, list | tuple) else state


def counted(rule: Rule) -> Any:
    """What a round changes only if it counts; a number of tries is not that."""
    return {key: value for key, value in bits(rule.state_dict()).items() if key != "version"}


# --- freeze and thaw ----------------------------------------------------------------------
@pytest.mark.parametrize("name", KINDS)
def test_moments_of_frozen_rows_leave_and_come_back_as_zero(tmp_path: Path, name: str) -> None:
    clients, rule = learners(tmp_path), build(name)
    strategy = FedFrozen(rule, schedule=SCHEDULE)
    arrays = clients.run(strategy, 2)
    warm = moments(rule)
    assert list(warm) == MOMENTS.get(name, [])
    assert all(shapes(tensors) == SHAPES for tensors in warm.values())
    assert all((tensors[QKV][KERNEL] != 0).any() for tensors in warm.values())

    strategy.configure_train(3, arrays, ConfigRecord(), clients.grid)
    frozen = moments(rule)
    for field, tensors in frozen.items():
        assert shapes(tensors) == ACTIVE
        assert torch.equal(tensors[QKV], warm[field][QKV][VALUE])
        assert torch.equal(tensors[BIAS], warm[field][BIAS][VALUE])
        assert torch.equal(tensors[HEAD], warm[field][HEAD])

    arrays = clients.run(strategy, 2, arrays, first=3)
    later = moments(rule)
    assert all(shapes(tensors) == ACTIVE for tensors in later.values())
    strategy.configure_train(5, arrays, ConfigRecord(), clients.grid)
    thawed = moments(rule)
    assert list(thawed) == list(warm)
    for field, tensors in thawed.items():
        assert shapes(tensors) == SHAPES
        assert (tensors[QKV][KERNEL] == 0).all() and (tensors[BIAS][KERNEL] == 0).all()
        assert torch.equal(tensors[QKV][VALUE], later[field][QKV])
        assert torch.equal(tensors[BIAS][VALUE], later[field][BIAS])
        assert torch.equal(tensors[HEAD], later[field][HEAD])
        assert not torch.equal(tensors[HEAD], frozen[field][HEAD])


@pytest.mark.parametrize("name", KINDS)
def test_frozen_rows_keep_their_bits_and_thawed_ones_move(tmp_path: Path, name: str) -> None:
    clients = learners(tmp_path)
    strategy = FedFrozen(build(name), schedule=SCHEDULE)
    warm = clients.run(strategy, 2)
    frozen = clients.run(strategy, 2, warm, first=3)
    for entry in (QKV, BIAS):
        before, after = to_tensors(warm)[entry], to_tensors(frozen)[entry]
        assert torch.equal(after[KERNEL], before[KERNEL])
        assert not torch.equal(after[VALUE], before[VALUE])
    thawed = to_tensors(clients.run(strategy, 1, frozen, first=5))
    assert not torch.equal(thawed[QKV][KERNEL], after[KERNEL])
    assert {spec for number, _, spec in clients.selections if number in (3, 4)} == {"query-key"}
    assert {spec for number, _, spec in clients.selections if number in (1, 2, 5)} == {"all"}


@pytest.mark.parametrize("name", KINDS)
def test_the_first_step_of_thawed_rows_is_that_of_a_fresh_rule(tmp_path: Path, name: str) -> None:
    # one step each, so that what the clients send of a row depends on x alone
    options: dict[str, Any] = {"steps": lambda i: 1}
    clients = learners(tmp_path / "long", **options)
    strategy = FedFrozen(build(name), schedule=SCHEDULE)
    arrays = clients.run(strategy, 4)
    after = to_tensors(clients.run(strategy, 1, arrays, first=5))
    fresh = learners(tmp_path / "fresh", **options)
    alone = to_tensors(fresh.run(build(name), 1, arrays, first=5))
    for entry in (QKV, BIAS):
        torch.testing.assert_close(after[entry][KERNEL], alone[entry][KERNEL], rtol=0, atol=0)
    has_memory = name in MOMENTS
    assert torch.equal(after[QKV][VALUE], alone[QKV][VALUE]) is not has_memory
    assert torch.equal(after[HEAD], alone[HEAD]) is not has_memory


@pytest.mark.parametrize("name", ["fedavgm", "nesterov", "fedadam", "corrected"])
def test_the_first_step_after_the_thaw_by_numbers(tmp_path: Path, name: str) -> None:
    clients, rule = learners(tmp_path), build(name)
    strategy = FedFrozen(rule, schedule=SCHEDULE)
    arrays = clients.run(strategy, 4)
    x = to_tensors(arrays)[QKV].double()
    before = moments(rule)
    after = to_tensors(clients.run(strategy, 1, arrays, first=5))[QKV].double()
    n = {i: len(clients.examples[i]) for i in range(4)}
    mean = sum(n[i] * clients.sent[5][i][QKV].double() for i in n) / sum(n.values())
    d = mean - x
    new, old = torch.empty_like(x), torch.empty_like(x)  # a first step, and one that goes on
    if name in ("fedavgm", "nesterov"):
        v = torch.cat([torch.zeros(14, 7), before["v"][QKV]]).double()
        goes_on = 0.7 * v - d
        old = x - (0.7 * goes_on - d if name == "nesterov" else goes_on)
        new = x + (1.7 * d if name == "nesterov" else d)
    else:
        m = torch.cat([torch.zeros(14, 7), before["m"][QKV]]).double()
        v = torch.cat([torch.zeros(14, 7), before["v"][QKV]]).double()
        m, v = 0.6 * m + 0.4 * d, 0.8 * v + 0.2 * d**2
        # the value rows are at their fifth step, the thawed ones at their first
        late = (1 - 0.6**5, 1 - 0.8**5) if name == "corrected" else (1, 1)
        old = x + 0.01 * (m / late[0]) / ((v / late[1]).sqrt() + 1e-3)
        first = (d, d.abs()) if name == "corrected" else (0.4 * d, 0.2**0.5 * d.abs())
        new = x + 0.01 * first[0] / (first[1] + 1e-3)
    torch.testing.assert_close(after[KERNEL], new[KERNEL], rtol=0, atol=2e-6)
    torch.testing.assert_close(after[VALUE], old[VALUE], rtol=0, atol=2e-6)
    assert (new[VALUE] - old[VALUE]).abs().max() > 1e-3  # they can be told apart


def test_bias_correction_counts_the_steps_of_each_row(tmp_path: Path) -> None:
    rule = build("corrected")
    learners(tmp_path).run(FedFrozen(rule, schedule=SCHEDULE), 7)
    t = rule.state.t
    assert t[QKV][KERNEL].unique().tolist() == [3]  # rounds 5, 6, 7
    assert t[QKV][VALUE].unique().tolist() == [7]
    assert t[HEAD].unique().tolist() == [7]


@pytest.mark.parametrize(("name", "stop"), WITH_STAGES)
def test_a_state_restored_at_any_stage_goes_on_bit_for_bit(
    tmp_path: Path, name: str, stop: int
) -> None:
    options: dict[str, Any] = {"fraction_train": 0.5, "min_train_nodes": 1}
    straight = learners(tmp_path / "a").run(FedFrozen(build(name, **options), schedule=SCHEDULE), 6)
    first = FedFrozen(build(name, **options), schedule=SCHEDULE)
    half = learners(tmp_path / "b").run(first, stop)
    saved = copy.deepcopy(first.state_dict())
    second = FedFrozen(build(name, **options), schedule=SCHEDULE)
    second.load_state_dict(saved)
    rest = learners(tmp_path / "b").run(second, 6 - stop, half, first=stop + 1)  # a new grid
    assert bits(to_tensors(rest)) == bits(to_tensors(straight))


# --- SCAFFOLD's controls --------------------------------------------------------------------
def whole(control: Tensors, spec: str) -> Tensors:
    """A control with the rows that were frozen as zeros."""
    full = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for name, tensor in control.items():
        part = full[name][VALUE] if spec == "query-key" and name in (QKV, BIAS) else full[name]
        part.copy_(tensor)
    return full


def carried(clients: Learners, rule: Scaffold, client: int, server_round: int) -> Tensors:
    """c_i as it counts in a round, whole: rows frozen since it was computed are zero."""
    kept = clients.control(rule, client)
    if kept is None:
        return whole({}, "all")
    computed = int(rule.versions.instructions(client)[ACCEPTED])  # type: ignore[arg-type]
    control = whole(kept.tensors, kept.selection)
    since = {SCHEDULE.spec(number) for number in range(computed, server_round + 1)}
    if "query-key" in since:
        for name in (QKV, BIAS):
            control[name][KERNEL] = 0
    return control


def assert_c_is_the_mean(clients: Learners, rule: Scaffold, server_round: int) -> None:
    """sum_i c_i / N == c over all clients, sampled or not."""
    count = len(clients.examples)
    controls = [carried(clients, rule, client, server_round) for client in range(count)]
    c = whole(rule.state.c, SCHEDULE.spec(server_round))
    for name in SHAPES:
        mean = torch.stack([control[name] for control in controls]).double().mean(dim=0)
        torch.testing.assert_close(c[name].double(), mean, rtol=0, atol=1e-6)
        assert c[name].abs().max() > 1e-3


def used_control(clients: Learners, rule: Scaffold, client: int, server_round: int) -> Tensors:
    """c_i that a client really went on from, by what it kept and what it sent."""
    kept = clients.control(rule, client)
    assert kept is not None
    sent = clients.sent[server_round][client]
    return {name: kept.tensors[name] - sent[f"control/{name}"] for name in SHAPES}


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_c_is_the_mean_of_all_controls_after_every_round(tmp_path: Path, fraction: float) -> None:
    clients = learners(tmp_path)
    rule = Scaffold(fraction_train=fraction, min_train_nodes=1, seed=4)
    strategy = FedFrozen(rule, schedule=SCHEDULE)
    arrays = clients.initial()
    for server_round in range(1, 9):
        arrays = clients.round(strategy, server_round, arrays)
        assert rule.report.clients == 4 * fraction
        assert_c_is_the_mean(clients, rule, server_round)


def test_a_client_away_during_the_freeze_starts_thawed_rows_at_zero(tmp_path: Path) -> None:
    clients = learners(tmp_path)
    rule = Scaffold(fraction_train=0.5, min_train_nodes=1, seed=11)
    strategy = FedFrozen(rule, schedule=SCHEDULE)
    arrays = clients.run(strategy, 4)
    seen = {number: set(clients.sent[number]) for number in clients.sent}
    away = (seen[1] | seen[2]) - seen[3] - seen[4]
    assert away, "take a seed with a client that was there before the freeze and not in it"
    old = {client: clients.control(rule, client) for client in away}
    assert rule.versions.instructions(min(away))[PATH] == ["query-key"]
    back: dict[int, int] = {}
    for server_round in range(5, 12):
        arrays = clients.round(strategy, server_round, arrays)
        for client in away & set(clients.sent[server_round]) - back.keys():
            back[client] = server_round
            used, kept = used_control(clients, rule, client, server_round), old[client]
            assert kept is not None and kept.selection == "all"
            for name in (QKV, BIAS):
                assert kept.tensors[name][KERNEL].abs().max() > 1e-3
                assert used[name][KERNEL].abs().max() < 1e-7
                torch.testing.assert_close(
                    used[name][VALUE], kept.tensors[name][VALUE], rtol=0, atol=1e-7
                )
            torch.testing.assert_close(used[HEAD], kept.tensors[HEAD], rtol=0, atol=1e-7)
        assert_c_is_the_mean(clients, rule, server_round)
    assert back.keys() == away


def test_the_server_names_the_selections_since_a_clients_last_round(tmp_path: Path) -> None:
    clients = learners(tmp_path)
    rule = Scaffold(fraction_train=0.5, min_train_nodes=1, seed=11)
    strategy = FedFrozen(rule, schedule=SCHEDULE)
    last: dict[int, int] = {}
    arrays = clients.initial()
    for server_round in range(1, 8):
        arrays = clients.round(strategy, server_round, arrays)
        last.update(dict.fromkeys(clients.sent[server_round], server_round))
        for client in range(4):
            said = rule.versions.instructions(client)
            assert said[ACCEPTED] == last.get(client, 0)
            starts = [(1, "all"), (3, "query-key"), (5, "all")]
            path = [spec for first, spec in starts if last.get(client, 0) < first <= server_round]
            assert said[PATH] == path


@pytest.mark.parametrize("entry", [HEAD, f"control/{HEAD}"])
def test_a_refused_reply_moves_neither_c_nor_the_clients_control(
    tmp_path: Path, entry: str
) -> None:
    def damage(server_round: int, client: int, arrays: Tensors) -> None:
        if (server_round, client) in ((2, 1), (3, 1), (4, 2)):
            arrays[entry] = arrays[entry].clone()
            arrays[entry][0, 0] = float("nan")

    clients, rule = learners(tmp_path, tamper=damage), Scaffold()
    strategy = FedFrozen(rule, schedule=SCHEDULE)
    arrays = clients.initial()
    expected = {1: [1, 1, 1, 1], 2: [2, 1, 2, 2], 3: [3, 1, 3, 3], 4: [4, 4, 3, 4], 5: [5] * 4}
    after_first = None
    strategy.check(arrays)
    for server_round in range(1, 7):
        messages = list(
            strategy.configure_train(server_round, arrays, ConfigRecord(), clients.grid)
        )
        before = {name: tensor.clone() for name, tensor in rule.state.c.items()}  # after a freeze
        replies = clients.grid.send_and_receive(messages)
        following, _ = strategy.aggregate_train(server_round, replies)
        assert following is not None
        arrays = following
        refused = {2: "client 1", 3: "client 1", 4: "client 2"}.get(server_round)
        assert [line.split(":")[0] for line in rule.report.refused] == (
            [refused] if refused else []
        )
        good = [i for i in range(4) if f"client {i}" != refused]
        for name, c in rule.state.c.items():
            moved = sum(clients.sent[server_round][i][f"control/{name}"].double() for i in good)
            start = before.get(name, torch.zeros(()))
            torch.testing.assert_close(c.double(), start + moved / 4, rtol=0, atol=1e-6)
        assert_c_is_the_mean(clients, rule, server_round)
        if server_round in expected:
            rounds = [rule.versions.instructions(i)[ACCEPTED] for i in range(4)]
            assert rounds == expected[server_round]
        if server_round == 1:
            after_first = clients.control(rule, 1)
        if server_round == 4:  # twice refused, it went on from what it kept in round 1
            kept, sent = clients.control(rule, 1), clients.sent[4][1]
            assert kept is not None and after_first is not None
            used = kept.tensors[HEAD] - sent[f"control/{HEAD}"]
            torch.testing.assert_close(used, after_first.tensors[HEAD], rtol=0, atol=1e-7)


def test_each_client_lost_once_leaves_c_the_mean_of_all_controls(tmp_path: Path) -> None:
    def lost(server_round: int, client: int, arrays: Tensors) -> None:
        if server_round % 4 == client:
            raise RuntimeError("no power")  # after the client kept its new control

    clients, rule = learners(tmp_path, tamper=lost), Scaffold(fraction_train=0.8)
    strategy = FedFrozen(rule, schedule=SCHEDULE)
    arrays = clients.initial()
    for server_round in range(1, 9):
        arrays = clients.round(strategy, server_round, arrays)
        assert_c_is_the_mean(clients, rule, server_round)


# --- rounds that do not count ------------------------------------------------------------
def failing(at: int, clients: tuple[int, ...]) -> Any:
    state = {"fails": True}

    def tamper(server_round: int, client: int, arrays: Tensors) -> None:
        if state["fails"] and server_round == at and client in clients:
            arrays[HEAD] = torch.full_like(arrays[HEAD], float("inf"))

    tamper.state = state  # type: ignore[attr-defined]
    return tamper


@pytest.mark.parametrize(("name", "at"), WITH_STAGES)
def test_a_round_below_the_quorum_leaves_state_and_model_and_can_be_repeated(
    tmp_path: Path, name: str, at: int
) -> None:
    whole_run = learners(tmp_path / "whole").run(FedFrozen(build(name), schedule=SCHEDULE), 6)
    tamper = failing(at, (0, 2, 3))
    clients = learners(tmp_path / "failing", tamper=tamper)
    rule = build(name, min_replies=0.5)
    strategy = FedFrozen(rule, schedule=SCHEDULE)
    arrays = clients.run(strategy, at - 1)
    model = bits(to_tensors(arrays))
    before = counted(rule)
    for _ in range(2):
        with pytest.raises(QuorumError, match=f"round {at}: 1 of 4 replies are usable"):
            clients.round(strategy, at, arrays)
        assert counted(rule) == before
        assert bits(to_tensors(arrays)) == model
    tamper.state["fails"] = False
    rest = clients.run(strategy, 7 - at, arrays, first=at)
    assert bits(to_tensors(rest)) == bits(to_tensors(whole_run))


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedavgm", "corrected"])
def test_a_round_without_a_usable_reply_leaves_state_and_model(tmp_path: Path, name: str) -> None:
    clients = learners(tmp_path, tamper=failing(4, (0, 1, 2, 3)))
    rule = build(name)
    strategy = FedFrozen(rule, schedule=SCHEDULE)
    arrays = clients.run(strategy, 3)
    before = counted(rule)
    messages = list(strategy.configure_train(4, arrays, ConfigRecord(), clients.grid))
    replies = list(clients.grid.send_and_receive(messages))
    assert strategy.aggregate_train(4, replies) == (None, None)
    assert (rule.report.clients, rule.report.dropped) == (0, 4)
    assert counted(rule) == before
    assert not torch.equal(  # and the next round goes on
        to_tensors(clients.run(strategy, 1, arrays, first=5))[HEAD], to_tensors(arrays)[HEAD]
    )


def test_a_second_start_goes_on_from_the_controls_of_the_first(
    tmp_path: Path,
) -> None:
    clients = learners(tmp_path)
    rule = Scaffold(fraction_evaluate=0.0)
    strategy = FedFrozen(rule, warmup_rounds=1)
    for _ in range(2):
        result = strategy.start(clients.grid, clients.initial(), num_rounds=3)
        assert rule.report.dropped == 0
        assert shapes(rule.state.c) == ACTIVE
    assert torch.isfinite(to_tensors(result.arrays)[HEAD]).all()
    kept = [clients.control(rule, client) for client in range(4)]
    for name, c in rule.state.c.items():
        mean = torch.stack([one.tensors[name] for one in kept if one is not None]).mean(dim=0)
        torch.testing.assert_close(c, mean, rtol=0, atol=1e-6)
    assert rule.versions.instructions(0)[PATH] == []
    assert rule.state_dict()["stages"] == ["all", "query-key", "all", "query-key"]
