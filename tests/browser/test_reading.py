"""What the page reads out of files is what the command line reads: nibbles, kernels, expressions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import CommandLine
from page_under_test import PackedPage

from qcs4w_gpu import LINEAR_KERNELS, KernelError
from qcs4w_gpu.expressions import evaluate
from qcs4w_gpu.judge import EXACT_WINDOW
from qcs4w_gpu.kernel import parse_kernel
from qcs4w_gpu.plan import fold_grid
from qcs4w_packer import LAYOUTS, pack_weight, save_container

ROOT = Path(__file__).parents[2]
WGSL = sorted([*(ROOT / "gpu/qcs4w_gpu/kernels").glob("*.wgsl"), *(ROOT / "examples").glob("*.wgsl")])
SIZES = ({"M": 1, "N": 1, "K": 1, "K_packed": 16}, {"M": 65, "N": 129, "K": 4097, "K_packed": 2064})


@pytest.fixture(scope="module")
def packed_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two weights, one with an odd K."""
    draw = np.random.default_rng(3)
    path = tmp_path_factory.mktemp("packed") / "packed.safetensors"
    shapes = {"odd": (5, 37), "even": (40, 64), "one": (1, 1)}
    save_container(
        path, {f"{name}.weight": pack_weight(draw.standard_normal(s, np.float32)) for name, s in shapes.items()}
    )
    return path


def go_to(page: PackedPage, row: int, column: int, layout: str) -> None:
    """Show another part of the dump."""
    page.raw.fill("#dump-row", str(row))
    page.raw.fill("#dump-column", str(column))
    page.raw.select_option("#layout", layout)
    page.raw.press("#dump-column", "Enter")
    page.raw.dispatch_event("#dump-row", "change")
    page.raw.wait_for_selector(f"#dump-facts:text('columns {column}–')")
    page.raw.wait_for_selector(f"#dump-facts:text('rows {row}–')")
    page.raw.wait_for_selector(f"#dump-facts:text('read as {layout}:')")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("tensor", "row", "column"), [("odd", 0, 0), ("odd", 2, 21), ("even", 36, 48), ("one", 0, 0)])
def test_the_dump_is_that_of_inspect(
    shared_page: PackedPage, qcs4w: CommandLine, packed_file: Path, layout: str, tensor: str, row: int, column: int
) -> None:
    """k, byte, half, nibble, code, value, scale and file offset are those of `qcs4w inspect`, for every layout."""
    name = f"{tensor}.weight"
    shared_page.open(packed_file, name)
    go_to(shared_page, row, column, layout)
    options = ("--tensor", name, "--rows", f"{row}:{row + 4}", "--cols", f"{column}:{column + 16}")
    document = qcs4w("inspect", packed_file, *options, "--layout", layout, "--json").document
    shown = shared_page.dump()
    assert len(shown) == len(document["dump"]["rows"])
    in_features = next(t["in_features"] for t in document["tensors"])
    for seen, expected in zip(shown, document["dump"]["rows"], strict=True):
        lines = seen["lines"]
        count = len(expected["codes"])
        has_pad = in_features % 2 == 1 and column + count == in_features
        ks = [str(column + i) for i in range(count)]
        assert lines["k"] == ks + ["pad"] * has_pad
        assert lines["byte"] == expected["bytes"]
        assert lines["nibble"][:count] == [f"{n:X}" for n in expected["nibbles"]]
        assert lines["code"] == [str(c) for c in expected["codes"]] + [""] * has_pad
        assert lines["value"] == [f"{v:.4g}" for v in expected["values"]] + [""] * has_pad
        even_half, odd_half = ("high", "low") if LAYOUTS[layout].even_high else ("low", "high")
        assert lines["half"] == [odd_half if (column + i) % 2 else even_half for i in range(count + has_pad)]
        assert seen["title"].startswith(f"row {expected['row']}")
        assert f"scale {expected['scale']:.9g} " in seen["title"]
        assert f"file offset {expected['file_offset']} (0x{expected['file_offset']:x})" in seen["title"]


