"""unpack_file: floats that are code · scale to the bit, in the shape that their source had, and nothing but that."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import GOLDEN
from hypothesis import given
from hypothesis import strategies as st
from making import leftovers, poke, run_python, write_safetensors
from packed_folders import write_container
from safetensors import safe_open
from safetensors.torch import load_file

from qcs4w_packer import (
    Blob,
    ContainerError,
    DigestError,
    LossyError,
    OutputError,
    PackedLinear,
    Qcs4wError,
    Request,
    SelectionError,
    UnknownTensorError,
    UnpackRequest,
    UsageError,
    open_packed,
    pack_file,
    pack_weight,
    save_container,
    unpack_file,
)
from qcs4w_packer.metadata import PackedEntry
from qcs4w_packer.narrow import STORAGE, narrow, rounding_error
from qcs4w_packer.quantize import dequantize
from qcs4w_packer.rowunpack import dequantize_packed

TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def oracle(packed: PackedLinear) -> np.ndarray:
    """Read a weight as DESIGN states it, without the code under test: (nibble - 8) · scale."""
    nibbles = np.empty((packed.out_features, 2 * packed.packed.shape[1]), np.uint8)
    nibbles[:, 0::2] = packed.packed // 16
    nibbles[:, 1::2] = packed.packed % 16
    codes = nibbles[:, : packed.in_features].astype(np.float32) - np.float32(8)
    product: np.ndarray = codes * packed.scales[:, None]
    return product


def random_packed(rng: np.random.Generator, out_features: int, in_features: int) -> PackedLinear:
    """A weight of every code, packed."""
    return pack_weight(rng.standard_normal((out_features, in_features), np.float32))


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (5, 3), (3, 10), (7, 1), (113, 129), (64, 64), (2, 300_001)])
@pytest.mark.parametrize("transposed", [False, True], ids=["out-in", "in-out"])
def test_every_value_is_code_times_scale(
    shape: tuple[int, int], transposed: bool, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Odd and even K, tiny and wide, stored either way round: equal bits, in the source's shape."""
    packed = random_packed(rng, *shape)
    path = write_container(tmp_path / "a.safetensors", [(PackedEntry("w", *shape, transposed=transposed), packed)])
    report = unpack_file(path, tmp_path / "out.safetensors")
    expected = oracle(packed).T if transposed else oracle(packed)
    with safe_open(tmp_path / "out.safetensors", "np") as file:
        assert list(file.keys()) == ["w"]
        np.testing.assert_array_equal(file.get_tensor("w"), expected, strict=True)
    (result,) = report.tensors
    assert result.rounding is not None
    assert (result.tensor.shape, result.tensor.dtype, result.rounding.largest) == (expected.shape, "F32", 0)
    assert report.output_nbytes == (tmp_path / "out.safetensors").stat().st_size


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 40))
def test_the_fast_product_is_the_plain_one(seed: int, out_features: int, in_features: int) -> None:
    """The table of pairs gives the bits of codes · scales, negative zeros and scales of any size among them."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (out_features, -(-in_features // 2)), np.uint8)
    scales = rng.integers(0, 2**32, out_features, np.uint32).view(np.float32)
    scales[~np.isfinite(scales)] = -0.0
    with np.errstate(over="ignore"):
        expected = dequantize(PackedLinear(packed, scales, in_features).codes(), scales)
    values = np.ascontiguousarray(dequantize_packed(packed, scales, in_features))
    np.testing.assert_array_equal(values.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F64"])
def test_rounding_is_torchs(dtype: str, rng: np.random.Generator) -> None:
    """Random bits of every size, ties and subnormals become what torch makes of them, and the loss is told."""
    values = rng.integers(0, 2**32, 400_000, np.uint32)
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16 | 0x8000) & np.uint32(0x7F7FFFFF)
    values = np.concatenate([values, ties, ties | 0x80000000, np.arange(2000, dtype=np.uint32)]).view(np.float32)
    limit = {"F16": 65519.99, "BF16": 3.3895e38, "F64": np.inf}[dtype]
    values = values[np.isfinite(values) & (np.abs(values) < limit)][None]
    stored = narrow(values, dtype, name="w")
    expected = torch.from_numpy(values).to(TORCH[dtype])
    assert stored.tobytes() == expected.view(torch.uint8).numpy().tobytes()
    back = expected.to(torch.float64).numpy()
    relative = np.abs(back - values)[values != 0] / np.abs(values[values != 0]).astype(np.float64)
    assert rounding_error(values, dtype) == pytest.approx(relative.max(), rel=1e-6, abs=0)
    lasting = values[(back != 0) | (values == 0)]
    assert rounding_error(lasting, dtype) < 1


@pytest.mark.parametrize(("said", "written"), [
    ("F64", "F64"), ("F32", "F32"), ("F16", "F16"), ("BF16", "BF16"), ("F8_E4M3", "BF16"), ("unknown", "F32"),
])  # fmt: skip
def test_the_dtype_of_the_source(said: str, written: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """--dtype source gives each weight what it had; fp8, which would need its scale, becomes bf16."""
    packed = random_packed(rng, 5, 7)
    path = write_container(tmp_path / "a.safetensors", [(PackedEntry("w", 5, 7, source_dtype=said), packed)])
    report = unpack_file(path, tmp_path / "out.safetensors", request=UnpackRequest("source"))
    assert report.tensors[0].tensor.dtype == written
    stored = load_file(tmp_path / "out.safetensors")["w"]
    assert torch.equal(stored, torch.from_numpy(oracle(packed)).to(TORCH[written]))
    assert report.tensors[0].rounding is not None
    assert (report.tensors[0].rounding.largest > 0) == (written in ("F16", "BF16"))


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("transposed", [False, True], ids=["out-in", "in-out"])
def test_what_rounding_costs(dtype: str, transposed: bool, tmp_path: Path, rng: np.random.Generator) -> None:
    """The report tells the largest relative error of a value, and how many that were not 0 have become 0."""
    packed = random_packed(rng, 40, 33)
    packed.scales[7:9] = 2.0**-28 if dtype == "f16" else 2.0**-136
    path = write_container(tmp_path / "a.safetensors", [(PackedEntry("w", 40, 33, transposed=transposed), packed)])
    (result,) = unpack_file(path, tmp_path / "out.safetensors", request=UnpackRequest(dtype)).tensors
    before = oracle(packed)
    after = load_file(tmp_path / "out.safetensors")["w"].to(torch.float64).numpy()
    after = after.T if transposed else after
    assert result.rounding is not None
    assert result.rounding.vanished == np.count_nonzero((after == 0) & (before != 0)) > 0
    assert result.rounding.largest == 1
    packed.scales[7:9] = 0.1
    path.unlink()
    write_container(path, [(PackedEntry("w", 40, 33, transposed=transposed), packed)])
    (result,) = unpack_file(path, tmp_path / "out.safetensors", request=UnpackRequest(dtype), force=True).tensors
    before = oracle(packed)
    after = load_file(tmp_path / "out.safetensors")["w"].to(torch.float64).numpy()
    relative = np.abs((after.T if transposed else after) - before)[before != 0] / np.abs(before[before != 0])
    assert result.rounding is not None
    assert result.rounding.largest == pytest.approx(relative.max(), rel=1e-6, abs=0)
    assert result.rounding.vanished == 0


def test_every_dtype_has_a_name() -> None:
    """What can be stored is what the container's sources can be."""
    assert set(STORAGE) == set(TORCH)


