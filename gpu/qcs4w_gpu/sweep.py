"""A sweep of shapes for a kernel that somebody is writing, on weights that were packed by slow code of its own.

The packer under test has no part in the weights of a sweep: they are quantized and packed here, number by number. The
packer is held against them: packing the same floats has to give the same bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from qcs4w_packer import PackedLinear, Qcs4wError

from .dispatcher import Gpu
from .kernel import Kernel
from .reproduce import Reproducer, reproduce_kernel
from .verify import Verdict, rounding_factor_of, verify

_ROWS = (1, 3, 4, 5, 17)
_OUT_FEATURES = (1, 2, 3, 5, 7, 63, 65)
_IN_FEATURES = (1, 2, 3, 5, 8, 31, 64, 67, 257)
# Tiles of 64 × 128 and their neighbours; long rows, of which one code alone may be wrong.
_SPECIAL_FROM = 5  # rows; fewer are all random
_LARGER = (
    (64, 128, 16),
    (65, 129, 33),
    (33, 130, 40),
    (130, 9, 12),
    (4, 37, 2047),
    (1, 5, 4099),
    (4, 3, 8192),
    (65, 3, 8192),
)


@dataclass(frozen=True, order=True)
class Shape:
    """M, N and K of a linear."""

    rows: int
    out_features: int
    in_features: int

    @property
    def products(self) -> int:
        """How many products a linear of this shape adds up."""
        return self.rows * self.out_features * self.in_features

    def __str__(self) -> str:
        return f"M {self.rows}, N {self.out_features}, K {self.in_features}"


# Of one product all faults look alike: why a kernel fails at a smaller shape than this is told by what it does here.
_TELLING = Shape(5, 37, 67)


def sweep_shapes() -> list[Shape]:
    """Return the shapes of a sweep, the smallest first: every N with every K, and each M with many of both."""
    pairs = [(n, k) for n in _OUT_FEATURES for k in _IN_FEATURES]
    shapes = [Shape(_ROWS[i % len(_ROWS)], n, k) for i, (n, k) in enumerate(pairs)]
    shapes += [Shape(*each) for each in _LARGER]
    return sorted(shapes, key=lambda each: (each.products, each))


def sweep(
    gpu: Gpu,
    kernel: Kernel | None = None,
    *,
    shapes: Sequence[Shape] | None = None,
    seed: int = 0,
    rounding_factor: int | None = None,
) -> Iterator[tuple[Shape, Verdict]]:
    """Verify a kernel at many shapes, the smallest first; the causes of what fails are told at one of some size.

    Args:
        gpu: where to run.
        kernel: to judge; by default what the plan chooses for each shape.
        shapes: by default `sweep_shapes`.
        seed: of all random numbers.
        rounding_factor: c of the bound; by default the adapter is probed.

    Raises:
        LimitError, GpuError: as running does.
    """
    factor = rounding_factor_of(gpu) if rounding_factor is None else rounding_factor
    for shape in sweep_shapes() if shapes is None else shapes:
        verdict = _verify_shape(gpu, kernel, shape, seed, factor)
        if verdict.status == "fail" and shape.products < _TELLING.products:
            verdict = _explained(gpu, kernel, verdict, seed, factor)
        yield shape, verdict


def reproduce_shape(
    gpu: Gpu, kernel: Kernel | None, shape: Shape, verdict: Verdict, *, seed: int = 0
) -> Reproducer | None:
    """Return the smallest part of a shape that fails.

    Args:
        gpu: where it failed.
        kernel: that was judged, as for `sweep`.
        shape: of a sweep.
        verdict: its failure.
        seed: the sweep's.

    Returns:
        None where the kernel is right, and the packer is not: its bytes are not saved here.
    """
    if verdict.bounded.is_match and (verdict.exact is None or verdict.exact.is_match):
        return None
    x = np.random.default_rng(seed).standard_normal((shape.rows, shape.in_features), np.float32)  # as `ask` draws it
    packed = pack_slowly(sweep_weight(shape, seed))
    return reproduce_kernel(
        gpu, packed, verdict, x=x, seed=seed, kernel=kernel, rounding_factor=rounding_factor_of(gpu)
    )


def _verify_shape(gpu: Gpu, kernel: Kernel | None, shape: Shape, seed: int, factor: int) -> Verdict:
    weight = sweep_weight(shape, seed)
    return verify(
        gpu, pack_slowly(weight), rows=shape.rows, seed=seed, kernel=kernel, source=weight, rounding_factor=factor
    )


def _explained(gpu: Gpu, kernel: Kernel | None, verdict: Verdict, seed: int, factor: int) -> Verdict:
    """Return the verdict of a small shape with the causes that a larger one shows, where that fails too."""
    probes = [probe for probe in (verdict.exact, verdict.bounded) if probe is not None]
    if any(probe.unwritten or not probe.guards_intact for probe in probes):  # that is the cause
        return verdict
    try:
        larger = _verify_shape(gpu, kernel, _TELLING, seed, factor)
    except Qcs4wError:  # this kernel takes no such shape
        return verdict
    if larger.status == "pass":
        return verdict
    causes = (replace(cause, evidence=f"at {_TELLING}: {cause.evidence}") for cause in larger.causes)
    return replace(verdict, causes=tuple(causes))


def sweep_weight(shape: Shape, seed: int) -> NDArray[np.float32]:
    """Return random weights (N, K), of which some rows try the packer: tiny ones, zeros, and nothing but ties."""
    draw = np.random.default_rng((seed, shape.rows, shape.out_features, shape.in_features))
    weight: NDArray[np.float32] = draw.standard_normal((shape.out_features, shape.in_features), np.float32)
    if shape.out_features >= _SPECIAL_FROM:
        weight[1] *= np.float32(1e-7)  # below the floor of the scale
        weight[2] = 0
        weight[3] = (np.arange(shape.in_features) % 16 - np.float32(7.5)) / np.float32(8)
    return weight


def pack_slowly(weight: NDArray[np.float32]) -> PackedLinear:
    """Quantize and pack a weight number by number, by the words of the format and nothing else.

    Args:
        weight: float32, shape (N, K), finite.
    """
    rows, scales = [], []
    for row in weight:
        values = [float(value) for value in row]
        largest = max(abs(value) for value in values)
        scale = max(np.float32(largest) / np.float32(7.5), np.float32(2.0**-23))
        inverse = np.float32(1) / scale
        codes = [max(-8, min(7, round(float(np.float32(value) * inverse)))) for value in values]  # halves to even
        if len(codes) % 2:
            codes.append(0)
        rows.append([(even + 8) * 16 + (odd + 8) for even, odd in zip(codes[::2], codes[1::2], strict=True)])
        scales.append(scale)
    return PackedLinear(np.array(rows, np.uint8), np.array(scales, np.float32), weight.shape[1])
