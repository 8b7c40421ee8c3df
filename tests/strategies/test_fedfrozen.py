import random
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Message
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, Strategy
from flwr.serverapp.strategy import FedAdam as FlowerFedAdam
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import FedAvgM as FlowerFedAvgM

from fedfrozen_app.strategies import FedAvg, FedFrozen, FreezeSchedule
from fedfrozen_app.strategies.fedfrozen import weight_key
from fedfrozen_app.transport.arrays import to_record, to_tensors
from tests.strategies.federation import (
    ACTIVE_BYTES,
    COUNTER,
    FROZEN_BYTES,
    HEAD,
    QKV,
    WHOLE_BYTES,
    WIDTH,
    Federation,
    initial,
    without_empty_block,
)

KERNEL = slice(0, 2 * WIDTH)  # query and key rows of the fused weight
STOCK = [FlowerFedAvg, FlowerFedAvgM, FlowerFedAdam]


def stock(kind: type[Strategy]) -> Strategy:
    if kind is FlowerFedAvgM:
        # server_momentum needs the initial arrays, which it takes from the first round
        return FlowerFedAvgM(server_momentum=0.9)
    return kind()  # type: ignore[call-arg]


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[k], other[k]) for k in one)


def nan_in_head(server_round: int, client: int, arrays: dict[str, torch.Tensor]) -> None:
    if client == 1:
        arrays[HEAD][2, 3] = float("nan")


# --- laws -------------------------------------------------------------------------------
@pytest.mark.parametrize("warmup_rounds", [4, 5])
def test_a_warmup_as_long_as_the_run_equals_the_inner_strategy(
    tmp_path: Path, warmup_rounds: int
) -> None:
    plain, sent_plain = Federation(tmp_path).run(FedAvg(seed=2, fraction_train=0.7), 4)
    inner = FedAvg(seed=2, fraction_train=0.7)
    ours, sent = Federation(tmp_path).run(FedFrozen(inner, warmup_rounds=warmup_rounds), 4)
    assert equal(ours, plain)
    assert [without_empty_block(traffic, 2) for traffic in sent] == sent_plain


@pytest.mark.parametrize("kind", STOCK)
def test_a_warmup_as_long_as_the_run_equals_a_stock_strategy(
    tmp_path: Path, kind: type[Strategy]
) -> None:
    random.seed(5)  # stock strategies shuffle the clients by the global generator
    plain, _ = Federation(tmp_path).run(stock(kind), 3)
    random.seed(5)
    ours, _ = Federation(tmp_path).run(FedFrozen(stock(kind), warmup_rounds=3), 3)
    assert equal(ours, plain)


def test_without_a_warmup_no_query_or_key_row_ever_moves(tmp_path: Path) -> None:
    after, _ = Federation(tmp_path).run(FedFrozen(warmup_rounds=0), 3)
    before = initial()
    assert torch.equal(after[QKV][KERNEL], before[QKV][KERNEL])
    moved = 3 * 1.4 / 6
    torch.testing.assert_close(after[QKV][2 * WIDTH :], before[QKV][2 * WIDTH :] + moved)
    torch.testing.assert_close(after[HEAD], before[HEAD] + moved)


@pytest.mark.parametrize("kind", [FedAvg, *STOCK])
def test_after_the_freeze_frozen_rows_keep_their_bits_on_server_and_clients(
    tmp_path: Path, kind: type[Strategy]
) -> None:
    federation = Federation(tmp_path)
    strategy = FedFrozen(stock(kind), warmup_rounds=2)
    at_freeze, _ = federation.run(strategy, 2)
    kernel = at_freeze[QKV][KERNEL].float()  # FedAdam returns fp64, clients hold fp32
    assert not torch.equal(kernel, initial()[QKV][KERNEL])
    after, _ = federation.run(strategy, 3, to_record(at_freeze), first=3)
    assert torch.equal(after[QKV][KERNEL], kernel)
    assert not torch.equal(after[QKV][2 * WIDTH :], at_freeze[QKV][2 * WIDTH :])
    for whole in federation.whole.values():
        assert torch.equal(whole[QKV][KERNEL], kernel)


