"""verify: one run over a sweep of shapes and a batch of files, its reports, and its end when a dispatch has none."""

import itertools
import os
import shlex
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .console import Console, describe_error, print_error, write
from .interrupts import end_process, interruptible
from .main import EXIT_ERROR, EXIT_FAILED
from .options import standard_input
from .report import adapter_document, error_document, plural, quoted, to_json
from .report_verdict import counted, is_shape, verdict_lines
from .verify_batch import Batch, Outcome, Shard
from .verify_options import Options
from .verify_reports import FORMATS, Reports, open_reports
from .verify_requests import Request, Unusable, open_manifest, read_manifest, requests_of
from .verify_save import FailingFolder
from .verify_sweep import Sweep
from .verify_work import Device, Setting

if TYPE_CHECKING:
    from qcs4w_gpu import Gpu, Kernel

_LAST_S = 60.0  # to judge what was run and to write reports, once a dispatch has not ended

Result = dict[str, Any]


class VerifyRun:
    """One run.

    Args:
        options: checked.
        console: where words go.
    """

    def __init__(self, options: Options, console: Console):
        self._options, self._console = options, console
        self._shard = options.shard or Shard()
        self._device = Device(self._open_gpu)
        self._saved: FailingFolder | None = None
        self._sweep: Sweep | None = None
        self._unused: list[str] = []
        self._file_shown: str | None = None
        self._input: Path | None = None
        self._reports: Reports
        self._batch: Batch
        self._requests: Iterable[Request | Unusable]

    def run(self) -> int:
        """Verify all that was asked for; return the exit code."""
        from qcs4w_packer import UsageError

        with ExitStack() as stack:
            kernel = self._prepare(stack)
            stack.enter_context(interruptible())
            stack.callback(self._device.close)
            self._check_device(kernel)
            if self._options.kernel.sweep:
                add_shape = self._saved.add_shape if self._saved else None
                self._sweep = Sweep(self._device.gpu, kernel, self._options.seed, self._shard, add_shape)
                for result in self._sweep.results():
                    self._take(Outcome(result, 0, None))
            for outcome in self._batch.results(self._requests):
                self._take(outcome)
            self._unused = self._unused_inputs()
            if not self._reports.results and self._shard == Shard():
                raise UsageError("there is nothing to verify", hint="the list of files is empty")
            code = self._exit_code()
            self._write(code)
        self._tell(code)
        return code

    def _prepare(self, stack: ExitStack) -> "Kernel | None":
        """Open and check what there is before any work; return the kernel that is to be judged."""
        from qcs4w_packer import open_source

        options = self._options
        x = options.input_path
        if x is not None:
            x = stack.enter_context(standard_input(x))
        for given in filter(None, (options.source, x, options.output)):
            open_source(given).close()  # a fault of theirs is one error, and not one of each tensor
        self._input = x
        self._reports = open_reports(
            stack,
            options.jsonl,
            {kind: options.reports[kind] for kind in FORMATS},
            options.save_failing,
            force=options.force,
        )
        if options.save_failing is not None:
            self._saved = FailingFolder(options.save_failing, options.kernel, self._device, force=options.force)
            self._saved.check()
        kernel = options.kernel.read()
        self._requests = self._all_requests(stack)
        self._batch = Batch(
            Setting(self._device, kernel, with_bias=not options.no_bias, draw=self._reports.wants_pictures),
            blob=options.blob,
            jobs=options.jobs or min(os.cpu_count() or 1, 4),
            shard=self._shard,
            fail_fast=options.fail_fast,
            strict=options.strict,
            verbose=options.verbose,
            on_failure=self._saved.add if self._saved else None,
        )
        return kernel

    def _all_requests(self, stack: ExitStack) -> Iterable[Request | Unusable]:
        options, x = self._options, self._input
        template = Request(
            Path(), options.tensors, x, options.output, options.source, options.rows, options.seed, options.thresholds
        )
        requests: Iterable[Request | Unusable] = requests_of(options.paths, template)
        if options.manifest is not None:
            lines = read_manifest(stack.enter_context(open_manifest(options.manifest)), options.manifest, template)
            requests = itertools.chain(requests, lines)
        also = [Path(options.files_from) if options.files_from else None, options.manifest, options.kernel.file]
        also += [options.source, x, options.output, options.blob.scales if options.blob else None]
        return self._reports.spare(requests, [path for path in also if path is not None])

    def _check_device(self, kernel: "Kernel | None") -> None:
        """Open the device where one will be needed for sure: without an adapter that is one error.

        A manifest may need none, but for a kernel.
        """
        from qcs4w_gpu.linear import check_kernel

        options, device = self._options, self._device
        if options.output is None and (options.paths or options.kernel.sweep or options.kernel.file):
            self._console.note(f"adapter: {device.gpu.adapter}; {device.gpu.reason}")
            if kernel is not None:
                check_kernel(device.gpu, kernel)  # a fault of its text is one error, and not one of each tensor

    def _open_gpu(self) -> "Gpu":
        from qcs4w_gpu import Gpu

        options = self._options
        gpu = Gpu(options.adapter, engine=options.engine, require_gpu=options.require_gpu)
        return options.kernel.watched(gpu, self._give_up)

    def _give_up(self, error: Exception) -> NoReturn:
        """Write what there is and end the process: a dispatch does not end, and the driver keeps the main thread."""
        last = threading.Timer(_LAST_S, self._end, [error])
        last.daemon = True
        last.start()
        try:
            shapes = [Outcome(each, 0, None) for each in self._sweep.abandon(error)] if self._sweep else []
            outcomes = [*shapes, *self._batch.abandon(self._requests, error)]
            for outcome in outcomes:
                if self._saved is not None:
                    self._saved.left_out += outcome.result["status"] == "fail"
                self._take(outcome)
            if "timeout" not in map(_error_code, outcomes):  # it was a failure's smallest input that was looked for
                self._console.warn(str(error))
            self._write(EXIT_ERROR)
            self._tell(EXIT_ERROR)
        except Exception as caught:  # the edge of this thread
            self._end(caught)
        end_process(EXIT_ERROR)

    def _end(self, error: Exception) -> NoReturn:
        message, hint, code = describe_error(error)
        if self._console.as_json:
            write(to_json(self._console.command, error_document(code, message, hint), EXIT_ERROR), sys.stdout)
        else:
            print_error(message, hint)
        end_process(EXIT_ERROR)

    def _take(self, outcome: Outcome) -> None:
        """Add one result to the reports, and show it."""
        result = outcome.result
        self._reports.add(result, outcome.picture)
        if (is_shape(result) and result["status"] == "pass") or _error_code(outcome) == "not_reached":
            return  # the number of them is enough
        if self._has_several and not is_shape(result) and result["file"] != self._file_shown:
            self._file_shown = result["file"]
            self._console.answer(f"{self._file_shown}:")
        _show(result, outcome.name_width, self._console)

    @cached_property
    def _has_several(self) -> bool:
        """Whether there may be tensors of several files, so that their names are told."""
        paths = self._options.paths
        return self._options.manifest is not None or len(paths) > 1 or any(map(_stands_for_several, paths))

    def _unused_inputs(self) -> list[str]:
        from qcs4w_packer import open_source

        x, batch = self._input, self._batch
        was_used = any(path == x for path, _ in batch.used_inputs)  # else an error has said why
        if x is None or not was_used or self._options.tensors or batch.stopped:
            return []
        with open_source(x) as inputs:
            return [name for name in inputs.tensors if (x, name) not in batch.used_inputs]

    def _unused_thresholds(self) -> list[str]:
        if self._shard != Shard() or self._batch.stopped:
            return []
        names = [result["tensor"] for result in self._reports.results if result["tensor"] is not None]
        return self._options.thresholds.unused(names)

    def _summary(self) -> dict[str, int]:
        counts = Counter(result["status"] for result in self._reports.results)
        return {status: counts[status] for status in ("pass", "fail", "error")}

    def _exit_code(self) -> int:
        counts = self._summary()
        return EXIT_ERROR if counts["error"] else EXIT_FAILED if counts["fail"] else 0

    def _write(self, code: int) -> None:
        """Write what repeats the failures, and the reports."""
        if self._saved is not None and self._saved.write():
            script = shlex.quote(str(self._saved.script))
            self._console.note(f"wrote {self._options.save_failing}; to repeat it: sh {script}")
        for path in self._reports.write(self._facts(), self._summary(), code):
            self._console.note(f"wrote {path}")

    def _facts(self) -> dict[str, str]:
        """Return what a report says of the run."""
        from qcs4w_packer import __version__

        first = self._device.first
        ran = {"engine": first.engine.version, "adapter": str(first.adapter)} if first else {}
        return {"qcs4w": __version__, **ran, "seed": str(self._options.seed), "shard": str(self._shard)}

    def _tell(self, code: int) -> None:
        """Say what came of it all, and print the document."""
        console, batch, results, counts = self._console, self._batch, self._reports.results, self._summary()
        console.answer(
            f"\n{counted(results)}: {counts['pass']} passed, {counts['fail']} failed, "
            f"{counts['error']} could not be checked" + f"; shard {self._shard}" * (self._shard.count > 1)
        )
        idle = self._unused_thresholds()
        if idle:
            console.warn(f"--max-quant-error: no tensor fits {quoted(idle)}")
        if batch.stopped:
            console.warn("stopped there; the rest was not looked at")
        if self._saved is not None and self._saved.left_out:
            console.warn(f"{plural(self._saved.left_out, 'failing tensor')} not in {self._options.save_failing}")
        if self._unused:
            console.warn(f"{self._input}: no packed tensor is named {quoted(self._unused)}")
        if batch.unchecked:
            console.warn(f"not checked, for want of an input: {quoted([item['tensor'] for item in batch.unchecked])}")
        gpu = self._device.first
        console.document(
            {
                "engine": gpu.engine.version if gpu else None,
                "adapter": adapter_document(gpu.adapter) if gpu else None,
                "seed": self._options.seed,
                "rounding_factor": self._device.rounding_factor,
                "shard": str(self._shard),
                "summary": counts,
                "stopped": batch.stopped,
                "unused_inputs": self._unused,
                "unused_thresholds": idle,
                "unchecked": batch.unchecked,
                "results": results,
            },
            code,
        )


def _error_code(outcome: Outcome) -> str | None:
    code: str | None = outcome.result.get("error", {}).get("code")
    return code


def _stands_for_several(path: Path) -> bool:
    return os.path.isdir(path) or any(sign in str(path) for sign in "*?[")


def _show(result: Result, name_width: int, console: Console) -> None:
    if "error" in result:
        console.answer_styled([[("ERROR", "bold red"), (f"  {result['tensor'] or result['file']}  not checked", "")]])
        if not console.as_json:
            print_error(result["error"]["message"], result["error"]["hint"])
        return
    console.answer_styled(verdict_lines(result, name_width))
