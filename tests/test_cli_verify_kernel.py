"""The verify command on a kernel of the user's: its grid, its constants, the sweep, the watchdog and --watch."""

import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from cases import edited
from command_line import CommandLine, command, process

from qcs4w_packer import pack_weight, save_container

KERNELS = Path(__file__).parent / "kernels"
MINE = Path(__file__).parent.parent / "examples" / "my_kernel.wgsl"
GRID = "//! grid = ceil(M * N / WORKGROUP)\n"

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _adapter(gpu: object) -> None:
    """These tests need an adapter."""


@pytest.fixture
def packed(tmp_path: Path, rng: np.random.Generator) -> Path:
    """A small packed file."""
    path = tmp_path / "w.safetensors"
    save_container(path, {"fc.weight": pack_weight(rng.standard_normal((37, 21), np.float32))})
    return path


def kernel_without_grid(folder: Path) -> Path:
    """Write my_kernel.wgsl without its line for the host."""
    path = folder / "mine.wgsl"
    path.write_text(edited(MINE.read_text(), (GRID, "")))
    return path


@pytest.mark.parametrize(
    "options",
    [
        ["--grid", "ceil(M * N / WORKGROUP)"],
        ["--grid", "ceil(M * N / 64)"],
        ["--grid", "ceil(M * N / WORKGROUP)", "--define", "WORKGROUP=32"],
        ["--grid", "ceil(M * N / WORKGROUP)", "--define", "WORKGROUP=0x20u"],
        ["--grid", "ceil(M * N / 64), 1"],
        ["--grid", "1, ceil(M * N / 64)", "--workgroup", "64"],
    ],
    ids=["constant", "number", "defined", "hexadecimal", "x and y", "y"],
)
def test_a_grid_is_given_on_the_command_line(
    options: list[str], packed: Path, tmp_path: Path, qcs4w: CommandLine
) -> None:
    """A kernel that knows nothing of us runs with its grid, and its override constants, as options."""
    result = qcs4w("verify", packed, "--kernel", kernel_without_grid(tmp_path), *options)
    assert result.code == 0, result


def test_too_small_a_grid_is_told_as_such(packed: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """A grid that leaves out a part is a failure that says what was not written."""
    result = qcs4w("verify", packed, "--kernel", kernel_without_grid(tmp_path), "--grid", "max(1, M * N / 64)")
    assert result.code == 1
    assert "20 elements never written, row 3, columns 17..: too few workgroups" in result.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "does not say how many workgroups"),
        (["--grid", "ceil(M * N / TILE)"], "cannot evaluate 'TILE'"),
        (["--grid", "1, 2, 3"], "cannot evaluate"),
        (["--grid", "1, 70000"], "asks for 1 × 70,000 workgroups, the device takes 65,535 in each dimension"),
        (["--grid", "1", "--define", "TILE=4"], "there are WORKGROUP: u32 = 64u"),
        (["--grid", "1", "--define", "WORKGROUP=4.5"], "'4.5' is no value of WORKGROUP: u32 = 64u"),
        (["--grid", "1", "--define", "WORKGROUP=-1"], "'-1' is no value of WORKGROUP: u32"),
        (["--grid", "1", "--define", "WORKGROUP=many"], "'many' is no value of WORKGROUP"),
        (["--grid", "1", "--define", "WORKGROUP"], "is not NAME=VALUE"),
        (
            ["--grid", "1", "--define", "WORKGROUP=8", "--define", "WORKGROUP=9"],
            "--define says WORKGROUP more than once",
        ),
        (["--grid", "ceil(M / TILE)"], "whole numbers, M, N, K, K_packed, WORKGROUP"),
        (["--grid", "1", "--define", "WORKGROUP=4096"], "max-compute-invocations-per-workgroup"),
        (["--grid", "1", "--workgroup", "N"], "cannot evaluate 'N'"),
        (["--grid", "1", "--workgroup", "0"], "'0' is not one to three numbers from 1"),
        (["--grid", "1", "--workgroup", "8, 0"], "'8, 0' is not one to three numbers from 1"),
        (["--grid", "1", "--workgroup", "8, 4, 2, 1"], "is not one to three numbers from 1"),
        (["--grid", "1", "--workgroup", ""], "'' is not one to three numbers from 1"),
        (["--grid", "1", "--timeout", "nan"], "'nan' is no number of seconds"),
        (["--grid", "1", "--workgroup", "16, 4"], "--workgroup says 16 × 4 × 1, the text says 64 × 1 × 1"),
    ],
)
def test_what_does_not_fit_a_kernel_is_said(
    options: list[str], words: str, packed: Path, tmp_path: Path, qcs4w: CommandLine
) -> None:
    """A wrong grid, constant or workgroup size is one error that lists what there is."""
    result = qcs4w("verify", packed, "--kernel", kernel_without_grid(tmp_path), *options)
    assert result.code == 2
    assert words in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ((GRID, "//! grid = floor(M * N / 64)\n"), "cannot evaluate 'floor(M * N / 64)'"),
        ((GRID, "//! grid = 1, 1, 1\n"), "cannot evaluate '(1, 1)'"),
        (("@binding(3)", "@binding(5)"), "3 (scales) is missing"),
        (("var sum = 0.0;", "var sum = ;"), "does not compile"),
    ],
    ids=["grid", "three of them", "binding", "text"],
)
def test_a_fault_of_the_text_is_said_once(
    edit: tuple[str, str], words: str, tmp_path: Path, rng: np.random.Generator, qcs4w: CommandLine
) -> None:
    """What is wrong with a kernel at any shape is one error, however many tensors there are."""
    path = tmp_path / "w.safetensors"
    save_container(path, {f"{i}.weight": pack_weight(rng.standard_normal((3, 4), np.float32)) for i in range(3)})
    (tmp_path / "mine.wgsl").write_text(edited(MINE.read_text(), edit))
    error = qcs4w.refused("verify", path, "--kernel", tmp_path / "mine.wgsl")
    assert error.count(words) == 1
    if "grid" in edit[0]:
        assert "Hint: there are + - * % / (rounds down), ceil(a / b), min, max, whole numbers, M, N, K, K_pac" in error


