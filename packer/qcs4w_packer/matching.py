"""From one row that may lie somewhere in a file to a whole needle: the distance of its rows, and how many are there."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .haystack import Haystack
from .needles import Needle

_MOST_HITS = 32  # kept of one needle
_MOST_TRIES = 10_000  # rows that are compared for one needle before it is given up
_MOST_STRIDES = 4  # distances that are tried for one row
_WIDEST_GAP = 4096  # bytes between rows, or a row's own width where that is more
_PIECE = 1 << 20  # bytes that are compared at a time


@dataclass(frozen=True)
class Match:
    """Where the rows of a needle lie in a file.

    Attributes:
        offset: of row 0; where that row is not there, where it would be.
        stride: bytes from one row to the next.
        width: bytes of a row.
        rows: how many the needle has.
        rows_equal: how many of them lie there.
        first_equal, last_equal: the first and the last of those.
        pads: the values of the nibbles beside the last column, () where there are none.
    """

    offset: int
    stride: int
    width: int
    rows: int
    rows_equal: int
    first_equal: int
    last_equal: int
    pads: tuple[int, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether every row is there."""
        return self.rows_equal == self.rows

    @property
    def start(self) -> int:
        """Offset of the first row that is there."""
        return self.offset + self.first_equal * self.stride

    @property
    def missing_between(self) -> int:
        """How many rows between the first and the last equal one are not there."""
        return self.last_equal - self.first_equal + 1 - self.rows_equal

    @property
    def end(self) -> int:
        """Offset behind the last row."""
        return self.offset + (self.rows - 1) * self.stride + self.width


class Budget:
    """How many bytes a whole search may still compare: a file made to be slow is given up at some point."""

    def __init__(self, nbytes: int):
        self.nbytes = nbytes


class Matcher:
    """Collects the matches of one needle.

    Attributes:
        needle: what is searched for.
        whole: matches of all rows.
        parts: matches of some rows.
        has_more: more matches were found than are kept.
        is_cut_short: given up before the end of the file.
    """

    def __init__(self, file: Haystack, needle: Needle, budget: Budget):
        self.needle = needle
        self.whole: list[Match] = []
        self.parts: list[Match] = []
        self.has_more = self.is_cut_short = False
        self._file = file
        self._budget = budget
        self._tries = 0
        self._tried: set[tuple[int, int]] = set()

    @property
    def is_done(self) -> bool:
        """Whether further places are of no interest."""
        return self.has_more or self.is_cut_short

    def try_row(self, row: int, place: int) -> None:
        """Compare the file with the needle, given that its row `row` may begin at byte `place`."""
        needle = self.needle
        if self.is_done or place < 0 or place + needle.width > self._file.nbytes or self._is_known(row, place):
            return
        self._tries += 1
        if self._tries > _MOST_TRIES or self._budget.nbytes < 0:
            self.is_cut_short = True
            return
        if not self._row_equals(row, place):
            return
        best: Match | None = None
        for stride in self._strides(row, place):
            at = (place - row * stride, stride)
            if at in self._tried:
                continue
            self._tried.add(at)
            match = self._compare(*at)
            if best is None or match.rows_equal > best.rows_equal:
                best = match
            if match.is_whole:
                break
        if best is not None:
            self._keep(best)

    def _is_known(self, row: int, place: int) -> bool:
        """Tell whether a row lies where a known match has one."""
        if (place - row * self.needle.width, self.needle.width) in self._tried:
            return True
        return any(m.offset <= place < m.end and (place - m.offset) % m.stride == 0 for m in self.whole) or any(
            m.offset + row * m.stride == place for m in self.parts
        )

    def _keep(self, match: Match) -> None:
        kept = self.whole if match.is_whole else self.parts
        if len(kept) < _MOST_HITS:
            kept.append(match)
        elif match.is_whole:
            self.has_more = True
        else:
            kept[min(range(len(kept)), key=lambda i: kept[i].rows_equal)] = match

    def _row_equals(self, row: int, place: int) -> bool:
        width = self.needle.width
        for start in range(0, width, _PIECE):
            stop = min(start + _PIECE, width)
            there = self._file.rows(place + start, 0, 1, stop - start)
            self._budget.nbytes -= stop - start
            differ = there ^ self.needle.read(slice(row, row + 1), slice(start, stop))
            if stop == width:
                differ[:, -1] &= self.needle.last_mask
            if differ.any():
                return False
        return True

    def _strides(self, row: int, place: int) -> Iterator[int]:
        """Yield the distances at which the next row, or the one before, is found; a row alone has its own width."""
        needle = self.needle
        width, usable = needle.width, needle.usable_width
        reach = width + max(width, _WIDEST_GAP)
        found = 0
        for neighbour in (row + 1, row - 1):
            if not 0 <= neighbour < needle.rows or found:
                continue
            pair = needle.read(slice(min(row, neighbour), max(row, neighbour) + 1), slice(0, usable))
            if np.array_equal(pair[0], pair[1]):
                break  # rows that are alike say nothing of their distance
            wanted = pair[int(neighbour > row)].tobytes()
            if neighbour > row:
                start, data = self._file.stretch(place + width, place + reach + usable)
                at = data.find(wanted)
                while at >= 0 and found < _MOST_STRIDES:
                    found += 1
                    yield start + at - place
                    at = data.find(wanted, at + 1)
            else:
                start, data = self._file.stretch(place - reach, place - width + usable)
                at = data.rfind(wanted)
                while at >= 0 and found < _MOST_STRIDES:
                    found += 1
                    yield place - start - at
                    at = data.rfind(wanted, 0, at + usable - 1)
        if not found:
            yield width

    def _compare(self, offset: int, stride: int) -> Match:
        """Compare all rows that would lie within the file."""
        needle, nbytes = self.needle, self._file.nbytes
        equal = np.zeros(needle.rows, np.bool_)
        first = max(0, -(offset // stride))
        last = min(needle.rows, (nbytes - offset - needle.width) // stride + 1)
        equal[first:last] = True
        pads: set[int] = set()
        pad_mask = 0xFF ^ needle.last_mask
        for rows, columns in needle.blocks(stride):
            rows = slice(max(rows.start, first), min(rows.stop, last))
            count, width = rows.stop - rows.start, columns.stop - columns.start
            if count < 1:
                continue
            there = self._file.rows(offset + rows.start * stride + columns.start, stride, count, width)
            self._budget.nbytes -= count * width
            differ = there ^ needle.read(rows, columns)
            if columns.stop == needle.width and pad_mask:
                differ[:, -1] &= needle.last_mask
                pads.update(np.flatnonzero(np.bincount(there[:, -1] & pad_mask)).tolist())
            equal[rows] &= ~differ.any(axis=1)
        found = np.flatnonzero(equal)
        shift = 4 if pad_mask == 0xF0 else 0
        return Match(
            offset=offset,
            stride=stride,
            width=needle.width,
            rows=needle.rows,
            rows_equal=len(found),
            first_equal=int(found[0]),
            last_equal=int(found[-1]),
            pads=tuple(sorted(pad >> shift for pad in pads)),
        )
