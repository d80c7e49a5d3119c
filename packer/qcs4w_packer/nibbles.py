"""Codes <-> bytes: the one place that knows nibble order, offset and padding."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import CodeRangeError

CODE_MIN, CODE_MAX = -8, 7
OFFSET = 8  # stored nibble = code + OFFSET
PAD_NIBBLE = OFFSET  # an odd in_features is padded with the code 0, before the shift
PAD_BYTE = PAD_NIBBLE << 4 | PAD_NIBBLE


@dataclass(frozen=True)
class Layout:
    """How two 4-bit codes lie in a byte.

    Attributes:
        name: what a command line calls it.
        even_high: the even column is in bits 4..7 (else in bits 0..3).
        twos_complement: a nibble is the code's two's complement (else code + 8).
    """

    name: str
    even_high: bool
    twos_complement: bool

    @property
    def pad_nibble(self) -> int:
        """What stands beside the last column of an odd in_features: the code 0."""
        return 0 if self.twos_complement else PAD_NIBBLE


EVEN_HIGH = Layout("even-high", even_high=True, twos_complement=False)
EVEN_LOW = Layout("even-low", even_high=False, twos_complement=False)
EVEN_HIGH_TWOS = Layout("even-high-twos", even_high=True, twos_complement=True)
EVEN_LOW_TWOS = Layout("even-low-twos", even_high=False, twos_complement=True)

#: Every layout that can be read, by name; the first is qcs4w's own.
LAYOUTS = {layout.name: layout for layout in (EVEN_HIGH, EVEN_LOW, EVEN_HIGH_TWOS, EVEN_LOW_TWOS)}


def packed_width(in_features: int) -> int:
    """Return K_packed, the bytes of one packed row: ceil(in_features / 2)."""
    return (in_features + 1) // 2


def pack_codes(codes: NDArray[np.int8], layout: Layout = EVEN_HIGH) -> NDArray[np.uint8]:
    """Pack signed 4-bit codes two to a byte.

    Args:
        codes: int8, shape (N, K), each in [-8, 7].
        layout: how the bytes are to be written.

    Returns:
        uint8, shape (N, ceil(K / 2)); an odd K is padded with the code 0, as the layout spells it.

    Raises:
        CodeRangeError: a code lies outside [-8, 7]; the message gives row, column and value.
    Source: pytorch/executorch cff6f4d, backends/vulkan/_passes/fuse_quantized_ops.py, pack_4bit_weight_tensor.
    """
    codes = np.asarray(codes)
    wrong = (codes < CODE_MIN) | (codes > CODE_MAX)
    if wrong.any():
        row, column = (int(i) for i in np.argwhere(wrong)[0])
        raise CodeRangeError(
            f"code {codes[row, column]} at row {row}, column {column} lies outside [{CODE_MIN}, {CODE_MAX}]"
        )
    packed = np.empty((codes.shape[0], packed_width(codes.shape[1])), np.uint8)
    pack_codes_into(np.ascontiguousarray(codes, np.int8), packed)
    return packed if layout == EVEN_HIGH else recode_table(layout)[packed]


def recode_table(layout: Layout) -> NDArray[np.uint8]:
    """Return what each of qcs4w's bytes becomes in another layout: uint8, shape (256,), to be indexed by the byte."""
    table: NDArray[np.uint8] = np.arange(256, dtype=np.uint8)
    if layout.twos_complement:
        table ^= np.uint8(OFFSET << 4 | OFFSET)  # code + 8 and the two's complement differ in the nibble's top bit
    if not layout.even_high:
        table = (table << np.uint8(4)) | (table >> np.uint8(4))
    return table


def pack_codes_into(codes: NDArray[np.int8], packed: NDArray[np.uint8], room: NDArray[np.uint8] | None = None) -> None:
    """Pack codes known to be in range into `packed`, as `pack_codes` does.

    Args:
        codes: int8, shape (N, K), C order, each in [-8, 7].
        packed: uint8, shape (N, ceil(K / 2)), overwritten.
        room: uint8, shape (N, 2 * ceil(K / 2)), overwritten too; by default it is made here.
    """
    rows, columns = codes.shape
    nibbles = np.empty((rows, 2 * packed.shape[1]), np.uint8) if room is None else room
    np.add(codes.view(np.uint8), np.uint8(OFFSET), out=nibbles[:, :columns])  # wraps: -8 is 0xF8, and 0xF8 + 8 is 0
    nibbles[:, columns:] = PAD_NIBBLE
    pairs = nibbles.view("<u2")  # (N, K_packed): even column in the low byte, odd in the high one
    pairs *= np.uint16(0x1001)  # the even one is added to the high byte, 4 bits up: even << 4 | odd
    pairs >>= np.uint16(8)
    np.copyto(packed, pairs, casting="unsafe")


def unpack_codes(packed: NDArray[np.uint8], in_features: int, layout: Layout = EVEN_HIGH) -> NDArray[np.int8]:
    """Read signed codes out of packed bytes.

    Args:
        packed: uint8, shape (N, ceil(in_features / 2)).
        in_features: K, columns to return.
        layout: how the bytes are to be read.

    Returns:
        int8, shape (N, in_features), each in [-8, 7].
    """
    return signed_codes(unpack_nibbles(packed, even_high=layout.even_high)[:, :in_features], layout)


def signed_codes(nibbles: NDArray[np.uint8], layout: Layout = EVEN_HIGH) -> NDArray[np.int8]:
    """Turn nibbles into the codes that they encode.

    Args:
        nibbles: uint8, any shape, each in [0, 15].
        layout: only its encoding counts.

    Returns:
        int8, each in [-8, 7].
    """
    codes = nibbles.astype(np.int8)
    if layout.twos_complement:
        return np.where(codes > CODE_MAX, codes - np.int8(16), codes)
    return codes - np.int8(OFFSET)


def unpack_nibbles(packed: NDArray[np.uint8], *, even_high: bool = True) -> NDArray[np.uint8]:
    """Split bytes into nibbles in column order.

    Args:
        packed: uint8, shape (N, K_packed).
        even_high: the even column is in the high nibble.

    Returns:
        uint8, shape (N, 2 * K_packed), each in [0, 15]; the last column of an odd K is the pad.
    """
    high, low = packed >> 4, packed & 0x0F
    pair: tuple[NDArray[Any], NDArray[Any]] = (high, low) if even_high else (low, high)
    return np.stack(pair, axis=-1).reshape(packed.shape[0], -1)


def wrong_pad_rows(packed: NDArray[np.uint8], in_features: int) -> int:
    """Count the rows whose pad nibble (odd in_features only) is not the code 0."""
    if in_features % 2 == 0:
        return 0
    return int(np.count_nonzero((packed[:, -1] & 0x0F) != PAD_NIBBLE))
