"""Causes: the usual faults are named from y alone, or from a source, and nothing else is.

QCS4W_TRIALS sets how many random trials each fault gets; `make faults` takes 100.
"""

import os

import numpy as np
import pytest
from cases import SIZES, packed_of, random_codes
from faulty import faulty
from numpy.typing import NDArray

from qcs4w_gpu.causes import (
    Evidence,
    causes_of_codes,
    causes_of_output,
    causes_of_weights,
    explain_outputs,
    name_faults,
)
from qcs4w_gpu.faults import INPUTS, OUTPUTS, SCALES, Hypothesis, Suspects, hypotheses
from qcs4w_gpu.judge import exact_input
from qcs4w_packer import PackedLinear, Reading, readings
from qcs4w_packer.nibbles import EVEN_HIGH_TWOS, EVEN_LOW, EVEN_LOW_TWOS
from qcs4w_packer.quantize import quantize
from qcs4w_packer.rowpack import pack_weight

TRIALS = int(os.environ.get("QCS4W_TRIALS", "4"))

# The smallest M, N, K at which 100 random trials of every fault and every pair of them were all named right; the
# second has an odd K. K 6 has tails of 1 and 2 to drop, K 7 tails of 1 and 3.
SMALLEST = ((4, 4, 6), (4, 5, 7))
# No evidence can tell these apart: with an odd K, swapped nibbles read the pad, a zero, in place of the last column.
SAME = {"nibbles swapped and dropped tail: last 1 column": "nibbles swapped"}

# The smallest N and K at which random codes always tell one reading from another by the exact probe.
SMALLEST_N, SMALLEST_K = 4, 4


def misread(packed: PackedLinear, x: NDArray[np.float32], reading: Reading) -> NDArray[np.float32]:
    """Return the y of a kernel that reads the bytes this way."""
    codes = reading.codes(packed.packed, packed.in_features).astype(np.float32)
    return (x @ (codes * packed.scales[:, None]).T).astype(np.float32)


def names(packed: PackedLinear, x: NDArray[np.float32], y: NDArray[np.float32]) -> list[str]:
    """Return the causes of a wrong y by name, the best first."""
    return [cause.name for cause in causes_of_output(packed, x, y, packed.scales)]


SINGLE = {
    "nibbles swapped": Reading(EVEN_LOW),
    "two's complement": Reading(EVEN_HIGH_TWOS),
    "offset missing": Reading(offset=0),
    "dropped tail: last 1 column": Reading(dropped_tail=1),
    "dropped tail: last 3 columns": Reading(dropped_tail=3),
    "nibbles swapped and two's complement": Reading(EVEN_LOW_TWOS),
    "nibbles swapped and offset missing": Reading(EVEN_LOW, offset=0),
    "offset missing and dropped tail: last 1 column": Reading(offset=0, dropped_tail=1),
    "two's complement and dropped tail: last 3 columns": Reading(EVEN_HIGH_TWOS, dropped_tail=3),
}


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("seed", range(10))
def test_a_fault_is_named_from_y_alone(name: str, seed: int) -> None:
    """Each usual fault, and usual pairs of them, come first by name and leave nothing unexplained."""
    draw = np.random.default_rng(seed)
    packed = pack_weight(draw.standard_normal((8, 11), np.float32))
    x = draw.standard_normal((4, 11), np.float32)
    causes = causes_of_output(packed, x, misread(packed, x, SINGLE[name]), packed.scales)
    assert causes[0].name == name
    assert causes[0].residual < 1e-6
    assert "from the right answer by" in causes[0].evidence


