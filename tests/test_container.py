"""The container: what stands in it, what is refused, and that other tools can open it."""

import hashlib
import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making import mutated, raw_safetensors, save_floats, time_limit, write_safetensors
from safetensors.numpy import load_file, save_file

from qcs4w_packer import (
    Container,
    ContainerError,
    DigestError,
    NonFiniteError,
    OutputError,
    PackedLinear,
    Qcs4wError,
    UnknownTensorError,
    __version__,
    load_packed,
    pack_weight,
    save_container,
)
from qcs4w_packer.container import is_container_like
from qcs4w_packer.container_writer import ContainerWriter
from qcs4w_packer.metadata import PackedEntry, bias_name
from qcs4w_packer.safetensors_file import DTYPE_BITS, Planned, SafetensorsFile

WEIGHT = np.array([[1, -1, 0.5, -0.5, 0.25], [0.3, -0.3, 0.1, 0, 0.2], [2, 0, 0, -1, 1]], np.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A container with two packed tensors and a bias."""
    path = tmp_path / "a.safetensors"
    packed = {"fc.weight": pack_weight(WEIGHT), "out.weight": pack_weight(WEIGHT[:2, :4])}
    save_container(path, packed, biases={"fc.weight": np.array([1, 2, 3], np.float32)})
    return path


def parts(path: Path) -> tuple[dict[str, Any], bytes]:
    """A file's header and data."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit the container's own document."""
    header, data = parts(path)
    document = json.loads(header["__metadata__"]["qcs4w"])
    change(document)
    header["__metadata__"]["qcs4w"] = json.dumps(document)
    raw_safetensors(path, header, data)


def renamed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit the header itself."""
    header, data = parts(path)
    change(header)
    raw_safetensors(path, header, data)


def test_what_stands_in_the_file(path: Path) -> None:
    """Names, dtypes, shapes and the whole metadata document, read by the safetensors package and by json."""
    stored = load_file(path)
    packed = pack_weight(WEIGHT)
    assert set(stored) == {
        "fc.weight.qcs4w_packed", "fc.weight.qcs4w_scale", "fc.weight.qcs4w_shape", "fc.bias",
        "out.weight.qcs4w_packed", "out.weight.qcs4w_scale", "out.weight.qcs4w_shape",
    }  # fmt: skip
    np.testing.assert_array_equal(stored["fc.weight.qcs4w_packed"], packed.packed, strict=True)
    np.testing.assert_array_equal(stored["fc.weight.qcs4w_scale"], packed.scales, strict=True)
    np.testing.assert_array_equal(stored["fc.weight.qcs4w_shape"], np.array([3, 5], np.int64), strict=True)
    header, _ = parts(path)
    assert list(header["__metadata__"]) == ["qcs4w"]
    document = json.loads(header["__metadata__"]["qcs4w"])
    described = document.pop("tensors")
    assert document == {"version": 1, "nibble_order": "even-high", "offset": 8, "tool": f"qcs4w {__version__}"}
    assert list(described) == ["fc.weight", "out.weight"]
    assert described["fc.weight"] == {
        "source_dtype": "F32",
        "method": "absmax",
        "packed_sha256": hashlib.sha256(packed.packed.tobytes()).hexdigest(),
        "scale_sha256": hashlib.sha256(packed.scales.astype("<f4").tobytes()).hexdigest(),
        "transposed": False,
        "aliases": [],
    }


def test_the_bytes_of_a_tiny_file(tmp_path: Path) -> None:
    """The data of a container of one row, byte by byte: shape, scale, codes, aligned by falling element size."""
    save_container(tmp_path / "a.safetensors", {"weight": pack_weight(np.array([[1, -1, 0.5, -0.5]], np.float32))})
    header, data = parts(tmp_path / "a.safetensors")
    assert {name: said["data_offsets"] for name, said in header.items() if name != "__metadata__"} == {
        "weight.qcs4w_shape": [0, 16],
        "weight.qcs4w_scale": [16, 20],
        "weight.qcs4w_packed": [20, 22],
    }
    assert data.hex(" ") == "01 00 00 00 00 00 00 00 04 00 00 00 00 00 00 00 89 88 08 3e f1 c4"


@st.composite
def packed_linears(draw: st.DrawFn) -> PackedLinear:
    """Any packed linear that holds its invariants; pads may be wrong and scales odd."""
    rows, in_features = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    width = (in_features + 1) // 2
    packed = np.frombuffer(draw(st.binary(min_size=rows * width, max_size=rows * width)), np.uint8)
    finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
    scales = np.array(draw(st.lists(finite, min_size=rows, max_size=rows)), np.float32)
    return PackedLinear(packed.reshape(rows, width), scales, in_features)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8), packed_linears(), min_size=1, max_size=3
    )
)
def test_loading_undoes_saving(tmp_path_factory: pytest.TempPathFactory, packed: dict[str, PackedLinear]) -> None:
    """Load ∘ save is the identity, for any Unicode name that does not meet another."""
    path = tmp_path_factory.mktemp("a") / "a.safetensors"
    save_container(path, packed)
    with Container(path) as container:
        assert list(container.entries) == list(packed)
        for name, expected in packed.items():
            found = container.load(name)
            assert found.in_features == expected.in_features
            np.testing.assert_array_equal(found.packed, expected.packed, strict=True)
            assert found.scales.tobytes() == expected.scales.tobytes()
        assert container.carried == []


