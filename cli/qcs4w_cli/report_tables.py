"""verify's results as tables: CSV for spreadsheets, Markdown for pull requests. Pure: results in, text out."""

import csv
import io
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from .report import clean_line, plural
from .report_verdict import all_zero, counted

Result = dict[str, Any]

COLUMNS = (
    *("status", "file", "tensor", "line", "out_features", "in_features", "rows", "kernel", "output_dtype"),
    *("exact_failures", "bounded_failures", "elements", "worst_row", "worst_column", "worst_error", "worst_bound"),
    *("relative_error", "source_match", "quantization_error", "max_quant_error", "causes", "error"),
)

_WORST_FIRST = ("error", "fail", "pass")
_MOST_LINES = 200  # of a Markdown table: a comment on a pull request has at most 65,536 characters


def flat(result: Result) -> dict[str, Any]:
    """Return one result as the columns of a table; what it lacks is None."""
    row: dict[str, Any] = {name: result.get(name) for name in COLUMNS}
    if result["status"] == "error":
        return row | {"error": result["error"]["message"]}
    exact, bounded, source = result["exact"], result["bounded"], result["source"]
    worst = worst_of(result)
    return row | {
        "exact_failures": None if exact is None else exact["failures"],
        "bounded_failures": bounded["failures"],
        "elements": bounded["elements"],
        "worst_row": worst["row"],
        "worst_column": worst["column"],
        "worst_error": worst["error"],
        "worst_bound": worst["bound"],
        "relative_error": bounded["relative_error"],
        "source_match": None if source is None else source["match"],
        "quantization_error": None if source is None else source["quantization_error"]["relative"],
        "causes": "; ".join(cause["name"] for cause in result["causes"]),
    }


def names_of(results: Sequence[Result], nameless: str = "") -> list[str]:
    """Return what to call each result within its file: its tensor, and the manifest's line where that is not enough.

    Args:
        results: all of a run.
        nameless: what to call a file as a whole.
    """
    names = [result["tensor"] or nameless for result in results]
    times = Counter((result["file"], name) for result, name in zip(results, names, strict=True))
    return [
        f"{name} (line {result['line']})".strip() if "line" in result and times[result["file"], name] > 1 else name
        for result, name in zip(results, names, strict=True)
    ]


def worst_of(result: Result) -> dict[str, Any]:
    """Return the element that says most: of the exact probe where that alone fails, else of the bounded one."""
    exact, bounded = result["exact"], result["bounded"]
    worst: dict[str, Any] = (exact if exact and exact["failures"] and not bounded["failures"] else bounded)["worst"]
    return worst


def csv_text(results: Sequence[Result]) -> str:
    """Return a CSV with a line of titles; a name that a spreadsheet would take for a formula gets a quote before it."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for result in results:
        writer.writerow({name: _cell(value) for name, value in flat(result).items()})
    return stream.getvalue()


def markdown_text(results: Sequence[Result], heading: str) -> str:
    """Return a table for a pull request, what did not pass first."""
    counts = Counter(result["status"] for result in results)
    lines = [
        f"### {_escaped(heading)}",
        "",
        f"{counted(results)}: **{counts['pass']:,} passed, {counts['fail']:,} failed, "
        f"{counts['error']:,} could not be checked**",
    ]
    order = sorted(zip(results, names_of(results), strict=True), key=lambda each: _WORST_FIRST.index(each[0]["status"]))
    if order:
        several = len({result["file"] for result in results}) > 1
        lines += ["", f"| | tensor |{' file |' * several} N × K | worst error / bound | quantization error | finding |"]
        lines += [f"|---|---|{'---|' * several}---:|---:|---:|---|"]
        lines += [_markdown_row(result, name, with_file=several) for result, name in order[:_MOST_LINES]]
    if len(order) > _MOST_LINES:
        lines += ["", f"and {plural(len(order) - _MOST_LINES, 'tensor')} more"]
    return "\n".join(lines) + "\n"


def share(result: Result) -> float:
    """Return the worst error in units of its bound."""
    worst = worst_of(result)
    if worst["bound"]:
        return float(worst["error"] / worst["bound"])
    return math.inf if worst["error"] else 0.0


def finding(result: Result) -> str:
    """Say in a few words what is wrong; "" of what passes."""
    if result["status"] == "error":
        return str(result["error"]["message"])
    exact, bounded, source = result["exact"], result["bounded"], result["source"]
    texts = []
    for name, probe in (("exact", exact), ("bounded", bounded)):
        if probe is not None and probe["failures"]:
            texts.append(f"{name}: {probe['failures']:,} of {probe['elements']:,} elements wrong, {probe['pattern']}")
        if probe is not None and (zeros := all_zero(probe)):
            texts.append(f"{name}: {zeros}")
        if probe is not None and probe["nan_count"]:
            texts.append(f"{name}: {probe['nan_count']:,} NaN")
        if probe is not None and probe["unwritten"]:
            texts.append(f"{name}: {plural(probe['unwritten'], 'element')} never written")
        if probe is not None and not probe["guards_intact"]:
            texts.append(f"{name}: something was written behind y")
    if source is not None and not source["match"]:
        texts.append("does not fit its source")
    if result["exceeds_quant_error"]:
        texts.append(f"quantization error above {result['max_quant_error']:g}")
    texts += [f"likely cause: {cause['name']}" for cause in result["causes"]]
    return "; ".join(texts)


def _markdown_row(result: Result, name: str, *, with_file: bool) -> str:
    place = [name, result["file"]] if with_file else [name or result["file"]]
    if result["status"] == "error":
        cells = ["error", *place, "", "", "", finding(result)]
    else:
        error = flat(result)["quantization_error"]
        cells = [
            result["status"],
            *place,
            f"{result['out_features']} × {result['in_features']}",
            f"{share(result):.2g}",
            "" if error is None else f"{error:.4f}",
            finding(result),
        ]
    icon = {"pass": "✅", "fail": "❌", "error": "⚠️"}[cells[0]]
    return "| " + " | ".join([f"{icon} {cells[0]}", *map(_escaped, cells[1:])]) + " |"


def _escaped(text: str) -> str:
    """Return text that Markdown shows as it is, on one line."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>#&|~$" else c for c in clean_line(text))


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        value = clean_line(value)
        return f"'{value}" if value.startswith(("=", "+", "-", "@")) else value
    return value
