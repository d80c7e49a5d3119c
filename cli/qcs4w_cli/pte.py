"""How inspect shows a .pte file: every et_vk.linear_qcs4w call, its constants, and what refuses it."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .console import Console
from .report import Table, plural, size

if TYPE_CHECKING:
    from qcs4w_packer import PteCall, PteConstant, PteFile

_SHOWN_DIGITS = 12  # of a sha256; -v shows all


def call_documents(file: "PteFile", names: Iterable[str]) -> list[dict[str, Any]]:
    """Return the JSON form of calls; their constants are read, for the digests."""
    return [
        {
            "tensor": call.name,
            "method": call.method,
            "delegate": call.delegate,
            "backend": call.backend,
            "order": call.order,
            "rows": call.rows,
            "out_features": call.out_features,
            "in_features": call.in_features,
            "weight": _constant_document(call.weight),
            "scales": _constant_document(call.scales),
            "refusals": [
                {"rule": refusal.rule.name, "stage": refusal.rule.stage, "fault": refusal.fault, "mend": refusal.mend}
                for refusal in call.refusals
            ],
        }
        for call in map(file.calls.__getitem__, names)
    ]


def show_calls(file: "PteFile", console: Console, verbose: bool) -> None:
    """Print the calls as a table, with the digests in full where more is asked for."""
    calls = list(file.calls.values())
    methods = {call.method for call in calls}
    console.answer(
        f"{file.path}: ExecuTorch program, {size(file.nbytes)}; {plural(len(calls), 'call')} of et_vk.linear_qcs4w"
        + (f" in {plural(len(methods), 'method')}" if calls else "")
    )
    if not calls:
        return
    titles: tuple[str, ...] = (
        "linear", ">M max", ">N", ">K", ">delegate", ">call", "scales", ">weight at", ">scales at", "digest", "sha256",
        "notes",
    )  # fmt: skip
    if verbose:
        titles = (*titles[:-2], "backend", ">weight bytes", "sha256 of the weight", "sha256 of the scales", "notes")
    console.answer("")
    console.answer(Table(titles, [_row(call, file, verbose) for call in calls], ("cyan",)))


def note_place(file: "PteFile", name: str, console: Console) -> None:
    """Say of which file the offsets in a dump are, where it is a data file."""
    path = file.calls[name].weight.path
    if path != file.path:
        console.note(f"the offsets are in {path}")


def _row(call: "PteCall", file: "PteFile", verbose: bool) -> tuple[str, ...]:
    weight, scales = call.weight, call.scales
    if verbose:
        more: tuple[str, ...] = (call.backend, f"{weight.nbytes:,}", weight.sha256, scales.sha256)
    else:
        more = (weight.sha256[:_SHOWN_DIGITS],)
    data_files = dict.fromkeys(stored.path.name for stored in (weight, scales) if stored.path != file.path)
    notes = [f"in {name}" for name in data_files]
    if call.refusals:
        notes.append(f"ExecuTorch's WebGPU runtime refuses it: {_reasons(call)}")
    return (
        call.name,
        "?" if call.rows is None else str(call.rows),
        str(call.out_features),
        str(call.in_features),
        str(call.delegate),
        str(call.order),
        call.scale_dtype,
        f"{weight.offset:,}",
        f"{scales.offset:,}",
        _digest(weight, scales),
        *more,
        "; ".join(notes),
    )


def _reasons(call: "PteCall") -> str:
    return "; ".join(refusal.fault for refusal in call.refusals)


def _digest(*constants: "PteConstant") -> str:
    matches = {constant.key_matches for constant in constants}
    return "MISMATCH" if False in matches else "none" if None in matches else "ok"


def _constant_document(constant: "PteConstant") -> dict[str, Any]:
    return {
        "file": str(constant.path),
        "file_offset": constant.offset,
        "nbytes": constant.nbytes,
        "dtype": constant.dtype,
        "key": constant.key,
        "sha256": constant.sha256,
        "key_ok": constant.key_matches,
    }
