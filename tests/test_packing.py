"""pack_file from end to end: every kind of source, dry runs, memory, and what happens when something breaks."""

import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from making import (
    ITEM_NBYTES,
    NON_FINITE,
    bytes_read,
    leftovers,
    mutated,
    npy_header,
    poke,
    raw_safetensors,
    run_python,
    save_floats,
    sparse_safetensors,
    time_limit,
    write_safetensors,
)
from safetensors import safe_open

from qcs4w_packer import (
    Container,
    NonFiniteError,
    OutputError,
    Qcs4wError,
    Request,
    SelectionError,
    SourceError,
    UnknownTensorError,
    UsageError,
    load_packed,
    open_source,
    pack_file,
    pack_weight,
)
from qcs4w_packer.packing import source_weight

WORK = ".out.safetensors.qcs4w"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


@pytest.fixture
def weight(rng: np.random.Generator) -> np.ndarray:
    """A matrix of odd sizes."""
    return rng.standard_normal((37, 53)).astype(np.float32)


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes in C order."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def save_as(path: Path, weight: np.ndarray) -> None:
    """Write one matrix under the name `weight` in the format of the suffix."""
    if path.suffix == ".npy":
        np.save(path, weight)
    elif path.suffix == ".npz":
        np.savez_compressed(path, weight=weight)
    elif path.suffix == ".safetensors":
        save_floats(path, {"weight": weight})
    else:
        torch.save({"weight": torch.from_numpy(np.ascontiguousarray(weight))}, path)


@pytest.mark.parametrize("layout", ["C", "F", "big-endian"])
def test_every_source_gives_the_same_file(layout: str, weight: np.ndarray, tmp_path: Path) -> None:
    """The same weights make the same container, byte for byte, whatever file they come from."""
    stored = np.asfortranarray(weight) if layout == "F" else weight.astype(">f4") if layout == "big-endian" else weight
    outputs = set()
    for suffix in (".safetensors", ".npy", ".npz", ".pt", ".pth", ".bin"):
        path = tmp_path / f"a{suffix}"
        save_as(path, weight if suffix in (".pt", ".pth", ".bin") else stored)
        report = pack_file(path, tmp_path / "out.safetensors", force=True)
        assert [tensor.entry.name for tensor in report.packed] == ["weight"]
        outputs.add((tmp_path / "out.safetensors").read_bytes())
    assert len(outputs) == 1
    expected = pack_weight(weight)
    found = load_packed(tmp_path / "out.safetensors")
    np.testing.assert_array_equal(found.packed, expected.packed)
    np.testing.assert_array_equal(found.scales, expected.scales)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_packs_like_its_float32(dtype: str, weight: np.ndarray, tmp_path: Path) -> None:
    """F16, BF16 and F64 give the bytes of their float32 widening, and the source's dtype is told."""
    stored = torch.from_numpy(weight).to(DTYPES[dtype])
    path = write_safetensors(tmp_path / "a.safetensors", {"weight": (dtype, (37, 53), raw(stored))})
    pack_file(path, tmp_path / "out.safetensors")
    expected = pack_weight(stored.float().numpy())
    with Container(tmp_path / "out.safetensors") as container:
        assert container.only().source_dtype == dtype
        np.testing.assert_array_equal(container.load("weight").packed, expected.packed)


def test_chunks_and_blocks_change_nothing(rng: np.random.Generator, tmp_path: Path) -> None:
    """A tensor of several 16 MiB chunks packs like the whole."""
    weight = rng.standard_normal((5003, 1021)).astype(np.float32)
    save_floats(tmp_path / "a.safetensors", {"a.weight": weight})
    report = pack_file(tmp_path / "a.safetensors", tmp_path / "out.safetensors")
    expected = pack_weight(weight)
    found = load_packed(tmp_path / "out.safetensors")
    np.testing.assert_array_equal(found.packed, expected.packed)
    np.testing.assert_array_equal(found.scales, expected.scales)
    error = report.packed[0].error
    assert error is not None
    off = weight.astype(np.float64) - expected.dequantize()
    relative = math.sqrt((off**2).sum() / (weight.astype(np.float64) ** 2).sum())
    assert error.relative == pytest.approx(relative, rel=2 * (2.0**-19 * math.sqrt(1021) + 1023 * 2.0**-24))


