"""Layouts of other tools, read and written: bytes by hand, round trips of any shape, refusals."""

import json
import re
from pathlib import Path

import foreign
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making import mutated, run_python, time_limit

from qcs4w_packer import (
    ContainerError,
    LossyError,
    PackedLinear,
    Qcs4wError,
    SourceError,
    open_packed,
    open_source,
    pack_codes,
    save_container,
)
from qcs4w_packer.convert import ConvertOptions, convert_file
from qcs4w_packer.formats import compressed_tensors, matmul_nbits, q4gsw
from qcs4w_packer.formats.detect import foreign_opener
from qcs4w_packer.formats.outputs import TARGETS, OnnxTarget
from qcs4w_packer.metadata import PackedEntry
from qcs4w_packer.packed_sources import is_packed_file

OUTPUTS = {target: "out.onnx" if target == "onnx" else "out.safetensors" for target in TARGETS}
OUTPUTS |= dict.fromkeys(("compressed-tensors", "raw", "npy"), "out")

ALL_CODES = np.arange(-8, 8, dtype=np.int8)[None]  # the row −8..7
ODD_CODES = np.array([[1, -8, 7]], np.int8)


def linear(codes: np.ndarray, scales: np.ndarray | None = None) -> PackedLinear:
    rows, columns = codes.shape
    scales = np.linspace(0.01, 0.3, rows, dtype=np.float32) if scales is None else scales
    return PackedLinear(pack_codes(codes.astype(np.int8)), scales, columns)


def random_linear(rows: int, columns: int, seed: int = 0) -> PackedLinear:
    rng = np.random.default_rng(seed)
    return linear(rng.integers(-8, 8, (rows, columns)), rng.random(rows, np.float32) + np.float32(1e-3))


def entry_of(weight: PackedLinear, name: str = "fc.weight") -> PackedEntry:
    return PackedEntry(name, weight.out_features, weight.in_features)


def read(path: Path, name: str = "fc.weight") -> PackedLinear:
    with open_packed(path) as file:
        return file.load(name)


# Bytes by hand


@pytest.mark.parametrize(
    ("codes", "expected"),
    [(ALL_CODES, "10 32 54 76 98 BA DC FE"), (ODD_CODES, "09 8F 88 88")],
    ids=["-8..7", "odd K filled up with the code 0"],
)
def test_q4gsw_bytes(codes: np.ndarray, expected: str) -> None:
    """q4gsw has the even column low, and K filled up to 8."""
    weight = linear(codes)
    arrays = q4gsw.encode(entry_of(weight), weight)
    assert arrays["fc.weight.q4gsw_packed"].tobytes() == bytes.fromhex(expected)


def test_q4gsw_scales_are_groups_first_and_filled_up_to_4() -> None:
    """The scales of N = 5 rows are [1, 8] with zeros behind them."""
    weight = random_linear(5, 3)
    scales = q4gsw.encode(entry_of(weight), weight)["fc.weight.q4gsw_scale"]
    assert scales.shape == (1, 8)
    assert scales[0].tolist() == [*weight.scales.tolist(), 0, 0, 0]


@pytest.mark.parametrize(
    ("codes", "expected"),
    [(ALL_CODES, "10 32 54 76 98 BA DC FE"), (ODD_CODES, "09 0F 00 00")],
    ids=["-8..7", "a word filled up with the nibble 0"],
)
def test_compressed_tensors_bytes(codes: np.ndarray, expected: str) -> None:
    """compressed-tensors fills a word up with zero bits, which is no code 0."""
    weight = linear(codes)
    arrays = compressed_tensors.encode(entry_of(weight), weight, weight.scales[:, None])
    assert arrays["fc.weight_packed"].tobytes() == bytes.fromhex(expected)
    assert arrays["fc.weight_shape"].tolist() == [1, codes.shape[1]]


def test_matmul_nbits_bytes() -> None:
    """MatMulNBits has whole blocks filled up with the code 0, and the row's scale once a block."""
    weight = linear(np.pad(ODD_CODES, ((0, 0), (16, 0))), np.float32([0.5]))
    arrays = matmul_nbits.encode(weight, weight.scales, block=16, explicit_zero_points=True)
    assert arrays["B"].tobytes() == bytes.fromhex("88" * 8 + "09 8F" + "88" * 6)
    assert arrays["B"].shape == (1, 2, 8)
    assert arrays["scales"].tolist() == [[0.5, 0.5]]
    assert arrays["zero_points"].tolist() == [[0x88]]


