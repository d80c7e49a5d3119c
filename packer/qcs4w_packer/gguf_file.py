"""GGUF of float types as a source: the header by bounded reads, the data by positioned ones, no other package.

A file is: magic, version, counts; key-value pairs; names, dimensions (fastest first), types and offsets of tensors;
then the data, aligned. Source: ggml-org/ggml, docs/gguf.md; the sizes of types are those of gguf 0.19, constants.py.
"""

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from .checkpoint_index import grouped
from .errors import SourceError
from .open_files import OpenFiles, PooledFile
from .safetensors_file import DTYPE_BITS, Slot, lfs_pointer_fault, name_fault, open_for_reading, read_at, stamp_of
from .weights import Source, slot_tensor

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_LARGEST_HEADER = 128 << 20  # bytes; the largest tokenizers have some 30 million
_LARGEST_NAME = 1 << 16
_LARGEST_RANK = 64
_DEEPEST = 4  # arrays in arrays

#: Types whose elements are what safetensors has too.
_DTYPES = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16"}

#: Quantized types by number: name, elements of a block, bytes of a block.
_QUANTIZED = {
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}  # fmt: skip

# Value types of metadata by number, for struct; 8 is a string and 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class _Info:
    """One tensor as the header has it."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int  # from the start of the data

    @property
    def nbytes(self) -> int | None:
        """Bytes of data; None for a type that is not known."""
        if self.kind in _QUANTIZED:
            _, block, nbytes = _QUANTIZED[self.kind]
            return prod(self.shape) // block * nbytes
        if self.kind in _DTYPES:
            return prod(self.shape) * DTYPE_BITS[_DTYPES[self.kind]] // 8
        return None


class _Header:
    """Reads a header from its start to its end."""

    def __init__(self, fd: int, path: Path):
        self._fd, self.path = fd, path
        self.nbytes = os.fstat(fd).st_size
        self.at = 0
        self._block, self._block_start = b"", 0

    def fault(self, message: str) -> SourceError:
        """Return the error of a file that is not sound."""
        return SourceError(
            f"{self.path}: not a sound GGUF file: {message}", hint="download the file again; it may be truncated"
        )

    def skip(self, nbytes: int) -> None:
        """Go on without reading."""
        if nbytes > min(self.nbytes, _LARGEST_HEADER) - self.at:
            raise self.fault(
                f"its header goes on for {nbytes:,} bytes at byte {self.at:,}, the file has {self.nbytes:,} "
                f"(and a header {_LARGEST_HEADER:,} at most)"
            )
        self.at += nbytes

    def take(self, nbytes: int) -> bytes:
        """Read the next bytes."""
        start = self.at
        self.skip(nbytes)
        if start < self._block_start or start + nbytes > self._block_start + len(self._block):
            self._block_start = start
            self._block = read_at(self._fd, self.path, start, min(max(nbytes, 1 << 16), self.nbytes - start))
        return self._block[start - self._block_start : start - self._block_start + nbytes]

    def number(self, code: str) -> Any:
        """Read one number."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]

    def text(self) -> str:
        """Read a short string."""
        length = self.number("Q")
        if length > _LARGEST_NAME:
            raise self.fault(f"a name at byte {self.at:,} has {length:,} bytes, {_LARGEST_NAME:,} are the most")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self.fault(f"a name at byte {self.at:,} is not UTF-8") from None

    def value(self, kind: int, depth: int = 0) -> Any:
        """Read a value of metadata; None for an array or a long string, which are passed over."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            length = self.number("Q")
            if length > 200:
                self.skip(length)
                return None
            return self.take(length).decode("utf-8", "replace")
        if kind != _ARRAY or depth >= _DEEPEST:
            raise self.fault(f"a value at byte {self.at:,} has type {kind}, which is not known")
        inner, count = self.number("I"), self.number("Q")
        if inner in _SCALARS:
            self.skip(count * struct.calcsize(_SCALARS[inner]))
        else:
            for _ in range(count):
                self.value(inner, depth + 1)
        return None

    def info(self) -> _Info:
        """Read the entry of a tensor."""
        name = self.text()
        rank = self.number("I")
        if rank > _LARGEST_RANK:
            raise self.fault(f"tensor '{name:.100}' has {rank:,} dimensions")
        dims = [self.number("Q") for _ in range(rank)]
        kind, offset = self.number("I"), self.number("Q")
        if any(size >= 1 << 63 for size in (*dims, offset)):
            raise self.fault(f"tensor '{name:.100}' has dimensions or an offset that no file has")
        if kind in _QUANTIZED and (not dims or dims[0] % _QUANTIZED[kind][1]):
            raise self.fault(f"tensor '{name:.100}' of type {_QUANTIZED[kind][0]} has rows that are no whole blocks")
        return _Info(name, tuple(reversed(dims)), kind, offset)


def open_gguf(path: Path) -> Source:
    """Open a GGUF file: tensors of plain types can be read, quantized ones are told by name and type.

    Raises:
        SourceError: not a sound GGUF file, or one whose tensors are all quantized.
    """
    fd = open_for_reading(path)
    try:
        if fault := lfs_pointer_fault(fd, path):
            raise fault
        header = _Header(fd, path)
        metadata, infos = _read(header)
        stamp = stamp_of(fd)
    finally:
        os.close(fd)
    start = _data_start(header, metadata)
    _check_places(header, infos, start)
    files = OpenFiles()
    files.add(path, stamp)
    tensors, unreadable = {}, {}
    for info in infos.values():
        if fault_of_name := name_fault(info.name):
            unreadable[info.name] = fault_of_name
        elif info.kind in _DTYPES and info.nbytes is not None:
            slot = Slot(_DTYPES[info.kind], info.shape, start + info.offset, info.nbytes)
            tensors[info.name] = slot_tensor(PooledFile(files, path), info.name, slot)
        else:
            unreadable[info.name] = (
                f"{_QUANTIZED[info.kind][0]} is a quantized type, the file does not have its floats"
                if info.kind in _QUANTIZED
                else f"type {info.kind} is not known"
            )
    if infos and not tensors:
        name, reason = next(iter(unreadable.items()))
        raise SourceError(
            f"{path}: has no tensor that can be read: '{name:.100}': {reason}",
            hint="take the GGUF in F16 or BF16, or the checkpoint that it was made of",
        )
    return Source(
        path, tensors, left_out=(*_told(metadata), *grouped(unreadable)), unreadable=unreadable, closer=files.close
    )


def _read(header: _Header) -> tuple[dict[str, Any], dict[str, _Info]]:
    if header.nbytes < 24 or header.take(4) != _MAGIC:
        raise header.fault("it does not begin with GGUF")
    version = header.number("I")
    if version not in _VERSIONS:
        odd = ", it is of a big-endian machine" if version and not version & 0xFFFF else ""
        raise header.fault(f"version {version} is not known{odd}; {' and '.join(map(str, _VERSIONS))} are")
    tensors, pairs = header.number("Q"), header.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = header.text()
        if key in metadata:
            raise header.fault(f"key '{key:.100}' occurs twice")
        metadata[key] = header.value(header.number("I"))
    infos: dict[str, _Info] = {}
    for _ in range(tensors):
        info = header.info()
        if info.name in infos:
            raise header.fault(f"tensor '{info.name:.100}' occurs twice")
        infos[info.name] = info
    return metadata, infos


def _data_start(header: _Header, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise header.fault(f"its alignment is {alignment!r:.40}, expected a power of two")
    return -(-header.at // alignment) * alignment


def _check_places(header: _Header, infos: Mapping[str, _Info], start: int) -> None:
    """Refuse tensors that lie beyond the file's end or in one another."""
    known = [(start + info.offset, start + info.offset + info.nbytes, info) for info in infos.values() if info.nbytes]
    last = max((end for _, end, _ in known), default=0)
    if last > header.nbytes:
        raise header.fault(f"the header describes {last:,} bytes, the file has {header.nbytes:,}: it is truncated")
    end = start
    for first, after, info in sorted(known, key=lambda place: place[0]):
        if first < end:
            raise header.fault(f"tensor '{info.name:.100}' starts at byte {first:,}, inside of another")
        end = after


def _told(metadata: Mapping[str, Any]) -> list[str]:
    """Return what is not carried into a container, described for people."""
    told = []
    if metadata:
        kind = metadata.get("general.architecture")
        of = f" of architecture {kind!r:.60}" if isinstance(kind, str) else ""
        told.append(f"{len(metadata):,} keys of GGUF metadata{of} (hyperparameters, the tokenizer)")
    parts = metadata.get("split.count")
    if type(parts) is int and parts > 1:
        told.append(f"the other parts of this GGUF, which has {parts:,} (each is opened by itself)")
    return told