def test_the_dump_is_walked_through_by_its_buttons(shared_page: PackedPage, packed_file: Path) -> None:
    """Each button moves the dump; where there is nothing more it is off."""
    shared_page.open(packed_file, "even.weight")
    raw = shared_page.raw
    assert raw.is_disabled("#rows-back")
    raw.click("#rows-on")
    raw.click("#columns-on")
    raw.wait_for_selector("#dump-facts:text('rows 4–7 of 40, columns 16–31 of 64')")
    for _ in range(2):
        raw.click("#columns-on")
    raw.wait_for_selector("#dump-facts:text('columns 48–63')")
    assert raw.is_disabled("#columns-on")
    raw.click("#rows-back")
    raw.wait_for_selector("#dump-facts:text('rows 0–3')")
    raw.fill("#dump-row", "-5")
    raw.press("#dump-row", "Enter")
    raw.fill("#dump-row", "1000")
    raw.press("#dump-row", "Enter")
    raw.wait_for_selector("#dump-facts:text('rows 39–39')")


def test_the_page_offers_the_kernels_of_the_project(shared_page: PackedPage) -> None:
    """Its list of kernels is LINEAR_KERNELS, and every one is fetched from where all of qcs4w has it."""
    listed = shared_page.module("kernel", "(module) => module.LINEAR_KERNELS")
    assert tuple(listed) == LINEAR_KERNELS
    for name in listed:
        source = shared_page.module("kernel", "async (m, name) => (await m.shippedKernel(name)).source", name)
        assert source == (ROOT / "gpu/qcs4w_gpu/kernels" / f"{name}.wgsl").read_text()


READ_KERNEL = """(module, [name, source, sizes]) => {
  try {
    const kernel = module.parseKernel(name, source);
    return {
      entry: kernel.entryPoint,
      align: [kernel.rowAlign, kernel.xAlign],
      bindings: [...kernel.bindings],
      constants: [...kernel.constants],
      grid: sizes.map((each) => module.workgroups(kernel, each)),
    };
  } catch (error) {
    return error.name;
  }
}"""


def read_by_page(page: PackedPage, name: str, source: str) -> Any:
    """What the page reads from a kernel's text, or the name of its error."""
    return page.module("kernel", READ_KERNEL, [name, source, SIZES])


@pytest.mark.parametrize("path", WGSL, ids=lambda path: path.stem)
def test_kernels_are_read_as_the_command_line_reads_them(shared_page: PackedPage, path: Path) -> None:
    """Entry point, bindings, constants, alignment and grid come out of the WGSL alike."""
    kernel = parse_kernel(path.stem, path.read_text())
    assert read_by_page(shared_page, path.stem, path.read_text()) == {
        "entry": kernel.entry_point,
        "align": [kernel.row_align, kernel.x_align],
        "bindings": [[index, kind] for index, kind in kernel.bindings.items()],
        "constants": [[name, value] for name, value in kernel.constants.items()],
        "grid": [kernel.workgroups(sizes) for sizes in SIZES],
    }


NAIVE = (ROOT / "gpu/qcs4w_gpu/kernels/linear_naive.wgsl").read_text()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("//! grid =", "// grid ="),
        ("//! grid =", "//! gird ="),
        ("//! row_align = 1", "//! grid = 1"),
        ("//! row_align = 1", "//! row_align = 0"),
        ("//! row_align = 1", "//! x_align = 32"),
        ("//! row_align = 1", "//! x_align = 0"),
        ("ceil(M * N / WORKGROUP)", "ceil(M * N / NOBODY)"),
        ("ceil(M * N / WORKGROUP)", "M - M"),
        ("@compute", ""),
        ("fn main", "fn other() {} @compute @workgroup_size(1) fn main"),
        ("@group(0) @binding(3)", "@group(1) @binding(3)"),
        ("fn code_at", "/* /* nested // */ //! grid = 7 \n */ fn code_at"),
        ("fn code_at", "/* // */ //! row_align = 2\nfn code_at"),
        ("fn code_at", "fn local() { const WORKGROUP = 1u; }\nfn code_at"),
        ("64u", "max(8u, min(64u, 0x40u))"),
    ],
)
def test_odd_kernels_are_read_or_refused_alike(shared_page: PackedPage, old: str, new: str) -> None:
    """What the command line refuses of a kernel the page refuses, and what it reads the page reads alike."""
    assert old in NAIVE
    source = NAIVE.replace(old, new)
    seen = read_by_page(shared_page, "odd", source)
    try:
        kernel = parse_kernel("odd", source)
        expected = [kernel.workgroups(sizes) for sizes in SIZES]
    except KernelError:
        assert seen == "PageError"
    else:
        assert seen["grid"] == expected
        assert seen["align"] == [kernel.row_align, kernel.x_align]


