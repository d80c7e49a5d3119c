"""Tensors of weight files that can be read row by row, whatever the file's format; `sources` opens the files.

A reader for one format supplies raw bytes only (`SourceTensor.fetch`); what they mean as float32 is told here,
once for all formats. Bytes go into a container unchanged when a tensor is carried along.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from .closing import Closing
from .errors import NonFiniteError
from .fp8 import Fp8Rows
from .safetensors_file import DTYPE_BITS, Slot
from .scratch import Scratch

#: The name given to the tensor of a file that names none (.npy, or one bare tensor in a .pt).
NAMELESS = "weight"

#: What can be quantized, by the safetensors name of the dtype.
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")

_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class SourceTensor:
    """One tensor of a weight file.

    Attributes:
        name: its name in the file.
        dtype: as safetensors names it (F32, BF16, …).
        shape: any rank.
        fetch: (start, stop) -> the bytes of these rows, little-endian, C order. A row is the last dimension;
            all others are counted through. Where rows do not end on whole bytes (4- and 6-bit dtypes) all is one row.
        storage: equal for tensors that are one and the same memory (tied weights), else None.
        file: the weight file that holds it; None where the source is one file.
        direction: what the file or its config says of a linear weight, "out-in" or "in-out"; None where they do not.
        fp8: how codes of 8-bit floats become floats, where their scales are known.
        is_held: fetching a row holds the whole tensor in memory, in the place of the last one: threads must not go
            from one such tensor to another and back.
        fetch_into: (start, stop, room) -> fetches the bytes of these rows into memory of exactly their size; None
            where the format cannot.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    fetch: Callable[[int, int], bytes] = field(repr=False, compare=False)
    storage: Hashable = None
    file: Path | None = None
    direction: Literal["out-in", "in-out"] | None = None
    fp8: Fp8Rows | None = field(default=None, repr=False, compare=False)
    is_held: bool = field(default=False, repr=False, compare=False)
    fetch_into: Callable[[int, int, memoryview], None] | None = field(default=None, repr=False, compare=False)

    @property
    def is_float(self) -> bool:
        """Whether its rows can be read as float32."""
        return self.dtype in FLOAT_DTYPES or self.fp8 is not None

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    @property
    def rows(self) -> int:
        """Rows as `fetch` counts them."""
        return _row_count(self.dtype, self.shape)

    def chunks(self) -> Iterator[tuple[int, bytes]]:
        """Yield (first row, bytes) of consecutive rows, about 16 MiB at a time, at least one row."""
        if not self.nbytes:
            return
        rows = self.rows
        step = max(1, _CHUNK_BYTES // max(1, self.nbytes // rows))
        for start in range(0, rows, step):
            yield start, self.fetch(start, min(start + step, rows))

    def float_rows(self) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield (first row, float32 rows of shape (n, K)) for a float tensor of any rank; fp8 is dequantized.

        Raises:
            NonFiniteError: a finite float64 value is beyond float32; a value of fp8 is not finite.
        """
        rows = self.rows
        step = max(1, _CHUNK_BYTES * rows // max(1, self.nbytes))
        for start in range(0, rows if self.nbytes else 0, step):
            yield start, self.floats(start, min(start + step, rows))

    def floats(self, start: int, stop: int, scratch: Scratch | None = None) -> NDArray[np.float32]:
        """Return rows [start, stop) of a float tensor as float32, shape (n, K); any thread may ask.

        Args:
            start: number of the first row.
            stop: number of the row after the last.
            scratch: memory of the calling thread that the answer may lie in, until it is asked again.

        Raises:
            NonFiniteError: a finite float64 value is beyond float32; a value of fp8 is not finite.
        """
        data = self._fetched(start, stop, scratch)
        if self.fp8 is not None:
            return self.fp8(data, start)
        columns = self.shape[-1] if self.shape else 1
        return widen(data, self.dtype, name=self.name, first_row=start, columns=columns, scratch=scratch)

    def _fetched(self, start: int, stop: int, scratch: Scratch | None) -> bytes | memoryview:
        if scratch is None or self.fetch_into is None:
            return self.fetch(start, stop)
        room = scratch.array("fetched", (self.nbytes // max(1, self.rows) * (stop - start),), np.uint8).data
        self.fetch_into(start, stop, room)
        return room

    def read_rows(self, stop: int) -> NDArray[np.float32]:
        """Return the first rows of a float matrix (N, K), as float32 (min(stop, N), K)."""
        parts = []
        for start, rows in self.float_rows():
            parts.append(rows[: stop - start])
            if start + len(rows) >= stop:
                break
        return np.concatenate(parts) if parts else np.empty((0, self.shape[-1]), np.float32)

    def read(self) -> NDArray[np.float32]:
        """Return a float tensor whole, as float32 in its own shape."""
        parts = [rows.reshape(-1) for _, rows in self.float_rows()]
        flat = np.concatenate(parts) if parts else np.empty(0, np.float32)
        return flat.reshape(self.shape)


@dataclass(frozen=True)
class Source(Closing):
    """An open weight file, or a folder of them. Use it as a context manager.

    Attributes:
        path: where it lies.
        tensors: by name, in the file's order.
        metadata: the file's own string metadata (safetensors only).
        nameless: the file names no tensor; its only one is called NAMELESS here.
        left_out: what the file holds besides tensors that a container can hold, described for people.
        unreadable: tensors that it names and whose floats it does not have, with the reason.
        shards: the weight files of a folder, in order; empty where the source is one file.
        beside: what else a checkpoint needs and is carried along with a folder (config.json, tokenizer files).
        config: what config.json says; empty without one.
        closer: closes the file.
    """

    path: Path
    tensors: dict[str, SourceTensor]
    metadata: dict[str, str] = field(default_factory=dict)
    nameless: bool = False
    left_out: tuple[str, ...] = ()
    unreadable: Mapping[str, str] = field(default_factory=dict)
    shards: tuple[Path, ...] = ()
    beside: tuple[Path, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    closer: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)

    def aliases_of(self, name: str) -> list[str]:
        """Return a tensor's other names in the metadata, where safetensors.torch.save_model puts tied ones."""
        return self._aliases.get(name, [])

    @cached_property
    def _aliases(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for alias, owner in self.metadata.items():
            if owner in self.tensors and alias not in self.tensors:
                found.setdefault(owner, []).append(alias)
        return found

    def close(self) -> None:
        """Close the file; fetching afterwards is an error."""
        self.closer()


class Readable(Protocol):
    """A file that can be read at an offset."""

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read exactly `nbytes` bytes."""

    def read_into(self, offset: int, room: memoryview) -> None:
        """Read as many bytes as there is room for."""


def slot_tensor(file: Readable, name: str, slot: Slot) -> SourceTensor:
    """Make one slot of an open safetensors file readable by rows."""
    row_nbytes = slot.nbytes // max(1, _row_count(slot.dtype, slot.shape))

    def fetch(start: int, stop: int) -> bytes:
        return file.read(slot.start + start * row_nbytes, (stop - start) * row_nbytes)

    def fetch_into(start: int, stop: int, room: memoryview) -> None:
        file.read_into(slot.start + start * row_nbytes, room)

    return SourceTensor(name, slot.dtype, slot.shape, fetch, fetch_into=fetch_into)


def _row_count(dtype: str, shape: tuple[int, ...]) -> int:
    if shape and shape[-1] * DTYPE_BITS[dtype] % 8:
        return 1
    return prod(shape[:-1])


def _from_row(first: int, fetch_into: Callable[[int, int, memoryview], None]) -> Callable[[int, int, memoryview], None]:
    return lambda start, stop, room: fetch_into(first + start, first + stop, room)


def split_stack(tensor: SourceTensor) -> list[SourceTensor]:
    """Split a stack of matrices [E, N, K] into E tensors [N, K] named T.0, T.1, …"""
    experts, rows, columns = tensor.shape

    def part(index: int) -> SourceTensor:
        first = index * rows

        def fetch(start: int, stop: int) -> bytes:
            return tensor.fetch(first + start, first + stop)

        name = f"{tensor.name}.{index}"
        fp8 = tensor.fp8 and tensor.fp8.part(name, first)
        into = tensor.fetch_into and _from_row(first, tensor.fetch_into)
        return replace(tensor, name=name, shape=(rows, columns), fetch=fetch, fetch_into=into, storage=None, fp8=fp8)

    return [part(index) for index in range(experts)]


def widen(
    data: bytes | memoryview,
    dtype: str,
    *,
    name: str,
    columns: int,
    first_row: int = 0,
    scratch: Scratch | None = None,
) -> NDArray[np.float32]:
    """Turn raw little-endian floats into float32 rows, exactly but for F64, which is rounded.

    Args:
        data: whole rows.
        dtype: one of FLOAT_DTYPES.
        name: tensor name, for messages.
        columns: K.
        first_row: number of the first row, for messages.
        scratch: memory that the answer may lie in.

    Returns:
        float32, shape (n, K).
    """
    if dtype == "BF16":
        halves = np.frombuffer(data, "<u2").reshape(-1, columns)
        bits = (scratch or Scratch()).array("widened", halves.shape, np.uint32)
        np.left_shift(halves, np.uint32(16), out=bits)
        return bits.view(np.float32)
    stored = np.frombuffer(data, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype]).reshape(-1, columns)
    with np.errstate(over="ignore", invalid="ignore"):
        narrow: NDArray[np.float32] = stored
        if dtype != "F32":
            narrow = (scratch or Scratch()).array("widened", stored.shape, np.float32)
            np.copyto(narrow, stored, casting="same_kind")
    if dtype == "F64":
        lost = np.isinf(narrow) & np.isfinite(stored)
        if lost.any():
            row, column = (int(i) for i in np.argwhere(lost)[0])
            raise NonFiniteError(
                f"tensor '{name}' holds {stored[row, column]} at row {first_row + row}, column {column}, "
                "which is beyond float32",
            )
    return narrow
