"""The ways in which packed 4-bit weights lie in bytes and get misread. One list, for every command that asks.

`readings` are misreadings of rows as qcs4w packs them: what a wrong kernel does. `layouts` are what other tools write:
what a file may hold. Both are `Reading`s: an arrangement of the nibbles, an order of two in a byte, an encoding.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .nibbles import (
    EVEN_HIGH,
    EVEN_LOW,
    EVEN_LOW_TWOS,
    LAYOUTS,
    OFFSET,
    Layout,
    packed_width,
    signed_codes,
    unpack_nibbles,
)

Bytes = NDArray[np.uint8]

# Position p of a word's nibbles, counted from the lowest, holds column AWQ_ORDER[p] of its eight.
# Source: casper-hansen/AutoAWQ, awq/modules/linear/gemm.py, WQLinear_GEMM.from_linear.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

_GGML_BLOCK = 32  # codes; source: ggml-org/llama.cpp, ggml/src/ggml-common.h, block_q4_0
_GGML_SCALE_NBYTES = 2


@dataclass(frozen=True)
class Arrangement:
    """Where the nibbles of a matrix (N, K) lie.

    Attributes:
        name: short, as options and JSON have it; "" for rows packed along K, one behind the other.
        words: for people.
        nbytes: (N, K) -> bytes of the whole matrix; 0 where it cannot hold this shape.
        nibbles: (bytes of the matrix, N, K, rows, even column is high) -> uint8 (rows, K), its first rows.
        has_order: whether two columns share a byte in one order or the other; else the arrangement fixes it.
        writers: the tools that write it with code + 8, for people.
    """

    name: str
    words: str
    nbytes: Callable[[int, int], int]
    nibbles: Callable[[Bytes, int, int, int, bool], Bytes]
    has_order: bool = False
    writers: str = ""


def _rows(padding: int) -> Arrangement:
    """Return rows packed along K, each filled up to a multiple of `padding` bytes."""

    def width(columns: int) -> int:
        return -(-packed_width(columns) // padding) * padding

    def nibbles(data: Bytes, rows: int, columns: int, stop: int, even_high: bool) -> Bytes:
        return unpack_nibbles(data.reshape(rows, width(columns))[:stop], even_high=even_high)[:, :columns]

    return Arrangement(
        f"rows-of-{padding}" if padding > 1 else "",
        f"rows filled up to {2 * padding} codes" if padding > 1 else "rows packed along K",
        lambda rows, columns: rows * width(columns),
        nibbles,
        has_order=True,
    )


def _columns_nibbles(data: Bytes, rows: int, columns: int, stop: int, even_high: bool) -> Bytes:
    part = data.reshape(columns, packed_width(rows))[:, : packed_width(stop)]
    return unpack_nibbles(part, even_high=even_high)[:, :stop].T


def _words(part: NDArray[Any]) -> Bytes:
    """Return the nibbles of 32-bit words (..., 4 bytes), the lowest first: (..., 8)."""
    return unpack_nibbles(part.reshape(-1, 4), even_high=False).reshape(*part.shape[:-1], 8)


def _gptq_nibbles(data: Bytes, rows: int, columns: int, stop: int, even_high: bool) -> Bytes:
    words = _words(data.reshape(-(-columns // 8), rows, 4)[:, :stop])  # (K / 8, stop, 8)
    return words.transpose(1, 0, 2).reshape(stop, -1)[:, :columns]


def _awq_words(part: NDArray[Any]) -> Bytes:
    """Return AWQ's words (A, B, 4 bytes) in column order: (A, 8 · B)."""
    placed = _words(part)
    ordered = np.empty_like(placed)
    ordered[..., AWQ_ORDER] = placed
    return ordered.reshape(len(part), -1)


