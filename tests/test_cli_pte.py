"""The commands on .pte files."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import CommandLine, process
from conftest import GOLDEN
from pte_making import Pte, tensor
from safetensors.numpy import load_file

FOLDER = GOLDEN / "pte"
LISTING: dict[str, list[dict[str, Any]]] = json.loads((FOLDER / "listing.json").read_text())


def damage(name: str, tmp_path: Path, what: str) -> Path:
    """Copy a file with one byte of its first weight or scales changed."""
    path = Path(shutil.copy(FOLDER / name, tmp_path))
    data = bytearray(path.read_bytes())
    data[LISTING[name][0][what]["offset"]] ^= 0x10
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", LISTING)
def test_every_call_is_in_the_json(name: str, qcs4w: CommandLine) -> None:
    """The JSON lists every call with the places and digests that ExecuTorch's own reader finds."""
    document = qcs4w("inspect", FOLDER / name, "--json").document
    assert (document["format"], document["container"], document["problems"]) == ("pte", False, [])
    assert document["nbytes"] == (FOLDER / name).stat().st_size
    assert [entry["tensor"] for entry in document["tensors"]] == [call["tensor"] for call in document["calls"]]
    for call, said in zip(document["calls"], LISTING[name], strict=True):
        assert (call["method"], call["delegate"], call["order"]) == (said["method"], said["delegate"], said["order"])
        assert call["rows"] * call["in_features"] == np.prod(said["x_dims"])
        assert call["scales"]["dtype"] == said["scale_dtype"]
        for stored, place in ((call["weight"], said["weight"]), (call["scales"], said["scales"])):
            assert Path(stored["file"]) == FOLDER / place["file"]
            assert (stored["file_offset"], stored["nbytes"]) == (place["offset"], place["nbytes"])
            assert (stored["key"], stored["sha256"]) == (place["key"], place["sha256"])
            assert stored["key_ok"] is (None if place["key"] is None else True)


def test_the_table(qcs4w: CommandLine) -> None:
    """Each call is a line with M, N, K, delegate, place in the chain, offsets and digest."""
    result = qcs4w("inspect", FOLDER / "two_layer_bias.pte")
    assert (result.code, result.err) == (0, "")
    head, _, titles, *lines = result.out.splitlines()
    assert head.endswith("two_layer_bias.pte: ExecuTorch program, 4.7 KiB; 2 calls of et_vk.linear_qcs4w in 1 method")
    expected = "linear M max N K delegate call scales weight at scales at digest sha256 notes"
    assert titles.split() == expected.split()
    first, second = (line.split() for line in lines)
    assert first[:-1] == ["forward.linear_0", "4", "24", "32", "0", "2", "F32", "4,352", "4,096", "ok"]
    assert second[:-1] == ["forward.linear_1", "4", "8", "24", "0", "5", "F32", "4,736", "4,224", "ok"]
    for line, said in zip((first, second), LISTING["two_layer_bias.pte"], strict=True):
        assert line[-1] == said["weight"]["sha256"][:12]
        assert said["scales"]["sha256"] in qcs4w("inspect", FOLDER / "two_layer_bias.pte", "-v").out


def test_what_the_runtime_refuses(qcs4w: CommandLine) -> None:
    """Why ExecuTorch's WebGPU runtime would refuse a call stands in its notes; that is no fault of the file."""
    for name, words in (
        ("unaligned_5x6.pte", "WebGPU runtime refuses it: N·ceil(K/2) = 5·3 = 15 is no multiple of 4"),
        ("f16_scales.pte", "refuses it: the scales are F16; x is F16, y is F16"),
    ):
        result = qcs4w("inspect", FOLDER / name)
        assert result.code == 0
        assert words in result.out
    document = qcs4w("inspect", FOLDER / "f16_model.pte", "--json").document
    assert [found["fault"] for found in document["calls"][0]["refusals"]] == ["x is F16, y is F16"]


def test_check(qcs4w: CommandLine) -> None:
    """The check command refuses what inspect says that the runtime refuses, for the file's own M."""
    for name, rules in (
        ("one_16x32.pte", []),
        ("unaligned.pte", ["part-words"]),
        ("f16_scales.pte", ["scale-dtype", "activation-dtype"]),
        ("f16_model.pte", ["activation-dtype"]),
    ):
        document = qcs4w("check", FOLDER / name, "--json").document
        (result,) = document["results"]
        assert [found["rule"] for found in result["refusals"]] == rules
        assert document["exit_code"] == (1 if rules else 0)
        assert result["rows"] == qcs4w("inspect", FOLDER / name, "--json").document["calls"][0]["rows"]


