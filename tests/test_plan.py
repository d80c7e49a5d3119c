"""Grids, strides and limits: arithmetic without a device."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from cases import WEBGPU_LIMITS
from hypothesis import given
from hypothesis import strategies as st

import qcs4w_gpu.plan
from qcs4w_gpu import LINEAR_KERNELS, KernelError, LimitError, choose_kernel, parse_kernel, plan_linear, shipped_kernel
from qcs4w_gpu.plan import fold_grid, row_stride

NAIVE = shipped_kernel("linear_naive")
TILED = shipped_kernel("linear_tiled")
LARGE = {"max-storage-buffer-binding-size": 1 << 40, "max-buffer-size": 1 << 40}


@pytest.mark.parametrize(
    ("workgroups", "limit", "grid"),
    [
        (1, 65_535, (1, 1)),
        (65_535, 65_535, (65_535, 1)),
        (65_536, 65_535, (32_768, 2)),
        (65_537, 65_535, (32_769, 2)),
        (131_071, 65_535, (43_691, 3)),
        (65_535 * 65_535, 65_535, (65_535, 65_535)),
        (7, 3, (3, 3)),
        (9, 3, (3, 3)),
        (1, 1, (1, 1)),
    ],
)
def test_grids_are_folded(workgroups: int, limit: int, grid: tuple[int, int]) -> None:
    """A line of workgroups beyond the limit is folded into two dimensions."""
    assert fold_grid(workgroups, limit) == grid


@given(st.integers(1, 1 << 34), st.integers(1, 1 << 17))
def test_folded_grids_cover_and_waste_little(workgroups: int, limit: int) -> None:
    """Whatever the numbers, all workgroups are there, each dimension is within the limit, and less than y are idle."""
    if workgroups > limit * limit:
        with pytest.raises(LimitError):
            fold_grid(workgroups, limit)
        return
    x, y = fold_grid(workgroups, limit)
    assert 1 <= x <= limit
    assert 1 <= y <= limit
    assert 0 <= x * y - workgroups < y


def test_too_many_workgroups_are_refused() -> None:
    """What does not fit into two dimensions is an error with the numbers."""
    with pytest.raises(LimitError, match="4,294,836,226 workgroups exceed 65,535 × 65,535"):
        fold_grid(65_535 * 65_535 + 1, 65_535)


def test_a_plan_folds() -> None:
    """A shape that needs 65,536 workgroups gets two dimensions."""
    limits = WEBGPU_LIMITS | LARGE
    plan = plan_linear(256, 16_384, 2, kernel=NAIVE, stride=1, limits=limits)
    assert plan.grid == (32_768, 2)
    assert plan.sizes == {"M": 256, "N": 16_384, "K": 2, "K_packed": 1}
    assert list(plan.sizes) == ["M", "N", "K", "K_packed"]


@pytest.mark.parametrize(
    ("rows", "out_features", "in_features", "what"),
    [
        (1, 128_256, 4096, "packed weights .N 128256 × 2048 bytes. needs 262,668,288 bytes"),
        (8193, 16, 4096, "x .M 8193 × K 4096 in float32. needs 134,234,112 bytes"),
        (8193, 4096, 16, "y .M 8193 × N 4096 in float32. needs 134,234,112 bytes"),
    ],
    ids=["weights", "x", "y"],
)
def test_buffers_beyond_the_binding_limit_are_refused(
    rows: int, out_features: int, in_features: int, what: str
) -> None:
    """A buffer larger than one binding may be is refused with its size, the limit's name and the limit."""
    stride = row_stride(in_features)
    with pytest.raises(LimitError, match=f"{what}.*max-storage-buffer-binding-size is 134,217,728") as caught:
        plan_linear(rows, out_features, in_features, kernel=NAIVE, stride=stride, limits=WEBGPU_LIMITS)
    assert caught.value.hint


