"""The adapters of this machine, and which one is taken."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from . import webgpu
from .errors import NoAdapterError

# A real GPU before a software one. The words are wgpu-py's.
_KINDS = {
    "DiscreteGPU": "discrete GPU",
    "IntegratedGPU": "integrated GPU",
    "VirtualGPU": "virtual GPU",
    "Unknown": "unknown",
    "CPU": "software",
}
_INSTALL_HINT = (
    "install a Vulkan driver: your GPU vendor's, or Mesa's software driver: "
    "'apt-get install mesa-vulkan-drivers' (Debian, Ubuntu), 'dnf install mesa-vulkan-drivers' (Fedora)"
)
_REFUSED_HINT = (
    "take --engine wgpu, or a driver that it does take: your GPU vendor's, a newer Mesa (Debian 12's is too old), or "
    "SwiftShader, which comes with Chromium: VK_DRIVER_FILES=/usr/lib/chromium/vk_swiftshader_icd.json"
)


@dataclass(frozen=True)
class Adapter:
    """One WebGPU adapter.

    Attributes:
        index: its number, as `--adapter` takes it.
        name: of the device.
        kind: "discrete GPU", "integrated GPU", "virtual GPU", "unknown" or "software".
        backend: Vulkan or Metal.
        driver: the driver's own words.
        limits: by WebGPU's names with dashes.
        features: WebGPU's names.
        engine: the implementation that found it.
        handle: the implementation's own object.
    """

    index: int
    name: str
    kind: str
    backend: str
    driver: str
    limits: dict[str, int] = field(repr=False)
    features: frozenset[str] = field(repr=False)
    handle: Any = field(repr=False, compare=False, default=None)
    engine: str = webgpu.DEFAULT_ENGINE

    @property
    def is_software(self) -> bool:
        """Whether it computes on the CPU."""
        return self.kind == "software"

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}, {self.backend}, {self.driver or 'unknown driver'})"


def list_adapters(engine: str = webgpu.DEFAULT_ENGINE) -> list[Adapter]:
    """Return every adapter that a WebGPU implementation finds, in its order.

    Raises:
        MissingEngineError: the implementation is not installed.
        NoAdapterError: looking for adapters failed.
    """
    found_by = webgpu.engine(engine)
    try:
        found = found_by.adapters()
    except found_by.call_errors() as error:
        raise NoAdapterError(f"looking for WebGPU adapters failed: {error}", hint=_INSTALL_HINT) from None
    return [describe_adapter(found_by, index, handle) for index, handle in enumerate(found)]


def describe_adapter(engine: webgpu.Engine, index: int, handle: Any) -> Adapter:
    """Return what there is to know of an implementation's adapter object."""
    return Adapter(
        index=index,
        name=handle.info["device"],
        kind=_KINDS.get(handle.info["adapter_type"], "unknown"),
        backend=handle.info["backend_type"],
        driver=handle.info["description"],
        limits=dict(handle.limits),
        features=engine.webgpu_features(handle.features),
        handle=handle,
        engine=engine.name,
    )


def choose_adapter(
    adapters: Sequence[Adapter],
    wanted: str | None = None,
    *,
    require_gpu: bool = False,
    refused: Sequence[str] = (),
) -> tuple[Adapter, str]:
    """Choose an adapter.

    Args:
        adapters: what there is.
        wanted: an index or a part of a name; None leaves the choice to us.
        require_gpu: refuse a software adapter.
        refused: why the implementation did not take others, in its own words.

    Returns:
        The adapter, and why it was taken, for people.

    Raises:
        NoAdapterError: there is none, none of that name, or only a software one where a GPU is required.
    """
    if not adapters and refused:
        raise NoAdapterError(f"there is a driver, but the engine refuses it: {'; '.join(refused)}", hint=_REFUSED_HINT)
    if not adapters:
        raise NoAdapterError("there is no WebGPU adapter on this machine", hint=_INSTALL_HINT)
    listed = "; ".join(f"{a.index}: {a.name} ({a.kind})" for a in adapters)
    fitting = list(adapters)
    if wanted is not None:
        if wanted.isdecimal() and len(wanted) < 3:  # "4090" is no index, but a part of a name
            fitting = [a for a in adapters if a.index == int(wanted)]
        else:
            fitting = [a for a in adapters if wanted.casefold() in f"{a.name} {a.driver}".casefold()]
        if not fitting:
            raise NoAdapterError(f"no adapter '{wanted}'", hint=f"there are {listed}")
    order = list(_KINDS.values())
    taken = min(fitting, key=lambda a: order.index(a.kind))
    if require_gpu and taken.is_software:
        raise NoAdapterError(
            f"a GPU is required, but {taken.name} computes on the CPU", hint=f"adapters found: {listed}"
        )
    if wanted is not None:
        reason = f"asked for as '{wanted}'" + (f", the best of {len(fitting)} that fit" if len(fitting) > 1 else "")
    elif len(adapters) == 1:
        reason = "the only adapter"
    else:
        reason = f"a {taken.kind} comes first among {len(adapters)} adapters"
    return taken, reason
