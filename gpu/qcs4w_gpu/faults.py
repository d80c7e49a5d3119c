"""What a linear with a usual fault would answer: every single fault and every pair, as one array of outputs.

A fault belongs to one place: how the bytes are read (`Reading`), which scale is taken, which x, where y is written, or
the bias. Two of different places make a pair; two of one place contradict each other, but for the readings, of which
order, encoding, tail and arrangement are places of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qcs4w_packer import PackedLinear, Reading, readings
from qcs4w_packer.nibbles import OFFSET, packed_width
from qcs4w_packer.readings import COLUMNS as TRANSPOSED
from qcs4w_packer.readings import RIGHT, ROWS, dropped_tails

Floats = NDArray[np.float64]

# Of x and of the weight. More would tell no more: 64 × 128 sums of which two agree by chance are the same fault.
_PART_M, _PART_N = 64, 128
_BLOCK = 8192  # columns of the weight read at a time

#: Faults of the scale, of x, of where y is written, and of the bias; "" for none.
SCALES = (
    "",
    "scales of the neighbour: n + 1 for n",
    "scales of the neighbour: n - 1 for n",
    "scales by k in place of n",
    "scales by m in place of n",
    "scales missing",
)
INPUTS = ("", "rows of x of the neighbour: m + 1 for m", "rows of x of the neighbour: m - 1 for m", "x read by columns")
OUTPUTS = (
    "",
    "columns of y shifted: n holds n + 1",
    "columns of y shifted: n holds n - 1",
    "y written by columns",
)
BIASES = ("", "bias missing", "bias twice")

_BY_K, _BY_COLUMNS = SCALES[3], INPUTS[3]


@dataclass(frozen=True)
class Hypothesis:
    """A reading and up to one fault in every other place."""

    reading: Reading = RIGHT
    scale: str = ""
    input: str = ""
    output: str = ""
    bias: str = ""

    @property
    def faults(self) -> tuple[str, ...]:
        """What is wrong, in the words that reports use; empty for the right answer."""
        return (*self.reading.faults, *filter(None, (self.scale, self.input, self.output, self.bias)))

    @property
    def name(self) -> str:
        """The faults joined, or "qcs4w" for the right answer."""
        return " and ".join(self.faults) or RIGHT.name


RIGHT_ANSWER = Hypothesis()


@lru_cache(maxsize=64)
def hypotheses(in_features: int, out_features: int, *, has_bias: bool = False) -> tuple[Hypothesis, ...]:
    """Return the right answer, every single fault and every pair, and of readings alone also what is composed of more.

    Args:
        in_features: K, which says what tails there are.
        out_features: N, with which the bytes may hold the transposed matrix.
        has_bias: include the faults of a bias.
    """
    others = [Hypothesis(RIGHT, *parts) for parts in product(SCALES, INPUTS, OUTPUTS, BIASES if has_bias else ("",))]
    counted = [(len(other.faults), other) for other in others]
    found = []
    for reading in readings(in_features, out_features=out_features):
        count = len(reading.faults)
        found += [(count + more, replace(other, reading=reading)) for more, other in counted if count + more <= 2]
        if count > 2:
            found.append((count, Hypothesis(reading)))
    return tuple(each for _, each in sorted(found, key=lambda item: item[0]))


class Suspects:
    """The outputs of all hypotheses for one weight and one input, for a part of the rows and columns.

    Args:
        packed: the weight, N × K.
        x: float32, shape (M, K).
        scales: float32, shape (N,), those that are meant.
        bias: float32, shape (N,), where one is added.
        tried: the hypotheses; those that tell of a bias need one.
    """

    def __init__(
        self,
        packed: PackedLinear,
        x: NDArray[np.float32],
        scales: NDArray[np.float32],
        *,
        bias: NDArray[np.float32] | None = None,
        tried: Sequence[Hypothesis] | None = None,
    ):
        self._packed, self._x = packed, x
        self._scales = scales.astype(np.float64)
        self._bias = None if bias is None else bias.astype(np.float64)
        self.shape = len(x), packed.out_features
        self._part = min(len(x), _PART_M), min(packed.out_features, _PART_N)
        self._products: dict[tuple[Any, ...], dict[int, tuple[Floats, Floats]]] = {}
        if tried is None:
            tried = hypotheses(packed.in_features, packed.out_features, has_bias=bias is not None)
        self.tried = list(tried)
        self.outputs = np.stack([self._output(each) for each in self.tried])

    def residuals(self, y: NDArray[np.floating]) -> tuple[Floats, Floats]:
        """Return what each hypothesis leaves unexplained of a y, and what the right answer leaves of the same part.

        Args:
            y: floats, shape (M, N); what is not finite tells nothing.

        Returns:
            Two of shape (tried,): ‖y − answer‖ / ‖y‖; where they have no element in common, infinity.
        """
        rows, columns = self._part
        count_m, count_n = self.shape
        plain = y[:rows, :columns].astype(np.float64)
        turned = y.reshape(-1).reshape(count_n, count_m).T[:rows, :columns].astype(np.float64)
        left, baseline = np.empty(len(self.tried)), np.empty(len(self.tried))
        right = self.outputs[self.tried.index(RIGHT_ANSWER)]
        by_columns = np.array([each.output == OUTPUTS[3] for each in self.tried])
        left[~by_columns] = _relative(plain, self.outputs[~by_columns])
        left[by_columns] = _relative(turned, self.outputs[by_columns])
        # What a hypothesis says nothing of must not speak for it: the right answer is held against the same part.
        common = np.where(np.isnan(self.outputs[~by_columns]), np.nan, right)
        baseline[~by_columns] = _relative(plain, common)
        baseline[by_columns] = _relative(plain, right[None])
        return left, baseline

    def turned(self, y: NDArray[np.floating]) -> list[tuple[str, float, float]]:
        """Hold a y against the right answer in ways that make no pairs: reversed, or multiplied by a number.

        Args:
            y: floats, shape (M, N).

        Returns:
            (what it is, the residual, what the right answer leaves), where both have more than one element in common.
        """
        rows, columns = self._part
        right = self.outputs[self.tried.index(RIGHT_ANSWER)][None]
        plain = y[:rows, :columns].astype(np.float64)
        baseline = float(_relative(plain, right)[0])
        found = [
            (words, float(_relative(other.astype(np.float64), right)[0]), baseline)
            for words, other in (
                ("rows of y reversed", y[::-1][:rows, :columns]),
                ("columns of y reversed", y[:, ::-1][:rows, :columns]),
            )
        ]
        told = np.isfinite(plain)
        size = float(np.square(right[0][told]).sum())
        factor = float((plain[told] * right[0][told]).sum()) / size if size else 0.0
        if factor and told.sum() > 1:
            found.append((f"y is {factor:.4g} × the right one", float(_relative(plain, factor * right)[0]), baseline))
        return found

    def _output(self, each: Hypothesis) -> Floats:
        """Return a hypothesis' y where it is not turned, NaN where the hypothesis cannot say: (rows, columns)."""
        columns = self._part[1]
        y = self._product(each)
        if each.input in INPUTS[1:3]:
            y = _shifted(y, 1 if each.input == INPUTS[1] else -1)
        y = y * self._factors(each.scale)
        if self._bias is not None:
            y = y + {"": 1, BIASES[1]: 0, BIASES[2]: 2}[each.bias] * self._bias[None, :columns]
        if each.output in OUTPUTS[1:3]:
            y = _shifted(y.T, 1 if each.output == OUTPUTS[1] else -1).T
        return y

    def _factors(self, fault: str) -> Floats:
        """Return what sums are multiplied by, (rows or 1, columns or 1); NaN where there is no such scale."""
        rows, columns = self._part
        scales = self._scales
        ends = np.concatenate([[np.nan], scales, [np.nan]])
        if fault == SCALES[1]:
            return ends[2 : columns + 2][None, :]
        if fault == SCALES[2]:
            return ends[:columns][None, :]
        if fault == SCALES[4]:
            return scales[np.minimum(np.arange(rows), len(scales) - 1)][:, None]  # as a guarded read past the end
        if fault in (SCALES[3], SCALES[5]):
            return np.ones((1, 1))
        return scales[None, :columns]

    def _product(self, each: Hypothesis) -> Floats:
        """Return x · codesᵀ as a hypothesis reads both, (rows, columns)."""
        reading = each.reading
        key = (each.scale == _BY_K, each.input == _BY_COLUMNS, reading.arrangement.name, reading.layout)
        if key not in self._products:
            self._products[key] = self._multiply(each)
        sums, row_sums = self._products[key][reading.dropped_tail]
        return sums if reading.layout.twos_complement else sums + (OFFSET - reading.offset) * row_sums

    def _multiply(self, each: Hypothesis) -> dict[int, tuple[Floats, Floats]]:
        """Return, for each tail that may be dropped, x · codesᵀ with the usual offset, and the sums of x."""
        rows, columns = self._part
        packed, x = self._packed, self._x
        in_features = packed.in_features
        if each.input == _BY_COLUMNS:
            x = x.reshape(-1).reshape(in_features, len(x)).T
        sums, row_sums = np.zeros((rows, columns)), np.zeros((rows, 1))
        found = {}
        stops = {in_features - tail: tail for tail in (0, *dropped_tails(in_features))}
        at = 0
        for end in sorted({*range(_BLOCK, in_features, _BLOCK), *stops}):
            wide = x[:rows, at:end].astype(np.float64)
            if each.scale == _BY_K:
                wide = wide * self._scales[np.minimum(np.arange(at, end), len(self._scales) - 1)]
            sums = sums + wide @ _codes(packed, each.reading, columns, at, end).astype(np.float64).T
            row_sums = row_sums + wide.sum(axis=1, keepdims=True)
            if end in stops:
                found[stops[end]] = sums, row_sums
            at = end
        return found


