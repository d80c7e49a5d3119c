"""The journal of one shard: which tensors are finished, so that a broken run can go on where it was.

One JSON document a line: first the fingerprint of what is being made, then each finished tensor with the digests of its
bytes. A line is written only after the data it speaks of have reached the disk; what it says is believed only after the
bytes have been read again. Lines are gathered (by bytes and by seconds), since every flush costs the time of a disk.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .files import write_at

_FLUSH_NBYTES = 256 << 20  # of data, at most, that a power cut can cost
_FLUSH_S = 5.0  # or of work

Line = Mapping[str, Any]


def read_journal(path: Path, fingerprint: str) -> list[dict[str, Any]]:
    """Return the lines of finished tensors, none if there is no journal or it belongs to other work.

    A last line that a power cut has torn ends the list.
    """
    try:
        raw = path.read_bytes()
    except OSError:
        return []
    lines: list[dict[str, Any]] = []
    for text in raw.split(b"\n")[:-1]:  # what follows the last newline is torn
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            break
        if not isinstance(line, dict):
            break
        lines.append(line)
    if not lines or lines[0].get("fingerprint") != fingerprint:
        return []
    return lines[1:]


class Journal:
    """Keeps a journal beside a file that is being written.

    The flushing runs in a thread of its own, so that computing goes on meanwhile.

    Args:
        path: the journal; made when the first lines are written.
        fingerprint: of the work.
        data: descriptor of the file that the lines speak of.
        kept: lines of earlier runs that have proved true; they are written again.

    Attributes:
        count: tensors that the journal on the disk speaks of.
    """

    def __init__(self, path: Path, fingerprint: str, data: int, kept: list[dict[str, Any]]):
        self._path, self._data = path, data
        self._fingerprint = fingerprint
        self._kept = kept
        self._waiting: list[Line] = []
        self._nbytes = 0
        self._since = time.monotonic()
        self._fd = -1
        self._end = 0
        self._thread = ThreadPoolExecutor(1, "qcs4w-journal")
        self._flushing: Future[None] | None = None
        self.count = len(kept)

    def add(self, line: Line, nbytes: int) -> None:
        """Say that a tensor is finished: all its bytes have been given to the system."""
        self._waiting.append(line)
        self._nbytes += nbytes
        if self._nbytes >= _FLUSH_NBYTES or time.monotonic() - self._since >= _FLUSH_S:
            self._settle()
            self._flushing = self._thread.submit(self._write, self._taken())

    def flush(self) -> None:
        """Write what waits, and wait for it."""
        self._settle()
        if self._waiting:
            self._write(self._taken())

    def forget(self) -> None:
        """Drop what waits: the whole is finished."""
        self._settle()
        self._taken()

    def close(self) -> None:
        """Write what waits and close the file."""
        try:
            self.flush()
        finally:
            with contextlib.suppress(OSError):
                self._settle()
            self._thread.shutdown()
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _settle(self) -> None:
        """Wait for the flush under way, and meet its error."""
        flushing, self._flushing = self._flushing, None
        if flushing is not None:
            flushing.result()

    def _taken(self) -> list[Line]:
        lines, self._waiting = self._waiting, []
        self._nbytes, self._since = 0, time.monotonic()
        return lines

    def _write(self, lines: list[Line]) -> None:
        flush_data(self._data)
        if self._fd < 0:
            # Beside the old journal and then in its place: a kill in between loses neither.
            fresh = self._path.with_name(self._path.name + ".new")
            self._fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            self._append([{"fingerprint": self._fingerprint}, *self._kept, *lines])
            fresh.replace(self._path)
        else:
            self._append(lines)
        self.count += len(lines)

    def _append(self, lines: list[Line]) -> None:
        data = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
        write_at(self._fd, data, self._end)
        self._end += len(data)
        flush_data(self._fd)


#: Write a file's content through to the disk, without its times where the system tells them apart.
flush_data: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)
