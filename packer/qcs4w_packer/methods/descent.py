"""Codes and scales under a quadratic loss: rounding from the last column on, refitting scales, descending code by code.

All arrays hold one column of the weight a row, (K, n), in the order of a `Factored` H, so that what belongs to one
column lies together: work goes column by column for all n rows of the weight at once. Columns are taken in blocks:
within a block one by one, and what a block changes reaches all others in one matrix product.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..nibbles import CODE_MAX, CODE_MIN
from ..quantize import SCALE_FLOOR
from .hessian import Factored

if TYPE_CHECKING:
    import torch

_BLOCK = 32  # columns


@dataclass
class Solution:
    """Codes and scales of some rows, edited in place as they get better.

    Attributes:
        factored: H of the inputs.
        weight: float32, shape (K, n).
        codes: float32, shape (K, n), integers in [-8, 7].
        scales: float32, shape (n,).
        rest: float32, shape (K, n), weight − scale · code.
        pull: float32, shape (K, n), H · rest, half the slope of the loss; None until `prepare`.
        whole: float32, shape (K, n), H · weight; None until `prepare`.
    """

    factored: Factored
    weight: "torch.Tensor"
    codes: "torch.Tensor"
    scales: "torch.Tensor"
    rest: "torch.Tensor"
    pull: "torch.Tensor | None" = None
    whole: "torch.Tensor | None" = None

    def prepare(self) -> tuple["torch.Tensor", "torch.Tensor"]:
        """Return `pull` and `whole`, made now if they have not been yet."""
        if self.pull is None or self.whole is None:
            self.pull = self.factored.matrix @ self.rest
            self.whole = self.factored.matrix @ self.weight
        return self.pull, self.whole

    def losses(self) -> "torch.Tensor":
        """Return (w − ŵ)ᵀ H (w − ŵ) of each row: float32, shape (n,)."""
        pull, _ = self.prepare()
        return (self.rest * pull).sum(dim=0)


def round_backwards(factored: Factored, weight: "torch.Tensor", scales: "torch.Tensor") -> Solution:
    """Choose codes from the last column to the first, each with the error of those before made good as far as can be.

    Args:
        factored: H of the inputs.
        weight: float32, shape (K, n).
        scales: float32, shape (n,).
    """
    import torch

    lower = factored.lower
    columns = len(weight)
    inverse = scales.reciprocal()
    codes, rest = torch.empty_like(weight), torch.empty_like(weight)
    for stop in range(columns, 0, -_BLOCK):
        start = max(0, stop - _BLOCK)
        aims = torch.addmm(weight[start:stop], lower[stop:, start:stop].T, rest[stop:])
        inner = lower[start:stop, start:stop].T.contiguous()
        block = rest[start:stop]
        for i in range(stop - start - 1, -1, -1):
            aim = torch.addmv(aims[i], block[i + 1 :].T, inner[i, i + 1 :])
            code = torch.mul(aim, inverse, out=codes[start + i]).round_().clamp_(CODE_MIN, CODE_MAX)
            torch.addcmul(weight[start + i], code, scales, value=-1, out=block[i])
    return Solution(factored, weight, codes, scales.clone(), rest)


def refit(solution: Solution) -> None:
    """Give each row the best scale for its codes, where that is above zero: (qᵀHw) / (qᵀHq)."""
    import torch

    pull, whole = solution.prepare()
    codes, scales = solution.codes, solution.scales
    moved = whole - pull  # H · ŵ
    along = (codes * pull).sum(dim=0)
    size = (codes * moved).sum(dim=0) / scales
    better = scales + along / size
    fits = (size > 0) & (along + scales * size > 0) & torch.isfinite(better)
    better = torch.where(fits, better.clamp(min=float(SCALE_FLOOR)), scales)
    ratio = better / scales
    solution.scales = better
    torch.addcmul(solution.weight, codes, better, value=-1, out=solution.rest)
    torch.addcmul(whole, moved, ratio, value=-1, out=pull)


def descend(solution: Solution) -> None:
    """Visit every code once, from the last column to the first, and give it the best value while all others stay."""
    import torch

    pull, _ = solution.prepare()
    matrix, codes, rest, scales = solution.factored.matrix, solution.codes, solution.rest, solution.scales
    inverse = scales.reciprocal()
    shares = 1 / matrix.diagonal()
    moves = torch.empty((_BLOCK, codes.shape[1]), dtype=codes.dtype, device=codes.device)
    for stop in range(len(codes), 0, -_BLOCK):
        start = max(0, stop - _BLOCK)
        moved = moves[: stop - start]
        inner = matrix[start:stop, start:stop]
        steps = inverse * shares[start:stop, None]
        for i in range(stop - start - 1, -1, -1):
            slope = torch.addmv(pull[start + i], moved[i + 1 :].T, inner[i, i + 1 :], alpha=-1)
            code = codes[start + i]
            aim = torch.addcmul(code, slope, steps[i]).round_().clamp_(CODE_MIN, CODE_MAX)
            torch.mul(aim - code, scales, out=moved[i])
            code.copy_(aim)
        rest[start:stop] -= moved
        pull.addmm_(matrix[:, start:stop], moved, alpha=-1)
