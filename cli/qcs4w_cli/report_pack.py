"""What pack has done, or would do -> tables, lines and JSON. Pure."""

from typing import TYPE_CHECKING, Any

from .progress import name_to_log
from .report import Table, duration, plural, quantization_document, quoted, refused_note, size
from .report_calibration import calibration_warnings
from .report_groups import MOST_ROWS, grouped, numbers, pattern, shortened

if TYPE_CHECKING:
    from qcs4w_packer import PackedTensor, PackReport, PlannedShard
    from qcs4w_packer.select import Choice

_FATES = {"drop": "left out", "carry": "copied"}


def pack_tables(report: "PackReport", *, verbose: bool) -> list[Table]:
    """Return what became of the packed tensors: each of a few, else the files and the kinds; with `verbose` all."""
    tables = [_shard_table(report)] if len(report.shards) > 1 and report.made else []
    if not verbose:
        tables = [shortened(table) for table in tables]
    if verbose or len(report.packed) <= MOST_ROWS:
        return [*tables, _tensor_table(report)] if report.packed else tables
    return [*tables, shortened(_kind_table(report))]


def _tensor_table(report: "PackReport") -> Table:
    rows: list[tuple[str, ...]] = [
        (
            tensor.entry.name,
            str(tensor.entry.out_features),
            str(tensor.entry.in_features),
            tensor.entry.source_dtype,
            _sizes(tensor.source_nbytes, tensor.entry.packed_nbytes),
            *([] if report.is_dry_run else [_error(tensor), f"{tensor.error.snr_db:.1f} dB" if tensor.error else ""]),
            "; ".join(
                [tensor.reason] * report.is_dry_run
                + [tensor.entry.method] * (tensor.entry.method != "absmax")
                + ["transposed"] * tensor.entry.transposed
                + [f"also {alias}" for alias in tensor.entry.aliases]
                + refused_note(bool(tensor.entry.executorch_refusals))
                + [f"{plural(tensor.floored_rows, 'row')} at the scale floor"] * bool(tensor.floored_rows)
            ),
        )
        for tensor in report.packed
    ]
    errors = () if report.is_dry_run else (">error", ">SNR")
    return Table(("packed tensor", ">N", ">K", "from", ">bytes", *errors, "notes"), rows, ("cyan",))


def _kind_table(report: "PackReport") -> Table:
    """Return the tensors whose names differ in numbers only as one row each, with the worst of them."""
    rows = []
    groups = grouped(report.packed, lambda tensor: (pattern(tensor.entry.name), _shape(tensor), _why(report, tensor)))
    for (kind, shape, why), tensors in groups.items():
        worst = max(tensors, key=_relative)
        mean = sum(map(_relative, tensors)) / len(tensors)
        rows.append(
            (
                (tensors[0].entry.name if len(tensors) == 1 else kind).removesuffix(".weight"),
                f"{len(tensors):,}",
                shape,
                size(sum(tensor.entry.packed_nbytes for tensor in tensors)),
                *([why] if report.is_dry_run else [_percent(mean), _error(worst), numbers(worst.entry.name)]),
            )
        )
    last = ("reason",) if report.is_dry_run else (">error", ">worst", "at *")
    return Table(("packed tensors", ">×", ">N × K", ">bytes", *last), rows, ("cyan",))


def _shard_table(report: "PackReport") -> Table:
    packed = grouped(report.packed, lambda tensor: (tensor.shard,))
    rows = []
    for shard in _made(report):
        errors = [_relative(tensor) for tensor in packed.get((shard.name,), ())]
        rows.append(
            (
                shard.name,
                f"{len(shard.choices):,}",
                f"{len(shard.carried):,}",
                _sizes(shard.source_nbytes, shard.nbytes),
                *([] if report.is_dry_run else [_percent(sum(errors) / len(errors)) if errors else ""]),
            )
        )
    last = () if report.is_dry_run else (">error",)
    return Table(("file", ">packed", ">others", ">bytes", *last), rows, ("cyan",))


