"""verify: its options together, what contradicts in them, and those with a form of their own."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .console import Console
from .options import read_file_list
from .verify_batch import Shard
from .verify_kernel import KernelRequest
from .verify_requests import Thresholds

if TYPE_CHECKING:
    from qcs4w_packer import Blob


@dataclass(frozen=True)
class Options:
    """What was said on the command line; a field has the name of its option, or of its parameter in `verify.command`.

    Attributes:
        limits: of the quantization error: (pattern or None, limit).
        reports: the file of each format, or None.
    """

    packed: tuple[Path, ...]
    manifest: Path | None
    files_from: str | None
    tensors: tuple[str, ...]
    source: Path | None
    than: Path | None
    input_path: Path | None
    output: Path | None
    no_bias: bool
    limits: tuple[tuple[str | None, float], ...]
    rows: int
    seed: int
    kernel: KernelRequest
    save_failing: Path | None
    shard: Shard | None
    fail_fast: bool
    strict: bool
    jobs: int | None
    jsonl: Path | None
    force: bool
    blob: "Blob | None"
    engine: str
    adapter: str | None
    require_gpu: bool
    as_json: bool
    quiet: bool
    verbose: bool
    reports: dict[str, Path | None]

    @cached_property
    def paths(self) -> list[Path]:
        """The packed files, folders and globs that were named; a list on stdin can be read once."""
        return [*self.packed, *(read_file_list(self.files_from) if self.files_from else [])]

    @cached_property
    def thresholds(self) -> Thresholds:
        """What --max-quant-error was given."""
        return thresholds_of(self.limits)

    def open_console(self) -> Console:
        """Return where words go.

        Raises:
            UsageError: two of the options want stdout, or stdin.
        """
        from qcs4w_packer import UsageError

        lines_to_stdout = self.jsonl is not None and str(self.jsonl) == "-"
        if lines_to_stdout and self.as_json:
            raise UsageError("--json and --jsonl - both want stdout", hint="give --jsonl a file")
        if [*map(str, (self.manifest, self.files_from, self.input_path))].count("-") > 1:
            raise UsageError("--manifest, --files-from and --input cannot share stdin", hint="give but one of them -")
        return Console("verify", self.as_json, self.quiet, answers_to_stderr=lines_to_stdout)

    def check(self) -> None:
        """Refuse options that contradict each other.

        Raises:
            UsageError: they do, or there is nothing to verify.
        """
        from qcs4w_packer import UsageError

        paths, kernel = self.paths, self.kernel
        if not paths and self.manifest is None and not kernel.sweep:
            hint = "name a packed file, a --manifest, or --files-from a list"
            raise UsageError("there is nothing to verify", hint=hint)
        if self.than is not None:
            self._check_than()
        elif self.thresholds and self.source is None and (paths or self.manifest is None):  # lines may name their own
            raise UsageError("--max-quant-error needs --source: the error is that of the packed weights against it")
        elif self.output is not None and self.input_path is None:
            raise UsageError("--output needs --input: the x that the output was computed from")
        elif self.output is not None and (kernel.name is not None or kernel.sweep):
            raise UsageError(
                "--output is judged as it is: no kernel runs, so that --kernel and --sweep have no meaning"
            )

    def _check_than(self) -> None:
        from qcs4w_packer import UsageError

        others: dict[str, Any] = {
            "manifest": self.manifest,
            "files-from": self.files_from,
            "output": self.output,
            "shape": self.blob,
            "max-quant-error": self.limits or None,
            "no-bias": self.no_bias or None,
            "shard": self.shard,
            "fail-fast": self.fail_fast or None,
            "strict": self.strict or None,
            **self.kernel.said(),
            "save-failing": self.save_failing,
            "jsonl": self.jsonl,
            **self.reports,
        }
        useless = [f"--{name}" for name, value in others.items() if value is not None]
        if len(self.paths) != 1 or self.source is None or useless:
            message = "--than compares two packed files: give one PACKED, --source, and perhaps --input"
            hint = f"it has no {' and no '.join(useless)}; --json has all its figures" if useless else None
            raise UsageError(message, hint=hint)


class ThresholdType(click.ParamType):  # type: ignore[type-arg]
    """A threshold for all tensors, or for those whose names fit a pattern: X or PATTERN=X."""

    name = "[pattern=]x"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str | None, float]:
        """Parse the text."""
        if isinstance(value, tuple):
            return value
        pattern, equals, number = str(value).rpartition("=")
        try:
            limit = float(number)
        except ValueError:
            limit = math.nan
        if not 0 <= limit < math.inf or (equals and not pattern):
            self.fail(f"'{value:.80}' is neither X nor PATTERN=X with X from 0, such as '*.mlp.*=0.15'", param, ctx)
        return pattern or None, limit


def thresholds_of(limits: Sequence[tuple[str | None, float]]) -> Thresholds:
    """Gather what --max-quant-error was given.

    Raises:
        UsageError: a regular expression is not sound.
    """
    from qcs4w_packer.name_patterns import find_names

    for pattern, _ in limits:
        find_names((), pattern or "")  # a fault is told before the work begins
    general = [limit for pattern, limit in limits if pattern is None]
    by_pattern = tuple((pattern, limit) for pattern, limit in limits if pattern is not None)
    return Thresholds(general[-1] if general else None, by_pattern)
