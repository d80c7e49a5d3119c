"""Where is it wrong? From a map of the wrong elements of y to words: a tile, a tail, every fourth column.

A wrong element may be right by chance, so that a region needs not be full of failures; but nothing outside of it is
wrong, and nearly all of its rows and columns have a failure.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Booleans = NDArray[np.bool_]

_FULL = 0.75  # of a region's elements
_FULLER = 0.05  # by so much a region has to be fuller, to be named before a simpler one
_NEARLY = 0.8  # of a region's rows, or columns
_LISTED = 4
_REPEATS = 3  # as often a period has to be seen
_LONGEST_PERIOD = 1024
_LARGEST = 1 << 20  # elements among which a period is looked for
_GLANCE = 4096  # failures that show at once that there is no period


def where_wrong(wrong: Booleans) -> str | None:
    """Name the pattern of the wrong elements.

    Args:
        wrong: bool, shape (M, N).

    Returns:
        "columns 64.. of every row", say; for what has no pattern how it is scattered; None where nothing is wrong.
    """
    count = int(wrong.sum())
    if not count:
        return None
    rows, columns = np.asarray(wrong.any(axis=1)), np.asarray(wrong.any(axis=0))
    if count == wrong.size:
        return "every element"
    if count == 1:
        return f"one element, y[{rows.argmax()}, {columns.argmax()}]"
    full, words = _product(count, rows, columns)
    fuller, other_words = _in_memory(wrong) if full < 1 - _FULLER else (0.0, "")
    if fuller > full + _FULLER:
        full, words = fuller, other_words
    return (
        words if full >= _FULL else f"scattered: {count:,} elements in {rows.sum():,} rows, {columns.sum():,} columns"
    )


def _product(count: int, rows: Booleans, columns: Booleans) -> tuple[float, str]:
    """Name failures that are the product of some rows and some columns, with how much of it they fill."""
    row_words, column_words = _members(rows, "row"), _members(columns, "column")
    if row_words is None or column_words is None:
        return 0.0, ""
    row_set, row_name = row_words
    column_set, column_name = column_words
    full = count / int(row_set.sum() * column_set.sum())
    if row_set.all() and column_set.all():
        return full, "nearly every element"
    if row_set.all():
        return full, f"{column_name} of every row"
    if column_set.all():
        return full, row_name
    if _is_run(row_set) and _is_run(column_set) and row_set.sum() > 1 and column_set.sum() > 1:
        return full, f"one tile: rows {_span(row_set)}, columns {_span(column_set)}"
    return full, f"{row_name}, {column_name}"


def _in_memory(wrong: Booleans) -> tuple[float, str]:
    """Name failures by the order in which y lies in memory, across its rows, with how much of that they fill."""
    flat = wrong.reshape(-1)
    best = (0.0, "")
    for members, words in (*_runs(flat, "element"), *_periods(flat, "element")):
        full = int(flat.sum()) / int(members.sum())
        if full > best[0]:
            is_tail = _is_run(members) and members[-1]
            best = (
                full,
                f"the last {members.sum():,} elements of y" if is_tail else f"{words} of y as it lies in memory",
            )
    return best


def _members(flags: Booleans, noun: str) -> tuple[Booleans, str] | None:
    """Return a set of rows, or columns, that nearly equals the given one, and its name."""
    for members, words in (*_runs(flags, noun), *_periods(flags, noun)):
        if flags.sum() >= _NEARLY * members.sum():
            return members, words
    listed = np.flatnonzero(flags)
    if len(listed) <= _LISTED:
        return flags, f"{noun}s {', '.join(str(i) for i in listed)}"
    return None


def _runs(flags: Booleans, noun: str) -> Iterator[tuple[Booleans, str]]:
    """Yield the smallest run that holds all of them."""
    first, end = int(flags.argmax()), len(flags) - int(flags[::-1].argmax())
    members = np.zeros_like(flags)
    members[first:end] = True
    yield members, f"{noun} {first}" if end - first == 1 else f"{noun}s {_span(members)}"


def _periods(flags: Booleans, noun: str) -> Iterator[tuple[Booleans, str]]:
    """Yield the sets that repeat with a period and hold all of them, the shortest period first."""
    index = np.arange(len(flags))
    chosen = np.flatnonzero(flags)
    longest = _LONGEST_PERIOD if len(flags) <= _LARGEST else 0
    for period in range(2, min(len(flags) // _REPEATS, longest) + 1):
        if len(np.unique(chosen[:_GLANCE] % period)) == period:
            continue
        in_period = np.zeros(period, np.bool_)
        in_period[chosen % period] = True
        count = int(in_period.sum())
        if count == period or len(chosen) < _FULL * count * (len(flags) // period):
            continue
        if count == 1:
            yield in_period[index % period], f"every {_ordinal(period)} {noun} from {in_period.argmax()}"
        elif _is_run(in_period):
            yield in_period[index % period], f"{noun}s {_span(in_period, closed=True)} of every {period}"


def _is_run(flags: Booleans) -> bool:
    """Whether the chosen ones follow each other."""
    chosen = np.flatnonzero(flags)
    return len(chosen) == int(chosen[-1]) - int(chosen[0]) + 1


def _span(flags: Booleans, *, closed: bool = False) -> str:
    """Return a run as "64..127", or as "64.." where it reaches the end."""
    chosen = np.flatnonzero(flags)
    if len(chosen) == 1:
        return str(chosen[0])
    return f"{chosen[0]}.." if flags[-1] and chosen[0] and not closed else f"{chosen[0]}..{chosen[-1]}"


def _ordinal(number: int) -> str:
    ends = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ends.get(number % 10, 'th')}"
