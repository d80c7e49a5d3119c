"""Pictures of a wrong y: small at any size, and nothing that is wrong is lost in them."""

import numpy as np
import pytest
from cases import packed_of, random_codes

from qcs4w_gpu.picture import picture_of


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (96, 192), (97, 193), (1000, 777)], ids=str)
def test_one_wrong_element_shows_at_any_size(shape: tuple[int, int]) -> None:
    """A single wrong element is in its own cell of the map, which has at most 96 by 192 of them."""
    packed = packed_of(random_codes(shape[1], 3))
    expected = np.zeros(shape)
    y = expected.astype(np.float32)
    y[-1, shape[1] // 2] = 3.0
    picture = picture_of(packed, y, expected, np.full(shape, 0.5))
    assert picture.cells.shape == (min(shape[0], 96), min(shape[1], 192))
    assert np.argwhere(picture.cells > 0).shape == (1, 2)
    row, column = np.argwhere(picture.cells)[0]
    assert row == picture.cells.shape[0] - 1
    assert (
        column
        == np.searchsorted(
            np.arange(picture.cells.shape[1]) * shape[1] // picture.cells.shape[1], shape[1] // 2, side="right"
        )
        - 1
    )
    assert picture.cells.max() == 6.0
    assert picture.errors.max() == 3.0
    assert picture.equal == y.size - 1
    assert picture.error_counts.sum() == 1


def test_nan_and_right_infinities() -> None:
    """NaN is infinitely wrong; an infinity that is right is no error."""
    packed = packed_of(random_codes(3, 4))
    y = np.array([[np.nan, np.inf, 1.0]], np.float32)
    right = np.array([[False, True, False]])
    picture = picture_of(packed, y, np.ones((1, 3)), np.ones((1, 3)), right=right)
    assert picture.cells.tolist() == [[np.inf, 0.0, 0.0]]
    assert picture.error_counts.sum() == 0


def test_codes_are_counted() -> None:
    """Every code of the weight is in its own bin, -8 first; without a bound the map shows the error itself."""
    packed = packed_of(np.array([[-8, -8, 7], [0, 0, 0]], np.int8))
    picture = picture_of(packed, np.zeros((1, 2), np.float32), np.array([[0.0, 2.0]]), None)
    assert picture.code_counts.tolist() == [2, *[0] * 7, 3, *[0] * 6, 1]
    assert (picture.probe, picture.cells.tolist()) == ("exact", [[0.0, 2.0]])
