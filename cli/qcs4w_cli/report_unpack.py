"""What unpack has done, or would do -> tables, lines and JSON. Pure."""

from typing import TYPE_CHECKING, Any

from .progress import name_to_log
from .report import Table, duration, plural, quoted, size
from .report_groups import MOST_ROWS, grouped, pattern, shortened

if TYPE_CHECKING:
    from qcs4w_packer import UnpackReport
    from qcs4w_packer.unpack_watch import UnpackedTensor


def unpack_tables(report: "UnpackReport", *, verbose: bool) -> list[Table]:
    """Return what became of the packed tensors: each of a few, else the files and the kinds; with `verbose` all."""
    tables = [_file_table(report)] if len(report.files) > 1 else []
    if not verbose:
        tables = [shortened(table) for table in tables]
    if verbose or len(report.tensors) <= MOST_ROWS:
        return [*tables, _tensor_table(report)]
    return [*tables, shortened(_kind_table(report))]


def _tensor_table(report: "UnpackReport") -> Table:
    rows = []
    for result in report.tensors:
        tensor = result.tensor
        notes = (
            [f"{plural(len(tensor.parts), 'part')} of a stack"] * (len(tensor.shape) == 3)
            + ["turned back"] * tensor.transposed
            + [f"also {alias}" for alias in tensor.aliases]
        )
        sizes = f"{size(tensor.packed_nbytes)} → {size(tensor.nbytes)}"
        rows.append((tensor.name, _shape(result), tensor.dtype, sizes, _cost([result]), "; ".join(notes)))
    return Table(("tensor", ">shape", "dtype", ">bytes", ">rounding", "notes"), rows, ("cyan",))


def _kind_table(report: "UnpackReport") -> Table:
    """Return the tensors whose names differ in numbers only as one row each."""
    rows = []
    groups = grouped(report.tensors, lambda result: (pattern(result.tensor.name), _shape(result), result.tensor.dtype))
    for (kind, shape, dtype), results in groups.items():
        nbytes = sum(result.tensor.nbytes for result in results)
        name = (results[0].tensor.name if len(results) == 1 else kind).removesuffix(".weight")
        rows.append((name, f"{len(results):,}", shape, dtype, size(nbytes), _cost(results)))
    return Table(("tensors", ">×", ">shape", "dtype", ">bytes", ">rounding"), rows, ("cyan",))


def _file_table(report: "UnpackReport") -> Table:
    unpacked = grouped(report.tensors, lambda result: (result.file or "",))
    rows = [
        (name, f"{len(unpacked.get((name,), ())):,}", size(nbytes))
        for name, nbytes in zip(report.files, report.file_nbytes, strict=True)
    ]
    return Table(("file", ">unpacked", ">bytes"), rows, ("cyan",))


def unpacked_line(result: "UnpackedTensor", *, is_folder: bool) -> str:
    """Return what became of one tensor, for a log."""
    tensor = result.tensor
    cost = _cost([result])
    return (
        f"{name_to_log(tensor.name)} {_shape(result)} {tensor.dtype} → {size(tensor.nbytes)}"
        + (f", rounding {cost}" if cost not in ("", "none") else "")
        + ", turned back" * tensor.transposed
        + (f", {result.file}" if is_folder else "")
    )


def unpack_summary(report: "UnpackReport", seconds: float) -> list[str]:
    """Return the last lines: how many, how large, how fast, and where.

    Args:
        report: of the whole.
        seconds: that it took.
    """
    first = (
        f"{'would unpack' if report.is_dry_run else 'unpacked'} {plural(len(report.tensors), 'tensor')}, "
        f"{plural(len(report.carried), 'other')} copied; {size(report.output_nbytes)}"
    )
    if report.is_dry_run:
        return [first, "dry run, nothing was written"]
    rate = f"{size(int(report.output_nbytes / seconds))}/s" if seconds else "n/a"
    files = [plural(len(report.files), "weight file")] * (len(report.files) > 1)
    files += [f"beside {'them' if files else 'it'} {quoted(report.beside)}"] * bool(report.beside)
    last = f"wrote {report.output}" + (f" ({'; '.join(files)})" if files else "")
    return [first, f"in {duration(seconds)}, {rate}", last]


def unpack_document(report: "UnpackReport", seconds: float, free_nbytes: int | None) -> dict[str, Any]:
    """Return the JSON form of an unpack report.

    Args:
        report: of the whole.
        seconds: that it took.
        free_nbytes: of the disk, where it is known.
    """
    return {
        "source": str(report.source),
        "output": None if report.output is None else str(report.output),
        "from": report.source_format,
        "dry_run": report.is_dry_run,
        "files": list(report.files),
        "file_nbytes": list(report.file_nbytes),
        "output_nbytes": report.output_nbytes,
        "free_nbytes": free_nbytes,
        "alias_nbytes": report.alias_nbytes,
        "elapsed_ms": 1000 * seconds,
        "tensors": [
            {
                "tensor": result.tensor.name,
                "dtype": result.tensor.dtype,
                "shape": list(result.tensor.shape),
                "nbytes": result.tensor.nbytes,
                "packed_nbytes": result.tensor.packed_nbytes,
                "parts": len(result.tensor.parts),
                "aliases": list(result.tensor.aliases),
                "transposed": result.tensor.transposed,
                "file": result.file,
                "rounding_error": None if result.rounding is None else result.rounding.largest,
                "vanished": None if result.rounding is None else result.rounding.vanished,
            }
            for result in report.tensors
        ],
        "carried": list(report.carried),
        "beside": list(report.beside),
        "left_out": list(report.left_out),
        "notes": list(report.notes),
    }


def _shape(result: "UnpackedTensor") -> str:
    return " × ".join(map(str, result.tensor.shape))


def _cost(results: "list[UnpackedTensor]") -> str:
    """Return the most that rounding has cost; nothing where it is not known."""
    costs = [result.rounding.largest for result in results if result.rounding]
    return "" if not costs else f"{max(costs):.2g}" if max(costs) else "none"
