"""verify: the GPU's linear against the judge, by two probes, and the packed bytes against their source."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from qcs4w_packer import PackedLinear, QuantizationError
from qcs4w_packer.errors import UsageError
from qcs4w_packer.measure import quantization_error, row_square_sums
from qcs4w_packer.nibbles import wrong_pad_rows
from qcs4w_packer.quantize import dequantize
from qcs4w_packer.rowpack import pack_weight

from .causes import Cause, Evidence, causes_of_codes, causes_of_weights, explain_outputs
from .dispatcher import Gpu
from .judge import Comparison, Reference, check_domain, compare, exact_input, oracle, reference
from .kernel import Kernel, shipped_kernel
from .linear import Linear, Run, as_rows, plan_for
from .picture import Picture, picture_of
from .plan import fold_grid

_GUARD_WORDS = 64
EXACT_ROWS = (4, 256)  # at least, at most

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
        kernel: that both probes ran; None where y came from elsewhere.
        rows: M of the bounded probe.
        exact: integer inputs, scales of 1: equality is demanded, so that any single wrong code is caught. None where y
            came from elsewhere: its input was not ours to choose.
        bounded: real scales and input, against the bound of float32 arithmetic.
        source: the bytes against their source, or None without one.
        causes: likely reasons for a failure, best first.
        warnings: what is odd, though not wrong.
        output_dtype: of a y that came from elsewhere, as safetensors names it; None for the GPU's.
        max_quant_error: the relative quantization error that is allowed, or None.
        picture: of a failure, where one was asked for.
    """

    kernel: str | None
    rows: int
    exact: Comparison | None
    bounded: Comparison
    source: SourceCheck | None
    causes: tuple[Cause, ...]
    warnings: tuple[str, ...]
    output_dtype: str | None = None
    max_quant_error: float | None = None
    picture: Picture | None = None

    @property
    def status(self) -> Literal["pass", "fail"]:
        """Whether everything that was looked at is right."""
        right = all(part is None or part.is_match for part in (self.exact, self.bounded, self.source))
        return "pass" if right and not self.exceeds_quant_error else "fail"

    @property
    def exceeds_quant_error(self) -> bool:
        """Whether the quantization error is above the threshold that was given for it."""
        limit, check = self.max_quant_error, self.source
        return limit is not None and check is not None and not check.error.relative <= limit


@dataclass(frozen=True)
class Answers:
    """What a device made of the two probes, still to be judged.

    Attributes:
        packed: the weight.
        kernel: that ran, by its name.
        x_exact: integers, float32, shape (M', K).
        x: float32, shape (M, K).
        exact: the run of x_exact, with scales of 1.
        bounded: the run of x.
    """

    packed: PackedLinear
    kernel: str
    x_exact: NDArray[np.float32]
    x: NDArray[np.float32]
    exact: Run
    bounded: Run


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
    """Judge the GPU's linear for one packed weight: `ask` and `judge` in one.

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
    answers = ask(gpu, packed, x=x, rows=rows, seed=seed, kernel=kernel)
    factor = rounding_factor_of(gpu) if rounding_factor is None else rounding_factor
    return judge(answers, rounding_factor=factor, source=source, method=method)


def ask(
    gpu: Gpu,
    packed: PackedLinear,
    *,
    x: NDArray[np.floating] | None = None,
    rows: int = DEFAULT_ROWS,
    seed: int = DEFAULT_SEED,
    kernel: Kernel | None = None,
) -> Answers:
    """Run both probes on a device; arguments and errors are those of `verify`. The weights are uploaded once."""
    if rows < 1:
        raise UsageError(f"rows is {rows}, expected at least 1")
    if x is not None:
        x = as_rows(x, packed.in_features)
        rows = len(x)
    kernel = plan_for(gpu, rows, packed.out_features, packed.in_features, kernel).kernel  # both probes judge this one
    if x is None:
        x = np.random.default_rng(seed).standard_normal((rows, packed.in_features), np.float32)
    check_domain(packed, x)
    x_exact = exact_input(packed.in_features, min(max(len(x), EXACT_ROWS[0]), EXACT_ROWS[1]), seed)
    with Linear(gpu, packed, kernel=kernel, scales=np.ones_like(packed.scales)) as linear:
        exact = linear.run(x_exact, guard_words=_GUARD_WORDS)
        linear.set_scales(packed.scales)
        bounded = linear.run(x, guard_words=_GUARD_WORDS)
    return Answers(packed, kernel.name, x_exact, x, exact, bounded)


def judge(
    answers: Answers,
    *,
    rounding_factor: int,
    source: NDArray[np.float32] | None = None,
    method: str = "absmax",
    max_quant_error: float | None = None,
    draw: bool = False,
) -> Verdict:
    """Hold a device's answers against the float64 reference; needs no GPU, and may run in a thread of its own.

    Args:
        answers: of `ask`.
        rounding_factor: c of the bound.
        source: float32, shape (N, K), what the weight was made of.
        method: how the container says that the scales were chosen.
        max_quant_error: the relative quantization error that is allowed; it needs the source.
        draw: add a picture where it fails.

    Raises:
        UsageError: the source has the wrong shape.
    """
    packed, x = answers.packed, answers.x
    wanted: Reference = reference(packed, x, rounding_factor=rounding_factor)
    wanted_exact = oracle(packed, answers.x_exact, unit_scales=True)
    exact = _compare(answers.exact, wanted_exact, 0.0)
    bounded = _compare(answers.bounded, wanted.y, wanted.bound)
    causes: list[Cause] = []
    if exact.failures or bounded.failures:
        ones = np.ones_like(packed.scales)
        evidence = [Evidence(answers.x_exact, answers.exact.y, ones), Evidence(x, answers.bounded.y, packed.scales)]
        causes = explain_outputs(packed, evidence)
    check = None if source is None else check_source(packed, source, method)
    if check is not None and source is not None and not check.is_match:
        causes += [*causes_of_weights(packed, source), *causes_of_codes(packed, source)]
    verdict = Verdict(
        kernel=answers.kernel,
        rows=len(x),
        exact=exact,
        bounded=bounded,
        source=check,
        causes=tuple(causes),
        warnings=tuple(weight_warnings(packed)),
        max_quant_error=max_quant_error,
    )
    if not draw or verdict.status == "pass":
        return verdict
    if exact.failures and not bounded.failures:
        return replace(verdict, picture=picture_of(packed, answers.exact.y, wanted_exact, None))
    return replace(verdict, picture=picture_of(packed, answers.bounded.y, wanted.y, wanted.bound))


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
    watchdog, gpu.watchdog = gpu.watchdog, None  # it watches what the user runs: this takes long on a busy machine
    try:
        with gpu.empty(2 * count * 4, label="rounding probe") as results, gpu.upload(a) as left, gpu.upload(b) as right:
            gpu.dispatch(kernel, {0: results, 1: left, 2: right}, sizes, grid)
            seen = gpu.read(results).view(np.float32)
    finally:
        gpu.watchdog = watchdog
    return 1 if np.array_equal(seen, np.concatenate([a + b, a * b])) else 2


def _compare(run: Run, expected: NDArray[np.float64], bound: NDArray[np.float64] | float) -> Comparison:
    return compare(run.y, expected, bound, unwritten=run.unwritten, guards_intact=run.guards_intact)


def weight_warnings(packed: PackedLinear) -> list[str]:
    """Say what is odd about packed bytes, though not wrong."""
    rows = wrong_pad_rows(packed.packed, packed.in_features)
    if not rows:
        return []
    return [f"K is odd, and the pad nibble of {rows} rows is not 8: padded after the shift, or the nibbles are swapped"]
