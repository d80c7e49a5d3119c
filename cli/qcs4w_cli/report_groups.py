"""Names that differ in numbers only, told as one: checkpoints have hundreds of each kind."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from .report import Table, plural

T = TypeVar("T")

#: More rows than these are told in groups, unless all are asked for.
MOST_ROWS = 40

_NUMBER = re.compile(r"(?<![^./'])\d+(?![^./'])")  # a whole part of a name


def pattern(name: str) -> str:
    """Return a name with its numbers replaced: layers.*.fc.weight. As a glob it matches all of its kind."""
    return _NUMBER.sub("*", name)


def numbers(name: str) -> str:
    """Return the numbers of a name, which its pattern lacks: 3.17."""
    return ".".join(_NUMBER.findall(name))


def grouped(items: Iterable[T], key: Callable[[T], tuple[str, ...]]) -> dict[tuple[str, ...], list[T]]:
    """Return items by key, in the order in which the keys come up."""
    groups: dict[tuple[str, ...], list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def told(texts: Sequence[str], *, everything: bool, most: int = 3) -> list[str]:
    """Return sentences about tensors, those that differ in numbers only as one, and not too many."""
    if everything or len(texts) <= most:
        return list(texts)
    groups = grouped(texts, lambda text: (pattern(text),))
    lines = [group[0] if len(group) == 1 else f"{what} ({len(group):,} times)" for (what,), group in groups.items()]
    return lines if len(lines) <= most else [*lines[:most], f"{len(lines) - most:,} more kinds (-v lists all)"]


def shortened(table: Table, most: int = MOST_ROWS) -> Table:
    """Return a table without its last rows, where there are too many, and say how many there are."""
    if len(table.rows) <= most:
        return table
    last = (f"… {plural(len(table.rows) - most, 'more row')} (-v lists all)", *[""] * (len(table.columns) - 1))
    return Table(table.columns, [*table.rows[:most], last], table.styles)
