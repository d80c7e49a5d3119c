"""Packed bytes whose layout is in question, out of any file, and the evidence that they are held against."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .arrays import read_array
from .blob_file import Blob, read_scales
from .errors import SelectionError, SourceError, UnknownTensorError, UsageError
from .explain import sample_rows
from .metadata import PackedEntry
from .name_patterns import did_you_mean
from .npy_file import npy_data_start
from .packed_sources import is_packed_file, open_packed
from .packing import source_weight
from .safetensors_file import SafetensorsFile, open_for_reading
from .sources import SUFFIXES, open_source
from .weights import Source, SourceTensor

_PACKED_DTYPES = ("U8", "I8", "I32", "U32")


@dataclass(frozen=True, eq=False)
class PackedBytes:
    """Bytes that may be packed codes.

    Attributes:
        path: the file that they came from.
        tensor: what the file calls them; None for raw bytes.
        data: uint8, flat; raw bytes reach to the end of their file, mapped and not read.
        blob: where they lie: a description with which `open_packed` reads them once shape and layout are known;
            None where they lie in no one place.
        scales: what is known of them, float32 (N,), or None; those of raw bytes are read once N is known.
        entry: what the file says of them; None where it says nothing.
        format: what the file says that it is: "qcs4w", "raw", …
    """

    path: Path
    tensor: str | None
    data: NDArray[np.uint8]
    blob: Blob | None
    scales: NDArray[np.float32] | None
    entry: PackedEntry | None
    format: str

    def scales_of(self, out_features: int) -> NDArray[np.float32] | None:
        """Return the scales, float32 (N,), if they are known."""
        return read_scales(self.blob, out_features) if self.scales is None and self.blob else self.scales


def packed_bytes(path: Path, tensor: str | None = None, blob: Blob | None = None) -> PackedBytes:
    """Find the bytes in question.

    Args:
        path: a file of packed linears, an array file with an integer tensor, or any file as raw bytes.
        tensor: its name, where the file names several.
        blob: raw bytes: where they lie; their shape and layout may be unknown.

    Raises:
        UnknownTensorError: there is no such tensor, or several and none is named.
        SourceError: the file cannot be read.
    """
    if blob is None and is_packed_file(path):
        with open_packed(path, strict=False, tensor=tensor) as file:
            entry = file.entry(tensor) if tensor is not None else file.only()
            packed, scales = file.arrays(entry)
            place, scales_place = file.place(entry), file.scales_place(entry)
            where = Blob(offset=place[1]) if place else None
            if where and scales_place:
                where = replace(where, scales=scales_place[0], scales_offset=scales_place[1])
            return PackedBytes(
                place[0] if place else path, entry.name, packed.reshape(-1), where, scales, entry, file.format
            )
    if blob is None and path.suffix.lower() in SUFFIXES and not _is_raw(path):
        with open_source(path) as source:
            stored = _integers(source, tensor)
            data = np.frombuffer(stored.fetch(0, stored.rows), np.uint8)
            where = None
            if path.suffix.lower() == ".npy":
                where = Blob()  # counts from the first byte of the data by itself
            elif path.suffix.lower() == ".safetensors":
                with SafetensorsFile(path) as file:
                    where = Blob(offset=file.slots[stored.name].start)
            return PackedBytes(path, None if source.nameless else stored.name, data, where, None, None, "array")
    blob = (blob or Blob()).settled(path)
    start = blob.offset + (npy_data_start(path) if path.suffix.lower() == ".npy" else 0)
    try:
        size = path.stat().st_size
        data = np.memmap(path, np.uint8, "r", offset=start) if start < size else np.empty(0, np.uint8)
    except (OSError, ValueError) as error:
        raise SourceError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return PackedBytes(path, None, data, blob, None, None, "raw")


def _is_raw(path: Path) -> bool:
    """Tell raw bytes in a .bin from a torch file, which is a zip archive or a pickle."""
    if path.suffix.lower() != ".bin":
        return False
    fd = open_for_reading(path)
    try:
        return os.pread(fd, 2, 0) not in (b"PK", b"\x80\x02")
    finally:
        os.close(fd)


def weight_of(
    source: Source, questioned: PackedBytes, tensor: str | None = None
) -> tuple[NDArray[np.float32], tuple[int, int]]:
    """Read as much of the float weight that the bytes may have been made of as is looked at.

    Args:
        source: a weight file.
        questioned: the bytes.
        tensor: the weight's name, where neither the bytes nor the source have only one.

    Returns:
        Its first rows, float32 (`sample_rows`, K), and its shape (N, K).

    Raises:
        UnknownTensorError: it cannot be told which of the tensors is meant.
        SelectionError: it is no float matrix.
        UsageError: it has another shape than is said of the bytes, or is empty.
    """
    if questioned.entry is not None:
        shape = (questioned.entry.out_features, questioned.entry.in_features)
        return source_weight(source, questioned.entry, sample_rows(*shape)), shape
    matrices = [name for name, each in source.tensors.items() if len(each.shape) == 2 and each.is_float]
    for name in (tensor, f"{tensor}.weight") if tensor is not None else ():
        if name in source.tensors:
            matrices = [name]
    if len(matrices) != 1:
        hint = did_you_mean(tensor, source.tensors) if tensor else "name one with --tensor"
        raise UnknownTensorError(f"{source.path}: holds {len(matrices)} float matrices, which is meant?", hint=hint)
    chosen = source.tensors[matrices[0]]
    if len(chosen.shape) != 2 or not chosen.is_float:
        raise SelectionError(
            f"{source.path}: '{chosen.name}' is {chosen.dtype} {list(chosen.shape)}, expected a float matrix [N, K]"
        )
    shape = (chosen.shape[0], chosen.shape[1])
    said = questioned.blob.shape if questioned.blob else None
    if said not in (None, shape):
        raise UsageError(f"{source.path}: the weight has shape {list(shape)}, --shape says {list(said)}")
    if 0 in shape:
        raise UsageError(f"{source.path}: the weight has shape {list(shape)}, expected at least 1 each")
    return chosen.read_rows(sample_rows(*shape)), shape


def activations_of(
    source: Source, questioned: PackedBytes, tensor: str | None, columns: int | None
) -> NDArray[np.float32]:
    """Read an input or an output of the linear, float32 (M, columns).

    Raises:
        UnknownTensorError: it cannot be told which of the arrays is meant.
        UsageError: it has other columns.
    """
    names = list(source.tensors)
    wanted = [name for name in (questioned.tensor, tensor) if name]
    wanted += [name.removesuffix(".weight") for name in wanted]
    chosen = names if len(names) == 1 else [name for name in names if name in wanted]
    if len(chosen) != 1:
        raise UnknownTensorError(
            f"{source.path}: holds {len(names)} arrays, which is meant?",
            hint="give one array, or name it as the tensor is",
        )
    array = read_array(source, chosen[0], columns)
    return array.reshape(-1, array.shape[-1])


def _integers(source: Source, tensor: str | None) -> SourceTensor:
    if tensor is not None:
        if tensor not in source.tensors:
            raise UnknownTensorError(f"{source.path}: no tensor '{tensor}'", hint=did_you_mean(tensor, source.tensors))
        chosen = source.tensors[tensor]
        if chosen.dtype not in _PACKED_DTYPES:
            raise UsageError(
                f"{source.path}: '{tensor}' is {chosen.dtype}, packed codes are {', '.join(_PACKED_DTYPES)}",
                hint=f"pack it first: qcs4w pack {source.path} -o OUT.safetensors",
            )
        return chosen
    integers = [each for each in source.tensors.values() if each.dtype in _PACKED_DTYPES and each.nbytes]
    if len(integers) != 1:
        raise UnknownTensorError(
            f"{source.path}: holds {len(integers)} integer tensors that may be packed codes",
            hint="name one with --tensor",
        )
    return integers[0]
