"""A batch with every kind of result, and readers of the reports on it."""

import csv
import io
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from qcs4w_packer import PackedLinear, pack_weight, save_container

EVIL = "<script>alert(1)</script>|`=1+1`\"'&.weight"
JUNIT_KINDS = {"failure": "fail", "error": "error", "system-out": "pass"}


def make_batch(folder: Path) -> list[str | Path]:
    """Write a file with a sound tensor, one with swapped nibbles, one with an odd name; return verify's arguments."""
    draw = np.random.default_rng(3)
    names = ("a.weight", "b.weight", EVIL)
    weights = {name: draw.standard_normal((37, 20), np.float32) for name in names}
    packed = {name: pack_weight(weight) for name, weight in weights.items()}
    right = packed["b.weight"]
    packed["b.weight"] = PackedLinear(right.packed << 4 | right.packed >> 4, right.scales, right.in_features)
    save_container(folder / "w.safetensors", packed)
    np.savez(folder / "source.npz", **weights)
    return ["verify", folder / "w.safetensors", folder / "missing.safetensors", "--source", folder / "source.npz"]


Seen = list[tuple[str, str]]


def of_csv(text: str) -> Seen:
    """(status, tensor) of each line."""
    return [(row["status"], row["tensor"]) for row in csv.DictReader(io.StringIO(text))]


def of_junit(text: str) -> Seen:
    """(status, tensor) of each test case."""
    cases = ElementTree.fromstring(text).iter("testcase")
    return [(JUNIT_KINDS[case[0].tag], case.get("name", "").replace("(file)", "")) for case in cases]


def of_markdown(text: str) -> Seen:
    """(status, tensor or file) of each line of the table, unescaped."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and "N ×" not in line]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    return [(row[0].split()[-1], re.sub(r"\\(.)", r"\1", row[1].strip() or row[2].strip())) for row in rows]


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.rows: Seen = []
        self._cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "td":
            self._cells.append(given["data-value"] or "")
        if tag == "script" and given:
            raise AssertionError(given)

    def handle_endtag(self, tag: str) -> None:
        if tag == "tr" and self._cells:
            self.rows.append((self._cells[0], self._cells[1]))
            self._cells = []


def of_html(text: str) -> Seen:
    """(status, tensor) of each row of the page's table."""
    page = _Page()
    page.feed(text)
    return page.rows
