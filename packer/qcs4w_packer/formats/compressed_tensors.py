"""compressed-tensors, format pack-quantized: X.weight_packed, X.weight_scale, X.weight_shape.

Eight codes to an int32, the first in the lowest bits, code + 8; what fills a row's last word up is 0, not 8.
Source: vllm-project/compressed-tensors e341321, src/compressed_tensors/compressors/pack_quantized.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ContainerError, LossyError
from ..metadata import PackedEntry
from ..nibbles import CODE_MIN, OFFSET
from ..packed import PackedLinear
from ..safetensors_file import Planned
from .checkpoint import SCALE_DTYPES, Checkpoint
from .low_first import from_low_first, to_low_first, word_nibbles
from .one_scale import one_scale_per_row, refuse_zero_points

PACKED, SCALE, SHAPE, ZERO, ORDER = "_packed", "_scale", "_shape", "_zero_point", "_g_idx"
_WORD = 8  # codes to an int32


class CompressedTensors(Checkpoint):
    """A pack-quantized checkpoint, read where it is symmetric with one scale a row."""

    format = "compressed-tensors"
    marker = f"weight{PACKED}"
    parts = (f"weight{PACKED}", f"weight{SCALE}", f"weight{SHAPE}", f"weight{ZERO}", f"weight{ORDER}")

    def name_of(self, stem: str) -> str:
        """Return the weight's name."""
        return f"{stem}weight"

    def shape_of(self, name: str, stem: str) -> tuple[int, int]:
        """Return (N, K) from weight_shape."""
        packed = self.slot(name + PACKED, ("I32",), 2)
        self.slot(name + SHAPE, ("I64", "I32"), 1)
        stated = self.array(name + SHAPE).tolist()
        if len(stated) != 2 or min(stated) < 1 or packed.shape != (stated[0], -(-stated[1] // _WORD)):
            raise ContainerError(
                f"{self.path}: {name + PACKED} is {packed.dtype} {list(packed.shape)}, {name + SHAPE} says {stated}, "
                "expected [N, ceil(K / 8)] for [N, K] of 4 bits",
                hint="other numbers of bits are not read",
            )
        rows, columns = stated
        scale = self._file.slots.get(name + SCALE)
        if scale is None or scale.dtype not in SCALE_DTYPES:
            raise ContainerError(
                f"{self.path}: {name + SCALE} is {'missing' if scale is None else scale.dtype}, "
                f"expected {' or '.join(SCALE_DTYPES)}"
            )
        if scale.shape not in ((), (1,)) and (
            len(scale.shape) != 2 or scale.shape[0] not in (1, rows) or not scale.shape[1]
        ):
            raise self.refuse(name + SCALE, scale, f"[{rows}, 1] or [{rows}, groups]")
        if self.has(name + ZERO):
            self._check_zero_points(name + ZERO, scale.shape)
        return rows, columns

    def arrays(self, entry: PackedEntry) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Read packed bytes in qcs4w's layout and scales.

        Raises:
            LossyError: a row has several scales, columns are in another order, or zero points are not 0.
        """
        where, name = self.where(entry), entry.name
        if self.has(name + ORDER):
            raise LossyError(f"{where}: its columns are grouped by activation order (weight_g_idx)")
        scales = self.floats(name + SCALE)
        # strategies: tensor [1], channel [N, 1], group [N, G]; all to (G, N)
        by_group = np.broadcast_to(scales, (entry.out_features, scales.shape[1] if scales.ndim == 2 else 1)).T
        shared = one_scale_per_row(np.ascontiguousarray(by_group), where)
        self._refuse_asymmetry(entry, where)
        words = self.array(name + PACKED)
        return from_low_first(words.view(np.uint8).reshape(len(words), -1), entry.in_features), shared

    def _check_zero_points(self, name: str, scale_shape: tuple[int, ...]) -> None:
        """Refuse zero points that are not one for each scale: rows without one would pass as symmetric."""
        slot = self._file.slots[name]
        expected = {"I8": scale_shape}
        if len(scale_shape) == 2:
            expected["I32"] = (-(-scale_shape[0] // _WORD), scale_shape[1])
        if expected.get(slot.dtype) != slot.shape:
            wanted = " or ".join(f"{dtype} {list(shape)}" for dtype, shape in expected.items())
            raise self.refuse(name, slot, wanted)

    def _refuse_asymmetry(self, entry: PackedEntry, where: str) -> None:
        name = entry.name + ZERO
        if not self.has(name):
            return
        stored = self.array(name)
        if stored.dtype == np.int8:  # the zero point itself, in the shape of the scales
            nibbles = np.atleast_2d((stored + np.int8(OFFSET)).view(np.uint8)).T
        else:  # zero point + 8, eight rows to a word, [ceil(N / 8), G]
            nibbles = word_nibbles(np.ascontiguousarray(stored.T))[:, : entry.out_features]
        refuse_zero_points(nibbles, OFFSET, where)


def plan(entry: PackedEntry, scale_dtype: str) -> list[Planned]:
    """Return the tensors that a linear becomes."""
    name = weight_name(entry.name)
    rows, columns = entry.out_features, entry.in_features
    return [
        Planned(name + PACKED, "I32", (rows, -(-columns // _WORD))),
        Planned(name + SCALE, scale_dtype, (rows, 1)),
        Planned(name + SHAPE, "I64", (2,)),
    ]


def encode(entry: PackedEntry, weight: PackedLinear, scales: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Return the arrays that `plan` names; `scales` are in the dtype that they will have."""
    name = weight_name(entry.name)
    stored = to_low_first(weight.packed, weight.in_features, multiple=_WORD, pad_code=CODE_MIN)  # the nibble 0
    return {
        name + PACKED: stored,
        name + SCALE: scales,
        name + SHAPE: np.array([weight.out_features, weight.in_features], "<i8"),
    }


def decode(entry: PackedEntry, stored: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
    """Return qcs4w's bytes again, from what `encode` returned."""
    return from_low_first(stored[weight_name(entry.name) + PACKED], entry.in_features)


def weight_name(name: str) -> str:
    """Return the name of a weight as a module's parameter, which ends in `weight`."""
    return name if name.endswith("weight") else f"{name}.weight"


def is_config_of(document: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    """Tell whether a config.json says of the model what is given, and of its quantization just what `config` does."""
    said = document.get("quantization_config")
    ignored = said.get("ignore") if isinstance(said, dict) else None
    is_ours = isinstance(ignored, list) and said == config(ignored)
    return is_ours and {k: v for k, v in document.items() if k != "quantization_config"} == {
        k: v for k, v in model.items() if k != "quantization_config"
    }


def config(left_as_floats: Iterable[str]) -> dict[str, Any]:
    """Return config.json's part on quantization.

    Args:
        left_as_floats: names of the linear modules that are not packed.
    """
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": list(left_as_floats),
    }
