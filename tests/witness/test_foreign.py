"""Conversions held against the libraries whose layouts they are: each reads what the other wrote."""

import json
from collections.abc import Callable
from pathlib import Path

import executorch.backends.vulkan.custom_ops_lib  # noqa: F401 - defines torch.ops.et_vk
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from awq.modules.linear.gemm import WQLinear_GEMM
from awq.utils.packing_utils import dequantize_gemm
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from executorch.backends.vulkan.patterns.weight_packing_utils import pack_4bit_weight_tensor
from gptqmodel import QuantizeConfig
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from safetensors.torch import load_file, save_file

from qcs4w_packer import LossyError, PackedLinear, open_packed, pack_codes, save_container
from qcs4w_packer.convert import ConvertOptions, convert_file

SHAPES = [(1, 1), (3, 2), (5, 7), (8, 8), (17, 33), (64, 127), (30, 256)]
IN_WORDS = [(32, 32), (32, 64), (64, 128)]  # (N, K) that GPTQ and AWQ tools take


def linear(rows: int, columns: int, seed: int = 0) -> PackedLinear:
    """Random codes, each of the sixteen among them where there is room, and scales over twelve powers of two."""
    rng = np.random.default_rng(seed)
    scales = (rng.random(rows) * 2.0 ** rng.integers(-12, 0, rows)).astype(np.float32) + np.float32(2**-14)
    return PackedLinear(pack_codes(rng.integers(-8, 8, (rows, columns)).astype(np.int8)), scales, columns)


@pytest.fixture
def container(tmp_path: Path) -> Callable[[PackedLinear], Path]:
    """Save one weight, `fc.weight`, as a container."""

    def save(weight: PackedLinear, bias: np.ndarray | None = None) -> Path:
        path = tmp_path / "packed.safetensors"
        save_container(path, {"fc.weight": weight}, biases=None if bias is None else {"fc.weight": bias}, force=True)
        return path

    return save


def read(path: Path, name: str = "fc.weight") -> PackedLinear:
    """Read a weight of any file."""
    with open_packed(path) as file:
        return file.load(name)


def assert_same(found: PackedLinear, codes: np.ndarray, scales: np.ndarray) -> None:
    """Codes and scales are the same, to the bit."""
    assert np.array_equal(found.codes(), codes)
    assert found.scales.tolist() == scales.astype(np.float32).tolist()


# compressed-tensors


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_compressed_tensors_decompresses_what_we_wrote(
    tmp_path: Path, container: Callable[[PackedLinear], Path], shape: tuple[int, int], dtype: str
) -> None:
    """Its own decompress, by the config that we wrote, gives our dequantized values."""
    weight = linear(*shape)
    convert_file(container(weight), tmp_path / "ct", to="compressed-tensors", options=ConvertOptions(dtype))
    config = QuantizationConfig.model_validate(
        json.loads((tmp_path / "ct/config.json").read_text())["quantization_config"]
    )
    (scheme,) = config.config_groups.values()
    assert config.format == "pack-quantized"
    state = {name.removeprefix("fc."): tensor for name, tensor in load_file(tmp_path / "ct/model.safetensors").items()}
    found = PackedQuantizationCompressor.decompress(state, scheme)["weight"]
    if dtype == "f32":
        assert np.array_equal(found.numpy(), weight.dequantize())
    else:
        scales = torch.from_numpy(weight.scales).half()[:, None]
        assert torch.equal(found, torch.from_numpy(weight.codes()).half() * scales)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_we_read_what_compressed_tensors_compressed(tmp_path: Path, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """What it compresses has its codes and scales here, in any dtype of scales, and its bytes when written again."""
    rng = np.random.default_rng(1)
    codes = rng.integers(-8, 8, shape)
    scales = torch.from_numpy(rng.random((shape[0], 1)).astype(np.float32) + 0.01).to(dtype)
    scheme = QuantizationScheme(
        targets=["Linear"], weights={"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}
    )
    state = {"weight": torch.from_numpy(codes).to(dtype) * scales, "weight_scale": scales}
    theirs = {f"fc.{name}": t for name, t in PackedQuantizationCompressor.compress(state, scheme).items()}
    save_file(theirs, tmp_path / "t.safetensors")
    assert_same(read(tmp_path / "t.safetensors"), codes, scales.float().numpy()[:, 0])
    convert_file(tmp_path / "t.safetensors", tmp_path / "ours.safetensors")
    convert_file(tmp_path / "ours.safetensors", tmp_path / "again", to="compressed-tensors")
    again = load_file(tmp_path / "again/model.safetensors")
    assert torch.equal(again["fc.weight_packed"], theirs["fc.weight_packed"])
    assert torch.equal(again["fc.weight_shape"], theirs["fc.weight_shape"])


def test_groups_of_compressed_tensors_are_refused(tmp_path: Path) -> None:
    """A weight that it compressed in groups of 32 is refused, since its scales differ."""
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    arguments = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    scales = weight.reshape(8, 2, 32).abs().amax(-1) / 7.5
    theirs = PackedQuantizationCompressor.compress({"weight": weight, "weight_scale": scales}, scheme)
    save_file({f"fc.{name}": tensor for name, tensor in theirs.items()}, tmp_path / "t.safetensors")
    with pytest.raises(LossyError, match="8 of 8 rows have more than one scale"):
        read(tmp_path / "t.safetensors")


# ONNX Runtime


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("block", "zero_points"), [(16, False), (32, True), (128, False)])
def test_onnxruntime_runs_what_we_wrote(
    tmp_path: Path, container: Callable[..., Path], shape: tuple[int, int], block: int, zero_points: bool
) -> None:
    """The identity as x gives our dequantized weight, transposed, plus the bias, without any rounding."""
    weight, bias = linear(*shape), np.zeros(shape[0], np.float32)
    bias[0] = 0.5
    options = ConvertOptions(block=block, explicit_zero_points=zero_points)
    convert_file(container(weight, bias), tmp_path / "m.onnx", to="onnx", options=options)
    onnx.checker.check_model(onnx.load(tmp_path / "m.onnx"))
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"fc.weight_input": np.eye(shape[1], dtype=np.float32)})
    assert np.array_equal(found, weight.dequantize().T + bias)
    assert_same(read(tmp_path / "m.onnx"), weight.codes(), weight.scales)


