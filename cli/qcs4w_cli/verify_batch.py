"""verify: many files and tensors, one after another; what cannot be checked is a result too."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import describe_error, print_traceback
from .report import error_document, verdict_document

if TYPE_CHECKING:
    from qcs4w_gpu import Gpu, Kernel
    from qcs4w_packer import Blob, PackedEntry, PackedFile
    from qcs4w_packer.weights import Source


@dataclass(frozen=True)
class Job:
    """What every tensor of a batch is verified with."""

    gpu: "Gpu"
    source: "Source | None"
    inputs: "Source | None"
    rows: int
    seed: int
    kernel: "Kernel | None"
    blob: "Blob | None"
    rounding_factor: int
    verbose: bool
    used_inputs: set[str] = field(default_factory=set)
    unchecked: list[dict[str, str]] = field(default_factory=list)

    def verify_file(self, path: Path, names: tuple[str, ...]) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield the JSON form of a result for each tensor; what cannot be checked is a result too.

        With it comes the width that the file's names need.
        """
        from qcs4w_packer import Qcs4wError, open_packed
        from qcs4w_packer.arrays import pair_inputs

        try:
            container = open_packed(path, self.blob)
        except Qcs4wError as error:
            yield self.failure(path, None, error), 0
            return
        with container:
            width = max(map(len, container.entries))
            for name in names or (None,):
                try:
                    if self.inputs is not None:
                        pairs = pair_inputs(container, self.inputs, name)
                        self.used_inputs.update(array_name for _, array_name in pairs)
                        if name is None:
                            checked = {entry.name for entry, _ in pairs}
                            left = (other for other in container.entries if other not in checked)
                            self.unchecked.extend({"file": str(path), "tensor": other} for other in left)
                    elif name is not None:
                        pairs = [(container.entry(name), "")]
                    else:
                        pairs = [(entry, "") for entry in container.entries.values()]
                except Qcs4wError as error:
                    yield self.failure(path, name, error), width
                    continue
                for entry, array_name in pairs:
                    try:
                        yield self.verify_tensor(container, entry, array_name), width
                    except Qcs4wError as error:
                        yield self.failure(path, entry.name, error), width

    def verify_tensor(self, container: "PackedFile", entry: "PackedEntry", array_name: str) -> dict[str, Any]:
        """Verify one tensor and return the JSON form of its verdict."""
        from qcs4w_gpu import verify
        from qcs4w_gpu.linear import plan_for
        from qcs4w_packer.arrays import read_array
        from qcs4w_packer.packing import source_weight

        rows = self.rows if self.inputs is None else self.inputs.tensors[array_name].rows or 1
        plan_for(self.gpu, rows, entry.out_features, entry.in_features, self.kernel)
        verdict = verify(
            self.gpu,
            container.load(entry.name),
            x=read_array(self.inputs, array_name, entry.in_features) if self.inputs is not None else None,
            rows=self.rows,
            seed=self.seed,
            kernel=self.kernel,
            source=source_weight(self.source, entry) if self.source is not None else None,
            method=entry.method,
            rounding_factor=self.rounding_factor,
        )
        return {"file": str(container.path), "tensor": entry.name, **verdict_document(entry, verdict)}

    def failure(self, path: Path, tensor: str | None, error: Exception) -> dict[str, Any]:
        """Return the JSON form of what could not be checked; with -v its traceback goes to stderr."""
        message, hint, code = describe_error(error)
        if self.verbose:
            print_traceback(error)
        return {"file": str(path), "tensor": tensor, "status": "error", **error_document(code, message, hint)}
