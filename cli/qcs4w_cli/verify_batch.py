"""verify: many files and tensors on one device; what cannot be checked is a result too.

While one tensor is judged in a thread, the device works on the next; no more are held than there are threads, plus one.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import describe_error, print_traceback
from .report import error_document
from .report_verdict import verdict_document
from .verify_requests import Request, Unusable
from .verify_work import OpenFiles, Setting, Work

if TYPE_CHECKING:
    from qcs4w_gpu import Verdict
    from qcs4w_gpu.picture import Picture
    from qcs4w_packer import Blob, PackedEntry, PackedFile

Result = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What became of one tensor.

    Attributes:
        result: as JSON.
        name_width: that the names of its file need.
        picture: of what failed, where pictures are wanted.
    """

    result: Result
    name_width: int
    picture: "Picture | None"


@dataclass(frozen=True)
class Shard:
    """The part of a batch that one of several machines takes: tensors are dealt out in turn."""

    index: int = 0
    count: int = 1

    def holds(self, position: int) -> bool:
        """Tell whether the tensor at a position of the whole batch is in this part."""
        return position % self.count == self.index

    def __str__(self) -> str:
        return f"{self.index + 1}/{self.count}"


@dataclass
class Batch:
    """What every tensor is verified with, and what is known once all are.

    Attributes:
        setting: where and how each tensor is run and judged.
        blob: what is known of raw bytes.
        jobs: threads that judge.
        shard: the part to take.
        fail_fast: stop at the first tensor that does not pass.
        strict: stop at a request that cannot be met.
        verbose: print the traceback of what could not be checked.
        on_failure: called with each tensor that fails and its verdict, while its files are open.
        used_inputs: arrays of input files that were used.
        unchecked: tensors without an input, as JSON.
        stopped: it ended before all were verified.
    """

    setting: Setting
    blob: "Blob | None" = None
    jobs: int = 1
    shard: Shard = Shard()
    fail_fast: bool = False
    strict: bool = False
    verbose: bool = False
    on_failure: "Callable[[Work, Verdict], None] | None" = None
    used_inputs: set[tuple[Path, str]] = field(default_factory=set)
    unchecked: list[dict[str, str]] = field(default_factory=list)
    stopped: bool = False
    _left: "Iterator[_Task] | None" = None
    _in_hand: "_Task | None" = None
    _waiting: "deque[_Pending]" = field(default_factory=deque)
    _judged: Outcome | None = None

    def results(self, requests: Iterable[Request | Unusable]) -> Iterator[Outcome]:
        """Yield what becomes of each tensor, in order."""
        with ThreadPoolExecutor(self.jobs, "judge", self._share_cores) as pool, OpenFiles(self.blob) as files:
            self._left = self._tasks(requests, files)
            while True:
                task = self._in_hand = next(self._left, None)
                if task is not None:
                    self._waiting.append(self._start(task, pool))
                    self._in_hand = None
                while self._waiting and (task is None or len(self._waiting) > self.jobs):
                    outcome = self._finish(self._waiting.popleft())
                    yield outcome
                    if self.fail_fast and outcome.result["status"] != "pass":
                        self.stopped = True
                        pool.shutdown(cancel_futures=True)
                        return
                if task is None:
                    return

    def abandon(self, requests: Iterable[Request | Unusable], error: Exception) -> Iterator[Outcome]:
        """Yield what is known of all that `results` has not yielded yet; called while the driver keeps its thread.

        What was run is judged; the tensor that has begun has an error, those after it were not reached.

        Args:
            requests: those of `results`, which may not have begun.
            error: why the tensor does not end.
        """
        from qcs4w_gpu import NotReachedError

        self.stopped = True
        if self._judged is not None:
            yield self._judged
        for pending in self._waiting:
            yield pending.outcome(self.verbose)
        if self._in_hand is not None:
            yield self._in_hand.failed(error, verbose=False)
        with OpenFiles(self.blob) as files:
            for task in self._tasks(requests, files) if self._left is None else self._left:
                unreached = NotReachedError("not reached: a dispatch before it did not end")
                yield task.failed(task.error or unreached, verbose=False)

    def _finish(self, pending: "_Pending") -> Outcome:
        """Wait until a tensor is judged, and hand on what fails."""
        outcome = pending.outcome(self.verbose)
        if self.on_failure is not None and outcome.result["status"] == "fail":
            self._judged = outcome
            try:
                pending.hand_on(self.on_failure)
            except Exception as error:  # as in `outcome`
                outcome = pending.task.failed(error, verbose=self.verbose)
            self._judged = None
        return outcome

    def _share_cores(self) -> None:
        """Give each judge its part of the cores: idle threads of torch take time from a software driver."""
        import torch

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.jobs))

    def _tasks(self, requests: Iterable[Request | Unusable], files: OpenFiles) -> Iterator["_Task"]:
        """Yield what there is to do, of this shard alone."""
        position = 0
        for request in requests:
            for task in self._tasks_of(request, files):
                if self.shard.holds(position):
                    yield task
                    if self.strict and task.is_unusable:
                        self.stopped = True
                        return
                position += 1

    def _tasks_of(self, request: Request | Unusable, files: OpenFiles) -> Iterator["_Task"]:
        if isinstance(request, Unusable):
            yield _Task(request.file, request.line, error=request.error, is_unusable=True)
            return
        try:
            container = files.packed(request.file)
            width = max(map(len, container.entries), default=0)
        except Exception as error:  # as in `_start`
            yield _Task(request.file, request.line, next(iter(request.tensors), None), error=error)
            return
        for name in request.tensors or (None,):
            try:
                pairs = self._pairs(request, container, name, files)
            except Exception as error:  # as in `_start`
                yield _Task(request.file, request.line, name, width, error=error)
                continue
            for entry, array_name in pairs:
                yield _Task(
                    request.file,
                    request.line,
                    entry.name,
                    width,
                    work=Work(self.setting, request, entry, array_name, files, is_only=len(pairs) == 1),
                )

    def _pairs(
        self, request: Request, container: "PackedFile", name: str | None, files: OpenFiles
    ) -> "list[tuple[PackedEntry, str]]":
        """Return the tensors of a request, each with the name of its input; "" for random rows."""
        from qcs4w_packer.arrays import pair_inputs

        if request.input is None:
            return [(entry, "") for entry in ([container.entry(name)] if name else container.entries.values())]
        pairs = pair_inputs(container, files.source(request.input), name)
        self.used_inputs.update((request.input, array_name) for _, array_name in pairs)
        if name is None:
            checked = {entry.name for entry, _ in pairs}
            left = (other for other in container.entries if other not in checked)
            self.unchecked.extend({"file": str(request.file), "tensor": other} for other in left)
        return pairs

    def _start(self, task: "_Task", pool: ThreadPoolExecutor) -> "_Pending":
        """Do what needs the device and the files, and hand the rest to a thread."""
        from qcs4w_gpu import DeviceLostError, MissingEngineError, NoAdapterError

        if task.work is None:
            return _Pending(task)
        try:
            return _Pending(task, pool.submit(task.work.begin()))
        except (MissingEngineError, NoAdapterError):  # of the whole batch
            raise
        except Exception as error:  # one that nobody foresaw is a result as well, and no end of the batch
            if isinstance(error, DeviceLostError):  # this tensor did it; the next gets a new one
                self.setting.device.close()
            return _Pending(replace(task, error=error))


