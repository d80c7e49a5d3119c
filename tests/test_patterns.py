"""Where it is wrong: each pattern of failures has its words, and noise has none."""

import re

import numpy as np
import pytest
from numpy.typing import NDArray

from qcs4w_gpu.patterns import where_wrong

M, N = np.mgrid[0:130, 0:200]
FLAT = M * 200 + N

PATTERNS = {
    "every element": M >= 0,
    "columns 64.. of every row": N >= 64,
    "columns 0..63 of every row": N < 64,
    "column 199 of every row": N == 199,
    "column 7 of every row": N == 7,
    "rows 65..": M >= 65,
    "rows 0..3": M < 4,
    "row 129": M == 129,
    "rows 64..127": (M >= 64) & (M < 128),
    "rows 3, 50": (M == 3) | (M == 50),
    "every 4th column from 3 of every row": N % 4 == 3,
    "every 2nd column from 1 of every row": N % 2 == 1,
    "every 23rd row from 5": M % 23 == 5,
    "columns 32..63 of every 64 of every row": N % 64 >= 32,
    "one tile: rows 0..63, columns 128..191": (M < 64) & (N >= 128) & (N < 192),
    "one tile: rows 128.., columns 192..": (M >= 128) & (N >= 192),
    "row 5, columns 8..15": (M == 5) & (N >= 8) & (N < 16),
    "rows 64.., every 4th column from 1": (M >= 64) & (N % 4 == 1),
    "one element, y[3, 5]": (M == 3) & (N == 5),
    "the last 1,010 elements of y": FLAT.size - 1010 <= FLAT,
    "elements 250..749 of y as it lies in memory": (FLAT >= 250) & (FLAT < 750),
    "every 7th element from 2 of y as it lies in memory": FLAT % 7 == 2,
    "scattered: 130 elements in 130 rows, 33 columns": M * M % 200 == N,
}


@pytest.mark.parametrize(("words", "wrong"), PATTERNS.items(), ids=PATTERNS)
def test_each_pattern_has_its_words(words: str, wrong: NDArray[np.bool_]) -> None:
    """A pattern of failures is named."""
    assert where_wrong(wrong) == words


# A row or a column by itself has no neighbours that would fill up its ends.
THICK = [
    words for words in PATTERNS if not re.match(r"scattered|one el|columns? (7|199)|rows? (5|129|3,)|(the|elem)", words)
]


@pytest.mark.parametrize("words", THICK)
@pytest.mark.parametrize("seed", range(3))
def test_elements_that_are_right_by_chance_do_not_hide_a_pattern(words: str, seed: int) -> None:
    """A tenth of the failures may be missing."""
    by_chance = np.random.default_rng(seed).random(M.shape) < 0.1
    found = where_wrong(PATTERNS[words] & ~by_chance)
    assert found == ("nearly every element" if words == "every element" else words)


def test_nothing_wrong_has_no_words() -> None:
    """Without a failure there is no pattern."""
    assert where_wrong(np.zeros((3, 4), np.bool_)) is None


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [0.001, 0.01, 0.3])
def test_noise_is_scattered(seed: int, share: float) -> None:
    """Failures without a pattern are not given one."""
    found = where_wrong(np.random.default_rng(seed).random(M.shape) < share)
    assert found is not None
    assert found.startswith("scattered: ")


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 1), (1, 9), (9, 1), (2, 2), (3, 3)], ids=str)
def test_small_outputs_have_words_for_every_failure(shape: tuple[int, int]) -> None:
    """Whatever is wrong in a small y, there are words for it, and those of one row do not claim another."""
    for bits in range(1, 1 << (shape[0] * shape[1])):
        wrong = (bits >> np.arange(shape[0] * shape[1]) & 1).astype(np.bool_).reshape(shape)
        words = where_wrong(wrong)
        assert words
        assert (words == "every element") == bool(wrong.all())


def test_a_large_map_is_named_quickly() -> None:
    """A map of eight million elements takes no more than some seconds."""
    wrong = np.zeros((64, 131_072), np.bool_)
    wrong[:, 3::4] = True
    assert where_wrong(wrong) == "every 4th column from 3 of every row"
    noise = np.random.default_rng(0).random(wrong.shape) < 0.3
    assert str(where_wrong(noise)).startswith("scattered")
