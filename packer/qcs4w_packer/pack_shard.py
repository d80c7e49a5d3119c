"""Packing one shard of a plan: read, computed and written at once, row block by row block, with a journal."""

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from .calibrated import Calibrated
from .container_writer import ContainerWriter
from .errors import NonFiniteError, OutputError, SourceError
from .files import cannot_write, flush
from .journal import Journal, read_journal
from .measure import ErrorSums, QuantizationError
from .metadata import PACKED, SCALE, PackedEntry
from .methods.least_squares import least_squares_scales
from .ordered import cores, in_order
from .pack_plan import PackPlan, PlannedShard
from .pack_watch import PackedTensor, Tally
from .row_jobs import FoundRows, carrying_jobs, packing_jobs, whole_jobs
from .rowpack import PackedRows
from .safetensors_file import read_at
from .select import Choice
from .weights import SourceTensor
from .work_folder import WorkFolder

_MOST_THREADS = 8  # each holds blocks of a few MiB; more would wait for the one that writes and hashes
_READ_NBYTES = 8 << 20  # at a time, when what was finished is read again


def pack_shard(
    work: WorkFolder, shard: PlannedShard, tally: Tally, *, threads: int | None = None
) -> tuple[PackedTensor, ...]:
    """Make one shard, or finish what an earlier run has begun of it. It waits in the work folder for `finish`.

    Args:
        work: the locked work folder; its plan holds the shard.
        shard: which.
        tally: told of every piece of work.
        threads: how many compute at once; by default one for each core, up to 8.

    Returns:
        what became of each tensor that is packed, in order.

    Raises:
        OutputError: the disk is full or fails, or another process works on this shard.
        SourceError: a source cannot be read any more; the message names file and offset.
        NonFiniteError: a weight is not finite.
    """
    threads = threads or min(cores(), _MOST_THREADS)
    with work.holding(shard), _Shard(work, shard, tally) as making:
        making.resume(threads)
        making.run(threads)
        return making.finish()


