"""Options and arguments that several commands share, and the input files that run and verify read."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


PATH: click.Path = click.Path(path_type=Path)  # whether it can be read is for the reader to say


@contextmanager
def standard_input(path: Path) -> Iterator[Path]:
    """Yield a path, or for `-` a temporary .npy file with what came on stdin."""
    if str(path) != "-":
        yield path
        return
    import tempfile

    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        file.write(sys.stdin.buffer.read())
        file.flush()
        yield Path(file.name)


def read_file_list(path: str) -> list[Path]:
    """Read paths, one a line, from a file or stdin (`-`)."""
    from qcs4w_packer.errors import SourceError

    try:
        with click.open_file(path, encoding="utf-8") as file:
            return [Path(line) for line in (text.rstrip("\n") for text in file) if line]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise SourceError(f"{path}: cannot be read: {reason}") from None