def test_strided_arrays_are_saved_as_they_look(tmp_path: Path) -> None:
    """Views of packed bytes and scales are written like their copies."""
    packed, scales = np.arange(24, dtype=np.uint8).reshape(6, 4), np.arange(1, 7, dtype=np.float32)
    save_container(tmp_path / "a.safetensors", {"w": PackedLinear(packed[::2, ::2], scales[::2], 4)})
    found = load_packed(tmp_path / "a.safetensors")
    assert found.packed.tolist() == packed[::2, ::2].tolist()
    assert found.scales.tolist() == [1, 3, 5]


def test_every_tensor_is_aligned_to_its_elements(tmp_path: Path) -> None:
    """Whatever is carried and however long names are, each tensor starts at a multiple of its element's size."""
    for length in range(1, 12):
        carried = [Planned(f"{dtype}{'x' * length}", dtype, (4, 3 + (DTYPE_BITS[dtype] < 8))) for dtype in DTYPE_BITS]
        entries = [PackedEntry("w" * length, 3, 5), PackedEntry("v", 1, 1, aliases=("u" * length,))]
        writer = ContainerWriter(entries, carried, {"note": "n" * length})
        target = tmp_path / f"{length}.safetensors"
        with target.open("wb+") as file:
            writer.begin(file.fileno())
            for entry in entries:
                packed = pack_weight(np.ones((entry.out_features, entry.in_features), np.float32))
                writer.write_rows(entry.name, 0, packed.packed, packed.scales)
            writer.finish()
        with SafetensorsFile(target) as written:
            assert written.nbytes == writer.nbytes
            for slot in written.slots.values():
                assert slot.start % max(1, DTYPE_BITS[slot.dtype] // 8) == 0


def test_rows_may_come_in_pieces(tmp_path: Path) -> None:
    """Rows written a few at a time give the file that writing all at once gives, digests included."""
    packed = pack_weight(WEIGHT)
    save_container(tmp_path / "whole.safetensors", {"w": packed})
    writer = ContainerWriter([PackedEntry("w", 3, 5)])
    with (tmp_path / "pieces.safetensors").open("wb+") as file:
        writer.begin(file.fileno())
        writer.write_rows("w", 0, packed.packed[:2], packed.scales[:2])
        writer.write_rows("w", 2, packed.packed[2:], packed.scales[2:])
        writer.finish()
    assert (tmp_path / "pieces.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("entries", "carried", "name"),
    [
        ([PackedEntry("w", 1, 1)], [Planned("w.qcs4w_scale", "F32", (1,))], "w.qcs4w_scale"),
        ([PackedEntry("w", 1, 1), PackedEntry("w", 2, 2)], [], "w"),
        ([PackedEntry("w", 1, 1, aliases=("v",)), PackedEntry("v", 2, 2)], [], "v"),
        ([PackedEntry("w", 1, 1, aliases=("v",)), PackedEntry("u", 2, 2, aliases=("v",))], [], "v"),
        ([PackedEntry("w", 1, 1)], [Planned("b", "F32", (1,)), Planned("b", "F32", (2,))], "b"),
    ],
    ids=["generated and carried", "packed twice", "alias and packed", "alias twice", "carried twice"],
)
def test_names_that_meet_are_an_error(entries: list[PackedEntry], carried: list[Planned], name: str) -> None:
    """Two tensors of one name are refused before anything is written."""
    with pytest.raises(OutputError, match=f"two tensors of the output would be named '{name}'"):
        ContainerWriter(entries, carried)


@pytest.mark.parametrize("name", ["__metadata__", "a\udc80"], ids=["reserved", "surrogate"])
def test_names_that_no_header_can_hold_are_an_error(name: str) -> None:
    """A name that would spoil the header is refused."""
    with pytest.raises(OutputError, match="a container cannot hold a tensor"):
        ContainerWriter([PackedEntry("w", 1, 1)], [Planned(name, "F32", (1,))])


def test_a_container_of_nothing_is_not_written(tmp_path: Path) -> None:
    """What no reader would take is refused by the writer."""
    with pytest.raises(OutputError, match="at least one packed tensor"):
        save_container(tmp_path / "none.safetensors", {})
    assert not list(tmp_path.iterdir())


def test_an_output_is_not_overwritten(path: Path) -> None:
    """Saving over a file needs force."""
    before = path.read_bytes()
    with pytest.raises(OutputError, match="exists already"):
        save_container(path, {"w": pack_weight(WEIGHT)})
    assert path.read_bytes() == before
    save_container(path, {"w": pack_weight(WEIGHT)}, force=True)
    assert list(Container(path).entries) == ["w"]


DOCUMENTS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "newer version": (lambda d: d.update(version=2), "has container version 2, this qcs4w reads 1"),
    "version as text": (lambda d: d.update(version="1"), "has container version '1'"),
    "version true": (lambda d: d.update(version=True), "has container version True"),
    "no version": (lambda d: d.pop("version"), "has container version None"),
    "other order": (lambda d: d.update(nibble_order="even-low"), "states nibble_order 'even-low', this qcs4w reads"),
    "no order": (lambda d: d.pop("nibble_order"), "states nibble_order None"),
    "other offset": (lambda d: d.update(offset=0), "states offset 0, this qcs4w reads 8"),
    "tensors a list": (lambda d: d.update(tensors=[]), "is not an object with 'tensors'"),
    "no tensors": (lambda d: d.update(tensors={}), "tensor 'fc.weight' is packed but not described"),
    "one not described": (lambda d: d["tensors"].pop("out.weight"), "tensor 'out.weight' is packed but not described"),
    "one too many": (lambda d: d["tensors"].update(x={}), "tensor 'x' is described in the metadata but x.qcs4w_packed"),
    "no digest": (lambda d: d["tensors"]["fc.weight"].pop("packed_sha256"), "description in the metadata is not sound"),
    "digest a number": (lambda d: d["tensors"]["fc.weight"].update(scale_sha256=1), "is not sound"),
    "aliases a text": (lambda d: d["tensors"]["fc.weight"].update(aliases="ab"), "aliases are not a list of names"),
    "aliases of numbers": (lambda d: d["tensors"]["fc.weight"].update(aliases=[1]), "aliases are not a list of names"),
    "stack a number": (lambda d: d["tensors"]["fc.weight"].update(stack=1), "stack is not a name"),
    "not an object": (lambda d: d["tensors"].update({"fc.weight": 1}), "not an object"),
    "alias of another": (
        lambda d: d["tensors"]["fc.weight"].update(aliases=["out.weight"]),
        "'out.weight' is an alias of tensor 'fc.weight' and of 'out.weight'",
    ),
}  # fmt: skip

