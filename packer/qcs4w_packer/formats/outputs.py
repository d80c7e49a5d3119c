"""What `convert` writes: for each layout, what a weight becomes and the files that hold it."""

import contextlib
import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..container_writer import ContainerWriter
from ..errors import Qcs4wError, UsageError
from ..files import (
    check_folder,
    check_outside,
    check_target,
    copy_file,
    replacing,
    replacing_folder,
    write_at,
    write_file,
)
from ..json_file import read_json
from ..metadata import PackedEntry, bias_name
from ..onnx_model import onnx_package
from ..packed import PackedLinear
from ..safetensors_file import Planned, file_kind
from ..safetensors_writer import SafetensorsWriter
from ..weights import FLOAT_DTYPES, SourceTensor
from . import compressed_tensors, matmul_nbits, pairs, q4gsw
from .checkpoint import CONFIG

SCALE_DTYPES: dict[str, np.dtype[Any]] = {"f32": np.dtype("<f4"), "f16": np.dtype("<f2")}
_SAFETENSORS_NAMES = {"f32": "F32", "f16": "F16"}

Arrays = dict[str, NDArray[Any]]
#: Called with each weight's arrays as `encode` returned them, in the order of the entries.
Put = Callable[[PackedEntry, Arrays], None]


@dataclass(frozen=True)
class Request:
    """What is going to be written.

    Attributes:
        entries: the weights, in order.
        carried: tensors that are copied byte for byte where the target can hold them.
        biases: float32 (N,) by the name of their weight.
        metadata: string metadata of the source.
        scale_dtype: a key of SCALE_DTYPES.
        block: columns to a block (ONNX only).
        explicit_zero_points: state the zero point 8 that is the default (ONNX only).
        beside: files of the checkpoint, config.json excepted, that are copied where the target is one.
        config: what config.json says.
    """

    entries: tuple[PackedEntry, ...]
    carried: tuple[SourceTensor, ...] = ()
    biases: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    scale_dtype: str = "f32"
    block: int = 32
    explicit_zero_points: bool = False
    beside: tuple[Path, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def lone_biases(self) -> dict[str, NDArray[np.float32]]:
        """Biases that are no carried tensor already, by the name that they get."""
        held = {tensor.name for tensor in self.carried}
        named = {bias_name(name): bias for name, bias in self.biases.items()}
        return {name: bias for name, bias in named.items() if name not in held}


class Target(ABC):
    """A layout in its files.

    Args:
        request: what will be written.

    Raises:
        UsageError: it asks for something that the target does not have.
    """

    name: str
    scale_dtypes: tuple[str, ...] = ("f32",)
    holds_carried = False
    holds_beside = False
    is_folder = False

    def __init__(self, request: Request):
        self.request = request
        if request.scale_dtype not in self.scale_dtypes:
            raise UsageError(
                f"{self.name} keeps scales as {' or '.join(self.scale_dtypes)}, not {request.scale_dtype}",
                hint="leave --scale-dtype out",
            )

    @abstractmethod
    def encode(self, entry: PackedEntry, weight: PackedLinear, scales: NDArray[Any]) -> Arrays:
        """Return what a weight becomes; `scales` are (N,) in the dtype that they will have."""

    @abstractmethod
    def decode(self, entry: PackedEntry, arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
        """Return qcs4w's packed bytes again, from what `encode` returned."""

    @abstractmethod
    def open(self, output: Path, *, force: bool, sources: tuple[Path, ...]) -> AbstractContextManager[Put]:
        """Open the output; it is whole when the block ends well, and as it was otherwise."""

    def check(self, output: Path, *, force: bool, sources: tuple[Path, ...]) -> None:
        """Say before any work whether the output can be written.

        Raises:
            OutputError: it cannot.
        """
        if self.is_folder:
            check_folder(output, force=force, is_ours=self.is_ours, sources=sources)
        else:
            check_target(output, force=force, sources=sources)
        check_outside(output, sources)

    def is_ours(self, folder: Path) -> bool:
        """Tell by its content whether a folder is what `open` has made, and nothing else."""
        return False


class ContainerTarget(Target):
    """qcs4w's own container."""

    name = "qcs4w"
    holds_carried = True

    def encode(self, entry: PackedEntry, weight: PackedLinear, scales: NDArray[Any]) -> Arrays:
        """Return packed bytes and scales."""
        return {"packed": weight.packed, "scales": scales}

    def decode(self, entry: PackedEntry, arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
        """Return the packed bytes."""
        return arrays["packed"]

    @contextlib.contextmanager
    def open(self, output: Path, *, force: bool, sources: tuple[Path, ...]) -> Iterator[Put]:
        """Open the container."""
        request = self.request
        planned = [Planned(t.name, t.dtype, t.shape) for t in request.carried]
        planned += [Planned(name, "F32", bias.shape) for name, bias in request.lone_biases.items()]
        writer = ContainerWriter(request.entries, planned, request.metadata)
        with replacing(output, force=force, nbytes=writer.nbytes, sources=sources) as fd:
            writer.begin(fd)
            yield lambda entry, arrays: writer.write_rows(entry.name, 0, arrays["packed"], arrays["scales"])
            for tensor in request.carried:
                offset = 0
                for _, data in tensor.chunks():
                    writer.write_carried(tensor.name, offset, data)
                    offset += len(data)
            for name, bias in request.lone_biases.items():
                writer.write_carried(name, 0, bias.astype("<f4").tobytes())
            writer.finish()


class Q4gswTarget(Target):
    """A safetensors file of q4gsw weights with one group a row."""

    name = "q4gsw"
    holds_carried = True

    def encode(self, entry: PackedEntry, weight: PackedLinear, scales: NDArray[Any]) -> Arrays:
        """Return the tensors of one weight."""
        return q4gsw.encode(entry, weight)

    def decode(self, entry: PackedEntry, arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
        """Return qcs4w's packed bytes again."""
        return q4gsw.decode(entry, arrays)

    @contextlib.contextmanager
    def open(self, output: Path, *, force: bool, sources: tuple[Path, ...]) -> Iterator[Put]:
        """Open the file."""
        planned = [tensor for entry in self.request.entries for tensor in q4gsw.plan(entry)]
        with _safetensors(output, planned, self.request, self.request.metadata, force, sources) as put:
            yield put


class CompressedTensorsTarget(Target):
    """A folder with model.safetensors in the layout pack-quantized, config.json, and what else the checkpoint has."""

    name = "compressed-tensors"
    scale_dtypes = ("f32", "f16")
    holds_carried = True
    holds_beside = True
    is_folder = True
    _WEIGHTS, _CONFIG = "model.safetensors", CONFIG

    def encode(self, entry: PackedEntry, weight: PackedLinear, scales: NDArray[Any]) -> Arrays:
        """Return the tensors of one weight."""
        return compressed_tensors.encode(entry, weight, scales[:, None])

    def decode(self, entry: PackedEntry, arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
        """Return qcs4w's packed bytes again."""
        return compressed_tensors.decode(entry, arrays)

    def is_ours(self, folder: Path) -> bool:
        """Tell by its config, whose part on the model is the one that is going to be written."""
        names = {self._WEIGHTS, self._CONFIG, *(path.name for path in self.request.beside)}
        try:
            return _holds_only(folder, names) and compressed_tensors.is_config_of(
                read_json(folder / self._CONFIG), self.request.config
            )
        except Qcs4wError:
            return False

    @contextlib.contextmanager
    def open(self, output: Path, *, force: bool, sources: tuple[Path, ...]) -> Iterator[Put]:
        """Open the folder."""
        request = self.request
        dtype = _SAFETENSORS_NAMES[request.scale_dtype]
        planned = [tensor for entry in request.entries for tensor in compressed_tensors.plan(entry, dtype)]
        said = {"quantization_config": compressed_tensors.config(_linear_modules(request.carried))}
        metadata = {"format": "pt", **request.metadata}  # transformers asks for the format
        with replacing_folder(output, force=force, is_ours=self.is_ours, sources=sources) as folder:
            with _safetensors(folder / self._WEIGHTS, planned, request, metadata, False, ()) as put:
                yield put
            write_file(folder / self._CONFIG, _json_bytes({**request.config, **said}))
            for path in request.beside:
                copy_file(path, folder / path.name)


class PairsTarget(Target):
    """A folder of plain arrays and an index: .bin files, or .npy in the subclass."""

    name = "raw"
    is_folder = True

    def encode(self, entry: PackedEntry, weight: PackedLinear, scales: NDArray[Any]) -> Arrays:
        """Return packed bytes, scales, and the bias if there is one."""
        arrays = {"packed": weight.packed, "scales": scales}
        bias = self.request.biases.get(entry.name)
        return arrays if bias is None else {**arrays, "bias": bias.astype("<f4")}

    def decode(self, entry: PackedEntry, arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
        """Return the packed bytes."""
        return arrays["packed"]

    def is_ours(self, folder: Path) -> bool:
        """Tell by its index, which names every file."""
        try:
            with pairs.PairsFolder(folder) as there:
                return _holds_only(folder, {file.name for file in there.files if file != folder})
        except Qcs4wError:
            return False

    @contextlib.contextmanager
    def open(self, output: Path, *, force: bool, sources: tuple[Path, ...]) -> Iterator[Put]:
        """Open the folder."""
        described: list[dict[str, Any]] = []
        with replacing_folder(output, force=force, is_ours=self.is_ours, sources=sources) as folder:

            def put(entry: PackedEntry, arrays: Arrays) -> None:
                files = self._files(entry)
                for role, name in files.items():
                    write_file(folder / name, pairs.file_bytes(arrays[role], self.name))
                described.append(pairs.index_entry(entry, files, arrays))

            yield put
            write_file(folder / pairs.INDEX, _json_bytes(pairs.index_document(self.name, described)))

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        return {entry.name: number for number, entry in enumerate(self.request.entries)}

    def _files(self, entry: PackedEntry) -> dict[str, str]:
        return pairs.file_names(self._numbers[entry.name], self.name, with_bias=entry.name in self.request.biases)


class NpyTarget(PairsTarget):
    """A folder of .npy files and an index."""

    name = "npy"


class OnnxTarget(Target):
    """An ONNX model with one MatMulNBits node a weight; beyond 16 MiB its tensors lie in a file beside it."""

    name = "onnx"
    scale_dtypes = ("f32", "f16")

    #: Bytes from which on tensors go into OUT.onnx.data, one at a time; a protobuf must be held whole.
    inline_nbytes = 16 << 20
    _ALIGNMENT = 4096  # of tensors in it, so that they can be mapped

    def __init__(self, request: Request):
        super().__init__(request)
        if fault := matmul_nbits.fault_of_block(request.block):
            raise UsageError(f"the block is {request.block}: {fault}")
        self._onnx = onnx_package()

    def encode(self, entry: PackedEntry, weight: PackedLinear, scales: NDArray[Any]) -> Arrays:
        """Return the node's inputs."""
        request = self.request
        arrays = matmul_nbits.encode(
            weight, scales, block=request.block, explicit_zero_points=request.explicit_zero_points
        )
        bias = request.biases.get(entry.name)
        return arrays if bias is None else {**arrays, "bias": bias.astype(scales.dtype)}

    def decode(self, entry: PackedEntry, arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
        """Return qcs4w's packed bytes again."""
        return matmul_nbits.decode(entry, arrays)

    def check(self, output: Path, *, force: bool, sources: tuple[Path, ...]) -> None:
        """Say before any work whether the output can be written, and the file beside it if there is one."""
        super().check(output, force=force, sources=sources)
        if self._has_data_file:
            check_target(_data_file(output), force=force, sources=sources)

    @contextlib.contextmanager
    def open(self, output: Path, *, force: bool, sources: tuple[Path, ...]) -> Iterator[Put]:
        """Open the model, and the file beside it if there is one."""
        helper, initializers, nodes = self._onnx.helper, [], []
        with contextlib.ExitStack() as data_file, replacing(output, force=force, sources=sources) as fd:
            beside = _data_file(output)
            data_fd = (
                data_file.enter_context(replacing(beside, force=force, sources=sources))
                if self._has_data_file
                else None
            )
            end = 0

            def put(entry: PackedEntry, arrays: Arrays) -> None:
                nonlocal end
                names = matmul_nbits.tensor_names(entry.name, self.request.block)
                for role, array in arrays.items():
                    data = np.ascontiguousarray(array)
                    tensor = self._onnx.TensorProto(
                        name=names[role], data_type=helper.np_dtype_to_tensor_dtype(data.dtype), dims=data.shape
                    )
                    if data_fd is None:
                        tensor.raw_data = data.tobytes()
                    else:
                        write_at(data_fd, data.data, end)
                        tensor.data_location = self._onnx.TensorProto.EXTERNAL
                        place = {"location": beside.name, "offset": end, "length": data.nbytes}
                        for key, value in place.items():
                            tensor.external_data.add(key=key, value=str(value))
                        end += data.nbytes + -data.nbytes % self._ALIGNMENT
                    initializers.append(tensor)
                used = {role: names[role] for role in arrays}
                nodes.append(matmul_nbits.node(self._onnx, entry, used, self.request.block))

            yield put
            write_at(fd, self._model(nodes, initializers).SerializeToString(), 0)
            data_file.close()  # the data has its name before the model that refers to it

    @property
    def _has_data_file(self) -> bool:
        return sum(entry.packed_nbytes for entry in self.request.entries) > self.inline_nbytes

    def _model(self, nodes: list[Any], initializers: list[Any]) -> Any:
        helper = self._onnx.helper
        kind = helper.np_dtype_to_tensor_dtype(SCALE_DTYPES[self.request.scale_dtype])
        values = [
            [helper.make_tensor_value_info(f"{entry.name}_{end}", kind, ["rows", size]) for entry, size in sized]
            for end, sized in (
                ("input", [(entry, entry.in_features) for entry in self.request.entries]),
                ("output", [(entry, entry.out_features) for entry in self.request.entries]),
            )
        ]
        graph = helper.make_graph(nodes, "qcs4w", *values, initializers)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(matmul_nbits.DOMAIN, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8, producer_name="qcs4w")


_TARGETS: tuple[type[Target], ...] = (
    ContainerTarget, Q4gswTarget, CompressedTensorsTarget, PairsTarget, NpyTarget, OnnxTarget,
)  # fmt: skip

#: Every layout that can be written, by name.
TARGETS = {target.name: target for target in _TARGETS}


@contextlib.contextmanager
def _safetensors(
    path: Path,
    planned: list[Planned],
    request: Request,
    metadata: Mapping[str, str],
    force: bool,
    sources: tuple[Path, ...],
) -> Iterator[Put]:
    """Open a safetensors file for planned tensors, and copy what is carried once they are written."""
    others = [Planned(t.name, t.dtype, t.shape) for t in request.carried]
    others += [Planned(name, "F32", bias.shape) for name, bias in request.lone_biases.items()]
    writer = SafetensorsWriter([*planned, *others], metadata)
    with replacing(path, force=force, nbytes=writer.nbytes, sources=sources) as fd:
        writer.begin(fd)

        def put(entry: PackedEntry, arrays: Arrays) -> None:
            for name, array in arrays.items():
                writer.write(fd, name, np.ascontiguousarray(array).data.cast("B"))

        yield put
        for tensor in request.carried:
            offset = 0
            for _, data in tensor.chunks():
                writer.write(fd, tensor.name, data, offset)
                offset += len(data)
        for name, bias in request.lone_biases.items():
            writer.write(fd, name, bias.astype("<f4").tobytes())


def _holds_only(folder: Path, names: set[str]) -> bool:
    """Tell whether all that lies in a folder are regular files of these names."""
    return all(file.name in names and file_kind(file) == "file" for file in folder.iterdir())


def _linear_modules(carried: tuple[SourceTensor, ...]) -> list[str]:
    """Return the modules of carried float matrices, which a loader must not take for packed."""
    matrices = (t for t in carried if len(t.shape) == 2 and t.dtype in FLOAT_DTYPES and t.name.endswith(".weight"))
    return [tensor.name.removesuffix(".weight") for tensor in matrices]


def _data_file(output: Path) -> Path:
    return output.with_name(f"{output.name}.data")


def _json_bytes(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()
