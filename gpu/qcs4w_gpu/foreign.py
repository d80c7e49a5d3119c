"""A y that was computed elsewhere, on a phone, in a browser or by another runtime: judged without any GPU."""

import os
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from qcs4w_packer import PackedLinear
from qcs4w_packer.errors import UsageError

from .causes import Cause, causes_of_codes, causes_of_output, causes_of_weights
from .judge import compare, reference, stored_bound
from .linear import as_rows
from .picture import picture_of
from .verify import Verdict, check_source, weight_warnings


def judge_output(
    packed: PackedLinear,
    x: NDArray[np.floating],
    y: NDArray[np.floating],
    *,
    dtype: str = "F32",
    bias: NDArray[np.float32] | None = None,
    source: NDArray[np.float32] | None = None,
    method: str = "absmax",
    rounding_factor: int = 1,
    max_quant_error: float | None = None,
    draw: bool = False,
    file: str | os.PathLike[str] | None = None,
) -> Verdict:
    """Judge y = x · Ŵᵀ (+ bias), wherever it was computed, as long as sums are kept in float32 or better.

    There is no exact probe: it needs an input of small integers. A y of such an input is judged by the bound as well.

    Args:
        packed: the weight.
        x: floats, shape (..., K).
        y: float32, shape (..., N), with the leading dimensions of x; NaN and infinities may stand in it.
        dtype: that y was stored in: F16, BF16, F32 or F64. What storing rounds is allowed for.
        bias: float32, shape (N,), that y should have in it.
        source: float32, shape (N, K), what the weight was made of.
        method: how the container says that the scales were chosen.
        rounding_factor: c of the bound: 1 where arithmetic rounds to nearest, as nearly all does.
        max_quant_error: the relative quantization error that is allowed; it needs the source.
        draw: add a picture where it fails.
        file: where y came from, for errors.

    Raises:
        UsageError: x, y or source have the wrong shape.
        DomainError: x leaves the range in which float32 can be judged.
    """
    rows = as_rows(x, packed.in_features)
    if y.ndim < 1 or y.shape[-1] != packed.out_features or _leading(y) != _leading(x):
        expected = [*x.shape[:-1], packed.out_features]
        turned = list(y.shape) == expected[::-1]
        raise UsageError(
            f"{f'{file}: ' if file else ''}the output has shape {list(y.shape)}, expected {expected} "
            f"for the input {list(x.shape)}",
            hint="save it transposed: one row for each row of the input" if turned else None,
        )
    y = np.ascontiguousarray(y.reshape(-1, packed.out_features))

    wanted = reference(packed, rows, rounding_factor=rounding_factor, bias=bias)
    bound, overflow = stored_bound(wanted, y, dtype)
    found = compare(y, wanted.y, bound, overflow=overflow)
    causes: list[Cause] = []
    if not found.is_match:
        causes = causes_of_output(packed, rows, y, packed.scales, bias=bias)
    check = None if source is None else check_source(packed, source, method)
    if check is not None and source is not None and not check.is_match:
        causes += [*causes_of_weights(packed, source), *causes_of_codes(packed, source)]
    verdict = Verdict(
        kernel=None,
        rows=len(rows),
        exact=None,
        bounded=found,
        source=check,
        causes=tuple(causes),
        warnings=(*weight_warnings(packed), *_blindness(wanted.y, bound)),
        output_dtype=dtype,
        max_quant_error=max_quant_error,
    )
    if not draw or verdict.status == "pass":
        return verdict
    return replace(verdict, picture=picture_of(packed, y, wanted.y, bound, right=overflow))


def _blindness(y: NDArray[np.float64], bound: NDArray[np.float64]) -> list[str]:
    """Say where the judge cannot see: there is no exact probe to catch what hides within the bound."""
    hidden = int((np.abs(y) <= bound).sum())
    if 2 * hidden < y.size:
        return []
    return [
        f"{hidden:,} of {y.size:,} elements of y should be no larger than their bound, so that zeros would pass there: "
        "the input is zero or tiny, or K so large that sums in float32 may lose everything"
    ]


def _leading(array: NDArray[np.floating]) -> tuple[int, ...]:
    """Return the leading dimensions that matter: [1, M, K] and [M, K] are the same rows."""
    return tuple(size for size in array.shape[:-1] if size != 1)