@pytest.mark.parametrize("option", [["--grid", "1"], ["--workgroup", "1"], ["--define", "A=1"], ["--watch"]])
@pytest.mark.parametrize("kernel", [[], ["--kernel", "linear_naive"]], ids=["none", "ours"])
def test_options_of_a_kernel_need_one(option: list[str], kernel: list[str], packed: Path, qcs4w: CommandLine) -> None:
    """What tells of a user's kernel is refused without one."""
    assert "needs --kernel with a .wgsl file of yours" in qcs4w.refused("verify", packed, *kernel, *option)


def test_a_constant_without_a_value_is_named(packed: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """An override constant that has no default has to be defined; a const cannot be."""
    path = tmp_path / "mine.wgsl"
    source = edited(MINE.read_text(), ("override WORKGROUP: u32 = 64u;", "@id(7) override WORKGROUP: u32;"))
    path.write_text(source)
    assert "--define WORKGROUP=VALUE sets it" in qcs4w.refused("verify", packed, "--kernel", path)
    path.write_text(source.replace("@workgroup_size(WORKGROUP)", "@workgroup_size(64)"))
    assert "--define WORKGROUP=VALUE sets it" in qcs4w("verify", packed, "--kernel", path, "--grid", "1").err
    assert qcs4w("verify", packed, "--kernel", path, "--define", "WORKGROUP=64").code == 0
    path.write_text(MINE.read_text().replace("override", "const"))
    error = qcs4w("verify", packed, "--kernel", path, "--define", "WORKGROUP=64").err
    assert "'WORKGROUP' is a const, which cannot be set from outside" in error


def test_a_right_kernel_passes_the_sweep(qcs4w: CommandLine) -> None:
    """The sweep needs no file: its weights are made and packed on the way; what passes is counted."""
    result = qcs4w("verify", "--sweep", "--kernel", MINE)
    assert result.code == 0
    assert result.out.strip() == "71 shapes: 71 passed, 0 failed, 0 could not be checked"


@pytest.mark.parametrize(
    ("kernel", "shape", "words"),
    [
        ("missing_tail", "M 1, N 1, K 1", "never written"),
        ("out_of_bounds", "M 1, N 1, K 1", "something was written behind y"),
        ("one_wrong_code", "M 4, N 3, K 8192", "column 0 of every row"),
    ],
)
def test_the_sweep_ends_at_the_first_shape_that_fails(kernel: str, shape: str, words: str, qcs4w: CommandLine) -> None:
    """The smallest shape that fails is named, with what is wrong there."""
    result = qcs4w("verify", "--sweep", "--kernel", KERNELS / f"{kernel}.wgsl")
    assert "quantization error" not in result.out
    assert result.code == 1
    assert result.out.startswith(f"FAIL  {shape}")
    assert words in result.out
    assert "1 failed, 0 could not be checked" in result.out
    document = qcs4w("verify", "--sweep", "--kernel", KERNELS / f"{kernel}.wgsl", "--json").document
    assert document["results"][-1]["tensor"] == shape
    assert [result["status"] for result in document["results"][:-1]] == ["pass"] * (len(document["results"]) - 1)


def test_the_shapes_of_a_sweep_are_dealt_out(qcs4w: CommandLine) -> None:
    """Each shape is in one shard, as each tensor is."""
    parts = [qcs4w("verify", "--sweep", "--shard", f"{i}/3", "--json").document["results"] for i in (1, 2, 3)]
    shapes = [result["tensor"] for part in parts for result in part]
    assert sorted(map(len, parts)) == [23, 24, 24]
    assert len(set(shapes)) == len(shapes)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (("byte < params.K_packed", "byte < params.K / 2u"), "dropped tail: last 1 column (at M 5, N 37, K 67: "),
        (("* scales[n]", "* scales[n / 2u * 2u]"), "none of the known ones fits"),
    ],
    ids=["a tail like swapped nibbles", "a scale like the neighbour's"],
)
def test_why_a_sweep_fails_is_told_at_a_shape_of_some_size(
    edit: tuple[str, str], words: str, tmp_path: Path, qcs4w: CommandLine
) -> None:
    """Of one product, faults look alike: a cause that a larger shape contradicts is not named, one it shows is."""
    path = tmp_path / "mine.wgsl"
    path.write_text(edited(MINE.read_text(), edit))
    result = qcs4w("verify", "--sweep", "--kernel", path)
    assert result.code == 1
    assert f"likely cause: {words}" in result.out
    assert result.out.count("likely cause") == 1


