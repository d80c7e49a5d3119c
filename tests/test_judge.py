"""The judge: an oracle of its own, a bound that right answers keep, and comparisons that no wrong one passes."""

import ast
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from cases import SUMMATIONS, packed_of, random_codes
from numpy.typing import NDArray

import qcs4w_gpu.judge
from qcs4w_gpu import DomainError, compare, oracle, reference
from qcs4w_gpu.judge import EXACT_WINDOW, check_domain, exact_input
from qcs4w_packer import PackedLinear
from qcs4w_packer.errors import UsageError
from qcs4w_packer.rowpack import pack_weight

TINY = np.float32(2.0**-126)


def slow_linear(packed: PackedLinear, x: NDArray[np.float32], *, unit_scales: bool) -> list[list[Fraction]]:
    """Return x · Ŵᵀ by three loops over exact fractions, from bytes read by arithmetic."""
    y = []
    for row in x:
        y.append([])
        for data, scale in zip(packed.packed, packed.scales, strict=True):
            total = Fraction(0)
            for k in range(packed.in_features):
                byte = int(data[k // 2])
                code = (byte // 16 if k % 2 == 0 else byte % 16) - 8
                total += Fraction(float(row[k])) * code
            y[-1].append(total if unit_scales else total * Fraction(float(scale)))
    return y


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 4), (3, 2, 5), (1, 7, 9), (4, 1, 33)], ids=str)
@pytest.mark.parametrize("unit_scales", [False, True], ids=["scales", "ones"])
def test_the_oracle_equals_three_loops_over_fractions(shape: tuple[int, int, int], unit_scales: bool) -> None:
    """The oracle is exact up to float64 on random bytes, scales and inputs."""
    rows, out_features, in_features = shape
    draw = np.random.default_rng(shape)
    packed = PackedLinear(
        draw.integers(0, 256, (out_features, (in_features + 1) // 2)).astype(np.uint8),  # pads of any kind
        draw.standard_normal(out_features).astype(np.float32),
        in_features,
    )
    x = draw.standard_normal((rows, in_features)).astype(np.float32)
    wanted = slow_linear(packed, x, unit_scales=unit_scales)
    seen = oracle(packed, x, unit_scales=unit_scales)
    size = np.abs(x).astype(np.float64).sum() * 8 * max(1.0, float(np.abs(packed.scales).max()))
    for m, n in np.ndindex(seen.shape):
        assert abs(Fraction(float(seen[m, n])) - wanted[m][n]) <= size * 2.0**-50
    if not unit_scales:
        np.testing.assert_array_equal(seen, reference(packed, x).y)


def test_the_oracle_works_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a few rows at a time gives the same answer and bound."""
    packed = pack_weight(np.random.default_rng(0).standard_normal((37, 11), np.float32))
    x = np.ones((2, 11), np.float32)
    whole = reference(packed, x)
    monkeypatch.setattr(qcs4w_gpu.judge, "_BLOCK_BYTES", 16 * 6 * 4)
    parts = reference(packed, x)
    np.testing.assert_array_equal(oracle(packed, x), whole.y)
    np.testing.assert_array_equal(parts.y, whole.y)
    np.testing.assert_array_equal(parts.bound, whole.bound)


def test_the_judge_shares_no_code_with_what_it_judges() -> None:
    """The judge imports the packed weight as a record and errors, and calls none of the packer's unpacking."""
    tree = ast.parse(Path(qcs4w_gpu.judge.__file__).read_text("utf-8"))
    imported = {
        (node.module, name.name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names
    }
    assert {pair for pair in imported if pair[0] and "qcs4w" in pair[0]} == {
        ("qcs4w_packer", "PackedLinear"),
        ("qcs4w_packer.errors", "UsageError"),
    }
    assert {module for module, _ in imported if module in ("dispatcher", "linear", "webgpu", "kernel")} == set()
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not attributes & {"dequantize", "unpack_codes", "unpack_nibbles"}
    assert not any(isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "codes" for node in ast.walk(tree))


@pytest.mark.parametrize("factor", [1, 2])
def test_the_bound_is_the_documented_formula(factor: int) -> None:
    """Each element's bound is what the module's docstring says."""
    packed = packed_of(random_codes(3, 7), np.array([0.5, 3.0, 1e-30]))
    x = np.random.default_rng(0).standard_normal((2, 7), np.float32)
    bound = reference(packed, x, rounding_factor=factor).bound
    codes, scales = random_codes(3, 7).astype(np.float64), packed.scales.astype(np.float64)
    for m, n in np.ndindex(2, 3):
        weight = codes[n] * scales[n]
        rounding = factor * (7 + 2) * 2.0**-24 * float(np.abs(x[m].astype(np.float64)) @ np.abs(weight))
        x_sum = float(np.abs(x[m].astype(np.float64)).sum())
        flushing = 2.0**-126 * (np.abs(weight).sum() + 8 * x_sum + (7 + 2) * max(1.0, scales[n]))
        assert math.isclose(bound[m, n], rounding + flushing, rel_tol=1e-12)


def flush(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return values with subnormals set to zero, as WGSL permits."""
    return np.where(np.abs(values) < TINY, np.float32(0), values)


def answers(packed: PackedLinear, codes: NDArray[np.int8], x: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """Return y by every right way to compute it in float32: order of the sum, place of the scale, flushing."""
    wide, scales = codes.astype(np.float32), packed.scales
    late = x[:, None, :] * wide[None]  # (M, N, K)
    early = x[:, None, :] * (wide * scales[:, None])[None]
    found = {f"{order}, scaled late": add(late) * scales for order, add in SUMMATIONS.items()}
    found |= {f"{order}, scaled early": add(early) for order, add in SUMMATIONS.items()}
    total = np.zeros(late.shape[:2], np.float32)
    for k in range(packed.in_features):
        total = flush(total + flush(flush(x[:, None, k]) * wide[None, :, k]))
    found["flushing, scaled late"] = flush(total * flush(scales))
    total = np.zeros(late.shape[:2], np.float32)
    for k in range(packed.in_features):
        total = flush(total + flush(flush(x[:, None, k]) * flush(wide[:, k] * flush(scales))[None]))
    found["flushing, scaled early"] = total
    return found


INPUTS = {
    "normal": lambda draw, shape: draw.standard_normal(shape),
    "wide range": lambda draw, shape: draw.standard_normal(shape) * np.exp2(draw.integers(-40, 40, shape)),
    "cancelling": lambda draw, shape: 1e6 * draw.choice((-1, 1), shape) + draw.standard_normal(shape),
    "one sign": lambda draw, shape: draw.uniform(1, 2, shape),
    "subnormal": lambda draw, shape: draw.standard_normal(shape) * 2.0**-128,
    "mixed with subnormal": lambda draw, shape: draw.standard_normal(shape) * np.exp2(draw.integers(-149, -100, shape)),
    "large": lambda draw, shape: draw.standard_normal(shape) * 2.0**100,
}
SCALES = {
    "of weights": lambda draw, n: draw.uniform(1e-3, 1e-1, n),
    "ones": lambda draw, n: np.ones(n),
    "large": lambda draw, n: draw.uniform(1, 2, n) * 2.0**12,
    "huge": lambda draw, n: draw.uniform(1, 2, n) * 2.0**120,
    "subnormal": lambda draw, n: draw.uniform(0.1, 2, n) * 2.0**-127,
    "negative": lambda draw, n: -draw.uniform(1e-3, 1e-1, n),
}


@pytest.mark.parametrize("in_features", [1, 2, 3, 17, 256, 2048])
@pytest.mark.parametrize("kind", INPUTS)
def test_right_answers_stay_within_the_bound(kind: str, in_features: int) -> None:
    """Float32 arithmetic in any order, scaled before or after the sum, with subnormals or without, is never blamed."""
    draw = np.random.default_rng(in_features)
    for scales in SCALES:
        codes = random_codes(5, in_features, seed=in_features)
        packed = packed_of(codes, SCALES[scales](draw, 5))
        x = INPUTS[kind](draw, (3, in_features)).astype(np.float32)
        try:
            wanted = reference(packed, x)
        except DomainError:
            continue
        for way, y in answers(packed, codes, x).items():
            found = compare(y, wanted.y, wanted.bound)
            assert found.is_match, f"{way}, scales {scales}: {found.worst}"


def toward_zero(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Round float64 to float32 toward zero."""
    near = values.astype(np.float32)
    return np.where(np.abs(near.astype(np.float64)) > np.abs(values), np.nextafter(near, np.float32(0)), near)


@pytest.mark.parametrize("in_features", [1, 7, 300, 4096])
def test_directed_rounding_stays_within_the_doubled_bound(in_features: int) -> None:
    """Arithmetic that rounds toward zero keeps the bound with c = 2."""
    draw = np.random.default_rng(0)
    codes = np.abs(random_codes(4, in_features)).clip(1, 7).astype(np.int8)
    packed = packed_of(codes, draw.uniform(0.1, 0.2, 4))
    x = draw.uniform(1, 2, (3, in_features)).astype(np.float32)
    total = np.zeros((3, 4), np.float32)
    for k in range(in_features):
        product = toward_zero(x[:, None, k].astype(np.float64) * codes[None, :, k])
        total = toward_zero(total.astype(np.float64) + product)
    y = toward_zero(total.astype(np.float64) * packed.scales)
    wanted = reference(packed, x, rounding_factor=2)
    assert compare(y, wanted.y, wanted.bound).is_match


@pytest.mark.parametrize("in_features", [1, 2, 3, 129, 1024, 4096, 8192])
def test_the_exact_probe_catches_any_single_wrong_code(in_features: int) -> None:
    """One code off by one anywhere changes a y that must be equal, and what is right is equal."""
    draw = np.random.default_rng(in_features)
    codes = random_codes(4, in_features, seed=1)
    x = exact_input(in_features, 4, seed=0)
    wanted = oracle(packed_of(codes), x, unit_scales=True)
    assert compare((x @ codes.astype(np.float32).T), wanted).is_match
    for _ in range(20):
        n, k = int(draw.integers(4)), int(draw.integers(in_features))
        wrong = codes.copy()
        wrong[n, k] += 1 if wrong[n, k] < 7 else -1
        found = compare((x @ wrong.astype(np.float32).T), wanted)
        assert found.failures == 4
        assert found.wrong_columns == (n,)


def test_a_bound_alone_would_miss_one_wrong_code() -> None:
    """At K = 8192 the bounded probe does not see one code off by one, which is why there is an exact one."""
    codes = random_codes(4, 8192)
    wrong = codes.copy()
    wrong[0, 8191] += 1 if wrong[0, 8191] < 7 else -1
    x = np.random.default_rng(0).standard_normal((4, 8192), np.float32)
    wanted = reference(packed_of(codes), x)
    assert compare((x.astype(np.float64) @ wrong.T).astype(np.float32), wanted.y, wanted.bound).is_match


@pytest.mark.parametrize("in_features", [1, 5, 1000])
def test_exact_inputs_are_small_whole_numbers(in_features: int) -> None:
    """Up to the window x has the rows asked for, each value a non-zero whole number in [-4, 4]."""
    x = exact_input(in_features, 4, seed=0)
    assert x.shape == (4, in_features)
    assert x.dtype == np.float32
    assert set(np.unique(np.abs(x))) <= {1, 2, 3, 4}
    np.testing.assert_array_equal(x, exact_input(in_features, 4, seed=0))
    if in_features > 100:
        assert len(np.unique(x)) == 8
        assert not np.array_equal(x, exact_input(in_features, 4, seed=1))


@pytest.mark.parametrize("beyond", [0, 1, EXACT_WINDOW + 3])
def test_windows_cover_a_long_row_once(beyond: int) -> None:
    """Beyond 524,288 columns each row of x covers one window, and together they cover every column."""
    in_features = EXACT_WINDOW + beyond
    x = exact_input(in_features, 2, seed=0)
    windows = math.ceil(in_features / EXACT_WINDOW)
    assert x.shape == (2 * windows, in_features)
    assert int(np.count_nonzero(x, axis=1).max()) <= EXACT_WINDOW
    np.testing.assert_array_equal(np.count_nonzero(x, axis=0), 2)
    assert 8 * float(np.abs(x).sum(axis=1).max()) <= 2**24


@pytest.mark.parametrize("k", [0, EXACT_WINDOW - 1, EXACT_WINDOW, EXACT_WINDOW + 776])
def test_a_wrong_code_in_a_long_row_is_caught(k: int) -> None:
    """In rows longer than a window a single wrong code is still a difference that float32 shows."""
    in_features = EXACT_WINDOW + 777
    codes = random_codes(1, in_features)
    codes[0, ::3] = -8  # large sums
    x = exact_input(in_features, 2, seed=0)
    wanted = oracle(packed_of(codes), x, unit_scales=True)
    right = SUMMATIONS["forward"](x * codes.astype(np.float32))[:, None]
    assert compare(right, wanted).is_match
    codes[0, k] += 1 if codes[0, k] < 7 else -1
    wrong = SUMMATIONS["forward"](x * codes.astype(np.float32))[:, None]
    assert compare(wrong, wanted).failures == 2


@pytest.mark.parametrize(
    ("x_max", "scale", "in_features", "inside"),
    [
        (2.0**120, 1.0, 8, True),
        (2.0**121, 1.0, 8, False),
        (2.0**100, 2.0**20, 8, True),
        (2.0**100, 2.0**21, 8, False),
        (2.0**100, -(2.0**21), 8, False),
        (2.0**121, 2.0**-100, 8, False),
        (1.0, 2.0**120, 8, True),
        (0.0, 2.0**127, 8, True),
        (3e38, 1.0, 1, False),
    ],
)
def test_the_domain_is_checked(x_max: float, scale: float, in_features: int, inside: bool) -> None:
    """Where a float32 sum could overflow the judge refuses, and says by how much."""
    packed = packed_of(np.full((2, in_features), 7, np.int8), np.array([1.0, scale]))
    x = np.zeros((1, in_features), np.float32)
    x[0, -1] = -x_max
    if inside:
        check_domain(packed, x)
        assert np.isfinite(reference(packed, x).bound).all()
        return
    with pytest.raises(DomainError, match=r"it must stay below 2\^127") as caught:
        reference(packed, x)
    assert caught.value.hint


def test_equal_answers_match() -> None:
    """Equality passes with a bound of zero, zeros of either sign included."""
    found = compare(np.array([[1.5, -0.0]], np.float32), np.array([[1.5, 0.0]]))
    assert found.is_match
    assert (found.elements, found.failures, found.relative_error) == (2, 0, 0.0)
    assert (found.wrong_rows, found.wrong_columns, found.wrong_column_count) == ((), (), 0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bound", [0.0, 1e30, 1e300])
def test_nan_and_infinity_never_pass(value: float, bound: float) -> None:
    """A NaN or an infinity is a failure under any bound, and the worst of all."""
    y = np.zeros((2, 3), np.float32)
    y[1, 2] = value
    found = compare(y, np.full((2, 3), 1e20), bound)
    assert not found.is_match
    assert (found.worst.row, found.worst.column) == (1, 2)
    assert found.worst.error == math.inf
    assert found.wrong_rows[-1] == 1
    assert 2 in found.wrong_columns


def test_the_bound_itself_is_allowed() -> None:
    """An error equal to the bound passes, the next larger one fails."""
    y = np.array([[1.0]], np.float32)
    assert compare(y, np.array([[0.75]]), 0.25).is_match
    assert not compare(y, np.array([[0.75]]), float(np.nextafter(0.25, 0))).is_match


def test_the_worst_element_is_the_worst_by_its_bound() -> None:
    """The worst element is the one furthest beyond its own bound, not the one with the largest error."""
    expected = np.zeros((2, 2))
    y = np.array([[8, 3], [1, 0]], np.float32)
    bound = np.array([[10.0, 1.0], [0.5, 0.0]])
    worst = compare(y, expected, bound).worst
    assert (worst.row, worst.column, worst.value, worst.expected, worst.error, worst.bound) == (0, 1, 3, 0, 3, 1)


def test_the_worst_exact_element_has_the_largest_error() -> None:
    """Where equality is demanded the largest error is the worst."""
    y = np.array([[1, 0, 5], [0, -9, 2]], np.float32)
    found = compare(y, np.zeros((2, 3)))
    assert (found.worst.row, found.worst.column, found.worst.error) == (1, 1, 9)
    assert found.failures == 4
    assert found.wrong_rows == (0, 1)
    assert found.wrong_columns == (0, 1, 2)


def test_wrong_places_are_listed_up_to_a_few() -> None:
    """Failing columns are counted in full and listed in part."""
    found = compare(np.ones((20, 30), np.float32), np.zeros((20, 30)))
    assert found.wrong_columns == tuple(range(8))
    assert found.wrong_rows == tuple(range(8))
    assert found.wrong_column_count == 30
    assert found.failures == found.elements == 600


def test_relative_error_is_of_the_whole() -> None:
    """The relative error is the norm of the difference over the norm of what it should be."""
    assert compare(np.array([[3.0, 5.0]], np.float32), np.array([[3.0, 4.0]])).relative_error == 0.2
    assert compare(np.array([[2.0]], np.float32), np.array([[0.0]])).relative_error == 2


def test_unwritten_elements_and_touched_guards_fail() -> None:
    """An answer that is right where it was written still fails for what was not, and for writing behind y."""
    y, unwritten = np.zeros((1, 2), np.float32), np.array([[False, True]])
    found = compare(y, np.zeros((1, 2)), unwritten=unwritten)
    assert (found.unwritten, found.failures, found.is_match) == (1, 0, False)
    found = compare(y, np.zeros((1, 2)), guards_intact=False)
    assert not found.is_match


def test_another_shape_is_refused() -> None:
    """A y of another shape is an error; broadcasting must not make it pass."""
    with pytest.raises(UsageError, match=r"y has shape \[1, 3\], expected \[2, 3\]"):
        compare(np.zeros((1, 3), np.float32), np.zeros((2, 3)))