def test_an_awq_word_of_0_to_7(tmp_path: Path) -> None:
    """The AWQ word `20 64 31 75` holds the nibbles 0..7: the codes −8..−1 of eight rows, one column."""
    path = foreign.awq(tmp_path / "a.safetensors", np.arange(-8, 0)[:, None])
    assert bytes.fromhex("20 64 31 75") in path.read_bytes()
    assert read(path).codes().ravel().tolist() == list(range(-8, 0))


def test_a_gptq_word_of_0_to_7(tmp_path: Path) -> None:
    """The GPTQ word `10 32 54 76` holds the nibbles 0..7: the codes −8..−1 of one row."""
    path = foreign.gptq(tmp_path / "g.safetensors", np.arange(-8, 0)[None])
    assert bytes.fromhex("10 32 54 76") in path.read_bytes()
    assert read(path).codes().tolist() == [list(range(-8, 0))]


# Round trips


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 19),
    columns=st.integers(1, 70),
    seed=st.integers(0, 1 << 20),
    target=st.sampled_from([*TARGETS]),
)
def test_every_round_trip_keeps_codes_and_scales(
    tmp_path_factory: pytest.TempPathFactory, rows: int, columns: int, seed: int, target: str
) -> None:
    """Through every target and back codes, scales and biases are the same bits, whatever N and K."""
    folder = tmp_path_factory.mktemp("round")
    weights = {"a.fc.weight": random_linear(rows, columns, seed), "b.fc.weight": random_linear(columns, rows, seed)}
    bias = np.arange(rows, dtype=np.float32) / 3
    save_container(folder / "c.safetensors", weights, biases={"a.fc.weight": bias})
    convert_file(folder / "c.safetensors", folder / OUTPUTS[target], to=target)
    convert_file(folder / OUTPUTS[target], folder / "back.safetensors")
    with open_packed(folder / "back.safetensors") as back, open_packed(folder / OUTPUTS[target]) as middle:
        assert middle.format == target
        for name, weight in weights.items():
            for file in (middle, back):
                loaded = file.load(name)
                assert loaded.in_features == weight.in_features
                assert np.array_equal(loaded.packed, weight.packed)
                assert np.array_equal(loaded.scales, weight.scales)
        assert np.array_equal(back.bias(back.entry("a.fc.weight")), bias)
        assert back.bias(back.entry("b.fc.weight")) is None


@pytest.mark.parametrize("shape", [(1, 1), (8, 3), (16, 33), (24, 64)], ids=str)
def test_gptq_and_awq_of_any_shape_are_read(tmp_path: Path, shape: tuple[int, int], rng: np.random.Generator) -> None:
    """Codes and scales come out as they were put in; AWQ has N in eights, GPTQ says an odd K in g_idx."""
    codes = rng.integers(-8, 8, shape)
    path = foreign.gptq(tmp_path / "g.safetensors", codes, g_idx=[0] * shape[1])
    assert np.array_equal(read(path).codes(), codes)
    assert read(path).scales.tolist() == foreign.scales_of(1, shape[0])[0].tolist()
    if shape[0] % 8 == 0:
        path = foreign.awq(tmp_path / "a.safetensors", codes, scales=foreign.scales_of(3, shape[0]))
        assert np.array_equal(read(path).codes(), codes)