@pytest.mark.parametrize("shape", SMALLEST, ids=str)
@pytest.mark.parametrize("seed", range(TRIALS))
def test_every_fault_and_every_pair_is_named(seed: int, shape: tuple[int, int, int]) -> None:
    """From y alone each single fault and each pair comes first by its name, at the smallest shape already."""
    rows, out_features, in_features = shape
    draw = np.random.default_rng((seed, *shape))
    packed = pack_weight(draw.standard_normal((out_features, in_features), np.float32))
    x, bias = draw.standard_normal((rows, in_features), np.float32), draw.standard_normal(out_features, np.float32)
    suspects = Suspects(packed, x, packed.scales, bias=bias)
    tried = [each for each in suspects.tried if 0 < len(each.faults) <= 2]
    assert len(tried) > 150
    for fault in tried:
        causes = name_faults([suspects], [faulty(packed, x, fault, bias)])
        assert causes, fault.name
        assert causes[0].name == (SAME.get(fault.name, fault.name) if in_features % 2 else fault.name)
        assert causes[0].residual < 1e-5


def test_the_list_of_faults_is_whole() -> None:
    """What people get wrong is in the list, singly and in pairs of different places, each once."""
    names = [each.name for each in hypotheses(6, 4, has_bias=True)]
    assert len(set(names)) == len(names)
    singles = [name for name in names if " and " not in name]
    assert singles[0] == "qcs4w"
    assert len(singles) == 1 + 8 + 5 + 3 + 3 + 2  # readings, scales, inputs, outputs, bias
    assert "nibbles swapped and scales missing" in names
    assert "bias twice" in names
    assert not any("bias" in each.name for each in hypotheses(6, 4))
    # With an odd K and few rows the bytes cannot hold the transposed matrix.
    assert not any("transposed" in each.name for each in hypotheses(8, 1))


def test_both_probes_are_explained_by_one_fault() -> None:
    """A fault of the codes and one of the scales are named together: the exact probe alone would show the first."""
    draw = np.random.default_rng(0)
    packed = pack_weight(draw.standard_normal((8, 12), np.float32))
    ones = PackedLinear(packed.packed, np.ones_like(packed.scales), 12)
    fault = Hypothesis(Reading(EVEN_LOW), scale=SCALES[1])
    x_exact, x = exact_input(12, 4, 0), draw.standard_normal((4, 12), np.float32)
    evidence = [
        Evidence(x_exact, faulty(ones, x_exact, fault), ones.scales),
        Evidence(x, faulty(packed, x, fault), packed.scales),
    ]
    assert [cause.name for cause in explain_outputs(packed, evidence)] == [fault.name]
    assert [cause.name for cause in explain_outputs(packed, evidence[:1])] == ["nibbles swapped"]


@pytest.mark.parametrize("fault", [INPUTS[1], INPUTS[3], OUTPUTS[1], OUTPUTS[3]])
def test_one_row_of_x_tells_no_row_from_another(fault: str) -> None:
    """With a single row of x, reading its neighbour cannot be seen, and is never named; shifted columns are."""
    packed = pack_weight(np.random.default_rng(0).standard_normal((8, 12), np.float32))
    x = np.random.default_rng(1).standard_normal((1, 12), np.float32)
    place = {"input": fault} if fault in INPUTS else {"output": fault}
    expected = [fault] if fault == OUTPUTS[1] else []
    assert names(packed, x, faulty(packed, x, Hypothesis(**place))) == expected


def test_a_part_that_a_fault_cannot_tell_does_not_speak_for_it() -> None:
    """Where only the last row is wrong, "rows of the neighbour", which says nothing of it, is not named."""
    packed, x = packed_of(random_codes(8, 12)), np.ones((4, 12), np.float32)
    y = faulty(packed, x, Hypothesis())
    y[-1] *= 3
    assert names(packed, x, y) == []


@pytest.mark.parametrize("in_features", [8192 + 67, 20_000])
def test_long_rows_are_read_in_blocks(in_features: int) -> None:
    """Blocks of columns add up to what is read at once."""
    packed, x = packed_of(random_codes(4, in_features)), exact_input(in_features, 4, 0)
    for fault in (Hypothesis(Reading(EVEN_LOW, dropped_tail=in_features % 256)), Hypothesis(input=INPUTS[3])):
        assert names(packed, x, faulty(packed, x, fault)) == [fault.name]


