"""The weight files that unpack makes: which tensors each holds, and the list of them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ._version import __version__
from .metadata import METADATA_KEY
from .pack_plan import SINGLE_NAME
from .packed_file import PackedFile
from .packed_folder import PackedFolder
from .safetensors_file import Planned
from .safetensors_writer import SafetensorsWriter, refuse_twins
from .unpack_plan import FloatTensor
from .weights import SourceTensor

#: Says in a file's metadata that its weights have been 4-bit codes, so that nobody takes them for the originals.
UNPACKED_KEY = "qcs4w_unpacked"


@dataclass(frozen=True)
class WeightFile:
    """One file that will be written.

    Attributes:
        name: of the file.
        tensors: float tensors that are made of packed ones.
        carried: what is copied byte for byte.
        metadata: of the file that they come from.
    """

    name: str
    tensors: tuple[FloatTensor, ...]
    carried: tuple[SourceTensor, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def planned(self) -> Iterator[Planned]:
        """All tensors, as they will stand in the file."""
        for tensor in self.tensors:
            yield from tensor.planned
        yield from (Planned(tensor.name, tensor.dtype, tensor.shape) for tensor in self.carried)

    @cached_property
    def writer(self) -> SafetensorsWriter:
        """A writer for the file; transformers asks for the format."""
        kept = {key: text for key, text in self.metadata.items() if key != METADATA_KEY}
        return SafetensorsWriter(self.planned, {"format": "pt", **kept, UNPACKED_KEY: f"qcs4w {__version__}"})


def one_file(
    file: PackedFile, tensors: Sequence[FloatTensor], carried: Sequence[SourceTensor], name: str
) -> list[WeightFile]:
    """Plan one file for everything."""
    return [WeightFile(name, tuple(tensors), tuple(carried), file.metadata)]


def files_of_folder(
    file: PackedFile, tensors: Sequence[FloatTensor], carried: Sequence[SourceTensor], largest: int | None
) -> list[WeightFile]:
    """Plan the files of a folder.

    Args:
        file: what is unpacked.
        tensors: what it becomes.
        carried: what goes along.
        largest: bytes that a file may have at most, headers left aside; a tensor that is larger gets one of its own.
            By default the shards are those of the packed folder.

    Raises:
        OutputError: two tensors, in whatever file, would have one name.
    """
    refuse_twins(planned.name for planned in WeightFile("", tuple(tensors), tuple(carried)).planned)
    if largest is not None:
        files = list(_by_size(file, tensors, carried, largest))
    elif isinstance(file, PackedFolder):
        files = list(_by_shard(file, tensors, carried))
    else:
        return one_file(file, tensors, carried, SINGLE_NAME)
    if len(files) == 1:
        return [WeightFile(SINGLE_NAME, files[0].tensors, files[0].carried, files[0].metadata)]
    return files


def _by_shard(
    file: PackedFolder, tensors: Sequence[FloatTensor], carried: Sequence[SourceTensor]
) -> Iterator[WeightFile]:
    """Put each tensor where its first part lies; a shard of which nothing is left is not written."""
    for shard in file.shards:
        own = tuple(tensor for tensor in tensors if file.shard(tensor.parts[0].name) is shard)
        others = tuple(tensor for tensor in carried if file.shard(tensor.name) is shard)
        if own or others:
            yield WeightFile(shard.path.name, own, others, shard.metadata)


def _by_size(
    file: PackedFile, tensors: Sequence[FloatTensor], carried: Sequence[SourceTensor], largest: int
) -> Iterator[WeightFile]:
    groups: list[list[FloatTensor | SourceTensor]] = []
    room = 0
    everything: list[FloatTensor | SourceTensor] = [*tensors, *carried]
    for tensor in everything:
        nbytes = tensor.nbytes * (1 + len(tensor.aliases)) if isinstance(tensor, FloatTensor) else tensor.nbytes
        if nbytes > room or not groups:
            groups.append([])
            room = largest
        groups[-1].append(tensor)
        room -= nbytes
    for number, group in enumerate(groups, 1):
        yield WeightFile(
            f"model-{number:05}-of-{len(groups):05}.safetensors",
            tuple(tensor for tensor in group if isinstance(tensor, FloatTensor)),
            tuple(tensor for tensor in group if isinstance(tensor, SourceTensor)),
            file.metadata,
        )


def index_bytes(files: Sequence[WeightFile]) -> bytes:
    """Return the content of the list of shards."""
    places = {planned.name: file.name for file in files for planned in file.planned}
    total = sum(planned.nbytes for file in files for planned in file.planned)
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
