from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord
from torch import nn

from fedfrozen_app.models.selection import Selection
from fedfrozen_app.strategies import FedAvg, Scaffold
from fedfrozen_app.strategies.scaffold import (
    Correction,
    ScaffoldConfig,
    ScaffoldState,
    aggregate,
    next_control,
)
from fedfrozen_app.transport.arrays import to_record, to_tensors
from fedfrozen_app.transport.payload import NUM_EXAMPLES, to_namespaces
from tests.strategies.clients import (
    Clients,
    LossWorker,
    MlpWorker,
    Tensors,
    exchange,
    gap,
    numbers,
    quadratic,
    update,
)

# 3 of 7 clients a round
PARTIAL = {"seed": 1, "fraction_train": 3 / 7}


def test_two_rounds_of_the_server_by_hand() -> None:
    config = ScaffoldConfig(server_lr=0.5, num_clients=4)
    # mean y = (-2, -2) whatever n_i; mean Delta c = (-2, 2), of 2 of 4 clients
    replies = [
        update(1, numbers(2, -4), control=numbers(1, -2)),
        update(3, numbers(-6, 0), control=numbers(-5, 6)),
    ]
    state = aggregate(ScaffoldState({"w": numbers(0, 0)}), iter(replies), config)
    assert state.x["w"].tolist() == [-1, -1]
    assert state.c["w"].tolist() == [-1, 1]
    # one client alone: x + 1/2 (4, 0) and c + 1/4 (4, -8)
    reply = update(3, numbers(3, -1), control=numbers(4, -8))
    state = aggregate(state, iter([reply]), config)
    assert state.x["w"].tolist() == [1, -1]
    assert state.c["w"].tolist() == [0, -1]


def test_two_rounds_of_server_and_clients_by_hand(tmp_path: Path) -> None:
    """F_i = (w - b_i)^2 / 2 with b = (4, -2), two steps and one, eta_l = 1/2, n = (1, 3)."""
    losses = [quadratic(1, numbers(4)), quadratic(1, numbers(-2))]
    clients = Clients(LossWorker(tmp_path, losses, [2, 1], size=1, num_examples=[1, 3], lr=0.5))
    rule = Scaffold()
    # client 0: 0 -> 2 -> 3, c_0 = (0 - 3) / (2/2) = -3;  client 1: 0 -> -1, c_1 = 1 / (1/2) = 2
    x = clients.round(rule, 1, {"w": numbers(0)})
    assert x["w"].item() == 1  # (3 - 1) / 2
    assert rule.state.c["w"].item() == -0.5
    assert [clients.control(rule, i)["w"].item() for i in (0, 1)] == [-3, 2]
    # client 0: c - c_0 = 5/2; gradients -3 + 5/2 and -11/4 + 5/2: 1 -> 5/4 -> 11/8
    #           c_0+ = -3 + 1/2 + (1 - 11/8) / 1 = -23/8, the mean of -3 and -11/4
    # client 1: c - c_1 = -5/2; gradient 3 - 5/2: 1 -> 3/4;  c_1+ = 2 + 1/2 + (1/4) / (1/2) = 3
    x = clients.round(rule, 2, x)
    assert x["w"].item() == 1.0625  # (11/8 + 3/4) / 2
    assert rule.state.c["w"].item() == 0.0625  # -1/2 + (1/8 + 1) / 2
    assert [clients.control(rule, i)["w"].item() for i in (0, 1)] == [-2.875, 3]


def test_option_two_by_hand() -> None:
    # c_i - c + (x - y) / (tau eta_l) = (1/2 - 1 + 2, 2 + 1 - 4)
    c, c_i = {"w": numbers(1, -1)}, {"w": numbers(0.5, 2)}
    new = next_control(c, c_i, {"w": numbers(0, 1)}, {"w": numbers(-1, 3)}, 0.5)
    assert new["w"].tolist() == [1.5, -1]


def test_the_correction_adds_c_and_takes_c_i_away() -> None:
    params = {"w": nn.Parameter(numbers(5, 5)), "head": nn.Parameter(numbers(1))}
    selection = Selection.build("all", params)
    c = {"w": numbers(1, -2), "head": numbers(3)}
    c_i = {"w": numbers(0.5, 4), "head": numbers(1)}
    hook = Correction(c, c_i, selection)
    hook.begin(params)
    params["w"].grad = numbers(10, 10)
    hook.correct(params)
    assert params["w"].grad.tolist() == [10.5, 4]
    # the loss does not use the head: its gradient is zero, and 0 - c_i + c is left
    assert params["head"].grad is not None and params["head"].grad.tolist() == [2]


def test_a_parameter_that_one_client_alone_uses_reaches_its_optimum() -> None:
    # client 0: (w - 4)^2 / 2, client 1 does not use w: the mean of the losses is least at 4
    x = {"w": numbers(0)}
    c, own = {"w": numbers(0)}, [{"w": numbers(0)}, {"w": numbers(0)}]
    selection = Selection.build("all", x)
    for _ in range(400):
        ends, deltas = [], []
        for client in (0, 1):
            params = {"w": nn.Parameter(x["w"].clone())}
            optimizer = torch.optim.SGD(params.values(), lr=0.1)
            hook = Correction(c, own[client], selection)
            hook.begin(params)
            for _ in range(5):
                optimizer.zero_grad()
                if client == 0:
                    ((params["w"] - 4) ** 2 / 2).sum().backward()
                hook.correct(params)
                optimizer.step()
            ends.append(params["w"].detach())
            following = next_control(c, own[client], x, {"w": ends[-1]}, 0.5)
            deltas.append(following["w"] - own[client]["w"])
            own[client] = following
        x = {"w": (ends[0] + ends[1]) / 2}
        c = {"w": c["w"] + (deltas[0] + deltas[1]) / 2}
    assert abs(float(x["w"]) - 4) < 1e-6


