"""A packed linear on a device: weights are uploaded once, and run many times."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qcs4w_packer import PackedLinear
from qcs4w_packer.closing import Closing
from qcs4w_packer.errors import NonFiniteError, UsageError
from qcs4w_packer.nibbles import PAD_BYTE

from .dispatcher import Buffer, Gpu, Step, elapsed_ms
from .kernel import Kernel, check_linear, is_matrix, shipped_kernel
from .plan import Plan, Precision, choose_kernel, fold_grid, matrix_sizes, plan_linear, plan_sum, row_stride

#: A quiet NaN that no computation makes: what stands in y before a kernel runs, and in guard words after it.
POISON = np.uint32(0x7FC0DEAD)


@dataclass(frozen=True)
class Timing:
    """Where the time of one run went, in milliseconds.

    Attributes:
        upload_ms: x to the device, by the host's clock.
        kernel_ms: the linear and the addition of its bias, by the GPU's clock; None where it has none.
        readback_ms: y to the host, by the host's clock.
    """

    upload_ms: float
    kernel_ms: float | None
    readback_ms: float


@dataclass(frozen=True)
class Run:
    """The result of one run.

    Attributes:
        y: float32, shape (M, N).
        plan: what ran.
        timing: where the time went.
        unwritten: bool, shape (M, N): elements that the kernel never wrote.
        guards_intact: nothing was written behind y.
    """

    y: NDArray[np.float32]
    plan: Plan
    timing: Timing
    unwritten: NDArray[np.bool_]
    guards_intact: bool


class Prepared(Closing):
    """All that runs of a linear with so many rows need, on the device: see `Linear.prepare`.

    Attributes:
        plan: what runs.
        x: rows of `plan.x_stride` floats; `write` fills it.
        y: float32, shape (M, N), and guard words behind it.
        steps: dispatches, in their order.
    """

    def __init__(self, gpu: Gpu, plan: Plan, x: Buffer, y: Buffer, steps: Sequence[Step], held: ExitStack):
        self.plan, self.x, self.y, self.steps = plan, x, y, steps
        self._gpu, self._held = gpu, held

    def write(self, x: NDArray[np.float32]) -> None:
        """Put an x, float32, shape (M, K), on the device."""
        self._gpu.write(self.x, pad_columns(x, self.plan.x_stride))

    def run(self) -> float | None:
        """Run once and wait; return the milliseconds that it took on the GPU, or None where it has no clock."""
        return self._gpu.run([self.steps])[0]

    def read(self) -> NDArray[np.float32]:
        """Return y, float32, shape (M, N)."""
        shape = (self.plan.rows, self.plan.out_features)
        return self.read_words()[: shape[0] * shape[1]].view(np.float32).reshape(shape)

    def read_words(self) -> NDArray[np.uint32]:
        """Return y and what lies behind it as 32-bit words."""
        return self._gpu.read(self.y)

    def close(self) -> None:
        """Free x and y on the device; a second time does nothing."""
        self._held.close()


class Linear(Closing):
    """y = x · Ŵᵀ (+ bias) on a device.

    Args:
        gpu: the device; it must outlive this.
        packed: the weight.
        bias: float32, shape (N,), added after the product.
        kernel: run this one whatever the shape; by default the plan chooses.
        scales: float32, shape (N,), in place of the weight's own.
        precision: how exact a kernel the plan chooses: "f32", or "f16", which rounds x first.

    Raises:
        LimitError: the weights do not fit into one buffer of the device.
        PrecisionError: the device has not what the precision needs.
    """

    def __init__(
        self,
        gpu: Gpu,
        packed: PackedLinear,
        *,
        bias: NDArray[np.float32] | None = None,
        kernel: Kernel | None = None,
        scales: NDArray[np.float32] | None = None,
        precision: Precision = "f32",
    ):
        if kernel is not None:
            check_linear(kernel)
        for what, vector in (("bias", bias), ("scales", scales)):
            if vector is not None and vector.shape != (packed.out_features,):
                raise UsageError(f"{what} has shape {list(vector.shape)}, expected [{packed.out_features}]")
        self.out_features, self.in_features = packed.out_features, packed.in_features
        self._gpu, self._kernel, self.precision = gpu, kernel, precision
        stride = self._plan(1).row_stride  # refuses what cannot fit before anything is uploaded
        start = time.perf_counter()
        with ExitStack() as held:  # what has been uploaded is freed again if the rest fails
            self._weights = held.enter_context(gpu.upload(_pad_rows(packed.packed, stride), label="packed weights"))
            factors = packed.scales if scales is None else scales.astype(np.float32)
            self._scales = held.enter_context(gpu.upload(factors, label="scales"))
            self._bias = None
            if bias is not None:
                self._bias = held.enter_context(gpu.upload(bias.astype(np.float32), label="bias"))
            gpu.finish()
            self._held = held.pop_all()
        self.upload_ms = elapsed_ms(start)

    @property
    def has_bias(self) -> bool:
        """Whether a bias is added."""
        return self._bias is not None

    def __call__(self, x: ArrayLike) -> NDArray[np.float32]:
        """Return y, float32, shape (..., N), for x of shape (..., K), an array or what NumPy makes one of."""
        x = np.asarray(x)
        return self.run(as_rows(x, self.in_features)).y.reshape(*x.shape[:-1], self.out_features)

    def run(self, x: NDArray[np.floating], *, guard_words: int = 0) -> Run:
        """Run once, with what a careful caller wants to know.

        Args:
            x: floats, shape (M, K); as `as_rows` makes them.
            guard_words: 32-bit words behind y that must stay untouched.

        Raises:
            UsageError, NonFiniteError: x is not what `as_rows` takes.
            LimitError: x or y do not fit into one buffer of the device.
            GpuError: the driver's own words.
        """
        x = as_rows(x, self.in_features)
        gpu = self._gpu
        self._plan(len(x))  # refuses what cannot fit before anything is uploaded
        start = time.perf_counter()
        with self.prepare(len(x), guard_words=guard_words) as prepared:
            prepared.write(x)
            gpu.finish()
            upload_ms = elapsed_ms(start)
            kernel_ms = prepared.run()
            start = time.perf_counter()
            words = prepared.read_words()
            timing = Timing(upload_ms, kernel_ms, elapsed_ms(start))
        plan = prepared.plan
        shape, count = (plan.rows, plan.out_features), plan.rows * plan.out_features
        return Run(
            y=words[:count].view(np.float32).reshape(shape),
            plan=plan,
            timing=timing,
            unwritten=(words[:count] == POISON).reshape(shape),
            guards_intact=bool((words[count:] == POISON).all()),
        )

    def set_scales(self, scales: NDArray[np.float32]) -> None:
        """Put other scales, float32 (N,), in place of those on the device; the weights stay where they are."""
        if scales.shape != (self.out_features,):
            raise UsageError(f"scales has shape {list(scales.shape)}, expected [{self.out_features}]")
        self._gpu.write(self._scales, scales.astype(np.float32))

    def close(self) -> None:
        """Free the weights on the device; a second time does nothing."""
        self._held.close()

    def prepare(self, rows: int, *, guard_words: int = 0) -> "Prepared":
        """Make ready what runs of M rows need, so that each of them costs as little as can be.

        Args:
            rows: M.
            guard_words: 32-bit words behind y that must stay untouched.

        Raises:
            LimitError: x or y do not fit into one buffer of the device.
        """
        gpu, plan = self._gpu, self._plan(rows)
        with ExitStack() as held:
            x = held.enter_context(gpu.empty(4 * rows * plan.x_stride, label="x"))
            y = held.enter_context(gpu.upload(np.full(rows * plan.out_features + guard_words, POISON), label="y"))
            steps = [
                held.enter_context(step)
                for step in self._steps(plan, x, y, lambda nbytes: held.enter_context(gpu.empty(nbytes, label="sums")))
            ]
            return Prepared(gpu, plan, x, y, steps, held.pop_all())

    def _steps(self, plan: Plan, x: Buffer, y: Buffer, scratch: Callable[[int], Buffer]) -> Iterator[Step]:
        """Yield the linear and, where there is one, the addition of its bias."""
        gpu = self._gpu
        out = y if plan.splits == 1 else scratch(4 * plan.splits * plan.rows * plan.out_features)
        buffers = {0: out, 1: x, 2: self._weights, 3: self._scales}
        if is_matrix(plan.kernel):
            sizes = matrix_sizes(plan.rows, plan.out_features, plan.row_stride)
            buffers[1], buffers[2] = scratch(sizes.parts_nbytes), scratch(sizes.blocks_nbytes)
            buffers[5] = scratch(sizes.factors_nbytes)
            yield self._extra("matrix_weights", {0: buffers[2], 2: self._weights}, plan, M=sizes.out_features)
            parts = {"PARTS": plan.kernel.constants["PARTS"]}
            yield self._extra("matrix_rows", {0: buffers[1], 1: x, 3: buffers[5]}, plan, parts, N=sizes.rows)
        yield gpu.step(plan.kernel, buffers, plan.sizes, plan.grid)
        if plan.splits > 1:
            total = plan_sum(plan, limits=gpu.limits)
            yield gpu.step(total.kernel, {0: y, 1: out, 3: self._scales}, total.sizes, total.grid)
        if is_matrix(plan.kernel) and plan.kernel.constants["PARTS"] > 1:
            exact = {0: y, 1: x, 2: self._weights, 3: self._scales, 5: buffers[5]}
            yield self._extra("matrix_strict", exact, plan)
        if self._bias is not None:
            add = plan_linear(
                plan.rows,
                plan.out_features,
                plan.in_features,
                kernel=shipped_kernel("bias_add"),
                stride=plan.row_stride,
                limits=gpu.limits,
            )
            yield gpu.step(add.kernel, {0: y, 1: self._bias}, add.sizes, add.grid)

    def _extra(
        self,
        name: str,
        buffers: dict[int, Buffer],
        plan: Plan,
        defines: Mapping[str, int] = MappingProxyType({}),
        **sizes: int,
    ) -> Step:
        """Make a kernel ready that prepares or mends what linear_matrix does; some of its sizes may differ."""
        kernel, own = shipped_kernel(name, **defines), {**plan.sizes, **sizes}
        grid = fold_grid(kernel.workgroups(own), self._gpu.limits["max-compute-workgroups-per-dimension"])
        return self._gpu.step(kernel, buffers, own, grid)

    def _plan(self, rows: int) -> Plan:
        return plan_for(self._gpu, rows, self.out_features, self.in_features, self._kernel, precision=self.precision)


def check_kernel(gpu: Gpu, kernel: Kernel) -> None:
    """Check what no shape changes, before a batch: a user's kernel's bindings, its grid, and that it compiles.

    Args:
        gpu: the device that is to run it.
        kernel: of the linear.

    Raises:
        KernelError: it does not keep the contract, or does not compile.
    """
    check_linear(kernel)
    kernel.check_grid()
    gpu.compile(kernel)


def plan_for(
    gpu: Gpu,
    rows: int,
    out_features: int,
    in_features: int,
    kernel: Kernel | None = None,
    *,
    precision: Precision = "f32",
) -> Plan:
    """Plan y[M, N] on a device, before anything is read, drawn or uploaded.

    Args:
        gpu: the device.
        rows: M.
        out_features: N.
        in_features: K.
        kernel: what is to run; by default what suits the shape.
        precision: how exact a kernel is to be chosen.

    Raises:
        LimitError: it does not fit the device.
        PrecisionError: the device has not what the precision needs.
    """
    if kernel is None:
        kernel = choose_kernel(rows, out_features, in_features, gpu.facts, precision=precision).kernel
    return plan_linear(
        rows,
        out_features,
        in_features,
        kernel=kernel,
        stride=row_stride(in_features, kernel),
        limits=gpu.limits,
    )


def as_rows(x: NDArray[np.floating], in_features: int, *, name: str = "weight") -> NDArray[np.float32]:
    """Return an input of any rank as float32 rows.

    Args:
        x: floats, shape (..., K), K equal to in_features.
        in_features: K.
        name: of the weight, for messages.

    Returns:
        float32, shape (M, K).

    Raises:
        UsageError: another last dimension, or no rows.
        NonFiniteError: NaN, an infinity, or a value beyond float32; WGSL may assume that there are none.
    """
    if x.ndim < 1 or x.shape[-1] != in_features:
        raise UsageError(f"input of '{name}' has shape {list(x.shape)}, expected [..., {in_features}]")
    if x.size == 0:
        raise UsageError(f"input of '{name}' has shape {list(x.shape)}, which has no rows")
    with np.errstate(over="ignore", invalid="ignore"):
        rows = np.ascontiguousarray(x.reshape(-1, in_features), np.float32)
    if not np.isfinite(rows).all():
        row, column = (int(i) for i in np.argwhere(~np.isfinite(rows))[0])
        raise NonFiniteError(
            f"input of '{name}' holds {rows[row, column]} at row {row}, column {column}; it must be finite in float32"
        )
    return rows


def pad_columns(x: NDArray[np.float32], stride: int) -> NDArray[np.float32]:
    """Return rows of x `stride` floats apart, filled up with zeros."""
    if x.shape[1] == stride:
        return x
    padded = np.zeros((x.shape[0], stride), np.float32)
    padded[:, : x.shape[1]] = x
    return padded


def _pad_rows(packed: NDArray[np.uint8], stride: int) -> NDArray[np.uint8]:
    """Return packed rows `stride` bytes apart, padded with codes of zero."""
    if packed.shape[1] == stride:
        return packed
    padded = np.full((packed.shape[0], stride), PAD_BYTE, np.uint8)
    padded[:, : packed.shape[1]] = packed
    return padded
