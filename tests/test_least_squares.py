"""The scale of least squared error against every path walked one by one, dense grids and rows worked by hand."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qcs4w_packer import quantize
from qcs4w_packer.methods.least_squares import _BLOCK_ELEMENTS, least_squares_scales
from qcs4w_packer.quantize import row_absmax, row_scales

FLOOR = 2.0**-23
ROUNDED = 1e-12  # what rounding the scale and its reciprocal to float32 may cost, as a share of Σ h·w²

KINDS: dict[str, Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "heavy tails": lambda rng, shape: rng.standard_t(2, shape),
    "uniform": lambda rng, shape: rng.uniform(-1, 1, shape),
    "positive": lambda rng, shape: np.abs(rng.standard_normal(shape)),
    "negative": lambda rng, shape: -np.abs(rng.standard_normal(shape)),
    "few values": lambda rng, shape: rng.integers(-3, 4, shape),
    "outlier": lambda rng, shape: np.where(np.arange(shape[1]) == shape[1] // 2, 300.0, rng.standard_normal(shape)),
    "sizes": lambda rng, shape: rng.standard_normal(shape) * 10.0 ** rng.uniform(-30, 30, (shape[0], 1)),
}


def losses(weight: np.ndarray, scales: np.ndarray, importance: np.ndarray | float = 1.0) -> np.ndarray:
    """Σ h·(w − s·q)² of each row in float64, with the codes that packing would store."""
    codes, _ = quantize(weight, np.asarray(scales, np.float32))
    off = weight.astype(np.float64) - codes * np.asarray(scales, np.float64)[:, None]
    return np.asarray((importance * off * off).sum(axis=1))


def sizes(weight: np.ndarray, importance: np.ndarray | float = 1.0) -> np.ndarray:
    """Σ h·w² of each row in float64."""
    return np.asarray((importance * weight.astype(np.float64) ** 2).sum(axis=1))


def least_loss(row: list[float], importance: list[float]) -> float:
    """The least Σ h·(w − s·q)² of one row: every step of every code, largest scale first, in Python's own floats."""
    steps = [
        (abs(w) / (m + 0.5), h * abs(w), h * (2 * m + 1))
        for w, h in zip(row, importance, strict=True)
        for m in range(8 if w < 0 else 7)
        if w and h
    ]
    a = b = gain = 0.0
    for _, more_a, more_b in sorted(steps, reverse=True):
        a, b = a + more_a, b + more_b
        scale = max(a / b, FLOOR)
        gain = max(gain, scale * (2 * a - scale * b))
    return sum(h * w * w for w, h in zip(row, importance, strict=True)) - gain


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("columns", [1, 2, 3, 11, 63, 64, 113, 900])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_optimum(kind: str, columns: int, weighted: bool, rng: np.random.Generator) -> None:
    """No other scale and codes of any row have a lower error: the whole path, step by step."""
    weight = KINDS[kind](rng, (7, columns)).astype(np.float32)
    h = rng.gamma(0.3, size=columns) if weighted else np.ones(columns)
    scales = least_squares_scales(weight, h if weighted else None)
    expected = [least_loss(row, h.tolist()) for row in weight.astype(np.float64).tolist()]
    assert scales.dtype == np.float32
    assert (losses(weight, scales, h) <= expected + ROUNDED * sizes(weight, h)).all()


@settings(max_examples=150, deadline=None)
@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.integers(1, 90)),
        elements=st.one_of(st.floats(-2, 2, width=32), st.floats(-(2.0**100), 2.0**100, width=32), st.just(0.0)),
    ),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_no_scale_of_a_dense_grid_is_better(weight: np.ndarray, seed: int, weighted: bool) -> None:
    """2,000 scales from the floor to twice the largest value, and absmax's own, for rows of any size and any h."""
    columns = weight.shape[1]
    h = np.random.default_rng(seed).gamma(0.3, size=columns) if weighted else np.ones(columns)
    scales = least_squares_scales(weight, h if weighted else None)
    assert (scales >= FLOOR).all()
    found = losses(weight, scales, h)
    allowed = ROUNDED * sizes(weight, h) * (1 + 1e-9)
    assert (found <= losses(weight, row_scales(row_absmax(weight)), h) + allowed).all()
    for row, largest in enumerate(row_absmax(weight).tolist()):
        grid = np.maximum(np.linspace(largest / 40, 2 * largest, 2000), FLOOR).astype(np.float32)
        others = losses(np.repeat(weight[row : row + 1], len(grid), axis=0), grid, h)
        assert found[row] <= others.min() + allowed[row]


