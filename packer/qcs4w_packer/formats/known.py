"""What is known of each 4-bit layout: who writes it and how its bytes lie. For reports that name a layout."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownFormat:
    """One layout of 4-bit linear weights.

    Attributes:
        name: what the command line calls it.
        written_by: the tools that write it.
        even_high: of two neighbours along the packed axis the even one is in bits 4..7.
        offset: stored nibble = code + offset, or None where each group states its zero point.
        orientation: shape of the stored weight and its dtype; N out_features, K in_features, G groups.
        neighbours: which elements share a byte, where these are not columns 2j and 2j + 1 of a row.
        padding: what fills up K, and with which nibble.
        scales: shape and dtype.
        reads: `qcs4w convert` reads it.
        writes: `qcs4w convert --to` writes it.
        source: where the layout is defined: repository, commit, path.
    """

    name: str
    written_by: str
    even_high: bool
    offset: int | None
    orientation: str
    neighbours: str
    padding: str
    scales: str
    reads: bool
    writes: bool
    source: str


_FORMATS = (
    KnownFormat(
        "qcs4w", "qcs4w, ExecuTorch's linear_qcs4w", True, 8, "uint8 [N, ceil(K/2)]", "",
        "K to 2 with nibble 8", "float32 [N]", True, True,
        "pytorch/executorch cff6f4d, backends/vulkan/_passes/fuse_quantized_ops.py",
    ),
    KnownFormat(
        "q4gsw", "ExecuTorch's linear_q4gsw", False, 8, "uint8 [N, ceil(K/8)·4]", "",
        "K to 8 with nibble 8; N of the scales to 4 with 0", "float32 [G, N]", True, True,
        "pytorch/executorch d8b23cb, backends/vulkan/patterns/weight_packing_utils.py; "
        "767f8ad, backends/vulkan/patterns/quantized_linear.py",
    ),
    KnownFormat(
        "compressed-tensors", "compressed-tensors and llm-compressor, pack-quantized", False, 8,
        "int32 [N, ceil(K/8)]", "", "K to 8 with nibble 0", "any float [N, G], [N, 1] for strategy channel", True, True,
        "vllm-project/compressed-tensors e341321, src/compressed_tensors/compressors/pack_quantized/helpers.py",
    ),
    KnownFormat(
        "onnx", "ONNX Runtime's MatMulNBits", False, 8, "uint8 [N, blocks, block/2]", "",
        "K to the block with the zero point", "float32 or float16 [N, blocks]", True, True,
        "microsoft/onnxruntime 8b8f774, docs/ContribOperators.md, com.microsoft.MatMulNBits",
    ),
    KnownFormat(
        "gptq", "AutoGPTQ, GPTQModel, AutoRound (v1 stores the zero point minus one)", False, None,
        "int32 [K/8, N]", "rows 2j and 2j + 1 of the stored [K, N]", "none", "float16 [G, N]", True, False,
        "AutoGPTQ/AutoGPTQ c80855e, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py; "
        "ModelCloud/GPTQModel 50aa90a, gptqmodel/utils/model.py",
    ),
    KnownFormat(
        "awq", "AutoAWQ (GEMM), AutoRound", False, None, "int32 [K, N/8]",
        "of each 8 columns 0 and 2, 4 and 6, 1 and 3, 5 and 7 of the stored [K, N]", "none", "float16 [G, N]",
        True, False, "casper-hansen/AutoAWQ d9dc8e5, awq/modules/linear/gemm.py",
    ),
    KnownFormat(
        "ggml-q4_0", "llama.cpp", False, 8, "blocks of 32: float16 scale, 16 bytes",
        "columns j and j + 16 of each block", "none", "float16, one a block of 32, inside the data", False, False,
        "ggml-org/llama.cpp 36491e4, ggml/src/ggml-quants.c, quantize_row_q4_0_ref",
    ),
)  # fmt: skip

#: Every known layout by name.
KNOWN = {known.name: known for known in _FORMATS}
