"""The judge: is y right? A float64 oracle in torch, a bound on what float32 may differ, and a comparison.

The oracle reads the packed bytes with code of its own; it shares nothing with the packer's unpacking or with the
kernels, so that one mistake cannot hide in both. No WebGPU in here: a y from anywhere can be judged.

The bound. Let u = 2⁻²⁴, and let ŵ = code · scale exactly. A float32 kernel rounds K products, K − 1 additions (or K
fused steps) in any order, and the scaling, before or after the sum:

    |y − y64| ≤ c · (K + 2) · u · Σ|x_k·ŵ_k|  +  2⁻¹²⁶ · (Σ|ŵ_k| + 8·Σ|x_k| + (K + 2) · max(1, |scale|))

First term, round to nearest, c = 1. An inner product of K terms is off by at most K·u·Σ|x_k·w_k| in any order and for
any K (Jeannerod and Rump, Improved error bounds for inner products in floating-point arithmetic, 2013). Rounding the
scaled sum adds u·(1 + K·u) of the same sum, and so does rounding every ŵ_k before the product: K + 1 + K·u in all,
below K + 2 for K < 2²⁴. Where an adapter was seen rounding otherwise, which WGSL permits, every step is off by at most
2u, and c = 2: (1 + 2u)^(K + 1) − 1 is below 2·(K + 2)·u up to K = 2,895; beyond, that is the bound to first order, and
the part that it leaves out, at most 2·K·u of it, would need all steps to be off by nearly 2u in the same direction.

Second term, for subnormals, which WGSL lets an adapter flush to zero. A flushed x_k costs at most 2⁻¹²⁶·|ŵ_k|; a
flushed scale or ŵ_k at most 2⁻¹²⁶·8·|x_k|, as |code| ≤ 8; each of at most K + 2 flushed results at most 2⁻¹²⁶, times
the scale where that is applied after the sum. Outside the domain 8 · K · max|x| · max(1, |scale|) < 2¹²⁷ a result may
overflow.

A bias b may be added anywhere in the sum: it is one more term, so that K + 3 stands for K + 2 and Σ|x_k·ŵ_k| + |b| for
the sum, with two more results that may be flushed. A y stored in a narrower type is rounded once more: see
`stored_bound`.

A kernel of precision "f16" first multiplies a row by a power of two that brings its largest |x_k| into [2¹⁴, 2¹⁵), and
rounds it to f16, to either neighbour: off by 2⁻¹⁰·|x_k|, or by 2⁻²⁴ / 2¹⁴ of the row's largest where it becomes
subnormal. That adds 2⁻¹⁰·Σ|x_k·ŵ_k| + 2⁻³⁸·max|x|·Σ|ŵ_k|.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from qcs4w_packer import PackedLinear
from qcs4w_packer.errors import UsageError

from .errors import DomainError
from .patterns import where_wrong

if TYPE_CHECKING:
    import torch

UNIT = 2.0**-24
TINY = 2.0**-126
HALF_UNIT = 2.0**-10
HALF_TINY = 2.0**-38

#: Up to this K every sum of the exact probe stays below 2²⁴, so that float32 has no rounding to do.
EXACT_WINDOW = 524_288

#: Rounding of a stored y, by dtype: u, η = half the smallest subnormal, and the first value that rounds to infinity.
#: float32 is what kernels compute in; a float64 file is read as float32. The bound allows for both already.
_STORED = {
    "F64": (0.0, 0.0, 2.0**128 * (1 - 2.0**-25)),
    "F32": (0.0, 0.0, 2.0**128 * (1 - 2.0**-25)),
    "F16": (2.0**-11, 2.0**-25, 65520.0),
    "BF16": (2.0**-8, 2.0**-134, 2.0**128 * (1 - 2.0**-9)),
}

_BLOCK_BYTES = 64 << 20  # of float64 weights at a time


@dataclass(frozen=True)
class Reference:
    """What y should be, from the oracle.

    Attributes:
        y: float64, shape (M, N).
        bound: float64, shape (M, N), the largest |y − y64| that float32 arithmetic can explain.
    """

    y: NDArray[np.float64]
    bound: NDArray[np.float64]


@dataclass(frozen=True)
class Element:
    """One element of y: its place, what it is, what it should be, and how far off it may be."""

    row: int
    column: int
    value: float
    expected: float
    error: float
    bound: float


@dataclass(frozen=True)
class Comparison:
    """How a y compares with its reference.

    Attributes:
        elements: M · N.
        failures: elements beyond their bound, NaN included.
        worst: the element with the largest error in units of its bound.
        relative_error: ‖y − y64‖ / ‖y64‖.
        wrong_rows: rows m of y with a failure, the first few.
        wrong_columns: columns n of y with a failure, the first few.
        wrong_column_count: how many columns have one.
        pattern: where they are, in words ("columns 64.. of every row"); None where nothing is wrong.
        unwritten: elements that the kernel never wrote.
        unwritten_pattern: where they are, in words; None where everything was written.
        guards_intact: nothing was written behind y.
        nan_count: elements that are NaN.
        wrong_zeros: elements with a failure that are 0.
    """

    elements: int
    failures: int
    worst: Element
    relative_error: float
    wrong_rows: tuple[int, ...] = ()
    wrong_columns: tuple[int, ...] = ()
    wrong_column_count: int = 0
    pattern: str | None = None
    unwritten: int = 0
    unwritten_pattern: str | None = None
    guards_intact: bool = True
    nan_count: int = 0
    wrong_zeros: int = 0

    @property
    def is_match(self) -> bool:
        """Whether y is right."""
        return not self.failures and not self.unwritten and self.guards_intact


def oracle(packed: PackedLinear, x: NDArray[np.float32], *, unit_scales: bool = False) -> NDArray[np.float64]:
    """Return x · Ŵᵀ in float64.

    Args:
        packed: the weight, N × K.
        x: float32, shape (M, K).
        unit_scales: put 1 in place of every scale.

    Returns:
        float64, shape (M, N).
    """
    import torch  # here, since listing adapters or running a kernel needs none of it

    rows = torch.from_numpy(x.astype(np.float64))
    parts = [rows @ (weight if unit_scales else weight * scales[:, None]).T for weight, scales in _blocks(packed)]
    result: NDArray[np.float64] = torch.cat(parts, dim=1).numpy()
    return result


def reference(
    packed: PackedLinear,
    x: NDArray[np.float32],
    *,
    rounding_factor: int = 1,
    bias: NDArray[np.floating] | None = None,
    half: bool = False,
) -> Reference:
    """Return x · Ŵᵀ (+ bias) in float64 with its bound.

    Args:
        packed: the weight, N × K.
        x: float32, shape (M, K), finite.
        rounding_factor: c, 1 or 2.
        bias: floats, shape (N,), where y has one in it.
        half: a kernel may round x to f16, as precision "f16" does.

    Raises:
        DomainError: an intermediate could overflow float32.
    """
    import torch

    check_domain(packed, x)
    rows = torch.from_numpy(x.astype(np.float64))
    sizes = rows.abs()
    row_sums = sizes.sum(dim=1, keepdim=True)  # (M, 1)
    count = packed.in_features + (2 if bias is None else 3)
    values, bounds = [], []
    for codes, scales in _blocks(packed):
        weight = codes * scales[:, None]
        absolute = weight.abs()
        flushed = TINY * (8 * row_sums + (absolute.sum(dim=1) + count * scales.abs().clamp(min=1.0))[None, :])
        values.append(rows @ weight.T)
        allowed = rounding_factor * count * UNIT * (sizes @ absolute.T) + flushed
        if half:
            allowed += HALF_UNIT * (sizes @ absolute.T) + HALF_TINY * sizes.amax(dim=1)[:, None] * absolute.sum(dim=1)
        bounds.append(allowed)
    y, bound = torch.cat(values, dim=1).numpy(), torch.cat(bounds, dim=1).numpy()
    if bias is not None:
        wide = bias.astype(np.float64)
        y, bound = y + wide, bound + rounding_factor * count * UNIT * np.abs(wide) + 2 * TINY
    return Reference(y, bound)


def stored_bound(
    wanted: Reference, y: NDArray[np.float32], dtype: str
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return what storing y in a dtype allows it to differ, and which of its infinities are right.

    A value v within B of y64 is rounded once more, to nearest: B_out = B + u · (|y64| + B) + η. An infinity is right
    where some such v rounds to it.

    Args:
        wanted: y64 and B.
        y: float32, shape (M, N), as read from the file.
        dtype: that it was stored in: F16, BF16, F32 or F64.

    Returns:
        float64, shape (M, N); bool, shape (M, N).
    """
    unit, tiny, overflow = _STORED[dtype]
    bound = wanted.bound + unit * (np.abs(wanted.y) + wanted.bound) + tiny
    right = np.isinf(y) & (np.copysign(1.0, y) * wanted.y + wanted.bound >= overflow)
    return bound, right


