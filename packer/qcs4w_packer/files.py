"""Output files that are whole or not there: written beside their target, flushed, then renamed."""

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from .errors import OutputError
from .safetensors_file import open_for_reading, read_at

_CHUNK_NBYTES = 16 << 20
_ELSEWHERE = "write elsewhere"


@contextlib.contextmanager
def replacing(
    target: str | os.PathLike[str], *, force: bool = False, nbytes: int = 0, sources: tuple[Path, ...] = ()
) -> Iterator[int]:
    """Yield a file descriptor whose content becomes `target` when the block ends well.

    Whatever happens inside (an error, Ctrl-C, a full disk), `target` is as it was and nothing is left beside it.

    Args:
        target: the file to make; a symbolic link is followed.
        force: replace a file that is there.
        nbytes: its size when known, compared with the free space before anything is written.
        sources: files that are being read, which must not be the target.

    Raises:
        OutputError: it exists, is one of the sources, or cannot be written.
    """
    path = check_target(target, force=force, sources=sources)
    # 40 characters of up to 4 bytes: a name may have 255 bytes.
    part = path.parent / f".{path.name[:40]}.{secrets.token_hex(4)}.part"
    fd = -1
    try:
        check_room(path, nbytes)
        try:
            # Within the block, so that a Ctrl-C as soon as there is a file finds the way to its removal.
            fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            yield fd
            if force and path.exists():  # what replaces a private file is private
                os.fchmod(fd, stat.S_IMODE(path.stat().st_mode))
            os.fsync(fd)
        finally:
            if fd >= 0:
                os.close(fd)
        publish(part, path, force)
    except OSError as error:
        raise cannot_write(path, error) from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()


def check_target(target: str | os.PathLike[str], *, force: bool = False, sources: tuple[Path, ...] = ()) -> Path:
    """Return the real path that an output will have, or say why it cannot be written, before any work is done.

    Raises:
        OutputError: as for `replacing`.
    """
    try:
        path = Path(os.path.realpath(target))
        if os.path.lexists(path) and not path.exists():
            raise OutputError(f"{target}: is a symbolic link that leads nowhere")
        if path.exists():
            if any(source.exists() and path.samefile(source) for source in sources):
                raise OutputError(f"{target}: is the file being read; sources are never changed", hint=_ELSEWHERE)
            if not path.is_file():
                raise OutputError(f"{target}: is not a regular file")
            if not force:
                raise OutputError(f"{target}: exists already", hint="--force replaces it")
        _check_parent(target, path.parent)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        raise OutputError(f"{target}: cannot be written: {getattr(error, 'strerror', None) or error}") from None
    return path


def check_room(path: Path, nbytes: int) -> None:
    """Say before any work that a file or folder of this size does not fit on the disk that it is meant for.

    Raises:
        OutputError: it does not.
    """
    free = shutil.disk_usage(path.parent).free
    if nbytes > free:
        raise OutputError(f"{path}: needs {nbytes:,} bytes, the disk has {free:,} free: {nbytes - free:,} are missing")


