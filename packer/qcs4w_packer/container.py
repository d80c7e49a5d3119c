"""The qcs4w container: a safetensors file that any tool can open, and that says how its bytes are to be read.

A source tensor T becomes T.qcs4w_packed (U8 [N, ceil(K/2)]), T.qcs4w_scale (F32 [N]) and T.qcs4w_shape (I64 [2] =
N, K). The names are ours on purpose: X.weight_packed belongs to compressed-tensors, whose nibbles lie the other way.
`__metadata__` has one key, `qcs4w`, a JSON document.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ._version import __version__
from .errors import ContainerError, DigestError, NonFiniteError, OutputError, UnknownTensorError
from .files import replacing, write_at
from .nibbles import EVEN_HIGH, OFFSET, packed_width
from .packed import PackedLinear
from .safetensors_file import Planned, SafetensorsFile, SafetensorsLayout, Slot, name_fault
from .select import did_you_mean
from .weights import FLOAT_DTYPES, SourceTensor, slot_tensor

METADATA_KEY = "qcs4w"
VERSION = 1
_PACKED, _SCALE, _SHAPE = ".qcs4w_packed", ".qcs4w_scale", ".qcs4w_shape"
_PENDING = "0" * 64  # holds a digest's place until the data has been written


@dataclass(frozen=True)
class PackedEntry:
    """What a container says about one packed tensor.

    Attributes:
        name: T, the source tensor's name.
        out_features: N.
        in_features: K.
        source_dtype: dtype of the float weight, as safetensors names it.
        method: how scales were chosen; "absmax" is ExecuTorch's rule.
        transposed: the source stored [K, N].
        aliases: other names of the very same weight (tied tensors).
        stack: the 3-D source tensor that this matrix was split from.
        packed_sha256: of the packed bytes as stored.
        scale_sha256: of the scales as stored.
    """

    name: str
    out_features: int
    in_features: int
    source_dtype: str = "F32"
    method: str = "absmax"
    transposed: bool = False
    aliases: tuple[str, ...] = ()
    stack: str | None = None
    packed_sha256: str = _PENDING
    scale_sha256: str = _PENDING

    @property
    def packed_nbytes(self) -> int:
        """Bytes of packed codes and scales."""
        return self.out_features * (packed_width(self.in_features) + 4)

    @property
    def executorch_refuses(self) -> bool:
        """Whether ExecuTorch's WebGPU runtime will refuse it: N · ceil(K/2) is no multiple of 4."""
        return self.out_features * packed_width(self.in_features) % 4 != 0

    def to_json(self) -> dict[str, Any]:
        """Return the entry as it stands in the metadata; shapes are left to the tensors themselves."""
        entry: dict[str, Any] = {
            "source_dtype": self.source_dtype,
            "method": self.method,
            "packed_sha256": self.packed_sha256,
            "scale_sha256": self.scale_sha256,
            "transposed": self.transposed,
            "aliases": list(self.aliases),
        }
        if self.stack:
            entry["stack"] = self.stack
        return entry


def bias_name(name: str) -> str:
    """Return the name that the bias of a weight has by custom."""
    return name.removesuffix("weight") + "bias" if name.endswith("weight") else f"{name}.bias"


