"""The pack command."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .console import Console
from .main import COMMANDS
from .options import PATH, PartType, SizeType, common_options, force_option, free_disk
from .report import clean_line
from .report_calibration import calibration_line, calibration_table
from .report_groups import told
from .report_pack import (
    carried_table,
    oversize_notice,
    pack_document,
    pack_summary,
    pack_tables,
    pack_warnings,
    packed_line,
)

if TYPE_CHECKING:
    from qcs4w_packer import PackedTensor, PackPlan, PackReport, Step, Watch
    from qcs4w_packer.parts import Part

    from .progress import TensorProgress

#: Stated here so that --help need not load the packer; a test holds them against its own.
METHODS = ("absmax", "mse", "hmse", "gptq")


def _part() -> "type[Part]":
    from qcs4w_packer.parts import Part

    return Part


@click.command("pack", short_help=COMMANDS["pack"])
@click.argument("source", type=PATH)
@click.option("-o", "--output", type=PATH, help="The .safetensors file to make; of a folder of weights, the folder.")
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
@click.option(
    "--shard",
    "part",
    type=PartType(_part),
    help="Make the i-th of n parts of the output's files, such as 2/4, beside jobs that make the others.",
)
@click.option(
    "--ray",
    metavar="[ADDRESS]",
    is_flag=False,
    flag_value="local",
    help="Make the files on a Ray cluster (--ray=auto, --ray=HOST:PORT); alone, on one of this machine's own.",
)
@click.option(
    "--method",
    type=click.Choice(METHODS),
    help="How codes and scales are chosen.  [default: gptq with --calibration, else absmax]",
)
@click.option(
    "--calibration", type=PATH, metavar="FILE", help="Inputs of the linears by name, or XᵀX of them: see below."
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    help="Chooses the inputs that are kept apart to measure by.",
)
@click.option(
    "--device", type=click.Choice(("cpu", "cuda")), default="cpu", show_default=True, help="Where gptq computes."
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
    part: "Part | None",
    ray: str | None,
    method: str | None,
    calibration: Path | None,
    seed: int,
    device: str,
    restart: bool,
    dry_run: bool,
    force: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> int:
    """Quantize and pack the linear weights of a file or checkpoint, by default byte for byte as ExecuTorch does.

    SOURCE is a .safetensors, .npy, .npz, .pt, .pth, .bin, .gguf or .onnx file, or the folder of a checkpoint: its
    shards are packed one by one into a new folder, with a new index, config and tokenizer files.

    By default every 2-D float tensor that is a linear weight by name is packed (no embeddings, norms, heads or
    routers: --dry-run lists them with the reason), and all other tensors are copied as they are. Weights in fp8 are
    dequantized by the scales beside them first, tied weights are packed once, and stacks of experts are split.
    `qcs4w unpack` is the way back.

    A PATTERN is a name, a glob ('*.mlp.*'), or re: and a regular expression; it has to fit the whole name. Options
    that take one may be given again.

    Methods, all in the same format at the same size: absmax is ExecuTorch's; mse has the least squared error of the
    weights, hmse the same weighted by the mean square of each column's inputs, gptq the least squared error of the
    outputs. hmse and gptq need --calibration: a .safetensors or .npz file with the inputs of each linear under its
    name (floats [..., K], best 16·K rows or more), or NAME.hessian [K, K] = XᵀX with NAME.hessian_rows, or for hmse
    NAME.mean_square [K]. An eighth of the rows is kept apart, and the error of the outputs on them is told against
    absmax's. Tensors that the file does not name are packed by absmax.

    A run that was broken off (Ctrl-C, a kill, a full disk) goes on when the same command is given again. Where the
    output has many files, --shard and --ray spread them over machines that share a disk.

    \b
    Example:
      qcs4w pack model.safetensors --dry-run
      qcs4w pack model.safetensors -o packed.safetensors
      qcs4w pack model.safetensors -o packed.safetensors --exclude 'pooler.*' --force
      qcs4w pack model.safetensors -o small-error.safetensors --method mse
      qcs4w pack model.safetensors -o gptq.safetensors --calibration activations.npz
      qcs4w pack model.safetensors --dry-run --also 're:embeddings[.](word|position)_.*'
      qcs4w pack checkpoint -o packed_checkpoint
      qcs4w pack checkpoint -o packed_checkpoint --force --max-shard-size 5GB --also '*lm_head*'
      qcs4w pack checkpoint -o packed_checkpoint --force --shard 1/2
    """  # noqa: D301
    from qcs4w_packer import Recipe, Request, UsageError, pack_file
    from qcs4w_packer.sources import is_checkpoint

    if ray is not None and part is not None:
        raise UsageError("--ray and --shard are two ways to share the work", hint="Ray deals the files out by itself")
    console = Console("pack", as_json, quiet)
    _check_name(source, output, makes_folder=max_shard_size is not None or is_checkpoint(source), dry_run=dry_run)
    recipe = Recipe(method, calibration, seed, device)
    began = time.monotonic()
    with console.tensor_progress("packing", wanted=not dry_run) as progress:
        report = pack_file(
            source,
            output,
            request=Request(tensors or None, include or None, exclude, transpose, no_transpose, also),
            packed_only=packed_only,
            max_shard_size=max_shard_size,
            restart=restart,
            recipe=recipe,
            force=force,
            dry_run=dry_run,
            part=part,
            ray=ray,
            watch=_watch(console, progress),
        )
    seconds = time.monotonic() - began
    free_nbytes = free_disk(output) if dry_run and output is not None else None
    for table in pack_tables(report, verbose=verbose):
        console.answer(table)
        console.answer("")
    if calibration is not None:
        console.answer(calibration_table(report, verbose=verbose))
        console.answer("")
    if (report.carried or report.dropped) and (dry_run or verbose):
        console.answer(carried_table(report, verbose=verbose))
        console.answer("")
    _tell(console, report, free_nbytes, verbose=verbose)
    if max_shard_size is not None and (notice := oversize_notice(report, max_shard_size)):
        console.note(notice)
    if calibration is not None:
        console.answer(calibration_line(report, seed))
    for line in pack_summary(report, seconds, progress.done):
        console.answer(clean_line(line))
    console.document(pack_document(report, seconds, free_nbytes), 0)
    return 0


def _check_name(source: Path, output: Path | None, *, makes_folder: bool, dry_run: bool) -> None:
    """Refuse an output whose name says that it is something else than what will be made."""
    from qcs4w_packer import UsageError

    if output is None:
        if not dry_run:
            raise UsageError(
                "there is no output", hint="say where to with -o OUT.safetensors, or look first with --dry-run"
            )
        return
    is_file = output.suffix.lower() == ".safetensors"
    if makes_folder and is_file:
        raise UsageError(f"{output}: several files make a folder", hint=f"-o {output.with_suffix('')}")
    if not makes_folder and not is_file and source.exists():  # else the source's own error is the one to tell
        raise UsageError(
            f"{output}: a container is a .safetensors file", hint=f"-o {output.with_suffix('.safetensors')}"
        )


def _watch(console: Console, progress: "TensorProgress") -> "Watch":
    """Return what brings the packer's news to the screen or the log."""
    from qcs4w_packer import Watch

    is_folder = False

    def planned(plan: "PackPlan") -> None:
        nonlocal is_folder
        is_folder = plan.is_folder
        sizes = {tensor.name: tensor.nbytes for shard in plan.shards for tensor in shard.carried}
        packing = [choice.tensor for shard in plan.shards for choice in shard.choices]
        progress.begin(sizes | {tensor.name: tensor.nbytes for tensor in packing}, len(packing))

    def step(step: "Step") -> None:
        progress.step(step.tensor, step.nbytes, step.total)

    def packed(tensor: "PackedTensor") -> None:
        progress.finished(packed_line(tensor, tensor.shard if is_folder else ""), is_news=not tensor.resumed)

    return Watch(planned=planned, step=step, packed=packed, note=console.note)


def _tell(console: Console, report: "PackReport", free_nbytes: int | None, *, verbose: bool) -> None:
    """Print what the user should know beside the tables."""
    for notice in report.notices:
        console.note(notice)
    for what in told(report.left_out, everything=verbose):
        console.warn(f"not in the output: {what}")
    for warning in pack_warnings(report):
        console.warn(warning)
    if report.is_dry_run and report.output is not None:
        from qcs4w_packer.work_folder import work_path

        begun = work_path(Path(os.path.realpath(report.output)))
        if begun.is_dir():
            console.note(f"an earlier run has left its work in {begun}; pack goes on from there if nothing has changed")
    console.room(report.output_nbytes, free_nbytes)
