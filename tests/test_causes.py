"""Causes: the usual misreadings are named from y alone, or from a source, and nothing else is."""

import numpy as np
import pytest
from cases import SIZES, packed_of, random_codes
from numpy.typing import NDArray

from qcs4w_gpu.causes import causes_of_output, causes_of_weights
from qcs4w_gpu.judge import exact_input
from qcs4w_packer import PackedLinear, Reading, readings
from qcs4w_packer.nibbles import EVEN_HIGH_TWOS, EVEN_LOW, EVEN_LOW_TWOS
from qcs4w_packer.quantize import quantize
from qcs4w_packer.rowpack import pack_weight

# The smallest N and K at which random codes always tell one reading from another.
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
    assert "read so, y is off by" in causes[0].evidence


@pytest.mark.parametrize("in_features", [k for k in SIZES if k >= SMALLEST_K])
def test_every_reading_is_named_from_the_exact_probe(in_features: int) -> None:
    """From N = K = 4 on the exact probe tells all readings apart, or names the simplest of those that are equal."""
    for seed in range(10):
        packed = packed_of(random_codes(SMALLEST_N, in_features, seed))
        x = exact_input(in_features, 4, seed)
        outputs = {reading: misread(packed, x, reading) for reading in readings(in_features)}
        for reading, y in outputs.items():
            same = [other for other in outputs if np.array_equal(outputs[other], y)]
            simplest = min(same, key=lambda each: len(each.faults))
            expected = [] if not simplest.faults else [simplest.name]
            assert names(packed, x, y)[:1] == expected, reading.name


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


@pytest.mark.parametrize("kind", ["noise", "zeros", "nan", "negated", "doubled", "transposed"])
def test_other_faults_have_no_cause(kind: str) -> None:
    """Noise, zeros, NaN, a wrong sign, a wrong factor or a transposed output are not explained by a misreading."""
    packed, x = packed_of(random_codes(16, 33)), exact_input(33, 16, 0)
    right = misread(packed, x, Reading())
    y = {
        "noise": np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32),
        "zeros": np.zeros_like(right),
        "nan": np.full_like(right, np.nan),
        "negated": -right,
        "doubled": 2 * right,
        "transposed": right.T.copy(),
    }[kind]
    assert names(packed, x, y) == []


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
