"""The dispatcher: one device, its buffers and pipelines, for every kernel, ours or a user's."""

import contextlib
import math
import re
import struct
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qcs4w_packer.closing import Closing

from . import webgpu
from .device import Adapter, choose_adapter, list_adapters
from .errors import DeviceLostError, GpuError, KernelError, LimitError
from .kernel import PARAMS_BINDING, Kernel
from .plan import Facts

# Asked for where the adapter has them: a clock, and what a kernel may enable.
_USEFUL_FEATURES = ("timestamp-query", "shader-f16", "subgroups", "chromium-experimental-subgroup-matrix")
# One large write measured at half the speed of 32 MiB pieces.
_UPLOAD_BYTES = 32 << 20


# The words of wgpu, Dawn and their drivers; a bare "lost" may stand in the text of a kernel that does not compile.
_LOST = re.compile(r"\bdevice\]? (?:is |was )?lost\b", re.IGNORECASE)


@dataclass(frozen=True)
class Watchdog:
    """What happens when a dispatch takes too long: nothing can end it, since the driver waits for it.

    Attributes:
        seconds: that a dispatch may take, compilation included.
        bark: called in a thread of its own with what is running, for people; it may end the process.
    """

    seconds: float
    bark: Callable[[str], None]

    @contextlib.contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """Call `bark` if the block has not ended in time."""
        timer = threading.Timer(self.seconds, self.bark, [what])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()  # a bark that has begun is not disturbed


@dataclass(eq=False)
class Buffer(Closing):
    """A storage buffer on the device; nbytes is a multiple of 4."""

    handle: Any
    nbytes: int
    label: str
    owner: "Gpu"

    def close(self) -> None:
        """Give the memory back; a second time does nothing."""
        if self.handle is not None:
            self.handle.destroy()
            self.handle = None


@dataclass(eq=False)
class Step(Closing):
    """A dispatch made ready on a device: see `Gpu.step`.

    Attributes:
        where: what it is, for messages.
        pipeline, group, params: the implementation's own objects.
        grid: workgroups along x and y.
        buffers: that it reads and writes.
        owner: the device.
    """

    where: str
    pipeline: Any
    group: Any
    params: Any
    grid: tuple[int, int]
    buffers: tuple[Buffer, ...]
    owner: "Gpu"

    def close(self) -> None:
        """Give its Params back; a second time does nothing. It must not be run any more."""
        if self.params is not None:
            self.params.destroy()
            self.params = None


