"""Raw bytes to float32 rows, whatever the file's format; torch is the witness."""

from pathlib import Path

import numpy as np
import pytest
import torch
from making import NON_FINITE, poke, run_python, save_floats, sparse_safetensors, write_safetensors

from qcs4w_packer import NonFiniteError, SourceError, open_source
from qcs4w_packer.weights import SourceTensor, split_stack, widen


@pytest.mark.parametrize(("name", "dtype"), [("BF16", torch.bfloat16), ("F16", torch.float16)], ids=["bf16", "f16"])
def test_all_patterns_of_16_bits_widen_as_torch_does(name: str, dtype: torch.dtype) -> None:
    """All 65,536 patterns become the float32 that torch makes of them, subnormals and signed zeros included."""
    patterns = np.arange(65536, dtype="<u2")
    found = widen(patterns.tobytes(), name, name="w", columns=64)
    expected = torch.from_numpy(patterns.view(np.int16)).view(dtype).float().numpy().reshape(-1, 64)
    assert found.shape == (1024, 64)
    finite = ~np.isnan(expected)
    np.testing.assert_array_equal(found.view(np.uint32)[finite], expected.view(np.uint32)[finite])
    assert np.isnan(found[~finite]).all()


def test_float64_rounds_as_torch_does(rng: np.random.Generator) -> None:
    """Random float64 of every size in float32's range, ties and subnormals included, round as torch rounds."""
    values = np.ldexp(rng.uniform(-1, 1, 4096), rng.integers(-160, 128, 4096))
    values[:4] = [1 + 2.0**-24, 1 + 3 * 2.0**-24, 2.0**-150, -0.0]
    found = widen(values.tobytes(), "F64", name="w", columns=64)
    expected = torch.from_numpy(values).float().numpy().reshape(-1, 64)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_float32_is_not_touched(rng: np.random.Generator) -> None:
    """Every bit pattern of float32 passes through, NaN's payload too."""
    data = rng.bytes(4096)
    assert widen(data, "F32", name="w", columns=16).tobytes() == data


