"""A kernel: a .wgsl file and what its text says about itself. No WebGPU in here.

Tile sizes, workgroup sizes and bindings stand in the WGSL only; the host reads them from there. Lines that begin with
`//!` are for the host: `grid` is the number of workgroups as an expression of M, N, K, K_packed and the file's
constants; `row_align` is what K_packed must be a multiple of.
"""

import ast
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

from .errors import KernelError

#: Kernels of the linear itself, all of the same contract, the readable truth first.
LINEAR_KERNELS = ("linear_naive", "linear_tiled")

PARAMS_BINDING = 4

BufferKind = Literal["storage", "read-only-storage", "uniform"]

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_DIRECTIVE = re.compile(r"^\s*//!\s*(\w+)\s*=\s*(.+?)\s*$", re.MULTILINE)
_BINDING = re.compile(r"@group\(\s*0\s*\)\s*@binding\(\s*(\d+)\s*\)\s*var\s*<\s*(\w+)\s*(?:,\s*(\w+)\s*)?>")
_CONSTANT = re.compile(r"\b(?:const|override)\s+(\w+)\s*(?::\s*u32\s*)?=\s*([^;]+);")
_ENTRY = re.compile(r"@compute\b(?P<attributes>[^{;]*?)\bfn\s+(?P<name>\w+)", re.DOTALL)
_WORKGROUP_SIZE = re.compile(r"@workgroup_size\(([^)]*)\)")


@dataclass(frozen=True)
class Kernel:
    """A compute kernel.

    Attributes:
        name: of the file, without its suffix; its label in reports.
        source: WGSL.
        entry_point: the @compute function.
        workgroup_size: invocations along x, y, z.
        bindings: what each binding of group 0 is.
        constants: the file's u32 constants.
        grid: the `//! grid` expression.
        row_align: K_packed must be a multiple of this many bytes.
    """

    name: str
    source: str
    entry_point: str
    workgroup_size: tuple[int, int, int]
    bindings: Mapping[int, BufferKind]
    constants: Mapping[str, int]
    grid: str
    row_align: int

    def workgroups(self, sizes: Mapping[str, int]) -> int:
        """Return the number of workgroups for given M, N, K and K_packed."""
        return _evaluate(self.grid, {**self.constants, **sizes}, f"{self.name}: grid")


@cache
def shipped_kernel(name: str) -> Kernel:
    """Return one of the kernels in this package's kernels folder."""
    return parse_kernel(name, (files("qcs4w_gpu") / "kernels" / f"{name}.wgsl").read_text("utf-8"))


def read_kernel(path: Path) -> Kernel:
    """Read a user's kernel file.

    Raises:
        KernelError: it cannot be read, or does not keep the contract.
    """
    try:
        return parse_kernel(path.stem, path.read_text("utf-8"))
    except OSError as error:
        raise KernelError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise KernelError(f"{path}: is not UTF-8 text") from None


def parse_kernel(name: str, source: str) -> Kernel:
    """Read from WGSL what the host needs to know.

    Raises:
        KernelError: an entry point, the `//! grid` line or a binding is missing or not understood.
    """
    directives = dict(_DIRECTIVE.findall(source))
    code = _COMMENT.sub(" ", source)
    entries = list(_ENTRY.finditer(code))
    if len(entries) != 1:
        raise KernelError(f"kernel '{name}' has {len(entries)} @compute entry points, expected one")
    if "grid" not in directives:
        raise KernelError(
            f"kernel '{name}' does not say how many workgroups it needs",
            hint="add a line such as: //! grid = ceil(M * N / 64)",
        )
    constants: dict[str, int] = {}
    for constant, expression in _CONSTANT.findall(code):
        try:
            constants[constant] = _evaluate(expression, constants, constant)
        except KernelError:
            continue  # a constant of another type; it is missed only where an expression needs it
    size = _WORKGROUP_SIZE.search(entries[0]["attributes"])
    sizes = [s for s in size[1].split(",") if s.strip()] if size else []
    x, y, z = ([_evaluate(s, constants, f"{name}: workgroup_size") for s in sizes] + [1, 1, 1])[:3]
    return Kernel(
        name=name,
        source=source,
        entry_point=entries[0]["name"],
        workgroup_size=(x, y, z),
        bindings={int(i): _kind(space, access) for i, space, access in _BINDING.findall(code)},
        constants=constants,
        grid=directives["grid"],
        row_align=_evaluate(directives.get("row_align", "1"), constants, f"{name}: row_align"),
    )


def check_linear(kernel: Kernel) -> None:
    """Check that a kernel has the bindings of the linear.

    Raises:
        KernelError: a binding is missing, or is not what the contract says.
    """
    expected: dict[int, BufferKind] = {
        0: "storage",
        1: "read-only-storage",
        2: "read-only-storage",
        3: "read-only-storage",
        PARAMS_BINDING: "uniform",
    }
    if dict(kernel.bindings) != expected:
        raise KernelError(
            f"kernel '{kernel.name}' has bindings {dict(sorted(kernel.bindings.items()))}, expected {expected}",
            hint="0 output, 1 input, 2 packed weights, 3 scales, 4 uniform Params {M, N, K, K_packed: u32}",
        )


def _kind(space: str, access: str) -> BufferKind:
    if space == "uniform":
        return "uniform"
    return "storage" if access == "read_write" else "read-only-storage"


def _evaluate(expression: str, names: Mapping[str, int], where: str) -> int:
    """Evaluate whole-number arithmetic: + - * /, ceil, min, max, numbers (`32u` too) and names.

    `/` is exact inside `ceil` and rounds down elsewhere, as it does for u32 in WGSL.
    """
    text = re.sub(r"\b(\d+)u\b", r"\1", expression)

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int() as number) if not isinstance(number, bool):
                return Fraction(number)
            case ast.Name(id=name) if name in names:
                return Fraction(names[name])
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() as op, right=right):
                a, b = value(left), value(right)
                if isinstance(op, ast.Add):
                    return a + b
                if isinstance(op, ast.Sub):
                    return a - b
                return a * b if isinstance(op, ast.Mult) else a / b
            case ast.Call(func=ast.Name(id="ceil"), args=[argument], keywords=[]):
                return Fraction(math.ceil(value(argument)))
            case ast.Call(func=ast.Name(id="min" | "max" as function), args=[_, *_] as arguments, keywords=[]):
                return (min if function == "min" else max)(value(argument) for argument in arguments)
            case _:
                raise KernelError(f"{where}: cannot evaluate '{ast.unparse(node)}' in '{expression}'")

    try:
        return math.floor(value(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError) as error:
        raise KernelError(f"{where}: cannot evaluate '{expression}': {error}") from None
