"""A tensor's work cut into jobs that threads can do apart, in bounded memory."""

import threading
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from .ordered import DRAINED, Drained
from .rowpack import PackedRows, pack_read_rows, refuse_non_finite
from .scratch import Scratch
from .weights import SourceTensor

_JOB_ELEMENTS = 2 << 20  # of float weights: 8 MiB of float32, never held at once
_READ_ELEMENTS = 256 << 10
_CARRY_NBYTES = 8 << 20
_TILE_ROWS = 256  # turned at a time: what is read stays in cache, four times as fast as a whole column

_OWN = threading.local()

PackJob = Callable[[], PackedRows]
CarryJob = Callable[[], bytes]


def packing_jobs(tensor: SourceTensor, *, transposed: bool) -> Iterator[PackJob | Drained]:
    """Yield jobs that pack consecutive rows of a float matrix, from its first to its last."""
    if transposed:
        yield from _turned_jobs(tensor)
        return
    if tensor.is_held:
        yield DRAINED
    rows, in_features = tensor.shape
    step = max(1, _JOB_ELEMENTS // in_features)
    for start in range(0, rows, step):
        yield _row_job(tensor, start, min(start + step, rows))


def carrying_jobs(tensor: SourceTensor) -> Iterator[CarryJob | Drained]:
    """Yield jobs that read a tensor's bytes, from the first to the last."""
    if tensor.is_held:
        yield DRAINED
    rows = tensor.rows
    step = max(1, _CARRY_NBYTES * rows // max(1, tensor.nbytes))
    for start in range(0, rows if tensor.nbytes else 0, step):
        yield _read_job(tensor, start, min(start + step, rows))


def _row_job(tensor: SourceTensor, start: int, stop: int) -> PackJob:
    def job() -> PackedRows:
        scratch = _scratch()
        return pack_read_rows(
            lambda first, end: tensor.floats(first, end, scratch),
            (stop - start, tensor.shape[1]),
            name=tensor.name,
            first_row=start,
            scratch=scratch,
        )

    return job


def _scratch() -> Scratch:
    """Return the calling thread's own memory to work in."""
    if not hasattr(_OWN, "scratch"):
        _OWN.scratch = Scratch()
    scratch: Scratch = _OWN.scratch
    return scratch


def _read_job(tensor: SourceTensor, start: int, stop: int) -> CarryJob:
    return lambda: tensor.fetch(start, stop)


def _turned_jobs(tensor: SourceTensor) -> Iterator[PackJob | Drained]:
    """Yield jobs for a weight stored [in, out]: its columns are the rows, so that all of it has to be read first.

    As many columns are held, as float32, as take the room of the tensor's own bytes: all of an F32 tensor, half of
    those of a BF16 one, which is read twice.
    """
    in_features, out_features = tensor.shape
    passes = max(1, -(-in_features * out_features * 4 // max(1, tensor.nbytes)))
    held = -(-out_features // passes)
    step = max(1, min(held, _JOB_ELEMENTS // in_features))
    for first in range(0, out_features, held):
        yield DRAINED  # the columns held before are let go
        columns = _read_columns(tensor, first, min(first + held, out_features), check=first == 0)
        for start in range(0, columns.shape[1], step):
            yield _column_job(columns, start, min(start + step, columns.shape[1]), tensor.name, first)
        del columns


def _column_job(columns: NDArray[np.float32], start: int, stop: int, name: str, first: int) -> PackJob:
    def read(begin: int, end: int) -> NDArray[np.float32]:
        turned = _scratch().array("turned", (end - begin, len(columns)), np.float32)
        for row in range(0, len(columns), _TILE_ROWS):
            part = slice(row, row + _TILE_ROWS)
            turned[:, part] = columns[part, begin - first : end - first].T
        return turned

    return lambda: pack_read_rows(
        read, (stop - start, len(columns)), name=name, first_row=first + start, scratch=_scratch()
    )


def _read_columns(tensor: SourceTensor, start: int, stop: int, *, check: bool) -> NDArray[np.float32]:
    """Read some columns of a matrix as it is stored.

    Raises:
        NonFiniteError: with `check`, the first value of the whole matrix, as the file counts it, that is not finite.
    """
    columns = np.empty((tensor.shape[0], stop - start), np.float32)
    step = max(1, _READ_ELEMENTS // tensor.shape[1])
    for row in range(0, tensor.shape[0], step):
        rows = tensor.floats(row, min(row + step, tensor.shape[0]), _scratch())
        if check:  # before it is turned, so that the message counts as the file does
            refuse_non_finite(rows, name=tensor.name, first_row=row)
        columns[row : row + len(rows)] = rows[:, start:stop]
    return columns
