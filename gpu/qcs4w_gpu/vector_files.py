"""Test vectors as files: raw arrays, a JSON index and a C header, in a folder of their own."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from qcs4w_packer import __version__
from qcs4w_packer.files import replacing_folder
from qcs4w_packer.nibbles import EVEN_HIGH, OFFSET, PAD_NIBBLE, packed_width

from .vectors import DEFAULT_SIZES, KINDS, Vector, check_size, make_vector

FORMAT, FORMAT_VERSION = "qcs4w-vectors", 1
INDEX, HEADER, README = "index.json", "qcs4w_vectors.h", "README.txt"

_LINE = 16  # numbers a line of the header
_MAX_INDEX_NBYTES = 16 << 20

_README = """\
Test vectors for et_vk.linear_qcs4w, made by qcs4w {version} with seed {seed}.

    y[m, n] = sum over k of x[m, k] * (nibble(n, k) - 8) * scales[n]

x is float32 [M, K], packed uint8 [N, ceil(K/2)], scales float32 [N], y float64 [M, N]; row by row, little-endian.
nibble(n, k) lies in byte k / 2 of row n: an even k in its high half, an odd k in its low half. The low half of the last
byte of an odd K is padding (8) and belongs to no column.

exact cases: your y must be equal to y. All sums are whole numbers that float32 holds, in any order.
bounded cases: |your y - y| must be at most bound, float32 [M, N], for each element (compare in float64). It allows for
float32 sums in any order, rounded to nearest, and for flushed subnormals; where a device rounds otherwise, twice that.

index.json lists every case with its files, shapes, dtypes and sha256. {header} holds the same for C and C++:
    #include "{header}"
    for (size_t i = 0; i < QCS4W_VECTOR_COUNT; i++) {{ const qcs4w_vector *v = &qcs4w_vectors[i]; ... }}
A kernel that binds packed as array<u32> needs the end of the buffer filled up to 4 bytes.
"""

_HEADER_HEAD = """\
/* Test vectors for et_vk.linear_qcs4w, made by qcs4w {version} with seed {seed}. README.txt says how to use them. */
#ifndef QCS4W_VECTORS_H
#define QCS4W_VECTORS_H

#include <stddef.h>
#include <stdint.h>

typedef struct {{
    const char *name;
    uint32_t M, N, K, K_packed;
    const float *x;        /* [M, K] */
    const uint8_t *packed; /* [N, K_packed], even column in the high nibble, code + 8 */
    const float *scales;   /* [N] */
    const double *y;       /* [M, N] */
    const float *bound;    /* [M, N], or NULL where y must be equal */
}} qcs4w_vector;
"""


@dataclass(frozen=True)
class Written:
    """What was written: the index, and the bytes of all files."""

    index: dict[str, Any]
    nbytes: int


def write_vectors(
    folder: str | os.PathLike[str],
    sizes: Iterable[tuple[int, int, int]] = DEFAULT_SIZES,
    *,
    seed: int = 0,
    force: bool = False,
) -> Written:
    """Write an exact and a bounded case of each size into a new folder; the same seed gives the same bytes.

    Args:
        folder: where to; it becomes whole or stays as it was.
        sizes: M, N, K of each case; one given twice is written once.
        seed: of what is drawn.
        force: replace a folder that holds nothing but what was written here before.

    Raises:
        UsageError: a size is below 1 or too large.
        OutputError: the folder exists or cannot be written.
    """
    wanted = list(dict.fromkeys(sizes))
    for size in wanted:
        check_size(*size)
    with replacing_folder(folder, force=force, is_ours=holds_vectors_only) as path:
        cases = []
        with (path / HEADER).open("w", encoding="utf-8") as header:
            header.write(_HEADER_HEAD.format(version=__version__, seed=seed))
            entries = []
            for size in wanted:
                for kind in KINDS:
                    vector = make_vector(*size, kind=kind, seed=seed)
                    cases.append(_write_case(path, vector))
                    header.writelines(_c_arrays(vector))
                    entries.append(_c_entry(vector))
            header.write(f"\nstatic const qcs4w_vector qcs4w_vectors[] = {{\n{''.join(entries)}}};\n")
            header.write(f"\n#define QCS4W_VECTOR_COUNT {len(entries)}\n\n#endif\n")
        (path / README).write_text(_README.format(version=__version__, seed=seed, header=HEADER), encoding="utf-8")
        index = _index(cases, seed)
        (path / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        nbytes = sum(file.stat().st_size for file in path.iterdir())
    return Written(index, nbytes)


def holds_vectors_only(folder: Path) -> bool:
    """Tell whether a folder holds test vectors as its index lists them, and no other file."""
    try:
        with (folder / INDEX).open("rb") as file:
            index = json.loads(file.read(_MAX_INDEX_NBYTES))
        if index["format"] != FORMAT:
            return False
        listed = {array["file"] for case in index["cases"] for array in case["arrays"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
    return all(file.is_file() and file.name in {*listed, INDEX, HEADER, README} for file in folder.iterdir())


def _arrays(vector: Vector) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the arrays of a case by name, in the byte order of the files."""
    yield "x", vector.x.astype("<f4")
    yield "packed", vector.packed.packed
    yield "scales", vector.packed.scales.astype("<f4")
    yield "y", vector.y.astype("<f8")
    if vector.bound is not None:
        yield "bound", vector.bound.astype("<f4")


