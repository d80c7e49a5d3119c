"""The vectors command."""

from pathlib import Path
from typing import Any

import click

from .console import Console
from .main import COMMANDS
from .options import PATH, common_options, force_option
from .report import Table, plural, size


class SizesType(click.ParamType):  # type: ignore[type-arg]  # generic in recent clicks only
    """Three sizes: M,N,K."""

    name = "m,n,k"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int, int]:
        """Parse the text."""
        if isinstance(value, tuple):
            return value
        sizes = str(value).replace("x", ",").split(",")
        if len(sizes) != 3 or not all(part.isascii() and part.isdecimal() and len(part) < 16 for part in sizes):
            self.fail(f"'{value:.40}' is not M,N,K such as 4,64,128", param, ctx)
        rows, out_features, in_features = map(int, sizes)
        return rows, out_features, in_features


@click.command("vectors", short_help=COMMANDS["vectors"])
@click.option("-o", "--output", type=PATH, required=True, help="The folder to make.")
@click.option(
    "--sizes",
    type=SizesType(),
    multiple=True,
    help="M,N,K of an exact and a bounded case. Repeatable.  [default: 15 sizes: primes, ones, odd K, tile edges]",
)
@click.option(
    "--seed", type=click.IntRange(0, 2**64 - 1), default=0, show_default=True, help="The same seed, the same bytes."
)
@force_option
@common_options
def command(
    output: Path,
    sizes: tuple[tuple[int, int, int], ...],
    seed: int,
    force: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> int:
    """Write test vectors for authors of kernels: raw .bin files, a JSON index and a C header.

    Each case has x, packed bytes, scales and y in float64. In exact cases (whole numbers, scales of 1) y must be equal,
    so that any wrong code shows; in bounded cases each element has the largest error that float32 can explain. No GPU
    is needed. The folder's README.txt says how to read them.

    \b
    Example:
      qcs4w vectors -o vectors
      qcs4w vectors -o more --sizes 1,4096,64 --sizes 3,5,7 --seed 1
    """  # noqa: D301
    from qcs4w_gpu.vector_files import write_vectors
    from qcs4w_gpu.vectors import DEFAULT_SIZES

    console = Console("vectors", as_json, quiet)
    written = write_vectors(output, sizes or DEFAULT_SIZES, seed=seed, force=force)
    cases = written.index["cases"]
    rows = [
        (
            case["name"],
            *(str(case[key]) for key in ("M", "N", "K")),
            {"exact": "equal", "bounded": "within its bound"}[case["kind"]],
            size(sum(array["nbytes"] for array in case["arrays"].values())),
        )
        for case in cases
    ]
    console.answer(Table(("case", ">M", ">N", ">K", "y must be", ">bytes"), rows, ("cyan",)))
    console.answer(f"\nwrote {plural(len(cases), 'case')}, {size(written.nbytes)} with index and C header, to {output}")
    console.document({"output": str(output), "nbytes": written.nbytes, "index": written.index}, 0)
    return 0
