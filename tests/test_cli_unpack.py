"""The unpack command."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from command_line import CommandLine, child_process, on_a_terminal, process
from making import leftovers, poke
from safetensors.numpy import load_file

from qcs4w_packer import PackedLinear, load_packed, save_container


def test_what_is_shown(packed_file: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """A table with shapes, sizes and the cost of rounding, a line of summary, and a whole checkpoint."""
    result = qcs4w("unpack", packed_file, "-o", tmp_path / "out.safetensors")
    assert result.code == 0
    assert result.err.splitlines() == [
        "1/2 layers.0.fc.weight 12 × 33 F32 → 1.5 KiB",
        "2/2 layers.1.fc.weight 8 × 12 F32 → 384 B",
    ]
    assert "layers.0.fc.weight  12 × 33  F32" in result.out
    assert "none" in result.out
    assert "unpacked 2 tensors, 3 others copied; 2.8 KiB" in result.out
    assert result.out.endswith(f"wrote {tmp_path / 'out.safetensors'}\n")
    stored = load_file(tmp_path / "out.safetensors")
    source = load_file(packed_file.with_name("model.safetensors"))
    assert stored.keys() == source.keys()
    weight = load_packed(packed_file, "layers.0.fc")
    np.testing.assert_array_equal(stored["layers.0.fc.weight"], weight.codes() * weight.scales[:, None])
    np.testing.assert_array_equal(stored["embed_tokens.weight"], source["embed_tokens.weight"])


def test_the_document(packed_file: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """--json has the same, checked against the schema; rounding to the source's dtype has a price."""
    out = tmp_path / "out.safetensors"
    document = qcs4w("unpack", packed_file, "-o", out, "--dtype", "source", "--json").document
    assert (document["from"], document["dtype"], document["files"]) == ("qcs4w", "source", ["out.safetensors"])
    assert document["file_nbytes"] == [document["output_nbytes"]] == [out.stat().st_size]
    assert document["elapsed_ms"] > 0
    first, second = document["tensors"]
    assert (first["tensor"], first["dtype"], first["shape"]) == ("layers.0.fc.weight", "F32", [12, 33])
    assert (first["rounding_error"], first["vanished"], first["file"]) == (0, 0, "out.safetensors")
    assert second["dtype"] == "F16"
    assert 0 < second["rounding_error"] < 2**-11
    assert load_file(out)["layers.1.fc.weight"].dtype == np.float16


def test_a_dry_run(packed_file: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """It needs no output, writes none, and knows no rounding yet."""
    before = sorted(tmp_path.iterdir())
    result = qcs4w("unpack", packed_file, "--dry-run", "--exclude", "layers.1.*")
    assert result.code == 0
    assert "would unpack 1 tensor" in result.out
    assert "dry run, nothing was written" in result.out
    assert "Warning: not in the output: packed tensor 'layers.1.fc.weight' (not chosen)" in result.err
    document = qcs4w("unpack", packed_file, "-n", "--json").document
    assert (document["output"], document["files"], document["tensors"][0]["rounding_error"]) == (None, [], None)
    assert sorted(tmp_path.iterdir()) == before


def test_values_that_vanish_are_a_warning(tmp_path: Path, qcs4w: CommandLine) -> None:
    """What float16 makes 0 is said."""
    path = tmp_path / "a.safetensors"
    save_container(path, {"w": PackedLinear(np.array([[0x19]], np.uint8), np.array([2.0**-28], np.float32), 2)})
    result = qcs4w("unpack", path, "-o", tmp_path / "out.safetensors", "--dtype", "f16")
    assert result.code == 0
    assert "Warning: 2 values became 0 in f16" in result.err


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        ([], "there is no output", "-o OUT,"),
        (["-o", "out"], "out: the floats of one file are written to a .safetensors file", "-o out.safetensors"),
        (["-o", "out.safetensors", "--tensor", "layers.9.fc"], "no packed tensor 'layers.9.fc'", "did you mean"),
        (["-o", "out.safetensors", "--include", "nothing*"], "--include 'nothing*' matches no packed tensor", ""),
        (["-o", "out.safetensors", "--dtype", "fp8"], "Invalid value for '--dtype'", "qcs4w unpack --help"),
        (["-o", "nowhere/out.safetensors"], "there is no folder", ""),
    ],
)
def test_what_is_refused(
    args: list[str],
    message: str,
    hint: str,
    packed_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    qcs4w: CommandLine,
) -> None:
    """Each fault is one error that says how to mend it, and leaves nothing."""
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    error = qcs4w.refused("unpack", packed_file, *args)
    assert message in error
    assert hint in error
    assert sorted(tmp_path.iterdir()) == before


