"""Our reader and layout of safetensors, with the safetensors package as the witness, and hostile headers."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from making import mutated, raw_safetensors, save_floats, time_limit, write_safetensors
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from qcs4w_packer import Qcs4wError, SourceError
from qcs4w_packer.safetensors_file import (
    DTYPE_BITS,
    Planned,
    SafetensorsFile,
    SafetensorsLayout,
    name_fault,
    open_for_reading,
)

TORCH_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16",
    torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64", torch.uint64: "U64", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
SHAPES = [(), (0,), (1,), (7,), (2, 3), (3, 0, 2), (1, 1, 1, 5), (2, 2, 3)]


def entry(dtype: object = "F32", shape: object = (2, 2), offsets: object = (0, 16), **more: object) -> dict[str, Any]:
    """One tensor's entry in a header, sound unless told otherwise."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def header(text: str) -> bytes:
    """The header's length and its text."""
    return struct.pack("<Q", len(text.encode())) + text.encode()


SOUND = json.dumps({"a": entry()})

# What stands in the file, and the words by which it is refused.
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it has 0 bytes, a header needs at least 8"),
    "too short": (b"\x08\0\0\0\0\0\0", "it has 7 bytes"),
    "length beyond the file": (struct.pack("<Q", 1000) + b"{}", "the header claims 1,000 bytes, the file has 2"),
    "length of 2^64 - 1": (b"\xff" * 8 + b"{}", "the header claims 18,446,744,073,709,551,615 bytes"),
    "length zero": (struct.pack("<Q", 0), "the header is not JSON"),
    "not JSON": (header("{'a': 1}"), "the header is not JSON"),
    "cut JSON": (header(SOUND[:-1]) + bytes(16), "the header is not JSON"),
    "two documents": (header(SOUND + SOUND) + bytes(16), "the header is not JSON"),
    "NUL after JSON": (header(SOUND + "\0") + bytes(16), "the header is not JSON"),
    "not UTF-8": (struct.pack("<Q", 8) + b'{"\xff": 1}', "the header is not JSON"),
    "not UTF-8 but 16": (struct.pack("<Q", 6) + "{}".encode("utf-16"), "the header is not JSON"),
    "deep nesting": (header("[" * 200_000), "the header is not JSON"),
    "deep objects": (header('{"a":' * 200_000), "the header is not JSON"),
    "a list": (header("[]"), "the header is not a JSON object"),
    "a number": (header("1"), "the header is not a JSON object"),
    "number of 5000 digits": (header('{"a":' + "9" * 5000 + "}"), "the header is not JSON"),
    "tensor twice": (header(f'{SOUND[:-1]}, {SOUND[1:]}') + bytes(16), "'a' occurs twice"),
    "dtype twice": (header('{"a": {"dtype": "U8", "dtype": "F32"}}'), "'dtype' occurs twice"),
    "entry is a list": (header('{"a": [1]}'), "the entry of tensor 'a' is not an object"),
    "entry is null": (header('{"a": null}'), "the entry of tensor 'a' is not an object"),
    "lone surrogate": (header('{"\\ud800": {}}'), "is not valid Unicode"),
    "metadata is a list": (header('{"__metadata__": []}'), "__metadata__ is not an object of strings"),
    "metadata of numbers": (header('{"__metadata__": {"a": 1}}'), "__metadata__ is not an object of strings"),
    "metadata nested": (header('{"__metadata__": {"a": {}}}'), "__metadata__ is not an object of strings"),
    "metadata with a surrogate": (header('{"__metadata__": {"a": "\\udfff"}}'), "__metadata__ is not valid Unicode"),
    "metadata key a surrogate": (header('{"__metadata__": {"\\udfff": ""}}'), "__metadata__ is not valid Unicode"),
}  # fmt: skip

