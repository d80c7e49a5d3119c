"""verify: what is to be verified, from arguments, folders, globs and manifests."""

import glob
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qcs4w_packer.errors import Qcs4wError

_LONGEST_LINE = 1 << 20  # bytes
_PATHS = ("file", "input", "output", "source")
_KEYS = (*_PATHS, "tensor", "rows", "seed", "max_quant_error")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors begin a file with it


@dataclass(frozen=True)
class Thresholds:
    """How large a quantization error may be.

    Attributes:
        general: of every tensor, or None.
        by_pattern: (glob or `re:` of names, threshold); the last one that fits a name counts, before `general`.
    """

    general: float | None = None
    by_pattern: tuple[tuple[str, float], ...] = ()

    def __bool__(self) -> bool:
        return self.general is not None or bool(self.by_pattern)

    def of(self, name: str) -> float | None:
        """Return the threshold of a tensor."""
        from qcs4w_packer.name_patterns import find_names

        return next(
            (limit for pattern, limit in reversed(self.by_pattern) if find_names([name], pattern)), self.general
        )

    def unused(self, names: Sequence[str]) -> list[str]:
        """Return the patterns that fit none of these names."""
        from qcs4w_packer.name_patterns import find_names

        return [pattern for pattern, _ in self.by_pattern if not find_names(names, pattern)]


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

    @property
    def paths(self) -> list[Path]:
        """All that is read for it."""
        return [path for path in (self.file, self.input, self.output, self.source) if path is not None]


@dataclass(frozen=True)
class Unusable:
    """A request that cannot be met: where it stands, and what is wrong with it."""

    file: Path
    error: "Qcs4wError"
    line: int | None = None


def requests_of(paths: list[Path], template: Request) -> Iterator[Request | Unusable]:
    """Yield a request for each packed file that the arguments mean; what one of them lacks does not stop the others."""
    from qcs4w_packer.errors import ContainerError

    for path in paths:
        try:
            found = [path] if path.exists() or not glob.has_magic(str(path)) else _matches(path)
        except OSError as error:
            yield Unusable(path, _unreadable(path, error))
            continue
        if not found:
            yield Unusable(path, ContainerError(f"{path}: matches no file"))
        for each in found:
            yield from _each_file(replace(template, file=each))


def _matches(pattern: Path) -> list[Path]:
    return [Path(found) for found in sorted(glob.glob(str(pattern), recursive=True))]


def _each_file(request: Request) -> Iterator[Request | Unusable]:
    """Yield a request for each packed file that the file of one means."""
    from qcs4w_packer import Qcs4wError

    try:
        yield from [replace(request, file=file) for file in _files_of(request.file)]
    except Qcs4wError as error:
        yield Unusable(request.file, error, request.line)
    except OSError as error:
        yield Unusable(request.file, _unreadable(request.file, error), request.line)


def _files_of(path: Path) -> list[Path]:
    """Return a file itself, or the packed files in a folder, sorted.

    Raises:
        ContainerError: a folder without a packed file.
    """
    from qcs4w_packer.errors import ContainerError

    if not path.is_dir() or _is_packed_folder(path):
        return [path]
    inside = [each for each in sorted(path.iterdir()) if each.is_file() and _may_be_packed(each)]
    if not inside:
        raise ContainerError(
            f"{path}: there is no packed file in this folder", hint="float weights are packed by qcs4w pack"
        )
    return inside


@contextmanager
def open_manifest(manifest: Path) -> Iterator[IO[bytes]]:
    """Open a manifest, or stdin for `-`, before any work is done.

    Raises:
        SourceError: it cannot be read.
    """
    if str(manifest) == "-":
        yield sys.stdin.buffer
        return
    try:
        file = manifest.open("rb")
    except OSError as error:
        raise _unreadable(manifest, error) from None
    with file:
        yield file


def read_manifest(file: IO[bytes], manifest: Path, template: Request) -> Iterator[Request | Unusable]:
    """Yield a request for each line of a manifest; a bad line is one that cannot be met, with its number.

    Args:
        file: JSON lines. Empty ones are passed over.
        manifest: its path, or `-` for stdin. Paths in it are relative to its folder (for stdin: to the current one).
        template: what a line does not say.

    Raises:
        SourceError: it cannot be read.
    """
    from qcs4w_packer.errors import UsageError

    folder = manifest.parent
    number = 0
    try:
        while data := file.readline(_LONGEST_LINE + 1):
            number += 1
            line = data.removeprefix(_BYTE_ORDER_MARK) if number == 1 else data
            if line.strip():
                try:
                    request = _request(line, folder, replace(template, line=number))
                except UsageError as error:
                    text = f"{manifest}: line {number}: {error}"
                    yield Unusable(manifest, UsageError(text, hint=error.hint), number)
                else:
                    yield from _each_file(request)
            while len(data) > _LONGEST_LINE and not data.endswith(b"\n"):  # the rest of a line that is too long
                data = file.readline(_LONGEST_LINE + 1)
    except OSError as error:
        raise _unreadable(manifest, error) from None


def _request(data: bytes, folder: Path, template: Request) -> Request:
    """Read one line; UsageError says what is wrong with it."""
    from qcs4w_packer.errors import UsageError
    from qcs4w_packer.name_patterns import did_you_mean

    if len(data) > _LONGEST_LINE:
        raise UsageError(f"is longer than {_LONGEST_LINE:,} bytes")
    try:
        line = json.loads(data.decode(), object_pairs_hook=_said_once)
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
    for key, least, most in (("rows", 1, 2**32 - 1), ("seed", 0, 2**64 - 1)):
        value = line.get(key)
        if value is None:
            continue
        if type(value) is not int or not least <= value <= most:
            raise UsageError(f"{key} is {json.dumps(value):.40}, expected a whole number from {least} to {most}")
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


def _said_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; of two values for one key none can be the right one."""
    from qcs4w_packer.errors import UsageError

    said: dict[str, Any] = {}
    for key, value in pairs:
        if key in said:
            raise UsageError(f"says '{key:.40}' twice")
        said[key] = value
    return said


def _is_packed_folder(path: Path) -> bool:
    """Tell whether a folder as a whole is one checkpoint of several shards, or what another tool writes."""
    from qcs4w_packer.formats.detect import foreign_opener
    from qcs4w_packer.packed_folder import is_sharded

    return foreign_opener(path) is not None or is_sharded(path)


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
