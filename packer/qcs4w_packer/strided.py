"""Arrays that lie in a file with strides, read row by row by positioned reads."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from .weights import Readable

_SLACK_NBYTES = 1 << 20  # read besides what is wanted, where that saves reads
_SLACK_IN_ROW = 4096  # elements
_LARGEST_EXCESS = 4  # times the tensor, read and held at once


@dataclass(frozen=True)
class Strided:
    """Where the elements of an array lie in a file.

    Attributes:
        start: the first element's offset in bytes.
        itemsize: bytes of an element.
        shape: any rank.
        strides: by dimension, in elements, none negative.
        flip: bits of an element that are stored inverted (a negated or conjugated view).
        swapped: bytes that are stored in the other order, as long as this, or 0.
    """

    start: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    flip: int = 0
    swapped: int = 0

    @property
    def span(self) -> int:
        """Elements from the first to the last, both counted; 0 for an empty array."""
        if not prod(self.shape):
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def is_plain(self) -> bool:
        """Its bytes stand in C order, as they are to be read."""
        packed = tuple(prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))
        steps = zip(self.shape, self.strides, packed, strict=True)
        return not self.flip and not self.swapped and all(size == 1 or a == b for size, a, b in steps)


class LastWhole:
    """Holds the last array that had to be read whole, so that several of them never do at once."""

    def __init__(self) -> None:
        self._last: tuple[Strided, NDArray[np.generic]] | None = None
        self._lock = threading.Lock()

    def get(self, file: Readable, array: Strided) -> NDArray[np.generic]:
        """Return all elements from the first to the last, in the file's order."""
        with self._lock:
            last = self._last
            if last is None or last[0] != array:
                self._last = last = None  # before another is read
                last = self._last = (array, _read(file, array, 0, array.span))
            return last[1]

    def clear(self) -> None:
        """Let go of it."""
        self._last = None


def strided_fetch(file: Readable, array: Strided, whole: LastWhole) -> Callable[[int, int], bytes]:
    """Return what reads rows of an array, as `SourceTensor.fetch` is to.

    Args:
        file: which holds it.
        array: where.
        whole: shared by the arrays of a source, for those whose rows lie across all of it (transposed ones).
    """
    columns, step = (array.shape[-1], array.strides[-1]) if array.shape else (1, 1)
    if array.is_plain:
        row_nbytes = columns * array.itemsize
        return lambda start, stop: file.read(array.start + start * row_nbytes, (stop - start) * row_nbytes)
    row_span = (columns - 1) * step + 1
    slack = _SLACK_NBYTES // array.itemsize

    def fetch(start: int, stop: int) -> bytes:
        wanted = max(0, stop - start) * columns
        if not wanted:
            return b""
        places = _row_places(array, start, stop)
        low, high = int(places.min()), int(places.max()) + row_span
        if high - low <= 2 * wanted + slack:
            rows = _rows(_read(file, array, low, high), places - low, columns, step)
        elif row_span <= 2 * columns + _SLACK_IN_ROW or array.span > _LARGEST_EXCESS * prod(array.shape) + slack:
            rows = np.stack([_read(file, array, int(p), int(p) + row_span)[::step][:columns] for p in places])
        else:
            rows = _rows(whole.get(file, array), places, columns, step)
        return _finish(rows, array)

    return fetch


def _row_places(array: Strided, start: int, stop: int) -> NDArray[np.int64]:
    """Return where rows begin, in elements from the array's first."""
    leading = array.shape[:-1]
    if not leading:
        return np.zeros(stop - start, np.int64)
    places = np.zeros(stop - start, np.int64)
    for index, stride in zip(np.unravel_index(np.arange(start, stop), leading), array.strides[:-1], strict=True):
        places += index * stride
    return places


def _read(file: Readable, array: Strided, low: int, high: int) -> NDArray[np.generic]:
    data = file.read(array.start + low * array.itemsize, (high - low) * array.itemsize)
    return np.frombuffer(data, f"<u{array.itemsize}")


def _rows(data: NDArray[np.generic], places: NDArray[np.int64], columns: int, step: int) -> NDArray[np.generic]:
    """Take the rows that begin at some places of flat data, shape (n, columns)."""
    item = data.itemsize
    windows = as_strided(
        data, (len(data) - (columns - 1) * step, columns), (item, step * item), writeable=False
    )  # all rows that could be
    taken: NDArray[np.generic] = windows[places]
    return taken


def _finish(rows: NDArray[np.generic], array: Strided) -> bytes:
    if array.swapped:
        parts = np.ascontiguousarray(rows).view(f"<u{array.swapped}")
        rows = parts.byteswap().view(rows.dtype)
    if array.flip:
        rows = np.bitwise_xor(rows, rows.dtype.type(array.flip))
    return rows.tobytes()
