"""Which layout do packed bytes have? Named from weights, from an output, or from the nibbles alone."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from qcs4w_packer import NonFiniteError, UsageError, pack_weight
from qcs4w_packer.explain import explain_output, explain_weights
from qcs4w_packer.histogram import explain_alone
from qcs4w_packer.quantize import quantize
from qcs4w_packer.readings import ARRANGEMENTS, NAMED, ROWS, layouts

Codes = NDArray[np.int8]


def words_of(nibbles: list[int]) -> bytes:
    """Put nibbles into bytes, the first one low."""
    return bytes(low | high << 4 for low, high in zip(nibbles[::2], nibbles[1::2], strict=True))


def rows_of(codes: Codes, encode: Callable[[int], int], *, even_high: bool, filled_to: int = 2) -> bytes:
    """Pack rows one nibble after another."""
    data = b""
    for row in codes.tolist():
        nibbles = [encode(code) for code in row]
        nibbles += [encode(0)] * (-len(nibbles) % filled_to)
        pairs = zip(nibbles[::2], nibbles[1::2], strict=True)
        data += bytes((even << 4 | odd) if even_high else (odd << 4 | even) for even, odd in pairs)
    return data


def plus_8(code: int) -> int:
    return code + 8


def twos(code: int) -> int:
    return code & 15


def gptq(codes: Codes) -> bytes:
    """Words [K / 8, N]: column 8j + i of row n in nibble i of word (j, n)."""
    rows, columns = codes.shape
    return b"".join(
        words_of([int(codes[n, 8 * j + i]) + 8 for i in range(8)]) for j in range(columns // 8) for n in range(rows)
    )


def awq(codes: Codes) -> bytes:
    """Words [K, N / 8]: rows 8j + (0 2 4 6 1 3 5 7) of column k in word (k, j), the lowest nibble first."""
    rows, columns = codes.shape
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return b"".join(
        words_of([int(codes[8 * j + i, k]) + 8 for i in order]) for k in range(columns) for j in range(rows // 8)
    )


def halves(codes: Codes, scale: bytes = b"") -> bytes:
    """Blocks of 32: column j low, column j + 16 high, behind a scale of float16 or none."""
    return b"".join(
        scale + bytes((int(block[j]) + 8) | (int(block[j + 16]) + 8) << 4 for j in range(16))
        for row in codes
        for block in row.reshape(-1, 32)
    )


WRITERS: dict[str, Callable[[Codes], bytes]] = {
    "even-high": lambda codes: rows_of(codes, plus_8, even_high=True),
    "even-low": lambda codes: rows_of(codes, plus_8, even_high=False),
    "even-high-twos": lambda codes: rows_of(codes, twos, even_high=True),
    "even-low-twos": lambda codes: rows_of(codes, twos, even_high=False),
    "columns-even-high": lambda codes: rows_of(codes.T, plus_8, even_high=True),
    "columns-even-low": lambda codes: rows_of(codes.T, plus_8, even_high=False),
    "gptq": gptq,
    "awq": awq,
    "halves": halves,
    "q4_0": lambda codes: halves(codes, np.float16(0.5).tobytes()),
    "even-high offset 7": lambda codes: rows_of(codes.clip(-7, 7), lambda code: code + 7, even_high=True),
    "even-low offset 9": lambda codes: rows_of(codes.clip(-8, 6), lambda code: code + 9, even_high=False),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_layout_is_named_from_the_weights(name: str) -> None:
    """Each layout is named right and surely in 100 of 100 random trials at N = 8, K = 64 and a little above."""
    for seed in range(100):
        draw = np.random.default_rng(seed)
        shape = (8 * int(draw.integers(1, 3)), 32 * int(draw.integers(2, 4)))
        weight = draw.standard_normal(shape, np.float32)
        data = np.frombuffer(WRITERS[name](quantize(weight)[0]), np.uint8)
        finding = explain_weights(data, weight)
        assert (finding.best.reading.label, finding.verdict) == (name, "certain"), seed


@pytest.mark.parametrize("name", WRITERS)
def test_every_layout_is_named_from_an_output(name: str) -> None:
    """An input and the output that it should give name the layout as well, in 100 of 100 trials."""
    for seed in range(100):
        draw = np.random.default_rng(seed)
        codes, scales = quantize(draw.standard_normal((16, 64), np.float32))
        data = np.frombuffer(WRITERS[name](codes), np.uint8)
        read = NAMED.get(name)
        meant = read.matrix(data, 16, 64) if read else codes.clip(-7, 7) if "7" in name else codes.clip(-8, 6)
        x = draw.standard_normal((6, 64), np.float32)
        y = (x @ (meant * scales[:, None]).T).astype(np.float32)
        finding = explain_output(data, 16, x, y)
        assert (finding.best.reading.label, finding.verdict) == (name, "certain"), seed


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("shape", [(8, 64), (16, 96), (3, 32), (5, 160)], ids=str)
def test_no_layout_reads_past_its_own_bytes(name: str, shape: tuple[int, int]) -> None:
    """A layout needs no more than `nbytes`, and fewer rows read the same as the first of all."""
    reading = NAMED[name]
    data = np.random.default_rng(0).integers(0, 256, reading.nbytes(*shape), np.uint8)
    whole = reading.matrix(data, *shape)
    assert whole.shape == shape
    assert np.array_equal(reading.matrix(np.append(data, np.zeros(9, np.uint8)), *shape, rows=2), whole[:2])


@pytest.mark.parametrize(
    ("data", "weight", "label"),
    [
        ("01 23 45 67 89 AB CD EF", range(-8, 8), "even-high"),
        ("10 32 54 76 98 BA DC FE", range(-8, 8), "even-low"),
        ("89 AB CD EF 01 23 45 67", range(-8, 8), "even-high-twos"),
        ("98 BA DC FE 10 32 54 76", range(-8, 8), "even-low-twos"),
        ("20 64 31 75", range(8), "awq-rows offset 0"),
        ("98" * 16, [0] * 16 + [1] * 16, "halves"),
        ("88" * 8 + "99" * 8, [0] * 16 + [1] * 16, "even-high"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bytes_of_bug_reports_are_named(data: str, weight: list[int], label: str) -> None:
    """Rows that cost other tools' users days: the codes −8..7 in four layouts, AWQ's word, ggml's halves."""
    finding = explain_weights(np.frombuffer(bytes.fromhex(data), np.uint8), np.array([weight], np.float32))
    assert finding.best.reading.label == label