@pytest.mark.parametrize("in_features", [k for k in SIZES if k >= SMALLEST_K])
def test_every_reading_is_named_from_the_exact_probe(in_features: int) -> None:
    """From N = K = 4 on the exact probe tells all readings apart, or names the simplest of those that are equal."""
    for seed in range(3):
        packed = packed_of(random_codes(SMALLEST_N, in_features, seed))
        x = exact_input(in_features, 4, seed)
        outputs = {reading: misread(packed, x, reading) for reading in readings(in_features)}
        suspects = Suspects(packed, x, packed.scales)
        for reading, y in outputs.items():
            same = [other for other in outputs if np.array_equal(outputs[other], y)]
            simplest = min(same, key=lambda each: len(each.faults))
            expected = [] if not simplest.faults else [simplest.name]
            assert [cause.name for cause in name_faults([suspects], [y])][:1] == expected, reading.name


def test_the_right_answer_has_no_cause() -> None:
    """Nothing is named where nothing is wrong, rounding aside."""
    packed = pack_weight(np.random.default_rng(0).standard_normal((16, 64), np.float32))
    x = np.random.default_rng(1).standard_normal((4, 64), np.float32)
    assert names(packed, x, misread(packed, x, Reading())) == []


@pytest.mark.parametrize("in_features", [8, 64, 8192])
def test_one_wrong_code_has_no_cause(in_features: int) -> None:
    """A fault that is none of the usual ones is not given the name of one."""
    codes = random_codes(8, in_features)
    packed, x = packed_of(codes), exact_input(in_features, 4, 0)
    codes[3, in_features // 2] += 1 if codes[3, in_features // 2] < 7 else -1
    assert names(packed, x, x @ codes.T.astype(np.float32)) == []


@pytest.mark.parametrize("kind", ["noise", "zeros", "nan"])
def test_other_faults_have_no_cause(kind: str) -> None:
    """Noise, zeros and NaN are not explained by any of the usual faults."""
    packed, x = packed_of(random_codes(16, 33)), exact_input(33, 16, 0)
    right = misread(packed, x, Reading())
    y = {
        "noise": np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32),
        "zeros": np.zeros_like(right),
        "nan": np.full_like(right, np.nan),
    }[kind]
    assert names(packed, x, y) == []


@pytest.mark.parametrize("has_bias", [False, True])
def test_what_is_plain_to_see_is_named(has_bias: bool) -> None:
    """A multiple of the right answer, and one whose rows or columns are reversed, are named as that, not as a bias."""
    packed, x = packed_of(random_codes(16, 33)), exact_input(33, 16, 0)
    bias = 300 * np.random.default_rng(0).standard_normal(16, np.float32) if has_bias else None
    right = faulty(packed, x, Hypothesis(), bias)
    for y, expected in (
        (-right, "y is -1 × the right one"),
        (2 * right, "y is 2 × the right one"),
        (right[::-1], "rows of y reversed"),
        (right[:, ::-1], "columns of y reversed"),
    ):
        causes = causes_of_output(packed, x, y, packed.scales, bias=bias)
        assert [cause.name for cause in causes] == [expected]


def test_a_multiple_has_to_be_one_for_all_probes() -> None:
    """Where two probes are off by different factors, neither is the cause."""
    packed, x = packed_of(random_codes(16, 33)), exact_input(33, 16, 0)
    right = faulty(packed, x, Hypothesis())
    evidence = [Evidence(x, factor * right, packed.scales) for factor in (np.float32(2), np.float32(3))]
    assert explain_outputs(packed, evidence) == []


