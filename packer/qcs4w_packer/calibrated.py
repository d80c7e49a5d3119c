"""What a container says about a tensor that was quantized with its inputs in view."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from .safetensors_file import is_unicode

_WIDE_NUMBER = 1.2345678901234567e-100
_LONGEST_FALLBACK = 60


@dataclass(frozen=True)
class Calibrated:
    """How a tensor was calibrated, and what that gained.

    Attributes:
        rows: inputs that codes and scales were chosen by; 0 where only their mean squares were given.
        held_out_rows: inputs kept apart, by which the errors were measured; 0 where there were none to keep, so that
            they were measured on the same inputs, if at all.
        seed: chose which rows are kept apart.
        damping: what was added to the diagonal of H, as a share of its mean; 0 where H was not used.
        output_error: ‖x·(W − Ŵ)ᵀ‖ / ‖x·Wᵀ‖; None where it could not be measured, or has not been yet.
        absmax_output_error: the same for method absmax.
        fallback: why another method was used than the one asked for.
    """

    rows: int
    held_out_rows: int
    seed: int
    damping: float = 0.0
    output_error: float | None = None
    absmax_output_error: float | None = None
    fallback: str | None = None

    @property
    def gain(self) -> float | None:
        """The error of the outputs as a share of absmax's; None where it is not known."""
        if self.output_error is None or not self.absmax_output_error:
            return None
        return self.output_error / self.absmax_output_error

    def to_json(self) -> dict[str, Any]:
        """Return it as it stands in the metadata."""
        return asdict(self)

    def widest(self) -> "Calibrated":
        """Return one that takes no less room in a header, whatever the outcome will be."""
        return replace(
            self,
            damping=_WIDE_NUMBER,
            output_error=_WIDE_NUMBER,
            absmax_output_error=_WIDE_NUMBER,
            fallback="_" * _LONGEST_FALLBACK,
        )


def calibrated_from_json(said: Any) -> Calibrated | None:
    """Read what metadata say of a tensor's calibration; None where they say nothing.

    Raises:
        TypeError, ValueError: the description is not sound.
    """
    if said is None:
        return None
    number, text = (int, float), (str, type(None))
    kinds: dict[str, tuple[type, ...]] = {
        "rows": (int,),
        "held_out_rows": (int,),
        "seed": (int,),
        "damping": number,
        "output_error": (*number, type(None)),
        "absmax_output_error": (*number, type(None)),
        "fallback": text,
    }
    if not isinstance(said, dict) or not all(type(said.get(key)) in kind for key, kind in kinds.items()):
        raise TypeError("its calibration is not described as it should be")
    found = Calibrated(**{key: said[key] for key in kinds})
    figures = (found.damping, found.output_error or 0, found.absmax_output_error or 0)
    counts = (found.rows, found.held_out_rows, found.seed)
    if not all(0 <= figure < math.inf for figure in figures) or not all(0 <= count < 1 << 63 for count in counts):
        raise ValueError("a figure of its calibration is out of range")
    if found.fallback is not None and not is_unicode(found.fallback):
        raise ValueError("a text is not valid Unicode")
    return found
