"""Integers at the edge of what fp32 holds, where the scale itself is rounded far."""

import pytest
import torch

from fedfrozen_app.transport.quantise import dequantise, quantise

UNIT = 2.0**-149  # the smallest fp32 above zero


@pytest.mark.parametrize(("bits", "range_in_units"), [(8, 300), (8, 381), (4, 17), (4, 22)])
def test_a_scale_that_fp32_rounds_down_does_not_let_codes_overflow(
    bits: int, range_in_units: int
) -> None:
    levels = 2**bits - 1
    assert levels < range_in_units < 1.5 * levels  # so the scale, a unit, is up to a third short
    x = torch.tensor([0.0, 7.0, float(range_in_units)], dtype=torch.float64).mul(UNIT).float()
    codes, scale = quantise(x, bits)
    assert scale.tolist() == [UNIT, 0.0]
    back = dequantise(codes, scale, 3, bits) / UNIT
    assert back.tolist() == [0.0, 7.0, levels]  # the outermost code, not one from the other end
