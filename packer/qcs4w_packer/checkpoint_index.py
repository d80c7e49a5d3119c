"""Which files of a checkpoint folder hold its weights, by their names and the index alone.

The names are those of Hugging Face: `model.safetensors`, or `model.safetensors.index.json` and shards; of old
`pytorch_model.bin` and `pytorch_model.bin.index.json`. A variant stands before the suffix: `model.fp16.safetensors`,
`model.safetensors.index.fp16.json`. Source: huggingface/transformers 5.24, utils/__init__.py and modeling_utils.py.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import SourceError
from .json_file import read_json
from .safetensors_file import is_unicode, name_fault

_DEFAULTS = ("model.safetensors", "pytorch_model.bin")  # the first that is there is taken
_INDEX = re.compile(r"(?P<kind>\.safetensors|\.bin)\.index(?P<variant>\..+)?\.json$")
_SHARD = re.compile(r"(?P<stem>.*?)[-_]?\d+-of-\d+(?P<rest>.*\.(?:safetensors|bin))$", re.DOTALL)
_LARGEST_INDEX = 64 << 20  # bytes; one of 140,000 experts' tensors has 15 million
_SHOWN = 3  # names in a message


@dataclass(frozen=True)
class Weights:
    """The files of a folder that hold the weights.

    Attributes:
        folder: where they lie.
        files: their names, in order.
        index: the name of the index, or None for a single file.
        weight_map: file by tensor, as the index has it.
        total_nbytes: bytes of all tensors as the index states them, or None.
    """

    folder: Path
    files: tuple[str, ...]
    index: str | None = None
    weight_map: Mapping[str, str] | None = None
    total_nbytes: int | None = None


def is_index(name: str) -> bool:
    """Tell whether a file name is that of an index."""
    return _INDEX.search(name) is not None


def find_weights(folder: Path, names: Collection[str], index: str | None = None) -> Weights:
    """Find the files that hold the weights of a folder. Reads the index, if there is one, and no weight file.

    Args:
        folder: the checkpoint.
        names: of all files in it.
        index: the one to follow, where it has several (variants).

    Raises:
        SourceError: there are no weights, several of them, shards without an index, a shard that the index does not
            name, or an index that is not sound.
    """
    chosen = index or _choose(folder, names)
    if not is_index(chosen):
        return Weights(folder, (chosen,))
    weights = _read_index(folder, chosen)
    _refuse_strays(weights, names)
    return weights


def listed(names: Sequence[str]) -> str:
    """Return the first of some names, and how many more there are."""
    more = len(names) - _SHOWN
    shown = (name if is_unicode(name) else repr(name) for name in names[:_SHOWN])
    return ", ".join(shown) + (f" and {more:,} more" if more > 0 else "")


def grouped(reasons: Mapping[str, str]) -> list[str]:
    """Return one line for each reason, with the first of the names that it holds for."""
    groups: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault(reason, []).append(name)
    return [f"{listed(names)} ({reason})" for reason, names in groups.items()]


def _choose(folder: Path, names: Collection[str]) -> str:
    """Return the name of an index or of a single weight file."""
    for default in _DEFAULTS:
        suffix = Path(default).suffix
        indexes = [name for name in names if (match := _INDEX.search(name)) and match["kind"] == suffix]
        if f"{default}.index.json" in indexes:
            return f"{default}.index.json"
        shards = sorted(name for name in names if name.endswith(suffix) and _SHARD.match(name))
        if shards and not indexes:
            raise SourceError(
                f"{folder}: holds shards ({listed(shards)}) and no {default}.index.json that names them all",
                hint="download the index too, or name one file",
            )
        if default in names:
            return default
    others = sorted(n for n in names if ".safetensors.index" in n and is_index(n)) or sorted(
        name for name in names if name.endswith(".safetensors")
    )
    if len(others) == 1:
        return others[0]
    if others:
        raise SourceError(
            f"{folder}: has no {_DEFAULTS[0]}, and several others: {listed(others)}",
            hint=f"name the one to read: {folder / others[0]}",
        )
    raise SourceError(
        f"{folder}: holds no weights, expected {_DEFAULTS[0]}, {_DEFAULTS[0]}.index.json or {_DEFAULTS[1]}",
        hint="of weights under another name, name the file",
    )


def _read_index(folder: Path, name: str) -> Weights:
    path = folder / name
    document = read_json(path, largest=_LARGEST_INDEX)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{path}: has no weight_map, which names the shard of each tensor")
    suffix = ".safetensors" if ".safetensors.index" in name else ".bin"
    for tensor, file in weight_map.items():
        if fault := name_fault(tensor):
            raise SourceError(f"{path}: tensor {tensor!r:.100}: {fault}")
        if not isinstance(file, str) or not _is_plain(file) or not file.endswith(suffix):
            raise SourceError(
                f"{path}: places tensor '{tensor:.100}' in {file!r:.100}, expected a {suffix} file of this folder"
            )
    metadata = document.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if type(total) is float and total.is_integer():  # some tools write 1234.0
        total = int(total)
    return Weights(
        folder, tuple(sorted(set(weight_map.values()))), name, weight_map, total if type(total) is int else None
    )


def _is_plain(name: str) -> bool:
    """Tell whether a name is that of a file in a folder, and leads nowhere else."""
    return 0 < len(name) < 256 and name not in (".", "..") and not set(name) & set("/\\\0") and is_unicode(name)


def _refuse_strays(weights: Weights, names: Collection[str]) -> None:
    """Refuse a folder with files that look like weights of the same checkpoint and are not named by its index."""
    families = {(match["stem"], match["rest"]) for name in weights.files if (match := _SHARD.match(name))}
    strays = [
        name
        for name in sorted(set(names) - set(weights.files))
        if ((match := _SHARD.match(name)) and (match["stem"], match["rest"]) in families)
        or f"{name}.index.json" == weights.index
    ]
    if strays:
        raise SourceError(
            f"{weights.folder}: {weights.index} does not name {listed(strays)}: "
            "strays of another checkpoint, or the index is stale",
            hint="move them elsewhere if the index is right; else download or save the index again",
        )