EXPRESSIONS = (
    "M", "M * N / 64", "ceil(M * N / 64)", "ceil(M / 8) * ceil(N / 16)", "ceil(ceil(M / 3) / 2)", "(M + N - 1u) / N",
    "min(M, N, 3)", "max(1, M / N)", "ceil(max(M / 7, N / 9))", "M % 7", "7 - M % 3 * 2", "0x10u + 1i", "M - N * 9",
    "ceil((M - N) / 4)", "(M - N) / 4", "(M - N) % 4", "M / 0", "ceil(M / (N - N))", "", "M +", "(M", "M)", "M N",
    "M ** 2", "M // 2", "abs(M)", "ceil(M, N)", "min()", "M; N", "9" * 40, "M" + " + 1" * 300, "x" * 2000, "ceil",
    "2.5", "__import__('os')", "1e3", "M if N else 1",
)  # fmt: skip


def test_expressions_mean_the_same(shared_page: PackedPage) -> None:
    """The arithmetic of head comments gives the same whole number, or is refused by both."""
    names = {"M": 13, "N": 38}
    by_page = """(module, [texts, names]) => texts.map((text) => {
      try { return module.evaluate(text, new Map(Object.entries(names)), "here"); } catch (error) { return error.name; }
    })"""
    seen = shared_page.module("expression", by_page, [EXPRESSIONS, names])
    for text, found in zip(EXPRESSIONS, seen, strict=True):
        try:
            expected: int | str = evaluate(text, names, "here")
        except KernelError:
            expected = "PageError"
        assert found == expected, text[:60]


def test_grids_fold_alike(shared_page: PackedPage) -> None:
    """Workgroups are folded into two dimensions as the command line folds them."""
    totals = [1, 65535, 65536, 65537, 131071, 4_000_000_000]
    seen = shared_page.module("plan", "(module, totals) => totals.map((t) => module.foldGrid(t, 65535))", totals)
    assert seen == [list(fold_grid(total, 65535)) for total in totals]


def test_the_exact_probe_is_exact_for_any_k(shared_page: PackedPage) -> None:
    """Its input is small non-zero integers, and beyond the window each row covers one window of K."""
    for_k = "(module, k) => Array.from(module.exactInput(k, 2, 5))"
    small = np.array(shared_page.module("judge", for_k, 999)).reshape(2, 999)
    assert sorted(set(small.ravel())) == [-4, -3, -2, -1, 1, 2, 3, 4]
    # Which part of each row is not zero: before the window's end, behind it.
    parts = """(module, [k, window]) => {
      const x = module.exactInput(k, 2, 5);
      const count = (row, first, end) => x.subarray(row * k + first, row * k + end).filter((v) => v !== 0).length;
      return Array.from({ length: x.length / k }, (_, row) => [count(row, 0, window), count(row, window, k)]);
    }"""
    seen = shared_page.module("judge", parts, [EXACT_WINDOW + 3, EXACT_WINDOW])
    assert seen == [[EXACT_WINDOW, 0]] * 2 + [[0, 3]] * 2


@pytest.mark.parametrize(
    ("y", "expected"), [([1, 2], True), ([1, 2.5], False), ([1, None], False), ([1.25, 2], True), ([1.26, 2], False)]
)
def test_the_comparison_demands_the_bound(shared_page: PackedPage, y: list[float | None], expected: bool) -> None:
    """An element beyond its bound fails, and so does NaN."""
    compare = """(module, y) => module.compare(
      { y: Float32Array.from(y, (v) => v ?? NaN), unwritten: 0, guardsIntact: true },
      { y: Float64Array.of(1, 2), bound: Float64Array.of(0.25, 0.25) }, 2).isMatch"""
    assert shared_page.module("judge", compare, y) is expected
