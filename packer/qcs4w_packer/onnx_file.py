"""The initialisers of an ONNX model as a source; the graph says which of them are linear weights, and how they lie.

MatMul(x, W) has W [K, N], Gemm(x, W) too, or [N, K] with transB = 1; a Transpose between turns it round. Source:
onnx/onnx, docs/Operators.md. The model itself is read whole (protobuf allows 2 GiB); external data are not.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Literal

from .checkpoint_index import grouped
from .errors import SourceError
from .onnx_model import external_place, is_external, load_model, onnx_package
from .open_files import OpenFiles, PooledFile
from .safetensors_file import DTYPE_BITS, Slot, name_fault
from .weights import Source, SourceTensor, slot_tensor

_DTYPES = {
    "FLOAT": "F32", "UINT8": "U8", "INT8": "I8", "UINT16": "U16", "INT16": "I16", "INT32": "I32", "INT64": "I64",
    "BOOL": "BOOL", "FLOAT16": "F16", "DOUBLE": "F64", "UINT32": "U32", "UINT64": "U64", "COMPLEX64": "C64",
    "BFLOAT16": "BF16", "FLOAT8E4M3FN": "F8_E4M3", "FLOAT8E4M3FNUZ": "F8_E4M3FNUZ", "FLOAT8E5M2": "F8_E5M2",
    "FLOAT8E5M2FNUZ": "F8_E5M2FNUZ", "FLOAT8E8M0": "F8_E8M0",
}  # fmt: skip
_PASSED_THROUGH = ("Identity", "Cast")
_LARGEST_RANK = 64

Direction = Literal["out-in", "in-out"]
_TURNED: dict[Direction, Direction] = {"out-in": "in-out", "in-out": "out-in"}


def open_onnx(path: Path) -> Source:
    """Open an ONNX model: its initialisers are the tensors.

    Raises:
        Qcs4wError: the onnx package is not installed.
        SourceError: not a sound model, or external data that are missing, too short, or not of the model's folder.
    """
    model = load_model(path)
    files = OpenFiles()
    try:
        return _source(path, model, files)
    except BaseException:
        files.close()
        raise


def _source(path: Path, model: Any, files: OpenFiles) -> Source:
    graph = model.graph
    names = {number: name for name, number in onnx_package().TensorProto.DataType.items()}
    directions = _directions(graph)
    tensors: dict[str, SourceTensor] = {}
    unreadable: dict[str, str] = {}
    last: dict[str, bytes] = {}
    seen: set[str] = set()
    for proto in graph.initializer:
        name, kind = proto.name, names.get(proto.data_type, f"number {proto.data_type}")
        if not isinstance(name, str) or not name or name in seen:  # bytes where it is no UTF-8
            raise SourceError(f"{path}: initialiser {name!r:.100} has no name of its own")
        seen.add(name)
        dims = tuple(proto.dims)
        if len(dims) > _LARGEST_RANK or any(size < 0 for size in dims):
            raise SourceError(f"{path}: initialiser '{name:.100}' has shape {list(dims)!r:.100}")
        if kind not in _DTYPES or name_fault(name):
            unreadable[name] = name_fault(name) or f"data type {kind} has no safetensors counterpart"
            continue
        dtype = _DTYPES[kind]
        nbytes = prod(dims) * DTYPE_BITS[dtype] // 8
        if is_external(proto):
            file, offset = external_place(proto, path, nbytes)
            size = files.add_now(file)
            if offset + nbytes > size:
                raise SourceError(
                    f"{file}: has {size:,} bytes, initialiser '{name:.100}' ends at {offset + nbytes:,}: truncated"
                )
            place = (file, offset, dtype, dims)
            tensor = slot_tensor(PooledFile(files, file), name, Slot(dtype, dims, offset, nbytes))
        else:
            place = None
            tensor = SourceTensor(name, dtype, dims, _inline(path, proto, nbytes, dims, last), is_held=True)
        tensors[name] = replace(tensor, direction=directions.get(name), storage=place)
    left_out = [f"the model's graph ({len(graph.node):,} nodes)"]
    if graph.sparse_initializer:
        left_out.append(f"{len(graph.sparse_initializer):,} sparse initialisers")
    left_out += grouped(unreadable)

    def close() -> None:
        last.clear()
        files.close()

    return Source(path, tensors, left_out=tuple(left_out), unreadable=unreadable, closer=close)


def _inline(
    path: Path, proto: Any, nbytes: int, dims: tuple[int, ...], last: dict[str, bytes]
) -> Callable[[int, int], bytes]:
    """Return what fetches rows of a tensor that lies in the model itself; one at a time is held as bytes."""
    if proto.HasField("raw_data"):
        found = len(proto.raw_data)
        if found != nbytes:
            raise SourceError(f"{path}: initialiser '{proto.name:.100}' has {found:,} bytes, expected {nbytes:,}")
    row_nbytes = nbytes // max(1, prod(dims[:-1]))

    def fetch(start: int, stop: int) -> bytes:
        data = last.get(proto.name)
        if data is None:
            last.clear()
            data = last[proto.name] = _bytes(path, proto, nbytes)
        return data[start * row_nbytes : stop * row_nbytes]

    return fetch


def _bytes(path: Path, proto: Any, nbytes: int) -> bytes:
    """Return a tensor's bytes, little-endian, in C order."""
    if proto.HasField("raw_data"):
        return bytes(proto.raw_data)
    try:  # in one of the fields for numbers
        data: bytes = onnx_package().numpy_helper.to_array(proto).tobytes()
    except Exception as error:  # onnx and numpy raise many types
        raise SourceError(f"{path}: initialiser '{proto.name:.100}' is not sound: {error!s:.200}") from None
    if len(data) != nbytes:
        raise SourceError(f"{path}: initialiser '{proto.name:.100}' has {len(data):,} bytes, expected {nbytes:,}")
    return data


