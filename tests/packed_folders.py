"""Makes folders of containers that are the shards of one checkpoint, for tests of what reads them."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from making import write_safetensors

from qcs4w_packer import PackedLinear
from qcs4w_packer.container_writer import ContainerWriter
from qcs4w_packer.metadata import METADATA_KEY, PackedEntry, to_document
from qcs4w_packer.safetensors_file import Planned, SafetensorsFile

#: Tensors that are carried along: dtype, shape and bytes by name.
Carried = Mapping[str, tuple[str, tuple[int, ...], bytes]]

INDEX = "model.safetensors.index.json"


def write_container(
    path: Path,
    tensors: Iterable[tuple[PackedEntry, PackedLinear]],
    carried: Carried | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write a container whose entries say what the test wants; without any it is a shard of carried tensors alone."""
    tensors, carried = list(tensors), carried or {}
    if not tensors:
        return write_safetensors(path, carried, {**(metadata or {}), METADATA_KEY: to_document([])})
    planned = [Planned(name, dtype, shape) for name, (dtype, shape, _) in carried.items()]
    writer = ContainerWriter([entry for entry, _ in tensors], planned, metadata)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)  # unlike `replacing`, without waiting for the disk
    try:
        writer.begin(fd)
        for entry, packed in tensors:
            writer.write_rows(entry.name, 0, packed.packed, packed.scales)
        for name, (_, _, data) in carried.items():
            writer.write_carried(name, 0, data)
        writer.finish()
    finally:
        os.close(fd)
    return path


def write_index(folder: Path) -> Path:
    """Write the index of the shards that lie in a folder."""
    weight_map, total = {}, 0
    for path in sorted(folder.glob("*.safetensors")):
        with SafetensorsFile(path) as file:
            weight_map |= dict.fromkeys(file.slots, path.name)
            total += sum(slot.nbytes for slot in file.slots.values())
    document = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(document))
    return folder


def shard_name(number: int, count: int) -> str:
    """Name a shard as Hugging Face does, counted from 1."""
    return f"model-{number:05}-of-{count:05}.safetensors"
