"""Measure inspect --find against cat: the same large file, warm, in turns; peak memory too.

The file is random bytes with one weight near its end, in the layout that the line names; the folder is of choice
(/dev/shm needs no disk). A line gives the best wall time of cat and of the whole command, start-up included, their
ratio, the same ratio of processor time (which other work on the machine disturbs less), and the peak resident memory.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from timed import timed

from qcs4w_packer import PackedLinear, pack_codes, save_container
from qcs4w_packer.placements import PLACEMENTS, Placement

_PIECE = 64 << 20


def main() -> None:
    """Make the files, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))  # noqa: S108 - the user's choice
    parser.add_argument("--gib", type=float, default=4, help="size of the file")
    parser.add_argument("--turns", type=int, default=3, help="runs of each")
    parser.add_argument("--shape", type=int, nargs=2, default=(4096, 4096), metavar=("N", "K"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        needle, haystack = Path(folder) / "needle.safetensors", Path(folder) / "haystack.bin"
        rng = np.random.default_rng(0)
        rows, columns = arguments.shape
        codes = np.clip(rng.normal(0, 2.5, (rows, columns)).round(), -8, 7).astype(np.int8)
        weight = PackedLinear(pack_codes(codes), rng.random(rows, np.float32), columns)
        save_container(needle, {"weight": weight})
        nbytes = int(arguments.gib * (1 << 30))
        with haystack.open("wb") as file:
            for start in range(0, nbytes, _PIECE):
                file.write(rng.bytes(min(_PIECE, nbytes - start)))
        say(f"{nbytes:,} bytes, weight {rows} x {columns}, best of {arguments.turns} turns, {os.cpu_count()} cores")
        say(f"{'there':<24}{'searched':<18}{'cat s':>7}{'find s':>8}{'ratio':>7}{'CPU ratio':>11}{'peak MB':>9}")
        command = [sys.executable, "-m", "qcs4w_cli", "inspect", str(haystack), "--find", str(needle), "--quiet"]
        place(haystack, nbytes, weight, None)
        measure("nothing", "every layout", haystack, command, arguments.turns)
        for placement in PLACEMENTS:
            if not placement.fits(rows, columns):
                continue
            place(haystack, nbytes, weight, placement)
            if placement.is_plain or placement.is_transposed:
                layout = placement.reading.layout.name
                measure(placement.name, layout, haystack, [*command, "--layout", layout], arguments.turns)
            else:
                measure(placement.name, "every layout", haystack, command, arguments.turns)


def place(haystack: Path, nbytes: int, weight: PackedLinear, placement: Placement | None) -> None:
    """Write the weight into the file at seven eighths of it, or random bytes of its size."""
    data = np.random.default_rng(1).bytes(weight.packed.nbytes)
    if placement is not None:
        rows, width = placement.shape(weight.out_features, weight.in_features)
        data = placement.rectangle(weight.packed, weight.in_features, slice(0, rows), slice(0, width)).tobytes()
    with haystack.open("r+b") as file:
        file.seek(nbytes * 7 // 8 + 13)
        file.write(data)


def measure(there: str, searched: str, haystack: Path, command: Sequence[str], turns: int) -> None:
    """Run cat and a command in turns and print the best times of each."""
    runs = [(timed(["cat", str(haystack)]), timed(command)) for _ in range(turns)]
    expected = 1 if there == "nothing" else 0
    if any(find[3] != expected for _, find in runs):
        sys.exit(f"{there}: exit code {runs[0][1][3]}, expected {expected}")
    cat, cat_cpu = (min(run[0][i] for run in runs) for i in range(2))
    find, find_cpu = (min(run[1][i] for run in runs) for i in range(2))
    peak = max(run[1][2] for run in runs) / 1e6
    say(f"{there:<24}{searched:<18}{cat:>7.2f}{find:>8.2f}{find / cat:>7.2f}{find_cpu / cat_cpu:>11.2f}{peak:>9.0f}")


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
