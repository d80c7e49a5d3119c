"""verify --save-failing: what is saved is small, complete, and fails again by its own command."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cases import edited
from command_line import CommandLine, Result, process

from qcs4w_packer import PackedLinear, load_packed, pack_weight, save_container

ROOT = Path(__file__).parent
KERNELS = ROOT / "kernels"
MINE = ROOT.parent / "examples" / "my_kernel.wgsl"

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _adapter(gpu: object) -> None:
    """These tests need an adapter."""


def repeat(folder: Path) -> list[Result]:
    """Run the commands of a folder."""
    lines = (folder / "reproduce.sh").read_text().splitlines()
    commands = [shlex.split(line) for line in lines if line and not line.startswith(("#", "cd "))]
    assert all(words[:2] == ["qcs4w", "verify"] for words in commands)
    return [process(*words[1:], cwd=folder) for words in commands]


def packed_files(folder: Path, rng: np.random.Generator, shape: tuple[int, int]) -> Path:
    """Write a file with two tensors."""
    path = folder / "w.safetensors"
    save_container(path, {f"{name}.weight": pack_weight(rng.standard_normal(shape, np.float32)) for name in "ab"})
    return path


@pytest.mark.parametrize(
    ("edit", "shape"),
    [
        (("pair >> 4u", "pair >> 3u"), (1, 1)),
        (("* scales[n]", "* scales[n] * 1.5"), (1, 1)),
        (("let k = 2u * byte;", "let k = 2u * byte; if (k >= 32u) { continue; }"), (1, 64)),
        (("y[index] = sum", "y[index] = f32(n / 5u) + sum"), (37, 1)),
    ],
    ids=["codes", "scales", "from column 32", "from row 5"],
)
def test_a_kernels_failure_is_saved_small(
    edit: tuple[str, str], shape: tuple[int, int], tmp_path: Path, rng: np.random.Generator, qcs4w: CommandLine
) -> None:
    """Of a kernel's fault there remain as few rows and columns as it needs, and it fails again as saved."""
    path, kernel, folder = packed_files(tmp_path, rng, (37, 67)), tmp_path / "mine.wgsl", tmp_path / "failing"
    kernel.write_text(edited(MINE.read_text(), edit, ("//! grid = ceil(M * N / WORKGROUP)\n", "")))
    options = ["--kernel", kernel, "--grid", "ceil(M * N / WORKGROUP)", "--define", "WORKGROUP=32"]
    result = qcs4w("verify", path, *options, "--save-failing", folder)
    assert result.code == 1
    assert f"wrote {folder}" in result.err
    assert sorted(file.name for file in folder.iterdir()) == sorted(
        ["kernel.wgsl", "reproduce.sh"]
        + [f"00{i}.{name}" for i in (0, 1) for name in ("safetensors", "x.npy", "expected.npy", "got.npy")]
    )
    packed = load_packed(folder / "000.safetensors")
    assert (packed.out_features, packed.in_features) == shape
    x, expected, got = (np.load(folder / f"000.{name}.npy") for name in ("x", "expected", "got"))
    assert x.shape == (1, shape[1])
    assert expected.shape == got.shape == (1, shape[0])
    assert not np.array_equal(expected.astype(np.float32), got)
    assert [each.code for each in repeat(folder)] == [1, 1]


def test_a_failure_of_the_sweep_is_saved_too(tmp_path: Path, qcs4w: CommandLine) -> None:
    """Of the shape at which a sweep ends, the smallest part that fails is saved, and fails again."""
    kernel, folder = tmp_path / "mine.wgsl", tmp_path / "failing"
    kernel.write_text(
        edited(MINE.read_text(), ("let k = 2u * byte;", "let k = 2u * byte; if (k >= 32u) { continue; }"))
    )
    result = qcs4w("verify", "--sweep", "--kernel", kernel, "--save-failing", folder)
    assert result.code == 1
    assert f"wrote {folder}" in result.err
    packed = load_packed(folder / "000.safetensors")
    assert (packed.out_features, packed.in_features) == (1, 64)
    assert "# M 1, N 2, K 64, y[" in (folder / "reproduce.sh").read_text()
    assert [each.code for each in repeat(folder)] == [1]


