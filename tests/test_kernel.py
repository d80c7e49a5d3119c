"""What the host reads from a kernel's text."""

import ast
import os
import re
import time
from pathlib import Path

import pytest
from cases import KERNELS, edited

import qcs4w_gpu
from qcs4w_gpu import TINT_KERNELS, KernelError, parse_kernel, read_kernel, shipped_kernel
from qcs4w_gpu.kernel import check_linear

SHIPPED = (*KERNELS, *TINT_KERNELS, "bias_add", "probe_rounding", "split_sum", "bench_copy", "bench_fma")

SMALL = """//! grid = ceil(M * N / WORKGROUP)
@group(0) @binding(0) var<storage, read_write> y: array<f32>;
const WORKGROUP: u32 = 64u;
@compute @workgroup_size(WORKGROUP) fn main() {}
"""

# The reserved words of WGSL: naga takes some of them as names, Tint takes none.
RESERVED = re.findall(
    r"\w+",
    """
NULL Self abstract active alignas alignof as asm asm_fragment async attribute auto await become cast catch class
co_await co_return co_yield coherent column_major common compile compile_fragment concept const_cast consteval
constexpr constinit crate debugger decltype delete demote demote_to_helper do dynamic_cast enum explicit export
extends extern external fallthrough filter final finally friend from fxgroup get goto groupshared highp impl
implements import inline instanceof interface layout lowp macro macro_rules match mediump meta mod module move mut
mutable namespace new nil noexcept noinline nointerpolation non_coherent noncoherent noperspective null nullptr of
operator package packoffset partial pass patch pixelfragment precise precision premerge priv protected pub public
readonly ref regardless register reinterpret_cast require resource restrict self set shared sizeof smooth snorm
static static_assert static_cast std subroutine super target template this thread_local throw trait try type typedef
typeid typename typeof union unless unorm unsafe unsized use using varying virtual volatile wgsl where with writeonly
yield""",
)


def test_a_kernel_is_read() -> None:
    """Name, entry point, sizes, bindings, constants and grid come from the text."""
    kernel = parse_kernel("small", SMALL)
    assert (kernel.name, kernel.entry_point, kernel.workgroup_size) == ("small", "main", (64, 1, 1))
    assert kernel.bindings == {0: "storage"}
    assert kernel.constants == {"WORKGROUP": 64}
    assert kernel.row_align == 1
    assert kernel.workgroup_nbytes == 0
    assert kernel.workgroups({"M": 13, "N": 5, "K": 1, "K_packed": 1}) == 2


@pytest.mark.parametrize(
    "hidden",
    [
        "// @group(0) @binding(1) var<storage, read> z: array<f32>;",
        "/* @group(0) @binding(1) var<storage, read> z: array<f32>; */",
        "/* /* nested */ @group(0) @binding(1) var<storage, read> z: array<f32>; */",
        "/* // */ /* @compute @workgroup_size(1) fn other() {} */",
        "// /* not a block\n",
        "// @compute @workgroup_size(1) fn other() {}",
        "/*\n//! grid = 7\n*/",
        "/* const WORKGROUP: u32 = 7u; */",
        "// // ! grid = 7",
    ],
)
def test_comments_hide_what_is_in_them(hidden: str) -> None:
    """Nothing inside of a comment counts, nested block comments included."""
    kernel, plain = parse_kernel("k", SMALL + hidden), parse_kernel("k", SMALL)
    assert (kernel.bindings, kernel.constants, kernel.grid) == (plain.bindings, plain.constants, plain.grid)
    before = parse_kernel("k", hidden + "\n" + SMALL)
    assert (before.bindings, before.constants, before.grid) == (plain.bindings, plain.constants, plain.grid)


