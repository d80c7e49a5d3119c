"""What runs packed linears besides qcs4w, and what it refuses: one table of rules, for `check`, `pack` and `inspect`.

A rule says what is wrong in figures, why the target minds, how to mend it, and where that was read: files of
pytorch/executorch at a commit, and the WebGPU specification's table of limits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Literal

from .nibbles import packed_width

#: What every WebGPU device offers for one storage binding, in bytes, and gives where no more was asked for.
DEFAULT_MAX_BINDING = 128 << 20

_TILE = 4  # rows and columns of y for each invocation
_MOST_TILES = 2**32 - 1

_HOST = "pytorch/executorch 9b5164e, backends/webgpu/runtime/ops/linear_qcs4w/QuantizedLinearQcs4w.cpp"
_DEVICE = "pytorch/executorch 0dfaa10, backends/webgpu/runtime/WebGPUDevice.cpp"
_EXPORT = "pytorch/executorch 3b60683 (1.5.1), backends/vulkan/custom_ops_lib.py and _passes/fuse_quantized_ops.py"
_WEBGPU = "W3C WebGPU, section 3.6.2, limits"


@dataclass(frozen=True)
class Case:
    """A packed linear as a target meets it.

    Attributes:
        out_features: N.
        in_features: K.
        rows: M, the most rows of input.
        scale_dtype: as stored, by its safetensors name.
        input_dtype: of x.
        output_dtype: of y.
        misfit: what a program says of x or y that is not the shape of a linear's, None where all fits.
        max_binding: bytes that the device binds at once (maxStorageBufferBindingSize).
    """

    out_features: int
    in_features: int
    rows: int = 1
    scale_dtype: str = "F32"
    input_dtype: str = "F32"
    output_dtype: str = "F32"
    misfit: str | None = None
    max_binding: int = DEFAULT_MAX_BINDING


@dataclass(frozen=True)
class Rule:
    """One reason for which a target refuses a linear.

    Attributes:
        name: for people and scripts.
        stage: where it fails: at export, in the runtime on every device, or on devices with too small a limit.
        what: what is refused, in general.
        why: why the target minds.
        source: where that was read.
        fault: what is wrong with a case, in figures; None where nothing is.
        mend: how to mend a case that breaks the rule.
    """

    name: str
    stage: Literal["export", "runtime", "device"]
    what: str
    why: str
    source: str
    fault: Callable[[Case], str | None]
    mend: Callable[[Case], str]


@dataclass(frozen=True)
class Target:
    """A runtime: its name on the command line, what it is called in sentences, and its rules."""

    name: str
    title: str
    rules: tuple[Rule, ...]


@dataclass(frozen=True)
class Refusal:
    """A rule that a linear breaks: what is wrong, in figures, and how to mend it."""

    rule: Rule
    fault: str
    mend: str


def refusals(case: Case, target: Target) -> list[Refusal]:
    """Return why a target refuses a linear, in the order of its rules; empty where it does not."""
    found = ((rule, rule.fault(case)) for rule in target.rules)
    return [Refusal(rule, fault, rule.mend(case)) for rule, fault in found if fault]


def _odd_columns(case: Case) -> str | None:
    return f"K = {case.in_features} is odd" if case.in_features % 2 else None


def _mend_odd_columns(case: Case) -> str:
    return f"give the float weight one more column of zeros (K = {case.in_features + 1}), and the input one more zero"


def _part_words(case: Case) -> str | None:
    width = packed_width(case.in_features)
    nbytes = case.out_features * width
    return f"N·ceil(K/2) = {case.out_features}·{width} = {nbytes:,} is no multiple of 4" if nbytes % 4 else None


def _mend_part_words(case: Case) -> str:
    step = 4 // gcd(4, packed_width(case.in_features))
    rows = -(-case.out_features // step) * step
    return f"give the float weight rows of zeros up to N = {rows}, and drop y from column {case.out_features} on"


def _half_scales(case: Case) -> str | None:
    return None if case.scale_dtype == "F32" else f"the scales are {case.scale_dtype}"


def _half_activations(case: Case) -> str | None:
    found = [
        f"{what} is {dtype}" for what, dtype in (("x", case.input_dtype), ("y", case.output_dtype)) if dtype != "F32"
    ]
    return ", ".join(found) or None


def _many_tiles(case: Case) -> str | None:
    tiles = -(-case.rows // _TILE) * -(-case.out_features // _TILE)
    return f"y has {tiles:,} tiles of {_TILE} × {_TILE}, {_MOST_TILES:,} are the most" if tiles > _MOST_TILES else None


@dataclass(frozen=True)
class _Binding:
    what: str
    nbytes: int
    by_rows: bool = False  # it grows with the rows of input


def _too_large(case: Case) -> list[_Binding]:
    """Return the storage bindings that are larger than the device's limit."""
    rows, columns = case.out_features, case.in_features
    bindings = (
        _Binding("the packed weight", rows * packed_width(columns)),
        _Binding("its scales", rows * 4),
        _Binding(f"x for M = {case.rows}", case.rows * columns * 4, by_rows=True),
        _Binding(f"y for M = {case.rows}", case.rows * rows * 4, by_rows=True),
    )
    return [binding for binding in bindings if binding.nbytes > case.max_binding]


