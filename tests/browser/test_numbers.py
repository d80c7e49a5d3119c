"""The page's numbers are the command line's: the same bytes, the same kernels, another driver and another judge."""

from pathlib import Path

import numpy as np
import pytest
from cases import edited, exact_case
from command_line import CommandLine
from numpy.typing import NDArray
from page_under_test import PackedPage

from qcs4w_gpu import LINEAR_KERNELS
from qcs4w_gpu.judge import reference
from qcs4w_packer import PackedLinear, load_packed, pack_weight, save_container

SHAPES = ((1, 1), (5, 3), (65, 129), (64, 128), (7, 2047), (384, 1536))
IDS = [f"{n}x{k}" for n, k in SHAPES]

pytestmark = pytest.mark.gpu


def x_file(folder: Path, rows: int, in_features: int) -> tuple[Path, NDArray[np.float32]]:
    """Write seeded random rows; return the file and what is in it."""
    x = np.random.default_rng((rows, in_features)).standard_normal((rows, in_features), np.float32)
    np.save(folder / "x.npy", x)
    return folder / "x.npy", x


def run_by_command(qcs4w: CommandLine, packed: Path, x: Path) -> NDArray[np.float32]:
    """Run a file's only tensor on the command line's own driver."""
    output = packed.parent / "y.npy"
    result = qcs4w("run", packed, "-x", x, "-o", output, "--force")
    assert result.code == 0, result
    y: NDArray[np.float32] = np.load(output)
    return y


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES, ids=IDS)
def test_every_kernel_agrees_with_the_command_line_within_the_bound(
    shared_page: PackedPage, qcs4w: CommandLine, tmp_path: Path, out_features: int, in_features: int
) -> None:
    """Y of each kernel lies within the judge's bound, and no further from the command line's y than both bounds."""
    weight = np.random.default_rng((out_features, in_features)).standard_normal((out_features, in_features), np.float32)
    packed_file = tmp_path / "packed.safetensors"
    save_container(packed_file, {"fc.weight": pack_weight(weight)})
    x_path, x = x_file(tmp_path, 3, in_features)
    wanted = reference(load_packed(packed_file), x)
    y_command = run_by_command(qcs4w, packed_file, x_path)
    assert qcs4w("verify", packed_file, "-x", x_path).code == 0
    shared_page.open(packed_file)
    shared_page.take_x(x_path)
    for kernel in LINEAR_KERNELS:
        assert shared_page.run(kernel) == "pass", shared_page.result()
        y = shared_page.download("y")
        assert y.shape == (3, out_features)
        assert y.dtype == np.float32
        assert (np.abs(y - wanted.y) <= wanted.bound).all()
        assert (np.abs(y.astype(np.float64) - y_command) <= 2 * wanted.bound).all()
        np.testing.assert_array_equal(shared_page.download("x"), x)
        for place, (shown, expected, error, bound) in shared_page.first_numbers().items():
            assert np.float32(shown) == y[place]
            assert expected == pytest.approx(wanted.y[place], rel=1e-12, abs=1e-300)
            assert error == pytest.approx(abs(y[place] - wanted.y[place]), rel=0.01, abs=1e-14)
            assert bound == pytest.approx(wanted.bound[place], rel=0.01)


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES, ids=IDS)
def test_exact_cases_are_equal_to_the_command_line_bit_by_bit(
    shared_page: PackedPage, qcs4w: CommandLine, tmp_path: Path, out_features: int, in_features: int
) -> None:
    """Small integers and scales of powers of two leave nothing to round: every kernel gives the one right y."""
    packed, x, y_exact = exact_case(17, out_features, in_features)
    packed_file, x_path = tmp_path / "packed.safetensors", tmp_path / "x.npy"
    save_container(packed_file, {"fc.weight": packed})
    np.save(x_path, x)
    np.testing.assert_array_equal(run_by_command(qcs4w, packed_file, x_path), y_exact)
    shared_page.open(packed_file)
    shared_page.take_x(x_path)
    for kernel in LINEAR_KERNELS:
        assert shared_page.run(kernel) == "pass", shared_page.result()
        np.testing.assert_array_equal(shared_page.download("y"), y_exact)