@pytest.mark.parametrize("kind", STOCK)
def test_a_stock_strategy_moves_the_active_entries_as_it_would_alone(
    tmp_path: Path, kind: type[Strategy]
) -> None:
    # element-wise rules: what happens to one entry does not depend on the others
    alone, _ = Federation(tmp_path).run(stock(kind), 3)
    ours, _ = Federation(tmp_path).run(FedFrozen(stock(kind), warmup_rounds=1), 3)
    torch.testing.assert_close(ours[HEAD], alone[HEAD].float(), rtol=1e-5, atol=1e-6)


def test_a_stock_strategy_that_returns_fp64_keeps_clients_of_fp32_and_their_bytes(
    tmp_path: Path,
) -> None:
    def single(server_round: int, client: int, arrays: dict[str, torch.Tensor]) -> object:
        return {name: tensor.float() for name, tensor in arrays.items()}

    strategy = FedFrozen(FlowerFedAdam(), warmup_rounds=2)
    after, sent = Federation(tmp_path, tamper=single).run(strategy, 4)  # type: ignore[arg-type]
    assert strategy.report.dropped == 0
    assert [traffic.bytes_up for traffic in sent[2:]] == [3 * ACTIVE_BYTES] * 2
    assert sent[3].bytes_down == 3 * ACTIVE_BYTES
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}


@pytest.mark.parametrize("kind", STOCK)
def test_a_stock_strategy_with_counters_keeps_all_replies_before_and_after_the_freeze(
    tmp_path: Path, kind: type[Strategy]
) -> None:
    # stock strategies average integers into fp64; clients hold and reply int64
    federation = Federation(tmp_path, counter=True)
    start = {**initial(), COUNTER: torch.tensor(5)}
    strategy = FedFrozen(stock(kind), warmup_rounds=2)
    arrays = to_record(start)
    for server_round in (1, 2, 3, 4):
        arrays, sent = federation.round(strategy, server_round, arrays)
        assert strategy.report.dropped == 0
        both = (sent.bytes_down, sent.bytes_up)
        block = 3 * FROZEN_BYTES if server_round == 3 else 0
        each = 3 * (8 + (WHOLE_BYTES if server_round < 3 else ACTIVE_BYTES))
        assert both == (each + block, each)


def test_a_second_start_with_the_same_object_is_a_run_of_its_own(tmp_path: Path) -> None:
    def run(strategy: FedFrozen, seed: int, rounds: int) -> dict[str, np.ndarray]:
        federation = Federation(tmp_path / str(seed))
        start = to_record(initial(seed))
        result = strategy.start(federation.grid, start, num_rounds=rounds)
        return {name: array.numpy() for name, array in result.arrays.items()}

    used = FedFrozen(warmup_ratio=0.5, fraction_evaluate=0.0)
    run(used, 3, 2)
    again = run(used, 5, 6)
    fresh = run(FedFrozen(warmup_ratio=0.5, fraction_evaluate=0.0), 5, 6)
    assert used.schedule.stages == ((1, "all"), (4, "query-key"))
    assert all(np.array_equal(again[name], fresh[name]) for name in fresh)
    frozen_at_once = FedFrozen(warmup_rounds=0, fraction_evaluate=0.0)
    run(frozen_at_once, 3, 1)
    kernel = run(frozen_at_once, 5, 1)[QKV][KERNEL]
    assert np.array_equal(kernel, initial(5)[QKV][KERNEL].numpy())


def test_the_weight_key_of_a_wrapped_wrapper_counts(tmp_path: Path) -> None:
    inner = FlowerFedAvg(weighted_by_key="n")
    wrapped = DifferentialPrivacyServerSideFixedClipping(inner, 0.0, 1e6, 3)
    assert weight_key(wrapped) == weight_key(inner) == "n"
    assert weight_key(FlowerFedAvg()) == weight_key(object()) == "num-examples"


def test_a_schedule_may_thaw_again(tmp_path: Path) -> None:
    schedule = FreezeSchedule(((1, "query-key"), (2, "all"), (3, "head")))
    federation = Federation(tmp_path)
    strategy = FedFrozen(schedule=schedule)
    first, _ = federation.run(strategy, 1)
    assert torch.equal(first[QKV][KERNEL], initial()[QKV][KERNEL])
    second, _ = federation.run(strategy, 1, to_record(first), first=2)
    assert not torch.equal(second[QKV][KERNEL], first[QKV][KERNEL])
    third, _ = federation.run(strategy, 1, to_record(second), first=3)
    assert torch.equal(third[QKV], second[QKV])
    assert not torch.equal(third[HEAD], second[HEAD])


