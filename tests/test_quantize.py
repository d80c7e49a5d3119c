"""Scales and codes, against a reference in Python's own floats that shares nothing with numpy."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qcs4w_packer import dequantize, pack_codes, quantize
from qcs4w_packer.quantize import row_absmax, row_scales

FLOOR = 2.0**-23

# Beyond 7.5 / 8 of float32's range a negative absmax has the code -8, and -8 · scale is an infinity.
LARGEST = float(np.float32(3.1e38))

PINNED = {
    "ties": ((1, -1, 0.5, -0.5), (7, -7, 4, -4), "F1 C4"),
    "reciprocal": ((0.3, -0.3, 0.1, 0), (7, -7, 2, 0), "F1 A8"),
    "asymmetric": ((0.75, -0.75), (7, -8), "F0"),
}


def f32(value: float) -> float:
    """Round to float32. A float64 product or quotient of two float32 rounds to the right float32."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def reference(row: list[float]) -> tuple[list[int], float]:
    """Codes and scale of one row by the written rule; Python's round is half to even."""
    scale = max(f32(max(map(abs, row)) / 7.5), FLOOR)
    inverse = f32(1 / scale)
    return [min(7, max(-8, round(f32(value * inverse)))) for value in row], scale


@pytest.mark.parametrize(("weights", "codes", "text"), PINNED.values(), ids=PINNED)
def test_rows_worked_by_hand(weights: tuple[float, ...], codes: tuple[int, ...], text: str) -> None:
    """The vectors that every implementation of the format can be held against."""
    found, _ = quantize(np.array([weights], np.float32))
    assert found.dtype == np.int8
    assert found.tolist() == [list(codes)]
    assert pack_codes(found).tobytes() == bytes.fromhex(text)


def test_the_scale_is_exact() -> None:
    """A largest magnitude of 1 gives 1 / 7.5 as float32 has it: 0x3e088889, printed 0.13333334."""
    _, scales = quantize(np.array([[1, -1, 0.5, -0.5]], np.float32))
    assert scales.dtype == np.float32
    assert scales.view(np.uint32).tolist() == [0x3E088889]
    assert str(scales[0]) == "0.13333334"


@pytest.mark.parametrize("width", [1, 2, 3, 7, 64, 113])
@pytest.mark.parametrize("size", [1e-6, 0.02, 1, 3e38], ids=str)
def test_codes_and_scales_follow_the_rule(width: int, size: float, rng: np.random.Generator) -> None:
    """200 random rows of each width and size equal the reference, bit for bit."""
    weight = (rng.uniform(-1, 1, (200, width)) * size).astype(np.float32)
    codes, scales = quantize(weight)
    expected = [reference(row) for row in weight.tolist()]
    assert codes.tolist() == [row for row, _ in expected]
    assert scales.tolist() == [scale for _, scale in expected]


def test_dividing_by_the_scale_gives_other_codes(rng: np.random.Generator) -> None:
    """Without the rounded reciprocal some 9 % of rows differ, in the ±absmax element only."""
    weight = rng.standard_normal((20_000, 32)).astype(np.float32)
    codes, scales = quantize(weight)
    divided = np.clip(np.rint(weight / scales[:, None]), -8, 7).astype(np.int8)
    rows, columns = np.nonzero(codes != divided)
    np.testing.assert_array_equal(np.abs(weight[rows, columns]), np.abs(weight[rows]).max(axis=1))
    share = len(set(rows)) / len(weight)
    assert 0.07 < share < 0.11  # 0.09 with a standard deviation of 0.002


def test_halves_round_to_even_and_clamp() -> None:
    """With absmax 7.5 the scale is 1, so that every half is a tie; +8 is clamped to 7, -8 stays."""
    row = [7.5, -7.5, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 3.5, 5.5, 6.5, -6.5, -0.0, 0.49999997]
    codes, scales = quantize(np.array([row], np.float32))
    assert scales.tolist() == [1.0]
    assert codes.tolist() == [[7, -8, 0, 0, 2, -2, 2, -2, 4, 6, 6, -6, 0, 0]]


