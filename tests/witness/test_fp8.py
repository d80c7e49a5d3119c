"""Weights in fp8 held against the libraries that write and read them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.mxfp8 import MXFP8QuantizationCompressor
from compressed_tensors.compressors.naive_quantized import FloatQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from qcs4w_packer.sources import open_source

SHAPES = [(1, 1), (5, 3), (128, 128), (129, 257), (300, 130)]


def read(path: Path, tensors: dict[str, torch.Tensor]) -> np.ndarray:
    """Save a layer's tensors and read its weight as pack does."""
    save_file({f"fc.{name}": tensor.contiguous() for name, tensor in tensors.items()}, path / "m.safetensors")
    with open_source(path / "m.safetensors") as source:
        return source.tensors["fc.weight"].read()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_what_compressed_tensors_means(tmp_path: Path, shape: tuple[int, int], strategy: str) -> None:
    """float-quantized: what it decompresses is what we read, to the bit."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    tiles = {"tensor": (1,), "channel": (shape[0], 1), "block": (-(-shape[0] // 128), -(-shape[1] // 128))}
    scale = torch.rand(tiles[strategy], generator=torch.Generator().manual_seed(1)) * 0.01 + 0.01
    arguments = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    block = {"block_structure": [128, 128]} if strategy == "block" else {}
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments | block)
    theirs = FloatQuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    assert theirs["weight"].dtype == torch.float8_e4m3fn
    meant = FloatQuantizationCompressor.decompress(theirs, scheme)["weight"]
    assert read(tmp_path, theirs).tobytes() == meant.float().numpy().tobytes()


@pytest.mark.parametrize("shape", [(1, 32), (5, 96), (130, 256)], ids=str)
def test_microscaling_of_compressed_tensors(tmp_path: Path, shape: tuple[int, int]) -> None:
    """mxfp8: a power of two for every 32 columns, stored as a byte."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    scale = torch.exp2(torch.randint(-9, -5, (shape[0], shape[1] // 32), generator=torch.Generator().manual_seed(1)))
    arguments = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments | {"scale_dtype": "torch.uint8"})
    theirs = MXFP8QuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    assert theirs["weight_scale"].dtype == torch.uint8
    meant = MXFP8QuantizationCompressor.decompress(theirs, scheme)["weight"]
    assert read(tmp_path, theirs).tobytes() == meant.float().numpy().tobytes()


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("shape", [(128, 128), (256, 384)], ids=str)
def test_what_transformers_means(tmp_path: Path, shape: tuple[int, int], scale_dtype: torch.dtype) -> None:
    """Finegrained fp8, where its own loader dequantizes: scales of blocks in each of its dtypes."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    tiles = (shape[0] // 128, shape[1] // 128)
    scale = (torch.rand(tiles, generator=torch.Generator().manual_seed(1)) * 0.01 + 0.001).to(scale_dtype)
    meant = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)
    assert read(tmp_path, {"weight": weight, "weight_scale_inv": scale}).tobytes() == meant.numpy().tobytes()
