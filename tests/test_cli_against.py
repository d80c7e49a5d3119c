"""inspect --against and raw bytes on the command line."""

import shlex
from pathlib import Path

import numpy as np
import pytest
from command_line import CommandLine
from making import bytes_read
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


@pytest.mark.parametrize("to", ["q4gsw", "compressed-tensors", "onnx"])
def test_a_file_of_another_tool_is_what_it_says(to: str, folder: Path, qcs4w: CommandLine) -> None:
    """Bytes that a reader of another format has brought into ours are not said to lie so in the file."""
    out = {"q4gsw": "o.safetensors", "onnx": "o.onnx"}.get(to, "o")
    assert qcs4w("convert", "right.safetensors", "--to", to, "-o", out).code == 0
    result = qcs4w("inspect", out, "--tensor", "fc.weight", "--against", "model.safetensors")
    assert result.code == 0, result
    assert f"layout      as {to} lays it (certain)" in result.out
    assert "linear_qcs4w" not in result.out
    found = qcs4w("inspect", out, "--tensor", "fc.weight", "--against", "model.safetensors", "--json").document[
        "against"
    ]
    assert found["read_through"]
    assert found["convert"] is None


def test_a_layout_that_is_stated_is_held_against_the_bytes(folder: Path, qcs4w: CommandLine) -> None:
    """--layout is a claim: exit code 1 where the bytes are another one."""
    assert qcs4w("inspect", "low.bin", "--layout", "even-low", "--against", "w.npy").code == 0
    wrong = qcs4w("inspect", "low.bin", "--layout", "even-high", "--against", "w.npy")
    assert wrong.code == 1
    assert "--layout says even-high, its bytes are even-low" in wrong.err


def test_the_command_that_is_offered_works(folder: Path, qcs4w: CommandLine) -> None:
    """What is printed to convert bytes runs as it stands, with scales of any dtype and place."""
    scales = np.fromfile("scales.bin", np.float32)
    scales.astype(np.float16).tofile("scales.f16")
    Path("both.bin").write_bytes(b"x" * 9 + Path("low.bin").read_bytes() + scales.tobytes())
    for number, args in enumerate(
        (
            ["low.bin", "--scales", "scales.bin"],
            ["low.bin", "--scales", "scales.f16", "--scales-dtype", "f16"],
            ["both.bin", "--offset", "9", "--scales-offset", str(9 + 24 * 48)],
            ["swapped.safetensors"],
        )
    ):
        source = "model.safetensors" if args[0] == "swapped.safetensors" else "w.npy"
        command = qcs4w("inspect", *args, "--against", source, "--json").document["against"]["convert"]
        out = f"out{number}.safetensors"
        assert qcs4w(*shlex.split(command.replace("OUT.safetensors", out))[1:]).code == 0, command
        expected = 1 if "scales.f16" in args else 0  # scales rounded to float16 are others
        assert qcs4w("diff", out, "right.safetensors", "--tensor", "weight=fc.weight").code == expected


def test_another_offset_has_no_command(folder: Path, qcs4w: CommandLine) -> None:
    """Bytes with an offset of 7 are named, and it is said that no layout of convert reads them."""
    codes = pack_weight(np.load("w.npy")).codes().clip(-7, 7) + 7
    (codes[:, ::2] << 4 | codes[:, 1::2]).astype(np.uint8).tofile("seven.bin")
    result = qcs4w("inspect", "seven.bin", "--against", "w.npy")
    assert "even-high offset 7 (certain)" in result.out
    assert "no layout of convert subtracts 7: pack the weights again" in result.err


def test_a_forgotten_offset_is_suspected(folder: Path, qcs4w: CommandLine) -> None:
    """Where nothing fits and bytes are left over, the offset is what to look at."""
    Path("late.bin").write_bytes(b"x" * 123 + Path("low.bin").read_bytes())
    result = qcs4w("inspect", "late.bin", "--against", "w.npy")
    assert result.code == 1
    assert "the file has 123 bytes more than 24 × 96 takes: look at --offset" in result.out
    assert qcs4w("inspect", "late.bin", "--offset", "123", "--against", "w.npy").code == 0


def test_scales_that_are_not_known_are_not_shown(folder: Path, qcs4w: CommandLine) -> None:
    """A dump of raw bytes without scales has codes and no values."""
    args = ["inspect", "low.bin", "--shape", "24,96", "--rows", "0:1", "--cols", "0:4"]
    result = qcs4w(*args)
    assert "scale not known" in result.out
    assert "value" not in result.out
    assert qcs4w(*args, "--json").document["dump"]["rows"][0]["values"] is None


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts bytes as Linux does")
def test_a_dump_reads_its_rows_only(folder: Path, qcs4w: CommandLine) -> None:
    """Two rows of a file of 20 GB are two rows, and so is a weight of which only some rows are looked at."""
    with Path("big.bin").open("wb") as file:
        file.truncate(200_000 * 100_000)
    before = bytes_read()
    assert qcs4w("inspect", "big.bin", "--shape", "200000,200000", "--rows", "0:2", "--cols", "0:4").code == 0
    assert bytes_read() - before < 50 << 20


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
    "other shape": (["low.bin", "--shape", "25,96", "--against", "w.npy"], "[24, 96], --shape says [25, 96]"),
    "huge shape": (["low.bin", "--shape", "3000000000,3000000000"], "look at --shape and --offset"),
    "no rows": (["low.bin", "--shape", "0,96"], "the shape is 0,96"),
    "nothing there": (["low.bin", "--offset", "99999"], "there are no bytes from there on"),
    "dtype of nothing": (["low.bin", "--scales-dtype", "f16", "--against", "w.npy"], "say it with --scales FILE"),
    "a dump as well": (["low.bin", "--hex", "--against", "w.npy"], "--against and --output name a layout"),
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