def test_a_fault_that_leaves_much_is_one_in_part() -> None:
    """Swapped nibbles that a second, unknown fault distorts are named, and it is said that they are not all."""
    packed, x = packed_of(random_codes(32, 64)), exact_input(64, 16, 0)
    y = misread(packed, x, Reading(EVEN_LOW))
    y += 0.1 * np.abs(y).mean() * np.random.default_rng(0).standard_normal(y.shape).astype(np.float32)
    cause = causes_of_output(packed, x, y, packed.scales)[0]
    assert (cause.name, cause.evidence[:9]) == ("nibbles swapped", "in part: ")
    assert cause.residual > 0.01


@pytest.mark.parametrize("in_features", [2, 8, 64, 8192, 8194])
def test_a_loop_that_ends_too_early_is_named(in_features: int) -> None:
    """One column or one byte too few is named at an even K too."""
    packed, x = packed_of(random_codes(8, in_features)), exact_input(in_features, 4, 0)
    for tail, words in ((1, "last 1 column"), (2, "last 2 columns")):
        if tail < in_features:
            y = misread(packed, x, Reading(dropped_tail=tail))
            assert names(packed, x, y) == [f"dropped tail: {words}"]


def test_equal_readings_are_all_named() -> None:
    """Where the last three codes are zero, dropping one or three cannot be told apart: the shorter list names both."""
    codes = random_codes(8, 11)
    codes[:, 8:10] = 0
    codes[:, 10] = 3
    packed, x = packed_of(codes), exact_input(11, 4, 0)
    found = names(packed, x, misread(packed, x, Reading(dropped_tail=1)))
    assert set(found) == {"dropped tail: last 1 column", "dropped tail: last 3 columns"}


def test_a_swapped_odd_row_has_dropped_its_pad_already() -> None:
    """With an odd K, swapped nibbles read the pad in place of the last column: the simpler name stands alone."""
    packed, x = packed_of(random_codes(8, 11)), exact_input(11, 4, 0)
    assert names(packed, x, misread(packed, x, Reading(EVEN_LOW, dropped_tail=1))) == ["nibbles swapped"]


def test_a_fault_without_effect_has_no_name() -> None:
    """Swapped nibbles that are equal give the right y, for which nothing is named."""
    packed, x = packed_of(np.full((8, 12), 5, np.int8)), exact_input(12, 4, 0)
    assert names(packed, x, misread(packed, x, Reading(EVEN_LOW))) == []


def test_a_few_nan_do_not_hide_a_cause() -> None:
    """An element that was never written does not keep the fault of the others from being named."""
    packed, x = packed_of(random_codes(32, 64)), exact_input(64, 4, 0)
    y = misread(packed, x, Reading(EVEN_LOW))
    y[0, 0] = np.nan
    assert names(packed, x, y)[0] == "nibbles swapped"


def test_large_outputs_are_explained_from_a_part() -> None:
    """A part of many rows is enough to name a fault."""
    packed, x = packed_of(random_codes(700, 32)), exact_input(32, 600, 0)
    assert names(packed, x, misread(packed, x, Reading(EVEN_LOW_TWOS))) == ["nibbles swapped and two's complement"]


def stored(layout: Reading, weight: NDArray[np.float32]) -> PackedLinear:
    """Return a weight packed by somebody who uses another layout than ours."""
    codes, scales = quantize(weight)
    nibbles = (codes & 15 if layout.layout.twos_complement else codes + 8).astype(np.uint8)
    if codes.shape[1] % 2:
        nibbles = np.pad(nibbles, ((0, 0), (0, 1)), constant_values=0 if layout.layout.twos_complement else 8)
    even, odd = nibbles[:, ::2], nibbles[:, 1::2]
    packed = even << 4 | odd if layout.layout.even_high else odd << 4 | even
    return PackedLinear(packed.astype(np.uint8), scales, codes.shape[1])