def test_diff_with_what_pack_makes(tmp_path: Path, qcs4w: CommandLine) -> None:
    """A program and the container that pack makes of the same weight hold the same bytes."""
    tensors = load_file(FOLDER / "tensors.safetensors")
    np.save(tmp_path / "w.npy", tensors["one_16x32/w0"])
    assert qcs4w("pack", tmp_path / "w.npy", "-o", tmp_path / "packed.safetensors").code == 0
    result = qcs4w("diff", FOLDER / "one_16x32.pte", tmp_path / "packed.safetensors")
    assert result.code == 0, result


def test_a_program_without_the_operator(qcs4w: CommandLine) -> None:
    """Inspect says that there is no call; verify and run have nothing to work on, exit code 2."""
    for name in ("int8_linear.pte", "no_delegate.pte"):
        result = qcs4w("inspect", FOLDER / name)
        assert (result.code, len(result.out.splitlines())) == (0, 1)
        assert "0 calls of et_vk.linear_qcs4w" in result.out
        assert qcs4w("inspect", FOLDER / name, "--json").document["calls"] == []


@pytest.mark.parametrize(
    ("name", "what"), [("one_16x32.pte", "weight"), ("one_16x32.pte", "scales"), ("f16_scales.pte", "scales")]
)
def test_bytes_that_are_not_those_of_the_key(name: str, what: str, tmp_path: Path, qcs4w: CommandLine) -> None:
    """A constant that does not have the digest in its key is reported, the call is shown all the same, exit code 1."""
    path = damage(name, tmp_path, what)
    result = qcs4w("inspect", path)
    assert result.code == 1
    assert "MISMATCH" in result.out
    assert f"the {'packed bytes' if what == 'weight' else 'scales'} have sha256" in result.err
    document = qcs4w("inspect", path, "--json").document
    assert document["calls"][0][what]["key_ok"] is False
    assert len(document["problems"]) == 1


def test_a_scale_that_is_not_finite(tmp_path: Path, qcs4w: CommandLine) -> None:
    """A NaN among the scales is a problem of the file."""
    path = tmp_path / "a.pte"
    path.write_bytes(Pte(scales=np.full(8, np.nan, "<f4").tobytes()).to_bytes())
    result = qcs4w("inspect", path)
    assert result.code == 1
    assert "tensor 'forward.linear_0': the scale of row 0 is nan" in result.err


def test_odd_names_and_unknown_rows(tmp_path: Path, qcs4w: CommandLine) -> None:
    """A method's name cannot steer the terminal, and an M that nobody knows is a question mark."""
    pte = Pte()
    pte.graph[2][0] = tensor([])
    pte.plans = [{0: "\x1b[31mEVIL\npass", 7: [{0: "\x1b]0;B\x07", 1: {0: ("b", 1)}}]}]
    path = tmp_path / "a.pte"
    path.write_bytes(pte.to_bytes())
    result = qcs4w("inspect", path, "-v")
    assert result.code == 0
    assert "\x1b" not in result.out + result.err
    assert len(result.out.splitlines()) == 4
    assert result.out.splitlines()[3].split()[1] == "?"
    assert qcs4w("inspect", path, "--json").document["calls"][0]["rows"] is None


@pytest.mark.parametrize("name", ["two_delegates.pte", "external.pte", "inline_delegate.pte", "inline_constants.pte"])
def test_dumps_have_the_file_s_own_offsets(name: str, qcs4w: CommandLine) -> None:
    """A dump's bytes lie at its offsets in the file, or in the data file that it names."""
    for index, said in enumerate(LISTING[name]):
        arguments = ("inspect", FOLDER / name, "--tensor", f"forward.linear_{index}", "--rows", "1:3")
        document = qcs4w(*arguments, "--json").document
        data = Path(document["calls"][0]["weight"]["file"]).read_bytes()
        width = said["weight_dims"][1]
        for row in document["dump"]["rows"]:
            shown = bytes.fromhex("".join(row["bytes"]))
            assert row["file_offset"] == said["weight"]["offset"] + row["row"] * width
            assert data[row["file_offset"] :][: len(shown)] == shown
        noted = f"the offsets are in {FOLDER / said['weight']['file']}" if said["weight"]["file"] != name else ""
        assert qcs4w(*arguments, "--hex").err.strip() == noted


