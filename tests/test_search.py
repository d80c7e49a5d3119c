"""Finding packed weights in files that are made here byte by byte."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN
from making import poke, run_python, sparse_safetensors, time_limit

from qcs4w_packer import Container, DigestError, PackedLinear, SourceError, pack_codes, save_container
from qcs4w_packer.findings import SearchReport, TensorFound
from qcs4w_packer.needles import scale_bytes
from qcs4w_packer.placements import PLACEMENTS, Placement
from qcs4w_packer.search import search

WINDOW = 1024  # bytes, the smallest

# What the real ExecuTorch wrote: file -> (N, K, offset and sha256 of the weight, offset of the scales) of each call.
PTE = {
    "one_16x32": [(16, 32, 2176, "5d55dda6534b7bea5c5cb97009beca1942e035d420d498715cdea0b4d8c48851", 2048)],
    "unaligned_5x6": [(5, 6, 2176, "11a7d66be6a2ae3f726648176a10e258e9a6f61f473cfd646579c92b30f2df4d", 2048)],
    "two_layer_bias": [
        (24, 32, 4352, "e03dc089eb5feab8b85066d374fd67bb715e7bcc92571892163f199813d3918f", 4096),
        (8, 24, 4736, "65f2f7e3d45fa90706a37748030865fb791e4769cfe5b98ce63e1264e4172702", 4224),
    ],
}


def random_weight(rng: np.random.Generator, rows: int, columns: int) -> PackedLinear:
    """A weight whose codes are bell-shaped, as real ones are."""
    codes = np.clip(rng.normal(0, 3, (rows, columns)).round(), -8, 7).astype(np.int8)
    return PackedLinear(pack_codes(codes), rng.random(rows, np.float32) + np.float32(0.1), columns)


def placed(weight: PackedLinear, placement: Placement) -> np.ndarray:
    """The bytes of a weight in another layout, (rows, bytes a row)."""
    rows, width = placement.shape(weight.out_features, weight.in_features)
    return placement.rectangle(weight.packed, weight.in_features, slice(0, rows), slice(0, width))


class Search:
    """Saves weights as a needle and haystacks as bytes, and searches."""

    def __init__(self, folder: Path):
        self.needle, self.haystack = folder / "needle.safetensors", folder / "haystack.bin"
        self._saved: dict[str, PackedLinear] = {}

    def report(self, haystack: bytes | None, window: int = WINDOW, **weights: PackedLinear) -> SearchReport:
        """Search bytes, or the haystack that is there, for several weights."""
        if weights != self._saved:
            save_container(self.needle, weights, force=True)
            self._saved = weights
        if haystack is not None:
            self.haystack.write_bytes(haystack)
        with Container(self.needle) as packed:
            return search(self.haystack, packed, window_nbytes=window)

    def __call__(self, haystack: bytes | None, weight: PackedLinear, window: int = WINDOW) -> TensorFound:
        """Search for one weight."""
        (found,) = self.report(haystack, window, weight=weight).tensors
        return found


@pytest.fixture
def find(tmp_path: Path) -> Search:
    return Search(tmp_path)


@pytest.mark.parametrize("size", [(3, 7), (24, 33), (33, 24), (5, 31), (40, 64), (64, 32)], ids=str)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda placement: placement.name)
def test_placing_is_the_way_back_of_reading(
    placement: Placement, size: tuple[int, int], rng: np.random.Generator
) -> None:
    """Each placement's bytes, read as its reading says, are the codes again; rectangles are parts of the whole."""
    if not placement.fits(*size):
        assert size[0] % 8 or size[1] % 8
        return
    weight = random_weight(rng, *size)
    whole = placed(weight, placement)
    np.testing.assert_array_equal(placement.reading.matrix(whole, *size), weight.codes())
    assert whole.shape == placement.shape(*size)
    for _ in range(20):
        first, start = (int(rng.integers(n)) for n in whole.shape)
        rows, columns = slice(first, int(rng.integers(first, len(whole))) + 1), slice(start, whole.shape[1])
        columns = slice(start, int(rng.integers(start, whole.shape[1])) + 1)
        part = placement.rectangle(weight.packed, size[1], rows, columns)
        np.testing.assert_array_equal(part, whole[rows, columns])


