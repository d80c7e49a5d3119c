"""inspect --against and raw bytes on the command line."""

from pathlib import Path

import numpy as np
import pytest
from command_line import CommandLine
from safetensors.numpy import save_file

from qcs4w_packer import PackedLinear, pack_weight, save_container


@pytest.fixture
def folder(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A weight as .npy and in a checkpoint of two, its bytes with nibbles swapped in several files, x and y."""
    monkeypatch.chdir(tmp_path)
    weight = rng.standard_normal((24, 96)).astype(np.float32)
    packed = pack_weight(weight)
    swapped = packed.packed >> 4 | packed.packed << 4
    np.save("w.npy", weight)
    save_file({"fc.weight": weight, "other.weight": weight[:8]}, "model.safetensors")
    swapped.tofile("low.bin")
    np.save("low.npy", swapped)
    save_file({"q": swapped, "s": packed.scales}, "low.safetensors")
    packed.scales.tofile("scales.bin")
    save_container("right.safetensors", {"fc.weight": packed})
    save_container("swapped.safetensors", {"fc.weight": PackedLinear(swapped, packed.scales, 96)})
    x = rng.standard_normal((5, 96)).astype(np.float32)
    np.save("x.npy", x)
    np.save("y.npy", x @ packed.dequantize().T)
    return tmp_path


SWAPPED = {
    "raw": ["low.bin", "--against", "w.npy"],
    "raw with its shape": ["low.bin", "--shape", "24,96", "--against", "w.npy"],
    "npy": ["low.npy", "--against", "w.npy"],
    "safetensors": ["low.safetensors", "--against", "w.npy"],
    "by name": ["low.safetensors", "--tensor", "q", "--against", "w.npy"],
    "a container": ["swapped.safetensors", "--against", "model.safetensors"],
    "an output": ["low.bin", "-x", "x.npy", "-y", "y.npy"],
    "a container's output": ["swapped.safetensors", "-x", "x.npy", "-y", "y.npy"],
}


@pytest.mark.parametrize("name", SWAPPED)
def test_swapped_nibbles_are_named(name: str, folder: Path, qcs4w: CommandLine) -> None:
    """From any file, by weights or by an output; a file that says otherwise makes the exit code 1."""
    result = qcs4w("inspect", *SWAPPED[name])
    assert "layout      even-low (certain)" in result.out
    assert "q4gsw, ONNX MatMulNBits, compressed-tensors" in result.out
    is_container = SWAPPED[name][0] == "swapped.safetensors"
    assert result.code == int(is_container)
    assert ("the file says qcs4w (even-high), its bytes are even-low" in result.err) == is_container
    found = qcs4w("inspect", *SWAPPED[name], "--json").document["against"]
    assert (found["verdict"], found["layout"]) == ("certain", "even-low")
    assert (found["out_features"], found["in_features"]) == (24, 96)


def test_our_own_file_is_what_it_says(folder: Path, qcs4w: CommandLine) -> None:
    """A sound container is even-high by the rule of ExecuTorch, scales equal to the bit, exit code 0."""
    result = qcs4w("inspect", "right.safetensors", "--tensor", "fc", "--against", "model.safetensors")
    assert result.code == 0
    assert "layout      even-high (certain)" in result.out
    assert "absmax / 7.5, codes −8..7: makes every code (2,304 looked at)" in result.out
    assert "scales      equal to the bit" in result.out
    assert "convert" not in result.err


def test_nothing_fits(folder: Path, rng: np.random.Generator, qcs4w: CommandLine) -> None:
    """Bytes of something else: exit code 1 and no name."""
    rng.integers(0, 256, 24 * 48, np.uint8).tofile("noise.bin")
    result = qcs4w("inspect", "noise.bin", "--against", "w.npy")
    assert result.code == 1
    assert "none that is known fits" in result.out
    document = qcs4w("inspect", "noise.bin", "--against", "w.npy", "--json").document
    assert document["against"]["layout"] is None


def test_verbose_shows_every_reading(folder: Path, qcs4w: CommandLine) -> None:
    """Six readings, and all with -v."""
    short, long = (qcs4w("inspect", "low.bin", "--against", "w.npy", *more) for more in ([], ["-v"]))
    assert "more readings fit worse (-v shows them)" in short.err
    assert len(long.out.splitlines()) > len(short.out.splitlines()) + 20


def test_raw_bytes_are_verified_and_run(folder: Path, qcs4w: CommandLine) -> None:
    """Verify and run take raw bytes in another layout, and the answers are those of the container."""
    raw = ["low.bin", "--shape", "24,96", "--layout", "even-low", "--scales", "scales.bin"]
    verified = qcs4w("verify", *raw, "--source", "w.npy")
    assert verified.code == 0, verified
    assert "source equal" in verified.out
    assert qcs4w("run", *raw, "-x", "x.npy", "-o", "raw.npy").code == 0
    assert qcs4w("run", "right.safetensors", "-x", "x.npy", "-o", "own.npy").code == 0
    assert np.array_equal(np.load("raw.npy"), np.load("own.npy"))


def test_nibbles_alone(folder: Path, qcs4w: CommandLine) -> None:
    """Without a source the encoding is told by the histogram, of raw bytes and of an array."""
    for args in (
        ["low.bin", "--shape", "24,96"],
        ["low.safetensors", "--tensor", "q"],
        ["low.npy", "--tensor", "weight"],
    ):
        result = qcs4w("inspect", *args)
        assert result.code == 0, result
        assert "encoding: code + 8" in result.out
        assert qcs4w("inspect", *args, "--json").document["nibbles"]["encoding"] == "code + 8"


def test_raw_bytes_are_dumped(folder: Path, qcs4w: CommandLine) -> None:
    """A dump of raw bytes shows their own offsets."""
    result = qcs4w(
        "inspect", "low.bin", "--shape", "23,96", "--offset", "48", "--hex", "--rows", "0:1", "--cols", "0:4"
    )
    data = Path("low.bin").read_bytes()
    assert result.out.splitlines() == ["row 0", f"00000030  {data[48:50].hex(' ').upper()}"]


REFUSED = {
    "half a pair": (["low.bin", "-x", "x.npy"], "--input and --output together"),
    "both": (["low.bin", "-x", "x.npy", "-y", "y.npy", "--against", "w.npy"], "--input and --output together"),
    "too short": (["scales.bin", "--against", "w.npy"], "there are 96 bytes, fewer than"),
    "which matrix": (["low.bin", "--against", "model.safetensors"], "holds 2 float matrices, which is meant?"),
    "no such tensor": (["low.safetensors", "--tensor", "k", "--against", "w.npy"], "no tensor 'k'"),
    "float": (["low.safetensors", "--tensor", "s", "--against", "w.npy"], "'s' is F32, packed codes are"),
    "no file": (["none.bin", "--against", "w.npy"], "none.bin"),
    "unpaired": (["low.bin", "-x", "x.npy", "-y", "w.npy"], r"x has shape [5, 96], y [24, 96]"),
    "shape": (["low.bin", "--shape", "24"], "'24' is not N,K such as 4096,4096"),
    "dump without shape": (["low.bin", "--offset", "3", "--hex"], "do not tell their size"),
    "layout": (["low.bin", "--shape", "9,9", "--layout", "evenlow"], "evenlow"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_questions_are_refused(name: str, folder: Path, qcs4w: CommandLine) -> None:
    """One error each, that says how to mend it."""
    args, words = REFUSED[name]
    assert words in qcs4w.refused("inspect", *args)


def test_raw_options_need_a_shape(folder: Path, qcs4w: CommandLine) -> None:
    """Verify and run cannot guess how large raw bytes are."""
    assert "say it with --shape N,K" in qcs4w("verify", "low.bin", "--offset", "3").err
    assert "say it with --shape N,K" in qcs4w.refused("run", "low.bin", "--scales", "scales.bin", "-x", "x.npy")
    assert "no layout 'evenlow'" in qcs4w.refused("run", "low.bin", "--layout", "evenlow", "-x", "x.npy")
