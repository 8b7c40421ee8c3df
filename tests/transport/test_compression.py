import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction

import pytest
import torch
from flwr.app import ArrayRecord, RecordDict

from fedfrozen_app.seeds import torch_generator
from fedfrozen_app.transport import ledger
from fedfrozen_app.transport.arrays import to_record
from fedfrozen_app.transport.codec import Layout, layout_of_tensors
from fedfrozen_app.transport.compression import (
    Codec,
    Integers,
    PowerSGD,
    TopK,
    parse_codec,
    payload_bytes,
    with_feedback,
)
from fedfrozen_app.transport.low_rank import orthonormalise, power_iteration
from fedfrozen_app.transport.quantise import dequantise, quantise
from fedfrozen_app.transport.top_k import largest

Tensors = dict[str, torch.Tensor]
NAMES = ("int8", "int4", "topk:0.01", "topk:1", "powersgd:2", "powersgd:99")
BUFFERS = ("bn.running_mean", "bn.num_batches_tracked", "temperature", "mask")


def randn(*shape: int, index: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch_generator(7, "test", index))


def model(index: int = 0) -> Tensors:
    """A state dict of 1,552 trained values, not in name order, and 61 bytes of buffers."""
    return {
        "layer.weight": randn(13, 29, index=index),
        "layer.bias": randn(13, index=index + 1),
        "conv.weight": randn(11, 3, 5, 7, index=index + 2),
        "norm.weight": randn(7, index=index + 3),
        "empty": torch.zeros(0, 3),
        "bn.running_mean": randn(11, index=index + 4),
        "bn.num_batches_tracked": torch.tensor(2**53 + 1),
        "temperature": torch.tensor(0.07),
        "mask": torch.tensor([True, False, True, True, False]),
    }


def codec_of(name: str) -> Codec:
    codec = parse_codec(name, seed=3)
    assert codec is not None
    return codec


def nbytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def round_trip(codec: Codec, tensors: Tensors) -> Tensors:
    return codec.decode(codec.encode(tensors), layout_of_tensors(tensors))


def record_layout(record: ArrayRecord) -> Layout:
    """Shape and dtype as a message says them."""
    return {name: (tuple(array.shape), array.dtype) for name, array in record.items()}


# --- names --------------------------------------------------------------------------------
def test_each_name_gives_its_codec() -> None:
    assert parse_codec("none") is None
    assert parse_codec("int8") == Integers(8) and parse_codec("int4") == Integers(4)
    assert parse_codec("topk:0.01") == TopK(Fraction(1, 100)) == parse_codec("topk:1e-2")
    assert parse_codec("topk:1") == TopK(Fraction(1)) and parse_codec("topk:.5") is not None
    assert parse_codec("powersgd:2", seed=3) == PowerSGD(2, 3) != parse_codec("powersgd:2")
    assert [codec_of(name).of_update for name in NAMES] == [False, False, True, True, True, True]


@pytest.mark.parametrize(
    "text",
    ["", "int16", "int8:3", "INT8", "topk", "topk:", "topk:0", "topk:1.01", "topk:-0.1"]
    + ["topk:nan", "topk:.", "topk:1_0", "topk:1e-999", "topk:0.1\n", "powersgd", "powersgd:"]
    + ["powersgd:0", "powersgd:-1", "powersgd:2.5", "powersgd:٣", "powersgd:" + "9" * 5000],
)
def test_other_names_are_refused_with_field_value_rule_and_remedy(text: str) -> None:
    with pytest.raises(ValueError, match=r"^compression.* must .*, got '.*'; use ") as error:
        parse_codec(text)
    assert repr(text) in str(error.value) and "\n" not in str(error.value)


def test_a_name_is_read_without_torch() -> None:
    read = "import sys, fedfrozen_app.transport.codec_name; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# --- integers -----------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shift", [0.0, -1000.0])
def test_an_integer_is_off_by_half_a_step_at_most(
    bits: int, dtype: torch.dtype, shift: float
) -> None:
    x = (randn(1009) + shift).to(dtype)
    _, scale = quantise(x, bits)
    step = float(scale[0])
    assert step == pytest.approx(float(x.max() - x.min()) / (2**bits - 1), rel=1e-2)
    back = round_trip(Integers(bits), {"x": x})["x"]
    assert back.dtype == dtype
    # fp32 holds scale and zero point; what comes back is rounded to the dtype of x
    rounding = float(x.abs().max()) * max(torch.finfo(dtype).eps / 2, 2.0**-23)
    worst = float((back.double() - x.double()).abs().max())
    assert worst <= step / 2 + rounding
    if shift == 0.0:
        assert worst > 0.45 * step