class Container:
    """A qcs4w container opened for reading. Use it as a context manager.

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

    def __init__(self, path: str | os.PathLike[str], *, strict: bool = True):
        self.path = Path(path)
        self._strict = strict
        self.problems: list[str] = []
        self._file = SafetensorsFile(self.path)
        try:
            self.document = self._read_document()
            described = self.document.get("tensors", {})
            self.entries = {
                name: entry
                for name in self._packed_names(described)
                if (entry := self._read_entry(name, described.get(name))) is not None
            }
            self._names = self._spellings()
            generated = {name + suffix for name in self.entries for suffix in (_PACKED, _SCALE, _SHAPE)}
            self.carried = [name for name in self._file.slots if name not in generated]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return self._file.nbytes

    @property
    def metadata(self) -> Mapping[str, str]:
        """The file's other string metadata."""
        return {k: v for k, v in self._file.metadata.items() if k != METADATA_KEY}

    def entry(self, name: str) -> PackedEntry:
        """Return what is said about a packed tensor, found by its name, an alias, or its module's name.

        Raises:
            UnknownTensorError: there is none of that name.
        """
        for candidate in (name, f"{name}.weight"):
            if candidate in self._names:
                return self.entries[self._names[candidate]]
        hint = did_you_mean(name, self._names)
        if name in self._file.slots:
            hint = "it is in the file as it was in the source, not packed"
        raise UnknownTensorError(f"{self.path}: no packed tensor '{name}'", hint=hint)

    def only(self) -> PackedEntry:
        """Return the container's single packed tensor.

        Raises:
            UnknownTensorError: there are several.
        """
        if len(self.entries) == 1:
            return next(iter(self.entries.values()))
        some = ", ".join(f"'{name}'" for name in list(self.entries)[:3]) + ", …" * (len(self.entries) > 3)
        raise UnknownTensorError(
            f"{self.path}: holds {len(self.entries)} packed tensors ({some})", hint="choose one with --tensor"
        )

    def load(self, name: str) -> PackedLinear:
        """Read one packed tensor, checked against its digests.

        Raises:
            UnknownTensorError: there is none of that name.
            DigestError: the bytes are not those that were written.
        """
        entry = self.entry(name)
        wrong = self.wrong_digests(entry)
        if wrong:
            raise DigestError(
                f"{self.path}: {'; '.join(wrong)}",
                hint="the file was damaged or edited after packing: pack it again, or look with qcs4w inspect",
            )
        return self.load_unchecked(entry)

    def load_unchecked(self, entry: PackedEntry) -> PackedLinear:
        """Read one packed tensor whatever its digests say."""
        packed = np.frombuffer(self.read(entry.name + _PACKED), np.uint8)
        scales = np.frombuffer(self.read(entry.name + _SCALE), "<f4")
        try:
            return PackedLinear(packed.reshape(entry.out_features, -1), scales, entry.in_features)
        except ContainerError as error:
            raise ContainerError(f"{self.path}: tensor '{entry.name}': {error}") from None

    def wrong_digests(self, entry: PackedEntry) -> list[str]:
        """Recompute a tensor's digests and describe each that differs from the one in the metadata."""
        stated = {_PACKED: entry.packed_sha256, _SCALE: entry.scale_sha256}
        return [
            f"tensor '{entry.name}': sha256 of {entry.name + suffix} is {found}, the metadata says {digest}"
            for suffix, digest in stated.items()
            if (found := hashlib.sha256(self.read(entry.name + suffix)).hexdigest()) != digest
        ]

    def read(self, stored_name: str) -> bytes:
        """Read the bytes of a tensor by its name in the safetensors file."""
        slot = self._file.slots[stored_name]
        return self._file.read(slot.start, slot.nbytes)

    def packed_slot(self, entry: PackedEntry) -> Slot:
        """Return where a tensor's packed bytes lie in the file."""
        return self._file.slots[entry.name + _PACKED]

    def carried_tensor(self, name: str) -> SourceTensor:
        """Return a tensor that was copied along, by its name."""
        return slot_tensor(self._file, name, self._file.slots[name])

    def bias(self, entry: PackedEntry) -> NDArray[np.float32] | None:
        """Return the bias that the file holds for a packed tensor, float32 (N,), or None.

        Raises:
            ContainerError: a tensor of that name is not N floats.
            NonFiniteError: it holds NaN or an infinity.
        """
        for name in map(bias_name, (entry.name, *entry.aliases)):
            if name not in self.carried:
                continue
            tensor = self.carried_tensor(name)
            if tensor.dtype not in FLOAT_DTYPES or tensor.shape != (entry.out_features,):
                raise ContainerError(
                    f"{self.path}: bias '{name}' is {tensor.dtype} {list(tensor.shape)}, "
                    f"expected {entry.out_features} floats",
                    hint="--no-bias runs without it",
                )
            bias = tensor.read()
            if not np.isfinite(bias).all():
                column = int(np.flatnonzero(~np.isfinite(bias))[0])
                raise NonFiniteError(f"{self.path}: bias '{name}' holds {bias[column]} at column {column}")
            return bias
        return None

    def _refuse(self, message: str, hint: str | None = None) -> None:
        """Raise what a strict reader raises; otherwise remember it."""
        if self._strict:
            raise ContainerError(f"{self.path}: {message}", hint=hint)
        self.problems.append(message)

    def _read_document(self) -> dict[str, Any]:
        text = self._file.metadata.get(METADATA_KEY)
        if text is None:
            if any(name.endswith(_PACKED) for name in self._file.slots):
                self._refuse(f"has packed tensors but no '{METADATA_KEY}' metadata, so that their layout is unknown")
            else:
                self._refuse("is not a qcs4w container", hint=f"make one: qcs4w pack {self.path} -o OUT.safetensors")
            return {}
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            self._refuse(f"its '{METADATA_KEY}' metadata is not JSON ({error})")
            return {}
        if not isinstance(document, dict) or not isinstance(document.get("tensors"), dict):
            self._refuse(f"its '{METADATA_KEY}' metadata is not an object with 'tensors'")
            return {}
        version = document.get("version")
        if type(version) is not int or version != VERSION:
            self._refuse(
                f"has container version {version!r}, this qcs4w reads {VERSION}",
                hint="a newer qcs4w may read it",
            )
        for key, expected in (("nibble_order", EVEN_HIGH.name), ("offset", OFFSET)):
            if document.get(key) != expected:
                self._refuse(f"states {key} {document.get(key)!r}, this qcs4w reads {expected!r}")
        return document

    def _packed_names(self, described: Mapping[str, Any]) -> list[str]:
        stored = [name.removesuffix(_PACKED) for name in self._file.slots if name.endswith(_PACKED)]
        if self.document:
            for name in (name for name in stored if name not in described):
                self._refuse(f"tensor '{name}' is packed but not described in the metadata")
            for name in (name for name in described if name + _PACKED not in self._file.slots):
                self._refuse(f"tensor '{name}' is described in the metadata but {name + _PACKED} is missing")
            if not described:
                self._refuse("holds no packed tensor")
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
        packed, scale, shape = slots[name + _PACKED], slots.get(name + _SCALE), slots.get(name + _SHAPE)
        if scale is None or shape is None:
            self._refuse(f"tensor '{name}': {name + (_SCALE if scale is None else _SHAPE)} is missing")
            return None
        if (shape.dtype, shape.shape) != ("I64", (2,)):
            self._refuse(f"{name + _SHAPE} is {shape.dtype} {list(shape.shape)}, expected I64 [2]")
            return None
        rows, columns = (int(v) for v in np.frombuffer(self.read(name + _SHAPE), "<i8"))
        for stored, slot, dtype, size in (
            (name + _PACKED, packed, "U8", (rows, packed_width(columns))),
            (name + _SCALE, scale, "F32", (rows,)),
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
            return _entry_from_json(entry, said)
        except (KeyError, TypeError, ValueError) as error:
            self._refuse(f"tensor '{name}': its description in the metadata is not sound ({error})")
            return entry


def _entry_from_json(entry: PackedEntry, said: Any) -> PackedEntry:
    if not isinstance(said, dict):
        raise TypeError("not an object")
    aliases = said.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise TypeError("aliases are not a list of names")
    texts = {key: said[key] for key in ("source_dtype", "method", "packed_sha256", "scale_sha256")}
    if not all(isinstance(text, str) for text in texts.values()):
        raise TypeError("a text is missing")
    stack = said.get("stack")
    if stack is not None and not isinstance(stack, str):
        raise TypeError("stack is not a name")
    return PackedEntry(
        entry.name,
        entry.out_features,
        entry.in_features,
        transposed=said.get("transposed") is True,
        aliases=tuple(aliases),
        stack=stack,
        **texts,
    )


@dataclass
class _Digests:
    packed: Any = field(default_factory=hashlib.sha256)
    scales: Any = field(default_factory=hashlib.sha256)


class ContainerWriter:
    """Writes a container row by row into an open file; digests are filled in at the end.

    Args:
        entries: what will be packed; shapes must be right, digests are computed here.
        carried: what will be copied along.
        metadata: other string metadata to keep.

    Raises:
        OutputError: two tensors would have one name.
    """

    def __init__(
        self,
        entries: Iterable[PackedEntry],
        carried: Iterable[Planned] = (),
        metadata: Mapping[str, str] | None = None,
    ):
        entries = list(entries)
        _refuse_twins(name for entry in entries for name in (entry.name, *entry.aliases))
        self._entries = {entry.name: entry for entry in entries}
        self._metadata = {k: v for k, v in (metadata or {}).items() if k != METADATA_KEY}
        self._digests = {name: _Digests() for name in self._entries}
        planned = list(carried)
        for name, entry in self._entries.items():
            planned += [
                Planned(name + _PACKED, "U8", (entry.out_features, packed_width(entry.in_features))),
                Planned(name + _SCALE, "F32", (entry.out_features,)),
                Planned(name + _SHAPE, "I64", (2,)),
            ]
        _refuse_twins(tensor.name for tensor in planned)
        self._layout = SafetensorsLayout(planned, self._header_metadata())
        self._fd = -1

    @property
    def nbytes(self) -> int:
        """Size of the finished file."""
        return self._layout.nbytes

    def begin(self, fd: int) -> None:
        """Start writing into an open file."""
        self._fd = fd
        os.ftruncate(fd, self.nbytes)
        for name, entry in self._entries.items():
            shape = np.array([entry.out_features, entry.in_features], "<i8")
            write_at(fd, shape.data, self._layout.offsets[name + _SHAPE])

    def write_rows(self, name: str, first_row: int, packed: NDArray[np.uint8], scales: NDArray[np.float32]) -> None:
        """Write consecutive rows of a packed tensor; rows must come in order, since they are hashed."""
        packed_bytes, scale_bytes = np.ascontiguousarray(packed).data, np.ascontiguousarray(scales, "<f4").data
        self._digests[name].packed.update(packed_bytes)
        self._digests[name].scales.update(scale_bytes)
        write_at(self._fd, packed_bytes, self._layout.offsets[name + _PACKED] + first_row * packed.shape[1])
        write_at(self._fd, scale_bytes, self._layout.offsets[name + _SCALE] + first_row * 4)

    def write_carried(self, name: str, offset: int, data: bytes) -> None:
        """Write bytes of a carried tensor, `offset` bytes from its beginning."""
        write_at(self._fd, data, self._layout.offsets[name] + offset)

    def finish(self) -> None:
        """Write the header, now that the digests are known."""
        self._entries = {
            name: replace(
                entry,
                packed_sha256=self._digests[name].packed.hexdigest(),
                scale_sha256=self._digests[name].scales.hexdigest(),
            )
            for name, entry in self._entries.items()
        }
        header = self._layout.header(self._header_metadata())
        if len(header) != self._layout.header_nbytes:
            raise RuntimeError("the header has changed its length")
        write_at(self._fd, header, 0)

    def _header_metadata(self) -> dict[str, str]:
        document = {
            "version": VERSION,
            "nibble_order": EVEN_HIGH.name,
            "offset": OFFSET,
            "tool": f"qcs4w {__version__}",
            "tensors": {name: entry.to_json() for name, entry in self._entries.items()},
        }
        return {**self._metadata, METADATA_KEY: json.dumps(document, separators=(",", ":"))}


def save_container(
    path: str | os.PathLike[str],
    tensors: Mapping[str, PackedLinear],
    *,
    biases: Mapping[str, NDArray[np.float32]] | None = None,
    force: bool = False,
) -> None:
    """Write packed weights into a container.

    Args:
        path: the file to make.
        tensors: packed weights by name.
        biases: float32 (N,) by the name of the weight that they belong to.
        force: replace a file that is there.

    Raises:
        OutputError: it exists, or cannot be written.
    """
    carried = {bias_name(name): np.ascontiguousarray(bias, "<f4") for name, bias in (biases or {}).items()}
    writer = ContainerWriter(
        (PackedEntry(name, packed.out_features, packed.in_features) for name, packed in tensors.items()),
        (Planned(name, "F32", array.shape) for name, array in carried.items()),
    )
    with replacing(path, force=force, nbytes=writer.nbytes) as fd:
        writer.begin(fd)
        for name, packed in tensors.items():
            writer.write_rows(name, 0, packed.packed, packed.scales)
        for name, array in carried.items():
            writer.write_carried(name, 0, array.tobytes())
        writer.finish()


def is_container_like(path: str | os.PathLike[str]) -> bool:
    """Tell whether a safetensors file has packed tensors or our metadata, sound or not.

    Raises:
        SourceError: it is not a sound safetensors file.
    """
    with SafetensorsFile(path) as file:
        return METADATA_KEY in file.metadata or any(name.endswith(_PACKED) for name in file.slots)


def load_packed(path: str | os.PathLike[str], name: str | None = None) -> PackedLinear:
    """Read one packed weight from a container, by default the only one.

    Raises:
        SourceError, ContainerError, DigestError, UnknownTensorError: as `Container` does.
    """
    with Container(path) as container:
        return container.load(name or container.only().name)


def _refuse_twins(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if fault := name_fault(name):
            raise OutputError(f"a container cannot hold a tensor {name!r}: {fault}")
        if name in seen:
            raise OutputError(f"two tensors of the output would be named '{name}'", hint="--exclude one of the two")
        seen.add(name)
