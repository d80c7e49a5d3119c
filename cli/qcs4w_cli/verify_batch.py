"""verify: many files and tensors on one device; what cannot be checked is a result too.

While one tensor is judged in a thread, the device works on the next; no more are held than there are threads, plus one.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import describe_error, print_traceback
from .report import error_document, verdict_document
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

    def results(self, requests: Iterable[Request | Unusable]) -> Iterator[Outcome]:
        """Yield what becomes of each tensor, in order."""
        waiting: deque[Callable[[], Outcome]] = deque()
        with ThreadPoolExecutor(self.jobs, "judge", self._share_cores) as pool, OpenFiles(self.blob) as files:
            tasks = self._tasks(requests, files)
            while True:
                task = next(tasks, None)
                if task is not None:
                    waiting.append(self._start(task, pool))
                while waiting and (task is None or len(waiting) > self.jobs):
                    outcome = waiting.popleft()()
                    yield outcome
                    if self.fail_fast and outcome.result["status"] != "pass":
                        self.stopped = True
                        pool.shutdown(cancel_futures=True)
                        return
                if task is None:
                    return

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
        from qcs4w_packer import Qcs4wError

        if isinstance(request, Unusable):
            yield _Task(request.file, request.line, error=request.error, is_unusable=True)
            return
        try:
            container = files.packed(request.file)
            width = max(map(len, container.entries), default=0)
        except Qcs4wError as error:
            yield _Task(request.file, request.line, next(iter(request.tensors), None), error=error)
            return
        for name in request.tensors or (None,):
            try:
                pairs = self._pairs(request, container, name, files)
            except Qcs4wError as error:
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

    def _start(self, task: "_Task", pool: ThreadPoolExecutor) -> Callable[[], Outcome]:
        """Do what needs the device and the files, hand the rest to a thread, and return what waits for the result."""
        from qcs4w_gpu import DeviceLostError, MissingEngineError, NoAdapterError
        from qcs4w_packer import Qcs4wError

        judging: Future[Verdict] | None = None
        error = task.error
        if task.work is not None:
            try:
                judging = pool.submit(task.work.begin())
            except (MissingEngineError, NoAdapterError):  # of the whole batch
                raise
            except Qcs4wError as caught:
                error = caught
                if isinstance(caught, DeviceLostError):  # this tensor did it; the next gets a new one
                    self.setting.device.close()

        def finish() -> Outcome:
            picture = None
            try:
                if judging is None:
                    raise error if error is not None else AssertionError(task)
                assert task.work is not None  # noqa: S101 - it made `judging`
                verdict = judging.result()
                picture = verdict.picture
                content = verdict_document(task.work.entry, verdict)
                if self.on_failure is not None and verdict.status == "fail":
                    self.on_failure(task.work, verdict)
            except Qcs4wError as caught:
                message, hint, code = describe_error(caught)
                if self.verbose:
                    print_traceback(caught)
                content = {"status": "error", **error_document(code, message, hint)}
            place = {"file": str(task.file), "tensor": task.tensor}
            result = place | ({} if task.line is None else {"line": task.line}) | content
            return Outcome(result, task.width, picture)

        return finish


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
