"""convert: a file of packed linears in one layout -> another layout, codes unchanged, one weight at a time."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .blob_file import Blob
from .errors import LossyError, SelectionError, UsageError
from .formats.checkpoint import CONFIG
from .formats.outputs import SCALE_DTYPES, TARGETS, Put, Request, Target
from .json_file import read_json
from .metadata import PackedEntry
from .nibbles import pack_codes, wrong_pad_rows
from .packed import PackedLinear
from .packed_file import PackedFile
from .packed_folder import PackedFolder
from .packed_sources import open_packed
from .packing import Progress
from .sources import open_source

# Files of floats; a .safetensors is opened first, since it may hold anything.
_FLOAT_SUFFIXES = (".npy", ".npz", ".pt", ".pth", ".bin")


@dataclass(frozen=True)
class ConvertOptions:
    """How a conversion is to be done.

    Attributes:
        scale_dtype: "f32", or "f16" where the target has such scales.
        block: columns to a block of an ONNX model; by default 32.
        explicit_zero_points: an ONNX model states the zero point 8 that is the default.
        packed_only: do not copy the other tensors along.
    """

    scale_dtype: str = "f32"
    block: int | None = None
    explicit_zero_points: bool = False
    packed_only: bool = False


@dataclass(frozen=True)
class ConvertedTensor:
    """What became of one weight.

    Attributes:
        entry: its name and shape.
        nbytes: bytes of all that it became.
        codes_equal: what was written, read back, has the same codes.
        scale_loss: the largest |stored - scale| / |scale|; 0 where scales keep float32.
        lost_scales: scales that became 0 and were not.
    """

    entry: PackedEntry
    nbytes: int
    codes_equal: bool
    scale_loss: float
    lost_scales: int


@dataclass(frozen=True)
class ConvertReport:
    """The result of a conversion.

    Attributes:
        source: the file read.
        output: the file or folder made; in a dry run that would be made, or None.
        source_format: a format's name.
        target_format: a key of TARGETS.
        tensors: in the file's order.
        carried: names of the other tensors that went along.
        left_out: what did not, described for people.
        notes: what was decided while reading.
        is_dry_run: nothing was written.
    """

    source: Path
    output: Path | None
    source_format: str
    target_format: str
    tensors: tuple[ConvertedTensor, ...]
    carried: tuple[str, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    is_dry_run: bool


def convert_file(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None,
    *,
    to: str = "qcs4w",
    blob: Blob | None = None,
    tensors: Sequence[str] = (),
    options: ConvertOptions | None = None,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ConvertReport:
    """Write packed linears in another layout; codes stay as they are, bit for bit.

    Args:
        path: any file of packed linears, or a checkpoint's folder.
        output: the file or folder to make; may be None in a dry run.
        to: a key of TARGETS.
        blob: what is known of raw bytes.
        tensors: convert only these; by default all.
        options: how.
        force: replace an output that is there.
        dry_run: read and check everything, and write nothing.
        progress: called as the work proceeds with bytes done, bytes in all, and the tensor.

    Raises:
        LossyError: something would be lost; the message says what.
        SelectionError: the file holds floats.
        Qcs4wError: as readers and `replacing` do; the output is then as it was.
    """
    options = options or ConvertOptions()
    path = Path(path)
    if to not in TARGETS:
        raise UsageError(f"there is no layout '{to}', expected one of {', '.join(TARGETS)}")
    if to != "onnx" and (options.block is not None or options.explicit_zero_points):
        raise UsageError(f"blocks and zero points are of an ONNX model, the target is {to}")
    if output is None and not dry_run:
        raise UsageError("output may be None in a dry run only")
    with open_for_conversion(path, blob) as source:
        entries = _chosen(source, tensors)
        target = TARGETS[to](_request(source, entries, options, TARGETS[to]))
        sources = (path, *source.files)  # a checkpoint's folder is none of the latter
        if output is not None:
            target.check(Path(output), force=force or dry_run, sources=sources)
        total = sum(entry.packed_nbytes for entry in entries)
        results = []
        notes: list[str] = []
        with _opened(target, None if dry_run else output, force, sources) as put:
            for entry in entries:
                weight = _load(source, entry, notes)
                result, arrays = _encode(target, entry, weight, notes)
                results.append(result)
                if put is not None:
                    put(entry, arrays)
                if progress:
                    progress(entry.packed_nbytes, total, entry.name)
        notes += [note for note in source.notes if note not in notes]
        return ConvertReport(
            source=path,
            output=None if output is None else Path(output),
            source_format=source.format,
            target_format=to,
            tensors=tuple(results),
            carried=tuple(tensor.name for tensor in target.request.carried) + tuple(_held_biases(target)),
            left_out=tuple(_left_out(source, target)),
            notes=tuple(notes),
            is_dry_run=dry_run,
        )


def open_for_conversion(path: Path, blob: Blob | None = None) -> PackedFile:
    """Open what can be converted.

    Raises:
        SelectionError: it holds floats, which `pack` quantizes.
        Qcs4wError: as readers do.
    """
    if blob is None and path.suffix.lower() in _FLOAT_SUFFIXES:
        with open_source(path):
            raise SelectionError(
                f"{path}: holds floats, nothing packed that describes itself",
                hint=f"quantize it: qcs4w pack {path} -o OUT.safetensors; raw packed bytes need --shape",
            )
    return open_packed(path, blob)


@contextlib.contextmanager
def _opened(
    target: Target, output: str | os.PathLike[str] | None, force: bool, sources: tuple[Path, ...]
) -> Iterator[Put | None]:
    if output is None:
        yield None
    else:
        with target.open(Path(output), force=force, sources=sources) as put:
            yield put


def _chosen(source: PackedFile, names: Sequence[str]) -> tuple[PackedEntry, ...]:
    if not names:
        return tuple(source.entries.values())
    wanted = {source.entry(name).name for name in names}
    return tuple(entry for entry in source.entries.values() if entry.name in wanted)


def _request(
    source: PackedFile, entries: tuple[PackedEntry, ...], options: ConvertOptions, target: type[Target]
) -> Request:
    biases = {}
    beside: tuple[Path, ...] = ()
    config: dict[str, Any] = {}
    if isinstance(source, PackedFolder) and target.holds_beside and not options.packed_only:
        beside = tuple(path for path in source.beside if path.name != CONFIG)
        config = next((read_json(path) for path in source.beside if path.name == CONFIG), {})
    if not options.packed_only:
        biases = {entry.name: bias for entry in entries if (bias := source.bias(entry)) is not None}
    is_copied = target.holds_carried and not options.packed_only
    return Request(
        entries=entries,
        carried=tuple(map(source.carried_tensor, source.carried)) if is_copied else (),
        biases=biases,
        metadata=source.metadata if is_copied else {},
        scale_dtype=options.scale_dtype,
        block=32 if options.block is None else options.block,
        explicit_zero_points=options.explicit_zero_points,
        beside=beside,
        config=config,
    )


def _load(source: PackedFile, entry: PackedEntry, notes: list[str]) -> PackedLinear:
    weight = source.load(entry.name)
    wrong = wrong_pad_rows(weight.packed, weight.in_features)
    if wrong:
        notes.append(f"tensor '{entry.name}': the pad nibble of {wrong:,} rows was not the code 0, and is now")
        weight = PackedLinear(pack_codes(weight.codes()), weight.scales, weight.in_features)
    return weight


def _encode(
    target: Target, entry: PackedEntry, weight: PackedLinear, notes: list[str]
) -> tuple[ConvertedTensor, dict[str, NDArray[Any]]]:
    scale_dtype = target.request.scale_dtype
    scales, loss, lost = _narrow(weight.scales, scale_dtype, f"tensor '{entry.name}': the scale of row")
    arrays = target.encode(entry, weight, scales)
    if scale_dtype != "f32" and "bias" in arrays:
        _, bias_loss, _ = _narrow(target.request.biases[entry.name], scale_dtype, f"tensor '{entry.name}': bias")
        if bias_loss:
            notes.append(
                f"the bias of '{entry.name}' was rounded to {scale_dtype}, by up to {bias_loss:.2g} of a value"
            )
    equal = np.array_equal(target.decode(entry, arrays), weight.packed)
    if not equal:
        raise RuntimeError(f"tensor '{entry.name}' does not have its codes in {target.name}")
    nbytes = sum(array.nbytes for array in arrays.values())
    return ConvertedTensor(entry, nbytes, codes_equal=equal, scale_loss=loss, lost_scales=lost), arrays


def _narrow(values: NDArray[np.float32], dtype: str, what: str) -> tuple[NDArray[Any], float, int]:
    """Round floats to a dtype of SCALE_DTYPES.

    Returns:
        What they became, the largest relative error, and how many became 0 and were not.

    Raises:
        LossyError: one is beyond the dtype's range.
    """
    with np.errstate(over="ignore"):
        narrow: NDArray[Any] = values.astype(SCALE_DTYPES[dtype])
    if not np.isfinite(narrow).all():
        index = int(np.flatnonzero(~np.isfinite(narrow))[0])
        raise LossyError(f"{what} {index}, {values[index]:g}, is beyond {dtype}", hint="leave out --scale-dtype f16")
    nonzero = values != 0
    kept, before = narrow.astype(np.float64)[nonzero], values.astype(np.float64)[nonzero]
    loss = float(np.max(np.abs(kept - before) / np.abs(before), initial=0.0))
    return narrow, loss, int(np.count_nonzero(kept == 0))


def _held_biases(target: Target) -> Iterator[str]:
    """Name the biases that went along otherwise than as carried tensors."""
    yield from target.request.lone_biases


def _left_out(source: PackedFile, target: Target) -> Iterator[str]:
    request = target.request
    taken = {entry.name for entry in request.entries}
    yield from (f"packed tensor '{name}' (not chosen)" for name in source.entries if name not in taken)
    held = {tensor.name for tensor in request.carried} | set(request.lone_biases)
    yield from (f"tensor '{name}'" for name in source.carried if name not in held)
    if isinstance(source, PackedFolder):
        copied = {path.name for path in request.beside} | ({CONFIG} if request.config else set())
        yield from (f"{path.name} of the folder" for path in source.beside if path.name not in copied)
    if target.name != "qcs4w":
        yield from (f"the name '{alias}' of tensor '{e.name}'" for e in request.entries for alias in e.aliases)