# --- bytes ------------------------------------------------------------------------------
def test_only_active_entries_travel_after_the_freeze(tmp_path: Path) -> None:
    _, sent = Federation(tmp_path).run(FedFrozen(warmup_rounds=2), 5)
    whole, active = 3 * WHOLE_BYTES, 3 * ACTIVE_BYTES
    assert [traffic.bytes_up for traffic in sent] == [whole, whole, active, active, active]
    # the block is broadcast once, with the first frozen round
    assert [traffic.bytes_down for traffic in sent] == [whole, whole, whole, active, active]
    assert sent[3].wire_bytes_up < sent[1].wire_bytes_up


def test_replies_carry_one_array_record_in_the_library_order(tmp_path: Path) -> None:
    shapes = []

    def look(server_round: int, client: int, arrays: dict[str, torch.Tensor]) -> None:
        shapes.append({name: tuple(tensor.shape) for name, tensor in arrays.items()})

    after, _ = Federation(tmp_path, tamper=look).run(FedFrozen(warmup_rounds=0), 1)
    assert shapes[0][QKV] == (WIDTH, WIDTH)
    assert list(after) == list(initial())


# --- the frozen-block protocol ----------------------------------------------------------
def test_a_client_first_sampled_after_the_freeze_gets_the_block_then(tmp_path: Path) -> None:
    federation = Federation(tmp_path, 7)
    strategy = FedFrozen(FedAvg(fraction_train=0.3, seed=4), warmup_rounds=1)
    arrays, known = to_record(initial()), set()
    late = 0
    for server_round in range(1, 9):
        arrays, sent = federation.round(strategy, server_round, arrays)
        cohort = {client for number, client, _ in federation.seen if number == server_round}
        new = cohort - known if server_round > 1 else set()
        known |= cohort if server_round > 1 else set()
        expected = len(cohort) * (WHOLE_BYTES if server_round == 1 else ACTIVE_BYTES)
        assert sent.bytes_down == expected + len(new) * FROZEN_BYTES
        assert strategy.report.dropped == 0
        late += len(new) if server_round > 2 else 0
    assert late >= 2
    assert "missing" not in {what for _, _, what in federation.seen}


