"""What pack will write, decided from headers alone: which tensors go into which file, and how large it becomes."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from .architecture import tied_names
from .container_writer import ContainerWriter
from .errors import SelectionError
from .formats.detect import foreign_opener
from .metadata import PACKED, SCALE, SHAPE, PackedEntry
from .request import Request
from .safetensors_file import Planned
from .safetensors_writer import refuse_twins
from .select import Choice, choose
from .weights import Source, SourceTensor

#: The name of a folder's only weight file, and of the list of several.
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_HEADER_NBYTES = 1024  # of a shard's header, besides what its tensors need


@dataclass(frozen=True)
class PlannedShard:
    """One file that will be written.

    Attributes:
        name: of the file.
        choices: what is packed into it, tied tensors once.
        entries: what the file will say of each of them, digests excepted.
        carried: what is copied into it.
        metadata: the file's string metadata, ours excepted.
    """

    name: str
    choices: tuple[Choice, ...]
    entries: tuple[PackedEntry, ...]
    carried: tuple[SourceTensor, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)

    def writer(self) -> ContainerWriter:
        """Return a writer for the file; no file is touched."""
        planned = (Planned(tensor.name, tensor.dtype, tensor.shape) for tensor in self.carried)
        return ContainerWriter(self.entries, planned, self.metadata, is_shard=True)

    @cached_property
    def nbytes(self) -> int:
        """Size of the finished file."""
        return self.writer().nbytes

    @property
    def source_nbytes(self) -> int:
        """Bytes of source that have to be read."""
        return sum(choice.tensor.nbytes for choice in self.choices) + sum(tensor.nbytes for tensor in self.carried)

    @property
    def tensor_count(self) -> int:
        """Tensors of the source that go into it."""
        return len(self.choices) + len(self.carried)

    def stored(self) -> dict[str, int]:
        """Return the bytes of every tensor in the file, by the name under which it is stored."""
        sizes = {tensor.name: tensor.nbytes for tensor in self.carried}
        for entry in self.entries:
            codes = entry.packed_nbytes - 4 * entry.out_features
            sizes |= {entry.name + PACKED: codes, entry.name + SCALE: 4 * entry.out_features, entry.name + SHAPE: 16}
        return sizes


@dataclass(frozen=True)
class PackPlan:
    """All that will be written for one source.

    Attributes:
        source: open; its headers have been read, its data has not.
        output: the file, or the folder, to make; None in a dry run without one.
        is_folder: the output is a folder of shards.
        shards: the files, in order; at least one.
        carried: choices for all that is copied, or left out with `packed_only`.
        dropped: choices for what is in no output, with the reason.
        options: what was asked for, as it can stand in JSON.
    """

    source: Source
    output: Path | None
    is_folder: bool
    shards: tuple[PlannedShard, ...]
    carried: tuple[Choice, ...]
    dropped: tuple[Choice, ...]
    options: Mapping[str, object]

    @property
    def source_nbytes(self) -> int:
        """Bytes of source that have to be read."""
        return sum(shard.source_nbytes for shard in self.shards)

    @property
    def output_nbytes(self) -> int:
        """Bytes of all files with tensors."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def tensor_count(self) -> int:
        """Tensors of the source that go into the output."""
        return sum(shard.tensor_count for shard in self.shards)

    @property
    def source_files(self) -> tuple[Path, ...]:
        """The weight files that are read."""
        return self.source.shards or (self.source.path,)

    def index(self) -> bytes | None:
        """Return the content of the list of shards; None where there is only one."""
        if len(self.shards) == 1:
            return None
        sizes = [(name, nbytes, shard.name) for shard in self.shards for name, nbytes in shard.stored().items()]
        document = {
            "metadata": {"total_size": sum(nbytes for _, nbytes, _ in sizes)},
            "weight_map": {name: shard for name, _, shard in sorted(sizes)},
        }
        return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def plan_pack(
    source: Source,
    output: Path | None,
    request: Request | None = None,
    *,
    max_shard_size: int | None = None,
    packed_only: bool = False,
) -> PackPlan:
    """Decide what becomes of every tensor of a source and into which file it goes. Reads no data, writes nothing.

    Args:
        source: an open weight file or folder.
        output: the file to make; a folder where the source is one or `max_shard_size` is given.
        request: what to pack; by default linear weights by name.
        max_shard_size: bytes that a file may have at most; a tensor that is larger gets one of its own. By default
            the files are those of the source.
        packed_only: do not carry the other tensors along.

    Raises:
        Qcs4wError: as `choose` does.
        SelectionError: the source is packed already.
        OutputError: two tensors of the output, in whatever file, would have one name.
    """
    _refuse_packed(source)
    request = request or Request()
    choices = choose(source, request)
    carried = tuple(choice for choice in choices if choice.action == "carry")
    is_folder = bool(source.shards) or max_shard_size is not None
    taken = [c for c in choices if c.action == "pack" and not c.alias_of]
    taken += [] if packed_only else carried
    entries = {choice.tensor.name: entry for choice, entry in _entries(choices, source)}
    refuse_twins(name for entry in entries.values() for name in (entry.name, *entry.aliases))
    if max_shard_size is not None:
        metadata = {} if packed_only else source.metadata
        groups = list(_by_size(_in_file_order(taken, choices), entries, max_shard_size, len(json.dumps(metadata))))
    else:
        groups = _by_file(taken, source)
    names = _shard_names(groups, source, output, is_folder=is_folder, as_source=max_shard_size is None)
    shards = tuple(
        PlannedShard(
            name,
            tuple(choice for choice in group if choice.action == "pack"),
            tuple(entries[choice.tensor.name] for choice in group if choice.action == "pack"),
            tuple(choice.tensor for choice in group if choice.action != "pack"),
            {} if packed_only else source.metadata,
        )
        for name, group in zip(names, groups, strict=True)
    )
    refuse_twins(name for shard in shards for name in shard.stored())
    return PackPlan(
        source,
        output,
        is_folder,
        shards,
        carried,
        tuple(choice for choice in choices if choice.action not in ("pack", "carry")),
        {**vars(request), "max_shard_size": max_shard_size, "packed_only": packed_only},
    )


