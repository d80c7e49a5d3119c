"""Activations in the usual files: read, paired with packed tensors by name, and written."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from making import save_floats, write_safetensors
from safetensors.numpy import load_file

from qcs4w_packer import (
    Container,
    NonFiniteError,
    OutputError,
    PackedEntry,
    SourceError,
    UnknownTensorError,
    UsageError,
    open_source,
    pack_weight,
)
from qcs4w_packer.arrays import OUTPUT_SUFFIXES, check_output_format, npy_bytes, pair_inputs, read_array, save_arrays
from qcs4w_packer.container_writer import ContainerWriter


def load(path: Path) -> dict[str, np.ndarray]:
    """Read arrays by the libraries that own the formats."""
    if path.suffix == ".npy":
        return {"": np.load(path)}
    if path.suffix == ".npz":
        return dict(np.load(path))
    if path.suffix == ".safetensors":
        return load_file(path)
    content = torch.load(path, weights_only=True)
    tensors = content if isinstance(content, dict) else {"": content}
    return {name: tensor.numpy() for name, tensor in tensors.items()}


@pytest.mark.parametrize("suffix", OUTPUT_SUFFIXES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0), (1, 2, 3, 4)], ids=str)
def test_one_array_comes_back(suffix: str, shape: tuple[int, ...], tmp_path: Path, rng: np.random.Generator) -> None:
    """Every format gives back what was saved, to its own library and to us; strides leave no trace."""
    array = np.asarray(rng.standard_normal(shape), np.float32).T
    path = tmp_path / f"y{suffix}"
    save_arrays(path, {"y": array}, nameless=True)
    (found,) = load(path).values()
    np.testing.assert_array_equal(found, array, strict=True)
    with open_source(path) as source:
        (tensor,) = source.tensors.values()
        np.testing.assert_array_equal(tensor.read(), array, strict=True)
        assert source.nameless == (suffix in (".npy", ".pt", ".pth"))


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pt", ".pth"])
def test_several_arrays_come_back_by_name(suffix: str, tmp_path: Path) -> None:
    """Names survive, even those that numpy's own savez takes for its arguments."""
    arrays = {name: np.full((2, 3), i, np.float32) for i, name in enumerate(["a.b", "file", "é/ü", "allow_pickle"])}
    save_arrays(tmp_path / f"y{suffix}", arrays, nameless=False)
    found = load(tmp_path / f"y{suffix}")
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array, strict=True)


def test_a_named_array_keeps_its_name_in_a_pt_file(tmp_path: Path) -> None:
    """One array of a file that names its arrays stays a dictionary."""
    save_arrays(tmp_path / "y.pt", {"y": np.ones(2, np.float32)}, nameless=False)
    assert list(load(tmp_path / "y.pt")) == ["y"]


def test_the_bytes_of_an_npy_are_numpys(tmp_path: Path) -> None:
    """What goes into a stream is what numpy writes into a file."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.save(tmp_path / "y.npy", array)
    assert npy_bytes(array) == (tmp_path / "y.npy").read_bytes()


@pytest.mark.parametrize(
    ("name", "count", "words"),
    [("y.txt", 1, "suffix '.txt'"), ("y", 1, "suffix ''"), ("y.npy", 2, "holds one array, there are 2")],
)
def test_a_format_that_does_not_fit(name: str, count: int, words: str, tmp_path: Path) -> None:
    """An unknown suffix, or two arrays for a .npy, is refused and leaves no file."""
    with pytest.raises(UsageError, match=words):
        check_output_format(Path(name), [str(i) for i in range(count)])
    arrays = {str(i): np.ones(1, np.float32) for i in range(count)}
    with pytest.raises(UsageError, match=words):
        save_arrays(tmp_path / name, arrays, nameless=False)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("suffix", OUTPUT_SUFFIXES)
def test_an_output_needs_force(suffix: str, tmp_path: Path) -> None:
    """Nothing is overwritten unasked, and never the input."""
    path = tmp_path / f"y{suffix}"
    path.write_bytes(b"old")
    array = {"y": np.ones(1, np.float32)}
    with pytest.raises(OutputError, match="exists already"):
        save_arrays(path, array, nameless=False)
    with pytest.raises(OutputError, match="is the file being read"):
        save_arrays(path, array, nameless=False, force=True, sources=(path,))
    assert path.read_bytes() == b"old"
    save_arrays(path, array, nameless=False, force=True)
    assert load(path)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F64"])
def test_any_float_is_read_as_float32(dtype: str, tmp_path: Path) -> None:
    """Activations of any rank and float dtype."""
    stored = (
        torch.arange(24)
        .reshape(2, 3, 4)
        .to({"F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}[dtype])
    )
    data = stored.view(torch.uint8).numpy().tobytes()
    with open_source(write_safetensors(tmp_path / "x.safetensors", {"x": (dtype, (2, 3, 4), data)})) as source:
        np.testing.assert_array_equal(read_array(source, "x"), stored.float().numpy(), strict=True)


@pytest.mark.parametrize(("dtype", "shape"), [("I32", (2,)), ("F32", ()), ("F8_E4M3", (4,))], ids=str)
def test_what_is_no_activation(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Integers, scalars and fp8 are refused by name."""
    nbytes = int(np.prod(shape)) * (1 if dtype.startswith("F8") else 4)
    path = write_safetensors(tmp_path / "x.safetensors", {"x": (dtype, shape, bytes(nbytes))})
    with open_source(path) as source, pytest.raises(SourceError, match=rf"'x' is {dtype} .* expected floats"):
        read_array(source, "x")


