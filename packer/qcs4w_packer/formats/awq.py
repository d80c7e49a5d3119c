"""AWQ checkpoints in the GEMM layout: X.qweight, X.qzeros, X.scales; read where all groups of a row share one scale.

qweight is int32 [K, N/8]: eight neighbouring rows of the weight, nibble i of a word holding number
0, 2, 4, 6, 1, 3, 5, 7 of them; code + zero point. qzeros is int32 [G, N/8] in the same order.
Source: casper-hansen/AutoAWQ d9dc8e5, awq/modules/linear/gemm.py.
"""

import os

import numpy as np
from numpy.typing import NDArray

from ..errors import ContainerError
from ..metadata import PackedEntry
from ..nibbles import OFFSET, pack_codes
from ..readings import NAMED
from .checkpoint import SCALE_DTYPES, Checkpoint, quantization_config
from .gptq import QWEIGHT, QZEROS, SCALES
from .one_scale import one_scale_per_row, refuse_zero_points

_WORD = 8  # codes to an int32


class AwqFile(Checkpoint):
    """An AWQ checkpoint."""

    format = "awq"
    marker = QWEIGHT
    parts = (QWEIGHT, QZEROS, SCALES)

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(path)
        try:
            self._check_config()
        except BaseException:
            self.close()
            raise

    def name_of(self, stem: str) -> str:
        """Return the weight's name."""
        return f"{stem}weight"

    def shape_of(self, name: str, stem: str) -> tuple[int, int]:
        """Return (N, K)."""
        qweight, scales = self.slot(stem + QWEIGHT, ("I32",), 2), self.slot(stem + SCALES, SCALE_DTYPES, 2)
        qzeros = self.slot(stem + QZEROS, ("I32",), 2)
        columns, words = qweight.shape
        groups, rows = scales.shape
        if groups < 1 or rows != words * _WORD:
            raise self.refuse(stem + SCALES, scales, f"[groups, {words * _WORD}]")
        if qzeros.shape != (groups, words):
            raise self.refuse(stem + QZEROS, qzeros, f"[{groups}, {words}]")
        return rows, columns

    def arrays(self, entry: PackedEntry) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Read packed bytes in qcs4w's layout and scales.

        Raises:
            LossyError: a row has several scales, or a zero point is not 8.
        """
        stem, where = self.stem(entry), self.where(entry)
        shared = one_scale_per_row(self.floats(stem + SCALES), where)
        zeros, words = self.array(stem + QZEROS), self.array(stem + QWEIGHT)
        read = NAMED["awq"].matrix  # qzeros are packed as the weight is, with groups for columns
        refuse_zero_points(read(zeros.view(np.uint8), entry.out_features, len(zeros)).T + OFFSET, OFFSET, where)
        return pack_codes(read(words.view(np.uint8), entry.out_features, entry.in_features)), shared

    def _check_config(self) -> None:
        config = quantization_config(self.path)
        bits, version = config.get("bits", config.get("w_bit", 4)), config.get("version", "gemm")
        if bits != 4 or str(version).lower() != "gemm":
            raise ContainerError(
                f"{self.path}: its config says version {version!r:.40}, {bits!r:.40} bits, expected gemm with 4"
            )
