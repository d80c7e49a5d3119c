"""How fast the kernels are on this machine's adapter, beside its own ceilings and, where torch has CUDA, cuBLAS.

Run by `make bench-kernels`; ENGINE=dawn takes Dawn, SHAPES=1x4096x4096,128x4096x4096 other shapes than those of the
kernels' README. Every product is judged before it is timed.
"""

import argparse
import statistics
import sys

import torch

from qcs4w_gpu import Gpu, GpuError
from qcs4w_gpu.bench import Bench, Timed
from qcs4w_gpu.plan import PRECISIONS

SHAPES = (
    *((rows, 28_672, 8192) for rows in (1, 2, 4, 8, 16)),
    *((rows, 4096, 4096) for rows in (1, 4, 16)),
    *((rows, 8192, 8192) for rows in (32, 64, 128, 512, 2048)),
)
CUBLAS_REPEATS = 10


def cublas_us(shape: tuple[int, int, int], dtype: torch.dtype) -> float:
    """Return the median microseconds of a product by torch with CUDA, two weights in turn."""
    rows, out_features, in_features = shape
    x = torch.randn(rows, in_features, device="cuda").to(dtype)
    weights = [torch.randn(out_features, in_features, device="cuda").to(dtype) for _ in range(2)]
    times = []
    for turn in range(3 * CUBLAS_REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for weight in weights * 3:
            _ = x @ weight.T
        end.record()
        torch.cuda.synchronize()
        if turn >= CUBLAS_REPEATS:  # those before warm it up
            times.append(start.elapsed_time(end) / 6)
    return statistics.median(times) * 1e3


def line(timed: Timed, precision: str, copy: float) -> str:
    """Return a row of the table."""
    time = timed.time
    shape = f"{timed.rows} x {timed.out_features} x {timed.in_features}"
    spread = f"{time.least_ms * 1e3:.1f} to {time.most_ms * 1e3:.1f}" + ("" if time.is_steady else ", clock changed")
    return (
        f"| {shape} | {timed.kernel} | {precision} | {time.median_ms * 1e3:.1f} | {spread} | "
        f"{timed.bytes_per_s / 1e12:.2f} | {timed.bytes_per_s / copy:.0%} | {timed.flops_per_s / 1e12:.1f} | "
        f"{timed.relative_error:.1e} | {'yes' if timed.is_right else 'NO'} |"
    )


def main() -> int:
    """Print the table; fail if a product is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="wgpu")
    parser.add_argument("--adapter")
    parser.add_argument("--shapes", help="MxNxK, with commas between")
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    shapes: list[tuple[int, ...]] = list(SHAPES)
    if given.shapes:
        shapes = [tuple(int(size) for size in shape.split("x")) for shape in given.shapes.split(",")]
    wrong = 0
    with Gpu(given.adapter, engine=given.engine) as gpu, Bench(gpu) as bench:
        ceilings = bench.ceilings()
        copy = ceilings.copy_bytes_per_s
        print(f"{gpu.engine.version} on {gpu.adapter}")
        print(f"copy {copy / 1e12:.3f} TB/s, multiply-adds {ceilings.fma_flops_per_s / 1e12:.1f} TFLOP/s")
        print("| M x N x K | kernel | precision | us | least to most | TB/s | of copy | TFLOP/s | error | right |")
        print("|---|---|---|---|---|---|---|---|---|---|")
        for rows, out_features, in_features in shapes:
            for precision in PRECISIONS:
                if precision == "f16" and (rows < 48 or not gpu.facts.has_matrices):
                    continue
                try:
                    timed = bench.linear((rows, out_features, in_features), precision=precision, repeats=given.repeats)
                except GpuError as error:
                    print(f"| {rows} x {out_features} x {in_features} | {error} |")
                    continue
                wrong += not timed.is_right
                print(line(timed, precision, copy), flush=True)
        empty = bench.chain([bench.shortest] * 40).median_ms
        print(f"a dispatch that does next to nothing, in a chain of 40: {empty * 1e3:.2f} us")
    if torch.cuda.is_available():
        for rows, out_features, in_features in shapes:
            for dtype in (torch.float32, torch.float16):
                us = cublas_us((rows, out_features, in_features), dtype)
                tflops = 2 * rows * out_features * in_features / us / 1e6
                print(f"cuBLAS {dtype} {rows} x {out_features} x {in_features}: {us:.1f} us, {tflops:.1f} TFLOP/s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
