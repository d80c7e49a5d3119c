"""What native code prints to stderr, which Python's own sys.stderr does not see."""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

_MOST_BYTES = 1 << 16  # what a pipe holds; what comes after it is lost, and nobody waits


@dataclass
class Printed:
    """What was printed: empty until the block is left."""

    text: str = ""


@contextlib.contextmanager
def captured_stderr() -> Iterator[Printed]:
    """Catch what is printed to file descriptor 2, by any thread, while the block runs."""
    printed = Printed()
    try:
        kept = os.dup(2)
    except OSError:  # closed: there is nothing to catch
        yield printed
        return
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    if sys.stderr is not None:
        sys.stderr.flush()
    os.dup2(writer, 2)
    try:
        yield printed
    finally:
        os.dup2(kept, 2)
        with contextlib.suppress(BlockingIOError):  # nothing was printed
            printed.text = os.read(reader, _MOST_BYTES).decode(errors="replace")
        for descriptor in (kept, reader, writer):
            os.close(descriptor)
