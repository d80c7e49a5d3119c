"""Patterns for names: globs, and `re:EXPR` for regular expressions. Either must fit the whole name."""

import difflib
import re
import signal
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import islice
from types import FrameType

from .errors import UsageError

#: What a pattern that is a regular expression begins with.
REGEX = "re:"

_MOST_CHARACTERS = 1_000  # of an expression
_MOST_COMPARED, _LONGEST_COMPARED = 5_000, 200  # names, and their characters, when a similar one is looked for
_MOST_SECONDS = 5.0  # for one pattern and all names


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Tell whether a name is, or is matched by, one of the patterns. No patterns match nothing.

    Raises:
        UsageError: a regular expression is not sound.
    """
    return any(name == pattern or _test(pattern)(name) for pattern in patterns)


def find_names(names: Iterable[str], pattern: str) -> list[str]:
    """Return the names that are, or are matched by, a pattern, in order.

    Python's regular expressions can need time exponential in the length of a name: after 5 seconds they are given up.
    (Only in the main thread, where a signal can stop them, as it does in the commands.)

    Raises:
        UsageError: the regular expression is not sound, or takes too long.
    """
    test = _test(pattern)
    if not pattern.startswith(REGEX):
        return [name for name in names if name == pattern or test(name)]
    with _limited(pattern):
        return [name for name in names if name == pattern or test(name)]


def did_you_mean(name: str, known: Collection[str]) -> str | None:
    """Return a hint that names the known names closest to `name`, or None."""
    if len(known) > _MOST_COMPARED or len(name) > _LONGEST_COMPARED:  # comparing takes the product of the lengths
        known = [other for other in islice(known, _MOST_COMPARED) if len(other) <= _LONGEST_COMPARED]
    close = [other for other in known if name in other][:3] if len(name) > 2 else []
    close = close or difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(f"'{other}'" for other in close) + "?"
    if len(known) <= 5:
        return "there is " + ", ".join(f"'{other}'" for other in known) if known else None
    return None


@lru_cache(maxsize=4096)
def _test(pattern: str) -> Callable[[str], bool]:
    if not pattern.startswith(REGEX):
        return lambda name: fnmatchcase(name, pattern)
    expression = pattern.removeprefix(REGEX)
    if len(expression) > _MOST_CHARACTERS:
        raise UsageError(
            f"'{pattern:.40}…' has {len(expression):,} characters, {_MOST_CHARACTERS:,} are the most",
            hint="give the option more than once",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what a later Python may read in another way
            compiled = re.compile(expression)
    except re.error as error:
        at = error.pos
        place = "" if at is None else f" at character {at + 1}, here: {expression[:at]} ▸ {expression[at:]}"
        raise UsageError(
            f"'{pattern}' is no regular expression: {error.msg}{place}", hint="a glob is written without re:"
        ) from None
    except (OverflowError, RecursionError) as error:
        raise UsageError(f"'{pattern:.100}' is no regular expression: {error}") from None
    return lambda name: compiled.fullmatch(name) is not None


@contextmanager
def _limited(pattern: str) -> Iterator[None]:
    """Stop what runs for too long; the matcher looks for signals as it goes."""
    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield  # no signal reaches it, or somebody else's clock is running
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise UsageError(
            f"'{pattern}' takes more than {_MOST_SECONDS:g} seconds",
            hint="write it without a repeat inside a repeat, or as more than one pattern",
        )

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, _MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