class Gpu(Closing):
    """A WebGPU device. Use it as a context manager.

    Attributes:
        engine: the WebGPU implementation, of which `version` is its name and version.
        adapter: where it runs.
        reason: why that adapter was taken, for people.
        limits: of the device, by WebGPU's names with dashes.
        features: of the device, by WebGPU's names.
        facts: what a choice of kernel depends on.
        watchdog: watches every dispatch; None for none.

    Args:
        adapter: an index or a part of a name, or one of `list_adapters`, of which Dawn opens each once; by default a
            real GPU before a software one.
        engine: "wgpu" or "dawn"; an adapter of `list_adapters` knows its own.
        require_gpu: refuse a software adapter.
        limits: ask for these limits only, in place of all that the adapter has.
        features: ask for these features only, in place of all useful ones that the adapter has.

    Raises:
        MissingEngineError: the engine is not installed.
        NoAdapterError: there is no adapter that fits.
        GpuError: the driver refuses a device, or the adapter lacks a feature.
    """

    def __init__(
        self,
        adapter: str | Adapter | None = None,
        *,
        engine: str = webgpu.DEFAULT_ENGINE,
        require_gpu: bool = False,
        limits: Mapping[str, int] | None = None,
        features: Collection[str] | None = None,
    ):
        self._closed = False
        self.watchdog: Watchdog | None = None
        if isinstance(adapter, Adapter):
            self.engine = webgpu.engine(adapter.engine)
            self.adapter, _ = choose_adapter([adapter], require_gpu=require_gpu)
            self.reason = "given by the program"
        else:
            self.engine = webgpu.engine(engine)
            listed = list_adapters(engine)
            self.adapter, self.reason = choose_adapter(
                listed, adapter, require_gpu=require_gpu, refused=self.engine.refused
            )
        if features is None:
            features = [name for name in _USEFUL_FEATURES if name in self.adapter.features]
        if missing := sorted(set(features) - self.adapter.features):  # wgpu-py would ignore what it does not know
            raise GpuError(f"{self.adapter} does not have {', '.join(missing)}")
        with self._reporting("opening the device"):
            self._device = self.adapter.handle.request_device_sync(
                required_features=self.engine.own_features(features),
                required_limits=dict(limits if limits is not None else _askable(self.adapter.limits)),
            )
        self.limits: dict[str, int] = dict(self._device.limits)
        self.features = self.engine.webgpu_features(self._device.features)
        needed = {"chromium-experimental-subgroup-matrix", "shader-f16", "subgroups"}
        has_matrices = needed <= self.features and self.engine.has_matrices(self.adapter.handle)
        self.facts = Facts(self.adapter.is_software, has_matrices, self.limits)
        self._flags = self.engine.api.BufferUsage
        self._pipelines: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        self._fence = self._device.create_buffer(size=4, usage=self._flags.COPY_SRC)
        self._clocks: dict[int, tuple[Any, Any, float]] = {}
        # The driver sets itself up at the first use, which is no part of anybody's upload.
        self.upload(np.zeros(1, np.float32)).close()
        self.finish()

    def close(self) -> None:
        """Give the device back, with all buffers on it; a second time does nothing."""
        self._closed = True
        self._pipelines.clear()
        self._clocks.clear()
        self._device.destroy()

    def empty(self, nbytes: int, *, label: str = "buffer") -> Buffer:
        """Make a buffer of at least `nbytes` bytes; its content is zero.

        Raises:
            LimitError: it is larger than the device allows.
        """
        size = max(4, -(-nbytes // 4) * 4)
        for limit in ("max-buffer-size", "max-storage-buffer-binding-size"):
            if size > self.limits[limit]:
                raise LimitError(f"{label} needs {size:,} bytes, the device's {limit} is {self.limits[limit]:,}")
        with self._reporting(f"making {label} of {size:,} bytes"):
            usage = self._flags.STORAGE | self._flags.COPY_SRC | self._flags.COPY_DST
            return Buffer(self._device.create_buffer(label=label, size=size, usage=usage), size, label, self)

    def upload(self, array: NDArray[Any], *, label: str = "buffer") -> Buffer:
        """Make a buffer that holds an array's bytes, padded with zeros to a multiple of 4."""
        buffer = self.empty(array.nbytes, label=label)
        self.write(buffer, array)
        return buffer

    def write(self, buffer: Buffer, array: NDArray[Any]) -> None:
        """Write an array's bytes to the start of a buffer.

        Raises:
            GpuError: they do not fit, or the buffer has been freed.
        """
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if data.nbytes % 4:
            data = np.concatenate([data, np.zeros(-data.nbytes % 4, np.uint8)])
        if data.nbytes > buffer.nbytes:
            raise GpuError(f"{data.nbytes:,} bytes do not fit into {buffer.label} of {buffer.nbytes:,} bytes")
        handle = self._handle(buffer)
        with self._reporting("uploading"):
            for start in range(0, data.nbytes, _UPLOAD_BYTES):
                self._device.queue.write_buffer(handle, start, data[start : start + _UPLOAD_BYTES])

    def read(self, buffer: Buffer) -> NDArray[np.uint32]:
        """Read a whole buffer back as 32-bit words; `.view(np.float32)` makes them floats."""
        handle = self._handle(buffer)
        with self._reporting("reading back"):
            return np.frombuffer(self._device.queue.read_buffer(handle), np.uint32).copy()

    def finish(self) -> None:
        """Wait until the device has done everything asked of it."""
        # wgpu-py 0.32 cannot wait (on_submitted_work_done_sync raises TypeError); a read waits for all before it.
        with self._reporting("waiting for the device"):
            self._device.queue.read_buffer(self._fence)

    def dispatch(
        self, kernel: Kernel, buffers: Mapping[int, Buffer], sizes: Mapping[str, int], grid: tuple[int, int]
    ) -> float | None:
        """Run a kernel once and wait for it.

        Args:
            kernel: what to run.
            buffers: by binding, all but the Params.
            sizes: M, N, K, K_packed: the Params.
            grid: workgroups along x and y.

        Returns:
            The kernel's time on the GPU in milliseconds by its own clock, or None where it has none.

        Raises:
            KernelError: it does not compile, asks for more than the device has, or for a buffer that is not given.
            DeviceLostError, GpuError: the driver's own words, with kernel, sizes and adapter.
        """
        with self.step(kernel, buffers, sizes, grid) as step:
            return self.run([[step]])[0]

    def step(
        self, kernel: Kernel, buffers: Mapping[int, Buffer], sizes: Mapping[str, int], grid: tuple[int, int]
    ) -> "Step":
        """Make a dispatch ready, to be run as often as one likes; arguments and errors as for `dispatch`."""
        missing = sorted(kernel.bindings.keys() - buffers.keys() - {PARAMS_BINDING})
        if missing:
            raise KernelError(f"kernel '{kernel.name}' has a binding {missing[0]} that no buffer is given for")
        bound = {index: (self._handle(buffer), buffer.nbytes) for index, buffer in buffers.items()}
        where = f"kernel '{kernel.name}' ({', '.join(f'{k} {v}' for k, v in sizes.items())})"
        with self._watching(where):
            pipeline, layout = self._pipeline(kernel)
        with self._reporting(where):
            params = self._device.create_buffer(size=16, usage=self._flags.UNIFORM | self._flags.COPY_DST)
            words = struct.pack("<4I", *(sizes[name] for name in ("M", "N", "K", "K_packed")))
            self._device.queue.write_buffer(params, 0, words)  # wgpudawn maps buffers of a lost device, and crashes
            bound[PARAMS_BINDING] = (params, 16)
            group = self._device.create_bind_group(
                layout=layout,
                entries=[
                    {"binding": i, "resource": {"buffer": bound[i][0], "offset": 0, "size": bound[i][1]}}
                    for i in kernel.bindings
                ],
            )
        return Step(where, pipeline, group, params, grid, tuple(buffers.values()), self)

    def run(self, passes: Sequence[Sequence["Step"]]) -> list[float | None]:
        """Run passes of steps in one submission, one after another, and wait for them.

        Args:
            passes: each a line of steps; what one writes, the next may read.

        Returns:
            The time of each pass on the GPU in milliseconds by its own clock, or None where it has none.

        Raises:
            DeviceLostError, GpuError: the driver's own words, with kernel, sizes and adapter.
        """
        where = "; ".join(dict.fromkeys(step.where for steps in passes for step in steps))
        for step in (step for steps in passes for step in steps):
            if step.owner is not self:
                raise GpuError(f"{step.where} belongs to another device")
            for buffer in step.buffers:
                self._handle(buffer)
        with self._watching(where), self._reporting(where):
            clock = self._clock_of(len(passes)) if "timestamp-query" in self.features else None
            encoder = self._device.create_command_encoder()
            for index, steps in enumerate(passes):
                stamps = None
                if clock:
                    stamps = {
                        "query_set": clock[0],
                        "beginning_of_pass_write_index": 2 * index,
                        "end_of_pass_write_index": 2 * index + 1,
                    }
                compute = encoder.begin_compute_pass(timestamp_writes=stamps)
                for step in steps:
                    compute.set_pipeline(step.pipeline)
                    compute.set_bind_group(0, step.group)
                    compute.dispatch_workgroups(*step.grid, 1)
                compute.end()
            if clock:
                encoder.resolve_query_set(clock[0], 0, 2 * len(passes), clock[1], 0)
            self._device.queue.submit([encoder.finish()])
            if not clock:
                self._device.queue.read_buffer(self._fence)
                return [None] * len(passes)
            ticks = np.frombuffer(self._device.queue.read_buffer(clock[1]), np.uint64).reshape(-1, 2)
            return [float(int(end) - int(begin)) * clock[2] / 1e6 if end > begin else None for begin, end in ticks]

    def _watching(self, where: str) -> contextlib.AbstractContextManager[None]:
        """Let the watchdog, if there is one, watch a block."""
        return self.watchdog.watching(where) if self.watchdog else contextlib.nullcontext()

    def _clock_of(self, passes: int) -> tuple[Any, Any, float]:
        """Return the queries for a number of passes, the buffer that they end in, and nanoseconds per tick."""
        if passes not in self._clocks:
            self._clocks[passes] = (
                self._device.create_query_set(type="timestamp", count=2 * passes),
                self._device.create_buffer(size=16 * passes, usage=self._flags.QUERY_RESOLVE | self._flags.COPY_SRC),
                self.engine.timestamp_period_ns(self._device.queue),
            )
        return self._clocks[passes]

    def compile(self, kernel: Kernel) -> None:
        """Compile a kernel, as its first dispatch would.

        Raises:
            KernelError: it does not compile, or asks for more than the device has.
        """
        self._pipeline(kernel)

    def _pipeline(self, kernel: Kernel) -> tuple[Any, Any]:
        """Return a kernel's pipeline and layout, made once per kernel text and defined constants."""
        key = (kernel.source, tuple(sorted(kernel.defines.items())))
        if key not in self._pipelines:
            self._check_needs(kernel)
            with self._reporting(f"kernel '{kernel.name}' does not compile", KernelError):
                module = self._device.create_shader_module(label=kernel.name, code=self.engine.own_wgsl(kernel.source))
                layout = self._device.create_bind_group_layout(
                    entries=[
                        {
                            "binding": index,
                            "visibility": self.engine.api.ShaderStage.COMPUTE,
                            "buffer": {"type": kind},
                        }
                        for index, kind in kernel.bindings.items()
                    ]
                )
                pipeline = self._device.create_compute_pipeline(
                    layout=self._device.create_pipeline_layout(bind_group_layouts=[layout]),
                    compute={
                        "module": module,
                        "entry_point": kernel.entry_point,
                        "constants": dict(kernel.defines),
                    },
                )
            self._pipelines[key] = (pipeline, layout)
        return self._pipelines[key]

    def _check_needs(self, kernel: Kernel) -> None:
        """Refuse what the device has not; wgpu checks no workgroup memory, and names no missing feature."""
        for feature in sorted(kernel.features - self.features):
            raise KernelError(
                f"kernel '{kernel.name}' needs the feature {feature}, which {self.adapter} does not have",
                hint="qcs4w devices lists the features of each adapter",
            )
        for limit, wanted in (
            ("max-compute-invocations-per-workgroup", math.prod(kernel.workgroup_size)),
            ("max-compute-workgroup-storage-size", kernel.workgroup_nbytes),
        ):
            if wanted > self.limits[limit]:
                raise KernelError(
                    f"kernel '{kernel.name}' asks for {wanted:,}, "
                    f"the device's {limit} is {self.limits[limit]:,} ({self.adapter.name})"
                )

    def _handle(self, buffer: Buffer) -> Any:
        """Return a live buffer of this device; handing on any other makes the implementation end the process."""
        if buffer.handle is None:
            raise GpuError(f"{buffer.label} has been freed")
        if buffer.owner is not self:
            raise GpuError(f"{buffer.label} belongs to another device")
        return buffer.handle

    @contextlib.contextmanager
    def _reporting(self, doing: str, kind: type[GpuError] = GpuError) -> Iterator[None]:
        """Turn whatever the implementation reports into one error that says what was being done, and where."""
        if self._closed:
            raise GpuError(f"{doing}: the device has been closed")
        message = ""
        try:
            yield
        except self.engine.call_errors() as error:
            message = str(error) or type(error).__name__
            # wgpudawn's error and its frames hold each other; the collector that parts them crashes on their buffers.
            traceback.clear_frames(error.__traceback__)
        # Also what came between calls: an error may be late, but is never ignored.
        reported = self.engine.take_reported()
        message = message or "\n".join(reported)
        if message:
            lost = bool(_LOST.search(message))
            hint = "a watchdog may have ended a long kernel; try fewer rows" if lost else None
            raise (DeviceLostError if lost else kind)(f"{doing} on {self.adapter}: {message.strip()}", hint=hint)


def _askable(limits: Mapping[str, int]) -> dict[str, int]:
    """Return the adapter's limits that compute work needs; asking for all of them trips over native-only ones."""
    wanted = (
        "max-buffer-size",
        "max-storage-buffer-binding-size",
        "max-compute-workgroup-storage-size",
        "max-compute-invocations-per-workgroup",
        "max-compute-workgroup-size-x",
        "max-compute-workgroup-size-y",
        "max-compute-workgroup-size-z",
        "max-compute-workgroups-per-dimension",
    )
    return {name: limits[name] for name in wanted if name in limits}


def elapsed_ms(start: float) -> float:
    """Return milliseconds since a time.perf_counter() reading."""
    return (time.perf_counter() - start) * 1e3
