"""Weights that are hard to quantize: hypothesis draws shapes, kinds of rows and, for small ones, every value."""

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

Row = NDArray[np.float32]
FLOOR_ABSMAX = np.float32(7.5 * 2.0**-23)  # up to here the scale is 2⁻²³


def gaussian(rng: np.random.Generator, width: int) -> Row:
    """What weights look like."""
    return rng.standard_normal(width, np.float32) * np.float32(0.02)


def uniform(rng: np.random.Generator, width: int) -> Row:
    """Evenly spread, as weights are before training."""
    return rng.uniform(-1, 1, width).astype(np.float32)


def ties(rng: np.random.Generator, width: int) -> Row:
    """Half codes, k + 0.5 times the scale of the row, and their neighbours on either side."""
    absmax = np.float32(2.0 ** rng.uniform(-19, 100))
    scale = absmax / np.float32(7.5)
    row = (rng.integers(-8, 8, width).astype(np.float32) + np.float32(0.5)) * scale
    away = rng.choice(np.array([-np.inf, 0, np.inf], np.float32), width)
    row = np.where(away == 0, row, np.nextafter(row, away))
    row = np.clip(row, -absmax, absmax)
    row[rng.integers(width)] = absmax * rng.choice([-1, 1])
    return row.astype(np.float32)


def exact_ties(rng: np.random.Generator, width: int) -> Row:
    """Half codes of a scale that is a power of two, so that each is a tie to the last bit."""
    row = rng.integers(-8, 8, width) + 0.5
    row[rng.integers(width)] = 7.5 * rng.choice([-1, 1])
    return (np.clip(row, -7.5, 7.5) * 2.0 ** rng.integers(-22, 120)).astype(np.float32)


def extremes(rng: np.random.Generator, width: int) -> Row:
    """±absmax in many places, of one sign or of both: a tie of 7.5 that the reciprocal decides."""
    absmax = np.float32(rng.uniform(1, 2)) * np.float32(2.0 ** rng.integers(-18, 126))
    signs = rng.choice([[-1, 0, 0.5], [1, 0, -0.5], [-1, 1, 0.25]])
    row = rng.choice(signs, width).astype(np.float32)
    row[rng.integers(width)] = signs[0]
    return row * absmax


def near_the_floor(rng: np.random.Generator, width: int) -> Row:
    """Absmax about 8.94e-7, below which the scale is 2⁻²³: on the edge, a step beside it, or within a factor of 8."""
    steps = np.nextafter(FLOOR_ABSMAX, np.array([0, 1], np.float32))
    absmax = np.float32(rng.choice([FLOOR_ABSMAX, *steps, FLOOR_ABSMAX * rng.uniform(0.125, 8)]))
    row = rng.uniform(-1, 1, width).astype(np.float32)
    row[rng.integers(width)] = rng.choice([-1, 1])
    return row * absmax


def vanishing(rng: np.random.Generator, width: int) -> Row:
    """All zero, negative zero, subnormals: nothing that the floor leaves a code for."""
    zeros = np.zeros(width, np.float32)
    return [zeros, -zeros, (rng.uniform(-1, 1, width) * 1e-39).astype(np.float32)][rng.integers(3)]


def halves(rng: np.random.Generator, width: int) -> Row:
    """Values of an fp16 checkpoint."""
    return (rng.standard_normal(width) * 2.0 ** rng.integers(-14, 12)).astype(np.float16).astype(np.float32)


def bfloats(rng: np.random.Generator, width: int) -> Row:
    """Values of a bf16 checkpoint: the low half of the word is 0."""
    row = rng.standard_normal(width, np.float32) * np.float32(0.02)
    return (row.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def wide(rng: np.random.Generator, width: int) -> Row:
    """Magnitudes from the smallest subnormal to the largest number in one row."""
    signs = rng.choice([-1.0, 1.0], width)
    return (signs * 2.0 ** rng.uniform(-149, 127.99, width)).astype(np.float32)


def huge(rng: np.random.Generator, width: int) -> Row:
    """Up to the largest float32, whose code times its scale may be an infinity."""
    largest = float(np.finfo(np.float32).max)
    return (rng.choice([-1.0, -0.5, 0.25, 1.0, rng.uniform()], width) * largest).astype(np.float32)


def one_sided(rng: np.random.Generator, width: int) -> Row:
    """All positive or all negative, or one value throughout."""
    row = rng.uniform(0.5, 1, width) if rng.integers(2) else np.full(width, rng.uniform(0.1, 1))
    return (row * rng.choice([-1, 1])).astype(np.float32)


def integers(rng: np.random.Generator, width: int) -> Row:
    """Small whole numbers, as tests and one-hot weights have."""
    return rng.integers(-15, 16, width).astype(np.float32)


KINDS: tuple[Callable[[np.random.Generator, int], Row], ...] = (
    gaussian,
    uniform,
    ties,
    exact_ties,
    extremes,
    near_the_floor,
    vanishing,
    halves,
    bfloats,
    wide,
    huge,
    one_sided,
    integers,
)


def matrix(rng: np.random.Generator, shape: tuple[int, int], kinds: tuple[Callable[..., Row], ...] = KINDS) -> Row:
    """Make a weight whose rows take the kinds in turn: float32, of the given shape (N, K), finite."""
    rows, width = shape
    weight = np.stack([kinds[row % len(kinds)](rng, width) for row in range(rows)])
    assert weight.dtype == np.float32
    assert np.isfinite(weight).all()
    return weight


@st.composite
def made_matrices(draw: st.DrawFn, max_rows: int, widths: st.SearchStrategy[int]) -> Row:
    """Draw a shape, kinds of rows and the seed of their values."""
    rows, width = draw(st.integers(1, max_rows)), draw(widths)
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=5))
    return matrix(np.random.default_rng(draw(st.integers(0, 2**32 - 1))), (rows, width), tuple(kinds))


def free_matrices(widths: st.SearchStrategy[int]) -> st.SearchStrategy[Row]:
    """Draw each value of a small weight from all finite float32."""
    values = st.floats(allow_nan=False, allow_infinity=False, width=32)
    shapes = st.tuples(st.integers(1, 6), widths)
    return shapes.flatmap(lambda shape: hnp.arrays(np.float32, shape, elements=values))
