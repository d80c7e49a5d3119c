"""Rows of arrays with strides, read by positioned reads; numpy's own views are the witness."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from qcs4w_packer.strided import LastWhole, Strided, strided_fetch


@dataclass
class Memory:
    """A file in memory that counts what is read."""

    data: bytes
    reads: list[int] = field(default_factory=list)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read as a file does."""
        assert 0 <= offset <= offset + nbytes <= len(self.data)
        self.reads.append(nbytes)
        return self.data[offset : offset + nbytes]


def test_random_views_are_read_as_numpy_sees_them(rng: np.random.Generator) -> None:
    """500 views of rank 0 to 4, any strides (0 among them) and row ranges: equal bytes, never a read out of place."""
    flat = rng.integers(0, 1 << 32, 20_000, dtype=np.uint64).astype("<u4")
    for _ in range(500):
        shape = tuple(int(n) for n in rng.integers(0, 9, rng.integers(0, 5)))
        strides = tuple(int(n) for n in rng.integers(0, 300, len(shape)))
        first = int(rng.integers(0, 500))
        array = Strided(16 + 4 * first, 4, shape, strides)
        fetch = strided_fetch(Memory(bytes(16) + flat.tobytes()), array, LastWhole())
        view = as_strided(flat[first:], shape, [4 * stride for stride in strides])
        rows = view.reshape(np.prod(shape[:-1], dtype=int), shape[-1]) if shape else view.reshape(1, 1)
        start = int(rng.integers(0, len(rows) + 1))
        stop = int(rng.integers(start, len(rows) + 1))
        assert fetch(start, stop) == rows[start:stop].tobytes(), (shape, strides, start, stop)


# rows, columns, their strides, and the bytes that reading 64 rows at a time may take, in parts of the matrix's own
WALKS = {
    "contiguous": (2048, 1024, 1024, 1, 1.0),
    "transposed": (2048, 1024, 1, 2048, 1.0),
    "every hundredth row": (2048, 1024, 102_400, 1, 1.0),
    "every second column": (2048, 1024, 2048, 2, 2.0),
    "few columns of many": (2048, 8, 16, 1, 2.1),
    "one row repeated": (2048, 1024, 0, 1, 0.04),
}


@pytest.mark.parametrize(("rows", "columns", "row", "column", "share"), WALKS.values(), ids=WALKS)
def test_a_walk_reads_little_more_than_the_matrix(rows: int, columns: int, row: int, column: int, share: float) -> None:
    """Each way to lie has its way to be read: in blocks, row by row, or whole and once."""
    array = Strided(0, 2, (rows, columns), (row, column))
    file, whole = Memory(np.arange(array.span, dtype="<u2").tobytes()), LastWhole()
    fetch = strided_fetch(file, array, whole)
    view = as_strided(np.frombuffer(file.data, "<u2"), (rows, columns), (2 * row, 2 * column))
    for start in range(0, rows, 64):
        assert fetch(start, start + 64) == view[start : start + 64].tobytes()
    assert sum(file.reads) <= share * rows * columns * 2


def test_only_one_array_is_held_whole() -> None:
    """Another one takes its place."""
    file, whole = Memory(bytes(8 << 20)), LastWhole()
    one, two = (strided_fetch(file, Strided(at, 2, (1024, 2048), (1, 1024)), whole) for at in (0, 4 << 20))
    for fetch in (one, one, two, two, one):
        fetch(0, 8)
    assert file.reads == [4 << 20] * 3


def test_a_sparse_view_is_never_held_whole() -> None:
    """A view of one in a hundred elements across a large array is read a row at a time."""
    array = Strided(0, 2, (400, 100), (100, 40_000))
    file = Memory(np.arange(array.span, dtype="<u2").tobytes())
    fetch = strided_fetch(file, array, LastWhole())
    view = as_strided(np.frombuffer(file.data, "<u2"), (400, 100), (200, 80_000))
    assert fetch(3, 5) == view[3:5].tobytes()
    assert len(file.reads) <= 2