def carried_table(report: "PackReport", *, verbose: bool) -> Table:
    """Return what is not packed, and why: each of a few, else by kind and reason; with `verbose` all."""
    others = (*report.carried, *report.dropped)
    if verbose or len(others) <= MOST_ROWS:
        rows: list[tuple[str, ...]] = [
            (t.name, t.dtype, str(list(t.shape)), size(t.nbytes), _fate(report, choice), choice.reason)
            for choice in others
            if (t := choice.tensor)
        ]
        return Table(("other tensor", "dtype", "shape", ">bytes", "fate", "reason"), rows)
    rows = []
    key = lambda c: (_fate(report, c), pattern(c.reason), pattern(c.tensor.name))  # noqa: E731
    for (fate, reason, kind), choices in grouped(others, key).items():
        name, why = (choices[0].tensor.name, choices[0].reason) if len(choices) == 1 else (kind, reason)
        nbytes = sum(choice.tensor.nbytes for choice in choices)
        rows.append((name, f"{len(choices):,}", size(nbytes), fate, why))
    return shortened(Table(("other tensors", ">×", ">bytes", "fate", "reason"), rows))


def packed_line(tensor: "PackedTensor", shard: str) -> str:
    """Return what became of one tensor, for a log.

    Args:
        tensor: which.
        shard: name of its file, where there are several.
    """
    entry = tensor.entry
    return (
        f"{name_to_log(entry.name)} {_shape(tensor)} {entry.source_dtype} → {size(entry.packed_nbytes)}"
        + (f", error {_error(tensor)}" if tensor.error else "")
        + ", transposed" * entry.transposed
        + (f", {shard}" if shard else "")
    )


def pack_summary(report: "PackReport", seconds: float, done_nbytes: int) -> list[str]:
    """Return the last lines: how many, how large, how fast, how good, and where.

    Args:
        report: of the whole.
        seconds: that it took.
        done_nbytes: bytes of source that this run has worked on.
    """
    stacks = {tensor.entry.stack for tensor in report.packed if tensor.entry.stack}
    experts = sum(bool(tensor.entry.stack) for tensor in report.packed)
    aliases = sum(len(tensor.entry.aliases) for tensor in report.packed)
    beside = [f"{experts:,} out of {plural(len(stacks), 'stack')} of experts"] * bool(stacks)
    beside += [f"{plural(aliases, 'more name')} of tied weights"] * bool(aliases)
    others, before, after = len(report.carried), report.source_nbytes, report.output_nbytes
    if len(report.made) < len(report.shards):  # a part of the whole
        others = sum(len(shard.carried) for shard in _made(report))
        before = sum(shard.source_nbytes for shard in _made(report))
        after = sum(shard.nbytes for shard in _made(report))
    first = (
        f"{'would pack' if report.is_dry_run else 'packed'} {plural(len(report.packed), 'tensor')}"
        + (f" ({', '.join(beside)})" if beside else "")
        + f", {plural(others, 'other')} {'left out' if report.packed_only else 'copied'}; {_sizes(before, after)}"
        + (f", {before / after:.1f} times smaller" if after and before >= 1.05 * after else "")
    )
    if report.is_dry_run:
        return [first, "dry run, nothing was written"]
    second = f"in {duration(seconds)}, {size(int(done_nbytes / seconds)) if seconds else 'n/a'}/s"
    if resumed := sum(tensor.resumed for tensor in report.packed):
        second += f"; {resumed:,} of the tensors had been finished before"
    if len(report.packed) > 1:
        worst = max(report.packed, key=_relative)
        second += f"; largest error {_error(worst)}: {worst.entry.name}"
    if not report.is_complete:
        made = f"made {len(report.made):,} of {plural(len(report.shards), 'weight file')} (part {report.part})"
        return [first, second, f"{made}; {report.output} appears when all are there"]
    files = [plural(len(report.shards), "weight file")] * (len(report.shards) > 1)
    files += [f"beside {'them' if files else 'it'} {quoted(report.beside)}"] * bool(report.beside)
    return [first, second, f"wrote {report.output}" + (f" ({'; '.join(files)})" if files else "")]


def oversize_notice(report: "PackReport", limit: int) -> str | None:
    """Return a line on the files that are larger than was asked for, or None where there are none.

    Args:
        report: of the run.
        limit: bytes that a file may have (--max-shard-size).
    """
    above = [shard.nbytes for shard in report.shards if shard.nbytes > limit]
    if not above:
        return None
    verb = "is" if len(above) == 1 else "are"
    return (
        f"{plural(len(above), 'file')} of one tensor {verb} larger than --max-shard-size, up to {size(max(above))}: "
        "a tensor is never divided"
    )


