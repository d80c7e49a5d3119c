"""ExecuTorch programs (.pte) as files of packed linears: every et_vk.linear_qcs4w call, without ExecuTorch.

Each method of a program has delegates; the blob of one that was made for Vulkan, which the WebGPU runtime reads as
well, holds a graph. A graph's constants are named data: a key, the sha256 of their bytes, leads to a segment of the
program or of a data file (.ptd) beside it. Graphs of other makers may keep them in their blob.
Source: pytorch/executorch v1.5.1, schema/program.fbs; the rest stands in `segmented_file` and `vulkan_graph`.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .errors import DigestError, SourceError
from .flatbuffer import Table
from .metadata import PackedEntry
from .nibbles import packed_width
from .packed import PackedLinear
from .packed_file import PackedFile
from .pte_call import PteCall, PteConstant
from .safetensors_file import open_for_reading, read_at
from .segmented_file import PROGRAM, SegmentedFile
from .targets import Case
from .vulkan_graph import GraphCall, GraphConstant, linear_calls
from .weights import widen

_BACKEND = "VulkanBackend"
_LONGEST_NAME = 256  # letters of a method's name
_MOST_CLAIMED = 4  # times the size of a file, by the constants in it; each may be read, and they may overlap
_MIN_CALL = 16  # bytes of the file for each call that is listed; a real one takes ten times as much


class PteFile(PackedFile):
    """A .pte file opened for reading. Use it as a context manager; its constants can be read while it is open.

    A linear's bias is not its own in a program: it is added by a later call.

    Attributes:
        path: where it lies.
        nbytes: its size.
        calls: every linear_qcs4w call by name, in the order of the file.
        entries: the same as packed tensors; their digests are what the keys state.

    Raises:
        SourceError: it cannot be read, is not sound, or a constant is not there.
    """

    format = "pte"

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.carried, self.problems = [], []
        self._file = SegmentedFile(self.path)
        self.nbytes = self._file.nbytes
        self._data_files: list[SegmentedFile] | None = None
        self._data_faults: list[str] = []
        self._graphs: dict[tuple[int, int], list[GraphCall]] = {}
        self._constants: dict[GraphConstant, PteConstant] = {}
        self._claimed: dict[Path, int] = {}
        try:
            self.calls: dict[str, PteCall] = {}
            for call in self._read_calls():
                self.calls[call.name] = call
                if len(self.calls) * _MIN_CALL > self.nbytes:
                    raise self._file.fault("it lists more calls than a file of its size can hold")
        except BaseException:
            self.close()
            raise
        self.entries = {call.name: call.to_entry() for call in self.calls.values()}

    def close(self) -> None:
        """Close the file and the data files beside it."""
        for file in (self._file, *(self._data_files or ())):
            file.close()

    @property
    def files(self) -> tuple[Path, ...]:
        """The program, and the data files beside it that were needed."""
        return (self.path, *(file.path for file in self._data_files or ()))

    def arrays(self, entry: PackedEntry) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Read packed bytes (N, K_packed) and scales (N,), whatever their keys say; F16 scales are widened."""
        packed = np.frombuffer(self.calls[entry.name].weight.read(), np.uint8)
        return packed.reshape(entry.out_features, -1), self.scales(entry)

    def scales(self, entry: PackedEntry) -> NDArray[np.float32]:
        """Read the scales (N,) alone."""
        stored = self.calls[entry.name].scales
        return widen(stored.read(), stored.dtype, name=entry.name, columns=1).reshape(-1)

    def row_reader(self, entry: PackedEntry) -> Callable[[int, int], NDArray[np.uint8]]:
        """Return a function (first row, end) -> packed rows, which reads these rows only."""
        weight, width = self.calls[entry.name].weight, packed_width(entry.in_features)

        def read(start: int, stop: int) -> NDArray[np.uint8]:
            data = weight.fetch(weight.offset + start * width, (stop - start) * width)
            return np.frombuffer(data, np.uint8).reshape(-1, width)

        return read

    def case(self, entry: PackedEntry) -> Case:
        """Return what a runtime would meet."""
        return self.calls[entry.name].case

    def load(self, name: str) -> PackedLinear:
        """Read one packed tensor, checked against the digests in its keys.

        Raises:
            UnknownTensorError: there is none of that name.
            DigestError: the bytes are not those that were exported.
            ContainerError: a scale is not finite.
        """
        entry = self.entry(name)
        wrong = self.wrong_digests(entry) if self.calls[entry.name].scale_dtype != "F32" else []
        if wrong:
            raise DigestError(
                f"{self.path}: {'; '.join(wrong)}", hint="the file was damaged or edited: export it again"
            )
        return super().load(name)

    def wrong_digests(self, entry: PackedEntry) -> list[str]:
        """Describe each constant whose bytes are not those that its key states."""
        call = self.calls[entry.name]
        return [
            f"tensor '{entry.name}': the {what} have sha256 {constant.sha256}, the file says {constant.key}"
            for what, constant in (("packed bytes", call.weight), ("scales", call.scales))
            if constant.key_matches is False
        ]

    def place(self, entry: PackedEntry) -> tuple[Path, int]:
        """Return the file and the offset at which a tensor's packed bytes lie."""
        weight = self.calls[entry.name].weight
        return weight.path, weight.offset

    def scales_place(self, entry: PackedEntry) -> tuple[Path, int] | None:
        """Return the file and the offset at which float32 scales lie; None for F16 ones."""
        scales = self.calls[entry.name].scales
        return (scales.path, scales.offset) if scales.dtype == "F32" else None

    def _read_calls(self) -> Iterator[PteCall]:
        methods = set()
        for plan in self._file.root.tables(1, "plan"):
            method = plan.text(0)
            if not method or len(method) > _LONGEST_NAME:
                raise self._file.fault(f"a method's name has {len(method or '')} letters")
            if method in methods:
                raise self._file.fault(f"two methods have the name {method!r}")
            methods.add(method)
            number = 0
            for index, delegate in enumerate(plan.tables(7, "delegate")):
                backend = delegate.text(0) or ""
                for call in self._delegate_calls(delegate, backend):
                    yield PteCall(
                        f"{method}.linear_{number}",
                        method,
                        index,
                        backend,
                        call.order,
                        call.rows,
                        call.case,
                        self._constant(call.weight),
                        self._constant(call.scales),
                    )
                    number += 1

    def _delegate_calls(self, delegate: Table, backend: str) -> list[GraphCall]:
        """Return the calls in a delegate's blob, which several may share; one that is not for Vulkan has none."""
        processed = delegate.table(1)
        if processed is None:
            raise self._file.fault(f"delegate {backend[:80]!r} has no data")
        location, index = processed.number(0, "i8"), processed.number(1, "u32")
        if location == 1:
            start, nbytes = self._file.segment(index)
        elif location == 0:
            span = self._file.root.tables(3, "inline delegate")[index].span(0, 1) or (0, 0)
            start, nbytes = span  # the program begins with the file
        else:
            raise self._file.fault(f"the data of delegate {backend[:80]!r} lies in place {location}, expected 0 or 1")
        if (start, nbytes) not in self._graphs:
            calls = linear_calls(self._file, start, nbytes)
            if calls is None and backend == _BACKEND:
                raise self._file.fault(f"the blob of a {_BACKEND} at byte {start:,} has no header VH00")
            self._graphs[start, nbytes] = calls or []
        return self._graphs[start, nbytes]

    def _constant(self, said: GraphConstant) -> PteConstant:
        """Return the one object for a constant."""
        if said not in self._constants:
            file, offset = (self._file, said.offset) if said.key is None else self._find(said.key, said.nbytes)
            claimed = self._claimed[file.path] = self._claimed.get(file.path, 0) + said.nbytes
            if claimed > _MOST_CLAIMED * file.nbytes:
                raise file.fault("its constants overlap, and together are larger than it by far")
            self._constants[said] = PteConstant(file.path, offset, said.nbytes, said.key, said.dtype, file.read)
        return self._constants[said]

    def _find(self, key: str, nbytes: int) -> tuple[SegmentedFile, int]:
        """Return the file that holds named data of a key, and where."""
        for file in self._files():
            if key in file.named:
                offset, found = file.segment(file.named[key])
                if found != nbytes:
                    raise file.fault(f"the data of key {key[:80]!r} has {found:,} bytes, its tensor {nbytes:,}")
                return file, offset
        looked = [file.path.name for file in self._data_files or ()] + self._data_faults
        raise SourceError(
            f"{self.path}: the data of key {key[:80]!r} is neither in it nor in a .ptd file beside it "
            f"({'; '.join(looked[:5]) or 'there is none'})",
            hint="put the .ptd files that were exported with it into its folder",
        )

    def _files(self) -> Iterator[SegmentedFile]:
        """Yield the program and then, once a key is not in it, each sound data file beside it."""
        yield self._file
        if self._data_files is None:
            self._data_files = []
            try:
                beside = sorted(path for path in self.path.parent.iterdir() if path.suffix == ".ptd")
            except OSError as error:
                raise SourceError(f"{self.path.parent}: cannot be listed: {error.strerror}") from None
            for path in beside:
                try:
                    self._data_files.append(SegmentedFile(path, is_data=True))
                except SourceError as error:  # it may be of no concern; told where a key is missing
                    self._data_faults.append(str(error))
        yield from self._data_files


def is_pte(path: str | os.PathLike[str]) -> bool:
    """Tell a .pte file by its content.

    Raises:
        SourceError: it cannot be read.
    """
    path = Path(path)
    fd = open_for_reading(path)
    try:
        return os.fstat(fd).st_size >= 8 and read_at(fd, path, 4, 4) == PROGRAM
    finally:
        os.close(fd)
