"""The pack command."""

from pathlib import Path

import click

from .console import Console
from .main import COMMANDS
from .options import PATH, SizeType, common_options, force_option
from .report import carried_table, pack_document, pack_table, pack_warnings, plural, size


@click.command("pack", short_help=COMMANDS["pack"])
@click.argument("source", type=PATH)
@click.option("-o", "--output", type=PATH, help="The container to make (a .safetensors file; a folder of a folder).")
@click.option("--tensor", "tensors", multiple=True, metavar="NAME", help="Pack this tensor only. Repeatable.")
@click.option(
    "--include", multiple=True, metavar="PATTERN", help="Pack the matrices that match, in place of the default choice."
)
@click.option(
    "--also", multiple=True, metavar="PATTERN", help="Pack these too: a head, an embedding, a stack of experts."
)
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave the tensors that match unpacked.")
@click.option(
    "--transpose", multiple=True, metavar="PATTERN", help="Pack these the other way round: the file has [in, out]."
)
@click.option(
    "--no-transpose", multiple=True, metavar="PATTERN", help="These are [out, in], whatever their names suggest."
)
@click.option("--packed-only", is_flag=True, help="Do not copy the other tensors (biases, norms, …) along.")
@click.option(
    "--max-shard-size",
    type=SizeType(),
    metavar="SIZE",
    help="Make a folder of files of at most so many bytes, such as 5GB.  [default: as the source is divided]",
)
@click.option("--restart", is_flag=True, help="Begin anew, whatever a broken run has finished.")
@click.option(
    "-n", "--dry-run", is_flag=True, help="Show what would be packed and skipped, and why; reads no weight data."
)
@force_option
@common_options
def command(
    source: Path,
    output: Path | None,
    tensors: tuple[str, ...],
    include: tuple[str, ...],
    also: tuple[str, ...],
    exclude: tuple[str, ...],
    transpose: tuple[str, ...],
    no_transpose: tuple[str, ...],
    packed_only: bool,
    max_shard_size: int | None,
    restart: bool,
    dry_run: bool,
    force: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> int:
    """Quantize and pack the linear weights of a file, byte for byte as ExecuTorch does.

    SOURCE is a .safetensors, .npy, .npz, .pt, .pth or .bin file, or the folder of a checkpoint. By default every 2-D
    float tensor that is a linear weight by name is packed (no embeddings, norms, heads or routers: --dry-run lists
    them with the reason), and all other tensors are copied as they are, so that the result is a whole checkpoint.
    Weights in fp8 are dequantized by the scales beside them first.

    A PATTERN is a name, a glob ('*.mlp.*'), or re: and a regular expression; it has to fit the whole name.

    A run that was broken off (Ctrl-C, a kill, a full disk) goes on when the same command is given again.

    \b
    Example:
      qcs4w pack model.safetensors --dry-run
      qcs4w pack model.safetensors -o packed.safetensors
      qcs4w pack model.safetensors -o packed.safetensors --exclude 'pooler.*' --force
      qcs4w pack model.safetensors --dry-run --also 're:embeddings[.](word|position)_.*'
    """  # noqa: D301
    from qcs4w_packer import Request, UsageError, Watch, pack_file

    console = Console("pack", as_json, quiet)
    if output is None and not dry_run:
        raise UsageError(
            "there is no output", hint="say where to with -o OUT.safetensors, or look first with --dry-run"
        )
    is_folder = max_shard_size is not None or source.is_dir()
    if output is not None and is_folder and output.suffix.lower() == ".safetensors":
        raise UsageError(f"{output}: several files make a folder", hint=f"-o {output.with_suffix('')}")
    if output is not None and not is_folder and output.suffix.lower() != ".safetensors":
        raise UsageError(
            f"{output}: a container is a .safetensors file", hint=f"-o {output.with_suffix('.safetensors')}"
        )
    with console.progress("packing", unit_bytes=True, wanted=not dry_run) as progress:
        report = pack_file(
            source,
            output,
            request=Request(tensors or None, include or None, exclude, transpose, no_transpose, also),
            packed_only=packed_only,
            max_shard_size=max_shard_size,
            restart=restart,
            force=force,
            dry_run=dry_run,
            progress=progress,
            watch=Watch(note=console.note),
        )
    console.answer(pack_table(report))
    if (report.carried or report.dropped) and (dry_run or verbose):
        console.answer("")
        console.answer(carried_table(report))
    for notice in report.notices:
        console.note(notice)
    for what in report.left_out:
        console.warn(f"not in the output: {what}")
    for warning in pack_warnings(report):
        console.warn(warning)
    others = "left out" if packed_only else "copied"
    console.answer(
        f"\n{'would pack' if dry_run else 'packed'} {plural(len(report.packed), 'tensor')}, "
        f"{plural(len(report.carried), 'other')} {others}; "
        f"{size(report.source_nbytes)} → {size(report.output_nbytes)}"
        + (f"; wrote {report.output}" if not dry_run else "; dry run, nothing was written")
    )
    console.document(pack_document(report), 0)
    return 0
