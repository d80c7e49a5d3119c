"""Where unpack writes: one weight file, or a folder of shards with their index and what lies beside them."""

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from .errors import UsageError
from .files import (
    check_folder,
    check_outside,
    check_room,
    check_target,
    copy_file,
    replacing,
    replacing_folder,
    write_file,
)
from .formats.checkpoint import CONFIG
from .pack_plan import INDEX_NAME
from .safetensors_file import file_kind
from .unpack_beside import Beside, is_unpacked_folder
from .unpack_files import WeightFile, index_bytes
from .unpack_plan import UnpackRequest


@dataclass(frozen=True)
class Place:
    """Where the output goes.

    Attributes:
        output: the file or folder; None in a dry run without one.
        is_folder: it is a folder.
    """

    output: Path | None
    is_folder: bool

    @classmethod
    def of(cls, source: Path, output: Path | None, request: UnpackRequest) -> "Place":
        """Decide by the output's suffix, or in a dry run without one by the source.

        Raises:
            UsageError: a single file would be written without a suffix, or --max-shard-size asks for a folder.
        """
        may_be = file_kind(source) == "folder" or request.max_shard_size is not None
        if output is None:
            return cls(None, may_be)
        is_file = output.suffix.lower() == ".safetensors"
        if is_file and request.max_shard_size is not None:
            raise UsageError(
                f"{output}: shards of a largest size are written to a folder", hint=f"-o {output.with_suffix('')}"
            )
        if not is_file and not may_be:
            is_bare = output.name in ("", "..")  # ., / and nothing at all have no name to give a suffix to
            named = output / "out.safetensors" if is_bare else output.with_suffix(".safetensors")
            raise UsageError(
                f"{output}: the floats of one file are written to a .safetensors file",
                hint=f"-o {named}, or --max-shard-size for a folder of shards",
            )
        return cls(output, not is_file)

    @property
    def name(self) -> str:
        """Name of a single file; empty where none is known."""
        return "" if self.output is None else self.output.name

    def check(self, sources: tuple[Path, ...], beside: Beside, *, force: bool) -> None:
        """Say before any work whether the output can be written."""
        if self.output is None:
            return
        if self.is_folder:
            check_folder(self.output, force=force, is_ours=_ours(beside), sources=sources)
        else:
            check_target(self.output, force=force, sources=sources)
        check_outside(self.output, sources)

    @contextlib.contextmanager
    def open(
        self,
        output: Path,
        files: list[WeightFile],
        beside: Beside,
        nbytes: int,
        sources: tuple[Path, ...],
        *,
        force: bool,
    ) -> Iterator[Callable[[WeightFile], AbstractContextManager[int]]]:
        """Yield a function that opens each weight file; all is there when the block ends well, or nothing."""
        if not self.is_folder:
            yield lambda file: replacing(output, force=force, nbytes=nbytes, sources=sources)
            return
        check_room(Path(os.path.realpath(output)), nbytes)
        with replacing_folder(output, force=force, is_ours=_ours(beside), sources=sources) as folder:
            yield lambda file: replacing(folder / file.name, nbytes=file.writer.nbytes)
            if len(files) > 1:
                write_file(folder / INDEX_NAME, index_bytes(files))
            for path in beside.copied:
                copy_file(path, folder / path.name)
            if beside.config is not None:
                write_file(folder / CONFIG, beside.config)


def _ours(beside: Beside) -> Callable[[Path], bool]:
    return lambda folder: is_unpacked_folder(folder, beside.names)
