"""What is told while unpacking goes on: to a progress bar, a log, or nobody."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .narrow import Rounding
from .unpack_files import WeightFile
from .unpack_plan import FloatTensor


@dataclass(frozen=True)
class UnpackedTensor:
    """What became, or in a dry run would become, of packed tensors.

    Attributes:
        tensor: as written.
        file: name of the weight file that holds it; None in a dry run without an output.
        rounding: what rounding to its dtype has cost; None in a dry run.
    """

    tensor: FloatTensor
    file: str | None
    rounding: Rounding | None = None


@dataclass(frozen=True)
class UnpackWatch:
    """Functions that are called while unpacking goes on, in the caller's thread.

    Attributes:
        planned: once, before any work, with the files that will be written.
        step: after each piece, with the bytes just written, those to write in all, and the tensor's name.
        unpacked: after each tensor that was packed.
    """

    planned: Callable[[Sequence[WeightFile]], None] = lambda files: None
    step: Callable[[int, int, str], None] = lambda nbytes, total, name: None
    unpacked: Callable[[UnpackedTensor], None] = lambda tensor: None
