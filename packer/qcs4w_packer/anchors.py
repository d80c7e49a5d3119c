"""Searching a file for many needles in one pass: words at every 1024th byte or so are looked up in one table.

A stretch of step + 7 bytes, wherever it lies in a file, holds a word of 8 bytes whose offset is a multiple of `step`.
So the words that begin at each of `step` consecutive bytes of a needle go into a table, and of the file only the words
at multiples of `step` are looked up: a fraction of the work of comparing everywhere, and for any number of needles.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .needles import LEAST_ROW, Needle

WORD = 8  # bytes
MAX_STEP = 1024  # bytes; windows are multiples of it, so that no word that is looked up crosses their edges

_LOOKED_AT = 64  # rows of a needle among which its anchors are chosen, where the first ones looked at are dull
_CHECKS = 2  # words of a row that are compared before it is read
_SLICE = 1 << 18  # candidates that are expanded at a time
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, its bits well mixed (2^64 / golden ratio)


Known = tuple[NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True)
class Anchor:
    """A row by which a needle is recognised.

    Attributes:
        needle: its index.
        row: of the needle.
        columns: int64, shape (step,), where in the row each word begins, one for every remainder of step.
        words: uint64, shape (step,), the words there.
        check_columns, check_words: int64 and uint64, shape (_CHECKS,), further words of the row.
    """

    needle: int
    row: int
    columns: NDArray[np.int64]
    words: NDArray[np.uint64]
    check_columns: NDArray[np.int64]
    check_words: NDArray[np.uint64]

    @property
    def step(self) -> int:
        """At which multiples words of a file are looked up."""
        return len(self.words)


def choose_anchors(needle: Needle, index: int, most: int) -> list[Anchor]:
    """Choose rows that tell a needle from other data, spread over it.

    Args:
        needle: what is searched for.
        index: the needle's number.
        most: how many anchors at most.

    Returns:
        None at all if the needle is too short, or so dull (one byte repeated) that words do not tell it apart.
    """
    if needle.usable_width < LEAST_ROW:
        return []
    step = min(MAX_STEP, 1 << (needle.usable_width - WORD + 1).bit_length() - 1)
    length = min(needle.usable_width, 2 * step + WORD - 1)
    most = min(most, needle.rows)
    seen: list[_Seen] = []
    for tries in (most, _LOOKED_AT):  # nearly always the first rows looked at will do
        seen = list(_look_at(needle, index, step, length, tries))
        if all(found.is_good for found in seen):
            return [found.anchor for found in seen]
    usable = {found.stretch: found for found in reversed(seen) if 2 * found.variety > step}
    ranked = sorted(usable.values(), key=lambda found: (found.has_twin, -found.variety, found.anchor.row))
    single = [found.anchor for found in ranked if not found.has_twin]
    # Where every row has a twin the first row is the safest: a file is searched from its beginning.
    return single[:most] or [found.anchor for found in ranked[:1]]


@dataclass(frozen=True)
class _Seen:
    """A row that was looked at: how many of its words vary, and whether it equals a neighbour there."""

    anchor: Anchor
    stretch: bytes
    variety: int
    has_twin: bool

    @property
    def is_good(self) -> bool:
        return self.variety == self.anchor.step and not self.has_twin


def _look_at(needle: Needle, index: int, step: int, length: int, tries: int) -> Iterator[_Seen]:
    """Make anchors of rows spread over a needle, and of stretches spread over its rows."""
    tries = min(tries, needle.rows if needle.rows > 1 else needle.usable_width - length + 1)
    rows = np.linspace(0, needle.rows - 1, tries).astype(int).tolist()
    starts = np.linspace(0, needle.usable_width - length, tries).astype(int).tolist()
    for row, start in zip(rows, starts, strict=True):
        first, stop = max(0, row - 1), min(needle.rows, row + 2)
        block = needle.read(slice(first, stop), slice(start, start + length))
        stretch = np.ascontiguousarray(block[row - first])
        changes = np.concatenate(([0], np.cumsum(stretch[1:] != stretch[:-1])))
        variety = changes[WORD - 1 :] - changes[: len(changes) - WORD + 1]  # of the word that begins at each byte
        padded = np.full(-(-len(variety) // step) * step, -1)
        padded[: len(variety)] = variety
        best = padded.reshape(-1, step).argmax(axis=0) * step + np.arange(step)
        words = unaligned_words(stretch)
        checks = np.argsort(variety, kind="stable")[:: -max(1, len(variety) // 4)][:_CHECKS]
        checks = np.resize(checks, _CHECKS)
        yield _Seen(
            Anchor(index, row, best + start, words[best], checks + start, words[checks]),
            stretch.tobytes(),
            variety=step - int(np.count_nonzero(variety[best] == 0)),
            has_twin=bool((block == stretch).all(axis=1).sum() > 1),
        )


def unaligned_words(data: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return a view of the words that begin at each byte: uint64, shape (n − 7,)."""
    words: NDArray[np.uint64] = np.ndarray((len(data) - WORD + 1,), "<u8", data.data, strides=(1,))
    return words


