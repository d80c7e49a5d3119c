"""A safetensors file of another tool, with the JSON that lies beside it."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ContainerError, LossyError
from ..json_file import read_json
from ..metadata import PackedEntry
from ..packed_file import PackedFile
from ..safetensors_file import SafetensorsFile, Slot, file_kind
from ..weights import FLOAT_DTYPES, SourceTensor, slot_tensor, widen

QUANTIZE_CONFIG, CONFIG = "quantize_config.json", "config.json"

_NUMPY = {"I32": "<i4", "I64": "<i8", "U8": "|u1", "I8": "|i1"}


class Checkpoint(PackedFile):
    """A safetensors file of packed linears in a foreign layout, opened for reading. Use it as a context manager.

    Args:
        path: where it lies.
        marker: ends the name of one tensor of each packed linear.
        parts: end the names of all that belongs to one.

    Raises:
        SourceError: not a sound safetensors file.
        ContainerError: the parts of a linear do not fit together.
    """

    marker: str
    parts: tuple[str, ...]

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.problems = []
        self.notes: list[str] = []
        self._file = SafetensorsFile(self.path)
        try:
            stems = [name.removesuffix(self.marker) for name in self._file.slots if name.endswith(self.marker)]
            self._stems = {self.name_of(stem): stem for stem in stems}
            self.entries = {name: self._describe(name, stem) for name, stem in self._stems.items()}
            used = {stem + part for stem in stems for part in self.parts}
            self.carried = [name for name in self._file.slots if name not in used]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def files(self) -> tuple[Path, ...]:
        """The file, and the configs beside it."""
        beside = (self.path.with_name(name) for name in (QUANTIZE_CONFIG, CONFIG))
        return (self.path, *(path for path in beside if file_kind(path) == "file"))

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return self._file.nbytes

    @property
    def metadata(self) -> Mapping[str, str]:
        """The file's string metadata."""
        return self._file.metadata

    def name_of(self, stem: str) -> str:
        """Return the name of the linear whose tensors begin with `stem`."""
        raise NotImplementedError

    def shape_of(self, name: str, stem: str) -> tuple[int, int]:
        """Return (N, K), once all parts are known to fit."""
        raise NotImplementedError

    def carried_tensor(self, name: str) -> SourceTensor:
        """Return a tensor that lies beside the packed ones, by its name."""
        return slot_tensor(self._file, name, self._file.slots[name])

    def wrong_digests(self, entry: PackedEntry) -> list[str]:
        """Return nothing: other tools state no digests."""
        return []

    def odd_scales(self, entry: PackedEntry) -> list[str]:
        """Describe scales that no reader takes, groups with scales of their own among them."""
        try:
            return super().odd_scales(entry)
        except LossyError as error:
            return [str(error)]

    def where(self, entry: PackedEntry) -> str:
        """Return file and tensor, for messages."""
        return f"{self.path}: tensor '{entry.name}'"

    def stem(self, entry: PackedEntry) -> str:
        """Return what the names of a linear's tensors begin with."""
        return self._stems[entry.name]

    def slot(self, name: str, dtypes: tuple[str, ...], rank: int) -> Slot:
        """Return the place of a tensor.

        Raises:
            ContainerError: there is none, or it has another dtype or rank.
        """
        slot = self._file.slots.get(name)
        if slot is None:
            raise ContainerError(f"{self.path}: {name} is missing, a {self.format} linear has one")
        if slot.dtype not in dtypes or len(slot.shape) != rank:
            raise ContainerError(
                f"{self.path}: {name} is {slot.dtype} {list(slot.shape)}, expected {' or '.join(dtypes)} of rank {rank}"
            )
        return slot

    def refuse(self, name: str, slot: Slot, expected: str) -> ContainerError:
        """Return the error of a tensor whose shape does not fit."""
        return ContainerError(f"{self.path}: {name} is {slot.dtype} {list(slot.shape)}, expected {expected}")

    def has(self, name: str) -> bool:
        """Tell whether the file has a tensor."""
        return name in self._file.slots

    def array(self, name: str) -> NDArray[Any]:
        """Read an integer tensor whole, in its own shape."""
        slot = self._file.slots[name]
        return np.frombuffer(self._file.read(slot.start, slot.nbytes), _NUMPY[slot.dtype]).reshape(slot.shape)

    def floats(self, name: str) -> NDArray[np.float32]:
        """Read a float tensor whole, widened exactly to float32, in its own shape."""
        slot = self._file.slots[name]
        columns = slot.shape[-1] if slot.shape else 1
        return widen(self._file.read(slot.start, slot.nbytes), slot.dtype, name=name, columns=columns).reshape(
            slot.shape
        )

    def _describe(self, name: str, stem: str) -> PackedEntry:
        rows, columns = self.shape_of(name, stem)
        if rows < 1 or columns < 1:
            raise ContainerError(f"{self.path}: tensor '{name}' is {rows} × {columns}, expected at least 1 × 1")
        return PackedEntry(name, rows, columns, source_dtype="unknown", method="unknown")


#: Scales wider than these would be rounded.
SCALE_DTYPES = tuple(dtype for dtype in FLOAT_DTYPES if dtype != "F64")


def quantization_config(path: Path) -> dict[str, Any]:
    """Return what quantize_config.json, or config.json's `quantization_config`, says beside a file; {} if neither is.

    Raises:
        SourceError: one of them is not JSON.
    """
    choices: tuple[tuple[str, Callable[[dict[str, Any]], Any]], ...] = (
        (QUANTIZE_CONFIG, lambda document: document),
        (CONFIG, lambda document: document.get("quantization_config")),
    )
    for file_name, part in choices:
        beside = path.parent / file_name
        if file_kind(beside) == "file":
            found = part(read_json(beside))
            if isinstance(found, dict):
                return found
    return {}
