"""unpack: packed linears -> a weight file of floats, block by block, for any tool that needs them."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._version import __version__
from .blob_file import Blob
from .errors import UsageError
from .files import check_outside, check_target, replacing
from .metadata import METADATA_KEY, PackedEntry
from .narrow import Rounding, narrow
from .packed_file import PackedFile
from .packed_sources import open_packed
from .rowunpack import dequantize_packed
from .safetensors_file import Planned
from .safetensors_writer import SafetensorsWriter
from .unpack_plan import FloatTensor, UnpackRequest, plan_tensors

#: Called with the bytes just written, the bytes to write in all, and the tensor's name.
Progress = Callable[[int, int, str], None]

#: Says in a file's metadata that its weights have been 4-bit codes, so that nobody takes them for the originals.
UNPACKED_KEY = "qcs4w_unpacked"

# 1 MiB of float32, which stays in the processor's cache.
_BLOCK_ELEMENTS = 256 * 1024


@dataclass(frozen=True)
class UnpackedTensor:
    """What became, or in a dry run would become, of packed tensors.

    Attributes:
        tensor: as written.
        file: name of the weight file that holds it; None in a dry run without an output.
        rounding: what rounding to its dtype has cost; None in a dry run.
    """

    tensor: FloatTensor
    file: str | None = None
    rounding: Rounding | None = None


@dataclass(frozen=True)
class UnpackReport:
    """The result of unpacking.

    Attributes:
        source: what was read.
        output: the file made; in a dry run the file that would be made, or None.
        source_format: a format's name.
        tensors: in the order of the file.
        carried: names of the other tensors that went along, byte for byte.
        left_out: what did not, described for people.
        notes: what a user should know.
        files: names of the weight files.
        output_nbytes: size of the weight files.
        alias_nbytes: how much of it holds tied tensors once more.
        is_dry_run: nothing was written and no weight was read.
    """

    source: Path
    output: Path | None
    source_format: str
    tensors: tuple[UnpackedTensor, ...]
    carried: tuple[str, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    files: tuple[str, ...]
    output_nbytes: int
    alias_nbytes: int
    is_dry_run: bool


def unpack_file(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None,
    *,
    request: UnpackRequest | None = None,
    blob: Blob | None = None,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> UnpackReport:
    """Write packed linears as float weights: code · scale, rounded once in float32, then to the dtype asked for.

    Args:
        path: any file of packed linears.
        output: the .safetensors file to make; may be None in a dry run.
        request: what to unpack, and to which dtype; by default all, to float32, which holds every value exactly.
        blob: what is known of raw bytes.
        force: replace an output that is there.
        dry_run: decide, measure sizes, and write nothing.
        progress: called as the work proceeds.

    Raises:
        LossyError: a value is beyond the range of the dtype.
        DigestError: the packed bytes are not those that were written.
        Qcs4wError: as `open_packed`, `plan_tensors` and `replacing` do; the output is then as it was.
    """
    request = request or UnpackRequest()
    if output is None and not dry_run:
        raise UsageError("output may be None in a dry run only")
    with open_packed(path, blob) as file:
        if not file.has_scales:
            raise UsageError(f"{file.path}: the scales are not known, without which codes are no weights")
        tensors, left = plan_tensors(file, request)
        carried = [] if request.packed_only else list(file.carried)
        writer = SafetensorsWriter(_planned(file, tensors, carried), _metadata(file))
        sources = (Path(path), *file.files)
        if output is not None:
            check_target(output, force=force or dry_run, sources=sources)
            check_outside(output, sources)
        name = None if output is None else Path(output).name
        results = [UnpackedTensor(tensor, name) for tensor in tensors]
        if output is not None and not dry_run:
            with replacing(output, force=force, nbytes=writer.nbytes, sources=sources) as fd:
                writer.begin(fd)
                job = _Job(file, writer, fd, progress)
                results = [UnpackedTensor(tensor, name, job.unpack(tensor)) for tensor in tensors]
                for other in carried:
                    job.copy(other)
        return UnpackReport(
            source=Path(path),
            output=None if output is None else Path(output),
            source_format=file.format,
            tensors=tuple(results),
            carried=tuple(carried),
            left_out=tuple(_left_out(file, left, carried)),
            notes=tuple(file.notes),
            files=() if name is None else (name,),
            output_nbytes=writer.nbytes,
            alias_nbytes=sum(len(tensor.aliases) * tensor.nbytes for tensor in tensors),
            is_dry_run=dry_run,
        )


def _planned(file: PackedFile, tensors: list[FloatTensor], carried: list[str]) -> list[Planned]:
    planned = [each for tensor in tensors for each in tensor.planned]
    return planned + [Planned(name, t.dtype, t.shape) for name in carried for t in [file.carried_tensor(name)]]


def _metadata(file: PackedFile) -> dict[str, str]:
    """Return a file's metadata with the format that transformers asks for, and without what is said of packed bytes."""
    kept = {key: text for key, text in file.metadata.items() if key != METADATA_KEY}
    return {"format": "pt", **kept, UNPACKED_KEY: f"qcs4w {__version__}"}


def _left_out(file: PackedFile, left: list[PackedEntry], carried: list[str]) -> Iterator[str]:
    yield from (f"packed tensor '{entry.name}' (not chosen)" for entry in left)
    yield from (f"tensor '{name}'" for name in file.carried if name not in set(carried))


@dataclass(frozen=True)
class _Job:
    """Writes the tensors of one weight file."""

    file: PackedFile
    writer: SafetensorsWriter
    fd: int
    progress: Progress | None

    def unpack(self, tensor: FloatTensor) -> Rounding:
        """Write one float tensor, and its aliases, and return what rounding has cost."""
        cost = Rounding()
        part_nbytes = tensor.nbytes // len(tensor.parts)
        for number, part in enumerate(tensor.parts):
            offset = number * part_nbytes
            for first_row, values in _float_blocks(self.file, part):
                stored, lost = narrow(values, tensor.dtype, name=part.name, first_row=first_row)
                cost += lost
                data = _bytes(stored)
                for name in (tensor.name, *tensor.aliases):
                    self._write(name, data, offset)
                offset += data.nbytes
        return cost

    def copy(self, name: str) -> None:
        """Write a carried tensor, byte for byte."""
        offset = 0
        for _, data in self.file.carried_tensor(name).chunks():
            self._write(name, memoryview(data), offset)
            offset += len(data)

    def _write(self, name: str, data: memoryview, offset: int) -> None:
        self.writer.write(self.fd, name, data, offset)
        if self.progress:
            self.progress(data.nbytes, self.writer.nbytes, name)


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


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).data.cast("B")
