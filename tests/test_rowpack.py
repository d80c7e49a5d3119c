"""The fused, blocked packer against the plain one, and its refusals and figures."""

import math

import numpy as np
import pytest

from qcs4w_packer import NonFiniteError, UsageError, dequantize, pack_codes, pack_weight, quantize
from qcs4w_packer.rowpack import _BLOCK_ELEMENTS, _PART_COLUMNS, pack_rows, pack_weight_measured

SHAPES = [
    (1, 1), (1, 2), (2, 1), (5, 3), (3, 10), (7, 1), (1, 113), (113, 7), (17, 64), (64, 127),
    (_BLOCK_ELEMENTS + 3, 1), (_BLOCK_ELEMENTS // 3 + 2, 3), (1025, 257),
    (3, _BLOCK_ELEMENTS + 1), (2, _BLOCK_ELEMENTS), (2, _PART_COLUMNS + 3),
]  # fmt: skip


def weights(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Rows of very different sizes."""
    sizes = np.exp(rng.uniform(-12, 12, (shape[0], 1)))
    return np.asarray(rng.standard_normal(shape) * sizes, np.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_change_nothing(shape: tuple[int, int], rng: np.random.Generator) -> None:
    """Packing in blocks gives the bytes and scales of quantizing and packing the whole."""
    weight = weights(rng, shape)
    codes, scales = quantize(weight)
    rows = pack_rows(weight)
    np.testing.assert_array_equal(rows.packed, pack_codes(codes))
    np.testing.assert_array_equal(rows.scales, scales)
    linear = pack_weight(weight)
    assert (linear.out_features, linear.in_features) == shape
    np.testing.assert_array_equal(linear.packed, rows.packed)
    np.testing.assert_array_equal(linear.scales, scales)
    np.testing.assert_array_equal(linear.codes(), codes)
    np.testing.assert_array_equal(linear.dequantize(), dequantize(codes, scales))


@pytest.mark.parametrize(
    "shape", [(1, 1), (5, 3), (113, 127), (300, 1000), (2, 100_003), (1, _PART_COLUMNS + 3)], ids=str
)
def test_error_figures_equal_a_float64_recomputation(shape: tuple[int, int], rng: np.random.Generator) -> None:
    """Σ(w − ŵ)² and Σw² of each row, within what float32 arithmetic on scaled values can lose.

    Scaled values lie below 7.6 and carry two roundings, so that each is off by at most 2⁻²⁰ scales; adding K squares
    in float32 loses a share of at most (K + 1) · 2⁻²⁴.
    """
    weight = weights(rng, shape)
    rows = pack_rows(weight)
    codes, scales = quantize(weight)
    wide, unit = weight.astype(np.float64), scales.astype(np.float64)
    off = np.sqrt(((wide - codes * unit[:, None]) ** 2).sum(axis=1))
    size = np.sqrt((wide**2).sum(axis=1))
    lost = (shape[1] + 2) * 2.0**-24
    moved = 2.0**-20 * math.sqrt(shape[1]) * unit
    assert (np.abs(np.sqrt(rows.error_squares) - off) <= moved + lost * off).all()
    assert (np.abs(np.sqrt(rows.weight_squares) - size) <= moved + lost * size).all()

    _, error = pack_weight_measured(weight)
    share = off / size
    tolerance = 2 * (2.0**-19 * math.sqrt(shape[1]) + lost)  # no row is off by less than half a scale
    assert error.relative == pytest.approx(math.sqrt((off**2).sum() / (size**2).sum()), rel=tolerance)
    assert error.worst_row_relative == pytest.approx(share.max(), rel=tolerance)
    assert share[error.worst_row] == pytest.approx(share.max(), rel=tolerance)
    assert error.snr_db == pytest.approx(-20 * math.log10(error.relative))


def test_rows_at_the_floor_are_told_and_measured() -> None:
    """A vanished row is wholly lost, a zero row is not, and neither makes NaN."""
    weight = np.array([[0, 0], [1e-40, -1e-40], [8e-7, -8e-7], [1e-6, -1e-6], [1, -1]], np.float32)
    rows = pack_rows(weight)
    assert rows.floored.tolist() == [False, True, True, False, False]
    assert rows.scales[:3].tolist() == [2.0**-23] * 3
    assert rows.packed[:2].tolist() == [[0x88], [0x88]]
    wide = weight.astype(np.float64)
    off = wide[:3] - dequantize(*quantize(weight[:3]))
    assert rows.error_squares[:3].tolist() == (off**2).sum(axis=1).tolist()
    assert rows.weight_squares[:3].tolist() == (wide[:3] ** 2).sum(axis=1).tolist()
    assert rows.error_squares[1] == rows.weight_squares[1] > 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize(
    ("shape", "row", "column"),
    [((1, 1), 0, 0), ((5, 3), 0, 2), ((5, 3), 4, 0), ((1025, 257), 1024, 256), ((3, _BLOCK_ELEMENTS + 1), 2, 7)],
    ids=["alone", "first row", "last row", "later block", "block of one row"],
)
def test_a_value_that_is_not_finite_is_named(value: float, shape: tuple[int, int], row: int, column: int) -> None:
    """NaN and infinities are refused by tensor, row and column, wherever a block begins."""
    weight = np.zeros(shape, np.float32)
    weight[row, column] = value
    with pytest.raises(NonFiniteError, match=rf"tensor 'fc\.weight' holds {value} at row {row}, column {column};"):
        pack_weight(weight, name="fc.weight")
    with pytest.raises(NonFiniteError, match=rf"at row {row + 1000}, column {column};"):
        pack_rows(weight, first_row=1000)


def test_the_first_bad_value_is_named() -> None:
    """Of several bad values the first in row order is told."""
    weight = np.zeros((4, 4), np.float32)
    weight[2, 3], weight[3, 0] = np.nan, np.inf
    with pytest.raises(NonFiniteError, match="row 2, column 3"):
        pack_weight(weight)


def test_a_float64_beyond_float32_is_refused() -> None:
    """A finite float64 that float32 cannot hold is refused too; the largest float32 is not."""
    with pytest.raises(NonFiniteError, match="row 0, column 1"):
        pack_weight(np.array([[1, 1e39]]))
    assert pack_weight(np.array([[1, float(np.finfo(np.float32).max)]])).codes().tolist() == [[0, 7]]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4"], ids=str)
@pytest.mark.parametrize("order", ["C", "F"])
def test_any_float_array_packs_like_its_float32(dtype: object, order: str, rng: np.random.Generator) -> None:
    """dtype, byte order and memory order of the weight leave no trace, nor is it edited."""
    weight = np.array(rng.standard_normal((9, 11)), dtype, order=order)  # type: ignore[call-overload]
    weight.flags.writeable = False
    expected = pack_weight(np.ascontiguousarray(weight, np.float32))
    found = pack_weight(weight)
    np.testing.assert_array_equal(found.packed, expected.packed)
    np.testing.assert_array_equal(found.scales, expected.scales)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (4,), (2, 2, 2), ()], ids=str)
def test_only_matrices_with_elements_are_packed(shape: tuple[int, ...]) -> None:
    """Any other shape is refused with what was wanted."""
    with pytest.raises(UsageError, match=r"expected \(N, K\)"):
        pack_weight(np.zeros(shape, np.float32))
