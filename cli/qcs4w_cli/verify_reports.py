"""verify: reports in files, each from the same results as the JSON."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from .options import PATH, Decorator
from .report import SCHEMA_VERSION, json_value
from .verify_requests import Request, Unusable

if TYPE_CHECKING:
    from qcs4w_gpu.picture import Picture

FORMATS = ("junit", "csv", "markdown", "html")

Result = dict[str, Any]


def report_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that name reports."""
    helps = {
        "html": "Write one page with a table, and plots of what failed (pip install 'qcs4w[report]').",
        "markdown": "Write a table for a pull request.",
        "csv": "Write a table for a spreadsheet.",
        "junit": "Write JUnit XML, which CI systems show as tests.",
    }
    for name, text in helps.items():
        option: Decorator = click.option(f"--{name}", type=PATH, metavar="FILE", help=text)
        function = option(function)
    return click.option(
        "--jsonl", type=PATH, metavar="FILE", help="Write a line of JSON for each tensor as it goes; - is stdout."
    )(function)


@dataclass
class Reports:
    """The reports of one run.

    Attributes:
        closing: closes what is opened here.
        targets: the file of each format that was asked for.
        lines: the file for lines of JSON as results come, made with the first of them.
        stream: where they go.
        force: replace files that are there.
        results: so far, as JSON.
        pictures: of failing tensors, by the position of their result.
    """

    closing: contextlib.ExitStack
    targets: dict[str, Path]
    lines: Path | None = None
    stream: TextIO | None = None
    force: bool = False
    results: list[Result] = field(default_factory=list)
    pictures: "dict[int, Picture]" = field(default_factory=dict)
    _started: bool = False

    def add(self, result: Result, picture: "Picture | None") -> None:
        """Take in one more result."""
        from .report_html import MOST_PLOTTED

        if picture is not None and len(self.pictures) < MOST_PLOTTED:
            self.pictures[len(self.results)] = picture
        self.results.append(result)
        self._line({"result": result})

    @property
    def wants_pictures(self) -> bool:
        """Whether what fails is to be drawn."""
        return "html" in self.targets

    def spare(self, requests: Iterable[Request | Unusable], also: Sequence[Path]) -> Iterable[Request | Unusable]:
        """Return the requests, once it is known that no report would replace what is read for them.

        Only a report that is there already can: then, and only then, are all requests made beforehand.

        Args:
            requests: all of them.
            also: what else is read.

        Raises:
            OutputError: a report would replace what is read, or lies in a folder that is read as a whole.
        """
        from qcs4w_packer.files import check_outside, check_target

        there = [path for path in (*self.targets.values(), self.lines) if path is not None and path.exists()]
        if not there:
            return requests
        known = list(requests)
        read = {path for each in known if isinstance(each, Request) for path in each.paths} | set(also)
        for path in there:
            check_target(path, force=self.force, sources=tuple(read))
            check_outside(path, tuple(read))
        return known

    def write(self, facts: dict[str, str], summary: dict[str, int], exit_code: int) -> list[Path]:
        """Write all of them, each beside its target and then renamed; return where they lie.

        Args:
            facts: about the run, for people.
            summary: how many tensors had which status.
            exit_code: of the command.
        """
        from qcs4w_packer.files import write_file

        for kind, path in self.targets.items():
            write_file(path, self._text(kind, facts).encode(), force=self.force)
        self._line({"summary": summary, "exit_code": exit_code})
        return list(self.targets.values())

    def _text(self, kind: str, facts: dict[str, str]) -> str:
        if kind == "csv":
            from .report_tables import csv_text

            return csv_text(self.results)
        if kind == "junit":
            from .report_junit import junit_text

            return junit_text(self.results, facts)
        if kind == "markdown":
            from .report_tables import markdown_text

            return markdown_text(self.results, "qcs4w verify")
        from .report_html import html_text

        return html_text(self.results, self.pictures, facts, "qcs4w verify")

    def _line(self, content: dict[str, Any]) -> None:
        from qcs4w_packer.errors import OutputError

        if self.lines is not None and not self._started:
            try:
                # What is there as it goes cannot be written beside its target and renamed.
                self.stream = self.closing.enter_context(self.lines.open("w" if self.force else "x", encoding="utf-8"))
            except OSError as error:
                raise OutputError(f"{self.lines}: cannot be written: {error.strerror or error}") from None
            self._started = True
        if self.stream is None:
            return
        line = json.dumps(json_value({"schema_version": SCHEMA_VERSION, "command": "verify", **content}))
        try:
            self.stream.write(line + "\n")
            self.stream.flush()
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                raise OutputError(f"--jsonl cannot be written: {error.strerror or error}") from None
            self.stream = None


def open_reports(
    stack: contextlib.ExitStack,
    jsonl: Path | None,
    targets: dict[str, Path | None],
    folder: Path | None = None,
    *,
    force: bool,
) -> Reports:
    """Check before any work that all reports can be written.

    Args:
        stack: closes the lines of JSON.
        jsonl: where they go; `-` is stdout.
        targets: the file of each other format, or None.
        folder: that this run makes as well.
        force: replace files that are there.

    Raises:
        OutputError: a file is there already, or cannot be written.
        UsageError: two reports go to one file, or what draws the page is not installed.
    """
    from importlib.util import find_spec

    from qcs4w_packer.errors import UsageError
    from qcs4w_packer.files import check_target

    wanted = {kind: path for kind, path in targets.items() if path is not None}
    for kind, path in wanted.items():
        if str(path) == "-":
            raise UsageError(f"--{kind} does not go to stdout", hint="name a file; lines of JSON do: --jsonl -")
    lines = None if jsonl is None or str(jsonl) == "-" else jsonl
    real = [check_target(path, force=force) for path in (*wanted.values(), lines) if path is not None]
    if len(set(real)) < len(real):
        raise UsageError("two reports cannot go to one file")
    if folder is not None and folder.resolve() in real:
        raise UsageError(f"a report and --save-failing cannot both go to {folder}")
    if "html" in wanted and find_spec("matplotlib") is None:
        raise UsageError("--html draws with matplotlib, which is not installed", hint="pip install 'qcs4w[report]'")
    return Reports(stack, wanted, lines, sys.stdout if jsonl is not None and lines is None else None, force)