# One tensor's entry, over 16 bytes of data.
HOSTILE_ENTRIES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown dtype": (entry(dtype="F33"), "dtype 'F33', which the format does not know"),
    "dtype in lower case": (entry(dtype="f32"), "dtype 'f32'"),
    "dtype is a number": (entry(dtype=32), "dtype 32"),
    "dtype is a list": (entry(dtype=["F32"]), r"dtype \['F32'\]"),
    "no dtype": ({"shape": [2, 2], "data_offsets": [0, 16]}, "dtype None"),
    "no shape": ({"dtype": "F32", "data_offsets": [0, 16]}, "shape None"),
    "no offsets": ({"dtype": "F32", "shape": [2, 2]}, "data_offsets None"),
    "shape is a number": (entry(shape=4), "shape 4, expected a list of sizes"),
    "negative sizes": (entry(shape=[-2, -2]), r"shape \[-2, -2\], expected a list of sizes"),
    "float size": (entry(shape=[2.0, 2]), r"shape \[2\.0, 2\]"),
    "bool size": (entry(shape=[True, 4]), r"shape \[True, 4\]"),
    "text size": (entry(shape=["2", 2]), r"shape \['2', 2\]"),
    "size of 2^63": (entry(shape=[1 << 63, 0]), "expected a list of sizes"),
    "product beyond 64 bits": (entry(shape=[1 << 62, 1 << 62]), "bits, but its offsets hold 16 bytes"),
    "product that wraps to 4": (entry(shape=[(1 << 62) + 1, 4]), "bits, but its offsets hold 16 bytes"),
    "zero times huge": (entry(shape=[0, 1 << 62]), "that is 0 bits, but its offsets hold 16 bytes"),
    "rank of a million": (entry(shape=[1] * 1_000_000), "expected a list of sizes"),
    "shape too large": (entry(shape=[2, 3]), "that is 192 bits, but its offsets hold 16 bytes"),
    "shape too small": (entry(shape=[2, 1]), "that is 64 bits, but its offsets hold 16 bytes"),
    "half a byte": (entry("F4", [5], [0, 16]), "that is 20 bits"),
    "offsets turned round": (entry(offsets=[16, 0]), r"data_offsets \[16, 0\], expected \[begin, end\]"),
    "negative offset": (entry(offsets=[-16, 0]), r"data_offsets \[-16, 0\]"),
    "float offset": (entry(offsets=[0, 16.0]), r"data_offsets \[0, 16\.0\]"),
    "bool offset": (entry("U8", [1], [False, True]), r"data_offsets \[False, True\]"),
    "huge offset": (entry("U8", [1], [(1 << 70) - 1, 1 << 70]), "data_offsets"),
    "three offsets": (entry(offsets=[0, 8, 16]), "expected"),
    "beyond the file": (entry(offsets=[4, 20]), "it is truncated"),
    "hole at the start": (entry("F32", [3], [4, 16]), "overlap or hole"),
    "bytes that belong to none": (entry("F32", [3], [0, 12]), "4 bytes after the last tensor belong to none"),
}


@pytest.mark.parametrize(("content", "words"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    """Each fault is one SourceError that names the file and the fault, at once."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with time_limit(5), pytest.raises(SourceError, match=f"(?s)a.safetensors: not a sound safetensors file: .*{words}"):
        SafetensorsFile(path)
    if words != "'a' occurs twice":  # of which the package takes the last
        with pytest.raises(SafetensorError), safe_open(path, "numpy"):
            pass


@pytest.mark.parametrize(("said", "words"), HOSTILE_ENTRIES.values(), ids=HOSTILE_ENTRIES)
def test_a_hostile_entry_is_refused(said: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Each fault of one tensor names it, and a message stays short whatever the header holds."""
    path = raw_safetensors(tmp_path / "a.safetensors", {"fc": said}, bytes(16))
    with time_limit(5), pytest.raises(SourceError, match=words) as caught:
        SafetensorsFile(path)
    assert len(str(caught.value)) < 500 + len(str(path))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ((0, 8), (4, 12), "overlap or hole"),
        ((0, 8), (0, 8), "overlap or hole"),
        ((0, 8), (12, 20), "overlap or hole"),
        ((8, 16), (16, 24), "overlap or hole"),
    ],
    ids=["overlap", "same place", "hole", "hole before"],
)
def test_tensors_must_cover_the_file(
    first: tuple[int, int], second: tuple[int, int], words: str, tmp_path: Path
) -> None:
    """No two tensors share bytes, and none lie between them."""
    said = {"a": entry("F32", [2], first), "b": entry("F32", [2], second)}
    path = raw_safetensors(tmp_path / "a.safetensors", said, bytes(max(*first, *second)))
    with pytest.raises(SourceError, match=words):
        SafetensorsFile(path)


