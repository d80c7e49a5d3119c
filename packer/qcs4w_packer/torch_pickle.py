"""What torch.save wrote, unpickled without its data: the tensors, and where their storages lie.

Two forms: a zip archive (NAME/data.pkl, NAME/data/KEY, uncompressed), and the older stream: five pickles, then each
storage after 8 bytes with its count of elements. The pickles are read by torch's own restricted unpickler, the one of
`torch.load(weights_only=True)`. Source: pytorch/pytorch 2.13, torch/serialization.py, _load and _legacy_load.
"""

import io
import mmap
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch._weights_only_unpickler import Unpickler

from .errors import SourceError
from .safetensors_file import read_at

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_LARGEST_STRING = 1 << 28  # bytes of one string in a pickle
_IS_FOLDER = 0x10  # among the attributes of a zip entry; torch would give memory that it has not read into
_LOCAL_HEADER = 30  # bytes of a zip entry before its name


@dataclass(frozen=True)
class Storage:
    """Where the memory of tensors lies in the file.

    Attributes:
        start: the first byte.
        nbytes: how many.
    """

    start: int
    nbytes: int


@dataclass(frozen=True)
class Unpickled:
    """What a file holds.

    Attributes:
        content: what was saved; its tensors are not to be read, they mostly have no data.
        storages: by the address of the storage (`UntypedStorage._cdata`).
        is_big_endian: numbers are stored the other way round.
        kept: keeps the addresses taken.
    """

    content: Any
    storages: dict[int, Storage]
    is_big_endian: bool
    kept: tuple[object, ...]


def unpickle(fd: int, path: Path) -> Unpickled:
    """Unpickle a file of torch.save with `weights_only`; no tensor's data is read.

    Raises:
        SourceError: the storages are not where they should be.
        pickle.UnpicklingError: it needs more than tensors, or is damaged.
        Exception: whatever else a damaged pickle makes the unpickler raise.
    """
    with os.fdopen(os.dup(fd), "rb") as stream, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of prototypes and deprecations, none of which the user can mend here
        stream.seek(0)
        try:
            if zipfile.is_zipfile(stream):
                return _unpickle_zip(stream, fd, path)
            stream.seek(0)
            return _unpickle_stream(stream, fd, path)
        finally:
            torch._utils._sparse_tensors_to_validate.clear()  # as torch.load does


class _Reader:
    """A file as the unpickler reads it, with bounds on what it may take at once."""

    def __init__(self, stream: IO[bytes]):
        self._stream = stream

    def read(self, nbytes: int) -> bytes:
        """Read so many bytes, or fewer at the end."""
        if nbytes > _LARGEST_STRING:
            raise pickle.UnpicklingError(f"a string of {nbytes:,} bytes")
        return self._stream.read(nbytes)

    def readline(self) -> bytes:
        """Read a line, which is part of a global's name."""
        line = self._stream.readline(_LARGEST_STRING)
        if line == b"bytearray\n":  # is allowed by torch, and bytearray(n) takes n bytes at once
            raise pickle.UnpicklingError("GLOBAL builtins.bytearray is not read here")
        return line


class _Storages:
    """Makes a storage for each persistent id of a pickle, without data.

    Args:
        limit: bytes of the file, which no storage can pass.
        mapped: makes storages of the file's memory map, by key and bytes, in place of ones on the meta device.
    """

    def __init__(self, limit: int, mapped: Callable[[str, int], torch.UntypedStorage] | None = None):
        self._limit, self._mapped = limit, mapped
        self.by_key: dict[str, tuple[torch.storage.TypedStorage, int]] = {}  # and its bytes

    def load(self, saved_id: Any) -> torch.storage.TypedStorage:
        """Return the storage of an id as torch.save writes them."""
        if not isinstance(saved_id, tuple) or len(saved_id) not in (5, 6):
            raise pickle.UnpicklingError(f"storage {saved_id!r:.100}")
        _, kind, key, _, count, *view = saved_id
        if view not in ([], [None]) or not isinstance(key, str) or type(count) is not int or count < 0:
            raise pickle.UnpicklingError(f"storage {saved_id!r:.100}")
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        if key not in self.by_key:
            nbytes = count * dtype.itemsize
            if nbytes > self._limit:
                raise pickle.UnpicklingError(f"a storage has {nbytes:,} bytes, the file {self._limit:,}: truncated")
            memory = self._mapped(key, nbytes) if self._mapped else _without_data(nbytes)
            typed = torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
                wrap_storage=memory, dtype=dtype, _internal=True
            )
            self.by_key[key] = (typed, nbytes)
        return self.by_key[key][0]

    def unpickled(self, content: Any, place: Callable[[str, int], int], *, is_big_endian: bool = False) -> Unpickled:
        """Return the result once every storage has its place."""
        storages = {
            typed._untyped_storage._cdata: Storage(place(key, nbytes), nbytes)
            for key, (typed, nbytes) in self.by_key.items()
        }
        return Unpickled(content, storages, is_big_endian, tuple(self.by_key.values()))


