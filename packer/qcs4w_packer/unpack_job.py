"""Writing one weight file of floats: block by block, so that no tensor is held whole."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .metadata import PackedEntry
from .narrow import Rounding, narrow
from .packed_file import PackedFile
from .rowunpack import dequantize_packed
from .unpack_files import WeightFile
from .unpack_plan import FloatTensor

#: Called with the bytes just written, the bytes to write in all, and the tensor's name.
Progress = Callable[[int, int, str], None]

# 1 MiB of float32, which stays in the processor's cache.
_BLOCK_ELEMENTS = 256 * 1024


@dataclass(frozen=True)
class Job:
    """The work on one weight file.

    Attributes:
        source: the packed tensors.
        file: what is written.
        fd: of it, open.
        total: bytes of all weight files, for `progress`.
    """

    source: PackedFile
    file: WeightFile
    fd: int
    total: int
    progress: Progress | None

    def run(self) -> dict[str, Rounding]:
        """Write everything and return what rounding has cost, by tensor."""
        self.file.writer.begin(self.fd)
        costs = {tensor.name: self._unpack(tensor) for tensor in self.file.tensors}
        for tensor in self.file.carried:
            offset = 0
            for _, data in tensor.chunks():
                self._write(tensor.name, memoryview(data), offset)
                offset += len(data)
        return costs

    def _unpack(self, tensor: FloatTensor) -> Rounding:
        cost = Rounding()
        part_nbytes = tensor.nbytes // len(tensor.parts)
        for number, part in enumerate(tensor.parts):
            offset = number * part_nbytes
            for first_row, values in _float_blocks(self.source, part):
                stored, lost = narrow(values, tensor.dtype, name=part.name, first_row=first_row)
                cost += lost
                data = np.ascontiguousarray(stored).data.cast("B")
                for name in (tensor.name, *tensor.aliases):
                    self._write(name, data, offset)
                offset += data.nbytes
        return cost

    def _write(self, name: str, data: memoryview, offset: int) -> None:
        self.file.writer.write(self.fd, name, data, offset)
        if self.progress:
            self.progress(data.nbytes, self.total, name)


def _float_blocks(file: PackedFile, entry: PackedEntry) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield (first row, float32 rows) of a weight as its source stored it, a megabyte at a time.

    Of a weight that was turned round, a row of the source is a column of the packed matrix: its bytes, an eighth of the
    floats, are held while the rows are made.
    """
    if not entry.transposed:
        for row, packed, scales in file.checked_rows(entry, max(1, _BLOCK_ELEMENTS // entry.in_features)):
            yield row, dequantize_packed(packed, scales, entry.in_features)
        return
    weight = file.load(entry.name)
    step = max(2, _BLOCK_ELEMENTS // entry.out_features // 2 * 2)  # whole bytes
    for column in range(0, entry.in_features, step):
        part = np.ascontiguousarray(weight.packed[:, column // 2 : (column + step) // 2])
        columns = min(step, entry.in_features - column)
        yield column, np.ascontiguousarray(dequantize_packed(part, weight.scales, columns).T)
