"""judge_output: a y from elsewhere, in any stored dtype, with and without a bias."""

import numpy as np
import pytest
import torch
from cases import packed_of, random_codes

from qcs4w_gpu import Verdict, judge_output
from qcs4w_packer import PackedLinear
from qcs4w_packer.errors import UsageError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def weight(out_features: int = 37, in_features: int = 67, size: float = 0.05) -> PackedLinear:
    """Return a packed weight with scales that no two rows share."""
    scales = np.linspace(size, 2 * size, out_features, dtype=np.float32)
    return packed_of(random_codes(out_features, in_features), scales)


def inputs(rows: int = 5, in_features: int = 67) -> np.ndarray:
    """Return float32 (M, K)."""
    return np.random.default_rng(1).standard_normal((rows, in_features), np.float32)


def product(packed: PackedLinear, x: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """Return float32 x · Ŵᵀ (+ bias) as a plain float32 program computes it."""
    dense = packed.codes().astype(np.float32) * packed.scales[:, None]
    y = x @ dense.T
    return y if bias is None else y + bias


def stored(y: np.ndarray, dtype: str) -> np.ndarray:
    """Return y as it comes back from a file of a dtype."""
    return torch.from_numpy(y).to(DTYPES[dtype]).to(torch.float32).numpy()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_right_output_passes_in_every_dtype(dtype: str) -> None:
    """What float32 computes and a dtype rounds passes, subnormal values included; no exact probe is claimed."""
    for size in (0.05, 1e-6, 1e-38):
        packed = weight(size=size)
        verdict = judge_output(packed, inputs(), stored(product(packed, inputs()), dtype), dtype=dtype)
        assert (verdict.status, verdict.exact, verdict.kernel) == ("pass", None, None)
        assert verdict.output_dtype == dtype


@pytest.mark.parametrize(("dtype", "unit"), [("F16", 2.0**-11), ("BF16", 2.0**-8)])
def test_a_narrow_output_is_held_to_its_own_rounding(dtype: str, unit: float) -> None:
    """Half a unit in the last place is allowed, two of them are not; a float32 file with such an error fails."""
    packed, x = weight(), inputs()
    y = stored(product(packed, x), dtype)
    assert judge_output(packed, x, y).status == "fail"
    y[2, 3] *= 1 + 4 * unit
    verdict = judge_output(packed, x, y, dtype=dtype)
    assert (verdict.status, verdict.bounded.failures) == ("fail", 1)
    assert (verdict.bounded.worst.row, verdict.bounded.worst.column) == (2, 3)


def test_infinity_is_right_beyond_the_range_of_f16_alone() -> None:
    """What rounds to infinity in f16 may be infinite, with its sign; a smaller value may not, nor may f32."""
    packed = packed_of(np.array([[7], [-7], [1]], np.int8), np.full(3, 20000, np.float32))
    x = np.ones((1, 1), np.float32)
    y = np.array([[np.inf, -np.inf, 20000]], np.float32)
    assert judge_output(packed, x, y, dtype="F16").status == "pass"
    for wrong in ([-np.inf, -np.inf, 20000], [np.inf, -np.inf, np.inf]):
        verdict = judge_output(packed, x, np.array([wrong], np.float32), dtype="F16")
        assert (verdict.status, verdict.bounded.failures) == ("fail", 1)
    for dtype in ("F32", "BF16"):
        assert judge_output(packed, x, y, dtype=dtype).bounded.failures == 2


def test_the_edge_of_f16() -> None:
    """65,520 is the first value that rounds to infinity: 65,504 is a number, and infinity in its place is wrong."""
    for value, infinite in ((65504, "fail"), (65520, "pass")):
        packed = packed_of(np.array([[1]], np.int8), np.array([value], np.float32))
        y = np.array([[np.inf]], np.float32)
        assert judge_output(packed, np.ones((1, 1), np.float32), y, dtype="F16").status == infinite


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_never_passes(dtype: str) -> None:
    """NaN is counted by name, and is a failure whatever the bound."""
    packed, x = weight(), inputs()
    y = stored(product(packed, x), dtype)
    y[1, 2] = y[4, 36] = np.nan
    verdict = judge_output(packed, x, y, dtype=dtype)
    assert (verdict.status, verdict.bounded.nan_count, verdict.bounded.failures) == ("fail", 2, 2)


@pytest.mark.parametrize("size", [10, 0.01])
def test_a_bias_is_a_part_of_y(size: float) -> None:
    """A y with its bias passes, wherever it entered the sum; without it, or with it twice, that is what is said."""
    packed, x = weight(), inputs()
    bias = np.random.default_rng(2).standard_normal(37, np.float32) * np.float32(size)
    y = product(packed, x, bias)
    terms = x[:, None] * (packed.codes() * packed.scales[:, None])  # (M, N, K)
    started = np.concatenate([np.broadcast_to(bias[None, :, None], (5, 37, 1)), terms], axis=2, dtype=np.float32)
    first = np.cumsum(started, axis=2, dtype=np.float32)[..., -1]

    def judged(y: np.ndarray) -> Verdict:
        return judge_output(packed, x, y, bias=bias)

    assert judged(y).status == judged(first).status == "pass"
    for name, wrong in (("bias missing", y - bias), ("bias twice", y + bias)):
        verdict = judged(product(packed, x, None if name == "bias missing" else 2 * bias))
        assert verdict.status == judged(wrong).status == "fail"
        assert verdict.causes[0].name == name


def test_causes_are_named_from_y_alone() -> None:
    """The faults that a GPU's y betrays are named for one from elsewhere, in a narrow dtype and under a bias too."""
    packed, x = weight(), inputs()
    bias = np.random.default_rng(2).standard_normal(37, np.float32)
    swapped = PackedLinear(packed.packed << 4 | packed.packed >> 4, packed.scales, packed.in_features)
    for dtype in ("F32", "F16", "BF16"):
        verdict = judge_output(packed, x, stored(product(swapped, x, bias), dtype), dtype=dtype, bias=bias)
        assert verdict.status == "fail"
        assert "nibbles swapped" in {cause.name for cause in verdict.causes}


@pytest.mark.parametrize("shape", [(5, 36), (4, 37), (37,), (37, 5), (1, 5, 37, 1)], ids=str)
def test_a_wrong_shape_is_said(shape: tuple[int, ...]) -> None:
    """An output that is not of N columns and of the rows of x is one error with both shapes."""
    with pytest.raises(UsageError, match=r"the output has shape .*expected \[5, 37\]"):
        judge_output(weight(), inputs(), np.zeros(shape, np.float32))


def test_leading_dimensions_of_one_do_not_matter() -> None:
    """[1, M, N] belongs to [M, K], as runtimes add a batch of one."""
    packed, x = weight(), inputs()
    assert judge_output(packed, x, product(packed, x)[None]).status == "pass"
    assert judge_output(packed, x[:, None], product(packed, x)).status == "pass"


@pytest.mark.parametrize(
    ("size", "in_features"), [(0.0, 67), (1e-42, 67), (1.0, 200_000)], ids=["zero", "tiny", "wide"]
)
def test_a_pass_that_zeros_would_have_had_is_told(size: float, in_features: int) -> None:
    """Where the bound is wider than y, zeros pass, and the verdict says so; it says nothing of a telling input."""
    packed = weight(2, in_features)
    x = inputs(1, in_features) * np.float32(size)
    verdict = judge_output(packed, x, np.zeros((1, 2), np.float32))
    assert verdict.status == "pass"
    assert any("2 of 2 elements of y should be no larger than their bound" in text for text in verdict.warnings)
    telling = inputs(1, 67)
    right = weight(2, 67)
    assert not judge_output(right, telling, product(right, telling).astype(np.float32)).warnings
