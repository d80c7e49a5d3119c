"""inspect --find on the command line."""

import os
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from command_line import CommandLine
from conftest import GOLDEN

from qcs4w_packer import LAYOUTS, Container, PackedLinear, pack_codes, save_container, unpack_codes


@pytest.fixture
def weight(packed_file: Path) -> PackedLinear:
    """One of the packed tensors, 12 × 33."""
    with Container(packed_file) as container:
        return container.load("layers.0.fc")


def test_a_file_that_holds_all(packed_file: Path, qcs4w: CommandLine) -> None:
    """A container holds its own tensors, at the offsets that inspect shows: exit code 0."""
    offsets = {t["tensor"]: t["file_offset"] for t in qcs4w("inspect", packed_file, "--json").document["tensors"]}
    result = qcs4w("inspect", packed_file, "--find", packed_file)
    assert result.code == 0
    assert "2 found, 0 not" in result.out
    found = qcs4w("inspect", packed_file, "--find", packed_file, "--json").document["find"]
    assert (found["found"], found["missing"], found["format"]) == (2, 0, "qcs4w")
    for tensor in found["tensors"]:
        (hit,) = tensor["hits"]
        assert hit["offset"] == offsets[tensor["tensor"]]
        assert hit["layouts"] == ["even-high"]
        assert [place["dtype"] for place in hit["scales"]] == ["F32"]
        assert str(hit["offset"]) in result.out


def test_a_file_that_lacks_one(packed_file: Path, weight: PackedLinear, tmp_path: Path, qcs4w: CommandLine) -> None:
    """One tensor that is missing makes the verdict no, exit code 1; --tensor asks for the other alone."""
    (tmp_path / "model.bin").write_bytes(b"\x00" * 1000 + weight.packed.tobytes())
    result = qcs4w("inspect", tmp_path / "model.bin", "--find", packed_file)
    assert result.code == 1
    assert "1 found, 1 not" in result.out
    assert qcs4w("inspect", tmp_path / "model.bin", "--find", packed_file, "--tensor", "layers.0.fc").code == 0
    assert qcs4w("inspect", tmp_path / "model.bin", "--find", packed_file, "--tensor", "layers.1.fc").code == 1