def test_a_whole_checkpoint(weight: np.ndarray, tmp_path: Path, rng: np.random.Generator) -> None:
    """What is not packed is carried byte for byte, every dtype of it, and the source's metadata too."""
    carried = {
        "norm.weight": ("BF16", (5,), rng.bytes(10)),
        "fc.bias": ("F32", (37,), bytes(148)),
        "embed.weight": ("F16", (3, 4), rng.bytes(24)),
        "ids": ("I64", (2, 2), rng.bytes(32)),
        "mask": ("BOOL", (3,), b"\x01\x00\x01"),
        "scalar": ("F64", (), rng.bytes(8)),
        "empty": ("F32", (0, 7), b""),
        "q": ("F8_E4M3", (7,), rng.bytes(7)),
        "mx": ("F4", (2, 3), b"abc"),
        "mx6": ("F6_E2M3", (4, 1), b"def"),
        "big": ("U8", ((16 << 20) + 77, 3), rng.bytes(3) * ((16 << 20) + 77)),
    }
    source = {"fc.weight": ("F32", (37, 53), weight.tobytes()), **carried}
    path = write_safetensors(tmp_path / "a.safetensors", source, {"format": "pt", "é": "ü"})
    report = pack_file(path, tmp_path / "out.safetensors")
    assert {choice.tensor.name for choice in report.carried} == set(carried)
    assert report.source_nbytes == sum(len(data) for _, _, data in source.values())
    assert report.output_nbytes == (tmp_path / "out.safetensors").stat().st_size
    with Container(tmp_path / "out.safetensors") as container:
        assert set(container.carried) == set(carried)
        assert container.metadata == {"format": "pt", "é": "ü"}
        for name, (dtype, shape, data) in carried.items():
            tensor = container.carried_tensor(name)
            assert (tensor.dtype, tensor.shape) == (dtype, shape)
            assert container.read(name) == data, name
    with safe_open(tmp_path / "out.safetensors", "pt") as witness:
        assert set(carried) < set(witness.keys())
        assert witness.get_tensor("fc.weight.qcs4w_shape").tolist() == [37, 53]


def test_packed_only_leaves_the_rest_out(weight: np.ndarray, tmp_path: Path) -> None:
    """Neither tensors nor metadata of the source come along, and the report still names them."""
    path = save_floats(tmp_path / "a.safetensors", {"fc.weight": weight, "fc.bias": weight[0]}, {"format": "pt"})
    report = pack_file(path, tmp_path / "out.safetensors", packed_only=True)
    assert [choice.tensor.name for choice in report.carried] == ["fc.bias"]
    with Container(tmp_path / "out.safetensors") as container:
        assert (container.carried, container.metadata) == ([], {})


def test_packing_twice_gives_the_same_bytes(weight: np.ndarray, tmp_path: Path) -> None:
    """There is no time, path or chance in a container."""
    path = save_floats(tmp_path / "a.safetensors", {"fc.weight": weight, "b": weight})
    for name in ("one", "two"):
        pack_file(path, tmp_path / f"{name}.safetensors")
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()


def test_a_transposed_tensor_is_packed_the_right_way_round(weight: np.ndarray, tmp_path: Path) -> None:
    """--transpose packs W of a stored Wᵀ, not a reshaped one, and says so."""
    path = save_floats(tmp_path / "a.safetensors", {"h.c_attn.weight": weight.T})
    pack_file(path, tmp_path / "out.safetensors", request=Request(transpose=("*c_attn*",)))
    expected = pack_weight(weight)
    with Container(tmp_path / "out.safetensors") as container, open_source(path) as source:
        entry = container.only()
        assert (entry.transposed, entry.out_features, entry.in_features) == (True, 37, 53)
        np.testing.assert_array_equal(container.load(entry.name).packed, expected.packed)
        np.testing.assert_array_equal(source_weight(source, entry), weight)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_stack_is_packed_matrix_by_matrix(transposed: bool, rng: np.random.Generator, tmp_path: Path) -> None:
    """Each matrix of [E, N, K] becomes a tensor of its own, which knows its stack."""
    stack = rng.standard_normal((3, 8, 10)).astype(np.float32)
    path = save_floats(tmp_path / "a.safetensors", {"experts": stack})
    request = Request(include=("experts",), transpose=("experts",) if transposed else ())
    pack_file(path, tmp_path / "out.safetensors", request=request)
    with Container(tmp_path / "out.safetensors") as container, open_source(path) as source:
        assert list(container.entries) == ["experts.0", "experts.1", "experts.2"]
        for entry, matrix in zip(container.entries.values(), stack, strict=True):
            expected = matrix.T if transposed else matrix
            assert entry.stack == "experts"
            np.testing.assert_array_equal(container.load(entry.name).packed, pack_weight(expected).packed)
            np.testing.assert_array_equal(source_weight(source, entry), expected)