def test_what_float16_cannot_hold_is_an_error(tmp_path: Path, rng: np.random.Generator) -> None:
    """A value beyond 65504 is named with its place, and nothing is left behind."""
    weight = rng.standard_normal((300, 2000), np.float32)
    weight[299, 1999] = -70_000
    path = tmp_path / "a.safetensors"
    save_container(path, {"big": pack_weight(weight)})
    with pytest.raises(LossyError, match=re.escape("tensor 'big': -74666.7 at row 299, column 1999")) as caught:
        unpack_file(path, tmp_path / "out.safetensors", request=UnpackRequest("f16"))
    assert "bf16" in str(caught.value.hint)
    assert not (tmp_path / "out.safetensors").exists()
    assert not leftovers(tmp_path)
    unpack_file(path, tmp_path / "out.safetensors", request=UnpackRequest("bf16"))


def test_what_float32_cannot_hold_is_an_error(tmp_path: Path) -> None:
    """-8 · scale may leave float32 where the weight was near its end: no infinity is written."""
    path = tmp_path / "a.safetensors"
    save_container(path, {"w": PackedLinear(np.array([[0x00]], np.uint8), np.array([1e38], np.float32), 2)})
    with pytest.raises(LossyError, match=r"tensor 'w': -inf at row 0, column 0 is beyond f32"):
        unpack_file(path, tmp_path / "out.safetensors")


