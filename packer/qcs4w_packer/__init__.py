"""qcs4w_packer: weight files -> float matrices -> signed 4-bit codes -> bytes -> container.

Imports neither WebGPU nor the command line. Public names are listed here once.
"""

from ._version import __version__
from .blob_file import Blob
from .container import Container, load_packed
from .container_writer import save_container
from .diff_files import FileDiff, diff_files
from .errors import (
    CodeRangeError,
    ContainerError,
    DigestError,
    LossyError,
    NonFiniteError,
    OutputError,
    Qcs4wError,
    SelectionError,
    SourceError,
    UnknownTensorError,
    UnsafePickleError,
    UsageError,
)
from .measure import QuantizationError
from .metadata import PackedEntry
from .nibbles import LAYOUTS, Layout, pack_codes, unpack_codes
from .pack_finish import finish
from .pack_plan import PackPlan, PlannedShard, plan_pack
from .pack_shard import pack_shard
from .pack_watch import PackedTensor, Step, Tally, Watch
from .packed import PackedLinear
from .packed_file import PackedFile
from .packed_folder import PackedFolder
from .packed_sources import open_packed
from .packing import PackReport, pack_file
from .pte_call import PteCall, PteConstant
from .pte_file import PteFile
from .quantize import dequantize, quantize
from .readings import Reading, readings
from .request import Request
from .rowpack import pack_weight
from .sources import open_source
from .unpack import UnpackReport, unpack_file
from .unpack_plan import UnpackRequest
from .work_folder import WorkFolder

__all__ = [
    "LAYOUTS",
    "Blob",
    "CodeRangeError",
    "Container",
    "ContainerError",
    "DigestError",
    "FileDiff",
    "Layout",
    "LossyError",
    "NonFiniteError",
    "OutputError",
    "PackPlan",
    "PackReport",
    "PackedEntry",
    "PackedFile",
    "PackedFolder",
    "PackedLinear",
    "PackedTensor",
    "PlannedShard",
    "PteCall",
    "PteConstant",
    "PteFile",
    "Qcs4wError",
    "QuantizationError",
    "Reading",
    "Request",
    "SelectionError",
    "SourceError",
    "Step",
    "Tally",
    "UnknownTensorError",
    "UnpackReport",
    "UnpackRequest",
    "UnsafePickleError",
    "UsageError",
    "Watch",
    "WorkFolder",
    "__version__",
    "dequantize",
    "diff_files",
    "finish",
    "load_packed",
    "open_packed",
    "open_source",
    "pack_codes",
    "pack_file",
    "pack_shard",
    "pack_weight",
    "plan_pack",
    "quantize",
    "readings",
    "save_container",
    "unpack_codes",
    "unpack_file",
]