def test_a_deleted_cache_is_filled_again_in_the_same_round(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    strategy = FedFrozen(warmup_rounds=1)
    after, _ = federation.run(strategy, 2)
    for path in (tmp_path / "1").iterdir():
        path.unlink()
    arrays, sent = federation.round(strategy, 3, to_record(after))
    assert [entry for entry in federation.seen if entry[0] == 3] == [
        (3, 0, "query-key"),
        (3, 1, "missing"),
        (3, 1, "query-key"),
        (3, 2, "query-key"),
    ]
    assert sent.bytes_down == 4 * ACTIVE_BYTES + FROZEN_BYTES
    assert strategy.report.dropped == 0
    unharmed, _ = Federation(tmp_path / "other").run(FedFrozen(warmup_rounds=1), 3)
    assert equal(to_tensors(arrays), unharmed)


def test_a_corrupted_cache_file_is_noticed_and_fetched_again(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    strategy = FedFrozen(warmup_rounds=1)
    after, _ = federation.run(strategy, 2)
    (path,) = (tmp_path / "2").iterdir()
    content = bytearray(path.read_bytes())
    content[-1] ^= 255
    path.write_bytes(bytes(content))
    federation.round(strategy, 3, to_record(after))
    assert (3, 2, "missing") in federation.seen
    assert torch.equal(federation.whole[2][QKV][KERNEL], after[QKV][KERNEL])


def test_two_runs_with_different_kernels_share_one_cache(tmp_path: Path) -> None:
    one, other = (Federation(tmp_path, shared_cache=True) for _ in range(2))
    strategies = [FedFrozen(warmup_rounds=0) for _ in range(2)]
    models = [to_record(initial(seed)) for seed in (3, 5)]
    for server_round in (1, 2, 3):
        for number, federation in enumerate((one, other)):
            models[number], _ = federation.round(strategies[number], server_round, models[number])
    for number, (federation, seed) in enumerate(zip((one, other), (3, 5), strict=True)):
        kernel = initial(seed)[QKV][KERNEL]
        assert torch.equal(to_tensors(models[number])[QKV][KERNEL], kernel)
        assert all(torch.equal(whole[QKV][KERNEL], kernel) for whole in federation.whole.values())
    assert len(list((tmp_path / "all").iterdir())) == 2


def test_a_client_that_never_takes_the_block_is_dropped(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    strategy = FedFrozen(warmup_rounds=0)
    arrays, _ = federation.round(strategy, 1, to_record(initial()))
    cache = federation.cache

    class Lost(type(cache(0))):  # type: ignore[misc]
        def get(self, key: str) -> None:
            return None

    # client 0 has lost its cache, and the block it is sent is taken out on the way
    federation.cache = lambda client: Lost(tmp_path) if client == 0 else cache(client)  # type: ignore[method-assign]
    send = federation.grid.send_and_receive

    def without_block(messages: list[Message], **options: object) -> object:
        for message in messages:
            message.content.pop("frozen", None)
        return send(messages, **options)  # type: ignore[arg-type]

    federation.grid.send_and_receive = without_block  # type: ignore[method-assign, assignment]
    federation.round(strategy, 2, arrays)
    assert strategy.report.dropped == 1
    assert strategy.report.refused == ["client 0: lacks the frozen block"]


def test_state_restored_in_mid_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole, sent = Federation(tmp_path / "a").run(FedFrozen(warmup_rounds=1), 4)
    federation = Federation(tmp_path / "b")
    first = FedFrozen(warmup_rounds=1)
    half, _ = federation.run(first, 2)
    second = FedFrozen(warmup_rounds=1)
    second.load_state_dict(first.state_dict())
    rest, sent_rest = federation.run(second, 2, to_record(half), first=3)
    assert equal(rest, whole)
    assert sent_rest == sent[2:]  # the block is not sent again


# --- replies that must not enter the model ------------------------------------------------
def raises(server_round: int, client: int, arrays: dict[str, torch.Tensor]) -> None:
    if client == 1:
        raise RuntimeError("no power")


def missing_entry(server_round: int, client: int, arrays: dict[str, torch.Tensor]) -> None:
    if client == 1:
        del arrays["head.bias"]


def extra_entry(server_round: int, client: int, arrays: dict[str, torch.Tensor]) -> None:
    if client == 1:
        arrays["backdoor"] = torch.zeros(3)


def whole_fused_weight(server_round: int, client: int, arrays: dict[str, torch.Tensor]) -> None:
    if client == 1:
        arrays[QKV] = torch.zeros(3 * WIDTH + 1, WIDTH)


def integers(server_round: int, client: int, arrays: dict[str, torch.Tensor]) -> None:
    if client == 1:
        arrays[HEAD] = arrays[HEAD].long()


def infinite(server_round: int, client: int, arrays: dict[str, torch.Tensor]) -> None:
    if client == 1:
        arrays["norm.weight"][0] = float("-inf")


BAD = {
    raises: "RuntimeError: no power",
    nan_in_head: "head.weight has non-finite values",
    infinite: "norm.weight has non-finite values",
    missing_entry: "1 entries are missing, first 'head.bias'",
    extra_entry: "1 unexpected entries, first 'backdoor'",
    whole_fused_weight: "blocks.0.attn.qkv.weight is float32[22, 7], expected float",
    integers: "head.weight is int64[5, 7], expected float",
}


@pytest.mark.parametrize("warmup_rounds", [0, 1])
@pytest.mark.parametrize("kind", [FedAvg, FlowerFedAvg])
@pytest.mark.parametrize("tamper", BAD, ids=lambda tamper: tamper.__name__)
def test_a_bad_reply_is_left_out_counted_and_named(
    tmp_path: Path, tamper: object, kind: type[Strategy], warmup_rounds: int
) -> None:
    strategy = FedFrozen(kind(), warmup_rounds=warmup_rounds)  # type: ignore[call-arg]
    after, _ = Federation(tmp_path, tamper=tamper).run(strategy, 1)  # type: ignore[arg-type]
    report = strategy.report
    assert (report.cohort, report.clients, report.dropped) == (3, 2, 1)
    assert len(report.refused) == 1
    assert report.refused[0].startswith("client ") and BAD[tamper] in report.refused[0]  # type: ignore[index]
    # clients 0 and 2 alone: (1 * .1 + 3 * .3) / 4
    torch.testing.assert_close(after[HEAD], initial()[HEAD] + 0.25)


def test_when_all_replies_are_bad_the_model_stays(tmp_path: Path) -> None:
    def all_raise(server_round: int, client: int, arrays: object) -> None:
        if server_round == 2:
            raise RuntimeError("no power")

    strategy, federation = FedFrozen(warmup_rounds=0), Federation(tmp_path, tamper=all_raise)
    first, _ = federation.run(strategy, 1)
    after, _ = federation.run(strategy, 1, to_record(first), first=2)
    assert equal(after, first)
    assert strategy.report.dropped == 3


# --- arguments --------------------------------------------------------------------------
def test_start_turns_a_ratio_into_rounds_and_runs_like_flower(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    strategy = FedFrozen(warmup_ratio=0.5, fraction_evaluate=0.0)
    result = strategy.start(federation.grid, to_record(initial()), num_rounds=4)
    assert strategy.schedule.stages == ((1, "all"), (3, "query-key"))
    selections = {number: what for number, _, what in federation.seen}
    assert selections == {1: "all", 2: "all", 3: "query-key", 4: "query-key"}
    by_hand, _ = Federation(tmp_path / "b").run(FedFrozen(warmup_rounds=2), 4)
    assert all(np.array_equal(result.arrays[k].numpy(), v.numpy()) for k, v in by_hand.items())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"warmup_rounds": 1, "warmup_ratio": 0.5}, "one of warmup_rounds, warmup_ratio"),
        ({"warmup_rounds": -1}, "warmup_rounds must be >= 0, got -1"),
        ({"warmup_ratio": 1.5}, r"warmup_ratio must be in \[0, 1\], got 1.5"),
        ({"value_l2": -0.1}, "value_l2 must be >= 0, got -0.1"),
        ({"strategy": FedAvg(), "fraction_train": 0.5}, "fraction_train.*wrapped FedAvg"),
    ],
)
def test_arguments_that_contradict_each_other(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FedFrozen(**arguments)  # type: ignore[arg-type]


def test_a_ratio_without_the_number_of_rounds_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs the number of rounds"):
        Federation(tmp_path).run(FedFrozen(warmup_ratio=0.5), 1)


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (FreezeSchedule.warmup(5, "query-key"), "nothing; from round 6: query-key"),
        (FreezeSchedule.warmup(0, "query-key"), "query-key"),
        (FreezeSchedule.warmup(1, "head"), "nothing; from round 2: all but the head"),
        (
            FreezeSchedule(((1, "value-head"), (3, "all"), (4, "a.*, b.*"))),
            "all but value rows and head; from round 3: nothing; from round 4: a.*, b.*",
        ),
        (
            FreezeSchedule.warmup(2, "query-key", always="head.*"),
            "head.*; from round 3: query-key, head.*",
        ),
    ],
)
def test_the_log_says_under_frozen_what_is_frozen(
    schedule: FreezeSchedule, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "flwr")
    FedFrozen(schedule=schedule).summary()
    (line,) = [text for r in caplog.records if "Frozen" in (text := r.getMessage())]
    assert line == f"\t├──> Frozen: {said}"


def test_the_log_of_a_ratio_needs_no_number_of_rounds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "flwr")
    FedFrozen(warmup_ratio=0.5).summary()
    assert "Frozen: nothing; after the warm-up: query-key" in caplog.text


@pytest.mark.parametrize(
    "stages", [(), ((2, "all"),), ((1, "all"), (1, "head")), ((1, "all"), (3, "head"), (2, "all"))]
)
def test_the_rounds_of_a_schedule_rise_from_one(stages: tuple[tuple[int, str], ...]) -> None:
    with pytest.raises(ValueError, match="must rise from 1"):
        FreezeSchedule(stages)


def test_a_frozen_name_that_matches_nothing_fails_before_any_client_is_asked(
    tmp_path: Path,
) -> None:
    federation = Federation(tmp_path)
    strategy = FedFrozen(warmup_rounds=2, frozen="blocks.0.attn.qvk.weight", fraction_evaluate=0.0)
    with pytest.raises(ValueError, match="qkv"):
        strategy.start(federation.grid, to_record(initial()), num_rounds=4)
    assert federation.seen == []
