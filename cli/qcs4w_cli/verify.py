"""The verify command."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .console import Console, print_error
from .interrupts import interruptible
from .main import COMMANDS, EXIT_ERROR, EXIT_FAILED
from .options import PATH, adapter_options, blob_options, common_options, read_file_list, standard_input
from .report import adapter_document, plural, quoted, verdict_lines
from .verify_batch import Job

if TYPE_CHECKING:
    from qcs4w_gpu import Kernel
    from qcs4w_packer import Blob


@click.command("verify", short_help=COMMANDS["verify"])
@click.argument("packed", nargs=-1, type=PATH)
@click.option("--files-from", metavar="FILE", help="Read more paths from a file, one a line; - is stdin.")
@click.option("--tensor", "tensors", multiple=True, metavar="NAME", help="Verify this tensor only. Repeatable.")
@click.option(
    "--source",
    type=PATH,
    help="The float weights that the file was packed from: hold the packed bytes against them too.",
)
@click.option(
    "-x",
    "--input",
    "input_path",
    type=PATH,
    help="Judge on these inputs, in place of random rows, the tensors that they name.",
)
@click.option("--rows", type=click.IntRange(1, 2**32 - 1), default=4, show_default=True, help="Rows of random input.")
@click.option(
    "--seed", type=click.IntRange(0, 2**64 - 1), default=0, show_default=True, help="Seed of all random numbers."
)
@click.option("--kernel", metavar="NAME|FILE", help="Judge this kernel: one of ours by name, or a .wgsl file of yours.")
@blob_options()
@adapter_options
@common_options
def command(
    packed: tuple[Path, ...],
    files_from: str | None,
    tensors: tuple[str, ...],
    source: Path | None,
    input_path: Path | None,
    rows: int,
    seed: int,
    kernel: str | None,
    blob: "Blob | None",
    engine: str,
    adapter: str | None,
    require_gpu: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> int:
    """Check the GPU's linear against torch in float64, tensor by tensor.

    Two probes each: integer inputs, where the answer must be equal, so that any single wrong code is caught; and real
    inputs, where it must stay within the bound of float32 arithmetic. With --source the packed bytes are held against
    the float weights as well. The exit code is 0 when all pass, 1 when one fails, 2 when one could not be checked.

    \b
    Example:
      qcs4w verify packed.safetensors
      qcs4w verify packed.safetensors --source model.safetensors
      qcs4w verify packed.safetensors --tensor pooler.dense --rows 65 --seed 7 --json
      qcs4w verify model.pte
    """  # noqa: D301
    from contextlib import ExitStack

    from qcs4w_gpu import Gpu
    from qcs4w_gpu.verify import rounding_factor_of
    from qcs4w_packer import UsageError, open_source

    console = Console("verify", as_json, quiet)
    paths = [*packed, *(read_file_list(files_from) if files_from else [])]
    if not paths:
        raise UsageError("there is nothing to verify", hint="name a packed file, or --files-from a list")
    results: list[dict[str, Any]] = []
    with ExitStack() as stack:
        from_source = stack.enter_context(open_source(source)) if source else None
        inputs = None
        if input_path:
            inputs = stack.enter_context(open_source(stack.enter_context(standard_input(input_path))))
        chosen_kernel = _kernel(kernel)
        stack.enter_context(interruptible())
        gpu = stack.enter_context(Gpu(adapter, engine=engine, require_gpu=require_gpu))
        console.note(f"adapter: {gpu.adapter}; {gpu.reason}")
        factor = rounding_factor_of(gpu)
        job = Job(gpu, from_source, inputs, rows, seed, chosen_kernel, blob, factor, verbose)
        for path in paths:
            for result, name_width in job.verify_file(path, tensors):
                results.append(result)
                _show(result, name_width, console)
    unused = [name for name in inputs.tensors if name not in job.used_inputs] if inputs and not tensors else []
    counts = Counter(result["status"] for result in results)
    code = EXIT_ERROR if counts["error"] else EXIT_FAILED if counts["fail"] else 0
    summary = {status: counts[status] for status in ("pass", "fail", "error")}
    console.answer(
        f"\n{plural(len(results), 'tensor')}: {counts['pass']} passed, {counts['fail']} failed, "
        f"{counts['error']} could not be checked"
    )
    if unused:
        console.warn(f"{input_path}: no packed tensor is named {quoted(unused)}")
    if job.unchecked:
        console.warn(f"not checked, for want of an input: {quoted([item['tensor'] for item in job.unchecked])}")
    console.document(
        {
            "engine": gpu.engine.version,
            "adapter": adapter_document(gpu.adapter),
            "seed": seed,
            "rounding_factor": factor,
            "summary": summary,
            "unused_inputs": unused,
            "unchecked": job.unchecked,
            "results": results,
        },
        code,
    )
    return code


def _show(result: dict[str, Any], name_width: int, console: Console) -> None:
    if "error" in result:
        console.answer_styled([[("ERROR", "bold red"), (f"  {result['tensor'] or result['file']}  not checked", "")]])
        if not console.as_json:
            print_error(result["error"]["message"], result["error"]["hint"])
        return
    console.answer_styled(verdict_lines(result, name_width))


def _kernel(name: str | None) -> "Kernel | None":
    from qcs4w_gpu import LINEAR_KERNELS, KernelError, read_kernel, shipped_kernel

    if name is None:
        return None
    if name in LINEAR_KERNELS:
        return shipped_kernel(name)
    if not name.endswith(".wgsl"):
        raise KernelError(
            f"no kernel '{name}'", hint=f"there are {', '.join(LINEAR_KERNELS)}, or a .wgsl file of yours"
        )
    return read_kernel(Path(name))
