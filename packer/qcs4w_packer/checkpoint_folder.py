"""A folder as Hugging Face lays it out, opened as one source: its shards, its config, and what is carried along."""

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from .checkpoint_index import Weights, find_weights, grouped, is_index, listed
from .errors import SourceError, UnsafePickleError
from .json_file import read_json
from .open_files import OpenFiles, PooledFile
from .safetensors_file import SafetensorsFile, file_kind
from .weights import Source, SourceTensor, slot_tensor

_CONFIG = "config.json"

#: Files that a checkpoint needs beside its weights. Code (.py) is copied like the rest; nothing here runs it.
_BESIDE_SUFFIXES = (
    ".json", ".jsonl", ".txt", ".md", ".model", ".jinja", ".tiktoken", ".vocab", ".bpe", ".spm", ".yaml", ".yml", ".py",
)  # fmt: skip
_BESIDE_STEMS = ("license", "licence", "notice", "readme", "use_policy", "copying")
_LARGEST_BESIDE = 1 << 30  # bytes; the largest tokenizer.json known has 33 million

#: Other forms of weights, of which only one is taken.
_WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".onnx_data", ".h5", ".msgpack", ".ot", ".npz",
    ".npy", ".tflite", ".pb", ".mlmodel", ".pte", ".ptd",
)  # fmt: skip


def open_folder(folder: Path, index: str | None = None) -> Source:
    """Open a checkpoint folder: every header is read and every name is checked, no data is read.

    Args:
        folder: with `model.safetensors`, `pytorch_model.bin`, or one of their indexes and shards.
        index: the name of the index to follow, where there are several.

    Raises:
        SourceError: there are no weights, a shard is missing, a stray or not sound, the index is stale, or a config
            is no JSON.
        UnsafePickleError: a .bin file that holds more than tensors.
    """
    names, folders = listing(folder)
    weights = find_weights(folder, names, index)
    config = read_json(folder / _CONFIG) if _CONFIG in names else {}
    stack = contextlib.ExitStack()
    try:
        shards = _open_shards(weights, stack)
        tensors = merge_tensors(weights, shards)
    except BaseException:
        stack.close()
        raise
    metadata, disputed = merge_metadata(shard.metadata for shard in shards)
    beside, others = files_beside(weights, names)
    left_out = [
        *(what for shard in shards for what in shard.left_out),
        *disputed,
        *others,
        *grouped({name: "subfolders are not read" for name in folders if not name.startswith(".")}),
    ]
    return Source(
        folder,
        tensors,
        metadata=metadata,
        left_out=tuple(left_out),
        shards=tuple(shard.path for shard in shards),
        beside=beside,
        config=config,
        closer=stack.close,
    )


def listing(folder: Path) -> tuple[list[str], list[str]]:
    """Return the names of all files and of all subfolders."""
    names: list[str] = []
    folders: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    is_folder = entry.is_dir()
                except OSError:  # a link that goes round in circles
                    is_folder = False
                (folders if is_folder else names).append(entry.name)
    except OSError as error:
        raise SourceError(f"{folder}: cannot be read: {error.strerror or error}") from None
    return sorted(names), sorted(folders)


def _open_shards(weights: Weights, stack: contextlib.ExitStack) -> list[Source]:
    """Open every weight file, or tell all that are missing, else all that are not sound."""
    paths = [weights.folder / name for name in weights.files]
    missing = [path.name for path in paths if file_kind(path) is None]
    if missing:
        raise missing_fault(weights, missing)
    files = stack.enter_context(OpenFiles())
    shards: list[Source] = []
    faults: list[SourceError] = []
    for path in paths:
        try:
            shards.append(stack.enter_context(_open_shard(path, files)))
        except UnsafePickleError:
            raise
        except SourceError as error:
            faults.append(error)
    if len(faults) > 1:
        raise SourceError(
            f"{weights.folder}: {len(faults)} of {len(paths)} weight files are not sound: "
            + "; ".join(str(fault) for fault in faults[:3])
            + (f"; and {len(faults) - 3} more" if len(faults) > 3 else ""),
            hint=faults[0].hint,
        )
    if faults:
        raise faults[0]
    return shards


def _open_shard(path: Path, files: OpenFiles) -> Source:
    if path.suffix.lower() == ".bin":
        from .torch_file import open_torch

        return open_torch(path, files)
    with SafetensorsFile(path) as header:
        files.add(path, header.stamp)
        pooled = PooledFile(files, path)
        tensors = {name: slot_tensor(pooled, name, slot) for name, slot in header.slots.items()}
        return Source(path, tensors, metadata=header.metadata)


