"""The graph that ExecuTorch's Vulkan and WebGPU runtimes run: its linear_qcs4w calls and where their constants lie.

A delegate's blob: 4 zero bytes, `VH00`, u16 length of the header, u32 place and u32 size of the flatbuffer, u32 place
and u64 size of bytes that hold constants. The flatbuffer (`VK00`) has a chain of calls, whose arguments are numbers of
values, and a list of constants, which lie in the blob's bytes or have a key.
Source: pytorch/executorch v1.5.1, backends/vulkan/serialization/schema.fbs and vulkan_graph_serialize.py.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from .flatbuffer import Flatbuffer, Table
from .nibbles import packed_width
from .safetensors_file import DTYPE_BITS
from .segmented_file import SegmentedFile
from .targets import Case

CALL, PREPACK = "et_vk.linear_qcs4w.default", "et_vk.prepack.default"

_HEADER_NBYTES = 30
_TENSOR = 5  # of the union of values
_MAX_RANK = 8  # the runtimes know 4
_HAS_KEY = (1 << 64) - 1  # in the place of an offset
_UINT8, _FLOAT16, _FLOAT32 = 1, 4, 5
_DTYPES = {_UINT8: "U8", _FLOAT16: "F16", _FLOAT32: "F32"}


@dataclass(frozen=True)
class GraphConstant:
    """A constant as the graph names it.

    Attributes:
        dtype: U8, F16 or F32.
        nbytes: its size.
        key: of named data; None for one that lies in the blob.
        offset: in the file, of one that lies in the blob.
    """

    dtype: str
    nbytes: int
    key: str | None
    offset: int = 0


@dataclass(frozen=True)
class GraphCall:
    """A linear_qcs4w call as the graph has it.

    Attributes:
        order: its number in the chain of calls.
        rows: M, for a dynamic shape the most that it may be; None where x has no dimensions.
        case: shape and dtypes, as a runtime meets them.
        weight: packed bytes, (N, ceil(K/2)).
        scales: (N,).
    """

    order: int
    rows: int | None
    case: Case
    weight: GraphConstant
    scales: GraphConstant


def linear_calls(file: SegmentedFile, start: int, nbytes: int) -> list[GraphCall] | None:
    """Return the linear_qcs4w calls of a delegate's blob in order, None if it is no Vulkan blob.

    Raises:
        SourceError: it is one, but not sound.
    """
    head = file.read(start, _HEADER_NBYTES) if nbytes >= _HEADER_NBYTES else b""
    return list(_Graph(file, start, nbytes, head).calls()) if head[4:8] == b"VH00" else None


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the graph; `constant` is negative for what is computed."""

    dtype: int
    dims: tuple[int, ...]
    constant: int

    @property
    def dtype_name(self) -> str:
        return _DTYPES.get(self.dtype, f"of type {self.dtype}")

    def __str__(self) -> str:
        return f"{self.dtype_name} [{', '.join(map(str, self.dims))}]"