def test_a_header_bomb_is_refused_unread(tmp_path: Path) -> None:
    """A header beyond 100 MB is refused by its length, even where the file is that long."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", 100_000_001))
    os.truncate(path, 200_000_000)
    with time_limit(1), pytest.raises(SourceError, match="100,000,000 is the most"):
        SafetensorsFile(path)


def test_a_long_name_is_shortened_in_messages(tmp_path: Path) -> None:
    """A hostile name of a megabyte does not fill the screen."""
    path = raw_safetensors(tmp_path / "a.safetensors", {"x" * 1_000_000: entry(dtype="no")}, bytes(16))
    with pytest.raises(SourceError) as caught:
        SafetensorsFile(path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("seed", range(5))
def test_files_of_the_safetensors_package_read_the_same(seed: int, tmp_path: Path) -> None:
    """Random files of every dtype and awkward shapes: names, dtypes, shapes and bytes are the package's."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for dtype in TORCH_DTYPES:
        for shape in SHAPES:
            size = torch.empty(shape, dtype=dtype).element_size() * int(np.prod(shape))
            data = rng.bytes(size) if dtype != torch.bool else bytes(rng.integers(0, 2, size, np.uint8))
            flat = torch.frombuffer(bytearray(data), dtype=dtype) if size else torch.empty(0, dtype=dtype)
            tensors[f"{dtype}.{shape} é"] = flat.reshape(shape)
    names = list(tensors)
    rng.shuffle(names)
    path = tmp_path / "a.safetensors"
    save_file({name: tensors[name] for name in names}, path, metadata={"format": "pt", "é": "ü"})
    with SafetensorsFile(path) as file:
        assert file.metadata == {"format": "pt", "é": "ü"}
        assert set(file.slots) == set(tensors)
        for name, tensor in tensors.items():
            slot = file.slots[name]
            assert (slot.dtype, slot.shape) == (TORCH_DTYPES[tensor.dtype], tuple(tensor.shape))
            flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
            assert file.read(slot.start, slot.nbytes) == flat.numpy().tobytes()