@pytest.mark.parametrize("transposed", [False, True], ids=["out-in", "in-out"])
def test_a_stack_is_put_together_again(transposed: bool, tmp_path: Path, rng: np.random.Generator) -> None:
    """Three matrices of a 3-D source come back as one tensor of its name, in the order of their numbers."""
    stack = rng.standard_normal((11, 6, 9), np.float32)
    source = write_safetensors(tmp_path / "m.safetensors", {"experts": ("F32", stack.shape, stack.tobytes())})
    request = Request(include=("experts",), transpose=("experts",) if transposed else ())
    pack_file(source, tmp_path / "a.safetensors", request=request)
    report = unpack_file(tmp_path / "a.safetensors", tmp_path / "out.safetensors")
    stored = load_file(tmp_path / "out.safetensors")
    turned = stack.transpose(0, 2, 1) if transposed else stack
    expected = np.stack([oracle(pack_weight(matrix)) for matrix in turned])
    assert list(stored) == ["experts"]
    np.testing.assert_array_equal(stored["experts"].numpy(), expected.transpose(0, 2, 1) if transposed else expected)
    assert len(report.tensors[0].tensor.parts) == 11


def stack_entries(*numbers: int, parts: int | None = 3) -> list[PackedEntry]:
    """Entries of a stack with these numbers."""
    return [PackedEntry(f"t.{number}", 4, 6, stack="t", stack_parts=parts) for number in numbers]


