"""Dumps of packed bytes: nibbles, codes and values side by side. Pure: a tensor's part -> lines of styled text."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qcs4w_packer import LAYOUTS, UsageError
from qcs4w_packer.nibbles import packed_width, unpack_codes, unpack_nibbles

from .report import Span

if TYPE_CHECKING:
    from qcs4w_packer import Layout, PackedEntry, PackedFile

_CELL = 10
_COLUMNS_PER_LINE = 8
_HIGH, _LOW = "bold yellow", "bold blue"


@dataclass(frozen=True)
class DumpRow:
    """One row's part of a dump; all lists run over the columns of the dump.

    Attributes:
        row: n.
        scale: of the row; None where it is not known.
        file_offset: where the row's first packed byte lies in the file.
        packed: the row's bytes that hold the columns.
        pad: the nibble behind the last column of an odd K, where the dump reaches it, or None.
        nibbles: as they lie in the bytes, in column order.
        codes: as the layout reads them.
        values: code · scale; None without a scale.
    """

    row: int
    scale: float | None
    file_offset: int
    packed: bytes
    pad: int | None
    nibbles: list[int]
    codes: list[int]
    values: list[float] | None


@dataclass(frozen=True)
class Dump:
    """A rectangle of one packed tensor.

    Attributes:
        name: of the tensor.
        layout: how the bytes are read.
        first_column: k of the first column.
        first_byte: index within a row of the first byte.
        rows: what is shown.
    """

    name: str
    layout: "Layout"
    first_column: int
    first_byte: int
    rows: list[DumpRow]

    @classmethod
    def of(cls, container: "PackedFile", entry: "PackedEntry", rows: slice, cols: slice, layout: str) -> "Dump":
        """Read a rectangle of a tensor whatever its digest says.

        Raises:
            UsageError: it lies outside the tensor, or the file holds the tensor in other bytes.
        """
        start, stop, _ = rows.indices(entry.out_features)
        first, last, _ = cols.indices(entry.in_features)
        for name, low, high, limit in (
            ("rows", start, stop, entry.out_features),
            ("cols", first, last, entry.in_features),
        ):
            if low >= high:
                raise UsageError(f"--{name} is empty: '{entry.name}' has {limit} {name}, 0:{limit}")
        place = container.place(entry)
        if place is None:
            raise UsageError(
                f"{container.path}: '{entry.name}' does not lie there in qcs4w's own bytes, but as {container.format}",
                hint=f"make it so first: qcs4w convert {container.path} -o OUT.safetensors",
            )
        scales = container.scales(entry)
        reading = LAYOUTS[layout]
        width = packed_width(entry.in_features)
        part = container.row_reader(entry)(start, stop)
        nibbles = unpack_nibbles(part, even_high=reading.even_high)[:, first:last]
        codes = unpack_codes(part, entry.in_features, reading)[:, first:last]
        first_byte, end_byte = first // 2, (last + 1) // 2
        pads = unpack_nibbles(part, even_high=reading.even_high)[:, -1]
        has_pad = last == entry.in_features and last % 2 == 1
        return cls(
            entry.name,
            reading,
            first,
            first_byte,
            [
                DumpRow(
                    row=start + i,
                    scale=float(scales[start + i]) if container.has_scales else None,
                    file_offset=place[1] + (start + i) * width,
                    packed=part[i, first_byte:end_byte].tobytes(),
                    pad=int(pads[i]) if has_pad else None,
                    nibbles=[int(v) for v in nibbles[i]],
                    codes=[int(v) for v in codes[i]],
                    values=[float(v) * float(scales[start + i]) for v in codes[i]] if container.has_scales else None,
                )
                for i in range(stop - start)
            ],
        )

    def document(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "tensor": self.name,
            "layout": self.layout.name,
            "first_column": self.first_column,
            "rows": [
                {
                    "row": row.row,
                    "scale": row.scale,
                    "file_offset": row.file_offset,
                    "bytes": row.packed.hex(" ").upper().split(" "),
                    "nibbles": row.nibbles,
                    "codes": row.codes,
                    "values": row.values,
                }
                for row in self.rows
            ],
        }

    def lines(self) -> Iterator[list[Span]]:
        """Yield lines for people: k, half, byte, nibble, code and value under each other."""
        order = "even column in the high nibble" if self.layout.even_high else "even column in the low nibble"
        encoding = "two's complement" if self.layout.twos_complement else "code + 8"
        yield [(f"{self.name} read as {self.layout.name}: {order}, {encoding}", "bold")]
        for row in self.rows:
            yield []
            yield [
                (f"row {row.row}", "bold cyan"),
                ("  scale not known" if row.scale is None else f"  scale {row.scale:.9g}", ""),
                (f"  file offset {row.file_offset} (0x{row.file_offset:x})", ""),
            ]
            # Whole bytes on each line: it starts at an even column.
            start = -(self.first_column % 2)
            while start < len(row.codes):
                yield from self._panel(row, max(start, 0), min(start + _COLUMNS_PER_LINE, len(row.codes)))
                start += _COLUMNS_PER_LINE

    def _panel(self, row: DumpRow, start: int, stop: int) -> Iterator[list[Span]]:
        columns = range(start, stop)
        ks = [self.first_column + i for i in columns]
        high = [(k % 2 == 0) == self.layout.even_high for k in ks]
        styles = [_HIGH if is_high else _LOW for is_high in high]
        data = [f"{row.packed[k // 2 - self.first_byte]:02X}" if i == 0 or k % 2 == 0 else "" for i, k in enumerate(ks)]
        cells = [
            [str(k) for k in ks],
            data,
            ["high" if is_high else "low" for is_high in high],
            [f"{row.nibbles[i]:X}" for i in columns],
            [str(row.codes[i]) for i in columns],
            *([] if row.values is None else [[f"{row.values[i]:.4g}" for i in columns]]),
        ]
        if row.pad is not None and stop == len(row.codes):
            pad = ("pad", "", "low" if self.layout.even_high else "high", f"{row.pad:X}", "", "")
            for line, cell in zip(cells, pad[: len(cells)], strict=True):
                line.append(cell)
            styles.append("dim")
        titles = ("k", "byte", "half", "nibble", "code", "value")
        for title, line in zip(titles[: len(cells)], cells, strict=True):
            yield _line(title, line, styles if title in ("half", "nibble") else ["dim" * (title == "k")] * len(line))


def hex_lines(dump: Dump) -> Iterator[str]:
    """Yield the bytes of a dump, 16 a line, with their offsets in the file."""
    for row in dump.rows:
        yield f"row {row.row}"
        for at in range(0, len(row.packed), 16):
            offset = row.file_offset + dump.first_byte + at
            yield f"{offset:08x}  {row.packed[at : at + 16].hex(' ').upper()}"


def _line(title: str, cells: list[str], styles: list[str]) -> list[Span]:
    return [(f"{title:<7}", "dim"), *((f"{cell:>{_CELL}}", style) for cell, style in zip(cells, styles, strict=True))]
