"""verify --save-failing: the smallest input that still fails, per tensor, and the command that repeats it."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .verify_kernel import KernelRequest
from .verify_work import Device, Work

if TYPE_CHECKING:
    from qcs4w_gpu import Verdict
    from qcs4w_gpu.reproduce import Reproducer
    from qcs4w_gpu.sweep import Shape

SCRIPT = "reproduce.sh"
_HEAD = "#!/bin/sh\n# Written by qcs4w verify --save-failing: each command fails as its tensor did.\n"
_ENTER = 'cd "$(dirname "$0")" || exit 2\n'  # its files lie beside it
_TENSOR = "weight"  # the name that a nameless .npy belongs to
_KERNEL = "kernel.wgsl"
_MOST = 20


@dataclass
class FailingFolder:
    """What is to be saved of the tensors that failed.

    Attributes:
        target: the folder; nothing is written before all are verified.
        kernel: the options of the kernel, for the command.
        device: where what failed is run again.
        force: replace a folder that was written here before.
        left_out: failures that are not saved: beyond the first 20, or without an input that could be told.
    """

    target: Path
    kernel: KernelRequest
    device: Device
    force: bool = False
    left_out: int = 0
    _kept: "list[_Failure]" = field(default_factory=list)

    @property
    def script(self) -> Path:
        """What repeats the failures."""
        return self.target / SCRIPT

    def check(self) -> None:
        """Refuse a target that cannot be written, before any work is done."""
        from qcs4w_packer.files import check_folder

        check_folder(self.target, force=self.force, is_ours=_is_ours)

    def add(self, work: Work, verdict: "Verdict") -> None:
        """Look for the smallest input that fails as this tensor does."""
        name, request = work.entry.name, work.request
        limit = request.thresholds.of(name)
        self._add(lambda: work.reproduce(verdict), name, work.entry.method, request.seed, limit)

    def add_shape(self, shape: "Shape", seed: int, reproduce: "Callable[[], Reproducer | None]") -> None:
        """Look for the smallest input that fails as this shape of a sweep does."""
        self._add(reproduce, str(shape), "absmax", seed, None)

    def _add(
        self, reproduce: "Callable[[], Reproducer | None]", name: str, method: str, seed: int, limit: float | None
    ) -> None:
        from qcs4w_gpu import DeviceLostError
        from qcs4w_packer import Qcs4wError

        if len(self._kept) == _MOST:
            self.left_out += 1
            return
        try:
            found = reproduce()
        except Qcs4wError as error:  # the verdict stands; what made it cannot be told smaller
            found = None
            if isinstance(error, DeviceLostError):  # the next tensor gets a new one, and is not blamed
                self.device.close()
        if found is None:
            self.left_out += 1
        else:
            self._kept.append(_Failure(found, name, method, seed, limit))

    def write(self) -> bool:
        """Write the folder, whole or not at all; without a failure there is nothing to write."""
        import numpy as np

        from qcs4w_packer import save_container
        from qcs4w_packer.files import replacing_folder

        if not self._kept:
            return False
        with replacing_folder(self.target, force=self.force, is_ours=_is_ours) as folder:
            lines = [_HEAD, _ENTER]
            if self.kernel.file is not None:
                (folder / _KERNEL).write_bytes(self.kernel.file.read_bytes())
            for index, failure in enumerate(self._kept):
                stem, found = f"{index:03}", failure.found
                save_container(folder / f"{stem}.safetensors", {_TENSOR: found.packed}, method=failure.method)
                arrays = {"x": found.x, "expected": found.expected, "source": found.source}
                arrays["y" if found.is_foreign else "got"] = found.got
                for name, array in arrays.items():
                    if array is not None:
                        np.save(folder / f"{stem}.{name}.npy", array)
                place = f"y[{found.row}, {found.column}]" if found.x is not None else f"row {found.row}"
                told = repr(failure.name)[1:-1]  # a name must not end its comment
                lines.append(f"\n# {told}, {place}\n{self._command(stem, failure)}\n")
            (folder / SCRIPT).write_text("".join(lines), encoding="utf-8")
        return True

    def _command(self, stem: str, failure: "_Failure") -> str:
        found = failure.found
        words = ["qcs4w", "verify", f"{stem}.safetensors"]
        if found.source is not None:
            words += ["--source", f"{stem}.source.npy"]
            limit = [] if failure.limit is None else ["--max-quant-error", str(failure.limit)]
            return shlex.join(words + limit)
        words += ["--input", f"{stem}.x.npy"]
        if found.is_foreign:
            return shlex.join([*words, "--output", f"{stem}.y.npy"])
        words += ["--seed", str(failure.seed)]
        if self.kernel.file is not None:
            words += ["--kernel", _KERNEL]
            for option, value in (("--grid", self.kernel.grid), ("--workgroup", self.kernel.workgroup)):
                words += [] if value is None else [option, value]
            for name, value in self.kernel.defines.items():
                words += ["--define", f"{name}={value}"]
        elif found.kernel is not None:
            words += ["--kernel", found.kernel]
        return shlex.join(words)


@dataclass(frozen=True)
class _Failure:
    """What is saved of one failure: how it can be repeated, and what its command needs to know."""

    found: "Reproducer"
    name: str
    method: str
    seed: int
    limit: float | None


def _is_ours(folder: Path) -> bool:
    """Tell whether a folder holds what was written here before, and nothing else."""
    try:
        is_script = (folder / SCRIPT).read_bytes().startswith(_HEAD.encode())
    except OSError:
        return False
    kinds = (".safetensors", ".npy")
    return is_script and all(
        file.is_file() and (file.name in (SCRIPT, _KERNEL) or (file.name[:3].isdecimal() and file.suffix in kinds))
        for file in folder.iterdir()
    )
