"""verify --sweep: many small shapes, the smallest first, up to the first that does not pass."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .console import describe_error
from .report import error_document
from .report_verdict import SWEEP, verdict_document
from .verify_batch import Shard

if TYPE_CHECKING:
    from qcs4w_gpu import Gpu, Kernel
    from qcs4w_gpu.reproduce import Reproducer
    from qcs4w_gpu.sweep import Shape

    OnFailure = Callable[[Shape, int, Callable[[], Reproducer | None]], None]

Result = dict[str, Any]


@dataclass
class Sweep:
    """A sweep of shapes.

    Attributes:
        gpu: where to run.
        kernel: to judge; by default what the plan chooses.
        seed: of all random numbers.
        shard: the part of the shapes to take.
        on_failure: called with a shape that fails, the seed, and what looks for the smallest input that does so.
    """

    gpu: "Gpu"
    kernel: "Kernel | None"
    seed: int
    shard: Shard
    on_failure: "OnFailure | None" = None
    _in_hand: Result = field(default_factory=dict)

    def results(self) -> Iterator[Result]:
        """Yield the JSON form of a result for each shape, up to the first that does not pass."""
        from qcs4w_gpu.sweep import reproduce_shape, sweep, sweep_shapes

        shapes = [shape for position, shape in enumerate(sweep_shapes()) if self.shard.holds(position)]
        judged = sweep(self.gpu, self.kernel, shapes=shapes, seed=self.seed)
        for shape in shapes:
            self._in_hand = {"file": SWEEP, "tensor": str(shape)}
            try:
                verdict = next(judged)[1]
                result = self._in_hand = self._in_hand | verdict_document(shape, verdict)
                if self.on_failure is not None and verdict.status != "pass":
                    smaller = functools.partial(reproduce_shape, self.gpu, self.kernel, shape, verdict, seed=self.seed)
                    self.on_failure(shape, self.seed, smaller)
            except Exception as error:  # one that nobody foresaw is a result as well, and no end of the batch
                result = self._failed(error)
            self._in_hand = {}
            yield result
            if result["status"] != "pass":
                return

    def abandon(self, error: Exception) -> Iterator[Result]:
        """Yield what is known of the shape that has begun; called while the driver keeps the thread of `results`.

        Args:
            error: why it does not end.
        """
        if self._in_hand:
            yield self._in_hand if "status" in self._in_hand else self._failed(error)

    def _failed(self, error: Exception) -> Result:
        message, hint, code = describe_error(error)
        place = {key: self._in_hand[key] for key in ("file", "tensor")}
        return {**place, "status": "error", **error_document(code, message, hint)}
