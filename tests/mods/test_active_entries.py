"""The mod itself: the handler sees whole models, the network active entries only."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client.mod import secagg_mod, secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import (
    LocalDpMod,
    adaptiveclipping_mod,
    arrays_size_mod,
    fixedclipping_mod,
    message_size_mod,
)
from flwr.clientapp.typing import Mod
from flwr.serverapp import strategy as flower
from torch import nn

import fedfrozen_app.mods.active as active
from fedfrozen_app import strategies as ours
from fedfrozen_app.engine.local_grid import LocalGrid
from fedfrozen_app.models.selection import Selection
from fedfrozen_app.mods import active_entries, freeze_, selection_of
from fedfrozen_app.strategies import FedFrozen, FedFrozenLatent, FreezeSchedule, UnfitClientsError
from fedfrozen_app.strategies.base import ServerRule
from fedfrozen_app.transport.arrays import to_record
from fedfrozen_app.transport.codec import layout_of_tensors
from fedfrozen_app.transport.compression import parse_codec, payload_bytes
from fedfrozen_app.transport.frozen_cache import FrozenCache
from fedfrozen_app.transport.ledger import LedgerGrid
from fedfrozen_app.transport.order import order_of, whole_shapes
from fedfrozen_app.transport.payload import (
    ORDER,
    MissingFrozenBlock,
    first_config,
    missing_reply,
    open_payload,
)
from tests.mods.project import KERNEL, Project, check_frozen, classifier, len_of, nbytes

WHOLE = classifier().state_dict()
KERNELS = len_of(Selection.build("query-key", WHOLE).split(WHOLE)[1])


def fedavg(**options: Any) -> flower.FedAvg:
    return flower.FedAvg(**{"fraction_evaluate": 0.0, **options})


def frozen_fedavg(**options: Any) -> FedFrozen:
    return FedFrozen(strategy=fedavg(), warmup_rounds=1, **options)


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active, "_said", set())


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    return [text for text in found if text.startswith("active_entries")]


# --- what the handler sees, and what travels -----------------------------------------------------
def test_an_unchanged_handler_sees_whole_models_and_frozen_rows_come_back_as_they_were(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    project, strategy = Project(tmp_path, freeze=False), frozen_fedavg()
    project.run(strategy)
    check_frozen(project, strategy)
    assert project.trained == [len_of(WHOLE)] * 9  # work for nothing
    (warning,) = warnings_of(caplog)
    assert warning.startswith("active_entries: 4 frozen entries came back changed")
    assert "call freeze_(model, selection_of(message))" in warning


def test_the_one_line_stops_the_work_and_leaves_nothing_to_warn_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    project, strategy = Project(tmp_path), frozen_fedavg()
    project.run(strategy)
    check_frozen(project, strategy)
    assert project.trained == [len_of(WHOLE)] * 3 + [len_of(WHOLE) - KERNELS] * 6
    assert warnings_of(caplog) == []


def test_a_process_that_is_new_for_every_message_warns_once_by_client(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(active, "_said", NeverAnything())
    project = Project(tmp_path, freeze=False)
    project.run(frozen_fedavg())
    assert len(warnings_of(caplog)) == 3


class NeverAnything(set[str]):
    def add(self, item: str) -> None:
        pass


class Native(Project):
    """The same training in a client that is written for the protocol, without the mod."""

    def active(self, message: Message, context: Context, call_next: Any) -> Message:
        try:
            payload = open_payload(message, FrozenCache(self.root))
        except MissingFrozenBlock as missing:
            return missing_reply(message, str(missing))
        selection = Selection.build(payload.selection, WHOLE)
        whole = selection.merge(payload.active, payload.frozen or {})
        config = ConfigRecord({k: v for k, v in first_config(message).items() if k != ORDER})
        message.content = RecordDict({"arrays": to_record(whole), "config": config})
        reply = call_next(message, context)
        half, _ = selection.split(reply.content["arrays"].to_torch_state_dict())
        reply.content["arrays"] = to_record(half)
        return reply


def test_the_mod_gives_the_model_of_a_client_written_for_the_protocol(tmp_path: Path) -> None:
    project, native = Project(tmp_path / "mod"), Native(tmp_path / "native")
    for each in (project, native):
        each.run(FedFrozen(strategy=ours.FedAvg(fraction_evaluate=0.0), warmup_rounds=1))
    for one, other in zip(project.models, native.models, strict=True):
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert project.rounds == native.rounds  # wire bytes included


def test_evaluation_gets_the_whole_model_and_costs_the_active_entries(tmp_path: Path) -> None:
    project = Project(tmp_path)
    strategy = FedFrozen(strategy=fedavg(fraction_evaluate=1.0), warmup_rounds=1)
    result = project.run(strategy)
    check_frozen(project, strategy)
    assert project.evaluated == [list(WHOLE)] * 9
    losses = result.evaluate_metrics_clientapp
    for number in (1, 2, 3):
        model = classifier()
        model.load_state_dict(project.models[number])
        with torch.no_grad():
            loss = project.step(model.eval(), torch.Generator().manual_seed(5))
        assert losses[number]["eval_loss"] == pytest.approx(float(loss), abs=1e-6)
    whole, part = nbytes(WHOLE), nbytes(WHOLE) - 4 * KERNELS
    down = [r.bytes_down for r in project.rounds[1:]]
    # round 2 brings the block with the train message, and evaluation finds it there
    assert down == [3 * 2 * whole, 3 * (whole + part), 3 * 2 * part]


def test_a_handler_that_goes_by_the_order_of_arrays_gets_the_librarys(tmp_path: Path) -> None:
    project = Project(tmp_path)
    plain = project.train

    def by_position(message: Message, context: Context) -> Message:
        arrays = message.content["arrays"].to_numpy_ndarrays()
        for given, (name, expected) in zip(arrays, WHOLE.items(), strict=True):
            assert given.shape == tuple(expected.shape), name
        return plain(message, context)

    project.train = by_position  # type: ignore[method-assign]
    project.__post_init__()
    strategy = frozen_fedavg()
    project.run(strategy)
    check_frozen(project, strategy)


class Odd(nn.Module):
    """Equal halves, a buffer, an integer, and names whose order is not the alphabet's."""

    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.a = nn.Linear(6, 3)


