"""verify: the work on one tensor, and what a batch shares for it: the device, and files that are open."""

import functools
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .verify_requests import Request

if TYPE_CHECKING:
    from qcs4w_gpu import Gpu, Kernel, Verdict
    from qcs4w_gpu.reproduce import Reproducer
    from qcs4w_packer import Blob, PackedEntry, PackedFile
    from qcs4w_packer.weights import Source

_OPEN_FILES = 8  # of each kind; a manifest may name thousands, one after another

Judge = Callable[[], "Verdict"]


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
        from qcs4w_gpu import GpuError

        gpu, self._gpu = self._gpu, None
        if gpu is not None:
            with suppress(GpuError):
                gpu.close()


class OpenFiles:
    """Files that are open; the least recently used are closed, so that a batch of thousands holds a few."""

    def __init__(self, blob: "Blob | None"):
        self._blob = blob
        self._held: OrderedDict[tuple[str, Path], Any] = OrderedDict()

    def __enter__(self) -> "OpenFiles":
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


@dataclass(frozen=True)
class Setting:
    """What all tensors of a batch have in common.

    Attributes:
        device: where to run; not touched for a y from elsewhere.
        kernel: to judge; by default what the plan chooses.
        with_bias: hold a y from elsewhere against the bias that its file has.
        draw: add pictures of what fails.
    """

    device: Device
    kernel: "Kernel | None" = None
    with_bias: bool = True
    draw: bool = False


@dataclass(frozen=True)
class Work:
    """How one tensor is verified."""

    setting: Setting
    request: Request
    entry: "PackedEntry"
    array_name: str
    files: OpenFiles
    is_only: bool

    def begin(self) -> Judge:
        """Read what is needed, run it if it is the GPU's y that is judged, and return what judges it."""
        from qcs4w_gpu.verify import judge
        from qcs4w_packer.errors import UsageError
        from qcs4w_packer.packing import source_weight

        request, entry = self.request, self.entry
        source = source_weight(self.files.source(request.source), entry) if request.source else None
        rest: dict[str, Any] = {
            "source": source,
            "method": entry.method,
            "max_quant_error": request.thresholds.of(entry.name),
            "draw": self.setting.draw,
        }
        if request.output is not None:
            if self.setting.kernel is not None:
                raise UsageError(f"{request.output} is judged as it is: no kernel runs, --kernel has no meaning")
            return self._foreign(rest)
        return functools.partial(judge, self._ask(), rounding_factor=self.setting.device.rounding_factor, **rest)

    def _ask(self) -> Any:
        from qcs4w_gpu.linear import plan_for
        from qcs4w_gpu.verify import ask
        from qcs4w_packer.arrays import read_array

        request, entry, gpu, kernel = self.request, self.entry, self.setting.device.gpu, self.setting.kernel
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
            bias=container.bias(entry) if self.setting.with_bias else None,
            file=request.output,
            **rest,
        )

    def reproduce(self, verdict: "Verdict") -> "Reproducer | None":
        """Return the smallest input that fails as this tensor did; None where only the quantization error is too large.

        Args:
            verdict: of this tensor, a failure.
        """
        import numpy as np

        from qcs4w_gpu.linear import as_rows
        from qcs4w_gpu.reproduce import reproduce_kernel, reproduce_output, reproduce_source
        from qcs4w_packer.arrays import pair_output, read_array
        from qcs4w_packer.packing import source_weight

        request, entry = self.request, self.entry
        container = self.files.packed(request.file)
        packed = container.load(entry.name)
        inputs = self.files.source(request.input) if request.input else None
        x = None
        if inputs is not None:
            x = as_rows(read_array(inputs, self.array_name, entry.in_features), entry.in_features)
        if request.output is not None and x is not None and not verdict.bounded.is_match:
            outputs = self.files.source(request.output)
            name = pair_output(container, outputs, entry, self.array_name, is_only=self.is_only)
            bias = container.bias(entry) if self.setting.with_bias else None
            y = read_array(outputs, name).reshape(-1, entry.out_features)
            return reproduce_output(packed, verdict, x=x, y=y, bias=bias)
        if request.output is None and not (verdict.bounded.is_match and verdict.exact and verdict.exact.is_match):
            if x is None:
                draw = np.random.default_rng(request.seed)
                x = draw.standard_normal((request.rows, entry.in_features), np.float32)
            return reproduce_kernel(
                self.setting.device.gpu,
                packed,
                verdict,
                x=x,
                seed=request.seed,
                kernel=self.setting.kernel,
                rounding_factor=self.setting.device.rounding_factor,
            )
        if request.source is not None and verdict.source is not None and not verdict.source.is_match:
            return reproduce_source(packed, source_weight(self.files.source(request.source), entry), entry.method)
        return None
