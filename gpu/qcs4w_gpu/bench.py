"""How fast a linear is on a device: kernels timed beside the ceilings of the same device in the same run.

A time is the GPU's own, of a chain: a line of dispatches in one pass, each with other weights, so that none finds its
weights in the cache. Before every chain the device is kept busy until its clock is up, and a short computation on both
sides of the chain shows whether the clock has held.
"""

import math
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qcs4w_packer import PackedLinear
from qcs4w_packer.closing import Closing
from qcs4w_packer.nibbles import packed_width

from .dispatcher import Gpu, Step
from .errors import GpuError
from .judge import compare, reference
from .kernel import Kernel, shipped_kernel
from .linear import Linear
from .plan import Precision

#: Weights in rotation add up to more than any cache that we know.
ROTATED_BYTES = 160 << 20
_COPIED_BYTES = 512 << 20
_BURN_MS = 30.0
_CHAIN_MS = 3.0
_MOST_IN_CHAIN = 64
_CHECKED_ROWS = 16
_CHECKED_COLUMNS = 96


@dataclass(frozen=True)
class Spread:
    """Times of the same thing: the median, the least and the most, in milliseconds, and how often it was measured.

    Attributes:
        is_steady: the device's clock was the same before and after each of them, within 3 %.
    """

    median_ms: float
    least_ms: float
    most_ms: float
    count: int
    is_steady: bool


@dataclass(frozen=True)
class Ceilings:
    """What a device can do at most, measured.

    Attributes:
        copy_bytes_per_s: bytes read and written by a copy.
        fma_flops_per_s: operations of fused multiply-adds in float32, two each.
    """

    copy_bytes_per_s: float
    fma_flops_per_s: float


@dataclass(frozen=True)
class Timed:
    """A linear, timed.

    Attributes:
        kernel: its name.
        rows, out_features, in_features: M, N, K.
        grid: workgroups along x and y.
        time: of one product.
        weight_bytes: read at least once for every product.
        flops: 2 · M · N · K.
        relative_error: ‖y − y64‖ / ‖y64‖ on a sample of rows and columns.
        is_right: the judge's verdict on that sample.
    """

    kernel: str
    rows: int
    out_features: int
    in_features: int
    grid: tuple[int, int]
    time: Spread
    weight_bytes: int
    flops: float
    relative_error: float
    is_right: bool

    @property
    def bytes_per_s(self) -> float:
        """Bytes of weights, of x and of y that have to move in a second."""
        moved = self.weight_bytes + 4 * self.rows * (self.in_features + self.out_features)
        return moved / self.time.median_ms * 1e3

    @property
    def flops_per_s(self) -> float:
        """Operations in a second."""
        return self.flops / self.time.median_ms * 1e3