def _without_data(nbytes: int) -> torch.UntypedStorage:
    return torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()


def _load(stream: IO[bytes], storages: _Storages | None = None) -> Any:
    unpickler = Unpickler(_Reader(stream), encoding="utf-8")
    if storages is not None:
        unpickler.persistent_load = storages.load  # type: ignore[method-assign]  # as torch.load does
    return unpickler.load()  # type: ignore[no-untyped-call]


def _unpickle_zip(stream: IO[bytes], fd: int, path: Path) -> Unpickled:
    nbytes = os.fstat(fd).st_size
    with zipfile.ZipFile(stream) as archive:
        records: dict[str, zipfile.ZipInfo] = {}
        for info in archive.infolist():
            _, _, name = info.filename.partition("/")
            if name in records:
                raise SourceError(f"{path}: record '{name:.100}' occurs twice")
            records[name] = info
        if "constants.pkl" in records:
            raise SourceError(f"{path}: is a TorchScript archive", hint="save its state_dict() with torch.save")
        small = {name: _record(info, fd, path) for name, info in records.items() if name in ("data.pkl", "byteorder")}
    if "data.pkl" not in small:
        raise pickle.UnpicklingError("a zip file without a data.pkl")

    def place(key: str, wanted: int) -> int:
        info = records.get(f"data/{key}")
        if info is None:
            raise SourceError(f"{path}: has no record 'data/{key:.100}'; it is not whole")
        start, found = _record(info, fd, path)
        if found != wanted:
            raise SourceError(f"{path}: record 'data/{key:.100}' has {found:,} bytes, expected {wanted:,}")
        return start

    order = read_at(fd, path, *small["byteorder"]) if "byteorder" in small else b"little"
    if order not in (b"little", b"big"):
        raise SourceError(f"{path}: byte order {order!r:.40} is not known")
    pickled = read_at(fd, path, *small["data.pkl"])
    storages = _Storages(nbytes)
    try:
        content = _load(io.BytesIO(pickled), storages)
    except (NotImplementedError, RuntimeError):  # quantized and nested tensors are not made without their data
        memory = torch.frombuffer(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY), dtype=torch.uint8).untyped_storage()
        storages = _Storages(nbytes, lambda key, wanted: memory[(start := place(key, wanted)) : start + wanted])
        content = _load(io.BytesIO(pickled), storages)
    return storages.unpickled(content, place, is_big_endian=order == b"big")


def _record(info: zipfile.ZipInfo, fd: int, path: Path) -> tuple[int, int]:
    """Return a record's first byte in the file and its size."""
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise SourceError(f"{path}: record '{info.filename:.100}' is compressed", hint="save it again with torch.save")
    if info.compress_size != info.file_size or info.external_attr & _IS_FOLDER:
        raise SourceError(f"{path}: record '{info.filename:.100}' is damaged: it has {info.compress_size:,} bytes")
    header = read_at(fd, path, info.header_offset, _LOCAL_HEADER)
    if header[:4] != b"PK\x03\x04":
        raise SourceError(f"{path}: record '{info.filename:.100}' is not where the zip directory says")
    name, extra = struct.unpack("<HH", header[26:])
    start = info.header_offset + _LOCAL_HEADER + name + extra
    end = start + info.file_size
    nbytes = os.fstat(fd).st_size
    if end > nbytes:
        raise SourceError(f"{path}: record '{info.filename:.100}' ends at byte {end:,}, the file has {nbytes:,}")
    return start, info.file_size


def _unpickle_stream(stream: IO[bytes], fd: int, path: Path) -> Unpickled:
    if _load(stream) != _MAGIC:
        raise pickle.UnpicklingError("no file of torch.save: it does not begin with the magic number")
    if (version := _load(stream)) != _PROTOCOL:
        raise pickle.UnpicklingError(f"protocol version {version!r:.40} is not known")
    _load(stream)  # of the system that wrote it; data are little-endian whatever it says
    nbytes = os.fstat(fd).st_size
    storages = _Storages(nbytes)
    content = _load(stream, storages)
    keys = _load(stream)
    if not isinstance(keys, list) or len(set(map(str, keys))) != len(keys):
        raise pickle.UnpicklingError("the list of storages is none")
    starts: dict[str, int] = {}
    at = stream.tell()
    for key in keys:
        if not isinstance(key, str) or key not in storages.by_key:
            raise pickle.UnpicklingError(f"storage {key!r:.100} belongs to no tensor")
        typed, expected = storages.by_key[key]
        (count,) = struct.unpack("<q", read_at(fd, path, at, 8))
        if count * typed.dtype.itemsize != expected or at + 8 + expected > nbytes:
            raise SourceError(
                f"{path}: a storage at byte {at:,} has {count:,} elements, expected {expected:,} bytes: truncated"
            )
        starts[key] = at + 8
        at += 8 + expected

    def place(key: str, _: int) -> int:
        if key not in starts:
            raise SourceError(f"{path}: has no data for storage '{key:.100}'; it is not whole")
        return starts[key]

    return storages.unpickled(content, place)
