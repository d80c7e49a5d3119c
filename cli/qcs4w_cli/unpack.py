"""The unpack command."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .console import Console
from .main import COMMANDS
from .options import PATH, SizeType, blob_options, common_options, force_option, free_disk
from .report import clean_line, plural, size
from .report_groups import told
from .report_unpack import unpack_document, unpack_summary, unpack_tables, unpacked_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qcs4w_packer import Blob, UnpackReport
    from qcs4w_packer.unpack_files import WeightFile
    from qcs4w_packer.unpack_watch import UnpackedTensor, UnpackWatch

    from .progress import TensorProgress

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
@click.option("--include", multiple=True, metavar="PATTERN", help="Unpack the tensors that match, in place of all.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave the tensors that match out.")
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

    A PATTERN is a name, a glob ('*.mlp.*'), or re: and a regular expression; it has to fit the whole name. Options
    that take one may be given again.

    The floats are the dequantized weights, not those from before packing. float32 holds them exactly; what rounding to
    another dtype costs is told for each tensor.

    \b
    Example:
      qcs4w unpack packed.safetensors -o floats.safetensors
      qcs4w unpack packed.safetensors -o floats.safetensors --dtype bf16 --force
      qcs4w unpack packed.safetensors --tensor pooler.dense --dry-run
      qcs4w unpack packed_checkpoint -o floats --dtype source
    """  # noqa: D301
    from qcs4w_packer import UnpackRequest, UsageError, unpack_file

    console = Console("unpack", as_json, quiet)
    if output is None and not dry_run:
        raise UsageError("there is no output", hint="say where to with -o OUT, or look first with --dry-run")
    began = time.monotonic()
    with console.tensor_progress("unpacking", wanted=not dry_run) as progress:
        report = unpack_file(
            packed,
            output,
            request=UnpackRequest(dtype, tensors, include, exclude, packed_only, max_shard_size),
            blob=blob,
            force=force,
            dry_run=dry_run,
            watch=_watch(progress),
        )
    seconds = time.monotonic() - began
    free_nbytes = free_disk(output) if dry_run and output is not None else None
    for table in unpack_tables(report, verbose=verbose):
        console.answer(table)
        console.answer("")
    _tell(console, report, dtype, free_nbytes, verbose=verbose)
    for line in unpack_summary(report, seconds):
        console.answer(clean_line(line))
    console.document({"dtype": dtype, **unpack_document(report, seconds, free_nbytes)}, 0)
    return 0


def _watch(progress: "TensorProgress") -> "UnpackWatch":
    """Return what brings the packer's news to the screen or the log."""
    from qcs4w_packer.unpack_watch import UnpackWatch

    total = 0
    is_folder = False

    def planned(files: "Sequence[WeightFile]") -> None:
        nonlocal total, is_folder
        is_folder = len(files) > 1
        unpacking = [tensor for file in files for tensor in file.tensors]
        sizes = {tensor.name: tensor.nbytes for file in files for tensor in file.carried}
        sizes |= {tensor.name: tensor.nbytes * (1 + len(tensor.aliases)) for tensor in unpacking}
        total = sum(sizes.values())
        progress.begin(sizes, len(unpacking))

    def step(nbytes: int, _total_with_headers: int, name: str) -> None:
        progress.step(name, nbytes, total)

    def unpacked(tensor: "UnpackedTensor") -> None:
        progress.finished(unpacked_line(tensor, is_folder=is_folder))

    return UnpackWatch(planned, step, unpacked)


def _tell(console: Console, report: "UnpackReport", dtype: str, free_nbytes: int | None, *, verbose: bool) -> None:
    """Print what the user should know beside the tables."""
    for what in told(report.left_out, everything=verbose):
        console.warn(f"not in the output: {what}")
    vanished = sum(result.rounding.vanished for result in report.tensors if result.rounding)
    if vanished:
        console.warn(f"{plural(vanished, 'value')} became 0 in {dtype}")
    if report.alias_nbytes:
        console.note(f"tied weights are written under each of their names, which takes {size(report.alias_nbytes)}")
    for note in report.notes:
        console.note(note)
    console.room(report.output_nbytes, free_nbytes)