HEADERS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no metadata": (lambda h: h.pop("__metadata__"), "has packed tensors but no 'qcs4w' metadata"),
    "not JSON": (lambda h: h["__metadata__"].update(qcs4w="{"), "metadata is not JSON"),
    "deep JSON": (lambda h: h["__metadata__"].update(qcs4w="[" * 100_000), "metadata is not JSON"),
    "a list": (lambda h: h["__metadata__"].update(qcs4w="[]"), "is not an object with 'tensors'"),
    "no scale": (lambda h: h.update(x=h.pop("fc.weight.qcs4w_scale")), "fc.weight.qcs4w_scale is missing"),
    "no shape": (lambda h: h.update(x=h.pop("fc.weight.qcs4w_shape")), "fc.weight.qcs4w_shape is missing"),
    "no codes": (lambda h: h.update(x=h.pop("fc.weight.qcs4w_packed")), "fc.weight.qcs4w_packed is missing"),
    "scales of one row": (
        lambda h: h["fc.weight.qcs4w_scale"].update(shape=[3, 1]),
        r"fc.weight.qcs4w_scale is F32 \[3, 1\], expected F32 \[3\] for N 3, K 5",
    ),
    "scales as integers": (lambda h: h["fc.weight.qcs4w_scale"].update(dtype="I32"), "is I32"),
    "codes signed": (lambda h: h["fc.weight.qcs4w_packed"].update(dtype="I8"), r"is I8 \[3, 3\], expected U8 \[3, 3\]"),
    "codes flat": (lambda h: h["fc.weight.qcs4w_packed"].update(shape=[9]), r"is U8 \[9\]"),
    "shape as floats": (lambda h: h["fc.weight.qcs4w_shape"].update(dtype="F64"), r"is F64 \[2\], expected I64 \[2\]"),
    "shape of another": (
        lambda h: h.update(
            {"fc.weight.qcs4w_shape": h["out.weight.qcs4w_shape"], "out.weight.qcs4w_shape": h["fc.weight.qcs4w_shape"]}
        ),
        "expected U8",
    ),
}  # fmt: skip