def test_floats_are_no_packed_file(checkpoint: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """A file that was never packed is refused by name."""
    assert "is not a qcs4w container" in qcs4w.refused("unpack", checkpoint, "-o", tmp_path / "out.safetensors")


def test_damage_is_found(packed_file: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """A changed byte is an error by tensor, in text and JSON, and nothing is written."""
    poke(packed_file, packed_file.stat().st_size - 3, b"\x55")
    error = qcs4w.refused("unpack", packed_file, "-o", tmp_path / "out.safetensors")
    assert "have sha256" in error
    document = qcs4w("unpack", packed_file, "-o", tmp_path / "out.safetensors", "--json").document
    assert document["error"]["code"] == "digest"
    assert not leftovers(tmp_path)


def test_an_output_needs_force(packed_file: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """What is there stays, until --force."""
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"old")
    assert "exists already" in qcs4w.refused("unpack", packed_file, "-o", out)
    assert out.read_bytes() == b"old"
    assert qcs4w("unpack", packed_file, "-o", out, "--force").code == 0


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    """Interrupted in the middle: exit code 130, no output and nothing beside it."""
    path = tmp_path / "a.safetensors"
    packed = PackedLinear(np.zeros((6000, 8000), np.uint8), np.ones(6000, np.float32), 16_000)
    save_container(path, {"w": packed})
    with child_process("unpack", path, "-o", tmp_path / "out.safetensors") as child:
        give_up = time.monotonic() + 60
        while not leftovers(tmp_path):
            assert child.poll() is None
            assert time.monotonic() < give_up
            time.sleep(0.001)
        os.kill(child.pid, signal.SIGINT)
        assert child.wait(60) == 130
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.safetensors"]


def test_a_process_of_its_own(packed_file: Path, tmp_path: Path) -> None:
    """The command works from a shell, and its help has an example."""
    result = process("unpack", packed_file, "-o", tmp_path / "out.safetensors")
    assert result.code == 0, result
    assert "Example:" in process("unpack", "--help").out


def test_bars_on_a_terminal(packed_file: Path, tmp_path: Path) -> None:
    """A terminal gets one bar for all bytes and one for the tensor in hand; --quiet gets none."""
    drawn = on_a_terminal("unpack", packed_file, "-o", tmp_path / "a.safetensors")
    assert "unpacking" in drawn
    assert "2/2" in drawn
    assert drawn.count("\x1b[?25l") == drawn.count("\x1b[?25h") == 1
    assert "\x1b[?25l" not in on_a_terminal("unpack", packed_file, "-o", tmp_path / "b.safetensors", "-q")


def test_many_tensors_are_told_by_file_and_kind(tmp_path: Path, qcs4w: CommandLine) -> None:
    """A large checkpoint has a row for each file and each kind of name, in the dry run too; -v has every tensor."""
    one = PackedLinear(np.full((3, 2), 0x9A, np.uint8), np.ones(3, np.float32), 4)
    save_container(tmp_path / "a.safetensors", {f"layers.{i}.fc.weight": one for i in range(50)})
    arguments = ("unpack", tmp_path / "a.safetensors", "-o", tmp_path / "out", "--max-shard-size", "1500")
    dry = qcs4w(*arguments, "-n")
    assert "layers.*.fc  50  3 × 4  F32" in dry.out
    assert "KiB of disk, " in dry.err
    result = qcs4w(*arguments)
    assert "model-00001-of-00002.safetensors        31" in result.out
    assert "layers.*.fc  50  3 × 4  F32    2.3 KiB      none" in result.out
    assert f"wrote {tmp_path / 'out'} (2 weight files)" in result.out
    assert "50/50 layers.49.fc.weight 3 × 4 F32 → 48 B, model-00002-of-00002.safetensors" in result.err
    assert "layers.17.fc.weight" in qcs4w(*arguments, "-n", "-v").out
    left = qcs4w(*arguments, "-n", "--tensor", "layers.1.fc").err
    assert "not in the output: packed tensor 'layers.*.fc.weight' (not chosen) (49 times)" in left