def check_domain(packed: PackedLinear, x: NDArray[np.float32]) -> None:
    """Check that no intermediate result can overflow float32.

    Raises:
        DomainError: 8 · K · max|x| · max(1, scale) reaches 2¹²⁷.
    """
    x_max, scale_max = float(np.abs(x).max()), float(np.abs(packed.scales).max())
    reach = 8 * packed.in_features * x_max * max(1.0, scale_max)
    if reach >= 2.0**127:
        raise DomainError(
            f"x up to {x_max:.3g} with K {packed.in_features} and scales up to {scale_max:.3g} can overflow float32: "
            f"8 · K · max|x| · max(1, scale) is {reach:.3g}, it must stay below 2^127 (1.70e+38)",
            hint="scale the input down",
        )


def exact_input(in_features: int, rows: int, seed: int) -> NDArray[np.float32]:
    """Return rows of small non-zero integers for which every sum is exact in float32.

    Args:
        in_features: K.
        rows: at least this many rows; beyond EXACT_WINDOW columns a row covers one window of K and is zero elsewhere.
        seed: of the random generator.

    Returns:
        float32, shape (M, K), in [-4, 4].
    """
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 5, (rows, in_features)) * draw.choice((-1, 1), (rows, in_features))
    x: NDArray[np.float32] = sizes.astype(np.float32)
    windows = math.ceil(in_features / EXACT_WINDOW)
    if windows == 1:
        return x
    parts = np.zeros((windows * rows, in_features), np.float32)
    for window in range(windows):
        columns = slice(window * EXACT_WINDOW, (window + 1) * EXACT_WINDOW)
        parts[window * rows : (window + 1) * rows, columns] = x[:, columns]
    return parts


