"""Grids, strides and limits: arithmetic without a device."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from cases import WEBGPU_LIMITS
from hypothesis import given
from hypothesis import strategies as st

import qcs4w_gpu.plan
from qcs4w_gpu import (
    FAST_KERNELS,
    LINEAR_KERNELS,
    Facts,
    KernelError,
    LimitError,
    Precision,
    PrecisionError,
    choose_kernel,
    parse_kernel,
    plan_linear,
    shipped_kernel,
)
from qcs4w_gpu.plan import BRANCHES, fold_grid, row_stride

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


SOFTWARE = Facts(is_software=True, has_matrices=False, limits=WEBGPU_LIMITS)
GPU = Facts(is_software=False, has_matrices=False, limits=WEBGPU_LIMITS)
TENSOR_CORES = Facts(is_software=False, has_matrices=True, limits=WEBGPU_LIMITS | LARGE)
SHORT_OF_MEMORY = Facts(is_software=False, has_matrices=True, limits=WEBGPU_LIMITS)

#: Device, M, N, K, precision, and the kernel, the parts of K and the branch that are to be chosen.
CHOICES = [
    (SOFTWARE, 1, 5, 1, "f32", "linear_naive", 1, "software short"),
    (SOFTWARE, 11, 5, 1023, "f32", "linear_naive", 1, "software short"),
    (SOFTWARE, 1, 5, 1024, "f32", "linear_gemv", 1, "software few"),
    (SOFTWARE, 11, 5, 28_672, "f32", "linear_gemv", 1, "software few"),
    (SOFTWARE, 12, 5, 1, "f32", "linear_tiled", 1, "software many"),
    (SOFTWARE, 10_000, 5, 65_535, "f32", "linear_tiled", 1, "software many"),
    (SOFTWARE, 10_000, 5, 65_536, "f32", "linear_gemv", 1, "software long"),
    (GPU, 2, 4096, 1023, "f32", "linear_naive", 1, "short"),
    (GPU, 1, 28_672, 8192, "f32", "linear_decode", 1, "decode"),
    (GPU, 2, 5, 1024, "f32", "linear_decode", 1, "decode"),
    (GPU, 3, 28_672, 8192, "f32", "linear_few4", 1, "few4"),
    (GPU, 4, 4096, 4096, "f32", "linear_few4", 4, "few split"),
    (GPU, 5, 28_672, 8192, "f32", "linear_few8", 1, "few8"),
    (GPU, 40, 64, 64, "f32", "linear_few8", 1, "few8"),
    (GPU, 16, 4096, 4096, "f32", "linear_few8", 4, "few split"),
    (GPU, 8, 64, 1 << 20, "f32", "linear_few8", 8, "few split"),
    (GPU, 41, 64, 2047, "f32", "linear_prefill", 1, "prefill"),
    (GPU, 2048, 8192, 8192, "f32", "linear_prefill", 1, "prefill"),
    (GPU, 128, 8192, 8192, "f32", "linear_prefill", 4, "prefill split"),
    (TENSOR_CORES, 1, 28_672, 8192, "f32", "linear_decode", 1, "decode"),
    (TENSOR_CORES, 47, 8192, 8192, "f32", "linear_prefill", 4, "prefill split"),
    (TENSOR_CORES, 48, 8192, 8192, "f32", "linear_matrix", 8, "matrix split"),
    (TENSOR_CORES, 128, 8192, 8192, "f32", "linear_matrix", 4, "matrix split"),
    (TENSOR_CORES, 48, 8192, 63, "f32", "linear_prefill", 1, "prefill"),
    (TENSOR_CORES, 2048, 8192, 8192, "f32", "linear_matrix", 1, "matrix"),
    (TENSOR_CORES, 2048, 8192, 8192, "f16", "linear_matrix", 1, "matrix f16"),
    (TENSOR_CORES, 1, 64, 4096, "f16", "linear_matrix", 4, "matrix f16"),
    (SHORT_OF_MEMORY, 2048, 16_384, 8192, "f32", "linear_prefill", 1, "prefill"),
]


@pytest.mark.parametrize(
    ("facts", "rows", "out_features", "in_features", "precision", "name", "splits", "branch"), CHOICES
)
def test_a_kernel_is_chosen_by_shape_device_and_precision(
    facts: Facts,
    rows: int,
    out_features: int,
    in_features: int,
    precision: Precision,
    name: str,
    splits: int,
    branch: str,
) -> None:
    """Each side of every border goes to the kernel that is meant for it, and the choice says why."""
    choice = choose_kernel(rows, out_features, in_features, facts, precision=precision)
    assert (choice.kernel.name, choice.kernel.constants.get("SPLITS", 1), choice.branch) == (name, splits, branch)
    assert choice.reason
    assert ("in 4 parts" in choice.reason) == (splits == 4)


def test_every_branch_is_exercised() -> None:
    """No rule of the plan goes untested, and no kernel is shipped that no rule chooses."""
    assert {branch for *_, branch in CHOICES} == set(BRANCHES)
    assert {name for *_, name, _, _ in CHOICES} == {*LINEAR_KERNELS, *FAST_KERNELS, "linear_matrix"}


@pytest.mark.parametrize("facts", [SOFTWARE, GPU, replace(SHORT_OF_MEMORY, has_matrices=False)])
def test_a_precision_beyond_the_device_is_refused(facts: Facts) -> None:
    """f16 without subgroup matrices, or without memory for what they read, is an error that says what would do."""
    with pytest.raises(PrecisionError, match="precision f16 needs a device with subgroup matrices") as caught:
        choose_kernel(128, 8192, 8192, facts, precision="f16")
    assert caught.value.hint
    with pytest.raises(PrecisionError):
        choose_kernel(128, 16_384, 8192, SHORT_OF_MEMORY, precision="f16")


def test_a_split_needs_room_for_its_sums() -> None:
    """Parts of K that are summed apart count against the buffer limits, and are named."""
    kernel = shipped_kernel("linear_prefill", SPLITS=8)
    with pytest.raises(LimitError, match=r"sums .M 4096 × N 4096 × 8 parts of K in float32. needs 536,870,912 bytes"):
        plan_linear(4096, 4096, 64, kernel=kernel, stride=32, limits=WEBGPU_LIMITS)


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
