"""8-bit floats -> float32: what their codes mean, and how a weight of them is scaled.

A weight is code value × scale, both in float32, whatever the scale is called: DeepSeek's `weight_scale_inv` is
multiplied too. One scale stands for a block of the weight: all of it, a row, or a tile that is cut at the edge.

Source: OCP 8-bit Floating Point Specification 1.0 and Microscaling Formats 1.0 (E8M0); Noune et al.,
arXiv:2206.02915 (the FNUZ kinds); deepseek-ai/DeepSeek-V3, README_WEIGHTS.md (128×128 blocks).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from .errors import NonFiniteError

#: The 8-bit floats that weights are stored in.
WEIGHT_DTYPES = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")

# Bits of exponent and mantissa, and the exponent's bias.
_KINDS = {"F8_E4M3": (4, 3, 7), "F8_E5M2": (5, 2, 15), "F8_E4M3FNUZ": (4, 3, 8), "F8_E5M2FNUZ": (5, 2, 16)}

_BLOCK_ELEMENTS = 256 * 1024  # rows are done in blocks of so many elements, which stay in cache


@cache
def fp8_values(dtype: str) -> NDArray[np.float32]:
    """Return what the 256 codes of an 8-bit float mean, exactly.

    Args:
        dtype: one of WEIGHT_DTYPES, or F8_E8M0 (powers of two, the dtype of scales).

    Returns:
        float32, shape (256,), read-only. E4M3 has NaN at 0x7F and 0xFF and no infinity; E5M2 is IEEE's, with both;
        the FNUZ kinds have one NaN, at 0x80, in the place of minus zero.
    """
    codes = np.arange(256)
    if dtype == "F8_E8M0":
        values = np.where(codes == 255, np.nan, np.ldexp(1.0, codes - 127))
    else:
        exponent_bits, mantissa_bits, bias = _KINDS[dtype]
        exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
        mantissa = codes & ((1 << mantissa_bits) - 1)
        # A subnormal has no hidden bit and the exponent of the smallest normal.
        whole = mantissa + np.where(exponent > 0, 1 << mantissa_bits, 0)
        values = np.ldexp(whole.astype(np.float64), np.maximum(exponent, 1) - bias - mantissa_bits)
        values = np.where(codes & 0x80, -values, values)
        if dtype == "F8_E4M3":
            values[[0x7F, 0xFF]] = np.nan
        elif dtype == "F8_E5M2":
            values[[0x7C, 0xFC]] = np.inf, -np.inf
            values[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
        else:
            values[0x80] = np.nan
    table = values.astype(np.float32)
    table.setflags(write=False)
    return table


@dataclass(frozen=True)
class Fp8Rows:
    """Turns rows of fp8 codes into float32 rows; it fetches only the scales that these rows need.

    Attributes:
        name: the weight's name, for messages.
        dtype: one of WEIGHT_DTYPES.
        shape: (N, K) of one matrix; the rows of a stack of them are counted through.
        scale_name: the sibling that holds the scales.
        block: rows and columns of a matrix that one scale stands for.
        fetch_scales: (start, stop) -> float32 (stop - start, ceil(K / block columns)), of the rows of scales.
            Each matrix of a stack has ceil(N / block rows) of them.
        first_row: the row of the stack that is row 0 here.
    """

    name: str
    dtype: str
    shape: tuple[int, int]
    scale_name: str
    block: tuple[int, int]
    fetch_scales: Callable[[int, int], NDArray[np.float32]] = field(repr=False)
    first_row: int = 0

    def part(self, name: str, first_row: int) -> "Fp8Rows":
        """Return the same for one matrix of the stack, which begins at `first_row`."""
        return replace(self, name=name, first_row=self.first_row + first_row)

    def __call__(self, data: bytes | memoryview, start: int) -> NDArray[np.float32]:
        """Decode and scale whole rows.

        Args:
            data: the codes of consecutive rows.
            start: number of the first of them.

        Returns:
            float32, shape (n, K).

        Raises:
            NonFiniteError: a code or a scale is NaN or infinite, or a product is beyond float32.
        """
        matrix_rows, columns = self.shape
        codes = np.frombuffer(data, np.uint8).reshape(-1, columns)
        values = np.empty(codes.shape, np.float32)
        step = max(1, _BLOCK_ELEMENTS // columns)
        per_matrix = -(-matrix_rows // self.block[0])
        rows = self.first_row + start + np.arange(len(codes))
        places = rows // matrix_rows * per_matrix + rows % matrix_rows // self.block[0]
        scales = self.fetch_scales(int(places[0]), int(places[-1]) + 1) if len(codes) else np.empty((0, 1), np.float32)
        places -= places[:1]
        whole = columns // self.block[1]  # blocks of a row that are not cut
        edge = whole * self.block[1]
        with np.errstate(over="ignore", invalid="ignore"):
            for first in range(0, len(codes), step):
                part = slice(first, first + step)
                decoded, scale = values[part], scales[places[part]]
                np.take(fp8_values(self.dtype), codes[part], out=decoded, mode="clip")  # a code is below 256 anyway
                tiles = decoded[:, :edge].reshape(len(decoded), whole, self.block[1])  # a view
                tiles *= scale[:, :whole, None]
                decoded[:, edge:] *= scale[:, whole:]
                if not np.isfinite(decoded).all():
                    row, column = (int(i) for i in np.argwhere(~np.isfinite(decoded))[0])
                    by = scale[row, column // self.block[1]]
                    raise self._not_finite(int(codes[first + row, column]), by, start + first + row, column)
        return values

    def _not_finite(self, code: int, scale: np.float32, row: int, column: int) -> NonFiniteError:
        place = f"row {row}, column {column}"
        value = fp8_values(self.dtype)[code]
        if not np.isfinite(value):
            return NonFiniteError(
                f"tensor '{self.name}' holds the {self.dtype} code 0x{code:02X} ({value}) at {place}; "
                "weights must be finite"
            )
        if not np.isfinite(scale):
            return NonFiniteError(f"tensor '{self.scale_name}' holds {scale} as the scale of '{self.name}' at {place}")
        return NonFiniteError(
            f"tensor '{self.name}' holds {value} at {place}, and times its scale {scale:.6g} of '{self.scale_name}' "
            "that is beyond float32"
        )