def test_smallest_and_largest_value_have_the_outer_codes_and_halves_go_to_even() -> None:
    x = torch.tensor([-1.0, -0.5, 0.5, 1.5, 14.0])
    codes, scale = quantise(x, 4)
    assert scale.tolist() == [1.0, -1.0]
    # steps 0, 0.5, 1.5, 2.5, 15; the low half of a byte comes first
    assert codes.tolist() == [0 | 0 << 4, 2 | 2 << 4, 15]
    assert dequantise(codes, scale, 5, 4).tolist() == [-1.0, -1.0, 1.0, 1.0, 14.0]
    codes, _ = quantise(torch.tensor([-2.0, 3.0, 0.0]), 8)
    assert codes.tolist() == [0, 255, 102]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("numel", [0, 1, 2, 7, 8, 1277, 1280])
def test_packed_sizes_are_exact(bits: int, numel: int) -> None:
    x = randn(numel)
    codes, scale = quantise(x, bits)
    assert (codes.dtype, codes.nbytes) == (torch.uint8, (numel * bits + 7) // 8)
    assert (scale.dtype, scale.nbytes) == (torch.float32, 8)
    assert dequantise(codes, scale, numel, bits).shape == (numel,)


def test_a_latent_of_1280_values_is_648_bytes_at_4_bits_and_1288_at_8() -> None:
    latent = {"latent": randn(1280)}
    assert nbytes(Integers(4).encode(latent)) == 648
    assert nbytes(Integers(8).encode(latent)) == 1288


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [0.0, -0.1, 3e-45, 3.4e38])
def test_a_constant_tensor_comes_back_exactly(bits: int, value: float) -> None:
    x = torch.full((5, 7), value)
    assert torch.equal(round_trip(Integers(bits), {"x": x})["x"], x)


@pytest.mark.parametrize("bits", [4, 8])
def test_ranges_at_both_ends_of_fp32_are_quantised(bits: int) -> None:
    tiny = torch.tensor([0.0, 1e-45, 3e-45, 6e-45])
    assert torch.equal(round_trip(Integers(bits), {"x": tiny})["x"], tiny)
    huge = torch.tensor([-3e38, 1.7e38, 3e38])  # max - min is not an fp32
    error = (round_trip(Integers(bits), {"x": huge})["x"] - huge).abs().max()
    assert float(error) <= 6e38 / (2**bits - 1) / 2 * (1 + 1e-6)


# --- top-k --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fraction", "numel", "kept"),
    [("0.07", 100, 7), ("0.01", 700, 7), ("0.01", 701, 8), ("0.1", 1, 1), ("1", 17, 17)],
)
def test_top_k_keeps_the_ceiling_of_the_decimal_fraction(
    fraction: str, numel: int, kept: int
) -> None:
    wire = codec_of(f"topk:{fraction}").encode({"x": randn(numel)})
    assert {name: (t.dtype, t.numel()) for name, t in wire.items()} == {
        "packed/values": (torch.float32, kept),
        "packed/indices": (torch.int32, kept),
    }


def test_top_k_keeps_the_largest_magnitudes_of_each_tensor() -> None:
    tensors = {"big": 1000 * randn(23, 31), "small": randn(501, index=1)}
    back = round_trip(codec_of("topk:0.1"), tensors)
    for name, kept in (("big", 72), ("small", 51)):
        x, y = tensors[name].reshape(-1), back[name].reshape(-1)
        order = x.abs().argsort(descending=True)
        assert torch.equal(y[order[:kept]], x[order[:kept]])
        assert int((y != 0).sum()) == kept


def test_of_equal_magnitudes_the_first_are_kept() -> None:
    x = torch.tensor([1.0, -2.0, 2.0, 3.0, -2.0, 2.0])
    assert largest(x, 3).tolist() == [1, 2, 3]
    assert largest(torch.zeros(100_003), 5).tolist() == [0, 1, 2, 3, 4]


