"""Faults that were put into kernels and into the packer on purpose: each has to be caught by `verify --sweep`.

`make mutants` (this file, run as a program) sweeps them all and prints the score. A survivor is a hole in the judge.
The weights of a sweep are packed by code of its own, so that a fault of the packer cannot be on both sides.
"""

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
from cases import edited, open_gpu

from qcs4w_gpu import Gpu, Kernel, parse_kernel, shipped_kernel
from qcs4w_gpu.sweep import Shape, sweep, sweep_shapes
from qcs4w_packer import rowpack


@dataclass(frozen=True)
class Mutant:
    """A kernel with a fault.

    Attributes:
        kernel: the one that is spoilt.
        edits: what is replaced in its text.
        shape: N, K at which the fault has to show.
        rows: M of the bounded probe.
        cause: its name, where the list of causes has one.
        probe: the probe that has to see it: "exact", "bounded", or "guards".
    """

    kernel: str
    edits: tuple[tuple[str, str], ...]
    shape: tuple[int, int] = (37, 67)
    rows: int = 4
    cause: str | None = None
    probe: str = "exact"


NAIVE_CODE = "return f32(i32(nibble) - 8);"
TILED_CODE = "return vec4<f32>(vec4<i32>((words >> vec4<u32>(bit)) & vec4<u32>(0xFu)) - 8);"
MUTANTS = {
    "naive: nibbles swapped": Mutant("linear_naive", (("k % 2u == 0u", "k % 2u == 1u"),), cause="nibbles swapped"),
    "naive: offset missing": Mutant("linear_naive", ((NAIVE_CODE, "return f32(nibble);"),), cause="offset missing"),
    "naive: offset of 7": Mutant(
        "linear_naive",
        ((NAIVE_CODE, "return f32(i32(nibble) - 7);"),),
        cause="offset off by one: 7 for 8",
    ),
    "naive: two's complement": Mutant(
        "linear_naive",
        ((NAIVE_CODE, "return f32(select(i32(nibble), i32(nibble) - 16, nibble > 7u));"),),
        cause="two's complement",
    ),
    "naive: swapped and offset missing": Mutant(
        "linear_naive",
        (("k % 2u == 0u", "k % 2u == 1u"), (NAIVE_CODE, "return f32(nibble);")),
        cause="nibbles swapped and offset missing",
    ),
    "naive: unsigned subtraction wraps": Mutant("linear_naive", ((NAIVE_CODE, "return f32(nibble - 8u);"),)),
    "naive: tail of 8 dropped": Mutant(
        "linear_naive",
        (("if (k >= params.K)", "if (k >= params.K / 8u * 8u)"),),
        cause="dropped tail: last 3 columns",
    ),
    "naive: last column dropped": Mutant(
        "linear_naive", (("if (k >= params.K)", "if (k + 1u >= params.K)"),), cause="dropped tail: last 1 column"
    ),
    "naive: last turn dropped": Mutant(
        "linear_naive", (("k < params.K; k", "k + 16u <= params.K; k"),), cause="dropped tail: last 3 columns"
    ),
    "naive: first column dropped": Mutant("linear_naive", (("var k = 0u;", "var k = 1u;"),)),
    "naive: one column too many": Mutant(
        "linear_naive", (("if (k >= params.K)", "if (k > params.K)"),), shape=(37, 66)
    ),
    "naive: k off by one in x": Mutant("linear_naive", (("m * params.K + k]", "m * params.K + k + 1u]"),)),
    "naive: x read by columns": Mutant(
        "linear_naive", (("m * params.K + k]", "k * params.M + m]"),), cause="x read by columns"
    ),
    "naive: row stride for even K": Mutant("linear_naive", (("n * params.K_packed", "n * (params.K / 2u)"),)),
    "naive: bytes of a word reversed": Mutant(
        "linear_naive", (("8u * (byte_index % 4u)", "24u - 8u * (byte_index % 4u)"),)
    ),
    "naive: scale of the neighbour": Mutant(
        "linear_naive",
        (("* scales[n]", "* scales[(n + 1u) % params.N]"),),
        probe="bounded",
        cause="scales of the neighbour: n + 1 for n",
    ),
    "naive: scale of the row of x": Mutant(
        "linear_naive", (("* scales[n]", "* scales[m]"),), probe="bounded", cause="scales by m in place of n"
    ),
    "naive: scale missing": Mutant("linear_naive", (("* scales[n]", ""),), probe="bounded", cause="scales missing"),
    "naive: 16-bit sums": Mutant(
        "linear_naive", (("y[index] = sum *", "y[index] = quantizeToF16(sum) *"),), shape=(37, 2047), probe="bounded"
    ),
    "naive: 16-bit products": Mutant(
        "linear_naive",
        (("return x[m * params.K + k] *", "return quantizeToF16(x[m * params.K + k]) *"),),
        probe="bounded",
    ),
    "naive: stale accumulator": Mutant("linear_naive", (("var sum = 0.0;", "var sum = y[index];"),)),
    "naive: store unguarded": Mutant(
        "linear_naive", (("if (index >= params.M * params.N) { return; }", ""),), shape=(37, 67), probe="guards"
    ),
    "naive: last element unwritten": Mutant(
        "linear_naive", (("index >= params.M * params.N)", "index >= params.M * params.N - 1u)"),)
    ),
    "naive: output by columns": Mutant(
        "linear_naive", (("y[index] =", "y[n * params.M + m] ="),), cause="y written by columns"
    ),
    "naive: folded rows forgotten": Mutant(
        "linear_naive", (("//! grid = ceil(M * N / WORKGROUP)", "//! grid = max(1, M * N / WORKGROUP)"),)
    ),
    "naive: one wrong code of 8192": Mutant(
        "linear_naive",
        ((NAIVE_CODE, "return f32(i32(nibble) - 8 + select(0, 1, n == 2u && k == 8190u));"),),
        shape=(3, 8192),
    ),
    "gemv: nibbles swapped": Mutant(
        "linear_gemv",
        (
            ("let xe = x_four(m, k0 + j * 8u);", "let xe = x_four(m, 1u + k0 + j * 8u);"),
            ("let xo = x_four(m, k0 + j * 8u + 1u);", "let xo = x_four(m, k0 + j * 8u);"),
        ),
        cause="nibbles swapped",
    ),
    "gemv: offset missing": Mutant(
        "linear_gemv",
        (
            ("(524296.0, 2056.0, 524296.0, 2056.0)", "(524288.0, 2048.0, 524288.0, 2048.0)"),
            ("(8388616.0, 32776.0, 8388616.0, 32776.0)", "(8388608.0, 32768.0, 8388608.0, 32768.0)"),
        ),
        cause="offset missing",
    ),
    "gemv: last column dropped": Mutant(
        "linear_gemv", (("if (k >= params.K)", "if (k + 1u >= params.K)"),), cause="dropped tail: last 1 column"
    ),
    "gemv: bits of a byte mixed up": Mutant("linear_gemv", (("(0xF0u, 0xF000u,", "(0xF000u, 0xF0u,"),)),
    "gemv: upper half of a word forgotten": Mutant(
        "linear_gemv", (("(halves & ODD_MASK)", "(vec4<u32>(word) & ODD_MASK)"),)
    ),
    "gemv: last step of the sum left out": Mutant("linear_gemv", (("step > 0u;", "step > 1u;"),)),
    "gemv: second turn left out": Mutant("linear_gemv", (("at += THREADS", "at += 2u * THREADS"),), shape=(3, 8192)),
    "gemv: first row of x for all": Mutant("linear_gemv", (("let m = index % params.M;", "let m = 0u;"),)),
    "gemv: neighbouring rows exchanged": Mutant("linear_gemv", (("weights[row.y + at]", "weights[row.z + at]"),)),
    "gemv: scale of the group": Mutant("linear_gemv", (("* scales[n0 + local]", "* scales[n0]"),), probe="bounded"),
    "gemv: columns unguarded": Mutant("linear_gemv", ((" && n0 + local < params.N", ""),), probe="guards"),
    "gemv: one wrong code of 8192": Mutant(
        "linear_gemv",
        (
            (
                "let w0 = weights[row.x + at];",
                "let w0 = weights[row.x + at] ^ vec4<u32>(0u, 0u, 0u, select(0u, 0x10000000u, at == 255u));",
            ),
        ),
        shape=(3, 8192),
    ),
    "tiled: nibbles swapped": Mutant(
        "linear_tiled", (("vec4<u32>(bit)", "vec4<u32>(bit ^ 4u)"),), cause="nibbles swapped"
    ),
    "tiled: offset missing": Mutant(
        "linear_tiled", ((TILED_CODE, TILED_CODE.replace(" - 8", "")),), cause="offset missing"
    ),
    "tiled: one column of each half word twice": Mutant(
        "linear_tiled", (("codes_at(half, 8u)", "codes_at(half, 0u)"),)
    ),
    "tiled: last column dropped": Mutant(
        "linear_tiled",
        (("m >= params.M || k >= params.K", "m >= params.M || k + 1u >= params.K"),),
        cause="dropped tail: last 1 column",
    ),
    "tiled: last word dropped": Mutant(
        "linear_tiled", (("word >= row_words", "word + 1u >= row_words"),), cause="dropped tail: last 3 columns"
    ),
    "tiled: last tile dropped": Mutant(
        "linear_tiled", (("k0 < params.K;", "k0 + TILE_K <= params.K;"),), cause="dropped tail: last 3 columns"
    ),
    "tiled: tile of weights stands still": Mutant("linear_tiled", (("(k0 + k) / 8u", "k / 8u"),)),
    "tiled: sums start again": Mutant(
        "linear_tiled",
        (("    load_tiles(m0,", "    sums = array<vec4<f32>, 16>();\n    load_tiles(m0,"),),
    ),
    "tiled: columns unguarded": Mutant("linear_tiled", (("if (n < params.N) { y[", "{ y["),), rows=65),
    "tiled: rows unguarded": Mutant(
        "linear_tiled", (("if (m >= params.M) { return; }", ""),), shape=(3, 67), probe="guards"
    ),
    "tiled: scale of the first row": Mutant(
        "linear_tiled", (("sum.x * scales[n]", "sum.x * scales[0]"),), probe="bounded"
    ),
    "tiled: every fourth column unwritten": Mutant(
        "linear_tiled", (("if (n + 3u < params.N) { y[at + 3u] = sum.w * scales[n + 3u]; }", ""),)
    ),
    "tiled: wrong in one late row": Mutant(
        "linear_tiled",
        (("y[at] = sum.x *", "y[at] = (sum.x + select(0.0, 1.0, m == 40u)) *"),),
        shape=(3, 8192),
        rows=65,
    ),
    "tiled: row of tiles miscounted": Mutant(
        "linear_tiled", (("(tile / tiles_m) * TILE_N", "(tile / tiles_n) * TILE_N"),), rows=65
    ),
    "tiled: one wrong code of 8192": Mutant(
        "linear_tiled",
        (
            (
                "return weights[n * row_words + word];",
                "return weights[n * row_words + word] ^ select(0u, 0x10000000u, n == 1u && word == 1023u);",
            ),
        ),
        shape=(3, 8192),
    ),
}