def test_a_sweep_and_files_are_one_answer(packed: Path, qcs4w: CommandLine) -> None:
    """With a file the sweep comes first, and the file after it."""
    result = qcs4w("verify", packed, "--sweep", "--kernel", MINE)
    assert result.code == 0
    assert "71 shapes, 1 tensor: 72 passed" in result.out


ENDLESS = """//! grid = 65535 * 64
@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> weights: array<u32>;
@group(0) @binding(3) var<storage, read> scales: array<f32>;
struct Params { M: u32, N: u32, K: u32, K_packed: u32 }
@group(0) @binding(4) var<uniform> params: Params;
@compute @workgroup_size(64) fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  var sum = 0.0;
  for (var k = 0u; k < 60000u; k += 1u) { sum += x[k % params.K] * scales[0] * f32(weights[0]); }
  y[id.x % (params.M * params.N)] = sum;
}
"""


def test_an_endless_kernel_is_an_error(packed: Path, tmp_path: Path) -> None:
    """A dispatch that does not end is one error after --timeout seconds, in text and as JSON, and no hang."""
    path = tmp_path / "endless.wgsl"
    path.write_text(ENDLESS)
    arguments = ("verify", packed, "--kernel", path, "--timeout", "1.5")
    result = process(*arguments)
    assert result.code == 2
    assert "kernel 'endless' (M 4, N 37, K 21, K_packed 11) has not ended within 1.5 s on " in result.err
    assert "--timeout SECONDS waits longer" in result.err
    assert process(*arguments, "--json").document["results"][0]["error"]["code"] == "timeout"


def endless_at(name: str, value: int) -> str:
    """Return a kernel that is right, but takes days where one of its Params has a value.

    It is the grid that grows: software drivers end a loop after some thousand rounds.
    """
    more = f" + 4000000 * max(0, 1 - max({name} - {value}, {value} - {name}))"
    loop = "for (var k = 0u; k < 60000u; k += 1u) { sum += x[k % params.K] * scales[0]; }"
    return edited(
        MINE.read_text(),
        (GRID, GRID.rstrip() + more + "\n"),
        ("  if (index >= params.M * params.N) { return; }\n", ""),
        (
            "  var sum = 0.0;\n",
            "  var sum = 0.0;\n  if (index >= params.M * params.N) {\n"
            f"    if (params.{name} == {value}u) {{ {loop} y[0] = sum; }}\n    return;\n  }}\n",
        ),
    )


