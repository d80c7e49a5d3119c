"""What ExecuTorch's WebGPU runtime refuses of an et_vk.linear_qcs4w.

Source: pytorch/executorch 9b5164e, backends/webgpu/runtime/ops/linear_qcs4w/QuantizedLinearQcs4w.cpp,
qcs4w_linear_impl; for bindings 0dfaa10, backends/webgpu/runtime/WebGPUDevice.cpp: it asks for all that the adapter
offers, and the operator binds each buffer whole.
"""

from collections.abc import Iterator

from .nibbles import packed_width

_TILE = 4  # rows and columns of y for each invocation
_MOST_TILES = 2**32 - 1
_DEFAULT_BINDING = 128 << 20  # bytes; WebGPU's maxStorageBufferBindingSize where an adapter offers no more


def is_unaligned(out_features: int, in_features: int) -> bool:
    """Whether N · ceil(K/2), the packed bytes, is no multiple of 4: the kernel reads them as u32."""
    return out_features * packed_width(in_features) % 4 != 0


def webgpu_refusals(
    out_features: int,
    in_features: int,
    *,
    rows: int | None = None,
    scale_dtype: str = "F32",
    input_dtype: str = "F32",
    output_dtype: str = "F32",
) -> Iterator[str]:
    """Yield every reason why the runtime would refuse a linear, none if it takes it.

    Args:
        out_features: N.
        in_features: K.
        rows: M, the most that it is built for; None where it is not known.
        scale_dtype: of the scales, as safetensors names it.
        input_dtype: of x.
        output_dtype: of y.
    """
    if rows == 0:
        yield "M is 0"
    if is_unaligned(out_features, in_features):
        nbytes = out_features * packed_width(in_features)
        yield f"N·ceil(K/2) = {nbytes:,} is no multiple of 4"
    for what, dtype in (("scales are", scale_dtype), ("x is", input_dtype), ("y is", output_dtype)):
        if dtype != "F32":
            yield f"{what} {dtype} where F32 is expected"
    if rows and -(-rows // _TILE) * -(-out_features // _TILE) > _MOST_TILES:
        yield f"y has more than {_MOST_TILES:,} tiles of {_TILE} × {_TILE}"
    sizes = {"the weight": out_features * packed_width(in_features)}
    if rows:
        sizes |= {"x": 4 * rows * in_features, "y": 4 * rows * out_features}
    for what, nbytes in sizes.items():
        if nbytes > _DEFAULT_BINDING:
            yield f"{what} has {nbytes / 2**20:,.1f} MiB, beyond a binding of 128 MiB where the adapter offers no more"
