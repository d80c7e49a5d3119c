"""Packed bytes that nothing describes: a stretch of any file, or an array, with what the user knows about it."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .errors import SourceError, UsageError
from .metadata import PackedEntry
from .nibbles import pack_codes
from .npy_file import npy_data_start
from .packed import PackedLinear
from .packed_file import PackedFile
from .readings import RIGHT, Reading
from .safetensors_file import DTYPE_BITS, open_for_reading, read_at
from .sources import open_source
from .weights import FLOAT_DTYPES, NAMELESS, widen

#: The dtypes that raw scales may have.
SCALE_DTYPES = ("F32", "F16", "BF16")

# Scales in a file of these are an array; in any other, .bin too, they are raw bytes.
_ARRAY_SUFFIXES = (".npy", ".npz", ".safetensors", ".pt", ".pth")


@dataclass(frozen=True)
class Blob:
    """What the user says about packed bytes.

    Attributes:
        shape: N and K; None where only the evidence tells (see `explain`).
        offset: of the first packed byte in its file.
        scales: the file of the scales: an array file with one array, or raw bytes. None: scales are not known.
        scales_offset: of the first scale in it, or in the file itself where `scales` is None; None: nothing else is
            in the file of the scales.
        scales_dtype: of raw scales, one of SCALE_DTYPES.
        layout: how the codes lie in the bytes, one of `readings.NAMED`.
    """

    shape: tuple[int, int] | None = None
    offset: int = 0
    scales: Path | None = None
    scales_offset: int | None = None
    scales_dtype: str = "F32"
    layout: Reading = RIGHT

    def settled(self, path: Path) -> "Blob":
        """Return the same with the file of the scales named: `path` itself where only an offset is given.

        Raises:
            UsageError: a dtype is given for scales that are not.
        """
        if self.scales is None and self.scales_offset is not None:
            return replace(self, scales=path)
        if self.scales is None and self.scales_dtype != "F32":
            raise UsageError(f"{path}: scales of {self.scales_dtype} have no place", hint="say it with --scales FILE")
        return self


class BlobFile(PackedFile):
    """One packed linear in a file that says nothing of it, called "weight".

    Args:
        path: any file; a .npy counts from the first byte of its data.
        blob: what its bytes are.

    Raises:
        SourceError: a file cannot be read or is too short.
        UsageError: the scales do not fit the shape.
    """

    format = "raw"

    def __init__(self, path: str | os.PathLike[str], blob: Blob):
        self.path = Path(path)
        self.blob = blob = blob.settled(self.path)
        if blob.shape is None:
            raise UsageError(f"{self.path}: raw packed bytes do not tell their size", hint="say it with --shape N,K")
        rows, columns = self._shape = blob.shape
        if rows < 1 or columns < 1:
            raise UsageError(f"the shape is {rows},{columns}, expected N,K of at least 1 each")
        self.entries = {NAMELESS: PackedEntry(NAMELESS, rows, columns, source_dtype="unknown", method="unknown")}
        self.carried, self.problems = [], []
        self._fd = open_for_reading(self.path)
        try:
            self._start = blob.offset
            if self.path.suffix.lower() == ".npy":
                self._start += npy_data_start(self.path)
            self._nbytes = blob.layout.nbytes(rows, columns)
            if not self._nbytes:
                raise UsageError(f"{self.path}: {rows} × {columns} cannot lie as {blob.layout.label}")
            needed, there = self._start + self._nbytes, os.fstat(self._fd).st_size
            if needed > there:
                raise SourceError(
                    f"{self.path}: has {there:,} bytes, {rows} × {columns} packed from byte {self._start:,} on end at "
                    f"{needed:,}",
                    hint="K columns take ceil(K / 2) bytes a row; look at --shape and --offset",
                )
            self._scales = read_scales(blob, rows)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def files(self) -> tuple[Path, ...]:
        """The file of the packed bytes, and that of the scales."""
        return (self.path, *([self.blob.scales] if self.blob.scales else []))

    @property
    def has_scales(self) -> bool:
        """Whether the scales are known; where they are not, `arrays` returns ones."""
        return self.blob.scales is not None

    def load(self, name: str) -> PackedLinear:
        """Read the weight.

        Raises:
            UsageError: its scales are not known.
            UnknownTensorError, ContainerError: as for any packed file.
        """
        if not self.has_scales:
            raise UsageError(f"{self.path}: raw packed bytes have no scales", hint="name their file with --scales")
        return super().load(name)

    def arrays(self, entry: PackedEntry) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Read packed bytes (N, K_packed), brought into qcs4w's own layout if they lie otherwise, and scales (N,)."""
        rows, columns = self._shape
        data = np.frombuffer(read_at(self._fd, self.path, self._start, self._nbytes), np.uint8)
        if self.blob.layout == RIGHT:
            packed = data.reshape(rows, -1)
        else:
            packed = pack_codes(self.blob.layout.matrix(data, rows, columns))
        return packed, self.scales(entry)

    def scales(self, entry: PackedEntry) -> NDArray[np.float32]:
        """Return the scales (N,); ones where they are not known."""
        return np.ones(entry.out_features, np.float32) if self._scales is None else self._scales

    def row_reader(self, entry: PackedEntry) -> Callable[[int, int], NDArray[np.uint8]]:
        """Return a function (first row, end) -> packed rows, which reads no more than these."""
        if self.blob.layout != RIGHT:
            return super().row_reader(entry)
        width = self._nbytes // entry.out_features

        def read(start: int, stop: int) -> NDArray[np.uint8]:
            data = read_at(self._fd, self.path, self._start + start * width, (stop - start) * width)
            return np.frombuffer(data, np.uint8).reshape(stop - start, width)

        return read

    def place(self, entry: PackedEntry) -> tuple[Path, int] | None:
        """Return the file and the offset of the packed bytes; None where `arrays` brings them into another layout."""
        return (self.path, self._start) if self.blob.layout == RIGHT else None

    def scales_place(self, entry: PackedEntry) -> tuple[Path, int] | None:
        """Return the file and the offset of raw float32 scales; None for any other."""
        is_raw = self.blob.scales is not None and self.blob.scales_dtype == "F32" and not _is_array_file(self.blob)
        return (self.blob.scales, self.blob.scales_offset or 0) if is_raw and self.blob.scales else None