FLOOR = "SCALE_FLOOR = np.float32(2.0**-23)"
ABSMAX = "np.maximum(weight.max(axis=1), -weight.min(axis=1))"
PAD = "nibbles[:, columns:] = PAD_NIBBLE"
SHIFT = "np.add(codes.view(np.uint8), np.uint8(OFFSET), out=nibbles[:, :columns])"
JOIN = """    pairs *= np.uint16(0x1001)  # the even one is added to the high byte, 4 bits up: even << 4 | odd
    pairs >>= np.uint16(8)
"""

# Edits of the packer: the file, and what is replaced in it.
PACKING: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "pack: nibbles swapped": ("nibbles", ((JOIN, "    pairs |= pairs >> np.uint16(4)\n"),)),
    "pack: odd column from the even one": (
        "nibbles",
        ((JOIN, "    pairs &= np.uint16(0xFF)\n    pairs *= np.uint16(0x11)\n"),),
    ),
    "pack: offset missing": ("nibbles", ((SHIFT, "nibbles[:, :columns] = codes.view(np.uint8) & np.uint8(15)"),)),
    "pack: offset of 7": (
        "nibbles",
        ((SHIFT, "nibbles[:, :columns] = codes.view(np.uint8) + np.uint8(7) & np.uint8(15)"),),
    ),
    "pack: padded after the shift": (
        "nibbles",
        ((PAD, "nibbles[:, columns:] = 0"),),
    ),
    "pack: high nibble alone": ("nibbles", (("np.uint16(0x1001)", "np.uint16(0x1000)"),)),
    "pack: divisor 7": ("quantize", (("np.float32(7.5)", "np.float32(7)"),)),
    "pack: divisor 8": ("quantize", (("np.float32(7.5)", "np.float32(8)"),)),
    "pack: no floor on the scale": (
        "quantize",
        ((FLOOR, "SCALE_FLOOR = np.float32(0)"),),
    ),
    "pack: floor doubled": (
        "quantize",
        ((FLOOR, "SCALE_FLOOR = np.float32(2.0**-22)"),),
    ),
    "pack: divided by the scale": (
        "quantize",
        (("np.multiply(weight, inverse[:, None], out=out)", "np.divide(weight, scales[:, None], out=out)"),),
    ),
    "pack: halves away from zero": (
        "quantize",
        (("np.rint(scaled, out=out)", "np.trunc(scaled + np.copysign(np.float32(0.5), scaled), out=out)"),),
    ),
    "pack: halves down": ("quantize", (("np.rint(scaled, out=out)", "np.ceil(scaled - np.float32(0.5), out=out)"),)),
    "pack: cut off in place of rounded": ("quantize", (("np.rint(scaled, out=out)", "np.trunc(scaled, out=out)"),)),
    "pack: clamp at -7": ("quantize", (("np.float32(CODE_MIN)", "np.float32(CODE_MIN + 1)"),)),
    "pack: clamp at 6": ("quantize", (("np.float32(CODE_MAX)", "np.float32(CODE_MAX - 1)"),)),
    "pack: largest value for largest magnitude": (
        "quantize",
        ((ABSMAX, "np.abs(weight.max(axis=1))"),),
    ),
}