@pytest.mark.parametrize(
    ("row", "h", "scale", "codes"),
    [
        ([0, 0, 0], None, FLOOR, [0, 0, 0]),
        ([3], None, 3, [1]),
        ([-3], None, -3 / -8, [-8]),
        ([7, 1], None, 1, [7, 1]),
        ([-8, 1], None, 1, [-8, 1]),
        ([8, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1], None, 66 / 59, [7, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1]),
        ([1, 5], [1, 0], 1, [1, 5]),
        ([5e-8, 0], None, FLOOR, [0, 0]),
        ([1e-7], None, FLOOR, [1]),
    ],
    ids=["zeros", "one column", "one negative", "exact", "exact at -8", "clips at 7", "dead column", "lost", "floor"],
)
def test_rows_worked_by_hand(row: list[float], h: list[float] | None, scale: float, codes: list[int]) -> None:
    """Scales and codes of rows so small that the optimum can be seen, or another as good."""
    weight = np.array([row], np.float32)
    found = least_squares_scales(weight, None if h is None else np.array(h))
    best = losses(weight, np.array([scale]), 1.0 if h is None else np.array(h))
    assert losses(weight, found, 1.0 if h is None else np.array(h)) == pytest.approx(best, abs=1e-12)
    if len(row) > 1 and h is None:
        assert found[0] == np.float32(scale)
        assert quantize(weight, found)[0].tolist() == [codes]


def test_what_no_input_sees_is_packed_as_absmax_does(rng: np.random.Generator) -> None:
    """Where h is 0 for every weight of a row that is not 0, any scale is as good, and the row stays what it was."""
    weight = rng.standard_normal((3, 5)).astype(np.float32)
    weight[1, :2] = 0
    weight[2] = 0
    h = np.array([1.0, 0.5, 0, 0, 0])
    scales = least_squares_scales(weight, h)
    expected = row_scales(row_absmax(weight))
    assert scales[1:].tolist() == expected[1:].tolist()
    assert scales[0] != expected[0]
    assert least_squares_scales(weight, np.zeros(5)).tolist() == expected.tolist()


@pytest.mark.parametrize("columns", [5, 700])
def test_blocks_and_neighbours_change_nothing(columns: int, rng: np.random.Generator) -> None:
    """A row's scale depends on that row alone, wherever it stands and whatever the others' sizes are."""
    rows = 2 * (_BLOCK_ELEMENTS // columns) + 3 if columns > 5 else 50
    weight = (rng.standard_normal((rows, columns)) * 10.0 ** rng.uniform(-20, 20, (rows, 1))).astype(np.float32)
    weight[::7] = 0
    h = rng.gamma(0.3, size=columns)
    whole = least_squares_scales(weight, h)
    some = [0, 1, 2, 13, rows // 2, rows - 2, rows - 1]
    alone = np.concatenate([least_squares_scales(weight[i : i + 1], h) for i in some])
    np.testing.assert_array_equal(whole[some], alone)
    np.testing.assert_allclose(least_squares_scales(weight, 1e-200 * h), whole, rtol=2**-23)


@pytest.mark.parametrize("columns", [3, 256, 3000])
def test_constant_rows_come_back_exactly(columns: int) -> None:
    """All weights alike: every breakpoint falls together, and nothing is lost."""
    weight = np.repeat(np.array([[0.3], [-0.7], [1e30]], np.float32), columns, axis=1)
    assert (losses(weight, least_squares_scales(weight)) <= ROUNDED * sizes(weight)).all()
