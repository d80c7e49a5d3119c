"""verify --output: a y from elsewhere, judged where there is no GPU."""

from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import CommandLine
from making import write_safetensors

from qcs4w_gpu import Gpu
from qcs4w_packer import PackedLinear, load_packed, open_packed, save_container


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may open a device."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a GPU was opened")

    monkeypatch.setattr(Gpu, "__init__", refuse)


def answer(path: Path, name: str, x: np.ndarray, *, with_bias: bool = True) -> np.ndarray:
    """Return float32 y as `run` would write it."""
    packed = load_packed(path, name)
    y = x @ (packed.codes().astype(np.float32) * packed.scales[:, None]).T
    with open_packed(path) as container:
        bias = container.bias(container.entry(name)) if with_bias else None
    return (y if bias is None else y + bias).astype(np.float32)


@pytest.fixture
def saved(packed_file: Path, tmp_path: Path, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """x.npz and y.npz for both tensors of the packed file."""
    xs = {f"layers.{i}.fc": rng.standard_normal((2, 3, k), np.float32) for i, k in ((0, 33), (1, 12))}
    ys = {name: answer(packed_file, name, x) for name, x in xs.items()}
    np.savez(tmp_path / "x.npz", **xs)
    np.savez(tmp_path / "y.npz", **ys)
    return ys


@pytest.mark.usefixtures("saved")
def test_a_right_output_passes(packed_file: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """Outputs are paired by name as inputs are; the bias of the file is in them; no adapter is named."""
    result = qcs4w("verify", packed_file, "--input", tmp_path / "x.npz", "--output", tmp_path / "y.npz")
    assert result.code == 0
    assert result.out.count("exact n/a") == 2
    assert result.out.count("F32 output") == 2
    document = qcs4w("verify", packed_file, "-x", tmp_path / "x.npz", "-y", tmp_path / "y.npz", "--json").document
    assert document["engine"] is document["adapter"] is None
    assert [(r["exact"], r["kernel"], r["output_dtype"]) for r in document["results"]] == [(None, None, "F32")] * 2


def test_narrow_outputs(packed_file: Path, saved: dict[str, np.ndarray], tmp_path: Path, qcs4w: CommandLine) -> None:
    """f16 and bf16 outputs get the bound of their own rounding."""
    for dtype, kind in (("F16", torch.float16), ("BF16", torch.bfloat16)):
        tensors = {name: torch.from_numpy(y).to(kind) for name, y in saved.items()}
        raw = {n: (dtype, tuple(t.shape), t.view(torch.int16).numpy().tobytes()) for n, t in tensors.items()}
        write_safetensors(tmp_path / "y.safetensors", raw)
        arguments = ("verify", packed_file, "-x", tmp_path / "x.npz", "-y", tmp_path / "y.safetensors", "--json")
        assert {r["output_dtype"] for r in qcs4w(*arguments).document["results"]} == {dtype}
        assert qcs4w(*arguments).code == 0
        widened = {name: tensor.to(torch.float32).numpy() for name, tensor in tensors.items()}
        np.savez(tmp_path / "wide.npz", **widened)
        assert qcs4w("verify", packed_file, "-x", tmp_path / "x.npz", "-y", tmp_path / "wide.npz").code == 1


def test_a_missing_bias_is_named(
    packed_file: Path, tmp_path: Path, rng: np.random.Generator, qcs4w: CommandLine
) -> None:
    """A y without the file's bias fails and is told so; --no-bias judges it as it is."""
    x = rng.standard_normal((4, 33), np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", answer(packed_file, "layers.0.fc", x, with_bias=False))
    arguments = ("verify", packed_file, "--tensor", "layers.0.fc", "-x", tmp_path / "x.npy", "-y", tmp_path / "y.npy")
    result = qcs4w(*arguments)
    assert result.code == 1
    assert "likely cause: bias missing" in result.out
    assert qcs4w(*arguments, "--no-bias").code == 0


def test_swapped_nibbles_and_nan_are_named(
    packed_file: Path, saved: dict[str, np.ndarray], tmp_path: Path, qcs4w: CommandLine
) -> None:
    """A runtime that reads the nibbles the other way round is told so; NaN is told by name and never passes."""
    packed = load_packed(packed_file, "layers.1.fc.weight")
    other = PackedLinear(packed.packed << 4 | packed.packed >> 4, packed.scales, packed.in_features)
    save_container(tmp_path / "swapped.safetensors", {"layers.1.fc.weight": other})
    arguments = ("-x", tmp_path / "x.npz", "-y", tmp_path / "y.npz")
    result = qcs4w("verify", tmp_path / "swapped.safetensors", *arguments)
    assert result.code == 1
    assert "likely cause: nibbles swapped" in result.out
    saved["layers.1.fc"][0, 0, 0] = np.nan
    np.savez(tmp_path / "y.npz", **saved)
    result = qcs4w("verify", packed_file, *arguments)
    assert result.code == 1
    assert "1 element of y is NaN" in result.out
    assert "= nan, expected" in result.out


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (np.zeros((4, 9), np.float32), "y.npy: the output has shape [4, 9], expected [4, 8]"),
        (np.zeros((8, 4), np.float32), "Hint: save it transposed"),
        (np.zeros((5, 8), np.float32), "the output has shape [5, 8], expected [4, 8]"),
        (np.zeros((8,), np.float32), "the output has shape [8], expected [4, 8]"),
        (np.zeros((4, 8), np.int32), "expected floats"),
        (np.zeros((0, 8), np.float32), "the output has shape [0, 8]"),
        (np.float32(1), "expected floats of shape"),
    ],
    ids=["columns", "turned", "rows", "rank", "dtype", "no rows", "scalar"],
)
def test_a_wrong_output_is_one_error(
    y: np.ndarray, words: str, packed_file: Path, tmp_path: Path, qcs4w: CommandLine
) -> None:
    """An output of the wrong N, rows, rank or dtype could not be judged: exit code 2, with the shapes."""
    np.save(tmp_path / "x.npy", np.ones((4, 12), np.float32))
    np.save(tmp_path / "y.npy", y)
    result = qcs4w("verify", packed_file, "--tensor", "layers.1.fc", "-x", tmp_path / "x.npy", "-y", tmp_path / "y.npy")
    assert result.code == 2
    assert words in result.err
    assert result.err.count("Error:") == 1


@pytest.mark.usefixtures("saved")
def test_bad_files(packed_file: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """Empty and missing files, an output alone, and an output without the tensor are one clear error each."""
    (tmp_path / "empty.npy").write_bytes(b"")
    x, y = tmp_path / "x.npz", tmp_path / "y.npz"
    assert "empty.npy" in qcs4w.refused("verify", packed_file, "-x", x, "-y", tmp_path / "empty.npy")
    assert "missing.npy: does not exist" in qcs4w.refused("verify", packed_file, "-x", x, "-y", "missing.npy")
    assert "--output needs --input" in qcs4w.refused("verify", packed_file, "-y", y)
    assert "no kernel runs" in qcs4w.refused("verify", packed_file, "-x", x, "-y", y, "--kernel", "linear_naive")
    np.savez(tmp_path / "other.npz", **{"layers.1.fc": np.load(y)["layers.1.fc"]})
    result = qcs4w("verify", packed_file, "-x", x, "-y", tmp_path / "other.npz")
    assert result.code == 2
    assert "no array is the output of 'layers.0.fc.weight' (arrays: 'layers.1.fc')" in result.err
    assert "1 passed, 0 failed, 1 could not be checked" in result.out


def test_zeros_that_were_never_written(
    packed_file: Path, saved: dict[str, np.ndarray], tmp_path: Path, qcs4w: CommandLine
) -> None:
    """Where every wrong element is 0, a kernel that did not write them is the first guess; others are no zeros."""
    saved["layers.0.fc"][..., 3:] = 0
    saved["layers.1.fc"][..., 3:] = [[[0]], [[1]]]
    np.savez(tmp_path / "y.npz", **saved)
    options = ("--input", tmp_path / "x.npz", "--output", tmp_path / "y.npz")
    result = qcs4w("verify", packed_file, *options, "--markdown", tmp_path / "r.md")
    assert result.code == 1
    assert result.out.count("bounded: all wrong elements are 0: not written?") == 1
    assert (tmp_path / "r.md").read_text().count("all wrong elements are 0: not written?") == 1
    first, second = qcs4w("verify", packed_file, *options, "--json").document["results"]
    assert first["bounded"]["wrong_zeros"] == first["bounded"]["failures"]
    assert 0 < second["bounded"]["wrong_zeros"] < second["bounded"]["failures"]
