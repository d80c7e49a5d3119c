"""The parts of a job that several machines share, as CI matrices and job arrays count them: i of n."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Part:
    """The part of a job that one of several machines takes.

    Attributes:
        index: which, from 0.
        count: of how many.
    """

    index: int = 0
    count: int = 1

    def of(self, items: Sequence[_Item], sizes: Sequence[int]) -> tuple[_Item, ...]:
        """Return this part's items, in order, when they are dealt out by size: the largest first, to the least laden.

        Args:
            items: of the whole job.
            sizes: of each item, in any unit.
        """
        loads = [0] * self.count
        mine = []
        for position in sorted(range(len(items)), key=lambda position: (-sizes[position], position)):
            least = loads.index(min(loads))
            loads[least] += max(1, sizes[position])
            if least == self.index:
                mine.append(position)
        return tuple(items[position] for position in sorted(mine))

    def __str__(self) -> str:
        return f"{self.index + 1}/{self.count}"


WHOLE = Part()  # all of it