def test_the_source_of_an_entry_may_be_missing(weight: np.ndarray, tmp_path: Path) -> None:
    """A source without the tensor, or with another kind of it, is told; a nameless one always fits."""
    path = save_floats(tmp_path / "a.safetensors", {"fc.weight": weight})
    pack_file(path, tmp_path / "out.safetensors")
    np.save(tmp_path / "a.npy", weight)
    entry = Container(tmp_path / "out.safetensors").only()
    with open_source(save_floats(tmp_path / "b.safetensors", {"fd.weight": weight})) as source:
        with pytest.raises(UnknownTensorError, match=r"no tensor 'fc\.weight'") as caught:
            source_weight(source, entry)
        assert "fd.weight" in (caught.value.hint or "")
    row = save_floats(tmp_path / "b.safetensors", {"fc.weight": weight[0]})
    with open_source(row) as source, pytest.raises(SelectionError, match="not a float matrix"):
        source_weight(source, entry)
    with open_source(tmp_path / "a.npy") as source:
        np.testing.assert_array_equal(source_weight(source, entry), weight)


def test_a_stack_that_meets_a_matrix_is_an_error(weight: np.ndarray, tmp_path: Path) -> None:
    """`T.0` of a stack T beside a tensor T.0 is refused, and the hint works."""
    path = save_floats(tmp_path / "a.safetensors", {"T": weight[None], "T.0": weight, "T.1": weight})
    out = tmp_path / "out.safetensors"
    with pytest.raises(OutputError, match=r"would be named 'T\.0'") as caught:
        pack_file(path, out, request=Request(include=("*",)))
    assert "--exclude" in (caught.value.hint or "")
    assert not out.exists()
    pack_file(path, out, request=Request(include=("*",), exclude=("T",)))
    assert list(Container(out).entries) == ["T.0", "T.1"]


def test_a_generated_name_that_meets_a_carried_one_is_an_error(weight: np.ndarray, tmp_path: Path) -> None:
    """A source that already has `T.qcs4w_scale` cannot be packed over it; excluding T can."""
    tensors = {"a.weight": weight, "a.weight.qcs4w_scale": weight[0], "b.weight": weight}
    path = save_floats(tmp_path / "a.safetensors", tensors)
    with pytest.raises(OutputError, match=r"would be named 'a\.weight\.qcs4w_scale'"):
        pack_file(path, tmp_path / "out.safetensors")
    assert os.listdir(tmp_path) == ["a.safetensors"]
    pack_file(path, tmp_path / "out.safetensors", request=Request(exclude=("a.weight",)))


def test_a_container_is_not_packed_again(weight: np.ndarray, tmp_path: Path) -> None:
    """Packing what is packed is refused."""
    pack_file(save_floats(tmp_path / "a.safetensors", {"fc.weight": weight}), tmp_path / "out.safetensors")
    with pytest.raises(SelectionError, match="is a qcs4w container already"):
        pack_file(tmp_path / "out.safetensors", tmp_path / "again.safetensors")


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_tied_weights_are_packed_once(zipped: bool, tmp_path: Path) -> None:
    """Embedding and head of one storage make one packed tensor with an alias, which finds it."""
    shared = torch.randn(64, 33, generator=torch.Generator().manual_seed(0))
    content = {"embed.weight": shared, "fc.weight": torch.ones(4, 4), "lm_head.weight": shared}
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    request = Request(include=("*",))
    report = pack_file(tmp_path / "a.pt", tmp_path / "out.safetensors", request=request)
    assert [(t.entry.name, t.entry.aliases) for t in report.packed] == [
        ("embed.weight", ("lm_head.weight",)),
        ("fc.weight", ()),
    ]
    with Container(tmp_path / "out.safetensors") as container:
        assert list(container.entries) == ["embed.weight", "fc.weight"]
        assert container.carried == []
        expected = pack_weight(shared.numpy()).packed
        for name in ("embed.weight", "lm_head.weight", "lm_head"):
            np.testing.assert_array_equal(container.load(name).packed, expected)


