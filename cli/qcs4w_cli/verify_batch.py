"""verify: many files and tensors on one device; what cannot be checked is a result too.

While one tensor is judged in a thread, the device works on the next; no more are held than there are threads, plus one.
"""

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import describe_error, print_traceback
from .report import error_document, verdict_document
from .verify_requests import Request, Unusable

if TYPE_CHECKING:
    from qcs4w_gpu import Gpu, Kernel, Verdict
    from qcs4w_gpu.picture import Picture
    from qcs4w_packer import Blob, PackedEntry, PackedFile
    from qcs4w_packer.weights import Source

_OPEN_FILES = 8  # of each kind; a manifest may name thousands, one after another

Judge = Callable[[], "Verdict"]
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


class Device:
    """The one device of a batch, opened at its first use, and again where it was lost."""

    def __init__(self, open_gpu: "Callable[[], Gpu]"):
        self._open = open_gpu
        self._gpu: Gpu | None = None
        self.opened = 0
        self.first: Gpu | None = None
        self.rounding_factor = 1  # of a y from elsewhere; of a device once it is open

    @property
    def gpu(self) -> "Gpu":
        """The device."""
        from qcs4w_gpu.verify import rounding_factor_of

        if self._gpu is None:
            self._gpu = self._open()
            self.opened += 1
            if self.first is None:
                self.first = self._gpu
                self.rounding_factor = rounding_factor_of(self._gpu)
        return self._gpu

    def close(self) -> None:
        """Give it back; the next use opens another."""
        from contextlib import suppress

        from qcs4w_gpu import GpuError

        gpu, self._gpu = self._gpu, None
        if gpu is not None:
            with suppress(GpuError):
                gpu.close()


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
        device: where to run; not touched for a y from elsewhere.
        kernel: to judge; by default what the plan chooses.
        blob: what is known of raw bytes.
        jobs: threads that judge.
        shard: the part to take.
        with_bias: hold a y from elsewhere against the bias that its file has.
        fail_fast: stop at the first tensor that does not pass.
        strict: stop at a request that cannot be met.
        draw: add pictures of what fails.
        verbose: print the traceback of what could not be checked.
        used_inputs: arrays of input files that were used.
        unchecked: tensors without an input, as JSON.
        stopped: it ended before all were verified.
    """

    device: Device
    kernel: "Kernel | None" = None
    blob: "Blob | None" = None
    jobs: int = 1
    shard: Shard = Shard()
    with_bias: bool = True
    fail_fast: bool = False
    strict: bool = False
    draw: bool = False
    verbose: bool = False
    used_inputs: set[tuple[Path, str]] = field(default_factory=set)
    unchecked: list[dict[str, str]] = field(default_factory=list)
    stopped: bool = False

    def results(self, requests: Iterable[Request | Unusable]) -> Iterator[Outcome]:
        """Yield what becomes of each tensor, in order."""
        waiting: deque[Callable[[], Outcome]] = deque()
        with ThreadPoolExecutor(self.jobs, "judge", self._share_cores) as pool, _Open(self.blob) as files:
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

    def _tasks(self, requests: Iterable[Request | Unusable], files: "_Open") -> Iterator["_Task"]:
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

    def _tasks_of(self, request: Request | Unusable, files: "_Open") -> Iterator["_Task"]:
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
                    work=_Work(self, request, entry, array_name, files, is_only=len(pairs) == 1),
                )

    def _pairs(
        self, request: Request, container: "PackedFile", name: str | None, files: "_Open"
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
        from qcs4w_gpu import DeviceLostError
        from qcs4w_packer import Qcs4wError

        judging: Future[Verdict] | None = None
        error = task.error
        if task.work is not None:
            try:
                judging = pool.submit(task.work.begin())
            except Qcs4wError as caught:
                error = caught
                if isinstance(caught, DeviceLostError):  # this tensor did it; the next gets a new one
                    self.device.close()

        def finish() -> Outcome:
            picture = None
            try:
                if judging is None:
                    raise error if error is not None else AssertionError(task)
                assert task.work is not None  # noqa: S101 - it made `judging`
                verdict = judging.result()
                picture = verdict.picture
                content = verdict_document(task.work.entry, verdict)
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
    work: "_Work | None" = None
    error: "Exception | None" = None
    is_unusable: bool = False


@dataclass(frozen=True)
class _Work:
    """How one tensor is verified."""

    batch: Batch
    request: Request
    entry: "PackedEntry"
    array_name: str
    files: "_Open"
    is_only: bool

    def begin(self) -> Judge:
        """Read what is needed, run it if it is the GPU's y that is judged, and return what judges it."""
        import functools

        from qcs4w_gpu.verify import judge
        from qcs4w_packer.packing import source_weight

        request, entry = self.request, self.entry
        source = source_weight(self.files.source(request.source), entry) if request.source else None
        rest: dict[str, Any] = {
            "source": source,
            "method": entry.method,
            "max_quant_error": request.thresholds.of(entry.name),
            "draw": self.batch.draw,
        }
        if request.output is not None:
            return self._foreign(rest)
        return functools.partial(judge, self._ask(), rounding_factor=self.batch.device.rounding_factor, **rest)

    def _ask(self) -> Any:
        from qcs4w_gpu.linear import plan_for
        from qcs4w_gpu.verify import ask
        from qcs4w_packer.arrays import read_array

        request, entry, gpu, kernel = self.request, self.entry, self.batch.device.gpu, self.batch.kernel
        inputs = self.files.source(request.input) if request.input else None
        rows = request.rows if inputs is None else inputs.tensors[self.array_name].rows or 1
        plan_for(gpu, rows, entry.out_features, entry.in_features, kernel)  # what cannot fit is not read
        return ask(
            gpu,
            self.files.packed(request.file).load(entry.name),
            x=None if inputs is None else read_array(inputs, self.array_name, entry.in_features),
            rows=request.rows,
            seed=request.seed,
            kernel=kernel,
        )

    def _foreign(self, rest: dict[str, Any]) -> Judge:
        import functools

        from qcs4w_gpu.foreign import judge_output
        from qcs4w_packer.arrays import pair_output, read_array

        request, entry = self.request, self.entry
        assert request.input is not None  # noqa: S101 - seen to where requests are made
        assert request.output is not None  # noqa: S101
        container, outputs = self.files.packed(request.file), self.files.source(request.output)
        name = pair_output(container, outputs, entry, self.array_name, is_only=self.is_only)
        y = read_array(outputs, name)
        return functools.partial(
            judge_output,
            container.load(entry.name),
            read_array(self.files.source(request.input), self.array_name, entry.in_features),
            y,
            dtype=outputs.tensors[name].dtype,
            bias=container.bias(entry) if self.batch.with_bias else None,
            **rest,
        )


class _Open:
    """Files that are open; the least recently used are closed, so that a batch of thousands holds a few."""

    def __init__(self, blob: "Blob | None"):
        self._blob = blob
        self._held: OrderedDict[tuple[str, Path], Any] = OrderedDict()

    def __enter__(self) -> "_Open":
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            for file in self._held.values():
                stack.callback(file.close)

    def packed(self, path: Path) -> "PackedFile":
        """Return an open packed file."""
        from qcs4w_packer import open_packed

        file: PackedFile = self._get("packed", path, lambda: open_packed(path, self._blob))
        return file

    def source(self, path: Path) -> "Source":
        """Return an open file of arrays."""
        from qcs4w_packer import open_source

        file: Source = self._get("source", path, lambda: open_source(path))
        return file

    def _get(self, kind: str, path: Path, open_it: Callable[[], Any]) -> Any:
        key = (kind, path)
        if key not in self._held:
            opened = open_it()
            same_kind = [other for other in self._held if other[0] == kind]
            if len(same_kind) >= _OPEN_FILES:
                self._held.pop(same_kind[0]).close()
            self._held[key] = opened
        self._held.move_to_end(key)
        return self._held[key]
