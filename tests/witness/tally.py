"""Counts what was compared with the witness, so that a run can say how much its silence is worth."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from wrong_rules import Answer

SCALE_FLOOR_BITS = 0x34000000  # 2⁻²³


@dataclass
class Tally:
    """What was compared bit for bit, what differed, and how many of the hard cases were among it.

    Attributes:
        what: what was held against what, in the words of the report.
        compared: numbers of rows, codes, scales and packed bytes.
        wrong: how many of each differed.
        hard: numbers of hard cases, by what is hard about them.
        first: the first difference, in words; empty if there was none.
    """

    what: str
    compared: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("rows", "codes", "scales", "bytes"), 0))
    wrong: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("rows", "codes", "scales", "bytes"), 0))
    hard: dict[str, int] = field(default_factory=dict)
    first: str = ""

    @property
    def mismatches(self) -> int:
        """Codes, scales and bytes that differed."""
        return self.wrong["codes"] + self.wrong["scales"] + self.wrong["bytes"]

    def compare(self, weight: NDArray[np.float32], theirs: Answer, ours: Answer) -> str:
        """Hold one weight's codes, scales (by their bits) and packed bytes against each other.

        Returns:
            the first difference in words, or "".
        """
        first = ""
        pairs = {
            "codes": (theirs.codes, ours.codes),
            "scales": (theirs.scales.view(np.uint32)[:, None], ours.scales.view(np.uint32)[:, None]),
            "bytes": (theirs.packed, ours.packed),
        }
        wrong_rows = np.zeros(len(weight), np.bool_)
        for name, (wanted, found) in pairs.items():
            assert wanted.shape == found.shape, f"{name}: {wanted.shape} of the witness, {found.shape} of ours"
            assert wanted.dtype == found.dtype, f"{name}: {wanted.dtype} of the witness, {found.dtype} of ours"
            differing = wanted != found
            self.compared[name] += wanted.size
            self.wrong[name] += int(differing.sum())
            wrong_rows |= differing.any(axis=1)
            if differing.any() and not first:
                row, column = (int(i) for i in np.argwhere(differing)[0])
                first = (
                    f"{name}: {wanted[row, column]} of the witness, {found[row, column]} of ours "
                    f"at [{row}, {column}] of {weight.shape}; the row is {weight[row].tolist()}"
                )
        self.compared["rows"] += len(weight)
        self.wrong["rows"] += int(wrong_rows.sum())
        self.first = self.first or first
        self._count_hard_cases(weight, theirs)
        return first

    def _count_hard_cases(self, weight: NDArray[np.float32], theirs: Answer) -> None:
        with np.errstate(over="ignore", under="ignore"):
            scaled = weight * (np.float32(1) / theirs.scales)[:, None]
        counts = {
            "rows at the scale's floor": np.count_nonzero(theirs.scales.view(np.uint32) == SCALE_FLOOR_BITS),
            "ties": np.count_nonzero(np.abs(scaled - np.trunc(scaled)) == 0.5),
            "values clamped to 7": np.count_nonzero(np.rint(scaled) > 7),
            "codes -8": np.count_nonzero(theirs.codes == -8),
            "weights of odd K": weight.shape[1] % 2,
            "weights of a byte count that is no multiple of 4": theirs.packed.size % 4 > 0,
        }
        for name, count in counts.items():
            self.hard[name] = self.hard.get(name, 0) + int(count)

    def lines(self) -> list[str]:
        """Write the report."""
        compared = ", ".join(f"{count:,} {name}" for name, count in self.compared.items())
        wrong = ", ".join(f"{count:,} {name}" for name, count in self.wrong.items())
        hard = ", ".join(f"{count:,} {name}" for name, count in self.hard.items())
        return [
            f"{self.what}:",
            f"  compared     {compared}",
            f"  among them   {hard}",
            f"  mismatches   {wrong}" if self.mismatches else "  mismatches   0",
            *([f"  the first    {self.first}"] if self.first else []),
        ]
