"""verify's reports: they agree with each other, are whole or not there, and take hostile names."""

import json
import os
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import xmlschema
from command_line import SCHEMA, CommandLine, process
from reporting import EVIL, make_batch, of_csv, of_html, of_junit, of_markdown

from qcs4w_cli.report_html import MOST_PLOTTED
from qcs4w_packer import PackedLinear, pack_weight, save_container

pytestmark = pytest.mark.gpu
LINE = {"$defs": SCHEMA["$defs"], "$ref": "#/$defs/verify_line"}


@pytest.fixture(autouse=True)
def _adapter(gpu: object) -> None:
    """These tests need an adapter."""


def report_options(folder: Path) -> list[str | Path]:
    """Every report at once."""
    names = {"junit": "r.xml", "csv": "r.csv", "markdown": "r.md", "html": "r.html", "jsonl": "r.jsonl"}
    return [part for kind, name in names.items() for part in (f"--{kind}", folder / name)]


def test_all_reports_of_one_run_agree(tmp_path: Path, qcs4w: CommandLine) -> None:
    """JSON, JSON lines, JUnit, CSV, Markdown and HTML name the same tensors with the same status, hostile names too."""
    arguments = make_batch(tmp_path)
    result = qcs4w(*arguments, *report_options(tmp_path), "--json")
    assert result.code == 2
    document = result.document
    expected = [(r["status"], r["tensor"] or "") for r in document["results"]]
    assert expected == [("pass", "a.weight"), ("fail", "b.weight"), ("pass", EVIL), ("error", "")]
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    for line in lines:
        jsonschema.validate(line, LINE)
    assert [line["result"] for line in lines[:-1]] == document["results"]
    assert (lines[-1]["summary"], lines[-1]["exit_code"]) == (document["summary"], 2)
    assert of_csv((tmp_path / "r.csv").read_text()) == expected
    assert of_junit((tmp_path / "r.xml").read_text()) == expected
    page = (tmp_path / "r.html").read_text()
    assert of_html(page) == expected
    markdown = (tmp_path / "r.md").read_text()
    missing = ("error", str(tmp_path / "missing.safetensors"))
    assert of_markdown(markdown.replace("&lt;", "<")) == [missing, expected[1], expected[0], expected[2]]
    for text in (page, markdown, (tmp_path / "r.csv").read_text(), (tmp_path / "r.xml").read_text()):
        assert "nibbles swapped" in text


def test_a_tensor_that_is_verified_twice_can_be_told_apart(tmp_path: Path, qcs4w: CommandLine) -> None:
    """No two test cases, rows or headings are called the same: where a name is not enough, its line is told."""
    right = pack_weight(np.random.default_rng(0).standard_normal((3, 4), np.float32))
    for file in ("a", "b"):
        save_container(tmp_path / f"{file}.safetensors", {"fc.weight": right})
    np.save(tmp_path / "x.npy", np.ones((1, 4), np.float32))
    np.save(tmp_path / "y.npy", np.full((1, 3), 9, np.float32))
    twice = ['{"file": "a.safetensors", "input": "x.npy", "output": "y.npy"}', '{"file": "a.safetensors", "rows": 2}']
    (tmp_path / "batch.jsonl").write_text("\n".join([*twice, '{"file": "b.safetensors"}', "{", "{"]))
    options = report_options(tmp_path)
    assert qcs4w("verify", "--manifest", tmp_path / "batch.jsonl", *options).code == 2
    names = ["fc.weight (line 1)", "fc.weight (line 2)", "fc.weight"]
    assert [name for _, name in of_junit((tmp_path / "r.xml").read_text())] == [*names, " (line 4)", " (line 5)"]
    markdown = (tmp_path / "r.md").read_text().splitlines()
    assert markdown[4].startswith("| | tensor | file | N × K |")
    cells = [line.split(" | ")[1:3] for line in markdown[6:]]
    assert cells[2][0] == "fc.weight (line 1)"
    assert cells[4] == ["fc.weight", str(tmp_path / "b.safetensors").replace("_", "\\_")]
    assert len({tuple(each) for each in cells}) == 5
    assert f"{tmp_path / 'a.safetensors'}: fc.weight (line 1)</h3>" in (tmp_path / "r.html").read_text()


