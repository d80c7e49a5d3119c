"""The end of a pack: the list of shards, the files carried along, and the output's own name, all at one stroke."""

import os
import shutil
import stat
from pathlib import Path

from .container import is_container_like
from .errors import OutputError, Qcs4wError, SourceError
from .exchange import exchange
from .files import cannot_write, check_folder, check_outside, check_target, flush, publish
from .pack_plan import INDEX_NAME, PackPlan
from .work_folder import WorkFolder
from .work_statement import stamps


def finish(work: WorkFolder, *, force: bool = False) -> bool:
    """Give the finished shards their place, and remove the work folder.

    Of several processes that share the folder, any may call this when its own shards are finished: the last one to do
    so does it.

    Args:
        work: the work folder.
        force: replace an output that is there.

    Returns:
        False while shards are missing or others are at work on them; nothing is done then.

    Raises:
        OutputError: the output has appeared meanwhile or cannot be written.
        SourceError: a source has been changed while it was read.
    """
    plan = work.plan
    if not work.alone() or not all(work.made(shard).is_file() for shard in plan.shards):
        return False
    _check_sources(work)
    try:
        if plan.is_folder:
            _finish_folder(work, force=force)
        else:
            made = work.made(plan.shards[0])
            if force and work.output.exists():  # what replaces a private file is private
                made.chmod(stat.S_IMODE(work.output.stat().st_mode))
            publish(made, work.output, force)
        work.remove()
    except OSError as error:
        raise cannot_write(work.output, error) from None
    return True


def check_output(plan: PackPlan, *, force: bool = False) -> None:
    """Say before any work why the output could not be written.

    Raises:
        OutputError: it exists, is or holds a source, or is no place for a folder.
    """
    if plan.output is None:
        return
    if not plan.is_folder:
        check_target(plan.output, force=force, sources=plan.source_files)
        return
    check_outside(plan.output, (plan.source.path,))
    path = check_folder(
        plan.output, force=force, is_ours=lambda folder: _is_ours(folder, plan), sources=_read_files(plan)
    )
    if os.path.ismount(path):
        raise OutputError(
            f"{plan.output}: is a mount point, which cannot be replaced as a whole", hint="name a folder in it"
        )


def _finish_folder(work: WorkFolder, *, force: bool) -> None:
    plan, out = work.plan, work.path / "out"
    for path in plan.source.beside:
        _copy(path, out / path.name)
    index = plan.index()
    if index is not None:
        (out / INDEX_NAME).write_bytes(index)
    for path in out.iterdir():
        flush(path)
    flush(out)
    check_output(plan, force=force)  # it may have appeared meanwhile
    if not work.output.is_dir() or not any(work.output.iterdir()):
        if work.output.is_dir():
            out.chmod(stat.S_IMODE(work.output.stat().st_mode))
        out.rename(work.output)
    else:
        out.chmod(stat.S_IMODE(work.output.stat().st_mode))
        if not exchange(out, work.output):
            work.output.rename(work.path / "old")  # brought back by the next run, if a kill comes in between
            out.rename(work.output)
    flush(work.output.parent)


def _copy(source: Path, target: Path) -> None:
    """Copy a file that lies beside the weights.

    Raises:
        SourceError: it can no longer be read.
        OSError: the copy cannot be written.
    """
    try:
        shutil.copyfile(source, target)
    except shutil.SpecialFileError:
        raise SourceError(f"{source}: is no regular file any more") from None
    except OSError as error:
        if error.filename == str(source) and error.filename2 is None:  # two names: while it was written
            raise SourceError(f"{source}: cannot be read any more: {error.strerror}") from None
        raise


def _is_ours(folder: Path, plan: PackPlan) -> bool:
    """Tell whether a folder holds nothing but containers, and files of the names that are written beside them."""
    beside = {INDEX_NAME, *(path.name for path in plan.source.beside)}
    try:
        return all(
            path.is_file() and (path.name in beside or (path.suffix == ".safetensors" and is_container_like(path)))
            for path in folder.iterdir()
        )
    except Qcs4wError:
        return False


def _read_files(plan: PackPlan) -> tuple[Path, ...]:
    return (*plan.source_files, *plan.source.beside)


def _check_sources(work: WorkFolder) -> None:
    """Refuse what was made of a source that has been changed in the meantime."""
    before = work.stamps
    gone = [path for path in work.plan.source_files if not path.exists()]
    if gone:  # an open file stays whole when its name goes
        return
    changed = [name for name, stamp in stamps(work.plan).items() if before.get(name) != stamp]
    if changed:
        raise SourceError(f"{changed[0]}: was changed while it was read; nothing was written", hint="pack it again")
