"""Pairs of plain arrays in a folder: packed bytes and scales of each weight, and an index.json that says what is what.

For programs without a safetensors reader: `raw` writes .bin files of bytes and little-endian float32, `npy` writes
NumPy's .npy. Packed bytes are qcs4w's own, uint8 [N, ceil(K/2)]; scales and biases are float32 [N].
"""

import hashlib
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._version import __version__
from ..arrays import npy_bytes
from ..errors import ContainerError
from ..json_file import read_json
from ..metadata import PackedEntry
from ..nibbles import EVEN_HIGH, OFFSET, packed_width
from ..npy_file import open_npy
from ..packed_file import PackedFile
from ..safetensors_file import file_kind, open_for_reading, read_at

INDEX = "qcs4w.json"
VERSION = 1
KINDS = {"raw": ".bin", "npy": ".npy"}
_ROLES = {"packed": np.uint8, "scales": np.float32, "bias": np.float32}


class PairsFolder(PackedFile):
    """A folder that `convert --to raw` or `--to npy` made. Use it as a context manager.

    Args:
        path: the folder, or the index in it.

    Raises:
        SourceError: the index cannot be read.
        ContainerError: the index is not sound, or of another version or nibble order.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._folder = self.path if file_kind(self.path) == "folder" else self.path.parent
        self.carried, self.problems = [], []
        document = read_json(self._folder / INDEX)
        for key, expected in (("version", VERSION), ("nibble_order", EVEN_HIGH.name), ("offset", OFFSET)):
            if document.get(key) != expected:
                raise self._fault(f"states {key} {document.get(key)!r:.100}, this qcs4w reads {expected!r}")
        kind, tensors = document.get("kind"), document.get("tensors")
        if not isinstance(kind, str) or kind not in KINDS or not isinstance(tensors, list) or not tensors:
            raise self._fault("has no 'tensors', or a 'kind' that is neither raw nor npy")
        self.format = kind
        self._files: dict[str, dict[str, str]] = {}
        self.entries = {}
        for said in tensors:
            entry, files = self._read_entry(said)
            if entry.name in self.entries:
                raise self._fault(f"has two tensors '{entry.name}'")
            self.entries[entry.name], self._files[entry.name] = entry, files

    def close(self) -> None:
        """Do nothing: files are open while they are read only."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The folder, its index, and the files that this names."""
        named = (self._folder / name for files in self._files.values() for name in files.values())
        return (self._folder, self._folder / INDEX, *named)

    def arrays(self, entry: PackedEntry) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Read packed bytes and scales as they are, whatever their digests say."""
        rows, width = entry.out_features, packed_width(entry.in_features)
        return self._read(entry, "packed", (rows, width)), self._read(entry, "scales", (rows,))

    def place(self, entry: PackedEntry) -> tuple[Path, int] | None:
        """Return the file of the packed bytes, which begin it in the raw kind only."""
        return (self._folder / self._files[entry.name]["packed"], 0) if self.format == "raw" else None

    def bias(self, entry: PackedEntry) -> NDArray[np.float32] | None:
        """Return the bias, float32 (N,), or None."""
        return self._read(entry, "bias", (entry.out_features,)) if "bias" in self._files[entry.name] else None

    def _fault(self, message: str) -> ContainerError:
        return ContainerError(f"{self._folder / INDEX}: {message}")

    def _read_entry(self, said: Any) -> tuple[PackedEntry, dict[str, str]]:
        if not isinstance(said, dict) or not isinstance(said.get("tensor"), str):
            raise self._fault("has a tensor without a name")
        name = said["tensor"]
        rows, columns = (_size(said.get(key)) for key in ("out_features", "in_features"))
        if not rows or not columns:
            raise self._fault(f"tensor '{name}' has no shape, expected out_features and in_features of at least 1")
        files = {role: said[role] for role in _ROLES if said.get(role) is not None}
        for role, file in files.items():
            if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
                raise self._fault(f"tensor '{name}': {role} is {file!r:.100}, expected a file of this folder")
        packed_sha256, scale_sha256 = said.get("packed_sha256"), said.get("scale_sha256")
        if not {"packed", "scales"} <= files.keys():
            raise self._fault(f"tensor '{name}' does not name its files")
        if not isinstance(packed_sha256, str | None) or not isinstance(scale_sha256, str | None):
            raise self._fault(f"tensor '{name}' has digests that are no text")
        entry = PackedEntry(
            name,
            rows,
            columns,
            source_dtype="unknown",
            method="unknown",
            packed_sha256=packed_sha256,
            scale_sha256=scale_sha256,
        )
        return entry, files

    def _read(self, entry: PackedEntry, role: str, shape: tuple[int, ...]) -> NDArray[Any]:
        path, dtype = self._folder / self._files[entry.name][role], np.dtype(_ROLES[role])
        if self.format == "npy":
            with open_npy(path) as source:
                (tensor,) = source.tensors.values()
                if (tensor.dtype, tensor.shape) != ({"u": "U8", "f": "F32"}[dtype.kind], shape):
                    raise ContainerError(
                        f"{path}: is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)}"
                    )
                data = tensor.fetch(0, tensor.rows)
        else:
            fd = open_for_reading(path)
            try:
                expected, found = prod(shape) * dtype.itemsize, os.fstat(fd).st_size
                if expected != found:
                    raise ContainerError(f"{path}: has {found:,} bytes, expected {expected:,} of {dtype} {list(shape)}")
                data = read_at(fd, path, 0, expected)
            finally:
                os.close(fd)
        return np.frombuffer(data, dtype.newbyteorder("<")).reshape(shape)


def _size(value: Any) -> int:
    """Return a JSON value as a size of at least 1, or 0 if it is none."""
    return value if type(value) is int and 1 <= value < 1 << 40 else 0


def file_names(number: int, kind: str, *, with_bias: bool) -> dict[str, str]:
    """Return the names of a weight's files; names of tensors stand in the index only, since they may hold a slash."""
    roles = [role for role in _ROLES if with_bias or role != "bias"]
    return {role: f"{number:04}.{role}{KINDS[kind]}" for role in roles}


def file_bytes(array: NDArray[Any], kind: str) -> bytes:
    """Return an array as the bytes of its file."""
    return npy_bytes(array) if kind == "npy" else array.tobytes()


def index_entry(entry: PackedEntry, files: Mapping[str, str], arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Return what the index says of one weight."""
    digests = {
        role: hashlib.sha256(np.ascontiguousarray(arrays[role]).data).hexdigest() for role in ("packed", "scales")
    }
    return {
        "tensor": entry.name,
        "out_features": entry.out_features,
        "in_features": entry.in_features,
        **files,
        "packed_sha256": digests["packed"],
        "scale_sha256": digests["scales"],
    }


def index_document(kind: str, tensors: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of the index."""
    return {
        "version": VERSION,
        "kind": kind,
        "nibble_order": EVEN_HIGH.name,
        "offset": OFFSET,
        "packed_dtype": "uint8 [out_features, ceil(in_features / 2)]",
        "scale_dtype": "little-endian float32 [out_features]",
        "tool": f"qcs4w {__version__}",
        "tensors": tensors,
    }
