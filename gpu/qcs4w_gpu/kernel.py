"""A kernel: a .wgsl file and what its text says about itself. No WebGPU in here.

Tile sizes, workgroup sizes and bindings stand in the WGSL only; the host reads them from there. Comments that begin
with `//!` are for the host: `grid` is the number of workgroups as an expression of M, N, K, K_packed and the file's
constants; `row_align` is what K_packed must be a multiple of.
"""

import ast
import math
import os
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
LINEAR_KERNELS = ("linear_naive", "linear_gemv", "linear_tiled")

PARAMS_BINDING = 4

BufferKind = Literal["storage", "read-only-storage", "uniform"]

# An attribute's argument may hold calls, as in @workgroup_size(max(A, B)).
_ATTRIBUTES = r"(?P<attributes>(?:@\w+(?:\s*\((?:[^()]|\([^()]*\))*\))?\s*)+)"
_BINDING = re.compile(_ATTRIBUTES + r"var\s*<\s*(?P<space>\w+)\s*(?:,\s*(?P<access>\w+)\s*)?,?\s*>")
_ENTRY = re.compile(_ATTRIBUTES + r"fn\s+(?P<name>\w+)")
_CONSTANT = re.compile(r"\b(?:const|override)\s+(\w+)\s*(?::\s*u32\s*)?=\s*([^;]+);")
_WORKGROUP_VARIABLE = re.compile(r"\bvar\s*<\s*workgroup\s*>\s*\w+\s*:\s*([^;]+);")
# What a kernel enables by WGSL's name, as a feature by WebGPU's.
_FEATURES = {"f16": "shader-f16", "subgroups": "subgroups"}
_DIRECTIVE = re.compile(r"//!\s*(\w+)\s*=\s*(.+?)\s*")
_DIRECTIVES = ("grid", "row_align")
_LONGEST_EXPRESSION = 1000
# Far beyond any kernel, and far below what makes a parser, ours or naga's, run for minutes or out of stack.
_MOST_BYTES = 1 << 20
_DEEPEST = 100
_MOST_OF_A_KIND = 1000
_LARGEST_VALUE = 1 << 128


@dataclass(frozen=True)
class Kernel:
    """A compute kernel.

    Attributes:
        name: of the file, without its suffix; its label in reports.
        source: WGSL.
        entry_point: the @compute function.
        workgroup_size: invocations along x, y, z.
        workgroup_nbytes: of workgroup memory, as far as the types are numbers, vectors and arrays of these.
        bindings: what each binding of group 0 is.
        constants: the file's u32 constants.
        grid: the `//! grid` expression.
        row_align: K_packed must be a multiple of this many bytes.
        features: what its `enable` lines ask of the device, by WebGPU's names.
    """

    name: str
    source: str
    entry_point: str
    workgroup_size: tuple[int, int, int]
    workgroup_nbytes: int
    bindings: Mapping[int, BufferKind]
    constants: Mapping[str, int]
    grid: str
    row_align: int
    features: frozenset[str] = frozenset()

    def workgroups(self, sizes: Mapping[str, int]) -> int:
        """Return the number of workgroups for given M, N, K and K_packed.

        Raises:
            KernelError: the expression cannot be evaluated, or gives less than one.
        """
        return _evaluate_positive(self.grid, {**self.constants, **sizes}, f"kernel '{self.name}': grid")


@cache
def shipped_kernel(name: str) -> Kernel:
    """Return one of the kernels in this package's kernels folder."""
    return parse_kernel(name, (files("qcs4w_gpu") / "kernels" / f"{name}.wgsl").read_text("utf-8"))


