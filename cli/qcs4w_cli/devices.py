"""The devices command."""

from typing import TYPE_CHECKING

import click

from .console import Console
from .main import COMMANDS
from .options import ENGINES, adapter_options, common_options
from .report import LIMITS, Table, full_adapter_document, size

if TYPE_CHECKING:
    from qcs4w_gpu import Adapter

FEATURES = ("timestamp-query", "shader-f16", "subgroups")


@click.command("devices", short_help=COMMANDS["devices"])
@adapter_options
@common_options
def command(engine: str, adapter: str | None, require_gpu: bool, as_json: bool, quiet: bool, verbose: bool) -> int:
    """List the WebGPU adapters of this machine as each engine sees them, and which one would be taken and why.

    \b
    Example:
      qcs4w devices
      qcs4w devices --json
      qcs4w devices --adapter llvmpipe
    """  # noqa: D301
    from qcs4w_gpu import choose_adapter

    console = Console("devices", as_json, quiet)
    found = {name: _Found(name) for name in ENGINES}
    chosen = found[engine]
    if chosen.error is not None:
        raise chosen.error
    taken, reason = choose_adapter(chosen.adapters, adapter, require_gpu=require_gpu, refused=chosen.refused)
    adapters = [a for each in found.values() for a in each.adapters]
    console.answer(
        Table(
            ("engine", ">#", "adapter", "kind", "backend", "driver", "features", "taken"),
            [
                (
                    a.engine,
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
            ("", "", "cyan"),
        )
    )
    console.answer("")
    limits = [(name, *(_limit(name, a.limits.get(name)) for a in adapters)) for name in LIMITS]
    console.answer(Table(("limit", *(f">{a.engine} {a.index}" for a in adapters)), limits))
    if verbose:
        for a in adapters:
            console.answer(f"\n{a.engine} {a.index} all features: {', '.join(sorted(a.features))}")
    console.answer("")
    for each in found.values():
        if each.problem:
            console.answer(f"{each.name}: {each.problem}")
    console.answer(f"taken: {taken.name}: {reason}; engine {chosen.version}")
    console.document(
        {
            "engine": chosen.version,
            "engines": [
                {"name": each.name, "version": each.version, "problem": each.problem} for each in found.values()
            ],
            "adapters": [{**full_adapter_document(a), "engine": a.engine, "taken": a is taken} for a in adapters],
            "reason": reason,
        },
        0,
    )
    return 0


class _Found:
    """What an engine finds, and what keeps it from finding more."""

    def __init__(self, name: str):
        from qcs4w_gpu import GpuError, list_adapters
        from qcs4w_gpu.webgpu import engine

        self.name = name
        self.adapters: list[Adapter] = []
        self.version: str | None = None
        self.refused: list[str] = []
        self.error: GpuError | None = None
        try:
            self.version, self.refused = engine(name).version, engine(name).refused
            self.adapters = list_adapters(name)
        except GpuError as error:
            self.error = error

    @property
    def problem(self) -> str | None:
        if self.error:
            return f"{self.error}" + (f"; {self.error.hint}" if self.error.hint else "")
        if self.refused:
            return f"does not take a driver that is there: {'; '.join(self.refused)}"
        return None if self.adapters else "finds no adapter"


def _limit(name: str, value: int | None) -> str:
    if value is None:
        return ""
    return size(value) if name.endswith("size") else f"{value:,}"
