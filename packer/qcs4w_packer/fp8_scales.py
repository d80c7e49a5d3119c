"""Which tensor holds the scales of an fp8 weight, and what part of the weight each of them stands for.

Nothing is guessed: one sibling under a usual name, of a shape that fits one layout, or an error that says what was
looked for. Source of the names: DeepSeek-V3 and transformers (`weight_scale_inv`, `T_scale_inv` of stacked experts,
`activation_scale`), compressed-tensors, llm-compressor and ModelOpt (`weight_scale`, `input_scale`), DeepSeek's own
inference code (`scale`), Mistral (`qscale_weight`, `qscale_act`), ComfyUI (`scale_weight`, `scale_input`).
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import SelectionError
from .fp8 import WEIGHT_DTYPES, Fp8Rows, fp8_values
from .weights import FLOAT_DTYPES, Source, SourceTensor, widen

_DEFAULT_BLOCK = (128, 128)  # DeepSeek-V3's, and of all that follow it without saying so
_MX_BLOCK = (1, 32)  # fixed by the Microscaling specification, whose scales are E8M0
_EXPONENTS = ("F8_E8M0", "U8")  # compressed-tensors and transformers keep those in bytes

# Beside a weight T, and beside a module M of the weight M.weight.
_WEIGHT_SUFFIXES = ("_scale_inv", "_scale", ".scale")
_MODULE_NAMES = ("scale_weight", "qscale_weight", "scale_inv", "scale")
_ACTIVATION_SUFFIXES = ("_activation_scale", "_input_scale")
_ACTIVATION_NAMES = ("input_scale", "activation_scale", "input_scale_ub", "scale_input", "qscale_act")


def is_fp8_weight(tensor: SourceTensor) -> bool:
    """Tell whether a tensor has the dtype and rank of a weight, or of a stack of weights, in fp8."""
    return tensor.dtype in WEIGHT_DTYPES and len(tensor.shape) in (2, 3)


def with_scales(source: Source) -> Source:
    """Return the source with every fp8 weight that has sound scales readable as floats. Reads no data."""
    waiting = [t for t in source.tensors.values() if is_fp8_weight(t) and t.fp8 is None and 0 not in t.shape]
    scaled = {}
    with suppress(SelectionError):  # what is wrong is told when somebody wants such a tensor
        blocks = block_sizes(source) if waiting else []
        for tensor in waiting:
            with suppress(SelectionError):
                scaled[tensor.name] = replace(tensor, fp8=find_scale(source, tensor, blocks))
    return replace(source, tensors={**source.tensors, **scaled}) if scaled else source


def find_scale(source: Source, tensor: SourceTensor, blocks: Collection[tuple[int, int]] | None = None) -> Fp8Rows:
    """Find the scales of an fp8 weight and how they lie over it.

    Args:
        source: the file, or the folder.
        tensor: an fp8 weight of it.
        blocks: what `block_sizes` says of it, where that is known already.

    Raises:
        SelectionError: there are none, several, or of a shape that fits no layout.
    """
    where = f"{source.path}: tensor '{tensor.name}' {list(tensor.shape)} is {tensor.dtype}"
    names = _scale_names(tensor.name)
    found = [name for name in names if name in source.tensors]
    if not found:
        raise SelectionError(
            f"{where} and has no scale: none of {', '.join(names)} is there",
            hint="its codes mean nothing without their scale: is a shard missing? --exclude leaves it as it is",
        )
    if len(found) > 1:
        raise SelectionError(
            f"{where} and has more than one scale: {', '.join(found)}", hint="--exclude leaves it as it is"
        )
    if (zero := f"{tensor.name}_zero_point") in source.tensors:
        raise SelectionError(f"{where} with a zero point ({zero}), which fp8 weights do not have")
    scale = source.tensors[found[0]]
    if scale.dtype not in (*FLOAT_DTYPES, *_EXPONENTS):
        raise SelectionError(
            f"{where} and its scale '{scale.name}' is {scale.dtype}, expected one of "
            + ", ".join((*FLOAT_DTYPES, *_EXPONENTS))
        )
    rows, columns = tensor.shape[-2:]
    blocks = block_sizes(source) if blocks is None else blocks
    mx = {_MX_BLOCK} if scale.dtype in _EXPONENTS else set()
    block = _block_of(scale.shape, tensor.shape, {*blocks} | mx)
    if block is None:
        raise SelectionError(
            f"{where} and its scale '{scale.name}' has shape {list(scale.shape)}, expected "
            + " or ".join(str(list(shape)) for shape in _expected_shapes(tensor.shape, blocks)),
            hint="a scale belongs to the whole weight, to a row, or to a block; the size of a block is read from "
            "weight_block_size in config.json, else it is 128×128",
        )
    return Fp8Rows(
        tensor.name, tensor.dtype, (rows, columns), scale.name, block, _fetcher(scale, -(-columns // block[1]))
    )


def activation_scales(name: str, known: Collection[str]) -> list[str]:
    """Return the scales of the inputs of an fp8 weight's layer, which say nothing of its floats."""
    module = _module(name)
    names = [name + suffix for suffix in _ACTIVATION_SUFFIXES]
    names += [module + other for other in _ACTIVATION_NAMES] if module is not None else []
    return [other for other in names if other in known]


