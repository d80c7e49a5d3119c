"""Float32 -> the float dtypes of weight files, rounded half to even; what `weights.widen` reads back."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import LossyError

#: Every dtype that float32 values can be written in, with the NumPy type that holds its bits.
STORAGE: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"),
}  # fmt: skip

#: Those that hold every float32 value.
EXACT_DTYPES = ("F64", "F32")


@dataclass(frozen=True)
class Rounding:
    """What rounding float32 to the dtype that is written has cost.

    Attributes:
        largest: the largest relative error that a code can have with one of the tensor's scales.
        vanished: values that became 0 and were not.
    """

    largest: float = 0.0
    vanished: int = 0


def narrow(values: NDArray[np.float32], dtype: str, *, name: str, first_row: int = 0) -> NDArray[Any]:
    """Round float32 values to a dtype of weight files.

    Args:
        values: float32, shape (n, K).
        dtype: a key of STORAGE.
        name: of the tensor, for messages.
        first_row: number of the first row, for messages.

    Returns:
        An array of the same shape whose bytes are the stored values (bfloat16 as the uint16 of its bits).

    Raises:
        LossyError: a value is infinite, or beyond the dtype's range.
    """
    stored, kept = _rounded(values, dtype)
    if not np.isfinite(kept).all():
        row, column = (int(i) for i in np.argwhere(~np.isfinite(kept))[0])
        raise LossyError(
            f"tensor '{name}': {values[row, column]:g} at row {first_row + row}, column {column} "
            f"is beyond {dtype.lower()}",
            hint="choose another --dtype: bf16 and f32 reach up to 3.4e38"
            if dtype == "F16"
            else "its scale is beyond what any float weight has: look with qcs4w inspect",
        )
    return stored


def rounding_error(values: NDArray[np.float32], dtype: str) -> float:
    """Return the largest |stored - value| / |value| of values that are not 0 and within the dtype's range.

    It is 1 only where a value becomes 0: half a unit of the smallest subnormal is rounded down, all above it up.
    """
    if dtype in EXACT_DTYPES:
        return 0.0
    kept = _rounded(values, dtype)[1].astype(np.float32, copy=False)
    with np.errstate(invalid="ignore"):  # of 0 / 0, and of what is beyond the range
        relative = np.abs(kept - values) / np.abs(values)
    relative[~np.isfinite(relative)] = 0
    return float(relative.max(initial=0.0))


def _rounded(values: NDArray[np.float32], dtype: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return what is stored, and the values that a reader makes of it."""
    if dtype != "BF16":
        with np.errstate(over="ignore"):
            stored = values.astype(STORAGE[dtype], copy=False)
        return stored, stored
    bits = values.astype("<f4", copy=False).view("<u4")
    # Half to even: up by just under half a unit, and by a whole half where the last bit that stays is odd. NaN cannot
    # come here; an infinity stays one.
    kept = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) & np.uint32(0xFFFF0000)
    return (kept >> 16).astype("<u2"), kept.view(np.float32)