COSINES = {"even-high": 0.99, "even-low": 0.0, "even-high offset 7": 0.88, "even-high offset 0": 0.23}


@pytest.mark.parametrize("seed", range(5))
def test_cosines_of_misreadings_are_what_bug_reports_found(seed: int) -> None:
    """A Gaussian row of 4,096: 0.99 right, 0 swapped, 0.88 off by one, 0.23 without the offset, −0.65 as two's."""
    weight = np.random.default_rng(seed).standard_normal((1, 4096), np.float32)
    finding = explain_weights(pack_weight(weight).packed, weight)
    found = {each.reading.label: each.cosine for each in finding.ranked}
    for label, cosine in (*COSINES.items(), ("even-high-twos", -0.65)):
        assert found[label] == pytest.approx(cosine, abs=0.05), label


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        ("F1 C4", "absmax / 7.5, codes −8..7"),
        ("F1 B5", "absmax / 7, codes −7..7"),
        ("F0 C4", "absmax / 8, codes −8..7"),
    ],
)
def test_the_scale_rule_is_inferred(data: str, rule: str) -> None:
    """The divisors 7.5, 7 and 8 give other codes for (1, −1, ½, −½)."""
    weight = np.array([[1, -1, 0.5, -0.5]], np.float32)
    finding = explain_weights(np.frombuffer(bytes.fromhex(data), np.uint8), weight)
    assert finding.rule is not None
    assert (finding.rule.name, finding.rule.differing) == (rule, 0)


def test_a_symmetric_clamp_is_recognised(rng: np.random.Generator) -> None:
    """Divisor 7.5 with codes clamped to ±7 is told from the full range."""
    weight = rng.standard_normal((16, 64)).astype(np.float32)
    codes = quantize(weight)[0].clip(-7, 7)
    finding = explain_weights(np.frombuffer(WRITERS["even-high"](codes), np.uint8), weight)
    assert finding.rule is not None
    assert (finding.rule.name, finding.rule.differing) == ("absmax / 7.5, codes −7..7", 0)