@pytest.mark.parametrize("size", [(12, 40), (9, 33), (33, 9), (4, 6), (16, 32), (1, 90), (90, 1)], ids=str)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda placement: placement.name)
def test_every_layout_is_found_and_named(
    placement: Placement, size: tuple[int, int], find: Search, rng: np.random.Generator
) -> None:
    """A weight in any layout is found where it lies, under that layout's name, with its scales before it."""
    if not placement.fits(*size):
        return
    weight = random_weight(rng, *size)
    before = rng.bytes(1237)
    found = find(before + weight.scales.tobytes() + placed(weight, placement).tobytes() + rng.bytes(700), weight)
    (hit,) = found.hits
    assert hit.match.start == 1237 + 4 * size[0]
    assert placement.reading in hit.readings
    assert (hit.scales[0].dtype, hit.scales[0].offset, hit.scales[0].stride) == ("F32", 1237, 4)
    assert (found.parts, found.has_more, found.is_cut_short, hit.has_gaps) == ((), False, False, False)


@pytest.mark.parametrize("size", [(30, 34), (3, 10), (2, 1200)], ids=["rows", "short", "long rows"])
def test_a_needle_may_lie_anywhere_across_windows(
    size: tuple[int, int], find: Search, rng: np.random.Generator
) -> None:
    """At every offset around the edges of windows the place is exact, first and last bytes of the file included."""
    weight = random_weight(rng, *size)
    data = weight.packed.tobytes()
    noise = rng.bytes(3 * WINDOW)
    edges = {WINDOW - len(data) % WINDOW, WINDOW}
    for offset in sorted({*range(12), *(near + i for near in edges for i in range(-10, 10))} - {*range(-10, 0)}):
        for after in (b"", noise)[: 1 + offset % 2]:
            found = find(noise[:offset] + data + after, weight)
            assert [hit.match.start for hit in found.hits] == [offset], (offset, len(after))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_scales_are_found_in_each_dtype(dtype: str, rows: int, find: Search, rng: np.random.Generator) -> None:
    """Scales behind the weights, few or many, are found as f32, f16 and bf16, with their distance."""
    weight = random_weight(rng, rows, 70)
    scales = scale_bytes(weight.scales, dtype).tobytes()
    found = find(rng.bytes(901) + weight.packed.tobytes() + rng.bytes(45) + scales + rng.bytes(600), weight)
    (hit,) = found.hits
    assert [(place.dtype, place.offset - hit.match.start) for place in hit.scales] == [(dtype, 35 * rows + 45)]


def test_scale_bytes_are_those_of_torch(rng: np.random.Generator) -> None:
    """Rounding to bf16 and f16 agrees with torch, ties included."""
    import torch

    values = rng.standard_normal(2000).astype(np.float32) * np.float32(0.01)
    values[:500] = (values[:500].view(np.uint32) & 0xFFFF0000 | 0x8000).view(np.float32)  # ties of bf16
    for dtype, kind in (("BF16", torch.bfloat16), ("F16", torch.float16), ("F32", torch.float32)):
        expected = torch.from_numpy(values).to(kind).view(torch.uint8).numpy()
        np.testing.assert_array_equal(scale_bytes(values, dtype), expected)


def test_scales_far_away_and_scales_alone(find: Search, rng: np.random.Generator) -> None:
    """Scales megabytes from the weights count as theirs; scales without the codes are told."""
    weight = random_weight(rng, 32, 64)
    far = rng.bytes(3 << 20)
    found = find(weight.packed.tobytes() + far + weight.scales.tobytes(), weight, 1 << 20)
    assert [place.offset for place in found.hits[0].scales] == [1024 + len(far)]
    found = find(far + weight.scales.tobytes() + far, weight, 1 << 20)
    assert not found.is_found
    assert [place.offset for place in found.scales] == [len(far)]


