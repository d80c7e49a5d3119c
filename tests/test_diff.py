"""Where two packed tensors, and two files of them, differ."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making import run_python

from qcs4w_packer import Blob, Container, PackedLinear, open_packed, pack_codes, save_container
from qcs4w_packer import diff as diff_module
from qcs4w_packer.diff import TensorDiff, diff_tensors, nibble_of
from qcs4w_packer.diff_files import FileDiff, diff_files
from qcs4w_packer.diff_patterns import scale_patterns
from qcs4w_packer.nibbles import LAYOUTS, unpack_codes


def tensor(rng: np.random.Generator, rows: int = 9, columns: int = 33) -> PackedLinear:
    """A weight with all codes and scales of many sizes."""
    codes = rng.integers(-8, 8, (rows, columns)).astype(np.int8)
    return PackedLinear(pack_codes(codes), np.exp2(rng.uniform(-9, 1, rows)).astype(np.float32), columns)


def changed(one: PackedLinear, packed: np.ndarray | None = None, scales: np.ndarray | None = None) -> PackedLinear:
    """The same weight with other bytes or scales."""
    return PackedLinear(
        one.packed if packed is None else packed, one.scales if scales is None else scales, one.in_features
    )


def diff(folder: Path, a: PackedLinear, b: PackedLinear) -> TensorDiff:
    """The difference of two weights, each in a container of its own."""
    for name, packed in (("a", a), ("b", b)):
        save_container(folder / f"{name}.safetensors", {"w": packed}, force=True)
    with Container(folder / "a.safetensors") as one, Container(folder / "b.safetensors") as other:
        return diff_tensors(one, one.entry("w"), other, other.entry("w"))


def diff_paths(a: Path, b: Path, **options: object) -> FileDiff:
    """The difference of two containers, read leniently."""
    with open_packed(a, strict=False) as one, open_packed(b, strict=False) as other:
        return diff_files(one, other, **options)  # type: ignore[arg-type]


def test_equal_tensors(tmp_path: Path, rng: np.random.Generator) -> None:
    """The same bytes have no difference, in either order."""
    one = tensor(rng)
    assert diff(tmp_path, one, one) == TensorDiff(9, 33)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_one_difference_is_found_where_it_is(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A single changed byte, code or scale is told with its place, its values and its offset in both files."""
    rows, columns = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))
    folder = tmp_path_factory.mktemp("diff")
    one = tensor(np.random.default_rng(1), rows, columns)
    n, k = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    codes, scales = one.codes().copy(), one.scales.copy()
    codes[n, k] = data.draw(st.integers(-8, 7).filter(lambda code: code != codes[n, k]))
    row = data.draw(st.integers(0, rows - 1))
    scales[row] *= 1.5
    other = changed(one, pack_codes(codes), scales)
    found = diff(folder, one, other)
    assert (found.bytes, found.codes, found.pads, found.scales) == (1, 1, 0, 1)
    assert found.max_code_difference == abs(int(codes[n, k]) - int(one.codes()[n, k]))
    assert found.max_scale_difference == pytest.approx(1 / 3, rel=1e-6)
    assert (found.rows, found.columns) == ((n, n), (k, k))
    first_byte, first_code, first_scale = found.first_byte, found.first_code, found.first_scale
    assert first_byte is not None
    assert first_code is not None
    assert first_scale is not None
    assert (first_code.row, first_code.index, first_code.a, first_code.b) == (n, k, one.codes()[n, k], codes[n, k])
    assert (first_byte.row, first_byte.index) == (n, k // 2)
    half, a_nibble, b_nibble = nibble_of(first_code)
    assert half == ("high" if k % 2 == 0 else "low")
    for name, offset, byte, nibble, place, scale in (
        ("a", first_byte.a_offset, first_byte.a, a_nibble, first_scale.a_offset, one.scales[row]),
        ("b", first_byte.b_offset, first_byte.b, b_nibble, first_scale.b_offset, scales[row]),
    ):
        content = (folder / f"{name}.safetensors").read_bytes()
        assert offset is not None
        assert place is not None
        assert content[offset] == byte
        assert (content[offset] >> 4 if half == "high" else content[offset] & 15) == nibble
        assert content[place : place + 4] == np.float32(scale).tobytes()
    assert first_code.a_offset == first_byte.a_offset


def test_counts_do_not_depend_on_the_blocks(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read in blocks of one row or whole, two random tensors differ in the same ways, and those that numpy counts."""
    one, other = tensor(rng, 23, 41), tensor(rng, 23, 41)
    whole = diff(tmp_path, one, other)
    monkeypatch.setattr(diff_module, "_BLOCK_BYTES", 1)
    assert diff(tmp_path, one, other) == whole
    assert whole.bytes == np.count_nonzero(one.packed != other.packed)
    assert whole.codes == np.count_nonzero(one.codes() != other.codes())
    assert whole.max_code_difference == np.abs(one.codes() - other.codes()).max()
    assert whole.patterns == ()


@pytest.mark.parametrize("columns", [32, 33])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "even-high"])
def test_another_layout_is_named(layout: str, columns: int, tmp_path: Path, rng: np.random.Generator) -> None:
    """B in another layout is told by the layout's name, whatever the other tool pads with; so is A."""
    one = tensor(rng, columns=columns)
    swapped = one.packed >> 4 | one.packed << 4 if "even-low" in layout else one.packed
    other = changed(one, swapped ^ 0x88 if layout.endswith("twos") else swapped)
    if columns % 2:
        other.packed[:, -1] &= 0x0F if "even-low" in layout else 0xF0
    assert (unpack_codes(other.packed, columns, LAYOUTS[layout]) == one.codes()).all()
    (words,) = diff(tmp_path, one, other).patterns
    assert words.endswith(f"read as {layout}, B has the codes of A")
    (words,) = diff(tmp_path, other, one).patterns
    assert f"read as {layout}, " in words


def test_other_faults_are_named(tmp_path: Path, rng: np.random.Generator) -> None:
    """The ±7 clamp, an offset off by one, another pad or rounding are told; a single changed code is not explained."""
    one = tensor(rng, 40, 33)
    codes = one.codes()
    clamped = changed(one, pack_codes(np.maximum(codes, -7)))
    assert diff(tmp_path, one, clamped).patterns == ("±7 clamp: the codes of B are those of A, with −7 for −8",)
    assert diff(tmp_path, clamped, one).patterns == ("±7 clamp: the codes of A are those of B, with −7 for −8",)
    low = changed(one, pack_codes(np.minimum(codes, 6)))
    raised = changed(one, pack_codes(np.minimum(codes, 6) + np.int8(1)))
    assert diff(tmp_path, low, raised).patterns == ("offset off by one: each code of B is that of A + 1",)
    assert diff(tmp_path, raised, low).patterns == ("offset off by one: each code of B is that of A − 1",)
    padded = one.packed.copy()
    padded[:, -1] &= 0xF0
    found = diff(tmp_path, one, changed(one, padded))
    assert (found.bytes, found.codes, found.pads, found.first_code) == (40, 0, 40, None)
    assert "only the pad nibbles" in found.patterns[0]
    rounded = codes.copy()
    rounded[rng.random(codes.shape) < 0.09] -= 1
    rounded = np.maximum(rounded, -8)
    assert "another rounding" in diff(tmp_path, one, changed(one, pack_codes(rounded))).patterns[0]
    rounded = codes.copy()
    rounded[3, 4] += 1 if codes[3, 4] < 7 else -1
    assert diff(tmp_path, one, changed(one, pack_codes(rounded))).patterns == ()


def test_scales_are_explained(rng: np.random.Generator) -> None:
    """Rounding to half precision, another divisor and any common factor are told; different scales are not."""
    absmax = rng.uniform(0.1, 4, 50).astype(np.float32)
    ours = absmax / np.float32(7.5)
    half = ours.astype(np.float16).astype(np.float32)
    assert scale_patterns(ours, half) == ["the scales of B are those of A rounded to float16"]
    assert scale_patterns(half, ours) == ["the scales of A are those of B rounded to float16"]
    brain = ours.copy()
    brain.view(np.uint32)[...] = (brain.view(np.uint32) + 0x8000) & 0xFFFF0000  # no ties among these
    assert scale_patterns(ours, brain) == ["the scales of B are those of A rounded to bfloat16"]
    assert "A are as of absmax / 7.5, those of B of absmax / 7" in scale_patterns(ours, absmax / np.float32(7))[0]
    assert "A are as of absmax / 8, those of B of absmax / 7.5" in scale_patterns(absmax / np.float32(8), ours)[0]
    assert scale_patterns(ours, ours * np.float32(3)) == ["every scale of B is that of A times 3"]
    assert scale_patterns(ours, rng.permutation(ours)) == []
    assert scale_patterns(ours, np.where(np.arange(50) == 7, np.nan, ours).astype(np.float32)) == []
    assert scale_patterns(ours[:1], half[:1]) == []


def test_files_pair_up(tmp_path: Path, rng: np.random.Generator) -> None:
    """Tensors pair by name, module or, alone in both files, without one; others are said to be in one file only."""
    one, other = tensor(rng), tensor(rng, 4, 6)
    a, b, c = (tmp_path / f"{name}.safetensors" for name in "abc")
    save_container(a, {"x.weight": one, "y.weight": other, "z.weight": other})
    save_container(b, {"x": one, "y.weight": changed(other, other.packed ^ 1), "v.weight": other})
    found = diff_paths(a, b)
    assert [(pair.a_name, pair.b_name, pair.is_equal) for pair in found.pairs] == [
        ("x.weight", "x", True),
        ("y.weight", "y.weight", False),
    ]
    assert (found.only_a, found.only_b) == (("z.weight",), ("v.weight",))
    assert not found.is_equal
    assert diff_paths(a, b, names=("x",)).is_equal
    assert diff_paths(a, b, names=("z=v",)).is_equal
    save_container(c, {"other.name": one})
    save_container(tmp_path / "d.safetensors", {"w": one})
    assert diff_paths(c, tmp_path / "d.safetensors").is_equal
    (pair,) = diff_paths(c, b, names=("other.name=y",)).pairs
    assert pair.tensors is None
    assert not pair.is_equal


def test_biases_and_what_is_said(tmp_path: Path, rng: np.random.Generator) -> None:
    """A bias that differs is a difference, a method is none; with --tensor the bias of that tensor is compared too."""
    one = tensor(rng)
    bias = rng.standard_normal(9).astype(np.float32)
    a, b, c = (tmp_path / f"{name}.safetensors" for name in "abc")
    save_container(a, {"w": one, "v": one}, biases={"w": bias})
    save_container(b, {"w": one, "v": one}, biases={"w": np.where(np.arange(9) == 4, 1, bias).astype(np.float32)})
    save_container(c, {"w": one, "v": one}, biases={"w": bias}, method="mse")
    found = diff_paths(a, b)
    (carried,) = found.carried
    assert carried.name == "w.bias"
    for path, offset in ((a, carried.a_offset), (b, carried.b_offset)):
        assert offset is not None
        assert 0 < carried.bytes <= 4
        start = offset - offset % 4
        assert np.frombuffer(path.read_bytes()[start : start + 4], "<f4")[0] == (bias[4] if path == a else 1)
    assert diff_paths(a, b, packed_only=True).is_equal
    named = diff_paths(a, b, names=("w",))
    assert not named.is_equal
    assert "first at n 4" in (named.pairs[0].bias or "")
    assert diff_paths(a, b, names=("v",)).is_equal
    assert diff_paths(a, b, names=("w=v",)).pairs[0].bias == "only A has a bias"
    said = diff_paths(a, c)
    assert said.is_equal
    assert said.pairs[0].said == ("method: absmax, mse in B",)


def test_a_container_against_raw_bytes(tmp_path: Path, rng: np.random.Generator) -> None:
    """Raw bytes with their scales equal the container they were cut from; what lies beside the packed is left alone."""
    one = tensor(rng)
    path, raw, scales = tmp_path / "a.safetensors", tmp_path / "w.bin", tmp_path / "s.bin"
    save_container(path, {"w": one}, biases={"w": np.ones(9, np.float32)})
    raw.write_bytes(b"123" + one.packed.tobytes())
    scales.write_bytes(one.scales.tobytes())
    with Container(path) as a, open_packed(raw, Blob((9, 33), 3, scales)) as b:
        found = diff_files(a, b)
    assert found.pairs[0].tensors == TensorDiff(9, 33)
    assert found.carried_left is not None
    assert found.is_equal
    assert found.pairs[0].said == ("only A has a bias",)


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Two tensors of 128 MiB are compared in less than 64 MiB beside what the program itself takes."""
    code = """
import sys, resource, os
from pathlib import Path
import numpy as np
from qcs4w_packer import Container
from qcs4w_packer.container_writer import ContainerWriter
from qcs4w_packer.diff import diff_tensors
from qcs4w_packer.metadata import PackedEntry
folder = Path(sys.argv[1])
paths = [folder / "a.safetensors", folder / "b.safetensors"]
for path in paths:
    with open(path, "w+b") as file:
        writer = ContainerWriter([PackedEntry("w", 32768, 8192)])
        writer.begin(file.fileno())
        writer.finish()
with open(paths[1], "r+b") as file:
    file.seek(-7, 2)
    file.write(b"x")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with Container(paths[0]) as a, Container(paths[1]) as b:
    found = diff_tensors(a, a.entry("w"), b, b.entry("w"))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(found.bytes, found.rows, (after - before) // 1024)
"""
    done = run_python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    count, first, last, mebibytes = done.stdout.replace("(", "").replace(")", "").replace(",", "").split()
    assert (count, first, last) == ("1", "32767", "32767")
    assert int(mebibytes) < 64
