"""The condition of every conversion: all groups of a row share one scale, and the codes are symmetric."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import LossyError

_HINT = "unpack it to floats with the tool that made it, then qcs4w pack: that quantizes anew, with one scale a row"


def one_scale_per_row(scales: NDArray[np.float32], where: str) -> NDArray[np.float32]:
    """Return the scale that all groups of each row share.

    Args:
        scales: float32, shape (G, N), one row of scales a group.
        where: file and tensor, for the message.

    Returns:
        float32, shape (N,).

    Raises:
        LossyError: the groups of a row differ; the message says what would be lost.
    """
    differs = (scales.view(np.uint32) != scales.view(np.uint32)[0]).any(axis=0)
    if differs.any():
        row = int(np.flatnonzero(differs)[0])
        column = scales[:, row]
        raise LossyError(
            f"{where}: {int(differs.sum()):,} of {scales.shape[1]:,} rows have more than one scale (row {row}: "
            f"{len(np.unique(column)):,} in {len(column):,} groups, from {column.min():.6g} to {column.max():.6g}); "
            "one scale a row would lose the others",
            hint=_HINT,
        )
    return np.ascontiguousarray(scales[0])


def refuse_zero_points(stored: NDArray[Any], symmetric: int, where: str, *, add: int = 0) -> None:
    """Refuse zero points other than 8.

    Args:
        stored: shape (G, N), as they lie in the file.
        symmetric: the stored value that stands for 8.
        where: file and tensor, for the message.
        add: what the format adds to a stored value, for the message.

    Raises:
        LossyError: there is another one.
    """
    wrong = stored != symmetric
    if wrong.any():
        group, row = (int(i) for i in np.argwhere(wrong)[0])
        raise LossyError(
            f"{where}: the zero point of row {row}, group {group} is {float(stored[group, row]) + add:g}, expected 8; "
            "codes are symmetric here, and an offset of the row's values would be lost",
            hint=_HINT,
        )
