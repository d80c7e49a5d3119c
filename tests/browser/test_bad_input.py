"""Sound files that ask for too much, and names, inputs and kernels that do not fit: told, and nothing hangs."""

import json
import os
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from making import npy_header, raw_safetensors
from page_under_test import PackedPage

from qcs4w_packer import PackedLinear, pack_weight, save_container

WEIGHT = np.random.default_rng(0).standard_normal((6, 9), np.float32)
PATIENCE_S = 30  # SwiftShader and other tests share the machine; what hangs is stopped by Playwright after 60 s


@pytest.fixture
def packed_file(tmp_path: Path) -> Path:
    """A packed file with one tensor, (6, 9)."""
    path = tmp_path / "packed.safetensors"
    save_container(path, {"fc.weight": pack_weight(WEIGHT)})
    return path


def test_a_tensor_beyond_the_limits_is_refused_before_it_is_read(shared_page: PackedPage, tmp_path: Path) -> None:
    """Weights of 3 GB in a sparse file: the nibbles are shown, and running names the limit at once."""
    rows, columns = 3 * 2**20, 2048
    path = tmp_path / "huge.safetensors"
    nbytes = (16, 4 * rows, rows * columns // 2)
    ends = np.cumsum((0, *nbytes)).tolist()
    document = {"source_dtype": "F32", "method": "absmax", "packed_sha256": "0" * 64, "scale_sha256": "0" * 64}
    said = {"version": 1, "nibble_order": "even-high", "offset": 8, "tool": "t", "tensors": {"fc.weight": document}}
    header = {
        "__metadata__": {"qcs4w": json.dumps(said)},
        "fc.weight.qcs4w_shape": {"dtype": "I64", "shape": (2,), "data_offsets": ends[:2]},
        "fc.weight.qcs4w_scale": {"dtype": "F32", "shape": (rows,), "data_offsets": ends[1:3]},
        "fc.weight.qcs4w_packed": {"dtype": "U8", "shape": (rows, columns // 2), "data_offsets": ends[2:]},
    }
    raw_safetensors(path, json.dumps(header).encode(), struct.pack("<2q", rows, columns))
    os.truncate(path, path.stat().st_size - 16 + ends[3])
    start = time.monotonic()
    shared_page.open(path)
    assert "checked when it is run" in shared_page.raw.inner_text("#digest")
    assert shared_page.raw.is_visible(".dump-row")
    assert shared_page.press_run() == "error"
    assert time.monotonic() - start < PATIENCE_S
    needs = "packed weights (N 3,145,728 × 1,024 bytes) needs 3,221,225,472 bytes in one buffer, this browser's "
    assert needs in shared_page.result()


def test_too_many_rows_are_refused(shared_page: PackedPage, tmp_path: Path) -> None:
    """An x or y beyond one buffer is named; the rows are the person's own."""
    path = tmp_path / "packed.safetensors"
    save_container(
        path, {"fc.weight": PackedLinear(np.full((50_000, 1), 0x88, np.uint8), np.ones(50_000, np.float32), 2)}
    )
    shared_page.open(path)
    shared_page.raw.fill("#rows", "65536")
    assert shared_page.press_run() == "error"
    assert "y (M 65,536 × N 50,000 in float32) needs 13,107,200,000 bytes" in shared_page.result()
    shared_page.raw.fill("#rows", "4")


NAMES = (
    "<img src=x onerror=alert(1)>.weight", "<script>alert(1)</script>.weight", "__proto__.weight", "constructor",
    "\u202egnp.exe.weight", "a\nb\tc\x00.weight", "'\"`${alert(1)}.weight", "&lt;b&gt;.weight", "x" * 20_000,
    "toString",
)  # fmt: skip


def test_hostile_names_are_text(shared_page: PackedPage, tmp_path: Path) -> None:
    """HTML, prototype names, direction marks and names of kilobytes are shown as harmless text, and can be run."""
    path = tmp_path / "<img src=x onerror=alert(2)>.safetensors"
    save_container(path, {name: pack_weight(WEIGHT) for name in NAMES})
    shared_page.open(path)
    raw = shared_page.raw
    assert raw.locator("#tensor-list .tensor").count() == len(NAMES)
    assert (
        raw.eval_on_selector("main", "main => main.querySelectorAll('img, script, b, iframe').length") == 1
    )  # our own <b>
    shown = raw.eval_on_selector_all(".tensor .name", "names => names.map(name => name.textContent)")
    assert "<img src=x onerror=alert(1)>.weight" in shown
    assert r"\u{202e}gnp.exe.weight" in shown
    assert r"a\u{a}b\u{9}c\u{0}.weight" in shown
    assert max(map(len, shown)) <= 201
    for index, name in enumerate(NAMES):
        raw.locator("#tensor-list .tensor input").nth(shown.index(spelled(name))).check()
        raw.wait_for_selector("#digest[data-state=pass]")
        if index in (0, 2, 4):
            assert shared_page.run("linear_naive") == "pass"
    assert raw.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert not shared_page.faults


def spelled(name: str) -> str:
    """How the page shows a name."""
    cut = name if len(name) <= 200 else name[:200] + "…"
    return "".join(f"\\u{{{ord(c):x}}}" if c in "\u202e\n\t\x00" else c for c in cut)


BAD_INPUTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not a .npy file"),
    "no npy": (b"hello, world, hello", "is not a .npy file"),
    "truncated": (npy_header("(2, 9)") + bytes(71), "needs 72 bytes of data, the file has 71"),
    "objects": (npy_header("(2, 9)", "'|O'") + bytes(72), "holds dtype |O, expected floats"),
    "integers": (npy_header("(2, 9)", "'<i4'") + bytes(72), "holds dtype <i4, expected floats"),
    "fields": (npy_header("(2, 9)", "[('a', '<f4')]") + bytes(72), "holds something else than one array"),
    "Fortran": (npy_header("(2, 9)", order="True") + bytes(72), "lies in Fortran order"),
    "another K": (npy_header("(2, 8)") + bytes(64), "has shape [2,8], expected [..., 9]"),
    "no rows": (npy_header("(0, 9)"), "which has no rows"),
    "a scalar": (npy_header("()") + bytes(4), "expected [..., 9]"),
    "NaN": (npy_header("(1, 9)") + struct.pack("<9f", *[0] * 8, float("nan")), "holds NaN at row 0, column 8"),
    "beyond float32": (npy_header("(1, 9)", "'<f8'") + struct.pack("<9d", *[1e39] * 9), "Infinity at row 0, column 0"),
    "overflow": (npy_header("(1, 9)") + struct.pack("<9f", *[3e38] * 9), "can overflow float32"),
    "a shape beyond all": (npy_header("(99999999999999999999, 9)") + bytes(72), "bytes of data, the file has 72"),
    "a header bomb": (b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1) + bytes(100), "its header claims"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_an_x_that_does_not_fit_is_refused(
    shared_page: PackedPage, packed_file: Path, tmp_path: Path, case: str
) -> None:
    """The message names file, tensor and fault; nothing is run."""
    data, words = BAD_INPUTS[case]
    x = tmp_path / "x.npy"
    x.write_bytes(data)
    shared_page.open(packed_file)
    shared_page.take_x(x)
    assert shared_page.press_run() == "error"
    assert words in shared_page.result()


def test_a_kernel_that_cannot_be_used_is_refused(shared_page: PackedPage, packed_file: Path, tmp_path: Path) -> None:
    """Kernels that break the contract, or do not compile, are told apart from wrong ones."""
    source = (Path(__file__).parents[2] / "examples" / "my_kernel.wgsl").read_text()
    shared_page.open(packed_file)
    for name, text, words in (
        ("no_grid", source.replace("//! grid", "// grid"), "does not say how many workgroups it needs"),
        (
            "padded",
            source.replace("//! grid", "//! x_align = 32\n//! grid"),
            "wants rows of x a multiple of 32 columns",
        ),
        ("no_scales", source.replace("@group(0) @binding(3)", "@group(0) @binding(7)"), "has the bindings"),
    ):
        (tmp_path / f"{name}.wgsl").write_text(text)
        shared_page.take(tmp_path / f"{name}.wgsl")
        assert words in shared_page.problem()
    broken = tmp_path / "broken.wgsl"
    broken.write_text(source.replace("sum * scales[n]", "sum * nobody[n]"))
    shared_page.take(broken)
    shared_page.raw.wait_for_selector("#kernel:has-text('broken')")
    assert shared_page.press_run() == "error"
    assert "kernel 'broken' does not compile: line " in shared_page.result()
    assert "nobody" in shared_page.result()