def test_positions_that_int32_does_not_have_are_refused() -> None:
    codec = codec_of("topk:0.01")
    assert codec.wire_layout({"x": ((2**31 - 1,), "float32")})["packed/indices"][1] == "int32"
    with pytest.raises(ValueError, match="^'x' must have at most 2147483647 values"):
        codec.wire_layout({"x": ((2**16, 2**15), "float32")})


# --- PowerSGD -----------------------------------------------------------------------------
def low_rank(rows: int, columns: int, rank: int) -> torch.Tensor:
    return randn(rows, rank, index=11) @ randn(rank, columns, index=12)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def test_a_matrix_of_rank_2_is_recovered_at_rank_2_and_not_at_rank_1() -> None:
    update = {"weight": low_rank(37, 41, 2), "conv": low_rank(31, 105, 2).reshape(31, 3, 5, 7)}
    two, one = round_trip(PowerSGD(2), update), round_trip(PowerSGD(1), update)
    for name, tensor in update.items():
        assert relative(two[name], tensor) < 1e-6
        assert relative(one[name], tensor) > 0.1


def test_full_rank_is_the_identity() -> None:
    matrix = randn(13, 17)
    left, right = power_iteration(matrix, randn(17, 13, index=1))
    assert relative(left @ right.T, matrix) < 1e-5
    update = {"weight": matrix}  # where factors are no smaller, the matrix itself travels
    assert torch.equal(round_trip(PowerSGD(13), update)["weight"], matrix)


def test_starting_from_the_last_factor_approaches_the_best_approximation() -> None:
    update = {"weight": randn(43, 47)}
    singular = torch.linalg.svdvals(update["weight"])
    best = float(singular[3:].norm() / singular.norm())
    codec, layout = PowerSGD(3), layout_of_tensors(update)
    wire, errors = codec.encode(update), list[float]()
    for _ in range(60):
        errors.append(relative(codec.decode(wire, layout)["weight"], update["weight"]))
        wire = codec.encode(update, codec.memory(wire, layout))
    assert errors[0] > 1.04 * best
    assert errors[-1] == pytest.approx(best, rel=1e-3)


def test_columns_of_a_dependent_matrix_are_zero_and_the_others_orthonormal() -> None:
    one = randn(53, 1)
    basis = orthonormalise(torch.cat([one, -3 * one, randn(53, 2, index=1), 0 * one], dim=1))
    gram = basis.T @ basis
    assert torch.allclose(
        gram, torch.diag(torch.tensor([1.0, 0, 1, 1, 0]).double()), rtol=0, atol=1e-14
    )
    wire = PowerSGD(3).encode({"weight": low_rank(37, 41, 1)})
    assert wire["packed/left"].reshape(37, 3)[:, 1:].count_nonzero() == 0


def test_columns_that_almost_point_the_same_way_become_orthonormal() -> None:
    one, other = randn(53, 1).double(), randn(53, 1, index=1).double()
    basis = orthonormalise(torch.cat([one, one + 1e-5 * other], dim=1))
    assert torch.allclose(basis.T @ basis, torch.eye(2).double(), rtol=0, atol=1e-14)


def test_an_update_of_zero_does_not_silence_the_next_ones() -> None:
    codec, update = PowerSGD(2), {"weight": torch.zeros(37, 41)}
    wire, state = with_feedback(codec, update)
    assert all(tensor.count_nonzero() == 0 for tensor in wire.values())
    update["weight"][30:] = low_rank(7, 41, 2)
    wire, _ = with_feedback(codec, update, state)
    decoded = codec.decode(wire, layout_of_tensors(update))
    assert relative(decoded["weight"], update["weight"]) < 1e-6


def test_the_first_factor_follows_from_seed_and_name_alone() -> None:
    update = {"a": randn(37, 41), "b": randn(37, 41)}
    wire = PowerSGD(2, seed=3).encode(update)
    half = len(wire["packed/right"]) // 2
    assert not torch.equal(wire["packed/right"][:half], wire["packed/right"][half:])
    alone = PowerSGD(2, seed=3).encode({"b": update["b"]})
    assert torch.equal(wire["packed/right"][half:], alone["packed/right"])
    other = PowerSGD(2, seed=4).encode({"b": update["b"]})
    assert not torch.equal(other["packed/right"], alone["packed/right"])


