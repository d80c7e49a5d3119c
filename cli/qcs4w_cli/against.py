"""inspect --against: which layout do packed bytes have? The evidence is gathered, and the finding shown."""

import dataclasses
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qcs4w_packer.nibbles import OFFSET
from qcs4w_packer.readings import RIGHT

from .console import Console
from .main import EXIT_FAILED
from .report import Span, Table, size

if TYPE_CHECKING:
    from qcs4w_packer import Blob
    from qcs4w_packer.explain import Explanation, Finding
    from qcs4w_packer.histogram import Histogram
    from qcs4w_packer.questioned import PackedBytes

_SHOWN = 6  # readings; -v shows all
_VERDICT_STYLES = {"certain": "bold green", "likely": "green", "ambiguous": "bold yellow", "none": "bold red"}


def inspect_against(
    file: Path,
    tensor: str | None,
    blob: "Blob | None",
    source: Path | None,
    pair: tuple[Path, Path] | None,
    layout: str | None,
    console: Console,
    verbose: bool,
) -> int:
    """Name the layout of packed bytes from their float weights, or from an input and its output.

    Returns:
        0, or 1 where no layout fits, or another one than the file says.
    """
    from qcs4w_packer import open_source
    from qcs4w_packer.explain import explain_output, explain_weights
    from qcs4w_packer.questioned import activations_of, packed_bytes, weight_of

    questioned = packed_bytes(file, tensor, blob)
    with ExitStack() as stack:
        if source is not None:
            weight, shape = weight_of(stack.enter_context(open_source(source)), questioned, tensor)
            scales = questioned.scales_of(shape[0])
            finding = explain_weights(questioned.data, weight, scales, out_features=shape[0])
            evidence = f"the weights in {source}"
        else:
            assert pair is not None  # noqa: S101 - the command has seen to it
            columns = questioned.entry.in_features if questioned.entry else None
            x = activations_of(stack.enter_context(open_source(pair[0])), questioned, tensor, columns)
            y = activations_of(stack.enter_context(open_source(pair[1])), questioned, tensor, None)
            shape = (y.shape[1], x.shape[1])
            finding = explain_output(questioned.data, shape[0], x, y, questioned.scales_of(shape[0]))
            evidence = f"{pair[0]} → {pair[1]}"
    claimed = "even-high" if questioned.entry is not None else layout
    command = _convert_command(questioned, finding, shape)
    contradicted = (
        claimed is not None and finding.best.reading.label != claimed and finding.verdict in ("certain", "likely")
    )
    code = EXIT_FAILED if finding.verdict == "none" or contradicted else 0
    document = _document(questioned, finding, shape, claimed, command)
    console.answer_styled(_lines(questioned, finding, document, evidence))
    console.answer("")
    shown = finding.ranked if verbose else finding.ranked[:_SHOWN]
    console.answer(_table(shown))
    if len(shown) < len(finding.ranked):
        console.note(f"{len(finding.ranked) - len(shown)} more readings fit worse (-v shows them)")
    if contradicted:
        says = (
            f"--layout says {claimed}" if questioned.entry is None else f"the file says {questioned.format} ({claimed})"
        )
        console.warn(f"{says}, its bytes are {finding.best.reading.label}")
    if command:
        console.note(f"make it a qcs4w container: {command}")
    elif finding.verdict in ("certain", "likely") and finding.best.reading.offset != OFFSET:
        console.note(f"no layout of convert subtracts {finding.best.reading.offset}: pack the weights again")
    console.document(
        {
            "file": str(file),
            "container": questioned.entry is not None,
            "tensor": questioned.tensor,
            "against": document,
        },
        code,
    )
    return code


def _document(
    questioned: "PackedBytes", finding: "Finding", shape: tuple[int, ...], claimed: str | None, command: str | None
) -> dict[str, Any]:
    rule = finding.rule
    return {
        "verdict": finding.verdict,
        "layout": None if finding.verdict == "none" else finding.best.reading.label,
        "read_through": _reader(questioned),
        "out_features": shape[0],
        "in_features": shape[1],
        "claimed": claimed,
        "written_by": _writers(questioned, finding),
        "scale_rule": None
        if rule is None
        else {"name": rule.name, "differing": rule.differing, "codes": rule.codes, "same_scales": rule.same_scales},
        "expected_residual": finding.expected_residual,
        "padding": finding.padding,
        "notes": list(finding.notes),
        "convert": command,
        "readings": [
            {
                "layout": each.reading.label,
                "arrangement": each.reading.arrangement.words,
                "cosine": each.cosine,
                "residual": each.residual,
                "residual_as_scaled": each.residual_as_scaled,
                "probability": each.probability,
                "same_as": [other.label for other in each.same_as],
            }
            for each in finding.ranked
        ],
    }