def test_buffers_beyond_the_buffer_limit_are_refused() -> None:
    """The size of a buffer is a limit of its own."""
    limits = WEBGPU_LIMITS | {"max-storage-buffer-binding-size": 1 << 40}
    with pytest.raises(LimitError, match="max-buffer-size is 268,435,456"):
        plan_linear(1, 1 << 20, 600, kernel=NAIVE, stride=300, limits=limits)


@pytest.mark.parametrize(
    ("rows", "out_features", "in_features"), [(1, 128_256, 2048), (8192, 16, 4096), (8192, 4096, 1)]
)
def test_buffers_just_within_the_limits_are_planned(rows: int, out_features: int, in_features: int) -> None:
    """What fits a 128 MiB binding is planned, up to its last byte."""
    stride = row_stride(in_features)
    plan = plan_linear(rows, out_features, in_features, kernel=TILED, stride=stride, limits=WEBGPU_LIMITS)
    assert max(plan.grid) <= 65_535


@pytest.mark.parametrize(
    ("shape", "what"),
    [((1 << 16, 1 << 16, 8), "M · N"), ((1 << 16, 8, 1 << 16), "M · K"), ((1, 1 << 20, 1 << 13), "N · K_packed")],
    ids=["y", "x", "weights"],
)
def test_indices_beyond_32_bits_are_refused(shape: tuple[int, int, int], what: str) -> None:
    """Sizes that a kernel cannot count in u32 are refused even where buffers may be as large."""
    with pytest.raises(LimitError, match=f"{what} is 4,294,967,296"):
        plan_linear(*shape, kernel=NAIVE, stride=row_stride(shape[2]), limits=WEBGPU_LIMITS | LARGE)


def test_a_kernel_with_too_few_workgroups_is_refused() -> None:
    """A grid expression that comes to nothing is an error, not an empty dispatch."""
    kernel = replace(NAIVE, name="mine", grid="M - 1")
    with pytest.raises(KernelError, match="kernel 'mine': grid: 'M - 1' is 0"):
        plan_linear(1, 8, 8, kernel=kernel, stride=4, limits=WEBGPU_LIMITS)


@pytest.mark.parametrize(
    ("rows", "in_features", "name"),
    [
        (1, 1, "linear_naive"),
        (11, 1023, "linear_naive"),
        (1, 1024, "linear_gemv"),
        (11, 28_672, "linear_gemv"),
        (12, 1, "linear_tiled"),
        (10_000, 65_535, "linear_tiled"),
        (10_000, 65_536, "linear_gemv"),
    ],
)
def test_a_kernel_is_chosen_by_rows_and_columns(rows: int, in_features: int, name: str) -> None:
    """Few short rows go to the naive kernel, few long or very long ones to the GEMV, many to the tiles."""
    assert choose_kernel(rows, in_features).name == name


def test_every_kernel_is_chosen_for_something() -> None:
    """No kernel is shipped that nothing runs."""
    assert {choose_kernel(m, k).name for m in (1, 64) for k in (64, 4096)} == set(LINEAR_KERNELS)


@given(st.integers(1, 100_000), st.integers(1, 512))
def test_strides_hold_a_row(in_features: int, align: int) -> None:
    """A stride is the smallest multiple of row_align that holds ceil(K / 2) bytes."""
    kernel = parse_kernel("mine", NAIVE.source.replace("//! row_align = 1", f"//! row_align = {align}"))
    stride = row_stride(in_features, kernel)
    assert stride % align == 0
    assert 0 <= stride - -(-in_features // 2) < align


def test_planning_needs_no_device() -> None:
    """The plan and the kernel import neither wgpu nor what talks to it."""
    assert qcs4w_gpu.plan.__file__
    folder = Path(qcs4w_gpu.plan.__file__).parent
    for name in ("plan.py", "kernel.py", "judge.py", "causes.py"):
        tree = ast.parse((folder / name).read_text("utf-8"))
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert not modules & {"wgpu", "webgpu", "dispatcher", "device", "linear"}, name
