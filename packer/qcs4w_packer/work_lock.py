"""Locks on a work folder: held through flock, so that they end with their process, however it ends."""

import contextlib
import errno
import fcntl
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from .errors import OutputError

#: Names of files in a work folder; those with a dot in front are the file system's.
_OURS = re.compile(r"lock|plan\.json.*|.+\.(part|jsonl|jsonl\.new|lock)|\..+", re.DOTALL)


def take_folder(folder: Path, output: Path, *, shared: bool) -> int:
    """Return a descriptor that holds the folder's lock, made if need be.

    Raises:
        OutputError: another run holds it, or what is there is no work folder.
    """
    while True:
        _refuse_foreign(folder, output)
        folder.mkdir(exist_ok=True)
        try:
            fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
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


def _refuse_foreign(folder: Path, output: Path) -> None:
    """Refuse what has the work folder's name and is none: a work folder is emptied, and its files are overwritten."""
    strange = None
    if folder.is_symlink() or (os.path.lexists(folder) and not folder.is_dir()):
        strange = folder
    elif folder.is_dir():
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            strange = next((Path(entry.path) for entry in entries if not _is_ours(entry)), None)
    if strange is not None:
        raise OutputError(
            f"{output}: is made in {folder}, where {'this' if strange == folder else strange.name} is in the way: "
            "no earlier run has left that",
            hint="move it elsewhere, or write elsewhere with -o",
        )


def _is_ours(entry: os.DirEntry[str]) -> bool:
    """Tell whether a file or folder in a work folder may be one that a run has made there."""
    if entry.name in ("out", "old"):
        return entry.is_dir(follow_symlinks=False)
    return bool(_OURS.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False)


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
