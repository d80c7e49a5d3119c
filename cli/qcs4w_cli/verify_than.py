"""verify --than: which of two packed files of one source is nearer to it, tensor by tensor. Needs no GPU."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import Console, describe_error, print_error
from .main import EXIT_ERROR, EXIT_FAILED
from .options import standard_input
from .report import Table, error_document, plural, quoted

if TYPE_CHECKING:
    from qcs4w_packer import PackedEntry, PackedFile
    from qcs4w_packer.weights import Source

Result = dict[str, Any]


def verify_than(
    a: Path, b: Path, source: Path, input_path: Path | None, tensors: tuple[str, ...], console: Console
) -> int:
    """Compare the errors of two packed files against their source.

    Args:
        a: the file that should be no worse.
        b: the other one.
        source: the float weights of both.
        input_path: compare the errors of outputs on these inputs; without them the errors of the weights.
        tensors: only these; by default all of `a`, or all that the input names.
        console: for the answer.

    Returns:
        0 where `a` is worse nowhere, 1 where it is, 2 where something could not be compared.
    """
    from qcs4w_packer import open_packed, open_source

    results: list[Result] = []
    with ExitStack() as stack:
        files = stack.enter_context(open_packed(a)), stack.enter_context(open_packed(b))
        weights = stack.enter_context(open_source(source))
        inputs = None
        if input_path is not None:
            inputs = stack.enter_context(open_source(stack.enter_context(standard_input(input_path))))
        results.extend(_results(files, weights, inputs, tensors))
        seen = {result["tensor"] for result in results} | {result.get("tensor_b") for result in results}
        left = [name for name in files[1].entries if name not in seen] if not tensors and inputs is None else []
    for result in results:
        if "error" in result and not console.as_json:
            print_error(result["error"]["message"], result["error"]["hint"])
    counts = Counter(result["lower"] for result in results if "lower" in result)
    failed = sum("error" in result for result in results)
    code = EXIT_ERROR if failed else EXIT_FAILED if counts["b"] else 0
    measure = "weight" if input_path is None else "output"
    console.answer(_table(results, measure))
    console.answer(
        f"\n{plural(len(results), 'tensor')}: the {measure} error is lower in {a} for {counts['a']:,}, in {b} for "
        f"{counts['b']:,}, equal for {counts['equal']:,}; {failed:,} could not be compared"
    )
    if left:
        console.warn(f"{b}: also holds {quoted(left)}")
    console.document(
        {
            "packed": str(a),
            "than": str(b),
            "source": str(source),
            "measure": measure,
            "summary": {"a": counts["a"], "b": counts["b"], "equal": counts["equal"], "error": failed},
            "only_in_b": left,
            "results": results,
        },
        code,
    )
    return code


def _results(
    files: "tuple[PackedFile, PackedFile]", weights: "Source", inputs: "Source | None", tensors: tuple[str, ...]
) -> Iterator[Result]:
    from qcs4w_packer import Qcs4wError
    from qcs4w_packer.arrays import pair_inputs

    for name in tensors or (None,):
        try:
            if inputs is not None:
                pairs = pair_inputs(files[0], inputs, name)
            else:
                pairs = [(entry, "") for entry in ([files[0].entry(name)] if name else files[0].entries.values())]
        except Qcs4wError as error:
            yield _failure(name, error)
            continue
        for entry, array_name in pairs:
            try:
                yield _compared(files, entry, weights, inputs, array_name)
            except Qcs4wError as error:
                yield _failure(entry.name, error)


def _compared(
    files: "tuple[PackedFile, PackedFile]",
    entry: "PackedEntry",
    weights: "Source",
    inputs: "Source | None",
    array_name: str,
) -> Result:
    """Return the errors of one tensor in both files, relative to the source."""
    from qcs4w_gpu.linear import as_rows
    from qcs4w_packer.arrays import read_array
    from qcs4w_packer.errors import UsageError
    from qcs4w_packer.measure import output_error, quantization_error, row_square_sums
    from qcs4w_packer.packing import source_weight
    from qcs4w_packer.quantize import dequantize
    from qcs4w_packer.rowpack import refuse_non_finite

    other = files[1].entry(entry.name)
    shapes = [(each.out_features, each.in_features) for each in (entry, other)]
    if shapes[0] != shapes[1]:
        raise UsageError(
            f"'{entry.name}' is {list(shapes[0])} in {files[0].path}, {list(shapes[1])} in {files[1].path}"
        )
    weight = source_weight(weights, entry)
    refuse_non_finite(weight, name=entry.name)
    x = None
    if inputs is not None:
        x = as_rows(read_array(inputs, array_name, entry.in_features), entry.in_features, name=entry.name)
    errors = []
    for file, each in zip(files, (entry, other), strict=True):
        packed = file.load(each.name)
        dequantized = dequantize(packed.codes(), packed.scales)
        if x is not None:
            errors.append(output_error(x, weight, dequantized))
        else:
            errors.append(quantization_error(*row_square_sums(weight, dequantized)).relative)
    return {
        "tensor": entry.name,
        "tensor_b": other.name,
        "error_a": errors[0],
        "error_b": errors[1],
        "lower": "equal" if errors[0] == errors[1] else "a" if errors[0] < errors[1] else "b",
    }


def _failure(name: str | None, error: Exception) -> Result:
    message, hint, code = describe_error(error)
    return {"tensor": name, **error_document(code, message, hint)}


def _table(results: list[Result], measure: str) -> Table:
    rows = [
        (result["tensor"] or "", "ERROR", "", "", "")
        if "error" in result
        else (
            result["tensor"],
            {"a": "A", "b": "B", "equal": "equal"}[result["lower"]],
            f"{result['error_a']:.5f}",
            f"{result['error_b']:.5f}",
            _ratio(result["error_a"], result["error_b"]),
        )
        for result in results
    ]
    return Table(("tensor", "lower", f">{measure} error of A", ">of B", ">A / B"), rows, ("cyan",))


def _ratio(a: float, b: float) -> str:
    return f"{a / b if b else math.inf if a else 1.0:.4f}"
