"""What explains that all codes, or all scales, of one tensor differ from another's: the faults that tools have."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from .nibbles import CODE_MAX, CODE_MIN, EVEN_HIGH, LAYOUTS, Layout, unpack_codes
from .readings import Reading
from .scale_rules import DIVISORS

_SAME_RATIO = 2.0**-21  # a scale is rounded a few times in float32


@dataclass(frozen=True)
class _Rows:
    """The same rows of A and of B: packed uint8, (n, K_packed) each."""

    a_packed: NDArray[np.uint8]
    b_packed: NDArray[np.uint8]
    in_features: int

    def a(self, layout: Layout = EVEN_HIGH) -> NDArray[np.int8]:
        """The codes of A, read in some layout."""
        return unpack_codes(self.a_packed, self.in_features, layout)

    def b(self, layout: Layout = EVEN_HIGH) -> NDArray[np.int8]:
        """The codes of B, read in some layout."""
        return unpack_codes(self.b_packed, self.in_features, layout)


def _candidates() -> dict[str, Callable[[_Rows], bool]]:
    """Return what may explain differing codes, in words, with its test on some rows."""
    found: dict[str, Callable[[_Rows], bool]] = {}
    for layout in LAYOUTS.values():
        if layout != EVEN_HIGH:
            words = f"{Reading(layout).name}: read as {layout.name}"
            found[f"{words}, B has the codes of A"] = partial(_reads_as_a, layout)
            found[f"{words}, A has the codes of B"] = partial(_reads_as_b, layout)
    low = np.int8(CODE_MIN + 1)
    found["±7 clamp: the codes of B are those of A, with −7 for −8"] = lambda rows: np.array_equal(
        np.maximum(rows.a(), low), rows.b()
    )
    found["±7 clamp: the codes of A are those of B, with −7 for −8"] = lambda rows: np.array_equal(
        np.maximum(rows.b(), low), rows.a()
    )
    found["offset off by one: each code of B is that of A + 1"] = lambda rows: np.array_equal(
        np.minimum(rows.a() + np.int8(1), CODE_MAX), rows.b()
    )
    found["offset off by one: each code of B is that of A − 1"] = lambda rows: np.array_equal(
        np.maximum(rows.a() - np.int8(1), CODE_MIN), rows.b()
    )
    return found


def _reads_as_a(layout: Layout, rows: _Rows) -> bool:
    return np.array_equal(rows.b(layout), rows.a())


def _reads_as_b(layout: Layout, rows: _Rows) -> bool:
    return np.array_equal(rows.a(layout), rows.b())


def code_patterns(blocks: Iterable[tuple[NDArray[np.uint8], NDArray[np.uint8]]], in_features: int) -> list[str]:
    """Name what turns all codes of A into those of B, or the other way round.

    Args:
        blocks: packed rows of A and of B, (n, K_packed) each; read only as far as something still fits.
        in_features: K.
    """
    alive = _candidates()
    for a_packed, b_packed in blocks:
        rows = _Rows(a_packed, b_packed, in_features)
        alive = {words: fits for words, fits in alive.items() if fits(rows)}
        if not alive:
            break
    # A layout mostly fits both ways round, and is said once.
    twins = {words.replace("B has the codes of A", "A has the codes of B") for words in alive if "B has" in words}
    return [words for words in alive if words not in twins]


def scale_patterns(a: NDArray[np.float32], b: NDArray[np.float32]) -> list[str]:
    """Name what turns all scales (N,) of A into those of B, or the other way round; nothing explains a single one."""
    if len(a) < 2:
        return []
    for name, rounded in (("float16", _as_float16), ("bfloat16", _as_bfloat16)):
        for one, other, source, target in (("B", "A", a, b), ("A", "B", b, a)):
            if np.array_equal(rounded(source), target):
                return [f"the scales of {one} are those of {other} rounded to {name}"]
    if not (np.isfinite(a).all() and np.isfinite(b).all() and (a > 0).all() and (b > 0).all()):
        return []
    ratios = b.astype(np.float64) / a
    ratio = float(np.median(ratios))
    if np.abs(ratios / ratio - 1).max() > _SAME_RATIO:
        return []
    for a_divisor in DIVISORS:
        for b_divisor in DIVISORS:
            if a_divisor != b_divisor and abs(ratio * b_divisor / a_divisor - 1) < _SAME_RATIO:
                return [
                    f"divisors: the scales of A are as of absmax / {a_divisor:g}, those of B of absmax / {b_divisor:g}"
                ]
    return [f"every scale of B is that of A times {ratio:.7g}"]


def _as_float16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float32)


def _as_bfloat16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round to the nearest bfloat16, ties to even; a NaN may become an infinity, which equals nothing."""
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)