class Bench(Closing):
    """Times kernels on a device that has a clock.

    Attributes:
        gpu: the device.
        shortest: a step that does next to nothing, to see what a dispatch costs.

    Raises:
        GpuError: the device has no timestamps.
    """

    def __init__(self, gpu: Gpu):
        if "timestamp-query" not in gpu.features:
            raise GpuError(f"{gpu.adapter} has no clock (timestamp-query), so that nothing can be timed on it")
        self.gpu = gpu
        with ExitStack() as held:
            self._out = held.enter_context(gpu.empty(4 * 256 * 4096, label="sums"))
            self._factors = held.enter_context(gpu.upload(np.array([1.0, 0.0], np.float32), label="factors"))
            self._groups, self._turns = (8, 50) if gpu.adapter.is_software else (1024, 2000)
            self._probe = held.enter_context(self._fma(self._groups, self._turns))
            self.shortest = held.enter_context(self._fma(1, 1))
            burnt = max(1, int(self._turns * _BURN_MS / self._ms([self._probe])))
            self._burn = held.enter_context(self._fma(self._groups, burnt))
            self._held = held.pop_all()

    def close(self) -> None:
        """Free what is on the device; a second time does nothing."""
        self._held.close()

    def chain(self, steps: Sequence[Step], *, repeats: int = 7) -> Spread:
        """Time steps that follow each other in one pass; the times are those of one step.

        Args:
            steps: one or more.
            repeats: how often the chain is run.
        """
        probes, times = [], []
        for _ in range(repeats):
            _, before, taken, after = self.gpu.run([[self._burn], [self._probe], steps, [self._probe]])
            if before is None or taken is None or after is None:
                continue
            probes += [before, after]
            times.append(taken / len(steps))
        if not times:
            raise GpuError(f"the clock of {self.gpu.adapter} gave no times")
        usual = statistics.median(probes)
        steady = all(abs(probe - usual) < 0.03 * usual for probe in probes)
        return Spread(statistics.median(times), min(times), max(times), len(times), steady)

    def ceilings(self) -> Ceilings:
        """Measure what the device can do at most."""
        gpu, copying = self.gpu, shipped_kernel("bench_copy")
        most = min(gpu.limits["max-buffer-size"], gpu.limits["max-storage-buffer-binding-size"], _COPIED_BYTES)
        if gpu.adapter.is_software:
            most = min(most, 16 << 20)
        vectors = most // 16 // 1024 * 1024
        sizes = {"M": vectors, "N": 1, "K": 1, "K_packed": 1}
        groups = copying.workgroups(sizes)
        folded = (-(-groups // -(-groups // 32768)), -(-groups // 32768))
        with gpu.empty(16 * vectors, label="copy") as to, gpu.empty(16 * vectors, label="original") as source:
            gpu.write(source, np.random.default_rng(0).integers(0, 1 << 30, 4 << 20, np.uint32)[: 4 * vectors])
            with gpu.step(copying, {0: to, 1: source}, sizes, folded) as step:
                copied = self.chain([step] * 4).median_ms
        fma = self.chain([self._probe]).median_ms
        flops = 2 * 64 * self._turns * 256 * self._groups
        return Ceilings(2 * 16 * vectors / copied * 1e3, flops / fma * 1e3)

    def linear(
        self,
        shape: tuple[int, int, int],
        *,
        kernel: Kernel | None = None,
        precision: Precision = "f32",
        repeats: int = 7,
    ) -> Timed:
        """Time a linear of random weights, after a check that it is right.

        Args:
            shape: M, N, K.
            kernel: what is to run; by default what the plan chooses.
            precision: for the plan.
            repeats: how often the chain is run.
        """
        gpu = self.gpu
        rows, out_features, in_features = shape
        draw = np.random.default_rng(shape)
        packed = random_weight(draw, out_features, in_features)
        x = draw.standard_normal((rows, in_features), np.float32)
        copies = max(2, min(_MOST_IN_CHAIN, -(-ROTATED_BYTES // packed.packed.nbytes)))
        if gpu.adapter.is_software:
            copies = 2
        with ExitStack() as held:
            linears = [
                held.enter_context(Linear(gpu, packed, kernel=kernel, precision=precision)) for _ in range(copies)
            ]
            runs = [held.enter_context(linear.prepare(rows)) for linear in linears]
            for each in runs:
                each.write(x)
            gpu.run([runs[0].steps])
            error, right = _check(packed, x, runs[0].read(), precision)
            once = self.chain(runs[0].steps, repeats=1).median_ms * len(runs[0].steps)
            count = max(2, min(_MOST_IN_CHAIN, int(_CHAIN_MS / once)))
            count = -(-count // copies) * copies if count > copies else count
            steps = [step for i in range(count) for step in runs[i % copies].steps]
            per_product = len(runs[0].steps)
            time = self.chain(steps, repeats=repeats)
            time = Spread(
                time.median_ms * per_product,
                time.least_ms * per_product,
                time.most_ms * per_product,
                time.count,
                time.is_steady,
            )
            plan = runs[0].plan
        return Timed(
            kernel=plan.kernel.name,
            rows=rows,
            out_features=out_features,
            in_features=in_features,
            grid=plan.grid,
            time=time,
            weight_bytes=packed.packed.nbytes + 4 * out_features,
            flops=2.0 * math.prod(shape),
            relative_error=error,
            is_right=right,
        )

    def _fma(self, groups: int, turns: int) -> Step:
        sizes = {"M": groups, "N": 1, "K": turns, "K_packed": 1}
        return self.gpu.step(shipped_kernel("bench_fma"), {0: self._out, 1: self._factors}, sizes, (groups, 1))

    def _ms(self, steps: Sequence[Step]) -> float:
        times = [self.gpu.run([steps])[0] for _ in range(3)]
        return min((time for time in times if time is not None), default=1.0)


def random_weight(draw: np.random.Generator, out_features: int, in_features: int) -> PackedLinear:
    """Return a weight of random bytes, with scales near 1 / sqrt(K)."""
    width = packed_width(in_features)
    packed = np.frombuffer(draw.bytes(out_features * width), np.uint8).reshape(out_features, width).copy()
    if in_features % 2:
        packed[:, -1] = packed[:, -1] & 0xF0 | 0x08
    scales = (draw.uniform(0.5, 1.5, out_features) / math.sqrt(in_features)).astype(np.float32)
    return PackedLinear(packed, scales, in_features)


def _check(
    packed: PackedLinear, x: NDArray[np.float32], y: NDArray[np.float32], precision: Precision = "f32"
) -> tuple[float, bool]:
    """Judge a sample of y: return its relative error and the verdict."""
    rows = np.unique(np.linspace(0, len(x) - 1, _CHECKED_ROWS).astype(int))
    columns = np.unique(np.linspace(0, packed.out_features - 1, _CHECKED_COLUMNS).astype(int))
    sample = PackedLinear(packed.packed[columns], packed.scales[columns], packed.in_features)
    wanted = reference(sample, x[rows], half=precision == "f16")
    comparison = compare(y[np.ix_(rows, columns)], wanted.y, wanted.bound)
    return comparison.relative_error, comparison.is_match