# Edits that change no y, with the proof. The sweep has to pass them: what it calls a fault is one.
EQUIVALENT = {
    # A word past the row's end meets x of zero (x_at), and rows of weights past N are never stored (store_four): what
    # the codes are there changes no sum.
    "tiled: no code of zero past the end": Mutant("linear_tiled", (("return 0x88888888u;", "return 0u;"),)),
    # Rows of x past M fill rows of sums past M, which store_four leaves out; a read out of bounds is bounded in WGSL.
    "tiled: rows of x unguarded": Mutant("linear_tiled", (("m >= params.M || k >= params.K", "k >= params.K"),)),
    # Rows of weights past N fill sums past N, which the last line leaves out; the same of reads out of bounds.
    "gemv: rows of weights unclamped": Mutant("linear_gemv", (("min(n0 + 3u, last)", "n0 + 3u"),)),
    # A u32 modulo 2 is 0 or 1.
    "naive: below one": Mutant("linear_naive", (("k % 2u == 0u", "k % 2u < 1u"),)),
}


def mutant_kernel(mutant: Mutant) -> Kernel:
    """Return a kernel with its fault."""
    return parse_kernel("mutant", edited(shipped_kernel(mutant.kernel).source, *mutant.edits))


@contextlib.contextmanager
def mutated_packer(module: str, edits: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Pack by an edited module within the block."""
    path = Path(rowpack.__file__).with_name(f"{module}.py")
    name = f"qcs4w_packer._mutated_{module}"
    changed = ModuleType(name)
    changed.__package__ = "qcs4w_packer"
    sys.modules[name] = changed  # dataclasses look their module up
    exec(compile(edited(path.read_text("utf-8"), *edits), str(path), "exec"), changed.__dict__)
    original = sys.modules[f"qcs4w_packer.{module}"]
    names = [name for name in vars(rowpack) if name in vars(original) and not name.startswith("__")]
    kept = {name: getattr(rowpack, name) for name in names if callable(getattr(original, name)) or name.isupper()}
    try:
        for each in kept:
            setattr(rowpack, each, getattr(changed, each))
        with np.errstate(all="ignore"):  # a fault may divide by zero
            yield
    finally:
        for each, value in kept.items():
            setattr(rowpack, each, value)
        del sys.modules[name]


def first_failure(gpu: Gpu, kernel: Kernel | None) -> Shape | None:
    """Return the smallest shape of the sweep that fails, or None where all pass."""
    return next((shape for shape, verdict in sweep(gpu, kernel, rounding_factor=1) if verdict.status == "fail"), None)


def main() -> int:
    """Sweep all mutants, print where each is caught, and the score."""
    survivors, started = [], time.monotonic()

    def tell(name: str, found: Shape | None) -> None:
        survivors.extend([] if found else [name])
        sys.stdout.write(f"{'caught  ' if found else 'SURVIVED'}  {name:<50} {found or ''}\n")
        sys.stdout.flush()

    with open_gpu() as gpu:
        for name, mutant in MUTANTS.items():
            tell(name, first_failure(gpu, mutant_kernel(mutant)))
        for name, (module, edits) in PACKING.items():
            with mutated_packer(module, edits):
                tell(name, first_failure(gpu, shipped_kernel("linear_naive")))
        wrong = [name for name, mutant in EQUIVALENT.items() if first_failure(gpu, mutant_kernel(mutant))]
    total, equivalent = len(MUTANTS) + len(PACKING), len(EQUIVALENT)
    sys.stdout.write(
        f"\n{total - len(survivors)} of {total} mutants caught by {len(sweep_shapes())} shapes "
        f"in {time.monotonic() - started:.0f} s; {equivalent - len(wrong)} of {equivalent} equivalent edits pass\n"
    )
    return 1 if survivors or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
