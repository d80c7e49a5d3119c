"""Options and arguments that several commands share, and the input files that run and verify read."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

json_option: Decorator = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document instead of text."
)
quiet_option: Decorator = click.option(
    "-q", "--quiet", is_flag=True, help="No notes on stderr; errors and warnings stay."
)
verbose_option: Decorator = click.option(
    "-v", "--verbose", is_flag=True, help="Say more, and show the traceback of an error."
)
force_option: Decorator = click.option("--force", is_flag=True, help="Replace an output that is there.")


def common_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --json, --quiet and --verbose."""
    for option in (verbose_option, quiet_option, json_option):
        function = option(function)
    return function


def adapter_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --adapter and --require-gpu."""
    function = click.option("--require-gpu", is_flag=True, help="Fail where there is only a software adapter.")(
        function
    )
    return click.option(
        "--adapter",
        metavar="INDEX|NAME",
        envvar="QCS4W_ADAPTER",
        show_envvar=True,
        help="Which adapter to use, by number or part of its name.",
    )(function)


_LONGEST_LIST = 64 << 20  # bytes

PATH: click.Path = click.Path(path_type=Path)  # whether it can be read is for the reader to say


@contextmanager
def standard_input(path: Path) -> Iterator[Path]:
    """Yield a path, or for `-` a temporary .npy file with what came on stdin."""
    if str(path) != "-":
        yield path
        return
    import tempfile

    from qcs4w_packer.errors import SourceError

    from .interrupts import temporary_files

    with ExitStack() as held:
        try:
            file = held.enter_context(tempfile.NamedTemporaryFile(suffix=".npy"))
            temporary_files.add(file.name)
            held.callback(temporary_files.discard, file.name)
            file.write(sys.stdin.buffer.read())
            file.flush()
        except OSError as error:
            raise SourceError(f"stdin cannot be kept in {tempfile.gettempdir()}: {error.strerror or error}") from None
        yield Path(file.name)


def read_file_list(path: str) -> list[Path]:
    """Read paths, one a line, from a file or stdin (`-`)."""
    from qcs4w_packer.errors import SourceError

    try:
        with click.open_file(path, "rb") as file:
            content = file.read(_LONGEST_LIST + 1)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > _LONGEST_LIST:
        raise SourceError(f"{path}: has more than {_LONGEST_LIST:,} bytes; is it a list of paths?")
    return [Path(os.fsdecode(line)) for line in content.split(b"\n") if line]
