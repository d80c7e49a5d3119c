"""Which kernel runs, with how many workgroups: pure arithmetic on shapes and limits. No WebGPU in here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from qcs4w_packer.nibbles import packed_width

from .errors import LimitError
from .kernel import LINEAR_KERNELS, Kernel, shipped_kernel

# Where the kernels cross, found by timing all three on Mesa's lavapipe and on an NVIDIA H200 at N, K from 65 x 129 to
# 28672 x 8192: weights are read once for each row by linear_gemv, once for 64 rows by linear_tiled; below 1024 columns
# most of linear_gemv's invocations have nothing to do.
_TILED_FROM_ROWS = 12
_GEMV_FROM_COLUMNS = 1024
# Mesa's llvmpipe leaves loops unfinished after 65,535 turns; linear_gemv takes 4096 columns a turn.
_GEMV_ONLY_FROM_COLUMNS = 65_536

_U32_RANGE = 1 << 32


@dataclass(frozen=True)
class Plan:
    """How one product is to be computed.

    Attributes:
        kernel: what runs.
        rows: M.
        out_features: N.
        in_features: K.
        row_stride: K_packed as the kernel sees it, bytes from one packed row to the next.
        grid: workgroups along x and y.
    """

    kernel: Kernel
    rows: int
    out_features: int
    in_features: int
    row_stride: int
    grid: tuple[int, int]

    @property
    def sizes(self) -> dict[str, int]:
        """M, N, K and K_packed, in the order of the kernel's Params."""
        return _sizes(self.rows, self.out_features, self.in_features, self.row_stride)


def choose_kernel(rows: int, in_features: int) -> Kernel:
    """Return the kernel that serves M rows of K columns."""
    if rows >= _TILED_FROM_ROWS and in_features < _GEMV_ONLY_FROM_COLUMNS:
        return shipped_kernel("linear_tiled")
    return shipped_kernel("linear_gemv" if in_features >= _GEMV_FROM_COLUMNS else "linear_naive")


def row_stride(in_features: int, kernel: Kernel | None = None) -> int:
    """Return the bytes from one packed row to the next: ceil(K / 2), rounded up to what the kernel asks for.

    Without a kernel, or for one of ours, that is what any of ours asks for, so that they can share the weights.
    """
    ours = [shipped_kernel(name) for name in LINEAR_KERNELS]
    served = ours if kernel is None or kernel in ours else [kernel]
    align = math.lcm(*(each.row_align for each in served))
    return -(-packed_width(in_features) // align) * align


def plan_linear(
    rows: int, out_features: int, in_features: int, *, kernel: Kernel, stride: int, limits: Mapping[str, int]
) -> Plan:
    """Plan y[M, N] = x[M, K] · Ŵ[N, K]ᵀ.

    Args:
        rows: M.
        out_features: N.
        in_features: K.
        kernel: what is going to run.
        stride: bytes from one packed row to the next.
        limits: of the device, by WebGPU's names with dashes.

    Raises:
        LimitError: a buffer or the grid is beyond the device's limits.
    """
    sizes = _sizes(rows, out_features, in_features, stride)
    for what, nbytes in (
        (f"y (M {rows} × N {out_features} in float32)", rows * out_features * 4),
        (f"x (M {rows} × K {in_features} in float32)", rows * in_features * 4),
        (f"packed weights (N {out_features} × {stride} bytes)", out_features * stride),
    ):
        for limit in ("max-storage-buffer-binding-size", "max-buffer-size"):
            if nbytes > limits[limit]:
                raise LimitError(
                    f"{what} needs {nbytes:,} bytes in one buffer, the device's {limit} is {limits[limit]:,}",
                    hint="use fewer rows, or a device with larger buffers (qcs4w devices lists them)",
                )
    for what, count in (
        ("M · N", rows * out_features),
        ("M · K", rows * in_features),
        ("N · K_packed", out_features * stride),
    ):
        if count >= _U32_RANGE:
            raise LimitError(f"{what} is {count:,}, beyond the 32 bits of an index in WGSL", hint="use fewer rows")
    counts, most = kernel.grid_of(sizes), limits["max-compute-workgroups-per-dimension"]
    if isinstance(counts, int):
        grid = fold_grid(counts, most)
    elif max(counts) > most:
        raise LimitError(
            f"kernel '{kernel.name}' asks for {counts[0]:,} × {counts[1]:,} workgroups, "
            f"the device takes {most:,} in each dimension",
            hint="one expression is folded into two dimensions; or use fewer rows",
        )
    else:
        grid = counts
    return Plan(kernel, rows, out_features, in_features, stride, grid)


def fold_grid(workgroups: int, limit: int) -> tuple[int, int]:
    """Fold a line of workgroups into x × y, each within the device's limit, with as few too many as can be.

    Raises:
        LimitError: they do not fit into two dimensions.
    """
    y = max(1, -(-workgroups // limit))
    if y > limit:
        raise LimitError(f"{workgroups:,} workgroups exceed {limit:,} × {limit:,}", hint="use fewer rows")
    return max(1, -(-workgroups // y)), y


def _sizes(rows: int, out_features: int, in_features: int, stride: int) -> dict[str, int]:
    return {"M": rows, "N": out_features, "K": in_features, "K_packed": stride}
