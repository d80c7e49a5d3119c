"""pack: a weight file or a folder of them -> a container or a folder of containers, with a report of what it cost."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .errors import SelectionError, UnknownTensorError, UsageError
from .files import check_target
from .fp8_scales import find_scale, is_fp8_weight
from .metadata import PackedEntry
from .methods.calibration import open_calibration
from .methods.recipe import Recipe
from .name_patterns import did_you_mean
from .pack_finish import check_output, finish
from .pack_plan import PackPlan, PlannedShard, plan_pack
from .pack_shard import pack_shard
from .pack_watch import PackedTensor, Step, Tally, Watch
from .parts import WHOLE, Part
from .request import Request
from .select import Choice, notices
from .sources import is_checkpoint, open_source
from .weights import Source, split_stack
from .work_folder import WorkFolder

#: Called with the bytes of source just finished, the bytes to do in all, and the tensor's name.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class PackReport:
    """The result of packing one file or folder.

    Attributes:
        source: the weight file or folder.
        output: the container or folder; in a dry run what would be made, or None.
        packed: in the source's order.
        carried: choices for all that is copied as it is, or left out with `packed_only`.
        dropped: choices for what is in no output, with the reason.
        left_out: what the source holds besides tensors, described for people.
        notices: what was decided though nobody asked for it, described for people.
        shards: every file with tensors, in order.
        beside: names of the files that go along with a folder.
        source_nbytes: bytes of all tensors of the source.
        output_nbytes: bytes of all files with tensors.
        packed_only: what is carried has been left out.
        is_dry_run: nothing was written and no data was read.
        part: of a job that several share; `packed` holds this part's tensors.
        made: names of the files that this part makes.
        is_complete: the output is there; False while other parts are missing.
    """

    source: Path
    output: Path | None
    packed: tuple[PackedTensor, ...]
    carried: tuple[Choice, ...]
    dropped: tuple[Choice, ...]
    left_out: tuple[str, ...]
    notices: tuple[str, ...]
    shards: tuple[PlannedShard, ...]
    beside: tuple[str, ...]
    source_nbytes: int
    output_nbytes: int
    packed_only: bool
    is_dry_run: bool
    part: Part
    made: tuple[str, ...]
    is_complete: bool


def pack_file(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None,
    *,
    request: Request | None = None,
    packed_only: bool = False,
    max_shard_size: int | None = None,
    force: bool = False,
    restart: bool = False,
    dry_run: bool = False,
    part: Part | None = None,
    ray: str | None = None,
    recipe: Recipe | None = None,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> PackReport:
    """Quantize and pack the chosen tensors of a weight file, or of a folder of them, into containers.

    Called again after it was broken off, it goes on with what is finished; see `work_folder`.

    Args:
        path: what `open_source` opens.
        output: the container to make, or the folder where the source is one or `max_shard_size` is given; may be None
            in a dry run.
        request: what to pack; by default linear weights by name.
        packed_only: do not carry the other tensors along.
        max_shard_size: bytes that a file may have at most, see `plan_pack`.
        force: replace an output that is there.
        restart: begin anew, whatever an earlier run has finished.
        dry_run: decide, measure sizes, and write nothing.
        part: make only these of the output's files, beside other runs that make the others; the one that ends last
            gives the output its place. All must be given the same options.
        ray: make the files on this Ray cluster, see `ray_pack`.
        recipe: how codes and scales are to be found; by default by absmax, as ExecuTorch does.
        progress: called as the work proceeds with the bytes of source just done, those to do in all, and the tensor.
        watch: told in more detail.

    Raises:
        Qcs4wError: as `open_source`, `plan_pack`, `pack_shard` and `finish` do; the output is then as it was.
    """
    path = Path(path)
    output = None if output is None else Path(output)
    if output is None and not dry_run:
        raise UsageError("output may be None in a dry run only")
    if output is not None and not is_checkpoint(path) and max_shard_size is None:
        check_target(output, force=force or dry_run, sources=(path,))  # before the source is so much as opened
    watch = _with_progress(watch or Watch(), progress)
    recipe = recipe or Recipe()
    with open_source(path) as source, open_calibration(recipe) as calibration:
        plan = plan_pack(
            source,
            output,
            request,
            max_shard_size=max_shard_size,
            packed_only=packed_only,
            recipe=recipe,
            calibration=calibration,
        )
        check_output(plan, force=force or dry_run)
        mine = (part or WHOLE).of(plan.shards, [shard.source_nbytes for shard in plan.shards])
        packed, is_complete = _planned(mine), False
        if not dry_run:
            packed, is_complete = _carry_out(
                plan, mine, watch, force=force, restart=restart, shared=part is not None, ray=ray
            )
        return _report(plan, packed, mine, part or WHOLE, is_dry_run=dry_run, is_complete=is_complete)


def _carry_out(
    plan: PackPlan,
    mine: tuple[PlannedShard, ...],
    watch: Watch,
    *,
    force: bool,
    restart: bool,
    shared: bool,
    ray: str | None,
) -> tuple[list[PackedTensor], bool]:
    """Make shards, here or on a cluster, and the output once all are there; tell whether it is."""
    if not mine:
        return [], False
    watch.planned(replace(plan, shards=mine))
    work = WorkFolder(plan, restart=restart, shared=shared or ray is not None, note=watch.note)
    tally = Tally(watch, sum(shard.source_nbytes for shard in mine))
    try:
        if ray is not None:
            from .ray_pack import pack_on_ray

            packed = pack_on_ray(work, mine, tally, address=ray)
        else:
            packed = [tensor for shard in mine for tensor in pack_shard(work, shard, tally)]
        is_complete = finish(work, force=force)
        work.close()
    except BaseException as error:
        work.leave(error)
        raise
    return packed, is_complete


def _planned(shards: tuple[PlannedShard, ...]) -> list[PackedTensor]:
    return [
        PackedTensor(entry, choice.reason, choice.tensor.nbytes, shard=shard.name)
        for shard in shards
        for choice, entry in zip(shard.choices, shard.entries, strict=True)
    ]


def _report(
    plan: PackPlan,
    packed: list[PackedTensor],
    made: tuple[PlannedShard, ...],
    part: Part,
    *,
    is_dry_run: bool,
    is_complete: bool,
) -> PackReport:
    source = plan.source
    return PackReport(
        source=source.path,
        output=plan.output,
        packed=tuple(packed),
        carried=plan.carried,
        dropped=plan.dropped,
        left_out=source.left_out,
        notices=tuple(notices(choice for shard in plan.shards for choice in shard.choices)),
        shards=plan.shards,
        beside=tuple(path.name for path in source.beside) if plan.is_folder else (),
        source_nbytes=sum(tensor.nbytes for tensor in source.tensors.values()),
        output_nbytes=plan.output_nbytes,
        packed_only=bool(plan.options["packed_only"]),
        is_dry_run=is_dry_run,
        part=part,
        made=tuple(shard.name for shard in made),
        is_complete=is_complete,
    )


def _with_progress(watch: Watch, progress: Progress | None) -> Watch:
    if progress is None:
        return watch

    def step(step: Step) -> None:
        watch.step(step)
        progress(step.nbytes, step.total, step.tensor)

    return replace(watch, step=step)


def source_weight(source: Source, entry: PackedEntry, rows: int | None = None) -> NDArray[np.float32]:
    """Read the float weight that a packed tensor was made of.

    Args:
        source: the weight file.
        entry: the packed tensor.
        rows: how many of its first rows are wanted; by default all.

    Returns:
        float32, shape (N, K), turned round or cut out of a stack as it was when it was packed.

    Raises:
        UnknownTensorError: the source has no tensor of that name.
        SelectionError: it is not a float matrix.
        UsageError: it has another shape.
    """
    name = entry.stack or entry.name
    module = name.removesuffix(".weight")
    if source.nameless and len(source.tensors) == 1:
        tensor = next(iter(source.tensors.values()))
    elif name in source.tensors:
        tensor = source.tensors[name]
    elif module in source.tensors:
        tensor = source.tensors[module]
    else:
        raise UnknownTensorError(f"{source.path}: no tensor '{name}'", hint=did_you_mean(name, source.tensors))
    if entry.stack and len(tensor.shape) == 3:
        parts = {part.name: part for part in split_stack(tensor)}
        tensor = parts.get(entry.name, tensor)
    if is_fp8_weight(tensor) and not tensor.is_float:
        find_scale(source, tensor)  # says what is wrong with its scale
    if len(tensor.shape) != 2 or not tensor.is_float:
        raise SelectionError(
            f"{source.path}: tensor '{name}' is {tensor.dtype} {list(tensor.shape)}, not a float matrix"
        )
    shape = tensor.shape[::-1] if entry.transposed else tensor.shape
    if shape != (entry.out_features, entry.in_features):  # said before a large file is read for nothing
        expected = [entry.out_features, entry.in_features]
        raise UsageError(f"{source.path}: '{name}' has shape {list(shape)}, the packed weight {expected}")
    if not entry.transposed:
        return tensor.read_rows(entry.out_features if rows is None else rows)
    return np.ascontiguousarray(tensor.read().T)[:rows]
