"""A file of any size, read in windows and stretches: a memory map would count as resident memory."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .closing import Closing
from .errors import SourceError
from .safetensors_file import open_for_reading, read_at

T = TypeVar("T")

_MOST_WORKERS = 4  # threads that read and glance; copying from the system's cache is what takes the time

#: Bytes before each window that still hold the end of the one before.
CARRIED = 512


class Haystack(Closing):
    """Any regular file, opened for reading. Use it as a context manager.

    Attributes:
        path: where it lies.
        nbytes: its size when it was opened.

    Raises:
        SourceError: it is not there, or no regular file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._fd = open_for_reading(self.path)
        self.nbytes = os.fstat(self._fd).st_size

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def windows(
        self, window_nbytes: int, glance: Callable[[NDArray[np.uint8]], T]
    ) -> Iterator[tuple[int, bytearray, int, T]]:
        """Read the whole file, several windows at a time.

        Args:
            window_nbytes: size of a window.
            glance: called with the bytes of each window, in another thread; slow work in numpy belongs there.

        Yields:
            (offset, buffer, bytes read, what `glance` returned) in the file's order. The window lies in the buffer from
            CARRIED on, and before it the bytes that precede it in the file; it is overwritten later.
        """
        workers = min(_MOST_WORKERS, os.cpu_count() or 1)
        buffers = [bytearray(CARRIED + window_nbytes) for _ in range(workers + 1)]
        starts = range(0, self.nbytes, window_nbytes)

        def work(index: int) -> tuple[int, T]:
            buffer, start = buffers[index % len(buffers)], starts[index]
            nbytes = min(window_nbytes, self.nbytes - start)
            carried = min(start, CARRIED)
            self._fill(memoryview(buffer)[CARRIED - carried : CARRIED + nbytes], start - carried)
            return nbytes, glance(np.frombuffer(buffer, np.uint8, nbytes, CARRIED))

        with ThreadPoolExecutor(workers) as pool:
            ahead = deque(pool.submit(work, index) for index in range(min(workers, len(starts))))
            for index, start in enumerate(starts):
                nbytes, glanced = ahead.popleft().result()
                yield start, buffers[index % len(buffers)], nbytes, glanced
                if index + workers < len(starts):
                    ahead.append(pool.submit(work, index + workers))

    def _fill(self, piece: memoryview, offset: int) -> None:
        """Read as many bytes as `piece` has."""
        while piece:
            try:
                count = os.preadv(self._fd, [piece], offset)
            except OSError as error:
                raise SourceError(f"{self.path}: reading at byte {offset:,} failed: {error.strerror}") from None
            if not count:
                raise SourceError(f"{self.path}: ends at byte {offset:,}: it has become shorter meanwhile")
            piece, offset = piece[count:], offset + count

    def stretch(self, start: int, stop: int) -> tuple[int, bytes]:
        """Return (offset, bytes) of what the file has between two offsets."""
        start = min(max(start, 0), self.nbytes)
        return start, read_at(self._fd, self.path, start, max(0, min(stop, self.nbytes) - start))

    def rows(self, start: int, stride: int, rows: int, width: int) -> NDArray[np.uint8]:
        """Return `width` bytes at each of `rows` offsets, `stride` bytes apart; all lie within the file."""
        nbytes = (rows - 1) * stride + width
        data = np.frombuffer(read_at(self._fd, self.path, start, nbytes), np.uint8)
        return np.lib.stride_tricks.as_strided(data, (rows, width), (stride, 1), writeable=False)
