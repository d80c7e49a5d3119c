"""Saved activations: float arrays of any rank, read from and written to the usual files."""

import io
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .container import Container
from .errors import SourceError, UnknownTensorError, UsageError
from .files import check_target, write_file
from .metadata import PackedEntry
from .weights import FLOAT_DTYPES, Source

#: Suffixes that `save_arrays` knows.
OUTPUT_SUFFIXES = (".npy", ".npz", ".safetensors", ".pt", ".pth")


def read_array(source: Source, name: str) -> NDArray[np.float32]:
    """Read one float tensor of an open file whole, as float32.

    Raises:
        SourceError: it is not a float tensor.
        NonFiniteError: a float64 value is beyond float32.
    """
    tensor = source.tensors[name]
    if tensor.dtype not in FLOAT_DTYPES or not tensor.shape:
        what = "it" if source.nameless else f"'{name}'"
        raise SourceError(
            f"{source.path}: {what} is {tensor.dtype} {list(tensor.shape)}, expected floats of shape [..., K]"
        )
    return tensor.read()


def pair_inputs(container: Container, inputs: Source, wanted: str | None = None) -> list[tuple[PackedEntry, str]]:
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
    entries = [container.entry(wanted)] if wanted else list(container.entries.values())
    by_name = {name: entry for entry in entries for name in (entry.name, *entry.aliases)}
    by_module = {_module(name): entry for name, entry in by_name.items()}
    owner = by_module | by_name  # a tensor's own name beats a module's
    pairs = [(owner[name], name) for name in inputs.tensors if name in owner]
    if pairs:
        return pairs
    if single is not None and (wanted or inputs.nameless or len(entries) == 1):
        return [(entries[0] if wanted else container.only(), single)]
    name = wanted or next(iter(container.entries))
    names = ", ".join(f"'{array}'" for array in list(inputs.tensors)[:3]) or "none"
    raise UnknownTensorError(
        f"{inputs.path}: no array is named after a packed tensor of {container.path} (arrays: {names})",
        hint=f"name it '{name}', or give one array and choose with --tensor",
    )


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
    check_output_format(path, len(arrays))
    suffix = path.suffix.lower()
    if suffix == ".npy":
        data = npy_bytes(next(iter(arrays.values())))
    elif suffix == ".npz":
        stream = io.BytesIO()
        # Written one by one, since a keyword `file` would meet numpy's own argument of that name.
        import zipfile

        with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
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


def check_output_format(path: Path, count: int) -> None:
    """Say before any work whether `count` arrays can be written to `path`.

    Raises:
        UsageError: an unknown suffix, or several arrays for a .npy file.
    """
    suffix = path.suffix.lower()
    if suffix not in OUTPUT_SUFFIXES:
        raise UsageError(f"{path}: suffix {suffix!r} is not known, expected one of {', '.join(OUTPUT_SUFFIXES)}")
    if suffix == ".npy" and count > 1:
        raise UsageError(f"{path}: a .npy file holds one array, there are {count}", hint="write .npz or .safetensors")


def npy_bytes(array: NDArray[np.float32]) -> bytes:
    """Return an array as the bytes of a .npy file."""
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()
