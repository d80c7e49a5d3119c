"""Writes checkpoints of other tools nibble by nibble, without the code under test."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from making import write_safetensors

#: Neighbour j of eight lies in nibble AWQ_PLACE[j] of an AWQ word.
AWQ_PLACE = (0, 4, 1, 5, 2, 6, 3, 7)


def words(nibbles: Iterable[int]) -> bytes:
    """Pack nibbles, eight to a little-endian word, the first in the lowest bits; the last word is filled with 0."""
    values = [int(value) for value in nibbles]
    values += [0] * (-len(values) % 8)
    return b"".join(
        sum(value << (4 * place) for place, value in enumerate(values[i : i + 8])).to_bytes(4, "little")
        for i in range(0, len(values), 8)
    )


def scales_of(groups: int, rows: int) -> np.ndarray:
    """Return float16 scales (G, N), the same in every group."""
    return np.tile((np.arange(rows) + 1).astype("<f2") / np.float16(16), (groups, 1))


def gptq(
    path: Path,
    codes: np.ndarray,
    *,
    stored_zero: int = 7,
    scales: np.ndarray | None = None,
    g_idx: list[int] | None = None,
    stem: str = "fc.",
    extra: dict[str, tuple[str, tuple[int, ...], bytes]] | None = None,
) -> Path:
    """Write signed codes (N, K) as a GPTQ checkpoint."""
    rows, columns = codes.shape
    scales = scales_of(1, rows) if scales is None else scales
    groups = len(scales)
    padded = np.pad(codes + 8, ((0, 0), (0, -columns % 8)))
    qweight = b"".join(
        words(padded[row, 8 * block : 8 * block + 8]) for block in range(padded.shape[1] // 8) for row in range(rows)
    )
    qzeros = b"".join(words([stored_zero] * rows) for _ in range(groups))
    tensors = {
        f"{stem}qweight": ("I32", (padded.shape[1] // 8, rows), qweight),
        f"{stem}qzeros": ("I32", (groups, -(-rows // 8)), qzeros),
        f"{stem}scales": ("F16", scales.shape, scales.astype("<f2").tobytes()),
    }
    if g_idx is not None:
        tensors[f"{stem}g_idx"] = ("I32", (columns,), np.array(g_idx, "<i4").tobytes())
    return write_safetensors(path, {**tensors, **(extra or {})})


def awq(path: Path, codes: np.ndarray, *, zero: int = 8, scales: np.ndarray | None = None, stem: str = "fc.") -> Path:
    """Write signed codes (N, K), N a multiple of 8, as an AWQ checkpoint."""
    rows, columns = codes.shape
    scales = scales_of(1, rows) if scales is None else scales

    def in_words(values: np.ndarray) -> bytes:
        placed = np.empty_like(values)
        for start in range(0, len(values), 8):
            for j, place in enumerate(AWQ_PLACE):
                placed[start + place] = values[start + j]
        return words(placed)

    tensors = {
        f"{stem}qweight": ("I32", (columns, rows // 8), b"".join(in_words(codes[:, k] + 8) for k in range(columns))),
        f"{stem}qzeros": ("I32", (len(scales), rows // 8), in_words(np.full(rows, zero)) * len(scales)),
        f"{stem}scales": ("F16", scales.shape, scales.astype("<f2").tobytes()),
    }
    return write_safetensors(path, tensors)


def compressed(
    path: Path,
    codes: np.ndarray,
    scales: np.ndarray,
    *,
    extra: dict[str, tuple[str, tuple[int, ...], bytes]] | None = None,
) -> Path:
    """Write signed codes (N, K) and float32 scales, of any shape, as compressed-tensors does."""
    rows, columns = codes.shape
    packed = b"".join(words(row + 8) for row in codes)
    tensors = {
        "fc.weight_packed": ("I32", (rows, -(-columns // 8)), packed),
        "fc.weight_scale": ("F32", scales.shape, scales.astype("<f4").tobytes()),
        "fc.weight_shape": ("I64", (2,), np.array([rows, columns], "<i8").tobytes()),
    }
    return write_safetensors(path, {**tensors, **(extra or {})})
