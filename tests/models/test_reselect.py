"""State by parameter name follows the freeze: what froze is gone, what came is zero."""

import itertools

import pytest
import torch

from fedfrozen_app.models.reselect import reselect
from fedfrozen_app.models.selection import Selection

QKV, BIAS, GPT2, HEAD, NORM = (
    "blocks.0.attn.qkv.weight",
    "blocks.0.attn.qkv.bias",
    "h.0.attn.c_attn.weight",
    "head.weight",
    "norm.weight",
)
SHAPES: dict[str, tuple[int, ...]] = {
    NORM: (7,),
    QKV: (21, 7),
    BIAS: (21,),
    GPT2: (5, 15),
    HEAD: (11, 7),
}
ENTRIES = {name: torch.empty(shape, device="meta") for name, shape in SHAPES.items()}
TWO_RANGES = f"{QKV}[key]"  # query and value rows train
MANY_RANGES = f"{HEAD}[1:2] {HEAD}[4:7] {HEAD}[9:10] {NORM}"
COLUMNS = f"{GPT2}[0:3] {GPT2}[8:11]"
SPECS = ("all", "query-key", "value-head", "head", TWO_RANGES, MANY_RANGES, COLUMNS)


def select(spec: str) -> Selection:
    return Selection.build(spec, ENTRIES)