def test_scales_are_held_against_the_rule(rng: np.random.Generator) -> None:
    """The rule's own scales are equal to the bit; those of a neighbour are not, and leave a larger error."""
    weight = rng.standard_normal((16, 64)).astype(np.float32) * np.exp(np.arange(16))[:, None].astype(np.float32)
    packed = pack_weight(weight)
    right = explain_weights(packed.packed, weight, packed.scales)
    assert right.rule is not None
    assert right.rule.same_scales is True
    assert right.best.residual_as_scaled == pytest.approx(right.best.residual, rel=0.05)
    wrong = explain_weights(packed.packed, weight, np.roll(packed.scales, 1))
    assert wrong.rule is not None
    assert wrong.rule.same_scales is False
    assert wrong.verdict == "certain"
    assert wrong.best.residual_as_scaled is not None
    assert wrong.best.residual_as_scaled > 0.5


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("90 F8", "the pad nibble is 8, the code 0"),
        ("90 F0", "the pad nibble is 0, not 8: padded after the shift"),
        ("90 F8 90 F0", "the pad nibble of odd rows varies (0, 8)"),
    ],
)
def test_the_padding_of_an_odd_row_is_told(data: str, words: str) -> None:
    """Padding before the shift leaves 8, after it 0."""
    packed = np.frombuffer(bytes.fromhex(data), np.uint8)
    finding = explain_weights(packed, np.array([[1, -8, 7]] * (packed.size // 2), np.float32))
    assert finding.padding == words


@pytest.mark.parametrize("filled_to", [8, 16, 32, 64, 128, 256])
def test_filled_rows_are_seen(filled_to: int, rng: np.random.Generator) -> None:
    """Rows that start on a multiple of 4 to 128 bytes are named with their filling."""
    weight = rng.standard_normal((8, 301)).astype(np.float32)
    codes = quantize(weight)[0]
    data = rows_of(codes, plus_8, even_high=False, filled_to=filled_to)
    finding = explain_weights(np.frombuffer(data, np.uint8), weight)
    assert finding.verdict == "certain"
    reading = finding.best.reading
    assert not reading.layout.even_high
    assert reading.nbytes(8, 301) == len(data)


SMALL = {
    "one weight": np.array([[0.5]], np.float32),
    "two equal weights": np.array([[0.5, 0.5]], np.float32),
    "zeros": np.zeros((8, 64), np.float32),
    "constant rows": np.full((8, 64), 0.25, np.float32),
    "one row of two": np.array([[1, -0.5]], np.float32),
}


@pytest.mark.parametrize("name", SMALL)
def test_too_little_evidence_is_ambiguous(name: str) -> None:
    """Where the data cannot tell, nothing is claimed to be certain."""
    finding = explain_weights(pack_weight(SMALL[name]).packed, SMALL[name])
    assert finding.verdict == "ambiguous"


ONE_SIGN: dict[str, Callable[[np.random.Generator], NDArray[np.float32]]] = {
    "two values": lambda draw: draw.choice([0.5, 1.0], (64, 64)).astype(np.float32),
    "one and noise": lambda draw: (1 + 0.1 * draw.standard_normal((32, 64))).astype(np.float32),
    "minus one and noise": lambda draw: (-1 + 0.1 * draw.standard_normal((32, 64))).astype(np.float32),
    "positive": lambda draw: draw.random((32, 64), np.float32),
}


@pytest.mark.parametrize("name", ONE_SIGN)
@pytest.mark.parametrize("with_scales", [False, True])
def test_rows_of_one_sign_do_not_hide_the_offset(name: str, with_scales: bool, rng: np.random.Generator) -> None:
    """Where a scale could stand in for an offset, the rule that makes every code decides."""
    weight = ONE_SIGN[name](rng)
    packed = pack_weight(weight)
    finding = explain_weights(packed.packed, weight, packed.scales if with_scales else None)
    assert (finding.best.reading.label, finding.verdict) == ("even-high", "certain")


def test_asymmetric_rows_are_no_sure_thing(rng: np.random.Generator) -> None:
    """Rows with zero points of their own, as AWQ and GPTQ have, are not passed off as code + 8."""
    weight = rng.standard_normal((64, 128)).astype(np.float32)
    low, high = weight.min(axis=1, keepdims=True), weight.max(axis=1, keepdims=True)
    scale = (high - low) / 15
    codes = np.clip(np.rint(weight / scale) + np.rint(-low / scale), 0, 15).astype(np.uint8)
    finding = explain_weights(codes[:, ::2] | codes[:, 1::2] << 4, weight)
    assert finding.verdict != "certain"
    assert any("asymmetric" in note for note in finding.notes)


def test_a_bias_is_not_taken_for_an_offset(rng: np.random.Generator) -> None:
    """With inputs whose rows have one sum, a bias in y looks like another offset: that is said, not decided."""
    packed = pack_weight(rng.standard_normal((16, 64)).astype(np.float32))
    x = np.exp(rng.standard_normal((8, 64)))
    x = (x / x.sum(axis=1, keepdims=True)).astype(np.float32)
    y = (x @ packed.dequantize().T - packed.scales).astype(np.float32)
    finding = explain_output(packed.packed, 16, x, y)
    assert finding.verdict == "ambiguous"
    assert "a bias in y would explain it with the offset 8" in finding.notes[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_evidence_must_be_finite(bad: float, rng: np.random.Generator) -> None:
    """NaN and infinities in weights, x, y or scales are refused with their place."""
    weight, x, y = (rng.standard_normal(shape).astype(np.float32) for shape in ((8, 64), (4, 64), (4, 8)))
    packed = pack_weight(weight)
    for evidence, explain in (
        (weight, lambda: explain_weights(packed.packed, weight)),
        (x, lambda: explain_output(packed.packed, 8, x, y)),
        (y, lambda: explain_output(packed.packed, 8, x, y)),
    ):
        kept = evidence[1, 3]
        evidence[1, 3] = bad
        with pytest.raises(NonFiniteError, match="at row 1, column 3"):
            explain()
        evidence[1, 3] = kept
    scales = packed.scales.copy()
    scales[2] = bad
    with pytest.raises(NonFiniteError, match="'scales' holds"):
        explain_weights(packed.packed, weight, scales)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("factor", [1e-42, 1e-20, 1e20, 1e37])
def test_any_magnitude_is_weighed(factor: float, rng: np.random.Generator) -> None:
    """Subnormal and very large weights cause no warning of numpy's."""
    weight = (rng.standard_normal((8, 64)) * factor).astype(np.float32)
    explain_weights(pack_weight(weight).packed, weight)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_an_empty_weight_is_refused(shape: tuple[int, int]) -> None:
    """There is nothing to hold bytes against."""
    with pytest.raises(UsageError, match="at least 1 each"):
        explain_weights(np.zeros(64, np.uint8), np.zeros(shape, np.float32))


def test_bytes_of_something_else_fit_nothing(rng: np.random.Generator) -> None:
    """Random bytes are no layout of these weights."""
    weight = rng.standard_normal((16, 64)).astype(np.float32)
    finding = explain_weights(rng.integers(0, 256, 16 * 32, np.uint8), weight)
    assert finding.verdict == "none"
    assert finding.rule is None


def test_too_few_bytes_are_refused() -> None:
    """Bytes that cannot hold the matrix are an error that counts them."""
    with pytest.raises(UsageError, match=r"there are 15 bytes, fewer than 4-bit codes of 4 × 8 take \(16\)"):
        explain_weights(np.zeros(15, np.uint8), np.ones((4, 8), np.float32))


def test_probabilities_add_up() -> None:
    """The layouts tried share one probability."""
    weight = np.array([[0.3, -0.3, 0.1, 0.0, 0.2]], np.float32)
    finding = explain_weights(pack_weight(weight).packed, weight)
    assert sum(each.probability for each in finding.ranked) == pytest.approx(1)


@pytest.mark.parametrize("encode", [plus_8, twos], ids=["code + 8", "two's complement"])
@pytest.mark.parametrize("even_high", [True, False])
def test_nibbles_alone_tell_the_encoding(encode: Callable[[int], int], even_high: bool) -> None:
    """Weights gather round 0: code + 8 and two's complement are told apart, and a full range from a clamp."""
    expected = "code + 8" if encode is plus_8 else "two's complement"
    for seed in range(20):
        weight = np.random.default_rng(seed).standard_normal((32, 128), np.float32)
        for codes, clamped in ((quantize(weight)[0], False), (quantize(weight)[0].clip(-7, 7), True)):
            data = np.frombuffer(rows_of(codes, encode, even_high=even_high), np.uint8)
            histogram = explain_alone(data, 32)
            assert (histogram.encoding, histogram.clamped) == (expected, clamped)
            assert histogram.probability > 0.999
            assert sum(histogram.counts) == 32 * 128


def test_even_nibbles_tell_nothing(rng: np.random.Generator) -> None:
    """Evenly spread nibbles, and next to none, are not given an encoding."""
    assert explain_alone(rng.integers(0, 256, 4096, np.uint8), 16).encoding is None
    assert explain_alone(np.array([0x78], np.uint8), 1).encoding is None


def test_our_own_layout_comes_first() -> None:
    """It is what ties are given to."""
    assert next(layouts(8, 64, 256)).label == "even-high"
    assert ARRANGEMENTS[0] is ROWS
