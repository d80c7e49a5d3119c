"""The inspect command."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qcs4w_packer.nibbles import EVEN_HIGH, LAYOUTS
from qcs4w_packer.weights import NAMELESS

from .console import Console
from .dump import Dump, hex_lines
from .main import COMMANDS, EXIT_FAILED
from .options import PATH, blob_options, common_options
from .report import Table, clean_line, plural, refused_note, size

if TYPE_CHECKING:
    from qcs4w_packer import Blob, PackedEntry, PackedFile


class SliceType(click.ParamType):  # type: ignore[type-arg]  # generic in recent clicks only
    """A range of rows or columns: a:b, a:, :b or a single number."""

    name = "a:b"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> slice:
        """Parse the text."""
        if isinstance(value, slice):
            return value
        first, colon, last = str(value).partition(":")
        parts = (first, last if colon else first)
        if not str(value).isascii() or max(map(len, parts)) > 18:
            self.fail(f"'{value:.40}' is not a range such as 0:4, 8: or 3", param, ctx)
        if not all(part.isdecimal() or (colon and not part) for part in parts):
            self.fail(f"'{value}' is not a range such as 0:4, 8: or 3", param, ctx)
        start = int(first or 0)
        return slice(start, (int(last) if last else None) if colon else start + 1)


@click.command("inspect", short_help=COMMANDS["inspect"])
@click.argument("file", type=PATH)
@click.option("--tensor", metavar="NAME", help="Dump this packed tensor: bytes, nibbles, codes and values.")
@click.option("--rows", type=SliceType(), help="Rows n to dump.  [default: 0:4]")
@click.option("--cols", type=SliceType(), help="Columns k to dump.  [default: 0:16]")
@click.option("--hex", "as_hex", is_flag=True, help="Dump raw bytes with their offsets in the file.")
@click.option(
    "--layout",
    type=click.Choice(list(LAYOUTS)),
    help=f"How to read the bytes, or the only layout to find.  [default: {EVEN_HIGH.name}; all with --find]",
)
@click.option(
    "--find",
    "needle",
    type=PATH,
    metavar="NEEDLE",
    help="Search FILE, of any kind and size, for the packed tensors of the file NEEDLE.",
)
@click.option(
    "--against",
    type=PATH,
    metavar="WEIGHTS",
    help="Name the layout of the packed bytes by these float weights that they were made of.",
)
@click.option("-x", "--input", "input_path", type=PATH, help="Name the layout by this input and its --output.")
@click.option("-y", "--output", "output_path", type=PATH, help="What the linear should give for --input.")
@blob_options(layout=False)
@common_options
def command(
    file: Path,
    tensor: str | None,
    rows: slice | None,
    cols: slice | None,
    as_hex: bool,
    layout: str | None,
    against: Path | None,
    input_path: Path | None,
    output_path: Path | None,
    needle: Path | None,
    blob: "Blob | None",
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> int:
    """Show what is in a file: metadata, tensors, sizes and digests, or the nibbles of one tensor.

    It is for broken files too: what a reader would refuse is reported, what can be shown is shown, and the exit code
    is 1 (2 where the file cannot be opened at all). Of an ExecuTorch program (.pte) every linear_qcs4w call is listed,
    with the places and digests of its weight and scales and why the WebGPU runtime would refuse it; of any other file
    the tensors.

    It also names the layout that packed bytes really have, ours or another tool's: --against holds them against the
    float weights, --input and --output against an answer that is known to be right. Raw bytes of any file will do:
    --offset says where they begin, --shape how large they are. The exit code is 1 where no layout fits, or another one
    than the file says. In its table the cosine is between the evidence and what a reading makes of the bytes, the
    residual what it leaves unexplained (1: everything), with scales that suit it best or, as scaled, those given.

    With --find the file is searched for the bytes of packed tensors: in each layout of the nibbles, by rows or
    transposed, with or without gaps between rows, and for their scales. The exit code is 1 if one is not there.

    \b
    Example:
      qcs4w inspect packed.safetensors
      qcs4w inspect packed.safetensors --tensor pooler.dense --rows 0:2 --cols 0:16
      qcs4w inspect packed.safetensors --tensor pooler.dense --layout even-low
      qcs4w inspect packed.safetensors --tensor pooler.dense --hex
      qcs4w inspect packed.safetensors --tensor pooler.dense --against model.safetensors
      qcs4w inspect packed.bin --against weight.npy
      qcs4w inspect packed.bin --shape 384,384 --rows 0:2
      qcs4w inspect model.pte
      qcs4w inspect packed.safetensors --find packed.safetensors
    """  # noqa: D301
    from qcs4w_packer import PackedFolder, PteFile, UsageError, open_packed
    from qcs4w_packer.packed_sources import is_packed_file

    from .against import inspect_against, inspect_alone
    from .pte import call_documents, note_place, show_calls

    console = Console("inspect", as_json, quiet)
    if needle is not None:
        if rows or cols or as_hex or against or input_path or output_path:
            raise UsageError("--find goes with --tensor, --layout and --shape, not with what looks into FILE")
        from .find import find

        return find(file, needle, blob, tensor, layout, console)
    if against is not None or input_path is not None or output_path is not None:
        if (against is None) == (input_path is None or output_path is None):
            raise UsageError("the layout is named by --against WEIGHTS, or by --input and --output together")
        if rows or cols or as_hex:
            raise UsageError("--rows, --cols and --hex are of a dump, --against and --output name a layout")
        pair = (input_path, output_path) if input_path is not None and output_path is not None else None
        return inspect_against(file, tensor, blob, against, pair, layout, console, verbose)
    wants_dump = bool(as_hex or rows or cols or layout)
    if blob is not None:
        if not wants_dump:
            return inspect_alone(file, tensor, blob, console)
        tensor = tensor or NAMELESS
    elif not is_packed_file(file):
        if wants_dump:
            raise UsageError(
                f"{file}: has no packed tensors",
                hint=f"pack it first: qcs4w pack {file} -o OUT.safetensors; or say --shape N,K of raw packed bytes",
            )
        return inspect_alone(file, tensor, None, console) if tensor is not None else _inspect_source(file, console)
    if tensor is None and (rows or cols or layout):
        raise UsageError("--rows, --cols and --layout are of a dump", hint="say of which tensor with --tensor")
    with open_packed(file, blob, strict=False, tensor=tensor) as container:
        if tensor is None and as_hex:
            tensor = container.only().name
        entries = [container.entry(tensor)] if tensor is not None else list(container.entries.values())
        mismatches = {entry.name: container.wrong_digests(entry) for entry in entries}
        problems = [
            *container.problems,
            *(text for entry in entries for text in (*mismatches[entry.name], *container.odd_scales(entry))),
        ]
        code = EXIT_FAILED if problems else 0
        content: dict[str, Any] = {
            "file": str(file),
            "container": container.format == "qcs4w",
            "format": container.format,
            "nbytes": container.nbytes if isinstance(container, PackedFolder) else container.path.stat().st_size,
            "document": container.statement,
            "problems": problems,
            "tensors": [_tensor_document(container, entry, mismatches[entry.name]) for entry in entries],
            "carried": _carried(container),
        }
        if isinstance(container, PackedFolder):
            content["shards"] = [shard.path.name for shard in container.shards]
            content["beside"] = [path.name for path in container.beside]
        if isinstance(container, PteFile):
            content["calls"] = call_documents(container, [entry.name for entry in entries])
        if tensor is not None:
            dump = Dump.of(container, entries[0], rows or slice(0, 4), cols or slice(0, 16), layout or EVEN_HIGH.name)
            if as_hex:
                console.answer("\n".join(hex_lines(dump)))
            else:
                console.answer_styled(dump.lines())
            content["dump"] = dump.document()
            if isinstance(container, PteFile):
                note_place(container, entries[0].name, console)
            elif isinstance(container, PackedFolder):
                console.note(f"offsets are in {container.shard(entries[0].name).path}")
        elif isinstance(container, PteFile):
            show_calls(container, console, verbose)
        else:
            _show_overview(content, console, verbose)
        for problem in problems:
            console.warn(problem)
        console.document(content, code)
        return code


def _tensor_document(container: "PackedFile", entry: "PackedEntry", wrong: list[str]) -> dict[str, Any]:
    from qcs4w_packer import PackedFolder

    place = container.place(entry)
    shard = {"shard": container.shard(entry.name).path.name} if isinstance(container, PackedFolder) else {}
    return {
        "tensor": entry.name,
        "out_features": entry.out_features,
        "in_features": entry.in_features,
        "source_dtype": entry.source_dtype,
        "method": entry.method,
        "transposed": entry.transposed,
        "aliases": list(entry.aliases),
        "packed_nbytes": entry.packed_nbytes,
        "file_offset": place[1] if place else None,
        "packed_sha256": entry.packed_sha256,
        "scale_sha256": entry.scale_sha256,
        "digest_ok": None if entry.packed_sha256 is None else not wrong,
        "executorch_refuses": bool(entry.executorch_refusals),
        **shard,
    }


def _carried(container: "PackedFile") -> list[dict[str, Any]]:
    tensors = (container.carried_tensor(name) for name in container.carried)
    return [{"tensor": t.name, "dtype": t.dtype, "shape": list(t.shape), "nbytes": t.nbytes} for t in tensors]


def _show_overview(content: dict[str, Any], console: Console, verbose: bool) -> None:
    shards = content.get("shards", ())
    headline = f"{content['file']}: "
    if content["container"]:
        document = content["document"]
        said = {key: clean_line(str(document.get(key, "?"))) for key in ("version", "nibble_order", "offset", "tool")}
        headline += (
            f"qcs4w {f'checkpoint of {len(shards):,} shards' if len(shards) > 1 else 'container'}, "
            f"version {said['version']}, {size(content['nbytes'])}; "
            f"nibble order {said['nibble_order']}, offset {said['offset']}; made by {said['tool']}"
        )
    else:
        said = {key: clean_line(str(value)) for key, value in content["document"].items()}
        headline += "; ".join(
            [f"{content['format']}, {size(content['nbytes'])}", *(f"{key} {value}" for key, value in said.items())]
        )
    console.answer(headline + "\n")
    rows: list[tuple[str, ...]] = [
        (
            t["tensor"],
            *(str(t[key]) for key in ("out_features", "in_features")),
            size(t["packed_nbytes"]),
            "" if t["file_offset"] is None else f"{t['file_offset']:,}",
            t["source_dtype"],
            t["method"],
            {True: "ok", False: "MISMATCH", None: "none"}[t["digest_ok"]],
            (t["packed_sha256"] or "")[: None if verbose else 12],
            "; ".join(
                ["transposed"] * t["transposed"]
                + [f"also {alias}" for alias in t["aliases"]]
                + refused_note(t["executorch_refuses"])
            ),
        )
        for t in content["tensors"]
    ]
    titles: tuple[str, ...] = (
        "packed tensor",
        ">N",
        ">K",
        ">bytes",
        ">file offset",
        "from",
        "method",
        "digest",
        "sha256",
        "notes",
    )
    if len(shards) > 1:
        titles = (*titles[:4], "shard", *titles[4:])
        rows = [(*row[:4], t["shard"], *row[4:]) for row, t in zip(rows, content["tensors"], strict=True)]
    console.answer(Table(titles, rows, ("cyan",)))
    carried = content["carried"]
    if carried:
        total = size(sum(t["nbytes"] for t in carried))
        console.answer(
            f"\nand {plural(len(carried), 'tensor')} as in the source, {total}"
            + ("" if verbose else " (-v lists them)")
        )
    if content.get("beside"):
        console.answer(f"\nbeside the weights: {', '.join(content['beside'])}")
    if carried and verbose:
        listed = [(t["tensor"], t["dtype"], str(t["shape"]), size(t["nbytes"])) for t in carried]
        console.answer(Table(("other tensor", "dtype", "shape", ">bytes"), listed))


def _inspect_source(file: Path, console: Console) -> int:
    """List a weight file that is not a container."""
    from qcs4w_packer import open_source

    with open_source(file) as source:
        tensors = [
            {"tensor": t.name, "dtype": t.dtype, "shape": list(t.shape), "nbytes": t.nbytes}
            for t in source.tensors.values()
        ]
    console.answer(f"{file}: not a qcs4w container; {plural(len(tensors), 'tensor')}\n")
    rows = [(str(t["tensor"]), str(t["dtype"]), str(t["shape"]), size(int(str(t["nbytes"])))) for t in tensors]
    console.answer(Table(("tensor", "dtype", "shape", ">bytes"), rows, ("cyan",)))
    integers = [str(t["tensor"]) for t in tensors if t["dtype"] in ("U8", "I8", "I32", "U32")]
    if integers:
        chosen = "" if len(tensors) == 1 else f" --tensor {integers[0]}"
        console.note(f"packed by another tool? Name the layout: qcs4w inspect {file}{chosen} --against WEIGHTS")
    if len(integers) < len(tensors):
        console.note(f"see what would be packed: qcs4w pack {file} --dry-run")
    console.document({"file": str(file), "container": False, "tensors": tensors}, 0)
    return 0