def check_refusal(path: Path, words: str) -> None:
    """A strict reader refuses by name; a lenient one says the same and goes on."""
    with pytest.raises(ContainerError, match=f"(?s)a.safetensors: .*{words}"):
        Container(path)
    with Container(path, strict=False) as container:
        assert any(re.search(words, problem) for problem in container.problems), container.problems
        for entry in container.entries.values():
            container.wrong_digests(entry)
            container.arrays(entry)


@pytest.mark.parametrize(("change", "words"), DOCUMENTS.values(), ids=DOCUMENTS)
def test_a_document_that_is_not_sound(change: Callable[[dict[str, Any]], None], words: str, path: Path) -> None:
    """Unknown versions, orders and descriptions are refused, or collected as problems."""
    rewrite(path, change)
    check_refusal(path, words)


@pytest.mark.parametrize(("change", "words"), HEADERS.values(), ids=HEADERS)
def test_a_header_that_is_not_sound(change: Callable[[dict[str, Any]], None], words: str, path: Path) -> None:
    """Missing or misshapen parts are refused, or collected as problems."""
    renamed(path, change)
    check_refusal(path, words)


def test_unknown_keys_are_left_alone(path: Path) -> None:
    """A later tool may say more about version 1."""
    rewrite(path, lambda d: d.update(note="x"))
    rewrite(path, lambda d: d["tensors"]["fc.weight"].update(note="y"))
    assert Container(path).load("fc.weight").in_features == 5


def test_an_ordinary_file_is_no_container(tmp_path: Path) -> None:
    """A safetensors file without our metadata is told how to become one."""
    path = save_floats(tmp_path / "a.safetensors", {"fc.weight": WEIGHT})
    with pytest.raises(ContainerError, match="is not a qcs4w container") as caught:
        Container(path)
    assert "qcs4w pack" in (caught.value.hint or "")
    assert not is_container_like(path)
    with Container(path, strict=False) as container:
        assert (container.problems, container.entries) == (["is not a qcs4w container"], {})
        assert container.carried == ["fc.weight"]


def test_a_broken_container_is_still_container_like(path: Path) -> None:
    """Either sign is enough."""
    assert is_container_like(path)
    renamed(path, lambda h: h.pop("__metadata__"))
    assert is_container_like(path)


@pytest.mark.parametrize("part", ["packed", "scale"])
def test_tampering_is_noticed(part: str, path: Path) -> None:
    """Any flipped bit of codes or scales fails the digest, and only for its own tensor."""
    with Container(path) as container:
        slot = container._file.slots[f"fc.weight.qcs4w_{part}"]
    sound = path.read_bytes()
    for place in range(slot.start, slot.start + slot.nbytes):
        spoilt = bytearray(sound)
        spoilt[place] ^= 1 << place % 8
        path.write_bytes(spoilt)
        with Container(path) as container:
            what = "packed bytes" if part == "packed" else "scales"
            words = rf"tensor 'fc\.weight': the {what} have sha256 [0-9a-f]{{64}}, the file says"
            with pytest.raises(DigestError, match=words):
                container.load("fc.weight")
            assert len(container.wrong_digests(container.entry("fc.weight"))) == 1
            container.load("out.weight")


