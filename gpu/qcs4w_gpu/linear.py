"""A packed linear on a device: weights are uploaded once, and run many times."""

import time
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qcs4w_packer import PackedLinear
from qcs4w_packer.closing import Closing
from qcs4w_packer.errors import NonFiniteError, UsageError
from qcs4w_packer.nibbles import PAD_BYTE

from .dispatcher import Buffer, Gpu, elapsed_ms
from .kernel import Kernel, check_linear, shipped_kernel
from .plan import Plan, choose_kernel, plan_linear, row_stride

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


class Linear(Closing):
    """y = x · Ŵᵀ (+ bias) on a device.

    Args:
        gpu: the device; it must outlive this.
        packed: the weight.
        bias: float32, shape (N,), added after the product.
        kernel: run this one whatever the shape; by default the plan chooses.
        scales: float32, shape (N,), in place of the weight's own.

    Raises:
        LimitError: the weights do not fit into one buffer of the device.
    """

    def __init__(
        self,
        gpu: Gpu,
        packed: PackedLinear,
        *,
        bias: NDArray[np.float32] | None = None,
        kernel: Kernel | None = None,
        scales: NDArray[np.float32] | None = None,
    ):
        if kernel is not None:
            check_linear(kernel)
        for what, vector in (("bias", bias), ("scales", scales)):
            if vector is not None and vector.shape != (packed.out_features,):
                raise UsageError(f"{what} has shape {list(vector.shape)}, expected [{packed.out_features}]")
        self.out_features, self.in_features = packed.out_features, packed.in_features
        self._gpu, self._kernel = gpu, kernel
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
        gpu, plan = self._gpu, self._plan(len(x))
        count = plan.rows * plan.out_features
        start = time.perf_counter()
        with (
            gpu.upload(x, label="x") as x_buffer,
            gpu.upload(np.full(count + guard_words, POISON), label="y") as y_buffer,
        ):
            gpu.finish()
            upload_ms = elapsed_ms(start)
            kernel_ms = self._dispatch(plan, x_buffer, y_buffer)
            start = time.perf_counter()
            words = gpu.read(y_buffer)
            timing = Timing(upload_ms, kernel_ms, elapsed_ms(start))
        shape = (plan.rows, plan.out_features)
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

    def _dispatch(self, plan: Plan, x: Buffer, y: Buffer) -> float | None:
        """Run the linear and, where there is one, the addition of the bias; return milliseconds on the GPU."""
        gpu = self._gpu
        kernel_ms = gpu.dispatch(plan.kernel, {0: y, 1: x, 2: self._weights, 3: self._scales}, plan.sizes, plan.grid)
        if self._bias is not None:
            add = plan_linear(
                plan.rows,
                plan.out_features,
                plan.in_features,
                kernel=shipped_kernel("bias_add"),
                stride=plan.row_stride,
                limits=gpu.limits,
            )
            add_ms = gpu.dispatch(add.kernel, {0: y, 1: self._bias}, add.sizes, add.grid)
            kernel_ms = None if kernel_ms is None or add_ms is None else kernel_ms + add_ms
        return kernel_ms

    def _plan(self, rows: int) -> Plan:
        return plan_for(self._gpu, rows, self.out_features, self.in_features, self._kernel)


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


def plan_for(gpu: Gpu, rows: int, out_features: int, in_features: int, kernel: Kernel | None = None) -> Plan:
    """Plan y[M, N] on a device, before anything is read, drawn or uploaded.

    Args:
        gpu: the device.
        rows: M.
        out_features: N.
        in_features: K.
        kernel: what is to run; by default what suits the shape.

    Raises:
        LimitError: it does not fit the device.
    """
    return plan_linear(
        rows,
        out_features,
        in_features,
        kernel=kernel or choose_kernel(rows, in_features),
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


def _pad_rows(packed: NDArray[np.uint8], stride: int) -> NDArray[np.uint8]:
    """Return packed rows `stride` bytes apart, padded with codes of zero."""
    if packed.shape[1] == stride:
        return packed
    padded = np.full((packed.shape[0], stride), PAD_BYTE, np.uint8)
    padded[:, : packed.shape[1]] = packed
    return padded
