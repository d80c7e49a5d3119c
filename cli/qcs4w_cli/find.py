"""inspect --find: where in a file packed weights lie, and how."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcs4w_packer.nibbles import EVEN_HIGH

from .console import Console
from .main import EXIT_FAILED
from .report import Table, clean_line, plural, size

if TYPE_CHECKING:
    from qcs4w_packer.blob_file import Blob
    from qcs4w_packer.findings import Hit, ScalesPlace, TensorFound

_SHOWN = 5  # hits of one tensor that the table lists


def find(
    haystack: Path, needle: Path, blob: "Blob | None", tensor: str | None, layout: str | None, console: Console
) -> int:
    """Search a file for packed tensors and report; return the exit code: 0 if every one of them is there."""
    from qcs4w_packer.packed_sources import open_packed
    from qcs4w_packer.placements import PLACEMENTS
    from qcs4w_packer.search import search

    placements = [placement for placement in PLACEMENTS if layout is None or placement.is_named(layout)]
    with open_packed(needle, blob) as packed:
        entries = None if tensor is None else [packed.entry(tensor)]
        with console.progress("searching", unit_bytes=True) as progress:
            report = search(haystack, packed, entries=entries, placements=placements, progress=progress)
        needle_format = packed.format
    nbytes, found = report.nbytes, report.tensors
    missing = sum(not tensor.is_found for tensor in found)
    code = EXIT_FAILED if missing else 0
    console.answer(
        f"{haystack}: {size(nbytes)} searched for {plural(len(found), 'tensor')} of {needle} "
        f"in {plural(len(placements), 'layout')}; {len(found) - missing:,} found, {missing:,} not\n"
    )
    console.answer(Table(_TITLES, [row for tensor in found for row in _rows(tensor)], ("cyan",)))
    for tensor_found in found:
        for note in _notes(tensor_found, nbytes):
            console.note(f"{tensor_found.entry.name}: {note}")
    if (line := _next_step(haystack, found)) is not None:
        console.note(f"go on with: {line}")
    console.document(
        {
            "file": str(haystack),
            "nbytes": nbytes,
            "find": {
                "needle": str(needle),
                "format": needle_format,
                "layouts": [placement.name for placement in placements],
                "found": len(found) - missing,
                "missing": missing,
                "tensors": [_document(tensor_found) for tensor_found in found],
            },
        },
        code,
    )
    return code


_TITLES = ("tensor", ">N", ">K", "found", ">offset", "layout", ">row stride", "scales")


def _rows(tensor: "TensorFound") -> list[tuple[str, ...]]:
    entry = tensor.entry
    first = (entry.name, str(entry.out_features), str(entry.in_features))
    hits = tensor.hits or tensor.parts
    if not hits:
        where = "; ".join(_scales_words(place) for place in tensor.scales[:_SHOWN])
        return [(*first, "no", "", "", "", where)]
    rows: list[tuple[str, ...]] = []
    for hit in hits[:_SHOWN]:
        match = hit.match
        found = "ambiguous" if tensor.is_ambiguous else "yes"
        if not match.is_whole:
            found = f"{match.rows_equal:,} of {plural(match.rows, 'row')}"
        where = _scales_words(hit.scales[0], match.start) if hit.scales else "not found"
        rows.append((*first, found, str(match.start), _layouts(hit), str(hit.row_stride), where))
        first = ("", "", "")
    return rows


def _layouts(hit: "Hit") -> str:
    return " = ".join(reading.label for reading in hit.readings)


def _scales_words(place: "ScalesPlace", beside: int | None = None) -> str:
    text = f"{place.dtype} at {place.offset}"
    if beside is None:
        return text
    apart = place.offset - beside
    return f"{text} ({abs(apart):,} bytes {'after' if apart > 0 else 'before'} the weights)"


def _notes(tensor: "TensorFound", nbytes: int) -> list[str]:
    """Say what a table cannot."""
    notes: list[str] = []
    more = len(tensor.hits or tensor.parts) - _SHOWN
    if tensor.has_more:
        notes.append(f"found more than {len(tensor.hits)} times")
    elif more > 0:
        notes.append(f"{more:,} more in the JSON")
    if tensor.is_ambiguous and tensor.hits:
        notes.append(f"its bytes are too few, or too alike, to tell it from chance in {size(nbytes)}")
    if tensor.is_cut_short:
        notes.append("the file repeats itself so much that the search was given up: there may be more")
    for hit in (tensor.hits or tensor.parts)[:_SHOWN]:
        match, reading = hit.match, hit.readings[0]
        if len(hit.placements) > 1:
            notes.append(f"at {match.start} its bytes are the same in {len(hit.placements)} layouts")
        elif reading.writers and reading.label != EVEN_HIGH.name:
            notes.append(f"{reading.label} is what these write: {reading.writers}")
        if hit.has_gaps:
            notes.append(
                f"at {match.start} rows of {match.width} bytes were found with a stride of {match.stride} bytes"
            )
        if not match.is_whole:
            but = f", but for {plural(match.missing_between, 'row')} among them" if match.missing_between else ""
            notes.append(f"at {match.start} lie rows {match.first_equal}:{match.last_equal + 1} of {match.rows}{but}")
        if match.pads and (wrong := set(match.pads) - {reading.layout.pad_nibble}):
            notes.append(f"at {match.start} the nibble beside the last column is {_listed(wrong)}")
    if not tensor.hits and tensor.scales:
        notes.append("its scales are there, its codes are not in any of the layouts searched")
    return notes


def _listed(nibbles: set[int]) -> str:
    return ", ".join(f"{nibble:X}" for nibble in sorted(nibbles)[:4]) + ", …" * (len(nibbles) > 4)


def _next_step(haystack: Path, found: "list[TensorFound]") -> str | None:
    """Return a command that takes the first hit from its place, where raw bytes can be read so."""
    for hit in (hit for tensor in found for hit in tensor.hits):
        if not hit.is_read:
            continue
        file = shlex.quote(clean_line(str(haystack)))
        words = f"{file} --shape {hit.entry.out_features},{hit.entry.in_features} --offset {hit.match.start}"
        if not hit.scales or hit.scales[0].is_between:
            return f"qcs4w inspect {words}"
        if hit.readings[0].label != EVEN_HIGH.name:
            words += f" --layout {hit.readings[0].label}"
        words += f" --scales {file} --scales-offset {hit.scales[0].offset}"
        if hit.scales[0].dtype != "F32":
            words += f" --scales-dtype {hit.scales[0].dtype.lower()}"
        return f"qcs4w verify {words}"
    return None


def _document(tensor: "TensorFound") -> dict[str, Any]:
    entry = tensor.entry
    return {
        "tensor": entry.name,
        "out_features": entry.out_features,
        "in_features": entry.in_features,
        "found": tensor.is_found,
        "ambiguous": tensor.is_ambiguous,
        "more": tensor.has_more,
        "cut_short": tensor.is_cut_short,
        "hits": [_hit_document(hit) for hit in tensor.hits],
        "parts": [_hit_document(hit) for hit in tensor.parts],
        "scales": [_scales_document(place) for place in tensor.scales],
    }


def _hit_document(hit: "Hit") -> dict[str, Any]:
    match = hit.match
    return {
        "offset": match.start,
        "layouts": [reading.label for reading in hit.readings],
        "row_stride": hit.row_stride,
        "nbytes": (match.last_equal - match.first_equal) * match.stride + match.width,
        "rows": match.rows,
        "rows_equal": match.rows_equal,
        "first_row": match.first_equal,
        "last_row": match.last_equal,
        "pad_nibbles": list(match.pads),
        "scales": [{**_scales_document(place), "distance": place.offset - match.start} for place in hit.scales],
    }


def _scales_document(place: "ScalesPlace") -> dict[str, Any]:
    return {"dtype": place.dtype, "offset": place.offset, "stride": place.stride}
