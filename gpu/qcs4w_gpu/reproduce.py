"""The smallest input that still fails: one row of x, one of weights, and as few columns as the fault needs.

What is returned was verified again as it is, so that it fails for whoever repeats it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from qcs4w_packer import PackedLinear
from qcs4w_packer.nibbles import pack_codes

from .dispatcher import Gpu
from .foreign import judge_output
from .judge import exact_input, oracle
from .kernel import FAST_KERNELS, LINEAR_KERNELS, Kernel, shipped_kernel
from .verify import EXACT_ROWS, Verdict, ask, check_source, judge


@dataclass(frozen=True)
class Reproducer:
    """What fails.

    Attributes:
        packed: the weight, N × K.
        row: of y, in the tensor that it was taken from, where the error was worst.
        column: of y.
        x: float32, shape (M, K); None where the packed bytes fail against their source.
        expected: float64, shape (M, N).
        got: floats, shape (M, N).
        kernel: that made `got`, where it is one of ours; the plan might choose another for a smaller shape.
        is_foreign: `got` came from elsewhere.
        source: float32, shape (N, K), where the packed bytes fail against it.
    """

    packed: PackedLinear
    row: int
    column: int
    x: NDArray[np.float32] | None = None
    expected: NDArray[np.float64] | None = None
    got: NDArray[np.floating] | None = None
    kernel: str | None = None
    is_foreign: bool = False
    source: NDArray[np.float32] | None = None


def reproduce_kernel(
    gpu: Gpu,
    packed: PackedLinear,
    verdict: Verdict,
    *,
    x: NDArray[np.float32],
    seed: int,
    kernel: Kernel | None,
    rounding_factor: int,
) -> Reproducer:
    """Return the smallest part of a linear that a kernel gets wrong.

    Args:
        gpu: where it failed.
        packed: the weight.
        verdict: of `verify`, with a probe that failed.
        x: float32, shape (M, K), of the bounded probe.
        seed: of the exact probe.
        kernel: the user's; None for one of ours.
        rounding_factor: c of the bound.
    """
    assert verdict.exact is not None  # noqa: S101 - a kernel has both probes
    probe = verdict.bounded
    if not verdict.exact.is_match:  # its integers show the fault best, with scales of 1
        probe = verdict.exact
        packed = PackedLinear(packed.packed, np.ones_like(packed.scales), packed.in_features)
        x = exact_input(packed.in_features, min(max(len(x), EXACT_ROWS[0]), EXACT_ROWS[1]), seed)
    ran = kernel or (shipped_kernel(verdict.kernel) if verdict.kernel in (*LINEAR_KERNELS, *FAST_KERNELS) else None)

    def fails(part: PackedLinear, rows: NDArray[np.float32]) -> bool:
        answers = ask(gpu, part, x=rows, seed=seed, kernel=ran)
        return judge(answers, rounding_factor=rounding_factor).status == "fail"

    row, column = probe.worst.row, probe.worst.column
    part, rows = _smallest(packed, x, row, column, fails)
    got = ask(gpu, part, x=rows, seed=seed, kernel=ran).bounded.y
    return Reproducer(
        part, row, column, rows, oracle(part, rows), got, kernel=None if kernel or ran is None else ran.name
    )


def reproduce_output(
    packed: PackedLinear,
    verdict: Verdict,
    *,
    x: NDArray[np.float32],
    y: NDArray[np.floating],
    bias: NDArray[np.float32] | None = None,
) -> Reproducer:
    """Return the worst element of a y from elsewhere, with its row of x and of weights.

    Args:
        packed: the weight.
        verdict: of `judge_output`, a failure.
        x: float32, shape (M, K).
        y: floats, shape (M, N).
        bias: float32, shape (N,), that y should have in it; it is taken off.
    """
    row, column = verdict.bounded.worst.row, verdict.bounded.worst.column
    part = _weight_rows(packed, slice(column, column + 1))
    rows = np.ascontiguousarray(x[row : row + 1])
    got = y[row : row + 1, column : column + 1].astype(np.float64)
    got = got if bias is None else got - bias[column]
    found = Reproducer(part, row, column, rows, oracle(part, rows), got, is_foreign=True)
    if judge_output(part, rows, got, dtype="F64").status == "fail":
        return found
    whole = y.astype(np.float64) if bias is None else y - bias.astype(np.float64)
    return replace(found, packed=packed, x=x, expected=oracle(packed, x), got=whole)


def reproduce_source(packed: PackedLinear, source: NDArray[np.float32], method: str) -> Reproducer:
    """Return the first row of packed bytes that does not fit its source by itself, or all where only all do not.

    Args:
        packed: the weight.
        source: float32, shape (N, K).
        method: how the container says that the scales were chosen.
    """
    found = check_source(packed, source, method)
    row, column = found.first_difference[:2] if found.first_difference else (0, 0)
    for each in dict.fromkeys([row, *range(min(packed.out_features, _TRIED_ROWS))]):
        part, floats = _weight_rows(packed, slice(each, each + 1)), source[each : each + 1]
        if not check_source(part, floats, method).is_match:
            return Reproducer(part, each, column, source=floats)
    return Reproducer(packed, row, column, source=source)


_TRIED_ROWS = 256


def _smallest(
    packed: PackedLinear,
    x: NDArray[np.float32],
    row: int,
    column: int,
    fails: Callable[[PackedLinear, NDArray[np.float32]], bool],
) -> tuple[PackedLinear, NDArray[np.float32]]:
    """Return the first that still fails: of one row or all of x and of weights, and of 1, 2, 4, … columns."""
    part, rows = next((each for each in _parts(packed, x, min(row, len(x) - 1), column) if fails(*each)), (packed, x))
    count = 1
    while count < part.in_features:
        fewer = PackedLinear(pack_codes(part.codes()[:, :count]), part.scales, count)
        narrow = np.ascontiguousarray(rows[:, :count])
        if fails(fewer, narrow):
            return fewer, narrow
        count *= 2
    return part, rows


def _parts(
    packed: PackedLinear, x: NDArray[np.float32], row: int, column: int
) -> Iterator[tuple[PackedLinear, NDArray[np.float32]]]:
    one = np.ascontiguousarray(x[row : row + 1])
    yield _weight_rows(packed, slice(column, column + 1)), one
    yield packed, one
    yield _weight_rows(packed, slice(column, column + 1)), x


def _weight_rows(packed: PackedLinear, rows: slice) -> PackedLinear:
    return PackedLinear(packed.packed[rows].copy(), packed.scales[rows].copy(), packed.in_features)