def _module(name: str) -> str | None:
    """Return `a.b.` of `a.b.weight`, and nothing of a name that is no module's weight."""
    return name.removesuffix("weight") if name == "weight" or name.endswith(".weight") else None


def _scale_names(name: str) -> list[str]:
    module = _module(name)
    return [name + suffix for suffix in _WEIGHT_SUFFIXES] + (
        [module + other for other in _MODULE_NAMES] if module is not None else []
    )


def block_sizes(source: Source) -> list[tuple[int, int]]:
    """Return the block sizes that config.json gives, else the usual one.

    Raises:
        SelectionError: what it gives is not two positive numbers.
    """
    said: list[Any] = []
    for config in (source.config, source.config.get("text_config")):
        for key in ("quantization_config", "compression_config"):
            quantization = config.get(key) if isinstance(config, Mapping) else None
            if not isinstance(quantization, Mapping):
                continue
            said.append(quantization.get("weight_block_size"))
            groups = quantization.get("config_groups")
            for group in groups.values() if isinstance(groups, Mapping) else ():
                weights = group.get("weights") if isinstance(group, Mapping) else None
                said.append(weights.get("block_structure") if isinstance(weights, Mapping) else None)
    sizes = []
    for size in said:
        if size is None:
            continue
        if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
            raise SelectionError(
                f"{source.path}: the block size of its quantization_config is {size!r:.100}, expected two numbers "
                "above 0"
            )
        if (size[0], size[1]) not in sizes:
            sizes.append((size[0], size[1]))
    return sizes or [_DEFAULT_BLOCK]


def _expected_shapes(weight: tuple[int, ...], blocks: Collection[tuple[int, int]]) -> list[tuple[int, ...]]:
    *stack, rows, columns = weight
    tiled = [(*stack, -(-rows // block[0]), -(-columns // block[1])) for block in blocks]
    return [(), (*stack, 1, 1), (*stack, rows, 1), *tiled] if stack else [(), (rows,), (rows, 1), *tiled]


def _block_of(
    scale: tuple[int, ...], weight: tuple[int, ...], blocks: Collection[tuple[int, int]]
) -> tuple[int, int] | None:
    """Return (rows, columns) of a matrix that one scale stands for, or None where the shape fits no layout."""
    *stack, rows, columns = weight
    if prod(scale) == 1 or (stack and scale in ((*stack,), (*stack, 1), (*stack, 1, 1))):
        return rows, columns
    if scale in ((*stack, rows), (*stack, rows, 1)):
        return 1, columns
    if stack and scale == (*stack, 1, columns):  # of a stack that lies [E, in, out]
        return rows, 1
    fits = {
        (min(block[0], rows), min(block[1], columns))
        for block in blocks
        if scale == (*stack, -(-rows // block[0]), -(-columns // block[1]))
    }
    return fits.pop() if len(fits) == 1 else None


def _fetcher(scale: SourceTensor, width: int) -> Callable[[int, int], NDArray[np.float32]]:
    """Return what reads some rows of scales as float32 (n, width)."""

    def decode(data: bytes, first_row: int, columns: int) -> NDArray[np.float32]:
        if scale.dtype in _EXPONENTS:
            return fp8_values("F8_E8M0")[np.frombuffer(data, np.uint8)].reshape(-1, columns)
        return widen(data, scale.dtype, name=scale.name, first_row=first_row, columns=columns)

    def fetch(start: int, stop: int) -> NDArray[np.float32]:
        if prod(scale.shape) == 1:
            return np.broadcast_to(decode(scale.fetch(0, 1), 0, 1), (stop - start, 1))
        if scale.shape[-1] == width and len(scale.shape) > 1:
            return decode(scale.fetch(start, stop), start, width)
        return decode(scale.fetch(0, scale.rows), 0, width)[start:stop]  # one number a row, all in one dimension

    return fetch
