"""Locks on a work folder: held through flock, so that they end with their process, however it ends."""

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from .errors import OutputError


def take_folder(folder: Path, output: Path, *, shared: bool) -> int:
    """Return a descriptor that holds the folder's lock, made if need be."""
    while True:
        folder.mkdir(exist_ok=True)
        try:
            fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # another run has just finished and removed the folder
            continue
        try:
            if not try_lock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
                raise OutputError(
                    f"{output}: is being written by another run ({holder(fd)})",
                    hint="wait for it to end, or write elsewhere with -o",
                )
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(folder / "lock")):
                    sign(fd)
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # the lock of a folder that is no longer there


@contextlib.contextmanager
def preparing(folder: Path) -> Iterator[None]:
    """Wait until nobody else prepares a shared folder: what one has begun must not look to another like old work."""
    fd = os.open(folder / "plan.json.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def try_lock(fd: int, kind: int) -> bool:
    """Take a lock, or return False where another has it.

    Raises:
        OSError: the file system cannot lock.
    """
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def sign(fd: int) -> None:
    """Write down who holds a lock."""
    text = f"process {os.getpid()} on {socket.gethostname()}\n".encode()
    os.ftruncate(fd, 0)
    os.pwrite(fd, text, 0)


def holder(fd: int) -> str:
    """Return in words who has signed a lock last."""
    text = os.pread(fd, 200, 0).decode("utf-8", "replace").strip()
    return text if text.isprintable() and text else "unknown process"