@contextlib.contextmanager
def replacing_folder(
    target: str | os.PathLike[str],
    *,
    force: bool = False,
    is_ours: Callable[[Path], bool] | None = None,
    sources: tuple[Path, ...] = (),
) -> Iterator[Path]:
    """Yield an empty folder that becomes `target` when the block ends well; otherwise `target` is as it was.

    Args:
        target: the folder to make; an empty one that is there is taken.
        force: replace a folder that is there, if it is one of ours.
        is_ours: tells whether a folder holds what was written here before and nothing else. No other is ever replaced.
        sources: files that are being read, which must not lie in the target.

    Raises:
        OutputError: it exists, holds what is not ours or is being read, or cannot be written.
    """
    path = check_folder(target, force=force, is_ours=is_ours, sources=sources)
    part = path.parent / f".{path.name[:40]}.{secrets.token_hex(4)}.part"
    old = part.with_suffix(".old")
    try:
        try:
            part.mkdir()
            yield part
            for file in part.iterdir():
                flush(file)
            try:
                if path.is_dir() and any(path.iterdir()):
                    check_folder(path, force=force, is_ours=is_ours, sources=sources)  # it may have appeared meanwhile
                    path.rename(old)
                part.rename(path)
            except BaseException:
                if old.is_dir() and not path.exists():
                    old.rename(path)
                raise
            flush(path.parent)
        finally:
            shutil.rmtree(part, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
    except OutputError as error:  # of a file in it, by the name that it had for the time being
        raise OutputError(str(error).replace(str(part), str(path)), hint=error.hint) from None
    except OSError as error:
        raise cannot_write(path, error) from None


def check_folder(
    target: str | os.PathLike[str],
    *,
    force: bool = False,
    is_ours: Callable[[Path], bool] | None = None,
    sources: tuple[Path, ...] = (),
) -> Path:
    """Return the real path of a folder to make, or say why it cannot be made, before any work is done.

    Raises:
        OutputError: as for `replacing_folder`.
    """
    try:
        path = Path(os.path.realpath(target))
        if os.path.lexists(path) and not path.is_dir():
            raise OutputError(f"{target}: is there already, and no folder", hint="name another folder")
        for source in sources:
            if _is_within(source, path):
                what = "is" if source.exists() and path.samefile(source) else "holds"
                raise OutputError(f"{target}: {what} the file being read; sources are never changed", hint=_ELSEWHERE)
        if path.is_dir() and any(path.iterdir()):
            if not force:
                raise OutputError(f"{target}: exists already", hint="--force replaces it")
            if is_ours is None or not is_ours(path):
                raise OutputError(
                    f"{target}: holds more than what was written here before; --force does not remove that",
                    hint="name another folder, or empty this one",
                )
        _check_parent(target, path.parent)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        raise OutputError(f"{target}: cannot be written: {getattr(error, 'strerror', None) or error}") from None
    return path


def _check_parent(target: str | os.PathLike[str], folder: Path) -> None:
    """Refuse a folder in which nothing can be made: what is written beside a target has to be made there."""
    if not folder.is_dir():
        raise OutputError(f"{target}: there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise OutputError(f"{target}: cannot be written: the folder {folder} is closed to you", hint=_ELSEWHERE)


def check_outside(target: str | os.PathLike[str], sources: tuple[Path, ...]) -> None:
    """Refuse to write into a folder that is being read as a whole.

    Args:
        target: the file or folder to make.
        sources: what is being read; files among them do not matter here.

    Raises:
        OutputError: the target would lie in one of the folders.
    """
    for source in sources:
        if source.is_dir() and _is_within(Path(target), Path(os.path.realpath(source))):
            raise OutputError(f"{target}: lies in the folder being read; sources are never changed", hint=_ELSEWHERE)


def _is_within(path: Path, folder: Path) -> bool:
    """Tell whether a path lies in a real folder or is it, as it is named or as what it links to."""
    absolute = Path(os.path.abspath(path))
    named = Path(os.path.realpath(absolute.parent), absolute.name)
    return named.is_relative_to(folder) or Path(os.path.realpath(path)).is_relative_to(folder)


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at a file offset."""
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(fd, view[: 1 << 30], offset)
        view, offset = view[written:], offset + written


def write_file(
    target: str | os.PathLike[str], data: bytes | memoryview, *, force: bool = False, sources: tuple[Path, ...] = ()
) -> None:
    """Write a whole file at once, under the promises of `replacing`."""
    with replacing(target, force=force, nbytes=len(data), sources=sources) as fd:
        write_at(fd, data, 0)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file, byte for byte, into a folder that is being made.

    Raises:
        SourceError: it cannot be read.
        OutputError: it cannot be written.
    """
    fd = open_for_reading(source)
    try:
        nbytes = os.fstat(fd).st_size
        with replacing(target, nbytes=nbytes) as copy:
            for offset in range(0, nbytes, _CHUNK_NBYTES):
                write_at(copy, read_at(fd, source, offset, min(_CHUNK_NBYTES, nbytes - offset)), offset)
    finally:
        os.close(fd)


def publish(part: Path, path: Path, force: bool) -> None:
    """Give the finished file its name; without force not even a file that has just appeared is replaced."""
    if force:
        part.replace(path)
    else:
        try:
            path.hardlink_to(part)
        except FileExistsError:
            raise OutputError(f"{path}: has appeared meanwhile", hint="--force replaces it") from None
        except OSError:  # a file system without hard links
            if path.exists():
                raise OutputError(f"{path}: has appeared meanwhile", hint="--force replaces it") from None
            part.replace(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Write a file or folder through to the disk; some file systems cannot flush a folder."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def cannot_write(path: Path, error: OSError, detail: str = "") -> OutputError:
    """Return the error of an output that the system has refused; `detail` says how much was missing."""
    hint = f"make room, or {_ELSEWHERE}" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else None
    return OutputError(f"{path}: cannot be written: {error.strerror or error}{detail}; nothing was changed", hint=hint)