# --- values that are not finite


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("dtype", NON_FINITE)
@pytest.mark.parametrize(("row", "column"), [(0, 0), (9000, 510), (20_001, 1)], ids=["first", "middle", "last chunk"])
def test_a_value_that_is_not_finite_is_named(dtype: str, value: str, row: int, column: int, tmp_path: Path) -> None:
    """Refused by tensor, row and column of the file, also beyond the first 16 MiB; no output appears."""
    path, nbytes = tmp_path / "a.safetensors", ITEM_NBYTES[dtype]
    start = sparse_safetensors(path, (20_002, 511), dtype)
    poke(path, start + (row * 511 + column) * nbytes, bytes.fromhex(NON_FINITE[dtype][value]))
    with pytest.raises(NonFiniteError, match=rf"tensor 'a\.weight' holds {value} at row {row}, column {column};"):
        pack_file(path, tmp_path / "out.safetensors")
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_a_float64_beyond_float32_is_named_in_a_later_chunk(tmp_path: Path) -> None:
    """Rows are counted from the tensor's first, not from the chunk's."""
    start = sparse_safetensors(tmp_path / "a.safetensors", (20_002, 511), "F64")
    poke(tmp_path / "a.safetensors", start + (20_001 * 511 + 3) * 8, np.array([1e39], "<f8").tobytes())
    with pytest.raises(
        NonFiniteError, match=r"tensor 'a\.weight' holds 1e\+39 at row 20001, column 3, which is beyond"
    ):
        pack_file(tmp_path / "a.safetensors", tmp_path / "out.safetensors")


@pytest.mark.parametrize("dtype", [*NON_FINITE, "beyond float32"])
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_are_counted_as_the_file_does(dtype: str, transposed: bool, tmp_path: Path) -> None:
    """Of a transposed tensor, too, the place named is the one in the file: [row, column] as it is stored."""
    stored = "F64" if dtype == "beyond float32" else dtype
    bad = np.array([1e39], "<f8").tobytes() if dtype == "beyond float32" else bytes.fromhex(NON_FINITE[dtype]["nan"])
    path = tmp_path / "a.safetensors"
    start = sparse_safetensors(path, (5, 9), stored)
    for row, column in ((3, 7), (4, 0)):  # in the turned matrix (4, 0) would come first
        poke(path, start + (row * 9 + column) * ITEM_NBYTES[stored], bad)
    with pytest.raises(NonFiniteError, match=r"at row 3, column 7[;,]"):
        pack_file(path, tmp_path / "out.safetensors", request=Request(transpose=("*",) if transposed else ()))


def test_a_bad_value_in_a_stack_names_its_matrix(tmp_path: Path) -> None:
    """T.2 is named, with the row and column of that matrix."""
    start = sparse_safetensors(tmp_path / "a.safetensors", (4, 3, 5), name="T")
    poke(tmp_path / "a.safetensors", start + 4 * (2 * 15 + 1 * 5 + 4), bytes.fromhex(NON_FINITE["F32"]["nan"]))
    with pytest.raises(NonFiniteError, match=r"tensor 'T\.2' holds nan at row 1, column 4"):
        pack_file(tmp_path / "a.safetensors", tmp_path / "out.safetensors", request=Request(include=("T",)))


def test_bad_values_in_carried_tensors_are_carried(weight: np.ndarray, tmp_path: Path) -> None:
    """What is not packed is not judged."""
    norm = np.array([np.nan, np.inf], np.float32)
    path = save_floats(tmp_path / "a.safetensors", {"fc.weight": weight, "norm.weight": norm})
    pack_file(path, tmp_path / "out.safetensors")
    assert Container(tmp_path / "out.safetensors").read("norm.weight") == norm.tobytes()


