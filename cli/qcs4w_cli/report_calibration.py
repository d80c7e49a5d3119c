"""What calibration has gained: a table and a line. Pure."""

from math import exp, log
from typing import TYPE_CHECKING

from .report import Table, plural, quoted
from .report_groups import MOST_ROWS, shortened

if TYPE_CHECKING:
    from qcs4w_packer import PackReport


def calibration_table(report: "PackReport", *, verbose: bool) -> Table:
    """Return the error of each calibrated tensor's outputs beside absmax's, the least gain first."""
    known = [(tensor.entry, tensor.entry.calibration) for tensor in report.packed if tensor.entry.calibration]
    known.sort(key=lambda pair: -(pair[1].gain or 0))
    rows = [
        (
            entry.name,
            entry.method,
            f"{how.rows:,}" if how.rows else "",
            f"{how.held_out_rows:,}",
            "" if how.output_error is None else f"{how.output_error:.4f}",
            "" if how.absmax_output_error is None else f"{how.absmax_output_error:.4f}",
            "" if how.gain is None else f"{how.gain:.3f}",
            how.fallback or "",
        )
        for entry, how in known
    ]
    titles = ("calibrated tensor", "method", ">rows", ">kept apart", ">output error", ">absmax's", ">share", "notes")
    table = Table(titles, rows, ("cyan",))
    return table if verbose or len(rows) <= MOST_ROWS else shortened(table)


def calibration_line(report: "PackReport", seed: int) -> str:
    """Say by which rows codes were chosen and errors measured, and what was gained over all tensors."""
    known = [tensor.entry.calibration for tensor in report.packed if tensor.entry.calibration]
    rows = _span([one.rows for one in known])
    apart = _span([one.held_out_rows for one in known])
    line = f"calibrated {plural(len(known), 'tensor')} by {rows} rows, {apart} more kept apart (seed {seed})"
    gains = sorted(one.gain for one in known if one.gain)
    if gains:
        mean = exp(sum(map(log, gains)) / len(gains))
        line += (
            f"; output error as a share of absmax's: median {gains[len(gains) // 2]:.3f}, "
            f"geometric mean {mean:.3f}, worst {gains[-1]:.3f}"
        )
    if missing := len(report.packed) - len(known):
        line += f"; nothing is known of the inputs of {plural(missing, 'tensor')}, packed by absmax"
    return line


def calibration_warnings(report: "PackReport") -> list[str]:
    """Return what was used in place of the method asked for, and whose inputs are few."""
    fallen: dict[str, list[str]] = {}
    for tensor in report.packed:
        if tensor.entry.calibration and (why := tensor.entry.calibration.fallback):
            fallen.setdefault(f"{tensor.entry.method}, since {why}", []).append(tensor.entry.name)
    texts = [f"packed by {how}: {plural(len(names), 'tensor')}, {quoted(names)}" for how, names in fallen.items()]
    few = [tensor.entry.name for tensor in report.packed if tensor.has_few_rows]
    if few:
        texts.append(
            f"fewer than 4·K rows of inputs, 16·K or more are advised: {plural(len(few), 'tensor')}, {quoted(few)}"
        )
    return texts


def _span(counts: list[int]) -> str:
    """Return one count, or the least and the largest."""
    return f"{counts[0]:,}" if min(counts) == max(counts) else f"{min(counts):,} to {max(counts):,}"