def test_a_factor_of_another_shape_is_drawn_anew() -> None:
    codec, update = PowerSGD(2), {"weight": randn(37, 41)}
    fresh, started = codec.encode(update), codec.encode(update, {"weight": randn(43, 2)})
    assert all(torch.equal(fresh[key], started[key]) for key in fresh)
    moved = codec.encode(update, {"weight": randn(41, 2)})
    assert not torch.equal(fresh["packed/left"], moved["packed/left"])


# --- what holds for every codec -----------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_buffers_that_are_not_trained_travel_as_they_are(name: str) -> None:
    tensors = model()
    wire = codec_of(name).encode(tensors)
    back = codec_of(name).decode(wire, layout_of_tensors(tensors))
    for buffer in BUFFERS:
        assert wire[buffer].data_ptr() == tensors[buffer].data_ptr()
        assert torch.equal(back[buffer], tensors[buffer])
        assert back[buffer].dtype == tensors[buffer].dtype


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("none", 1552 * 4 + 61),
        ("int8", 1552 + 5 * 8 + 61),
        ("int4", 189 + 578 + 7 + 4 + 5 * 8 + 61),
        ("topk:0.01", (4 + 12 + 1 + 1) * 8 + 61),
        ("topk:1", 1552 * 8 + 61),
        ("powersgd:2", 2 * (13 + 29) * 4 + 2 * (11 + 105) * 4 + (13 + 7) * 4 + 61),
        ("powersgd:99", 1552 * 4 + 61),
    ],
)
def test_predicted_and_sent_bytes_are_those_of_the_formulas(name: str, size: int) -> None:
    codec, tensors = parse_codec(name), model()
    layout = record_layout(to_record(tensors))
    assert layout == layout_of_tensors(tensors)
    assert payload_bytes(layout, codec) == size
    if codec is not None:
        wire = codec.encode(tensors)
        assert nbytes(wire) == size
        assert ledger.payload_bytes(RecordDict({"arrays": to_record(wire)})) == size
        assert record_layout(to_record(wire)) == codec.wire_layout(layout)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_decoded_has_order_shapes_and_dtypes_of_the_layout(name: str) -> None:
    codec, tensors = codec_of(name), model()
    wire, layout = codec.encode(tensors), layout_of_tensors(tensors)
    back = codec.decode(wire, layout)
    other = codec.decode(wire, dict(reversed(layout.items())))
    assert layout_of_tensors(back) == layout
    assert list(back) == list(tensors) == list(reversed(other))
    assert all(torch.equal(back[key], other[key]) for key in tensors)


@pytest.mark.parametrize("name", NAMES)
def test_a_transposed_view_is_sent_as_what_it_shows(name: str) -> None:
    view = randn(29, 13).T
    wire, copy = codec_of(name).encode({"x": view}), codec_of(name).encode({"x": view.contiguous()})
    assert wire.keys() == copy.keys()
    assert all(torch.equal(wire[key], copy[key]) for key in copy)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["topk:1", "powersgd:2"])
def test_other_precisions_come_back_in_their_dtype(name: str, dtype: torch.dtype) -> None:
    update = {"weight": low_rank(37, 41, 2).to(dtype), "bias": randn(11).to(dtype)}
    back = round_trip(codec_of(name), update)
    assert {tensor.dtype for tensor in back.values()} == {dtype}
    # a matrix that was rounded to few bits has no rank of 2 any more
    tolerance = 1e-6 if dtype == torch.float64 else torch.finfo(dtype).eps
    for key, tensor in update.items():
        assert relative(back[key].double(), tensor.double()) < tolerance


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_entries_are_refused_by_name(name: str, value: float) -> None:
    for key in ("conv.weight", "bn.running_mean"):
        tensors = model()
        tensors[key].view(-1)[3] = value
        with pytest.raises(ValueError, match=f"^'{key}' has non-finite values"):
            codec_of(name).encode(tensors)


def test_a_value_that_fp32_does_not_have_is_refused() -> None:
    for name in ("int8", "topk:0.5"):
        with pytest.raises(
            ValueError, match="^'(x' has values beyond float32|packed/values' has non-f)"
        ):
            codec_of(name).encode({"x": torch.tensor([1e300, 1.0], dtype=torch.float64)})


