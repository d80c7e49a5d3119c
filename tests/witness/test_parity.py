"""The packer against the real ExecuTorch: its quantizer, its lowering and its packer, compared bit for bit."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rows import free_matrices, made_matrices, matrix
from tally import Tally
from vulkan_export import Linears, lowered, lowered_weights, only_delegate, quantized, quantizer_answers
from wrong_rules import WRONG_RULES, Answer, pack_wrongly

from qcs4w_packer import pack_weight

Packer = Callable[[np.ndarray], Answer]

SLOW = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
WIDTHS = st.integers(1, 70)  # K, odd ones too
EVEN_WIDTHS = st.integers(1, 40).map(lambda half: 2 * half)  # the lowering takes no others


def ours(weight: np.ndarray) -> Answer:
    """What `qcs4w pack` makes of a weight, the codes read back out of the packed bytes."""
    linear = pack_weight(weight)
    return Answer(linear.codes(), linear.scales, linear.packed)


def quantize_and_pack(weights: list[np.ndarray], dtype: torch.dtype = torch.float32) -> list[Answer]:
    """What ExecuTorch's quantizer and packer make of weights, short of lowering them."""
    return quantizer_answers(quantized(Linears([torch.from_numpy(weight).to(dtype) for weight in weights])))


def hold_against_the_quantizer(
    packer: Packer, tally: Tally, *, examples: int, phases: tuple[Phase, ...] = tuple(Phase)
) -> None:
    """Search for weights that a packer and ExecuTorch pack differently; AssertionError with the smallest one found."""

    @settings(SLOW, max_examples=examples, phases=phases)
    @given(st.lists(made_matrices(120, WIDTHS) | free_matrices(st.integers(1, 9)), min_size=1, max_size=3))
    def compare(weights: list[np.ndarray]) -> None:
        for weight, theirs in zip(weights, quantize_and_pack(weights), strict=True):
            difference = tally.compare(weight, theirs, packer(weight))
            assert not difference, difference

    compare()


def test_codes_scales_and_bytes_are_those_of_the_quantizer_and_the_packer(new_tally: Callable[[str], Tally]) -> None:
    """Thousands of drawn rows go through ExecuTorch's quantizer and packer and ours: every bit is equal."""
    tally = new_tally("ExecuTorch's quantizer and packer against ours")
    hold_against_the_quantizer(ours, tally, examples=200)
    assert tally.compared["rows"] > 5_000
    assert min(tally.hard.values()) > 40, tally.hard


def test_what_is_lowered_is_what_the_quantizer_and_the_packer_made(new_tally: Callable[[str], Tally]) -> None:
    """Thousands of rows go all the way into a program and are read out of it by the package: every bit is ours.

    The codes, scales and bytes of the shorter way, which the other tests take, are equal to those in the program.
    """
    tally = new_tally("a lowered program's linear_qcs4w against ours")

    @settings(SLOW, max_examples=3, phases=[Phase.generate])
    @given(st.lists(made_matrices(400, EVEN_WIDTHS), min_size=5, max_size=5), st.integers(0, 2**32 - 1))
    def compare(weights: list[np.ndarray], seed: int) -> None:
        weights = [*weights, matrix(np.random.default_rng(seed), (1701, 22))]
        model = Linears([torch.from_numpy(weight) for weight in weights])
        converted = quantized(model)
        found = lowered_weights(only_delegate(lowered(converted, model)))
        for weight, (packed, scales), direct in zip(weights, found, quantizer_answers(converted), strict=True):
            np.testing.assert_array_equal(packed, direct.packed)
            np.testing.assert_array_equal(scales.view(np.uint32), direct.scales.view(np.uint32))
            difference = tally.compare(weight, Answer(direct.codes, scales, packed), ours(weight))
            assert not difference, difference

    compare()
    assert tally.compared["rows"] > 5_000
    assert min(count for name, count in tally.hard.items() if name != "weights of odd K") > 0, tally.hard


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half_weights_are_widened_first(
    dtype: torch.dtype, new_tally: Callable[[str], Tally], rng: np.random.Generator
) -> None:
    """A module whose weights are stored in 16 bits gives the codes, scales and bytes of their float32 values."""
    tally = new_tally(f"ExecuTorch's quantizer and packer on weights in {dtype} against ours")
    drawn = [(rng.standard_normal((90, width)) * 10.0 ** rng.integers(-6, 3, (90, 1))) for width in (1, 2, 7, 64, 129)]
    weights = [torch.from_numpy(weight).to(dtype).float().numpy() for weight in drawn]
    for weight, theirs in zip(weights, quantize_and_pack(weights, dtype), strict=True):
        difference = tally.compare(weight, theirs, ours(weight))
        assert not difference, difference
    assert tally.compared["rows"] == 450


@pytest.mark.parametrize("rule", WRONG_RULES)
def test_a_wrong_rule_fails_the_suite(rule: str) -> None:
    """The same search with one of the usual mistakes in the packer ends in a mismatch."""
    tally = Tally(rule)
    with pytest.raises(AssertionError, match="of the witness"):
        hold_against_the_quantizer(
            lambda weight: pack_wrongly(weight, rule), tally, examples=300, phases=(Phase.generate,)
        )
    assert tally.mismatches