def test_swapped_nibbles_are_noticed(path: Path) -> None:
    """Another tool's rewriting of the bytes in its own order fails the digest."""
    header, data = parts(path)
    begin, end = header["fc.weight.qcs4w_packed"]["data_offsets"]
    swapped = bytes((byte >> 4) | (byte & 15) << 4 for byte in data[begin:end])
    raw_safetensors(path, header, data[:begin] + swapped + data[end:])
    with pytest.raises(DigestError):
        load_packed(path, "fc.weight")


def test_a_scale_that_is_not_finite_is_refused_whatever_its_digest(path: Path) -> None:
    """Fresh digests do not make NaN a scale."""
    header, data = parts(path)
    begin, end = header["fc.weight.qcs4w_scale"]["data_offsets"]
    scales = np.array([1, np.nan, 1], "<f4").tobytes()
    raw_safetensors(path, header, data[:begin] + scales + data[end:])
    rewrite(path, lambda d: d["tensors"]["fc.weight"].update(scale_sha256=hashlib.sha256(scales).hexdigest()))
    with pytest.raises(ContainerError, match=r"tensor 'fc\.weight': scale of row 1 is nan"):
        load_packed(path, "fc.weight")


def test_names_find_their_tensor(path: Path) -> None:
    """A tensor is found by name, alias, or the name of its module; others get a hint."""
    rewrite(path, lambda d: d["tensors"]["fc.weight"].update(aliases=["tied.weight"]))
    with Container(path) as container:
        for name in ("fc.weight", "fc", "tied.weight", "tied"):
            assert container.entry(name).name == "fc.weight"
        with pytest.raises(UnknownTensorError, match=r"no packed tensor 'fd\.weight'") as caught:
            container.entry("fd.weight")
        assert "did you mean 'fc.weight'" in (caught.value.hint or "")
        with pytest.raises(UnknownTensorError) as caught:
            container.entry("fc.bias")
        assert "not packed" in (caught.value.hint or "")
        with pytest.raises(UnknownTensorError, match="holds 2 packed tensors"):
            container.only()
    with pytest.raises(UnknownTensorError):
        load_packed(path)


@pytest.mark.parametrize(
    ("name", "bias"),
    [("fc.weight", "fc.bias"), ("weight", "bias"), ("in_proj_weight", "in_proj_bias"), ("T.0", "T.0.bias")],
)
def test_the_name_of_a_bias(name: str, bias: str) -> None:
    """The custom of modules."""
    assert bias_name(name) == bias


def test_a_bias_is_found(path: Path) -> None:
    """A carried bias belongs to its weight; a weight without one has None."""
    with Container(path) as container:
        bias = container.bias(container.entry("fc"))
        assert bias is not None
        assert bias.tolist() == [1, 2, 3]
        assert container.bias(container.entry("out")) is None


@pytest.mark.parametrize(
    ("bias", "error", "words"),
    [
        (np.zeros(2), ContainerError, r"bias 'fc\.bias' is F32 \[2\], expected 3 floats"),
        (np.zeros((3, 1)), ContainerError, r"is F32 \[3, 1\]"),
        (np.array([0, np.nan, 0]), NonFiniteError, r"bias 'fc\.bias' holds nan at column 1"),
        (np.array([0, 0, -np.inf]), NonFiniteError, "holds -inf at column 2"),
    ],
    ids=["short", "matrix", "nan", "inf"],
)
def test_a_bias_that_does_not_fit(bias: np.ndarray, error: type[Qcs4wError], words: str, tmp_path: Path) -> None:
    """N finite floats, or an error that names it."""
    path = tmp_path / "a.safetensors"
    save_container(path, {"fc.weight": pack_weight(WEIGHT)})
    with Container(path) as container:
        text = json.dumps(container.document)
    save_file({**load_file(path), "fc.bias": bias.astype(np.float32)}, path, metadata={"qcs4w": text})
    with Container(path) as container, pytest.raises(error, match=words):
        container.bias(container.entry("fc"))


@pytest.mark.parametrize(
    ("name", "bias", "words"),
    [
        ("fc.weight", np.zeros(2, np.float32), r"shape \[2\], expected \[3\]"),
        ("fc", np.zeros(3, np.float32), "one of fc.weight"),
    ],
    ids=["shape", "name"],
)
def test_a_bias_that_does_not_fit_is_not_saved(name: str, bias: np.ndarray, words: str, tmp_path: Path) -> None:
    """A bias belongs to a weight that is saved with it, and has its N."""
    with pytest.raises(ContainerError, match=words):
        save_container(tmp_path / "a.safetensors", {"fc.weight": pack_weight(WEIGHT)}, biases={name: bias})
    assert not list(tmp_path.iterdir())


