"""A kernel: a .wgsl file and what its text says about itself. No WebGPU in here.

Tile sizes, workgroup sizes and bindings stand in the WGSL only; the host reads them from there. Comments that begin
with `//!` are for the host: `grid` is the number of workgroups as an expression of M, N, K, K_packed and the file's
constants; `row_align` is what K_packed must be a multiple of; with `x_align` a row of x takes K floats rounded up to a
multiple of that, and zeros fill it.

A kernel bounds its stores by M · N, not by arrayLength(&y): y's binding has guard words behind it. A binding of exactly
M · N words would let a kernel pass that stores past y, since checked WGSL drops such stores, or moves them to a place
within; a runtime that binds a larger buffer, or does not check, would have its data overwritten. So the guard stays in
the binding, and a kernel that trusts arrayLength(&y) fails.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

from .errors import KernelError
from .expressions import arguments, at_last_comma, evaluate, evaluate_positive
from .overrides import Override, read_overrides, settle

#: Kernels of the linear itself, all of the same contract, the readable truth first.
LINEAR_KERNELS = ("linear_naive", "linear_gemv", "linear_tiled")

#: The kernel on tensor cores: what it reads is prepared by others, see linear.py.
MATRIX_KERNEL = "linear_matrix"
#: Kernels of the linear for GPUs, of the same contract.
FAST_KERNELS = ("linear_decode", "linear_few4", "linear_few8", "linear_prefill")
#: Those that Tint alone compiles, for they use subgroup matrices or the f16 that these come with.
TINT_KERNELS = (MATRIX_KERNEL, "matrix_rows", "matrix_weights", "matrix_strict")

PARAMS_BINDING = 4

BufferKind = Literal["storage", "read-only-storage", "uniform"]

_LINEAR_BINDINGS: dict[int, BufferKind] = {
    0: "storage",
    1: "read-only-storage",
    2: "read-only-storage",
    3: "read-only-storage",
    PARAMS_BINDING: "uniform",
}
_LINEAR_NAMES = ("output", "input", "packed weights", "scales", "Params")

# An attribute's argument may hold calls, as in @workgroup_size(max(A, B)).
_ATTRIBUTES = r"(?P<attributes>(?:@\w+(?:\s*\((?:[^()]|\([^()]*\))*\))?\s*)+)"
_BINDING = re.compile(_ATTRIBUTES + r"var\s*<\s*(?P<space>\w+)\s*(?:,\s*(?P<access>\w+)\s*)?,?\s*>")
_ENTRY = re.compile(_ATTRIBUTES + r"fn\s+(?P<name>\w+)")
_CONSTANT = re.compile(r"\b(?:const|override)\s+(\w+)\s*(?::\s*u32\s*)?=\s*([^;]+);")
_WORKGROUP_VARIABLE = re.compile(r"\bvar\s*<\s*workgroup\s*>\s*\w+\s*:\s*([^;]+);")
# What a kernel enables by WGSL's name, as a feature by WebGPU's.
_FEATURES = {
    "f16": "shader-f16",
    "subgroups": "subgroups",
    "chromium_experimental_subgroup_matrix": "chromium-experimental-subgroup-matrix",
}
_DIRECTIVE = re.compile(r"//!\s*(\w+)\s*=\s*(.+?)\s*")
_DIRECTIVES = ("grid", "row_align", "x_align")
# Far beyond any kernel, and far below what makes a parser, ours or naga's, run for minutes or out of stack.
_MOST_BYTES = 1 << 20
_DEEPEST = 100
_MOST_OF_A_KIND = 1000


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
        x_align: a row of x takes K floats, rounded up to a multiple of this many; zeros fill it.
        features: what its `enable` lines ask of the device, by WebGPU's names.
        defines: values of override constants in place of the text's own, by WebGPU's keys.
        unset: override constants that have no value.
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
    defines: Mapping[str, float] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    x_align: int = 1

    def workgroups(self, sizes: Mapping[str, int]) -> int:
        """Return the number of workgroups for given M, N, K and K_packed.

        Raises:
            KernelError: the expression cannot be evaluated, or gives less than one.
        """
        names = {**sizes, **self.constants, **sizes}  # the sizes first, where names are listed
        return evaluate_positive(self.grid, names, f"kernel '{self.name}': grid")

    def grid_of(self, sizes: Mapping[str, int]) -> tuple[int, int] | int:
        """Return the number of workgroups, or their numbers along x and y where the expression has two parts.

        Raises:
            KernelError: as for `workgroups`.
        """
        x, comma, y = at_last_comma(self.grid)
        if not (comma and x.strip() and y.strip()):
            return self.workgroups(sizes)
        names, where = {**sizes, **self.constants, **sizes}, f"kernel '{self.name}': grid"
        return evaluate_positive(x, names, where), evaluate_positive(y, names, where)

    def check_grid(self) -> None:
        """Refuse a grid that says nothing at any shape.

        Raises:
            KernelError: it has other than one or two expressions of M, N, K, K_packed and the file's constants.
        """
        self.grid_of({"M": 1009, "N": 1013, "K": 1019, "K_packed": 510})


@dataclass(frozen=True)
class KernelSettings:
    """What a user says of a kernel beside its text.

    Attributes:
        grid: the number of workgroups, in place of the `//! grid` line; two expressions with a comma between them are
            the numbers along x and y, and are not folded.
        workgroup: the workgroup size, where the text's own is more than the host can evaluate.
        defines: values of override constants, as text, by name.
    """

    grid: str | None = None
    workgroup: str | None = None
    defines: Mapping[str, str] = field(default_factory=dict)


PLAIN = KernelSettings()


@cache
def shipped_kernel(name: str, **defines: int) -> Kernel:
    """Return one of the kernels in this package's kernels folder, some of its override constants set."""
    text = (files("qcs4w_gpu") / "kernels" / f"{name}.wgsl").read_text("utf-8")
    return parse_kernel(name, text, KernelSettings(defines={key: str(value) for key, value in defines.items()}))


