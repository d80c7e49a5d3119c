"""The devices command."""

import click

from .console import Console
from .main import COMMANDS
from .options import adapter_options, common_options
from .report import LIMITS, Table, full_adapter_document, size

FEATURES = ("timestamp-query", "shader-f16", "subgroups")


@click.command("devices", short_help=COMMANDS["devices"])
@adapter_options
@common_options
def command(adapter: str | None, require_gpu: bool, as_json: bool, quiet: bool, verbose: bool) -> int:
    """List the WebGPU adapters of this machine, and which one would be taken and why.

    \b
    Example:
      qcs4w devices
      qcs4w devices --json
      qcs4w devices --adapter llvmpipe
    """  # noqa: D301
    from qcs4w_gpu import choose_adapter, list_adapters
    from qcs4w_gpu.webgpu import engine_version

    console = Console("devices", as_json, quiet)
    adapters = list_adapters()
    taken, reason = choose_adapter(adapters, adapter, require_gpu=require_gpu)
    console.answer(
        Table(
            (">#", "adapter", "kind", "backend", "driver", "features", "taken"),
            [
                (
                    str(a.index),
                    a.name,
                    a.kind,
                    a.backend,
                    a.driver,
                    " ".join(f for f in FEATURES if f in a.features),
                    "yes" if a is taken else "",
                )
                for a in adapters
            ],
            ("", "cyan"),
        )
    )
    console.answer("")
    limits = [(name, *(_limit(name, a.limits.get(name)) for a in adapters)) for name in LIMITS]
    console.answer(Table(("limit", *(f">#{a.index}" for a in adapters)), limits))
    if verbose:
        for a in adapters:
            console.answer(f"\n#{a.index} all features: {', '.join(sorted(a.features))}")
    console.answer(f"\ntaken: {taken.name}: {reason}; engine {engine_version()}")
    console.document(
        {
            "engine": engine_version(),
            "adapters": [{**full_adapter_document(a), "taken": a is taken} for a in adapters],
            "reason": reason,
        },
        0,
    )
    return 0


def _limit(name: str, value: int | None) -> str:
    if value is None:
        return ""
    return size(value) if name.endswith("size") else f"{value:,}"
