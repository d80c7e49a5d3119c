"""The check command."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qcs4w_packer.targets import DEFAULT_MAX_BINDING, TARGETS, Case, Target, refusals

from .console import Console, describe_error, print_error
from .main import COMMANDS, EXIT_ERROR, EXIT_FAILED
from .options import PATH, SizeType, blob_options, common_options
from .report import Span, Table, error_document, plural, size

if TYPE_CHECKING:
    from qcs4w_packer import Blob


@click.command("check", short_help=COMMANDS["check"])
@click.argument("files", nargs=-1, required=True, type=PATH, metavar="FILE...")
@click.option(
    "--target",
    type=click.Choice(list(TARGETS)),
    default=next(iter(TARGETS)),
    show_default=True,
    help="What is going to run it; -v lists the rules of each.",
)
@click.option("--tensor", "tensors", multiple=True, metavar="NAME", help="Check this tensor only. Repeatable.")
@click.option(
    "--rows", type=click.IntRange(1, 2**32 - 1), help="Most rows M of input.  [default: the file's own bound, or 1]"
)
@click.option(
    "--max-binding",
    type=SizeType(),
    default=DEFAULT_MAX_BINDING,
    show_default="128MiB, which every device has",
    help="maxStorageBufferBindingSize of the device, in bytes or as 2GiB.",
)
@blob_options()
@common_options
def command(
    files: tuple[Path, ...],
    target: str,
    tensors: tuple[str, ...],
    rows: int | None,
    max_binding: int,
    blob: "Blob | None",
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> int:
    """Check whether another runtime will take packed linears, and say how to mend what it refuses.

    Shapes and dtypes are looked at, not weights: large files take no longer. The exit code is 0 when all is taken, 1
    when a tensor is refused, 2 when a file could not be checked.

    \b
    Example:
      qcs4w check packed.safetensors --target executorch-webgpu
      qcs4w check packed.safetensors --rows 512 --max-binding 2GiB
    """  # noqa: D301
    console = Console("check", as_json, quiet)
    chosen = TARGETS[target]
    results: list[dict[str, Any]] = []
    for file in files:
        for result in _check_file(file, blob, tensors, chosen, rows, max_binding):
            results.append(result)
            _show(result, console)
    counts = Counter(result["status"] for result in results)
    code = EXIT_ERROR if counts["error"] else EXIT_FAILED if counts["refused"] else 0
    console.answer(
        f"\n{chosen.title}: {plural(len(results), 'tensor')}: {counts['ok']} taken, {counts['refused']} refused, "
        f"{counts['error']} could not be checked (bindings up to {size(max_binding)})"
    )
    if verbose:
        console.answer("")
        console.answer(_rules(chosen))
    console.document(
        {
            "target": chosen.name,
            "max_binding": max_binding,
            "rules": [
                {"name": rule.name, "stage": rule.stage, "what": rule.what, "why": rule.why, "source": rule.source}
                for rule in chosen.rules
            ],
            "summary": {status: counts[status] for status in ("ok", "refused", "error")},
            "results": results,
        },
        code,
    )
    return code


def _check_file(
    path: Path, blob: "Blob | None", names: tuple[str, ...], target: Target, rows: int | None, max_binding: int
) -> Iterator[dict[str, Any]]:
    """Yield the JSON form of a result for each tensor; what cannot be checked is a result too."""
    from qcs4w_packer import Qcs4wError, open_packed

    def failure(name: str | None, error: Exception) -> dict[str, Any]:
        message, hint, code = describe_error(error)
        return {"file": str(path), "tensor": name, "status": "error", **error_document(code, message, hint)}

    try:
        file = open_packed(path, blob)
    except Qcs4wError as error:
        yield failure(None, error)
        return
    with file:
        for name in names or tuple(file.entries):
            try:
                entry = file.entry(name)
            except Qcs4wError as error:
                yield failure(name, error)
                continue
            case = replace(file.case(entry), max_binding=max_binding)
            case = case if rows is None else replace(case, rows=rows)
            yield {"file": str(path), "tensor": entry.name, **_result(case, target)}


def _result(case: Case, target: Target) -> dict[str, Any]:
    found = refusals(case, target)
    return {
        "status": "refused" if found else "ok",
        "out_features": case.out_features,
        "in_features": case.in_features,
        "rows": case.rows,
        "scale_dtype": case.scale_dtype,
        "refusals": [
            {"rule": refusal.rule.name, "stage": refusal.rule.stage, "fault": refusal.fault, "mend": refusal.mend}
            for refusal in found
        ],
    }


_STAGES = {"export": "at export", "runtime": "on every device", "device": "on devices with so small a limit"}


def _show(result: dict[str, Any], console: Console) -> None:
    if result["status"] == "error":
        console.answer_styled([[("ERROR  ", "bold red"), (f"  {result['tensor'] or result['file']}  not checked", "")]])
        if not console.as_json:
            print_error(result["error"]["message"], result["error"]["hint"])
        return
    status: Span = ("ok     ", "green") if result["status"] == "ok" else ("REFUSED", "bold red")
    shape = f"{result['out_features']} × {result['in_features']}"
    lines: list[list[Span]] = [[status, (f"  {result['tensor']}  {shape}", "")]]
    for refusal in result["refusals"]:
        where = _STAGES[refusal["stage"]]
        lines.append([(f"         {refusal['rule']}", "bold"), (f", {where}: {refusal['fault']}", "")])
        lines.append([(f"         mend: {refusal['mend']}", "dim")])
    console.answer_styled(lines)


def _rules(target: Target) -> Table:
    rows = [(rule.name, _STAGES[rule.stage], rule.what, rule.why, rule.source) for rule in target.rules]
    return Table((f"rule of {target.name}", "refused", "what", "why", "read in"), rows, ("cyan",))