@pytest.mark.parametrize("gap", [1, 3, 32, 1000])
@pytest.mark.parametrize("size", [(20, 34), (7, 33), (2, 600)], ids=str)
def test_rows_with_gaps_are_found(gap: int, size: tuple[int, int], find: Search, rng: np.random.Generator) -> None:
    """Rows that are filled up, or have other data between them, are found with their stride."""
    weight = random_weight(rng, *size)
    rows = b"".join(row.tobytes() + rng.bytes(gap) for row in weight.packed)
    (hit,) = find(rng.bytes(333) + rows + rng.bytes(50), weight).hits
    width = weight.packed.shape[1]
    assert (hit.match.start, hit.row_stride, hit.has_gaps) == (333, width + gap, True)


def test_rows_filled_up_have_a_name(find: Search, rng: np.random.Generator) -> None:
    """Rows on multiples of 4 bytes, as q4gsw has them, are named as what reads them."""
    weight = random_weight(rng, 20, 34)
    rows = np.pad(placed(weight, PLACEMENTS[1]), ((0, 0), (0, 3)))
    (hit,) = find(rng.bytes(77) + rows.tobytes(), weight).hits
    assert [reading.label for reading in hit.readings] == ["rows-of-4-even-low"]
    np.testing.assert_array_equal(hit.readings[0].matrix(rows, 20, 34), weight.codes())


@pytest.mark.parametrize("dtype", ["F32", "F16"])
@pytest.mark.parametrize("before", [True, False])
def test_scales_between_rows_are_found(dtype: str, before: bool, find: Search, rng: np.random.Generator) -> None:
    """A scale that lies beside each row, before or behind it, is found."""
    weight = random_weight(rng, 12, 64)
    scales = scale_bytes(weight.scales, dtype).reshape(12, -1)
    rows = np.hstack([scales, weight.packed] if before else [weight.packed, scales])
    (hit,) = find(rng.bytes(401) + rows.tobytes() + rng.bytes(100), weight).hits
    (place,) = hit.scales
    assert place.is_between
    assert (place.dtype, place.offset, place.stride) == (dtype, 401 + (0 if before else 32), rows.shape[1])


def test_a_part_of_the_rows_is_told(find: Search, rng: np.random.Generator) -> None:
    """An eighth of the rows, as a shard holds it, is found wherever it was cut out; the tensor counts as not found."""
    weight = random_weight(rng, 64, 64)
    for first in range(0, 57, 7):
        found = find(rng.bytes(99) + weight.packed[first : first + 8].tobytes() + rng.bytes(99), weight)
        (part,) = found.parts
        assert not found.is_found
        assert (part.match.start, part.match.rows_equal) == (99, 8)
        assert (part.match.first_equal, part.match.last_equal) == (first, first + 7)


def test_one_altered_row_is_told(find: Search, rng: np.random.Generator) -> None:
    """A tensor of which one code was changed is there but for one row."""
    weight = random_weight(rng, 40, 64)
    changed = weight.packed.copy()
    changed[17, 5] ^= 1
    found = find(rng.bytes(99) + changed.tobytes() + rng.bytes(99), weight)
    assert not found.is_found
    assert [(part.match.rows_equal, part.match.missing_between) for part in found.parts] == [(39, 1)]


def test_other_pads_do_not_hide_a_weight(find: Search, rng: np.random.Generator) -> None:
    """Rows of odd K that were padded after the shift (nibble 0) are found, and the pad is told."""
    weight = random_weight(rng, 10, 33)
    packed = weight.packed.copy()
    packed[:, -1] &= 0xF0
    (hit,) = find(rng.bytes(10) + packed.tobytes(), weight).hits
    assert hit.match.pads == (0,)
    (hit,) = find(rng.bytes(10) + weight.packed.tobytes(), weight).hits
    assert hit.match.pads == (8,)


