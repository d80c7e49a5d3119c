"""The rules by which tools make 4-bit codes of weights: ours, and those that one meets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .nibbles import CODE_MAX, CODE_MIN
from .quantize import DIVISOR, SCALE_FLOOR, row_absmax, scaled_rows

Rounding = Literal["reciprocal", "divided", "half away"]
_ROUNDINGS: tuple[Rounding, ...] = ("reciprocal", "divided", "half away")

#: What absmax is divided by, by qcs4w and by other tools.
DIVISORS = (float(DIVISOR), 7.0, 8.0)


@dataclass(frozen=True)
class ScaleRule:
    """How the codes follow from the weights.

    Attributes:
        name: "absmax / 7.5, codes −8..7", say.
        differing: codes, of those looked at, that the rule makes otherwise.
        codes: looked at.
        same_scales: whether the given scales are the rule's; None without any.
    """

    name: str
    differing: int
    codes: int
    same_scales: bool | None


@dataclass(frozen=True)
class Rule:
    """absmax / divisor, or for ggml the value of largest magnitude / −8, then one of three ways to round."""

    divisor: float
    lowest: int = CODE_MIN
    rounding: Rounding = "reciprocal"
    signed: bool = False

    @property
    def name(self) -> str:
        """The rule in words."""
        what = "the value of largest magnitude / −8" if self.signed else f"absmax / {self.divisor:g}"
        how = {"reciprocal": "", "divided": ", divided by the scale", "half away": ", halves rounded away from zero"}
        return f"{what}, codes {self.lowest}..7{how[self.rounding]}".replace("-", "−")


# The first that fits is named: qcs4w's own rule, then the usual ones.
RULES = (
    *(
        Rule(divisor, lowest, rounding)
        for rounding in _ROUNDINGS
        for divisor, lowest in ((DIVISORS[0], CODE_MIN), (7.0, -7), (7.0, CODE_MIN), (8.0, CODE_MIN), (DIVISORS[0], -7))
    ),
    Rule(8.0, signed=True, rounding="half away"),
)

#: The rule of qcs4w.
OWN_RULE = RULES[0]


def codes_by_rule(weight: NDArray[np.float32], rule: Rule) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantize rows by a rule that need not be ours: codes (n, K) and scales (n,)."""
    absmax = row_absmax(weight)
    if rule.signed:
        largest = np.take_along_axis(weight, np.abs(weight).argmax(axis=1)[:, None], axis=1)[:, 0]
        scales = np.where(np.abs(largest) < SCALE_FLOOR, SCALE_FLOOR, largest / np.float32(-8))
    else:
        scales = np.maximum(absmax / np.float32(rule.divisor), SCALE_FLOOR)
    scaled = weight / scales[:, None] if rule.rounding == "divided" else scaled_rows(weight, scales)
    rounded = np.copysign(np.floor(np.abs(scaled) + 0.5), scaled) if rule.rounding == "half away" else np.rint(scaled)
    return np.clip(rounded, rule.lowest, CODE_MAX).astype(np.int8), scales.astype(np.float32)


def best_rule(
    codes: NDArray[np.int8],
    by_rule: Sequence[tuple[Rule, NDArray[np.int8], NDArray[np.float32]]],
    scales: NDArray[np.float32] | None,
) -> ScaleRule:
    """Find the rule that makes most of the codes."""
    rule, made, own_scales = min(by_rule, key=lambda each: np.count_nonzero(each[1] != codes))
    same = None if scales is None else bool(np.array_equal(own_scales, scales[: len(codes)]))
    return ScaleRule(rule.name, int(np.count_nonzero(made != codes)), codes.size, same)


def rule_of(
    codes: NDArray[np.int8],
    weight: NDArray[np.float32],
    scales: NDArray[np.float32] | None = None,
    *,
    rules: Sequence[Rule] = RULES,
) -> ScaleRule:
    """Find the rule that makes most of the codes.

    Args:
        codes: int8, shape (n, K), the first rows.
        weight: float32, shape (n, K), what they were made of.
        scales: float32, at least n, if they are known.
        rules: to try; the first of those that are equally good is named.
    """
    return best_rule(codes, [(rule, *codes_by_rule(weight, rule)) for rule in rules], scales)
