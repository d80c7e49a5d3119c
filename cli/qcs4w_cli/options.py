"""Options and arguments that several commands share, and the input files that run and verify read."""

import functools
import os
import re
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


#: The engines; stated here so that --help need not load any.
ENGINES = ("wgpu", "dawn")


def adapter_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --engine, --adapter and --require-gpu."""
    function = click.option("--require-gpu", is_flag=True, help="Fail where there is only a software adapter.")(
        function
    )
    function = click.option(
        "--adapter",
        metavar="INDEX|NAME",
        envvar="QCS4W_ADAPTER",
        show_envvar=True,
        help="Which adapter to use, by number or part of its name.",
    )(function)
    return click.option(
        "--engine",
        type=click.Choice(ENGINES),
        default=ENGINES[0],
        envvar="QCS4W_ENGINE",
        show_default=True,
        show_envvar=True,
        help="Which WebGPU runs the kernels: wgpu, or Chrome's Dawn (pip install 'qcs4w[dawn]').",
    )(function)


_LONGEST_LIST = 64 << 20  # bytes

_BYTES = click.IntRange(0, 2**63 - 1)

PATH: click.Path = click.Path(path_type=Path)  # whether it can be read is for the reader to say


class PartType(click.ParamType):  # type: ignore[type-arg]  # generic in recent clicks only
    """One of n parts of a job: i/n.

    Args:
        load: returns what is made of (i - 1, n); asked for only when the option is given.
    """

    name = "i/n"

    def __init__(self, load: Callable[[], Any]):
        self._load = load

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse the text."""
        made = self._load()
        if isinstance(value, made):
            return value
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", str(value))
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            self.fail(f"'{value:.40}' is not i/n with i from 1 to n, such as 2/4", param, ctx)
        return made(int(found[1]) - 1, int(found[2]))


class ShapeType(click.ParamType):  # type: ignore[type-arg]  # generic in recent clicks only
    """Two sizes: N,K."""

    name = "n,k"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Parse the text."""
        if isinstance(value, tuple):
            return value
        sizes = str(value).replace("x", ",").split(",")
        if len(sizes) != 2 or not all(size.isascii() and size.isdecimal() and len(size) < 16 for size in sizes):
            self.fail(f"'{value:.40}' is not N,K such as 4096,4096", param, ctx)
        return int(sizes[0]), int(sizes[1])


class LayoutType(click.ParamType):  # type: ignore[type-arg]  # generic in recent clicks only
    """A layout of raw bytes, by its label."""

    name = "layout"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Look it up."""
        from qcs4w_packer.readings import NAMED

        if not isinstance(value, str):
            return value
        if value not in NAMED:
            import difflib

            close = difflib.get_close_matches(value, NAMED, n=3)
            there = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(NAMED)}"
            self.fail(f"no layout '{value:.40}'; {there}", param, ctx)
        return NAMED[value]


class SizeType(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes: 134217728, 128MiB, 2GiB, or 5GB of a thousand each."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse the text."""
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"([0-9]{1,15})(?: ?([KMGT])(i?)B)?", str(value))
        if not found or not int(found[1]):
            self.fail(f"'{value:.40}' is not a size such as 5GB, 128MiB or 134217728", param, ctx)
        nbytes, unit = int(found[1]), 1024 if found[3] else 1000
        for _ in range(" KMGT".index(found[2] or " ")):
            nbytes *= unit
        return nbytes


def blob_options(*, layout: bool = True) -> Decorator:
    """Return a decorator that adds the options of raw packed bytes and hands them on as `blob`, a Blob or None.

    Args:
        layout: whether --layout is one of them; a command may have another use for it.
    """
    options = [
        click.option("--shape", type=ShapeType(), help="The file is raw packed bytes of N rows and K columns."),
        click.option("--offset", type=_BYTES, metavar="BYTES", help="Where raw bytes begin in their file."),
        click.option(
            "--scales", type=PATH, help="The scales of raw bytes: .npy, .safetensors, .pt, or raw floats of any suffix."
        ),
        click.option("--scales-offset", type=_BYTES, metavar="BYTES", help="Where raw scales begin in their file."),
        click.option(
            "--scales-dtype", type=click.Choice(["f32", "f16", "bf16"]), help="Of raw scales.  [default: f32]"
        ),
    ]
    if layout:
        options.append(
            click.option(
                "--layout",
                type=LayoutType(),
                help="How raw bytes hold codes: even-high, even-low, even-low-twos, columns-even-low, gptq, awq, or "
                "another name that inspect --against has given.  [default: even-high]",
            )
        )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def with_blob(**given: Any) -> Any:
            names = ("shape", "offset", "scales", "scales_offset", "scales_dtype", *(["layout"] if layout else []))
            said = {name: given.pop(name) for name in names}
            return function(**given, blob=_blob(**said))

        for option in reversed(options):
            with_blob = option(with_blob)
        return with_blob

    return decorate


def _blob(**said: Any) -> Any:
    """Return what was said of raw bytes, or None where nothing was."""
    from qcs4w_packer.blob_file import Blob

    known = {name: value for name, value in said.items() if value is not None}
    if not known:
        return None
    if "scales_dtype" in known:
        known["scales_dtype"] = known["scales_dtype"].upper()
    return Blob(**known)


def free_disk(output: Path) -> int | None:
    """Return the bytes that are free where an output will lie; None where nobody can tell."""
    import shutil

    folder = Path(os.path.realpath(output)).parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


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
