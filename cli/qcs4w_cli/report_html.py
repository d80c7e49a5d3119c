"""verify's results as one page that needs no network: verdicts, a sortable table, and plots of what failed."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

from .report import clean, clean_line, plural
from .report_tables import finding, flat, names_of, share
from .report_verdict import counted, verdict_lines

if TYPE_CHECKING:
    from qcs4w_gpu.picture import Picture

Result = dict[str, Any]

#: So many failing tensors get plots; a page with more would be too heavy to open.
MOST_PLOTTED = 12

_HEADS = ("status", "tensor", "file", "N", "K", "M", "ran", "worst error / bound", "quantization error", "finding")
_NUMBERS = {"N", "K", "M", "worst error / bound", "quantization error"}


def html_text(
    results: Sequence[Result], pictures: "Mapping[int, Picture]", facts: Mapping[str, str], title: str
) -> str:
    """Return the page.

    Args:
        results: in their order.
        pictures: of failing tensors, by the position of their result.
        facts: about the run: engine, adapter, seed, ….
        title: of the page.
    """
    counts = Counter(result["status"] for result in results)
    words = {"pass": "passed", "fail": "failed", "error": "could not be checked"}
    shown = ", ".join(f'<span class="{status}">{counts[status]:,} {words[status]}</span>' for status in words)
    failed = [index for index, result in enumerate(results) if result["status"] != "pass"]
    names = names_of(results)
    page = Template(files(__package__).joinpath("report_page.html").read_text(encoding="utf-8"))
    return page.substitute(
        title=_text(title),
        counts=f"{counted(results)}: {shown}",
        facts="".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts.items()),
        heads="".join(
            f'<th scope="col"{" class=number" * (head in _NUMBERS)}><button type="button">{head}</button></th>'
            for head in _HEADS
        ),
        rows="\n".join(_row(index, *each) for index, each in enumerate(zip(results, names, strict=True))),
        details=_details(results, names, failed, pictures),
    )


def _row(index: int, result: Result, told: str) -> str:
    row = flat(result)
    is_error = result["status"] == "error"
    ratio, error = None if is_error else share(result), row["quantization_error"]
    name = _text(told)
    link = name if result["status"] == "pass" else f'<a href="#t{index}">{name or "(file)"}</a>'
    cells = [
        _cell(result["status"], f'<span class="{result["status"]}">{result["status"]}</span>'),
        _cell(result["tensor"], link, "name"),
        _cell(result["file"], _text(result["file"]), "name"),
        *(_number(row[key], "d") for key in ("out_features", "in_features", "rows")),
        _cell(row["kernel"] or row["output_dtype"], _text(row["kernel"] or row["output_dtype"] or "")),
        _number(ratio, ".2g"),
        _number(error, ".4f"),
        _cell(finding(result), _text(finding(result)), "finding"),
    ]
    return f'<tr data-status="{result["status"]}">{"".join(cells)}</tr>'


def _details(
    results: Sequence[Result], names: Sequence[str], failed: Sequence[int], pictures: "Mapping[int, Picture]"
) -> str:
    if not failed:
        return ""
    parts = ["<h2>What did not pass</h2>"]
    for index in failed:
        result = results[index]
        place = f"{result['file']}: {names[index]}" if names[index] else result["file"]
        if result["status"] == "error":
            error = result["error"]
            text = error["message"] + (f"\nHint: {error['hint']}" if error["hint"] else "")
        else:
            text = "\n".join(clean_line("".join(part for part, _ in line)).strip() for line in verdict_lines(result))
        heading = f'<h3 class="{result["status"]}">{_text(place)}</h3>'
        parts.append(f'<article id="t{index}">{heading}<pre>{_lines(text)}</pre>')
        if index in pictures:
            from .report_plots import svgs

            plots = "".join(
                f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"
                for caption, svg in svgs(pictures[index], f"t{index}")
            )
            parts.append(f'<div class="plots">{plots}</div>')
        parts.append("</article>")
    without = sum(results[index]["status"] == "fail" and index not in pictures for index in failed)
    if without:
        parts.append(f"<p>{plural(without, 'tensor')} more failed and are not drawn: the page would be too heavy.</p>")
    return "\n".join(parts)


def _number(value: float | None, form: str) -> str:
    if value is None:
        return _cell(None, "")
    return _cell("Infinity" if value == math.inf else value, format(value, form), "number")


def _cell(value: Any, content: str, kind: str = "") -> str:
    key = escape(clean_line("" if value is None else str(value)))
    return f'<td data-value="{key}"{f" class={kind}" if kind else ""}>{content}</td>'


def _text(text: str) -> str:
    return _lines(clean_line(text))


def _lines(text: str) -> str:
    """Return text without what a page cannot hold: control characters but newlines, halves of surrogate pairs."""
    return escape(clean(text).encode("utf-8", "backslashreplace").decode())
