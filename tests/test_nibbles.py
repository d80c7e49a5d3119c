"""Codes to bytes and back, against bytes written by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qcs4w_packer import LAYOUTS, CodeRangeError, pack_codes, unpack_codes
from qcs4w_packer.nibbles import packed_width, unpack_nibbles, wrong_pad_rows

ALL_CODES = list(range(-8, 8))

PINNED = {
    "every code": (ALL_CODES, "01 23 45 67 89 AB CD EF"),
    "odd": ([1, -8, 7], "90 F8"),
    "lone zero": ([0], "88"),
    "lone lowest": ([-8], "08"),
    "pair": ([7, -7, 4, -4], "F1 C4"),
    "extremes": ([7, -8], "F0"),
    "blocks": ([0] * 16 + [1] * 16, "88 " * 8 + "99 " * 8),
}

FOREIGN = {
    "even-high": "01 23 45 67 89 AB CD EF",
    "even-low": "10 32 54 76 98 BA DC FE",
    "even-high-twos": "89 AB CD EF 01 23 45 67",
    "even-low-twos": "98 BA DC FE 10 32 54 76",
}


def row(text: str) -> np.ndarray:
    """One packed row from hexadecimal."""
    return np.frombuffer(bytes.fromhex(text), np.uint8)[None]


@pytest.mark.parametrize(("codes", "text"), PINNED.values(), ids=PINNED)
def test_codes_become_the_bytes_written_by_hand(codes: list[int], text: str) -> None:
    """Even column high, offset 8, an odd row padded with the code 0."""
    packed = pack_codes(np.array([codes], np.int8))
    assert packed.dtype == np.uint8
    assert packed.tobytes() == bytes.fromhex(text)


@pytest.mark.parametrize(("codes", "text"), PINNED.values(), ids=PINNED)
def test_bytes_written_by_hand_become_codes(codes: list[int], text: str) -> None:
    """Reading drops the pad and subtracts the offset."""
    assert unpack_codes(row(text), len(codes)).tolist() == [codes]


@pytest.mark.parametrize(("name", "text"), FOREIGN.items(), ids=FOREIGN)
def test_every_layout_reads_its_own_spelling(name: str, text: str) -> None:
    """The codes -8..7 in order come out of each layout's own bytes."""
    assert unpack_codes(row(text), 16, LAYOUTS[name]).tolist() == [ALL_CODES]


@pytest.mark.parametrize(("name", "text"), FOREIGN.items(), ids=FOREIGN)
def test_every_layout_writes_its_own_spelling(name: str, text: str) -> None:
    """The codes -8..7 in order become each layout's own bytes; a lone code is followed by the code 0."""
    assert pack_codes(np.array([ALL_CODES], np.int8), LAYOUTS[name]).tobytes() == bytes.fromhex(text)
    lone = pack_codes(np.array([[7]], np.int8), LAYOUTS[name])
    assert unpack_codes(lone, 2, LAYOUTS[name]).tolist() == [[7, 0]]


def test_every_layout_is_pinned() -> None:
    """No layout is without a vector of its own, and ours comes first."""
    assert list(LAYOUTS) == list(FOREIGN)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_byte_in_every_layout(name: str) -> None:
    """All 256 bytes, decoded digit by digit from their hexadecimal spelling, give the same codes."""
    layout = LAYOUTS[name]
    expected = []
    for byte in range(256):
        high, low = (int(digit, 16) for digit in f"{byte:02x}")
        pair = [high, low] if layout.even_high else [low, high]
        expected.append([(n - 16 if n > 7 else n) if layout.twos_complement else n - 8 for n in pair])
    assert unpack_codes(np.arange(256, dtype=np.uint8)[:, None], 2, layout).tolist() == expected


@given(hnp.arrays(np.int8, hnp.array_shapes(min_dims=2, max_dims=2, max_side=40), elements=st.integers(-8, 7)))
def test_unpacking_undoes_packing(codes: np.ndarray) -> None:
    """Unpack ∘ pack is the identity for every shape, and the width is ceil(K / 2)."""
    packed = pack_codes(codes)
    assert packed.shape == (len(codes), -(-codes.shape[1] // 2)) == (len(codes), packed_width(codes.shape[1]))
    np.testing.assert_array_equal(unpack_codes(packed, codes.shape[1]), codes)
    for layout in LAYOUTS.values():
        np.testing.assert_array_equal(unpack_codes(pack_codes(codes, layout), codes.shape[1], layout), codes)
    assert wrong_pad_rows(packed, codes.shape[1]) == 0


@given(hnp.arrays(np.uint8, hnp.array_shapes(min_dims=2, max_dims=2, max_side=20)))
def test_packing_undoes_unpacking(packed: np.ndarray) -> None:
    """Pack ∘ unpack is the identity where there is no pad."""
    np.testing.assert_array_equal(pack_codes(unpack_codes(packed, 2 * packed.shape[1])), packed)


@pytest.mark.parametrize("value", [8, -9, 127, -128])
def test_a_code_out_of_range_is_named(value: int) -> None:
    """The first code outside [-8, 7] is refused by row, column and value."""
    codes = np.zeros((3, 5), np.int8)
    codes[1, 4] = codes[2, 0] = value
    with pytest.raises(CodeRangeError, match=rf"code {value} at row 1, column 4 lies outside \[-8, 7\]"):
        pack_codes(codes)


def test_a_code_that_would_wrap_into_range_is_refused() -> None:
    """Codes are judged before they are narrowed to int8: 256 is not 0."""
    with pytest.raises(CodeRangeError, match="code 256"):
        pack_codes(np.array([[256, 0]], np.int64))


@pytest.mark.parametrize("turn", [np.asfortranarray, lambda a: a[:, ::-1][:, ::-1], lambda a: a[::-1][::-1]])
@pytest.mark.parametrize("columns", [6, 7])
def test_memory_order_does_not_matter(turn: object, columns: int) -> None:
    """Strided codes pack like contiguous ones, and the caller's array is not edited."""
    codes = (np.arange(3 * columns).reshape(3, columns) % 16 - 8).astype(np.int8)
    before = codes.copy()
    np.testing.assert_array_equal(pack_codes(turn(codes)), pack_codes(codes))  # type: ignore[operator]
    np.testing.assert_array_equal(codes, before)


def test_wrong_pads_are_counted() -> None:
    """A pad of 0 (padded after the shift) or of anything but 8 counts; an even K has no pad."""
    packed = np.array([[0x90, 0xF8], [0x90, 0xF0], [0x90, 0xF7]], np.uint8)
    assert wrong_pad_rows(packed, 3) == 2
    assert wrong_pad_rows(packed, 4) == 0


def test_nibbles_come_in_column_order() -> None:
    """The pad stays visible, and the order of the two nibbles can be turned."""
    assert unpack_nibbles(row("90 F8")).tolist() == [[9, 0, 15, 8]]
    assert unpack_nibbles(row("90 F8"), even_high=False).tolist() == [[0, 9, 8, 15]]