def test_rows_at_the_floor_are_warned_of(tmp_path: Path) -> None:
    """Tiny rows that are not zero are counted over all chunks; zero rows are not."""
    weight = np.array([[1, 2], [0, 0], [1e-40, 0], [8e-7, 0], [1e-6, 0]], np.float32)
    path = save_floats(tmp_path / "a.safetensors", {"a.weight": weight, "b.weight": np.ones((4, 2))})
    first, second = pack_file(path, tmp_path / "out.safetensors").packed
    assert first.floored_rows == 2
    assert first.warnings[0] == "2 rows below absmax 8.9e-7 met the scale floor and lost precision"
    assert "ExecuTorch" in first.warnings[1]
    assert second.warnings == []


# --- dry runs


def test_a_dry_run_says_what_a_run_does(weight: np.ndarray, tmp_path: Path) -> None:
    """Choices, names and the size of the output are those of the real run, and nothing is written."""
    tensors = {"fc.weight": weight, "fc.bias": weight[0], "c_attn.weight": weight, "embed": weight}
    path = save_floats(tmp_path / "a.safetensors", tensors, {"format": "pt"})
    request = Request(transpose=("c_attn*",))
    planned = pack_file(path, None, request=request, dry_run=True)
    assert os.listdir(tmp_path) == ["a.safetensors"]
    done = pack_file(path, tmp_path / "out.safetensors", request=request)
    assert planned.is_dry_run
    assert planned.output_nbytes == done.output_nbytes == (tmp_path / "out.safetensors").stat().st_size
    assert planned.carried == done.carried
    unknown = dict.fromkeys(("packed_sha256", "scale_sha256"), "")
    assert [(replace(t.entry, **unknown), t.reason, t.source_nbytes) for t in planned.packed] == [
        (replace(t.entry, **unknown), t.reason, t.source_nbytes) for t in done.packed
    ]
    with Container(tmp_path / "out.safetensors") as container:
        assert [t.entry for t in done.packed] == list(container.entries.values())
    assert [t.error for t in planned.packed] == [None, None]
    with pytest.raises(UsageError, match="dry run only"):
        pack_file(path, None, request=request)


def huge_npy(path: Path, order: str) -> None:
    """A .npy file of a terabyte that takes no room."""
    head = npy_header(f"({1 << 19}, {1 << 19})", order=order)
    path.write_bytes(head)
    os.truncate(path, len(head) + (1 << 40))


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts bytes as Linux does")
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("a.safetensors", lambda path: sparse_safetensors(path, (1 << 19, 1 << 19))),
        ("a.npy", lambda path: huge_npy(path, "False")),
        ("a.npy", lambda path: huge_npy(path, "True")),
        ("a.npz", lambda path: np.savez(path, weight=np.ones((2000, 2000)))),
    ],
    ids=["safetensors", "npy", "fortran npy", "npz"],
)
def test_a_dry_run_reads_no_data(name: str, make: Callable[[Path], None], tmp_path: Path) -> None:
    """Of a terabyte less than a mebibyte is asked for, which the system itself has counted."""
    make(tmp_path / name)
    before = bytes_read()
    with time_limit(10):
        report = pack_file(tmp_path / name, tmp_path / "out.safetensors", dry_run=True)
    assert bytes_read() - before < 1 << 20
    assert report.output_nbytes > report.source_nbytes // 16
    assert os.listdir(tmp_path) == [name]


def test_a_dry_run_refuses_what_a_run_would(tmp_path: Path, weight: np.ndarray) -> None:
    """Its own source as output, or names that meet; an output that exists is only told by the run."""
    path = save_floats(tmp_path / "a.safetensors", {"fc.weight": weight})
    with pytest.raises(OutputError, match="is the file being read"):
        pack_file(path, path, dry_run=True)
    (tmp_path / "out.safetensors").write_bytes(b"old")
    pack_file(path, tmp_path / "out.safetensors", dry_run=True)
    assert (tmp_path / "out.safetensors").read_bytes() == b"old"


# --- memory