class _Shard:
    """A shard while it is written."""

    def __init__(self, work: WorkFolder, shard: PlannedShard, tally: Tally):
        self._work, self._shard, self._tally = work, shard, tally
        self._plan: PackPlan = work.plan
        self._writer: ContainerWriter = shard.writer()
        self._packing = {e.name: (c, e) for c, e in zip(shard.choices, shard.entries, strict=True)}
        self._carrying = {tensor.name: tensor for tensor in shard.carried}
        self._results: dict[str, PackedTensor] = {}
        self._carried: set[str] = set()
        self._journal: Journal | None = None
        self._path = work.made(shard) if work.made(shard).is_file() else work.part(shard)

    def __enter__(self) -> "_Shard":
        with self._writing():
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if self._journal is not None:
                # A disk that has just refused something may refuse this too: the first error is the one to tell.
                with contextlib.suppress(OSError, OutputError) if error else self._writing():
                    self._journal.close()
                self._work.finished += self._journal.count
        finally:
            os.close(self._fd)

    def resume(self, threads: int) -> None:
        """Believe the journal as far as the bytes bear it out, and throw away the rest."""
        lines = read_journal(self._work.journal(self._shard), self._work.fingerprint(self._shard))
        jobs = (partial(self._is_true, line) for line in lines)
        proven = [line for line, good in zip(lines, in_order(jobs, threads), strict=True) if good]
        with self._writing():
            if not proven:
                os.ftruncate(self._fd, 0)
            if len(proven) < self._shard.tensor_count and self._path != self._work.part(self._shard):
                self._path = self._path.replace(self._work.part(self._shard))  # it does not pass for finished
            self._writer.begin(self._fd)
        fingerprint = self._work.fingerprint(self._shard)
        self._journal = Journal(self._work.journal(self._shard), fingerprint, self._fd, proven)
        for line in proven:
            self._adopt(line)
        if lines:
            wrong = len(lines) - len(proven)
            self._tally.watch.note(
                f"resumed {self._shard.name}: {len(proven):,} of {self._shard.tensor_count:,} tensors were finished"
                + (f"; {wrong:,} more had been, but their bytes are no longer what was written" if wrong else "")
            )

    def run(self, threads: int) -> None:
        """Do what is not finished."""
        todo = [pair for name, pair in self._packing.items() if name not in self._results]
        carried = [tensor for name, tensor in self._carrying.items() if name not in self._carried]

        def jobs() -> Iterator[Any]:
            for choice, _ in todo:
                yield from self._packing_jobs(choice)
            for tensor in carried:
                yield from carrying_jobs(tensor)

        made = in_order(jobs(), threads)
        with contextlib.closing(made):
            for choice, entry in todo:
                self._pack(choice, entry, made)
            for tensor in carried:
                self._carry(tensor, made)

    def finish(self) -> tuple[PackedTensor, ...]:
        """Write the header, flush, and put the file where it waits."""
        with self._writing():
            written = self._writer.finish()
            os.fsync(self._fd)
            if self._journal is not None and self._plan.is_folder:
                self._journal.flush()  # before it passes for finished
            elif self._journal is not None:
                self._journal.forget()  # a single file is published at once
            made = self._work.made(self._shard)
            if self._path != made:
                self._path.replace(made)
                flush(made.parent)
        return tuple(replace(self._results[entry.name], entry=written[entry.name]) for entry in self._shard.entries)

    def _packing_jobs(self, choice: Choice) -> Iterator[Any]:
        work = self._plan.works.get(choice.tensor.name)
        if work is not None:
            return whole_jobs(choice.tensor, work, transposed=choice.transposed)
        rule = least_squares_scales if self._plan.recipe.name == "mse" else None
        return packing_jobs(choice.tensor, transposed=choice.transposed, rule=rule)

    def _pack(self, choice: Choice, entry: PackedEntry, made: Iterator[Any]) -> None:
        """Write a tensor's rows as they come, and note it as finished."""
        name, nbytes = choice.tensor.name, choice.tensor.nbytes
        sums = ErrorSums()
        row = floored = 0
        while row < entry.out_features:
            try:
                rows: PackedRows | FoundRows = next(made)
            except NonFiniteError as error:
                error.hint = "mend the weight, or leave this tensor unpacked with --exclude"
                raise
            if isinstance(rows, FoundRows):
                entry = self._describe(entry, rows.method, rows.outcome)
                rows = rows.rows
            done = nbytes * row // entry.out_features
            with self._writing():
                self._writer.write_rows(entry.name, row, rows.packed, rows.scales)
                row += len(rows.scales)
                sums.add(rows.error_squares, rows.weight_squares)
                floored += int(rows.floored.sum())
                self._tally.advance(nbytes * row // entry.out_features - done, name, self._shard.name)
        error_figures = sums.result()
        self._note(
            {
                "packed": entry.name,
                "sha256": self._writer.digests(entry.name),
                "error": asdict(error_figures),
                "floored": floored,
                **({"method": entry.method, "found": asdict(entry.calibration)} if entry.calibration else {}),
            },
            entry.packed_nbytes,
        )
        result = PackedTensor(entry, choice.reason, nbytes, error_figures, floored, self._shard.name)
        self._results[entry.name] = result
        self._tally.watch.packed(self._with_digests(result))

    def _describe(self, entry: PackedEntry, method: str, outcome: Calibrated) -> PackedEntry:
        """Say in the header what came of a tensor."""
        self._writer.describe(entry.name, method, outcome)
        return replace(entry, method=method, calibration=outcome)

    def _carry(self, tensor: SourceTensor, made: Iterator[Any]) -> None:
        """Copy a tensor's bytes as they come, and note it as finished."""
        offset, digest = 0, hashlib.sha256()
        while offset < tensor.nbytes:
            data: bytes = next(made)
            with self._writing():
                self._writer.write_carried(tensor.name, offset, data)
                digest.update(data)
                offset += len(data)
                self._tally.advance(len(data), tensor.name, self._shard.name)
        self._note({"carried": tensor.name, "sha256": [digest.hexdigest()]}, tensor.nbytes)

    def _note(self, line: dict[str, Any], nbytes: int) -> None:
        with self._writing():
            if self._journal is not None:
                self._journal.add(line, nbytes)

    def _is_true(self, line: dict[str, Any]) -> bool:
        """Tell whether the file holds what a line of the journal says, byte for byte."""
        try:
            if "carried" in line:
                stored = [self._carrying[line["carried"]].name]
            else:
                stored = [line["packed"] + PACKED, line["packed"] + SCALE]
                QuantizationError(**line["error"]), int(line["floored"])
            return all(
                self._digest(*self._writer.place(name)) == said
                for name, said in zip(stored, line["sha256"], strict=True)
            )
        except (
            SourceError,
            LookupError,
            TypeError,
            ValueError,
        ):  # the file ends before, or it is no line
            return False

    def _digest(self, offset: int, nbytes: int) -> str:
        digest = hashlib.sha256()
        while nbytes:
            data = read_at(self._fd, self._path, offset, min(nbytes, _READ_NBYTES))
            digest.update(data)
            offset, nbytes = offset + len(data), nbytes - len(data)
        return digest.hexdigest()

    def _adopt(self, line: dict[str, Any]) -> None:
        """Take a tensor as finished."""
        if "carried" in line:
            self._carried.add(line["carried"])
            self._tally.skip(self._carrying[line["carried"]].nbytes)
            return
        name = line["packed"]
        choice, entry = self._packing[name]
        self._writer.adopt(name, tuple(line["sha256"]))
        if "found" in line:
            entry = self._describe(entry, line["method"], Calibrated(**line["found"]))
        error = QuantizationError(**line["error"])
        result = PackedTensor(
            entry, choice.reason, choice.tensor.nbytes, error, line["floored"], self._shard.name, resumed=True
        )
        self._results[name] = result
        self._tally.skip(choice.tensor.nbytes)
        self._tally.watch.packed(self._with_digests(result))

    def _with_digests(self, result: PackedTensor) -> PackedTensor:
        packed_sha256, scale_sha256 = self._writer.digests(result.entry.name)
        return replace(result, entry=replace(result.entry, packed_sha256=packed_sha256, scale_sha256=scale_sha256))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn what the system says of the output into an error that says what is missing."""
        try:
            yield
        except OSError as error:
            raise cannot_write(self._work.output, error, self._missing(error)) from None

    def _missing(self, error: OSError) -> str:
        if error.errno == errno.EFBIG:
            return (
                f": {self._shard.name} will have {self._writer.nbytes:,} bytes, more than the system's limit on a file"
            )
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return ""
        needed = max(0, self._plan.output_nbytes - self._work.used_nbytes())
        free = shutil.disk_usage(self._work.path).free
        return f": {needed:,} bytes more are needed, the disk has {free:,} free"
