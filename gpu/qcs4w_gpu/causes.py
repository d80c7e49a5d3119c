"""Why is it wrong? What people get wrong is tried, and what explains the evidence is named, the best first."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from qcs4w_packer import PackedLinear, Reading, readings
from qcs4w_packer.measure import quantization_error, row_square_sums
from qcs4w_packer.nibbles import wrong_pad_rows
from qcs4w_packer.quantize import dequantize
from qcs4w_packer.readings import RIGHT
from qcs4w_packer.scale_rules import OWN_RULE, rule_of

from .faults import Hypothesis, Suspects

# A fault is named when it leaves less than this part unexplained: of the whole, and of what the right reading leaves.
_EXPLAINS = 0.5
_PAIR_EXPLAINS = 0.1  # hundreds of pairs are tried, of which one may come near by chance
_SAME = 1e-6  # residuals below this are rounding
_WHOLE = 0.01  # residuals below this are rounding too, of a y that was stored in bf16: the fault is all there is
_OFF = "y is off from that by {residual:.2g}, from the right answer by {baseline:.2g}"
_ROWS = 256  # of the weight; more rows would not tell more
_MOST = 3


@dataclass(frozen=True)
class Cause:
    """One explanation of a failure.

    Attributes:
        name: of the fault, "nibbles swapped" say.
        residual: relative error that is left once the fault is assumed; 0 explains everything.
        evidence: what shows it, for people.
    """

    name: str
    residual: float
    evidence: str


@dataclass(frozen=True)
class Evidence:
    """An output that is wrong, and what it should have been made of.

    Attributes:
        x: float32, shape (M, K).
        y: floats, shape (M, N).
        scales: float32, shape (N,), those that made y.
        bias: float32, shape (N,), where one was to be added.
    """

    x: NDArray[np.float32]
    y: NDArray[np.floating]
    scales: NDArray[np.float32]
    bias: NDArray[np.float32] | None = None


def causes_of_output(
    packed: PackedLinear,
    x: NDArray[np.float32],
    y: NDArray[np.floating],
    scales: NDArray[np.float32],
    *,
    bias: NDArray[np.float32] | None = None,
) -> list[Cause]:
    """Explain one wrong output; see `explain_outputs`."""
    return explain_outputs(packed, [Evidence(x, y, scales, bias)])


def explain_outputs(packed: PackedLinear, evidence: Sequence[Evidence]) -> list[Cause]:
    """Explain wrong outputs of one kernel by a single fault or a pair of them.

    Args:
        packed: the weight.
        evidence: what the kernel made of it; a cause has to explain all of these.

    Returns:
        The best first; empty when none explains them.
    """
    answers = [Suspects(packed, each.x, each.scales, bias=each.bias) for each in evidence]
    return name_faults(answers, [each.y for each in evidence])


def name_faults(answers: Sequence[Suspects], outputs: Sequence[NDArray[np.floating]]) -> list[Cause]:
    """Name the faults whose answers are the outputs; all answers are those of the same hypotheses."""
    found = [each.residuals(y) for each, y in zip(answers, outputs, strict=True)]
    left = np.max([residuals for residuals, _ in found], axis=0)
    baselines = np.max([baseline for _, baseline in found], axis=0)
    tried = answers[0].tried
    named = [
        (float(left[i]), float(baselines[i]), tried[i]) for i in np.flatnonzero(left < _EXPLAINS) if tried[i].faults
    ]
    causes = _best(named, _OFF)
    if causes and causes[0].residual < _WHOLE:
        return causes
    return _simple(answers, outputs) or [replace(cause, evidence=f"in part: {cause.evidence}") for cause in causes]


def _simple(answers: Sequence[Suspects], outputs: Sequence[NDArray[np.floating]]) -> list[Cause]:
    """Name what is no fault of a list, but plain to see in every output: reversed, or a multiple of what is right."""
    found = [{words: rest for words, *rest in each.turned(y)} for each, y in zip(answers, outputs, strict=True)]
    for words in found[0]:
        if all(words in each and each[words][0] < min(_WHOLE, _EXPLAINS * each[words][1]) for each in found):
            left, baseline = (max(figures) for figures in zip(*(each[words] for each in found), strict=True))
            return [Cause(words, left, _OFF.format(residual=left, baseline=baseline))]
    return []


def causes_of_weights(packed: PackedLinear, weight: NDArray[np.float32]) -> list[Cause]:
    """Explain packed bytes that do not fit their float source by another order or encoding of the nibbles.

    Args:
        packed: the weight as stored.
        weight: float32, shape (N, K), what it was made of.

    Returns:
        The best first; empty when none explains the source better than our own reading.
    """
    rows = slice(0, _ROWS)

    def residual(reading: Reading) -> float:
        codes = reading.codes(packed.packed[rows], packed.in_features)
        return quantization_error(*row_square_sums(weight[rows], dequantize(codes, packed.scales[rows]))).relative

    baseline = residual(RIGHT)
    found = [(residual(reading), baseline, reading) for reading in readings() if reading.faults]
    return _best(found, "read so, the weights are off the source by {residual:.2g}, read as qcs4w by {baseline:.2g}")


def causes_of_codes(packed: PackedLinear, weight: NDArray[np.float32]) -> list[Cause]:
    """Explain packed bytes that are not those of their float source by another rule for scales, codes or padding.

    Args:
        packed: the weight as stored.
        weight: float32, shape (N, K), what it was made of.

    Returns:
        The rule first, then the padding; empty when it is ours, or when none makes the codes.
    """
    rows = slice(0, _ROWS)
    misread = [reading for reading in readings() if reading.name in {c.name for c in causes_of_weights(packed, weight)}]
    reading = misread[0] if misread else RIGHT
    codes = reading.codes(packed.packed[rows], packed.in_features)
    rule = rule_of(codes, weight[rows], packed.scales)
    own = rule_of(codes, weight[rows], packed.scales, rules=[OWN_RULE])
    causes = []
    if rule.name != own.name and rule.differing < _PAIR_EXPLAINS * own.differing:
        causes.append(
            Cause(
                rule.name,
                rule.differing / rule.codes,
                f"made so, {rule.differing:,} of {rule.codes:,} codes are others, by {own.name} {own.differing:,}",
            )
        )
    pads = wrong_pad_rows(packed.packed, packed.in_features)
    if reading is RIGHT and pads == packed.out_features:
        causes.append(Cause("padding after the shift", 0.0, "K is odd, and no row's pad nibble is 8"))
    return causes


def _best(found: Sequence[tuple[float, float, Hypothesis | Reading]], evidence: str) -> list[Cause]:
    """Rank faults, the smallest residual first; fewer of them win where residuals are equal.

    Args:
        found: (residual, what the right answer leaves of the same evidence, fault).
        evidence: the words for both figures.
    """
    telling = [item for item in found if item[0] < _share(item[2]) * min(item[1], 1.0)]
    telling.sort(key=lambda item: (round(item[0], 6), len(item[2].faults)))
    best: list[tuple[float, float, Hypothesis | Reading]] = []
    for left, baseline, fault in telling:
        if left > max(2 * telling[0][0], _SAME) or len(best) == _MOST:
            break
        if not any(set(better.faults) < set(fault.faults) for _, _, better in best):  # more faults that explain no more
            best.append((left, baseline, fault))
    return [Cause(each.name, left, evidence.format(residual=left, baseline=base)) for left, base, each in best]


def _share(fault: Hypothesis | Reading) -> float:
    """Return how much of the evidence a fault may leave unexplained and still be named."""
    return _EXPLAINS if isinstance(fault, Reading) or len(fault.faults) == 1 else _PAIR_EXPLAINS