def test_unknown_names(qcs4w: CommandLine) -> None:
    """A name that no call has is an error with a hint."""
    assert "forward.linear_1" in qcs4w.refused("inspect", FOLDER / "two_delegates.pte", "--tensor", "forward.linear_9")


def test_files_that_are_not_sound(tmp_path: Path, qcs4w: CommandLine) -> None:
    """A truncated program, or one without its data file, is one error, exit code 2."""
    path = tmp_path / "cut.pte"
    path.write_bytes((FOLDER / "one_16x32.pte").read_bytes()[:-1])
    assert "not a sound .pte file: by its header the program ends at byte" in qcs4w.refused("inspect", path)
    shutil.copy(FOLDER / "external.pte", tmp_path)
    assert "put the .ptd files" in qcs4w.refused("inspect", tmp_path / "external.pte")
    document = qcs4w("inspect", tmp_path / "external.pte", "--json").document
    assert document["error"]["code"] == "source"


def test_content_decides_not_the_name(tmp_path: Path, qcs4w: CommandLine) -> None:
    """A program is known by its content, whatever it is called."""
    path = Path(shutil.copy(FOLDER / "one_16x32.pte", tmp_path / "model.bin"))
    assert qcs4w("inspect", path, "--json").document["format"] == "pte"


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, calls in LISTING.items() if calls])
def test_verify(name: str, qcs4w: CommandLine, gpu: object) -> None:
    """Each call of a program is run on the GPU and passes, also those that ExecuTorch's own runtime refuses."""
    document = qcs4w("verify", FOLDER / name, "--json").document
    assert document["exit_code"] == 0
    assert [result["status"] for result in document["results"]] == ["pass"] * len(LISTING[name])


@pytest.mark.gpu
def test_verify_refuses_damaged_constants(tmp_path: Path, qcs4w: CommandLine, gpu: object) -> None:
    """A weight or scales that do not have the digest of their key are not verified: exit code 2."""
    for name, what in (("one_16x32.pte", "weight"), ("f16_scales.pte", "scales")):
        document = qcs4w("verify", damage(name, tmp_path, what), "--json").document
        assert document["exit_code"] == 2
        assert document["results"][0]["error"]["code"] == "digest"


@pytest.mark.gpu
def test_verify_of_a_program_without_the_operator(qcs4w: CommandLine, gpu: object) -> None:
    """A program with nothing to verify is an error, not a success."""
    result = qcs4w("verify", FOLDER / "int8_linear.pte")
    assert result.code == 2
    assert "without a call of et_vk.linear_qcs4w" in result.err


@pytest.mark.gpu
def test_run_gives_what_executorch_gave(tmp_path: Path, qcs4w: CommandLine, gpu: object) -> None:
    """The output of a program's only linear is that of ExecuTorch's converted module, for its own input."""
    tensors = load_file(FOLDER / "tensors.safetensors")
    for name in ("one_16x32", "unaligned_5x6", "batch3d_12x20", "dynamic_m"):
        np.save(tmp_path / "x.npy", tensors[f"{name}/x0"])
        out = tmp_path / f"{name}.npy"
        assert qcs4w("run", FOLDER / f"{name}.pte", "-x", tmp_path / "x.npy", "-o", out).code == 0
        np.testing.assert_allclose(np.load(out), tensors[f"{name}/y0"], rtol=0, atol=2e-5)


def test_colour_on_a_terminal_only() -> None:
    """In a pipe the table is plain text."""
    result = process("inspect", FOLDER / "two_methods.pte")
    assert result.code == 0
    assert "\x1b" not in result.out
    assert "prefill.linear_1" in result.out


def test_a_header_that_lies(tmp_path: Path, qcs4w: CommandLine) -> None:
    """Sizes beyond the file are one error, found without reading what is not there."""
    path = Path(shutil.copy(FOLDER / "one_16x32.pte", tmp_path))
    data = bytearray(path.read_bytes())
    struct.pack_into("<Q", data, 32, 2**62)
    path.write_bytes(data)
    assert "4,611," in qcs4w.refused("inspect", path)
