"""The verify command."""

from typing import Any

import click

from .console import Console
from .main import COMMANDS
from .options import PATH, PartType, adapter_options, blob_options, common_options, force_option
from .verify_batch import Shard
from .verify_kernel import KernelRequest, kernel_options, watch
from .verify_options import Options, ThresholdType
from .verify_reports import FORMATS, report_options


@click.command("verify", short_help=COMMANDS["verify"])
@click.argument("packed", nargs=-1, type=PATH)
@click.option(
    "--manifest",
    type=PATH,
    help="Verify what this file lists, JSON lines with file, tensor, input, output, source, rows, seed, "
    "max_quant_error; - is stdin. Its paths are relative to it.",
)
@click.option("--files-from", metavar="FILE", help="Read more paths from a file, one a line; - is stdin.")
@click.option("--tensor", "tensors", multiple=True, metavar="NAME", help="Verify this tensor only. Repeatable.")
@click.option(
    "--source",
    type=PATH,
    help="The float weights that the file was packed from: hold the packed bytes against them too.",
)
@click.option(
    "--than",
    type=PATH,
    metavar="PACKED",
    help="In place of all else: does the one packed file, or this one, have the lower error against --source? Of the "
    "outputs on --input, or else of the weights. The exit code is 1 where this one has.",
)
@click.option(
    "-x",
    "--input",
    "input_path",
    type=PATH,
    help="Judge on these inputs, in place of random rows, the tensors that they name.",
)
@click.option(
    "-y",
    "--output",
    type=PATH,
    help="Judge these outputs of --input, computed anywhere, in place of the GPU's. No GPU is used.",
)
@click.option("--no-bias", is_flag=True, help="The outputs of --output are without the bias that the file has.")
@click.option(
    "--max-quant-error",
    "limits",
    multiple=True,
    type=ThresholdType(),
    help="Fail where the relative quantization error against --source is larger; with a pattern, for the tensors that "
    "it fits. Repeatable, the last that fits counts.",
)
@click.option("--rows", type=click.IntRange(1, 2**32 - 1), default=4, show_default=True, help="Rows of random input.")
@click.option(
    "--seed", type=click.IntRange(0, 2**64 - 1), default=0, show_default=True, help="Seed of all random numbers."
)
@kernel_options
@click.option(
    "--save-failing",
    type=PATH,
    metavar="DIR",
    help="Write the smallest input that still fails into this folder, for each tensor that fails, and the command that "
    "repeats it.",
)
@click.option(
    "--shard", type=PartType(lambda: Shard), help="Take the i-th of n parts, such as 2/4; each tensor is in one."
)
@click.option("--fail-fast", is_flag=True, help="Stop at the first tensor that does not pass.")
@click.option("--strict", is_flag=True, help="Stop at a bad line of the manifest, or a folder without a packed file.")
@click.option(
    "--jobs", type=click.IntRange(1, 256), help="Threads for the CPU's reference.  [default: as many as cores, up to 4]"
)
@report_options
@force_option
@blob_options()
@adapter_options
@common_options
def command(**given: Any) -> int:
    """Check the GPU's linear against torch in float64, tensor by tensor.

    Two probes each: integer inputs, where the answer must be equal, so that any single wrong code is caught; and real
    inputs, where it must stay within the bound of float32 arithmetic. With --source the packed bytes are held against
    the float weights as well. A folder stands for the packed files in it. The exit code is 0 when all pass, 1 when one
    fails, 2 when one could not be checked.

    \b
    Example:
      qcs4w verify packed.safetensors
      qcs4w verify packed.safetensors --source model.safetensors
      qcs4w verify packed.safetensors --tensor pooler.dense --rows 65 --seed 7 --json
      qcs4w verify model.pte
      qcs4w verify packed.safetensors --tensor pooler.dense --input x.npy --output y_phone.npy
      qcs4w verify --manifest batch.jsonl --shard 1/2 --html report.html --junit report.xml
      qcs4w verify packed.safetensors --than other.safetensors --source model.safetensors
      qcs4w verify --sweep --kernel examples/my_kernel.wgsl --define WORKGROUP=128
      qcs4w verify packed.safetensors --kernel examples/my_kernel.wgsl --grid 'ceil(M * N / 64)' --timeout 30
    """  # noqa: D301
    options = Options(**{kind: given.pop(kind) for kind in given.keys() - set(FORMATS)}, reports=given)
    console = options.open_console()
    if options.kernel.watch:
        return _watch(options.kernel, console)
    options.check()
    if options.than is not None:
        from .verify_than import verify_than

        assert options.source is not None  # noqa: S101 - checked
        return verify_than(options.paths[0], options.than, options.source, options.input_path, options.tensors, console)
    from .verify_run import VerifyRun

    return VerifyRun(options, console).run()


def _watch(kernel: KernelRequest, console: Console) -> int:
    """Verify again, with all that was said, whenever the kernel is saved."""
    from qcs4w_packer import UsageError

    if console.as_json:
        raise UsageError("--watch is for people: it has no JSON")
    if kernel.file is None:
        raise UsageError("--watch needs --kernel with a .wgsl file of yours")
    context = click.get_current_context()
    given = {**context.params, "watch": False}

    def again() -> None:
        context.invoke(command, **given)
        given["force"] = True  # the reports of the run before are this command's own

    return watch(kernel.file, again, console)
