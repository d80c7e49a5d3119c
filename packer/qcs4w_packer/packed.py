"""PackedLinear: one quantized linear weight, checked once when it is made."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import ContainerError
from .nibbles import packed_width, unpack_codes
from .quantize import dequantize


@dataclass(frozen=True, eq=False)
class PackedLinear:
    """A linear weight as qcs4w stores it.

    Attributes:
        packed: uint8, shape (N, ceil(K / 2)), C order.
        scales: float32, shape (N,), finite.
        in_features: K; padding hides it when it is odd.

    Raises:
        ContainerError: shapes, dtypes or scales do not fit together.
    """

    packed: NDArray[np.uint8]
    scales: NDArray[np.float32]
    in_features: int

    def __post_init__(self) -> None:
        if self.in_features < 1:
            raise ContainerError(f"in_features is {self.in_features}, expected at least 1")
        width = packed_width(self.in_features)
        if self.packed.dtype != np.uint8 or self.packed.ndim != 2 or self.packed.shape[1] != width:
            raise ContainerError(
                f"packed has dtype {self.packed.dtype} and shape {list(self.packed.shape)}, "
                f"expected uint8 [N, {width}] for in_features {self.in_features}"
            )
        rows = self.packed.shape[0]
        if rows < 1:
            raise ContainerError("packed has no rows, expected at least 1")
        if self.scales.dtype != np.float32 or self.scales.shape != (rows,):
            raise ContainerError(
                f"scales have dtype {self.scales.dtype} and shape {list(self.scales.shape)}, expected float32 [{rows}]"
            )
        if not np.isfinite(self.scales).all():
            row = int(np.flatnonzero(~np.isfinite(self.scales))[0])
            raise ContainerError(f"scale of row {row} is {self.scales[row]}, expected a finite number")

    @property
    def out_features(self) -> int:
        """N, the rows of the weight."""
        return int(self.packed.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of the packed codes and the scales together."""
        return self.packed.nbytes + self.scales.nbytes

    def codes(self) -> NDArray[np.int8]:
        """Return the signed codes: int8, shape (N, K), each in [-8, 7]."""
        return unpack_codes(self.packed, self.in_features)

    def dequantize(self) -> NDArray[np.float32]:
        """Return code · scale: float32, shape (N, K)."""
        return dequantize(self.codes(), self.scales)
