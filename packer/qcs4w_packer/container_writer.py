"""Writing a container: row by row, without ever holding a whole tensor."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import ContainerError, OutputError
from .files import replacing, write_at
from .metadata import METADATA_KEY, PACKED, SCALE, SHAPE, PackedEntry, bias_name, to_document
from .nibbles import packed_width
from .packed import PackedLinear
from .safetensors_file import Planned, SafetensorsLayout
from .safetensors_writer import refuse_twins


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
        is_shard: it is one file of several, so that it may hold no packed tensor.

    Raises:
        OutputError: there is no packed tensor, or two tensors would have one name.
    """

    def __init__(
        self,
        entries: Iterable[PackedEntry],
        carried: Iterable[Planned] = (),
        metadata: Mapping[str, str] | None = None,
        *,
        is_shard: bool = False,
    ):
        entries = list(entries)
        if not entries and not is_shard:
            raise OutputError("a container needs at least one packed tensor")
        refuse_twins(name for entry in entries for name in (entry.name, *entry.aliases))
        self._entries = {entry.name: entry for entry in entries}
        self._metadata = {k: v for k, v in (metadata or {}).items() if k != METADATA_KEY}
        self._digests = {name: _Digests() for name in self._entries}
        self._known: dict[str, tuple[str, str]] = {}
        planned = list(carried)
        for name, entry in self._entries.items():
            planned += [
                Planned(name + PACKED, "U8", (entry.out_features, packed_width(entry.in_features))),
                Planned(name + SCALE, "F32", (entry.out_features,)),
                Planned(name + SHAPE, "I64", (2,)),
            ]
        refuse_twins(tensor.name for tensor in planned)
        self._nbytes = {tensor.name: tensor.nbytes for tensor in planned}
        self._layout = SafetensorsLayout(planned, self._header_metadata())
        self._fd = -1

    @property
    def nbytes(self) -> int:
        """Size of the finished file."""
        return self._layout.nbytes

    def begin(self, fd: int) -> None:
        """Start writing into an open file, or go on with one that was begun before."""
        self._fd = fd
        for name, entry in self._entries.items():
            shape = np.array([entry.out_features, entry.in_features], "<i8")
            write_at(fd, shape.data, self._layout.offsets[name + SHAPE])

    def write_rows(self, name: str, first_row: int, packed: NDArray[np.uint8], scales: NDArray[np.float32]) -> None:
        """Write consecutive rows of a packed tensor; rows must come in order, since they are hashed."""
        packed_bytes, scale_bytes = np.ascontiguousarray(packed).data, np.ascontiguousarray(scales, "<f4").data
        self._digests[name].packed.update(packed_bytes)
        self._digests[name].scales.update(scale_bytes)
        write_at(self._fd, packed_bytes, self._layout.offsets[name + PACKED] + first_row * packed.shape[1])
        write_at(self._fd, scale_bytes, self._layout.offsets[name + SCALE] + first_row * 4)

    def write_carried(self, name: str, offset: int, data: bytes) -> None:
        """Write bytes of a carried tensor, `offset` bytes from its beginning."""
        write_at(self._fd, data, self._layout.offsets[name] + offset)

    def digests(self, name: str) -> tuple[str, str]:
        """Return the sha256 of a tensor's packed bytes and of its scales, as far as they have been written."""
        made = self._digests[name]
        return self._known.get(name) or (made.packed.hexdigest(), made.scales.hexdigest())

    def adopt(self, name: str, digests: tuple[str, str]) -> None:
        """Take a tensor that an earlier run has written as finished, with the digests of what lies in the file."""
        self._known[name] = digests

    def place(self, stored_name: str) -> tuple[int, int]:
        """Return the offset in the file and the bytes of a tensor, by the name under which it is stored."""
        return self._layout.offsets[stored_name], self._nbytes[stored_name]

    def finish(self) -> dict[str, PackedEntry]:
        """Write the header, now that the digests are known, and return the entries as written, by name."""
        digests = {name: self.digests(name) for name in self._entries}
        self._entries = {
            name: replace(entry, packed_sha256=digests[name][0], scale_sha256=digests[name][1])
            for name, entry in self._entries.items()
        }
        header = self._layout.header(self._header_metadata())
        if len(header) != self._layout.header_nbytes:
            raise RuntimeError("the header has changed its length")
        write_at(self._fd, header, 0)
        os.ftruncate(self._fd, self.nbytes)
        return self._entries

    def header_text(self) -> str:
        """Return the header with the digests left open: it says all that is to be written."""
        return self._layout.header(self._header_metadata())[8:].decode()

    def _header_metadata(self) -> dict[str, str]:
        return {**self._metadata, METADATA_KEY: to_document(self._entries.values())}


def save_container(
    path: str | os.PathLike[str],
    tensors: Mapping[str, PackedLinear],
    *,
    biases: Mapping[str, NDArray[np.float32]] | None = None,
    method: str = "absmax",
    force: bool = False,
) -> None:
    """Write packed weights into a container.

    Args:
        path: the file to make.
        tensors: packed weights by name.
        biases: float32 (N,) by the name of the weight that they belong to.
        method: how the scales were chosen; "absmax" is for `pack_weight`'s own rule only.
        force: replace a file that is there.

    Raises:
        ContainerError: a bias is not N floats of one of the weights.
        OutputError: it exists, or cannot be written.
    """
    for name, bias in (biases or {}).items():
        if name not in tensors or bias.shape != (tensors[name].out_features,):
            expected = f"[{tensors[name].out_features}]" if name in tensors else f"one of {', '.join(tensors)}"
            raise ContainerError(f"bias of '{name}' has shape {list(bias.shape)}, expected {expected}")
    carried = {bias_name(name): np.ascontiguousarray(bias, "<f4") for name, bias in (biases or {}).items()}
    writer = ContainerWriter(
        (PackedEntry(name, packed.out_features, packed.in_features, method=method) for name, packed in tensors.items()),
        (Planned(name, "F32", array.shape) for name, array in carried.items()),
    )
    with replacing(path, force=force, nbytes=writer.nbytes) as fd:
        writer.begin(fd)
        for name, packed in tensors.items():
            writer.write_rows(name, 0, packed.packed, packed.scales)
        for name, array in carried.items():
            writer.write_carried(name, 0, array.tobytes())
        writer.finish()