def pack_warnings(report: "PackReport") -> list[str]:
    """Return each kind of warning once, with the number of tensors that it concerns."""
    from qcs4w_packer.targets import EXECUTORCH_WEBGPU

    refused: dict[str, list[str]] = {}
    for tensor in report.packed:
        for refusal in tensor.entry.executorch_refusals:
            refused.setdefault(refusal.rule.what, []).append(tensor.entry.name)
    floored = [t.entry.name for t in report.packed if t.floored_rows]
    texts = [
        f"{EXECUTORCH_WEBGPU.title} will refuse {plural(len(names), 'tensor')}, {quoted(names)}: {what}"
        for what, names in refused.items()
    ]
    texts += calibration_warnings(report)
    if floored:
        texts.append(
            "rows with absmax below 8.9e-7 met the scale floor and lost precision: "
            f"{plural(len(floored), 'tensor')}, {quoted(floored)}"
        )
    return texts


def pack_document(report: "PackReport", seconds: float, free_nbytes: int | None) -> dict[str, Any]:
    """Return the JSON form of a pack report.

    Args:
        report: of the whole.
        seconds: that it took.
        free_nbytes: of the disk, where it is known.
    """
    decided = _choices(report)
    shard_of = {tensor.name: shard.name for shard in report.shards for tensor in shard.carried}
    return {
        "source": str(report.source),
        "output": None if report.output is None else str(report.output),
        "dry_run": report.is_dry_run,
        "source_nbytes": report.source_nbytes,
        "output_nbytes": report.output_nbytes,
        "free_nbytes": free_nbytes,
        "elapsed_ms": 1000 * seconds,
        "complete": report.is_complete,
        "part": {"index": report.part.index + 1, "count": report.part.count, "files": list(report.made)},
        "resumed": sum(tensor.resumed for tensor in report.packed),
        "shards": [
            {
                "file": shard.name,
                "nbytes": shard.nbytes,
                "source_nbytes": shard.source_nbytes,
                "packed": len(shard.choices),
                "carried": len(shard.carried),
            }
            for shard in report.shards
        ],
        "beside": list(report.beside),
        "packed": [_tensor_document(tensor, decided[tensor.entry.name]) for tensor in report.packed],
        "carried": [
            {
                "tensor": choice.tensor.name,
                "dtype": choice.tensor.dtype,
                "shape": list(choice.tensor.shape),
                "nbytes": choice.tensor.nbytes,
                "reason": choice.reason,
                "left_out": report.packed_only or choice.action == "drop",
                "shard": shard_of.get(choice.tensor.name),
            }
            for choice in (*report.carried, *report.dropped)
        ],
        "left_out": list(report.left_out),
        "notices": list(report.notices),
    }


def _tensor_document(tensor: "PackedTensor", choice: "Choice") -> dict[str, Any]:
    entry = tensor.entry
    return {
        "tensor": entry.name,
        "out_features": entry.out_features,
        "in_features": entry.in_features,
        "source_dtype": entry.source_dtype,
        "source_nbytes": tensor.source_nbytes,
        "packed_nbytes": entry.packed_nbytes,
        "packed_sha256": entry.packed_sha256,
        "scale_sha256": entry.scale_sha256,
        "shard": tensor.shard,
        "resumed": tensor.resumed,
        "transposed": entry.transposed,
        "transposed_why": (choice.notice or "asked for by --transpose") if entry.transposed else None,
        "aliases": list(entry.aliases),
        "stack": entry.stack,
        "fp8_scale": choice.tensor.fp8.scale_name if choice.tensor.fp8 else None,
        "reason": tensor.reason,
        "quantization_error": quantization_document(tensor.error),
        "floored_rows": tensor.floored_rows,
        "method": entry.method,
        "calibration": entry.calibration and entry.calibration.to_json(),
        "warnings": tensor.warnings,
    }


def _made(report: "PackReport") -> "list[PlannedShard]":
    """Return the files that this run makes, or would make."""
    return [shard for shard in report.shards if shard.name in report.made]


def _choices(report: "PackReport") -> dict[str, "Choice"]:
    return {choice.tensor.name: choice for shard in report.shards for choice in shard.choices}


def _fate(report: "PackReport", choice: "Choice") -> str:
    return "left out" if report.packed_only else _FATES[choice.action]


def _why(report: "PackReport", tensor: "PackedTensor") -> str:
    return pattern(tensor.reason) if report.is_dry_run else ""


def _shape(tensor: "PackedTensor") -> str:
    return f"{tensor.entry.out_features} × {tensor.entry.in_features}"


def _relative(tensor: "PackedTensor") -> float:
    return tensor.error.relative if tensor.error else 0.0


def _error(tensor: "PackedTensor") -> str:
    return _percent(tensor.error.relative) if tensor.error else ""


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _sizes(before: int, after: int) -> str:
    return f"{size(before)} → {size(after)}"
