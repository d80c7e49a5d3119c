"""Saved activations: float arrays of any rank, read from and written to the usual files."""

import io
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .errors import SourceError, UnknownTensorError, UsageError
from .files import check_target, write_file
from .metadata import PackedEntry
from .packed_file import PackedFile
from .safetensors_file import name_fault
from .weights import FLOAT_DTYPES, Source

_LONGEST_ZIP_NAME = 65_000  # bytes; the field is 16 bits wide

#: Suffixes that `save_arrays` knows.
OUTPUT_SUFFIXES = (".npy", ".npz", ".safetensors", ".pt", ".pth")


def read_array(source: Source, name: str, in_features: int | None = None) -> NDArray[np.float32]:
    """Read one float tensor of an open file whole, as float32.

    Args:
        source: the open file.
        name: of the tensor.
        in_features: K, where it is the input of a linear: a shape that cannot fit is said before anything is read.

    Raises:
        SourceError: it is not a float tensor.
        UsageError: its last dimension is not `in_features`, or it has no rows.
        NonFiniteError: a float64 value is beyond float32.
    """
    tensor = source.tensors[name]
    what = "it" if source.nameless else f"'{name}'"
    if tensor.dtype not in FLOAT_DTYPES or not tensor.shape:
        raise SourceError(
            f"{source.path}: {what} is {tensor.dtype} {list(tensor.shape)}, expected floats of shape [..., K]"
        )
    if in_features is not None and (tensor.shape[-1] != in_features or 0 in tensor.shape):
        raise UsageError(
            f"{source.path}: {what} has shape {list(tensor.shape)}, expected [..., {in_features}] with at least one row"
        )
    return tensor.read()


def pair_inputs(container: PackedFile, inputs: Source, wanted: str | None = None) -> list[tuple[PackedEntry, str]]:
    """Pair packed tensors with the arrays of an input file that belong to them.

    An array belongs to the linear of its name, of its alias, or of its module (the name without `.weight`); a single
    array belongs to `wanted`, or to the container's only tensor, whatever its name.

    Args:
        container: the packed tensors.
        inputs: the arrays.
        wanted: one packed tensor; by default all that the input file names.

    Returns:
        (packed tensor, name of its array), at least one, in the order of the input file.

    Raises:
        UnknownTensorError: no array belongs to a packed tensor.
    """
    single = next(iter(inputs.tensors)) if len(inputs.tensors) == 1 else None
    entries = [container.entry(wanted)] if wanted is not None else list(container.entries.values())
    by_name = {name: entry for entry in entries for name in (entry.name, *entry.aliases)}
    by_module = {_module(name): entry for name, entry in by_name.items()}
    owner = by_module | by_name  # a tensor's own name beats a module's
    pairs = [(owner[name], name) for name in inputs.tensors if name in owner]
    if pairs:
        return pairs
    if single is not None and (wanted is not None or inputs.nameless or len(entries) == 1):
        return [(entries[0] if wanted is not None else container.only(), single)]
    name = wanted or next(iter(container.entries))
    names = ", ".join(f"'{array}'" for array in list(inputs.tensors)[:3]) or "none"
    raise UnknownTensorError(
        f"{inputs.path}: no array is named after a packed tensor of {container.path} (arrays: {names})",
        hint=f"name it '{name}', or give one array and choose with --tensor",
    )