def test_several_tensors_and_copies_in_one_pass(find: Search, rng: np.random.Generator) -> None:
    """Each of several tensors is found, each time that it occurs, and one that is not there is not."""
    weights = {f"w{i}": random_weight(rng, 8 + i, 48 - i) for i in range(6)}
    data = b"".join(rng.bytes(100 + i) + w.packed.tobytes() for i, w in enumerate(weights.values()))
    report = find.report(data + rng.bytes(9) + data, **weights, missing=random_weight(rng, 8, 48))
    assert [len(found.hits) for found in report.tensors] == [2] * 6 + [0]
    for found in report.tensors[:-1]:
        assert found.hits[1].match.start - found.hits[0].match.start == len(data) + 9


def test_a_container_holds_itself(find: Search, rng: np.random.Generator) -> None:
    """Searching a container for itself gives the offsets that its header states."""
    weights = {f"w{i}": random_weight(rng, 5 + i, 20 + 3 * i) for i in range(5)}
    find.report(b"", **weights)
    with Container(find.needle) as packed:
        for found in search(find.needle, packed).tensors:
            place = packed.place(found.entry)
            assert place is not None
            assert [hit.match.start for hit in found.hits] == [place[1]], found.entry.name


def test_layouts_that_are_the_same_bytes_are_one_hit(find: Search, rng: np.random.Generator) -> None:
    """Bytes of two equal nibbles look the same swapped: one hit that names both layouts."""
    codes = np.repeat(rng.integers(-8, 8, (9, 17), np.int8), 2, axis=1)
    weight = PackedLinear(pack_codes(codes), np.ones(9, np.float32), 34)
    (hit,) = find(rng.bytes(50) + weight.packed.tobytes(), weight).hits
    assert [reading.label for reading in hit.readings] == ["even-high", "even-low"]


@pytest.mark.parametrize("size", [(1, 1), (1, 2), (2, 3)], ids=str)
def test_a_tiny_needle_is_ambiguous(size: tuple[int, int], find: Search, rng: np.random.Generator) -> None:
    """What any file holds by chance is found, a limited number of times, and called ambiguous."""
    weight = random_weight(rng, *size)
    found = find(rng.bytes(100_000) + weight.packed.tobytes(), weight, 1 << 16)
    assert found.is_ambiguous
    assert found.is_found
    assert len(found.hits) <= 32 * len(PLACEMENTS)


@pytest.mark.parametrize("code", [0, -8, 7])
@pytest.mark.parametrize("size", [(30, 40), (1, 5000), (300, 2)], ids=str)
def test_a_needle_of_one_code_overlaps_itself(
    code: int, size: tuple[int, int], find: Search, rng: np.random.Generator
) -> None:
    """A constant needle is found in a longer run of its byte, from the run's beginning, and ends soon."""
    weight = PackedLinear(pack_codes(np.full(size, code, np.int8)), np.ones(size[0], np.float32), size[1])
    run = bytes([weight.packed[0, 0]])
    with time_limit(20):
        found = find(b"\x11" * 700 + run * 200_000, weight, 1 << 16)
    assert found.hits[0].match.start == 700
    assert found.has_more
    assert found.is_ambiguous
    assert not find(b"\x11" * 700 + run * (weight.packed.size - 1) + b"\x11" * 700, weight).is_found


def test_equal_rows_are_found_once(find: Search, rng: np.random.Generator) -> None:
    """A weight of equal rows is found at its first row."""
    weight = random_weight(rng, 1, 64)
    weight = PackedLinear(np.repeat(weight.packed, 50, axis=0), np.ones(50, np.float32), 64)
    (hit,) = find(rng.bytes(1000) + weight.packed.tobytes() + rng.bytes(10), weight).hits
    assert hit.match.start == 1000


def test_a_sparse_weight_among_zeros(find: Search, rng: np.random.Generator) -> None:
    """A pruned weight, nearly all zeros, is found in a file that is nearly all its zero byte, and soon."""
    codes = np.where(rng.random((64, 512)) < 0.05, rng.integers(-8, 8, (64, 512)), 0).astype(np.int8)
    weight = PackedLinear(pack_codes(codes), rng.random(64, np.float32), 512)
    for placement in PLACEMENTS[:4]:
        zero = b"\x88" if placement.reading.layout.pad_nibble else b"\x00"
        with time_limit(20):
            found = find(zero * 200_001 + placed(weight, placement).tobytes() + zero * 200_001, weight, 1 << 18)
        assert [hit.match.start for hit in found.hits] == [200_001], placement.name


