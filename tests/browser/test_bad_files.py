"""Files that are broken or made to do harm: a clear message within seconds, nothing run, nothing hung."""

import hashlib
import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import CommandLine
from making import raw_safetensors, save_floats, write_safetensors
from page_under_test import PackedPage

from qcs4w_packer import PackedLinear, pack_weight, save_container

WEIGHT = np.random.default_rng(0).standard_normal((6, 9), np.float32)
PATIENCE_S = 30  # SwiftShader and other tests share the machine; what hangs is stopped by Playwright after 60 s


def container(path: Path, *edits: tuple[bytes, bytes]) -> Path:
    """Write a packed file, and replace bytes in it by others of the same length."""
    save_container(path, {"fc.weight": pack_weight(WEIGHT)}, force=True)
    data = path.read_bytes()
    for old, new in edits:
        assert data.count(old) == 1
        assert len(old) == len(new)
        data = data.replace(old, new)
    path.write_bytes(data)
    return path


def header_of(path: Path) -> dict[str, Any]:
    """The header of a safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    return header


def with_bytes(data: bytes) -> Callable[[Path], object]:
    """A file of these bytes."""
    return lambda path: path.write_bytes(data)


def with_header(header: object, data: bytes = b"") -> Callable[[Path], object]:
    """A safetensors file of this header, spelled out or as bytes."""
    return lambda path: raw_safetensors(
        path, header if isinstance(header, bytes) else json.dumps(header).encode(), data
    )


def entry(begin: int = 0, end: int = 4, dtype: str = "F32", shape: tuple[int, ...] = (1,)) -> dict[str, Any]:
    """A header's entry."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


NOT_SAFETENSORS: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (with_bytes(b""), "it has 0 bytes, a header needs at least 8"),
    "seven bytes": (with_bytes(b"\0" * 7), "it has 7 bytes"),
    "a picture": (with_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100)), "the header claims"),
    "a header bomb": (
        with_bytes(struct.pack("<Q", 1 << 62) + b"{}"),
        "the header claims 4,611,686,018,427,387,904 bytes",
    ),
    "no JSON": (with_header(b"{'a': 1}"), "the header is not JSON"),
    "no UTF-8": (with_header(b'{"\xff": 1}'), "the header is not JSON"),
    "no object": (with_header([1]), "the header is not a JSON object"),
    "nested deep": (with_header(b"[" * 1_000_000), "the header is not JSON"),
    "nested deep and sound": (with_header(b"[" * 1_000_000 + b"]" * 1_000_000), "the header is not"),
    "a key twice": (
        with_header(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{}}', b"\0"),
        "key 'a' occurs twice",
    ),
    "a key twice, spelled otherwise": (
        with_header(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"\\u0061":{}}', b"\0"),
        "key 'a' occurs twice",
    ),
    "a key twice, further in": (
        with_header(b'{"a":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}}', b"\0"),
        "key 'shape' occurs twice",
    ),
    "unknown dtype": (
        with_header({"a": entry(dtype="toString")}, b"1234"),
        "dtype 'toString', which the format does not know",
    ),
    "negative shape": (with_header({"a": entry(shape=(-1,))}, b"1234"), "expected a list of sizes"),
    "shape beyond all": (with_header({"a": entry(shape=(2**52,) * 60)}, b"1234"), "but its offsets hold 4 bytes"),
    "a rank of thousands": (with_header({"a": entry(shape=(1,) * 5000)}, b"1234"), "expected a list of sizes"),
    "overlap": (with_header({"a": entry(), "b": entry(2, 6)}, b"123456"), "overlap or hole"),
    "hole": (with_header({"a": entry(), "b": entry(5, 9)}, b"123456789"), "overlap or hole"),
    "bytes of none": (with_header({"a": entry()}, b"12345"), "belong to none"),
    "truncated": (with_header({"a": entry()}, b"123"), "it is truncated"),
    "metadata no strings": (with_header({"__metadata__": {"qcs4w": 1}}), "__metadata__ is not an object of strings"),
    "lone surrogate": (
        with_header(b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"\0"),
        "not valid Unicode",
    ),
    "not packed": (
        lambda path: save_floats(path, {"a": WEIGHT, "b": WEIGHT}),
        "is a safetensors file of 2 tensors, but nothing in it is packed",
    ),
    "another tool's": (
        lambda path: save_floats(path, {"a.weight_packed": WEIGHT, "a.weight_scale": WEIGHT}),
        "is a safetensors file of 2 tensors, which another tool has packed",
    ),
}


@pytest.mark.parametrize("case", NOT_SAFETENSORS)
def test_what_is_no_packed_file_is_refused(
    shared_page: PackedPage, qcs4w: CommandLine, tmp_path: Path, case: str
) -> None:
    """The message says what is wrong, the command line refuses it too, and the page goes on working."""
    make, words = NOT_SAFETENSORS[case]
    bad = tmp_path / "bad.safetensors"
    make(bad)
    assert qcs4w("verify", bad).code == 2
    start = time.monotonic()
    shared_page.take(bad)
    problem = shared_page.problem()
    assert time.monotonic() - start < PATIENCE_S
    assert words in problem
    assert "bad.safetensors" in problem
    assert not shared_page.faults
    shared_page.open(container(tmp_path / "good.safetensors"))
    assert shared_page.raw.text_content("#problem") == ""


def offset_twice(header: dict[str, Any]) -> None:
    """State the offset twice in the metadata's document."""
    metadata = header["__metadata__"]
    metadata["qcs4w"] = metadata["qcs4w"].replace('"offset":8', '"offset":8,"offset":8')