def spoilt(entries: list[PackedEntry], index: int, **changes: object) -> list[PackedEntry]:
    """Entries of which one says something else."""
    return [replace(e, **changes) if i == index else e for i, e in enumerate(entries)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (stack_entries(0, 2), "part 't.1' is missing, it has 3"),
        (stack_entries(0), "part 't.1' and 1 more are missing, it has 3"),
        (stack_entries(0, 2, parts=None), "part 't.1' is missing, it has 3"),
        (stack_entries(0, 999_999_999, parts=None), "part 't.1' and 999,999,997 more are missing"),
        (stack_entries(0, 1, 2, 3), "has a part 't.3', its parts say that there are 3"),
        (spoilt(stack_entries(0, 1, 2), 1, name="u.1"), "has a part 'u.1', expected 't.NUMBER'"),
        (spoilt(stack_entries(0, 1, 2), 1, name="t.01"), "has a part 't.01', expected 't.NUMBER'"),
        (spoilt(stack_entries(0, 1, 2), 1, name="t"), "has a part 't', expected 't.NUMBER'"),
        (spoilt(stack_entries(0, 1, 2), 1, stack_parts=4), "do not say the same number"),
        (spoilt(stack_entries(0, 1, 2), 1, out_features=5), "'t.1' has out_features 5, 't.0' 4"),
        (spoilt(stack_entries(0, 1, 2), 2, transposed=True), "'t.2' has transposed True, 't.0' False"),
        (spoilt(stack_entries(0, 1, 2), 2, source_dtype="F16"), "'t.2' has source_dtype F16, 't.0' F32"),
        (spoilt(stack_entries(0, 1, 2), 2, aliases=("other",)), "part 't.2' has an alias 'other'"),
    ],
)
def test_a_stack_that_is_not_whole_is_refused(
    entries: list[PackedEntry], message: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Missing, extra, misnamed and misfit parts are named before anything is written."""
    tensors = [(entry, random_packed(rng, entry.out_features, entry.in_features)) for entry in entries]
    path = write_container(tmp_path / "a.safetensors", tensors)
    with pytest.raises(ContainerError, match=re.escape(message)):
        unpack_file(path, tmp_path / "out.safetensors", dry_run=True)


def test_a_part_of_a_stack_by_itself(tmp_path: Path, rng: np.random.Generator) -> None:
    """--tensor with a part's name gives its matrix, from an incomplete stack too; with the stack's name the whole."""
    tensors = [(entry, random_packed(rng, 4, 6)) for entry in stack_entries(0, 2)]
    path = write_container(tmp_path / "a.safetensors", tensors)
    report = unpack_file(path, tmp_path / "out.safetensors", request=UnpackRequest(tensors=("t.2",)))
    stored = load_file(tmp_path / "out.safetensors")
    np.testing.assert_array_equal(stored["t.2"].numpy(), oracle(tensors[1][1]))
    assert (list(stored), report.left_out) == (["t.2"], ("packed tensor 't.0' (not chosen)",))
    with pytest.raises(ContainerError, match="is missing"):
        unpack_file(path, None, request=UnpackRequest(tensors=("t",)), dry_run=True)


def test_tied_weights_get_every_name(tmp_path: Path, rng: np.random.Generator) -> None:
    """Each alias is a tensor of its own with the same values, and the report says what that takes."""
    packed = random_packed(rng, 6, 9)
    entry = PackedEntry("embed.weight", 6, 9, aliases=("head.weight", "decoder.weight"))
    path = write_container(tmp_path / "a.safetensors", [(entry, packed)])
    report = unpack_file(path, tmp_path / "out.safetensors")
    stored = load_file(tmp_path / "out.safetensors")
    assert set(stored) == {"embed.weight", "head.weight", "decoder.weight"}
    for tensor in stored.values():
        np.testing.assert_array_equal(tensor.numpy(), oracle(packed))
    assert report.alias_nbytes == 2 * 6 * 9 * 4


def test_the_rest_is_carried_byte_for_byte(tmp_path: Path, rng: np.random.Generator) -> None:
    """Tensors of every kind and the metadata go along; ours is replaced by a word on where the floats come from."""
    carried = {
        "norm": ("BF16", (3,), b"\x80\x3f\xc0\x7f\x01\x00"),
        "ids": ("I64", (2,), np.array([-1, 2**62], "<i8").tobytes()),
        "none": ("F32", (0, 4), b""),
        "scalar": ("F16", (), b"\x00\x3c"),
        "fp8": ("F8_E4M3", (2, 2), b"\x01\x7f\x80\xff"),
    }
    tensors = [(PackedEntry("w", 4, 5), random_packed(rng, 4, 5))]
    path = write_container(tmp_path / "a.safetensors", tensors, carried, {"format": "mlx", "made by": "us"})
    unpack_file(path, tmp_path / "out.safetensors")
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert set(file.keys()) == {"w", *carried}
        metadata = file.metadata()
        for name, (_, shape, data) in carried.items():
            tensor = file.get_tensor(name)
            assert tuple(tensor.shape) == shape
            assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == data
    assert {k: v for k, v in metadata.items() if k != "qcs4w_unpacked"} == {"format": "mlx", "made by": "us"}
    assert re.fullmatch(r"qcs4w \S+", metadata["qcs4w_unpacked"])


def test_there_and_back_is_within_half_a_step(tmp_path: Path, rng: np.random.Generator) -> None:
    """From a float source and back: no value is further from it than half a step of its row."""
    source = tmp_path / "m.safetensors"
    weight = rng.standard_normal((40, 33)).astype(np.float32)
    write_safetensors(source, {"a.weight": ("F32", weight.shape, weight.tobytes())})
    pack_file(source, tmp_path / "a.safetensors")
    unpack_file(tmp_path / "a.safetensors", tmp_path / "floats.safetensors")
    with open_packed(tmp_path / "a.safetensors") as file:
        expected = oracle(file.load("a.weight"))
    again = load_file(tmp_path / "floats.safetensors")["a.weight"].numpy()
    np.testing.assert_array_equal(again, expected)
    assert np.abs(again - weight).max() <= np.abs(weight).max() / 15 * 1.001


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["a.q.weight", "a.k.weight", "b.q.weight"]),
        ({"tensors": ("a.k",)}, ["a.k.weight"]),
        ({"tensors": ("tied",)}, ["b.q.weight"]),
        ({"tensors": ("b.q.weight", "a.q.weight")}, ["a.q.weight", "b.q.weight"]),
        ({"include": ("*.q.weight",)}, ["a.q.weight", "b.q.weight"]),
        ({"include": ("*.q.weight",), "exclude": ("a.*",)}, ["b.q.weight"]),
        ({"exclude": ("tied",)}, ["a.q.weight", "a.k.weight"]),
        ({"include": (r"re:.*\.[qv]\.weight",)}, ["a.q.weight", "b.q.weight"]),
    ],
)
def test_what_is_chosen(
    given: dict[str, tuple[str, ...]], expected: list[str], tmp_path: Path, rng: np.random.Generator
) -> None:
    """Names, modules, aliases and patterns choose in the order of the file; what is not chosen is left out and told."""
    path = chosen_from(tmp_path, rng)
    report = unpack_file(path, tmp_path / "out.safetensors", request=UnpackRequest(**given))  # type: ignore[arg-type]
    assert [result.tensor.name for result in report.tensors] == expected
    there = set(load_file(tmp_path / "out.safetensors"))
    assert there == {*expected, "norm", *(["tied"] * ("b.q.weight" in expected))}
    assert len(report.left_out) == 3 - len(expected)


def chosen_from(tmp_path: Path, rng: np.random.Generator) -> Path:
    """Write a container of three weights, one of them tied, and a norm."""
    entries = [PackedEntry(f"{name}.weight", 3, 4) for name in ("a.q", "a.k", "b.q")]
    entries[2] = replace(entries[2], aliases=("tied",))
    tensors = [(entry, random_packed(rng, 3, 4)) for entry in entries]
    return write_container(tmp_path / "a.safetensors", tensors, {"norm": ("F32", (1,), b"\0\0\x80\x3f")})


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"tensors": ("a.z",)}, UnknownTensorError, "no packed tensor 'a.z'"),
        ({"tensors": ("norm",)}, UnknownTensorError, "no packed tensor 'norm'"),
        ({"include": ("z*",)}, UnknownTensorError, "--include 'z*' matches no packed tensor"),
        ({"exclude": ("norm",)}, UnknownTensorError, "--exclude 'norm' matches no packed tensor"),
        ({"exclude": ("*",)}, SelectionError, "nothing to unpack"),
        ({"tensors": ("a.q",), "exclude": ("a.*",)}, SelectionError, "both asked for and excluded"),
        ({"tensors": ("a.q",), "include": ("a.*",)}, SelectionError, "by --tensor and by --include"),
    ],
)
def test_what_cannot_be_chosen(
    given: dict[str, tuple[str, ...]],
    error: type[Qcs4wError],
    message: str,
    tmp_path: Path,
    rng: np.random.Generator,
) -> None:
    """A name or a pattern that matches nothing is an error, as is a choice of nothing."""
    path = chosen_from(tmp_path, rng)
    with pytest.raises(error, match=re.escape(message)):
        unpack_file(path, tmp_path / "out.safetensors", request=UnpackRequest(**given))  # type: ignore[arg-type]
    assert not (tmp_path / "out.safetensors").exists()


def test_packed_only_leaves_the_rest(tmp_path: Path, rng: np.random.Generator) -> None:
    """Without the other tensors; they are told."""
    path = chosen_from(tmp_path, rng)
    report = unpack_file(path, tmp_path / "out.safetensors", request=UnpackRequest(packed_only=True))
    assert "norm" not in load_file(tmp_path / "out.safetensors")
    assert (report.carried, report.left_out) == ((), ("tensor 'norm'",))


@pytest.mark.parametrize("transposed", [False, True], ids=["out-in", "in-out"])
@pytest.mark.parametrize("which", ["qcs4w_packed", "qcs4w_scale"])
def test_damaged_bytes_never_become_floats(
    which: str, transposed: bool, tmp_path: Path, rng: np.random.Generator
) -> None:
    """A digest that does not match leaves no output, and an older output as it was."""
    path = write_container(
        tmp_path / "a.safetensors",
        [(PackedEntry("w", 300, 1000, transposed=transposed), random_packed(rng, 300, 1000))],
    )
    with safe_open(path, "np") as file:
        last = file.get_tensor(f"w.{which}").tobytes()[-64:]
    place = path.read_bytes().rindex(last) + 40
    poke(path, place, bytes([path.read_bytes()[place] ^ 1]))
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"old")
    with pytest.raises(DigestError, match=r"tensor 'w': the .* have sha256"):
        unpack_file(path, out, force=True)
    assert out.read_bytes() == b"old"
    assert not leftovers(tmp_path)


def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    """No NaN is written, though the digests are right."""
    packed = pack_weight(np.ones((3, 4), np.float32))
    packed.scales[1] = np.nan
    path = write_container(tmp_path / "a.safetensors", [(PackedEntry("w", 3, 4), packed)])
    with pytest.raises(ContainerError, match="the scale of row 1 is nan"):
        unpack_file(path, tmp_path / "out.safetensors")


def test_names_that_meet_are_an_error(tmp_path: Path, rng: np.random.Generator) -> None:
    """A packed tensor whose own name, alias or stack is carried as well cannot be written beside it."""
    norm = {"w": ("F32", (1,), b"\0\0\0\0")}
    for entry in (
        PackedEntry("w", 4, 6),
        PackedEntry("v", 4, 6, aliases=("w",)),
        PackedEntry("w.0", 4, 6, stack="w", stack_parts=1),
    ):
        path = write_container(tmp_path / "a.safetensors", [(entry, random_packed(rng, 4, 6))], norm)
        with pytest.raises(OutputError, match="two tensors of the output would be named 'w'"):
            unpack_file(path, tmp_path / "out.safetensors")
        unpack_file(path, None, request=UnpackRequest(packed_only=True), dry_run=True)
        path.unlink()


def test_a_dry_run_reads_no_weight(tmp_path: Path, rng: np.random.Generator) -> None:
    """It says sizes and files, takes damaged weights, and writes nothing."""
    path = chosen_from(tmp_path, rng)
    real = unpack_file(path, tmp_path / "real.safetensors")
    poke(path, path.stat().st_size - 1, b"\xff")
    report = unpack_file(path, tmp_path / "out.safetensors", dry_run=True)
    assert not (tmp_path / "out.safetensors").exists()
    assert (report.output_nbytes, report.is_dry_run) == (real.output_nbytes, True)
    assert all(result.rounding is None for result in report.tensors)


def test_the_output_is_never_what_is_read(tmp_path: Path, rng: np.random.Generator) -> None:
    """Not even with force, and an output that is there needs it."""
    path = chosen_from(tmp_path, rng)
    before = path.read_bytes()
    with pytest.raises(OutputError, match="file being read"):
        unpack_file(path, path, force=True)
    (tmp_path / "out.safetensors").write_bytes(b"old")
    with pytest.raises(OutputError, match="exists already"):
        unpack_file(path, tmp_path / "out.safetensors")
    with pytest.raises(UsageError):
        unpack_file(path, None)
    assert path.read_bytes() == before


def test_raw_bytes_and_their_scales(tmp_path: Path, rng: np.random.Generator) -> None:
    """Bytes that nothing describes are unpacked with what the user says of them; without scales they are refused."""
    packed = random_packed(rng, 6, 9)
    packed.packed.tofile(tmp_path / "w.bin")
    packed.scales.tofile(tmp_path / "s.bin")
    unpack_file(tmp_path / "w.bin", tmp_path / "out.safetensors", blob=Blob((6, 9), scales=tmp_path / "s.bin"))
    np.testing.assert_array_equal(load_file(tmp_path / "out.safetensors")["weight"].numpy(), oracle(packed))
    with pytest.raises(UsageError, match="scales are not known"):
        unpack_file(tmp_path / "w.bin", None, blob=Blob((6, 9)), dry_run=True)


@pytest.mark.parametrize("target", ["q4gsw", "compressed-tensors", "raw", "npy"])
def test_what_other_tools_wrote(
    target: str, tmp_path: Path, rng: np.random.Generator, qcs4w: Callable[..., object]
) -> None:
    """A layout of another tool gives the floats that our own gives."""
    packed = random_packed(rng, 16, 33)
    save_container(tmp_path / "a.safetensors", {"fc.weight": packed})
    out = tmp_path / ("b.safetensors" if target == "q4gsw" else "b")
    qcs4w("convert", tmp_path / "a.safetensors", "--to", target, "-o", out)
    unpack_file(out, tmp_path / "out.safetensors")
    np.testing.assert_array_equal(load_file(tmp_path / "out.safetensors")["fc.weight"].numpy(), oracle(packed))


MEMORY = """
import sys
sys.path.insert(0, sys.argv[1])
from qcs4w_packer import UnpackRequest, unpack_file
unpack_file(sys.argv[2], sys.argv[3], request=UnpackRequest(sys.argv[4]))
assert "torch" not in sys.modules
print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.parametrize("transposed", [False, True], ids=["out-in", "in-out"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_memory_does_not_grow_with_the_tensor(transposed: bool, dtype: str, tmp_path: Path) -> None:
    """A weight of 256 MiB is unpacked in little more than its packed bytes, or than nothing, without torch."""
    shape = (8192, 8192)
    packed = PackedLinear(np.full((8192, 4096), 0x3C, np.uint8), np.full(8192, 0.5, np.float32), 8192)
    path = write_container(tmp_path / "a.safetensors", [(PackedEntry("w", *shape, transposed=transposed), packed)])
    done = run_python(MEMORY, Path(__file__).parent.parent / "packer", path, tmp_path / "out.safetensors", dtype)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 90e6 + (shape[0] * shape[1] // 2 * 1.5 if transposed else 0)
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        part = file.get_slice("w")[8190:, 8190:].to(torch.float32)
    assert torch.equal(part, torch.tensor([[-2.5, 2.0]] * 2).T if transposed else torch.tensor([[-2.5, 2.0]] * 2))


def test_what_an_executorch_program_holds(tmp_path: Path) -> None:
    """The linears of a .pte become floats, by the names of their calls."""
    program = GOLDEN / "pte" / "two_layer_bias.pte"
    report = unpack_file(program, tmp_path / "out.safetensors")
    stored = load_file(tmp_path / "out.safetensors")
    with open_packed(program) as file:
        assert list(file.entries) == [result.tensor.name for result in report.tensors]
        assert len(file.entries) == 2
        for name in file.entries:
            np.testing.assert_array_equal(stored[name].numpy(), oracle(file.load(name)))