def read_kernel(path: str | os.PathLike[str], settings: KernelSettings = PLAIN) -> Kernel:
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
        return parse_kernel(path.stem, path.read_text("utf-8-sig"), settings)  # some editors begin a file with a mark
    except OSError as error:
        raise KernelError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise KernelError(f"{path}: is not UTF-8 text") from None


def parse_kernel(name: str, source: str, settings: KernelSettings = PLAIN) -> Kernel:
    """Read from WGSL what the host needs to know.

    Raises:
        KernelError: an entry point, the `//! grid` line or a binding is missing or not understood, or the settings do
            not fit the text.
    """
    where = f"kernel '{name}'"
    code, comments = _split_comments(source)
    _check_size(code, where)
    directives = _directives(comments, where)
    entries = [entry for entry in _ENTRY.finditer(code) if _attribute(entry, "compute") is not None]
    if len(entries) != 1:
        raise KernelError(f"{where} has {len(entries)} @compute entry points, expected one")
    grid = directives.get("grid") if settings.grid is None else settings.grid
    if grid is None:
        raise KernelError(
            f"{where} does not say how many workgroups it needs",
            hint="add a line such as: //! grid = ceil(M * N / 64), or say so by --grid 'ceil(M * N / 64)'",
        )
    scope = _module_scope(code)
    overrides = read_overrides(scope)
    defines = settle(overrides, settings.defines, _constant_names(scope), where)
    constants = _constants(scope, overrides, defines)
    unset = tuple(name for name, each in overrides.items() if each.default is None and each not in defines)
    own, what = _attribute(entries[0], "workgroup_size") or "", f"{where}: workgroup_size"
    size = own if settings.workgroup is None else settings.workgroup
    if missing := next((name for name in re.findall(r"\w+", size) if name in unset), None):
        raise _without_value(name, missing)
    x, y, z = _workgroup_size(size, constants, what)
    if settings.workgroup is not None:
        _check_workgroup((x, y, z), own, constants, what)
    bindings: dict[int, BufferKind] = {}
    for found in _BINDING.finditer(code):
        group, binding = _attribute(found, "group"), _attribute(found, "binding")
        if group is None or binding is None:
            continue
        if evaluate(group, constants, f"{where}: group") != 0:
            raise KernelError(f"{where} has a binding in group {group.strip()}; the host serves group 0 only")
        bindings[evaluate(binding, constants, f"{where}: binding")] = _kind(found["space"], found["access"])
    return Kernel(
        name=name,
        source=source,
        entry_point=entries[0]["name"],
        workgroup_size=(x, y, z),
        workgroup_nbytes=sum(_type_nbytes(kind, constants) for kind in _WORKGROUP_VARIABLE.findall(code)),
        bindings=bindings,
        constants=constants,
        grid=grid,
        row_align=evaluate_positive(directives.get("row_align", "1"), constants, f"{where}: row_align"),
        x_align=evaluate_positive(directives.get("x_align", "1"), constants, f"{where}: x_align"),
        features=_enabled(code),
        defines={override.key: value for override, value in defines.items()},
        unset=unset,
    )