def _lines(questioned: "PackedBytes", finding: "Finding", document: dict[str, Any], evidence: str) -> list[list[Span]]:
    best = finding.best
    what = f" '{questioned.tensor}'" if questioned.tensor else ""
    rows, columns = document["out_features"], document["in_features"]
    lines: list[list[Span]] = [[(f"{questioned.path}{what} as {rows} × {columns}, held against {evidence}", "")], []]

    def say(title: str, text: str, style: str = "") -> None:
        lines.append([(f"{title:<12}", "dim"), (text, style)])

    if finding.verdict == "none":
        say("layout", "none that is known fits", _VERDICT_STYLES["none"])
        more = questioned.data.size - best.reading.nbytes(rows, columns)
        if questioned.entry is None and more > 0:
            say("", f"the file has {more:,} bytes more than {rows} × {columns} takes: look at --offset", "yellow")
        return lines
    through = _reader(questioned)
    if through and best.reading == RIGHT:
        say("layout", f"as {through} lays it ({finding.verdict})", _VERDICT_STYLES[finding.verdict])
    else:
        read = f", read through {through}" if through else ""
        say("layout", f"{best.reading.label}{read} ({finding.verdict})", _VERDICT_STYLES[finding.verdict])
        say("", _described(best))
    if best.same_as:
        say("", f"these bytes read the same as {', '.join(other.label for other in best.same_as)}", "yellow")
    elif finding.verdict == "ambiguous" and not finding.notes:
        say("", "too little data, or too even, to tell it from the next", "yellow")
    for note in finding.notes:
        say("", note, "yellow")
    say("written by", _writers(questioned, finding) or "no tool that is known")
    rule = finding.rule
    if rule is not None:
        made = (
            f"{rule.name}: makes every code"
            if not rule.differing
            else f"none that is known; {rule.name} makes {1 - rule.differing / rule.codes:.1%} of the codes"
        )
        say("scale rule", f"{made} ({rule.codes:,} looked at)")
        if rule.same_scales is not None:
            say("scales", "equal to the bit" if rule.same_scales else "not those of the rule")
    if best.residual_as_scaled is not None and best.residual_as_scaled > 1.2 * best.residual + 1e-4:
        say("", f"the scales given leave {best.residual_as_scaled:.3f}, better ones {best.residual:.3f}", "yellow")
    if finding.padding:
        say("padding", finding.padding)
    if finding.expected_residual is not None:
        say(
            "error",
            f"{best.residual:.3f} of the weights; packed as qcs4w does they would lose {finding.expected_residual:.3f}",
        )
    return lines


def _reader(questioned: "PackedBytes") -> str | None:
    """Return the format whose reader made qcs4w's bytes of the file's own; None where they are the file's own."""
    return None if questioned.format in ("qcs4w", "pte", "raw", "array") else questioned.format


def _writers(questioned: "PackedBytes", finding: "Finding") -> str | None:
    through = _reader(questioned)
    if through:
        return through if finding.best.reading == RIGHT else None
    return finding.best.reading.writers or None


def _described(each: "Explanation") -> str:
    reading = each.reading
    parts = [reading.arrangement.words]
    if reading.arrangement.has_order:
        parts.append(f"even one in the {'high' if reading.layout.even_high else 'low'} nibble")
    if reading.layout.twos_complement:
        parts.append("two's complement")
    else:
        parts.append(f"code + {reading.offset}" if reading.offset else "codes 0..15, no offset")
    return "; ".join(parts)


