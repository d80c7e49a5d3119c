"""Telling whose layout a file has, by its name and the names of the tensors in it."""

from collections.abc import Callable
from pathlib import Path

from ..errors import ContainerError
from ..metadata import PACKED
from ..packed_file import PackedFile
from ..safetensors_file import SafetensorsFile, file_kind
from .awq import AwqFile
from .compressed_tensors import CompressedTensors
from .gptq import QWEIGHT, SCALES, GptqFile
from .matmul_nbits import MatMulNBitsFile, has_nodes
from .pairs import INDEX, PairsFolder
from .q4gsw import Q4gswFile

_PACK_FIRST = "float weights are packed by qcs4w pack"


def foreign_opener(path: Path) -> Callable[[Path], PackedFile] | None:
    """Return what opens a file of another tool, or None where it is none that is known.

    Args:
        path: a file, or the folder of `convert --to raw` or of a checkpoint.

    Raises:
        SourceError: a safetensors file or an ONNX model that is not sound.
        Qcs4wError: an ONNX model, and the onnx package is not installed.
        ContainerError: several tools' tensors in one file.
    """
    kind = file_kind(path)
    if path.name == INDEX or (kind == "folder" and file_kind(path / INDEX) == "file"):
        return PairsFolder
    if path.suffix.lower() == ".onnx":
        return MatMulNBitsFile if has_nodes(path) else None
    if path.suffix.lower() != ".safetensors" or kind != "file":
        return None
    with SafetensorsFile(path) as file:
        slots = file.slots
    if any(name.endswith(PACKED) for name in slots):
        return None  # a container of ours, whatever it carries along
    found: set[type[Q4gswFile | CompressedTensors | AwqFile | GptqFile]] = set()
    for name, slot in slots.items():
        if name.endswith(QWEIGHT) and name.removesuffix(QWEIGHT) + SCALES in slots:
            scales = slots[name.removesuffix(QWEIGHT) + SCALES]
            # GPTQ [K/8, N] has as many columns as there are scales, AWQ [K, N/8] an eighth
            is_gptq = slot.shape[-1:] == scales.shape[-1:]
            found.add(GptqFile if is_gptq else AwqFile)
        elif name.endswith(CompressedTensors.marker):
            found.add(CompressedTensors)
        elif name.endswith(Q4gswFile.marker):
            found.add(Q4gswFile)
    if len(found) > 1:
        names = ", ".join(sorted(kind.format for kind in found))
        raise ContainerError(f"{path}: holds packed tensors of several kinds: {names}")
    return next(iter(found), None)


def checkpoint_file(folder: Path) -> Path:
    """Return the one safetensors file of a folder that holds nothing that qcs4w has packed.

    Raises:
        ContainerError: there is none, or there are several.
    """
    files = safetensors_files(folder)
    if not files:
        raise ContainerError(f"{folder}: holds no packed linears, and no .safetensors file", hint=_PACK_FIRST)
    if len(files) > 1:
        raise ContainerError(
            f"{folder}: none of its {len(files)} .safetensors files is one that qcs4w pack has made",
            hint=f"{_PACK_FIRST}; of another tool's 4-bit checkpoint name one file, its config is read",
        )
    return files[0]


def safetensors_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder, by name."""
    return sorted(folder.glob("*.safetensors"))
