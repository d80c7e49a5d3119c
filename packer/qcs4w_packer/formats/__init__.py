"""Four-bit layouts of other tools: read where every row has one scale, and written.

| format | written by | stored weight | a byte or word | filled up | scales | zero point | source |
|---|---|---|---|---|---|---|---|
| qcs4w | qcs4w; ExecuTorch linear_qcs4w | uint8 [N, ⌈K/2⌉] | even high | K to 2, nibble 8 | f32 [N] | 8 | 1 |
| q4gsw | ExecuTorch linear_q4gsw | uint8 [N, ⌈K/8⌉·4] | even low | K to 8, nibble 8; N of scales to 4 | f32 [G, N] | 8 | 2 |
| compressed-tensors | compressed-tensors, llm-compressor | int32 [N, ⌈K/8⌉] | even low | K to 8, nibble 0 | [N, G] | 8 | 3 |
| onnx | ONNX Runtime MatMulNBits | uint8 [N, blocks, block/2] | even low | K to the block, nibble 8 | [N, blocks] | 8 | 4 |
| gptq | AutoGPTQ, GPTQModel, AutoRound | int32 [⌈K/8⌉, N], words along K | even low | none | f16 [G, N] | qzeros + 1 (v1), qzeros (v2) | 5 |
| awq | AutoAWQ GEMM, AutoRound | int32 [K, N/8], words along N | 0 2 4 6 1 3 5 7 | none | f16 [G, N] | qzeros | 6 |

The format's name is what `PackedFile.format` and `--to` have. Everywhere a stored nibble is code + zero point.
Sources:
1. pytorch/executorch cff6f4d, backends/vulkan/_passes/fuse_quantized_ops.py, pack_4bit_weight_tensor
2. pytorch/executorch d8b23cb, backends/vulkan/patterns/weight_packing_utils.py, pack_4bit_weight_tensor;
   767f8ad, backends/vulkan/patterns/quantized_linear.py, make_linear_q4gsw_op
3. vllm-project/compressed-tensors e341321, src/compressed_tensors/compressors/pack_quantized/helpers.py
4. microsoft/onnxruntime 8b8f774, docs/ContribOperators.md, com.microsoft.MatMulNBits
5. AutoGPTQ/AutoGPTQ c80855e, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py; ModelCloud/GPTQModel 50aa90a,
   gptqmodel/utils/model.py, convert_gptq_v1_to_v2_format_module
6. casper-hansen/AutoAWQ d9dc8e5, awq/modules/linear/gemm.py, WQLinear_GEMM.from_linear
Which bytes have which layout is told by `readings`, for files that do not say.
"""  # noqa: E501 - a table