class _Graph:
    def __init__(self, file: SegmentedFile, start: int, nbytes: int, head: bytes):
        self._file = file
        length, offset, size, bytes_offset, bytes_nbytes = struct.unpack_from("<HIIIQ", head, 8)
        if length < _HEADER_NBYTES or offset < length or offset + size > bytes_offset:
            raise file.fault(f"the header of the blob at byte {start:,} is not sound")
        if bytes_offset + bytes_nbytes > nbytes:
            raise file.fault(
                f"the blob at byte {start:,} has {nbytes:,} bytes, by its own header {bytes_offset + bytes_nbytes:,}"
            )
        self._bytes_start, self._bytes_nbytes = start + bytes_offset, bytes_nbytes
        root = Flatbuffer(file.read, start + offset, size, file.fault).root(b"VK00")
        self._chain = root.tables(1, "call")
        self._values = root.tables(2, "value")
        self._constants = root.tables(5, "constant")
        self._tensors: dict[int, _Tensor] = {}  # what several calls use is read once
        self._read: dict[_Tensor, GraphConstant] = {}
        self._sources: dict[int, int] = {}  # a value that prepack makes -> the value that it is made of

    def calls(self) -> Iterator[GraphCall]:
        found: list[tuple[int, tuple[int, ...]]] = []
        for order, call in enumerate(self._chain):
            name = call.text(1)
            if name == PREPACK:
                source, made = self._arguments(call, 2, PREPACK)
                self._sources[made] = source
            elif name == CALL:
                found.append((order, self._arguments(call, 4, CALL)))
        return (self._call(order, *arguments) for order, arguments in found)

    def _arguments(self, call: Table, count: int, name: str) -> tuple[int, ...]:
        arguments = call.numbers(2, "i32")
        if len(arguments) != count:
            raise self._file.fault(f"a call of {name} has {len(arguments)} arguments, expected {count}")
        return arguments

    def _call(self, order: int, x_value: int, weight_value: int, scales_value: int, y_value: int) -> GraphCall:
        x, y = self._tensor(x_value), self._tensor(y_value)
        weight, scales = self._source(weight_value), self._source(scales_value)
        where = f"call {order}, {CALL}"
        if weight.dtype != _UINT8 or len(weight.dims) != 2 or 0 in weight.dims:
            raise self._file.fault(f"{where}: its weight is {weight}, expected U8 [N, ceil(K / 2)]")
        out_features, width = weight.dims
        in_features = x.dims[-1] if x.dims else 2 * width
        if in_features < 1 or packed_width(in_features) != width:
            raise self._file.fault(f"{where}: its weight is {weight}, which does not fit x, {x}")
        if scales.dtype not in (_FLOAT16, _FLOAT32) or not scales.dims or prod(scales.dims) != out_features:
            raise self._file.fault(f"{where}: its scales are {scales}, expected {out_features:,} floats")
        rows = prod(x.dims[:-1]) if x.dims else None
        misfit = None
        if rows is None:
            misfit = "x has no dimensions"
        elif prod(y.dims) != rows * out_features:
            misfit = f"y is {y}, expected {rows:,} × {out_features:,}"
        case = Case(
            out_features,
            in_features,
            rows=1 if rows is None else rows,
            scale_dtype=scales.dtype_name,
            input_dtype=x.dtype_name,
            output_dtype=y.dtype_name,
            misfit=misfit,
        )
        return GraphCall(order, rows, case, self._constant(weight), self._constant(scales))

    def _source(self, index: int) -> _Tensor:
        """Return the constant that a value is, or is prepacked from."""
        tensor = self._tensor(index)
        for _ in self._sources:  # more steps than that lead in circles
            if index not in self._sources:
                break
            index = self._sources[index]
            source = self._tensor(index)
            if (source.dtype, source.dims) != (tensor.dtype, tensor.dims):
                raise self._file.fault(f"value {index} is {source} and is prepacked into {tensor}")
            tensor = source
        if tensor.constant < 0 or index in self._sources:
            raise self._file.fault(f"value {index} is a weight or scales of {CALL}, but no constant")
        return tensor

    def _tensor(self, index: int) -> _Tensor:
        if index not in self._tensors:
            value = self._values[index]
            tensor = value.table(1) if value.number(0, "u8") == _TENSOR else None
            if tensor is None:
                raise self._file.fault(f"value {index} is no tensor, and an argument of {CALL}")
            dims = tensor.numbers(1, "u32")
            if len(dims) > _MAX_RANK:
                raise self._file.fault(f"value {index} has {len(dims)} dimensions, {_MAX_RANK} are the most")
            self._tensors[index] = _Tensor(tensor.number(0, "i8"), dims, tensor.number(2, "i32"))
        return self._tensors[index]

    def _constant(self, tensor: _Tensor) -> GraphConstant:
        if tensor not in self._read:
            self._read[tensor] = self._read_constant(tensor)
        return self._read[tensor]

    def _read_constant(self, tensor: _Tensor) -> GraphConstant:
        stored = self._constants[tensor.constant]
        offset, length, key = stored.number(0, "u64"), stored.number(1, "u64"), stored.text(2)
        nbytes = prod(tensor.dims) * DTYPE_BITS[tensor.dtype_name] // 8
        if length != nbytes:
            raise self._file.fault(f"constant {tensor.constant} has {length:,} bytes, but is {tensor}")
        if offset == _HAS_KEY:
            if not key:
                raise self._file.fault(f"constant {tensor.constant} has neither a place nor a key")
            return GraphConstant(tensor.dtype_name, nbytes, key)
        if offset + nbytes > self._bytes_nbytes:
            raise self._file.fault(f"constant {tensor.constant} lies outside the bytes of its blob")
        return GraphConstant(tensor.dtype_name, nbytes, None, self._bytes_start + offset)
