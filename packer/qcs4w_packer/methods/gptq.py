"""Codes and scales that make the error of a linear's outputs small: GPTQ, then refitted scales and descent.

Source: Frantar et al., GPTQ (arXiv 2210.17323), with the columns in the order of H's diagonal; the form without an
inverse is Babai's nearest plane, as Chen et al. show (arXiv 2507.18553).
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..quantize import quantize
from .descent import Solution, descend, refit, round_backwards
from .hessian import Factored, damped_diagonal, factor, single_threaded
from .least_squares import least_squares_scales

DESCENTS = 2
_PART_ELEMENTS = 32 << 20  # of one float32 array of the (K, n) ones that a part of the rows needs
_PART_ROWS = 128  # no part is smaller, but a weight with fewer rows


@dataclass(frozen=True)
class Quantized:
    """Codes and scales, and how they were found.

    Attributes:
        codes: int8, shape (N, K), each in [-8, 7].
        scales: float32, shape (N,).
        method: what was used in the end.
        damping: what was added to H's diagonal, as a share of its mean; 0 where H was not used.
        fallback: why `method` is not the one that was asked for; None where it is.
    """

    codes: NDArray[np.int8]
    scales: NDArray[np.float32]
    method: str
    damping: float = 0.0
    fallback: str | None = None


def mse(weight: NDArray[np.float32]) -> Quantized:
    """Quantize with the scales of least squared error; weight is float32 (N, K)."""
    return Quantized(*quantize(weight, least_squares_scales(weight)), "mse")


def hmse(weight: NDArray[np.float32], importance: NDArray[np.floating]) -> Quantized:
    """Quantize with the scales of least squared error weighted by column.

    Args:
        weight: float32, shape (N, K), finite.
        importance: mean(x²) of each column, or anything in proportion: shape (K,), finite, not negative.
    """
    if not np.any(importance):
        return Quantized(*quantize(weight, least_squares_scales(weight)), "mse", fallback="all its inputs are zero")
    return Quantized(*quantize(weight, least_squares_scales(weight, importance)), "hmse")


def gptq(
    weight: NDArray[np.float32],
    hessian: NDArray[np.floating],
    rows: int,
    *,
    device: str = "cpu",
    threads: int | None = None,
) -> Quantized:
    """Quantize so that (w − ŵ)ᵀ H (w − ŵ) of each row gets small.

    The result does not depend on the number of threads: the rows are split in the same way for any, and each part is
    worked on by one.

    Args:
        weight: float32, shape (N, K), finite.
        hessian: H = XᵀX, float32 or float64, shape (K, K), symmetric, finite.
        rows: how many inputs H was made of.
        device: where torch works, "cpu" or "cuda".
        threads: on the CPU; by default one for each core.

    Returns:
        by `hmse` or `mse`, and says so, where H is zero or not positive definite.
    """
    with single_threaded():
        factored = factor(hessian, rows, device=device)
        if factored is None:
            found = hmse(weight, np.maximum(damped_diagonal(hessian, rows), 0))
            return Quantized(
                found.codes, found.scales, found.method, fallback=found.fallback or "H is not positive definite"
            )
        codes = np.empty(weight.shape, np.int8)
        scales = np.empty(len(weight), np.float32)

        def work(part: slice) -> None:
            solution = _solve(factored, weight[part])
            codes[part] = _in_own_order(solution)
            scales[part] = solution.scales.cpu().numpy()

        parts = list(_parts(*weight.shape))
        if device != "cpu":
            threads = 1
        with ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
            list(pool.map(work, parts))
    return Quantized(codes, scales, "gptq", factored.damping)


def _solve(factored: Factored, weight: NDArray[np.float32]) -> Solution:
    """Find codes and scales of some rows, float32 (n, K)."""
    import torch

    scales = torch.from_numpy(least_squares_scales(weight, factored.diagonal)).to(factored.matrix.device)
    turned = torch.from_numpy(weight).to(factored.matrix.device).T[factored.order].contiguous()
    solution = round_backwards(factored, turned, scales)
    for _ in range(DESCENTS):
        refit(solution)
        descend(solution)
    return solution


def _in_own_order(solution: Solution) -> NDArray[np.int8]:
    """Return the codes, int8 (n, K), with columns where the weight has them."""
    import torch

    codes = torch.empty(solution.codes.shape, dtype=torch.int8, device=solution.codes.device)
    codes[solution.factored.order] = solution.codes.to(torch.int8)
    found: NDArray[np.int8] = codes.T.contiguous().cpu().numpy()
    return found


def _parts(rows: int, columns: int) -> Iterator[slice]:
    """Split rows evenly, in two at least where there are enough."""
    most = max(1, min(_PART_ELEMENTS // columns, max(_PART_ROWS, -(-rows // 2))))
    count = -(-rows // most)
    edges = [rows * i // count for i in range(count + 1)]
    yield from (slice(a, b) for a, b in pairwise(edges))
