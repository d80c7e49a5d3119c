"""How the codes of one weight become rows of bytes, in each layout that a search looks for.

This is the way from codes to bytes; `readings.py` has the way back, and the names.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .nibbles import EVEN_HIGH, pack_codes, packed_width, recode_table, unpack_codes
from .readings import (
    AWQ,
    AWQ_ORDER,
    AWQ_ROWS,
    COLUMNS,
    GPTQ,
    HALVES,
    NAMED,
    ROWS,
    Arrangement,
    Reading,
)

_WORD = 8  # codes in 32 bits


@dataclass(frozen=True)
class Placement:
    """Rows of bytes that hold the codes of a weight (N, K).

    Attributes:
        reading: what turns the bytes back into codes.
    """

    reading: Reading

    @property
    def name(self) -> str:
        """What reports call it, the label of the reading: "even-low", "columns-even-low", "gptq"."""
        return self.reading.label

    @property
    def is_plain(self) -> bool:
        """Whether rows of codes are rows of bytes, in column order."""
        return self.reading.arrangement is ROWS

    @property
    def is_transposed(self) -> bool:
        """Whether rows of bytes are columns of codes."""
        return self.reading.arrangement is COLUMNS

    @property
    def is_by_rows(self) -> bool:
        """Whether the bytes of one row of codes lie together, the rows in their order."""
        return self.reading.arrangement in (ROWS, AWQ_ROWS, HALVES)

    def is_named(self, name: str) -> bool:
        """Tell whether a user may call it so: its label, or a layout of nibbles by rows or transposed."""
        return name == self.name or (self.is_transposed and name == self.reading.layout.name)

    def filled_up(self, size: tuple[int, int], stride: int) -> Reading | None:
        """Return what reads rows of a weight (N, K) that begin every `stride` bytes, if anything does."""
        if stride == self.shape(*size)[1]:
            return self.reading
        fitting = (
            reading
            for reading in NAMED.values()
            if self.is_plain
            and reading.layout == self.reading.layout
            and reading.arrangement.has_order
            and reading.arrangement is not COLUMNS
            and reading.nbytes(*size) == size[0] * stride
        )
        return next(fitting, None)

    @property
    def _unit(self) -> int:
        """How many neighbouring codes lie together; the matrix must be a whole number of them wide."""
        return len(_ORDERS.get(self.reading.arrangement, (0, 1)))

    def fits(self, out_features: int, in_features: int) -> bool:
        """Tell whether a weight can lie so; words and blocks must be full."""
        return self._unit == 2 or self._columns(out_features, in_features) % self._unit == 0

    def shape(self, out_features: int, in_features: int) -> tuple[int, int]:
        """Return (rows, bytes a row)."""
        arrangement = self.reading.arrangement
        if arrangement is GPTQ:
            return in_features // _WORD, out_features * _WORD // 2
        columns = self._columns(out_features, in_features)
        return out_features if columns == in_features else in_features, packed_width(columns)

    def last_mask(self, out_features: int, in_features: int) -> int:
        """Return which bits of a row's last byte are codes: all, or one nibble beside a pad."""
        if self._columns(out_features, in_features) % 2 == 0:
            return 0xFF
        return 0xF0 if self.reading.layout.even_high else 0x0F

    def rectangle(self, packed: NDArray[np.uint8], in_features: int, rows: slice, columns: slice) -> NDArray[np.uint8]:
        """Return some bytes of some rows, without making the others.

        Args:
            packed: uint8, shape (N, ceil(K / 2)), in qcs4w's own layout.
            in_features: K.
            rows: both ends are given.
            columns: bytes of each row; both ends are given.

        Returns:
            uint8, shape (rows, columns). Pads are the code 0, for plain rows those of `packed`.
        """
        arrangement, layout = self.reading.arrangement, self.reading.layout
        if arrangement is ROWS:
            part = packed[rows, columns]
            return part if layout == EVEN_HIGH else recode_table(layout)[part]
        if arrangement is GPTQ:
            first = columns.start // 4
            words = slice(first, -(-columns.stop // 4))
            codes = _codes(packed, in_features, words, slice(rows.start * _WORD, rows.stop * _WORD))
            data = pack_codes(codes, layout).reshape(len(codes), -1, 4).transpose(1, 0, 2)
            return data.reshape(len(data), -1)[:, columns.start - 4 * first : columns.stop - 4 * first]
        unit = self._unit
        first = 2 * columns.start // unit * unit
        wanted = slice(first, -(-2 * columns.stop // unit) * unit)
        if arrangement in (COLUMNS, AWQ):
            codes = _codes(packed, in_features, wanted, rows).T
        else:
            codes = _codes(packed, in_features, rows, wanted)
        data = pack_codes(self._ordered(codes), layout)
        return data[:, columns.start - first // 2 : columns.stop - first // 2]

    def _columns(self, out_features: int, in_features: int) -> int:
        """Return the length of the dimension along which codes share bytes."""
        return out_features if self.reading.arrangement in (COLUMNS, AWQ) else in_features

    def _ordered(self, codes: NDArray[np.int8]) -> NDArray[np.int8]:
        order = _ORDERS.get(self.reading.arrangement)
        if order is None:
            return codes
        return codes.reshape(len(codes), -1, len(order))[..., order].reshape(len(codes), -1)


#: Which code of a unit stands in each nibble, counted from the lowest of the first byte.
_ORDERS: dict[Arrangement, tuple[int, ...]] = {
    GPTQ: tuple(range(_WORD)),
    AWQ: AWQ_ORDER,
    AWQ_ROWS: AWQ_ORDER,
    HALVES: tuple(half + j for j in range(16) for half in (0, 16)),
}

#: What is searched for, qcs4w's own first. Rows that are filled up are found as rows with gaps between them.
PLACEMENTS = tuple(Placement(reading) for reading in NAMED.values() if reading.arrangement in (ROWS, COLUMNS, *_ORDERS))


def _codes(packed: NDArray[np.uint8], in_features: int, rows: slice, columns: slice) -> NDArray[np.int8]:
    """Return codes of some rows and columns: int8, shape (rows, columns)."""
    first = columns.start // 2  # byte that holds the first column
    stop = min(columns.stop, in_features)
    part = packed[rows, first : packed_width(stop)]
    return unpack_codes(part, stop - 2 * first)[:, columns.start - 2 * first :]
