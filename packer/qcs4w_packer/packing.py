"""pack: a weight file -> a container, row by row, with a report of what it cost."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .architecture import tied_names
from .container_writer import ContainerWriter
from .errors import NonFiniteError, SelectionError, UnknownTensorError, UsageError
from .files import check_target, replacing
from .formats.detect import foreign_opener
from .fp8_scales import find_scale, is_fp8_weight
from .measure import QuantizationError, quantization_error
from .metadata import PACKED, PackedEntry
from .rowpack import pack_rows, refuse_non_finite
from .safetensors_file import Planned
from .select import Choice, Request, choose, did_you_mean, notices
from .sources import open_source
from .targets import EXECUTORCH_WEBGPU
from .weights import Source, SourceTensor, split_stack

#: Called with the bytes of source just finished, the bytes to do in all, and the tensor's name.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class PackedTensor:
    """What became, or in a dry run would become, of one tensor.

    Attributes:
        entry: as written to the container; aliases name the tied tensors.
        reason: why it was chosen.
        source_nbytes: bytes of the float weight.
        error: against the float source; None in a dry run.
        floored_rows: rows whose scale met the floor though they are not all zero: they lost precision or vanished.
    """

    entry: PackedEntry
    reason: str
    source_nbytes: int
    error: QuantizationError | None = None
    floored_rows: int = 0

    @property
    def warnings(self) -> list[str]:
        """What the user should know about it."""
        found = []
        if self.floored_rows:
            rows = f"{self.floored_rows} row{'s' if self.floored_rows > 1 else ''}"
            found.append(f"{rows} below absmax 8.9e-7 met the scale floor and lost precision")
        refused = self.entry.executorch_refusals
        return found + [f"{EXECUTORCH_WEBGPU.title} will refuse it: {refusal.fault}" for refusal in refused]


@dataclass(frozen=True)
class PackReport:
    """The result of packing one file.

    Attributes:
        source: the weight file.
        output: the container; in a dry run the file that would be made, or None.
        packed: in the file's order.
        carried: choices for all that is copied as it is, or left out: with `packed_only`, or to be dropped.
        left_out: what the source holds besides tensors, described for people.
        notices: what was decided though nobody asked for it, described for people.
        source_nbytes: bytes of all tensors of the source.
        output_nbytes: size of the container.
        packed_only: what is carried has been left out.
        is_dry_run: nothing was written and no data was read.
    """

    source: Path
    output: Path | None
    packed: tuple[PackedTensor, ...]
    carried: tuple[Choice, ...]
    left_out: tuple[str, ...]
    notices: tuple[str, ...]
    source_nbytes: int
    output_nbytes: int
    packed_only: bool
    is_dry_run: bool


def pack_file(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None,
    *,
    request: Request | None = None,
    packed_only: bool = False,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> PackReport:
    """Quantize and pack the chosen tensors of a weight file into a container.

    Args:
        path: .safetensors, .npy, .npz, .pt, .pth or .bin.
        output: the container to make; may be None in a dry run.
        request: what to pack; by default linear weights by name.
        packed_only: do not carry the other tensors along.
        force: replace an output that is there.
        dry_run: decide, measure sizes, and write nothing.
        progress: called as the work proceeds with the bytes of source just done, those to do in all, and the tensor.

    Raises:
        Qcs4wError: as `open_source`, `choose`, `pack_rows` and `replacing` do; the output is then as it was.
    """
    path = Path(path)
    if output is not None:
        check_target(output, force=force or dry_run, sources=(path,))
    elif not dry_run:
        raise UsageError("output may be None in a dry run only")
    with open_source(path) as source:
        _refuse_container(source)
        choices = choose(source, request)
        packing = [choice for choice in choices if choice.action == "pack"]
        carried = [choice for choice in choices if choice.action != "pack"]
        tied = {choice.tensor.name: choice.alias_of for choice in packing if choice.alias_of}
        owners = [choice for choice in packing if not choice.alias_of]
        entries = [_entry(choice, tied, source) for choice in owners]
        copied = [] if packed_only else [choice.tensor for choice in carried if choice.action == "carry"]
        writer = ContainerWriter(
            entries, (Planned(t.name, t.dtype, t.shape) for t in copied), {} if packed_only else source.metadata
        )

        total = sum(choice.tensor.nbytes for choice in owners) + sum(tensor.nbytes for tensor in copied)

        def advance(nbytes: int, name: str) -> None:
            if progress:
                progress(nbytes, total, name)

        results: list[PackedTensor] = []
        if dry_run:
            results = [
                PackedTensor(entry, choice.reason, choice.tensor.nbytes)
                for choice, entry in zip(owners, entries, strict=True)
            ]
        elif output is not None:
            with replacing(output, force=force, nbytes=writer.nbytes, sources=(path,)) as fd:
                writer.begin(fd)
                for choice, entry in zip(owners, entries, strict=True):
                    try:
                        results.append(_pack_tensor(choice, entry, writer, advance))
                    except NonFiniteError as error:
                        error.hint = "mend the weight, or leave this tensor unpacked with --exclude"
                        raise
                for tensor in copied:
                    offset = 0
                    for _, data in tensor.chunks():
                        writer.write_carried(tensor.name, offset, data)
                        offset += len(data)
                        advance(len(data), tensor.name)
                written = writer.finish()
            results = [replace(result, entry=written[result.entry.name]) for result in results]
        return PackReport(
            source=path,
            output=None if output is None else Path(output),
            packed=tuple(results),
            carried=tuple(carried),
            left_out=source.left_out,
            notices=tuple(notices(choices)),
            source_nbytes=sum(tensor.nbytes for tensor in source.tensors.values()),
            output_nbytes=writer.nbytes,
            packed_only=packed_only,
            is_dry_run=dry_run,
        )


def source_weight(source: Source, entry: PackedEntry, rows: int | None = None) -> NDArray[np.float32]:
    """Read the float weight that a packed tensor was made of.

    Args:
        source: the weight file.
        entry: the packed tensor.
        rows: how many of its first rows are wanted; by default all.

    Returns:
        float32, shape (N, K), turned round or cut out of a stack as it was when it was packed.

    Raises:
        UnknownTensorError: the source has no tensor of that name.
        SelectionError: it is not a float matrix.
        UsageError: it has another shape.
    """
    name = entry.stack or entry.name
    module = name.removesuffix(".weight")
    if source.nameless and len(source.tensors) == 1:
        tensor = next(iter(source.tensors.values()))
    elif name in source.tensors:
        tensor = source.tensors[name]
    elif module in source.tensors:
        tensor = source.tensors[module]
    else:
        raise UnknownTensorError(f"{source.path}: no tensor '{name}'", hint=did_you_mean(name, source.tensors))
    if entry.stack and len(tensor.shape) == 3:
        parts = {part.name: part for part in split_stack(tensor)}
        tensor = parts.get(entry.name, tensor)
    if is_fp8_weight(tensor) and not tensor.is_float:
        find_scale(source, tensor)  # says what is wrong with its scale
    if len(tensor.shape) != 2 or not tensor.is_float:
        raise SelectionError(
            f"{source.path}: tensor '{name}' is {tensor.dtype} {list(tensor.shape)}, not a float matrix"
        )
    shape = tensor.shape[::-1] if entry.transposed else tensor.shape
    if shape != (entry.out_features, entry.in_features):  # said before a large file is read for nothing
        expected = [entry.out_features, entry.in_features]
        raise UsageError(f"{source.path}: '{name}' has shape {list(shape)}, the packed weight {expected}")
    if not entry.transposed:
        return tensor.read_rows(entry.out_features if rows is None else rows)
    return np.ascontiguousarray(tensor.read().T)[:rows]


def _pack_tensor(
    choice: Choice, entry: PackedEntry, writer: ContainerWriter, advance: Callable[[int, str], None]
) -> PackedTensor:
    tensor = choice.tensor
    errors, weights, floored = [], [], 0
    for first_row, weight in [(0, _read_transposed(tensor))] if choice.transposed else tensor.float_rows():
        rows = pack_rows(weight, name=tensor.name, first_row=first_row)
        writer.write_rows(entry.name, first_row, rows.packed, rows.scales)
        errors.append(rows.error_squares)
        weights.append(rows.weight_squares)
        floored += int(rows.floored.sum())
        advance(tensor.nbytes * len(weight) // entry.out_features, tensor.name)
    error = quantization_error(np.concatenate(errors), np.concatenate(weights))
    return PackedTensor(entry, choice.reason, tensor.nbytes, error, floored)


def _read_transposed(tensor: SourceTensor) -> NDArray[np.float32]:
    """Read a weight stored [in, out] as [out, in]; its columns are the rows, so that it is needed whole."""
    stored = tensor.read()
    refuse_non_finite(stored, name=tensor.name)  # before it is turned, so that the message counts as the file does
    return np.ascontiguousarray(stored.T)


def _entry(choice: Choice, tied: dict[str, str], source: Source) -> PackedEntry:
    name = choice.tensor.name
    aliases = [alias for alias, owner in tied.items() if owner == name] + tied_names(source, name)
    return PackedEntry(
        name,
        choice.out_features,
        choice.in_features,
        source_dtype=choice.tensor.dtype,
        transposed=choice.transposed,
        aliases=tuple(aliases),
        stack=choice.stack,
    )


def _refuse_container(source: Source) -> None:
    if any(name.endswith(PACKED) for name in source.tensors):
        raise SelectionError(
            f"{source.path}: is a qcs4w container already", hint=f"look at it: qcs4w inspect {source.path}"
        )
    if (opener := foreign_opener(source.path)) is not None:
        with opener(source.path) as file:
            raise SelectionError(
                f"{source.path}: is packed already, as {file.format}",
                hint=f"bring it here: qcs4w convert {source.path} -o OUT.safetensors",
            )
