"""Which layout do packed bytes have? Each one that is known is tried on the evidence, and the best are ranked.

The evidence is the float weight that the bytes were made of, or an input and the output that it should give. A layout
is scored by the likelihood of the evidence when its codes are read so and every row has the scale that suits it best
(or the scale given): −(n − 1) / 2 · ln(what is left unexplained) a row of n values, which is the profile likelihood of
a linear model with noise of unknown size. The probabilities are those of the layouts under a flat prior.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .errors import UsageError
from .nibbles import OFFSET, PAD_NIBBLE, packed_width, unpack_nibbles
from .readings import COLUMNS, Reading, layouts
from .rowpack import refuse_non_finite
from .scale_rules import RULES, ScaleRule, best_rule, codes_by_rule

Bytes = NDArray[np.uint8]
Verdict = Literal["certain", "likely", "ambiguous", "none"]

_CERTAIN, _LIKELY = 0.999, 0.9
_FITS = 0.6  # a reading that leaves more of the evidence than this explains nothing
_NOISE = 0.003  # squares that 4 bits leave of a row at best, so that luck in a short row proves little
_POOR, _POOR_AT_LEAST = 1.5, 0.01  # times what 4 bits must lose: a reading that leaves more is no sure one
_ELEMENTS = 1 << 19  # of the weight, read by each layout; more would tell no more
_ROWS = 256


@dataclass(frozen=True)
class Explanation:
    """One layout held against the evidence.

    Attributes:
        reading: the layout.
        cosine: between the evidence and what the reading makes of the bytes, a mean of the rows by their energy.
        residual: relative error left when each row has the scale that suits it best; 1 explains nothing.
        residual_as_scaled: the same with the scales that were given; None without any.
        probability: that this is the layout, among all that were tried.
        same_as: other layouts that read the very same codes here.
    """

    reading: Reading
    cosine: float
    residual: float
    residual_as_scaled: float | None
    probability: float
    same_as: tuple[Reading, ...] = ()


@dataclass(frozen=True)
class Finding:
    """What bytes are, as far as the evidence tells.

    Attributes:
        verdict: "certain" (999 in 1000), "likely" (9 in 10), "ambiguous", or "none" where no layout fits.
        ranked: the layouts tried, the best first; equal codes are listed once.
        rule: how the best one's codes follow from the weights; None without weights or where nothing fits.
        expected_residual: what packing the weights as qcs4w does would leave; None without weights.
        padding: what fills up an odd row, for people; None where there is nothing.
        notes: what speaks against the verdict, for people.
    """

    verdict: Verdict
    ranked: tuple[Explanation, ...]
    rule: ScaleRule | None = None
    expected_residual: float | None = None
    padding: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Explanation:
        """The first of the ranked ones."""
        return self.ranked[0]


def sample_rows(out_features: int, in_features: int) -> int:
    """Return how many of a weight's first rows are looked at."""
    return max(1, min(out_features, _ROWS, _ELEMENTS // max(1, in_features)))


def explain_weights(
    data: Bytes,
    weight: NDArray[np.float32],
    scales: NDArray[np.float32] | None = None,
    *,
    out_features: int | None = None,
) -> Finding:
    """Name the layout of packed bytes from the float weight that they were made of.

    Args:
        data: uint8, any shape, at least as many as the smallest layout takes; more may follow.
        weight: float32, shape (N, K), or its first `sample_rows` rows at least.
        scales: float32, shape (N,), if they are known.
        out_features: N, where the weight is not given whole.

    Raises:
        UsageError: the weight is empty, or there are fewer bytes than any layout takes.
        NonFiniteError: a weight or a scale is NaN or infinite.
    """
    if weight.ndim != 2 or 0 in weight.shape:
        raise UsageError(f"the weight has shape {list(weight.shape)}, expected [N, K] with at least 1 each")
    out_features = out_features or len(weight)
    rows = sample_rows(out_features, weight.shape[1])
    sample = weight[:rows]
    refuse_non_finite(sample, name="weight")
    evidence = _Evidence(sample.astype(np.float64), _finite_scales(scales, rows))
    shape = (out_features, weight.shape[1])
    by_rule = [(rule, *codes_by_rule(sample, rule)) for rule in RULES]
    ranked = _rank(data, shape, rows, lambda codes: codes.astype(np.float64), evidence, [c for _, c, _ in by_rule])
    own = by_rule[0][1].astype(np.float64)
    expected = _fit(evidence, own).residual
    best = ranked[0]
    rule, notes, verdict = None, [], _verdict(ranked)
    if verdict != "none":
        codes = best.reading.matrix(data, *shape, rows)
        rule = best_rule(codes, by_rule, scales)
        if best.residual > _POOR * expected + _POOR_AT_LEAST:
            verdict = "likely" if verdict == "certain" else verdict
            notes.append("it fits worse than 4 bits must: the encoding may be none of those known")
            centred = _fit(_Evidence(_centred(evidence.values)), _centred(codes.astype(np.float64))).residual
            if centred < 0.7 * best.residual:
                notes.append("zero points of their own for the rows would explain more: an asymmetric format")
    return Finding(verdict, ranked, rule, expected, _padding(data, best, *shape), tuple(notes))


def explain_output(
    data: Bytes,
    out_features: int,
    x: NDArray[np.float32],
    y: NDArray[np.float32],
    scales: NDArray[np.float32] | None = None,
) -> Finding:
    """Name the layout of packed bytes from an input and the output that the linear should give.

    Args:
        data: uint8, as for `explain_weights`.
        out_features: N.
        x: float32, shape (M, K).
        y: float32, shape (M, N).
        scales: float32, shape (N,), if they are known.

    Raises:
        UsageError: x and y are empty or do not fit together, or there are fewer bytes than any layout takes.
        NonFiniteError: x, y or a scale is NaN or infinite.
    """
    if 0 in x.shape or 0 in y.shape or len(x) != len(y) or y.shape[1] != out_features:
        raise UsageError(f"x has shape {list(x.shape)}, y {list(y.shape)}, expected [M, K] and [M, N], at least 1 each")
    shape = (out_features, x.shape[1])
    rows = sample_rows(*shape)
    refuse_non_finite(x[:_ROWS], name="x")
    refuse_non_finite(y[:_ROWS, :rows], name="y")
    wide = x[:_ROWS].astype(np.float64)
    evidence = _Evidence(y[:_ROWS, :rows].astype(np.float64).T, _finite_scales(scales, rows))  # (rows, M)

    def made(codes: NDArray[np.int8]) -> NDArray[np.float64]:
        return codes.astype(np.float64) @ wide.T

    ranked = _rank(data, shape, rows, made, evidence)
    best, verdict, notes = ranked[0], _verdict(ranked), []
    if verdict != "none" and best.reading.offset != OFFSET:
        usual = replace(best.reading, offset=OFFSET).matrix(data, *shape, rows)
        with_bias = _fit(_Evidence(_centred(evidence.values)), _centred(made(usual))).residual
        if with_bias < max(1.5 * best.residual, 0.02):
            verdict = "ambiguous"
            notes.append(f"a bias in y would explain it with the offset {OFFSET}: the sums of x are much alike")
    return Finding(verdict, ranked, padding=_padding(data, best, *shape), notes=tuple(notes))


@dataclass(frozen=True)
class _Evidence:
    """What readings are held against: values (rows, n), and the scales (rows,) if they are known."""

    values: NDArray[np.float64]
    scales: NDArray[np.float64] | None = None


def _finite_scales(scales: NDArray[np.float32] | None, rows: int) -> NDArray[np.float64] | None:
    if scales is None:
        return None
    refuse_non_finite(scales[:, None], name="scales")
    return scales[:rows].astype(np.float64)


def _centred(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return rows without their mean, which is what a zero point or a bias of each row takes away."""
    centred: NDArray[np.float64] = values - values.mean(axis=1, keepdims=True)
    return centred


def _rank(
    data: Bytes,
    shape: tuple[int, int],
    rows: int,
    made: Callable[[NDArray[np.int8]], NDArray[np.float64]],
    evidence: _Evidence,
    made_by_rules: Sequence[NDArray[np.int8]] = (),
) -> tuple[Explanation, ...]:
    groups: dict[bytes, tuple[_Fit, float, list[Reading]]] = {}
    tried = list(layouts(*shape, data.size))
    for reading in tried:
        codes = np.ascontiguousarray(reading.matrix(data, *shape, rows))
        key = codes.tobytes()
        if key in groups:
            groups[key][2].append(reading)
        else:
            fit = _fit(evidence, made(codes))
            known = _rule_likelihood(codes, made_by_rules, len(tried))
            groups[key] = (fit, fit.log_likelihood + known, [reading])
    if not groups:
        raise UsageError(
            f"there are {data.size:,} bytes, fewer than 4-bit codes of {shape[0]} × {shape[1]} take "
            f"({shape[0] * packed_width(shape[1]):,})"
        )
    top = max(likelihood for _, likelihood, _ in groups.values())
    weights = [math.exp(max(likelihood - top, -700)) for _, likelihood, _ in groups.values()]
    explained = []
    for (fit, _, same), weight in zip(groups.values(), weights, strict=True):
        first, *others = _different(same, *shape, rows)
        explained.append(
            Explanation(first, fit.cosine, fit.residual, fit.residual_as_scaled, weight / sum(weights), tuple(others))
        )
    return tuple(sorted(explained, key=lambda each: (-each.probability, each.residual)))


def _rule_likelihood(codes: NDArray[np.int8], made_by_rules: Sequence[NDArray[np.int8]], readings_tried: int) -> float:
    """Return by how much (as a logarithm) it is more likely that a rule makes these codes than that chance does.

    A fit with free scales cannot tell an offset from a scale where all weights of a row have one sign; that a rule
    which tools use makes code after code can. The codes that it makes otherwise are paid for by place and value.
    """
    if not made_by_rules:
        return 0.0
    differing = min(int(np.count_nonzero(made != codes)) for made in made_by_rules)
    shares = np.bincount(codes.reshape(-1) + 16, minlength=32) / codes.size
    entropy = -float((shares[shares > 0] * np.log(shares[shares > 0])).sum())
    told = codes.size * entropy - differing * (entropy + math.log(codes.size))
    return max(0.0, told - math.log(len(made_by_rules) * readings_tried))


def _different(same: list[Reading], out_features: int, in_features: int, rows: int) -> list[Reading]:
    """Drop readings that differ in name only: of this shape they read any bytes alike."""
    if len(same) == 1 or out_features * in_features > _ELEMENTS:
        return same
    nbytes = max(reading.nbytes(out_features, in_features) for reading in same)
    draw = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    seen = {reading.matrix(draw, out_features, in_features, rows).tobytes(): reading for reading in reversed(same)}
    return [reading for reading in same if reading in seen.values()]


@dataclass(frozen=True)
class _Fit:
    cosine: float
    residual: float
    residual_as_scaled: float | None
    log_likelihood: float


def _fit(evidence: _Evidence, made: NDArray[np.float64]) -> _Fit:
    """Hold what codes make (rows, n) against the evidence (rows, n)."""
    values, scales = evidence.values, evidence.scales
    count = values.shape[1]
    energy = np.einsum("ij,ij->i", values, values)
    size = np.einsum("ij,ij->i", made, made)
    product = np.einsum("ij,ij->i", values, made)
    there = energy > 0
    if not there.any():
        return _Fit(0.0, 0.0 if not size.any() else 1.0, None, 0.0)
    energy, size, product = energy[there], size[there], product[there]
    cosines = np.divide(product, np.sqrt(energy * size), out=np.zeros_like(product), where=size > 0)
    left = 1 - np.maximum(cosines, 0) ** 2
    likelihood = -(count - 1) / 2 * np.log(left + _NOISE)
    as_scaled = None
    if scales is not None:
        given = scales[there]
        squares = np.maximum(energy - 2 * given * product + given**2 * size, 0)
        likelihood = np.maximum(likelihood, -count / 2 * np.log(squares / energy + _NOISE))
        as_scaled = math.sqrt(float(squares.sum() / energy.sum()))
    total = energy.sum()
    return _Fit(
        float((cosines * energy).sum() / total),
        math.sqrt(max(0.0, float((left * energy).sum() / total))),
        as_scaled,
        float(likelihood.sum()),
    )


def _verdict(ranked: Sequence[Explanation]) -> Verdict:
    best = ranked[0]
    if best.residual > _FITS and (best.residual_as_scaled is None or best.residual_as_scaled > _FITS):
        return "none"
    if best.same_as or best.probability < _LIKELY:
        return "ambiguous"
    return "certain" if best.probability >= _CERTAIN else "likely"


def _padding(data: Bytes, best: Explanation, out_features: int, in_features: int) -> str | None:
    """Say what the last nibble of rows with an odd K holds."""
    reading = best.reading
    if in_features % 2 == 0 or not reading.arrangement.has_order or reading.arrangement is COLUMNS:
        return None
    rows = sample_rows(out_features, in_features)
    width = reading.nbytes(out_features, in_features) // out_features
    part = data.reshape(-1)[: rows * width].reshape(rows, width)
    pads = np.unique(unpack_nibbles(part, even_high=reading.layout.even_high)[:, in_features])
    if len(pads) > 1:
        return f"the pad nibble of odd rows varies ({', '.join(f'{pad:X}' for pad in pads)})"
    zero = 0 if reading.layout.twos_complement else PAD_NIBBLE
    if pads[0] == zero:
        return f"the pad nibble is {pads[0]:X}, the code 0"
    return f"the pad nibble is {pads[0]:X}, not {zero:X}: padded after the shift"