@dataclass(frozen=True)
class _Task:
    """One tensor, or what cannot be checked."""

    file: Path
    line: int | None
    tensor: str | None = None
    width: int = 0
    work: Work | None = None
    error: "Exception | None" = None
    is_unusable: bool = False

    def failed(self, error: Exception, *, verbose: bool) -> Outcome:
        """Return what became of it when it could not be checked."""
        message, hint, code = describe_error(error)
        if verbose:
            print_traceback(error)
        return self.outcome({"status": "error", **error_document(code, message, hint)})

    def outcome(self, content: Result, picture: "Picture | None" = None) -> Outcome:
        """Return what became of it, with its place."""
        place = {"file": str(self.file), "tensor": self.tensor}
        return Outcome(place | ({} if self.line is None else {"line": self.line}) | content, self.width, picture)


@dataclass(frozen=True)
class _Pending:
    """A task that has begun: it is being judged in a thread, or has failed before."""

    task: _Task
    judging: "Future[Verdict] | None" = None

    def outcome(self, verbose: bool) -> Outcome:
        """Wait for the verdict."""
        task = self.task
        if self.judging is None or task.work is None:
            return task.failed(task.error or AssertionError(task), verbose=verbose)
        try:
            verdict = self.judging.result()
            return task.outcome(verdict_document(task.work.entry, verdict), verdict.picture)
        except Exception as error:  # one that nobody foresaw is a result as well, and no end of the batch
            return task.failed(error, verbose=verbose)

    def hand_on(self, on_failure: "Callable[[Work, Verdict], None]") -> None:
        """Call back with a verdict that is there."""
        assert self.judging is not None  # noqa: S101 - it has a verdict
        assert self.task.work is not None  # noqa: S101
        on_failure(self.task.work, self.judging.result())
