"""Shapes and weights that every kernel has to get right, and the device that they run on."""

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qcs4w_gpu import FAST_KERNELS, LINEAR_KERNELS, Gpu, Kernel, Plan, plan_linear
from qcs4w_gpu.linear import POISON, pad_columns
from qcs4w_packer import PackedLinear
from qcs4w_packer.nibbles import PAD_BYTE, pack_codes

#: Every kernel of the linear that any device can run.
KERNELS = (*LINEAR_KERNELS, *FAST_KERNELS)

#: One, a few, primes, powers of two and their neighbours; odd K has a pad nibble, and byte counts miss multiples of 4.
ROWS = (1, 2, 3, 5, 17, 65)
SIZES = (1, 2, 3, 5, 7, 8, 63, 64, 65, 113, 129)
SMALL_SHAPES = ((1, 1, 1), (1, 1, 2), (3, 5, 3), (2, 3, 10), (5, 7, 1), (17, 33, 31), (33, 65, 129), (9, 2, 1))

#: What WebGPU promises on every device, as far as compute work is concerned.
WEBGPU_LIMITS = {
    "max-bind-groups": 4,
    "max-bindings-per-bind-group": 1000,
    "max-storage-buffers-per-shader-stage": 8,
    "max-uniform-buffer-binding-size": 65536,
    "max-storage-buffer-binding-size": 134217728,
    "max-buffer-size": 268435456,
    "max-compute-workgroup-storage-size": 16384,
    "max-compute-invocations-per-workgroup": 256,
    "max-compute-workgroup-size-x": 256,
    "max-compute-workgroup-size-y": 256,
    "max-compute-workgroup-size-z": 64,
    "max-compute-workgroups-per-dimension": 65535,
}


#: Which engine and which limits the tests run with: "wgpu" or "dawn"; all that the adapter has, or "default".
ENGINE = os.environ.get("QCS4W_ENGINE", "wgpu")
LIMITS = os.environ.get("QCS4W_LIMITS", "adapter")


def open_gpu(**given: Any) -> Gpu:
    """Open a device as the environment asks: QCS4W_LIMITS=default has WebGPU's default limits and no feature at all."""
    if LIMITS == "default":
        given = {"limits": WEBGPU_LIMITS, "features": ()} | given
    return Gpu(**{"engine": ENGINE} | given)


def shapes() -> Iterator[tuple[int, int]]:
    """Yield every N, K of the exact table."""
    return ((n, k) for n in SIZES for k in SIZES)


def random_codes(out_features: int, in_features: int, seed: int = 0) -> NDArray[np.int8]:
    """Return int8 codes in [-8, 7], shape (N, K)."""
    return np.random.default_rng(seed).integers(-8, 8, (out_features, in_features)).astype(np.int8)


def packed_of(codes: NDArray[np.int8], scales: NDArray[np.float32] | None = None) -> PackedLinear:
    """Return a packed weight of given codes, with scales of 1 where none are given."""
    ones = np.ones(len(codes), np.float32)
    return PackedLinear(pack_codes(codes), ones if scales is None else scales.astype(np.float32), codes.shape[1])


def exact_case(
    rows: int, out_features: int, in_features: int
) -> tuple[PackedLinear, NDArray[np.float32], NDArray[np.float32]]:
    """Return (weight, x, y) for which float32 has nothing to round: small integers, and scales of powers of two.

    y is computed from the codes before they are packed, in whole numbers.
    """
    draw = np.random.default_rng((rows, out_features, in_features))
    codes = random_codes(out_features, in_features, seed=rows * 100_000 + out_features * 1_000 + in_features)
    powers = draw.integers(-3, 4, out_features)
    x = draw.integers(1, 5, (rows, in_features)) * draw.choice((-1, 1), (rows, in_features))
    y = (x.astype(np.int64) @ codes.astype(np.int64).T) * 2.0**powers
    return packed_of(codes, np.exp2(powers)), x.astype(np.float32), y.astype(np.float32)


def run_with_limits(
    gpu: Gpu, kernel: Kernel, packed: PackedLinear, x: NDArray[np.float32], limits: Mapping[str, int], stride: int
) -> tuple[Plan, NDArray[np.float32], bool]:
    """Plan for limits that the device does not have, and dispatch that plan.

    Returns:
        The plan, y, and whether the guard words behind y are untouched.
    """
    rows, out_features = len(x), packed.out_features
    plan = plan_linear(rows, out_features, packed.in_features, kernel=kernel, stride=stride, limits=limits)
    padded = np.full((out_features, stride), PAD_BYTE, np.uint8)
    padded[:, : packed.packed.shape[1]] = packed.packed
    count = rows * out_features
    out = gpu.upload(np.full(count + 256, POISON))
    buffers = {
        0: out,
        1: gpu.upload(pad_columns(x, plan.x_stride)),
        2: gpu.upload(padded),
        3: gpu.upload(packed.scales),
    }
    gpu.dispatch(kernel, buffers, plan.sizes, plan.grid)
    words = gpu.read(out)
    for buffer in buffers.values():
        buffer.close()
    return plan, words[:count].view(np.float32).reshape(rows, out_features), bool((words[count:] == POISON).all())


def with_subgroups(source: str) -> str:
    """Return the naive kernel with a subgroup operation in it, in uniform control flow, that changes no y."""
    return "enable subgroups;\n" + edited(
        source,
        ("  let index = (", "  let one = subgroupBroadcastFirst(1.0);\n  let index = ("),
        ("= sum * scales[n]", "= one * sum * scales[n]"),
    )


def edited(source: str, *edits: tuple[str, str]) -> str:
    """Return a text with some parts replaced, each of which must occur exactly once."""
    for old, new in edits:
        assert source.count(old) == 1, f"occurs {source.count(old)} times: {old}"
        source = source.replace(old, new)
    return source


#: How float32 sums may be ordered; each takes (M, N, K) products and returns (M, N) sums.
SUMMATIONS: dict[str, Callable[[NDArray[np.float32]], NDArray[np.float32]]] = {
    "forward": lambda products: np.add.accumulate(products, axis=-1, dtype=np.float32)[..., -1],
    "backward": lambda products: np.add.accumulate(products[..., ::-1], axis=-1, dtype=np.float32)[..., -1],
    "ascending": lambda products: np.add.accumulate(np.sort(products, axis=-1), axis=-1, dtype=np.float32)[..., -1],
    "largest first": lambda products: np.add.accumulate(
        np.take_along_axis(products, np.argsort(-np.abs(products), axis=-1), axis=-1), axis=-1, dtype=np.float32
    )[..., -1],
    "pairwise": lambda products: products.sum(axis=-1, dtype=np.float32),
}
