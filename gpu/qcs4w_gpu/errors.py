"""What can go wrong on the GPU's side, as types."""

from qcs4w_packer.errors import Qcs4wError


class GpuError(Qcs4wError):
    """Raised when the driver or the WebGPU implementation reports an error; keeps its text."""

    code = "gpu"


class MissingEngineError(GpuError):
    """Raised when a WebGPU implementation is asked for that is not installed."""

    code = "no_engine"


class NoAdapterError(GpuError):
    """Raised when there is no WebGPU adapter, or none that fits what was asked for."""

    code = "no_adapter"


class LimitError(GpuError):
    """Raised when a shape needs more than the device allows; names the limit."""

    code = "limit"


class PrecisionError(GpuError):
    """Raised when a precision is asked for that the device cannot give."""

    code = "precision"


class KernelError(GpuError):
    """Raised when a kernel file does not keep the contract, or does not compile."""

    code = "kernel"


class KernelTimeoutError(GpuError):
    """Raised when a dispatch has not ended in the time that it was given."""

    code = "timeout"


class NotReachedError(GpuError):
    """Raised for what was still to be done when a dispatch did not end."""

    code = "not_reached"


class DeviceLostError(GpuError):
    """Raised when the device has gone away, for example because a watchdog ended it."""

    code = "device_lost"


class DomainError(Qcs4wError):
    """Raised when an input leaves the domain in which a float32 answer can be judged."""

    code = "domain"