def test_an_activation_beyond_float32_is_named(tmp_path: Path) -> None:
    """A float64 that float32 cannot hold is not turned into an infinity."""
    np.save(tmp_path / "x.npy", np.array([[1.0, 2.0], [1e40, 0.0]]))
    with open_source(tmp_path / "x.npy") as source, pytest.raises(NonFiniteError, match="row 1, column 0"):
        read_array(source, "weight")


def container_of(path: Path, *entries: PackedEntry) -> Container:
    """A container with these packed tensors of one row."""
    writer = ContainerWriter(entries)
    packed = pack_weight(np.ones((1, 2), np.float32))
    with path.open("wb+") as file:
        writer.begin(file.fileno())
        for entry in entries:
            writer.write_rows(entry.name, 0, packed.packed, packed.scales)
        writer.finish()
    return Container(path)


def pairs(
    folder: Path, entries: list[PackedEntry], names: list[str], wanted: str | None = None
) -> list[tuple[str, str]]:
    """Pair an input file of these names with a container."""
    inputs = save_floats(folder / "x.safetensors", {name: np.ones((1, 2)) for name in names})
    with container_of(folder / "c.safetensors", *entries) as container, open_source(inputs) as source:
        return [(entry.name, name) for entry, name in pair_inputs(container, source, wanted)]


A, B = PackedEntry("a.weight", 1, 2), PackedEntry("b.weight", 1, 2, aliases=("tied.weight",))

PAIRS: dict[str, tuple[list[PackedEntry], list[str], str | None, list[tuple[str, str]]]] = {
    "by name": ([A, B], ["b.weight", "a.weight"], None, [("b.weight", "b.weight"), ("a.weight", "a.weight")]),
    "by module": ([A, B], ["b", "a"], None, [("b.weight", "b"), ("a.weight", "a")]),
    "by alias": ([A, B], ["tied"], None, [("b.weight", "tied")]),
    "others are passed over": ([A, B], ["x", "a"], None, [("a.weight", "a")]),
    "single array, single tensor": ([A], ["x"], None, [("a.weight", "x")]),
    "single array, chosen": ([A, B], ["x"], "b", [("b.weight", "x")]),
    "chosen by alias": ([A, B], ["x"], "tied.weight", [("b.weight", "x")]),
    "chosen among several": ([A, B], ["a", "b"], "b", [("b.weight", "b")]),
    "a name beats a module": (
        [PackedEntry("a", 1, 2), A], ["a", "a.weight"], None, [("a", "a"), ("a.weight", "a.weight")],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("entries", "names", "wanted", "expected"), PAIRS.values(), ids=PAIRS)
def test_arrays_find_their_tensor(
    entries: list[PackedEntry], names: list[str], wanted: str | None, expected: list[tuple[str, str]], tmp_path: Path
) -> None:
    """By name, alias or module; a single array belongs to what was chosen."""
    assert pairs(tmp_path, entries, names, wanted) == expected


@pytest.mark.parametrize(
    ("names", "wanted"),
    [(["x"], None), (["x", "y"], None), (["x", "y"], "a"), (["b", "y"], "a")],
    ids=["single, two tensors", "none fits", "none is chosen", "another fits"],
)
def test_arrays_without_a_tensor(names: list[str], wanted: str | None, tmp_path: Path) -> None:
    """Which arrays there are, and how to name them, stands in the error."""
    with pytest.raises(UnknownTensorError, match=r"no array is named after a packed tensor .*arrays: '") as caught:
        pairs(tmp_path, [A, B], names, wanted)
    assert "name it 'a" in (caught.value.hint or "")


def test_a_tensor_that_is_not_there(tmp_path: Path) -> None:
    """A choice that the container lacks is refused first."""
    with pytest.raises(UnknownTensorError, match="no packed tensor 'zz'"):
        pairs(tmp_path, [A, B], ["a"], "zz")


def test_a_nameless_array_needs_a_choice(tmp_path: Path) -> None:
    """A bare .npy belongs to the only packed tensor; with two it must be said which."""
    np.save(tmp_path / "x.npy", np.ones((1, 2), np.float32))
    with container_of(tmp_path / "c.safetensors", A, B) as container, open_source(tmp_path / "x.npy") as source:
        with pytest.raises(UnknownTensorError, match="holds 2 packed tensors"):
            pair_inputs(container, source)
        assert pair_inputs(container, source, "b")[0][0].name == "b.weight"
