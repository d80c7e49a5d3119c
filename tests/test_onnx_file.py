"""ONNX models as sources: every initialiser, which of them are linear weights, and external data by its place."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from making import bytes_read, run_python
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from qcs4w_packer import Qcs4wError, SourceError, load_packed, open_packed, open_source, pack_file, pack_weight

N, K = 6, 5
W = np.random.default_rng(8).standard_normal((N, K)).astype(np.float32)
X = np.random.default_rng(9).standard_normal((3, K)).astype(np.float32)


def model(path: Path, weights: dict[str, np.ndarray], nodes: list[Any], output: str = "y") -> Path:
    """Save a model of one input x and one output."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, None])],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), path)
    return path


def node(kind: str, *inputs: str, output: str = "y", **attributes: Any) -> Any:
    """One node."""
    return helper.make_node(kind, list(inputs), [output], **attributes)


LINEARS = {
    "MatMul": (W.T, [node("MatMul", "x", "w")], "in-out"),
    "Gemm": (W.T, [node("Gemm", "x", "w")], "in-out"),
    "Gemm transB": (W, [node("Gemm", "x", "w", transB=1)], "out-in"),
    "Transpose, MatMul": (W, [node("Transpose", "w", output="t", perm=[1, 0]), node("MatMul", "x", "t")], "out-in"),
    "Transpose without perm": (W, [node("Transpose", "w", output="t"), node("MatMul", "x", "t")], "out-in"),
    "Transpose, Gemm transB": (
        W.T,
        [node("Transpose", "w", output="t", perm=[1, 0]), node("Gemm", "x", "t", transB=1)],
        "in-out",
    ),
    "two Transposes": (
        W.T,
        [node("Transpose", "w", output="s"), node("Transpose", "s", output="t"), node("MatMul", "x", "t")],
        "in-out",
    ),
    "Identity, Cast": (
        W.T,
        [
            node("Identity", "w", output="i"),
            node("Cast", "i", output="c", to=TensorProto.FLOAT),
            node("MatMul", "x", "c"),
        ],
        "in-out",
    ),
}


@pytest.mark.parametrize(("stored", "nodes", "direction"), LINEARS.values(), ids=LINEARS)
def test_the_graph_says_how_a_weight_lies(stored: np.ndarray, nodes: list[Any], direction: str, tmp_path: Path) -> None:
    """By onnx's own evaluation y = x · Wᵀ, and what is packed is W, whichever way the graph has it."""
    path = model(tmp_path / "m.onnx", {"w": stored}, nodes)
    (y,) = ReferenceEvaluator(str(path)).run(None, {"x": X})
    np.testing.assert_allclose(y, X @ W.T, rtol=1e-5, atol=1e-6)
    with open_source(path) as source:
        assert source.tensors["w"].direction == direction
    pack_file(path, tmp_path / "out.safetensors")
    np.testing.assert_array_equal(load_packed(tmp_path / "out.safetensors").packed, pack_weight(W).packed)


OTHERS = {
    "an embedding": [node("Gather", "w", "x")],
    "the left side": [node("MatMul", "w", "x")],
    "an embedding and a head": [node("Gather", "w", "x", output="e"), node("MatMul", "x", "w")],
    "both ways": [node("MatMul", "x", "w", output="a"), node("Gemm", "x", "w", transB=1)],
    "another order": [node("Transpose", "w", output="t", perm=[0, 1]), node("MatMul", "x", "t")],
    "an output too": [node("Identity", "w", output="y"), node("MatMul", "x", "w", output="z")],
    "another domain": [helper.make_node("MatMul", ["x", "w"], ["y"], domain="some.where")],
    "nothing": [node("Identity", "x")],
}


@pytest.mark.parametrize("nodes", OTHERS.values(), ids=OTHERS)
def test_other_uses_say_nothing(nodes: list[Any], tmp_path: Path) -> None:
    """A weight that is used in another way, or also in another way, is packed by request only."""
    with open_source(model(tmp_path / "m.onnx", {"w": W}, nodes)) as source:
        assert source.tensors["w"].direction is None