def missing_fault(weights: Weights, missing: list[str]) -> SourceError:
    """Return the error of weight files that are not there, with what the index tells of their sizes."""
    folder, named = weights.folder, set(missing)
    dangling = [name for name in missing if (folder / name).is_symlink()]
    message = f"{folder}: {listed(missing)} {'is' if len(missing) == 1 else 'are'} missing"
    if dangling:
        message += f" ({listed(dangling)}: a link that leads nowhere)"
    if weights.weight_map is not None:
        tensors = sum(file in named for file in weights.weight_map.values())
        message += f"; {weights.index} places {tensors:,} of its {len(weights.weight_map):,} tensors there"
        there = _bytes_of_tensors(folder / name for name in weights.files if name not in named)
        if weights.total_nbytes is not None and there is not None and weights.total_nbytes > there:
            message += f", {weights.total_nbytes - there:,} bytes"
    return SourceError(message, hint="download what is missing; a broken download can be started again")


def _bytes_of_tensors(paths: Iterable[Path]) -> int | None:
    """Return the bytes of all tensors of some safetensors files, or None where one is not sound."""
    total = 0
    try:
        for path in paths:
            with SafetensorsFile(path) as file:
                total += sum(slot.nbytes for slot in file.slots.values())
    except SourceError:
        return None
    return total


def merge_tensors(weights: Weights, shards: list[Source]) -> dict[str, SourceTensor]:
    """Return the tensors of all shards, in order, once index and headers say the same.

    Raises:
        SourceError: a tensor in two shards, one that only the index has, or one that the index does not have.
    """
    tensors: dict[str, SourceTensor] = {}
    for shard in shards:
        for name, tensor in shard.tensors.items():
            if name in tensors:
                first = tensors[name].file
                raise _stale(weights, f"tensor '{name}' lies in {first.name if first else ''} and in {shard.path.name}")
            tensors[name] = replace(tensor, file=shard.path)
    if weights.weight_map is None:
        return tensors
    for name, file in weights.weight_map.items():
        if name not in tensors:
            raise _stale(weights, f"{weights.index} places tensor '{name}' in {file}, which has none of that name")
        holder = tensors[name].file
        if holder is not None and holder.name != file:
            raise _stale(weights, f"{weights.index} places tensor '{name}' in {file}, it lies in {holder.name}")
    for name, tensor in tensors.items():
        if name not in weights.weight_map:
            place = tensor.file.name if tensor.file else ""
            raise _stale(weights, f"{place} holds tensor '{name}', which {weights.index} does not name")
    return tensors


def _stale(weights: Weights, message: str) -> SourceError:
    return SourceError(
        f"{weights.folder}: {message}", hint="index and shards are of different saves: download or save them together"
    )


def merge_metadata(each: Iterable[Mapping[str, str]]) -> tuple[dict[str, str], list[str]]:
    """Return the string metadata of all shards, and what is left out because two shards differ in it."""
    merged: dict[str, str] = {}
    disputed: dict[str, None] = {}
    for metadata in each:
        for key, value in metadata.items():
            if merged.setdefault(key, value) != value:
                disputed[key] = None
    kept = {key: value for key, value in merged.items() if key not in disputed}
    return kept, [f"metadata '{key:.100}' (shards differ in it)" for key in disputed]


def files_beside(weights: Weights, names: list[str]) -> tuple[tuple[Path, ...], list[str]]:
    """Return what is carried along beside the weights, and what is not, described for people.

    A link is followed where it ends in the folder itself or where the weights lie: caches are folders of links, and
    a folder from elsewhere must not bring files of ours into an output.
    """
    folder = weights.folder
    roots = {Path(os.path.realpath(folder))} | {Path(os.path.realpath(folder / n)).parent for n in weights.files}
    carried: list[Path] = []
    reasons: dict[str, str] = {}
    for name in names:
        path = folder / name
        if name in weights.files or is_index(name) or name.startswith("."):
            continue
        if path.suffix.lower() in _WEIGHT_SUFFIXES:
            reasons[name] = f"other weight files; those of {weights.index or weights.files[0]} are read"
        elif not name.lower().startswith(_BESIDE_STEMS) and path.suffix.lower() not in _BESIDE_SUFFIXES:
            reasons[name] = "not what a checkpoint needs"
        elif file_kind(path) != "file" or path.stat().st_size > _LARGEST_BESIDE:
            reasons[name] = f"no regular file of at most {_LARGEST_BESIDE:,} bytes"
        elif path.is_symlink() and Path(os.path.realpath(path)).parent not in roots:
            reasons[name] = "a link that leaves the folder"
        else:
            carried.append(path)
    return tuple(carried), grouped(reasons)