@pytest.mark.parametrize("newline", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_line_endings_do_not_matter(newline: str) -> None:
    """A file with Windows line endings says the same."""
    kernel = parse_kernel("k", SMALL.replace("\n", newline))
    assert kernel.grid == "ceil(M * N / WORKGROUP)"
    assert kernel.workgroup_size == (64, 1, 1)


@pytest.mark.parametrize(
    ("declaration", "expected"),
    [
        ("@group(0) @binding(3) var<storage, read> v: array<f32>;", {3: "read-only-storage"}),
        ("@binding(3) @group(0) var<storage> v: array<f32>;", {3: "read-only-storage"}),
        ("@group(0u)@binding(3u)var<storage,read_write>v: array<f32>;", {3: "storage"}),
        ("@group( 0 )\n@binding( WORKGROUP / 16u )\nvar <uniform> v: vec4<u32>;", {4: "uniform"}),
        ("var<workgroup> v: array<f32, 3>;", {}),
        ("var<private> v: f32;", {}),
    ],
)
def test_bindings_are_read(declaration: str, expected: dict[int, str]) -> None:
    """Bindings are read in either order of their attributes, with suffixes and constants."""
    assert parse_kernel("k", SMALL + declaration).bindings == {0: "storage"} | expected


def test_another_group_is_refused() -> None:
    """The host serves group 0 only, and says so."""
    with pytest.raises(KernelError, match="a binding in group 1"):
        parse_kernel("k", SMALL + "@group(1) @binding(0) var<storage, read> v: array<f32>;")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("const A: u32 = 3u; const B = A * 2;", {"A": 3, "B": 6}),
        ("override A: u32 = 0x10u;", {"A": 16}),
        ("@id(1) override A = 5;", {"A": 5}),
        ("override A: u32;", {}),
        ("const A: f32 = 1.5; const B: i32 = -1; const C = vec2(1, 2);", {}),
        ("const A = 7u / 2u * 2u;", {"A": 6}),
        ("const A = max(3, min(4u, 5i));", {"A": 4}),
        ("const A = 2; fn f() { const A = 9; { const WORKGROUP = 1; } }", {"A": 2}),
        ("const A = 99999999999 * 99999999999 * 99999999999 * 99999999999;", {}),
        ("const A = 1 << 3;", {}),
    ],
)
def test_constants_are_read(text: str, expected: dict[str, int]) -> None:
    """Whole-number constants of the module are known with WGSL's arithmetic; others are left alone."""
    assert parse_kernel("k", SMALL + text).constants == {"WORKGROUP": 64} | expected


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ("@compute @workgroup_size(8, 4)", (8, 4, 1)),
        ("@workgroup_size(8, 4, 2) @compute", (8, 4, 2)),
        ("@compute\n@workgroup_size(WORKGROUP,)", (64, 1, 1)),
        ("@compute @workgroup_size(max(WORKGROUP, 2u), WORKGROUP / (8u * 2u))", (64, 4, 1)),
        ("@compute @diagnostic(off, derivative_uniformity) @workgroup_size(SIZE)", (16, 1, 1)),
    ],
)
def test_workgroup_size_is_read(attributes: str, expected: tuple[int, int, int]) -> None:
    """The workgroup size may be an expression of constants and overrides, on either side of @compute."""
    source = edited(SMALL, ("@compute @workgroup_size(WORKGROUP)", attributes)) + "override SIZE: u32 = 16u;"
    assert parse_kernel("k", source).workgroup_size == expected