def read_kernel(path: str | os.PathLike[str]) -> Kernel:
    """Read a user's kernel file.

    Raises:
        KernelError: it cannot be read, or does not keep the contract.
    """
    path = Path(path)
    try:
        if not path.is_file():
            raise KernelError(f"{path}: {'is no regular file' if path.exists() else 'cannot be read: no such file'}")
        if path.stat().st_size > _MOST_BYTES:
            raise KernelError(f"{path}: has {path.stat().st_size:,} bytes, expected {_MOST_BYTES:,} at most")
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
    where = f"kernel '{name}'"
    code, comments = _split_comments(source)
    _check_size(code, where)
    directives = _directives(comments, where)
    entries = [entry for entry in _ENTRY.finditer(code) if _attribute(entry, "compute") is not None]
    if len(entries) != 1:
        raise KernelError(f"{where} has {len(entries)} @compute entry points, expected one")
    if "grid" not in directives:
        raise KernelError(
            f"{where} does not say how many workgroups it needs",
            hint="add a line such as: //! grid = ceil(M * N / 64)",
        )
    constants: dict[str, int] = {}
    for constant, expression in _CONSTANT.findall(_module_scope(code)):
        try:
            constants[constant] = _evaluate(expression, constants, constant)
        except KernelError:
            continue  # a constant of another type; it is missed only where an expression needs it
    sizes = _arguments(_attribute(entries[0], "workgroup_size") or "", constants, f"{where}: workgroup_size")
    x, y, z = [*sizes, 1, 1, 1][:3]
    bindings: dict[int, BufferKind] = {}
    for found in _BINDING.finditer(code):
        group, binding = _attribute(found, "group"), _attribute(found, "binding")
        if group is None or binding is None:
            continue
        if _evaluate(group, constants, f"{where}: group") != 0:
            raise KernelError(f"{where} has a binding in group {group.strip()}; the host serves group 0 only")
        bindings[_evaluate(binding, constants, f"{where}: binding")] = _kind(found["space"], found["access"])
    return Kernel(
        name=name,
        source=source,
        entry_point=entries[0]["name"],
        workgroup_size=(x, y, z),
        workgroup_nbytes=sum(_type_nbytes(kind, constants) for kind in _WORKGROUP_VARIABLE.findall(code)),
        bindings=bindings,
        constants=constants,
        grid=directives["grid"],
        row_align=_evaluate_positive(directives.get("row_align", "1"), constants, f"{where}: row_align"),
        features=_enabled(code),
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


def _check_size(code: str, where: str) -> None:
    """Refuse what only serves to keep a parser busy."""
    depth = deepest = 0
    for character in re.sub(r"[^()\[\]{}]", "", code):
        depth += 1 if character in "([{" else -1
        deepest = max(deepest, depth)
    most = max(len(re.findall(kind, code)) for kind in (r"\bconst\b", r"\boverride\b", "@", r"\bvar\b"))
    if deepest > _DEEPEST or most > _MOST_OF_A_KIND or re.search(r"(?:array\s*<\s*){20}", code):
        raise KernelError(
            f"{where} is not read: it is nested {deepest} deep and has {most} declarations of a kind, "
            f"expected {_DEEPEST} and {_MOST_OF_A_KIND} at most, and arrays 20 deep"
        )


def _split_comments(source: str) -> tuple[str, list[str]]:
    """Split WGSL into its code and its line comments; block comments nest, and what is in them is gone."""
    code, comments, depth, at = [], [], 0, 0
    while mark := re.compile(r"/\*|\*/" if depth else r"/\*|//[^\n]*").search(source, at):
        if not depth:
            code.append(source[at : mark.start()])
        if mark[0] == "/*":
            depth += 1
        elif mark[0] == "*/":
            depth -= 1
        else:
            comments.append(mark[0])
        at = mark.end()
    if not depth:
        code.append(source[at:])
    return " ".join(code), comments


def _directives(comments: list[str], where: str) -> dict[str, str]:
    """Return what the `//!` comments say; one that is misspelt or said twice is an error, never ignored."""
    said: dict[str, str] = {}
    for comment in comments:
        if not comment.startswith("//!"):
            continue
        parts = _DIRECTIVE.fullmatch(comment)
        if parts is None or parts[1] not in _DIRECTIVES:
            raise KernelError(
                f"{where}: the line '{comment.strip()}' is not understood",
                hint=f"the host knows {', '.join(f'//! {known} = ...' for known in _DIRECTIVES)}",
            )
        if parts[1] in said:
            raise KernelError(f"{where} says '//! {parts[1]}' twice")
        said[parts[1]] = parts[2]
    return said


def _enabled(code: str) -> frozenset[str]:
    """Return the features that code enables; extensions that are none of WebGPU's are for the compiler to judge."""
    directives = re.match(r"\s*(?:(?:enable|requires|diagnostic)\b[^;]*;\s*)*", code)
    names = re.findall(r"\benable\s+([^;]*);", directives[0]) if directives else []
    return frozenset(_FEATURES[name] for name in re.findall(r"\w+", ",".join(names)) if name in _FEATURES)


def _module_scope(code: str) -> str:
    """Return code without what stands in braces, where a constant may have the name of a global one."""
    count = 1
    while count:
        code, count = re.subn(r"\{[^{}]*\}", ";", code)
    return code


def _attribute(declaration: re.Match[str], name: str) -> str | None:
    """Return an attribute's argument, "" where it has none, or None where the attribute is missing."""
    found = re.search(rf"@{name}\b(?:\s*\(((?:[^()]|\([^()]*\))*)\))?", declaration["attributes"])
    return None if found is None else found[1] or ""


def _kind(space: str, access: str | None) -> BufferKind:
    if space == "uniform":
        return "uniform"
    return "storage" if access == "read_write" else "read-only-storage"


def _type_nbytes(kind: str, constants: Mapping[str, int]) -> int:
    """Return the bytes of a WGSL type, 0 where it is not a number, a vector or an array of these."""
    kind = re.sub(r"\s", "", kind)
    if kind.startswith("array<") and kind.endswith(">"):
        element, comma, count = _at_last_comma(kind.removeprefix("array<").removesuffix(">").removesuffix(","))
        try:
            return _type_nbytes(element, constants) * _evaluate(count, constants, kind) if comma else 0
        except KernelError:
            return 0
    if vector := re.fullmatch(r"vec([234])(?:<(\w+)>|([fiuh]))", kind):
        scalar = vector[2] or {"h": "f16"}.get(vector[3], "f32")
        return (4 if vector[1] == "3" else int(vector[1])) * _type_nbytes(scalar, constants)
    return {"f16": 2, "f32": 4, "i32": 4, "u32": 4, "bool": 4, "atomic<u32>": 4, "atomic<i32>": 4}.get(kind, 0)


def _at_last_comma(text: str) -> tuple[str, str, str]:
    """Part a text at its last comma outside of brackets."""
    depth = 0
    for at in range(len(text) - 1, -1, -1):
        depth += (text[at] in ")>") - (text[at] in "(<")
        if text[at] == "," and not depth:
            return text[:at], ",", text[at + 1 :]
    return text, "", ""


def _arguments(text: str, names: Mapping[str, int], where: str) -> list[int]:
    """Evaluate a list of expressions; commas inside of calls do not part them."""
    parts = re.findall(r"(?:[^,()]|\([^()]*\))+", text)
    return [_evaluate(part, names, where) for part in parts if part.strip()]


def _evaluate_positive(expression: str, names: Mapping[str, int], where: str) -> int:
    value = _evaluate(expression, names, where)
    if value < 1:
        raise KernelError(f"{where}: '{expression}' is {value}, expected at least 1")
    return value


def _evaluate(expression: str, names: Mapping[str, int], where: str) -> int:
    """Evaluate whole-number arithmetic: + - * / %, ceil, min, max, numbers (`32u` too) and names.

    `/` is exact inside `ceil` and rounds down elsewhere, as it does for u32 in WGSL.
    """
    text = re.sub(r"\b(0[xX][0-9a-fA-F]+|\d+)[iu]\b", r"\1", expression).strip()

    def value(node: ast.expr, *, exact: bool = False) -> Fraction:
        match node:
            case ast.Constant(value=int() as number) if not isinstance(number, bool):
                return Fraction(number)
            case ast.Name(id=name) if name in names:
                return Fraction(names[name])
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() | ast.Mod() as op, right=right):
                a, b = value(left, exact=exact), value(right, exact=exact)
                if isinstance(op, ast.Add):
                    return a + b
                if isinstance(op, ast.Sub):
                    return a - b
                if isinstance(op, ast.Mult):
                    return a * b
                if b == 0:
                    raise KernelError(f"{where}: division by zero in '{expression}'")
                if isinstance(op, ast.Mod):
                    return a % b
                return a / b if exact else Fraction(a // b)
            case ast.Call(func=ast.Name(id="ceil"), args=[argument], keywords=[]):
                return Fraction(math.ceil(value(argument, exact=True)))
            case ast.Call(func=ast.Name(id="min" | "max" as function), args=[_, *_] as arguments, keywords=[]):
                return (min if function == "min" else max)(value(argument, exact=exact) for argument in arguments)
            case _:
                raise KernelError(f"{where}: cannot evaluate '{ast.unparse(node)}' in '{expression}'")

    if len(text) > _LONGEST_EXPRESSION:
        raise KernelError(f"{where}: an expression has {len(text)} characters, expected {_LONGEST_EXPRESSION} at most")
    try:
        result = math.floor(value(ast.parse(text, mode="eval").body))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise KernelError(f"{where}: cannot evaluate '{expression}': {error}") from None
    if abs(result) > _LARGEST_VALUE:
        raise KernelError(f"{where}: '{expression}' is beyond 128 bits")
    return result
