"""Makes weight files for tests byte by byte, sound ones and hostile ones, without the code under test."""

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

PACKER = Path(__file__).parents[1] / "packer"

#: What a finite row must never hold, as little-endian bytes, by dtype.
NON_FINITE = {
    "F32": {"nan": "0000c07f", "inf": "0000807f", "-inf": "000080ff"},
    "F16": {"nan": "007e", "inf": "007c", "-inf": "00fc"},
    "BF16": {"nan": "c07f", "inf": "807f", "-inf": "80ff"},
    "F64": {"nan": "000000000000f87f", "inf": "000000000000f07f", "-inf": "000000000000f0ff"},
}
ITEM_NBYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def raw_safetensors(path: Path, header: bytes | Mapping[str, Any], data: bytes = b"") -> Path:
    """Write a safetensors file from a header, taken as it is, and the bytes after it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def write_safetensors(
    path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]], metadata: Mapping[str, str] | None = None
) -> Path:
    """Write (dtype, shape, bytes) by name into a sound safetensors file, in the order given."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + len(data)]}
        begin += len(data)
    return raw_safetensors(path, header, b"".join(data for _, _, data in tensors.values()))


def save_floats(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> Path:
    """Write float32 arrays into a safetensors file."""
    tensors = {name: ("F32", array.shape, array.astype("<f4").tobytes()) for name, array in arrays.items()}
    return write_safetensors(path, tensors, metadata)


def save_folder(folder: Path, arrays: Mapping[str, np.ndarray], per_shard: int = 2) -> Path:
    """Write a checkpoint folder of several shards with an index and a config."""
    folder.mkdir()
    names = list(arrays)
    count = -(-len(names) // per_shard)
    weight_map: dict[str, str] = {}
    for index in range(count):
        part = names[index * per_shard : (index + 1) * per_shard]
        shard = f"model-{index + 1:05}-of-{count:05}.safetensors"
        save_floats(folder / shard, {name: arrays[name] for name in part})
        weight_map |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "none"}')
    return folder


def sparse_safetensors(path: Path, shape: tuple[int, ...], dtype: str = "F32", name: str = "a.weight") -> int:
    """Write a file with one all-zero tensor that takes no room on the disk; return the offset of its data."""
    nbytes = int(np.prod(shape, dtype=object)) * ITEM_NBYTES[dtype]
    raw_safetensors(path, {name: {"dtype": dtype, "shape": list(shape), "data_offsets": [0, nbytes]}})
    start = path.stat().st_size
    os.truncate(path, start + nbytes)
    return start


def poke(path: Path, offset: int, data: bytes) -> None:
    """Overwrite some bytes of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def npy_header(
    shape: str = "(2, 3)", descr: str = "'<f4'", *, order: str = "False", version: int = 1, extra: str = ""
) -> bytes:
    """Return the first bytes of a .npy file, its fields spelled as given."""
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, {extra}}}".encode()
    length = struct.pack("<H" if version == 1 else "<I", len(text) + 1)
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + b"\n"


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """Damage a file's bytes: flip bits, overwrite, cut, repeat or insert, more often near its ends."""
    spoilt = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        near = min(len(spoilt), 400)
        place = int(rng.choice([rng.integers(len(spoilt)), rng.integers(near), len(spoilt) - 1 - rng.integers(near)]))
        match int(rng.integers(6)):
            case 0:
                spoilt[place] ^= 1 << int(rng.integers(8))
            case 1:
                spoilt[place] = int(rng.integers(256))
            case 2:
                spoilt[place : place + 8] = rng.bytes(8)
            case 3:
                del spoilt[place : place + int(rng.integers(1, 40))]
            case 4:
                spoilt[place:place] = spoilt[place : place + int(rng.integers(1, 40))]
            case _:
                spoilt[place : place + 4] = bytes([int(rng.choice([0, 0x7F, 0xFF]))]) * 4
        if not spoilt:
            return b""
    return bytes(spoilt)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Fail when a block takes longer."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program that can import qcs4w_packer in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(PACKER)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def bytes_read() -> int:
    """Return how many bytes this process has asked the system for so far (Linux counts them)."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(lines[0].removeprefix("rchar: "))


def leftovers(folder: Path) -> list[str]:
    """Name the unfinished files in a folder."""
    return [path.name for path in folder.iterdir() if path.name.endswith(".part")]
