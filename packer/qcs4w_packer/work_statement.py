"""plan.json: what is being made, of what and by whom, so that a later run can tell whether it makes the very same."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from ._version import __version__
from .pack_plan import PackPlan
from .safetensors_file import open_for_reading, read_at

_ENDS_NBYTES = 1 << 16  # of a source file's beginning and end, where formats have their headers and directories


def stamps(plan: PackPlan) -> dict[str, list[Any]]:
    """Return size, time and a digest of both ends of every source file: they tell whether it is still the same.

    Raises:
        SourceError: one cannot be read.
    """
    found: dict[str, list[Any]] = {}
    for path in plan.source_files:
        fd = open_for_reading(path)
        try:
            about = os.fstat(fd)
            ends = read_at(fd, path, 0, min(_ENDS_NBYTES, about.st_size))
            ends += read_at(fd, path, max(0, about.st_size - _ENDS_NBYTES), min(_ENDS_NBYTES, about.st_size))
            found[str(path.resolve())] = [about.st_size, about.st_mtime_ns, hashlib.sha256(ends).hexdigest()]
        finally:
            os.close(fd)
    return found


def statement(plan: PackPlan) -> dict[str, Any]:
    """Return what plan.json says; equal statements make equal bytes."""
    sources = stamps(plan)
    config = json.dumps(plan.source.config, sort_keys=True, default=str)
    common = json.dumps([__version__, sources, config, plan.recipe.options()], sort_keys=True)
    shards = {
        shard.name: hashlib.sha256((common + shard.writer().header_text()).encode()).hexdigest()
        for shard in plan.shards
    }
    document = {"tool": f"qcs4w {__version__}", "sources": sources, "options": dict(plan.options), "shards": shards}
    said: dict[str, Any] = json.loads(json.dumps(document))  # as it will be read again: tuples become lists
    return said


def read_statement(path: Path) -> dict[str, Any] | None:
    """Return what a plan.json says, or None where it is missing or damaged: journals then speak for themselves."""
    try:
        said = json.loads(path.read_text())
        return said if isinstance(said, dict) and isinstance(said.get("shards"), dict) else None
    except (OSError, ValueError, RecursionError):
        return None


def what_changed(before: dict[str, Any] | None, now: dict[str, Any], *, restart: bool) -> str:
    """Say why work that was begun is of no use for what is made now."""
    if restart:
        return "asked for"
    if before is None:
        return "what was begun is of other work"
    if before.get("tool") != now["tool"]:
        return f"it was begun by {before.get('tool')}, this is {now['tool']}"
    if before.get("sources") != now["sources"]:
        old = before.get("sources")
        old = old if isinstance(old, dict) else {}
        changed = [name for name, stamp in now["sources"].items() if old.get(name) != stamp]
        names = changed or sorted(set(old) - set(now["sources"])) or ["the source"]
        return f"{names[0]} has changed" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
    return "the options have changed"