def _awq_nibbles(data: Bytes, rows: int, columns: int, stop: int, even_high: bool) -> Bytes:
    return _awq_words(data.reshape(columns, -(-rows // 8), 4)[:, : -(-stop // 8)])[:, :stop].T


def _awq_row_nibbles(data: Bytes, rows: int, columns: int, stop: int, even_high: bool) -> Bytes:
    return _awq_words(data.reshape(rows, -(-columns // 8), 4)[:stop])[:, :columns]


def _halves(part: NDArray[Any], stop: int) -> Bytes:
    """Return ggml's blocks (stop, K / 32, 16 bytes) in column order: the low nibbles first, then the high ones."""
    return np.concatenate([part & 0x0F, part >> 4], axis=-1).reshape(stop, -1)


def _halves_nibbles(data: Bytes, rows: int, columns: int, stop: int, even_high: bool) -> Bytes:
    return _halves(data.reshape(rows, columns // _GGML_BLOCK, -1)[:stop], stop)


def _q4_0_nibbles(data: Bytes, rows: int, columns: int, stop: int, even_high: bool) -> Bytes:
    return _halves(data.reshape(rows, columns // _GGML_BLOCK, -1)[:stop, :, _GGML_SCALE_NBYTES:], stop)


def _whole_blocks(nbytes_per_block: int) -> Callable[[int, int], int]:
    return lambda rows, columns: 0 if columns % _GGML_BLOCK else rows * columns // _GGML_BLOCK * nbytes_per_block


ROWS = _rows(1)
COLUMNS = Arrangement(
    "columns",
    "the transposed matrix, [K, N] packed along N",
    lambda rows, columns: columns * packed_width(rows),
    _columns_nibbles,
    has_order=True,
)
GPTQ = Arrangement(
    "gptq",
    "32-bit words [K / 8, N], column 8j + i in nibble i",
    lambda rows, columns: -(-columns // 8) * rows * 4,
    _gptq_nibbles,
    writers="GPTQ v1 and v2 (qweight; v1 stores its zero points less one)",
)
AWQ = Arrangement(
    "awq",
    "32-bit words [K, N / 8], nibbles in the order 0 2 4 6 1 3 5 7",
    lambda rows, columns: columns * -(-rows // 8) * 4,
    _awq_nibbles,
    writers="AWQ (AutoAWQ's GEMM version, qweight)",
)
AWQ_ROWS = Arrangement(
    "awq-rows",
    "32-bit words along K, nibbles in the order 0 2 4 6 1 3 5 7",
    lambda rows, columns: rows * -(-columns // 8) * 4,
    _awq_row_nibbles,
    writers="AWQ's word order, along K",
)
HALVES = Arrangement(
    "halves",
    "blocks of 32, column j in a low nibble and j + 16 in the high one",
    _whole_blocks(_GGML_BLOCK // 2),
    _halves_nibbles,
    writers="ggml Q4_0, its block scales taken out",
)
Q4_0 = Arrangement(
    "q4_0",
    "blocks of 32 behind a float16 scale each, column j in a low nibble and j + 16 in the high one",
    _whole_blocks(_GGML_BLOCK // 2 + _GGML_SCALE_NBYTES),
    _q4_0_nibbles,
    writers="ggml Q4_0",
)

#: Rows that start on a multiple of so many bytes: words, GPU vectors, blocks of other formats.
_PADDINGS = (4, 8, 16, 32, 64, 128)

ARRANGEMENTS = (ROWS, *map(_rows, _PADDINGS), COLUMNS, GPTQ, AWQ, AWQ_ROWS, HALVES, Q4_0)

_ROW_WRITERS = {
    "even-high": "qcs4w, which is ExecuTorch's et_vk.linear_qcs4w",
    "even-low": "ExecuTorch's q4gsw, ONNX MatMulNBits, compressed-tensors pack-quantized",
    "even-low-twos": "ONNX INT4 tensors, OpenVINO i4",
}


@dataclass(frozen=True)
class Reading:
    """One way to turn packed bytes into integers.

    Attributes:
        layout: nibble order and encoding.
        offset: what is subtracted from a nibble (not for two's complement); 0 leaves codes from 0 to 15.
        dropped_tail: this many last columns are left out of the sum.
        arrangement: where the nibbles lie.
    """

    layout: Layout = EVEN_HIGH
    offset: int = OFFSET
    dropped_tail: int = 0
    arrangement: Arrangement = ROWS

    @property
    def faults(self) -> tuple[str, ...]:
        """What is wrong with this reading, in the words that reports use; empty for the right one."""
        tail = self.dropped_tail
        named = (
            (self.arrangement is not ROWS, self.arrangement.words),
            (self.arrangement.has_order and not self.layout.even_high, "nibbles swapped"),
            (self.layout.twos_complement, "two's complement"),
            (self.offset == 0, "offset missing"),
            (self.offset not in (0, OFFSET), f"offset off by one: {self.offset} for {OFFSET}"),
            (tail > 0, f"dropped tail: last {tail} column{'s' if tail > 1 else ''}"),
        )
        return tuple(words for is_so, words in named if is_so)

    @property
    def name(self) -> str:
        """The faults joined, or "qcs4w" for the right reading."""
        return " and ".join(self.faults) or "qcs4w"

    @property
    def label(self) -> str:
        """What it is, rather than what is wrong with it: "even-low", "gptq", "even-high offset 7"."""
        parts = [self.arrangement.name, *([self.layout.name] if self.arrangement.has_order else [])]
        if not self.arrangement.has_order and self.layout.twos_complement:
            parts.append("twos")
        shown = "-".join(filter(None, parts))
        return shown if self.offset == OFFSET else f"{shown} offset {self.offset}"

    @property
    def writers(self) -> str:
        """The tools that write bytes so, for people; "" where none is known."""
        if self.offset != OFFSET:
            return ""
        if self.arrangement.has_order and self.arrangement is not COLUMNS:
            return _ROW_WRITERS.get(self.layout.name, "")
        return "" if self.layout.twos_complement else self.arrangement.writers

    def codes(self, packed: Bytes, in_features: int) -> NDArray[np.int8]:
        """Read rows as qcs4w packs them this way.

        Args:
            packed: uint8, shape (N, ceil(K / 2)).
            in_features: K.

        Returns:
            int8, shape (N, K), each in [-9, 15].
        """
        return self.matrix(packed, len(packed), in_features)

    def nbytes(self, out_features: int, in_features: int) -> int:
        """Return how many bytes a matrix (N, K) takes; 0 where it cannot lie so."""
        return self.arrangement.nbytes(out_features, in_features)

    def matrix(self, data: Bytes, out_features: int, in_features: int, rows: int | None = None) -> NDArray[np.int8]:
        """Read a matrix, or its first rows, from the bytes that hold it all.

        Args:
            data: uint8, at least `nbytes(N, K)` of them, of any shape.
            out_features: N.
            in_features: K.
            rows: how many rows to return; by default all.

        Returns:
            int8, shape (rows, K), each in [-9, 15].
        """
        stop = out_features if rows is None else min(rows, out_features)
        whole = data.reshape(-1)[: self.nbytes(out_features, in_features)]
        nibbles = self.arrangement.nibbles(whole, out_features, in_features, stop, self.layout.even_high)
        codes = signed_codes(nibbles, self.layout)
        if self.offset != OFFSET:
            codes = codes + np.int8(OFFSET - self.offset)
        if self.dropped_tail:
            codes[:, in_features - self.dropped_tail :] = 0
        return codes


RIGHT = Reading()

_ENCODINGS = (EVEN_LOW, EVEN_LOW_TWOS)  # for arrangements that have an order of their own
_OFFSETS = (OFFSET, 0, OFFSET - 1, OFFSET + 1)


def dropped_tails(in_features: int) -> list[int]:
    """Return how many last columns a loop may forget.

    Those past the last whole 2, 4, … 256, as a loop over vectors or tiles does; and the last column or byte, as a loop
    with one step too few does.
    """
    past = {in_features % step for step in (2, 4, 8, 16, 32, 64, 128, 256)}
    return sorted(tail for tail in past | {1, 2 - in_features % 2} if 0 < tail < in_features)


def readings(in_features: int | None = None, *, out_features: int | None = None) -> Iterator[Reading]:
    """Yield every misreading of rows as qcs4w packs them, the right one first, then by number of faults.

    Args:
        in_features: K; with it the readings that drop a tail are included.
        out_features: N; with both, also the bytes read as the transposed matrix, where they hold as many.
    """
    tails = [0] if in_features is None else [0, *dropped_tails(in_features)]
    arrangements = [ROWS]
    if in_features is not None and out_features is not None:
        held = ROWS.nbytes(out_features, in_features)
        arrangements += [COLUMNS] if COLUMNS.nbytes(out_features, in_features) <= held else []
    every = (
        Reading(layout, offset, tail, arrangement)
        for arrangement, layout, offset, tail in product(arrangements, LAYOUTS.values(), _OFFSETS, tails)
        if not (layout.twos_complement and offset != OFFSET)
    )
    yield from sorted(every, key=lambda reading: len(reading.faults))


def layouts(out_features: int, in_features: int, nbytes: int) -> Iterator[Reading]:
    """Yield what `nbytes` packed bytes of a matrix (N, K) may be, our own layout first.

    Where rows need no filling up, padded rows are plain rows: only one of them is yielded.
    """
    seen = set()
    for arrangement in ARRANGEMENTS:
        needed = arrangement.nbytes(out_features, in_features)
        is_rows = arrangement.has_order and arrangement is not COLUMNS
        if not 0 < needed <= nbytes or (is_rows and needed in seen):
            continue
        if is_rows:
            seen.add(needed)
        for layout in LAYOUTS.values() if arrangement.has_order else _ENCODINGS:
            for offset in (OFFSET,) if layout.twos_complement else _OFFSETS:
                yield Reading(layout, offset, arrangement=arrangement)


#: Every layout that a user can name, by its label; the first is qcs4w's own.
NAMED = {
    reading.label: reading
    for arrangement in ARRANGEMENTS
    for layout in (LAYOUTS.values() if arrangement.has_order else _ENCODINGS)
    for reading in [Reading(layout, arrangement=arrangement)]
}