def test_the_script_runs_from_anywhere(tmp_path: Path, rng: np.random.Generator, qcs4w: CommandLine) -> None:
    """What is printed repeats the failures, whatever folder one is in and whatever theirs is called."""
    path, kernel, folder = packed_files(tmp_path, rng, (5, 7)), tmp_path / "mine.wgsl", tmp_path / "it's failing"
    kernel.write_text(edited(MINE.read_text(), ("pair >> 4u", "pair >> 3u")))
    result = qcs4w("verify", path, "--kernel", kernel, "--save-failing", folder)
    printed = result.err.split("to repeat it: ")[1].splitlines()[0]
    (tmp_path / "qcs4w").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m qcs4w_cli "$@"\n')
    (tmp_path / "qcs4w").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(["sh", "-c", printed], cwd="/", env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("FAIL  weight") == 2


def test_one_wrong_code_is_saved(tmp_path: Path, rng: np.random.Generator, qcs4w: CommandLine) -> None:
    """A fault that integers alone show is saved with integers, and scales of 1."""
    path, folder = tmp_path / "w.safetensors", tmp_path / "failing"
    save_container(path, {"fc.weight": pack_weight(rng.standard_normal((3, 8192), np.float32))})
    arguments = ("verify", path, "--kernel", KERNELS / "one_wrong_code.wgsl", "--save-failing", folder)
    assert qcs4w(*arguments).code == 1
    packed = load_packed(folder / "000.safetensors")
    assert (packed.out_features, packed.in_features, packed.scales.tolist()) == (1, 8192, [1.0])
    assert np.abs(np.load(folder / "000.got.npy") - np.load(folder / "000.expected.npy")).max() >= 1
    assert [each.code for each in repeat(folder)] == [1]


def test_a_foreign_output_is_saved(tmp_path: Path, rng: np.random.Generator, qcs4w: CommandLine) -> None:
    """Of a y from elsewhere its worst element is saved, with its row of x and of weights."""
    path, folder = tmp_path / "w.safetensors", tmp_path / "failing"
    packed = pack_weight(rng.standard_normal((9, 33), np.float32))
    save_container(path, {"fc.weight": packed})
    x = rng.standard_normal((5, 33), np.float32)
    y = (x @ (packed.codes() * packed.scales[:, None]).T).astype(np.float32)
    y[3, 7] += 1
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    arguments = ("verify", path, "-x", tmp_path / "x.npy", "-y", tmp_path / "y.npy", "--save-failing", folder)
    assert qcs4w(*arguments).code == 1
    assert np.load(folder / "000.y.npy") == y[3, 7]
    assert np.array_equal(np.load(folder / "000.x.npy"), x[3:4])
    assert "fc.weight, y[3, 7]" in (folder / "reproduce.sh").read_text()
    assert [each.code for each in repeat(folder)] == [1]


def test_a_row_that_does_not_fit_its_source_is_saved(
    tmp_path: Path, rng: np.random.Generator, qcs4w: CommandLine
) -> None:
    """Of bytes that are not those of their source the first such row is saved, with its floats."""
    path, folder = tmp_path / "w.safetensors", tmp_path / "failing"
    weight = rng.standard_normal((9, 12), np.float32)
    packed = pack_weight(weight)
    data = packed.packed.copy()
    data[4, 2] ^= 0x10
    save_container(path, {"weight": PackedLinear(data, packed.scales, 12)})
    np.save(tmp_path / "w.npy", weight)
    assert qcs4w("verify", path, "--source", tmp_path / "w.npy", "--save-failing", folder).code == 1
    assert np.array_equal(np.load(folder / "000.source.npy"), weight[4:5])
    assert [each.code for each in repeat(folder)] == [1]


def test_nothing_is_written_where_nothing_fails(tmp_path: Path, rng: np.random.Generator, qcs4w: CommandLine) -> None:
    """Without a failure there is no folder."""
    path = packed_files(tmp_path, rng, (5, 7))
    assert qcs4w("verify", path, "--save-failing", tmp_path / "failing").code == 0
    assert not (tmp_path / "failing").exists()


def test_a_folder_is_never_lost(tmp_path: Path, rng: np.random.Generator, qcs4w: CommandLine) -> None:
    """A folder that is there is refused; --force replaces one of ours, and no other."""
    path, folder, kernel = packed_files(tmp_path, rng, (5, 7)), tmp_path / "failing", tmp_path / "mine.wgsl"
    kernel.write_text(edited(MINE.read_text(), ("pair >> 4u", "pair >> 3u")))
    arguments = ("verify", path, "--kernel", kernel, "--save-failing", folder)
    assert qcs4w(*arguments).code == 1
    assert "exists already" in qcs4w.refused(*arguments)
    assert qcs4w(*arguments, "--force").code == 1
    (folder / "mine.txt").write_text("mine")
    assert qcs4w(*arguments, "--force").code == 2
    assert (folder / "mine.txt").read_text() == "mine"