def _large_bindings(case: Case) -> str | None:
    found = ", ".join(f"{binding.what} takes {binding.nbytes:,} bytes" for binding in _too_large(case))
    return f"{found}; a binding has at most {case.max_binding:,}" if found else None


def _mend_large_bindings(case: Case) -> str:
    kinds = {binding.by_rows for binding in _too_large(case)}
    advice = ["split the weight by rows into several linears"] * (False in kinds)
    advice += ["run fewer rows of input at a time (--rows)"] * (True in kinds)
    return ", ".join([*advice, "or say what your device binds with --max-binding (qcs4w devices shows it)"])


_ODD_COLUMNS = Rule(
    "odd-columns",
    "export",
    "K is odd",
    "the exporter traces the operator once more on packed weights, there takes K for 2·ceil(K/2), and fails",
    _EXPORT,
    _odd_columns,
    _mend_odd_columns,
)
_PART_WORDS = Rule(
    "part-words",
    "runtime",
    "N·ceil(K/2) is no multiple of 4",
    "the packed weight is read as 32-bit words",
    _HOST,
    _part_words,
    _mend_part_words,
)
_HALF_SCALES = Rule(
    "scale-dtype",
    "runtime",
    "the scales are not float32",
    "the runtime holds the bytes of the scales against 4·N",
    _HOST,
    _half_scales,
    lambda case: "export the model in float32: the scales have the dtype of the weights that they were made of",
)
_HALF_ACTIVATIONS = Rule(
    "activation-dtype",
    "runtime",
    "x or y is not float32",
    "the runtime holds the bytes of x against 4·M·K and those of y against 4·M·N",
    _HOST,
    _half_activations,
    lambda case: "export the model in float32, and without force_fp16",
)
_MISFIT = Rule(
    "shapes",
    "runtime",
    "x or y has not the shape of a linear's",
    "M is taken from x, which must have columns and rows, and y must be M × N",
    _HOST,
    lambda case: case.misfit or ("M is 0" if case.rows == 0 else None),
    lambda case: "export the model again; no exporter is known to write this",
)
_MANY_TILES = Rule(
    "grid",
    "runtime",
    "y has more than 2³² - 1 tiles of 4 × 4",
    "tiles are numbered in 32 bits",
    _HOST,
    _many_tiles,
    lambda case: "run fewer rows of input at a time (--rows)",
)
_EXECUTORCH_BINDINGS = Rule(
    "binding-size",
    "device",
    "an array is larger than one storage binding",
    "each array is bound whole; the runtime asks for all that the adapter has, of which 128 MiB are sure",
    f"{_HOST}; {_DEVICE}; {_WEBGPU}",
    _large_bindings,
    _mend_large_bindings,
)
_DEFAULT_BINDINGS = Rule(
    "binding-size",
    "device",
    "an array is larger than one storage binding",
    "a device that was requested without limits binds 128 MiB at most",
    _WEBGPU,
    _large_bindings,
    _mend_large_bindings,
)

EXECUTORCH_WEBGPU = Target(
    "executorch-webgpu",
    "ExecuTorch's WebGPU runtime",
    (_ODD_COLUMNS, _MISFIT, _PART_WORDS, _HALF_SCALES, _HALF_ACTIVATIONS, _MANY_TILES, _EXECUTORCH_BINDINGS),
)
WEBGPU_DEFAULT = Target(
    "webgpu-default", "a host that binds each array whole, on a WebGPU device with default limits", (_DEFAULT_BINDINGS,)
)

#: Every target by its name; the first is the default.
TARGETS = {target.name: target for target in (EXECUTORCH_WEBGPU, WEBGPU_DEFAULT)}
