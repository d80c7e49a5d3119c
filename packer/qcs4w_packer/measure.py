"""How far dequantized weights lie from the float weights they were made of."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_BLOCK_ELEMENTS = 4 << 20  # of float64 weights at a time


@dataclass(frozen=True)
class QuantizationError:
    """Error of a dequantized weight against its float source.

    Attributes:
        relative: ‖W − Ŵ‖ / ‖W‖ in the Frobenius norm; 0 for an all-zero weight that came back as zero.
        snr_db: −20 · log10(relative), in dB; infinite when nothing was lost.
        worst_row: the row with the largest relative error of its own.
        worst_row_relative: that row's ‖w − ŵ‖ / ‖w‖.
    """

    relative: float
    snr_db: float
    worst_row: int
    worst_row_relative: float


def row_square_sums(
    weight: NDArray[np.float32], dequantized: NDArray[np.float32]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return Σ(w − ŵ)² and Σw² of each row, float64 (N,), for float32 inputs of shape (N, K)."""
    wide = weight.astype(np.float64)
    difference = wide - dequantized
    return np.einsum("ij,ij->i", difference, difference), np.einsum("ij,ij->i", wide, wide)


def output_error(x: NDArray[np.float32], weight: NDArray[np.float32], dequantized: NDArray[np.float32]) -> float:
    """Return ‖x·(W − Ŵ)ᵀ‖ / ‖x·Wᵀ‖, the relative error that quantizing makes in the output of a linear.

    Args:
        x: float32, shape (M, K).
        weight: float32, shape (N, K).
        dequantized: float32, shape (N, K).
    """
    wide = x.astype(np.float64)
    lost = whole = 0.0
    step = max(1, _BLOCK_ELEMENTS // weight.shape[1])
    for start in range(0, len(weight), step):
        rows = weight[start : start + step].astype(np.float64)
        difference = rows - dequantized[start : start + step]
        lost += float(np.square(wide @ difference.T).sum())
        whole += float(np.square(wide @ rows.T).sum())
    return math.sqrt(float(_ratio(np.array([lost]), np.array([whole]))[0]))


class ErrorSums:
    """Sums up rows block by block into one `QuantizationError`, since a matrix may have too many to keep of each."""

    def __init__(self) -> None:
        self._errors = self._weights = 0.0
        self._row_count = self._worst_row = 0
        self._worst = -1.0

    def add(self, error_squares: NDArray[np.float64], weight_squares: NDArray[np.float64]) -> None:
        """Add Σ(w − ŵ)² and Σw² of the rows that follow, float64 (n,), n at least 1; see `row_square_sums`."""
        rows = np.sqrt(_ratio(error_squares, weight_squares))
        worst = int(rows.argmax())
        if rows[worst] > self._worst:
            self._worst_row, self._worst = self._row_count + worst, float(rows[worst])
        self._row_count += len(rows)
        self._errors += float(error_squares.sum())
        self._weights += float(weight_squares.sum())

    def result(self) -> QuantizationError:
        """Return the error of all rows."""
        relative = math.sqrt(float(_ratio(np.array([self._errors]), np.array([self._weights]))[0]))
        return QuantizationError(
            relative=relative,
            snr_db=math.inf if relative == 0 else -20 * math.log10(relative),
            worst_row=self._worst_row,
            worst_row_relative=self._worst,
        )


def quantization_error(error_squares: NDArray[np.float64], weight_squares: NDArray[np.float64]) -> QuantizationError:
    """Sum up per-row squares (see `row_square_sums`) into one `QuantizationError`."""
    sums = ErrorSums()
    sums.add(error_squares, weight_squares)
    return sums.result()


def _ratio(error: NDArray[np.float64], size: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return error / size, with 0 / 0 = 0 and x / 0 = inf."""
    safe = np.where(size > 0, size, 1.0)
    return np.where(size > 0, error / safe, np.where(error > 0, np.inf, 0.0))
