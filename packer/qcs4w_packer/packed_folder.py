"""A folder of containers that are the shards of one checkpoint, read as one packed file."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .checkpoint_folder import files_beside, listing, merge_metadata, merge_tensors, missing_fault
from .checkpoint_index import Weights, find_weights, is_index
from .container import Container, is_container_like
from .errors import ContainerError, Qcs4wError, SourceError
from .metadata import PACKED, PackedEntry
from .open_files import OpenFiles
from .packed_file import PackedFile
from .safetensors_file import file_kind
from .weights import Source, SourceTensor


class PackedFolder(PackedFile):
    """What pack made of a checkpoint folder, opened for reading. Use it as a context manager.

    Every header is read when it is opened, so that a shard that is missing, truncated or of another checkpoint is found
    before any work; data is read when it is asked for, and no more than a few shards are held open.

    Args:
        folder: with `model.safetensors`, or `model.safetensors.index.json` and the shards that it names.
        strict: refuse what a reader must refuse; else remember it in `problems` and read what is there.
        tensor: only this packed tensor will be asked for: where the index names its shard, no other is looked at.

    Attributes:
        shards: the weight files that could be opened, in order.
        beside: what lies beside them and belongs to the checkpoint: config.json, tokenizer files.
        others: what lies there and does not, described for people.

    Raises:
        SourceError: a shard is missing, not sound, a stray, or the index is stale.
        ContainerError: a shard is no container, two say the same of a name, or nothing is packed.
    """

    format = "qcs4w"

    def __init__(self, folder: str | os.PathLike[str], *, strict: bool = True, tensor: str | None = None):
        self.path = Path(folder)
        self._strict = strict
        self.problems = []
        names, _ = listing(self.path)
        weights = find_weights(self.path, names)
        beside, self.others = files_beside(weights, names)
        self.beside = beside
        self._index = None if weights.index is None else self.path / weights.index
        self._files = OpenFiles()
        try:
            self.shards = self._open_shards(weights, _shard_of(weights, tensor))
            self._holders = {name: shard for shard in self.shards for name in shard.entries}
            self._carriers = {name: shard for shard in self.shards for name in shard.carried}
            self.entries = {name: shard.entries[name] for name, shard in self._holders.items()}
            self.carried = list(self._carriers)
            self._names = self._spellings()
            if not self.entries:
                self._refuse(ContainerError(f"{self.path}: holds no packed tensor"))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close every file."""
        self._files.close()

    @property
    def files(self) -> tuple[Path, ...]:
        """The folder, the index if there is one, and the shards."""
        index = () if self._index is None else (self._index,)
        return (self.path, *index, *(shard.path for shard in self.shards), *self.beside)

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def statement(self) -> dict[str, str | int]:
        """What the first shard's metadata say of it as a whole; readers refuse shards that say otherwise."""
        return self.shards[0].statement if self.shards else {}

    @property
    def metadata(self) -> Mapping[str, str]:
        """The other string metadata, as far as the shards agree."""
        return merge_metadata(shard.metadata for shard in self.shards)[0]

    def names(self) -> Mapping[str, str]:
        """Return every name by which a packed tensor may be asked for, with the name it is stored under."""
        return self._names

    def shard(self, name: str) -> Container:
        """Return the shard that holds a tensor, by the name of a packed entry or of a carried tensor."""
        return self._holders.get(name) or self._carriers[name]

    def arrays(self, entry: PackedEntry) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Read packed bytes (N, K_packed) and scales (N,) as they are, whatever their digests say."""
        return self.shard(entry.name).arrays(entry)

    def scales(self, entry: PackedEntry) -> NDArray[np.float32]:
        """Read the scales (N,) alone."""
        return self.shard(entry.name).scales(entry)

    def row_reader(self, entry: PackedEntry) -> Callable[[int, int], NDArray[np.uint8]]:
        """Return a function (first row, end) -> packed rows, which reads these rows only."""
        return self.shard(entry.name).row_reader(entry)

    def checked_rows(
        self, entry: PackedEntry, step: int
    ) -> Iterator[tuple[int, NDArray[np.uint8], NDArray[np.float32]]]:
        """Yield (first row, packed rows, their scales) of a tensor, of which no more than `step` rows are held."""
        return self.shard(entry.name).checked_rows(entry, step)

    def place(self, entry: PackedEntry) -> tuple[Path, int]:
        """Return the shard and the offset in it at which a tensor's packed bytes lie."""
        return self.shard(entry.name).place(entry)

    def scales_place(self, entry: PackedEntry) -> tuple[Path, int]:
        """Return the shard and the offset in it at which a tensor's scales lie."""
        return self.shard(entry.name).scales_place(entry)

    def carried_place(self, name: str) -> int:
        """Return the offset in its shard at which a carried tensor lies."""
        return self._carriers[name].carried_place(name)

    def carried_tensor(self, name: str) -> SourceTensor:
        """Return a tensor that was copied along, by its name."""
        return self._carriers[name].carried_tensor(name)

    def _refuse(self, error: Qcs4wError, *, is_fatal: bool = False) -> None:
        """Raise what a strict reader raises; otherwise remember it."""
        if self._strict or is_fatal:
            raise error
        self.problems.append(str(error).removeprefix(f"{self.path}: "))

    def _open_shards(self, weights: Weights, only: str | None) -> list[Container]:
        """Open every shard that can be, or one, and hold what they have against the index."""
        wanted = weights.files if only is None else (only,)
        missing = [name for name in wanted if file_kind(self.path / name) is None]
        if missing:
            self._refuse(missing_fault(weights, missing), is_fatal=only is not None)
        shards = []
        for name in wanted:
            if name in missing:
                continue
            try:
                shard = Container(self.path / name, strict=self._strict, files=self._files)
            except Qcs4wError as error:
                self._refuse(error, is_fatal=only is not None)
                continue
            self.problems += [f"{name}: {problem}" for problem in shard.problems]
            shards.append(shard)
        if len(shards) == len(weights.files):
            try:
                merge_tensors(weights, [Source(s.path, {t.name: t for t in s.stored}) for s in shards])
            except SourceError as error:
                self._refuse(error)
        return shards

    def _spellings(self) -> dict[str, str]:
        """Return the names of all shards, which must not say two things of one."""
        names = {name: name for name in self.entries}
        for shard in self.shards:
            for alias, name in shard.names().items():
                if names.setdefault(alias, name) != name:
                    other = f"'{names[alias]}' of {self.shard(names[alias]).path.name}"
                    self._refuse(
                        ContainerError(
                            f"{self.path}: '{alias}' is a name of tensor '{name}' of {shard.path.name} and of {other}"
                        )
                    )
        return names


def _shard_of(weights: Weights, tensor: str | None) -> str | None:
    """Return the file that holds a packed tensor by the index, or None where that does not tell (an alias)."""
    if tensor is None or weights.weight_map is None:
        return None
    places = (weights.weight_map.get(name + PACKED) for name in (tensor, f"{tensor}.weight"))
    return next(filter(None, places), None)


def holds_packed(folder: Path) -> bool:
    """Tell whether the weights of a checkpoint folder are packed, by the index or the header of its one file.

    Raises:
        SourceError: it is no checkpoint folder, or one whose index or file is not sound.
    """
    weights = find_weights(folder, listing(folder)[0])
    if weights.weight_map is not None:
        return any(name.endswith(PACKED) for name in weights.weight_map)
    return weights.files[0].endswith(".safetensors") and is_container_like(folder / weights.files[0])


def is_sharded(folder: Path) -> bool:
    """Tell whether a folder is one checkpoint by its index, and packed as far as can be seen."""
    if not any(is_index(name) for name in listing(folder)[0]):
        return False
    with contextlib.suppress(SourceError):
        return holds_packed(folder)
    return True
