"""The run command."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .console import Console, write_data
from .main import COMMANDS
from .options import PATH, adapter_options, common_options, force_option, standard_input
from .report import Table, adapter_document, milliseconds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from qcs4w_gpu import Gpu, Linear, Run
    from qcs4w_packer import Container, PackedEntry


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
@click.option("--tensor", metavar="NAME", help="Run this one; by default all that the input file names.")
@click.option("--no-bias", is_flag=True, help="Leave out the bias that the file has.")
@force_option
@adapter_options
@common_options
def command(
    packed: Path,
    input_path: Path,
    output: Path | None,
    tensor: str | None,
    no_bias: bool,
    force: bool,
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
    from qcs4w_gpu.webgpu import engine_version
    from qcs4w_packer import Container, UsageError, open_source
    from qcs4w_packer.arrays import check_output_format, npy_bytes, pair_inputs, read_array, save_arrays
    from qcs4w_packer.files import check_target

    to_stdout = output is not None and str(output) == "-"
    console = Console("run", as_json, quiet, answers_to_stderr=to_stdout)
    outputs: dict[str, NDArray[np.float32]] = {}
    results: list[dict[str, Any]] = []
    with Container(packed) as container, standard_input(input_path) as path, open_source(path) as inputs:
        pairs = pair_inputs(container, inputs, tensor)
        if to_stdout and len(pairs) > 1:
            raise UsageError(f"{len(pairs)} outputs do not fit into one .npy on stdout", hint="write a file with -o")
        if output is not None and not to_stdout:
            check_output_format(output, len(pairs))
            check_target(output, force=force, sources=(packed, input_path))
        with Gpu(adapter, require_gpu=require_gpu) as gpu:
            console.note(f"adapter: {gpu.adapter}; {gpu.reason}")
            with console.progress("running") as progress:
                for entry, array_name in pairs:
                    x = read_array(inputs, array_name)
                    linear, ran = _run(gpu, container, entry, x, console, with_bias=not no_bias)
                    name = entry.name if inputs.nameless else array_name
                    outputs[name] = ran.y.reshape(*x.shape[:-1], entry.out_features)
                    results.append(_result(entry, linear, ran))
                    progress(1, len(pairs), entry.name)
        if to_stdout:
            write_data(npy_bytes(next(iter(outputs.values()))))
        elif output is not None:
            sources = (packed, input_path)
            save_arrays(output, outputs, nameless=inputs.nameless, force=force, sources=sources)
    console.answer(_table(results))
    if output is None:
        console.note("nothing was written: -o names the output file")
    elif not to_stdout:
        console.note(f"wrote {output}")
    console.document(
        {
            "engine": engine_version(),
            "adapter": adapter_document(gpu.adapter),
            "packed": str(packed),
            "input": str(input_path),
            "output": None if output is None else str(output),
            "results": results,
        },
        0,
    )
    return 0


def _run(
    gpu: "Gpu",
    container: "Container",
    entry: "PackedEntry",
    x: "NDArray[np.float32]",
    console: Console,
    *,
    with_bias: bool,
) -> "tuple[Linear, Run]":
    """Upload one weight, run it on x once, and free it."""
    from qcs4w_gpu import DomainError, Linear
    from qcs4w_gpu.judge import check_domain
    from qcs4w_gpu.linear import as_rows

    weight = container.load(entry.name)
    rows = as_rows(x, entry.in_features, name=entry.name)
    try:
        check_domain(weight, rows)
    except DomainError as error:
        console.warn(f"{entry.name}: {error}")
    linear = Linear(gpu, weight, bias=container.bias(entry) if with_bias else None)
    try:
        return linear, linear.run(rows)
    finally:
        linear.close()


def _result(entry: "PackedEntry", linear: "Linear", ran: "Run") -> dict[str, Any]:
    return {
        "tensor": entry.name,
        "rows": ran.plan.rows,
        "out_features": entry.out_features,
        "in_features": entry.in_features,
        "bias": linear.has_bias,
        "kernel": ran.plan.kernel.name,
        "upload_weights_ms": linear.upload_ms,
        "upload_input_ms": ran.timing.upload_ms,
        "kernel_ms": ran.timing.kernel_ms,
        "readback_ms": ran.timing.readback_ms,
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