def test_a_use_inside_a_branch_is_seen(tmp_path: Path) -> None:
    """A subgraph that takes the weight in another way."""
    branch = helper.make_graph([node("Gather", "w", "i")], "b", [], [helper.make_tensor_value_info("y", 1, None)])
    nodes = [node("MatMul", "x", "w", output="z"), helper.make_node("If", ["c"], ["y"], then_branch=branch)]
    with open_source(model(tmp_path / "m.onnx", {"w": W}, nodes)) as source:
        assert source.tensors["w"].direction is None


DTYPES = {
    "F32": TensorProto.FLOAT, "F16": TensorProto.FLOAT16, "F64": TensorProto.DOUBLE, "BF16": TensorProto.BFLOAT16,
    "I8": TensorProto.INT8, "U8": TensorProto.UINT8, "I64": TensorProto.INT64, "BOOL": TensorProto.BOOL,
}  # fmt: skip


@pytest.mark.parametrize("as_raw", [True, False], ids=["raw", "fields"])
@pytest.mark.parametrize(("dtype", "kind"), DTYPES.items(), ids=DTYPES)
def test_every_dtype_is_read(dtype: str, kind: int, as_raw: bool, tmp_path: Path) -> None:
    """Bytes and numbers in fields give the values that onnx itself reads."""
    values = np.array([[0, 1, 1], [1, 0, 1]], helper.tensor_dtype_to_np_dtype(kind))
    tensor = helper.make_tensor("w", kind, [2, 3], values.tobytes() if as_raw else values.flatten(), raw=as_raw)
    graph = helper.make_graph([], "g", [], [], [tensor])
    onnx.save(helper.make_model(graph), tmp_path / "m.onnx")
    with open_source(tmp_path / "m.onnx") as source:
        found = source.tensors["w"]
        assert (found.dtype, found.shape) == (dtype, (2, 3))
        assert found.fetch(0, 2) == numpy_helper.to_array(tensor).tobytes()
        assert found.fetch(1, 2) == found.fetch(0, 2)[len(found.fetch(0, 1)) :]


def test_what_has_no_counterpart_is_told(tmp_path: Path) -> None:
    """Texts and 4-bit numbers, and the graph itself."""
    tensors = [
        helper.make_tensor("text", TensorProto.STRING, [1], [b"a"]),
        helper.make_tensor("four", TensorProto.INT4, [2], [1, 2]),
        numpy_helper.from_array(W, "w"),
    ]
    onnx.save(helper.make_model(helper.make_graph([], "g", [], [], tensors)), tmp_path / "m.onnx")
    with open_source(tmp_path / "m.onnx") as source:
        assert list(source.tensors) == ["w"]
        assert source.left_out == (
            "the model's graph (0 nodes)",
            "text (data type STRING has no safetensors counterpart)",
            "four (data type INT4 has no safetensors counterpart)",
        )


# ---- external data


def external(path: Path, array: np.ndarray = W.T, data: str = "m.data", **said: str) -> Path:
    """Save a model whose weight lies in a file beside it, 64 bytes in."""
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=array.shape, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": data, "offset": "64", "length": str(array.nbytes), **said}.items():
        tensor.external_data.add(key=key, value=value)
    graph = helper.make_graph([node("MatMul", "x", "w")], "g", [], [], [tensor])
    path.write_bytes(helper.make_model(graph).SerializeToString())
    if not (path.parent / "m.data").exists():
        (path.parent / "m.data").write_bytes(bytes(64) + np.ascontiguousarray(array).tobytes())
    return path


