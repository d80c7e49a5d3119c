"""The diff command."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .console import Console
from .main import COMMANDS, EXIT_FAILED
from .options import PATH, blob_options, common_options
from .report import Span, Table, plural

if TYPE_CHECKING:
    from qcs4w_packer import Blob, PackedFile
    from qcs4w_packer.diff import Place, TensorDiff
    from qcs4w_packer.diff_files import FileDiff, PairDiff


@click.command("diff", short_help=COMMANDS["diff"])
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.option(
    "--tensor",
    "tensors",
    multiple=True,
    metavar="NAME",
    help="Compare this tensor only; NAME_IN_A=NAME_IN_B where it has two names. Repeatable.",
)
@blob_options()
@click.option("--packed-only", is_flag=True, help="Do not compare the other tensors (biases, norms, …).")
@common_options
def command(
    a: Path,
    b: Path,
    tensors: tuple[str, ...],
    packed_only: bool,
    blob: "Blob | None",
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> int:
    """Tell where two packed files differ: the first byte, nibble, code and scale, how many, and what explains them.

    It is for damaged files too: what a reader would refuse is told as a warning, and the bytes are compared. What the
    files say of themselves (method, tool) is told and is no difference, but for what changes how bytes are read. With
    --shape a file that says nothing of itself is read as raw packed bytes. The exit code is 0 when they are equal, 1
    when they differ, 2 when they could not be compared.

    \b
    Example:
      qcs4w diff packed.safetensors again.safetensors
      qcs4w diff packed.safetensors again.safetensors --tensor pooler.dense --json
    """  # noqa: D301
    from qcs4w_packer import diff_files

    console = Console("diff", as_json, quiet)
    with _open(a, blob) as a_file, _open(b, blob) as b_file:
        with console.progress("comparing") as progress:
            found = diff_files(a_file, b_file, names=tensors, packed_only=packed_only, progress=progress)
        problems = [[f"{letter}: {problem}" for problem in file.problems] for letter, file in _lettered(a_file, b_file)]
        formats = [a_file.format, b_file.format]
    for pair in found.pairs:
        for letter, faults in _lettered(*(pair.tensors.digests if pair.tensors else ((), ()))):
            problems["AB".index(letter)] += [f"{letter}: {fault}" for fault in faults]
    code = 0 if found.is_equal else EXIT_FAILED
    console.answer(f"A: {a} ({formats[0]})\nB: {b} ({formats[1]})\n")
    console.answer(_table(found))
    console.answer_styled(line for pair in found.pairs if not pair.is_equal for line in _details(pair))
    _show_others(found, console, verbose)
    for problem in (*problems[0], *problems[1]):
        console.warn(problem)
    equal = sum(pair.is_equal for pair in found.pairs)
    console.answer(
        f"\n{'equal' if found.is_equal else 'different'}: {plural(len(found.pairs), 'packed tensor')} compared, "
        f"{len(found.pairs) - equal} differ"
        + "".join(
            f", {len(names)} only in {letter}" for letter, names in _lettered(found.only_a, found.only_b) if names
        )
    )
    console.document({"a": str(a), "b": str(b), **_document(found, formats, problems)}, code)
    return code


def _open(path: Path, blob: "Blob | None") -> "PackedFile":
    """Open a file, damaged ones too; what is known of raw bytes is meant for files that say nothing themselves."""
    from qcs4w_packer import open_packed
    from qcs4w_packer.packed_sources import is_packed_file

    return open_packed(path, None if blob is None or is_packed_file(path) else blob, strict=False)


def _lettered(a: Any, b: Any) -> tuple[tuple[str, Any], tuple[str, Any]]:
    return ("A", a), ("B", b)


def _table(found: "FileDiff") -> Table:
    titles = (
        "packed tensor", ">N", ">K", "result", ">bytes", ">codes", ">scales", ">largest |Δcode|", ">largest rel. Δscale"
    )  # fmt: skip
    rows: list[tuple[str, ...]] = []
    for pair in found.pairs:
        name = pair.a_name if pair.a_name == pair.b_name else f"{pair.a_name} = {pair.b_name}"
        verdict = "equal" if pair.is_equal else "DIFFERS"
        figures: tuple[str, ...] = ("",) * 5
        if pair.tensors is not None and not pair.tensors.is_equal:
            it = pair.tensors
            scales, largest = (
                (f"{it.scales:,}", f"{it.max_scale_difference:.3g}") if found.scales_compared else ("", "")
            )
            figures = (f"{it.bytes:,}", f"{it.codes:,}", scales, f"{it.max_code_difference:,}", largest)
        rows.append((name, *map(str, pair.a_shape), verdict, *figures))
    for letter, names in _lettered(found.only_a, found.only_b):
        rows += [(name, "", "", f"only in {letter}", *("",) * 5) for name in names]
    return Table(titles, rows, ("cyan",))


def _details(pair: "PairDiff") -> Iterator[list[Span]]:
    yield []
    yield [("DIFFERS", "bold red"), (f"  {pair.a_name}", "bold")]
    if pair.tensors is None:
        a, b = (f"{rows} × {columns}" for rows, columns in (pair.a_shape, pair.b_shape))
        yield [("         shape         ", "dim"), (f"{a}, {b} in B", "")]
    else:
        for title, text in _places(pair.tensors):
            yield [(f"         {title:<14}", "dim"), (text, "")]
        for pattern in pair.tensors.patterns:
            yield [("         pattern       ", "dim"), (pattern, "bold yellow")]
    if pair.bias is not None:
        yield [("         bias          ", "dim"), (pair.bias, "")]


def _places(found: "TensorDiff") -> Iterator[tuple[str, str]]:
    from qcs4w_packer.diff import nibble_of
    from qcs4w_packer.nibbles import packed_width

    if byte := found.first_byte:
        columns = f"k {2 * byte.index} and {2 * byte.index + 1}"
        text = f"n {byte.row}, byte {byte.index} ({columns}): {int(byte.a):02X}, {int(byte.b):02X} in B"
        yield "first byte", text + _offsets(byte)
    if code := found.first_code:
        half, a, b = nibble_of(code)
        text = f"n {code.row}, k {code.index} ({half} nibble): {a:X}, {b:X} in B; code {code.a:.0f}, {code.b:.0f} in B"
        yield "first nibble", text + _offsets(code)
    if scale := found.first_scale:
        yield "first scale", f"n {scale.row}: {scale.a:.9g}, {scale.b:.9g} in B" + _offsets(scale)
    counts = [
        f"{count:,} of {total:,} {what}"
        for what, count, total in (
            ("bytes", found.bytes, found.out_features * packed_width(found.in_features)),
            ("codes", found.codes, found.out_features * found.in_features),
            ("pad nibbles", found.pads, found.out_features),
            ("scales", found.scales, found.out_features),
        )
        if count
    ]
    within = [
        f"{name} {first}" + (f" to {last}" if last > first else "")
        for name, (first, last) in (("n", found.rows or (0, -1)), ("k", found.columns or (0, -1)))
        if last >= 0
    ]
    yield "in all", ", ".join(counts) + (f"; packed bytes within {', '.join(within)}" if within else "")


def _offsets(place: "Place") -> str:
    known = [
        f"{letter} {offset} (0x{offset:x})"
        for letter, offset in _lettered(place.a_offset, place.b_offset)
        if offset is not None
    ]
    return f"; offset {', '.join(known)}" if known else ""


def _show_others(found: "FileDiff", console: Console, verbose: bool) -> None:
    if found.carried:
        console.answer("")
        rows = [
            (
                diff.name,
                diff.fault,
                *("" if offset is None else f"{offset:,}" for offset in (diff.a_offset, diff.b_offset)),
            )
            for diff in found.carried
        ]
        console.answer(Table(("other tensor", "difference", ">offset in A", ">offset in B"), rows, ("cyan",)))
    if found.carried_equal:
        console.answer(f"\n{plural(found.carried_equal, 'other tensor')} equal")
    if found.carried_left:
        console.note(f"other tensors were not compared: {found.carried_left}")
    if not found.scales_compared:
        console.note("scales were not compared: those of raw bytes are not known without --scales")
    for text in found.meaning:
        console.answer(f"\nread differently: {text}")
    notes = [*found.said, *(f"{pair.a_name}: {text}" for pair in found.pairs for text in pair.said)]
    for text in notes if verbose else notes[:_MOST_NOTES]:
        console.note(f"said differently, no difference: {text}")
    if len(notes) > _MOST_NOTES and not verbose:
        console.note(f"and {len(notes) - _MOST_NOTES} more (-v lists them)")


_MOST_NOTES = 5


def _document(found: "FileDiff", formats: list[str], problems: list[list[str]]) -> dict[str, Any]:
    return {
        "equal": found.is_equal,
        "a_format": formats[0],
        "b_format": formats[1],
        "a_problems": problems[0],
        "b_problems": problems[1],
        "only_in_a": list(found.only_a),
        "only_in_b": list(found.only_b),
        "meaning": list(found.meaning),
        "said": list(found.said),
        "carried": [
            {"tensor": d.name, "fault": d.fault, "bytes": d.bytes, "a_offset": d.a_offset, "b_offset": d.b_offset}
            for d in found.carried
        ],
        "carried_equal": found.carried_equal,
        "carried_left": found.carried_left,
        "scales_compared": found.scales_compared,
        "tensors": [
            {
                "tensor": pair.a_name,
                "b_tensor": pair.b_name,
                "equal": pair.is_equal,
                "a_shape": list(pair.a_shape),
                "b_shape": list(pair.b_shape),
                "bias": pair.bias,
                "said": list(pair.said),
                "difference": None if pair.tensors is None else _tensor_document(pair.tensors),
            }
            for pair in found.pairs
        ],
    }


def _tensor_document(found: "TensorDiff") -> dict[str, Any]:
    from qcs4w_packer.diff import nibble_of

    first_byte, first_code, first_scale = found.first_byte, found.first_code, found.first_scale
    code = None
    if first_code is not None:
        half, a_nibble, b_nibble = nibble_of(first_code)
        code = {
            **_place_document(first_code, "column"),
            "half": half,
            "a_nibble": a_nibble,
            "b_nibble": b_nibble,
        }
    return {
        "bytes": found.bytes,
        "codes": found.codes,
        "pads": found.pads,
        "scales": found.scales,
        "max_code_difference": found.max_code_difference,
        "max_scale_difference": found.max_scale_difference,
        "first_byte": None if first_byte is None else _place_document(first_byte, "byte"),
        "first_code": code,
        "first_scale": None if first_scale is None else _place_document(first_scale, None),
        "rows": None if found.rows is None else list(found.rows),
        "columns": None if found.columns is None else list(found.columns),
        "patterns": list(found.patterns),
    }


def _place_document(place: "Place", index: str | None) -> dict[str, Any]:
    return {
        "row": place.row,
        **({index: place.index} if index else {}),
        "a": place.a,
        "b": place.b,
        "a_offset": place.a_offset,
        "b_offset": place.b_offset,
    }
