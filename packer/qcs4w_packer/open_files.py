"""Many files for positioned reads with few descriptors: a checkpoint may have hundreds of shards."""

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from .closing import Closing
from .errors import SourceError
from .safetensors_file import Stamp, open_for_reading, read_at, read_at_into, stamp_of

_MOST_OPEN = 16


@dataclass
class _Open:
    fd: int
    readers: int = 0


class OpenFiles(Closing):
    """Files that are opened when they are read and closed again when others are. Threads may share it.

    Each must stay what it was when it was added: the places that were read from its header would be wrong ones in a
    file that has been replaced or written to since.
    """

    def __init__(self) -> None:
        self._open: dict[Path, _Open] = {}  # the longest unused first
        self._stamps: dict[Path, Stamp] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def close(self) -> None:
        """Close every file; reading afterwards is an error."""
        with self._lock:
            self._is_closed = True
            for path in [path for path, held in self._open.items() if not held.readers]:
                os.close(self._open.pop(path).fd)

    def add(self, path: Path, stamp: Stamp) -> None:
        """Let a file be read, as long as its stamp is this one."""
        self._stamps[path] = stamp

    def add_now(self, path: Path) -> int:
        """Let a file be read, as long as it stays what it is now; return its bytes.

        Raises:
            SourceError: it cannot be opened.
        """
        fd = open_for_reading(path)
        try:
            stamp = stamp_of(fd)
            self._stamps.setdefault(path, stamp)
            return os.fstat(fd).st_size
        finally:
            os.close(fd)

    def read(self, path: Path, offset: int, nbytes: int) -> bytes:
        """Read exactly `nbytes` bytes of a file at an offset.

        Raises:
            SourceError: it cannot be opened or read there, ends before, or is not what it was.
        """
        held = self._take(path)
        try:
            return read_at(held.fd, path, offset, nbytes)
        finally:
            self._give_back(path, held)

    def read_into(self, path: Path, offset: int, room: memoryview) -> None:
        """Read at an offset of a file as many bytes as there is room for; errors are those of `read`."""
        held = self._take(path)
        try:
            read_at_into(held.fd, path, offset, room)
        finally:
            self._give_back(path, held)

    def _take(self, path: Path) -> _Open:
        with self._lock:
            if self._is_closed:
                raise SourceError(f"{path}: has been closed")
            held = self._open.pop(path, None) or self._open_again(path)
            held.readers += 1
            self._open[path] = held
            unused = [other for other, entry in self._open.items() if not entry.readers]
            for other in unused[: max(0, len(self._open) - _MOST_OPEN)]:
                os.close(self._open.pop(other).fd)
            return held

    def _give_back(self, path: Path, held: _Open) -> None:
        with self._lock:
            held.readers -= 1
            if self._is_closed and not held.readers:
                del self._open[path]
                os.close(held.fd)

    def _open_again(self, path: Path) -> _Open:
        fd = open_for_reading(path)
        if stamp_of(fd) != self._stamps[path]:
            os.close(fd)
            raise SourceError(f"{path}: has been changed since its header was read", hint="start again")
        return _Open(fd)


@dataclass(frozen=True)
class PooledFile:
    """One of the files, for those who read a single one.

    Attributes:
        files: which opens and closes it.
        path: where it lies.
    """

    files: OpenFiles
    path: Path

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read exactly `nbytes` bytes at an offset."""
        return self.files.read(self.path, offset, nbytes)

    def read_into(self, offset: int, room: memoryview) -> None:
        """Read at an offset as many bytes as there is room for."""
        self.files.read_into(self.path, offset, room)
