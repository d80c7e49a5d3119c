"""unpack: packed linears -> weight files of floats, block by block, for any tool that needs them."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .blob_file import Blob
from .errors import UsageError
from .metadata import PackedEntry
from .narrow import Rounding
from .packed_file import PackedFile
from .packed_sources import open_packed
from .unpack_beside import Beside, beside_of
from .unpack_files import files_of_folder, one_file
from .unpack_job import Job
from .unpack_place import Place
from .unpack_plan import UnpackRequest, plan_tensors
from .unpack_watch import UnpackedTensor, UnpackWatch
from .weights import SourceTensor


@dataclass(frozen=True)
class UnpackReport:
    """The result of unpacking.

    Attributes:
        source: what was read.
        output: the file or folder made; in a dry run that would be made, or None.
        source_format: a format's name.
        tensors: in the order of the files.
        carried: names of the other tensors that went along, byte for byte.
        beside: names of the files that went along beside the weights of a folder.
        left_out: what did not, described for people.
        notes: what a user should know.
        files: names of the weight files.
        file_nbytes: the size of each.
        output_nbytes: size of the weight files.
        alias_nbytes: how much of it holds tied tensors once more.
        is_dry_run: nothing was written and no weight was read.
    """

    source: Path
    output: Path | None
    source_format: str
    tensors: tuple[UnpackedTensor, ...]
    carried: tuple[str, ...]
    beside: tuple[str, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    files: tuple[str, ...]
    file_nbytes: tuple[int, ...]
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
    watch: UnpackWatch | None = None,
) -> UnpackReport:
    """Write packed linears as float weights: code · scale, rounded once in float32, then to the dtype asked for.

    Args:
        path: any file of packed linears, or a folder.
        output: a .safetensors file for everything, or a folder: of the shards that a packed folder has, with an index
            and what lies beside them. May be None in a dry run.
        request: what to unpack, and to which dtype; by default all, to float32, which holds every value exactly.
        blob: what is known of raw bytes.
        force: replace an output that is there.
        dry_run: decide, measure sizes, and write nothing.
        watch: told as the work proceeds.

    Raises:
        LossyError: a value is beyond the range of the dtype.
        DigestError: the packed bytes are not those that were written.
        Qcs4wError: as `open_packed`, `plan_tensors` and `replacing` do; the output is then as it was.
    """
    request = request or UnpackRequest()
    if output is None and not dry_run:
        raise UsageError("output may be None in a dry run only")
    path, watch = Path(path), watch or UnpackWatch()
    with open_packed(path, blob) as file:
        if not file.has_scales:
            raise UsageError(f"{file.path}: the scales are not known, without which codes are no weights")
        tensors, left = plan_tensors(file, request)
        carried = [] if request.packed_only else [file.carried_tensor(name) for name in file.carried]
        place = Place.of(path, None if output is None else Path(output), request)
        if place.is_folder:
            files = files_of_folder(file, tensors, carried, request.max_shard_size)
        else:
            files = one_file(file, tensors, carried, place.name)
        beside = beside_of(file, path, files) if place.is_folder else Beside()
        nbytes = sum(each.writer.nbytes for each in files)
        sources = (path, *file.files)
        costs: dict[str, Rounding] = {}
        place.check(sources, beside, force=force or dry_run)
        if place.output is not None and not dry_run:
            watch.planned(files)
            with place.open(place.output, files, beside, nbytes, sources, force=force) as write:
                for each in files:
                    with write(each) as fd:
                        costs |= Job(file, each, fd, nbytes, watch).run()
        return UnpackReport(
            source=path,
            output=place.output,
            source_format=file.format,
            tensors=tuple(
                UnpackedTensor(t, each.name or None, costs.get(t.name)) for each in files for t in each.tensors
            ),
            carried=tuple(tensor.name for tensor in carried),
            beside=beside.names,
            left_out=(*_left_out(file, left, carried), *beside.left_out),
            notes=(*file.notes, *beside.notes),
            files=tuple(each.name for each in files if each.name),
            file_nbytes=tuple(each.writer.nbytes for each in files if each.name),
            output_nbytes=nbytes,
            alias_nbytes=sum(len(tensor.aliases) * tensor.nbytes for tensor in tensors),
            is_dry_run=dry_run,
        )


def _left_out(file: PackedFile, left: list[PackedEntry], carried: list[SourceTensor]) -> Iterator[str]:
    yield from (f"packed tensor '{entry.name}' (not chosen)" for entry in left)
    taken = {tensor.name for tensor in carried}
    yield from (f"tensor '{name}'" for name in file.carried if name not in taken)