def test_one_round_from_zero_controls_equals_fedavg_with_equal_weights(tmp_path: Path) -> None:
    clients = Clients(MlpWorker(tmp_path, examples=(7, 7, 7), momentum=0.9, weight_decay=0.03))
    x = clients.worker.initial_weights()
    plain = clients.run(FedAvg(), 3, x)
    rule = Scaffold()
    ours = clients.run(rule, 3, x)
    assert gap(ours[0], plain[0]) < 1e-14
    assert gap(ours[2], plain[2]) > 1e-3  # later rounds are corrected


def test_the_number_of_examples_weighs_nothing(tmp_path: Path) -> None:
    x = {"w": numbers(0, 0)}
    losses = [quadratic(1, numbers(4, -8)), quadratic(3, numbers(-8, 8))]

    def model(num_examples: list[int]) -> Tensors:
        worker = LossWorker(tmp_path, losses, [2, 5], size=2, num_examples=num_examples, lr=0.1)
        return Clients(worker).run(Scaffold(), 3, x)[-1]

    assert torch.equal(model([1, 1])["w"], model([1, 97])["w"])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("cohort", [{}, PARTIAL], ids=["full", "partial"])
def test_c_is_the_mean_of_all_clients_controls_after_each_round(
    tmp_path: Path, cohort: dict[str, Any], momentum: float
) -> None:
    worker = MlpWorker(tmp_path, momentum=momentum, weight_decay=0.03)
    clients, rule = Clients(worker), Scaffold(server_lr=0.7, **cohort)
    x = worker.initial_weights()
    for server_round in range(1, 6):
        x = clients.round(rule, server_round, x)
        everyone = [clients.control(rule, client) for client in range(7)]
        took_part = [control for control in everyone if control]
        if not cohort:
            assert len(took_part) == 7
        elif server_round == 1:
            assert len(took_part) == 3
        mean = {name: sum(c_i[name] for c_i in took_part) / 7 for name in x}
        assert gap(mean, rule.state.c) < 1e-14
        assert min(float(c.abs().max()) for c in rule.state.c.values()) > 1e-3


def test_c_counts_the_clients_that_replied_and_not_those_that_were_asked(tmp_path: Path) -> None:
    worker = MlpWorker(tmp_path)
    clients, rule = Clients(worker), Scaffold()
    x = worker.initial_weights()
    for server_round, lost in ((1, 2), (2, 5), (3, 2)):
        replies = clients.replies(rule, server_round, x)
        del replies[lost]  # the client trained and kept a control that the server never saw
        record, _ = rule.aggregate_train(server_round, replies)
        assert record is not None
        x = to_tensors(record)
        mean = {n: sum(clients.control(rule, i).get(n, 0) for i in range(7)) / 7 for n in x}
        assert gap(mean, rule.state.c) < 1e-14
    assert rule.state_dict()["clients"][2] == [2, 0]
    assert rule.state_dict()["clients"][5] == [3, 0]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_control_is_a_gradient_whatever_steps_and_momentum(
    tmp_path: Path, momentum: float
) -> None:
    # steps too small to change the gradient a (x - b)
    losses = [quadratic(2, numbers(4, -8)), quadratic(3, numbers(-1, 5))]
    worker = LossWorker(tmp_path, losses, [3, 11], size=2, lr=1e-8, momentum=momentum)
    clients, rule = Clients(worker), Scaffold()
    clients.run(rule, 2, {"w": numbers(1, -1)})
    expected = [numbers(2 * -3, 2 * 7), numbers(3 * 2, 3 * -6)]
    for client, gradient in enumerate(expected):
        torch.testing.assert_close(clients.control(rule, client)["w"], gradient, rtol=0, atol=1e-4)


def test_controls_start_at_zero_and_travel_under_names_of_their_own(tmp_path: Path) -> None:
    grid = Clients(MlpWorker(tmp_path)).grid
    record = to_record({"w": numbers(3, -4), "steps": torch.tensor(5)})
    messages = Scaffold().configure_train(1, record, ConfigRecord(), grid)
    for message in messages:
        sent = to_tensors(message.content["arrays"])
        assert sent.keys() == {"w", "steps", "control/w"}  # buffers have no control
        assert sent["control/w"].tolist() == [0, 0]


def test_num_clients_may_count_more_than_those_that_are_connected() -> None:
    # one of N = 5 clients: c = 1/5 * 10
    x, y = {"w": numbers(0)}, {"w": numbers(4), **to_namespaces({"control": {"w": numbers(10)}})}
    for given, expected in ((5, 2.0), (0, 10.0)):
        rule = Scaffold(num_clients=given, min_train_nodes=1, min_available_nodes=1)
        exchange(rule, 1, x, [(y, {NUM_EXAMPLES: 1})])
        assert rule.state.c["w"].item() == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server_lr": 0.0}, r"server_lr must be > 0, got 0\.0"),
        ({"server_lr": -1.0}, r"server_lr must be > 0, got -1\.0"),
        ({"num_clients": -1}, "num_clients must be >= 0, got -1; use 0 for as connected"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scaffold(**options)
