"""The execution matrix: every kernel on every engine and driver, judged, and held against each other bit by bit.

`make conformance` runs it. It prints the table, writes it into the kernels' README, and fails if a cell fails or the
outputs of naga and Tint differ on one driver. Each cell runs in a process of its own with one Vulkan driver.
"""

import argparse
import base64
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cases import WEBGPU_LIMITS
from chromium import chromium, opened, served, swiftshader_icd
from matrix_cases import GUARD_WORDS, Case, matrix_cases, words
from numpy.typing import NDArray

from qcs4w_gpu import Gpu
from qcs4w_gpu.kernel import PARAMS_BINDING
from qcs4w_gpu.linear import POISON

README = Path(__file__).parent.parent / "gpu" / "qcs4w_gpu" / "kernels" / "README.md"
MARKED = re.compile(r"(<!-- matrix: made by make conformance -->\n).*?(<!-- end of matrix -->)", re.DOTALL)
TIMEOUT_S = 900
PARALLEL = 2


@dataclass(frozen=True)
class Cell:
    """An engine on a driver."""

    engine: str
    driver: str

    @property
    def title(self) -> str:
        """As it stands over a column."""
        return {"wgpu": "wgpu (naga)", "dawn": "Dawn (Tint)", "chromium": "Chromium (Tint)"}[self.engine]


CELLS = (
    Cell("wgpu", "lavapipe"),
    Cell("wgpu", "SwiftShader"),
    Cell("dawn", "SwiftShader"),
    Cell("chromium", "SwiftShader"),
)


@dataclass(frozen=True)
class Ran:
    """What came out of a cell: by case the output's words, or None where the device lacks what the kernel enables."""

    where: str
    seconds: float
    outputs: list[NDArray[np.uint32] | None]


def driver_manifest(driver: str) -> Path:
    """Return the Vulkan manifest of a software driver, for VK_DRIVER_FILES."""
    if driver == "SwiftShader":
        return swiftshader_icd()
    folders = ("/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d")
    for path in (path for folder in folders for path in Path(folder).glob("lvp_icd*.json")):
        return path
    raise FileNotFoundError("no lavapipe: install Mesa's software driver, apt-get install mesa-vulkan-drivers")


# --- one cell, in a process of its own ---


def run_here(engine: str) -> dict[str, Any]:
    """Run every case through the dispatcher, on a device with WebGPU's default limits."""
    wanted = {feature for case in matrix_cases() for feature in case.kernel.features}
    with Gpu(engine=engine, limits=WEBGPU_LIMITS, features=()) as probe:
        features = wanted & probe.adapter.features
    outputs: list[NDArray[np.uint32]] = []
    with Gpu(engine=engine, limits=WEBGPU_LIMITS, features=features) as gpu:
        for case in matrix_cases():
            if case.kernel.features - gpu.features:
                outputs.append(np.zeros_like(case.buffers[0]))
                continue
            buffers = {index: gpu.upload(content) for index, content in case.buffers.items()}
            gpu.dispatch(case.kernel, buffers, case.sizes, case.grid)
            outputs.append(gpu.read(buffers[0]))
            for buffer in buffers.values():
                buffer.close()
        where = f"{gpu.engine.version} on {gpu.adapter.name}"
    return _result(np.concatenate(outputs).tobytes(), where, sorted(wanted - features))


def run_in_a_page() -> dict[str, Any]:
    """Run every case in a page of Chromium, on a device with WebGPU's default limits."""
    kernels = {case.kernel.name: case.kernel for case in matrix_cases()}
    names, told, pieces, at = list(kernels), [], [], 0
    for case in matrix_cases():
        contents = {**case.buffers, PARAMS_BINDING: np.array([*case.sizes.values()], np.uint32)}
        buffers = []
        for binding, kind in sorted(case.kernel.bindings.items()):
            content = words(contents[binding])
            buffers.append([binding, kind, at, content.size])
            pieces.append(content)
            at += content.size
        told.append({"kernel": names.index(case.kernel.name), "grid": case.grid, "buffers": buffers})
    described = [
        {
            "name": kernel.name,
            "source": kernel.source,
            "entry_point": kernel.entry_point,
            "bindings": sorted(kernel.bindings.items()),
            "features": sorted(kernel.features),
        }
        for kernel in kernels.values()
    ]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "index.html").write_text("<title>matrix</title>")
        (Path(folder) / "data.bin").write_bytes(np.concatenate(pieces).tobytes())
        with served(Path(folder)) as base, chromium() as browser, opened(browser, base) as page:
            script = (Path(__file__).parent / "matrix.js").read_text("utf-8")
            result = page.evaluate(script, {"kernels": described, "cases": told, "base": base})
            where = f"Chromium {browser.version} on {result['adapter']}"
    return _result(base64.b64decode(result["outputs"]), where, result["missing"])


def _result(outputs: bytes, where: str, missing: Sequence[str]) -> dict[str, Any]:
    return {"outputs": base64.b64encode(outputs).decode(), "where": where, "missing": list(missing)}


# --- all cells ---


def run_cell(cell: Cell) -> Ran:
    """Run a cell in a process of its own that sees one driver only."""
    driver = str(driver_manifest(cell.driver))
    environment = {**os.environ, "VK_DRIVER_FILES": driver, "VK_ICD_FILENAMES": driver}
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, __file__, "--cell", cell.engine],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{cell.title} on {cell.driver} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return unpacked(json.loads(done.stdout), time.monotonic() - start)


