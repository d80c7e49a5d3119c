"""verify's results -> JSON and lines of text. Pure."""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .report import Span, plural, quantization_document

if TYPE_CHECKING:
    from qcs4w_gpu import Comparison, SourceCheck, Verdict
    from qcs4w_gpu.sweep import Shape
    from qcs4w_packer import PackedEntry

#: The "file" of a result of --sweep, whose "tensor" is a shape.
SWEEP = "sweep"


def is_shape(result: dict[str, Any]) -> bool:
    """Tell whether a result of verify is that of a shape of a sweep, and not of a tensor of a file."""
    return bool(result["file"] == SWEEP and str(result["tensor"]).startswith("M "))


def counted(results: Sequence[dict[str, Any]]) -> str:
    """Return how many shapes and tensors results of verify are of: "71 shapes, 2 tensors"."""
    shapes = sum(map(is_shape, results))
    tensors = len(results) - shapes
    parts = [plural(shapes, "shape")] * (shapes > 0) + [plural(tensors, "tensor")] * (tensors > 0 or not shapes)
    return ", ".join(parts)


def verdict_document(entry: "PackedEntry | Shape", verdict: "Verdict") -> dict[str, Any]:
    """Return the JSON form of a verdict."""
    return {
        "status": verdict.status,
        "out_features": entry.out_features,
        "in_features": entry.in_features,
        "rows": verdict.rows,
        "kernel": verdict.kernel,
        "exact": None if verdict.exact is None else _comparison_document(verdict.exact),
        "bounded": _comparison_document(verdict.bounded),
        "source": None if verdict.source is None else _source_document(verdict.source),
        "causes": [dataclasses.asdict(cause) for cause in verdict.causes],
        "warnings": list(verdict.warnings),
        "output_dtype": verdict.output_dtype,
        "max_quant_error": verdict.max_quant_error,
        "exceeds_quant_error": verdict.exceeds_quant_error,
    }


def verdict_lines(result: dict[str, Any], name_width: int = 0) -> list[list[Span]]:
    """Return a verdict (its JSON form) for people: one line, and what is wrong under it.

    Args:
        result: as `verdict_document` made it, with "tensor".
        name_width: to which names are filled up, so that lines of one file stand under each other.
    """
    exact, bounded, source = result["exact"], result["bounded"], result["source"]
    passed = result["status"] == "pass"
    shape = f"{result['out_features']} × {result['in_features']}"
    parts = [
        f"{result['tensor']:<{name_width}}",
        f"{shape:<13}",
        "exact n/a" if exact is None else f"exact {'DIFFERS' if exact['failures'] else 'equal'}",
        f"{'BEYOND' if bounded['failures'] else 'within'} bound, worst {_worst(bounded['worst'])}",
    ]
    if source is not None and not (source["match"] and is_shape(result)):  # a sweep's source is there for the packer
        fits = "equal" if source["equal_bytes"] else "fits" if source["match"] else "DIFFERS"
        parts.append(f"source {fits}, quantization error {source['quantization_error']['relative']:.4f}")
    status: Span = ("pass", "green") if passed else ("FAIL", "bold red")
    parts.append(result["kernel"] or f"{result['output_dtype']} output")
    lines: list[list[Span]] = [[status, ("  " + "  ".join(parts), "")]]
    probes = {name: probe for name, probe in (("exact", exact), ("bounded", bounded)) if probe is not None}
    for name, probe in probes.items():
        lines += [[(f"      {name}: {text}", "")] for text in _faults(probe, result["out_features"])]
        if zeros := all_zero(probe):
            lines.append([(f"      {name}: {zeros}", "")])
    if exact is not None and exact["match"] and bounded["failures"]:
        lines.append(
            [("      the codes are read right: look at the scales, or at inputs that are no small integers", "")]
        )
    if source is not None and not source["match"]:
        lines.append([(f"      source: {_source_fault(source)}", "")])
    if result["exceeds_quant_error"]:
        found, limit = source["quantization_error"]["relative"], result["max_quant_error"]
        lines.append([(f"      source: the quantization error {found:.4g} is above the threshold of {limit:g}", "")])
    for cause in result["causes"]:
        lines.append([("      likely cause: ", ""), (cause["name"], "bold"), (f" ({cause['evidence']})", "")])
    told = any(probe["unwritten"] or not probe["guards_intact"] for probe in probes.values())
    is_wrong = not all(part is None or part["match"] for part in (exact, bounded, source))
    if is_wrong and not result["causes"] and not told:
        lines.append([("      likely cause: none of the known ones fits", "")])
    return lines + [[(f"      note: {warning}", "yellow")] for warning in result["warnings"]]


def all_zero(probe: dict[str, Any]) -> str:
    """Say so where every wrong element of a probe is zero; "" elsewhere."""
    return "all wrong elements are 0: not written?" if 1 < probe["failures"] == probe["wrong_zeros"] else ""


def _worst(worst: dict[str, Any]) -> str:
    share = worst["error"] / worst["bound"] if worst["bound"] else math.inf if worst["error"] else 0.0
    place = f"y[{worst['row']}, {worst['column']}]"
    return f"{share:<7.2g} of it at {place:<12}"


def _faults(probe: dict[str, Any], out_features: int) -> list[str]:
    texts = []
    if probe["failures"]:
        worst, unwritten = probe["worst"], probe["unwritten"]
        count, columns = probe["wrong_column_count"], ", ".join(str(n) for n in probe["wrong_columns"])
        where = "in every column"
        if count < out_features:
            where = f"in {plural(count, 'column')} (n = {columns}{', …' * (count > len(probe['wrong_columns']))})"
        if probe["pattern"] != "every element":
            where += f", {probe['pattern']}"
        if unwritten < probe["failures"]:  # of what was not written, the value says nothing
            texts.append(
                f"{probe['failures']:,} of {probe['elements']:,} elements wrong, {where}; "
                f"worst y[{worst['row']}, {worst['column']}] = {worst['value']:.9g}, expected {worst['expected']:.9g}, "
                f"error {worst['error']:.3g}, bound {worst['bound']:.3g}"
            )
    if probe["nan_count"] > probe["unwritten"]:
        texts.append(f"{plural(probe['nan_count'], 'element')} of y {'is' if probe['nan_count'] == 1 else 'are'} NaN")
    if probe["unwritten"]:
        texts.append(
            f"{plural(probe['unwritten'], 'element')} never written, {probe['unwritten_pattern']}: "
            "too few workgroups, or a store left out"
        )
    if not probe["guards_intact"]:
        texts.append("something was written behind y: a store without a bounds check, or one by arrayLength(&y)")
    return texts


def _source_fault(source: dict[str, Any]) -> str:
    first = source["first_difference"]
    if first is None:
        return "the codes are those of the source, the scales or the padding are not"
    return (
        f"packed again it gives other codes, first at row {first['row']}, column {first['column']}: "
        f"{first['source_code']}, the file has {first['code']}"
    )


def _comparison_document(comparison: "Comparison") -> dict[str, Any]:
    document = dataclasses.asdict(comparison)
    return {"match": comparison.is_match, **document}


def _source_document(check: "SourceCheck") -> dict[str, Any]:
    first = check.first_difference
    keys = ("row", "column", "code", "source_code")
    return {
        "match": check.is_match,
        "equal_bytes": check.equal_bytes,
        "first_difference": None if first is None else dict(zip(keys, first, strict=True)),
        "quantization_error": quantization_document(check.error),
    }
