"""What qcs4w says about ExecuTorch in its messages and texts, asked of ExecuTorch itself."""

import numpy as np
import pytest
import torch
from executorch.backends.vulkan._passes.fuse_quantized_ops import pack_4bit_weight_tensor
from executorch.backends.vulkan.patterns import quantized_linear
from vulkan_export import QCS4W, Linears, lowered, lowered_weights, only_delegate, quantized, quantizer_answers
from wrong_rules import pack_wrongly

from qcs4w_packer import pack_codes, pack_weight, unpack_codes


def random_weight(rng: np.random.Generator, shape: tuple[int, int]) -> torch.Tensor:
    """A float32 weight (N, K)."""
    return torch.from_numpy(rng.standard_normal(shape, np.float32))


def test_no_odd_in_features_can_be_exported(rng: np.random.Generator) -> None:
    """The quantizer and the packer take an odd K, and the export raises in the pass that fuses."""
    model = Linears([random_weight(rng, (4, 5))])
    converted = quantized(model)
    assert quantizer_answers(converted)[0].packed.shape == (4, 3)
    with pytest.raises(Exception, match="FuseQuantizedOpsTransform") as caught:
        lowered(converted, model)
    assert "same reduction dim, but got [2, 5] X [6, 4]" in str(caught.value.__cause__)


def test_eight_bits_on_a_nearly_zero_weight_become_four(rng: np.random.Generator) -> None:
    """Quantized to 8 bits, a weight whose codes happen to fit into 4 is packed as 4-bit; its scales are the floor."""
    weight = rng.uniform(-1, 1, (4, 6)).astype(np.float32) * np.float32(7.4 * 2.0**-23)
    model = Linears([torch.from_numpy(weight)])
    delegate = only_delegate(lowered(quantized(model, weight_bits=8), model))
    assert delegate.operators() == [QCS4W]
    ((packed, scales),) = lowered_weights(delegate)
    assert scales.tolist() == [2.0**-23] * 4
    np.testing.assert_array_equal(packed, pack_weight(weight).packed)


def test_a_range_without_minus_8_divides_by_7(rng: np.random.Generator) -> None:
    """`weight_qmin=-7` gives the same operator with scales of absmax / 7; a bias becomes an addition after it."""
    weight = random_weight(rng, (16, 10))
    model = Linears([weight], [torch.ones(16)])
    delegate = only_delegate(lowered(quantized(model, weight_qmin=-7), model))
    assert [name for name in delegate.operators() if "prepack" not in name] == [QCS4W, "aten.add.Tensor"]
    ((packed, scales),) = lowered_weights(delegate)
    other = pack_wrongly(weight.numpy(), "divisor 7")
    np.testing.assert_array_equal(packed, other.packed)
    assert scales.tobytes() == other.scales.tobytes()


def test_the_eager_operator_never_subtracts_8(rng: np.random.Generator) -> None:
    """`torch.ops.et_vk.linear_qcs4w` multiplies by code + 8, so it is no reference for the kernel."""
    linear = pack_weight(rng.standard_normal((6, 8), np.float32))
    x = rng.standard_normal((3, 8), np.float32)
    arguments = (torch.from_numpy(array) for array in (x, linear.packed, linear.scales))
    answer = torch.ops.et_vk.linear_qcs4w(*arguments).numpy()
    codes = unpack_codes(linear.packed, 8).astype(np.float64)
    scales = linear.scales.astype(np.float64)[:, None]
    np.testing.assert_allclose(answer, x @ ((codes + 8) * scales).T, rtol=0, atol=1e-4)
    assert np.abs(answer - x @ (codes * scales).T).max() > 1


def test_two_packers_of_one_name_have_opposite_orders() -> None:
    """The `pack_4bit_weight_tensor` of linear_q4gsw puts the even column low, that of linear_qcs4w high."""
    codes = torch.arange(-8, 8, dtype=torch.int8)[None]
    high_first = pack_4bit_weight_tensor(codes).numpy()
    assert high_first.tobytes() == pack_codes(codes.numpy()).tobytes() == bytes.fromhex("0123456789ABCDEF")
    assert quantized_linear.pack_4bit_weight_tensor(codes).numpy().tobytes() == bytes.fromhex("1032547698BADCFE")


@pytest.mark.parametrize("value", [np.inf, -np.inf], ids=str)
def test_an_infinite_weight_is_taken_without_a_word(value: float, rng: np.random.Generator) -> None:
    """The row's scale becomes infinite, its codes 0 and its output NaN: what `qcs4w pack` refuses."""
    weight = random_weight(rng, (3, 4))
    weight[1, 2] = value
    model = Linears([weight])
    converted = quantized(model)
    ((codes, scales, _),) = quantizer_answers(converted)
    assert np.isinf(scales).tolist() == [False, True, False]
    assert not codes[1].any()
    (output,) = converted(*model.inputs())
    assert output.isnan().any(dim=0).tolist() == [False, True, False]
