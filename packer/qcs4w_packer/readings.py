"""The ways in which packed bytes get misread. One list, for `verify`'s causes and for naming a file's layout."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from .nibbles import EVEN_HIGH, LAYOUTS, OFFSET, Layout, unpack_codes


@dataclass(frozen=True)
class Reading:
    """One way to turn packed bytes into integers.

    Attributes:
        layout: nibble order and encoding.
        offset_missing: 8 is never subtracted, so that codes run from 0 to 15 (not for two's complement).
        dropped_tail: this many last columns are left out of the sum.
    """

    layout: Layout = EVEN_HIGH
    offset_missing: bool = False
    dropped_tail: int = 0

    @property
    def faults(self) -> tuple[str, ...]:
        """What is wrong with this reading, in the words that reports use; empty for the right one."""
        tail = self.dropped_tail
        named = (
            (not self.layout.even_high, "nibbles swapped"),
            (self.layout.twos_complement, "two's complement"),
            (self.offset_missing, "offset missing"),
            (tail > 0, f"dropped tail: last {tail} column{'s' if tail > 1 else ''}"),
        )
        return tuple(words for is_so, words in named if is_so)

    @property
    def name(self) -> str:
        """The faults joined, or "qcs4w" for the right reading."""
        return " and ".join(self.faults) or "qcs4w"

    def codes(self, packed: NDArray[np.uint8], in_features: int) -> NDArray[np.int8]:
        """Read packed bytes this way: int8, shape (N, in_features), each in [-8, 15]."""
        codes = unpack_codes(packed, in_features, self.layout)
        if self.offset_missing:
            codes = codes + np.int8(OFFSET)
        if self.dropped_tail:
            codes[:, in_features - self.dropped_tail :] = 0
        return codes


RIGHT = Reading()


def readings(in_features: int | None = None) -> Iterator[Reading]:
    """Yield every reading, the right one first, then by number of faults.

    Args:
        in_features: K; with it the readings that drop a tail are included: the columns past the last
            whole 2, 4, … 256, which is what a loop over whole vectors or tiles forgets.
    """
    tails = {0}
    if in_features is not None:
        tails |= {in_features % step for step in (2, 4, 8, 16, 32, 64, 128, 256)} - {in_features}
    every = (
        Reading(layout, offset_missing, tail)
        for layout, offset_missing, tail in product(LAYOUTS.values(), (False, True), sorted(tails))
        if not (layout.twos_complement and offset_missing)
    )
    yield from sorted(every, key=lambda reading: len(reading.faults))