MEASURE = """
import resource, sys
from qcs4w_packer import pack_file, Request
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
pack_file(sys.argv[1], sys.argv[2], request=Request(include=tuple(sys.argv[3:])))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("name", ["a.weight", "kept"], ids=["packed", "carried"])
def test_memory_does_not_grow_with_the_file(name: str, tmp_path: Path) -> None:
    """A tensor of 512 MiB packs, or is carried, within 96 MiB: a few chunks and blocks."""
    path = tmp_path / "a.safetensors"
    shapes = {name: (1 << 15, 1 << 12), "small.weight": (4, 4)}
    header: dict[str, object] = {}
    begin = 0
    for key, shape in shapes.items():
        size = shape[0] * shape[1] * 4
        header[key] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, begin + size]}
        begin += size
    raw_safetensors(path, header)
    os.truncate(path, path.stat().st_size + begin)
    done = run_python(MEASURE, path, tmp_path / "out.safetensors", "*.weight")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 96 << 10  # KiB


# --- when something breaks


def big_source(path: Path) -> Path:
    """Forty mebibytes of zeros in three tensors, so that work is under way when something breaks."""
    tensors = {f"{i}.weight": torch.zeros(2000, 1700) for i in range(3)}
    if path.suffix == ".pt":
        torch.save(tensors, path)
    elif path.suffix == ".npz":
        arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors.items()}
        np.savez(path, **arrays)
    else:
        save_floats(path, {name: tensor.numpy() for name, tensor in tensors.items()})
    return path


SUFFIXES = pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".pt"])


@SUFFIXES
def test_a_source_cut_short_while_it_is_read(suffix: str, tmp_path: Path) -> None:
    """One SourceError, no crash, and no output; at most what was finished is kept."""
    path = big_source(tmp_path / f"a{suffix}")

    def cut(nbytes: int, total: int, name: str) -> None:
        os.truncate(path, 20_000_000)

    with pytest.raises(SourceError, match=f"a{suffix}"):
        pack_file(path, tmp_path / "out.safetensors", progress=cut)
    assert set(os.listdir(tmp_path)) <= {path.name, WORK}


@SUFFIXES
def test_a_source_deleted_while_it_is_read(suffix: str, tmp_path: Path) -> None:
    """An open file stays whole: the pack ends well."""
    path = big_source(tmp_path / f"a{suffix}")
    pack_file(path, tmp_path / "out.safetensors", progress=lambda nbytes, total, name: path.unlink(missing_ok=True))
    assert len(Container(tmp_path / "out.safetensors").entries) == 3


@pytest.mark.parametrize("exists", [False, True], ids=["new", "replaced"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError, OSError])
def test_an_interrupted_pack_leaves_nothing(error: type[BaseException], exists: bool, tmp_path: Path) -> None:
    """Ctrl-C or any error before a tensor is finished: the old output stands and nothing is left."""
    path = big_source(tmp_path / "a.safetensors")
    out = tmp_path / "out.safetensors"
    if exists:
        out.write_bytes(b"old")
    seen = []

    def stop(nbytes: int, total: int, name: str) -> None:
        seen.append(len(leftovers(tmp_path / WORK)))
        if error is KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.01)
        raise error

    with pytest.raises(OutputError if error is OSError else error):
        pack_file(path, out, force=exists, progress=stop)
    assert seen == [1], "the work was not under way"
    assert sorted(os.listdir(tmp_path)) == [path.name] + ["out.safetensors"] * exists
    assert not exists or out.read_bytes() == b"old"


def test_a_full_disk_is_told(tmp_path: Path, weight: np.ndarray) -> None:
    """With a limit on file sizes the pack fails for real: one OutputError, the old file, no part."""
    path = save_floats(tmp_path / "a.safetensors", {"fc.weight": weight})
    (tmp_path / "out.safetensors").write_bytes(b"old")
    done = run_python(
        "import resource, sys\n"
        "from qcs4w_packer import pack_file, OutputError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1200, 1200))\n"
        "try: pack_file(sys.argv[1], sys.argv[2], force=True)\n"
        "except OutputError as error: print(error)",
        path,
        tmp_path / "out.safetensors",
    )
    assert "cannot be written: File too large: out.safetensors" in done.stdout, done.stderr
    assert "nothing was changed" in done.stdout
    assert (tmp_path / "out.safetensors").read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "out.safetensors"]


@pytest.mark.parametrize("kind", ["same", "symlink", "hard link"])
@pytest.mark.parametrize("suffix", [".safetensors", ".npy", ".npz", ".pt"])
def test_the_source_is_never_changed(kind: str, suffix: str, weight: np.ndarray, tmp_path: Path) -> None:
    """The output may not be the source by any name, even with force."""
    path, out = tmp_path / f"a{suffix}", tmp_path / f"out{suffix}"
    save_as(path, weight)
    before = path.read_bytes()
    if kind == "symlink":
        out.symlink_to(path)
    elif kind == "hard link":
        out.hardlink_to(path)
    with pytest.raises(OutputError, match="is the file being read"):
        pack_file(path, path if kind == "same" else out, force=True)
    assert path.read_bytes() == before


def test_refusals_come_before_any_work(weight: np.ndarray, tmp_path: Path) -> None:
    """An output that exists is refused before the source is so much as opened."""
    (tmp_path / "out.safetensors").write_bytes(b"old")
    with pytest.raises(OutputError, match="exists already"):
        pack_file(tmp_path / "missing.safetensors", tmp_path / "out.safetensors")


def test_progress_adds_up(weight: np.ndarray, tmp_path: Path) -> None:
    """The bytes told add up to the total told, over packed and carried tensors."""
    path = save_floats(tmp_path / "a.safetensors", {"fc.weight": weight, "fc.bias": weight[0], "b": weight})
    told: list[tuple[int, int, str]] = []
    pack_file(path, tmp_path / "out.safetensors", progress=lambda *step: told.append(step))
    assert {total for _, total, _ in told} == {sum(nbytes for nbytes, _, _ in told)} == {2 * weight.nbytes + 53 * 4}
    assert [name for _, _, name in told] == ["fc.weight", "fc.bias", "b"]


@pytest.mark.parametrize("suffix", [".safetensors", ".npy", ".npz"])
@pytest.mark.filterwarnings("ignore")
def test_damaged_sources_are_refused_or_packed_right(suffix: str, rng: np.random.Generator, tmp_path: Path) -> None:
    """250 damaged files of each kind: one Qcs4wError and no output, or the packing of what the file now holds."""
    path, out = tmp_path / f"a{suffix}", tmp_path / "out.safetensors"
    save_as(path, rng.standard_normal((6, 7)).astype(np.float32))
    sound = path.read_bytes()
    packed = 0
    with time_limit(60):
        for _ in range(250):
            path.write_bytes(mutated(sound, rng))
            out.unlink(missing_ok=True)
            try:
                pack_file(path, out)
            except Qcs4wError:
                assert os.listdir(tmp_path) == [path.name]
                continue
            packed += 1
            with Container(out) as container, open_source(path) as source:
                for entry in container.entries.values():
                    expected = pack_weight(source_weight(source, entry))
                    np.testing.assert_array_equal(container.load(entry.name).packed, expected.packed)
                for name in container.carried:
                    data = b"".join(part for _, part in source.tensors[name].chunks())
                    assert container.read(name) == data
    assert packed >= (0 if suffix == ".npz" else 10), "the mutator leaves too few files sound to prove anything"


def test_ties_in_safetensors_metadata(weight: np.ndarray, tmp_path: Path) -> None:
    """A tied name that save_model left in the metadata becomes an alias; a head tied so is left alone by default."""
    path = save_floats(
        tmp_path / "a.safetensors", {"fc.weight": weight, "tok.weight": weight}, {"lm_head.weight": "tok.weight"}
    )
    report = pack_file(path, tmp_path / "out.safetensors")
    assert [t.entry.name for t in report.packed] == ["fc.weight"]
    every = pack_file(path, tmp_path / "all.safetensors", request=Request(include=("*",)))
    assert [(t.entry.name, t.entry.aliases) for t in every.packed] == [
        ("fc.weight", ()),
        ("tok.weight", ("lm_head.weight",)),
    ]
    with Container(tmp_path / "all.safetensors") as container:
        assert container.entry("lm_head").name == "tok.weight"