def test_the_axis_of_bounds_that_are_alike_can_be_read() -> None:
    """Where all bounds lie within one power of ten, the ends of the axis alone are labelled: more would overlap."""
    import re

    from cases import packed_of, random_codes

    from qcs4w_cli.report_plots import svgs
    from qcs4w_gpu.picture import picture_of

    bounds = np.array([[2.4e-4, 2.9e-4, 3.7e-4]])
    picture = picture_of(packed_of(random_codes(3, 4)), np.ones((1, 3), np.float32), np.zeros((1, 3)), bounds)
    plot = next(svg for title, svg in svgs(picture, "t0") if title == "error against bound")
    axis = plot[plot.index("matplotlib.axis_1") : plot.index("matplotlib.axis_2")]
    assert re.findall(r"<text[^>]*>([^<]*)</text>", axis) == ["0.00024", "0.00037", "bound"]


def test_the_numbers_of_the_csv_are_those_of_the_json(tmp_path: Path, qcs4w: CommandLine) -> None:
    """What a spreadsheet gets is what the document says, at full precision."""
    import csv

    document = qcs4w(*make_batch(tmp_path), "--csv", tmp_path / "r.csv", "--json").document
    rows = list(csv.DictReader((tmp_path / "r.csv").open()))
    for row, result in zip(rows[:3], document["results"], strict=False):
        assert float(row["worst_error"]) == result["bounded"]["worst"]["error"]
        assert float(row["quantization_error"]) == result["source"]["quantization_error"]["relative"]


def test_junit_keeps_to_the_schema(tmp_path: Path, qcs4w: CommandLine) -> None:
    """The JUnit file holds to tests/junit.xsd, and its counts are those of its cases; a wrong one is refused by it."""
    qcs4w(*make_batch(tmp_path), "--junit", tmp_path / "r.xml")
    schema = xmlschema.XMLSchema(Path(__file__).parent / "junit.xsd")
    schema.validate(tmp_path / "r.xml")
    text = (tmp_path / "r.xml").read_text()
    assert '<testsuites name="qcs4w verify" tests="4" failures="1" errors="1">' in text
    assert text.count("<testsuite ") == 2
    for wrong in (
        text.replace("<failure ", "<fault ").replace("</failure>", "</fault>"),
        text.replace('tests="4"', ""),
    ):
        with pytest.raises(xmlschema.XMLSchemaValidationError):
            schema.validate(wrong)


