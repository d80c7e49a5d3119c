"""The diff command."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from command_line import CommandLine
from safetensors.numpy import load_file, save_file
from test_cli_run import flip

from qcs4w_packer import Container, PackedLinear, pack_file, save_container


@pytest.fixture
def swapped(packed_file: Path, tmp_path: Path) -> Path:
    """The packed file with the nibbles of layers.1.fc swapped, digests fresh."""
    path = tmp_path / "swapped.safetensors"
    with Container(packed_file) as container:
        tensors = {name: container.load(name) for name in container.entries}
    name = "layers.1.fc.weight"
    one = tensors[name]
    tensors[name] = PackedLinear(one.packed >> 4 | one.packed << 4, one.scales, one.in_features)
    save_container(path, tensors)
    return path


def test_a_file_equals_itself(packed_file: Path, qcs4w: CommandLine) -> None:
    """A file and its copy: every tensor is equal, those beside the packed too, exit code 0."""
    copy = packed_file.with_name("copy.safetensors")
    copy.write_bytes(packed_file.read_bytes())
    result = qcs4w("diff", packed_file, copy)
    assert result.code == 0
    assert result.err == ""
    lines = [line.split() for line in result.out.splitlines()]
    assert ["layers.0.fc.weight", "12", "33", "equal"] in lines
    assert "3 other tensors equal" in result.out
    document = qcs4w("diff", packed_file, copy, "--json").document
    assert document["equal"] is True
    assert document["carried_equal"] == 3
    assert all(tensor["difference"]["bytes"] == 0 for tensor in document["tensors"])


def test_swapped_nibbles_are_named(packed_file: Path, swapped: Path, qcs4w: CommandLine) -> None:
    """The first byte, nibble and code stand with place and offsets, and the pattern says what happened."""
    result = qcs4w("diff", packed_file, swapped, "--packed-only")
    assert result.code == 1
    assert "pattern       nibbles swapped: read as even-low, B has the codes of A" in result.out
    assert "2 packed tensors compared, 1 differ" in result.out
    document = qcs4w("diff", packed_file, swapped, "--packed-only", "--json").document
    assert document["carried_left"] == "as you asked"
    equal, different = document["tensors"]
    assert (equal["equal"], different["equal"]) == (True, False)
    code = different["difference"]["first_code"]
    byte = packed_file.read_bytes()[code["a_offset"]]
    assert code["a_nibble"] == (byte >> 4 if code["half"] == "high" else byte & 15)
    assert code["a"] == code["a_nibble"] - 8
    assert f"offset A {code['a_offset']} (0x{code['a_offset']:x})" in result.out
    assert f"n {code['row']}, k {code['column']} ({code['half']} nibble)" in result.out


def test_what_only_one_file_has(packed_file: Path, swapped: Path, checkpoint: Path, qcs4w: CommandLine) -> None:
    """Tensors that one file lacks are listed, packed ones and others, and are differences."""
    fewer = packed_file.with_name("fewer.safetensors")
    save_container(fewer, {"layers.0.fc.weight": Container(packed_file).load("layers.0.fc")})
    result = qcs4w("diff", packed_file, fewer)
    assert result.code == 1
    lines = [line.split() for line in result.out.splitlines()]
    assert ["layers.1.fc.weight", "only", "in", "A"] in lines
    assert ["layers.0.fc.bias", "only", "in", "A"] in lines
    assert "1 only in A" in result.out
    document = qcs4w("diff", fewer, packed_file, "--json").document
    assert document["only_in_b"] == ["layers.1.fc.weight"]
    assert qcs4w("diff", packed_file, fewer, "--tensor", "layers.0.fc.weight").code == 1, "the bias is the tensor's own"
    assert qcs4w("diff", packed_file, fewer, "--tensor", "layers.0.fc.weight", "--packed-only").code == 0


def test_shapes_that_differ(tmp_path: Path, qcs4w: CommandLine) -> None:
    """Tensors of two shapes are a difference, and nothing else is said of them."""
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_container(a, {"w": PackedLinear(np.zeros((4, 3), np.uint8), np.ones(4, np.float32), 6)})
    save_container(b, {"w": PackedLinear(np.zeros((4, 3), np.uint8), np.ones(4, np.float32), 5)})
    result = qcs4w("diff", a, b)
    assert result.code == 1
    assert "4 × 6, 4 × 5 in B" in result.out
    (tensor,) = qcs4w("diff", a, b, "--json").document["tensors"]
    assert (tensor["a_shape"], tensor["b_shape"], tensor["difference"]) == ([4, 6], [4, 5], None)


def test_damaged_files_are_compared(packed_file: Path, qcs4w: CommandLine) -> None:
    """A file whose digests do not fit is compared, the digest is a warning, and the flipped code is found."""
    copy = packed_file.with_name("copy.safetensors")
    copy.write_bytes(packed_file.read_bytes())
    flip(copy, "layers.0.fc.weight")
    result = qcs4w("diff", packed_file, copy)
    assert result.code == 1
    assert "Warning: B: tensor 'layers.0.fc.weight': the packed bytes have sha256" in result.err
    document = qcs4w("diff", packed_file, copy, "--json").document
    assert document["a_problems"] == []
    assert "sha256" in document["b_problems"][0]
    assert document["tensors"][0]["difference"]["bytes"] == 1
    assert qcs4w("diff", copy, copy).code == 0, "damaged alike is equal"


@pytest.mark.parametrize(
    ("key", "value", "code"), [("nibble_order", "even-low", 1), ("offset", 7, 1), ("tool", "another 1.0", 0)]
)
def test_only_words_that_change_meaning_are_a_difference(
    key: str, value: object, code: int, packed_file: Path, qcs4w: CommandLine
) -> None:
    """The same bytes under another nibble order or offset differ; written by another tool they do not."""
    with Container(packed_file) as container:
        document = container.document
    document[key] = value
    odd = packed_file.with_name("odd.safetensors")
    save_file(load_file(packed_file), odd, metadata={"qcs4w": json.dumps(document)})
    result = qcs4w("diff", packed_file, odd)
    assert result.code == code
    assert f"{key}: " in (result.out if code else result.err)
    assert str(value) in (result.out if code else result.err)


def test_other_tensors_are_compared_by_bytes(packed_file: Path, checkpoint: Path, qcs4w: CommandLine) -> None:
    """A changed embedding is told with the offset at which both files differ."""
    tensors = load_file(checkpoint)
    tensors["embed_tokens.weight"][3, 5] += 1
    edited, other = packed_file.with_name("edited.safetensors"), packed_file.with_name("other.safetensors")
    save_file(tensors, edited)
    pack_file(edited, other)
    result = qcs4w("diff", packed_file, other)
    assert result.code == 1
    assert "0 differ" in result.out
    (carried,) = qcs4w("diff", packed_file, other, "--json").document["carried"]
    assert carried["tensor"] == "embed_tokens.weight"
    a, b = packed_file.read_bytes(), other.read_bytes()
    assert a[carried["a_offset"]] != b[carried["b_offset"]]
    with Container(packed_file) as container:
        start = container.carried_place("embed_tokens.weight")
    assert (carried["a_offset"] - start) // 4 == 3 * 8 + 5


def test_what_cannot_be_compared(packed_file: Path, checkpoint: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """A missing file, one without packed tensors, or a name that neither has: one error, exit code 2."""
    assert "does not exist" in qcs4w.refused("diff", packed_file, tmp_path / "none.safetensors")
    assert "is not a qcs4w container" in qcs4w.refused("diff", checkpoint, packed_file)
    assert "layers.0.fc.weight" in qcs4w.refused("diff", packed_file, packed_file, "--tensor", "layers.0.f.weight")
    assert "no packed tensor 'y'" in qcs4w.refused("diff", packed_file, packed_file, "--tensor", "layers.0.fc=y")
    os.truncate(packed_file, packed_file.stat().st_size - 1)
    assert "truncated" in qcs4w.refused("diff", packed_file, packed_file)


def test_raw_bytes(packed_file: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """--shape reads a file that says nothing of itself; without --scales codes alone are compared, and that is said."""
    with Container(packed_file) as container:
        one = container.load("layers.1.fc")
    raw, scales = tmp_path / "w.bin", tmp_path / "s.bin"
    raw.write_bytes(one.packed.tobytes())
    scales.write_bytes(one.scales.tobytes())
    options = ("--tensor", "layers.1.fc=weight", "--shape", "8,12")
    result = qcs4w("diff", packed_file, raw, *options)
    assert result.code == 0
    assert "scales were not compared" in result.err
    assert qcs4w("diff", packed_file, raw, *options, "--json").document["scales_compared"] is False
    result = qcs4w("diff", packed_file, raw, *options, "--scales", scales)
    assert (result.code, "scales were not compared" in result.err) == (0, False)
    scales.write_bytes((one.scales * 2).astype(np.float32).tobytes())
    result = qcs4w("diff", packed_file, raw, *options, "--scales", scales)
    assert result.code == 1
    assert "every scale of B is that of A times 2" in result.out
    raw.write_bytes((one.packed >> 4 | one.packed << 4).tobytes())
    assert qcs4w("diff", packed_file, raw, *options).code == 1
    assert qcs4w("diff", packed_file, raw, *options, "--layout", "even-low").code == 0
