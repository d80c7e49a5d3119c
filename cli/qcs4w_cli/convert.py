"""The convert command."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .console import Console
from .main import COMMANDS
from .options import PATH, blob_options, common_options, force_option
from .report import Table, plural, quoted, size

if TYPE_CHECKING:
    from qcs4w_packer import Blob
    from qcs4w_packer.convert import ConvertReport

_LAYOUTS = ("qcs4w", "q4gsw", "compressed-tensors", "onnx", "raw", "npy")


@click.command("convert", short_help=COMMANDS["convert"])
@click.argument("source", type=PATH)
@click.option("-o", "--output", type=PATH, help="The file to make, or the folder.")
@click.option("--to", type=click.Choice(_LAYOUTS), default="qcs4w", help="The layout to write.  [default: qcs4w]")
@click.option("--tensor", "tensors", multiple=True, metavar="NAME", help="Convert this tensor only. Repeatable.")
@click.option(
    "--scale-dtype",
    type=click.Choice(["f32", "f16"]),
    default="f32",
    help="Of the scales written (compressed-tensors and onnx); the loss is reported.  [default: f32]",
)
@click.option("--block", type=int, help="Columns to a block of an ONNX model, a power of two from 16.  [default: 32]")
@click.option("--zero-points", is_flag=True, help="State the zero point 8 in an ONNX model, though it is the default.")
@click.option("--packed-only", is_flag=True, help="Do not copy the other tensors (biases, norms, …) along.")
@click.option("-n", "--dry-run", is_flag=True, help="Read and check everything, write nothing.")
@blob_options()
@force_option
@common_options
def command(
    source: Path,
    output: Path | None,
    to: str,
    tensors: tuple[str, ...],
    scale_dtype: str,
    block: int | None,
    zero_points: bool,
    packed_only: bool,
    dry_run: bool,
    blob: "Blob | None",
    force: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> int:
    """Write packed linears in the layout of another tool, or bring them here. Codes stay as they are.

    SOURCE is a container or a packed folder, a checkpoint of compressed-tensors, GPTQ or AWQ (a file or its folder), an
    .onnx with MatMulNBits, a q4gsw file or a raw or npy folder made here, a .pte, or raw bytes (--shape). Every row
    must have one scale and the zero point 8; else it is refused, and the message says what would be lost.

    A folder of shards becomes one file; --to compressed-tensors takes its config and tokenizer files along.

    \b
    --to qcs4w, q4gsw          a .safetensors file
    --to compressed-tensors    a folder: model.safetensors, config.json
    --to raw, npy              a folder: .bin or .npy pairs, qcs4w.json
    --to onnx                  an .onnx, its data beside it if large

    \b
    Example:
      qcs4w convert packed.safetensors --to compressed-tensors -o compressed
      qcs4w convert packed.safetensors --to raw -o pairs --tensor pooler.dense
      qcs4w convert packed.safetensors --to q4gsw -o q4gsw.safetensors --dry-run
    """  # noqa: D301
    from qcs4w_packer import UsageError
    from qcs4w_packer.convert import ConvertOptions, convert_file

    console = Console("convert", as_json, quiet)
    if output is None and not dry_run:
        raise UsageError("there is no output", hint="say where to with -o OUT, or look first with --dry-run")
    suffix = {"qcs4w": ".safetensors", "q4gsw": ".safetensors", "onnx": ".onnx"}.get(to)
    if output is not None and suffix is not None and output.suffix.lower() != suffix:
        is_place = output.name in ("", "..")  # ., / and nothing at all have no name to give a suffix to
        named = output / f"out{suffix}" if is_place else output.with_suffix(suffix)
        raise UsageError(f"{output}: {to} is written to a {suffix} file", hint=f"-o {named}")
    with console.progress("converting", unit_bytes=True, wanted=not dry_run) as progress:
        report = convert_file(
            source,
            output,
            to=to,
            blob=blob,
            tensors=tensors,
            options=ConvertOptions(scale_dtype, block, zero_points, packed_only),
            force=force,
            dry_run=dry_run,
            progress=progress,
        )
    console.answer(_table(report))
    for what in report.left_out[: None if verbose else 3]:
        console.warn(f"not in the output: {what}")
    if len(report.left_out) > 3 and not verbose:
        console.warn(f"not in the output: {len(report.left_out) - 3:,} more (-v names them)")
    lossy = [tensor.entry.name for tensor in report.tensors if tensor.lost_scales]
    if lossy:
        console.warn(f"scales are too small for {scale_dtype} and became 0: {quoted(lossy)}")
    for note in report.notes:
        console.note(note)
    converted = f"{plural(len(report.tensors), 'tensor')} from {report.source_format} to {report.target_format}"
    console.answer(
        f"\n{'would convert' if dry_run else 'converted'} {converted}, codes equal; "
        f"{plural(len(report.carried), 'other')} copied; "
        + (f"wrote {report.output}" if not dry_run else "dry run, nothing was written")
    )
    console.document(_document(report), 0)
    return 0


def _table(report: "ConvertReport") -> Table:
    rows = [
        (
            tensor.entry.name,
            str(tensor.entry.out_features),
            str(tensor.entry.in_features),
            report.source_format,
            report.target_format,
            size(tensor.nbytes),
            "equal" if tensor.codes_equal else "DIFFER",
            f"{tensor.scale_loss:.2g}" if tensor.scale_loss else "none",
        )
        for tensor in report.tensors
    ]
    return Table(("tensor", ">N", ">K", "from", "to", ">bytes", "codes", "scale loss"), rows, ("cyan",))


def _document(report: "ConvertReport") -> dict[str, Any]:
    return {
        "source": str(report.source),
        "output": None if report.output is None else str(report.output),
        "from": report.source_format,
        "to": report.target_format,
        "dry_run": report.is_dry_run,
        "tensors": [
            {
                "tensor": tensor.entry.name,
                "out_features": tensor.entry.out_features,
                "in_features": tensor.entry.in_features,
                "nbytes": tensor.nbytes,
                "codes_equal": tensor.codes_equal,
                "scale_loss": tensor.scale_loss,
                "lost_scales": tensor.lost_scales,
            }
            for tensor in report.tensors
        ],
        "carried": list(report.carried),
        "left_out": list(report.left_out),
        "notes": list(report.notes),
    }
