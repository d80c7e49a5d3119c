"""Streams: answers on stdout, the rest on stderr, plain text in a pipe, colour and progress bars on a terminal."""

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from .report import Span, Table, clean, clean_line, error_document, size, to_json

if TYPE_CHECKING:
    from .progress import TensorProgress


@dataclass(frozen=True)
class Console:
    """Where a command's words go.

    Attributes:
        command: its name, for the JSON.
        as_json: one JSON document on stdout and nothing else.
        quiet: no notes on stderr.
        answers_to_stderr: stdout is taken by data.
    """

    command: str
    as_json: bool = False
    quiet: bool = False
    answers_to_stderr: bool = False

    def answer(self, what: str | Table) -> None:
        """Print a line or a table on stdout, unless JSON was asked for."""
        if not self.as_json:
            shown = clean(what) if isinstance(what, str) else what
            write(shown, sys.stderr if self.answers_to_stderr else sys.stdout)

    def answer_styled(self, lines: Iterable[list[Span]]) -> None:
        """Print lines of (text, style) pieces on stdout; styles show on a terminal only."""
        if self.as_json:
            return
        stream = sys.stderr if self.answers_to_stderr else sys.stdout
        if has_colour(stream):
            from .report import print_styled

            print_styled(lines, stream)
        else:
            for line in lines:
                write(clean_line("".join(text for text, _ in line).rstrip()), stream)

    def note(self, text: str) -> None:
        """Print a note on stderr, unless quiet."""
        if not self.quiet and not self.as_json:
            write(clean_line(text), sys.stderr)

    def warn(self, text: str) -> None:
        """Print a warning on stderr."""
        if not self.as_json:
            label = click.style("Warning:", fg="yellow") if has_colour(sys.stderr) else "Warning:"
            write(f"{label} {clean_line(text)}", sys.stderr)

    def room(self, needed_nbytes: int, free_nbytes: int | None) -> None:
        """Print how much of a disk an output will take, as a warning if there is not so much; nothing if none can tell.

        Args:
            needed_nbytes: size of the output.
            free_nbytes: of the disk that it will lie on.
        """
        if free_nbytes is not None:
            tell = self.note if needed_nbytes <= free_nbytes else self.warn
            tell(f"it takes {size(needed_nbytes)} of disk, {size(free_nbytes)} are free")

    def document(self, content: dict[str, Any], exit_code: int) -> None:
        """Print the JSON document, if it was asked for."""
        if self.as_json:
            write(to_json(self.command, content, exit_code), sys.stderr if self.answers_to_stderr else sys.stdout)

    @contextlib.contextmanager
    def progress(
        self, what: str, *, unit_bytes: bool = False, wanted: bool = True
    ) -> Iterator[Callable[[int, int, str], None]]:
        """Yield a function (advance, total, what is being done) that moves a bar where there is a terminal."""
        if not wanted or self.quiet or self.as_json or not sys.stderr.isatty():
            yield lambda advance, total, name: None
            return
        from rich import progress as bars
        from rich.console import Console as RichConsole

        amount = bars.DownloadColumn() if unit_bytes else bars.MofNCompleteColumn()
        columns: list[bars.ProgressColumn] = [bars.TextColumn("{task.description}"), bars.BarColumn(), amount]
        columns += [bars.TransferSpeedColumn()] * unit_bytes + [bars.TimeRemainingColumn()]
        stderr = RichConsole(file=sys.stderr)
        with bars.Progress(*columns, console=stderr, transient=True) as bar:
            task = bar.add_task(what, total=None)

            def advance(count: int, total: int, name: str) -> None:
                bar.update(task, advance=count, total=total, description=f"{what} {clean(name)[-40:]}")

            yield advance

    def tensor_progress(self, what: str, *, wanted: bool = True) -> AbstractContextManager["TensorProgress"]:
        """Return what shows the work on tensor after tensor: bars on a terminal, else a line for each."""
        from .progress import tensor_progress

        return tensor_progress(
            what,
            sys.stderr,
            self.note,
            is_terminal=sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"),
            wanted=wanted and not self.quiet and not self.as_json,
        )


def write(what: str | Table, stream: Any) -> None:
    """Print to a stream; a closed pipe is quiet, and what follows is thrown away.

    Raises:
        OutputError: stdout cannot be written for another reason: an answer that is lost is no success.
    """
    try:
        if isinstance(what, str):
            stream.write(what + "\n")
        elif stream.isatty():
            from .report import print_rich

            print_rich(what, stream, colour=has_colour(stream))
        else:
            stream.write(what.plain() + "\n")
        stream.flush()
    except OSError as error:
        if stream is sys.stdout:
            _lost_stdout(error)


def write_data(data: bytes) -> None:
    """Write raw bytes to stdout."""
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    except OSError as error:
        _lost_stdout(error)


def _lost_stdout(error: OSError) -> None:
    """Let everything that is still going to be printed vanish; only a closed pipe is no error."""
    from qcs4w_packer.errors import OutputError

    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    if not isinstance(error, BrokenPipeError):
        raise OutputError(f"stdout cannot be written: {error.strerror or error}")


def has_colour(stream: Any) -> bool:
    """Tell whether a stream takes colour: a terminal, and neither NO_COLOR nor TERM=dumb."""
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def report_error(error: Exception, argv: Sequence[str], exit_code: int) -> None:
    """Print what went wrong and how to mend it; with --json as a document, with -v with the traceback."""
    from qcs4w_packer.errors import Qcs4wError

    message, hint, code = describe_error(error)
    flags = list(argv[: list(argv).index("--") if "--" in argv else None])
    if "--json" in flags:
        command = next((arg for arg in flags if not arg.startswith("-")), "qcs4w")
        with contextlib.suppress(Qcs4wError):
            write(to_json(command, error_document(code, message, hint), exit_code), sys.stdout)
    else:
        print_error(message, hint)
    if any(flag == "--verbose" or re.fullmatch("-[a-z]*v[a-z]*", flag) for flag in flags):
        print_traceback(error)


def print_traceback(error: Exception) -> None:
    """Print where an error was raised, on stderr."""
    with contextlib.suppress(OSError):
        traceback.print_exception(error, file=sys.stderr)


def print_error(message: str, hint: str | None) -> None:
    """Print an error and its hint on stderr; further lines, as compilers write them, are set in."""
    label = click.style("Error:", fg="red", bold=True) if has_colour(sys.stderr) else "Error:"
    write(f"{label} {clean(message).replace(chr(10), chr(10) + '  ')}", sys.stderr)
    if hint:
        write(f"Hint: {clean_line(hint)}", sys.stderr)


def describe_error(error: Exception) -> tuple[str, str | None, str]:
    """Return (message, hint, stable code) of any exception."""
    from qcs4w_packer.errors import Qcs4wError

    if isinstance(error, Qcs4wError):
        return str(error), error.hint, error.code
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        hint = f"{context.command_path} --help shows how" if context else None
        return error.format_message(), hint, "usage"
    if isinstance(error, MemoryError):
        return "not enough memory", "use fewer rows, or pack fewer tensors at a time", "memory"
    if isinstance(error, FileNotFoundError) and not _is_somewhere():
        return "the folder that this runs in has been removed", "cd to one that is there", "usage"
    hint = "this is a fault of qcs4w: please report it; -v shows where it happened"
    return f"internal error: {type(error).__name__}: {error}", hint, "internal"


def _is_somewhere() -> bool:
    """Tell whether the current folder is there; without one no relative name means anything."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True
