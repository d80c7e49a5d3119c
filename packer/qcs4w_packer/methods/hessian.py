"""H = XᵀX of a linear's inputs, damped and factored: what the methods know of the activations.

The squared error of the outputs of one row is (w − ŵ)ᵀ H (w − ŵ). With H = RᵀR, R upper triangular, it is
‖R (w − ŵ)‖², in which the last column stands alone: codes are chosen from the last column to the first. That needs one
Cholesky factor and no inverse, and float32 suffices, because damping keeps H well conditioned.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

LEAST_DAMPING, MOST_DAMPING = 0.01, 1.0
_TRIES = 4  # each with ten times the damping of the one before
_PANEL = 512  # columns


@dataclass(frozen=True)
class Factored:
    """A damped H in the order in which columns are quantized, in units of its mean diagonal before damping.

    Attributes:
        order: int64, shape (K,), columns by rising diagonal, so that the last, quantized first, matters most.
        matrix: float32, shape (K, K), (H + damping · mean · I) / mean, rows and columns in that order.
        lower: float32, shape (K, K), Rᵀ with each column divided by its diagonal element: 1 on the diagonal.
        diagonal: float32, shape (K,), of `matrix`, but in the columns' own order.
        damping: what was added to the diagonal, as a share of its mean.
    """

    order: "torch.Tensor"
    matrix: "torch.Tensor"
    lower: "torch.Tensor"
    diagonal: NDArray[np.float32]
    damping: float


def damping_for(in_features: int, rows: int) -> float:
    """Return clamp(K / rows, 0.01, 1): the fewer rows H was made of, the less it is to be trusted."""
    return min(MOST_DAMPING, max(LEAST_DAMPING, in_features / max(1, rows)))


def damped_diagonal(hessian: NDArray[np.floating], rows: int) -> NDArray[np.float64]:
    """Return the diagonal of H damped for its rows, float64, shape (K,); zeros where H is zero."""
    diagonal: NDArray[np.float64] = np.diagonal(hessian).astype(np.float64)
    damping = damping_for(len(diagonal), rows)
    diagonal += damping * float(diagonal.mean())
    return diagonal


def factor(hessian: NDArray[np.floating], rows: int, *, device: str = "cpu") -> Factored | None:
    """Damp, order and factor H.

    Args:
        hessian: float32 or float64, shape (K, K), symmetric, finite.
        rows: how many inputs it was made of.
        device: as torch names it.

    Returns:
        None where H is zero, or is not positive definite even with more damping.
    """
    import torch

    diagonal = np.diagonal(hessian).astype(np.float64)
    mean = float(diagonal.mean())
    if not mean > 0:
        return None
    order = np.argsort(diagonal, kind="stable")
    matrix = torch.from_numpy(np.ascontiguousarray(hessian, np.float32 if mean > 1e-30 else np.float64)).to(device)
    places = torch.from_numpy(order).to(device)
    matrix = (matrix[places][:, places] / mean).to(torch.float32)
    damping, added = damping_for(len(diagonal), rows), 0.0
    for _ in range(_TRIES):
        matrix.diagonal().add_(damping - added)
        added = damping
        lower, info = torch.linalg.cholesky_ex(matrix)
        if not int(info) and bool(torch.isfinite(lower.diagonal()).all()):
            lower /= lower.diagonal().clone()
            found = np.empty(len(order), np.float32)
            found[order] = matrix.diagonal().cpu().numpy()
            return Factored(places, matrix, lower, found, damping)
        damping *= 10
    return None


class Gram:
    """XᵀX, summed up over blocks of rows; only one triangle is computed.

    Args:
        columns: K.
    """

    def __init__(self, columns: int):
        self._sum = np.zeros((columns, columns), np.float32)

    def add(self, rows: NDArray[np.float32]) -> None:
        """Take more rows, float32 (n, K)."""
        import torch

        x, total = torch.from_numpy(np.ascontiguousarray(rows)), torch.from_numpy(self._sum)
        for start in range(0, len(total), _PANEL):
            panel = slice(start, start + _PANEL)
            total[start:, panel].addmm_(x[:, start:].T, x[:, panel])

    def whole(self) -> NDArray[np.float32]:
        """Return both triangles, float32 (K, K); nothing may be added after."""
        for start in range(0, len(self._sum), _PANEL):
            stop = start + _PANEL
            self._sum[start:stop, stop:] = self._sum[stop:, start:stop].T
        return self._sum


class _Threads:
    """How many blocks of `single_threaded` are open, and torch's number of threads before the first."""

    lock = threading.Lock()
    users = 0
    before = 1


@contextmanager
def single_threaded() -> Iterator[None]:
    """Let every operation of torch run in the thread that calls it: sums are then the same on any machine.

    Blocks may be open in several threads at once; after the last of them torch has its threads back.
    """
    import torch

    with _Threads.lock:
        if not _Threads.users:
            _Threads.before = torch.get_num_threads()
        torch.set_num_threads(1)  # of this thread too
        _Threads.users += 1
    try:
        yield
    finally:
        with _Threads.lock:
            _Threads.users -= 1
            if not _Threads.users:
                torch.set_num_threads(_Threads.before)