def test_our_layout_is_read_by_the_package(tmp_path: Path, rng: np.random.Generator) -> None:
    """The package opens what our layout places; each tensor is aligned to its elements and keeps its bytes."""
    names = [f"{name}.{i}" for i in range(3) for name in DTYPE_BITS]
    planned = [Planned(name, name.split(".")[0], ((i % 4), 4) if i % 5 else (8,)) for i, name in enumerate(names)]
    layout = SafetensorsLayout(planned, {"note": "é"})
    data = {tensor.name: rng.integers(0, 2, tensor.nbytes, np.uint8).tobytes() for tensor in planned}
    path = tmp_path / "a.safetensors"
    path.write_bytes(layout.header({"note": "é"}).ljust(layout.nbytes, b"\0"))
    with path.open("r+b") as file:
        for name, offset in layout.offsets.items():
            file.seek(offset)
            file.write(data[name])
    assert path.stat().st_size == layout.nbytes
    with safe_open(path, "pt") as witness:
        assert set(witness.keys()) == set(names)
        assert witness.metadata() == {"note": "é"}
        for tensor in planned:
            assert witness.get_slice(tensor.name).get_dtype() == tensor.dtype
    with SafetensorsFile(path) as ours:
        for tensor in planned:
            slot = ours.slots[tensor.name]
            assert slot.start == layout.offsets[tensor.name]
            assert slot.start % max(1, DTYPE_BITS[tensor.dtype] // 8) == 0
            assert ours.read(slot.start, slot.nbytes) == data[tensor.name]


def test_an_empty_file_of_tensors_is_sound(tmp_path: Path) -> None:
    """No tensors at all, with or without metadata, is a safetensors file."""
    for said in (b"{}", b'{"__metadata__":null}', b'{"__metadata__":{}}', b"{}      "):
        with SafetensorsFile(raw_safetensors(tmp_path / "a.safetensors", said)) as file:
            assert (file.slots, file.metadata) == ({}, {})


def test_order_in_the_header_is_kept(tmp_path: Path) -> None:
    """Slots come in the header's order, which need not be the order of the bytes."""
    said = {"b": entry("U8", [2], [1, 3]), "empty": entry("F32", [0], [1, 1]), "a": entry("U8", [1], [0, 1])}
    with SafetensorsFile(raw_safetensors(tmp_path / "a.safetensors", said, b"xyz")) as file:
        assert list(file.slots) == ["b", "empty", "a"]
        assert [file.read(slot.start, slot.nbytes) for slot in file.slots.values()] == [b"yz", b"", b"x"]


def test_reading_past_the_end_names_the_byte(tmp_path: Path) -> None:
    """A file cut short after it was opened is told, with the byte at which it ends."""
    path = save_floats(tmp_path / "a.safetensors", {"a": np.zeros((4, 4))})
    with SafetensorsFile(path) as file:
        slot = file.slots["a"]
        os.truncate(path, slot.start + 10)
        with pytest.raises(SourceError, match=f"ends at byte {slot.start + 10:,}, 54 more were expected"):
            file.read(slot.start, slot.nbytes)
    with pytest.raises(SourceError, match="failed"):
        file.read(0, 8)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "is a folder"),
        (lambda path: os.mkfifo(path), "is not a regular file"),
        (lambda path: path.symlink_to(path), "cannot be read|does not exist"),
    ],
    ids=["missing", "folder", "pipe", "link to itself"],
)
def test_what_is_no_file_is_refused(make: Any, words: str, tmp_path: Path) -> None:
    """Missing files, folders, pipes and loops are told apart, and nothing blocks."""
    path = tmp_path / "a.safetensors"
    make(path)
    with time_limit(5), pytest.raises(SourceError, match=words):
        open_for_reading(path)


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000], ids=["NUL", "too long"])
def test_an_impossible_path_is_refused(name: str, tmp_path: Path) -> None:
    """Names that no file can have are an error like any other."""
    with pytest.raises(SourceError):
        open_for_reading(tmp_path / name)


def test_names_that_no_header_can_hold() -> None:
    """The reserved name and lone surrogates cannot be written."""
    assert name_fault("__metadata__")
    assert name_fault("a\udc80")
    assert name_fault("é 𝄞") is None


def test_damaged_files_are_refused_or_sound(tmp_path: Path, rng: np.random.Generator) -> None:
    """600 damaged files: refused, or read as the package reads them; we accept nothing that it refuses."""
    path = tmp_path / "a.safetensors"
    tensors = {
        "a.weight": ("F32", (3, 4), rng.bytes(48)),
        "b": ("BF16", (5,), rng.bytes(10)),
        "c": ("I64", (), rng.bytes(8)),
        "d": ("U8", (2, 0), b""),
    }
    sound = write_safetensors(path, tensors, {"format": "pt"}).read_bytes()
    accepted = 0
    with time_limit(60):
        for _ in range(600):
            path.write_bytes(mutated(sound, rng))
            try:
                file = SafetensorsFile(path)
            except Qcs4wError:
                continue
            accepted += 1
            with file, safe_open(path, "pt") as witness:
                assert set(witness.keys()) == set(file.slots)
                assert (witness.metadata() or {}) == file.metadata
                for name, slot in file.slots.items():
                    assert tuple(witness.get_slice(name).get_shape()) == slot.shape
                    file.read(slot.start, slot.nbytes)
    assert accepted > 20, "the mutator leaves too few files readable to prove anything"