def test_external_data_are_read_at_their_place(tmp_path: Path) -> None:
    """Only the rows that are asked for."""
    rows = np.arange(4096 * 256, dtype=np.float32).reshape(4096, 256)
    with open_source(external(tmp_path / "m.onnx", rows)) as source:
        before = bytes_read()
        assert source.tensors["w"].fetch(7, 8) == rows[7].tobytes()
        assert bytes_read() - before < 10_000
        assert source.tensors["w"].direction == "in-out"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"location": "../m.data"}, "expected a file of the model's folder"),
        ({"location": "/etc/passwd"}, "expected a file of the model's folder"),
        ({"location": "a/../../m.data"}, "expected a file of the model's folder"),
        ({"location": "away"}, "expected a file of the model's folder"),
        ({"location": ""}, "expected a file of the model's folder"),
        ({"location": "missing"}, "missing: does not exist"),
        ({"length": "119"}, "says '119' bytes, expected 120"),
        ({"offset": "65"}, "m.data: has 184 bytes, initialiser 'w' ends at 185: truncated"),
        ({"offset": "-1"}, "offset '-1'"),
        ({"offest": "64"}, "says 'offest' of where its data lie"),
        ({"offset": "9" * 30}, "offset '9999"),
    ],
    ids=str,
)
def test_external_data_elsewhere_are_refused(said: dict[str, str], words: str, tmp_path: Path) -> None:
    """When the model is opened: places out of its folder by name or by a link, missing files, sizes that do not fit."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m.data").write_bytes(bytes(500))
    (tmp_path / "m" / "away").symlink_to("../m.data")
    with pytest.raises(SourceError, match=words):
        open_source(external(tmp_path / "m" / "m.onnx", **said))


def test_external_data_in_a_cache_of_links(tmp_path: Path) -> None:
    """Model and data are links into one folder of blobs."""
    (tmp_path / "made").mkdir()
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    external(tmp_path / "made" / "m.onnx")
    for number, name in enumerate(("m.onnx", "m.data")):
        (tmp_path / "made" / name).rename(tmp_path / "blobs" / str(number))
        (tmp_path / "snapshot" / name).symlink_to(f"../blobs/{number}")
    with open_source(tmp_path / "snapshot" / "m.onnx") as source:
        np.testing.assert_array_equal(source.tensors["w"].read(), W.T)


def test_one_place_is_one_tensor(tmp_path: Path) -> None:
    """Two initialisers of the same external bytes are tied."""
    path = external(tmp_path / "m.onnx")
    content = onnx.load(path, load_external_data=False)
    content.graph.initializer.add().CopyFrom(content.graph.initializer[0])
    content.graph.initializer[1].name = "v"
    path.write_bytes(content.SerializeToString())
    with open_source(path) as source:
        assert source.tensors["v"].storage == source.tensors["w"].storage is not None


# ---- damage


def test_a_model_that_is_none_is_refused(tmp_path: Path) -> None:
    """Random bytes, a truncated model, and data of another size than the shape says."""
    path = model(tmp_path / "m.onnx", {"w": W}, LINEARS["MatMul"][1])
    size = path.stat().st_size
    os.truncate(path, size // 2)
    with pytest.raises(SourceError, match="not a sound ONNX model"):
        open_source(path)
    content = helper.make_model(helper.make_graph([], "g", [], [], [numpy_helper.from_array(W, "w")]))
    content.graph.initializer[0].dims[0] = 7
    path.write_bytes(content.SerializeToString())
    with pytest.raises(SourceError, match="initialiser 'w' has 120 bytes, expected 140"):
        open_source(path)
    content.graph.initializer[0].dims[0] = -1
    path.write_bytes(content.SerializeToString())
    with pytest.raises(SourceError, match=r"initialiser 'w' has shape \[-1, 5\]"):
        open_source(path)


def test_two_initialisers_of_one_name_are_refused(tmp_path: Path) -> None:
    """Which is meant cannot be known."""
    pair = [numpy_helper.from_array(W, "w")] * 2
    onnx.save(helper.make_model(helper.make_graph([], "g", [], [], pair)), tmp_path / "m.onnx")
    with pytest.raises(SourceError, match="initialiser 'w' has no name of its own"):
        open_source(tmp_path / "m.onnx")


def test_a_float_model_is_no_packed_file(tmp_path: Path) -> None:
    """A model without MatMulNBits is packed, and not taken for packed."""
    path = model(tmp_path / "m.onnx", {"w": W}, LINEARS["MatMul"][1])
    with pytest.raises(Qcs4wError) as caught:
        open_packed(path)
    assert "qcs4w pack" in (caught.value.hint or "")


def test_without_onnx_the_error_says_how_to_get_it(tmp_path: Path) -> None:
    """Where onnx is not installed, opening a model is one clear error."""
    path = model(tmp_path / "m.onnx", {"w": W}, LINEARS["MatMul"][1])
    done = run_python(
        "import sys; sys.modules['onnx'] = None\n"
        "from qcs4w_packer import open_source, Qcs4wError\n"
        "try: open_source(sys.argv[1])\n"
        "except Qcs4wError as error: print(error, error.hint)",
        path,
    )
    assert "need the onnx package" in done.stdout
    assert "pip install 'qcs4w[onnx]'" in done.stdout