def odd() -> Odd:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Odd()


def odd_loss(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(7, 6, generator=generator)
    loss: torch.Tensor = model.a(model.norm(model.z(x)).relu()).square().mean()
    return loss


@pytest.mark.parametrize(
    "spec", ["z.weight[0:3]", "z.weight[0:2], z.weight[4:6]", "norm.*", "a.bias, z.*"]
)
def test_a_users_own_module_by_patterns(tmp_path: Path, spec: str) -> None:
    project = Project(tmp_path, build=odd, step=odd_loss)
    strategy = frozen_fedavg(frozen=spec)
    project.run(strategy)
    check_frozen(project, strategy, spec)


def test_three_stages_freeze_thaw_and_freeze_again(tmp_path: Path) -> None:
    stages = FreezeSchedule(((1, "query-key"), (2, "all"), (3, "value-head")))
    project = Project(tmp_path)
    strategy = FedFrozen(strategy=fedavg(), schedule=stages)
    project.run(strategy)
    assert strategy.report.dropped == 0
    start, one, two, three = project.models
    for before, after, spec in ((start, one, "query-key"), (two, three, "value-head")):
        selection = Selection.build(spec, WHOLE)
        (moved, still), (a, b) = selection.split(before), selection.split(after)
        assert all(torch.equal(b[name], still[name]) for name in still)
        assert not any(torch.equal(a[name], moved[name]) for name in moved)
    assert not torch.equal(one[KERNEL][:16], two[KERNEL][:16])
    sizes = [nbytes(Selection.build(s, WHOLE).split(WHOLE)[0]) for s in ("query-key", "value-head")]
    assert [r.bytes_up for r in project.rounds[1:]] == [
        3 * sizes[0],
        3 * nbytes(WHOLE),
        3 * sizes[1],
    ]


# --- the digest protocol -------------------------------------------------------------------------
def test_a_client_that_lost_its_cache_is_sent_the_block_in_the_same_round(tmp_path: Path) -> None:
    project, strategy = Project(tmp_path, caches=True), frozen_fedavg()
    plain = strategy.configure_train

    def lose_one(server_round: int, *args: Any) -> Any:
        if server_round == 3:
            for path in (tmp_path / "2").rglob("*.safetensors"):
                path.unlink()
        return plain(server_round, *args)

    strategy.configure_train = lose_one  # type: ignore[method-assign]
    project.run(strategy)
    assert strategy.report.dropped == 0
    assert project.seen == [list(WHOLE)] * 9  # the handler never knew
    part = nbytes(WHOLE) - 4 * KERNELS
    last = project.rounds[3]
    # the message that was answered *missing* went down too
    assert (last.bytes_down, last.bytes_up) == (3 * part + nbytes(WHOLE), 3 * part)


def test_a_late_joiner_needs_nothing_but_the_message(tmp_path: Path) -> None:
    project = Project(tmp_path, num_clients=5, caches=True)
    strategy = FedFrozen(ours.FedAvg(fraction_train=0.4, fraction_evaluate=0.0), warmup_rounds=1)
    project.run(strategy, rounds=7)
    assert strategy.report.dropped == 0
    assert project.seen == [list(WHOLE)] * 14
    frozen = strategy.state.block.tensors  # type: ignore[union-attr]
    assert torch.equal(project.models[-1][KERNEL][:16], frozen[KERNEL])
    for given in project.given.values():
        assert given[KERNEL].shape == (24, 8)


@pytest.mark.parametrize("rule", [flower.FedAvg, ours.FedAvg])
def test_a_server_without_fedfrozen_is_warned_of_once_and_with_the_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rule: Callable[..., Any]
) -> None:
    project = Project(tmp_path)
    project.run(rule(fraction_evaluate=1.0))
    (warning,) = warnings_of(caplog)
    assert "wrap it: fedfrozen_app.strategies.FedFrozen(strategy=" in warning
    assert project.seen == [list(WHOLE)] * 9


