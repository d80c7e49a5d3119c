"""Which method pack is to use, and with what: names and options, checked before any work."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError

#: The methods that need no inputs, and those that do, each with what it does.
PLAIN = {"absmax": "scale = absmax / 7.5, as ExecuTorch", "mse": "the least squared error of the weights"}
CALIBRATED = {
    "hmse": "the same, each column weighted by mean(x²)",
    "gptq": "the least squared error of the outputs: GPTQ, refitted scales, descent",
}
METHODS = PLAIN | CALIBRATED


@dataclass(frozen=True)
class Recipe:
    """What was asked for.

    Attributes:
        method: one of METHODS; by default gptq with calibration and absmax without.
        calibration: a file of activations or of what was made of them; see `calibration`.
        seed: chooses the rows of activations that are kept apart to measure by.
        device: where torch works, "cpu" or "cuda".

    Raises:
        UsageError: method and calibration do not go together, or an unknown method.
    """

    method: str | None = None
    calibration: Path | None = None
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.method is not None and self.method not in METHODS:
            raise UsageError(f"method '{self.method}' is not known, expected one of {', '.join(METHODS)}")
        if self.name in CALIBRATED and self.calibration is None:
            raise UsageError(
                f"method {self.name} needs to know the inputs of each linear",
                hint="give them with --calibration FILE, or use --method mse, which needs none",
            )
        if self.name in PLAIN and self.calibration is not None:
            raise UsageError(
                f"method {self.name} has no use for a calibration", hint=f"use one of {', '.join(CALIBRATED)}"
            )
        if self.device != "cpu" and self.calibration is None:
            raise UsageError(f"method {self.name} works on the CPU", hint="leave out --device")

    @property
    def name(self) -> str:
        """The method that it comes to."""
        return self.method or ("absmax" if self.calibration is None else "gptq")

    def check_device(self) -> None:
        """Say before any work that there is no such device.

        Raises:
            UsageError: torch cannot work there.
        """
        if self.device == "cpu":
            return
        import torch

        if not torch.cuda.is_available():
            raise UsageError(f"torch sees no device '{self.device}' here", hint="leave out --device to use the CPU")

    @classmethod
    def of(cls, options: dict[str, Any]) -> "Recipe":
        """Return what `options` told."""
        calibration = options["calibration"]
        return cls(**{**options, "calibration": None if calibration is None else Path(calibration)})

    def options(self) -> dict[str, Any]:
        """Return it as it can stand in JSON."""
        return {
            "method": self.name,
            "calibration": None if self.calibration is None else str(self.calibration),
            "seed": self.seed,
            "device": self.device,
        }