def compare(
    y: NDArray[np.float32],
    expected: NDArray[np.float64],
    bound: NDArray[np.float64] | float = 0.0,
    *,
    unwritten: NDArray[np.bool_] | None = None,
    guards_intact: bool = True,
    overflow: NDArray[np.bool_] | None = None,
) -> Comparison:
    """Compare y with what it should be.

    Args:
        y: float32, shape (M, N).
        expected: float64, shape (M, N).
        bound: the largest error allowed, (M, N) or one number; 0 demands equality.
        unwritten: bool, shape (M, N), elements known not to have been written.
        guards_intact: nothing was written behind y.
        overflow: bool, shape (M, N), infinities that are right.

    Raises:
        UsageError: y has another shape than what it should be.
    """
    if y.shape != expected.shape:
        raise UsageError(f"y has shape {list(y.shape)}, expected {list(expected.shape)}")
    bounds = np.broadcast_to(np.asarray(bound, np.float64), y.shape)
    with np.errstate(invalid="ignore"):
        error = np.abs(y.astype(np.float64) - expected)
    error[np.isnan(error)] = np.inf
    if overflow is not None:
        error[overflow] = 0.0
    wrong = error > bounds
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = np.where(error > 0, error / bounds, 0.0)
    row, column = (int(i) for i in np.unravel_index(_worst(excess, error), y.shape))
    size = float(np.linalg.norm(expected))
    columns = np.flatnonzero(wrong.any(axis=0))
    return Comparison(
        elements=y.size,
        failures=int(wrong.sum()),
        worst=Element(
            row,
            column,
            float(y[row, column]),
            float(expected[row, column]),
            float(error[row, column]),
            float(bounds[row, column]),
        ),
        relative_error=float(np.linalg.norm(error)) / size if size else float(np.linalg.norm(error)),
        wrong_rows=tuple(int(m) for m in np.flatnonzero(wrong.any(axis=1))[:8]),
        wrong_columns=tuple(int(n) for n in columns[:8]),
        wrong_column_count=len(columns),
        pattern=where_wrong(wrong),
        unwritten_pattern=None if unwritten is None else where_wrong(unwritten),
        unwritten=0 if unwritten is None else int(unwritten.sum()),
        guards_intact=guards_intact,
        nan_count=int(np.isnan(y).sum()),
        wrong_zeros=int((wrong & (y == 0)).sum()),
    )


def _worst(excess: NDArray[np.float64], error: NDArray[np.float64]) -> int:
    """Return the flat index of the largest excess; among equals (infinite ones, say) the largest error."""
    places = np.flatnonzero(excess == excess.max())  # no sorting: y may have a hundred million elements
    return int(places[error.ravel()[places].argmax()])


def _blocks(packed: PackedLinear) -> "Iterator[tuple[torch.Tensor, torch.Tensor]]":
    """Yield (codes, scales) in float64, some rows at a time, from bytes read here and nowhere else."""
    import torch

    data = torch.from_numpy(np.array(packed.packed))
    scales = torch.from_numpy(packed.scales.astype(np.float64))
    step = max(1, _BLOCK_BYTES // (16 * data.shape[1]))
    for start in range(0, data.shape[0], step):
        block = data[start : start + step].to(torch.float64)
        codes = torch.empty(block.shape[0], 2 * block.shape[1], dtype=torch.float64)
        codes[:, 0::2] = torch.floor(block / 16) - 8  # even column: the byte's sixteens
        codes[:, 1::2] = torch.remainder(block, 16) - 8  # odd column: its units
        yield codes[:, : packed.in_features], scales[start : start + step]
