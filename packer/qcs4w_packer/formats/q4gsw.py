"""q4gsw, the layout of ExecuTorch's linear_q4gsw, with one group a row. Kept in a safetensors file of our naming.

T.q4gsw_packed U8 [N, ceil(K/8)·4]: the even column low, code + 8, K filled up to 8 with the code 0.
T.q4gsw_scale F32 [G, N filled up to 4 with 0]: groups first. T.q4gsw_shape I64 [2] = N, K.
These are byte for byte the two constants that ExecuTorch's Vulkan lowering makes.
Source: pytorch/executorch d8b23cb, backends/vulkan/patterns/weight_packing_utils.py, pack_4bit_weight_tensor;
767f8ad, backends/vulkan/patterns/quantized_linear.py, make_linear_q4gsw_op.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ContainerError
from ..metadata import PackedEntry
from ..packed import PackedLinear
from ..safetensors_file import Planned
from .checkpoint import Checkpoint
from .low_first import from_low_first, to_low_first
from .one_scale import one_scale_per_row

PACKED, SCALE, SHAPE = ".q4gsw_packed", ".q4gsw_scale", ".q4gsw_shape"
_WORD, _ALIGN = 8, 4  # codes to which K is filled up, scales to which N is


class Q4gswFile(Checkpoint):
    """A file of q4gsw weights."""

    format = "q4gsw"
    marker = PACKED
    parts = (PACKED, SCALE, SHAPE)

    def name_of(self, stem: str) -> str:
        """Return the weight's name."""
        return stem

    def shape_of(self, name: str, stem: str) -> tuple[int, int]:
        """Return (N, K) from the shape tensor."""
        packed, scale = self.slot(stem + PACKED, ("U8",), 2), self.slot(stem + SCALE, ("F32",), 2)
        shape = self.slot(stem + SHAPE, ("I64",), 1)
        if shape.shape != (2,):
            raise self.refuse(stem + SHAPE, shape, "[2]")
        rows, columns = (int(size) for size in self.array(stem + SHAPE))
        if rows < 1 or columns < 1:
            raise ContainerError(f"{self.path}: {stem + SHAPE} says {rows} × {columns}, expected at least 1 × 1")
        if packed.shape != (rows, _packed_width(columns)):
            raise self.refuse(stem + PACKED, packed, f"[{rows}, {_packed_width(columns)}]")
        if scale.shape[0] < 1 or scale.shape[1] not in (rows, _aligned(rows)):
            raise self.refuse(stem + SCALE, scale, f"[groups, {_aligned(rows)}]")
        return rows, columns

    def arrays(self, entry: PackedEntry) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Read packed bytes in qcs4w's layout and scales.

        Raises:
            LossyError: a row has several scales.
        """
        stem = self.stem(entry)
        scales = np.ascontiguousarray(self.floats(stem + SCALE)[:, : entry.out_features])
        shared = one_scale_per_row(scales, self.where(entry))
        return from_low_first(self.array(stem + PACKED), entry.in_features), shared


def plan(entry: PackedEntry) -> list[Planned]:
    """Return the tensors that a linear becomes."""
    return [
        Planned(entry.name + PACKED, "U8", (entry.out_features, _packed_width(entry.in_features))),
        Planned(entry.name + SCALE, "F32", (1, _aligned(entry.out_features))),
        Planned(entry.name + SHAPE, "I64", (2,)),
    ]


def encode(entry: PackedEntry, weight: PackedLinear) -> dict[str, NDArray[Any]]:
    """Return the arrays that `plan` names."""
    rows = weight.out_features
    return {
        entry.name + PACKED: to_low_first(weight.packed, weight.in_features, multiple=_WORD),
        entry.name + SCALE: np.pad(weight.scales, (0, _aligned(rows) - rows)).astype("<f4")[None],
        entry.name + SHAPE: np.array([rows, weight.in_features], "<i8"),
    }


def decode(entry: PackedEntry, stored: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
    """Return qcs4w's bytes again, from what `encode` returned."""
    return from_low_first(stored[entry.name + PACKED], entry.in_features)


def _packed_width(in_features: int) -> int:
    return -(-in_features // _WORD) * _WORD // 2


def _aligned(out_features: int) -> int:
    return -(-out_features // _ALIGN) * _ALIGN
