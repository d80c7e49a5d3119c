"""The verify command."""

import itertools
import os
import shlex
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .console import Console, print_error
from .interrupts import interruptible
from .main import COMMANDS, EXIT_ERROR, EXIT_FAILED
from .options import (
    PATH,
    adapter_options,
    blob_options,
    common_options,
    force_option,
    read_file_list,
    standard_input,
)
from .report import adapter_document, plural, quoted, verdict_lines
from .verify_batch import Batch, Shard
from .verify_kernel import KernelRequest, kernel_options, watch
from .verify_options import ShardType, ThresholdType, thresholds_of
from .verify_reports import FORMATS, open_reports, report_options
from .verify_requests import Request, Unusable, open_manifest, read_manifest, requests_of
from .verify_save import FailingFolder
from .verify_work import Device, Setting

if TYPE_CHECKING:
    from qcs4w_packer import Blob


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
@click.option("--shard", type=ShardType(), help="Take the i-th of n parts, such as 2/4; each tensor is in one.")
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
def command(
    packed: tuple[Path, ...],
    manifest: Path | None,
    files_from: str | None,
    tensors: tuple[str, ...],
    source: Path | None,
    than: Path | None,
    input_path: Path | None,
    output: Path | None,
    no_bias: bool,
    limits: "tuple[tuple[str | None, float], ...]",
    rows: int,
    seed: int,
    kernel: KernelRequest,
    save_failing: Path | None,
    shard: Shard | None,
    fail_fast: bool,
    strict: bool,
    jobs: int | None,
    jsonl: Path | None,
    force: bool,
    blob: "Blob | None",
    engine: str,
    adapter: str | None,
    require_gpu: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **reports_wanted: Path | None,
) -> int:
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
    from contextlib import ExitStack

    from qcs4w_gpu import Gpu
    from qcs4w_gpu.linear import check_kernel
    from qcs4w_packer import UsageError, open_source

    lines_to_stdout = jsonl is not None and str(jsonl) == "-"
    if lines_to_stdout and as_json:
        raise UsageError("--json and --jsonl - both want stdout", hint="give --jsonl a file")
    console = Console("verify", as_json, quiet, answers_to_stderr=lines_to_stdout)
    if [*map(str, (manifest, files_from, input_path))].count("-") > 1:
        raise UsageError("--manifest, --files-from and --input cannot share stdin", hint="give but one of them -")
    paths = [*packed, *(read_file_list(files_from) if files_from else [])]
    if kernel.watch:
        return _watch(kernel, console)
    if not paths and manifest is None and not kernel.sweep:
        raise UsageError("there is nothing to verify", hint="name a packed file, a --manifest, or --files-from a list")
    if than is not None:
        from .verify_than import verify_than

        others: dict[str, Any] = {"manifest": manifest, "files-from": files_from, "output": output, "shape": blob}
        others |= {"max-quant-error": limits or None, "no-bias": no_bias or None, "shard": shard}
        others |= {"fail-fast": fail_fast or None, "strict": strict or None, **kernel.said()}
        others |= {"save-failing": save_failing, "jsonl": jsonl, **reports_wanted}
        useless = [f"--{name}" for name, value in others.items() if value is not None]
        if len(paths) != 1 or source is None or useless:
            message = "--than compares two packed files: give one PACKED, --source, and perhaps --input"
            hint = f"it has no {' and no '.join(useless)}; --json has all its figures" if useless else None
            raise UsageError(message, hint=hint)
        return verify_than(paths[0], than, source, input_path, tensors, console)
    thresholds = thresholds_of(limits)
    if thresholds and source is None and (paths or manifest is None):  # lines of a manifest may name their own
        raise UsageError("--max-quant-error needs --source: the error is that of the packed weights against it")
    if output is not None and input_path is None:
        raise UsageError("--output needs --input: the x that the output was computed from")
    if output is not None and (kernel.name is not None or kernel.sweep):
        raise UsageError("--output is judged as it is: no kernel runs, so that --kernel and --sweep have no meaning")
    shard = shard or Shard()
    with ExitStack() as stack:
        if input_path is not None:
            input_path = stack.enter_context(standard_input(input_path))
        for given in filter(None, (source, input_path, output)):
            open_source(given).close()  # a fault of theirs is one error, and not one of each tensor
        reports = open_reports(
            stack, jsonl, {kind: reports_wanted[kind] for kind in FORMATS}, save_failing, force=force
        )
        template = Request(Path(), tensors, input_path, output, source, rows, seed, thresholds)
        device = Device(lambda: kernel.watched(Gpu(adapter, engine=engine, require_gpu=require_gpu), console))
        saved = None
        if save_failing is not None:
            saved = FailingFolder(save_failing, kernel, device, force=force)
            saved.check()
        chosen = kernel.read()
        requests: Iterable[Request | Unusable] = requests_of(paths, template)
        if manifest is not None:
            lines = read_manifest(stack.enter_context(open_manifest(manifest)), manifest, template)
            requests = itertools.chain(requests, lines)
        also = [Path(files_from) if files_from else None, manifest, kernel.file, source, input_path, output]
        also += [blob.scales if blob else None]
        requests = reports.spare(requests, [path for path in also if path is not None])
        batch = Batch(
            Setting(device, chosen, with_bias=not no_bias, draw=reports.wants_pictures),
            blob=blob,
            jobs=jobs or min(os.cpu_count() or 1, 4),
            shard=shard,
            fail_fast=fail_fast,
            strict=strict,
            verbose=verbose,
            on_failure=saved.add if saved else None,
        )
        stack.enter_context(interruptible())
        stack.callback(device.close)
        # Without an adapter that is one error; a manifest may need none, but for a kernel.
        if output is None and (paths or kernel.sweep or kernel.file):
            console.note(f"adapter: {device.gpu.adapter}; {device.gpu.reason}")
            if chosen is not None:
                check_kernel(device.gpu, chosen)  # a fault of its text is one error, and not one of each tensor
        if kernel.sweep:
            on_failure = saved.add_shape if saved else None
            for result in kernel.sweep_results(device.gpu, chosen, seed, shard, on_failure):
                reports.add(result, None)
                if result["status"] != "pass":  # of the shapes that pass, the number is enough
                    _show(result, 0, console)
        several = manifest is not None or len(paths) > 1 or any(map(_stands_for_several, paths))
        file_shown = None
        for outcome in batch.results(requests):
            reports.add(outcome.result, outcome.picture)
            if several and outcome.result["file"] != file_shown:
                file_shown = outcome.result["file"]
                console.answer(f"{file_shown}:")
            _show(outcome.result, outcome.name_width, console)
        unused = []
        was_used = any(path == input_path for path, _ in batch.used_inputs)  # else an error has said why
        if input_path is not None and was_used and not tensors and not batch.stopped:
            with open_source(input_path) as inputs:
                unused = [name for name in inputs.tensors if (input_path, name) not in batch.used_inputs]
        results = reports.results
        if not results and shard == Shard():
            raise UsageError("there is nothing to verify", hint="the list of files is empty")
        counts = Counter(result["status"] for result in results)
        summary = {status: counts[status] for status in ("pass", "fail", "error")}
        code = EXIT_ERROR if counts["error"] else EXIT_FAILED if counts["fail"] else 0
        if saved is not None and saved.write():
            console.note(f"wrote {save_failing}; to repeat it: sh {shlex.quote(str(saved.script))}")
        for path in reports.write(_facts(device, seed, shard), summary, code):
            console.note(f"wrote {path}")
    console.answer(
        f"\n{plural(len(results), 'tensor')}: {counts['pass']} passed, {counts['fail']} failed, "
        f"{counts['error']} could not be checked" + f"; shard {shard}" * (shard.count > 1)
    )
    names = [result["tensor"] for result in results if result["tensor"] is not None]
    idle = thresholds.unused(names) if shard == Shard() and not batch.stopped else []
    if idle:
        console.warn(f"--max-quant-error: no tensor fits {quoted(idle)}")
    if batch.stopped:
        console.warn("stopped there; the rest was not looked at")
    if saved is not None and saved.left_out:
        console.warn(f"{plural(saved.left_out, 'failing tensor')} not in {save_failing}")
    if unused:
        console.warn(f"{input_path}: no packed tensor is named {quoted(unused)}")
    if batch.unchecked:
        console.warn(f"not checked, for want of an input: {quoted([item['tensor'] for item in batch.unchecked])}")
    gpu = device.first
    console.document(
        {
            "engine": gpu.engine.version if gpu else None,
            "adapter": adapter_document(gpu.adapter) if gpu else None,
            "seed": seed,
            "rounding_factor": device.rounding_factor,
            "shard": str(shard),
            "summary": summary,
            "stopped": batch.stopped,
            "unused_inputs": unused,
            "unused_thresholds": idle,
            "unchecked": batch.unchecked,
            "results": results,
        },
        code,
    )
    return code


def _stands_for_several(path: Path) -> bool:
    return os.path.isdir(path) or any(sign in str(path) for sign in "*?[")


def _facts(device: Device, seed: int, shard: Shard) -> dict[str, str]:
    """Return what a report says of the run."""
    from qcs4w_packer import __version__

    ran = {"engine": device.first.engine.version, "adapter": str(device.first.adapter)} if device.first else {}
    return {"qcs4w": __version__, **ran, "seed": str(seed), "shard": str(shard)}


def _show(result: dict[str, Any], name_width: int, console: Console) -> None:
    if "error" in result:
        console.answer_styled([[("ERROR", "bold red"), (f"  {result['tensor'] or result['file']}  not checked", "")]])
        if not console.as_json:
            print_error(result["error"]["message"], result["error"]["hint"])
        return
    console.answer_styled(verdict_lines(result, name_width))


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