class AnchorTable:
    """The words of anchors that share a step, for looking up.

    Attributes:
        anchors: as they were given.
    """

    def __init__(self, anchors: Sequence[Anchor]):
        self.anchors = anchors
        self._step = anchors[0].step
        words = np.concatenate([anchor.words for anchor in anchors])
        order = np.argsort(words, kind="stable")
        in_order = words[order]
        starts = np.flatnonzero(np.concatenate(([True], in_order[1:] != in_order[:-1])))
        self._keys, self._starts = in_order[starts], np.append(starts, len(words))
        self._anchor = np.repeat(np.arange(len(anchors), dtype=np.int32), self._step)[order]
        self._column = np.concatenate([anchor.columns for anchor in anchors])[order]
        self._check_columns = np.stack([anchor.check_columns for anchor in anchors])
        self._check_words = np.stack([anchor.check_words for anchor in anchors])
        # A table of bits, by the top bits of a product, lets nearly all words of other data pass at once.
        bits = min(max(16, len(self._keys).bit_length() + 5), 24)
        self._shift = np.uint64(64 - bits)
        self._may_be = np.zeros(1 << bits, np.bool_)
        self._may_be[self._hash(self._keys)] = True

    def glance(self, window: NDArray[np.uint8]) -> Known:
        """Look up the words of a window.

        Args:
            window: uint8, part of a file that begins at a multiple of MAX_STEP.

        Returns:
            int64 twice, equally long: which multiples of step hold a word of the table, and that word's index.
        """
        words: NDArray[np.uint64] = window[: len(window) // WORD * WORD].view("<u8")[:: self._step // WORD]
        at = np.flatnonzero(self._may_be[self._hash(words)])
        key = np.searchsorted(self._keys, words[at])
        key[key == len(self._keys)] = 0
        known = self._keys[key] == words[at]
        return at[known], key[known]

    def candidates(
        self, window: NDArray[np.uint8], found: Known
    ) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int64]]]:
        """Yield where rows of anchors may lie, given what `glance` found in the same window.

        Yields:
            (index of the anchor, where its row would begin, counted from the window's first byte), equally long.
            A row may begin before the window and end behind it.
        """
        at, key = found
        counts = self._starts[key + 1] - self._starts[key]
        ends = np.cumsum(counts)
        done = 0
        while done < len(at):
            limit = (int(ends[done - 1]) if done else 0) + _SLICE
            stop = max(done + 1, int(np.searchsorted(ends, limit)))
            part = slice(done, stop)
            yield self._survivors(window, at[part], self._starts[key[part]], counts[part])
            done = stop

    def _survivors(
        self, window: NDArray[np.uint8], at: NDArray[np.int64], starts: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Expand words that several anchors have, and keep the rows whose further words fit too."""
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        entry = np.repeat(starts, counts) + within
        anchor = self._anchor[entry]
        place = np.repeat(at, counts) * self._step - self._column[entry]
        words = unaligned_words(window)
        for check in range(_CHECKS):
            where = place + self._check_columns[anchor, check]
            inside = (where >= 0) & (where < len(words))
            fits = words[np.where(inside, where, 0)] == self._check_words[anchor, check]
            keep = fits | ~inside  # what lies outside the window is compared when the row is read
            anchor, place = anchor[keep], place[keep]
        return anchor, place

    def _hash(self, words: NDArray[np.uint64]) -> NDArray[np.int64]:
        hashed: NDArray[np.uint64] = words * _MULTIPLIER
        hashed >>= self._shift
        return hashed.view(np.int64)