def _directions(graph: Any) -> dict[str, Direction]:
    """Return how each initialiser lies that is used as a linear weight and as nothing else."""
    weights = {proto.name for proto in graph.initializer if len(proto.dims) == 2}
    origin: dict[str, tuple[str, bool]] = {name: (name, False) for name in weights if isinstance(name, str)}
    found: dict[str, set[Direction | None]] = {}
    for node in graph.node:
        for index, value in enumerate(node.input):
            if value not in origin:
                continue
            name, turned = origin[value]
            if node.domain in ("", "ai.onnx") and len(node.output) == 1 and index == 0:
                passed = node.op_type in _PASSED_THROUGH
                if passed or (node.op_type == "Transpose" and _attribute(node, "perm", [1, 0]) == [1, 0]):
                    origin[node.output[0]] = (name, turned != (not passed))
                    continue
            said = _said(node, index)
            found.setdefault(name, set()).add(_TURNED[said] if said and turned else said)
        for inner in _inner_graphs(node):
            for name in _used_inside(inner) & origin.keys():
                found.setdefault(origin[name][0], set()).add(None)
    for output in graph.output:
        if output.name in origin:
            found.setdefault(origin[output.name][0], set()).add(None)
    agreed = {name: next(iter(uses)) for name, uses in found.items() if len(uses) == 1}
    return {name: direction for name, direction in agreed.items() if direction is not None}


def _said(node: Any, index: int) -> Direction | None:
    """Return how a node takes an input as a linear weight, or None where it does not."""
    if node.domain not in ("", "ai.onnx") or index != 1:
        return None
    if node.op_type == "MatMul":
        return "in-out"
    if node.op_type == "Gemm":
        return "out-in" if _attribute(node, "transB", 0) else "in-out"
    return None


def _attribute(node: Any, name: str, default: Any) -> Any:
    for attribute in node.attribute:
        if attribute.name == name:
            return list(attribute.ints) if isinstance(default, list) else attribute.i
    return default


def _inner_graphs(node: Any) -> Iterable[Any]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _used_inside(graph: Any) -> set[str]:
    """Return the names that the nodes of a subgraph take."""
    used = {name for node in graph.node for name in node.input}
    for node in graph.node:
        for inner in _inner_graphs(node):
            used |= _used_inside(inner)
    return used
