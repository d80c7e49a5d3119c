"""Safetensors by positioned reads and writes: headers without data, bounded memory, hostile files refused.

The format: 8 bytes, little-endian, the header's length; a JSON header {name: {dtype, shape, data_offsets}};
then the tensors' bytes, little-endian, C order, without holes. Source: huggingface/safetensors, README.
"""

import json
import os
import re
import stat
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeGuard

from .closing import Closing
from .errors import SourceError

# The limit of the safetensors package; a longer header is not a header.
_MAX_HEADER = 100_000_000
_LFS_MAGIC = b"version https://git-lfs"
_MAX_SHOWN = 120  # characters of a header's value in a message
_MAX_RANK = 64  # torch's own limit; a longer shape only serves to make us multiply for minutes

#: What tells a file from another of its name, and from itself after it was written to.
Stamp = tuple[int, int, int, int]

METADATA_NAME = "__metadata__"

#: Bits of one element, for every dtype the format knows.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Slot:
    """One tensor's place in a safetensors file.

    Attributes:
        dtype: the format's name of it, a key of DTYPE_BITS.
        shape: any rank.
        start: the first byte's offset in the file.
        nbytes: bytes of data.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class SafetensorsFile(Closing):
    """A safetensors file opened for positioned reads. Use it as a context manager.

    Attributes:
        path: where it lies.
        slots: every tensor's place, by name, in the header's order.
        metadata: the header's `__metadata__`, empty when it has none.
        stamp: of the file whose header was read.

    Raises:
        SourceError: the file cannot be read, or its header is not sound.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._fd = open_for_reading(self.path)
        try:
            self.nbytes = os.fstat(self._fd).st_size
            self.stamp = stamp_of(self._fd)
            self.metadata, self.slots = self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; reading afterwards is an error."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read exactly `nbytes` bytes at a file offset."""
        return read_at(self._fd, self.path, offset, nbytes)

    def read_into(self, offset: int, room: memoryview) -> None:
        """Read at a file offset as many bytes as there is room for."""
        read_at_into(self._fd, self.path, offset, room)

    def _fault(self, message: str) -> SourceError:
        return SourceError(
            f"{self.path}: not a sound safetensors file: {message}",
            hint="download or export the file again; it may be truncated",
        )

    def _read_header(self) -> tuple[dict[str, str], dict[str, Slot]]:
        if self.nbytes < 8:
            raise self._fault(f"it has {self.nbytes} bytes, a header needs at least 8")
        (length,) = struct.unpack("<Q", self.read(0, 8))
        if fault := lfs_pointer_fault(self._fd, self.path):
            raise fault
        if length > min(_MAX_HEADER, self.nbytes - 8):
            raise self._fault(
                f"the header claims {length:,} bytes, the file has {self.nbytes - 8:,} after the length "
                f"(and {_MAX_HEADER:,} is the most)"
            )
        try:
            header = json.loads(self.read(8, length).decode("utf-8"), object_pairs_hook=no_duplicates)
        except (ValueError, RecursionError) as error:  # both JSON and UTF-8 faults are ValueErrors
            raise self._fault(f"the header is not JSON ({error})") from None
        if not isinstance(header, dict):
            raise self._fault("the header is not a JSON object")

        metadata = header.pop(METADATA_NAME, None)
        if metadata is None:
            metadata = {}
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise self._fault("__metadata__ is not an object of strings")
        if not all(is_unicode(text) for pair in metadata.items() for text in pair):
            raise self._fault("__metadata__ is not valid Unicode")
        slots = {name: self._slot(name, entry, 8 + length) for name, entry in header.items()}
        self._check_cover(slots, 8 + length)
        return metadata, slots

    def _slot(self, name: str, entry: Any, data_start: int) -> Slot:
        label = _short(name)
        if not is_unicode(name):
            raise self._fault(f"tensor name {label} is not valid Unicode")
        if not isinstance(entry, dict):
            raise self._fault(f"the entry of tensor {label} is not an object")
        dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
            raise self._fault(f"tensor {label} has dtype {_short(dtype)}, which the format does not know")
        if not _are_sizes(shape):
            raise self._fault(f"tensor {label} has shape {_short(shape)}, expected a list of sizes")
        if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self._fault(f"tensor {label} has data_offsets {_short(offsets)}, expected [begin, end]")
        begin, end = offsets
        bits = prod(shape) * DTYPE_BITS[dtype]
        if bits % 8 or bits // 8 != end - begin:
            raise self._fault(
                f"tensor {label} is {dtype} {_short(shape)}, that is {bits:,} bits, "
                f"but its offsets hold {end - begin:,} bytes"
            )
        return Slot(dtype, tuple(shape), data_start + begin, end - begin)

    def _check_cover(self, slots: Mapping[str, Slot], data_start: int) -> None:
        """Refuse truncation, overlaps, holes and bytes that belong to no tensor."""
        last = max((slot.start + slot.nbytes for slot in slots.values()), default=data_start)
        if last > self.nbytes:
            raise self._fault(f"the header describes {last:,} bytes, the file has {self.nbytes:,}: it is truncated")
        end = data_start
        for name, slot in sorted(slots.items(), key=lambda item: (item[1].start, item[1].nbytes)):
            if slot.start != end:
                raise self._fault(
                    f"tensor {_short(name)} starts at byte {slot.start:,}, expected {end:,}: overlap or hole"
                )
            end = slot.start + slot.nbytes
        if end != self.nbytes:
            raise self._fault(f"{self.nbytes - end:,} bytes after the last tensor belong to none")


