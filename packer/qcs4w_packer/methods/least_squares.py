"""The scale of each row with the least squared error that any scale can have, plain or weighted by column.

For a row w and weights h ≥ 0 of its columns, let m be the magnitude of the code that a scale s gives to each |w|. As s
falls from infinity, the codes grow one step at a time, at the breakpoints |w| / (m + ½): up to 7 for a positive weight
and 8 for a negative one. With A = Σ h·|w|·m and B = Σ h·m², the best scale for given codes is A / B and takes A² / B
away from Σ h·w², so that the optimum is the largest A² / B along the path. A step at s adds Δb = h·(2m + 1) to B and
h·|w| = Δb·s / 2 to A: A is a concave function of B whose slope is s / 2. Between two scales the path therefore lies in
the triangle of its chord and its two tangents, and A² / B, convex along a straight line, is largest in a corner. A
histogram gives A and B at a grid of scales for all rows at once; the triangles whose corner cannot reach the best value
met so far are ruled out, and only the breakpoints of the few that stay are sorted.
"""

import numpy as np
from numpy.typing import NDArray

from ..nibbles import CODE_MAX, CODE_MIN
from ..quantize import SCALE_FLOOR, row_absmax, row_scales

_BLOCK_ELEMENTS = 128 * 1024  # of float64 weights at a time
_SHORT_ROW = 64  # columns; shorter rows are sorted whole
_ROUNDING = 1e-10  # what float64 sums may be off, as a share of Σ h·w²; what lies so close is not ruled out
_ALL_ZERO = 2.5  # a scale, in units of the largest magnitude, that makes all codes 0; from 2 on they all are
_UP, _DOWN = CODE_MAX, -CODE_MIN  # the largest magnitudes of codes