def test_a_file_made_to_be_slow_is_given_up(find: Search, rng: np.random.Generator) -> None:
    """Thousands of copies of one row cost bounded time, and it is said that the search was given up."""
    weight = random_weight(rng, 4000, 32)
    with time_limit(30):
        found = find(weight.packed[0].tobytes() * 100_000, weight, 1 << 20)
    assert not found.is_found
    assert found.is_cut_short


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 100, 512, 1023, 1024])
def test_a_haystack_smaller_than_the_needle(nbytes: int, find: Search, rng: np.random.Generator) -> None:
    """Nothing is found in a file that is too small, an empty one included."""
    weight = random_weight(rng, 40, 66)
    found = find(weight.packed.tobytes()[:nbytes][::-1], weight)
    assert not found.is_found
    assert not found.parts


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe"])
def test_what_is_no_file_is_refused(kind: str, find: Search, rng: np.random.Generator) -> None:
    """A missing file, a folder and a pipe are refused at once, by name."""
    if kind == "folder":
        find.haystack.mkdir()
    elif kind == "pipe":
        os.mkfifo(find.haystack)
    with time_limit(5), pytest.raises(SourceError, match=r"haystack\.bin"):
        find(None, random_weight(rng, 3, 40))


def test_a_damaged_needle_is_refused(find: Search, rng: np.random.Generator) -> None:
    """A search for bytes that nobody wrote would only mislead."""
    weight = random_weight(rng, 30, 66)
    find(b"", weight)
    poke(find.needle, find.needle.stat().st_size - 1, b"\x00")
    with Container(find.needle) as packed, pytest.raises(DigestError, match="sha256"):
        search(find.haystack, packed)


@pytest.mark.parametrize("name", PTE)
def test_the_weights_of_a_program_of_executorch_are_found(name: str, find: Search) -> None:
    """In .pte files that the real package wrote each call's weight and scales lie where its own reader says."""
    data = (GOLDEN / "pte" / f"{name}.pte").read_bytes()
    weights = {}
    for rows, columns, at, digest, scales_at in PTE[name]:
        packed = np.frombuffer(data, np.uint8, rows * columns // 2, at).reshape(rows, -1)
        assert hashlib.sha256(packed.tobytes()).hexdigest() == digest
        weights[f"w{at}"] = PackedLinear(packed, np.frombuffer(data, "<f4", rows, scales_at), columns)
    report = find.report(data, **weights)
    for found, (_, _, at, _, scales_at) in zip(report.tensors, PTE[name], strict=True):
        (hit,) = found.hits
        assert [reading.label for reading in hit.readings] == ["even-high"]
        assert (hit.match.start, hit.scales[0].offset, hit.scales[0].dtype) == (at, scales_at, "F32")


def test_a_large_file_needs_little_memory(find: Search, tmp_path: Path, rng: np.random.Generator) -> None:
    """A file of 1 GiB (sparse on the disk) is searched within 150 MB, and the weight at its end is found."""
    weight = random_weight(rng, 1024, 1024)
    find(b"", weight)
    large = tmp_path / "large.safetensors"
    sparse_safetensors(large, (1 << 28,))
    end = large.stat().st_size
    with large.open("ab") as file:
        file.write(weight.packed.tobytes())
    code = """
import re, sys
from qcs4w_packer import Container
from qcs4w_packer.search import search
with Container(sys.argv[1]) as packed:
    (found,) = search(sys.argv[2], packed).tensors
# Unlike getrusage this does not count the process that this one was forked from.
print(found.hits[0].match.start, re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1])
"""
    done = run_python(code, find.needle, large)
    assert done.returncode == 0, done.stderr
    start, peak = map(int, done.stdout.split())
    assert start == end
    assert peak * 1024 < 150e6