def test_the_page_needs_nothing_else(tmp_path: Path, qcs4w: CommandLine) -> None:
    """No address but names of XML, plots of what failed alone, no id twice, and text in the page's colour."""
    import re

    qcs4w(*make_batch(tmp_path), "--html", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert not re.findall(r'(?:src|href)="(?!#|data:)', page)
    assert set(re.findall(r'xmlns[^=]*="[^"]*"', page)) >= set(re.findall(r'\S*="https?:[^"]*"', page))
    assert page.count("<svg") == 4
    assert "#010203" not in page
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert len(page) < 200_000


def test_a_page_of_many_failures_stays_light(tmp_path: Path, qcs4w: CommandLine) -> None:
    """The first failures are drawn, all are listed, and it is said that the rest is not drawn."""
    right = pack_weight(np.random.default_rng(0).standard_normal((3, 4), np.float32))
    wrong = PackedLinear(right.packed << 4 | right.packed >> 4, right.scales, 4)
    x = np.arange(4, dtype=np.float32)[None]
    y = x @ (wrong.codes().astype(np.float32) * wrong.scales[:, None]).T
    names = [f"{i:02}.weight" for i in range(MOST_PLOTTED + 3)]
    save_container(tmp_path / "w.safetensors", dict.fromkeys(names, right))
    np.savez(tmp_path / "x.npz", **dict.fromkeys(names, x))
    np.savez(tmp_path / "y.npz", **dict.fromkeys(names, y))
    files = (tmp_path / "w.safetensors", "-x", tmp_path / "x.npz", "-y", tmp_path / "y.npz")
    assert qcs4w("verify", *files, "--html", tmp_path / "r.html").code == 1
    page = (tmp_path / "r.html").read_text()
    assert len(of_html(page)) == MOST_PLOTTED + 3
    assert page.count("<svg") == 4 * MOST_PLOTTED
    assert "bounded: 3 of 3 elements wrong, every element" in page
    assert "3 tensors more failed and are not drawn" in page


def test_json_lines_on_stdout(tmp_path: Path) -> None:
    """`--jsonl -` has stdout to itself; what is for people goes to stderr."""
    done = process(*make_batch(tmp_path), "--jsonl", "-")
    assert done.code == 2
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert [line["result"]["status"] for line in lines[:-1]] == ["pass", "fail", "pass", "error"]
    assert "4 tensors: 2 passed, 1 failed, 1 could not be checked" in done.err


def test_reports_are_not_overwritten(tmp_path: Path, qcs4w: CommandLine) -> None:
    """A report that is there stays as it is, and nothing is verified; --force replaces it. Two cannot share a file."""
    arguments = make_batch(tmp_path)
    for kind in ("--junit", "--csv", "--markdown", "--html", "--jsonl"):
        there = tmp_path / "there"
        there.write_text("mine")
        assert "exists already" in qcs4w.refused(*arguments, kind, there)
        assert there.read_text() == "mine"
        assert qcs4w(*arguments, kind, there, "--force").code == 2
        assert "b.weight" in there.read_text()
    assert "no folder" in qcs4w.refused(*arguments, "--csv", tmp_path / "none" / "r.csv")
    same = tmp_path / "same"
    assert "cannot go to one file" in qcs4w.refused(*arguments, "--csv", same, "--jsonl", same)
    lines = tmp_path / "lines"
    assert "no adapter" in qcs4w.refused(*arguments, "--jsonl", lines, "--adapter", "42")
    assert not lines.exists()  # nothing was verified: nothing is in the way of the next try
    assert "both want stdout" in qcs4w(*arguments, "--jsonl", "-", "--json").out
    assert not same.exists()


def test_no_report_replaces_what_is_read(
    packed_file: Path, checkpoint: Path, tmp_path: Path, qcs4w: CommandLine
) -> None:
    """Not even --force lets a report take the place of a packed file, source, input, output, manifest or kernel."""
    packed, x, y = packed_file, tmp_path / "x.npy", tmp_path / "y.npy"
    np.save(x, np.zeros((1, 12), np.float32))
    np.save(y, np.zeros((1, 8), np.float32))
    manifest, kernel, names = tmp_path / "m.jsonl", tmp_path / "mine.wgsl", tmp_path / "names"
    manifest.write_text('{"file": "none.safetensors"}\n{"file": "packed.safetensors"}\n')
    kernel.write_bytes((Path(__file__).parent.parent / "examples" / "my_kernel.wgsl").read_bytes())
    names.write_text(f"{packed}\n")
    one = ["--tensor", "layers.1.fc", "-x", x]
    cases: list[tuple[Path, list[str | Path]]] = [
        (packed, [packed]),
        (packed, [tmp_path / "pack*"]),
        (packed, ["--manifest", manifest]),
        (manifest, ["--manifest", manifest]),
        (names, ["--files-from", names]),
        (checkpoint, [packed, "--source", checkpoint]),
        (kernel, [packed, "--kernel", kernel]),
        (kernel, ["--sweep", "--kernel", kernel]),
        (x, [packed, *one]),
        (y, [packed, *one, "-y", y]),
    ]
    for file, arguments in cases:
        before = file.read_bytes()
        for kind in ("--csv", "--jsonl"):
            error = qcs4w.refused("verify", *arguments, kind, file, "--force")
            assert "is the file being read; sources are never changed" in error
            assert file.read_bytes() == before
    (tmp_path / "old.csv").write_text("old")
    assert qcs4w("verify", packed, "--csv", tmp_path / "old.csv", "--force").code == 0
    assert "layers.1.fc" in (tmp_path / "old.csv").read_text()


def test_reports_that_cannot_be_written_are_refused_before_any_work(
    packed_file: Path, tmp_path: Path, qcs4w: CommandLine
) -> None:
    """A report has a file of its own, which is neither stdout nor the folder of --save-failing."""
    assert "does not go to stdout" in qcs4w.refused("verify", packed_file, "--csv", "-")
    folder = tmp_path / "failing"
    assert "cannot both go to" in qcs4w.refused("verify", packed_file, "--csv", folder, "--save-failing", folder)


def test_a_file_name_that_is_no_unicode(packed_file: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """What cannot be checked is in every report, whatever the bytes of its name."""
    missing = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\x1b[31m<b>.safetensors")
    result = qcs4w("verify", packed_file, missing, *report_options(tmp_path))
    assert result.code == 2
    assert "2 passed, 0 failed, 1 could not be checked" in result.out
    assert "internal" not in result.err
    for name in ("r.xml", "r.csv", "r.md", "r.html"):
        text = (tmp_path / name).read_text()
        assert "udcff" in text
        assert "\x1b" not in text


def test_a_page_without_matplotlib(tmp_path: Path, qcs4w: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what draws, --html is refused before any work, with what to install; the other reports need nothing."""
    arguments = make_batch(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if "site-packages" not in folder])
    monkeypatch.delitem(sys.modules, "matplotlib", raising=False)
    monkeypatch.setattr(sys, "path_importer_cache", {})
    assert "pip install 'qcs4w[report]'" in qcs4w.refused(*arguments, "--html", tmp_path / "r.html")
