"""GPTQ checkpoints: X.qweight, X.qzeros, X.scales, X.g_idx; read where all groups of a row share one scale.

qweight is int32 [ceil(K/8), N]: eight neighbours of a column, the first in the lowest bits, code + zero point.
qzeros is int32 [G, ceil(N/8)], packed along N. Version 1 stores the zero point minus one, version 2 itself.
Source: AutoGPTQ/AutoGPTQ c80855e, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py;
ModelCloud/GPTQModel 50aa90a, gptqmodel/utils/model.py, convert_gptq_v1_to_v2_format_module.
"""

import os

import numpy as np
from numpy.typing import NDArray

from ..errors import ContainerError, LossyError
from ..metadata import PackedEntry
from ..nibbles import OFFSET, pack_codes
from ..readings import NAMED
from .checkpoint import SCALE_DTYPES, Checkpoint, quantization_config
from .low_first import word_nibbles
from .one_scale import one_scale_per_row, refuse_zero_points

QWEIGHT, QZEROS, SCALES, G_IDX = "qweight", "qzeros", "scales", "g_idx"
_WORD = 8  # codes to an int32
_SYMMETRIC = {1: OFFSET - 1, 2: OFFSET}  # how each version stores the zero point 8


class GptqFile(Checkpoint):
    """A GPTQ checkpoint; its version is what the config beside it says, else what the zero points show."""

    format = "gptq"
    marker = QWEIGHT
    parts = (QWEIGHT, QZEROS, SCALES, G_IDX)

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(path)
        try:
            self.version = self._stated_version()
        except BaseException:
            self.close()
            raise

    def name_of(self, stem: str) -> str:
        """Return the weight's name."""
        return f"{stem}weight"

    def shape_of(self, name: str, stem: str) -> tuple[int, int]:
        """Return (N, K); K is the length of g_idx, or 8 a word where there is none."""
        qweight, scales = self.slot(stem + QWEIGHT, ("I32",), 2), self.slot(stem + SCALES, SCALE_DTYPES, 2)
        qzeros = self.slot(stem + QZEROS, ("I32",), 2)
        words, rows = qweight.shape
        columns = words * _WORD
        if self.has(stem + G_IDX):
            (columns,) = self.slot(stem + G_IDX, ("I32",), 1).shape
        if -(-columns // _WORD) != words:
            raise self.refuse(stem + QWEIGHT, qweight, f"[{-(-columns // _WORD)}, N] for K {columns} in 4 bits")
        groups = scales.shape[0]
        if groups < 1 or scales.shape[1] != rows:
            raise self.refuse(stem + SCALES, scales, f"[groups, {rows}]")
        if qzeros.shape != (groups, -(-rows // _WORD)):
            raise self.refuse(stem + QZEROS, qzeros, f"[{groups}, {-(-rows // _WORD)}] for 4 bits")
        return rows, columns

    def arrays(self, entry: PackedEntry) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Read packed bytes in qcs4w's layout and scales.

        Raises:
            LossyError: a row has several scales, a zero point is not 8, or columns are in activation order.
        """
        stem, where = self.stem(entry), self.where(entry)
        if self.has(stem + G_IDX) and (np.diff(self.array(stem + G_IDX)) < 0).any():
            raise LossyError(
                f"{where}: its columns are grouped by activation order (g_idx is not ascending)",
                hint="quantize it with desc_act=False",
            )
        shared = one_scale_per_row(self.floats(stem + SCALES), where)
        self._refuse_asymmetry(word_nibbles(self.array(stem + QZEROS))[:, : entry.out_features], where)
        words = self.array(stem + QWEIGHT).view(np.uint8)
        return pack_codes(NAMED["gptq"].matrix(words, entry.out_features, entry.in_features)), shared

    def _refuse_asymmetry(self, stored: NDArray[np.uint8], where: str) -> None:
        version, why = self.version, "its config says so"
        if version is None:
            version, why = (2 if stored[0, 0] == _SYMMETRIC[2] else 1), f"zero points are stored as {stored[0, 0]}"
        refuse_zero_points(stored, _SYMMETRIC[version], where, add=2 - version)
        note = f"read as GPTQ version {version}: {why}"
        if note not in self.notes:
            self.notes.append(note)

    def _stated_version(self) -> int | None:
        config = quantization_config(self.path)
        if not config:
            return None
        bits, method = config.get("bits"), config.get("quant_method", "gptq")
        if bits not in (None, 4) or not str(method).startswith("gptq"):
            raise ContainerError(
                f"{self.path}: its config says quant_method {method!r:.40}, {bits!r:.40} bits, expected gptq with 4"
            )
        stated = config.get("checkpoint_format", config.get("format"))
        if stated is None:
            return None
        if stated not in ("gptq", "gptq_v2"):
            raise ContainerError(
                f"{self.path}: its config says checkpoint_format {stated!r:.40}, expected 'gptq' or 'gptq_v2'",
                hint="save it again in one of these",
            )
        return 2 if stated == "gptq_v2" else 1
