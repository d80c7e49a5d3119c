"""What goes along beside the weights that unpack writes into a folder, and how to know such a folder again."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoint_folder import files_beside, listing
from .checkpoint_index import Weights
from .errors import Qcs4wError
from .formats.checkpoint import CONFIG, QUANTIZE_CONFIG, Checkpoint
from .json_file import read_json
from .metadata import METADATA_KEY
from .pack_plan import INDEX_NAME
from .packed_file import PackedFile
from .packed_folder import PackedFolder
from .safetensors_file import SafetensorsFile, file_kind
from .unpack_files import UNPACKED_KEY, WeightFile

_QUANTIZATION = "quantization_config"

#: What a config calls each dtype, the smallest first, and the dtypes of which it holds every value.
_HOLDS = {
    "bfloat16": {"BF16"},
    "float16": {"F16"},
    "float32": {"BF16", "F16", "F32"},
    "float64": {"BF16", "F16", "F32", "F64"},
}
_DEEPEST = 4  # configs of parts of a model within that of the whole


@dataclass(frozen=True)
class Beside:
    """What goes along into a folder beside the weights.

    Attributes:
        copied: files, byte for byte.
        config: content of config.json, where it does not stay as it is.
        left_out: what does not go along, described for people.
        notes: what was changed, for people.
    """

    copied: tuple[Path, ...] = ()
    config: bytes | None = None
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all files that go along."""
        return (*(path.name for path in self.copied), *([] if self.config is None else [CONFIG]))


def beside_of(file: PackedFile, folder: Path, weights: Sequence[WeightFile]) -> Beside:
    """Return what lies beside the packed weights of a folder and belongs to the checkpoint.

    Raises:
        SourceError: its config.json is no JSON.
    """
    if isinstance(file, PackedFolder):
        found, left_out = file.beside, file.others
    elif isinstance(file, Checkpoint):
        found, left_out = files_beside(Weights(folder, (file.path.name,)), listing(folder)[0])
    else:
        return Beside()
    copied = [path for path in found if path.name != QUANTIZE_CONFIG]
    config = next((path for path in copied if path.name == CONFIG), None)
    if config is None:
        return Beside(tuple(copied), None, tuple(left_out))
    before = read_json(config)
    after, notes = _config_of_floats(before, weights)
    if after == before:
        return Beside(tuple(copied), None, tuple(left_out), tuple(notes))
    copied.remove(config)
    text = json.dumps(after, indent=2) + "\n"
    return Beside(tuple(copied), text.encode(), tuple(left_out), tuple(notes))


def _config_of_floats(config: Mapping[str, Any], weights: Sequence[WeightFile]) -> tuple[dict[str, Any], list[str]]:
    """Return a config under which loaders give the weights exactly as they are written, and what was changed."""
    changed, notes = dict(config), list[str]()
    if _QUANTIZATION in config:
        if any(tensor.dtype.startswith("F8_") for file in weights for tensor in file.carried):
            notes.append(f"{CONFIG} keeps its {_QUANTIZATION}, which fp8 tensors that go along may need; look at it")
        else:
            del changed[_QUANTIZATION]
            notes.append(f"{CONFIG} goes along without its {_QUANTIZATION}: the weights are plain floats now")
    written = {tensor.dtype for file in weights for tensor in file.tensors}
    right = next(name for name, held in _HOLDS.items() if written <= held)
    narrow = {name for name, held in _HOLDS.items() if not written <= held}
    found: set[str] = set()
    changed = _with_dtype(changed, narrow, right, found)
    if found:
        notes.append(
            f"{CONFIG} says dtype {right} now, not {', '.join(sorted(found))}: loaders would round the weights"
        )
    return changed, notes


def _with_dtype(
    config: Mapping[str, Any], narrow: set[str], right: str, found: set[str], depth: int = 0
) -> dict[str, Any]:
    """Return a config, and those in it of parts of the model, with each dtype that is too narrow replaced."""
    changed: dict[str, Any] = {}
    for key, value in config.items():
        if key in ("dtype", "torch_dtype") and isinstance(value, str) and value in narrow:
            found.add(value)
            changed[key] = right
        elif isinstance(value, dict) and key.endswith("_config") and depth < _DEEPEST:
            changed[key] = _with_dtype(value, narrow, right, found, depth + 1)
        else:
            changed[key] = value
    return changed


def is_unpacked_folder(folder: Path, beside: Iterable[str]) -> bool:
    """Tell by its content whether a folder is what unpack made, with nothing in it but that and files of these names.

    Args:
        folder: to look at.
        beside: names of what goes along with the weights.
    """
    others = {INDEX_NAME, *beside}
    try:
        paths = list(folder.iterdir())
        weights = [path for path in paths if path.name not in others]
        return (
            all(file_kind(path) == "file" for path in paths)
            and len(weights) > 0
            and all(path.suffix == ".safetensors" and _is_unpacked(path) for path in weights)
        )
    except (Qcs4wError, OSError):
        return False


def _is_unpacked(path: Path) -> bool:
    with SafetensorsFile(path) as file:
        return UNPACKED_KEY in file.metadata and METADATA_KEY not in file.metadata