@pytest.mark.parametrize(
    ("value", "code", "is_floored"),
    [(0.0, 0, True), (1e-40, 0, True), (5e-8, 0, True), (8e-7, 7, True), (1e-6, 7, False)],
    ids=["zero", "subnormal", "vanishes", "loses precision", "above"],
)
def test_tiny_rows_meet_the_floor(value: float, code: int, is_floored: bool) -> None:
    """Below absmax 8.94e-7 the scale is 2⁻²³, never 0, so that no code is NaN."""
    weight = np.array([[value, 0.0]], np.float32)
    codes, scales = quantize(weight)
    assert codes.tolist() == [[code, 0]]
    assert scales.tolist() == [FLOOR if is_floored else f32(f32(value) / 7.5)]
    assert str(np.float32(FLOOR)) == "1.1920929e-07"


def test_the_floor_begins_where_it_should() -> None:
    """Just at 7.5 · 2⁻²³ the scale is 2⁻²³ by either rule; one step above it is larger."""
    edge = np.float32(7.5 * FLOOR)
    above = np.nextafter(edge, np.float32(1))
    scales = row_scales(np.array([edge, above], np.float32))
    assert scales[0] == np.float32(FLOOR) < scales[1]


def test_absmax_looks_at_both_signs() -> None:
    """The lowest and the highest value count alike, and NaN is not lost."""
    weight = np.array([[-3, 2], [1, 2], [0, -0.0], [np.nan, 1], [-np.inf, 1]], np.float32)
    np.testing.assert_array_equal(row_absmax(weight), np.array([3, 2, 0, np.nan, np.inf], np.float32))


@settings(max_examples=300)
@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=2, max_side=24),
        elements=st.floats(-LARGEST, LARGEST, width=32),
    )
)
def test_no_weight_moves_by_more_than_half_a_scale(weight: np.ndarray) -> None:
    """|w − ŵ| ≤ scale / 2 up to float32 rounding, the clamped ties at 7.5 included.

    In units of the scale, w · (1 / scale) is off by at most 7.5 · (scale, reciprocal, product: 3 roundings, of which
    each may count twice), and code · scale by 7 · 1 rounding of 2⁻²⁴: below 48 · 2⁻²⁴ together. Subnormal results
    add at most the smallest subnormal.
    """
    codes, scales = quantize(weight)
    assert np.isfinite(scales).all()
    off = np.abs(weight.astype(np.float64) - dequantize(codes, scales).astype(np.float64))
    bound = scales.astype(np.float64)[:, None] * (0.5 + 48 * 2.0**-24) + 2.0**-149
    assert (off <= bound).all()


def test_given_scales_are_used_as_they_are() -> None:
    """Scales of another rule are not recomputed."""
    codes, scales = quantize(np.array([[1, 2, -9]], np.float32), np.array([1], np.float32))
    assert codes.tolist() == [[1, 2, -8]]
    assert scales.tolist() == [1.0]


def test_dequantizing_multiplies_once() -> None:
    """ŵ = code · scale, each product rounded once to float32."""
    scales = np.array([f32(0.1), f32(1 / 3)], np.float32)
    codes = np.array([[-8, 7, 3], [1, 0, -5]], np.int8)
    expected = [[f32(q * float(s)) for q in row] for row, s in zip(codes.tolist(), scales, strict=True)]
    found = dequantize(codes, scales)
    assert found.dtype == np.float32
    assert found.tolist() == expected


def test_the_weight_is_not_edited(rng: np.random.Generator) -> None:
    """A read-only weight quantizes like any other."""
    weight = rng.standard_normal((3, 5)).astype(np.float32)
    weight.flags.writeable = False
    quantize(weight)