def test_onnxruntime_runs_scales_of_float16(tmp_path: Path, container: Callable[..., Path]) -> None:
    """With float16 scales the model takes and gives float16, within its rounding of ours."""
    weight = linear(32, 64)
    convert_file(container(weight), tmp_path / "m.onnx", to="onnx", options=ConvertOptions("f16"))
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"fc.weight_input": np.eye(64, dtype=np.float16)})
    assert found.dtype == np.float16
    expected = weight.dequantize().T
    assert np.all(np.abs(found - expected) <= np.abs(expected) * 2.0**-9 + 2.0**-24)


def test_onnxruntime_reads_tensors_beside_the_model(
    tmp_path: Path, container: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of external data that we write is one that ONNX Runtime maps."""
    monkeypatch.setattr("qcs4w_packer.formats.outputs.OnnxTarget.inline_nbytes", 0)
    weight = linear(17, 100)
    convert_file(container(weight), tmp_path / "m.onnx", to="onnx")
    onnx.checker.check_model(str(tmp_path / "m.onnx"))
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"fc.weight_input": np.eye(100, dtype=np.float32)})
    assert np.array_equal(found, weight.dequantize().T)


@pytest.mark.parametrize("block", [64, 16])
def test_we_read_what_onnxruntime_quantized(tmp_path: Path, block: int) -> None:
    """A model of its own quantizer, one block a row, runs as we dequantize it; with several blocks it is refused."""
    w = np.random.default_rng(0).standard_normal((48, 6)).astype(np.float32)
    value, helper = onnx.helper.make_tensor_value_info, onnx.helper
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "fc.weight"], ["y"])],
        "g",
        [value("x", onnx.TensorProto.FLOAT, ["M", 48])],
        [value("y", onnx.TensorProto.FLOAT, ["M", 6])],
        [onnx.numpy_helper.from_array(w, "fc.weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    quantizer = MatMulNBitsQuantizer(model, block_size=block, is_symmetric=True)
    quantizer.process()
    path = tmp_path / "theirs.onnx"
    quantizer.model.save_model_to_file(str(path))
    if block < 48:
        with pytest.raises(LossyError, match="more than one scale"):
            read(path)
        return
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": np.eye(48, dtype=np.float32)})
    assert np.array_equal(read(path).dequantize().T, found)


# ExecuTorch's q4gsw


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_executorch_packs_q4gsw_as_we_do(
    tmp_path: Path, container: Callable[..., Path], shape: tuple[int, int]
) -> None:
    """Our bytes are its packer's, and its operator gives our dequantized values."""
    weight = linear(*shape)
    convert_file(container(weight), tmp_path / "q.safetensors", to="q4gsw")
    ours = load_file(tmp_path / "q.safetensors")
    packed, scales = ours["fc.weight.q4gsw_packed"], ours["fc.weight.q4gsw_scale"]
    assert torch.equal(packed, pack_4bit_weight_tensor(torch.from_numpy(weight.codes())))
    identity = torch.eye(shape[1])
    found = torch.ops.et_vk.linear_q4gsw(identity, packed, scales[:, : shape[0]].contiguous(), shape[1])
    assert np.array_equal(found.numpy(), weight.dequantize().T)
    assert_same(read(tmp_path / "q.safetensors"), weight.codes(), weight.scales)


# GPTQ and AWQ


def float_linear(rows: int, columns: int, groups: int = 1) -> tuple[torch.nn.Linear, np.ndarray, torch.Tensor]:
    """Return a linear of codes times float16 scales, the codes (N, K), and the scales (N, G), equal in each row."""
    rng = np.random.default_rng(rows)
    codes = rng.integers(-8, 8, (rows, columns))
    scales = torch.from_numpy(rng.random((rows, 1)).astype(np.float16) + np.float16(0.05)).float()
    module = torch.nn.Linear(columns, rows, bias=False)
    module.weight.data = torch.from_numpy(codes).float() * scales
    return module, codes, scales.repeat(1, groups)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("shape", IN_WORDS, ids=str)
@pytest.mark.parametrize("with_config", [True, False], ids=["config", "no config"])
@pytest.mark.parametrize("group", [-1, 16], ids=["row", "groups"])
def test_we_read_what_gptqmodel_packed(
    tmp_path: Path, version: int, shape: tuple[int, int], with_config: bool, group: int
) -> None:
    """Its codes and scales come out in both versions, told by its config or by the zero points."""
    rows, columns = shape
    groups = 1 if group < 0 else columns // group
    module, codes, scales = float_linear(rows, columns, groups)
    theirs = TorchLinear(bits=4, group_size=group, sym=True, desc_act=False, in_features=columns, out_features=rows)
    g_idx = torch.arange(columns, dtype=torch.int32) // (columns // groups)
    theirs.pack_original(module, scales, torch.full_like(scales, 8), g_idx)
    state = {f"fc.{name}": tensor.clone() for name, tensor in theirs.state_dict().items()}
    if version == 1:
        before = state["fc.qzeros"]
        convert_gptq_v2_to_v1_format_module(theirs, QuantizeConfig(bits=4, group_size=group))
        state = {f"fc.{name}": tensor for name, tensor in theirs.state_dict().items()}
        assert not torch.equal(before, state["fc.qzeros"])
    save_file(state, tmp_path / "g.safetensors")
    if with_config:
        config = {"bits": 4, "quant_method": "gptq", "checkpoint_format": "gptq_v2" if version == 2 else "gptq"}
        (tmp_path / "quantize_config.json").write_text(json.dumps(config))
    with open_packed(tmp_path / "g.safetensors") as file:
        assert file.format == "gptq"
        found = file.load("fc.weight")
        assert f"version {version}" in file.notes[0]
    assert_same(found, codes, scales[:, 0].numpy())
    assert np.array_equal(found.dequantize(), module.weight.detach().numpy())


@pytest.mark.parametrize("shape", IN_WORDS, ids=str)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("tool", ["AutoAWQ", "GPTQModel"])
def test_we_read_what_awq_tools_packed(tmp_path: Path, shape: tuple[int, int], groups: int, tool: str) -> None:
    """Codes and scales come out, and the tool's own dequantization gives our values."""
    rows, columns = shape
    group = columns // groups
    module, codes, scales = float_linear(rows, columns, groups)
    zeros = torch.full_like(scales, 8)
    if tool == "AutoAWQ":
        theirs = WQLinear_GEMM.from_linear(module, 4, group, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())
    else:
        theirs = AwqTorchLinear(
            bits=4, group_size=group, sym=True, desc_act=False, in_features=columns, out_features=rows
        )
        theirs.pack(module, scales, zeros)
    state = theirs.state_dict()
    save_file({f"fc.{name}": tensor for name, tensor in state.items()}, tmp_path / "a.safetensors")
    with open_packed(tmp_path / "a.safetensors") as file:
        assert file.format == "awq"
        found = file.load("fc.weight")
    assert_same(found, codes, scales[:, 0].numpy())
    values = dequantize_gemm(state["qweight"], state["qzeros"], state["scales"], 4, group).T
    assert torch.equal(values, torch.from_numpy(found.dequantize()).half())


def test_an_awq_weight_with_real_zero_points_is_refused(tmp_path: Path) -> None:
    """What AutoAWQ makes of a skewed weight has other zero points than 8, and is refused."""
    module, _, scales = float_linear(32, 32)
    zeros = torch.full_like(scales, 8)
    zeros[3] = 5
    theirs = WQLinear_GEMM.from_linear(module, 4, 32, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())
    save_file({f"fc.{name}": tensor for name, tensor in theirs.state_dict().items()}, tmp_path / "a.safetensors")
    with pytest.raises(LossyError, match="zero point of row 3, group 0 is 5"):
        read(tmp_path / "a.safetensors")
