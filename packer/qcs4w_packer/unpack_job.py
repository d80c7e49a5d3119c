"""Writing one weight file of floats: block by block, so that no tensor is held whole."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .metadata import PackedEntry
from .narrow import Rounding, narrow, rounding_error
from .nibbles import CODE_MAX, CODE_MIN
from .packed_file import PackedFile
from .rowunpack import dequantize_packed
from .unpack_files import WeightFile
from .unpack_plan import FloatTensor
from .unpack_watch import UnpackedTensor, UnpackWatch

# 1 MiB of float32, which stays in the processor's cache.
_BLOCK_ELEMENTS = 256 * 1024

_CODES = np.arange(CODE_MIN, CODE_MAX + 1, dtype=np.float32)


@dataclass(frozen=True)
class Job:
    """The work on one weight file.

    Attributes:
        source: the packed tensors.
        file: what is written.
        fd: of it, open.
        total: bytes of all weight files.
        watch: told of every piece.
    """

    source: PackedFile
    file: WeightFile
    fd: int
    total: int
    watch: UnpackWatch

    def run(self) -> dict[str, Rounding]:
        """Write everything and return what rounding has cost, by tensor."""
        self.file.writer.begin(self.fd)
        costs: dict[str, Rounding] = {}
        for tensor in self.file.tensors:
            costs[tensor.name] = self._unpack(tensor)
            self.watch.unpacked(UnpackedTensor(tensor, self.file.name, costs[tensor.name]))
        for other in self.file.carried:
            offset = 0
            for _, data in other.chunks():
                self._write(other.name, memoryview(data), offset, of=other.name)
                offset += len(data)
        return costs

    def _unpack(self, tensor: FloatTensor) -> Rounding:
        largest, vanished = 0.0, 0
        part_nbytes = tensor.nbytes // len(tensor.parts)
        for number, part in enumerate(tensor.parts):
            offset = number * part_nbytes
            for first_row, values, scales in _float_blocks(self.source, part):
                stored = narrow(values, tensor.dtype, name=part.name, first_row=first_row)
                # There are sixteen values to a scale: all that rounding does is told by these.
                largest = max(largest, rounding_error(scales[:, None] * _CODES, tensor.dtype))
                if largest == 1:
                    bits = stored << 1 if tensor.dtype == "BF16" else stored  # without the sign of a zero
                    vanished += int(np.count_nonzero(values) - np.count_nonzero(bits))
                data = np.ascontiguousarray(stored).data.cast("B")
                for name in (tensor.name, *tensor.aliases):
                    self._write(name, data, offset, of=tensor.name)
                offset += data.nbytes
        return Rounding(largest, vanished)

    def _write(self, name: str, data: memoryview, offset: int, *, of: str) -> None:
        """Write a piece under one of a tensor's names, and tell it of the tensor."""
        self.file.writer.write(self.fd, name, data, offset)
        self.watch.step(data.nbytes, self.total, of)


def _float_blocks(
    file: PackedFile, entry: PackedEntry
) -> Iterator[tuple[int, NDArray[np.float32], NDArray[np.float32]]]:
    """Yield (first row, float32 rows, new scales in them) of a weight as its source stored it, a megabyte at a time.

    Of a weight that was turned round, a row of the source is a column of the packed matrix: its bytes, an eighth of the
    floats, are held while the rows are made.
    """
    if not entry.transposed:
        for row, packed, scales in file.checked_rows(entry, max(1, _BLOCK_ELEMENTS // entry.in_features)):
            yield row, dequantize_packed(packed, scales, entry.in_features), scales
        return
    weight = file.load(entry.name)
    step = max(2, _BLOCK_ELEMENTS // entry.out_features // 2 * 2)  # whole bytes
    for column in range(0, entry.in_features, step):
        part = np.ascontiguousarray(weight.packed[:, column // 2 : (column + step) // 2])
        columns = min(step, entry.in_features - column)
        rows = np.ascontiguousarray(dequantize_packed(part, weight.scales, columns).T)
        yield column, rows, weight.scales if column == 0 else weight.scales[:0]
