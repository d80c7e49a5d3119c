"""The unpack command."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .console import Console
from .main import COMMANDS
from .options import PATH, SizeType, blob_options, common_options, force_option
from .report import Table, plural, size

if TYPE_CHECKING:
    from qcs4w_packer import Blob, UnpackReport

_DTYPES = ("f32", "f16", "bf16", "source")


@click.command("unpack", short_help=COMMANDS["unpack"])
@click.argument("packed", type=PATH)
@click.option("-o", "--output", type=PATH, help="The .safetensors file to make, or of a packed folder the folder.")
@click.option(
    "--dtype",
    type=click.Choice(_DTYPES),
    default="f32",
    help="Of the floats written; source is what each weight had before it was packed.  [default: f32, which is exact]",
)
@click.option("--tensor", "tensors", multiple=True, metavar="NAME", help="Unpack this tensor only. Repeatable.")
@click.option("--include", multiple=True, metavar="GLOB", help="Unpack the tensors that match, in place of all.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Leave the tensors that match out.")
@click.option(
    "--max-shard-size",
    type=SizeType(),
    metavar="SIZE",
    help="Write a folder of files of at most so many bytes, as 5GiB.  [default: the shards of PACKED]",
)
@click.option("--packed-only", is_flag=True, help="Do not copy the other tensors (biases, norms, …) along.")
@click.option("-n", "--dry-run", is_flag=True, help="Show what would be written; reads no weight.")
@blob_options()
@force_option
@common_options
def command(
    packed: Path,
    output: Path | None,
    dtype: str,
    tensors: tuple[str, ...],
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    max_shard_size: int | None,
    packed_only: bool,
    dry_run: bool,
    blob: "Blob | None",
    force: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> int:
    """Write packed linears as float weights again, code · scale, for any tool that needs them.

    PACKED is anything that holds packed linears: a container, a folder of them, a .pte, a layout of another tool, raw
    bytes (--shape). All that lies beside the packed tensors goes along byte for byte. Weights that were packed the
    other way round are turned back, stacks of experts are put together again, and a weight with several names is
    written under each. A folder becomes a folder, shard by shard, with its index, config and tokenizer files; with
    -o OUT.safetensors everything goes into one file.

    --include and --exclude take globs, or re:EXPR, for whole names.

    The floats are the dequantized weights, not those from before packing. float32 holds them exactly; what rounding to
    another dtype costs is told for each tensor.

    \b
    Example:
      qcs4w unpack packed.safetensors -o floats.safetensors
      qcs4w unpack packed.safetensors -o floats.safetensors --dtype bf16 --force
      qcs4w unpack packed.safetensors --tensor pooler.dense --dry-run
    """  # noqa: D301
    from qcs4w_packer import UnpackRequest, UsageError, unpack_file

    console = Console("unpack", as_json, quiet)
    if output is None and not dry_run:
        raise UsageError("there is no output", hint="say where to with -o OUT, or look first with --dry-run")
    with console.progress("unpacking", unit_bytes=True, wanted=not dry_run) as progress:
        report = unpack_file(
            packed,
            output,
            request=UnpackRequest(dtype, tensors, include, exclude, packed_only, max_shard_size),
            blob=blob,
            force=force,
            dry_run=dry_run,
            progress=progress,
        )
    console.answer(_table(report))
    for what in report.left_out[: None if verbose else 3]:
        console.warn(f"not in the output: {what}")
    if len(report.left_out) > 3 and not verbose:
        console.warn(f"not in the output: {len(report.left_out) - 3:,} more (-v names them)")
    vanished = sum(result.rounding.vanished for result in report.tensors if result.rounding)
    if vanished:
        console.warn(f"{plural(vanished, 'value')} became 0 in {dtype}")
    if report.alias_nbytes:
        console.note(f"tied weights are written under each of their names, which takes {size(report.alias_nbytes)}")
    for note in report.notes:
        console.note(note)
    console.answer(
        f"\n{'would unpack' if dry_run else 'unpacked'} {plural(len(report.tensors), 'tensor')}, "
        f"{plural(len(report.carried), 'other')} copied; {size(report.output_nbytes)}"
        + (f" in {len(report.files):,} files; " if len(report.files) > 1 else "; ")
        + (f"wrote {report.output}" if not dry_run else "dry run, nothing was written")
    )
    console.document({"dtype": dtype, **_document(report)}, 0)
    return 0


def _table(report: "UnpackReport") -> Table:
    rows = []
    for result in report.tensors:
        tensor, rounding = result.tensor, result.rounding
        stack = len(tensor.shape) == 3
        notes = (
            [f"{plural(len(tensor.parts), 'part')} of a stack"] * stack
            + ["turned back"] * tensor.transposed
            + [f"also {alias}" for alias in tensor.aliases]
        )
        cost = "" if rounding is None else f"{rounding.largest:.2g}" if rounding.largest else "none"
        sizes = f"{size(tensor.packed_nbytes)} → {size(tensor.nbytes)}"
        rows.append((tensor.name, " × ".join(map(str, tensor.shape)), tensor.dtype, sizes, cost, "; ".join(notes)))
    return Table(("tensor", ">shape", "dtype", ">bytes", ">rounding", "notes"), rows, ("cyan",))


def _document(report: "UnpackReport") -> dict[str, Any]:
    return {
        "source": str(report.source),
        "output": None if report.output is None else str(report.output),
        "from": report.source_format,
        "dry_run": report.is_dry_run,
        "files": list(report.files),
        "output_nbytes": report.output_nbytes,
        "alias_nbytes": report.alias_nbytes,
        "tensors": [
            {
                "tensor": result.tensor.name,
                "dtype": result.tensor.dtype,
                "shape": list(result.tensor.shape),
                "nbytes": result.tensor.nbytes,
                "packed_nbytes": result.tensor.packed_nbytes,
                "parts": len(result.tensor.parts),
                "aliases": list(result.tensor.aliases),
                "transposed": result.tensor.transposed,
                "file": result.file,
                "rounding_error": None if result.rounding is None else result.rounding.largest,
                "vanished": None if result.rounding is None else result.rounding.vanished,
            }
            for result in report.tensors
        ],
        "carried": list(report.carried),
        "beside": list(report.beside),
        "left_out": list(report.left_out),
        "notes": list(report.notes),
    }
