"""The check command."""

from pathlib import Path

import numpy as np
import pytest
from command_line import CommandLine

from qcs4w_packer import PackedLinear, save_container
from qcs4w_packer.nibbles import packed_width
from qcs4w_packer.targets import TARGETS


def container(path: Path, **shapes: tuple[int, int]) -> Path:
    """A container of weights of these shapes."""
    save_container(
        path,
        {
            name: PackedLinear(
                np.full((rows, packed_width(columns)), 0x88, np.uint8), np.ones(rows, np.float32), columns
            )
            for name, (rows, columns) in shapes.items()
        },
    )
    return path


def test_all_is_taken(tmp_path: Path, qcs4w: CommandLine) -> None:
    """Shapes that the runtime takes: ok, exit code 0."""
    result = qcs4w("check", container(tmp_path / "a.safetensors", a=(4, 6), b=(8, 16)), "--target", "executorch-webgpu")
    assert result.code == 0
    assert [line.split()[:2] for line in result.out.splitlines()[:2]] == [["ok", "a"], ["ok", "b"]]
    assert "2 tensors: 2 taken, 0 refused" in result.out


def test_each_refusal_says_why_and_how_to_mend(tmp_path: Path, qcs4w: CommandLine) -> None:
    """An odd K and bytes that fill no word are refused with figures and the N and K that would do; exit code 1."""
    path = container(tmp_path / "a.safetensors", good=(4, 6), odd=(4, 7), words=(3, 10))
    result = qcs4w("check", path)
    assert result.code == 1
    for words in ("K = 7 is odd", "K = 8", "N·ceil(K/2) = 3·5 = 15 is no multiple of 4", "N = 4", "1 taken, 2 refused"):
        assert words in result.out
    document = qcs4w("check", path, "--json").document
    assert document["summary"] == {"ok": 1, "refused": 2, "error": 0}
    assert [[r["rule"] for r in t["refusals"]] for t in document["results"]] == [[], ["odd-columns"], ["part-words"]]
    assert qcs4w("check", path, "--tensor", "good").code == 0


def test_sizes_are_held_against_the_device(tmp_path: Path, qcs4w: CommandLine) -> None:
    """--max-binding and --rows say what the device binds and what is run; both targets mind."""
    path = container(tmp_path / "a.safetensors", a=(64, 64))
    for target in TARGETS:
        assert qcs4w("check", path, "--target", target, "--max-binding", "2KiB").code == 0
        result = qcs4w("check", path, "--target", target, "--max-binding", "2047")
        assert result.code == 1
        assert "the packed weight takes 2,048 bytes" in result.out
        result = qcs4w("check", path, "--target", target, "--max-binding", "2KiB", "--rows", "9")
        assert result.code == 1
        assert "x for M = 9 takes 2,304 bytes, y for M = 9 takes 2,304 bytes; a binding has at most 2,048" in result.out


def test_the_other_target_takes_any_shape(tmp_path: Path, qcs4w: CommandLine) -> None:
    """What is ExecuTorch's own does not hold for any host."""
    assert qcs4w("check", container(tmp_path / "a.safetensors", a=(3, 7)), "--target", "webgpu-default").code == 0


def test_the_rules_are_listed(tmp_path: Path, qcs4w: CommandLine) -> None:
    """-v lists each rule with its reason and its source, and so does the JSON."""
    path = container(tmp_path / "a.safetensors", a=(4, 4))
    out = qcs4w("check", path, "-v").out
    document = qcs4w("check", path, "--json").document
    for rule in TARGETS["executorch-webgpu"].rules:
        assert rule.why in out
        assert rule.source in out
    assert [rule["name"] for rule in document["rules"]] == [r.name for r in TARGETS["executorch-webgpu"].rules]


def test_several_files(tmp_path: Path, checkpoint: Path, qcs4w: CommandLine) -> None:
    """A file that cannot be checked does not stop the others, and its error beats a refusal: exit code 2."""
    good = container(tmp_path / "a.safetensors", a=(4, 4))
    bad = container(tmp_path / "b.safetensors", b=(3, 10))
    result = qcs4w("check", good, checkpoint, bad)
    assert result.code == 2
    assert "is not a qcs4w container" in result.err
    assert "1 taken, 1 refused, 1 could not be checked" in result.out
    document = qcs4w("check", good, checkpoint, bad, "--json").document
    assert [r["status"] for r in document["results"]] == ["ok", "error", "refused"]
    assert qcs4w("check", good, "--tensor", "x").code == 2


def test_raw_bytes_are_checked_by_their_shape(tmp_path: Path, qcs4w: CommandLine) -> None:
    """--shape makes any file a packed linear."""
    (tmp_path / "w.bin").write_bytes(bytes(15))
    assert qcs4w("check", tmp_path / "w.bin", "--shape", "3,10").code == 1


@pytest.mark.parametrize("size", ["0", "12 XB", "-1", "1e6", "", "9" * 20])
def test_what_is_no_size(size: str, tmp_path: Path, qcs4w: CommandLine) -> None:
    """--max-binding takes bytes, KiB, MiB, GiB, and units of a thousand."""
    assert "128MiB" in qcs4w.refused("check", tmp_path / "a.safetensors", "--max-binding", size)
