"""ONNX Runtime's com.microsoft.MatMulNBits: blocks of a row, the even column low, code + 8. Needs the onnx package.

B is uint8 [N, blocks, block / 2]; scales are float32 or float16 [N, blocks], here the row's scale repeated; zero points
are uint8 [N, ceil(blocks / 2)], low first, 8 where they are absent. K is filled up to whole blocks with the code 0.
Source: microsoft/onnxruntime 8b8f774, docs/ContribOperators.md, com.microsoft.MatMulNBits.
"""

import os
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ContainerError, LossyError, SourceError
from ..metadata import PackedEntry
from ..nibbles import OFFSET, PAD_BYTE, unpack_nibbles
from ..onnx_model import all_tensors, external_file, external_place, is_external, load_model, onnx_package
from ..packed import PackedLinear
from ..packed_file import PackedFile
from ..safetensors_file import open_for_reading, read_at
from .low_first import from_low_first, to_low_first
from .one_scale import one_scale_per_row, refuse_zero_points

OPERATOR, DOMAIN = "MatMulNBits", "com.microsoft"
SMALLEST_BLOCK, LARGEST_BLOCK = 16, 1 << 20
_INPUTS = ("A", "B", "scales", "zero_points", "g_idx", "bias")
# How quantizers name B after the weight: fc.weight_Q4G32 (ours and ONNX Runtime's), fc.weight_Q4, fc.weight_quant.
_SUFFIX = re.compile(r"(_Q4(G\d+)?|_quant)$")


def has_nodes(path: Path) -> bool:
    """Tell whether an ONNX model has a MatMulNBits node.

    Raises:
        Qcs4wError: the onnx package is not installed.
        SourceError: not a sound ONNX model.
    """
    return any(_is_packed(node) for node in load_model(path).graph.node)


