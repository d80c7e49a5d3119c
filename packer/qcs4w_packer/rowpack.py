"""Float rows -> packed bytes and scales, in blocks that stay in the processor's cache."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import NonFiniteError, UsageError
from .measure import QuantizationError, quantization_error, row_square_sums
from .nibbles import pack_codes_into, packed_width
from .packed import PackedLinear
from .quantize import SCALE_FLOOR, dequantize, round_codes, row_absmax, row_scales, scaled_rows
from .scratch import Scratch

# 1 MiB of float32 measured fastest (2.6 GB/s of source on one core, against 0.5 for whole arrays).
_BLOCK_ELEMENTS = 256 * 1024

# Sums of longer rows are put together in float64; beyond 10,000 OpenBLAS would begin threads of its own.
_DOT_COLUMNS = 8192

# Of one row at a time; even, since two columns share a byte, and a multiple of _DOT_COLUMNS.
_PART_COLUMNS = 1 << 20


#: Float rows (n, K) -> their scales, float32 (n,).
ScaleRule = Callable[[NDArray[np.float32]], NDArray[np.float32]]


@dataclass(frozen=True)
class PackedRows:
    """Some consecutive rows, packed, and what the packing cost.

    Attributes:
        packed: uint8, shape (n, ceil(K / 2)).
        scales: float32, shape (n,).
        error_squares: float64, shape (n,), Σ(w − ŵ)² of each row.
        weight_squares: float64, shape (n,), Σw² of each row.
        floored: bool, shape (n,), rows whose scale met the floor of 2⁻²³ though they are not all zero.
    """

    packed: NDArray[np.uint8]
    scales: NDArray[np.float32]
    error_squares: NDArray[np.float64]
    weight_squares: NDArray[np.float64]
    floored: NDArray[np.bool_]


def pack_rows(weight: NDArray[np.float32], *, name: str = "weight", first_row: int = 0) -> PackedRows:
    """Quantize and pack rows of one weight.

    Args:
        weight: float32, shape (n, K), n and K at least 1.
        name: tensor name, for messages.
        first_row: the number of weight's first row within the tensor, for messages.

    Raises:
        NonFiniteError: a value is NaN or infinite; ExecuTorch's own packer lets it through.
    """
    return pack_read_rows(
        lambda start, stop: weight[start - first_row : stop - first_row],
        (len(weight), weight.shape[1]),
        name=name,
        first_row=first_row,
    )


def pack_read_rows(
    read: Callable[[int, int], NDArray[np.float32]],
    shape: tuple[int, int],
    *,
    name: str = "weight",
    first_row: int = 0,
    scratch: Scratch | None = None,
    rule: ScaleRule | None = None,
) -> PackedRows:
    """Quantize and pack rows that are read block by block, each while it is still in the processor's cache.

    Args:
        read: (start, stop) -> these rows of the tensor, float32 (stop - start, K).
        shape: n, K.
        name: tensor name, for messages.
        first_row: the first of the n rows.
        scratch: memory to work in.
        rule: how scales are chosen; by default as ExecuTorch does, by absmax.

    Raises:
        NonFiniteError: a value is NaN or infinite.
    """
    rows, in_features = shape
    scratch = scratch or Scratch()
    made = PackedRows(
        np.empty((rows, packed_width(in_features)), np.uint8),
        np.empty(rows, np.float32),
        np.empty(rows),
        np.empty(rows),
        np.empty(rows, np.bool_),
    )
    step = max(1, _BLOCK_ELEMENTS // in_features)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        block = read(first_row + part.start, first_row + part.stop)
        _pack_block(block, made, part, scratch, name=name, first_row=first_row, rule=rule)
    return made


def pack_found(weight: NDArray[np.float32], codes: NDArray[np.int8], scales: NDArray[np.float32]) -> PackedRows:
    """Pack codes that are not simply the nearest.

    Args:
        weight: float32, shape (n, K), finite: what the codes were made of.
        codes: int8, shape (n, K), each in [-8, 7].
        scales: float32, shape (n,).
    """
    rows, in_features = weight.shape
    packed = np.empty((rows, packed_width(in_features)), np.uint8)
    errors, weights = np.empty(rows), np.empty(rows)
    step = max(1, _BLOCK_ELEMENTS // in_features)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        pack_codes_into(np.ascontiguousarray(codes[part]), packed[part])
        errors[part], weights[part] = row_square_sums(weight[part], dequantize(codes[part], scales[part]))
    return PackedRows(packed, scales, errors, weights, (scales == SCALE_FLOOR) & (weights > 0))


def _pack_block(
    block: NDArray[np.float32],
    made: PackedRows,
    part: slice,
    scratch: Scratch,
    *,
    name: str,
    first_row: int,
    rule: ScaleRule | None,
) -> None:
    """Pack a block into its part of the rows."""
    absmax = row_absmax(block)
    if not np.isfinite(absmax).all():
        refuse_non_finite(block, name=name, first_row=first_row + part.start)
    made.scales[part] = row_scales(absmax) if rule is None else rule(block)
    made.floored[part] = (made.scales[part] == SCALE_FLOOR) & (absmax > 0)
    made.error_squares[part] = made.weight_squares[part] = 0
    for start in range(0, block.shape[1], _PART_COLUMNS):
        _pack_columns(block[:, start : start + _PART_COLUMNS], made, part, start, scratch)


def _pack_columns(block: NDArray[np.float32], made: PackedRows, part: slice, first: int, scratch: Scratch) -> None:
    """Pack some columns of a block whose scales are known, from an even one on, and add up their squares."""
    scales, floored = made.scales[part], made.floored[part]
    scaled = scaled_rows(block, scales, out=scratch.array("scaled", block.shape, np.float32))
    rounded = round_codes(scaled, out=scratch.array("rounded", block.shape, np.float32))
    codes = scratch.array("codes", block.shape, np.int8)
    np.copyto(codes, rounded, casting="unsafe")
    packed = made.packed[part, first // 2 : first // 2 + packed_width(block.shape[1])]
    pack_codes_into(codes, packed, scratch.array("nibbles", (len(packed), 2 * packed.shape[1]), np.uint8))

    errors, weights = _square_sums(scaled, rounded, scales)
    if floored.any():  # there the squares of scaled values can underflow
        sums = row_square_sums(block[floored], dequantize(codes[floored], scales[floored]))
        errors[floored], weights[floored] = sums
    made.error_squares[part] += errors
    made.weight_squares[part] += weights


def pack_weight(weight: NDArray[np.floating], *, name: str = "weight") -> PackedLinear:
    """Quantize and pack a float matrix.

    Args:
        weight: a float array, shape (N, K); rounded to float32 first.
        name: tensor name, for messages.

    Raises:
        UsageError: it is no matrix, or an empty one.
        NonFiniteError: a value is NaN, infinite, or beyond float32.
    """
    return pack_weight_measured(weight, name=name)[0]


def pack_weight_measured(
    weight: NDArray[np.floating], *, name: str = "weight"
) -> tuple[PackedLinear, QuantizationError]:
    """Do what `pack_weight` does and also return the quantization error."""
    if weight.ndim != 2 or 0 in weight.shape:
        raise UsageError(f"{name} has shape {weight.shape}, expected (N, K) with N and K at least 1")
    with np.errstate(over="ignore"):
        narrow = np.ascontiguousarray(weight, np.float32)
    rows = pack_rows(narrow, name=name)
    error = quantization_error(rows.error_squares, rows.weight_squares)
    return PackedLinear(rows.packed, rows.scales, narrow.shape[1]), error


def _square_sums(
    scaled: NDArray[np.float32], rounded: NDArray[np.float32], scales: NDArray[np.float32]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return Σ(w − ŵ)² and Σw² per row from values in units of the scale; overwrites `scaled`."""
    unit = scales.astype(np.float64) ** 2
    weight_squares = unit * _row_squares(scaled)
    np.subtract(scaled, rounded, out=scaled)
    return unit * _row_squares(scaled), weight_squares


def _row_squares(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the sum of squares of each row; BLAS does it in a third of einsum's time."""
    sums = np.zeros(len(values))
    for start in range(0, values.shape[1], _DOT_COLUMNS):
        part = values[:, start : start + _DOT_COLUMNS]
        sums += np.matmul(part[:, None, :], part[:, :, None])[:, 0, 0]
    return sums


def refuse_non_finite(weight: NDArray[np.float32], *, name: str, first_row: int = 0) -> None:
    """Raise NonFiniteError with the place of the first value, in row order, that is NaN or infinite."""
    if not weight.size or np.isfinite(row_absmax(weight)).all():
        return
    places = np.argwhere(~np.isfinite(weight))
    row, column = (int(i) for i in places[0])
    raise NonFiniteError(
        f"tensor '{name}' holds {weight[row, column]} at row {first_row + row}, column {column}; "
        "weights must be finite in float32"
    )
