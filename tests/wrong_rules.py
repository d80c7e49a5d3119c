"""The packing rule as people get it wrong, which a good set of cases must notice."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qcs4w_packer import pack_codes

WRONG_RULES = (
    "divide",
    "divisor 7",
    "divisor 8",
    "half away from zero",
    "clamp at -7",
    "no floor",
    "low first",
    "pad after the shift",
)


class Answer(NamedTuple):
    """What a packer makes of one weight: int8 (N, K), float32 (N,), uint8 (N, ceil(K / 2))."""

    codes: NDArray[np.int8]
    scales: NDArray[np.float32]
    packed: NDArray[np.uint8]


def pack_wrongly(weight: NDArray[np.float32], rule: str) -> Answer:
    """Pack a float32 (N, K) weight by the rule of the format but for one mistake, one of WRONG_RULES."""
    divisor = np.float32({"divisor 7": 7, "divisor 8": 8}.get(rule, 7.5))
    absmax = np.abs(weight).max(axis=1)
    scales = np.maximum(absmax / divisor, np.float32(2.0**-23))
    if rule == "no floor":
        scales = np.where(absmax > 0, absmax / divisor, np.float32(1))
    with np.errstate(all="ignore"):
        scaled = weight / scales[:, None] if rule == "divide" else weight * (np.float32(1) / scales)[:, None]
        away = np.trunc(scaled + np.copysign(np.float32(0.5), scaled))
        rounded = away if rule == "half away from zero" else np.rint(scaled)
        codes = np.nan_to_num(np.clip(rounded, -7 if rule == "clamp at -7" else -8, 7)).astype(np.int8)
    packed = pack_codes(codes)
    if rule == "low first":
        packed = packed << 4 | packed >> 4
    if rule == "pad after the shift" and weight.shape[1] % 2:
        packed[:, -1] &= 0xF0
    return Answer(codes, scales, packed)