def _codes(packed: PackedLinear, reading: Reading, rows: int, start: int, end: int) -> NDArray[np.int8]:
    """Return columns of the first rows, as read with the usual offset."""
    plain = Reading(reading.layout, arrangement=reading.arrangement)
    if reading.arrangement is ROWS:
        odd = start % 2  # its byte's even column was read before
        return plain.codes(packed.packed[:rows, start // 2 : packed_width(end)], end - start + odd)[:, odd:]
    assert reading.arrangement is TRANSPOSED  # noqa: S101 - the list has no other
    width = packed_width(packed.out_features)
    part = packed.packed.reshape(-1)[start * width : end * width]
    return plain.matrix(part, packed.out_features, end - start, rows)


def _shifted(values: Floats, step: int) -> Floats:
    """Return rows of which each holds the one `step` after it; those without one are NaN."""
    result = np.full_like(values, np.nan)
    if step > 0:
        result[:-step] = values[step:]
    else:
        result[-step:] = values[:step]
    return result


def _relative(seen: Floats, answers: Floats) -> Floats:
    """Return ‖seen − answer‖ / ‖seen‖ of each answer over what both tell; zeros are explained by zeros alone."""
    with np.errstate(invalid="ignore"):
        difference = seen[None] - answers
        told = np.isfinite(difference)
        left = np.sqrt(np.square(difference, where=told, out=np.zeros_like(difference)).sum(axis=(1, 2)))
        size = np.sqrt(np.where(told, np.square(seen)[None], 0).sum(axis=(1, 2)))
    nothing = np.where(left > 0, np.inf, 0.0)
    relative = np.divide(left, size, out=nothing, where=size > 0)
    return np.where(told.any(axis=(1, 2)), relative, np.inf)
