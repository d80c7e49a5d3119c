"""The run command."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .console import Console, write_data
from .interrupts import interruptible
from .main import COMMANDS
from .options import PATH, adapter_options, blob_options, common_options, force_option, standard_input
from .report import Table, adapter_document, milliseconds, quoted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from qcs4w_gpu import Gpu
    from qcs4w_packer import Blob, PackedEntry, PackedFile
    from qcs4w_packer.weights import Source


@click.command("run", short_help=COMMANDS["run"])
@click.argument("packed", type=PATH)
@click.option(
    "-x",
    "--input",
    "input_path",
    type=PATH,
    required=True,
    help="Inputs [..., K]: .npy, .npz, .safetensors or .pt; - reads a .npy from stdin.",
)
@click.option("-o", "--output", type=PATH, help="Outputs [..., N], float32, by suffix; - writes a .npy to stdout.")
@click.option(
    "--tensor", "tensors", multiple=True, metavar="NAME", help="Run this one, not all that the input names. Repeatable."
)
@click.option("--no-bias", is_flag=True, help="Leave out the bias that the file has.")
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Run so often; the kernel's time is the median of all but the first, which compiles.",
)
@blob_options()
@force_option
@adapter_options
@common_options
def command(
    packed: Path,
    input_path: Path,
    output: Path | None,
    tensors: tuple[str, ...],
    no_bias: bool,
    repeat: int,
    blob: "Blob | None",
    force: bool,
    engine: str,
    adapter: str | None,
    require_gpu: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> int:
    """Compute y = x · Wᵀ (+ bias) on the GPU for one packed tensor, or for all that the input file names.

    \b
    Example:
      qcs4w run packed.safetensors -x activations.npz -o outputs.npz
      qcs4w run packed.safetensors -x x.npy -o y.npy --tensor pooler.dense
      qcs4w run packed.safetensors -x x.npy --tensor pooler.dense --no-bias --json
    """  # noqa: D301
    from qcs4w_gpu import Gpu
    from qcs4w_packer import UsageError, open_packed, open_source
    from qcs4w_packer.arrays import check_output_format, npy_bytes, output_name, pair_inputs, save_arrays
    from qcs4w_packer.files import check_target

    to_stdout = output is not None and str(output) == "-"
    console = Console("run", as_json, quiet, answers_to_stderr=to_stdout)
    outputs: dict[str, NDArray[np.float32]] = {}
    results: list[dict[str, Any]] = []
    with open_packed(packed, blob) as container, standard_input(input_path) as path, open_source(path) as inputs:
        reading = (input_path, *container.files)
        pairs = [pair for name in tensors or (None,) for pair in pair_inputs(container, inputs, name)]
        unused = [name for name in inputs.tensors if name not in {array_name for _, array_name in pairs}]
        if unused and not tensors:
            console.warn(f"{input_path}: no packed tensor is named {quoted(unused)}")
        if to_stdout and len(pairs) > 1:
            raise UsageError(f"{len(pairs)} outputs do not fit into one .npy on stdout", hint="write a file with -o")
        if output is not None and not to_stdout:
            check_output_format(output, [output_name(*pair) for pair in pairs])
            check_target(output, force=force, sources=reading)
        with interruptible(), Gpu(adapter, engine=engine, require_gpu=require_gpu) as gpu:
            console.note(f"adapter: {gpu.adapter}; {gpu.reason}")
            job = _Job(gpu, container, console, with_bias=not no_bias, repeat=repeat)
            with console.progress("running") as progress:
                for entry, array_name in pairs:
                    progress(0, len(pairs), entry.name)
                    y, result = job.run(entry, inputs, array_name)
                    outputs[output_name(entry, array_name)] = y
                    results.append(result)
                    progress(1, len(pairs), entry.name)
        if to_stdout:
            write_data(npy_bytes(next(iter(outputs.values()))))
        elif output is not None:
            save_arrays(output, outputs, nameless=inputs.nameless, force=force, sources=reading)
    console.answer(_table(results))
    if output is None:
        console.note("nothing was written: -o names the output file")
    elif not to_stdout:
        console.note(f"wrote {output}")
    console.document(
        {
            "engine": gpu.engine.version,
            "adapter": adapter_document(gpu.adapter),
            "packed": str(packed),
            "input": str(input_path),
            "output": None if output is None else str(output),
            "unused_inputs": unused,
            "results": results,
        },
        0,
    )
    return 0


@dataclass(frozen=True)
class _Job:
    """What every tensor is run with."""

    gpu: "Gpu"
    container: "PackedFile"
    console: Console
    with_bias: bool
    repeat: int

    def run(
        self, entry: "PackedEntry", inputs: "Source", array_name: str
    ) -> "tuple[NDArray[np.float32], dict[str, Any]]":
        """Upload one weight, run it on its input, free it; return y and the JSON form of what happened."""
        from statistics import median

        from qcs4w_gpu import DomainError, Linear
        from qcs4w_gpu.judge import check_domain
        from qcs4w_gpu.linear import as_rows, plan_for
        from qcs4w_packer.arrays import read_array

        plan_for(self.gpu, inputs.tensors[array_name].rows or 1, entry.out_features, entry.in_features)
        x = read_array(inputs, array_name, entry.in_features)
        rows = as_rows(x, entry.in_features, name=entry.name)
        weight = self.container.load(entry.name)
        try:
            check_domain(weight, rows)
        except DomainError as error:
            self.console.warn(f"{entry.name}: {error}")
        bias = self.container.bias(entry) if self.with_bias else None
        with Linear(self.gpu, weight, bias=bias) as linear:
            runs = [linear.run(rows) for _ in range(self.repeat)]
        last = runs[-1]
        times = [ran.timing.kernel_ms for ran in runs[1:] or runs if ran.timing.kernel_ms is not None]
        return last.y.reshape(*x.shape[:-1], entry.out_features), {
            "tensor": entry.name,
            "rows": last.plan.rows,
            "out_features": entry.out_features,
            "in_features": entry.in_features,
            "bias": linear.has_bias,
            "kernel": last.plan.kernel.name,
            "upload_weights_ms": linear.upload_ms,
            "upload_input_ms": last.timing.upload_ms,
            "kernel_ms": median(times) if times else None,
            "readback_ms": last.timing.readback_ms,
        }


def _table(results: list[dict[str, Any]]) -> Table:
    titles = (
        *("tensor", ">M", ">N", ">K", "bias", "kernel"),
        *(">upload weights ms", ">upload x ms", ">kernel ms", ">readback ms"),
    )
    rows = [
        (
            result["tensor"],
            *(str(result[key]) for key in ("rows", "out_features", "in_features")),
            "yes" if result["bias"] else "no",
            result["kernel"],
            *(milliseconds(result[f"{part}_ms"]) for part in ("upload_weights", "upload_input", "kernel", "readback")),
        )
        for result in results
    ]
    return Table(titles, rows, ("cyan",))
