"""verify's results as JUnit XML, which CI systems show as tests. Pure: results in, text out.

A file is a suite, a tensor a test case; what fails is a failure, what could not be checked an error.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any
from xml.etree import ElementTree

from .report import clean
from .report_tables import finding, names_of
from .report_verdict import verdict_lines

Result = dict[str, Any]


def junit_text(results: Sequence[Result], properties: dict[str, str]) -> str:
    """Return a JUnit document.

    Args:
        results: in their order; consecutive ones of one file are a suite.
        properties: of every suite: engine, adapter, ….
    """
    root = ElementTree.Element("testsuites", {"name": "qcs4w verify", **_counts(results)})
    named = zip(results, names_of(results, "(file)"), strict=True)
    for file, grouped in groupby(named, key=lambda each: each[0]["file"]):
        cases = list(grouped)
        group = [result for result, _ in cases]
        suite = ElementTree.SubElement(root, "testsuite", {"name": _text(file), **_counts(group)})
        listed = ElementTree.SubElement(suite, "properties")
        for name, value in properties.items():
            ElementTree.SubElement(listed, "property", {"name": name, "value": _text(value)})
        for result, name in cases:
            _add_case(suite, result, name)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _add_case(suite: ElementTree.Element, result: Result, name: str) -> None:
    case = ElementTree.SubElement(suite, "testcase", {"classname": _text(result["file"]), "name": _text(name)})
    if result["status"] == "error":
        error = result["error"]
        element = ElementTree.SubElement(case, "error", {"type": error["code"], "message": _text(error["message"])})
        element.text = _text(error["hint"] or error["message"])
        return
    text = "\n".join("".join(part for part, _ in line) for line in verdict_lines(result))
    if result["status"] == "fail":
        element = ElementTree.SubElement(case, "failure", {"type": "verdict", "message": _text(finding(result))})
        element.text = _text(text)
    else:
        ElementTree.SubElement(case, "system-out").text = _text(text)


def _counts(results: Sequence[Result]) -> dict[str, str]:
    counts = Counter(result["status"] for result in results)
    return {"tests": str(len(results)), "failures": str(counts["fail"]), "errors": str(counts["error"])}


def _text(text: str) -> str:
    """Return text without what XML cannot hold: control characters, halves of surrogate pairs, U+FFFE."""
    return clean(text).encode("utf-8", "backslashreplace").decode()