def spoil_digest(path: Path) -> None:
    """Make the first digit of a digest no digit."""
    data = path.read_bytes()
    at = data.index(rb"\"packed_sha256\":\"") + len(rb"\"packed_sha256\":\"")
    path.write_bytes(data[:at] + b"g" + data[at + 1 :])


def rewritten(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Write a packed file with an edited header."""
    container(path)
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = header_of(path)
    edit(header)
    raw_safetensors(path, json.dumps(header).encode(), data[8 + length :])


def poke_shape(path: Path, in_features: int) -> None:
    """Let the shape tensor state another K."""
    container(path)
    data = path.read_bytes()
    pair = struct.pack("<2q", 6, 9)
    assert data.count(pair) == 1
    path.write_bytes(data.replace(pair, struct.pack("<2q", 6, in_features)))


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "another version": (lambda p: container(p, (rb"\"version\":1", rb"\"version\":2")), "container version 2, this"),
    "another order": (lambda p: container(p, (b"even-high", b"even-low ")), "states nibble_order 'even-low '"),
    "another offset": (lambda p: container(p, (rb"\"offset\":8", rb"\"offset\":0")), "states offset 0"),
    "metadata no JSON": (lambda p: container(p, (rb"{\"version\"", rb"[\"version\"")), "metadata is not JSON"),
    "a metadata key twice": (lambda p: rewritten(p, offset_twice), "key 'offset' occurs twice"),
    "a digest that is none": (lambda p: spoil_digest(container(p)), "not the hex of a sha256"),
    "no metadata": (lambda p: rewritten(p, lambda h: h.pop("__metadata__")), "packed tensors but no 'qcs4w' metadata"),
    "another K": (lambda p: poke_shape(p, 12), "expected U8 [6,6] for N 6, K 12"),
    "not described": (lambda p: container(p, (rb"{\"fc.weight\"", rb"{\"cf.weight\"")), "is packed but not"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_container_that_a_reader_refuses_is_shown_and_not_run(
    shared_page: PackedPage, qcs4w: CommandLine, tmp_path: Path, case: str
) -> None:
    """The problem stands beside what can be shown; running does nothing; the command line refuses it too."""
    make, words = REFUSED[case]
    bad = tmp_path / "bad.safetensors"
    make(bad)
    assert qcs4w("verify", bad).code == 2
    assert qcs4w("inspect", bad).code == 1
    shared_page.take(bad)
    shared_page.raw.wait_for_selector("#announcement:text('is open')", state="attached")
    assert words in shared_page.raw.inner_text("#file-problems")
    if shared_page.raw.is_visible("#run-card"):
        assert shared_page.press_run() == "error"
        assert "a reader refuses this file" in shared_page.result()


def test_a_damaged_tensor_is_shown_and_not_run(shared_page: PackedPage, qcs4w: CommandLine, tmp_path: Path) -> None:
    """A digest that does not match is named at once, the nibbles are shown, and nothing is run."""
    bad = container(tmp_path / "bad.safetensors")
    data = bytearray(bad.read_bytes())
    data[-1] ^= 0x10
    bad.write_bytes(data)
    assert qcs4w("verify", bad).code == 2
    shared_page.open(bad)
    assert "MISMATCH" in shared_page.raw.inner_text("#digest")
    assert shared_page.raw.is_visible(".dump-row")
    assert shared_page.press_run() == "error"
    assert "sha256 of the packed bytes of fc.weight is " in shared_page.result()
    assert "! Not checked" in shared_page.result()


@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_scales_that_are_no_numbers_are_refused(shared_page: PackedPage, tmp_path: Path, scale: float) -> None:
    """NaN and infinity in a scale are named by row, not run."""
    good = pack_weight(WEIGHT)
    path = tmp_path / "bad.safetensors"
    scales = good.scales.copy()
    save_container(path, {"fc.weight": PackedLinear(good.packed, scales, 9)})
    data = path.read_bytes()
    place = data.rindex(scales.tobytes())
    scales[4] = scale
    data = data[:place] + scales.tobytes() + data[place + scales.nbytes :]
    old, new = (hashlib.sha256(each.tobytes()).hexdigest() for each in (good.scales, scales))
    path.write_bytes(data.replace(old.encode(), new.encode()))
    shared_page.open(path)
    assert shared_page.press_run() == "error"
    assert f"the scale of row 4 is {'NaN' if np.isnan(scale) else 'Infinity'}" in shared_page.result()


def test_a_header_too_long_for_a_page_is_refused_at_once(shared_page: PackedPage, tmp_path: Path) -> None:
    """A header of more than 32 MB is not read."""
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(struct.pack("<Q", 33_000_000))
    os.truncate(bad, 40_000_000)
    shared_page.take(bad)
    assert "its header has 33,000,000 bytes, this page reads up to 32,000,000" in shared_page.problem()


def test_a_header_of_megabytes_is_read(shared_page: PackedPage, tmp_path: Path) -> None:
    """Strings of megabytes and 50,000 tensors neither hang nor break the reading, and the list stays short."""
    shared_page.open(container(tmp_path / "first.safetensors"))
    path = tmp_path / "many.safetensors"
    rewritten(path, lambda header: header["__metadata__"].update(note='\\"' * 2_000_000))
    start = time.monotonic()
    shared_page.open(path)
    tensors = {f"t{i}": ("U8", (1,), b"\0") for i in range(50_000)}
    shared_page.take(write_safetensors(tmp_path / "bad.safetensors", tensors, {"note": "x"}))
    assert "is a safetensors file of 50,000 tensors, but nothing in it is packed" in shared_page.problem()
    assert time.monotonic() - start < PATIENCE_S
