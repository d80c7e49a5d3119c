"""The ways in which packed bytes get misread."""

from collections.abc import Callable

import numpy as np
import pytest

from qcs4w_packer import LAYOUTS, Reading, pack_codes, pack_weight, readings

CODES = np.array([[1, -8, 7, 3, 0]], np.int8)

MISREAD = {
    "qcs4w": (Reading(), [1, -8, 7, 3, 0]),
    "nibbles swapped": (Reading(LAYOUTS["even-low"]), [-8, 1, 3, 7, 0]),
    "two's complement": (Reading(LAYOUTS["even-high-twos"]), [-7, 0, -1, -5, -8]),
    "nibbles swapped and two's complement": (Reading(LAYOUTS["even-low-twos"]), [0, -7, -5, -1, -8]),
    "offset missing": (Reading(offset=0), [9, 0, 15, 11, 8]),
    "nibbles swapped and offset missing": (Reading(LAYOUTS["even-low"], offset=0), [0, 9, 11, 15, 8]),
    "dropped tail: last 1 column": (Reading(dropped_tail=1), [1, -8, 7, 3, 0]),
    "dropped tail: last 3 columns": (Reading(dropped_tail=3), [1, -8, 0, 0, 0]),
}


@pytest.mark.parametrize(("name", "reading", "codes"), [(n, *r) for n, r in MISREAD.items()], ids=MISREAD)
def test_each_fault_gives_its_own_codes(name: str, reading: Reading, codes: list[int]) -> None:
    """Codes worked by hand for each way to misread one row, and the words that name it."""
    assert reading.name == name
    assert reading.codes(pack_codes(CODES), 5).tolist() == [codes]


def test_the_right_reading_comes_first() -> None:
    """Readings are ordered by their number of faults, and none is listed twice."""
    every = list(readings(4099))
    assert every[0] == Reading()
    counts = [len(reading.faults) for reading in every]
    assert counts == sorted(counts)
    assert len(set(every)) == len(every)
    assert not any(reading.layout.twos_complement and reading.offset != 8 for reading in every)


@pytest.mark.parametrize(
    ("in_features", "tails"),
    [(None, {0}), (1, {0}), (2, {0, 1}), (3, {0, 1}), (130, {0, 1, 2}), (256, {0, 1, 2}), (263, {0, 1, 3, 7})],
    ids=str,
)
def test_tails_are_what_loops_forget(in_features: int | None, tails: set[int]) -> None:
    """A dropped tail is K modulo a power of two, the last column or the last byte, and never the whole row."""
    assert {reading.dropped_tail for reading in readings(in_features)} == tails


COSINES: dict[str, tuple[Reading, Callable[[float], bool]]] = {
    "read right": (Reading(), lambda cosine: abs(cosine - 0.99) < 0.03),
    "swapped": (Reading(LAYOUTS["even-low"]), lambda cosine: abs(cosine) < 0.08),
    "offset missing": (Reading(offset=0), lambda cosine: abs(cosine - 0.23) < 0.06),
    "two's complement": (Reading(LAYOUTS["even-high-twos"]), lambda cosine: abs(cosine + 0.65) < 0.06),
}


@pytest.mark.parametrize(("reading", "is_near"), COSINES.values(), ids=COSINES)
def test_misreadings_of_a_gaussian_row_are_told_apart(
    reading: Reading, is_near: Callable[[float], bool], rng: np.random.Generator
) -> None:
    """The cosine to the float row is what other tools' bug reports found for each fault."""
    weight = rng.standard_normal((1, 4096)).astype(np.float32)
    read = reading.codes(pack_weight(weight).packed, 4096)[0].astype(np.float64)
    assert is_near(float(read @ weight[0] / np.linalg.norm(read) / np.linalg.norm(weight[0])))