@pytest.mark.parametrize("block", [16, 32, 256])
@pytest.mark.parametrize("zero_points", [False, True], ids=["implicit", "explicit"])
def test_onnx_in_a_file_beside_it(
    tmp_path: Path, block: int, zero_points: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large model has its tensors in OUT.onnx.data, written one at a time, and is read from there."""
    monkeypatch.setattr(OnnxTarget, "inline_nbytes", 0)
    weight = random_linear(9, 100)
    save_container(tmp_path / "c.safetensors", {"fc.weight": weight})
    options = ConvertOptions(block=block, explicit_zero_points=zero_points)
    convert_file(tmp_path / "c.safetensors", tmp_path / "m.onnx", to="onnx", options=options)
    assert (tmp_path / "m.onnx.data").stat().st_size > weight.packed.nbytes
    assert np.array_equal(read(tmp_path / "m.onnx").packed, weight.packed)
    (tmp_path / "m.onnx.data").rename(tmp_path / "elsewhere")
    with pytest.raises(SourceError, match="does not exist"):
        read(tmp_path / "m.onnx")


# The condition


def test_groups_that_share_a_scale_are_read(tmp_path: Path) -> None:
    """Several groups are no obstacle while they say the same: GPTQ [G, N], compressed-tensors [N, G]."""
    codes = np.tile(ALL_CODES, (3, 2))
    scales = foreign.scales_of(4, 3)
    path = foreign.gptq(tmp_path / "g.safetensors", codes, scales=scales, g_idx=[k // 8 for k in range(32)])
    assert np.array_equal(read(path).codes(), codes)
    path = foreign.compressed(tmp_path / "c.safetensors", codes, scales.T)
    assert read(path).scales.tolist() == scales[0].tolist()


def test_one_scale_for_the_whole_tensor_is_read(tmp_path: Path) -> None:
    """compressed-tensors' strategy `tensor` has one scale, which every row gets."""
    path = foreign.compressed(tmp_path / "c.safetensors", np.tile(ALL_CODES, (3, 1)), np.float32([0.25]))
    assert read(path).scales.tolist() == [0.25] * 3


@pytest.mark.parametrize("kind", ["gptq", "awq", "compressed"])
def test_rows_with_several_scales_are_refused(tmp_path: Path, kind: str) -> None:
    """Another scale in one group: the message says which row, how many, and from where to where."""
    codes = np.tile(ALL_CODES, (8, 1))
    scales = foreign.scales_of(2, 8)
    scales[1, 5] = 2.0
    path = tmp_path / "f.safetensors"
    if kind == "compressed":
        foreign.compressed(path, codes, scales.T)
    else:
        getattr(foreign, kind)(path, codes, scales=scales)
    with pytest.raises(LossyError, match=r"1 of 8 rows .* \(row 5: 2 in 2 groups, from 0\.375 to 2\)") as caught:
        read(path)
    assert "qcs4w pack" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("stored", "config", "result"),
    [
        (7, None, "version 1: zero points are stored as 7"),
        (8, None, "version 2: zero points are stored as 8"),
        (7, {"checkpoint_format": "gptq"}, "version 1: its config says so"),
        (8, {"checkpoint_format": "gptq_v2", "bits": 4, "quant_method": "gptq"}, "version 2: its config says so"),
        (8, {"checkpoint_format": "gptq"}, "row 0, group 0 is 9, expected 8"),
        (7, {"checkpoint_format": "gptq_v2"}, "row 0, group 0 is 7, expected 8"),
        (3, None, "row 0, group 0 is 4, expected 8"),
        (7, {"bits": 8}, "8 bits, expected gptq with 4"),
        (7, {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    ],
    ids=str,
)
@pytest.mark.parametrize("place", ["quantize_config.json", "config.json"])
def test_versions_of_gptq(tmp_path: Path, stored: int, config: dict | None, result: str, place: str) -> None:
    """Version 1 stores the zero point minus one: the config tells the versions apart, else the stored values do."""
    path = foreign.gptq(tmp_path / "g.safetensors", ALL_CODES, stored_zero=stored)
    if config is not None:
        document = config if place == "quantize_config.json" else {"quantization_config": config}
        (tmp_path / place).write_text(json.dumps(document))
    try:
        with open_packed(path) as file:
            assert np.array_equal(file.load("fc.weight").codes(), ALL_CODES)
            (said,) = file.notes
    except Qcs4wError as error:
        said = str(error)
    assert result in said


def test_zero_points_of_awq(tmp_path: Path) -> None:
    """A zero point other than 8 is refused with its row, its group and its value."""
    path = foreign.awq(tmp_path / "a.safetensors", np.tile(ALL_CODES, (8, 1)), zero=6)
    with pytest.raises(LossyError, match="zero point of row 0, group 0 is 6, expected 8"):
        read(path)


def test_activation_order_is_refused(tmp_path: Path) -> None:
    """A g_idx that does not ascend is refused; so is compressed-tensors' weight_g_idx."""
    scales = foreign.scales_of(2, 1)
    path = foreign.gptq(tmp_path / "g.safetensors", ALL_CODES, scales=scales, g_idx=[1, 0] * 8)
    with pytest.raises(LossyError, match="activation order") as caught:
        read(path)
    assert "desc_act" in str(caught.value.hint)
    extra = {"fc.weight_g_idx": ("I32", (16,), np.zeros(16, "<i4").tobytes())}
    path = foreign.compressed(tmp_path / "c.safetensors", ALL_CODES, np.float32([[1]]), extra=extra)
    with pytest.raises(LossyError, match="activation order"):
        read(path)


@pytest.mark.parametrize(("zero", "is_read"), [(0, True), (-3, False)])
@pytest.mark.parametrize("dtype", ["I8", "I32"])
def test_zero_points_of_compressed_tensors(tmp_path: Path, zero: int, is_read: bool, dtype: str) -> None:
    """Stated zero points are fine while they are 0, packed into words or not."""
    data = np.int8([[zero]] * 3).tobytes() if dtype == "I8" else foreign.words([zero + 8] * 3)
    extra = {"fc.weight_zero_point": (dtype, (3 if dtype == "I8" else 1, 1), data)}
    codes = np.tile(ALL_CODES, (3, 1))
    path = foreign.compressed(tmp_path / "c.safetensors", codes, np.ones((3, 1)), extra=extra)
    if is_read:
        assert np.array_equal(read(path).codes(), codes)
    else:
        with pytest.raises(LossyError, match="zero point of row 0, group 0 is 5, expected 8"):
            read(path)


@pytest.mark.parametrize("stored", [0, -3])
def test_one_zero_point_for_the_whole_tensor(tmp_path: Path, stored: int) -> None:
    """The strategy `tensor` has one zero point beside its one scale."""
    extra = {"fc.weight_zero_point": ("I8", (1,), np.int8([stored]).tobytes())}
    path = foreign.compressed(tmp_path / "c.safetensors", ALL_CODES, np.float32([1]), extra=extra)
    if stored:
        with pytest.raises(LossyError, match="zero point of row 0, group 0 is 5, expected 8"):
            read(path)
    else:
        assert np.array_equal(read(path).codes(), ALL_CODES)


# Bad input


@pytest.mark.parametrize(
    ("scale_shape", "zero", "message"),
    [
        ((9, 0), None, r"weight_scale is F32 \[9, 0\]"),
        ((9, 1), ("I32", (2, 0)), r"expected I8 \[9, 1\] or I32 \[2, 1\]"),
        ((9, 1), ("I32", (1, 1)), r"is I32 \[1, 1\], expected"),
        ((9, 2), ("I32", (2, 1)), r"expected I8 \[9, 2\] or I32 \[2, 2\]"),
        ((9, 1), ("I8", (8, 1)), r"is I8 \[8, 1\], expected"),
        ((9, 1), ("I64", (9, 1)), r"is I64 \[9, 1\], expected"),
        ((1,), ("I32", (1, 1)), r"expected I8 \[1\]$"),
    ],
    ids=str,
)
def test_scales_and_zero_points_are_one_a_group(
    tmp_path: Path, scale_shape: tuple[int, ...], zero: tuple[str, tuple[int, ...]] | None, message: str
) -> None:
    """compressed-tensors with no scale at all, or with zero points for some of the rows, is refused when opened."""
    extra = {}
    if zero is not None:
        dtype, shape = zero
        size = {"I8": 1, "I32": 4, "I64": 8}[dtype]
        extra = {"fc.weight_zero_point": (dtype, shape, bytes(size * int(np.prod(shape))))}
    path = foreign.compressed(tmp_path / "c.safetensors", np.tile(ALL_CODES, (9, 1)), np.ones(scale_shape), extra=extra)
    with pytest.raises(ContainerError, match=message):
        open_packed(path)


@pytest.mark.parametrize("name", ["a\0b.safetensors", "a\0b.bin", f"{'a' * 300}.npy", f"{'a' * 300}/b.onnx"])
def test_a_path_that_leads_nowhere(name: str, tmp_path: Path) -> None:
    """What nothing can be named is one SourceError for every way of opening it."""
    for function in (open_packed, open_source, is_packed_file, lambda path: foreign_opener(path)):
        with pytest.raises(SourceError, match="cannot be read"):
            function(tmp_path / name)


def test_parts_that_do_not_fit(tmp_path: Path) -> None:
    """A missing part, another number of bits, and two tools' tensors in one file are told by name."""
    codes, scales = np.tile(ALL_CODES, (8, 1)), np.ones((8, 1), np.float32)
    path = foreign.compressed(
        tmp_path / "c.safetensors", codes, scales, extra={"fc.weight_shape": ("I64", (2,), np.int64([8, 8]).tobytes())}
    )
    with pytest.raises(ContainerError, match=r"fc.weight_packed is I32 \[8, 2\], fc.weight_shape says \[8, 8\]"):
        read(path)
    path = foreign.gptq(tmp_path / "g.safetensors", codes, extra={"fc.qzeros": ("I32", (1, 2), bytes(8))})
    with pytest.raises(ContainerError, match=r"fc.qzeros is I32 \[1, 2\], expected \[1, 1\]"):
        read(path)
    packed = ("I32", (8, 2), bytes(64))
    path = foreign.gptq(tmp_path / "two.safetensors", codes, extra={"x.weight_packed": packed})
    with pytest.raises(ContainerError, match="several kinds: compressed-tensors, gptq"):
        read(path)
    path = foreign.gptq(tmp_path / "g.safetensors", codes)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SourceError, match=r"config\.json: is not JSON"):
        read(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nibble_order": "even-low"}, "states nibble_order 'even-low'"),
        ({"version": 2}, "states version 2"),
        ({"kind": []}, "a 'kind' that is neither"),
        ({"kind": {}}, "a 'kind' that is neither"),
        ({"tensors": []}, "has no 'tensors'"),
        ({"tensors": [{"tensor": "a", "out_features": 0, "in_features": 2}]}, "has no shape"),
        (
            {"tensors": [{"tensor": "a", "out_features": 1, "in_features": 2, "packed": "../x", "scales": "s"}]},
            "packed is '../x', expected a file of this folder",
        ),
    ],
    ids=["order", "version", "kind, a list", "kind, an object", "nothing", "shape", "path"],
)
def test_a_bad_index_of_pairs(tmp_path: Path, change: dict, message: str) -> None:
    """An index of another version or order, without shapes, or that leads out of its folder is refused."""
    save_container(tmp_path / "c.safetensors", {"fc.weight": random_linear(3, 5)})
    convert_file(tmp_path / "c.safetensors", tmp_path / "raw", to="raw")
    index = tmp_path / "raw" / "qcs4w.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | change))
    with pytest.raises(ContainerError, match=message):
        open_packed(tmp_path / "raw")


