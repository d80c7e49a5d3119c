"""What a search looks for: rows of bytes that are made when they are asked for, never all of them at once."""

from collections.abc import Iterator
from math import log2

import numpy as np
from numpy.typing import NDArray

from .errors import DigestError
from .metadata import PackedEntry
from .packed_file import PackedFile, digest_faults
from .placements import Placement

#: Rows with fewer bytes are searched for as one stretch, all together, without gaps between them.
LEAST_ROW = 15

_KEPT = 64 << 20  # bytes of packed weights that are kept for the next comparison
_BLOCK = 1 << 20  # bytes of a needle that are made at a time


class Tensors:
    """The packed tensors that are searched for, read when they are needed; the last ones used are kept."""

    def __init__(self, file: PackedFile):
        self._file = file
        self._sound: set[str] = set()
        self._kept: dict[str, tuple[NDArray[np.uint8], NDArray[np.float32]]] = {}

    def arrays(self, entry: PackedEntry) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Return packed bytes (N, ceil(K / 2)) and scales (N,).

        Raises:
            DigestError: the bytes are not those that were written.
        """
        kept = self._kept.pop(entry.name, None)
        if kept is None:
            room = _KEPT - entry.packed_nbytes
            while self._kept and sum(packed.nbytes for packed, _ in self._kept.values()) > room:
                del self._kept[next(iter(self._kept))]  # before the next is read: one large tensor is held once
            kept = self._file.arrays(entry)
            wrong = [] if entry.name in self._sound else digest_faults(entry, *kept)
            self._sound.add(entry.name)
            if wrong:
                raise DigestError(f"{self._file.path}: {wrong[0]}", hint="look for an undamaged copy of it")
        self._kept[entry.name] = kept
        return kept


class Needle:
    """Rows of bytes.

    Attributes:
        entry: the tensor.
        rows, width: how many rows, of how many bytes; a needle of short rows counts as one row of all its bytes.
        last_mask: which bits of a row's last byte must be equal; the others are a pad.
    """

    def __init__(self, entry: PackedEntry, rows: int, width: int, last_mask: int = 0xFF):
        self.entry = entry
        self._short_width = width
        self.is_flat = width - (last_mask != 0xFF) < LEAST_ROW and rows > 1
        self.rows, self.width = (1, rows * width) if self.is_flat else (rows, width)
        self.last_mask = 0xFF if self.is_flat else last_mask

    @property
    def usable_width(self) -> int:
        """Bytes of a row that are free of pads."""
        return self.width - (self.last_mask != 0xFF)

    def read(self, rows: slice, columns: slice) -> NDArray[np.uint8]:
        """Return some bytes of some rows: uint8, shape (rows, columns); both ends of both are given."""
        if not self.is_flat:
            return self._rectangle(rows, columns)
        width = self._short_width
        first, last = columns.start // width, -(-columns.stop // width)
        flat = self._rectangle(slice(first, last), slice(0, width)).reshape(1, -1)
        return flat[:, columns.start - first * width : columns.stop - first * width]

    def opening(self, most: int) -> bytes:
        """Return the first bytes, at most one row of them."""
        return self.read(slice(0, 1), slice(0, min(self.width, most))).tobytes()

    def blocks(self, stride: int) -> Iterator[tuple[slice, slice]]:
        """Yield (rows, bytes of them) that cover the needle in pieces of about 1 MiB; `stride` is a row's in a file."""
        if self.width > _BLOCK:
            for row in range(self.rows):
                for start in range(0, self.width, _BLOCK):
                    yield slice(row, row + 1), slice(start, min(start + _BLOCK, self.width))
            return
        step = max(1, _BLOCK // stride)
        for row in range(0, self.rows, step):
            yield slice(row, min(row + step, self.rows)), slice(0, self.width)

    def _rectangle(self, rows: slice, columns: slice) -> NDArray[np.uint8]:
        raise NotImplementedError


class CodesNeedle(Needle):
    """The packed codes of a tensor, arranged in one way."""

    def __init__(self, tensors: Tensors, entry: PackedEntry, placement: Placement):
        size = entry.out_features, entry.in_features
        super().__init__(entry, *placement.shape(*size), placement.last_mask(*size))
        self.placement = placement
        self._tensors = tensors

    def _rectangle(self, rows: slice, columns: slice) -> NDArray[np.uint8]:
        packed, _ = self._tensors.arrays(self.entry)
        return self.placement.rectangle(packed, self.entry.in_features, rows, columns)


class ScalesNeedle(Needle):
    """The scales of a tensor, in one dtype."""

    def __init__(self, entry: PackedEntry, scales: NDArray[np.float32], dtype: str):
        self.dtype = dtype
        self._data = scale_bytes(scales, dtype)
        super().__init__(entry, 1, len(self._data))

    def _rectangle(self, rows: slice, columns: slice) -> NDArray[np.uint8]:
        return self._data[None, columns][rows]


#: The dtypes in which scales are searched for, as safetensors names them.
SCALE_DTYPES = ("F32", "F16", "BF16")


def scale_bytes(scales: NDArray[np.float32], dtype: str) -> NDArray[np.uint8]:
    """Return scales as they lie in a file, little-endian, rounded to nearest even: uint8, shape (N · itemsize,)."""
    if dtype == "F32":
        return scales.astype("<f4").view(np.uint8)
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return scales.astype("<f2").view(np.uint8)
    bits = scales.astype("<f4").view("<u4")
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype("<u2").view(np.uint8)


def information_bits(packed: NDArray[np.uint8]) -> float:
    """Estimate how much the codes tell, in bits: their number times the entropy of one, from a histogram.

    A needle of few bits, or of one code throughout, is found in any large file by chance.
    """
    counts = np.bincount(packed[: 1 + (1 << 20) // packed.shape[1]].reshape(-1), minlength=256).reshape(16, 16)
    nibbles = counts.sum(axis=0) + counts.sum(axis=1)
    shares = nibbles[nibbles > 0] / nibbles.sum()
    return float(2 * packed.size * sum(-share * log2(share) for share in shares))
