"""The one place that knows the WebGPU implementations. Nothing else imports one.

Two are served, side by side in one process: wgpu (wgpu-native, whose WGSL compiler is naga) and dawn (Chrome's and
ExecuTorch's, whose compiler is Tint). wgpudawn has wgpu-py's API, so that what differs fits into this module.
"""

import contextlib
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

from .errors import MissingEngineError
from .native_stderr import captured_stderr

#: The engines by name, and the module and backend that each is.
_MODULES = {"wgpu": ("wgpu", "wgpu_native"), "dawn": ("wgpudawn", "dawn")}
ENGINES = tuple(_MODULES)
DEFAULT_ENGINE = "wgpu"

# wgpu-py's names for features, by WebGPU's own.
_WGPU_FEATURES = {"subgroups": "subgroup"}
# Dawn's words for an adapter that it will not take.
_REFUSAL = re.compile(r"Warning: (.+)\n - While initializing adapter ")
_ENABLE = re.compile(r"\benable\s+([\w\s,]*);")


class _Collect(logging.Handler):
    """Keeps what an implementation reports outside of any call: validation errors, a lost device."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@dataclass(frozen=True, eq=False)
class Engine:
    """One WebGPU implementation.

    Attributes:
        name: "wgpu" or "dawn".
        api: its module, with wgpu-py's API.
        version: its name and version.
        refused: why it did not take an adapter that the machine has, in its own words; known once adapters are listed.
    """

    name: str
    api: Any
    version: str
    _collected: _Collect
    refused: list[str] = field(default_factory=list)

    def adapters(self) -> list[Any]:
        """Return the implementation's own adapter objects, in its order."""
        if self.name != "dawn":
            return list(self.api.gpu.enumerate_adapters_sync())
        # Only there Dawn says why it refuses an adapter; what else it prints repeats that there is none.
        with captured_stderr() as printed:
            found = list(self.api.gpu.enumerate_adapters_sync())
        reasons = (reason.rstrip(".") for reason in _REFUSAL.findall(printed.text))
        self.refused.extend(reason for reason in reasons if reason not in self.refused)
        return found

    def call_errors(self) -> tuple[type[BaseException], ...]:
        """Return the exceptions with which a call of the implementation may fail."""
        return (self.api.GPUError, self.api.GPUPipelineError, RuntimeError)

    def take_reported(self) -> list[str]:
        """Return what has been reported outside of calls since the last time, and forget it."""
        taken = list(self._collected.messages)
        self._collected.messages.clear()
        return taken

    def timestamp_period_ns(self, queue: Any) -> float:
        """Return nanoseconds per tick of a timestamp query; wgpu hands out raw ticks, Dawn nanoseconds."""
        if self.name == "dawn":
            return 1.0
        from wgpu.backends.wgpu_native._ffi import lib  # no public way in wgpu-py 0.32

        return float(lib.wgpuQueueGetTimestampPeriod(queue._internal))

    def has_matrices(self, handle: Any) -> bool:
        """Whether an adapter multiplies 16 x 16 matrices of f16 into f32, always 32 invocations together."""
        if self.name != "dawn" or "chromium-experimental-subgroup-matrix" not in handle.features:
            return False
        from wgpudawn.backends.dawn import extras

        wanted = {"component_type": "f16", "result_component_type": "f32", "m": 16, "n": 16, "k": 16}
        wanted |= {"min_subgroup_size": 32, "max_subgroup_size": 32}
        return wanted in extras.get_adapter_properties(handle).get("subgroup_matrix_configs", ())

    def webgpu_features(self, features: Iterable[str]) -> frozenset[str]:
        """Return the features of an adapter or a device by WebGPU's names."""
        ours = {theirs: ours for ours, theirs in _WGPU_FEATURES.items()} if self.name == "wgpu" else {}
        return frozenset(ours.get(name, name) for name in features)

    def own_features(self, features: Iterable[str]) -> list[str]:
        """Return features by the names that the implementation asks for."""
        return [_WGPU_FEATURES.get(name, name) if self.name == "wgpu" else name for name in features]

    def own_wgsl(self, source: str) -> str:
        """Return a kernel's text as the implementation's compiler reads it.

        naga does not know the line `enable subgroups;` though it has what that enables: there it becomes spaces, so
        that line and column of an error stay right. Everything else is left as it is.
        """
        return _without_subgroups(source) if self.name == "wgpu" else source


@cache
def engine(name: str = DEFAULT_ENGINE) -> Engine:
    """Import an implementation and set it up once.

    Raises:
        MissingEngineError: there is none of that name, or it is not installed.
    """
    if name not in _MODULES:
        raise MissingEngineError(f"there is no engine '{name}'", hint=f"the engines are {', '.join(ENGINES)}")
    module, backend = _MODULES[name]
    _quiet_mesa()
    try:
        api = import_module(module)
        extras = import_module(f"{module}.backends.{backend}.extras")
    except (ImportError, OSError) as error:  # OSError: its native library does not load on this machine
        hint = "pip install 'qcs4w[dawn]'" if name == "dawn" else "pip install wgpu"
        missing = isinstance(error, ModuleNotFoundError) and error.name == module
        said = "is not installed" if missing else f"cannot be loaded: {error}"
        raise MissingEngineError(f"the engine '{name}' {said}", hint=hint) from None
    # OpenGL adapters double the Vulkan ones, hold less, and their loader prints to stderr.
    given: dict[str, Any] = {"backends": ["Vulkan", "Metal"]}
    if name == "dawn":
        given["disable_toggles"] = ["timestamp_quantization"]  # to 0.1 ms: a page's protection from other pages
        # What Dawn keeps from web pages: subgroup matrices, and f16 where NVIDIA's Vulkan driver has it.
        given["enable_toggles"] = ["allow_unsafe_apis", "vulkan_enable_f16_on_nvidia"]
    with contextlib.suppress(RuntimeError):  # the program has an instance already: it is taken as it is
        extras.set_instance_extras(**given)
    logger = logging.getLogger(module)
    collected = _Collect()
    logger.addHandler(collected)
    logger.propagate = False
    return Engine(name, api, f"{name} {api.__version__}", collected)


def _without_subgroups(source: str) -> str:
    """Take `subgroups` out of what a text enables; every other character keeps its line and column."""

    def rewritten(directive: re.Match[str]) -> str:
        names = [name.strip() for name in directive[1].split(",")]
        kept = [name for name in names if name and name != "subgroups"]
        if "subgroups" not in names:
            return directive[0]
        text = f"enable {', '.join(kept)};" if kept else ""
        lines = directive[0].count("\n")  # a directive over several lines keeps these, if not the columns of its last
        return text + "\n" * lines if lines else text.ljust(len(directive[0]))

    return _ENABLE.sub(rewritten, source)


def _quiet_mesa() -> None:
    """Switch off Mesa's device-select layer where there is no desktop.

    It looks for a Wayland session, and prints an error to stderr for every try. With a desktop, or where the user
    steers it by its own variable, it stays on.
    """
    if "XDG_RUNTIME_DIR" not in os.environ and "MESA_VK_DEVICE_SELECT" not in os.environ:
        os.environ.setdefault("NODEVICE_SELECT", "1")
