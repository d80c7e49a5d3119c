"""The one place that knows which WebGPU implementation is used. Nothing else imports it."""

import contextlib
import logging
import os
from functools import cache
from typing import Any

ENGINE = "wgpu"

_reported: list[str] = []


class _Collect(logging.Handler):
    """Keeps what the implementation reports outside of any call: validation errors, a lost device."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            _reported.append(record.getMessage())


@cache
def engine() -> Any:
    """Import wgpu and set it up once."""
    import wgpu
    from wgpu.backends.wgpu_native import extras

    # OpenGL adapters double the Vulkan ones, hold less, and their loader prints to stderr.
    _quiet_mesa()
    with contextlib.suppress(RuntimeError):  # the program has an instance already: it is taken as it is
        extras.set_instance_extras(backends=["Vulkan", "Metal"])
    logger = logging.getLogger("wgpu")
    logger.addHandler(_Collect())
    logger.propagate = False
    return wgpu


def _quiet_mesa() -> None:
    """Switch off Mesa's device-select layer where there is no desktop.

    It looks for a Wayland session, and prints an error to stderr for every try. With a desktop, or where the user
    steers it by its own variable, it stays on.
    """
    if "XDG_RUNTIME_DIR" not in os.environ and "MESA_VK_DEVICE_SELECT" not in os.environ:
        os.environ.setdefault("NODEVICE_SELECT", "1")


def engine_version() -> str:
    """Return the implementation's name and version."""
    return f"{ENGINE} {engine().__version__}"


def call_errors() -> tuple[type[BaseException], ...]:
    """Return the exceptions with which a call of the implementation may fail."""
    wgpu = engine()
    return (wgpu.GPUError, wgpu.GPUPipelineError, RuntimeError)


def take_reported() -> list[str]:
    """Return what has been reported outside of calls since the last time, and forget it."""
    taken = list(_reported)
    _reported.clear()
    return taken


def timestamp_period_ns(queue: Any) -> float:
    """Return nanoseconds per tick of a timestamp query; wgpu hands out raw ticks."""
    from wgpu.backends.wgpu_native._ffi import lib  # no public way in wgpu-py 0.32

    return float(lib.wgpuQueueGetTimestampPeriod(queue._internal))
