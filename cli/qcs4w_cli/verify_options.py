"""verify: options with a form of their own."""

import math
import re
from collections.abc import Sequence
from typing import Any

import click

from .verify_batch import Shard
from .verify_requests import Thresholds


class ShardType(click.ParamType):  # type: ignore[type-arg]  # generic in recent clicks only
    """One of n parts: i/n."""

    name = "i/n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Shard:
        """Parse the text."""
        if isinstance(value, Shard):
            return value
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", str(value))
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            self.fail(f"'{value:.40}' is not i/n with i from 1 to n, such as 2/4", param, ctx)
        return Shard(int(found[1]) - 1, int(found[2]))


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