def _table(ranked: "tuple[Explanation, ...]") -> Table:
    rows = [
        (
            each.reading.label,
            f"{each.cosine:.3f}",
            f"{each.residual:.3f}",
            "" if each.residual_as_scaled is None else f"{each.residual_as_scaled:.3g}",
            f"{each.probability:.3g}" if each.probability > 1e-9 else "0",
            ", ".join(other.label for other in each.same_as),
        )
        for each in ranked
    ]
    titles = ("read as", ">cosine", ">residual", ">as scaled", ">probability", "same as")
    used = [i for i in range(len(titles)) if any(row[i] for row in rows)]
    return Table(tuple(titles[i] for i in used), [tuple(row[i] for i in used) for row in rows], ("cyan",))


def _convert_command(questioned: "PackedBytes", finding: "Finding", shape: tuple[int, ...]) -> str | None:
    """Return the command that makes a container of the bytes, where one can."""
    reading = finding.best.reading
    is_known = questioned.entry is not None and reading == RIGHT
    if finding.verdict in ("none", "ambiguous") or finding.notes or questioned.blob is None or is_known:
        return None
    if reading.offset != OFFSET:
        return None
    if reading.arrangement.name == "q4_0":
        return None  # a scale per block of 32, none per row
    blob = dataclasses.replace(questioned.blob, shape=(shape[0], shape[1]), layout=reading)
    words = ["qcs4w", "convert", str(questioned.path), "--shape", f"{shape[0]},{shape[1]}"]
    if blob.offset:
        words += ["--offset", str(blob.offset)]
    if reading.label != "even-high":
        words += ["--layout", reading.label]
    words += ["--scales", str(blob.scales) if blob.scales else "SCALES"]
    if blob.scales_offset is not None:
        words += ["--scales-offset", str(blob.scales_offset)]
    if blob.scales_dtype != "F32":
        words += ["--scales-dtype", blob.scales_dtype.lower()]
    return shlex.join([*words, "-o", "OUT.safetensors"])


def inspect_alone(file: Path, tensor: str | None, blob: "Blob | None", console: Console) -> int:
    """Say of packed bytes that nothing describes what their nibbles alone tell; 0."""
    from qcs4w_packer import SourceError, open_packed
    from qcs4w_packer.histogram import explain_alone
    from qcs4w_packer.questioned import packed_bytes

    questioned = packed_bytes(file, tensor, blob)
    shape = blob.shape if blob else None
    data = questioned.data
    if blob and shape:
        with open_packed(file, blob):  # for its checks of shape, place and scales
            data = data[: blob.layout.nbytes(*shape)]
    if not data.size:
        raise SourceError(f"{file}: there are no bytes from there on")
    histogram = explain_alone(data, shape[0] if shape else 1)
    what = f" '{questioned.tensor}'" if questioned.tensor else ""
    console.answer(f"{file}{what}: {size(data.size)} of packed codes, their nibbles alone\n")
    console.answer_styled(_histogram_lines(histogram))
    console.note("name the layout: --against WEIGHTS, or --input X --output Y")
    document = {"file": str(file), "container": False, "tensor": questioned.tensor}
    console.document({**document, "nibbles": dataclasses.asdict(histogram)}, 0)
    return 0


def _histogram_lines(histogram: "Histogram") -> list[list[Span]]:
    """Return what nibbles alone tell, with a bar for each."""
    total, most = sum(histogram.counts), max(histogram.counts)
    lines: list[list[Span]] = []
    for nibble, count in enumerate(histogram.counts):
        bar = "█" * round(40 * count / most) if most else ""
        lines.append([(f"nibble {nibble:X}  ", "dim"), (f"{count / max(total, 1):>6.1%}  ", ""), (bar, "blue")])
    lines.append([])
    return lines + [[(text, "")] for text in _histogram_words(histogram)]


def _histogram_words(histogram: "Histogram") -> list[str]:
    """Return what the nibbles alone tell, for people."""
    if histogram.encoding is None:
        return ["the nibbles are spread too evenly to tell code + 8 from two's complement"]
    words = [f"encoding: {histogram.encoding} ({histogram.probability:.1%} sure: weights gather round the code 0)"]
    if histogram.clamped:
        words.append(f"no code −8: a symmetric clamp at ±7 ({histogram.clamp_probability:.1%} sure)")
    else:
        words.append("the code −8 occurs: the full range, −8..7")
    return [*words, "the order of the two nibbles in a byte leaves no trace here"]