def test_a_pair_that_was_changed_is_told_by_its_digest(tmp_path: Path) -> None:
    """Another byte in a .bin file, and a file of another size, are refused."""
    save_container(tmp_path / "c.safetensors", {"fc.weight": random_linear(3, 5)})
    convert_file(tmp_path / "c.safetensors", tmp_path / "raw", to="raw")
    data = tmp_path / "raw" / "0000.packed.bin"
    data.write_bytes(b"\0" + data.read_bytes()[1:])
    with pytest.raises(ContainerError, match="sha256"):
        read(tmp_path / "raw")
    data.write_bytes(b"\0")
    with pytest.raises(ContainerError, match="has 1 bytes, expected 9"):
        read(tmp_path / "raw")


def test_pairs_whose_size_leaves_64_bits(tmp_path: Path) -> None:
    """A shape of 2^64 bytes does not pass for one of none."""
    (tmp_path / "w.bin").touch()
    save_container(tmp_path / "c.safetensors", {"fc.weight": random_linear(3, 5)})
    convert_file(tmp_path / "c.safetensors", tmp_path / "raw", to="raw")
    index = tmp_path / "raw" / "qcs4w.json"
    document = json.loads(index.read_text())
    document["tensors"][0] |= {"out_features": 2**39, "in_features": 2**26}
    index.write_text(json.dumps(document))
    (tmp_path / "raw" / "0000.packed.bin").write_bytes(b"")
    with pytest.raises(ContainerError, match="has 0 bytes, expected 18,446,744,073,709,551,616"):
        read(tmp_path / "raw")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("location", "a\0b", r"lies at 'a\\x00b'"),
        ("location", "x" * 300, "File name too long"),
        ("offset", "99999999999999999999999", "offset '9{23}'"),
        ("offset", "9223372036854775807", "offset '9223372036854775807'"),
        ("offset", "999999999999999999", "truncated"),
        ("offset", "-1", "offset '-1'"),
        ("length", "99999999999999999999999", "says '9{23}' bytes, expected 64"),
        ("length", "65", "says '65' bytes, expected 64"),
        ("length", "064", None),
    ],
)
def test_where_external_data_is_said_to_lie(
    tmp_path: Path, key: str, value: str, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place that no file has is refused, with all the digits it was stated in; leading zeros do not matter."""
    import onnx

    monkeypatch.setattr(OnnxTarget, "inline_nbytes", 0)
    weight = random_linear(4, 32)
    save_container(tmp_path / "c.safetensors", {"fc.weight": weight})
    convert_file(tmp_path / "c.safetensors", tmp_path / "m.onnx", to="onnx")
    model = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    (tensor,) = (tensor for tensor in model.graph.initializer if tensor.name.endswith("_Q4G32"))
    next(item for item in tensor.external_data if item.key == key).value = value
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    if message is None:
        assert np.array_equal(read(tmp_path / "m.onnx").packed, weight.packed)
    else:
        with pytest.raises(SourceError, match=message):
            read(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    ("name", "dims", "is_read"),
    [
        ("fc.weight_Q4G32", [-1, 2, 16], False),
        ("fc.weight_Q4G32", [256], False),
        ("fc.weight_Q4G32", [2, 8, 16], False),
        ("fc.weight_scales", [16], True),
        ("fc.weight_scales", [2, 8], False),
        ("fc.weight_zero_points", [8], True),
        ("fc.weight_zero_points", [1, 8], False),
        ("fc.weight_bias", [8, 1], False),
    ],
    ids=str,
)
def test_shapes_of_an_onnx_node(tmp_path: Path, name: str, dims: list[int], is_read: bool) -> None:
    """Initialisers have the shapes that N, K and the block make; scales and zero points may be flat, as of old."""
    import onnx

    weight = random_linear(8, 64)
    save_container(tmp_path / "c.safetensors", {"fc.weight": weight}, biases={"fc.weight": np.ones(8, np.float32)})
    options = ConvertOptions(explicit_zero_points=True)
    convert_file(tmp_path / "c.safetensors", tmp_path / "m.onnx", to="onnx", options=options)
    model = onnx.load(tmp_path / "m.onnx")
    (tensor,) = (tensor for tensor in model.graph.initializer if tensor.name == name)
    tensor.ClearField("dims")
    tensor.dims.extend(dims)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with open_packed(tmp_path / "m.onnx") as file:
        entry = file.entry("fc.weight")
        if is_read:
            assert np.array_equal(file.load(entry.name).packed, weight.packed)
        else:
            with pytest.raises(ContainerError, match=re.escape(f"'{name}' is {dims}, expected")):
                (file.bias(entry), file.load(entry.name))


def test_what_a_model_has_besides_is_told(tmp_path: Path) -> None:
    """The graph is left out of every conversion, other initialisers where there are any."""
    import onnx

    save_container(tmp_path / "c.safetensors", {"fc.weight": random_linear(8, 64)})
    convert_file(tmp_path / "c.safetensors", tmp_path / "m.onnx", to="onnx")
    with open_packed(tmp_path / "m.onnx") as file:
        assert file.notes == ["left out: the model's graph"]
    model = onnx.load(tmp_path / "m.onnx")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(3, np.float32), "norm"))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with open_packed(tmp_path / "m.onnx") as file:
        assert file.notes == ["left out: the model's graph, and 1 initialiser that is no packed linear"]


def test_external_data_stays_in_the_models_folder(tmp_path: Path) -> None:
    """A model whose tensors lie outside its folder is not followed there."""
    import onnx

    (tmp_path / "secret").write_bytes(bytes(1 << 10))
    (tmp_path / "in").mkdir()
    save_container(tmp_path / "c.safetensors", {"fc.weight": random_linear(4, 32)})
    convert_file(tmp_path / "c.safetensors", tmp_path / "in" / "m.onnx", to="onnx")
    model = onnx.load(tmp_path / "in" / "m.onnx")
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret")
    (tmp_path / "in" / "bad.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(SourceError, match=r"lies at '\.\./secret'"):
        read(tmp_path / "in" / "bad.onnx")


def test_an_onnx_model_with_unequal_blocks_or_zero_points(tmp_path: Path) -> None:
    """Blocks with scales of their own, and zero points other than 8, are refused."""
    import onnx

    save_container(tmp_path / "c.safetensors", {"fc.weight": random_linear(4, 64)})
    options = ConvertOptions(explicit_zero_points=True)
    convert_file(tmp_path / "c.safetensors", tmp_path / "m.onnx", to="onnx", options=options)
    for name, value, message in (
        ("fc.weight_scales", b"\0\0\0\0", "4 of 4|1 of 4"),
        ("fc.weight_zero_points", b"\x98", "is 9"),
    ):
        model = onnx.load(tmp_path / "m.onnx")
        (tensor,) = (tensor for tensor in model.graph.initializer if tensor.name == name)
        tensor.raw_data = value + tensor.raw_data[len(value) :]
        (tmp_path / "bad.onnx").write_bytes(model.SerializeToString())
        with pytest.raises(LossyError, match=message):
            read(tmp_path / "bad.onnx")


def test_without_onnx_the_error_says_how_to_get_it(tmp_path: Path) -> None:
    """Where onnx is not installed, converting to it is one clear error."""
    save_container(tmp_path / "c.safetensors", {"fc.weight": random_linear(4, 64)})
    code = (
        "import sys; sys.modules['onnx'] = None\n"
        "from qcs4w_packer.convert import convert_file\n"
        "from qcs4w_packer import Qcs4wError\n"
        "try: convert_file(sys.argv[1], sys.argv[2], to='onnx')\n"
        "except Qcs4wError as error: print(error, error.hint)"
    )
    done = run_python(code, tmp_path / "c.safetensors", tmp_path / "m.onnx")
    assert "need the onnx package" in done.stdout
    assert "qcs4w[onnx]" in done.stdout
    assert not (tmp_path / "m.onnx").exists()


@pytest.mark.parametrize("kind", ["gptq", "awq", "compressed", "q4gsw", "onnx", "raw", "npy"])
def test_damaged_files_give_one_error_or_an_answer(tmp_path: Path, kind: str, rng: np.random.Generator) -> None:
    """Whatever is damaged, a reader answers or raises an error of ours, soon."""
    codes = rng.integers(-8, 8, (8, 33))
    if kind in ("gptq", "awq"):
        victim = opened = getattr(foreign, kind)(tmp_path / "f.safetensors", codes)
    elif kind == "compressed":
        victim = opened = foreign.compressed(tmp_path / "f.safetensors", codes, np.ones((8, 1)))
    else:
        save_container(tmp_path / "c.safetensors", {"fc.weight": linear(codes)})
        opened = tmp_path / OUTPUTS[kind]
        convert_file(tmp_path / "c.safetensors", opened, to=kind)
        victim = opened / "qcs4w.json" if opened.is_dir() else opened
    sound = victim.read_bytes()
    refused = 0
    with time_limit(60):
        for _ in range(300):
            victim.write_bytes(mutated(sound, rng))
            try:
                with open_packed(opened) as file:
                    for name in file.entries:
                        file.load(name)
            except Qcs4wError:
                refused += 1
    assert refused > 50


def test_a_pad_nibble_that_is_not_the_code_0_is_mended_and_said(tmp_path: Path) -> None:
    """A row `90 F0`, padded after the shift, has its codes in the target, and `90 F8` on the way back."""
    save_container(
        tmp_path / "c.safetensors", {"fc.weight": PackedLinear(np.uint8([[0x90, 0xF0]]), np.float32([1]), 3)}
    )
    report = convert_file(tmp_path / "c.safetensors", tmp_path / "q.safetensors", to="q4gsw")
    assert report.notes == ("tensor 'fc.weight': the pad nibble of 1 rows was not the code 0, and is now",)
    assert read(tmp_path / "q.safetensors").packed.tolist() == [[0x90, 0xF8]]


def test_a_failure_in_the_middle_leaves_the_old_output(tmp_path: Path) -> None:
    """The second of two weights cannot be converted: the output is as it was, and no part is left."""
    good, bad = linear(ALL_CODES, np.float32([1])), linear(ALL_CODES, np.float32([1e6]))
    save_container(tmp_path / "c.safetensors", {"a.weight": good, "b.weight": bad})
    (tmp_path / "m.onnx").write_bytes(b"old")
    for target, output in (("onnx", tmp_path / "m.onnx"), ("compressed-tensors", tmp_path / "ct")):
        with pytest.raises(LossyError, match=r"tensor 'b\.weight': the scale of row 0, 1e\+06, is beyond f16"):
            convert_file(tmp_path / "c.safetensors", output, to=target, options=ConvertOptions("f16"), force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.safetensors", "m.onnx"]
    assert (tmp_path / "m.onnx").read_bytes() == b"old"
