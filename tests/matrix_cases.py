"""What the execution matrix runs: one list of dispatches, the same for every engine, driver and browser."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from cases import KERNELS, ROWS, WEBGPU_LIMITS, exact_case, shapes
from numpy.typing import NDArray

from qcs4w_gpu import Kernel, plan_linear, read_kernel, shipped_kernel
from qcs4w_gpu.judge import reference
from qcs4w_gpu.linear import POISON, _pad_rows, pad_columns
from qcs4w_gpu.plan import Plan, row_stride
from qcs4w_packer import PackedLinear
from qcs4w_packer.rowpack import pack_weight

GUARD_WORDS = 64
EXAMPLE = Path(__file__).parent.parent / "examples" / "my_kernel.wgsl"

# Software drivers need a minute for one kernel's whole table: of the many rows only every eleventh shape is taken.
FEW_ROWS = 5
EVERY = 11
LONG_ROW = (2, 3, 65_537)  # beyond the turns after which llvmpipe leaves a loop
BOUNDED_SHAPES = ((1, 33, 1031), (2, 129, 257), (4, 71, 515), (17, 65, 129))


@dataclass(frozen=True, eq=False)
class Case:
    """One dispatch, and what its output must be.

    Attributes:
        label: kernel and shape, for people.
        kind: "exact": equal to `wanted`; "bounded": within `bound` of it; "probe": of how sums are rounded.
        buffers: 32-bit words by binding; binding 0 is the output, poisoned, with guard words behind it.
        wanted: of the output without its guards, flat.
        bound: of the error, for a device that rounds to nearest.
    """

    label: str
    kind: Literal["exact", "bounded", "probe"]
    kernel: Kernel
    sizes: dict[str, int]
    grid: tuple[int, int]
    buffers: dict[int, NDArray[np.uint32]]
    wanted: NDArray[np.float64]
    bound: NDArray[np.float64] | None = None


@cache
def matrix_cases() -> tuple[Case, ...]:
    """Return every case, in an order that does not change."""
    return (_probe(), *(case for kernel in _kernels() for case in _linear(kernel)), *_bias())


def _kernels() -> list[Kernel]:
    return [*(shipped_kernel(name) for name in KERNELS), read_kernel(EXAMPLE)]


def _linear(kernel: Kernel) -> Iterator[Case]:
    for rows in ROWS:
        for shape in list(shapes())[:: 1 if rows <= FEW_ROWS else EVERY]:
            yield _exact(kernel, rows, *shape)
    yield _exact(kernel, *LONG_ROW)
    for rows, out_features, in_features in BOUNDED_SHAPES:
        draw = np.random.default_rng((rows, out_features, in_features))
        packed = pack_weight(draw.standard_normal((out_features, in_features), np.float32))
        x = draw.standard_normal((rows, in_features)) * np.exp2(draw.integers(-20, 20, (rows, in_features)))
        x = x.astype(np.float32)
        judged = reference(packed, x, rounding_factor=1)
        yield _case(kernel, "bounded", packed, x, judged.y, judged.bound)


def _exact(kernel: Kernel, rows: int, out_features: int, in_features: int) -> Case:
    packed, x, y = exact_case(rows, out_features, in_features)
    return _case(kernel, "exact", packed, x, y.astype(np.float64))


def _case(
    kernel: Kernel,
    kind: Literal["exact", "bounded"],
    packed: PackedLinear,
    x: NDArray[np.float32],
    wanted: NDArray[np.float64],
    bound: NDArray[np.float64] | None = None,
) -> Case:
    stride = row_stride(packed.in_features, kernel)
    plan = plan_linear(
        len(x), packed.out_features, packed.in_features, kernel=kernel, stride=stride, limits=WEBGPU_LIMITS
    )
    buffers = {
        1: words(pad_columns(x, plan.x_stride)),
        2: words(_pad_rows(packed.packed, stride)),
        3: words(packed.scales),
    }
    return _planned(plan, kind, buffers, wanted, bound)


def _bias() -> Iterator[Case]:
    kernel = shipped_kernel("bias_add")
    for rows, out_features in ((1, 1), (5, 101), (65, 129)):
        plan = plan_linear(rows, out_features, 1, kernel=kernel, stride=1, limits=WEBGPU_LIMITS)
        y = np.arange(rows * out_features, dtype=np.float32).reshape(rows, out_features)
        bias = np.arange(out_features, dtype=np.float32) * 0.25
        case = _planned(plan, "exact", {1: words(bias)}, (y + bias).astype(np.float64))
        case.buffers[0][: y.size] = words(y)
        yield case


def _planned(
    plan: Plan,
    kind: Literal["exact", "bounded"],
    buffers: dict[int, NDArray[np.uint32]],
    wanted: NDArray[np.float64],
    bound: NDArray[np.float64] | None = None,
) -> Case:
    sizes = " ".join(f"{name} {value}" for name, value in plan.sizes.items())
    out = np.full(wanted.size + GUARD_WORDS, POISON)
    return Case(
        label=f"{plan.kernel.name} {sizes}",
        kind=kind,
        kernel=plan.kernel,
        sizes=plan.sizes,
        grid=plan.grid,
        buffers={0: out, **buffers},
        wanted=wanted.ravel(),
        bound=None if bound is None else bound.ravel(),
    )


def _probe() -> Case:
    """Return sums and products of floats as they are when rounded to nearest, which WGSL does not demand."""
    kernel, count = shipped_kernel("probe_rounding"), 1024
    draw = np.random.default_rng(0)
    a, b = draw.standard_normal(count, np.float32), draw.standard_normal(count, np.float32) * np.float32(0.001)
    sizes = {"M": count, "N": 1, "K": 1, "K_packed": 1}
    buffers = {0: np.full(2 * count + GUARD_WORDS, POISON), 1: words(a), 2: words(b)}
    wanted = np.concatenate([a + b, a * b]).astype(np.float64)
    return Case(kernel.name, "probe", kernel, sizes, (kernel.workgroups(sizes), 1), buffers, wanted)


def words(array: NDArray[np.generic]) -> NDArray[np.uint32]:
    """Return an array's bytes as 32-bit words, padded with zeros."""
    data = np.ascontiguousarray(array).tobytes()
    return np.frombuffer(data + bytes(-len(data) % 4), np.uint32).copy()