def test_what_was_judged_before_a_timeout_is_kept(tmp_path: Path) -> None:
    """The verdicts before an endless dispatch stand in the document and in every report, and the rest is named."""
    draw = np.random.default_rng(0)
    sizes = {"a": 37, "b": 38, "c": 39}
    weights = {name: pack_weight(draw.standard_normal((size, 21), np.float32)) for name, size in sizes.items()}
    save_container(tmp_path / "p.safetensors", weights)
    (tmp_path / "mine.wgsl").write_text(endless_at("N", 38))
    reports = {kind: tmp_path / f"r.{kind}" for kind in ("junit", "csv", "markdown", "html", "jsonl")}
    options = [part for kind, path in reports.items() for part in (f"--{kind}", path)]
    kernel = ("--kernel", tmp_path / "mine.wgsl", "--timeout", "4")
    done = process("verify", tmp_path / "p.safetensors", *kernel, *options, "--json")
    assert done.code == 2
    seen = [(r["tensor"], r.get("error", {}).get("code", r["status"])) for r in done.document["results"]]
    assert seen == [("a", "pass"), ("b", "timeout"), ("c", "not_reached")]
    assert done.document["summary"] == {"pass": 1, "fail": 0, "error": 2}
    assert done.document["stopped"]
    for path in reports.values():
        text = path.read_text()
        assert "has not ended within 4 s" in text
        assert "not reached: a dispatch before it did not end" in text
    assert len(reports["jsonl"].read_text().splitlines()) == 4


def test_a_sweep_that_does_not_end_names_its_shape(packed: Path, tmp_path: Path) -> None:
    """Shapes before the one that does not end have passed; files after it were not reached."""
    (tmp_path / "mine.wgsl").write_text(endless_at("K", 3))
    options = ("--kernel", tmp_path / "mine.wgsl", "--timeout", "4", "--json")
    results = process("verify", packed, "--sweep", *options).document["results"]
    assert len(results) > 2
    assert [result["status"] for result in results[:-2]] == ["pass"] * (len(results) - 2)
    assert (results[-2]["file"], results[-2]["error"]["code"]) == ("sweep", "timeout")
    assert results[-2]["tensor"].endswith("K 3")
    assert results[-1]["error"]["code"] == "not_reached"


def wait_for(words: str, log: Path, seconds: float = 60) -> str:
    """Wait until a log holds some words; return all of it."""
    deadline = time.monotonic() + seconds
    while words not in (text := log.read_text()):
        assert time.monotonic() < deadline, text
        time.sleep(0.1)
    return text


def test_watch_verifies_again_on_save(packed: Path, tmp_path: Path) -> None:
    """Each save is a new verdict, a text that does not compile is an error that it survives, and Ctrl-C ends it."""
    path, log = tmp_path / "mine.wgsl", tmp_path / "log"
    path.write_text(MINE.read_text())
    with log.open("wb") as stream:
        child = subprocess.Popen(
            command("verify", packed, "--kernel", path, "--watch"),
            stdout=stream,
            stderr=stream,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    try:
        text = wait_for("watching ", log)
        assert "1 passed" in text
        path.write_text(edited(MINE.read_text(), ("pair >> 4u", "pair >> 3u")))
        assert "likely cause" in wait_for("1 failed", log)
        path.write_text("no kernel")
        wait_for("0 @compute entry points", log)
        new = tmp_path / "new"
        new.write_text(MINE.read_text())
        os.replace(new, path)
        deadline = time.monotonic() + 60
        while log.read_text().count("1 passed") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(0.3)
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=30) == 130
    finally:
        child.kill()
        child.wait()
    assert "Traceback" not in log.read_text()


def test_our_kernels_are_swept_too(qcs4w: CommandLine) -> None:
    """Without --kernel the sweep judges what the plan chooses."""
    result = qcs4w("verify", "--sweep", "--json")
    assert result.code == 0
    assert {each["kernel"] for each in result.document["results"]} == {"linear_naive", "linear_gemv", "linear_tiled"}
