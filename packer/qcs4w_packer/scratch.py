"""Memory that is used again for block after block."""

from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


class Scratch:
    """Arrays of one thread, by what they are used for: fresh pages cost as much as the arithmetic on them."""

    def __init__(self) -> None:
        self._held: dict[str, NDArray[np.uint8]] = {}

    def array(self, use: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an array with whatever it holds; the next call for the same use overwrites it."""
        nbytes = prod(shape) * np.dtype(dtype).itemsize
        held = self._held.get(use)
        if held is None or held.nbytes < nbytes:
            held = self._held[use] = np.empty(nbytes, np.uint8)
        return held[:nbytes].view(dtype).reshape(shape)
