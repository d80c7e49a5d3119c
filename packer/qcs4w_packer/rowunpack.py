"""Packed bytes and scales -> float rows, two columns at a time from one small table."""

import numpy as np
from numpy.typing import NDArray

from .nibbles import unpack_codes

# The two codes of every byte as float32, looked up as one word of 8 bytes: the table stays in the first cache.
_PAIRS = unpack_codes(np.arange(256, dtype=np.uint8)[:, None], 2).astype(np.float32).view(np.uint64)[:, 0]


def dequantize_packed(packed: NDArray[np.uint8], scales: NDArray[np.float32], in_features: int) -> NDArray[np.float32]:
    """Return code · scale, rounded once, as `quantize.dequantize` does.

    Args:
        packed: uint8, shape (n, ceil(in_features / 2)).
        scales: float32, shape (n,).
        in_features: K, columns to return.

    Returns:
        float32, shape (n, in_features); infinite where the product is beyond float32.
    """
    values = np.take(_PAIRS, packed).view(np.float32)  # (n, 2 * K_packed)
    with np.errstate(over="ignore"):
        np.multiply(values, scales[:, None], out=values)
    return values[:, :in_features]