def _entries(choices: list[Choice], source: Source) -> Iterator[tuple[Choice, PackedEntry]]:
    """Yield what the output will say of each tensor that is packed; twins by name stay twins, to be refused."""
    packing = [choice for choice in choices if choice.action == "pack"]
    aliases: dict[str, list[str]] = {}
    for choice in packing:
        if choice.alias_of:
            aliases.setdefault(choice.alias_of, []).append(choice.tensor.name)
    owners = [choice for choice in packing if not choice.alias_of]
    refuse_twins(choice.tensor.name for choice in owners)
    for choice in owners:
        name = choice.tensor.name
        yield (
            choice,
            PackedEntry(
                name,
                choice.out_features,
                choice.in_features,
                source_dtype=choice.tensor.dtype,
                transposed=choice.transposed,
                aliases=(*aliases.get(name, ()), *tied_names(source, name)),
                stack=choice.stack,
                stack_parts=source.tensors[choice.stack].shape[0] if choice.stack else None,
            ),
        )


def _in_file_order(taken: list[Choice], choices: list[Choice]) -> list[Choice]:
    """Return choices in the source's order, so that a module's weight and bias meet in one shard."""
    place = {id(choice): index for index, choice in enumerate(choices)}
    return sorted(taken, key=lambda choice: place[id(choice)])


def _by_file(taken: list[Choice], source: Source) -> list[list[Choice]]:
    """Return the choices of each of the source's files that has any."""
    groups: dict[Path | None, list[Choice]] = {file: [] for file in source.shards or (None,)}
    for choice in taken:
        groups.setdefault(choice.tensor.file if source.shards else None, []).append(choice)
    return [group for group in groups.values() if group]


def _by_size(
    taken: list[Choice], entries: Mapping[str, PackedEntry], most: int, metadata_nbytes: int
) -> Iterator[list[Choice]]:
    """Yield choices for one file after the other, each of at most `most` bytes where single tensors allow it."""
    group: list[Choice] = []
    empty = total = _HEADER_NBYTES + metadata_nbytes
    for choice in taken:
        nbytes = _nbytes_in_file(choice, entries)
        if group and total + nbytes > most:
            yield group
            group, total = [], empty
        group.append(choice)
        total += nbytes
    if group:
        yield group


def _nbytes_in_file(choice: Choice, entries: Mapping[str, PackedEntry]) -> int:
    """Return no less than what a tensor adds to a file, its part of the header included."""
    name = len(json.dumps(choice.tensor.name).encode()) + 20  # the header may escape less, never more
    if choice.action == "carry":
        return choice.tensor.nbytes + name + 100 + 22 * len(choice.tensor.shape)
    entry = entries[choice.tensor.name]
    said = 2 * len(json.dumps(entry.to_json()))  # a document within a document: quotes are escaped
    return entry.packed_nbytes + 16 + said + 2 * name + 3 * (name + 140)


def _shard_names(
    groups: list[list[Choice]], source: Source, output: Path | None, *, is_folder: bool, as_source: bool
) -> list[str]:
    """Return the files' names: those of the source where all of them come again, else the usual pattern."""
    if not is_folder:
        return [output.name if output is not None else SINGLE_NAME]
    count = len(groups)
    if count == 1:
        return [SINGLE_NAME]
    names = [path.name for path in source.shards]
    if as_source and len(names) == count and all(re.fullmatch(r".+-\d+-of-\d+\.safetensors", name) for name in names):
        return names
    return [f"model-{index:05}-of-{count:05}.safetensors" for index in range(1, count + 1)]


def _refuse_packed(source: Source) -> None:
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