@pytest.mark.parametrize("value", [1e39, -1e300, 3.4028235677973366e38], ids=str)
def test_a_float64_beyond_float32_is_named(value: float) -> None:
    """What would become an infinity is refused by tensor, row and column, counted from the first row given."""
    values = np.zeros((3, 5))
    values[1, 4] = value
    with pytest.raises(NonFiniteError, match=r"tensor 'fc' holds .* at row 101, column 4, which is beyond float32"):
        widen(values.tobytes(), "F64", name="fc", columns=5, first_row=100)
    values[1, 4] = 3.4028235e38
    assert np.isfinite(widen(values.tobytes(), "F64", name="fc", columns=5)).all()


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F64"])
def test_safetensors_read_with_numpy_alone(dtype: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """A process that cannot import torch reads what torch reads here."""
    weight = torch.from_numpy(rng.standard_normal((7, 9)))
    stored = weight.to({"BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}[dtype])
    data = stored.view(torch.uint8).numpy().tobytes()
    path = write_safetensors(tmp_path / "a.safetensors", {"w": (dtype, (7, 9), data)})
    done = run_python(
        "import sys; sys.modules['torch'] = None\n"
        "from qcs4w_packer import open_source\n"
        "with open_source(sys.argv[1]) as source: print(source.tensors['w'].read().tobytes().hex())",
        path,
    )
    assert done.stdout.strip() == stored.float().numpy().tobytes().hex(), done.stderr


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (3, 0), (2, 3, 4)], ids=str)
def test_a_tensor_of_any_rank_is_read_whole(shape: tuple[int, ...], tmp_path: Path, rng: np.random.Generator) -> None:
    """`read` gives the array in its own shape."""
    array = np.asarray(rng.standard_normal(shape), np.float32)
    with open_source(save_floats(tmp_path / "a.safetensors", {"w": array})) as source:
        np.testing.assert_array_equal(source.tensors["w"].read(), array, strict=True)


def test_chunks_cover_every_row_once(tmp_path: Path) -> None:
    """A tensor of more than 16 MiB comes in several pieces, whole rows each, in order."""
    shape = (5003, 1021)
    sparse_safetensors(tmp_path / "a.safetensors", shape)
    with open_source(tmp_path / "a.safetensors") as source:
        tensor = source.tensors["a.weight"]
        pieces = [(start, len(data)) for start, data in tensor.chunks()]
        assert len(pieces) == 2
        assert max(size for _, size in pieces) <= 16 << 20
        row = 1021 * 4
        assert [start for start, _ in pieces] == [0, pieces[0][1] // row]
        assert sum(size for _, size in pieces) == tensor.nbytes
        assert all(size % row == 0 for _, size in pieces)


def test_a_row_larger_than_a_chunk_is_one_chunk(tmp_path: Path) -> None:
    """Rows are never cut."""
    sparse_safetensors(tmp_path / "a.safetensors", (2, 5 << 20))
    with open_source(tmp_path / "a.safetensors") as source:
        assert [(start, len(data)) for start, data in source.tensors["a.weight"].chunks()] == [
            (0, 20 << 20),
            (1, 20 << 20),
        ]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("dtype", NON_FINITE)
def test_bytes_become_values_that_are_not_finite(dtype: str, value: str) -> None:
    """The patterns that tests poke into files are what they are taken for."""
    found = widen(bytes.fromhex(NON_FINITE[dtype][value]), dtype, name="w", columns=1)
    np.testing.assert_array_equal(found, np.array([[float(value)]], np.float32))


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [("F4", (2, 3), 3), ("F4", (3, 2), 3), ("F6_E2M3", (4, 1), 3), ("F6_E3M2", (2, 2, 2), 6), ("F4", (2, 4), 4)],
    ids=str,
)
def test_rows_that_do_not_end_on_a_byte(dtype: str, shape: tuple[int, ...], nbytes: int, tmp_path: Path) -> None:
    """4- and 6-bit tensors are copied whole where a row ends within a byte."""
    data = bytes(range(1, nbytes + 1))
    with open_source(write_safetensors(tmp_path / "a.safetensors", {"w": (dtype, shape, data)})) as source:
        assert b"".join(part for _, part in source.tensors["w"].chunks()) == data


def test_a_stack_splits_into_its_matrices(rng: np.random.Generator) -> None:
    """[E, N, K] becomes T.0, T.1, …, each with its own rows."""
    array = np.asarray(rng.standard_normal((3, 4, 5)), np.float32)
    rows = array.reshape(-1, 5)
    parts = split_stack(SourceTensor("T", "F32", (3, 4, 5), lambda a, b: rows[a:b].tobytes(), storage="s"))
    assert [(part.name, part.shape, part.storage) for part in parts] == [(f"T.{i}", (4, 5), None) for i in range(3)]
    for part, expected in zip(parts, array, strict=True):
        np.testing.assert_array_equal(part.read(), expected)


def test_bad_values_in_a_later_row_of_a_stack_are_counted_from_the_matrix(tmp_path: Path) -> None:
    """Row and column are those of the matrix that is named."""
    array = np.zeros((3, 4, 5))
    array[2, 1, 3] = 1e39
    path = write_safetensors(tmp_path / "a.safetensors", {"T": ("F64", (3, 4, 5), array.tobytes())})
    with open_source(path) as source:
        last = split_stack(source.tensors["T"])[2]
        with pytest.raises(NonFiniteError, match=r"tensor 'T\.2' holds 1e\+39 at row 1, column 3"):
            last.read()


@pytest.mark.parametrize("name", ["a.ggml", "a", "a.json", "a.npy.gz", ".npy"])
def test_an_unknown_suffix_lists_the_known_ones(name: str, tmp_path: Path) -> None:
    """The suffix decides, and the message says which there are."""
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(SourceError, match=r"suffix '.*' is not known, expected one of \.safetensors, \.npy"):
        open_source(tmp_path / name)


def test_a_folder_is_a_checkpoint(tmp_path: Path) -> None:
    """A folder is no file, whatever its name."""
    (tmp_path / "a.safetensors").mkdir()
    for folder in (tmp_path, tmp_path / "a.safetensors"):
        with pytest.raises(SourceError, match="holds no weights"):
            open_source(folder)


@pytest.mark.parametrize("name", ["a.safetensors", "a.npy", "a.npz", "a.pt"])
def test_a_missing_file_is_told(name: str, tmp_path: Path) -> None:
    """Every format says the same of a file that is not there."""
    with pytest.raises(SourceError, match=f"{name}: does not exist"):
        open_source(tmp_path / name)


def test_the_suffix_ignores_case(tmp_path: Path) -> None:
    """A.SafeTensors is a safetensors file."""
    with open_source(save_floats(tmp_path / "A.SafeTensors", {"w": np.ones((1, 1))})) as source:
        assert list(source.tensors) == ["w"]


def test_poking_reaches_the_right_element(tmp_path: Path) -> None:
    """The helper that plants bad values plants them where it says."""
    start = sparse_safetensors(tmp_path / "a.safetensors", (4, 5), "F16")
    poke(tmp_path / "a.safetensors", start + 2 * (3 * 5 + 2), bytes.fromhex(NON_FINITE["F16"]["inf"]))
    with open_source(tmp_path / "a.safetensors") as source:
        assert np.argwhere(np.isinf(source.tensors["a.weight"].read())).tolist() == [[3, 2]]


@pytest.mark.parametrize("suffix", [".safetensors", ".npy", ".npz", ".pt"])
def test_closing_twice_harms_nobody(suffix: str, tmp_path: Path) -> None:
    """A second close leaves alone whoever has got the descriptor's number meanwhile."""
    path = tmp_path / f"a{suffix}"
    if suffix == ".pt":
        torch.save({"a": torch.ones(2, 2)}, path)
    elif suffix == ".safetensors":
        save_floats(path, {"a": np.ones((2, 2), np.float32)})
    else:
        (np.savez if suffix == ".npz" else np.save)(path, np.ones((2, 2), np.float32))
    source = open_source(path)
    source.close()
    with path.open("rb") as other:
        source.close()
        assert other.read(1)
