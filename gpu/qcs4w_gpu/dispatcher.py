"""The dispatcher: one device, its buffers and pipelines, for every kernel, ours or a user's."""

import contextlib
import math
import re
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qcs4w_packer.closing import Closing

from . import webgpu
from .device import choose_adapter, list_adapters
from .errors import DeviceLostError, GpuError, KernelError, LimitError
from .kernel import PARAMS_BINDING, Kernel

_USEFUL_FEATURES = ("timestamp-query",)
# One large write measured at half the speed of 32 MiB pieces.
_UPLOAD_BYTES = 32 << 20


# The words of wgpu and of its drivers; a bare "lost" may stand in the text of a kernel that does not compile.
_LOST = re.compile(r"\bdevice (?:is |was )?lost\b", re.IGNORECASE)


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


class Gpu(Closing):
    """A WebGPU device. Use it as a context manager.

    Attributes:
        adapter: where it runs.
        reason: why that adapter was taken, for people.
        limits: of the device, by WebGPU's names with dashes.

    Args:
        adapter: an index or a part of a name; by default a real GPU before a software one.
        require_gpu: refuse a software adapter.
        limits: ask for these limits only, in place of all that the adapter has.

    Raises:
        NoAdapterError: there is no adapter that fits.
        GpuError: the driver refuses a device.
    """

    def __init__(
        self,
        adapter: str | None = None,
        *,
        require_gpu: bool = False,
        limits: Mapping[str, int] | None = None,
    ):
        self._closed = False
        self.adapter, self.reason = choose_adapter(list_adapters(), adapter, require_gpu=require_gpu)
        with self._reporting("opening the device"):
            self._device = self.adapter.handle.request_device_sync(
                required_features=[f for f in _USEFUL_FEATURES if f in self.adapter.features],
                required_limits=dict(limits if limits is not None else _askable(self.adapter.limits)),
            )
        self.limits: dict[str, int] = dict(self._device.limits)
        self._flags = webgpu.engine().BufferUsage
        self._pipelines: dict[str, tuple[Any, Any]] = {}
        self._fence = self._device.create_buffer(size=4, usage=self._flags.COPY_SRC)
        self._clock: tuple[Any, Any, float] | None = None
        # The driver sets itself up at the first use, which is no part of anybody's upload.
        self.upload(np.zeros(1, np.float32)).close()
        self.finish()
        if "timestamp-query" in self._device.features:
            self._clock = (
                self._device.create_query_set(type="timestamp", count=2),
                self._device.create_buffer(size=16, usage=self._flags.QUERY_RESOLVE | self._flags.COPY_SRC),
                webgpu.timestamp_period_ns(self._device.queue),
            )

    def close(self) -> None:
        """Give the device back, with all buffers on it; a second time does nothing."""
        self._closed = True
        self._pipelines.clear()
        self._clock = None
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
        where = f"kernel '{kernel.name}' ({', '.join(f'{k} {v}' for k, v in sizes.items())})"
        missing = sorted(kernel.bindings.keys() - buffers.keys() - {PARAMS_BINDING})
        if missing:
            raise KernelError(f"kernel '{kernel.name}' has a binding {missing[0]} that no buffer is given for")
        bound = {index: (self._handle(buffer), buffer.nbytes) for index, buffer in buffers.items()}
        pipeline, layout = self._pipeline(kernel)
        with self._reporting(where):
            params = self._device.create_buffer_with_data(
                data=struct.pack("<4I", *(sizes[name] for name in ("M", "N", "K", "K_packed"))),
                usage=self._flags.UNIFORM,
            )
            bound[PARAMS_BINDING] = (params, 16)
            group = self._device.create_bind_group(
                layout=layout,
                entries=[
                    {"binding": i, "resource": {"buffer": bound[i][0], "offset": 0, "size": bound[i][1]}}
                    for i in kernel.bindings
                ],
            )
            encoder = self._device.create_command_encoder()
            stamps = None
            if self._clock:
                stamps = {
                    "query_set": self._clock[0],
                    "beginning_of_pass_write_index": 0,
                    "end_of_pass_write_index": 1,
                }
            compute = encoder.begin_compute_pass(timestamp_writes=stamps)
            compute.set_pipeline(pipeline)
            compute.set_bind_group(0, group)
            compute.dispatch_workgroups(*grid, 1)
            compute.end()
            if self._clock:
                encoder.resolve_query_set(self._clock[0], 0, 2, self._clock[1], 0)
            self._device.queue.submit([encoder.finish()])
            if not self._clock:
                self._device.queue.read_buffer(self._fence)
                return None
            begin, end = np.frombuffer(self._device.queue.read_buffer(self._clock[1]), np.uint64)
            return float(int(end) - int(begin)) * self._clock[2] / 1e6 if end > begin else None

    def _pipeline(self, kernel: Kernel) -> tuple[Any, Any]:
        """Return a kernel's pipeline and layout, made once per kernel text."""
        if kernel.source not in self._pipelines:
            self._check_workgroup(kernel)
            with self._reporting(f"kernel '{kernel.name}' does not compile", KernelError):
                module = self._device.create_shader_module(label=kernel.name, code=kernel.source)
                layout = self._device.create_bind_group_layout(
                    entries=[
                        {
                            "binding": index,
                            "visibility": webgpu.engine().ShaderStage.COMPUTE,
                            "buffer": {"type": kind},
                        }
                        for index, kind in kernel.bindings.items()
                    ]
                )
                pipeline = self._device.create_compute_pipeline(
                    layout=self._device.create_pipeline_layout(bind_group_layouts=[layout]),
                    compute={"module": module, "entry_point": kernel.entry_point},
                )
            self._pipelines[kernel.source] = (pipeline, layout)
        return self._pipelines[kernel.source]

    def _check_workgroup(self, kernel: Kernel) -> None:
        """Refuse what the device cannot hold; the implementation does not check workgroup memory."""
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
        except webgpu.call_errors() as error:
            message = str(error) or type(error).__name__
        reported = webgpu.take_reported()  # also what came between calls: an error may be late, but is never ignored
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
