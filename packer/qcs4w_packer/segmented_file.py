"""ExecuTorch's two kinds of files, .pte and .ptd: a flatbuffer, a header behind its identifier, and segments of data.

| at | .pte (may lack the header) | .ptd |
|---|---|---|
| 0 | u32 place of the root table | the same |
| 4 | `ET12` | `FT01` |
| 8 | `eh00`, u32 length of the header, 24 or more | `FH01`, u32 length, 40 or more |
| 16 | u64 end of the flatbuffer | u64 start, u64 size of the flatbuffer |
| then | u64 start of the segments, u64 their size (from length 32 on) | u64 start, u64 size |

Source: pytorch/executorch v1.5.1, exir/_serialize/_program.py and schema/program.fbs,
extension/flat_tensor/serialize/serialize.py and flat_tensor.fbs.
"""

import os
import struct
from pathlib import Path

from .closing import Closing
from .errors import SourceError
from .flatbuffer import Flatbuffer, Tables
from .safetensors_file import closer_of, open_for_reading, read_at

#: Of a .pte file, behind its first four bytes.
PROGRAM = b"ET12"
_DATA = b"FT01"


class SegmentedFile(Closing):
    """A .pte or .ptd file opened for positioned reads.

    Attributes:
        path: where it lies.
        nbytes: its size.
        flatbuffer: what it begins with.
        root: the flatbuffer's root table.
        named: number of the segment of each named piece of data, by key.

    Raises:
        SourceError: it cannot be read, or is not sound.
    """

    def __init__(self, path: Path, *, is_data: bool = False):
        self.path = path
        self._is_data = is_data
        self._fd = open_for_reading(path)
        self.close = closer_of(self._fd)  # type: ignore[method-assign]
        try:
            self.nbytes = os.fstat(self._fd).st_size
            end, self._base, self._segments_nbytes = self._read_header()
            self.flatbuffer = Flatbuffer(self.read, 0, end, self.fault)
            self.root = self.flatbuffer.root(_DATA if is_data else PROGRAM)
            self._segments = self.root.tables(1 if is_data else 4, "segment")
            self.named = self._read_named(self.root.tables(2 if is_data else 7, "named data"))
        except BaseException:
            self.close()
            raise

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read a range of the file."""
        return read_at(self._fd, self.path, offset, nbytes)

    def fault(self, message: str) -> SourceError:
        """Make an error of what is wrong in the file."""
        return SourceError(
            f"{self.path}: not a sound {'.ptd' if self._is_data else '.pte'} file: {message}",
            hint="copy or export the file again; it may be truncated",
        )

    def segment(self, index: int) -> tuple[int, int]:
        """Return the file offset and the size of a segment."""
        segment = self._segments[index]
        offset, nbytes = segment.number(0, "u64"), segment.number(1, "u64")
        if offset + nbytes > self._segments_nbytes:
            raise self.fault(
                f"segment {index} ends at byte {self._base + offset + nbytes:,}, "
                f"the last byte of segments is before {self._base + self._segments_nbytes:,}"
            )
        return self._base + offset, nbytes

    def _read_header(self) -> tuple[int, int, int]:
        """Return where the flatbuffer ends, where the segments begin, and their size."""
        head = self.read(0, min(self.nbytes, 64)).ljust(64, b"\0")
        magic, length = struct.unpack_from("<4sI", head, 8)
        if self._is_data:
            if magic != b"FH01" or length < 40:
                raise self.fault("it has no header FH01")
            start, nbytes, base, segments = struct.unpack_from("<4Q", head, 16)
            end = start + nbytes
        else:
            if magic != b"eh00":
                return self.nbytes, 0, 0  # without segments there is no header
            if length < 24:
                raise self.fault(f"its header says that it has {length} bytes, expected at least 24")
            end, base, segments = struct.unpack_from("<3Q", head, 16)
            if length < 32:
                segments = 0
        if segments == 0 and end <= base <= self.nbytes:  # older headers do not tell
            segments = self.nbytes - base
        if end > self.nbytes or base + segments > self.nbytes or (segments and base < end):
            raise self.fault(
                f"by its header the program ends at byte {end:,} and the segments at {base + segments:,} "
                f"({base:,} + {segments:,}), the file has {self.nbytes:,}"
            )
        return end, base, segments

    def _read_named(self, entries: Tables) -> dict[str, int]:
        named: dict[str, int] = {}
        for entry in entries:
            key = entry.text(0)
            if key is None or key in named:
                raise self.fault("named data without a key" if key is None else f"key {key[:80]!r} occurs twice")
            named[key] = entry.number(1, "u32")
        return named
