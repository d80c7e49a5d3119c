"""The group of commands, and the one edge where an error becomes a message and an exit code.

Nothing here may import torch, wgpu, numpy or rich: `qcs4w --help` answers before any of them is loaded.
"""

import contextlib
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import click

EXIT_FAILED = 1  # a verdict: a verification failed, files differ, a digest in `inspect`
EXIT_ERROR = 2  # everything that could not be done
EXIT_INTERRUPTED = 130

#: Every command and its one line of help; the module of the same name is imported when it is called.
COMMANDS = {
    "pack": "Quantize and pack the linear weights of a file or checkpoint.",
    "run": "Run a packed linear on saved inputs.",
    "verify": "Check the GPU's answers against a float64 reference.",
    "inspect": "Show what is in a file, down to the nibbles.",
    "diff": "Tell where two packed files differ.",
    "check": "Check what another runtime will refuse.",
    "vectors": "Write test vectors for kernels in any language.",
    "convert": "Read and write the 4-bit layouts of other tools.",
    "unpack": "Turn packed linears back into float weights.",
    "devices": "List the WebGPU adapters of this machine.",
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"qcs4w_cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean '{close[0]}'?" if close else f" There are {', '.join(COMMANDS)}."
            raise click.UsageError(f"No such command '{args[0]}'.{hint}", ctx)
        return super().resolve_command(ctx, args)


def _print_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from qcs4w_packer._version import __version__

        click.echo(f"qcs4w {__version__}")
        ctx.exit()


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
def cli() -> None:
    """Quantize linear weights to 4 bits and run them on any GPU through WebGPU.

    \b
    Example:
      qcs4w pack model.safetensors -o packed.safetensors
      qcs4w verify packed.safetensors
    """  # noqa: D301 - \b is click's


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    _secure_streams()
    code = run(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the answer is out: Ctrl-C while Python tidies up changes nothing
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """Run the command line and return its exit code; every error ends here."""
    with contextlib.suppress(ValueError):  # not in the main thread
        for name in ("SIGTERM", "SIGHUP"):  # so that half-written files are cleaned up as after Ctrl-C
            number = getattr(signal, name)
            if signal.getsignal(number) is signal.SIG_DFL:  # under nohup it is ignored, and stays so
                signal.signal(number, _terminate)
    try:
        result = cli.main(args=list(argv) or ["--help"], prog_name="qcs4w", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except (KeyboardInterrupt, click.Abort):
        click.echo("Interrupted.", err=True)
        return EXIT_INTERRUPTED
    except SystemExit as leaving:
        if leaving.code != 1:
            raise
        return 0  # click leaves so when the pipe closes under its help; what commands print goes through Console
    except Exception as error:
        from .console import report_error

        report_error(error, argv, EXIT_ERROR)
        return EXIT_ERROR


def _terminate(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _secure_streams() -> None:
    """Give closed standard streams a place, before a file that we open takes theirs, and let any text be written."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open to the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 shows \\u2192 for an arrow