def pair_output(container: PackedFile, outputs: Source, entry: PackedEntry, array_name: str, *, is_only: bool) -> str:
    """Return the name of the array that holds a linear's output.

    Args:
        container: the packed tensors.
        outputs: the arrays.
        entry: the linear.
        array_name: of its input; an output of the same name is its own.
        is_only: it is the only one that is asked about, so that a single array is its output, whatever its name.

    Raises:
        UnknownTensorError: no array belongs to it.
        UsageError: several do.
    """
    if array_name in outputs.tensors and (is_only or not outputs.nameless):
        return array_name
    names = [name for known in (entry.name, *entry.aliases) for name in (known, _module(known))]
    found = [name for name in names if name in outputs.tensors and not outputs.nameless]
    if not found and is_only:
        found = [name for _, name in pair_inputs(container, outputs, entry.name)]
    found = list(dict.fromkeys(found))
    if len(found) > 1:
        raise UsageError(
            f"{outputs.path}: '{found[0]}' and '{found[1]}' may both be the output of '{entry.name}'",
            hint=f"name it '{array_name}', as its input",
        )
    if not found:
        there = ", ".join(f"'{array}'" for array in list(outputs.tensors)[:3]) or "none"
        raise UnknownTensorError(
            f"{outputs.path}: no array is the output of '{entry.name}' (arrays: {there})",
            hint=f"name it '{entry.name}', or choose with --tensor what is to be judged",
        )
    return found[0]


def output_name(entry: PackedEntry, array_name: str) -> str:
    """Return the name for the output of a linear: that of its input where it names the linear, else the linear's."""
    names = (entry.name, *entry.aliases)
    return array_name if array_name in (*names, *map(_module, names)) else entry.name


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def save_arrays(
    path: str | os.PathLike[str],
    arrays: Mapping[str, NDArray[np.float32]],
    *,
    nameless: bool,
    force: bool = False,
    sources: tuple[Path, ...] = (),
) -> None:
    """Write float32 arrays in the format of the path's suffix.

    Args:
        path: .npy, .npz, .safetensors, .pt or .pth.
        arrays: by name.
        nameless: a single array goes into a .pt file bare, as it came.
        force: replace a file that is there.
        sources: files being read, which must not be the target.

    Raises:
        UsageError: an unknown suffix, or several arrays for a .npy file.
        OutputError: it exists, or cannot be written.
    """
    path = Path(path)
    check_target(path, force=force, sources=sources)
    check_output_format(path, list(arrays))
    suffix = path.suffix.lower()
    if suffix == ".npy":
        data = npy_bytes(next(iter(arrays.values())))
    elif suffix == ".npz":
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
            # One by one: np.savez takes names as keywords, and one called `file` would meet its own argument.
            for name, array in arrays.items():
                archive.writestr(f"{name}.npy", npy_bytes(array))
        data = stream.getvalue()
    elif suffix == ".safetensors":
        from safetensors.numpy import save

        data = save({name: np.asarray(array, order="C") for name, array in arrays.items()})
    else:
        import torch

        stream = io.BytesIO()
        tensors = {name: torch.from_numpy(np.asarray(array, order="C")) for name, array in arrays.items()}
        torch.save(next(iter(tensors.values())) if nameless and len(tensors) == 1 else tensors, stream)
        data = stream.getvalue()
    write_file(path, data, force=force, sources=sources)


def check_output_format(path: Path, names: Sequence[str]) -> None:
    """Say before any work whether arrays of these names can be written to `path`.

    Raises:
        UsageError: an unknown suffix, several arrays for a .npy file, or a name that the format cannot hold.
    """
    suffix = path.suffix.lower()
    if suffix not in OUTPUT_SUFFIXES:
        raise UsageError(f"{path}: suffix {suffix!r} is not known, expected one of {', '.join(OUTPUT_SUFFIXES)}")
    if suffix == ".npy" and len(names) > 1:
        raise UsageError(
            f"{path}: a .npy file holds one array, there are {len(names)}", hint="write .npz or .safetensors"
        )
    for name in names if suffix != ".npy" else ():
        fault = name_fault(name)
        if suffix == ".npz" and ("\0" in name or len(name.encode("utf-8", "replace")) > _LONGEST_ZIP_NAME):
            fault = "a .npz file cannot hold the name"
        if fault:
            raise UsageError(f"{path}: cannot hold an array {name[:80]!r}: {fault}", hint="write .npy, one at a time")


def npy_bytes(array: NDArray[np.float32]) -> bytes:
    """Return an array as the bytes of a .npy file."""
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()
