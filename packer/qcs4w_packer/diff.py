"""Where two packed tensors of one shape differ: bytes, codes and scales, some rows at a time."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .diff_patterns import code_patterns, scale_patterns
from .metadata import PackedEntry
from .nibbles import EVEN_HIGH, OFFSET, packed_width, unpack_codes, unpack_nibbles
from .packed_file import PackedFile, sha256_faults

_BLOCK_BYTES = 4 << 20  # of packed rows of each file at a time
_SAMPLE_ROWS = 64
_MANY_CODES = 16  # fewer that differ by 1 say nothing


@dataclass(frozen=True)
class Place:
    """Where two tensors differ, with what either has there.

    Attributes:
        row: n.
        index: the byte's j or the code's k; 0 for a scale.
        a: the value in the first file.
        b: the value in the second file.
        a_offset: where its byte or scale lies in the first file; None where the format does not tell.
        b_offset: the same in the second file.
    """

    row: int
    index: int
    a: float
    b: float
    a_offset: int | None
    b_offset: int | None


@dataclass(frozen=True)
class TensorDiff:
    """How two packed tensors of one shape differ.

    Attributes:
        out_features: N.
        in_features: K.
        bytes: differing packed bytes.
        codes: differing codes.
        pads: rows whose pad nibbles differ (odd K only).
        scales: scales with differing bits.
        max_code_difference: largest |difference| of two codes.
        max_scale_difference: largest |a - b| / max(|a|, |b|) of two scales, infinite where one is not a number.
        first_byte: by row, then byte.
        first_code: by row, then column; a differing pad is none.
        first_scale: by row.
        rows: first and last row with a differing byte.
        columns: first and last column with a differing code.
        patterns: what explains all differences of the codes, or of the scales.
        digests: per file, where its bytes are not those whose sha256 it states.
    """

    out_features: int
    in_features: int
    bytes: int = 0
    codes: int = 0
    pads: int = 0
    scales: int = 0
    max_code_difference: int = 0
    max_scale_difference: float = 0.0
    first_byte: Place | None = None
    first_code: Place | None = None
    first_scale: Place | None = None
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None
    patterns: tuple[str, ...] = ()
    digests: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    @property
    def is_equal(self) -> bool:
        """Whether packed bytes and scales are the same."""
        return not self.bytes and not self.scales


def diff_tensors(a_file: PackedFile, a_entry: PackedEntry, b_file: PackedFile, b_entry: PackedEntry) -> TensorDiff:
    """Compare two packed tensors of one shape, whatever their digests say; scales where both files have some.

    Raises:
        SourceError: a file cannot be read to its end.
    """
    files = ((a_file, a_entry), (b_file, b_entry))
    readers = [file.row_reader(entry) for file, entry in files]
    scales = [file.scales(entry) for file, entry in files]
    hashes = [hashlib.sha256(), hashlib.sha256()]
    rows, columns = a_entry.out_features, a_entry.in_features
    found = _Found(columns)
    for start, a, b in _blocks(readers, rows, columns):
        for digest, block in zip(hashes, (a, b), strict=True):
            digest.update(np.ascontiguousarray(block).data)
        found.add(start, a, b)
    packed_places = [_offset(file.place(entry)) for file, entry in files]
    different = np.flatnonzero(scales[0].view(np.uint32) != scales[1].view(np.uint32))
    if not (a_file.has_scales and b_file.has_scales):
        different = different[:0]
    patterns: list[str] = []
    if found.codes:
        blocks = ((a, b) for _, a, b in _blocks(readers, rows, columns))
        patterns += code_patterns(chain(found.sample, blocks), columns)
        if not patterns and found.max_code_difference == 1 and found.codes >= _MANY_CODES:
            patterns.append("no two codes differ by more than 1: another rounding, or other scales, of the same weight")
    elif found.bytes:
        patterns.append("all codes are equal: only the pad nibbles behind an odd K differ")
    if len(different):
        patterns += scale_patterns(*scales)
    row = int(different[0]) if len(different) else 0
    return TensorDiff(
        rows,
        columns,
        bytes=found.bytes,
        codes=found.codes,
        pads=found.pads,
        scales=len(different),
        max_code_difference=found.max_code_difference,
        max_scale_difference=_scale_difference(scales[0][different], scales[1][different]),
        first_byte=_place(found.first_byte, packed_places, packed_width(columns), step=1),
        first_code=_place(found.first_code, packed_places, packed_width(columns), step=2),
        first_scale=_place(
            (row, 0, float(scales[0][row]), float(scales[1][row])),
            [_offset(file.scales_place(entry)) for file, entry in files],
            4,
        )
        if len(different)
        else None,
        rows=found.row_range,
        columns=found.column_range,
        patterns=tuple(patterns),
        digests=(
            tuple(sha256_faults(a_entry, hashes[0].hexdigest(), _sha256(scales[0]))),
            tuple(sha256_faults(b_entry, hashes[1].hexdigest(), _sha256(scales[1]))),
        ),
    )


class _Found:
    """Counts and first places of differing packed bytes, gathered block by block."""

    def __init__(self, in_features: int):
        self._in_features = in_features
        self.bytes = self.codes = self.pads = self.max_code_difference = 0
        self.first_byte: tuple[int, int, float, float] | None = None
        self.first_code: tuple[int, int, float, float] | None = None
        self.row_range: tuple[int, int] | None = None
        self.sample: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = []  # rows that differ, which explain soonest
        self._columns = np.zeros(in_features, np.bool_)

    def add(self, start: int, a: NDArray[np.uint8], b: NDArray[np.uint8]) -> None:
        """Take in packed rows (n, K_packed) that begin at row `start`."""
        rows = np.flatnonzero((a != b).any(axis=1))
        if not len(rows):
            return
        self.row_range = (start + int(rows[0]) if self.row_range is None else self.row_range[0], start + int(rows[-1]))
        a, b = a[rows], b[rows]
        if not self.sample:
            self.sample.append((a[:_SAMPLE_ROWS], b[:_SAMPLE_ROWS]))
        self.first_byte = self.first_byte or _first(a, b, start, rows)
        self.bytes += int(np.count_nonzero(a != b))
        a_codes, b_codes = unpack_codes(a, self._in_features), unpack_codes(b, self._in_features)
        different = a_codes != b_codes
        count = int(np.count_nonzero(different))
        if count:
            self.first_code = self.first_code or _first(a_codes, b_codes, start, rows)
            self.codes += count
            self.max_code_difference = max(self.max_code_difference, int(np.abs(a_codes - b_codes).max()))
            self._columns |= different.any(axis=0)
        if self._in_features % 2:
            self.pads += int(np.count_nonzero(unpack_nibbles(a)[:, -1] != unpack_nibbles(b)[:, -1]))

    @property
    def column_range(self) -> tuple[int, int] | None:
        """First and last column with a differing code."""
        columns = np.flatnonzero(self._columns)
        return (int(columns[0]), int(columns[-1])) if len(columns) else None


def _blocks(
    readers: list[Callable[[int, int], NDArray[np.uint8]]], rows: int, columns: int
) -> Iterator[tuple[int, NDArray[np.uint8], NDArray[np.uint8]]]:
    step = max(1, _BLOCK_BYTES // packed_width(columns))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield start, readers[0](start, stop), readers[1](start, stop)


def _first(a: NDArray[Any], b: NDArray[Any], start: int, rows: NDArray[Any]) -> tuple[int, int, float, float]:
    """Return row, index and both values of the first difference; `rows` says which rows of the block these are."""
    row, index = (int(i) for i in np.argwhere(a != b)[0])
    return start + int(rows[row]), index, int(a[row, index]), int(b[row, index])


def _place(
    found: tuple[int, int, float, float] | None, offsets: list[int | None], row_nbytes: int, step: int = 1
) -> Place | None:
    """Add file offsets to a difference; `step` is how many indexes share a byte."""
    if found is None:
        return None
    row, index, a, b = found
    within = row * row_nbytes + index // step
    return Place(row, index, a, b, *(None if offset is None else offset + within for offset in offsets))


def _offset(place: tuple[Any, int] | None) -> int | None:
    return None if place is None else place[1]


def _scale_difference(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    if not len(a):
        return 0.0
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    size = np.maximum(np.abs(wide_a), np.abs(wide_b))
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.where(size == 0, 0.0, np.abs(wide_a - wide_b) / size)  # 0 and -0 differ in bits only
    return float(np.nan_to_num(relative, nan=np.inf, posinf=np.inf).max())


def _sha256(scales: NDArray[np.float32]) -> str:
    return hashlib.sha256(np.ascontiguousarray(scales).data).hexdigest()


def nibble_of(code: Place) -> tuple[str, int, int]:
    """Return which half of its byte a differing code is, and the nibbles that stand there in either file."""
    half = "high" if (code.index % 2 == 0) == EVEN_HIGH.even_high else "low"
    return half, int(code.a) + OFFSET, int(code.b) + OFFSET
