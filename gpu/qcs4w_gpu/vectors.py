"""Test vectors: inputs, packed weights and what y must be, for authors of kernels in any language. Needs no adapter.

Two kinds, as the judge has two probes. *exact*: x of whole numbers in [-4, 4], scales of 1: every float32 sum is exact,
y must be equal, and any single wrong code shows. *bounded*: x and scales with fractions, where |y - y64| may reach the
bound that float32 rounding explains (see `judge`).

Everything is drawn as whole numbers of few bits, from a generator whose stream never changes: x = a / 2^10 with
|a| < 2^11, scale = m · 2^(e-18) with m < 2^12. The terms of one y[m, n] are then whole multiples, below 2^26, of one
power of two; float64 sums EXACT_WINDOW of them exactly in any order. So y is the true value, and the files are the same
on every machine.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from qcs4w_packer import PackedLinear, pack_codes
from qcs4w_packer.errors import UsageError
from qcs4w_packer.nibbles import CODE_MIN

from .judge import EXACT_WINDOW, oracle, reference

Kind = Literal["exact", "bounded"]
KINDS: tuple[Kind, ...] = ("exact", "bounded")

#: M, N, K by default: ones, primes, powers of two and their neighbours; odd K has a pad nibble, and N·ceil(K/2) is not
#: always a multiple of 4.
DEFAULT_SIZES = (
    (1, 1, 1), (1, 1, 2), (2, 3, 3), (3, 5, 7), (5, 7, 1), (2, 3, 10), (1, 4, 8), (4, 4, 16), (17, 33, 31), (1, 64, 64),
    (5, 65, 63), (33, 65, 129), (3, 113, 257), (1, 16, 1024), (2, 3, 4099),
)  # fmt: skip

#: Numbers of x, weight and y together that a case may have: more do not belong into a C header.
MAX_ELEMENTS = 1 << 21


@dataclass(frozen=True, eq=False)
class Vector:
    """One case.

    Attributes:
        kind: "exact" or "bounded".
        x: float32, shape (M, K).
        packed: the weight, N × K.
        y: float64, shape (M, N), x · Ŵᵀ.
        bound: float32, shape (M, N), the largest |y32 - y| that is right, rounded up; None where y must be equal.
    """

    kind: Kind
    x: NDArray[np.float32]
    packed: PackedLinear
    y: NDArray[np.float64]
    bound: NDArray[np.float32] | None

    @property
    def size(self) -> tuple[int, int, int]:
        """M, N, K."""
        return len(self.x), self.packed.out_features, self.packed.in_features

    @property
    def name(self) -> str:
        """For files and for C: exact_3x5x7."""
        return f"{self.kind}_{'x'.join(map(str, self.size))}"


def make_vector(rows: int, out_features: int, in_features: int, *, kind: Kind, seed: int = 0) -> Vector:
    """Make one case; the same arguments give the same bits on every machine.

    Raises:
        UsageError: a size is below 1, or they are too large.
    """
    check_size(rows, out_features, in_features)
    draw = _Draw((seed, rows, out_features, in_features, KINDS.index(kind)))
    codes = (draw(out_features, in_features, below=16) + CODE_MIN).astype(np.int8)
    signs = 1 - 2 * draw(rows, in_features, below=2)
    if kind == "exact":
        x = (signs * (1 + draw(rows, in_features, below=4))).astype(np.float32)
        packed = PackedLinear(pack_codes(codes), np.ones(out_features, np.float32), in_features)
        return Vector(kind, x, packed, oracle(packed, x), None)
    x = (signs * draw(rows, in_features, below=2048)).astype(np.float32) / np.float32(1024)
    mantissas = 2048 + draw(out_features, below=2048)
    scales = np.ldexp(mantissas.astype(np.float32), draw(out_features, below=8).astype(np.int32) - 18)
    packed = PackedLinear(pack_codes(codes), scales.astype(np.float32), in_features)
    expected = reference(packed, x)
    return Vector(kind, x, packed, expected.y, _round_up(expected.bound))


def check_size(rows: int, out_features: int, in_features: int) -> None:
    """Check that a case of this size can be made.

    Raises:
        UsageError: a size is below 1, or they are too large.
    """
    text = f"{rows},{out_features},{in_features}"
    if min(rows, out_features, in_features) < 1:
        raise UsageError(f"the size {text} is M,N,K with each at least 1")
    elements = rows * in_features + out_features * in_features + rows * out_features
    if in_features > EXACT_WINDOW or elements > MAX_ELEMENTS:
        raise UsageError(
            f"the size {text} has {elements:,} numbers, test vectors have at most {MAX_ELEMENTS:,}, "
            f"and K at most {EXACT_WINDOW:,}",
            hint="qcs4w verify --kernel judges a WGSL kernel on any size",
        )


class _Draw:
    """Whole numbers from raw bits: numpy promises that these never change, unlike what its Generator makes of them."""

    def __init__(self, seed: tuple[int, ...]):
        self._bits = np.random.PCG64(np.random.SeedSequence(list(seed)))

    def __call__(self, *shape: int, below: int) -> NDArray[np.int64]:
        """Return int64 in [0, below), a power of two, of some shape."""
        raw = np.asarray(self._bits.random_raw(int(np.prod(shape))), np.uint64)
        return (raw >> np.uint64(32) & np.uint64(below - 1)).astype(np.int64).reshape(shape)


def _round_up(bound: NDArray[np.float64]) -> NDArray[np.float32]:
    """Round to float32, never below the value."""
    near = bound.astype(np.float32)
    return np.where(near < bound, np.nextafter(near, np.float32(np.inf)), near).astype(np.float32)
