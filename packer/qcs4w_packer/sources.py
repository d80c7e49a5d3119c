"""Opening a weight file of any format, by its suffix."""

import os
from pathlib import Path

from .checkpoint_index import is_index
from .errors import SourceError
from .fp8_scales import with_scales
from .safetensors_file import SafetensorsFile, file_kind
from .weights import Source, slot_tensor

#: What each suffix that can be opened stands for.
SUFFIXES = {
    ".safetensors": "safetensors",
    ".npy": "npy",
    ".npz": "npz",
    ".pt": "pt",
    ".pth": "pt",
    ".bin": "pt",
    ".gguf": "gguf",
    ".onnx": "onnx",
}


def open_source(path: str | os.PathLike[str]) -> Source:
    """Open a weight file by its suffix, or a folder of shards; headers are read, data is not.

    Args:
        path: a weight file, a checkpoint folder, or the index of one with several.

    An fp8 weight with its scales beside it is read as floats.

    Raises:
        SourceError: no such file, an unknown suffix, or a file or folder that is not sound.
        UnsafePickleError: a .pt file that holds more than tensors.
    """
    return with_scales(_open(Path(path)))


def is_checkpoint(path: Path) -> bool:
    """Tell whether a source is a folder of weight files, or the index of one.

    Raises:
        SourceError: nothing can have this name.
    """
    return file_kind(path) == "folder" or is_index(path.name)


def _open(path: Path) -> Source:
    kind = SUFFIXES.get(path.suffix.lower())
    found = file_kind(path)
    if found == "folder":
        from .checkpoint_folder import open_folder

        return open_folder(path)
    if kind is None and found is None:
        raise SourceError(f"{path}: does not exist, expected a file or folder")
    if kind is None and is_index(path.name):
        from .checkpoint_folder import open_folder

        return open_folder(path.parent, path.name)
    if kind is None:
        raise SourceError(
            f"{path}: suffix {path.suffix!r} is not known, expected one of {', '.join(SUFFIXES)}",
            hint="rename the file; of raw packed bytes say --shape N,K",
        )
    if kind == "safetensors":
        return open_safetensors(path)
    if kind == "pt":
        from .torch_file import open_torch

        return open_torch(path)
    if kind == "gguf":
        from .gguf_file import open_gguf

        return open_gguf(path)
    if kind == "onnx":
        from .onnx_file import open_onnx

        return open_onnx(path)
    from .npy_file import open_npy, open_npz

    return open_npy(path) if kind == "npy" else open_npz(path)


def open_safetensors(path: Path) -> Source:
    """Open a .safetensors file as a source."""
    file = SafetensorsFile(path)
    tensors = {name: slot_tensor(file, name, slot) for name, slot in file.slots.items()}
    return Source(path, tensors, metadata=file.metadata, closer=file.close)
