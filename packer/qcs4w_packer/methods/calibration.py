"""Calibration files: what is known of the inputs of each linear.

A .safetensors or .npz file (or any other that `open_source` knows) with, for a weight `T` or its module `M` (`T`
without `.weight`), one of these, under either name:

    M                            activations, floats of shape [..., K], a row for each input
    M.hessian, M.hessian_rows    H = XᵀX, floats [K, K], and of how many rows it was made, one integer
    M.mean_square                mean(x²) of each column, floats [K]: enough for hmse
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..closing import Closing
from ..errors import NonFiniteError, SourceError, UnknownTensorError, UsageError
from ..name_patterns import did_you_mean
from ..sources import open_source
from ..weights import Source, SourceTensor
from .hessian import Gram
from .recipe import Recipe

HESSIAN, ROWS, MEAN_SQUARE = ".hessian", ".hessian_rows", ".mean_square"
ENOUGH_ROWS, FEW_ROWS = 16, 4  # times K

_BLOCK_ROWS = 64  # neighbours are alike, so that rows are kept apart in blocks
_MOST_HELD_OUT = 512
_ASYMMETRY = 1e-3  # of H, as a share of its largest diagonal element
_CHECK_ROWS = 1024
_INTEGERS = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "U8": "|u1"}


@dataclass(frozen=True)
class Inputs:
    """What a calibration file says of the inputs of one linear; headers only have been read.

    Attributes:
        kind: which of the three forms it has.
        name: of the array.
        tensor: the array.
        rows: inputs that the codes are chosen by; 0 for `mean_square`.
        held_out_rows: inputs kept apart.
    """

    kind: Literal["activations", "hessian", "mean_square"]
    name: str
    tensor: SourceTensor
    rows: int
    held_out_rows: int


@dataclass(frozen=True)
class Statistics:
    """What the methods need of the inputs of one linear.

    Attributes:
        mean_square: float64, shape (K,), in proportion to mean(x²) of each column.
        hessian: float32, shape (K, K), XᵀX; None where only the mean squares are known, or wanted.
        held_out: float32, shape (m, K), inputs kept apart; None where there are none.
    """

    mean_square: NDArray[np.float64]
    hessian: NDArray[np.float32] | None = None
    held_out: NDArray[np.float32] | None = None


class Calibration(Closing):
    """An open calibration file. Use it as a context manager.

    Args:
        path: the file.
        seed: chooses the rows that are kept apart.

    Raises:
        SourceError: no such file, or one that is not sound.
    """

    def __init__(self, path: Path, seed: int = 0):
        self.path, self.seed = path, seed
        self._source: Source = open_source(path)

    def close(self) -> None:
        """Close the file."""
        self._source.close()

    def check_names(self, known: Iterable[str]) -> None:
        """Refuse arrays that belong to none of these tensors.

        Raises:
            UnknownTensorError: there is one, or there is no array at all.
        """
        names = {form for name in known for form in _forms(name)}
        if not self._source.tensors:
            raise UnknownTensorError(f"{self.path}: holds no arrays")
        for array in self._source.tensors:
            base = next((array.removesuffix(end) for end in (HESSIAN, ROWS, MEAN_SQUARE) if array.endswith(end)), array)
            if base not in names and array not in names:
                raise UnknownTensorError(
                    f"{self.path}: array '{array}' is named after no tensor of the source",
                    hint=did_you_mean(base, names) or "name it after the weight or its module",
                )

    def find(self, names: Iterable[str], in_features: int, *, method: str) -> Inputs | None:
        """Find what there is for one linear, or None.

        Args:
            names: of the weight: its own and its aliases.
            in_features: K.
            method: it is for; decides what is needed.

        Raises:
            UsageError: a shape that cannot be, or mean squares only where H is needed.
            SourceError: an array that is not what its name says.
        """
        tensors = self._source.tensors
        forms = [form for name in names for form in _forms(name)]
        for base in forms:
            if base in tensors:
                shape = tensors[base].shape
                self._check(base, shape, (*shape[:-1], in_features), "[..., K]", some=True)
                rows = prod(shape[:-1])
                held_out = _held_out_count(rows)
                return Inputs("activations", base, tensors[base], rows - held_out, held_out)
            if base + HESSIAN in tensors:
                self._check(base + HESSIAN, tensors[base + HESSIAN].shape, (in_features, in_features), "[K, K]")
                return Inputs("hessian", base + HESSIAN, tensors[base + HESSIAN], self._rows(base), 0)
        for base in forms:
            if base + MEAN_SQUARE in tensors:
                name = base + MEAN_SQUARE
                if method != "hmse":
                    raise UsageError(
                        f"{self.path}: of '{base}' only mean(x²) is known, method {method} needs H or activations",
                        hint="use --method hmse",
                    )
                self._check(name, tensors[name].shape, (in_features,), "[K]")
                return Inputs("mean_square", name, tensors[name], 0, 0)
        return None

    def read(self, inputs: Inputs, *, need_hessian: bool) -> Statistics:
        """Read the inputs of one linear and sum them up; any thread may ask.

        Raises:
            NonFiniteError: a value is NaN or infinite.
            UsageError: H is not symmetric or has a negative diagonal element; a mean square is negative.
        """
        if inputs.kind == "activations":
            return self._sum_up(inputs, need_hessian=need_hessian)
        array = np.empty(inputs.tensor.shape, np.float32)
        flat = array.reshape(-1, inputs.tensor.shape[-1])
        for start, rows in inputs.tensor.float_rows():
            self._check_finite(inputs.name, rows, start)
            flat[start : start + len(rows)] = rows
        diagonal = array if inputs.kind == "mean_square" else np.diagonal(array)
        if diagonal.min() < 0:
            place = int(diagonal.argmin())
            raise UsageError(
                f"{self.path}: '{inputs.name}' holds {diagonal[place]} for column {place}, a sum of squares"
            )
        if inputs.kind == "hessian":
            self._check_symmetry(inputs.name, array)
        return Statistics(diagonal.astype(np.float64), array if inputs.kind == "hessian" and need_hessian else None)

    def _sum_up(self, inputs: Inputs, *, need_hessian: bool) -> Statistics:
        tensor, columns = inputs.tensor, inputs.tensor.shape[-1]
        kept_apart = held_out_rows(inputs.rows + inputs.held_out_rows, self.seed)
        gram = Gram(columns) if need_hessian else None
        squares = np.zeros(columns)
        held_out = []
        for start, rows in tensor.float_rows():
            self._check_finite(inputs.name, rows, start)
            apart = kept_apart[start : start + len(rows)]
            seen = rows[~apart]
            held_out.append(rows[apart])
            squares += np.einsum("ij,ij->j", seen, seen, dtype=np.float64)
            if gram is not None:
                gram.add(seen)
        return Statistics(
            squares, None if gram is None else gram.whole(), np.concatenate(held_out) if inputs.held_out_rows else None
        )

    def _rows(self, base: str) -> int:
        tensor = self._source.tensors.get(base + ROWS)
        if tensor is None:
            raise UsageError(
                f"{self.path}: '{base}{HESSIAN}' stands without '{base}{ROWS}', the number of rows that it was made of"
            )
        data = tensor.fetch(0, tensor.rows) if tensor.dtype in _INTEGERS and prod(tensor.shape) == 1 else b""
        rows = int(np.frombuffer(data, _INTEGERS[tensor.dtype])[0]) if data else 0
        if rows < 1:
            raise SourceError(f"{self.path}: '{base}{ROWS}' is not one integer of at least 1")
        return rows

    def _check(
        self, name: str, shape: tuple[int, ...], expected: tuple[int, ...], form: str, *, some: bool = False
    ) -> None:
        tensor = self._source.tensors[name]
        if not tensor.is_float or not shape:
            raise SourceError(f"{self.path}: '{name}' is {tensor.dtype} {list(shape)}, expected floats of shape {form}")
        if shape != expected or (some and 0 in shape):
            wanted = form.replace("K", str(expected[-1]))
            raise UsageError(f"{self.path}: '{name}' has shape {list(shape)}, the linear needs {wanted}")

    def _check_finite(self, name: str, rows: NDArray[np.float32], start: int) -> None:
        places = np.argwhere(~np.isfinite(rows))
        if len(places):
            row, column = (int(i) for i in places[0])
            raise NonFiniteError(
                f"{self.path}: '{name}' holds {rows[row, column]} at row {start + row}, column {column}"
            )

    def _check_symmetry(self, name: str, hessian: NDArray[np.float32]) -> None:
        most = _ASYMMETRY * float(np.diagonal(hessian).max())
        for start in range(0, len(hessian), _CHECK_ROWS):
            part = slice(start, start + _CHECK_ROWS)
            off = np.abs(hessian[part] - hessian[:, part].T)
            if off.max() > most:
                row, column = (int(i) for i in np.unravel_index(off.argmax(), off.shape))
                row += start
                raise UsageError(
                    f"{self.path}: '{name}' is not symmetric: {hessian[row, column]} at row {row}, column {column}, "
                    f"{hessian[column, row]} across",
                    hint="H is XᵀX, both triangles written out",
                )


def open_calibration(recipe: Recipe) -> AbstractContextManager[Calibration | None]:
    """Open a recipe's calibration file, if it has one.

    Raises:
        SourceError: no such file, or one that is not sound.
    """
    return nullcontext() if recipe.calibration is None else Calibration(recipe.calibration, recipe.seed)


def held_out_rows(rows: int, seed: int) -> NDArray[np.bool_]:
    """Choose the rows that are kept apart: about an eighth, at most 512, in blocks of neighbours.

    Returns:
        bool, shape (rows,).
    """
    kept_apart = np.zeros(rows, np.bool_)
    count = _held_out_count(rows)
    if count:
        block = max(1, min(_BLOCK_ROWS, count))
        starts = np.arange(0, rows - block + 1, block)
        for start in np.random.default_rng(seed).permutation(starts)[: count // block]:
            kept_apart[start : start + block] = True
    return kept_apart


def _held_out_count(rows: int) -> int:
    count = min(rows // 8, _MOST_HELD_OUT)
    return count - count % max(1, min(_BLOCK_ROWS, count))


def _forms(name: str) -> tuple[str, ...]:
    """Return a weight's name and its module's."""
    return tuple(dict.fromkeys((name, name.removesuffix(".weight"))))