@pytest.mark.parametrize(
    ("declarations", "nbytes"),
    [
        ("var<workgroup> a: array<f32, WORKGROUP * 2u>;", 512),
        ("var<workgroup> a: array<vec4<f32>, 8>; var<workgroup> b: u32;", 132),
        ("var<workgroup> a: array<array<vec2<f16>, 4>, WORKGROUP>;", 1024),
        ("var<workgroup> a: array<vec3f, 2>; var<workgroup> b: array<atomic<u32>, 3>;", 44),
        ("struct S { a: f32 } var<workgroup> a: S;", 0),
    ],
)
def test_workgroup_memory_is_counted(declarations: str, nbytes: int) -> None:
    """The bytes of workgroup memory are known for numbers, vectors and arrays."""
    assert parse_kernel("k", SMALL + declarations).workgroup_nbytes == nbytes


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "0 @compute entry points"),
        (SMALL + "@compute @workgroup_size(1) fn other() {}", "2 @compute entry points"),
        (edited(SMALL, ("//! grid", "// grid")), "does not say how many workgroups"),
        (edited(SMALL, ("//! grid", "//! gird")), "'//! gird = .*' is not understood"),
        (SMALL + "//! row_align: 4", "'//! row_align: 4' is not understood"),
        (SMALL + "//! grid = 1", "says '//! grid' twice"),
        (SMALL + "//! row_align = 0", "row_align: '0' is 0, expected at least 1"),
        (SMALL + "//! row_align = 1 - 5", "is -4, expected at least 1"),
        (SMALL + "//! row_align = M", "cannot evaluate 'M'"),
        (edited(SMALL, ("(WORKGROUP)", "(SOMETHING)")), "workgroup_size: cannot evaluate 'SOMETHING'"),
    ],
)
def test_faulty_kernels_are_refused(source: str, message: str) -> None:
    """A text that the host cannot serve is an error that says which part is not understood."""
    with pytest.raises(KernelError, match=message) as caught:
        parse_kernel("faulty", source)
    assert "kernel 'faulty'" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "}" * 20_000 + "{" * 20_000 + "}" * 20_000,
        "{)" * 20_000 + "}" * 20_000,
        "(" * 101,
        "{" * 200_000 + "}" * 200_000,
    ],
    ids=["stray ones first", "of two kinds", "not closed", "nested"],
)
def test_brackets_do_not_keep_the_parser_busy(text: str) -> None:
    """Text that is nested without end is refused at once, however its brackets are mixed."""
    with pytest.raises(KernelError, match="is nested"):
        parse_kernel("k", SMALL + text)


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('touch hacked')",
        "().__class__.__bases__[0].__subclasses__()",
        "9**9**9",
        "M << 99999999",
        "1/0",
        "ceil(M / (N - N))",
        "(" * 250 + "1" + ")" * 250,
        "-" * 900 + "1",
        "[" * 900,
        "1+" * 100_000 + "1",
        "9" * 5000,
        "*".join(["99999999999"] * 80),
        "f'{M}'",
        "lambda: 1",
        "M if N else K",
        "ceil(*[1])",
        "ceil(1, 2)",
        "True",
        "1.5",
        "M,",
        "UNKNOWN",
        "\0",
        "0",
        "M - N",
    ],
    ids=range(24),
)
def test_hostile_expressions_are_refused(expression: str) -> None:
    """A grid expression is arithmetic and nothing else; anything else is a KernelError, quickly."""
    kernel = parse_kernel("k", edited(SMALL, ("ceil(M * N / WORKGROUP)", expression)))
    with pytest.raises(KernelError, match="kernel 'k': grid"):
        kernel.workgroups({"M": 1, "N": 1, "K": 1, "K_packed": 1})


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("ceil(M / 4) * ceil(N / 4)", 6),
        ("M / 4 * 4", 4),
        ("ceil(M * N / 64u)", 1),
        ("max(M, N, K) - 1", 11),
        ("(M + 3u) / 4u", 2),
        ("K_packed", 13),
    ],
)
def test_grids_are_evaluated(expression: str, expected: int) -> None:
    """Division is exact inside of ceil, and rounds down elsewhere."""
    kernel = parse_kernel("k", edited(SMALL, ("ceil(M * N / WORKGROUP)", expression)))
    assert kernel.workgroups({"M": 5, "N": 12, "K": 7, "K_packed": 13}) == expected


def test_a_grid_that_makes_no_sense_is_one_error(recwarn: pytest.WarningsRecorder) -> None:
    """What Python itself would warn of is one error, and nothing beside it."""
    for expression in ("1if M", "1or M", r"'\d'"):
        kernel = parse_kernel("k", edited(SMALL, ("ceil(M * N / WORKGROUP)", expression)))
        with pytest.raises(KernelError, match="cannot evaluate"):
            kernel.workgroups({"M": 1, "N": 1, "K": 1, "K_packed": 1})
    assert not recwarn.list


def test_kernel_files_are_read(tmp_path: Path) -> None:
    """A kernel is named after its file; a file that cannot be read is a KernelError."""
    path = tmp_path / "mine.wgsl"
    path.write_text(SMALL, "utf-8")
    assert read_kernel(path).name == "mine"
    plain = read_kernel(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # as some editors write it
    assert read_kernel(path) == plain
    path.write_bytes(b"\xff\xfe")
    for wrong in (path, tmp_path / "none.wgsl", tmp_path):
        with pytest.raises(KernelError, match=re.escape(str(wrong))):
            read_kernel(wrong)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("@binding(3) var<storage, read> scales", "@binding(5) var<storage, read> scales"),
        ("@binding(1) var<storage, read> x", "@binding(1) var<storage, read_write> x"),
        ("@binding(4) var<uniform> params", "@binding(4) var<storage, read> params"),
        ("@group(0) @binding(0) var<storage, read_write> y", "@group(0) @binding(0) var<storage, read> y"),
    ],
    ids=["number", "read-write input", "params as storage", "read-only output"],
)
def test_the_linear_contract_is_checked(old: str, new: str) -> None:
    """A kernel whose bindings differ from the linear's is named, with what was found and expected."""
    kernel = parse_kernel("mine", edited(shipped_kernel("linear_naive").source, (old, new)))
    with pytest.raises(KernelError, match=r"kernel 'mine' has bindings other than .*, expected a ") as caught:
        check_linear(kernel)
    assert caught.value.hint
    assert "scales" in caught.value.hint


