"""NumPy's .npy and .npz as sources. Object arrays are never unpickled."""

import contextlib
import lzma
import os
import struct
import threading
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from .errors import SourceError
from .open_files import OpenFiles, PooledFile
from .safetensors_file import name_fault, open_for_reading, stamp_of
from .strided import LastWhole, Strided, strided_fetch
from .weights import NAMELESS, Source, SourceTensor

# No deflate stream shrinks by more than this. Source: zlib's technical notes.
_MAX_DEFLATE_RATIO = 1032

# What zipfile and its decompressors raise when they meet damage; `RuntimeError` covers encrypted members.
_ZIP_FAULTS = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, OSError, ValueError, OverflowError,
    NotImplementedError, RuntimeError,
)  # fmt: skip

# What numpy raises for headers that are not what it has written: it evaluates them as Python literals.
_HEADER_FAULTS = (
    ValueError, TypeError, LookupError, SyntaxError, tokenize.TokenError, OverflowError, RecursionError, MemoryError,
    EOFError, OSError,
)  # fmt: skip

_DTYPES = {
    "b1": "BOOL", "u1": "U8", "i1": "I8", "u2": "U16", "i2": "I16", "f2": "F16", "u4": "U32", "i4": "I32",
    "f4": "F32", "u8": "U64", "i8": "I64", "f8": "F64", "c8": "C64",
}  # fmt: skip


def open_npy(path: Path) -> Source:
    """Open a .npy file: one nameless tensor, read by rows, or held whole if it lies in Fortran order.

    Raises:
        SourceError: not a sound .npy file, or its dtype has no counterpart in safetensors.
    """
    fd = open_for_reading(path)
    files, whole = OpenFiles(), LastWhole()
    try:
        with os.fdopen(os.dup(fd), "rb") as stream:
            shape, fortran, dtype = _read_header(stream, path, os.fstat(fd).st_size)
            start = stream.tell()
        files.add(path, stamp_of(fd))
    finally:
        os.close(fd)
    name = _safetensors_dtype(dtype)
    if name is None:
        raise SourceError(f"{path}: dtype {dtype} cannot be read as a tensor", hint="save it as float32")
    part = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
    sizes = shape if fortran else shape[::-1]
    strides = tuple(prod(sizes[:axis]) for axis in range(len(shape)))  # of the fastest dimension first
    array = Strided(
        start, dtype.itemsize, shape, strides if fortran else strides[::-1], swapped=part if _is_swapped(dtype) else 0
    )
    fetch = strided_fetch(PooledFile(files, path), array, whole)
    tensor = SourceTensor(NAMELESS, name, shape, fetch, is_held=not array.is_plain)

    def close() -> None:
        whole.clear()
        files.close()

    return Source(path, {NAMELESS: tensor}, nameless=True, closer=close)


def _is_swapped(dtype: np.dtype[Any]) -> bool:
    return dtype.newbyteorder("<") != dtype


def npy_data_start(path: Path) -> int:
    """Return the offset of the first byte of a .npy file's data.

    Raises:
        SourceError: not a sound .npy file.
    """
    with os.fdopen(open_for_reading(path), "rb") as stream:
        _read_header(stream, path, os.fstat(stream.fileno()).st_size)
        return stream.tell()


def open_npz(path: Path) -> Source:
    """Open a .npz file; each member is read whole when its rows are first asked for, and the last one is kept.

    Raises:
        SourceError: not a sound .npz file.
    """
    os.close(open_for_reading(path))  # for its messages
    try:
        archive = zipfile.ZipFile(path)
    except _ZIP_FAULTS as error:
        raise SourceError(f"{path}: not a sound .npz file: {error!s:.200}") from None
    try:
        tensors: dict[str, SourceTensor] = {}
        left_out: list[str] = []
        last: dict[str, Callable[[int, int], bytes]] = {}
        lock = threading.Lock()

        def fetch_of(member: str) -> Callable[[int, int], bytes]:
            def fetch(start: int, stop: int) -> bytes:
                with lock:
                    if member not in last:
                        last.clear()
                        last[member] = _array_fetch(_read_member(archive, member, path))
                    rows = last[member]
                return rows(start, stop)

            return fetch

        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if info.filename == name:
                left_out.append(f"{name} (not an array)")
                continue
            if fault := name_fault(name):
                left_out.append(f"{name!r} ({fault})")
                continue
            if name in tensors:
                raise SourceError(f"{path}: array '{name:.100}' occurs twice")
            if info.file_size > _MAX_DEFLATE_RATIO * info.compress_size + 64:
                raise SourceError(
                    f"{path}: member '{info.filename:.100}' claims {info.file_size:,} bytes from {info.compress_size:,}"
                )
            with _zip_faults(path, info.filename), archive.open(info) as stream:
                shape, _, dtype = _read_header(stream, path, info.file_size, member=info.filename)
            dtype_name = _safetensors_dtype(dtype)
            if dtype_name is None:
                left_out.append(f"{name} (dtype {dtype} has no safetensors counterpart)")
            else:
                tensors[name] = SourceTensor(name, dtype_name, shape, fetch_of(info.filename), is_held=True)
    except BaseException:
        archive.close()
        raise
    return Source(path, tensors, left_out=tuple(left_out), closer=archive.close)


@contextlib.contextmanager
def _zip_faults(path: Path, member: str) -> Iterator[None]:
    """Turn every fault of zipfile and zlib into one SourceError."""
    try:
        yield
    except _ZIP_FAULTS as error:
        raise SourceError(f"{path}: member '{member:.100}' cannot be read: {error!s:.200}") from None


def _read_member(archive: zipfile.ZipFile, member: str, path: Path) -> NDArray[Any]:
    with _zip_faults(path, member), archive.open(member) as stream:
        return npy_format.read_array(stream, allow_pickle=False)


def _read_header(
    stream: IO[bytes], path: Path, available: int, member: str | None = None
) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read an .npy header; return (shape, is Fortran order, dtype) once the data's size is known to fit."""
    where = f"{path}: member '{member:.100}'" if member else f"{path}"
    try:
        version = npy_format.read_magic(stream)
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ValueError(f"version {version} is not known")
        read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
    except _HEADER_FAULTS as error:
        raise SourceError(f"{where}: not a sound .npy file: {error!s:.200}") from None
    if len(shape) > 64 or any(size < 0 for size in shape):
        raise SourceError(f"{where}: shape {shape} is not one of an array")
    if dtype.hasobject:
        raise SourceError(
            f"{where}: holds Python objects (dtype {dtype}), which only unpickling could read; nothing was run",
            hint="save it again as a plain float array",
        )
    expected, found = prod(shape) * dtype.itemsize, available - stream.tell()
    if expected != found:
        raise SourceError(
            f"{where}: {dtype} {list(shape)} needs {expected:,} bytes of data, the file has {found:,}",
            hint="save or download it again; it may be truncated",
        )
    return tuple(int(size) for size in shape), bool(fortran), dtype


def _safetensors_dtype(dtype: np.dtype[Any]) -> str | None:
    return None if dtype.fields else _DTYPES.get(f"{dtype.kind}{dtype.itemsize}")


def _array_fetch(array: NDArray[Any]) -> Callable[[int, int], bytes]:
    rows = array.reshape(-1, array.shape[-1] if array.ndim else 1)  # no copy of a matrix in Fortran order

    def fetch(start: int, stop: int) -> bytes:
        return rows[start:stop].astype(array.dtype.newbyteorder("<"), copy=False).tobytes()

    return fetch