def read_scales(blob: Blob, rows: int) -> NDArray[np.float32] | None:
    """Read the scales of raw bytes, float32 (N,); None where they are not known.

    Raises:
        UsageError: they are not N floats.
        SourceError: their file cannot be read.
    """
    path = blob.scales
    if path is None:
        return None
    scales = _scales_of_array_file(path) if _is_array_file(blob) else _raw_scales(path, blob, rows)
    if scales.shape != (rows,):
        raise UsageError(f"{path}: holds {len(scales):,} scales, expected {rows:,}, one a row")
    return scales


def _is_array_file(blob: Blob) -> bool:
    return blob.scales is not None and blob.scales_offset is None and blob.scales.suffix.lower() in _ARRAY_SUFFIXES


def _raw_scales(path: Path, blob: Blob, rows: int) -> NDArray[np.float32]:
    nbytes = rows * DTYPE_BITS[blob.scales_dtype] // 8
    fd = open_for_reading(path)
    try:
        there = os.fstat(fd).st_size
        if blob.scales_offset is None and there != nbytes:
            raise UsageError(
                f"{path}: has {there:,} bytes, {rows:,} scales of {blob.scales_dtype} have {nbytes:,}",
                hint="--scales-offset says where they begin, --scales-dtype what they are",
            )
        data = read_at(fd, path, blob.scales_offset or 0, nbytes)
    finally:
        os.close(fd)
    return widen(data, blob.scales_dtype, name="scales", columns=1).reshape(-1)


def _scales_of_array_file(path: Path) -> NDArray[np.float32]:
    with open_source(path) as source:
        if len(source.tensors) != 1:
            raise UsageError(
                f"{path}: holds {len(source.tensors)} arrays, expected the scales alone",
                hint="say with --scales-offset where they begin in the file, or save them alone",
            )
        tensor = next(iter(source.tensors.values()))
        if tensor.dtype not in FLOAT_DTYPES:
            raise UsageError(f"{path}: is {tensor.dtype} {list(tensor.shape)}, expected floats")
        return tensor.read().reshape(-1)