@pytest.mark.parametrize("dtype", ["<f4", "<f2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_command_that_goes_on_runs(
    dtype: str, layout: str, packed_file: Path, weight: PackedLinear, tmp_path: Path, qcs4w: CommandLine, gpu: object
) -> None:
    """The command that is offered takes the weight from where it was found, and passes."""
    packed = pack_codes(unpack_codes(weight.packed, 33), LAYOUTS[layout])
    (tmp_path / "my model.bin").write_bytes(b"\x07" * 99 + weight.scales.astype(dtype).tobytes() + packed.tobytes())
    result = qcs4w("inspect", tmp_path / "my model.bin", "--find", packed_file, "--tensor", "layers.0.fc")
    assert result.code == 0
    (line,) = [line for line in result.err.splitlines() if line.startswith("go on with: ")]
    words = shlex.split(line.removeprefix("go on with: "))
    assert words[:2] == ["qcs4w", "verify"]
    assert qcs4w(*words[1:]).code == 0


def test_what_is_told_of_rows_with_gaps(
    packed_file: Path, weight: PackedLinear, tmp_path: Path, qcs4w: CommandLine
) -> None:
    """Rows at a stride of their own are found, and the stride is told in words and in the JSON."""
    rows = np.pad(weight.packed, ((0, 0), (0, 115)))
    (tmp_path / "model.bin").write_bytes(rows.tobytes())
    arguments = ("inspect", tmp_path / "model.bin", "--find", packed_file, "--tensor", "layers.0.fc")
    result = qcs4w(*arguments)
    assert result.code == 0
    assert "stride of 132 bytes" in result.err
    (tensor,) = qcs4w(*arguments, "--json").document["find"]["tensors"]
    assert tensor["hits"][0]["row_stride"] == 132


def test_what_is_told_of_a_part(packed_file: Path, weight: PackedLinear, tmp_path: Path, qcs4w: CommandLine) -> None:
    """Some of the rows are no find, but they are told."""
    (tmp_path / "model.bin").write_bytes(b"\x01" * 10 + weight.packed[4:9].tobytes())
    arguments = ("inspect", tmp_path / "model.bin", "--find", packed_file, "--tensor", "layers.0.fc")
    result = qcs4w(*arguments)
    assert result.code == 1
    assert "5 of 12 rows" in result.out
    assert "at 10 lie rows 4:9 of 12" in result.err
    (tensor,) = qcs4w(*arguments, "--json").document["find"]["tensors"]
    (part,) = tensor["parts"]
    assert (tensor["found"], part["first_row"], part["last_row"], part["rows_equal"]) == (False, 4, 8, 5)


def test_what_is_told_of_scales_alone(
    packed_file: Path, weight: PackedLinear, tmp_path: Path, qcs4w: CommandLine
) -> None:
    """Codes that are not there while their scales are point to a layout that is not known."""
    (tmp_path / "model.bin").write_bytes(b"\x01" * 10 + weight.scales.tobytes())
    result = qcs4w("inspect", tmp_path / "model.bin", "--find", packed_file, "--tensor", "layers.0.fc")
    assert result.code == 1
    assert "F32 at 10" in result.out
    assert "its scales are there" in result.err


def test_an_ambiguous_needle(tmp_path: Path, rng: np.random.Generator, qcs4w: CommandLine) -> None:
    """A weight of one code is found everywhere: few places are listed, and it is called ambiguous."""
    packed = PackedLinear(pack_codes(np.array([[3]], np.int8)), np.array([0.1], np.float32), 1)
    save_container(tmp_path / "tiny.safetensors", {"w": packed})
    (tmp_path / "model.bin").write_bytes(rng.bytes(50_000))
    arguments = ("inspect", tmp_path / "model.bin", "--find", tmp_path / "tiny.safetensors")
    result = qcs4w(*arguments)
    assert result.code == 0
    assert "ambiguous" in result.out
    assert len(result.out.splitlines()) < 12
    (tensor,) = qcs4w(*arguments, "--json").document["find"]["tensors"]
    assert tensor["ambiguous"]
    assert tensor["more"]


def test_one_layout_alone(packed_file: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """--layout restricts the search to one order and encoding, by rows and transposed."""
    arguments = ("inspect", packed_file, "--find", packed_file, "--json", "--layout")
    assert qcs4w(*arguments, "even-high").document["find"]["layouts"] == ["even-high", "columns-even-high"]
    assert qcs4w(*arguments, "even-low").code == 1


def test_a_raw_needle(packed_file: Path, weight: PackedLinear, tmp_path: Path, qcs4w: CommandLine) -> None:
    """Raw packed bytes are a needle too, with --shape; without scales only codes are searched for."""
    (tmp_path / "raw.bin").write_bytes(weight.packed.tobytes())
    result = qcs4w("inspect", packed_file, "--find", tmp_path / "raw.bin", "--shape", "12,33", "--json")
    assert result.code == 0
    (tensor,) = result.document["find"]["tensors"]
    assert tensor["hits"][0]["scales"] == []


def test_a_program_of_executorch(tmp_path: Path, qcs4w: CommandLine) -> None:
    """A weight is found in the .pte that the real package made of it."""
    program = shutil.copy(GOLDEN / "pte" / "one_16x32.pte", tmp_path)
    data = Path(program).read_bytes()
    packed = np.frombuffer(data, np.uint8, 256, 2176).reshape(16, 16)
    needle = tmp_path / "packed.safetensors"
    save_container(needle, {"fc.weight": PackedLinear(packed, np.frombuffer(data, "<f4", 16, 2048), 32)})
    result = qcs4w("inspect", program, "--find", needle)
    assert result.code == 0
    assert "F32 at 2048 (128 bytes before the weights)" in result.out
    assert qcs4w("inspect", needle, "--find", program).code == 0  # the other way round too


@pytest.mark.parametrize("option", [["--rows", "0:2"], ["--hex"], ["--cols", "1"], ["--against", "w.npy"]], ids=str)
def test_options_of_a_dump_are_refused(option: list[str], packed_file: Path, qcs4w: CommandLine) -> None:
    """What looks into FILE does not go with --find."""
    assert "--find" in qcs4w.refused("inspect", packed_file, "--find", packed_file, *option)


def test_files_that_cannot_be_read(packed_file: Path, checkpoint: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """A haystack or needle that is missing, a folder, a pipe or no packed file is one error, exit code 2."""
    os.mkfifo(tmp_path / "pipe")
    for bad in (tmp_path / "missing", tmp_path, tmp_path / "pipe"):
        assert str(bad) in qcs4w.refused("inspect", bad, "--find", packed_file)
        assert str(bad) in qcs4w.refused("inspect", packed_file, "--find", bad)
    assert "not a qcs4w container" in qcs4w.refused("inspect", packed_file, "--find", checkpoint)
    assert "no packed tensor 'nope'" in qcs4w.refused("inspect", packed_file, "--find", packed_file, "--tensor", "nope")
