"""verify: what is to be verified, from arguments, folders, globs and manifests."""

import glob
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qcs4w_packer.errors import Qcs4wError

_LONGEST_LINE = 1 << 20  # bytes
_PATHS = ("file", "input", "output", "source")
_KEYS = (*_PATHS, "tensor", "rows", "seed", "max_quant_error")


@dataclass(frozen=True)
class Thresholds:
    """How large a quantization error may be.

    Attributes:
        general: of every tensor, or None.
        by_pattern: (glob of names, threshold); the last one that fits a name counts, before `general`.
    """

    general: float | None = None
    by_pattern: tuple[tuple[str, float], ...] = ()

    def __bool__(self) -> bool:
        return self.general is not None or bool(self.by_pattern)

    def of(self, name: str) -> float | None:
        """Return the threshold of a tensor."""
        return next((value for glob_, value in reversed(self.by_pattern) if fnmatchcase(name, glob_)), self.general)

    def unused(self, names: Sequence[str]) -> list[str]:
        """Return the patterns that fit none of these names."""
        return [pattern for pattern, _ in self.by_pattern if not any(fnmatchcase(name, pattern) for name in names)]


@dataclass(frozen=True)
class Request:
    """One packed file, and what it is verified with.

    Attributes:
        file: packed.
        tensors: only these; () is all, or all that the input names.
        input: x of the bounded probe; random rows without one.
        output: a y that was computed elsewhere, to be judged in place of the GPU's.
        source: the float weights.
        rows: of random input.
        seed: of all random numbers.
        thresholds: of the quantization error.
        line: of the manifest; None for an argument.
    """

    file: Path
    tensors: tuple[str, ...] = ()
    input: Path | None = None
    output: Path | None = None
    source: Path | None = None
    rows: int = 4
    seed: int = 0
    thresholds: Thresholds = Thresholds()
    line: int | None = None


@dataclass(frozen=True)
class Unusable:
    """A request that cannot be met: where it stands, and what is wrong with it."""

    file: Path
    error: "Qcs4wError"
    line: int | None = None


def expand(path: Path) -> Iterator[Path]:
    """Yield the packed files that an argument means: itself, those in a folder, or those that a glob matches, sorted.

    Raises:
        ContainerError: a folder without a packed file, or a pattern that matches nothing.
    """
    from qcs4w_packer.errors import ContainerError

    if not path.exists() and glob.has_magic(str(path)):
        found = sorted(glob.glob(str(path), recursive=True))
        if not found:
            raise ContainerError(f"{path}: matches no file")
        for each in found:
            yield from expand(Path(each)) if Path(each).is_dir() else [Path(each)]
    elif path.is_dir() and not _is_packed_folder(path):
        inside = [each for each in sorted(path.iterdir()) if each.is_file() and _may_be_packed(each)]
        if not inside:
            raise ContainerError(f"{path}: there is no packed file in this folder")
        yield from inside
    else:
        yield path


def requests_of(paths: list[Path], template: Request) -> Iterator[Request | Unusable]:
    """Yield a request for each packed file that the arguments mean."""
    from qcs4w_packer import Qcs4wError

    for path in paths:
        try:
            yield from (replace(template, file=each) for each in expand(path))
        except Qcs4wError as error:
            yield Unusable(path, error)
        except OSError as error:
            yield Unusable(path, _unreadable(path, error))


def read_manifest(manifest: Path, template: Request) -> Iterator[Request | Unusable]:
    """Yield a request for each line of a manifest; a bad line is one that cannot be met, with its number.

    Args:
        manifest: JSON lines, or `-` for stdin. Paths in it are relative to its folder (for stdin: to the current one).
            Empty lines are passed over.
        template: what a line does not say.

    Raises:
        SourceError: it cannot be read.
    """
    from qcs4w_packer.errors import UsageError

    from_stdin = str(manifest) == "-"
    folder = Path() if from_stdin else manifest.parent
    try:
        with sys.stdin.buffer if from_stdin else manifest.open("rb") as file:
            number = 0
            while data := file.readline(_LONGEST_LINE + 1):
                number += 1
                if data.strip():
                    try:
                        yield _request(data, folder, replace(template, line=number))
                    except UsageError as error:
                        text = f"{manifest}: line {number}: {error}"
                        yield Unusable(manifest, UsageError(text, hint=error.hint), number)
                while len(data) > _LONGEST_LINE and not data.endswith(b"\n"):  # the rest of a line that is too long
                    data = file.readline(_LONGEST_LINE + 1)
    except OSError as error:
        raise _unreadable(manifest, error) from None


def _request(data: bytes, folder: Path, template: Request) -> Request:
    """Read one line; UsageError says what is wrong with it."""
    from qcs4w_packer.errors import UsageError
    from qcs4w_packer.select import did_you_mean

    if len(data) > _LONGEST_LINE:
        raise UsageError(f"is longer than {_LONGEST_LINE:,} bytes")
    try:
        line = json.loads(data.decode())
    except json.JSONDecodeError as error:  # its own "line 1" is not the manifest's
        raise UsageError(f"is no JSON: {error.msg}, at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"is no JSON: {error}") from None
    if not isinstance(line, dict):
        raise UsageError('is no JSON object such as {"file": "packed.safetensors"}')
    for key in line:
        if key not in _KEYS:
            raise UsageError(f"'{key:.40}' is not known; there are {', '.join(_KEYS)}", hint=did_you_mean(key, _KEYS))
    if "file" not in line:
        raise UsageError("names no file")
    given: dict[str, Any] = {}
    for key in (*_PATHS, "tensor"):
        value = line.get(key)
        if value is None:
            continue
        if not isinstance(value, str) or not value or "\0" in value:
            raise UsageError(f"{key} is {json.dumps(value):.40}, expected a {'name' if key == 'tensor' else 'path'}")
        given |= {"tensors": (value,)} if key == "tensor" else {key: folder / value}
    for key, least in (("rows", 1), ("seed", 0)):
        value = line.get(key)
        if value is None:
            continue
        if type(value) is not int or not least <= value < 2**32:
            raise UsageError(f"{key} is {json.dumps(value):.40}, expected a whole number from {least}")
        given[key] = value
    limit = line.get("max_quant_error")
    if limit is not None:
        if type(limit) not in (int, float) or not 0 <= limit < math.inf:
            raise UsageError(f"max_quant_error is {json.dumps(limit):.40}, expected a number from 0")
        given["thresholds"] = Thresholds(float(limit))
    request = replace(template, **given)
    if request.output is not None and request.input is None:
        raise UsageError("names an output without its input")
    if request.thresholds and request.source is None:
        raise UsageError("names no source, to measure the quantization error against")
    return request


def _is_packed_folder(path: Path) -> bool:
    """Tell whether a folder as a whole is what another tool writes."""
    from qcs4w_packer.formats.detect import foreign_opener

    return foreign_opener(path) is not None


def _may_be_packed(path: Path) -> bool:
    """Tell whether to verify a file of a folder: what is damaged is, so that it is reported."""
    from qcs4w_packer import Qcs4wError
    from qcs4w_packer.packed_sources import is_packed_file

    try:
        return is_packed_file(path)
    except Qcs4wError:
        return True


def _unreadable(path: Path, error: OSError) -> "Qcs4wError":
    from qcs4w_packer.errors import SourceError

    return SourceError(f"{path}: cannot be read: {error.strerror or error}")