def test_a_warmup_that_never_ends_is_not_taken_for_a_server_without_fedfrozen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    project = Project(tmp_path)
    project.run(FedFrozen(strategy=fedavg(fraction_evaluate=1.0), warmup_rounds=9))
    assert warnings_of(caplog) == []


def test_messages_without_arrays_pass(tmp_path: Path) -> None:
    mod = active_entries(tmp_path)
    Project(tmp_path)  # messages need an identity of the process
    asked = Message(RecordDict({"config": ConfigRecord({"a": 1})}), 3, "query")
    context = Context(1, 3, {}, RecordDict(), {})
    assert mod(asked, context, lambda message, _: message) is asked


# --- codecs --------------------------------------------------------------------------------------
@pytest.mark.parametrize("own_node", [True, False])
@pytest.mark.parametrize("upload", ["int8", "topk:0.1", "powersgd:2"])
def test_codecs_work_behind_an_unchanged_handler(
    upload: str, own_node: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def active(self: Project, message: Message, context: Context, call_next: Any) -> Message:
        return active_entries(self.root, own_node=own_node)(message, context, call_next)

    monkeypatch.setattr(Project, "active", active)
    project = Project(tmp_path)
    strategy = frozen_fedavg(compression=upload, broadcast="int8")
    project.run(strategy)
    assert strategy.report.dropped == 0
    assert project.seen == [list(WHOLE)] * 9
    for given in project.given.values():  # dequantised, not the bytes
        assert {name: t.shape for name, t in given.items()} == {
            n: t.shape for n, t in WHOLE.items()
        }
    part, _ = Selection.build("query-key", WHOLE).split(WHOLE)
    up = [
        3 * payload_bytes(layout_of_tensors(half), parse_codec(upload))
        for half in (WHOLE, part, part)
    ]
    assert [r.bytes_up for r in project.rounds[1:]] == up
    states = project.grid._grid._states.values()  # type: ignore[attr-defined]
    kept = any(name.startswith("fedfrozen.feedback.") for state in states for name in state)
    files = list((tmp_path / "clients").rglob("feedback-*.safetensors"))
    feedback = upload != "int8"
    assert kept is (feedback and own_node)
    owners = {file.parent.name for file in files}  # one folder a client
    assert owners == ({"1", "2", "3"} if feedback and not own_node else set())


def test_error_feedback_of_a_round_enters_the_next(tmp_path: Path) -> None:
    """Top-k of one round leaves the rest, which comes in later ones."""
    project = Project(tmp_path)
    project.run(frozen_fedavg(compression="topk:0.02"), rounds=8)
    first, last = project.models[1], project.models[-1]
    active, _ = Selection.build("query-key", WHOLE).split(WHOLE)
    moved = [
        sum(int(((model[name] - WHOLE[name]).abs() > 1e-6).sum()) for name in active)
        for model in (first, last)
    ]
    # 2 % of a tensor, at least one number, are sent by each of three clients in a round
    assert moved[0] < 0.2 * len_of(active) and moved[1] > 2.5 * moved[0]


# --- rules of this package -----------------------------------------------------------------------
@pytest.mark.parametrize(
    "name", ["FedAvg", "FedProx", "FedAvgM", "FedAdam", "FedYogi", "FedAdagrad"]
)
def test_three_rounds_under_a_rule_of_this_package(name: str, tmp_path: Path) -> None:
    project = Project(tmp_path)
    rule: ServerRule[Any, Any] = getattr(ours, name)(fraction_evaluate=0.0)
    strategy = FedFrozen(strategy=rule, warmup_rounds=1)
    project.run(strategy)
    check_frozen(project, strategy)


def test_fednova_needs_one_metric_of_the_handler(tmp_path: Path) -> None:
    project = Project(tmp_path)
    plain = project.train

    def train(message: Message, context: Context) -> Message:
        reply = plain(message, context)
        reply.content["metrics"]["steps"] = 2
        return reply

    project.train = train  # type: ignore[method-assign]
    project.__post_init__()
    strategy = FedFrozen(strategy=ours.FedNova(fraction_evaluate=0.0), warmup_rounds=1)
    project.run(strategy)
    check_frozen(project, strategy)


def test_scaffold_ends_in_the_first_round_and_says_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(UnfitClientsError, match=r"round 1: SCAFFOLD .*ClientRules in the handler"):
        Project(tmp_path).run(FedFrozen(strategy=ours.Scaffold(fraction_evaluate=0.0)))


def test_latents_end_in_their_first_round_and_say_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(UnfitClientsError, match=r"round 1: FedFrozenLatent .*LatentTraining"):
        Project(tmp_path).run(FedFrozenLatent(ours.FedAvg(fraction_evaluate=0.0)))


PLAIN = {  # what a handler of plain models cannot answer, and what the error says to write
    "Scaffold": (
        lambda: FedFrozen(strategy=ours.Scaffold(fraction_evaluate=0.0)),
        "clients of Scaffold answer with controls: use .*ClientRules in the handler",
    ),
    "FedNova": (
        lambda: FedFrozen(strategy=ours.FedNova(fraction_evaluate=0.0)),
        "clients of FedNova answer with the metric 'steps': .*client 0: metric 'steps' is missing",
    ),
    "int8": (
        lambda: FedFrozen(strategy=fedavg(), compression="int8"),
        r"answer with encoded arrays: .* alone ClientApp\(mods=\[active_entries\(\)\]\) will do",
    ),
    "int8 of a rule": (
        lambda: FedFrozen(compression="int8", fraction_evaluate=0.0),
        r"clients of FedAvg answer with encoded arrays: .* ClientApp\(mods=\[active_entries",
    ),
    "latents": (
        lambda: FedFrozenLatent(ours.FedAvg(fraction_evaluate=0.0)),
        "clients train a latent: use .*LatentTraining in the handler",
    ),
    "no warm-up": (
        lambda: FedFrozen(strategy=fedavg(), warmup_rounds=0),
        r"clients need ClientApp\(mods=\[active_entries\(\)\]\)",
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_handlers_end_the_first_round_of_what_needs_more_and_are_told_what(
    name: str, tmp_path: Path
) -> None:
    build, remedy = PLAIN[name]
    project = Project(tmp_path, freeze=False)
    project.app = ClientApp()
    project.app.train()(project.train)
    project.grid = LedgerGrid(LocalGrid(project.app, 3))
    with pytest.raises(UnfitClientsError, match=f"round 1: .*{remedy}"):
        project.run(build(), 5)
    assert len(project.models) == 1


@pytest.mark.parametrize("rule", [flower.FedAvg, ours.FedAvg])
def test_clients_without_the_mod_end_the_first_frozen_round(
    tmp_path: Path, rule: Callable[..., Any]
) -> None:
    project = Project(tmp_path, freeze=False)
    project.app = ClientApp()
    project.app.train()(project.train)
    project.grid = LedgerGrid(LocalGrid(project.app, 3))
    strategy = FedFrozen(strategy=rule(fraction_evaluate=0.0), warmup_rounds=2)
    expected = r"round 3: no reply could be used.*clients need ClientApp\(mods=\[active_entries"
    with pytest.raises(UnfitClientsError, match=expected):
        project.run(strategy, 5)
    assert len(project.models) == 3  # the start and both rounds of the warm-up were handed over


def test_a_round_without_replies_later_on_ends_nothing(tmp_path: Path) -> None:
    project, fails = Project(tmp_path), {3}
    rounds = iter(sorted([1, 2, 3, 4] * 3))
    trains = project.train

    def train(message: Message, context: Context) -> Message:
        if next(rounds) in fails:
            raise RuntimeError("no power")
        return trains(message, context)

    project.app = ClientApp(mods=[project.active])
    project.app.train()(train)
    project.grid = LedgerGrid(LocalGrid(project.app, 3))
    strategy = FedFrozen(strategy=ours.FedAvg(fraction_evaluate=0.0), warmup_rounds=1)
    project.run(strategy, 4)
    assert len(project.models) == 5 and strategy.report.clients == 3
    assert all(torch.equal(t, project.models[3][name]) for name, t in project.models[2].items())


def test_a_value_l2_that_nobody_adds_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Project(tmp_path).run(frozen_fedavg(value_l2=0.25))
    (warning,) = warnings_of(caplog)
    assert "value_l2=0.25" in warning and "ValueL2" in warning


# --- mods of Flower ------------------------------------------------------------------------------
def test_three_rounds_with_local_differential_privacy(tmp_path: Path) -> None:
    mod = LocalDpMod(clipping_norm=0.5, sensitivity=0.01, epsilon=5.0, delta=0.1)
    project, strategy = Project(tmp_path, mods=[mod]), frozen_fedavg()
    project.run(strategy)
    check_frozen(project, strategy)
    quiet = Project(tmp_path / "quiet")
    quiet.run(frozen_fedavg())
    moved = [project.models[-1][name] - quiet.models[-1][name] for name in project.models[-1]]
    assert max(float(t.abs().max()) for t in moved) > 1e-3  # the mod did what it does


@pytest.mark.parametrize("outer", [True, False])
def test_three_rounds_with_mods_that_count_bytes(
    tmp_path: Path, outer: bool, caplog: pytest.LogCaptureFixture
) -> None:
    mods: list[Mod] = [message_size_mod, arrays_size_mod]
    project = Project(tmp_path, mods=[] if outer else mods, outer=mods if outer else [])
    strategy = frozen_fedavg()
    caplog.set_level(logging.INFO, "flwr")
    project.run(strategy)
    check_frozen(project, strategy)
    said = [r.getMessage() for r in caplog.records if "Total array elements sent" in r.getMessage()]
    assert len(said) == 9


def test_client_side_clipping_bounds_the_active_update(tmp_path: Path) -> None:
    """Clipping to 0.01 with no noise: the mean of updates is no longer than that."""
    inner = fedavg()
    strategy = FedFrozen(
        strategy=flower.DifferentialPrivacyClientSideFixedClipping(inner, 0.0, 0.01, 3),
        warmup_rounds=1,
    )
    project = Project(tmp_path, mods=[fixedclipping_mod])
    project.run(strategy)
    check_frozen(project, strategy)
    for before, after in zip(project.models[1:-1], project.models[2:], strict=True):
        step = sum(float((after[name] - before[name]).square().sum()) for name in after) ** 0.5
        assert 0.001 < step <= 0.01 + 1e-5


OUTER = {
    "fixedclipping_mod": (
        fixedclipping_mod,
        lambda: flower.DifferentialPrivacyClientSideFixedClipping(fedavg(), 0.0, 0.01, 3),
    ),
    "adaptiveclipping_mod": (
        adaptiveclipping_mod,
        lambda: flower.DifferentialPrivacyClientSideAdaptiveClipping(fedavg(), 0.0, 3),
    ),
    "LocalDpMod": (LocalDpMod(0.5, 0.01, 5.0, 0.1), fedavg),
}


@pytest.mark.parametrize("name", OUTER)
def test_a_mod_on_arrays_before_active_entries_is_told_where_it_belongs_before_any_training(
    name: str, tmp_path: Path
) -> None:
    mod, rule = OUTER[name]
    project = Project(tmp_path, outer=[mod])
    expected = rf"round 1: {name} expects .*mods=\[active_entries\(\), fixedclipping_mod\]"
    with pytest.raises(UnfitClientsError, match=expected):
        project.run(FedFrozen(strategy=rule(), warmup_rounds=2))
    assert project.seen == []


def test_one_client_with_its_mods_in_a_wrong_order_is_dropped_with_the_right_one(
    tmp_path: Path,
) -> None:
    project, rule = Project(tmp_path), OUTER["fixedclipping_mod"][1]()
    right, wrong = project.app, ClientApp(mods=[fixedclipping_mod, project.active])
    wrong.train()(project.train)
    project.mods, project.app = [fixedclipping_mod], ClientApp()
    project.__post_init__()
    right = project.app

    def either(message: Message, context: Context) -> Message:
        return (wrong if context.node_id == 2 else right)(message, context)

    project.grid = LedgerGrid(LocalGrid(either, 3))  # type: ignore[arg-type]
    strategy = FedFrozen(strategy=rule, warmup_rounds=1)
    project.run(strategy, rounds=1)
    (refused,) = strategy.report.refused
    assert "ClientApp(mods=[active_entries(), fixedclipping_mod])" in refused


def test_a_clipping_mod_without_its_strategy_ends_the_first_round(tmp_path: Path) -> None:
    with pytest.raises(UnfitClientsError, match="round 1: fixedclipping_mod requires the key"):
        Project(tmp_path, mods=[fixedclipping_mod]).run(frozen_fedavg())


@pytest.mark.parametrize("mod", [secagg_mod, secaggplus_mod])
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("rule", [fedavg, lambda: ours.FedAvg(fraction_evaluate=0.0)])
def test_secure_aggregation_ends_the_first_round_and_says_why(
    mod: Mod, outer: bool, rule: Any, tmp_path: Path
) -> None:
    project = Project(tmp_path, outer=[mod] if outer else [], mods=[] if outer else [mod])
    with pytest.raises(UnfitClientsError, match=r"round 1: secure aggregation .*legacy workflow"):
        project.run(FedFrozen(strategy=rule(), warmup_rounds=1))
    assert project.seen == []


# --- errors --------------------------------------------------------------------------------------
def test_a_reply_that_is_not_the_whole_state_dict_names_the_entry(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    project = Project(tmp_path)

    def trains_head(message: Message, context: Context) -> Message:
        arrays = message.content["arrays"].to_torch_state_dict()
        arrays.pop("head.bias")
        record = RecordDict({"arrays": ArrayRecord(arrays), "m": MetricRecord({"num-examples": 1})})
        return Message(record, reply_to=message)

    project.train = trains_head  # type: ignore[method-assign]
    project.__post_init__()
    strategy = FedFrozen(strategy=fedavg(), warmup_rounds=0)
    with pytest.raises(UnfitClientsError, match=r"round 1: .*entry 'head\.bias' is missing"):
        project.run(strategy, rounds=1)


def test_a_mod_that_was_not_called_ends_the_first_round_and_says_so(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.active = active_entries  # type: ignore[assignment]
    project.__post_init__()
    expected = r"^round 1: TypeError: .*call it: active_entries\(\), so ClientApp\(mods="
    with pytest.raises(UnfitClientsError, match=expected) as error:
        project.run(frozen_fedavg())
    assert "\n" not in str(error.value) and project.seen == []


def test_selection_of_a_message_that_no_mod_opened_says_which_one_to_add(tmp_path: Path) -> None:
    project = Project(tmp_path)

    def bare(message: Message, context: Context, call_next: Any) -> Message:
        return call_next(message, context)

    project.active = bare  # type: ignore[method-assign]
    project.loaded = lambda message: classifier()  # type: ignore[method-assign]
    project.__post_init__()
    strategy = FedFrozen(strategy=fedavg(), warmup_rounds=2)
    expected = r"round 1: .*no active_entries.* make it ClientApp\(mods=\[active_entries\(\)\]\)"
    with pytest.raises(UnfitClientsError, match=expected):
        project.run(strategy)


def test_a_selection_that_matches_nothing_names_the_nearest_parameters(tmp_path: Path) -> None:
    nearest = "closest are .*'encoder.layers.0.self_attn.in_proj_weight'"
    with pytest.raises(ValueError, match=nearest):
        Project(tmp_path).run(frozen_fedavg(frozen="encoder.layers.0.attn.in_proj_weight"))


def test_freeze_is_the_one_of_the_models() -> None:
    model = classifier()
    freeze_(model, Selection.build("query-key", model.state_dict()))
    assert sum(p.numel() for p in model.parameters()) == len_of(WHOLE) - KERNELS
    assert selection_of.__module__ == "fedfrozen_app.mods.active"


# --- the order of entries ------------------------------------------------------------------------
@pytest.mark.parametrize("spec", ["query-key", "value-head", "head.bias", "*norm*"])
def test_the_order_says_names_and_shapes_of_the_whole(spec: str) -> None:
    selection = Selection.build(spec, WHOLE)
    active_half, frozen_half = selection.split(WHOLE)
    shuffled = dict(reversed(frozen_half.items()))  # a file does not keep the order
    shapes = whole_shapes(order_of(selection), active_half, shuffled)
    assert [(n, t.shape) for n, t in shapes.items()] == [(n, t.shape) for n, t in WHOLE.items()]


@pytest.mark.parametrize(
    "order, message",
    [([0, 3], "2 entries does not fit halves with 3"), ([0, 3, 7], "is in 1 halves")],
)
def test_an_order_of_another_model_is_refused(order: list[int], message: str) -> None:
    active_half, frozen_half = {"a": torch.ones(2), "b": torch.ones(3)}, {"c": torch.ones(5)}
    with pytest.raises(ValueError, match=message):
        whole_shapes(order, active_half, frozen_half)
