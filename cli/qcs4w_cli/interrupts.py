"""Ctrl-C works while the GPU does: a wait inside the driver keeps Python's own signal handlers from running."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import NoReturn

_GRACE_S = 1.0

#: Files to remove when the process has to be ended from here.
temporary_files: set[str] = set()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP end the process within the block, whatever it waits for.

    Python's handlers get a second to do it in order. Outputs are never half-written then: they are written after.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    left = threading.Event()

    def watch() -> None:
        received = os.read(reader, 1)
        os.close(reader)
        if not received or left.wait(_GRACE_S):
            return
        with contextlib.suppress(OSError):
            os.write(2, b"\nInterrupted.\n")
        end_process(128 + received[0])

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        left.set()
        signal.set_wakeup_fd(previous)
        os.close(writer)


def end_process(code: int) -> NoReturn:
    """End the process from any thread, whatever the others wait for."""
    for path in temporary_files:
        with contextlib.suppress(OSError):
            os.unlink(path)
    os._exit(code)
