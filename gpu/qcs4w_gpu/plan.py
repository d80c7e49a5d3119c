"""Which kernel runs, with how many workgroups: pure arithmetic on shapes and limits. No WebGPU in here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from qcs4w_packer.nibbles import packed_width

from .errors import LimitError, PrecisionError
from .kernel import FAST_KERNELS, LINEAR_KERNELS, MATRIX_KERNEL, Kernel, shipped_kernel

#: How exact a linear is: "f32" keeps the judge's bound for every x; "f16" rounds x to 11 bits first, on tensor cores.
Precision = Literal["f32", "f16"]
PRECISIONS: tuple[Precision, ...] = ("f32", "f16")

# Where the kernels cross on a software device, found by timing three of them on Mesa's lavapipe: weights are read once
# for each row by linear_gemv, once for 64 rows by linear_tiled; below 1024 columns most of linear_gemv's invocations
# have nothing to do.
_TILED_FROM_ROWS = 12
_GEMV_FROM_COLUMNS = 1024
# Mesa's llvmpipe leaves loops unfinished after 65,535 turns; linear_gemv takes 4096 columns a turn.
_GEMV_ONLY_FROM_COLUMNS = 65_536

# Where they cross on a GPU, found on an NVIDIA H200; the figures stand in the kernels.
_DECODE_TO_ROWS = 2
_FEW4_TO_ROWS = 4
_FEW8_TO_ROWS = 40
_MATRIX_FROM_ROWS = 48
_MATRIX_FROM_COLUMNS = 64  # below, it takes none of its rows for exact enough
# K is split until a card of 132 multiprocessors has two workgroups for each, down to these columns a part.
_WANTED_WORKGROUPS = 264
_LEAST_PART = 1024
_MOST_SPLITS = 8

_U32_RANGE = 1 << 32


@dataclass(frozen=True)
class Facts:
    """What a choice of kernel depends on beside the shape.

    Attributes:
        is_software: the device computes on the CPU.
        has_matrices: it multiplies 16 x 16 matrices of f16 into f32, 32 invocations together (tensor cores).
        limits: of the device, by WebGPU's names with dashes.
    """

    is_software: bool
    has_matrices: bool
    limits: Mapping[str, int]


@dataclass(frozen=True)
class Choice:
    """A kernel for a shape, and why.

    Attributes:
        kernel: what is to run, its override constants set.
        branch: which rule chose it, as a word; `BRANCHES` has them all.
        reason: the same for people.
    """

    kernel: Kernel
    branch: str
    reason: str


#: Every rule of `choose_kernel`; a test fails if one of them has not been run.
BRANCHES = (
    "software long",
    "software many",
    "software few",
    "software short",
    "short",
    "decode",
    "few4",
    "few8",
    "few split",
    "prefill",
    "prefill split",
    "matrix",
    "matrix split",
    "matrix f16",
)


@dataclass(frozen=True)
class Plan:
    """How one product is to be computed.

    Attributes:
        kernel: what runs.
        rows: M.
        out_features: N.
        in_features: K.
        row_stride: K_packed as the kernel sees it, bytes from one packed row to the next.
        x_stride: floats from one row of x to the next.
        grid: workgroups along x and y.
        splits: parts of K that are summed apart, to be added up by another kernel; 1 for none.
    """

    kernel: Kernel
    rows: int
    out_features: int
    in_features: int
    row_stride: int
    x_stride: int
    grid: tuple[int, int]
    splits: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """M, N, K and K_packed, in the order of the kernel's Params."""
        return _sizes(self.rows, self.out_features, self.in_features, self.row_stride)


def choose_kernel(
    rows: int, out_features: int, in_features: int, facts: Facts, *, precision: Precision = "f32"
) -> Choice:
    """Choose the kernel for y[M, N] = x[M, K] · Ŵ[N, K]ᵀ.

    Args:
        rows: M.
        out_features: N.
        in_features: K.
        facts: of the device.
        precision: how exact it has to be.

    Raises:
        PrecisionError: the device has not what the precision needs.
    """
    wide = _fits_matrices(rows, out_features, in_features, facts)
    if precision == "f16":
        if not wide:
            raise PrecisionError(
                "precision f16 needs a device with subgroup matrices, and buffers for the weights in f16",
                hint="--engine dawn has them on GPUs with tensor cores; --precision f32 runs everywhere",
            )
        return _split(
            MATRIX_KERNEL, "matrix f16", "x rounded to f16, on tensor cores", rows, out_features, in_features, PARTS=1
        )
    if facts.is_software:
        return _choose_software(rows, in_features)
    if wide and rows >= _MATRIX_FROM_ROWS and in_features >= _MATRIX_FROM_COLUMNS:
        return _split(
            MATRIX_KERNEL, "matrix", "many rows, x in two f16 parts on tensor cores", rows, out_features, in_features
        )
    if rows > _FEW8_TO_ROWS:
        return _split(
            "linear_prefill", "prefill", "many rows: tiles in workgroup memory", rows, out_features, in_features
        )
    if rows > _FEW4_TO_ROWS:
        return _split(
            "linear_few8", "few8", "some rows: weights are read once for eight", rows, out_features, in_features
        )
    if rows > _DECODE_TO_ROWS:
        return _split(
            "linear_few4", "few4", "a few rows: weights are read once for four", rows, out_features, in_features
        )
    if in_features < _GEMV_FROM_COLUMNS:
        return Choice(shipped_kernel("linear_naive"), "short", "one or two rows of few columns: one y an invocation")
    return Choice(shipped_kernel("linear_decode"), "decode", "one or two rows: as fast as weights can be read")