def _write_case(folder: Path, vector: Vector) -> dict[str, Any]:
    """Write the arrays of a case and return its entry in the index."""
    arrays = {}
    for name, array in _arrays(vector):
        data = array.tobytes()
        file = f"{vector.name}.{name}.bin"
        (folder / file).write_bytes(data)
        arrays[name] = {
            "file": file,
            "dtype": array.dtype.name,
            "shape": list(array.shape),
            "nbytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
    rows, out_features, in_features = vector.size
    return {
        "name": vector.name,
        "kind": vector.kind,
        "M": rows,
        "N": out_features,
        "K": in_features,
        "K_packed": packed_width(in_features),
        "arrays": arrays,
    }


def _index(cases: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "tool": f"qcs4w {__version__}",
        "seed": seed,
        "operator": "et_vk.linear_qcs4w",
        "equation": "y[m, n] = sum_k x[m, k] * (nibble(n, k) - offset) * scales[n]",
        "byte_order": "little",
        "array_order": "C",
        "nibble_order": EVEN_HIGH.name,
        "offset": OFFSET,
        "pad_nibble": PAD_NIBBLE,
        "kinds": {
            "exact": "a float32 y must be equal to y",
            "bounded": "|y32 - y| must be at most bound for each element, compared in float64",
        },
        "header": HEADER,
        "cases": cases,
    }


def _c_arrays(vector: Vector) -> Iterator[str]:
    """Yield the definitions of a case's arrays in C."""
    types = {"x": "float", "packed": "uint8_t", "scales": "float", "y": "double", "bound": "float"}
    for name, array in _arrays(vector):
        numbers = [_c_number(value, types[name]) for value in array.ravel()]
        yield f"\nstatic const {types[name]} qcs4w_{vector.name}_{name}[] = {{\n"
        for start in range(0, len(numbers), _LINE):
            yield "    " + ", ".join(numbers[start : start + _LINE]) + ",\n"
        yield "};\n"


def _c_number(value: Any, kind: str) -> str:
    """Return a number as C reads it back bit for bit: the shortest decimal that rounds to it."""
    if kind == "uint8_t":
        return f"0x{value:02X}"
    return f"{value!s}f" if kind == "float" else str(value)


def _c_entry(vector: Vector) -> str:
    rows, out_features, in_features = vector.size
    name = f"qcs4w_{vector.name}"
    bound = "NULL" if vector.bound is None else f"{name}_bound"
    return (
        f'    {{"{vector.name}", {rows}, {out_features}, {in_features}, {packed_width(in_features)}, '
        f"{name}_x, {name}_packed, {name}_scales, {name}_y, {bound}}},\n"
    )