class MatMulNBitsFile(PackedFile):
    """The MatMulNBits nodes of an ONNX model, each known by the name of its weight. Use it as a context manager.

    The model itself is read whole; tensors that lie in a file beside it (external data) when they are asked for.

    Raises:
        Qcs4wError: the onnx package is not installed.
        SourceError: not a sound ONNX model.
        ContainerError: it has no node of that kind in 4 bits, or one that does not fit together.
    """

    format = "onnx"

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.carried, self.problems = [], []
        self.notes: list[str] = []
        self._onnx = onnx_package()
        model = load_model(self.path)
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self._nodes: dict[str, dict[str, str]] = {}
        self._blocks: dict[str, int] = {}
        self.entries = {}
        for node in model.graph.node:
            if _is_packed(node):
                self._add(node)
        if not self.entries:
            raise ContainerError(f"{self.path}: has no {OPERATOR} node of 4 bits")
        used = {name for inputs in self._nodes.values() for name in inputs.values()}
        others = len(self._tensors.keys() - used)
        besides = {0: "", 1: ", and 1 initialiser that is no packed linear"}.get(
            others, f", and {others:,} initialisers that are no packed linears"
        )
        self.notes.append(f"left out: the model's graph{besides}")
        external = (external_file(tensor, self.path) for tensor in all_tensors(model.graph) if is_external(tensor))
        self._files = tuple(dict.fromkeys(path for path in external if path is not None))

    def close(self) -> None:
        """Let go of the model."""
        self._tensors = {}

    @property
    def files(self) -> tuple[Path, ...]:
        """The model, and the files of its external data."""
        return (self.path, *self._files)

    def arrays(self, entry: PackedEntry) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Read packed bytes in qcs4w's layout and scales.

        Raises:
            LossyError: the blocks of a row differ in scale, a zero point is not 8, or columns are reordered.
        """
        inputs, where = self._nodes[entry.name], f"{self.path}: tensor '{entry.name}'"
        rows, block = entry.out_features, self._blocks[entry.name]
        blocks = -(-entry.in_features // block)
        if "g_idx" in inputs:
            raise LossyError(f"{where}: its columns are grouped by activation order (g_idx)")
        scales = self._read(inputs["scales"], (np.float32, np.float16), rows, blocks).astype(np.float32)
        shared = one_scale_per_row(np.ascontiguousarray(scales.reshape(rows, blocks).T), where)
        if "zero_points" in inputs:
            self._refuse_asymmetry(inputs["zero_points"], rows, blocks, where)
        stored = self._read(inputs["B"], (np.uint8,), rows, blocks, block // 2).reshape(rows, -1)
        return from_low_first(stored, entry.in_features), shared

    def bias(self, entry: PackedEntry) -> NDArray[np.float32] | None:
        """Return the node's bias, float32 (N,), or None."""
        name = self._nodes[entry.name].get("bias")
        if name is None:
            return None
        return self._read(name, (np.float32, np.float16), entry.out_features).astype(np.float32)

    def _add(self, node: Any) -> None:
        if not all(isinstance(name, str) for name in (node.name, *node.input)):  # bytes where they are no UTF-8
            raise SourceError(f"{self.path}: node {node.name!r:.100} has names that are not valid Unicode")
        attributes = {attribute.name: attribute.i for attribute in node.attribute}
        inputs = {role: name for role, name in zip(_INPUTS, node.input, strict=False) if name and role != "A"}
        weight = inputs.get("B", "")
        name = _SUFFIX.sub("", weight) or node.name
        if attributes.get("bits", 4) != 4:
            self.notes.append(f"'{name}' has {attributes['bits']} bits and is left out")
            return
        if not {"B", "scales"} <= inputs.keys() or any(part not in self._tensors for part in inputs.values()):
            raise ContainerError(f"{self.path}: node '{node.name}' has inputs that are no initialisers")
        rows, columns, block = (attributes.get(key, 0) for key in ("N", "K", "block_size"))
        if rows < 1 or columns < 1 or fault_of_block(block):
            raise ContainerError(f"{self.path}: node '{node.name}' states N {rows}, K {columns}, block_size {block}")
        if name in self.entries:
            if self._nodes[name]["B"] == weight:
                return  # one weight in several nodes
            name = weight
        self.entries[name] = PackedEntry(name, rows, columns, source_dtype="unknown", method="unknown")
        self._nodes[name], self._blocks[name] = inputs, block

    def _refuse_asymmetry(self, name: str, rows: int, blocks: int, where: str) -> None:
        if self._tensors[name].data_type == self._onnx.TensorProto.UINT8:
            stored = self._read(name, (np.uint8,), rows, -(-blocks // 2)).reshape(rows, -1)
            refuse_zero_points(unpack_nibbles(stored, even_high=False)[:, :blocks].T, OFFSET, where)
        else:  # not packed, in the dtype of the scales
            values = self._read(name, (np.float32, np.float16), rows, blocks).reshape(rows, blocks)
            refuse_zero_points(values.T, OFFSET, where)

    def _read(self, name: str, dtypes: tuple[type[np.generic], ...], *shape: int) -> NDArray[Any]:
        """Read an initialiser of known shape, flat; what has one value a block may be stored flat as well."""
        tensor = self._tensors[name]
        helper = self._onnx.helper
        known = {helper.np_dtype_to_tensor_dtype(np.dtype(dtype)): np.dtype(dtype) for dtype in dtypes}
        dtype = known.get(tensor.data_type)
        if dtype is None:
            raise ContainerError(
                f"{self.path}: initialiser '{name}' has data type {tensor.data_type}, "
                f"expected {' or '.join(str(item) for item in known.values())}"
            )
        dims, count = tuple(tensor.dims), prod(shape)
        if dims != shape and not (len(shape) == 2 and dims == (count,)):
            raise ContainerError(f"{self.path}: initialiser '{name}' is {list(dims)}, expected {list(shape)}")
        if is_external(tensor):
            data = self._external(tensor, count * dtype.itemsize)
            return np.frombuffer(data, dtype.newbyteorder("<"))
        try:
            array: NDArray[Any] = self._onnx.numpy_helper.to_array(tensor).reshape(-1)
        except (ValueError, TypeError, OverflowError, MemoryError) as error:
            raise SourceError(f"{self.path}: initialiser '{name}' is not sound: {error}") from None
        return array

    def _external(self, tensor: Any, nbytes: int) -> bytes:
        place, offset = external_place(tensor, self.path, nbytes)
        fd = open_for_reading(place)
        try:
            return read_at(fd, place, offset, nbytes)
        finally:
            os.close(fd)


def _is_packed(node: Any) -> bool:
    return bool(node.op_type == OPERATOR and node.domain == DOMAIN)


def fault_of_block(block: int) -> str | None:
    """Say why the operator does not take a block size, or return None."""
    if block < SMALLEST_BLOCK or block > LARGEST_BLOCK or block & (block - 1):
        return f"a block is a power of two from {SMALLEST_BLOCK} up"
    return None


def encode(
    weight: PackedLinear, scales: NDArray[Any], *, block: int, explicit_zero_points: bool
) -> dict[str, NDArray[Any]]:
    """Return the arrays of one node by the operator's names for its inputs.

    Args:
        weight: the linear.
        scales: shape (N,), float32 or float16.
        block: columns to a block.
        explicit_zero_points: state the 8 that is the default.

    Returns:
        B: uint8, shape (N, blocks, block / 2). scales: shape (N, blocks). zero_points: uint8, (N, ceil(blocks / 2)).
    """
    stored = to_low_first(weight.packed, weight.in_features, multiple=block)
    blocks = stored.shape[1] * 2 // block
    arrays = {
        "B": stored.reshape(weight.out_features, blocks, block // 2),
        "scales": np.repeat(scales[:, None], blocks, axis=1),
    }
    if explicit_zero_points:
        arrays["zero_points"] = np.full((weight.out_features, -(-blocks // 2)), PAD_BYTE, np.uint8)
    return arrays


def decode(entry: PackedEntry, stored: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
    """Return qcs4w's bytes again, from what `encode` returned."""
    return from_low_first(stored["B"].reshape(entry.out_features, -1), entry.in_features)


def tensor_names(name: str, block: int) -> dict[str, str]:
    """Return how the initialisers of a node are named, as ONNX Runtime's quantizer names them."""
    stem = f"{name}_Q4G{block}"
    return {
        "B": stem,
        "scales": f"{name}_scales",
        "zero_points": f"{name}_zero_points",
        "bias": f"{name}_bias",
    }


def node(onnx: Any, entry: PackedEntry, names: Mapping[str, str], block: int) -> Any:
    """Return the node of one weight, from `<weight>_input` to `<weight>_output`."""
    inputs = [f"{entry.name}_input", *(names.get(role, "") for role in _INPUTS[1:])]
    while not inputs[-1]:
        inputs.pop()
    return onnx.helper.make_node(
        OPERATOR,
        inputs,
        [f"{entry.name}_output"],
        name=entry.name,
        domain=DOMAIN,
        N=entry.out_features,
        K=entry.in_features,
        bits=4,
        block_size=block,
    )
