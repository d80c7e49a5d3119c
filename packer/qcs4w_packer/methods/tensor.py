"""One weight quantized by its recipe, and what that gained on inputs that were kept apart."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..calibrated import Calibrated
from ..quantize import dequantize, quantize
from .calibration import Calibration, Inputs, Statistics
from .gptq import Quantized, gptq, hmse
from .hessian import single_threaded

_BLOCK_ELEMENTS = 4 << 20


@dataclass(frozen=True)
class Work:
    """How one tensor is to be quantized.

    Attributes:
        method: one that needs inputs.
        calibration: the open file.
        inputs: what it has for this tensor.
        device: where torch works.
    """

    method: str
    calibration: Calibration
    inputs: Inputs
    device: str = "cpu"

    def planned(self) -> Calibrated:
        """Return what is known before any data has been read."""
        return Calibrated(self.inputs.rows, self.inputs.held_out_rows, self.calibration.seed)

    def carry_out(self, weight: NDArray[np.float32], *, threads: int) -> tuple[Quantized, Calibrated]:
        """Quantize a weight, float32 (N, K), finite, and measure what came of it."""
        with single_threaded():
            known = self.calibration.read(self.inputs, need_hessian=self.method != "hmse")
            if self.method == "hmse":
                found = hmse(weight, known.mean_square)
            else:
                assert known.hessian is not None  # noqa: S101  # `find` refuses it
                found = gptq(weight, known.hessian, self.inputs.rows, device=self.device, threads=threads)
            ours, absmax = _output_errors(known, weight, [(found.codes, found.scales), quantize(weight)])
        outcome = replace(
            self.planned(),
            damping=found.damping,
            output_error=ours,
            absmax_output_error=absmax,
            fallback=found.fallback,
        )
        return found, outcome


def _output_errors(
    known: Statistics, weight: NDArray[np.float32], answers: list[tuple[NDArray[np.int8], NDArray[np.float32]]]
) -> list[float | None]:
    """Return the error of the outputs for codes and scales each, on inputs kept apart, else by H; None without both.

    Five digits of them: the last ones depend on the machine.
    """
    import torch

    if known.held_out is None and known.hessian is None:
        return [None] * len(answers)
    x = torch.from_numpy(known.hessian if known.held_out is None else known.held_out)
    sums = np.zeros(1 + len(answers))
    step = max(1, _BLOCK_ELEMENTS // max(weight.shape[1], len(x)))
    for start in range(0, len(weight), step):
        rows = weight[start : start + step]
        rest = [
            rows - dequantize(codes[start : start + step], scales[start : start + step]) for codes, scales in answers
        ]
        for index, part in enumerate([rows, *rest]):
            these = torch.from_numpy(part)
            out = these @ x.T
            sums[index] += float((out * (these if known.held_out is None else out)).sum(dtype=torch.float64))
    return [float(f"{max(0.0, lost / sums[0]) ** 0.5:.5g}") if sums[0] > 0 else None for lost in sums[1:]]