@pytest.mark.parametrize("name", [*KERNELS, "linear_matrix"])
def test_shipped_kernels_keep_the_contract(name: str) -> None:
    """Our own kernels pass the check that a user's has to pass."""
    check_linear(shipped_kernel(name))


def test_every_kernel_file_is_known() -> None:
    """No .wgsl file lies about that no test runs."""
    folder = Path(qcs4w_gpu.__file__).parent / "kernels"
    assert sorted(path.stem for path in folder.glob("*.wgsl")) == sorted(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_head_comments_document_every_binding(name: str) -> None:
    """The head comment begins with the kernel's name and equation, and has a word on every binding."""
    source = shipped_kernel(name).source
    head = re.match(r"(//[^\n]*\n)+", source)
    assert head
    assert source.startswith(f"// {name}: ")
    for index, variable in re.findall(r"@binding\((\d)\) var<[^>]*> (\w+)", source):
        assert re.search(rf"\b{index} +{variable}\b", head[0]), f"binding {index} ({variable})"


@pytest.mark.parametrize("name", SHIPPED)
def test_kernels_use_no_reserved_word(name: str) -> None:
    """No identifier is a reserved word of WGSL, which Tint refuses though naga may not."""
    code = re.sub(r"//[^\n]*", "", shipped_kernel(name).source)
    assert not set(RESERVED) & set(re.findall(r"\w+", code))
    assert not re.findall(r"\b\w*__\w*\b", code)


@pytest.mark.parametrize("name", SHIPPED)
def test_kernels_fit_default_limits(name: str) -> None:
    """Invocations and workgroup memory stay within what every WebGPU device has."""
    kernel = shipped_kernel(name)
    x, y, z = kernel.workgroup_size
    assert x * y * z <= 256
    assert kernel.workgroup_nbytes <= 16384


def test_no_tile_size_stands_in_python() -> None:
    """No constant of a kernel has a namesake in the Python code."""
    constants = {name for kernel in SHIPPED for name in shipped_kernel(kernel).constants}
    assert "TILE_M" in constants
    for path in Path(qcs4w_gpu.__file__).parent.glob("*.py"):
        names = {node.id for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Name)}
        assert not names & constants, path.name


@pytest.mark.parametrize(
    "extra",
    [
        "@a " * 50_000,
        "const a = " * 50_000,
        "{" * 100_000 + "}" * 100_000,
        "fn f() { return " + "(" * 3000 + "1.0" + ")" * 3000 + "; }",
        "var<workgroup> a: " + "array<" * 1500 + "f32" + ", 1>" * 1500 + ";",
    ],
    ids=["attributes", "constants", "braces", "parentheses", "arrays"],
)
def test_a_text_that_would_keep_a_parser_busy_is_refused(extra: str) -> None:
    """What nests or repeats beyond any kernel is refused at once, before naga or we choke on it."""
    started = time.monotonic()
    with pytest.raises(KernelError, match="is not read"):
        parse_kernel("hostile", shipped_kernel("linear_naive").source + extra)
    assert time.monotonic() - started < 5


def test_only_regular_files_of_a_kernels_size_are_read(tmp_path: Path) -> None:
    """A pipe, a device, a folder and a huge file are refused without being read."""
    os.mkfifo(tmp_path / "pipe.wgsl")
    (tmp_path / "folder.wgsl").mkdir()
    with (tmp_path / "huge.wgsl").open("wb") as file:
        file.truncate(1 << 40)
    for name in ("pipe", "folder", "huge"):
        with pytest.raises(KernelError, match=f"{name}.wgsl: (is no regular file|has 1,099)"):
            read_kernel(tmp_path / f"{name}.wgsl")


@pytest.mark.parametrize(
    ("kind", "nbytes"),
    [("array<f32, max(A, B)>", 64), ("array<f32, A % 3u>", 4), ("array<array<vec4<f32>, 2>, A>", 512), ("Tile", 0)],
)
def test_workgroup_memory_of_any_spelling(kind: str, nbytes: int) -> None:
    """Lengths are expressions of constants; what cannot be read counts nothing and is no error."""
    text = SMALL + f"const A: u32 = 16u;\nconst B: u32 = 3u;\nvar<workgroup> tile: {kind};\n"
    assert parse_kernel("typed", text).workgroup_nbytes == nbytes
