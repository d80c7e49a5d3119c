"""Why is it wrong? The usual ways to misread packed bytes are tried, and those that explain the evidence are named."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qcs4w_packer import PackedLinear, Reading, readings
from qcs4w_packer.measure import quantization_error, row_square_sums
from qcs4w_packer.quantize import dequantize
from qcs4w_packer.readings import RIGHT

# A reading is named when it leaves less than this part unexplained: of the whole, and of what the right reading leaves.
_EXPLAINS = 0.5
_ROWS = 256  # of the weight, and of x; more rows would not tell more
_MOST = 3


@dataclass(frozen=True)
class Cause:
    """One explanation of a failure.

    Attributes:
        name: of the fault, "nibbles swapped" say.
        residual: relative error that is left once the fault is assumed; 0 explains everything.
        evidence: what shows it, for people.
    """

    name: str
    residual: float
    evidence: str


def causes_of_output(
    packed: PackedLinear, x: NDArray[np.float32], y: NDArray[np.float32], scales: NDArray[np.float32]
) -> list[Cause]:
    """Explain a wrong y by misreadings of the packed bytes.

    Args:
        packed: the weight.
        x: float32, shape (M, K).
        y: float32, shape (M, N), the wrong output.
        scales: float32, shape (N,), those that made y.

    Returns:
        The best first; empty when none explains it.
    """
    rows = slice(0, _ROWS)
    data, wide_x = packed.packed[rows], x[rows].astype(np.float64)
    seen = np.nan_to_num(y[rows, rows].astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)

    def residual(reading: Reading) -> float:
        codes = reading.codes(data, packed.in_features).astype(np.float64)
        return _relative(seen, wide_x @ (codes * scales[rows, None].astype(np.float64)).T)

    baseline = residual(RIGHT)
    found = [(residual(reading), reading) for reading in readings(packed.in_features) if reading.faults]
    return _best(found, baseline, "read so, y is off by {residual:.2g}, read as qcs4w by {baseline:.2g}")


def causes_of_weights(packed: PackedLinear, weight: NDArray[np.float32]) -> list[Cause]:
    """Explain packed bytes that do not fit their float source by another order or encoding of the nibbles.

    Args:
        packed: the weight as stored.
        weight: float32, shape (N, K), what it was made of.

    Returns:
        The best first; empty when none explains the source better than our own reading.
    """
    rows = slice(0, _ROWS)

    def residual(reading: Reading) -> float:
        codes = reading.codes(packed.packed[rows], packed.in_features)
        return quantization_error(*row_square_sums(weight[rows], dequantize(codes, packed.scales[rows]))).relative

    baseline = residual(RIGHT)
    found = [(residual(reading), reading) for reading in readings() if reading.faults]
    return _best(
        found, baseline, "read so, the weights are off the source by {residual:.2g}, read as qcs4w by {baseline:.2g}"
    )


def _best(found: list[tuple[float, Reading]], baseline: float, evidence: str) -> list[Cause]:
    """Rank readings, the smallest residual first; fewer faults win where residuals are equal."""
    telling = [(left, reading) for left, reading in found if left < _EXPLAINS * min(baseline, 1.0)]
    telling.sort(key=lambda item: (round(item[0], 6), len(item[1].faults)))
    best: list[tuple[float, Reading]] = []
    for left, reading in telling:
        if left > max(2 * telling[0][0], 1e-6) or len(best) == _MOST:
            break
        if not any(set(better.faults) < set(reading.faults) for _, better in best):  # more faults that explain no more
            best.append((left, reading))
    return [Cause(reading.name, left, evidence.format(residual=left, baseline=baseline)) for left, reading in best]


def _relative(seen: NDArray[np.float64], explained: NDArray[np.float64]) -> float:
    """Return ‖seen − explained‖ / ‖seen‖; nothing but zeros explains a y of zeros."""
    size, left = float(np.linalg.norm(seen)), float(np.linalg.norm(seen - explained))
    return left / size if size else (np.inf if left else 0.0)
