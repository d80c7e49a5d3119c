"""The folder beside an output in which it is made: who works in it, what was finished there, and when it goes.

    .OUT.qcs4w/lock          held (flock) by whoever works here, so that even kill -9 frees it; tells the process
    .OUT.qcs4w/plan.json     what is being made: tool, sources, options, and a fingerprint of every shard
    .OUT.qcs4w/SHARD.part    a shard being written, with SHARD.jsonl, its journal
    .OUT.qcs4w/out/SHARD     a finished shard; at the end `out` becomes the output

What is here is worth something only as long as the same work goes on. The rule, which `leave` follows: after Ctrl-C, a
kill, a full disk or a read error, the folder stays once one tensor is finished, since the same command will go on from
there. After an error that the same command would meet again (a weight that is not finite, wrong options), only finished
shards are worth anything, since what mends the error changes the others. A folder with nothing of worth is removed.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .errors import OutputError, Qcs4wError, SourceError
from .files import cannot_write
from .journal import read_journal
from .pack_plan import PackPlan, PlannedShard
from .work_lock import holder, preparing, sign, take_folder, try_lock
from .work_statement import read_statement, statement, what_changed

_LONGEST_NAME = 255 - len("..qcs4w")  # bytes that file systems take

Note = Callable[[str], None]


class WorkFolder:
    """The work folder of one output, locked.

    Args:
        plan: what is to be made.
        restart: begin anew whatever is there.
        shared: others may work on other shards at the same time.
        note: told in words what of earlier work is kept or thrown away.

    Attributes:
        path: the folder.
        finished: tensors that are known to be finished, by this run or an earlier one.
        stamps: of the source files, see `stamps`.

    Raises:
        OutputError: another run holds it, or it cannot be written.
        SourceError: a source cannot be read.
    """

    def __init__(self, plan: PackPlan, *, restart: bool = False, shared: bool = False, note: Note = lambda text: None):
        if plan.output is None:
            raise ValueError("a plan without an output cannot be carried out")
        self.output = Path(os.path.realpath(plan.output))
        self.path = work_path(self.output)
        self.plan = plan
        self.finished = 0
        self._note = note
        self._has_earlier = False
        try:
            self._fd = take_folder(self.path, self.output, shared=shared)
            try:
                self._heal()
                stated = statement(plan)
                self._fingerprints: dict[str, str] = stated["shards"]
                self.stamps: dict[str, list[Any]] = stated["sources"]
                with preparing(self.path) if shared else contextlib.nullcontext():
                    self._prepare(stated, restart=restart, shared=shared)
                self._has_earlier = any(self.journal(shard).is_file() for shard in plan.shards)
                self._check_room()
            except BaseException as error:
                self.leave(error)
                raise
        except OSError as error:
            raise cannot_write(self.output, error) from None

    @staticmethod
    def is_begun(output: Path) -> bool:
        """Tell whether somebody has begun to make an output, on a disk that can be seen from here."""
        return (work_path(Path(os.path.realpath(output))) / "plan.json").is_file()

    def fingerprint(self, shard: PlannedShard) -> str:
        """Return what tells whether a shard begun earlier is the very same."""
        return self._fingerprints[shard.name]

    def part(self, shard: PlannedShard) -> Path:
        """Return where a shard is written."""
        return self.path / f"{shard.name}.part"

    def made(self, shard: PlannedShard) -> Path:
        """Return where a finished shard waits for the others."""
        return self.path / "out" / shard.name

    def journal(self, shard: PlannedShard) -> Path:
        """Return a shard's journal."""
        return self.path / f"{shard.name}.jsonl"

    @contextlib.contextmanager
    def holding(self, shard: PlannedShard) -> Iterator[None]:
        """Lock a shard against others that share the folder.

        Raises:
            OutputError: another process works on it.
        """
        try:
            fd = os.open(self.path / f"{shard.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise cannot_write(self.output, error) from None
        try:
            if not try_lock(fd, fcntl.LOCK_EX):
                raise OutputError(f"{self.output}: shard {shard.name} is being written by {holder(fd)}")
            with contextlib.suppress(OSError):
                sign(fd)
            yield
        finally:
            os.close(fd)

    def used_nbytes(self) -> int:
        """Return the bytes of disk that unfinished and finished shards take already."""
        files = [path for shard in self.plan.shards for path in (self.part(shard), self.made(shard))]
        return sum(path.stat().st_blocks * 512 for path in files if path.is_file())

    def alone(self) -> bool:
        """Try to become the only one who works here; False while others do."""
        return try_lock(self._fd, fcntl.LOCK_EX)

    def close(self) -> None:
        """Let others work here."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def remove(self) -> None:
        """Remove the folder, and let go of it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()

    def leave(self, error: BaseException) -> None:
        """Go after an error: keep what the same command can go on from (see the head of this module), or nothing."""
        if self._fd < 0:
            return
        again = isinstance(error, Qcs4wError) and not isinstance(error, OutputError | SourceError)
        made = [shard for shard in self.plan.shards if self.made(shard).is_file()]
        if made if again else (self.finished or made or self._has_earlier):
            count = f" ({self.finished:,} of {self.plan.tensor_count:,} tensors)" if self.finished else ""
            said = f"what was finished{count} is kept in {self.path}: the same command goes on from there"
            if isinstance(error, Qcs4wError) and str(self.path) not in (
                error.hint or ""
            ):  # another process may have said it
                error.hint = f"{error.hint}; {said}" if error.hint else said
            elif not isinstance(error, Qcs4wError):
                self._note(said)
            self.close()
        elif self.alone():
            self.remove()
        else:
            self.close()

    def _check_room(self) -> None:
        beside = self.plan.source.beside if self.plan.is_folder else ()
        needed = self.plan.output_nbytes + sum(path.stat().st_size for path in beside) - self.used_nbytes()
        free = shutil.disk_usage(self.path).free
        if needed > free:
            raise OutputError(
                f"{self.output}: needs {needed:,} bytes, the disk has {free:,} free: {needed - free:,} are missing",
                hint="make room, or write elsewhere with -o",
            )

    def _heal(self) -> None:
        """Set right what a kill between two renames has left: the old output comes back, a published file is let go."""
        old = self.path / "old"
        if old.is_dir() and not self.output.exists():
            old.rename(self.output)
        shutil.rmtree(old, ignore_errors=True)
        out = self.path / "out"
        for path in out.iterdir() if out.is_dir() else ():
            about = path.lstat()
            if stat.S_ISLNK(about.st_mode) or (stat.S_ISREG(about.st_mode) and about.st_nlink > 1):
                path.unlink()  # it has another name, the output's: writing here would change that

    def _prepare(self, stated: dict[str, Any], *, restart: bool, shared: bool) -> None:
        """Keep those shards of earlier work that are the same now, remove the others, and write down what is made."""
        (self.path / "out").mkdir(exist_ok=True)
        plan_file = self.path / "plan.json"
        before = read_statement(plan_file)
        if before == stated and not restart:
            self._prune(set(stated["shards"]))  # a kill at the very end may have left the old output here
            return
        if (before or restart) and shared and not self.alone():
            raise OutputError(
                f"{self.output}: another run with other options or sources works on it ({holder(self._fd)})",
                hint="wait for it, or give both the same options",
            )
        same = {
            name
            for name, fingerprint in stated["shards"].items()
            if not restart and before and before["shards"].get(name) == fingerprint
        }
        if not before and not restart:  # a power cut may cost plan.json; journals speak for themselves
            same = {name for name, mark in stated["shards"].items() if read_journal(self.path / f"{name}.jsonl", mark)}
        lost = self._prune(same)
        if lost:
            kept = f" ({len(same)} of {len(stated['shards'])} files are as they were and stay)" if same else ""
            self._note(f"starting clean: {what_changed(before, stated, restart=restart)}{kept}")
        fresh = self.path / f"plan.json.{os.getpid()}"
        fresh.write_text(json.dumps(stated, indent=1))
        fresh.replace(plan_file)
        if shared:
            try_lock(self._fd, fcntl.LOCK_SH)

    def _prune(self, same: set[str]) -> bool:
        """Remove what is of other work; tell whether something that was finished is lost."""
        own = {"lock", "out", "old"} | {
            f"{name}.{kind}" for name in same for kind in ("part", "jsonl", "jsonl.new", "lock")
        }
        lost = False
        for path in self.path.iterdir():
            if path.name not in own and not path.name.startswith("plan.json"):
                lost = lost or path.suffix == ".jsonl"
                _remove(path)
        for path in (self.path / "out").iterdir():
            if path.name not in same:
                lost = True
                _remove(path)
        return lost


def work_path(output: Path) -> Path:
    """Return the work folder of an output; its name is cut where the file system would not take it."""
    name = output.name
    if len(os.fsencode(name)) > _LONGEST_NAME:
        name = f"{name[:40]}.{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}"
    return output.parent / f".{name}.qcs4w"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
