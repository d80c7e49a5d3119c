"""How much longer `qcs4w verify` takes than a bare loop over the same dispatches and the same products in torch.

Run by `make bench-verify`. Both are timed in one process, each on a device of its own, after a first tensor that
compiles the kernels. The loop reads no file, checks no digest, compares nothing and reports nothing.
"""

import argparse
import contextlib
import io
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from cases import open_gpu

from qcs4w_cli.main import run
from qcs4w_gpu import Gpu
from qcs4w_gpu.linear import plan_for
from qcs4w_packer import PackedLinear, load_packed, pack_weight, save_container

ROWS = 4  # M


def bare(gpu: Gpu, packed: PackedLinear) -> None:
    """Upload one weight, run both probes, read both answers, and compute both products and the bound in float64."""
    out_features, in_features = packed.out_features, packed.in_features
    plan = plan_for(gpu, ROWS, out_features, in_features)
    x = np.random.default_rng(0).standard_normal((ROWS, in_features), np.float32)
    weights = gpu.upload(packed.packed)
    for scales in (np.ones(out_features, np.float32), packed.scales):
        with gpu.upload(scales) as factors, gpu.upload(x) as inputs, gpu.empty(4 * ROWS * out_features) as y:
            gpu.dispatch(plan.kernel, {0: y, 1: inputs, 2: weights, 3: factors}, plan.sizes, plan.grid)
            gpu.read(y)
    weights.close()
    data = torch.from_numpy(np.array(packed.packed)).to(torch.float64)
    codes = torch.stack((torch.floor(data / 16) - 8, torch.remainder(data, 16) - 8), dim=2).reshape(out_features, -1)
    wide, dense = torch.from_numpy(x).double(), codes * torch.from_numpy(np.array(packed.scales)).double()[:, None]
    _ = wide @ codes.T, wide @ dense.T, wide.abs() @ dense.abs().T


def peak_mib() -> float:
    """Return the most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def verify(path: Path) -> float:
    """Time the command; it must pass."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        start = time.perf_counter()
        code = run(["verify", str(path), "--rows", str(ROWS)])
        seconds = time.perf_counter() - start
    if code:
        sys.exit(f"verify: exit code {code}")
    return seconds


def main() -> None:
    """Print both times, their ratio, and by how much memory grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=2000)
    parser.add_argument("--size", type=int, default=256, help="N and K")
    arguments = parser.parse_args()
    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path, few = Path(folder) / "many.safetensors", Path(folder) / "few.safetensors"
        shape = (arguments.size, arguments.size)
        packed = {f"{i}.weight": pack_weight(draw.standard_normal(shape, np.float32)) for i in range(arguments.tensors)}
        save_container(path, packed)
        tenth = arguments.tensors // 10
        save_container(few, {name: packed[name] for name in list(packed)[:tenth]})
        torch.set_num_threads(1)  # more of them get in the way of a software driver, and the loop would take longer
        with open_gpu() as gpu:
            bare(gpu, load_packed(path, "0.weight"))
            start = time.perf_counter()
            for weight in packed.values():
                bare(gpu, weight)
            loop = time.perf_counter() - start
            adapter = str(gpu.adapter)
        del packed
        verify(few)
        before = peak_mib()
        seconds = verify(path)
        grown = peak_mib() - before
    print(f"{arguments.tensors:,} tensors of {arguments.size} × {arguments.size}, M = {ROWS}, on {adapter}")
    print(f"bare loop     {loop:8.2f} s")
    print(f"qcs4w verify  {seconds:8.2f} s, {seconds / loop:.2f} times the loop")
    print(f"memory        {grown:+8.1f} MiB over a batch of {tenth:,}, at the peak")


if __name__ == "__main__":
    main()
