"""Results -> tables, text and JSON. Pure but for the two functions that draw with rich."""

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qcs4w_gpu import Adapter
    from qcs4w_packer import QuantizationError

SCHEMA_VERSION = 1

#: The limits that decide what fits, by WebGPU's names with dashes.
LIMITS = (
    "max-buffer-size",
    "max-storage-buffer-binding-size",
    "max-compute-workgroup-storage-size",
    "max-compute-invocations-per-workgroup",
    "max-compute-workgroups-per-dimension",
)

#: Styles that a cell may ask for on a terminal, by the cell's own text.
_CELL_STYLES = {
    "pass": "green",
    "FAIL": "bold red",
    "ERROR": "bold red",
    "ok": "green",
    "equal": "green",
    "MISMATCH": "bold red",
    "DIFFERS": "bold red",
}


#: A piece of a line and its style on a terminal.
Span = tuple[str, str]


@dataclass(frozen=True)
class Table:
    """Rows of text under column titles; titles that begin with '>' are set to the right.

    Attributes:
        columns: titles.
        rows: as many cells each.
        styles: rich's style of the first columns on a terminal, "" for none.
    """

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    styles: tuple[str, ...] = ()

    def plain(self) -> str:
        """Return aligned text without any truncation, colour or frame."""
        titles = [title.lstrip(">") for title in self.columns]
        lines = [titles, *([clean_line(cell) for cell in row] for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]
        aligned = (
            "  ".join(
                cell.rjust(width) if title.startswith(">") else cell.ljust(width)
                for cell, width, title in zip(line, widths, self.columns, strict=True)
            )
            for line in lines
        )
        return "\n".join(line.rstrip() for line in aligned)


def print_rich(table: Table, stream: Any, *, colour: bool) -> None:
    """Draw a table on a terminal."""
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(header_style="bold", box=None, pad_edge=False)
    for index, title in enumerate(table.columns):
        style = table.styles[index] if index < len(table.styles) else ""
        drawn.add_column(
            title.lstrip(">"), justify="right" if title.startswith(">") else "left", style=style, no_wrap=True
        )
    for row in table.rows:
        drawn.add_row(*(Text(clean_line(cell), style=_CELL_STYLES.get(cell, "")) for cell in row))
    # As wide as the text: a line too long for the terminal is wrapped by it, and a name can still be copied.
    width = max(map(len, table.plain().splitlines()))
    Console(file=stream, no_color=not colour, highlight=False, width=width + 1).print(drawn, soft_wrap=True)


def print_styled(lines: Iterable[list[Span]], stream: Any) -> None:
    """Draw lines of (text, style) pieces on a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    console.width = max(console.width, 40)
    for line in lines:
        console.print(Text.assemble(*((clean_line(text), style) for text, style in line)), soft_wrap=True)


def clean(text: str) -> str:
    """Return text with control characters spelled out: a tensor's name must not steer the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def clean_line(text: str) -> str:
    """Return text that also keeps to its line: a name with a newline must not forge one."""
    return clean(text).replace("\n", "\\n")


def to_json(command: str, content: dict[str, Any], exit_code: int) -> str:
    """Return the one document of a command; numbers that JSON lacks become "nan", "inf" or "-inf"."""
    from qcs4w_packer import __version__

    document = {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "tool": {"name": "qcs4w", "version": __version__},
        "exit_code": exit_code,
        **content,
    }
    return json.dumps(json_value(document), indent=2, allow_nan=False)


def error_document(code: str, message: str, hint: str | None) -> dict[str, Any]:
    """Return the JSON form of an error."""
    return {"error": {"code": code, "message": message, "hint": hint}}


def size(nbytes: int) -> str:
    """Return a number of bytes for people: 1.5 MiB."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def milliseconds(value: float | None) -> str:
    """Return a time for people, or n/a where the device has no clock."""
    return "n/a" if value is None else f"{value:.2f}"


def duration(seconds: float) -> str:
    """Return a time for people: 3.2 s, 4 min 10 s, 2 h 5 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def quoted(names: Sequence[str], most: int = 3) -> str:
    """Return "'a', 'b', 'c' and 4 more"."""
    listed = ", ".join(f"'{name}'" for name in names[:most])
    return listed + (f" and {len(names) - most:,} more" if len(names) > most else "")


def plural(count: int, noun: str) -> str:
    """Return "1 row", "2 rows"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def refused_note(is_refused: bool) -> list[str]:
    """Return a table's note on a tensor that ExecuTorch's runtime refuses on every device; `check` says why."""
    from qcs4w_packer.targets import EXECUTORCH_WEBGPU

    return [f"{EXECUTORCH_WEBGPU.title} refuses it"] * is_refused


def adapter_document(adapter: "Adapter") -> dict[str, Any]:
    """Return the JSON form of the adapter that something ran on."""
    return {key: getattr(adapter, key) for key in ("index", "name", "kind", "backend", "driver")}


def full_adapter_document(adapter: "Adapter") -> dict[str, Any]:
    """Return the JSON form of an adapter with what it can do."""
    return {
        **adapter_document(adapter),
        "limits": {name: adapter.limits[name] for name in LIMITS if name in adapter.limits},
        "features": sorted(adapter.features),
    }


def quantization_document(error: "QuantizationError | None") -> dict[str, Any] | None:
    """Return the JSON form of a quantization error."""
    return None if error is None else dataclasses.asdict(error)


def json_value(value: Any) -> Any:
    """Return a value with strings in place of the numbers that JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [json_value(item) for item in value]
    return value
