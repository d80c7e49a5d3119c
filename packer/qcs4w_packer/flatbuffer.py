"""Flatbuffers by positioned reads: tables, vectors and texts of files that are not to be trusted.

Every offset is checked before it is followed, nothing is read but what is asked for, and the reads together are
bounded by the buffer's size, so that parts which point at each other end in an error and not in a loop.

A table begins with the signed distance back to its vtable: u16 size of the vtable, u16 size of the table, then for
each field u16 its place in the table, 0 where it is absent and has its default. Tables, vectors and texts are pointed
to by u32 distances forward. A vector is a u32 count and its items; a text is a vector of UTF-8.
Source: google/flatbuffers, docs/source/internals.md.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .errors import SourceError

_NUMBERS = {
    kind: struct.Struct("<" + code)
    for kind, code in {"u8": "B", "i8": "b", "u16": "H", "u32": "I", "i32": "i", "u64": "Q"}.items()
}
_MOST_FIELDS = 16  # of a table; the schemas that are read here have at most 10
_LONGEST_TEXT = 4096  # bytes
_LONGEST_LIST = 256  # numbers; lists that are longer are never of interest

# Sound files need about one read for 10 bytes; parts that several others point to are read again each time.
_BYTES_PER_READ = 2
_READS_OF_ANY = 1000


class Flatbuffer:
    """One flatbuffer inside a file. Positions count from its first byte.

    Attributes:
        nbytes: its size; no position reaches beyond it.
    """

    def __init__(self, read: Callable[[int, int], bytes], start: int, nbytes: int, fault: Callable[[str], SourceError]):
        """Make a flatbuffer readable.

        Args:
            read: (file offset, nbytes) -> exactly that many bytes.
            start: file offset of its first byte.
            nbytes: its size.
            fault: makes an error of what is wrong.
        """
        self._read = read
        self._start = start
        self.nbytes = nbytes
        self.fault = fault
        self._reads_left = _READS_OF_ANY + nbytes // _BYTES_PER_READ

    def root(self, identifier: bytes) -> "Table":
        """Return the table that the buffer is about.

        Raises:
            SourceError: the buffer's four letters are others.
        """
        found = self.bytes(4, 4)
        if found != identifier:
            raise self.fault(f"its identifier is {found!r}, expected {identifier!r}")
        return Table(self, self.number(0, "u32"))

    def check(self, position: int, nbytes: int) -> None:
        """Raise SourceError where a range leaves the buffer."""
        if position < 0 or position + nbytes > self.nbytes:
            raise self.fault(
                f"{nbytes:,} bytes are said to lie at byte {position:,} of a flatbuffer of {self.nbytes:,} bytes"
            )

    def bytes(self, position: int, nbytes: int) -> bytes:
        """Read a range."""
        self.check(position, nbytes)
        self._reads_left -= 1
        if self._reads_left < 0:
            raise self.fault("the parts of a flatbuffer point at each other more often than its size allows")
        return self._read(self._start + position, nbytes)

    def number(self, position: int, kind: str) -> int:
        """Read a number: u8, i8, u16, u32, i32 or u64."""
        layout = _NUMBERS[kind]
        value: int = layout.unpack(self.bytes(position, layout.size))[0]
        return value


class Table:
    """A table: numbered fields, any of which may be absent."""

    def __init__(self, buffer: Flatbuffer, position: int):
        self._buffer = buffer
        self._position = position
        vtable = position - buffer.number(position, "i32")
        head = buffer.bytes(vtable, max(4, min(4 + 2 * _MOST_FIELDS, buffer.nbytes - vtable)))
        vtable_nbytes, self._nbytes = struct.unpack_from("<HH", head)
        if vtable_nbytes < 4 or self._nbytes < 4:
            raise buffer.fault(f"a table of {self._nbytes} bytes has a vtable of {vtable_nbytes}, expected 4 or more")
        buffer.check(vtable, vtable_nbytes)
        buffer.check(position, self._nbytes)
        fields = head[4:vtable_nbytes]
        self._places: tuple[int, ...] = struct.unpack(f"<{len(fields) // 2}H", fields[: len(fields) & ~1])

    def number(self, field: int, kind: str, default: int = 0) -> int:
        """Return a number, or its default where the field is absent."""
        place = self._place(field, _NUMBERS[kind].size)
        return default if place is None else self._buffer.number(place, kind)

    def table(self, field: int) -> "Table | None":
        """Return a table, or None where it is absent."""
        target = self._target(field)
        return None if target is None else Table(self._buffer, target)

    def text(self, field: int) -> str | None:
        """Return a text, or None where it is absent."""
        span = self.span(field, 1)
        if span is None:
            return None
        if span[1] > _LONGEST_TEXT:
            raise self._buffer.fault(f"a text of {span[1]:,} bytes, {_LONGEST_TEXT:,} are the most")
        try:
            return self._buffer.bytes(*span).decode("utf-8")
        except UnicodeDecodeError:
            raise self._buffer.fault("a text is not UTF-8") from None

    def numbers(self, field: int, kind: str) -> tuple[int, ...]:
        """Return a list of numbers, empty where it is absent."""
        layout = _NUMBERS[kind]
        span = self.span(field, layout.size)
        if span is None:
            return ()
        if span[1] > _LONGEST_LIST:
            raise self._buffer.fault(f"a list of {span[1]:,} numbers, {_LONGEST_LIST} are the most")
        return tuple(value for (value,) in layout.iter_unpack(self._buffer.bytes(span[0], span[1] * layout.size)))

    def tables(self, field: int, name: str) -> "Tables":
        """Return a list of tables, empty where it is absent; `name` is for messages."""
        position, count = self.span(field, 4) or (0, 0)
        return Tables(self._buffer, name, position, count)

    def span(self, field: int, item_nbytes: int) -> tuple[int, int] | None:
        """Return the position and the number of a vector's items, or None where it is absent."""
        target = self._target(field)
        if target is None:
            return None
        count = self._buffer.number(target, "u32")
        self._buffer.check(target + 4, count * item_nbytes)
        return target + 4, count

    def _target(self, field: int) -> int | None:
        place = self._place(field, 4)
        return None if place is None else place + self._buffer.number(place, "u32")

    def _place(self, field: int, nbytes: int) -> int | None:
        offset = self._places[field] if field < len(self._places) else 0
        if offset == 0:
            return None
        if offset < 4 or offset + nbytes > self._nbytes:
            raise self._buffer.fault(f"field {field} of a table of {self._nbytes} bytes is said to lie at {offset}")
        return self._position + offset


@dataclass(frozen=True)
class Tables:
    """A vector of tables, each read when it is asked for."""

    buffer: Flatbuffer
    name: str
    position: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Table:
        if not 0 <= index < self.count:
            raise self.buffer.fault(f"{self.name} {index} is referred to, there are {self.count}")
        place = self.position + 4 * index
        return Table(self.buffer, place + self.buffer.number(place, "u32"))

    def __iter__(self) -> Iterator[Table]:
        return (self[index] for index in range(self.count))