def least_squares_scales(
    weight: NDArray[np.float32], importance: NDArray[np.floating] | None = None
) -> NDArray[np.float32]:
    """Return the scale s ≥ 2⁻²³ of each row that makes Σ h·(w − s·q)² least, q being the nearest code at s.

    Args:
        weight: float32, shape (N, K), finite.
        importance: h of each column, shape (K,), finite and not negative; by default 1 for all.

    Returns:
        float32, shape (N,), the exact optimum rounded once. Where any scale is as good as any other, since h is 0
        wherever the row is not, it is absmax / 7.5 as `row_scales` has it.
    """
    rows, columns = weight.shape
    scales = row_scales(row_absmax(weight))
    h = np.ones(columns) if importance is None else np.asarray(importance, np.float64)
    if not h.any():
        return scales
    h = h / h.max()
    alive = np.flatnonzero(h)
    h = h[alive]
    step = max(1, _BLOCK_ELEMENTS // columns)
    for start in range(0, rows, step):
        block = weight[start : start + step].astype(np.float64)
        if len(alive) < columns:
            block = block[:, alive]
        part = scales[start : start + step]
        units = np.abs(block).max(axis=1)
        some = np.flatnonzero(units)
        if len(some) < len(block):
            block, units = block[some], units[some]
        if len(some):
            found = units * _optimum(block / units[:, None], h, SCALE_FLOOR / units)
            part[some] = np.maximum(found.astype(np.float32), SCALE_FLOOR)
    return scales


def _optimum(u: NDArray[np.float64], h: NDArray[np.float64], floors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the best scales of rows whose largest magnitude is 1: float64, shape (n,).

    Args:
        u: float64, shape (n, K), in [-1, 1].
        h: float64, shape (K,), above 0, at most 1.
        floors: float64, shape (n,), the least scale that each row may have.
    """
    magnitude = np.abs(u)
    limit = np.where(u < 0, np.int8(_DOWN), np.int8(_UP))
    limit[magnitude == 0] = 0
    if u.shape[1] < _SHORT_ROW:
        low = np.zeros(len(u))
        high = np.full(len(u), _ALL_ZERO)
    else:
        low, high = _interval(magnitude, limit, h, floors)
    found = _sorted_path(magnitude, limit, h, floors, low, high)
    # Once more from its codes: sums over all rows at once have rounded by what the neighbours are.
    codes = np.minimum(np.rint(magnitude / found[:, None]), limit)
    size = np.einsum("ij,ij,j->i", codes, codes, h)
    along = np.einsum("ij,ij,j->i", magnitude, codes, h)
    best: NDArray[np.float64] = np.maximum(along / np.where(size > 0, size, 1), floors)
    return best


def _interval(
    magnitude: NDArray[np.float64], limit: NDArray[np.int8], h: NDArray[np.float64], floors: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return for each row two scales between which the optimum is known to lie, each float64, shape (n,)."""
    rows, columns = magnitude.shape
    bins = int(np.clip(columns // 2, 384, 2048))
    width = bins + 1  # a value of v lies in bin v · bins, and bins are laid out from the largest down
    place = (magnitude * -bins).astype(np.intp)
    place += (limit == _DOWN) * np.intp(width)
    place += np.arange(bins, bins + 2 * width * rows, 2 * width)[:, None]
    sums, counts = (
        np.bincount(place.reshape(-1), values.reshape(-1), 2 * width * rows).reshape(rows, 2, width)
        for values in (magnitude * h, np.broadcast_to(h, magnitude.shape))
    )
    sums, counts = np.cumsum(sums, axis=2), np.cumsum(counts, axis=2)  # of all that is not smaller
    total = np.einsum("ij,ij,j->i", magnitude, magnitude, h)

    # Scale j is 2·j / bins, and its breakpoint for m lies at the edge of bin (2m + 1)·j.
    j = _grid(bins)
    A, B = np.zeros((rows, len(j) + 2)), np.zeros((rows, len(j) + 2))
    for m in range(_DOWN):
        edge = 2 * m + 1
        places = bins - edge * j[: np.searchsorted(j, bins // edge, side="right")]
        for sign in (0, 1) if m < _UP else (1,):
            A[:, 1 : len(places) + 1] += sums[:, sign, places]
            B[:, 1 : len(places) + 1] += edge * counts[:, sign, places]
    A[:, 0] = np.einsum("ij,ij,j->i", magnitude, limit, h)
    B[:, 0] = np.einsum("ij,ij,j->i", limit, limit, h, dtype=np.float64)
    s = np.concatenate(([0.0], j * (2 / bins), [_ALL_ZERO]))

    with np.errstate(divide="ignore", invalid="ignore"):
        straight = np.where(B > 0, A * A / B, 0)
        fit = np.maximum(np.where(B > 0, A / B, 0), floors[:, None])
        best = (fit * (2 * A - fit * B)).max(axis=1)
        near, far = s[:-1] / 2, s[1:] / 2
        corner_b = (A[:, :-1] - A[:, 1:] - near * B[:, :-1] + far * B[:, 1:]) / (far - near)
        corner_a = A[:, 1:] + far * (corner_b - B[:, 1:])
        corner = np.where(corner_b > 0, corner_a**2 / corner_b, 0)
    bound = np.maximum(np.maximum(straight[:, :-1], straight[:, 1:]), corner)
    open_ = bound >= (best - _ROUNDING * total)[:, None]
    low = open_.argmax(axis=1)
    high = len(s) - 1 - open_[:, ::-1].argmax(axis=1)
    return s[low], s[high]


def _grid(bins: int) -> NDArray[np.intp]:
    """Return the scales to try, in units of 2 / bins, rising: every one where optima lie, then ever fewer."""
    dense = bins // 6
    sparse = dense * 1.04 ** np.arange(1, 46)  # up to 1 and beyond
    return np.concatenate((np.arange(1, dense + 1), np.unique(np.minimum(sparse, bins).astype(np.intp))))


def _sorted_path(
    magnitude: NDArray[np.float64],
    limit: NDArray[np.int8],
    h: NDArray[np.float64],
    floors: NDArray[np.float64],
    low: NDArray[np.float64],
    high: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Walk each row's path from scale `high` down to `low` and return the best scale met: float64, shape (n,)."""
    rows = len(magnitude)
    with np.errstate(divide="ignore", invalid="ignore"):
        first = np.minimum(np.floor(magnitude / high[:, None] + 0.5), limit).astype(np.int8)
        last = np.minimum(np.floor(magnitude * (1 / low)[:, None] + 0.5), limit)
    last = np.where(np.isnan(last), 0, last).astype(np.int8)
    a0 = np.einsum("ij,ij,j->i", magnitude, first, h)
    b0 = np.einsum("ij,ij,j->i", first, first, h, dtype=np.float64)

    steps = last - first
    row, column = np.nonzero(steps)
    m = first[row, column]
    count = steps[row, column]
    if (count > 1).any():  # an element that takes several steps is listed once for each
        many = np.repeat(np.arange(len(row)), count)
        nth = np.arange(len(many)) - np.repeat(np.cumsum(count) - count, count)
        row, column, m = row[many], column[many], (m[many] + nth).astype(np.int8)
    size = magnitude[row, column]
    weight = h[column]
    scale = size / (m + 0.5)

    # One sort for all rows: the row is the whole part of the key, the fallen scale its fraction.
    span = np.where(high > low, high - low, 1)
    key = row + (0.25 + 0.5 * (high[row] - scale) / span[row])
    order = np.argsort(np.concatenate((np.arange(rows, dtype=np.float64), key)))
    owner = np.concatenate((np.arange(rows), row))[order]
    starts = np.searchsorted(owner, np.arange(rows))
    A = _running(np.concatenate((a0, weight * size))[order], starts, owner)
    B = _running(np.concatenate((b0, weight * (2.0 * m + 1)))[order], starts, owner)
    with np.errstate(divide="ignore", invalid="ignore"):
        fit = np.maximum(np.where(B > 0, A / B, 0), floors[owner])
    gain = fit * (2 * A - fit * B)
    best = np.flatnonzero(gain == np.maximum.reduceat(gain, starts)[owner])
    chosen = np.empty(rows, np.intp)
    chosen[owner[best[::-1]]] = best[::-1]  # of equals the first, which has the largest scale
    return fit[chosen]


def _running(steps: NDArray[np.float64], starts: NDArray[np.intp], owner: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the running sums of each row's steps; rows follow one another, row i from starts[i]."""
    sums = np.cumsum(steps)
    before: NDArray[np.float64] = (sums - steps)[starts]
    return sums - before[owner]
