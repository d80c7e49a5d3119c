"""Override constants of a kernel: WebGPU sets them when a pipeline is made."""

import math
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass

from .errors import KernelError

_OVERRIDE = re.compile(r"(?:@id\s*\(\s*(\d+)[iu]?\s*\)\s*)?\boverride\s+(\w+)\s*(?::\s*(\w+)\s*)?(?:=\s*([^;]+))?;")
_RANGES = {"u32": (0, 2**32 - 1), "i32": (-(2**31), 2**31 - 1)}


@dataclass(frozen=True)
class Override:
    """An override constant.

    Attributes:
        key: by which WebGPU sets it: its @id, or else its name.
        name: in the text.
        kind: its type, or None where the text leaves it to the compiler.
        default: its expression, or None where it has to be set.
    """

    key: str
    name: str
    kind: str | None
    default: str | None

    def __str__(self) -> str:
        return self.name + (f": {self.kind}" if self.kind else "") + (f" = {self.default}" if self.default else "")


def read_overrides(scope: str) -> dict[str, Override]:
    """Return the override constants of a text without comments and bodies, by name."""
    return {
        name: Override(key or name, name, kind or None, default.strip() or None)
        for key, name, kind, default in _OVERRIDE.findall(scope)
    }


def settle(
    overrides: Mapping[str, Override], defines: Mapping[str, str], constants: Set[str], where: str
) -> dict[Override, float]:
    """Return the values that are to be set.

    Args:
        overrides: those of the kernel.
        defines: what the user gave, as text.
        constants: names of the kernel's other constants, for the message.
        where: the kernel, for messages.

    Raises:
        KernelError: a name is unknown, or a value does not fit its type.
    """
    known = f"there are {', '.join(map(str, overrides.values()))}" if overrides else "the kernel has none"
    for name in defines:
        if name in constants:
            raise KernelError(
                f"{where}: '{name}' is a const, which cannot be set from outside",
                hint=f"declare it as override; {known}",
            )
        if name not in overrides:
            raise KernelError(f"{where} has no override constant '{name}'", hint=known)
    return {overrides[name]: _value(overrides[name], text, where) for name, text in defines.items()}


def _value(override: Override, text: str, where: str) -> float:
    """Read a value as WGSL writes it: 64, 64u, 0x40, 1.5, 1e-3f, true."""
    kind, plain = override.kind, text.strip()
    if kind in (None, "bool") and plain in ("true", "false"):
        return float(plain == "true")
    try:
        if re.fullmatch(r"[+-]?0[xX][0-9a-fA-F]+[iu]?", plain):
            value = float(int(plain.rstrip("iu"), 16))
        else:
            value = float(re.sub(r"(?<=[\d.])[iufh]$", "", plain))
    except ValueError:
        value = math.nan
    low, high = _RANGES.get(kind or "", (-math.inf, math.inf))
    if not math.isfinite(value) or kind == "bool" or not low <= value <= high or (kind in _RANGES and value % 1):
        raise KernelError(f"{where}: '{text:.40}' is no value of {override}")
    return value
