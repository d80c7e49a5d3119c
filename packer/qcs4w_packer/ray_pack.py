"""Packing the files of one output on the nodes of a Ray cluster, which see the source and the output on a shared disk.

Ray deals the files out and gives a dead worker's file to another, which goes on from its journal. No weights pass
through Ray: a worker opens the source itself and writes the file where it belongs.
"""

import contextlib
import logging
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import errors
from .errors import OutputError, Qcs4wError, SourceError, UsageError
from .methods.calibration import open_calibration
from .methods.recipe import Recipe
from .pack_plan import PlannedShard, plan_pack
from .pack_shard import pack_shard
from .pack_watch import PackedTensor, Tally, Watch
from .request import Request
from .sources import open_source
from .work_folder import WorkFolder

LOCAL = "local"  # the address that starts a Ray of this machine's own

_RETRIES = 5  # of one file, by as many workers that died
_PATIENCE = 10  # seconds for a host to answer
_SHARED = "the source and the output must lie on a disk that every node sees under the same path"


def pack_on_ray(
    work: WorkFolder, shards: tuple[PlannedShard, ...], tally: Tally, *, address: str = LOCAL
) -> list[PackedTensor]:
    """Make files on a cluster, one task for each; they wait in the work folder for `finish`.

    Args:
        work: the work folder, opened as a shared one.
        shards: the files to make.
        tally: told of each file once it is there.
        address: of the cluster, as `ray.init` takes it; LOCAL starts one and ends it again. A process that is connected
            already uses its own cluster.

    Returns:
        what became of each tensor that is packed, in the order of the shards.

    Raises:
        UsageError: Ray is not installed, or does not answer at the address.
        SourceError: a node does not see the source.
        OutputError: a node does not see the output; or a file's workers died again and again.
        Qcs4wError: as `pack_shard` does; the message names the node.
    """
    made: dict[str, tuple[PackedTensor, ...]] = {}
    by_name = {shard.name: shard for shard in shards}
    with _cluster(address) as ray:
        task = ray.remote(_pack_one).options(num_cpus=1, max_retries=_RETRIES)
        source, options = os.path.abspath(work.plan.source.path), dict(work.plan.options)
        waiting = {task.remote(source, str(work.output), options, shard.name): shard.name for shard in shards}
        try:
            while waiting:
                ready, _ = ray.wait(list(waiting), num_returns=1)
                name = waiting.pop(ready[0])
                made[name] = _result(ray, ready[0], name, work.output)
                work.finished += by_name[name].tensor_count
                for tensor in made[name]:
                    tally.watch.packed(tensor)
                tally.advance(by_name[name].source_nbytes, name, name)
        finally:
            for left in waiting:
                with contextlib.suppress(Exception):
                    ray.cancel(left, force=True)
    return [tensor for shard in shards for tensor in made[shard.name]]


@contextlib.contextmanager
def _cluster(address: str) -> Iterator[Any]:
    """Yield the ray module, connected; a connection that is there already is used and stays."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # silences a notice about GPUs, which we never use
    try:
        import ray
    except ImportError:
        raise UsageError("Ray is not installed", hint="pip install 'qcs4w[ray]'") from None
    if ray.is_initialized():
        yield ray
        return
    _knock(address)
    own: dict[str, Any] = {"num_cpus": os.cpu_count(), "include_dashboard": False} if address == LOCAL else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise _no_answer(address, (str(error).splitlines() or [type(error).__name__])[0]) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Refuse a host and port where nobody listens at once: Ray itself would try for minutes."""
    found = re.fullmatch(r"(?:ray://)?\[?(.+?)\]?:(\d{1,5})", address)
    if not found:
        return
    try:
        socket.create_connection((found[1], int(found[2])), timeout=_PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise _no_answer(address, getattr(error, "strerror", None) or str(error)) from None


def _no_answer(address: str, reason: str) -> UsageError:
    return UsageError(
        f"no Ray cluster answers at {address!r}: {reason:.200}",
        hint="start one with `ray start --head`, or leave the address out for one on this machine",
    )


def _result(ray: Any, task: Any, name: str, output: Path) -> tuple[PackedTensor, ...]:
    """Return what a task has made, or raise what it met."""
    try:
        packed, fault = ray.get(task)
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError) as error:
        raise OutputError(
            f"{output}: the workers that made {name} died {_RETRIES + 1} times ({type(error).__name__})",
            hint="does a node run out of memory? The same command goes on from what is finished",
        ) from None
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise OutputError(
            f"{output}: {name} was not made: {reason[-1]:.300}",
            hint="every node needs this version of qcs4w and of Python",
        ) from None
    if fault is not None:
        kind, message, hint = fault
        raise getattr(errors, kind, Qcs4wError)(message, hint=hint)
    result: tuple[PackedTensor, ...] = packed
    return result


def _pack_one(
    source: str, output: str, options: dict[str, Any], name: str
) -> tuple[tuple[PackedTensor, ...] | None, tuple[str, str, str | None] | None]:
    """Make one file; runs on a node. Returns what was packed, or the kind, message and hint of an error."""
    try:
        return _make(Path(source), Path(output), options, name), None
    except Qcs4wError as error:
        return None, (type(error).__name__, f"node {socket.gethostname()}: {error}", error.hint)


def _make(path: Path, output: Path, options: dict[str, Any], name: str) -> tuple[PackedTensor, ...]:
    if not path.exists():
        raise SourceError(f"{path} is not there", hint=_SHARED)
    if not WorkFolder.is_begun(output):
        raise OutputError(f"{output} is not being written there", hint=_SHARED)
    given = dict(options)
    split = {key: given.pop(key) for key in ("max_shard_size", "packed_only")}
    recipe = Recipe.of(given.pop("recipe"))
    with open_source(path) as source, open_calibration(recipe) as calibration:
        plan = plan_pack(source, output, Request(**given), **split, recipe=recipe, calibration=calibration)
        shard = next(shard for shard in plan.shards if shard.name == name)
        work = WorkFolder(plan, shared=True)
        try:
            packed = pack_shard(work, shard, Tally(Watch(), shard.source_nbytes), threads=1)
            work.close()
        except BaseException as error:
            work.leave(error)
            raise
        return packed
