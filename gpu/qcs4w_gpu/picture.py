"""What a page shows of one tensor: where y is wrong, by how much, and how its codes are spread; small at any size."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qcs4w_packer import PackedLinear
from qcs4w_packer.nibbles import CODE_MAX, CODE_MIN

_MAP = (96, 192)  # cells at most: rows, columns
_POINTS = 400
_BINS = 40


@dataclass(frozen=True, eq=False)
class Picture:
    """One probe of one tensor, reduced to what can be drawn.

    Attributes:
        probe: "exact" or "bounded".
        shape: M, N.
        cells: float64, at most 96 × 192: the largest excess in each part of y. The excess is error / bound, or for the
            exact probe the error itself; infinite for NaN.
        errors: float64, of some elements, the worst among them; NaN is left out.
        bounds: float64, of the same elements; zeros for the exact probe.
        error_counts: how many of all elements fall into each bin of log10(error); errors of zero are in none.
        error_edges: of these bins, one more.
        equal: elements without any error.
        code_counts: how often the weight has each code, -8 first.
    """

    probe: str
    shape: tuple[int, int]
    cells: NDArray[np.float64]
    errors: NDArray[np.float64]
    bounds: NDArray[np.float64]
    error_counts: NDArray[np.int64]
    error_edges: NDArray[np.float64]
    equal: int
    code_counts: NDArray[np.int64]


def picture_of(
    packed: PackedLinear,
    y: NDArray[np.float32],
    expected: NDArray[np.float64],
    bound: NDArray[np.float64] | None,
    *,
    right: NDArray[np.bool_] | None = None,
) -> Picture:
    """Reduce a y and what it should be to a picture.

    Args:
        packed: the weight.
        y: float32, shape (M, N).
        expected: float64, shape (M, N).
        bound: float64, shape (M, N), or None where equality is demanded.
        right: bool, shape (M, N), infinities that are right.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(y.astype(np.float64) - expected)
    error[np.isnan(error)] = np.inf
    if right is not None:
        error[right] = 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = error if bound is None else np.where(error > 0, error / bound, 0.0)
    finite = np.flatnonzero(np.isfinite(error))
    order = finite[np.argsort(excess.ravel()[finite])]
    chosen = order[np.unique(np.linspace(0, len(order) - 1, _POINTS).astype(np.int64))] if len(order) else order
    sizes = error.ravel()[finite]
    counts, edges = np.histogram(np.log10(sizes[sizes > 0]), bins=_BINS)
    codes = np.bincount((packed.codes().astype(np.int64) - CODE_MIN).ravel(), minlength=CODE_MAX - CODE_MIN + 1)
    return Picture(
        probe="exact" if bound is None else "bounded",
        shape=(y.shape[0], y.shape[1]),
        cells=_reduced(excess),
        errors=error.ravel()[chosen],
        bounds=np.zeros(len(chosen)) if bound is None else bound.ravel()[chosen],
        error_counts=counts,
        error_edges=edges,
        equal=int((sizes == 0).sum()),
        code_counts=codes,
    )


def _reduced(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the largest value of each part, for at most _MAP parts."""
    for axis, most in enumerate(_MAP):
        size = values.shape[axis]
        starts = np.arange(min(size, most)) * size // min(size, most)
        values = np.maximum.reduceat(values, starts, axis=axis)
    return values
