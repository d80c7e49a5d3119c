"""verify --than: which of two packed files is nearer to their source."""

from pathlib import Path

import numpy as np
import pytest
from command_line import CommandLine
from safetensors.numpy import load_file

from qcs4w_packer import PackedLinear, load_packed, pack_codes, pack_weight, save_container

NAME, OTHER = "layers.0.fc.weight", "layers.1.fc.weight"


@pytest.fixture
def worse(packed_file: Path, tmp_path: Path) -> Path:
    """The same tensors; the scales of the first are a tenth too large."""
    path = tmp_path / "worse.safetensors"
    first, second = load_packed(packed_file, NAME), load_packed(packed_file, OTHER)
    larger = PackedLinear(first.packed, first.scales * np.float32(1.1), first.in_features)
    save_container(path, {NAME: larger, OTHER: second})
    return path


def test_the_weight_error_decides_without_an_input(
    packed_file: Path, worse: Path, checkpoint: Path, qcs4w: CommandLine
) -> None:
    """Tensor by tensor the lower relative error is told; the exit code is 1 only where the other file is better."""
    result = qcs4w("verify", packed_file, "--than", worse, "--source", checkpoint)
    assert result.code == 0
    assert "2 tensors: the weight error is lower in" in result.out
    document = qcs4w("verify", packed_file, "--than", worse, "--source", checkpoint, "--json").document
    assert [r["lower"] for r in document["results"]] == ["a", "equal"]
    assert document["summary"] == {"a": 1, "b": 0, "equal": 1, "error": 0}
    verified = qcs4w("pack", checkpoint, "-o", packed_file.parent / "again.safetensors", "--json").document
    assert document["results"][0]["error_a"] == pytest.approx(verified["packed"][0]["quantization_error"]["relative"])
    assert qcs4w("verify", worse, "--than", packed_file, "--source", checkpoint).code == 1


def test_the_output_error_decides_on_an_input(tmp_path: Path, rng: np.random.Generator, qcs4w: CommandLine) -> None:
    """With an input the errors are those of the outputs, and may name the other file: here one column is all of x."""
    weight = rng.standard_normal((6, 8), np.float32)
    good = pack_weight(weight)
    codes = good.codes()
    rough = codes.copy()
    rough[:, 1:] = np.clip(rough[:, 1:] + 2, -8, 7)  # far off everywhere but in column 0
    smaller = np.float32(0.9)
    for name, packed in {
        "a": PackedLinear(pack_codes(codes), good.scales * smaller, 8),
        "b": PackedLinear(pack_codes(rough), good.scales, 8),
    }.items():
        save_container(tmp_path / f"{name}.safetensors", {"fc.weight": packed})
    np.save(tmp_path / "w.npy", weight)
    x = np.zeros((3, 8), np.float32)
    x[:, 0] = 1.0
    np.save(tmp_path / "x.npy", x)
    arguments = ("verify", tmp_path / "a.safetensors", "--than", tmp_path / "b.safetensors", "--source")
    assert qcs4w(*arguments, tmp_path / "w.npy", "--json").document["results"][0]["lower"] == "a"
    (result,) = qcs4w(*arguments, tmp_path / "w.npy", "-x", tmp_path / "x.npy", "--json").document["results"]
    column = weight[:, 0].astype(np.float64)
    for key, scales in (("error_a", good.scales * smaller), ("error_b", good.scales)):
        error = np.linalg.norm(column - codes[:, 0] * scales) / np.linalg.norm(column)
        assert result[key] == pytest.approx(error)
    assert result["lower"] == "b"


def test_what_cannot_be_compared(packed_file: Path, checkpoint: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """A tensor that the other file lacks, or has in another shape, is an error; the rest is compared."""
    extra = pack_weight(np.ones((2, 3), np.float32))
    save_container(tmp_path / "b.safetensors", {NAME: load_packed(packed_file, NAME), "extra.weight": extra})
    arguments = ("verify", packed_file, "--than", tmp_path / "b.safetensors", "--source", checkpoint)
    result = qcs4w(*arguments, "--json")
    assert result.code == 2
    assert result.document["summary"] == {"a": 0, "b": 0, "equal": 1, "error": 1}
    assert result.document["only_in_b"] == ["extra.weight"]
    assert "no packed tensor 'layers.1.fc.weight'" in qcs4w(*arguments).err
    save_container(tmp_path / "c.safetensors", {NAME: extra})
    result = qcs4w("verify", packed_file, "--than", tmp_path / "c.safetensors", "--source", checkpoint)
    assert result.code == 2
    assert "is [12, 33] in" in result.err


def test_options_that_do_not_go_together(packed_file: Path, checkpoint: Path, qcs4w: CommandLine) -> None:
    """--than takes one packed file and a source, and no option of a verification."""
    arguments = ("verify", packed_file, "--than", packed_file)
    for wrong in ((), (packed_file, "--source", checkpoint), ("--source", checkpoint, "--max-quant-error", "1")):
        assert "--than compares two packed files" in qcs4w.refused(*arguments, *wrong)
    error = qcs4w.refused(*arguments, "--source", checkpoint, "--html", "r.html", "--sweep", "--save-failing", "d")
    assert "Hint: it has no --sweep and no --save-failing and no --html" in error


def test_a_source_that_is_not_finite(packed_file: Path, checkpoint: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """Against NaN no error can be told: it is named, and never "equal"."""
    weights = {name: array.copy() for name, array in load_file(checkpoint).items()}
    weights[NAME][3, 5] = np.nan
    np.savez(tmp_path / "w.npz", **weights)
    result = qcs4w("verify", packed_file, "--than", packed_file, "--source", tmp_path / "w.npz")
    assert result.code == 2
    assert f"'{NAME}' holds nan at row 3, column 5" in result.err
    assert "equal for 1; 1 could not be compared" in result.out


@pytest.mark.parametrize(
    "option", [["--no-bias"], ["--fail-fast"], ["--timeout", "3"], ["--grid", "1"], ["--save-failing", "folder"]]
)
def test_options_without_a_meaning_are_refused(
    option: list[str], packed_file: Path, checkpoint: Path, qcs4w: CommandLine
) -> None:
    """What a comparison does not heed is said, and not passed over."""
    arguments = ("verify", packed_file, "--than", packed_file, "--source", checkpoint)
    assert "--than compares two packed files" in qcs4w.refused(*arguments, *option)
