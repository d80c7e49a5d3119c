"""The qcs4w container: a safetensors file that any tool can open, and that says how its bytes are to be read."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import ContainerError
from .metadata import METADATA_KEY, PACKED, SCALE, SHAPE, VERSION, PackedEntry, entry_from_json
from .nibbles import EVEN_HIGH, OFFSET, packed_width
from .open_files import OpenFiles, PooledFile
from .packed import PackedLinear
from .packed_file import PackedFile, sha256_faults
from .safetensors_file import METADATA_NAME, SafetensorsFile, no_duplicates
from .weights import Readable, SourceTensor, slot_tensor


class Container(PackedFile):
    """A qcs4w container opened for reading. Use it as a context manager.

    Args:
        path: where it lies.
        strict: refuse what a reader must refuse, else remember it in `problems`.
        files: through which it is read, where it is a shard of a folder: it keeps no descriptor of its own, and it may
            hold no packed tensor.

    Attributes:
        path: where it lies.
        entries: what it says of each packed tensor, by name.
        carried: names of the other tensors.
        document: the metadata as stored, {} when it has none.
        problems: with strict=False, what a strict reader would have refused.

    Raises:
        SourceError: not a sound safetensors file.
        ContainerError: not a container, or one of another version or nibble order.
    """

    format = "qcs4w"

    def __init__(self, path: str | os.PathLike[str], *, strict: bool = True, files: OpenFiles | None = None):
        self.path = Path(path)
        self._strict = strict
        self._is_shard = files is not None
        self.problems = []
        self._file = SafetensorsFile(self.path)
        self._data: Readable = self._file
        if files is not None:
            self._file.close()
            files.add(self.path, self._file.stamp)
            self._data = PooledFile(files, self.path)
        try:
            self.document = self._read_document()
            described = self.document.get("tensors", {})
            self.entries = {
                name: entry
                for name in self._packed_names(described)
                if (entry := self._read_entry(name, described.get(name))) is not None
            }
            self._names = self._spellings()
            generated = {name + suffix for name in self.entries for suffix in (PACKED, SCALE, SHAPE)}
            self.carried = [name for name in self._file.slots if name not in generated]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return self._file.nbytes

    @property
    def stored(self) -> list[SourceTensor]:
        """All tensors as they stand in the file, packed bytes and scales among them."""
        return [self.carried_tensor(name) for name in self._file.slots]

    @property
    def statement(self) -> dict[str, str | int]:
        """What the metadata say of the file as a whole: version, nibble order, offset, tool."""
        return {key: value for key, value in self.document.items() if isinstance(value, str | int)}

    @property
    def metadata(self) -> Mapping[str, str]:
        """The file's other string metadata."""
        return {k: v for k, v in self._file.metadata.items() if k != METADATA_KEY}

    def names(self) -> Mapping[str, str]:
        """Return every name by which a packed tensor may be asked for, with the name it is stored under."""
        return self._names

    def arrays(self, entry: PackedEntry) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Read packed bytes (N, K_packed) and scales (N,) as they are, whatever their digests say."""
        packed = np.frombuffer(self.read(entry.name + PACKED), np.uint8)
        return packed.reshape(entry.out_features, -1), self.scales(entry)

    def scales(self, entry: PackedEntry) -> NDArray[np.float32]:
        """Read the scales (N,) alone."""
        return np.frombuffer(self.read(entry.name + SCALE), "<f4")

    def row_reader(self, entry: PackedEntry) -> Callable[[int, int], NDArray[np.uint8]]:
        """Return a function (first row, end) -> packed rows, which reads these rows only."""
        fetch = self.carried_tensor(entry.name + PACKED).fetch
        width = packed_width(entry.in_features)
        return lambda start, stop: np.frombuffer(fetch(start, stop), np.uint8).reshape(-1, width)

    def checked_rows(
        self, entry: PackedEntry, step: int
    ) -> Iterator[tuple[int, NDArray[np.uint8], NDArray[np.float32]]]:
        """Yield (first row, packed rows, their scales) of a tensor, of which no more than `step` rows are held."""
        scales = self.scales(entry)
        if odd := self.odd_scales(entry):
            raise ContainerError(f"{self.path}: {odd[0]}, expected a finite number")
        read, digest = self.row_reader(entry), hashlib.sha256()
        for start in range(0, entry.out_features, step):
            packed = read(start, min(start + step, entry.out_features))
            digest.update(packed.data)
            yield start, packed, scales[start : start + step]
        self.refuse_digests(sha256_faults(entry, digest.hexdigest(), hashlib.sha256(scales.data).hexdigest()))

    def read(self, stored_name: str) -> bytes:
        """Read the bytes of a tensor by its name in the safetensors file."""
        slot = self._file.slots[stored_name]
        return self._data.read(slot.start, slot.nbytes)

    def place(self, entry: PackedEntry) -> tuple[Path, int]:
        """Return the file and the offset at which a tensor's packed bytes lie."""
        return self.path, self._file.slots[entry.name + PACKED].start

    def scales_place(self, entry: PackedEntry) -> tuple[Path, int]:
        """Return the file and the offset at which a tensor's scales lie."""
        return self.path, self._file.slots[entry.name + SCALE].start

    def carried_place(self, name: str) -> int:
        """Return the offset in the file at which a carried tensor lies."""
        return self._file.slots[name].start

    def carried_tensor(self, name: str) -> SourceTensor:
        """Return a tensor by its name in the file."""
        return slot_tensor(self._data, name, self._file.slots[name])

    def _refuse(self, message: str, hint: str | None = None) -> None:
        """Raise what a strict reader raises; otherwise remember it."""
        if self._strict:
            raise ContainerError(f"{self.path}: {message}", hint=hint)
        self.problems.append(message)

    def _read_document(self) -> dict[str, Any]:
        text = self._file.metadata.get(METADATA_KEY)
        if text is None:
            if any(name.endswith(PACKED) for name in self._file.slots):
                self._refuse(f"has packed tensors but no '{METADATA_KEY}' metadata, so that their layout is unknown")
            else:
                make = f"make one: qcs4w pack {self.path} -o OUT.safetensors"
                self._refuse("is not a qcs4w container", hint="a shard of another folder?" if self._is_shard else make)
            return {}
        try:
            document = json.loads(text, object_pairs_hook=no_duplicates)
        except (ValueError, RecursionError) as error:
            self._refuse(f"its '{METADATA_KEY}' metadata is not JSON ({error})")
            return {}
        if not isinstance(document, dict) or not isinstance(document.get("tensors"), dict):
            self._refuse(f"its '{METADATA_KEY}' metadata is not an object with 'tensors'")
            return {}
        version = document.get("version")
        if type(version) is not int or version != VERSION:
            self._refuse(
                f"has container version {version!r:.100}, this qcs4w reads {VERSION}",
                hint="a newer qcs4w may read it",
            )
        for key, expected in (("nibble_order", EVEN_HIGH.name), ("offset", OFFSET)):
            if document.get(key) != expected:
                self._refuse(f"states {key} {document.get(key)!r:.100}, this qcs4w reads {expected!r}")
        return document

    def _packed_names(self, described: Mapping[str, Any]) -> list[str]:
        stored = [name.removesuffix(PACKED) for name in self._file.slots if name.endswith(PACKED)]
        if METADATA_NAME in stored:
            self._refuse(f"has a packed tensor '{METADATA_NAME}', a name that safetensors reserves")
        if self.document:
            for name in (name for name in stored if name not in described):
                self._refuse(f"tensor '{name}' is packed but not described in the metadata")
            for name in (name for name in described if name + PACKED not in self._file.slots):
                self._refuse(f"tensor '{name}' is described in the metadata but {name + PACKED} is missing")
            if not described and not self._is_shard:
                self._refuse("holds no packed tensor", hint="is it one shard of a folder? Name the folder")
        return stored

    def _spellings(self) -> dict[str, str]:
        """Return every name by which a packed tensor may be asked for, with the name it is stored under."""
        names = {name: name for name in self.entries}
        for name, entry in self.entries.items():
            for alias in entry.aliases:
                if names.setdefault(alias, name) != name:
                    self._refuse(f"'{alias}' is an alias of tensor '{name}' and of '{names[alias]}'")
        return names

    def _read_entry(self, name: str, said: Any) -> PackedEntry | None:
        slots = self._file.slots
        packed, scale, shape = slots[name + PACKED], slots.get(name + SCALE), slots.get(name + SHAPE)
        if scale is None or shape is None:
            self._refuse(f"tensor '{name}': {name + (SCALE if scale is None else SHAPE)} is missing")
            return None
        if (shape.dtype, shape.shape) != ("I64", (2,)):
            self._refuse(f"{name + SHAPE} is {shape.dtype} {list(shape.shape)}, expected I64 [2]")
            return None
        rows, columns = (int(v) for v in np.frombuffer(self.read(name + SHAPE), "<i8"))
        for stored, slot, dtype, size in (
            (name + PACKED, packed, "U8", (rows, packed_width(columns))),
            (name + SCALE, scale, "F32", (rows,)),
        ):
            if rows < 1 or columns < 1 or (slot.dtype, slot.shape) != (dtype, size):
                self._refuse(
                    f"{stored} is {slot.dtype} {list(slot.shape)}, "
                    f"expected {dtype} {list(size)} for N {rows}, K {columns}"
                )
                return None
        entry = PackedEntry(name, rows, columns)
        if not self.document:
            return entry
        try:
            return entry_from_json(entry, said)
        except (KeyError, TypeError, ValueError) as error:
            self._refuse(f"tensor '{name}': its description in the metadata is not sound ({error})")
            return entry


def is_container_like(path: str | os.PathLike[str]) -> bool:
    """Tell whether a safetensors file has packed tensors or our metadata, sound or not.

    Raises:
        SourceError: it is not a sound safetensors file.
    """
    with SafetensorsFile(path) as file:
        return METADATA_KEY in file.metadata or any(name.endswith(PACKED) for name in file.slots)


def load_packed(path: str | os.PathLike[str], name: str | None = None) -> PackedLinear:
    """Read one packed weight from a container, by default the only one.

    Raises:
        SourceError, ContainerError, DigestError, UnknownTensorError: as `Container` does.
    """
    with Container(path) as container:
        return container.load(name or container.only().name)
