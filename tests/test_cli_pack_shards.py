"""pack --shard: jobs of an array that make one output together."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from command_line import CommandLine
from making import leftovers, save_folder

from qcs4w_packer.parts import Part


@pytest.fixture
def source(tmp_path: Path, rng: np.random.Generator) -> Path:
    """A checkpoint of five shards."""
    arrays = {f"layers.{i}.fc.weight": rng.standard_normal((40 + 90 * i, 130), np.float32) for i in range(10)}
    save_folder(tmp_path / "source", arrays)
    return tmp_path / "source"


def content(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file of an output."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def start(source: Path, output: Path, part: str) -> "subprocess.Popen[bytes]":
    """Start one job, in a process of its own."""
    command = [sys.executable, "-m", "qcs4w_cli", "pack", str(source), "-o", str(output), "--shard", part]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_parts_hold_each_item_once_and_are_even() -> None:
    """Every item is in one part, in order, and no part has much more than its share."""
    sizes = [7, 1, 9, 9, 2, 30, 4, 4, 0, 11]
    for count in (1, 2, 3, 10, 20):
        parts = [Part(index, count).of(range(len(sizes)), sizes) for index in range(count)]
        assert sorted(item for part in parts for item in part) == list(range(len(sizes)))
        assert all(list(part) == sorted(part) for part in parts)
        most = max(sum(sizes[item] for item in part) for part in parts)
        assert most <= max(30, sum(sizes) / count * 4 / 3)


def test_jobs_one_after_the_other_make_the_unbroken_output(source: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """The output appears with the last part, byte for byte that of one run; nothing else is left."""
    assert qcs4w("pack", source, "-o", tmp_path / "whole").code == 0
    made: list[str] = []
    for part in ("3/3", "1/3", "2/3"):
        assert not (tmp_path / "out").exists()
        said = qcs4w("pack", source, "-o", tmp_path / "out", "--shard", part, "--json").document
        assert said["complete"] is (part == "2/3")
        assert said["part"]["count"] == 3
        assert {tensor["shard"] for tensor in said["packed"]} == set(said["part"]["files"])
        made += said["part"]["files"]
    assert len(made) == len(set(made)) == 5
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert leftovers(tmp_path) == []


def test_jobs_at_once_make_the_unbroken_output(source: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """Four processes started together, none waits for another, and the last to end gives the output its place."""
    assert qcs4w("pack", source, "-o", tmp_path / "whole").code == 0
    jobs = [start(source, tmp_path / "out", f"{index}/4") for index in (1, 2, 3, 4)]
    said = [job.communicate(timeout=120)[0].decode() for job in jobs]
    assert [job.returncode for job in jobs] == [0] * 4, said
    assert sum("appears when all are there" in text for text in said) == 3
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert leftovers(tmp_path) == []


def test_a_killed_job_is_given_again(source: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """After kill -9 of one job the others end well, and the same job again completes the output."""
    assert qcs4w("pack", source, "-o", tmp_path / "whole").code == 0
    job = start(source, tmp_path / "out", "1/2")
    while not list(tmp_path.glob(".out.qcs4w/*.part")) and job.poll() is None:
        time.sleep(0.001)
    job.send_signal(signal.SIGKILL)
    job.communicate(timeout=60)
    assert qcs4w("pack", source, "-o", tmp_path / "out", "--shard", "2/2").code == 0
    assert not (tmp_path / "out").exists()
    assert f"wrote {tmp_path / 'out'}" in qcs4w("pack", source, "-o", tmp_path / "out", "--shard", "1/2").out
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_job_with_nothing_to_do_says_so(checkpoint: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """A file cannot be shared: the second job has nothing to do, which is no error, and touches nothing."""
    result = qcs4w("pack", checkpoint, "-o", tmp_path / "out.safetensors", "--shard", "2/2")
    assert result.code == 0
    assert "made 0 of 1 weight file (part 2/2)" in result.out
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("part", ["0/2", "3/2", "-1/2", "x/y", "1", "1/0", "1/2/3"])
def test_parts_that_are_none(part: str, checkpoint: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """A part outside 1 to n is refused."""
    assert "is not i/n with i from 1 to n" in qcs4w.refused(
        "pack", checkpoint, "-o", tmp_path / "out.safetensors", f"--shard={part}"
    )


def test_one_way_to_share(checkpoint: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """--ray and --shard exclude each other."""
    assert "two ways to share" in qcs4w.refused(
        "pack", checkpoint, "-o", tmp_path / "out.safetensors", "--shard", "1/2", "--ray"
    )
