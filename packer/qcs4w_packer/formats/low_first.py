"""What all foreign layouts here have in common: the even column low, code + 8, K filled up to a multiple."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..nibbles import EVEN_LOW, pack_codes, packed_width, recode_table, unpack_codes, unpack_nibbles


def to_low_first(packed: NDArray[np.uint8], in_features: int, *, multiple: int, pad_code: int = 0) -> NDArray[np.uint8]:
    """Turn qcs4w's bytes into bytes with the even column low.

    Args:
        packed: uint8, shape (N, ceil(K / 2)), qcs4w's layout.
        in_features: K.
        multiple: K is filled up to a multiple of it, which is even.
        pad_code: the code that fills it up.

    Returns:
        uint8, shape (N, ceil(K / multiple) * multiple / 2), C order.
    """
    fill = pack_codes(np.full((1, 2), pad_code, np.int8), EVEN_LOW)
    stored = np.repeat(np.repeat(fill, len(packed), axis=0), -(-in_features // multiple) * multiple // 2, axis=1)
    stored[:, : packed.shape[1]] = recode_table(EVEN_LOW)[packed]
    if in_features % 2:  # the byte that the last column shares with a pad
        last = np.pad(unpack_codes(packed[:, -1:], 1), ((0, 0), (0, 1)), constant_values=pad_code)
        stored[:, packed.shape[1] - 1] = pack_codes(last, EVEN_LOW)[:, 0]
    return stored


def from_low_first(stored: NDArray[np.uint8], in_features: int) -> NDArray[np.uint8]:
    """Turn bytes with the even column low into qcs4w's bytes.

    Args:
        stored: uint8, shape (N, at least ceil(K / 2)); what lies behind column K is dropped.
        in_features: K.

    Returns:
        uint8, shape (N, ceil(K / 2)).
    """
    width = packed_width(in_features)
    packed = recode_table(EVEN_LOW)[stored[:, :width]]  # swapping the nibbles of a byte is its own inverse
    if in_features % 2:
        packed[:, -1:] = pack_codes(unpack_codes(stored[:, width - 1 : width], 1, EVEN_LOW))
    return packed


def word_nibbles(words: NDArray[Any]) -> NDArray[np.uint8]:
    """Split 32-bit words into nibbles, lowest first.

    Args:
        words: int32, shape (R, C), little-endian, C order.

    Returns:
        uint8, shape (R, C * 8), each in [0, 15].
    """
    return unpack_nibbles(words.view(np.uint8).reshape(len(words), -1), even_high=False)