@dataclass(frozen=True)
class Planned:
    """A tensor that is going to be written: name, dtype and shape as in the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8


class SafetensorsLayout:
    """Where each planned tensor will lie, decided before any data is read.

    Tensors are ordered by falling element size (stable otherwise), so that each is aligned to its own size.

    Attributes:
        offsets: the file offset of each tensor's first byte, by name.
        nbytes: size of the whole file.
    """

    def __init__(self, tensors: Iterable[Planned], metadata: Mapping[str, str]):
        self._tensors = sorted(tensors, key=lambda tensor: -DTYPE_BITS[tensor.dtype])
        start = len(self.header(metadata))
        self.header_nbytes = start
        self.offsets: dict[str, int] = {}
        for tensor in self._tensors:
            self.offsets[tensor.name] = start
            start += tensor.nbytes
        self.nbytes = start

    def header(self, metadata: Mapping[str, str]) -> bytes:
        """Return the file's first bytes; metadata of the same length gives a header of the same length."""
        header: dict[str, Any] = {METADATA_NAME: dict(metadata)} if metadata else {}
        begin = 0
        for tensor in self._tensors:
            end = begin + tensor.nbytes
            header[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
            begin = end
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


def open_for_reading(path: Path) -> int:
    """Open a regular file and return its descriptor.

    Raises:
        SourceError: there is none, it may not be read, or it is a folder, pipe or device.
    """
    kind = file_kind(path)
    if kind != "file":
        what = {"folder": "is a folder", "other": "is not a regular file", None: "does not exist"}[kind]
        raise SourceError(f"{path}: {what}, expected a file")
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from None


def file_kind(path: Path) -> Literal["file", "folder", "other"] | None:
    """Tell what a path leads to, or None where nothing is.

    Raises:
        SourceError: nothing can have this name, or it may not be looked at.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        reason = getattr(error, "strerror", None) or error
        raise SourceError(f"{path}: cannot be read: {reason}") from None
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"


def closer_of(fd: int) -> Callable[[], None]:
    """Return a function that closes a descriptor once; called again it leaves alone who has the number by then."""
    left = [fd]

    def close() -> None:
        if left:
            os.close(left.pop())

    return close


def lfs_pointer_fault(fd: int, path: Path) -> SourceError | None:
    """Return the error of a file that a git checkout without Git LFS leaves in place of a large one, or None."""
    text = read_at(fd, path, 0, min(os.fstat(fd).st_size, 200))
    if not text.startswith(_LFS_MAGIC):
        return None
    size = re.search(rb"^size (\d{1,18})$", text, re.MULTILINE)
    of = f" of {int(size[1]):,} bytes" if size else ""
    return SourceError(f"{path}: is a Git LFS pointer to a file{of}, not the file", hint="fetch it: git lfs pull")


def stamp_of(fd: int) -> Stamp:
    """Return device, inode, bytes and time of the last change of an open file."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_at(fd: int, path: Path, offset: int, nbytes: int) -> bytes:
    """Read exactly `nbytes` bytes at `offset`; a short file or a read error names file and offset."""
    parts: list[bytes] = []
    while nbytes:
        try:
            part = os.pread(fd, min(nbytes, 1 << 30), offset)
        except OSError as error:
            raise _read_error(path, offset, error) from None
        if not part:
            raise _cut_short(fd, path, offset, nbytes)
        parts.append(part)
        offset += len(part)
        nbytes -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_at_into(fd: int, path: Path, offset: int, room: memoryview) -> None:
    """Fill bytes with what lies at `offset`; errors are those of `read_at`."""
    while room:
        try:
            count = os.preadv(fd, [room[: 1 << 30]], offset)
        except OSError as error:
            raise _read_error(path, offset, error) from None
        if not count:
            raise _cut_short(fd, path, offset, len(room))
        room, offset = room[count:], offset + count


def _read_error(path: Path, offset: int, error: OSError) -> SourceError:
    return SourceError(f"{path}: reading at byte {offset:,} failed: {error.strerror}")


def _cut_short(fd: int, path: Path, offset: int, nbytes: int) -> SourceError:
    end = min(offset, os.fstat(fd).st_size)  # it may have ended long before
    return SourceError(f"{path}: ends at byte {end:,}, {offset + nbytes - end:,} more were expected: it is truncated")


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object of its pairs, for json.loads; a key that occurs twice is a ValueError."""
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ValueError(f"key {_short(key)} occurs twice")
        seen[key] = value
    return seen


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    """Tell whether a JSON value is a short list of sizes that fit 63 bits."""
    if not isinstance(value, list) or len(value) > _MAX_RANK:
        return False
    return all(type(v) is int and 0 <= v < 1 << 63 for v in value)


def name_fault(name: str) -> str | None:
    """Say why the format cannot hold a tensor of this name, or return None."""
    if name == METADATA_NAME:
        return "the name is reserved in safetensors"
    return None if is_unicode(name) else "the name is not valid Unicode"


def is_unicode(text: str) -> bool:
    """Tell whether a text has no lone surrogates, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _short(value: Any) -> str:
    """Return a value as a message can show it: a hostile header may hold megabytes."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