@pytest.mark.parametrize("layout", [Reading(EVEN_LOW), Reading(EVEN_HIGH_TWOS), Reading(EVEN_LOW_TWOS)], ids=str)
@pytest.mark.parametrize("in_features", [8, 9, 33, 512])
@pytest.mark.parametrize("seed", range(5))
def test_a_layout_is_named_from_the_source(layout: Reading, in_features: int, seed: int) -> None:
    """Bytes that somebody packed another way are named from the weights that they were made of."""
    weight = np.random.default_rng(seed).standard_normal((8, in_features), np.float32)
    causes = causes_of_weights(stored(layout, weight), weight)
    assert causes[0].name == layout.name
    assert causes[0].residual < 0.15
    assert "off the source" in causes[0].evidence


@pytest.mark.parametrize("in_features", [1, 2, 8, 33, 512])
def test_our_own_bytes_have_no_cause(in_features: int) -> None:
    """Nothing is named for bytes that fit their source, nor where one code or all scales are somewhat off."""
    weight = np.random.default_rng(0).standard_normal((8, in_features), np.float32)
    packed = pack_weight(weight)
    assert causes_of_weights(packed, weight) == []
    scaled = PackedLinear(packed.packed, packed.scales * np.float32(1.07), in_features)
    assert causes_of_weights(scaled, weight) == []
    one_off = packed.packed.copy()
    one_off[0, 0] ^= 0x10
    assert causes_of_weights(PackedLinear(one_off, packed.scales, in_features), weight) == []


RULES = {
    "absmax / 7, codes −7..7": (7.0, -7),
    "absmax / 8, codes −8..7": (8.0, -8),
    "absmax / 7.5, codes −7..7": (7.5, -7),
}


def stored_by(weight: NDArray[np.float32], divisor: float, lowest: int) -> PackedLinear:
    """Return a weight packed with another divisor or clamp than ours."""
    scales = np.abs(weight).max(axis=1) / np.float32(divisor)
    codes = np.clip(np.rint(weight * (np.float32(1) / scales)[:, None]), lowest, 7).astype(np.int8)
    return packed_of(codes, scales)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", range(TRIALS))
def test_a_rule_of_the_scales_is_named_from_the_source(name: str, seed: int) -> None:
    """The divisors 7 and 8 and the clamp at −7 are named, with the codes that each rule makes otherwise."""
    weight = np.random.default_rng(seed).standard_normal((16, 64), np.float32)
    causes = causes_of_codes(stored_by(weight, *RULES[name]), weight)
    assert [cause.name for cause in causes] == [name]
    assert causes[0].residual < 0.01
    assert "by absmax / 7.5, codes −8..7" in causes[0].evidence


def test_a_rule_is_named_under_another_order(rng: np.random.Generator) -> None:
    """Swapped nibbles that another rule made are both named: one by the misreading, one by the codes so read."""
    weight = rng.standard_normal((16, 64), np.float32)
    packed = stored_by(weight, 7.0, -7)
    swapped = PackedLinear((packed.packed >> 4 | packed.packed << 4).astype(np.uint8), packed.scales, 64)
    assert causes_of_weights(swapped, weight)[0].name == "nibbles swapped"
    assert causes_of_codes(swapped, weight)[0].name == "absmax / 7, codes −7..7"


def test_padding_after_the_shift_is_named(rng: np.random.Generator) -> None:
    """An odd K whose pad nibbles are all 0 was padded after the shift; one such row alone was not."""
    weight = rng.standard_normal((4, 9), np.float32)
    packed = pack_weight(weight)
    data = packed.packed & np.array([0xFF, 0xFF, 0xFF, 0xFF, 0xF0], np.uint8)
    assert [c.name for c in causes_of_codes(PackedLinear(data, packed.scales, 9), weight)] == [
        "padding after the shift"
    ]
    one = packed.packed.copy()
    one[0, -1] &= 0xF0
    assert causes_of_codes(PackedLinear(one, packed.scales, 9), weight) == []
    assert causes_of_codes(packed, weight) == []