def test_x_of_the_page_gives_the_same_on_the_command_line(
    shared_page: PackedPage, qcs4w: CommandLine, tmp_path: Path
) -> None:
    """Random x is downloaded, run by the command line, and within both bounds; the same seed is the same x."""
    packed_file = tmp_path / "packed.safetensors"
    weight = np.random.default_rng(1).standard_normal((33, 77), np.float32)
    save_container(packed_file, {"fc.weight": pack_weight(weight)})
    shared_page.open(packed_file)
    shared_page.raw.fill("#rows", "5")
    shared_page.raw.fill("#seed", "7")
    assert shared_page.run() == "pass"
    x, y = shared_page.download("x"), shared_page.download("y")
    assert x.shape == (5, 77)
    assert abs(x.mean()) < 0.2
    assert 0.8 < x.std() < 1.2
    np.save(tmp_path / "x.npy", x)
    wanted = reference(load_packed(packed_file), x)
    y_command = run_by_command(qcs4w, packed_file, tmp_path / "x.npy")
    assert (np.abs(y.astype(np.float64) - y_command) <= 2 * wanted.bound).all()
    assert shared_page.run("linear_naive") == "pass"
    np.testing.assert_array_equal(shared_page.download("x"), x)
    shared_page.raw.fill("#seed", "8")
    assert shared_page.run("linear_naive") == "pass"
    assert (shared_page.download("x") != x).mean() > 0.99


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_x_may_be_of_any_rank_and_float_dtype(shared_page: PackedPage, tmp_path: Path, dtype: str) -> None:
    """An x of shape [2, 3, K] gives y of shape [2, 3, N], whatever floats it is stored as."""
    packed_file, x_path = tmp_path / "packed.safetensors", tmp_path / "x.npy"
    save_container(packed_file, {"fc.weight": pack_weight(np.eye(6, 9, dtype=np.float32))})
    x = np.random.default_rng(0).standard_normal((2, 3, 9)).astype(dtype)
    np.save(x_path, x)
    shared_page.open(packed_file)
    shared_page.take_x(x_path)
    assert shared_page.run() == "pass", shared_page.result()
    assert shared_page.download("y").shape == (2, 3, 6)
    np.testing.assert_array_equal(shared_page.download("x"), x.astype(np.float32))


def test_x_may_be_a_safetensors_file(shared_page: PackedPage, tmp_path: Path) -> None:
    """The input is found in a safetensors file by the weight's or the module's name, bfloat16 included."""
    import torch
    from safetensors.torch import save_file

    packed_file, x_path = tmp_path / "packed.safetensors", tmp_path / "x.safetensors"
    save_container(packed_file, {"a.fc.weight": pack_weight(np.eye(6, 9, dtype=np.float32))})
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)).bfloat16()
    save_file({"a.fc": x, "other": torch.zeros(2)}, x_path)
    shared_page.open(packed_file)
    shared_page.take_x(x_path)
    assert shared_page.run() == "pass", shared_page.result()
    np.testing.assert_array_equal(shared_page.download("x"), x.float().numpy())


def test_one_wrong_code_is_seen(shared_page: PackedPage, tmp_path: Path) -> None:
    """A kernel that reads a single code wrong fails by the integers alone, and its worst element is named."""
    draw = np.random.default_rng(0)
    packed_file = tmp_path / "packed.safetensors"
    save_container(packed_file, {"fc.weight": pack_weight(draw.standard_normal((3, 8193), np.float32))})
    shared_page.open(packed_file)
    shared_page.take(Path(__file__).parents[1] / "kernels" / "one_wrong_code.wgsl")
    shared_page.raw.wait_for_selector("#kernel:has-text('one_wrong_code')")
    assert shared_page.press_run() == "fail"
    result = shared_page.result()
    assert "integers: 4 of 12 elements wrong; worst y[" in result
    assert ", 0] = " in result
    assert "✗ Failed" in result
    assert "not timed" in result


def test_a_kernel_of_the_persons_own_is_judged(shared_page: PackedPage, tmp_path: Path) -> None:
    """A .wgsl file passes when it is right and fails both probes when it reads the high nibbles as low ones."""
    source = (Path(__file__).parents[2] / "examples" / "my_kernel.wgsl").read_text()
    right, wrong = tmp_path / "right.wgsl", tmp_path / "wrong.wgsl"
    right.write_text(source)
    wrong.write_text(edited(source, ("i32(pair >> 4u) - 8", "i32(pair & 0xFu) - 8")))
    packed_file = tmp_path / "packed.safetensors"
    save_container(
        packed_file, {"fc.weight": pack_weight(np.random.default_rng(0).standard_normal((9, 31), np.float32))}
    )
    shared_page.open(packed_file)
    for kernel, verdict in ((right, "pass"), (wrong, "fail")):
        shared_page.take(kernel)
        shared_page.raw.wait_for_selector(f"#kernel:has-text('{kernel.stem}')")
        assert shared_page.press_run() == verdict, shared_page.result()
    assert "real numbers: " in shared_page.result()


def test_a_kernel_that_writes_too_little_or_too_much_fails(shared_page: PackedPage, tmp_path: Path) -> None:
    """Elements that were never written are told from wrong ones."""
    source = (Path(__file__).parents[2] / "gpu/qcs4w_gpu/kernels/linear_naive.wgsl").read_text()
    kernel = tmp_path / "short.wgsl"
    kernel.write_text(edited(source, ("if (index >= params.M * params.N)", "if (index + 1u >= params.M * params.N)")))
    packed_file = tmp_path / "packed.safetensors"
    save_container(packed_file, {"fc.weight": PackedLinear(np.full((5, 4), 0x9A, np.uint8), np.ones(5, np.float32), 8)})
    shared_page.open(packed_file)
    shared_page.take(kernel)
    shared_page.raw.wait_for_selector("#kernel:has-text('short')")
    assert shared_page.press_run() == "fail"
    assert "1 element never written" in shared_page.result()
