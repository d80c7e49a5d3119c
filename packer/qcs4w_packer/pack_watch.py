"""What is told while packing goes on: to a progress bar, a log, or nobody."""

from collections.abc import Callable
from dataclasses import dataclass

from .measure import QuantizationError
from .metadata import PackedEntry
from .pack_plan import PackPlan
from .targets import EXECUTORCH_WEBGPU


@dataclass(frozen=True)
class PackedTensor:
    """What became, or in a dry run would become, of one tensor.

    Attributes:
        entry: as written to the container; aliases name the tied tensors.
        reason: why it was chosen.
        source_nbytes: bytes of the float weight.
        error: against the float source; None in a dry run.
        floored_rows: rows whose scale met the floor though they are not all zero: they lost precision or vanished.
        shard: name of the file that holds it.
        resumed: an earlier run had finished it.
    """

    entry: PackedEntry
    reason: str
    source_nbytes: int
    error: QuantizationError | None = None
    floored_rows: int = 0
    shard: str = ""
    resumed: bool = False

    @property
    def warnings(self) -> list[str]:
        """What the user should know about it."""
        found = []
        if self.floored_rows:
            rows = f"{self.floored_rows} row{'s' if self.floored_rows > 1 else ''}"
            found.append(f"{rows} below absmax 8.9e-7 met the scale floor and lost precision")
        refused = self.entry.executorch_refusals
        return found + [f"{EXECUTORCH_WEBGPU.title} will refuse it: {refusal.fault}" for refusal in refused]


@dataclass(frozen=True)
class Step:
    """A piece of work that is done.

    Attributes:
        tensor: its name in the source.
        shard: name of the file that it goes into.
        nbytes: bytes of source just done.
        done: bytes of source done by this run so far.
        total: bytes of source that this run has to do; less once it is known what an earlier run has finished.
    """

    tensor: str
    shard: str
    nbytes: int
    done: int
    total: int


@dataclass(frozen=True)
class Watch:
    """Functions that are called while packing goes on, in the caller's thread.

    Attributes:
        planned: once, before any work.
        step: after each piece of a tensor.
        packed: after each tensor that is packed, also for one that an earlier run had finished.
        note: what the user should know: what was resumed, what starts clean and why, what was kept.
    """

    planned: Callable[[PackPlan], None] = lambda plan: None
    step: Callable[[Step], None] = lambda step: None
    packed: Callable[[PackedTensor], None] = lambda tensor: None
    note: Callable[[str], None] = lambda text: None


class Tally:
    """Counts bytes of source for one `Watch`."""

    def __init__(self, watch: Watch, total: int):
        self.watch, self._total = watch, total
        self._done = 0

    def advance(self, nbytes: int, tensor: str, shard: str) -> None:
        """Tell a piece of work."""
        self._done += nbytes
        self.watch.step(Step(tensor, shard, nbytes, self._done, self._total))

    def skip(self, nbytes: int) -> None:
        """Take out what need not be done again."""
        self._total -= nbytes
