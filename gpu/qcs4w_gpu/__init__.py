"""qcs4w_gpu: a packed linear on any WebGPU adapter, and the judge of what it computes.

Knows neither the command line nor the terminal. Public names are listed here once.
"""

from .causes import Cause
from .device import Adapter, choose_adapter, list_adapters
from .dispatcher import Gpu, Step, Watchdog
from .errors import (
    DeviceLostError,
    DomainError,
    GpuError,
    KernelError,
    KernelTimeoutError,
    LimitError,
    MissingEngineError,
    NoAdapterError,
    NotReachedError,
    PrecisionError,
)
from .foreign import judge_output
from .judge import Comparison, compare, oracle, reference
from .kernel import (
    FAST_KERNELS,
    LINEAR_KERNELS,
    TINT_KERNELS,
    Kernel,
    KernelSettings,
    parse_kernel,
    read_kernel,
    shipped_kernel,
)
from .linear import Linear, Prepared, Run, Timing
from .plan import PRECISIONS, Choice, Facts, Plan, Precision, choose_kernel, plan_linear
from .vector_files import write_vectors
from .vectors import Vector, make_vector
from .verify import SourceCheck, Verdict, check_source, verify

__all__ = [
    "FAST_KERNELS",
    "LINEAR_KERNELS",
    "PRECISIONS",
    "TINT_KERNELS",
    "Adapter",
    "Cause",
    "Choice",
    "Comparison",
    "DeviceLostError",
    "DomainError",
    "Facts",
    "Gpu",
    "GpuError",
    "Kernel",
    "KernelError",
    "KernelSettings",
    "KernelTimeoutError",
    "LimitError",
    "Linear",
    "MissingEngineError",
    "NoAdapterError",
    "NotReachedError",
    "Plan",
    "Precision",
    "PrecisionError",
    "Prepared",
    "Run",
    "SourceCheck",
    "Step",
    "Timing",
    "Vector",
    "Verdict",
    "Watchdog",
    "check_source",
    "choose_adapter",
    "choose_kernel",
    "compare",
    "judge_output",
    "list_adapters",
    "make_vector",
    "oracle",
    "parse_kernel",
    "plan_linear",
    "read_kernel",
    "reference",
    "shipped_kernel",
    "verify",
    "write_vectors",
]