def unpacked(result: dict[str, Any], seconds: float) -> Ran:
    """Part what a cell printed into the outputs of its cases."""
    flat, outputs, at = np.frombuffer(base64.b64decode(result["outputs"]), np.uint32), [], 0
    for case in matrix_cases():
        size = case.buffers[0].size
        outputs.append(None if case.kernel.features & set(result["missing"]) else flat[at : at + size])
        at += size
    assert at == flat.size
    return Ran(result["where"], seconds, outputs)


def fault(case: Case, output: NDArray[np.uint32], rounding_factor: int) -> str | None:
    """Return what is wrong with an output, or None."""
    seen, guards = output[:-GUARD_WORDS], output[-GUARD_WORDS:]
    y = seen.view(np.float32).astype(np.float64)
    if (guards != POISON).any():
        return "wrote behind its output"
    if case.kind == "bounded":
        assert case.bound is not None
        wrong = ~(np.abs(y - case.wanted) <= rounding_factor * case.bound)
    else:
        wrong = y != case.wanted
    return f"{int(wrong.sum())} of {y.size} elements wrong" if wrong.any() else None


def judge(ran: Ran) -> tuple[dict[str, str], list[str]]:
    """Return by kernel what a cell has shown, and every fault."""
    shown: dict[str, str] = {}
    faults: list[str] = []
    factor = 1
    counts: dict[str, dict[str, int]] = {}
    for case, output in zip(matrix_cases(), ran.outputs, strict=True):
        if output is None:
            shown[case.kernel.name] = f"needs {', '.join(sorted(case.kernel.features))}"
            continue
        found = fault(case, output, factor)
        if case.kind == "probe":
            factor = 1 if found is None else 2
            shown[case.kernel.name] = "rounds to nearest" if found is None else "does not round to nearest"
            continue
        if found:
            faults.append(f"{case.label}: {found}")
        passed = counts.setdefault(case.kernel.name, {"exact": 0, "bounded": 0})
        passed[case.kind] += found is None
    for name, passed in counts.items():
        shown[name] = ", ".join(f"{count:,} {kind}" for kind, count in passed.items() if count)
        if any(found.startswith(f"{name} ") for found in faults):
            shown[name] = "**FAILS**"
    return shown, faults


def differing(one: Ran, other: Ran) -> tuple[int, int]:
    """Return how many words two cells have in common, and how many of these differ."""
    pairs = [(a, b) for a, b in zip(one.outputs, other.outputs, strict=True) if a is not None and b is not None]
    return sum(a.size for a, _ in pairs), sum(int((a != b).sum()) for a, b in pairs)


def table(shown: dict[Cell, dict[str, str]]) -> list[str]:
    """Return the table of engine × driver × kernel in Markdown."""
    kernels = list(dict.fromkeys(case.kernel.name for case in matrix_cases()))
    lines = ["| kernel | " + " | ".join(f"{cell.title}, {cell.driver}" for cell in shown) + " |"]
    lines.append("|---" * (len(shown) + 1) + "|")
    lines += [
        "| " + " | ".join([f"`{name}`", *(by_kernel[name] for by_kernel in shown.values())]) + " |" for name in kernels
    ]
    return lines


def main() -> int:
    """Run the matrix, or with --cell one engine of it on the driver that the environment names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cell", choices=("wgpu", "dawn", "chromium"), help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help="fail if the README's table is not what was found")
    given = parser.parse_args()
    if given.cell:
        json.dump(run_in_a_page() if given.cell == "chromium" else run_here(given.cell), sys.stdout)
        return 0

    matrix_cases()
    with ThreadPoolExecutor(PARALLEL) as pool:
        ran = dict(zip(CELLS, pool.map(run_cell, CELLS), strict=True))
    judged = {cell: judge(result) for cell, result in ran.items()}
    lines = table({cell: shown for cell, (shown, _) in judged.items()})
    faults = [f"{cell.title} on {cell.driver}: {found}" for cell, (_, found) in judged.items() for found in found]
    print("\n".join(lines) + "\n")
    for cell, result in ran.items():
        print(f"{cell.title}, {cell.driver}: {result.where}, {result.seconds:.0f} s")
    same_driver = [cell for cell in CELLS if cell.driver == "SwiftShader"]
    lines.append("")
    for cell in same_driver[1:]:
        common, different = differing(ran[same_driver[0]], ran[cell])
        said = f"On {cell.driver}, {same_driver[0].title} and {cell.title} "
        if different:
            said += f"differ in {different:,} of {common:,} words."
            faults.append(said)
        else:
            said += f"give the same bits in all {common:,} words."
        print(said)
        lines.append(said)

    text = README.read_text("utf-8")
    fresh = MARKED.sub(lambda marked: marked[1] + "\n".join(lines) + "\n" + marked[2], text)
    if fresh != text and given.check:
        faults.append(f"the table in {README} is not what was found: make conformance writes it")
    elif fresh != text and not faults:
        README.write_text(fresh, "utf-8")
        print(f"wrote {README}")
    for found in faults[:20]:
        print(f"FAIL {found}")
    print(f"{len(CELLS)} cells, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