DIGESTS = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from tests.transport.test_compression import digest_of_wires
for threads in (1, 2):
    torch.set_num_threads(threads)
    print(digest_of_wires())
"""


def digest_of_wires() -> str:
    """Return a digest of what every codec sends of tensors that threads share out."""
    tensors = {"tall": randn(50021, 11), "wide": randn(17, 20011, index=1)}
    tensors["ties"] = randn(50021, index=2).round()
    sha = hashlib.sha256()
    for name in ("int8", "int4", "topk:0.01", "powersgd:1", "powersgd:5"):
        start: Mapping[str, torch.Tensor] = {}
        for _ in range(2):
            wire = codec_of(name).encode(tensors, start)
            start = codec_of(name).memory(wire, layout_of_tensors(tensors))
            for tensor in wire.values():
                sha.update(tensor.numpy().tobytes())
    return sha.hexdigest()


def test_every_number_of_threads_and_process_sends_the_same_bits() -> None:
    root = __file__.rpartition("/tests/")[0]
    done = subprocess.run(
        [sys.executable, "-c", DIGESTS, root],
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},  # a busy machine has no cores to spin on
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [digest_of_wires()] * 2


# --- error feedback -----------------------------------------------------------------------
def integers(index: int) -> Tensors:
    """Updates whose sums fp32 holds exactly."""
    return {name: (10 * t).round() for name, t in model(index).items() if name not in BUFFERS}


def test_what_top_k_sent_and_what_is_left_is_all_there_was_bit_for_bit() -> None:
    codec, residual = codec_of("topk:0.01"), {}
    layout = layout_of_tensors(integers(0))
    given = {name: torch.zeros(shape) for name, (shape, _) in layout.items()}
    arrived = {name: torch.zeros(shape) for name, (shape, _) in layout.items()}
    for t in range(29):
        delta = integers(10 * t)
        wire, residual = with_feedback(codec, delta, residual)
        decoded = codec.decode(wire, layout)
        for name in layout:
            given[name] += delta[name]
            arrived[name] += decoded[name]
    for name in layout:
        assert torch.equal(arrived[name] + residual[name], given[name])
    assert all(residual[name].count_nonzero() > 0 for name in ("layer.weight", "conv.weight"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["topk:0.1", "powersgd:2"])
def test_what_arrived_and_what_is_left_is_all_there_was(name: str, dtype: torch.dtype) -> None:
    codec, state = codec_of(name), {}
    given, arrived = torch.zeros(37, 41).double(), torch.zeros(37, 41).double()
    for t in range(29):
        delta = {"weight": randn(37, 41, index=t).to(dtype), "bias": randn(5, index=t).to(dtype)}
        wire, state = with_feedback(codec, delta, state)
        given += delta["weight"].double()
        arrived += codec.decode(wire, layout_of_tensors(delta))["weight"].double()
    left = state["weight"]
    assert left.dtype == torch.promote_types(dtype, torch.float32)
    assert float(left.norm()) > 1.0
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    assert relative(arrived + left.double(), given) < tolerance
    assert ("start/weight" in state) == (name == "powersgd:2")


def test_feedback_goes_on_from_the_factor_sent_last() -> None:
    codec, first, second = PowerSGD(2), randn(37, 41), randn(37, 41, index=1)
    sent, state = with_feedback(codec, {"weight": first})
    assert torch.equal(state["start/weight"].reshape(-1), sent["packed/right"])
    wire, _ = with_feedback(codec, {"weight": second}, state)
    expected = codec.encode({"weight": second + state["weight"]}, {"weight": state["start/weight"]})
    assert all(torch.equal(wire[key], expected[key]) for key in expected)


def test_feedback_keeps_nothing_of_buffers_and_leaves_its_arguments_alone() -> None:
    delta, codec = model(), codec_of("topk:0.01")
    before = {name: tensor.clone() for name, tensor in delta.items()}
    wire, residual = with_feedback(codec, delta, {})
    kept = {name: tensor.clone() for name, tensor in residual.items()}
    with_feedback(codec, delta, residual)
    assert sorted(residual) == sorted(set(delta) - set(BUFFERS))
    assert all(torch.equal(wire[name], before[name]) for name in BUFFERS)
    assert all(torch.equal(delta[name], before[name]) for name in delta)
    assert all(torch.equal(residual[name], kept[name]) for name in kept)


def test_a_wider_update_is_sent_in_the_layout_of_the_model() -> None:
    codec, delta = codec_of("powersgd:2"), {"bias": randn(11), "weight": randn(37, 41)}
    layout = {name: (tuple(t.shape), "float16") for name, t in delta.items()}
    wire, residual = with_feedback(codec, delta, {}, layout)
    assert nbytes(wire) == payload_bytes(layout, codec) == 11 * 2 + 2 * (37 + 41) * 4
    back = codec.decode(wire, layout)
    assert {tensor.dtype for tensor in back.values()} == {torch.float16}
    rounding = residual["bias"].abs().max()
    assert 0 < float(rounding) < 2e-3
    assert torch.equal(back["bias"].float() + residual["bias"], delta["bias"])


def test_a_residual_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"residual of 'x' must have the shape \[7\].* got \[1\]"):
        with_feedback(codec_of("topk:0.5"), {"x": randn(7)}, {"x": randn(1)})


def distance_to_optimum(step: Callable[[int, Tensors], torch.Tensor]) -> float:
    """Return ||x - x*|| / ||x_0 - x*|| after 1,000 rounds of two clients' gradient steps.

    f_i(x) = ||x - x* -+ a||^2 / 2 in 1,009 dimensions: on 13 of them a = 30, so that their
    gradients are the largest of each client and cancel in the mean.
    """
    optimum, apart = randn(1009), torch.zeros(1009)
    apart[:13] = 30.0
    x = torch.zeros(1009)
    for _ in range(1000):
        steps = [step(i, {"x": -0.003 * (x - optimum - s * apart)}) for i, s in enumerate((1, -1))]
        x = x + (steps[0] + steps[1]) / 2
    return relative(x, optimum)


def test_top_k_of_1_percent_reaches_the_optimum_with_feedback_and_never_without() -> None:
    codec, layout = codec_of("topk:0.01"), {"x": ((1009,), "float32")}
    residuals: list[Tensors] = [{}, {}]

    def fed_back(client: int, delta: Tensors) -> torch.Tensor:
        wire, residuals[client] = with_feedback(codec, delta, residuals[client])
        return codec.decode(wire, layout)["x"]

    def forgotten(client: int, delta: Tensors) -> torch.Tensor:
        return codec.decode(codec.encode(delta), layout)["x"]

    assert (1 - 0.003) ** 1000 == pytest.approx(0.0496, abs=1e-4)  # with nothing compressed
    assert distance_to_optimum(fed_back) < 0.06
    assert distance_to_optimum(forgotten) > 0.98


# --- hostile arrays -----------------------------------------------------------------------
def put(key: str, index: int, value: float) -> Callable[[Tensors], None]:
    def change(wire: Tensors) -> None:
        wire[key].view(-1)[index] = value

    return change


def put_scale(index: int, value: float) -> Callable[[Tensors], None]:
    """Change a number among (scale, zero) of each of five tensors, at the end of the array."""

    def change(wire: Tensors) -> None:
        scales = wire["packed/q"][-5 * 8 :].numpy().view("<f4")
        scales[index] = value

    return change


def cast(key: str, dtype: torch.dtype) -> Callable[[Tensors], None]:
    return lambda wire: wire.update({key: wire[key].to(dtype)})


def resize(key: str, *shape: int) -> Callable[[Tensors], None]:
    """Claim a shape, however large, without the memory for it."""
    return lambda wire: wire.update({key: wire[key].reshape(-1)[:1].expand(shape)})


def rename(key: str, name: str) -> Callable[[Tensors], None]:
    return lambda wire: wire.update({name: wire.pop(key)})


NAN, MANY = float("nan"), 10**13
HOSTILE = [
    (
        "int8",
        rename("packed/q", "packed/Q"),
        "arrays are missing, first 'packed/q'",
    ),
    ("int8", lambda wire: wire.pop("mask"), "1 arrays are missing, first 'mask'"),
    ("int8", lambda wire: wire.update({"a\nb": randn(1)}), r"unexpected arrays, first 'a\\nb'"),
    ("int8", lambda wire: wire.update({"layer.bias": randn(13)}), "unexpected .*'layer.bias'"),
    (
        "int8",
        cast("packed/q", torch.int8),
        r"'packed/q' must be uint8\[1592\], got int8",
    ),
    ("int8", cast("bn.num_batches_tracked", torch.int32), r"must be int64\[\], got int32"),
    ("int8", resize("packed/q", 1591), r"must be uint8\[1592\], got uint8\[1591\]"),
    ("int8", resize("packed/q", MANY), r"must be uint8\[1592\], got uint8\[10000"),
    ("int8", resize("packed/q", 1592, 1), r"must be uint8\[1592\], got uint8\[1592, 1\]"),
    ("int8", resize("bn.running_mean", 13), r"must be float32\[11\], got float32\[13\]"),
    ("int8", put_scale(3, NAN), "'packed/q' has non-finite scales"),
    ("int8", put_scale(4, -1.0), "'packed/q' must have scales >= 0"),
    ("int8", put_scale(0, 3e38), "'conv.weight' has non-finite values"),
    ("int8", put("bn.running_mean", 5, NAN), "'bn.running_mean' has non-finite values"),
    ("int4", resize("packed/q", 817), r"must be uint8\[818\], got uint8\[817\]"),
    ("int4", put("packed/q", 577, 0x10), "must end 'conv.weight' with an empty half byte"),
    ("topk:0.01", resize("packed/values", 17), r"must be float32\[18\], got float32\[17\]"),
    ("topk:0.01", resize("packed/indices", MANY), r"must be int32\[18\], got int32\[1000"),
    ("topk:0.01", cast("packed/indices", torch.int64), r"must be int32\[18\], got int64"),
    ("topk:0.01", put("packed/values", 7, NAN), "'packed/values' has non-finite values"),
    ("topk:0.01", put("packed/indices", 0, -1), r"in \[0, 1155\) in 'conv.weight', got -1 to"),
    ("topk:0.01", put("packed/indices", 11, 1155), r"\[0, 1155\) in 'conv.weight', got .* 1155"),
    ("topk:0.01", put("packed/indices", 12, 13), r"in \[0, 13\) in 'layer.bias', got 13 to 13"),
    ("topk:0.01", put("packed/indices", 5, 10**9), "must ascend in 'conv.weight' without dup"),
    ("powersgd:2", resize("packed/left", 47), r"must be float32\[48\], got float32\[47\]"),
    ("powersgd:2", resize("packed/right", 24, 2), r"must be float32\[268\], got float32\[24, 2\]"),
    ("powersgd:2", cast("packed/right", torch.float64), r"must be float32\[268\], got float64"),
    ("powersgd:2", put("packed/left", 9, NAN), "'packed/left' has non-finite values"),
    ("powersgd:2", resize("layer.bias", 7), r"'layer.bias' must be float32\[13\], got .*\[7\]"),
]


@pytest.mark.parametrize(("name", "change", "message"), HOSTILE)
def test_hostile_arrays_are_refused(
    name: str, change: Callable[[Tensors], None], message: str
) -> None:
    codec, tensors = codec_of(name), model()
    wire = {key: tensor.clone() for key, tensor in codec.encode(tensors).items()}
    codec.decode(wire, layout_of_tensors(tensors))
    change(wire)
    with pytest.raises(ValueError, match=message) as error:
        codec.decode(wire, layout_of_tensors(tensors))
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


def test_an_index_sent_twice_is_refused() -> None:
    codec, tensors = codec_of("topk:0.01"), {"x": randn(701)}
    wire = codec.encode(tensors)
    wire["packed/indices"][3] = wire["packed/indices"][2]
    with pytest.raises(ValueError, match="must ascend in 'x' without duplicates"):
        codec.decode(wire, layout_of_tensors(tensors))


def test_a_product_beyond_the_dtype_is_refused() -> None:
    codec, tensors = PowerSGD(2), {"weight": randn(37, 41).half()}
    wire = codec.encode(tensors)
    wire["packed/right"] *= 1e5
    with pytest.raises(ValueError, match="^'weight' has non-finite values"):
        codec.decode(wire, layout_of_tensors(tensors))


def test_a_layout_without_exact_dtypes_is_refused() -> None:
    wire = Integers(8).encode({"x": randn(7)})
    with pytest.raises(ValueError, match=r"'x' must have the dtype of a tensor, got 'float\*'"):
        Integers(8).decode(wire, {"x": ((7,), "float*")})
