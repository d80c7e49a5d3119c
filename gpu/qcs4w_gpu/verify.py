"""verify: the GPU's linear against the judge, by two probes, and the packed bytes against their source."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from qcs4w_packer import PackedLinear, QuantizationError
from qcs4w_packer.errors import UsageError
from qcs4w_packer.measure import quantization_error, row_square_sums
from qcs4w_packer.nibbles import wrong_pad_rows
from qcs4w_packer.quantize import dequantize
from qcs4w_packer.rowpack import pack_weight

from .causes import Cause, causes_of_output, causes_of_weights
from .dispatcher import Gpu
from .judge import Comparison, Reference, compare, exact_input, oracle, reference
from .kernel import Kernel, shipped_kernel
from .linear import Linear, Run, as_rows, plan_for
from .plan import fold_grid

_GUARD_WORDS = 64
_EXACT_ROWS = (4, 256)  # at least, at most

#: Rows of random input when there is none, and their seed.
DEFAULT_ROWS = 4
DEFAULT_SEED = 0


@dataclass(frozen=True)
class SourceCheck:
    """The packed bytes against the float weight they were made of.

    Attributes:
        is_match: what the method promises holds.
        equal_bytes: packing the source again gives these bytes and scales.
        first_difference: (row, column, code here, code of the source packed again), or None.
        error: of the dequantized weights against the source.
    """

    is_match: bool
    equal_bytes: bool
    first_difference: tuple[int, int, int, int] | None
    error: QuantizationError


@dataclass(frozen=True)
class Verdict:
    """What `verify` found for one tensor.

    Attributes:
        kernel: that both probes ran.
        rows: M of the bounded probe.
        exact: integer inputs, scales of 1: equality is demanded, so that any single wrong code is caught.
        bounded: real scales and input, against the bound of float32 arithmetic.
        source: the bytes against their source, or None without one.
        causes: likely reasons for a failure, best first.
        warnings: what is odd, though not wrong.
    """

    kernel: str
    rows: int
    exact: Comparison
    bounded: Comparison
    source: SourceCheck | None
    causes: tuple[Cause, ...]
    warnings: tuple[str, ...]

    @property
    def status(self) -> Literal["pass", "fail"]:
        """Whether everything that was looked at is right."""
        right = self.exact.is_match and self.bounded.is_match and (self.source is None or self.source.is_match)
        return "pass" if right else "fail"


def verify(
    gpu: Gpu,
    packed: PackedLinear,
    *,
    x: NDArray[np.floating] | None = None,
    rows: int = DEFAULT_ROWS,
    seed: int = DEFAULT_SEED,
    kernel: Kernel | None = None,
    source: NDArray[np.float32] | None = None,
    method: str = "absmax",
    rounding_factor: int | None = None,
) -> Verdict:
    """Judge the GPU's linear for one packed weight.

    Args:
        gpu: where to run.
        packed: the weight.
        x: floats, shape (..., K), for the bounded probe; by default seeded normal random rows.
        rows: how many of these.
        seed: of all random numbers.
        kernel: judge this one; by default the kernel that the plan would choose.
        source: float32, shape (N, K), what the weight was made of.
        method: how the container says that the scales were chosen.
        rounding_factor: c of the bound; by default the adapter is probed (see `rounding_factor_of`).

    Raises:
        UsageError: x or source have the wrong shape, or rows is below 1.
        DomainError: x leaves the range in which float32 can be judged.
        LimitError, GpuError: as running does.
    """
    if rows < 1:
        raise UsageError(f"rows is {rows}, expected at least 1")
    if x is not None:
        x = as_rows(x, packed.in_features)
        rows = len(x)
    kernel = plan_for(gpu, rows, packed.out_features, packed.in_features, kernel).kernel  # both probes judge this one
    if x is None:
        x = np.random.default_rng(seed).standard_normal((rows, packed.in_features), np.float32)
    factor = rounding_factor_of(gpu) if rounding_factor is None else rounding_factor
    wanted: Reference = reference(packed, x, rounding_factor=factor)

    ones = np.ones_like(packed.scales)
    x_exact = exact_input(packed.in_features, min(max(len(x), _EXACT_ROWS[0]), _EXACT_ROWS[1]), seed)
    run_exact = _run(gpu, packed, x_exact, kernel, ones)
    exact = _compare(run_exact, oracle(packed, x_exact, unit_scales=True), 0.0)
    run_bounded = _run(gpu, packed, x, kernel, None)
    bounded = _compare(run_bounded, wanted.y, wanted.bound)

    causes: list[Cause] = []
    if not exact.is_match:
        causes = causes_of_output(packed, x_exact, run_exact.y, ones)
    elif not bounded.is_match:
        causes = causes_of_output(packed, x, run_bounded.y, packed.scales)
    check = None if source is None else check_source(packed, source, method)
    if check is not None and source is not None and not check.is_match:
        causes += causes_of_weights(packed, source)
    return Verdict(
        kernel=kernel.name,
        rows=len(x),
        exact=exact,
        bounded=bounded,
        source=check,
        causes=tuple(causes),
        warnings=tuple(_warnings(packed)),
    )


def check_source(packed: PackedLinear, source: NDArray[np.float32], method: str) -> SourceCheck:
    """Hold packed bytes against their float source; needs no GPU.

    For the method "absmax" packing the source again must give equal bytes. For any other method the bytes are right
    unless another reading of them explains the source better than ours.

    Raises:
        UsageError: the source has another shape.
    """
    shape = (packed.out_features, packed.in_features)
    if source.shape != shape:
        raise UsageError(f"the source has shape {list(source.shape)}, the packed weight {list(shape)}")
    codes = packed.codes()
    error = quantization_error(*row_square_sums(source, dequantize(codes, packed.scales)))
    again = pack_weight(source)
    fresh = again.codes()
    differing = np.argwhere(fresh != codes)
    first = None
    if len(differing):
        row, column = (int(i) for i in differing[0])
        first = (row, column, int(codes[row, column]), int(fresh[row, column]))
    equal = np.array_equal(again.packed, packed.packed) and np.array_equal(again.scales, packed.scales)
    is_match = equal if method == "absmax" else not causes_of_weights(packed, source)
    return SourceCheck(is_match, equal, first, error)


def rounding_factor_of(gpu: Gpu) -> int:
    """Return 1 where the adapter rounds sums and products to nearest, else 2: the c of the judge's bound."""
    draw = np.random.default_rng(0)
    count = 1024
    a = draw.standard_normal(count, np.float32)
    b = draw.standard_normal(count, np.float32) * np.exp2(draw.integers(-20, 4, count)).astype(np.float32)
    kernel = shipped_kernel("probe_rounding")
    sizes = {"M": count, "N": 1, "K": 1, "K_packed": 1}
    grid = fold_grid(kernel.workgroups(sizes), gpu.limits["max-compute-workgroups-per-dimension"])
    with gpu.empty(2 * count * 4, label="rounding probe") as results, gpu.upload(a) as left, gpu.upload(b) as right:
        gpu.dispatch(kernel, {0: results, 1: left, 2: right}, sizes, grid)
        seen = gpu.read(results).view(np.float32)
    return 1 if np.array_equal(seen, np.concatenate([a + b, a * b])) else 2


def _run(
    gpu: Gpu,
    packed: PackedLinear,
    x: NDArray[np.float32],
    kernel: Kernel,
    scales: NDArray[np.float32] | None,
) -> Run:
    with Linear(gpu, packed, kernel=kernel, scales=scales) as linear:
        return linear.run(x, guard_words=_GUARD_WORDS)


def _compare(run: Run, expected: NDArray[np.float64], bound: NDArray[np.float64] | float) -> Comparison:
    return compare(run.y, expected, bound, unwritten=run.unwritten, guards_intact=run.guards_intact)


def _warnings(packed: PackedLinear) -> list[str]:
    rows = wrong_pad_rows(packed.packed, packed.in_features)
    if not rows:
        return []
    return [f"K is odd, and the pad nibble of {rows} rows is not 8: padded after the shift, or the nibbles are swapped"]
