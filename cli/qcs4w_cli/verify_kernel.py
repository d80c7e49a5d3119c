"""verify: the options of a kernel that somebody is writing, its watchdog, and --watch."""

import functools
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .console import Console, print_error
from .main import EXIT_INTERRUPTED
from .options import Decorator

if TYPE_CHECKING:
    from qcs4w_gpu import Gpu, Kernel, KernelTimeoutError

_PATIENCE_S = 10.0
_POLL_S = 0.2
_NAMES = ("kernel", "grid", "workgroup", "defines", "sweep", "timeout", "watch")


@dataclass(frozen=True)
class KernelRequest:
    """Which kernel is to be judged, and how.

    Attributes:
        name: of one of ours, or a .wgsl file; None for what the plan chooses.
        grid: an expression, as `KernelSettings` takes it.
        workgroup: the same.
        defines: values of override constants.
        sweep: verify at many shapes.
        timeout: seconds that a dispatch may take; by default 10 for a file, and no end for ours.
        watch: verify again whenever the file is saved.
    """

    name: str | None = None
    grid: str | None = None
    workgroup: str | None = None
    defines: dict[str, str] = field(default_factory=dict)
    sweep: bool = False
    timeout: float | None = None
    watch: bool = False

    @property
    def file(self) -> Path | None:
        """The user's file, or None where the kernel is one of ours."""
        return Path(self.name) if self.name is not None and self.name.endswith(".wgsl") else None

    def said(self) -> dict[str, Any]:
        """Return what each option says, by its name; None where it is not given."""
        return {
            "kernel": self.name,
            "grid": self.grid,
            "workgroup": self.workgroup,
            "define": self.defines or None,
            "sweep": self.sweep or None,
            "timeout": self.timeout,
        }

    def read(self) -> "Kernel | None":
        """Return the kernel, or None where the plan chooses.

        Raises:
            KernelError: there is none, or it does not keep the contract.
            UsageError: an option has no meaning without a file.
        """
        from qcs4w_gpu import FAST_KERNELS, LINEAR_KERNELS, KernelError, KernelSettings, read_kernel, shipped_kernel
        from qcs4w_packer import UsageError

        if self.file is not None:
            return read_kernel(self.file, KernelSettings(self.grid, self.workgroup, self.defines))
        for option, given in (
            ("--grid", self.grid),
            ("--workgroup", self.workgroup),
            ("--define", self.defines),
            ("--watch", self.watch),
        ):
            if given:
                raise UsageError(f"{option} needs --kernel with a .wgsl file of yours")
        if self.name is None:
            return None
        names = (*LINEAR_KERNELS, *FAST_KERNELS)
        if self.name not in names:
            hint = f"there are {', '.join(names)}, or a .wgsl file of yours"
            raise KernelError(f"no kernel '{self.name}'", hint=hint)
        return shipped_kernel(self.name)

    def watched(self, gpu: "Gpu", give_up: "Callable[[KernelTimeoutError], None]") -> "Gpu":
        """Return a device with a watchdog.

        Args:
            gpu: the device.
            give_up: called in a thread of its own when a dispatch takes too long; nothing but the end of the process
                ends the wait in the driver.
        """
        from qcs4w_gpu import KernelTimeoutError, Watchdog

        seconds = self.timeout if self.timeout is not None else _PATIENCE_S if self.file else None
        if seconds is None:
            return gpu

        def bark(what: str) -> None:
            give_up(
                KernelTimeoutError(
                    f"{what} has not ended within {seconds:g} s on {gpu.adapter}; the rest was not looked at",
                    hint="is there a loop that does not end? --timeout SECONDS waits longer",
                )
            )

        gpu.watchdog = Watchdog(seconds, bark)
        return gpu


def kernel_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a kernel, and hand them on as `kernel`, a KernelRequest."""
    options: list[Decorator] = [
        click.option(
            "--kernel", metavar="NAME|FILE", help="Judge this kernel: one of ours by name, or a .wgsl file of yours."
        ),
        click.option(
            "--grid",
            metavar="EXPR",
            help="How many workgroups your kernel needs, of M, N, K, K_packed and its constants, with + - * / %, ceil, "
            "min and max; folded into two dimensions. Two expressions with a comma are x and y as they are.  [default: "
            "its //! grid line]",
        ),
        click.option(
            "--workgroup", metavar="EXPR", help="Its workgroup size, where the text's own is no plain arithmetic."
        ),
        click.option(
            "--define",
            "defines",
            metavar="NAME=VALUE",
            multiple=True,
            type=DefineType(),
            help="Set an override constant of it. Repeatable.",
        ),
        click.option(
            "--sweep",
            is_flag=True,
            help="Verify many small, odd and prime shapes first, up to the first that fails. Needs no PACKED.",
        ),
        click.option(
            "--timeout",
            metavar="SECONDS",
            type=SecondsType(0, 1e6, min_open=True),
            help="How long one dispatch may take.  [default: 10 for a kernel of yours]",
        ),
        click.option("--watch", is_flag=True, help="Verify again whenever your kernel is saved; Ctrl-C ends it."),
    ]

    @functools.wraps(function)
    def with_kernel(**given: Any) -> Any:
        said = {name: given.pop(name) for name in _NAMES}
        defines = dict(said["defines"])
        if twice := [name for name, count in Counter(name for name, _ in said["defines"]).items() if count > 1]:
            raise click.UsageError(f"--define says {twice[0]} more than once")
        return function(**given, kernel=KernelRequest(said.pop("kernel"), **{**said, "defines": defines}))

    decorated: Callable[..., Any] = with_kernel
    for option in reversed(options):
        decorated = option(decorated)
    return decorated


class SecondsType(click.FloatRange):
    """A time; no range of click's refuses NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse the text."""
        seconds: float = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"'{value:.20}' is no number of seconds", param, ctx)
        return seconds


class DefineType(click.ParamType):  # type: ignore[type-arg]  # generic in recent clicks only
    """A name and its value."""

    name = "name=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """Parse the text."""
        if isinstance(value, tuple):
            return value
        name, equals, said = str(value).partition("=")
        if not equals or not name.strip().isidentifier() or not said.strip():
            self.fail(f"'{value:.80}' is not NAME=VALUE such as TILE=8", param, ctx)
        return name.strip(), said.strip()


def watch(path: Path, again: Callable[[], Any], console: Console) -> int:
    """Run again whenever a file is saved, until Ctrl-C.

    Args:
        path: the file.
        again: what to run; an error is shown and does not end it.
        console: where words go.

    Returns:
        The exit code.
    """
    from qcs4w_packer import Qcs4wError

    try:
        while True:
            stamp = _stamp(path)
            try:
                again()
            except Qcs4wError as error:
                print_error(str(error), error.hint)
            console.note(f"watching {path}; Ctrl-C ends it")
            while _stamp(path) in (stamp, None):  # None: an editor is putting the new file in its place
                time.sleep(_POLL_S)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