def test_other_metadata_is_kept_apart(path: Path) -> None:
    """Ours is one key; the others belong to the file."""
    renamed(path, lambda h: h["__metadata__"].update(format="pt"))
    assert Container(path).metadata == {"format": "pt"}


@pytest.mark.parametrize("share", [0, 0.01, 0.3, 0.7, 0.9, 0.999])
def test_a_truncated_file_is_refused(share: float, path: Path) -> None:
    """A file that lacks its last byte, or more, is not opened."""
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(Qcs4wError):
        Container(path)


def test_every_flipped_bit_is_refused_or_harmless(path: Path) -> None:
    """Of all single-bit flips none gives wrong weights: refused, or what is still found is unchanged."""
    sound = path.read_bytes()
    expected = {name: load_packed(path, name) for name in ("fc.weight", "out.weight")}
    with time_limit(60):
        for place in range(len(sound)):
            spoilt = bytearray(sound)
            spoilt[place] ^= 1 << (place * 5 + 3) % 8
            path.write_bytes(spoilt)
            try:
                with Container(path) as container:
                    for name in container.entries:
                        found = container.load(name)
                        assert found.in_features == expected[name].in_features
                        np.testing.assert_array_equal(found.packed, expected[name].packed)
                        np.testing.assert_array_equal(found.scales, expected[name].scales)
            except Qcs4wError:
                pass


def test_damaged_files_do_not_stop_a_lenient_reader(path: Path, rng: np.random.Generator) -> None:
    """500 damaged containers: nothing but a Qcs4wError comes out, and what can be shown is shown."""
    sound = path.read_bytes()
    shown = 0
    with time_limit(60):
        for _ in range(500):
            path.write_bytes(mutated(sound, rng))
            try:
                with Container(path, strict=False) as container:
                    for entry in container.entries.values():
                        shown += 1
                        container.wrong_digests(entry)
                        container.arrays(entry)
                        container.bias(entry)
            except Qcs4wError:
                pass
    assert shown > 20, "the mutator leaves too few files readable to prove anything"


PACKED = np.zeros((2, 3), np.uint8)
SCALES = np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("packed", "scales", "in_features", "words"),
    [
        (PACKED, SCALES, 0, "in_features is 0, expected at least 1"),
        (PACKED, SCALES, 4, r"shape \[2, 3\], expected uint8 \[N, 2\]"),
        (PACKED, SCALES, 7, r"expected uint8 \[N, 4\]"),
        (PACKED.astype(np.int8), SCALES, 6, "dtype int8"),
        (PACKED[0], SCALES, 6, r"shape \[3\]"),
        (PACKED[:0], SCALES[:0], 6, "packed has no rows"),
        (PACKED, SCALES[:1], 6, r"shape \[1\], expected float32 \[2\]"),
        (PACKED, SCALES.astype(np.float64), 6, "dtype float64"),
        (PACKED, SCALES[:, None], 6, r"shape \[2, 1\]"),
        (PACKED, SCALES * np.float32(np.inf), 6, "scale of row 0 is inf"),
    ],
    ids=["no columns", "wide", "narrow", "signed", "flat", "no rows", "few scales", "f64 scales", "2-D scales", "inf"],
)
def test_a_packed_linear_checks_itself(packed: Any, scales: Any, in_features: int, words: str) -> None:
    """Shapes, dtypes and scales that do not fit together are refused when it is made."""
    with pytest.raises(ContainerError, match=words):
        PackedLinear(packed, scales, in_features)


def test_huge_shapes_are_refused_by_their_slots(tmp_path: Path) -> None:
    """N and K come from the file and are believed only where the bytes bear them out."""
    for shape in ((-1, 5), (0, 5), (3, 0), (1 << 62, 1 << 62), (3, -5), (3, 7)):
        tensors = {
            "w.qcs4w_packed": ("U8", (3, 3), bytes(9)),
            "w.qcs4w_scale": ("F32", (3,), bytes(12)),
            "w.qcs4w_shape": ("I64", (2,), struct.pack("<2q", *shape)),
        }
        path = write_safetensors(tmp_path / "a.safetensors", tensors)
        with Container(path, strict=False) as container:
            assert container.entries == {}
            assert any("expected" in problem for problem in container.problems)