def _workgroup_size(text: str, constants: Mapping[str, int], what: str) -> tuple[int, int, int]:
    sizes = arguments(text, constants, what)
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1 or text.strip()[:1] == ",":
        raise KernelError(f"{what}: '{text}' is not one to three numbers from 1, such as 64 or 8, 8")
    x, y, z = [*sizes, 1, 1][:3]
    return x, y, z


def _without_value(kernel: str, constant: str) -> KernelError:
    return KernelError(
        f"kernel '{kernel}': the override constant '{constant}' has no value", hint=f"--define {constant}=VALUE sets it"
    )


def _constants(scope: str, overrides: Mapping[str, Override], defines: Mapping[Override, float]) -> dict[str, int]:
    """Return the whole-number constants, of which some follow from others and from what was defined."""
    constants: dict[str, int] = {}
    for name, expression in _CONSTANT.findall(scope):
        defined = defines.get(overrides[name]) if name in overrides else None
        try:
            constants[name] = evaluate(expression, constants, name) if defined is None else _whole(defined, name)
        except KernelError:
            continue  # a constant of another type; it is missed only where an expression needs it
    for override, value in defines.items():
        if override.default is None and value == int(value):
            constants[override.name] = int(value)
    return constants


def _check_workgroup(given: tuple[int, int, int], own: str, constants: Mapping[str, int], what: str) -> None:
    """Refuse a workgroup size that the text contradicts, where the text can be evaluated: it is the text that runs."""
    try:
        read = _workgroup_size(own, constants, what)
    except KernelError:
        return
    if read != given:
        raise KernelError(
            f"{what}: --workgroup says {' × '.join(map(str, given))}, the text says {' × '.join(map(str, read))}",
            hint="it is read from the text: leave out --workgroup, or change an override constant with --define",
        )


def _whole(value: float, name: str) -> int:
    if value != int(value):
        raise KernelError(f"{name} is {value}, no whole number")
    return int(value)


def _constant_names(scope: str) -> frozenset[str]:
    return frozenset(re.findall(r"\bconst\s+(\w+)", scope))


def is_matrix(kernel: Kernel) -> bool:
    """Whether it is the kernel on tensor cores, whatever its override constants."""
    return kernel.source == shipped_kernel(MATRIX_KERNEL).source


def check_linear(kernel: Kernel) -> None:
    """Check that a kernel has the bindings of the linear.

    Raises:
        KernelError: a binding is missing, or is not what the contract says.
    """
    if kernel.unset:
        raise _without_value(kernel.name, kernel.unset[0])
    found = dict(kernel.bindings)
    if found == _LINEAR_BINDINGS or is_matrix(kernel):
        return
    faults = [
        f"{index} ({_LINEAR_NAMES[index]}) is {f'a {found[index]}' if index in found else 'missing'}, expected a {kind}"
        for index, kind in _LINEAR_BINDINGS.items()
        if found.get(index) != kind
    ] + [f"{index} is one that nobody fills" for index in sorted(found.keys() - _LINEAR_BINDINGS.keys())]
    raise KernelError(
        f"kernel '{kernel.name}' has bindings other than those of the linear: {'; '.join(faults)}",
        hint="0 output, 1 input, 2 packed weights, 3 scales, 4 uniform Params {M, N, K, K_packed: u32}",
    )


def _check_size(code: str, where: str) -> None:
    """Refuse what only serves to keep a parser busy."""
    deepest = 0
    for opening, brackets in (("([{", r"[^()\[\]{}]"), ("(", "[^()]"), ("[", r"[^\[\]]"), ("{", "[^{}]")):
        depth = 0
        for character in re.sub(brackets, "", code):
            depth = depth + 1 if character in opening else max(0, depth - 1)  # a stray one closes nothing
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
        element, comma, count = at_last_comma(kind.removeprefix("array<").removesuffix(">").removesuffix(","))
        try:
            return _type_nbytes(element, constants) * evaluate(count, constants, kind) if comma else 0
        except KernelError:
            return 0
    if vector := re.fullmatch(r"vec([234])(?:<(\w+)>|([fiuh]))", kind):
        scalar = vector[2] or {"h": "f16"}.get(vector[3], "f32")
        return (4 if vector[1] == "3" else int(vector[1])) * _type_nbytes(scalar, constants)
    return {"f16": 2, "f32": 4, "i32": 4, "u32": 4, "bool": 4, "atomic<u32>": 4, "atomic<i32>": 4}.get(kind, 0)
