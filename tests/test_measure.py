"""The quantization error, against figures worked by hand and in float64."""

import math

import numpy as np
import pytest

from qcs4w_packer.measure import QuantizationError, quantization_error, row_square_sums


def measure(weight: list[list[float]], dequantized: list[list[float]]) -> QuantizationError:
    """Measure two small matrices."""
    return quantization_error(*row_square_sums(np.array(weight, np.float32), np.array(dequantized, np.float32)))


def test_a_figure_worked_by_hand() -> None:
    """(3, 4) read as (3, 3) is off by 1 / 5, which is 13.98 dB."""
    error = measure([[0, 0], [3, 4]], [[0, 0], [3, 3]])
    assert error.relative == pytest.approx(0.2, rel=1e-15)
    assert error.snr_db == pytest.approx(20 * math.log10(5), rel=1e-15)
    assert error.worst_row == 1
    assert error.worst_row_relative == pytest.approx(0.2, rel=1e-15)


def test_nothing_lost_is_an_infinite_ratio() -> None:
    """Equal matrices, all zeros included, have no error."""
    for weight in ([[0.0, 0.0]], [[1.0, 2.0]]):
        assert measure(weight, weight) == QuantizationError(0.0, math.inf, 0, 0.0)


def test_noise_where_nothing_was_is_infinitely_wrong() -> None:
    """A zero row that did not come back as zero has an infinite relative error, and is the worst."""
    error = measure([[1, 1], [0, 0]], [[1, 1], [0, 1]])
    assert (error.worst_row, error.worst_row_relative) == (1, math.inf)
    assert error.relative == pytest.approx(math.sqrt(1 / 2))
    assert measure([[0.0]], [[1.0]]).snr_db == -math.inf


def test_the_worst_row_is_the_worst_for_its_size() -> None:
    """A small row that is half lost is worse than a large one with a larger absolute error."""
    assert measure([[100, 0], [0.2, 0]], [[99, 0], [0.1, 0]]).worst_row == 1


def test_sums_are_taken_in_float64(rng: np.random.Generator) -> None:
    """Squares beyond the range of float32 do not overflow or vanish, and equal numpy's float64 sums."""
    weight = rng.standard_normal((4, 1001)).astype(np.float32) * np.array([[1e30], [1e-30], [1], [1e-42]], np.float32)
    dequantized = weight * np.float32(0.75)
    errors, sizes = row_square_sums(weight, dequantized)
    wide = weight.astype(np.float64)
    np.testing.assert_allclose(errors, ((wide - dequantized) ** 2).sum(axis=1), rtol=1001 * 2.0**-53)
    np.testing.assert_allclose(sizes, (wide**2).sum(axis=1), rtol=1001 * 2.0**-53)
    assert (errors > 0).all()
