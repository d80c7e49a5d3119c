"""What the nibbles of packed codes tell by themselves, without weights or outputs to hold them against."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .nibbles import CODE_MIN, EVEN_HIGH, EVEN_HIGH_TWOS, signed_codes

Bytes = NDArray[np.uint8]

_SURE = 0.9


@dataclass(frozen=True)
class Histogram:
    """What the nibbles alone tell.

    Attributes:
        counts: of the nibbles 0 to 15.
        encoding: "code + 8", "two's complement", or None where it cannot be told.
        probability: of that encoding against the other.
        clamped: no code of −8 among them: a symmetric clamp; None where the encoding cannot be told.
        clamp_probability: that a file without the clamp would have shown one.
    """

    counts: tuple[int, ...]
    encoding: str | None
    probability: float
    clamped: bool | None
    clamp_probability: float


def explain_alone(packed: Bytes, out_features: int) -> Histogram:
    """Tell code + 8 from two's complement, and a clamp at ±7, by how often each nibble occurs.

    Codes of weights gather round 0. The order of two nibbles in a byte leaves no trace in their histogram.

    Args:
        packed: uint8, any shape; the first 4 MiB are looked at.
        out_features: N, rows that they hold.
    """
    flat = packed.reshape(-1)[: 1 << 22]
    counts = np.bincount(flat & 0x0F, minlength=16) + np.bincount(flat >> 4, minlength=16)
    total = int(counts.sum())
    nibbles = np.arange(16, dtype=np.uint8)
    hypotheses = {
        "code + 8": signed_codes(nibbles, EVEN_HIGH).astype(np.int64),
        "two's complement": signed_codes(nibbles, EVEN_HIGH_TWOS).astype(np.int64),
    }
    likelihoods = {name: _bell_likelihood(counts, codes) for name, codes in hypotheses.items()}
    flat_likelihood = total * math.log(1 / 16)
    best = max(likelihoods, key=lambda name: likelihoods[name])
    other = min(likelihoods.values())
    probability = 1 / (1 + math.exp(max(other - likelihoods[best], -700)))
    if likelihoods[best] - flat_likelihood < 10 or probability < _SURE:
        return Histogram(tuple(int(c) for c in counts), None, probability, None, 0.0)
    lowest = int(counts[hypotheses[best] == CODE_MIN][0])
    rows = out_features * flat.size / max(1, packed.size)
    # By absmax / 7.5 a row holds a −8 where its largest magnitude is negative: one row in two.
    return Histogram(tuple(int(c) for c in counts), best, probability, lowest == 0, 1 - 0.5**rows)


def _bell_likelihood(counts: NDArray[np.int64], codes: NDArray[np.int64]) -> float:
    """Return the log-likelihood of counts when codes follow a normal distribution round 0 of the variance seen."""
    variance = max(float((counts * codes**2).sum() / counts.sum()), 0.05)
    logits = -(codes**2) / (2 * variance)
    log_p = logits - math.log(float(np.exp(logits).sum()))
    return float((counts * log_p).sum())