def _choose_software(rows: int, in_features: int) -> Choice:
    """Choose for a device that computes on the CPU."""
    if in_features >= _GEMV_ONLY_FROM_COLUMNS:
        return Choice(shipped_kernel("linear_gemv"), "software long", "so many columns: loops of few turns")
    if rows >= _TILED_FROM_ROWS:
        return Choice(shipped_kernel("linear_tiled"), "software many", "many rows: tiles of 64 x 128")
    if in_features >= _GEMV_FROM_COLUMNS:
        return Choice(shipped_kernel("linear_gemv"), "software few", "few rows of many columns: a workgroup for four y")
    return Choice(shipped_kernel("linear_naive"), "software short", "few rows of few columns: one y an invocation")


def _split(
    name: str, branch: str, reason: str, rows: int, out_features: int, in_features: int, **defines: int
) -> Choice:
    """Choose a kernel in tiles, K in as many parts as it takes to give the device enough of them."""
    kernel = shipped_kernel(name, **defines)
    tiles = -(-rows // kernel.constants["TILE_M"]) * -(-out_features // kernel.constants["TILE_N"])
    parts = min(_WANTED_WORKGROUPS // tiles, in_features // _LEAST_PART, _MOST_SPLITS)
    if parts <= 1:
        return Choice(kernel, branch, reason)
    if branch != "matrix f16":
        branch = f"{'few' if branch.startswith('few') else branch} split"
    return Choice(
        shipped_kernel(name, SPLITS=parts, **defines),
        branch,
        f"{reason}; K in {parts} parts, for there are {tiles} tiles",
    )


def _fits_matrices(rows: int, out_features: int, in_features: int, facts: Facts) -> bool:
    """Whether there are subgroup matrices, and buffers hold what linear_matrix reads."""
    if not facts.has_matrices:
        return False
    sizes = matrix_sizes(rows, out_features, row_stride(in_features))
    return (
        all(
            max(sizes.parts_nbytes, sizes.blocks_nbytes) <= facts.limits[limit]
            for limit in ("max-storage-buffer-binding-size", "max-buffer-size")
        )
        and max(sizes.parts_nbytes, sizes.blocks_nbytes) < 2 * _U32_RANGE
    )


@dataclass(frozen=True)
class MatrixSizes:
    """What linear_matrix needs beside x, the weights and y.

    Attributes:
        rows: M, rounded up to whole tiles.
        out_features: N, rounded up to whole tiles.
        parts_nbytes: of x in two f16 parts.
        blocks_nbytes: of the codes in f16.
        factors_nbytes: of a float32 for each row.
    """

    rows: int
    out_features: int
    parts_nbytes: int
    blocks_nbytes: int
    factors_nbytes: int


def matrix_sizes(rows: int, out_features: int, stride: int) -> MatrixSizes:
    """Return what linear_matrix needs for M rows of x and N of weights, `stride` bytes apart."""
    tiles = shipped_kernel(MATRIX_KERNEL).constants
    padded_rows = -(-rows // tiles["TILE_M"]) * tiles["TILE_M"]
    padded_out = -(-out_features // tiles["TILE_N"]) * tiles["TILE_N"]
    columns = 2 * stride
    return MatrixSizes(padded_rows, padded_out, 4 * padded_rows * columns, 2 * padded_out * columns, 4 * padded_rows)


def row_stride(in_features: int, kernel: Kernel | None = None) -> int:
    """Return the bytes from one packed row to the next: ceil(K / 2), rounded up to what the kernel asks for.

    Without a kernel, or for one of ours, that is what any of ours asks for, so that they can share the weights.
    """
    ours = [shipped_kernel(name) for name in (*LINEAR_KERNELS, *FAST_KERNELS)]
    is_ours = kernel is None or any((kernel.name, kernel.source) == (each.name, each.source) for each in ours)
    served = ours if is_ours or kernel is None else [kernel]
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
    x_stride = -(-in_features // kernel.x_align) * kernel.x_align
    splits = kernel.constants.get("SPLITS", 1)
    sums = f"sums (M {rows} × N {out_features} × {splits} parts of K in float32)"
    for what, nbytes in (
        (f"y (M {rows} × N {out_features} in float32)", rows * out_features * 4),
        (sums, rows * out_features * 4 * splits),
        (f"x (M {rows} × K {in_features} in float32)", rows * x_stride * 4),
        (f"packed weights (N {out_features} × {stride} bytes)", out_features * stride),
    ):
        for limit in ("max-storage-buffer-binding-size", "max-buffer-size"):
            if nbytes > limits[limit]:
                raise LimitError(
                    f"{what} needs {nbytes:,} bytes in one buffer, the device's {limit} is {limits[limit]:,}",
                    hint="use fewer rows, or a device with larger buffers (qcs4w devices lists them)",
                )
    for what, count in (
        ("M · N", rows * out_features * splits),
        ("M · K", rows * x_stride),
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
    return Plan(kernel, rows, out_features, in_features, stride, x_stride, grid, splits)


def plan_sum(plan: Plan, *, limits: Mapping[str, int]) -> Plan:
    """Plan the addition of the parts of K that a plan's kernel has summed apart; K of its Params is their number."""
    return plan_linear(
        plan.rows, plan.out_features, plan.splits, kernel=shipped_kernel("split_sum"), stride=1, limits=limits
    )


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