def whole(seed: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def trains(spec: str) -> dict[str, torch.Tensor]:
    """What trains as 0 and 1, from numbers that the language is defined by."""
    ones = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    if spec == "query-key":
        ones[QKV][:14], ones[BIAS][:14], ones[GPT2][:, :10] = 0, 0, 0
    elif spec in ("value-head", "head"):
        kept = {name: tensor.clone() for name, tensor in ones.items()}
        ones = {name: tensor * (name == HEAD) for name, tensor in ones.items()}
        if spec == "value-head":
            ones[QKV][14:], ones[BIAS][14:] = kept[QKV][14:], kept[BIAS][14:]
            ones[GPT2][:, 10:] = kept[GPT2][:, 10:]
    elif spec == TWO_RANGES:
        ones[QKV][7:14] = 0
    elif spec == MANY_RANGES:
        ones[HEAD][[1, 4, 5, 6, 9]], ones[NORM] = 0, torch.zeros(7)
    elif spec == COLUMNS:
        ones[GPT2][:, [0, 1, 2, 8, 9, 10]] = 0
    return ones


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_freezing_query_and_key_leaves_the_value_rows_of_a_momentum() -> None:
    tensors = whole()
    after = reselect(tensors, "all", select("query-key"))
    assert {name: tuple(tensor.shape) for name, tensor in after.items()} == {
        NORM: (7,),
        QKV: (7, 7),
        BIAS: (7,),
        GPT2: (5, 5),
        HEAD: (11, 7),
    }
    assert torch.equal(after[QKV], tensors[QKV][14:])
    assert torch.equal(after[BIAS], tensors[BIAS][14:])
    assert torch.equal(after[GPT2], tensors[GPT2][:, 10:])
    assert torch.equal(after[HEAD], tensors[HEAD])


def test_thawing_brings_zero_rows_around_those_that_trained() -> None:
    tensors = {QKV: torch.full((7, 7), 3.0), GPT2: torch.full((5, 5), -2.0)}
    after = reselect(tensors, "query-key", select("all"))
    assert list(after) == [QKV, GPT2]  # missing entries stay missing, which stands for zero
    assert after[QKV].shape == (21, 7) and after[GPT2].shape == (5, 15)
    assert (after[QKV][:14] == 0).all() and (after[QKV][14:] == 3).all()
    assert (after[GPT2][:, :10] == 0).all() and (after[GPT2][:, 10:] == -2).all()


def test_several_ranges_go_to_other_several_ranges() -> None:
    # rows 0, 2, 3, 7, 8, 10 of the head train, afterwards 0, 1, 2, 5, 6, 10
    active = {HEAD: torch.tensor([0.0, 2, 3, 7, 8, 10]).unsqueeze(1).repeat(1, 7)}
    after = reselect(active, MANY_RANGES, select(f"{HEAD}[3:5] {HEAD}[7:10]"))
    assert after[HEAD][:, 0].tolist() == [0, 0, 2, 0, 0, 10]
    assert after[HEAD].shape == (6, 7)


def test_an_entry_that_froze_whole_leaves_and_comes_back_missing() -> None:
    tensors = whole()
    frozen = reselect(tensors, "all", select("head"))
    assert list(frozen) == [HEAD]
    thawed = reselect(frozen, "head", select("all"))
    assert list(thawed) == [HEAD] and torch.equal(thawed[HEAD], tensors[HEAD])


@pytest.mark.parametrize(("before", "after"), list(itertools.product(SPECS, SPECS)))
def test_what_trains_before_and_after_is_kept_and_the_rest_is_zero(before: str, after: str) -> None:
    tensors = whole()
    given = select(before).restrict(tensors)
    moved = reselect(given, before, select(after))
    masked = {name: tensor * trains(before)[name] for name, tensor in tensors.items()}
    expected = {
        name: tensor[mask.bool()]
        for name, tensor in masked.items()
        if (mask := trains(after)[name]).any()
    }
    for name, tensor in expected.items():
        got = moved.get(name, torch.zeros(select(after).active_shapes()[name]))
        assert torch.equal(got.flatten(), tensor.flatten()), name
    assert moved.keys() <= expected.keys()
    assert {k: v.shape for k, v in moved.items()} == {
        k: torch.Size(select(after).active_shapes()[k]) for k in moved
    }


@pytest.mark.parametrize("first", SPECS)
@pytest.mark.parametrize("second", SPECS)
def test_what_froze_and_came_back_is_zero(first: str, second: str) -> None:
    tensors, before = whole(), "all"
    for spec in (first, second, "all"):
        tensors, before = reselect(tensors, before, select(spec)), spec
    for name, original in whole().items():
        expected = original * trains(first)[name] * trains(second)[name]
        assert torch.equal(tensors.get(name, torch.zeros_like(original)), expected), name


@pytest.mark.parametrize(
    ("before", "after"), [p for p in itertools.product(SPECS, SPECS) if p[0] != p[1]]
)
def test_nothing_of_the_old_state_is_shared_with_the_new(before: str, after: str) -> None:
    given = select(before).restrict(whole())
    kept = {name: tensor.clone() for name, tensor in given.items()}
    moved = reselect(given, before, select(after))
    for tensor in moved.values():
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes  # nor kept alive by a view
        tensor.add_(1)
    assert equal(given, kept)


def test_an_equal_selection_under_another_spec_keeps_all_bits() -> None:
    given = select("query-key").restrict(whole())
    same = f"{QKV}[query,key] {BIAS}[query,key] {GPT2}[0:10]"
    moved = reselect(given, "query-key", select(same))
    assert equal(moved, given) and moved is not given


def test_dtype_and_device_stay() -> None:
    given = {QKV: torch.ones(7, 7, dtype=torch.float64), BIAS: torch.ones(7, device="meta")}
    moved = reselect(given, "query-key", select("all"))
    assert moved[QKV].dtype == torch.float64
    assert moved[BIAS].device.type == "meta" and moved[BIAS].shape == (21,)


def test_state_of_another_model_is_an_error() -> None:
    with pytest.raises(ValueError, match="'other.weight' is not in the selection"):
        reselect({"other.weight": torch.zeros(3)}, "query-key", select("all"))
    with pytest.raises(ValueError, match=r"head.weight.*\[11, 7\].*\[5, 7\]"):
        reselect({HEAD: torch.zeros(5, 7)}, "query-key", select(TWO_RANGES))
