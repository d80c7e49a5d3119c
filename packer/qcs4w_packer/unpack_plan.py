"""What unpack will write: which tensors, made of which packed ones, in which file. Headers only."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .errors import ContainerError, SelectionError, UnknownTensorError
from .metadata import PackedEntry
from .name_patterns import did_you_mean, find_names
from .narrow import STORAGE
from .packed_file import PackedFile
from .safetensors_file import Planned

#: What --dtype calls them; "source" is what the float weight had.
DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "source": None}


@dataclass(frozen=True)
class UnpackRequest:
    """What the user asked for.

    Attributes:
        dtype: a key of DTYPES.
        tensors: names; with them nothing else is unpacked.
        include: unpack what these patterns match, in place of all.
        exclude: patterns of what is left out.
        packed_only: do not copy the other tensors along.
        max_shard_size: bytes of tensors that a file of a folder may have; by default as the packed folder has them.
    """

    dtype: str = "f32"
    tensors: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    packed_only: bool = False
    max_shard_size: int | None = None


@dataclass(frozen=True)
class FloatTensor:
    """A float tensor to write.

    Attributes:
        name: of the tensor.
        dtype: as safetensors names it.
        shape: [N, K], [K, N] where it was turned round, with the number of parts in front for a stack.
        parts: the packed tensors that it is made of: one, or the matrices of a stack in order.
        aliases: names under which it is written once more.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[PackedEntry, ...]
    aliases: tuple[str, ...] = ()

    @property
    def transposed(self) -> bool:
        """Whether the packed tensor lies the other way round."""
        return self.parts[0].transposed

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the packed tensors that it is made of."""
        return sum(part.packed_nbytes for part in self.parts)

    @property
    def planned(self) -> list[Planned]:
        """It and its aliases as they stand in a file."""
        return [Planned(name, self.dtype, self.shape) for name in (self.name, *self.aliases)]

    @property
    def nbytes(self) -> int:
        """Bytes of its data, without those of its aliases."""
        return self.planned[0].nbytes


def plan_tensors(file: PackedFile, request: UnpackRequest) -> tuple[list[FloatTensor], list[PackedEntry]]:
    """Decide which float tensors will be written, in the order of the file.

    Returns:
        The tensors, and the packed ones that become none.

    Raises:
        UnknownTensorError: a name or a pattern matches nothing.
        SelectionError: nothing is left to unpack, or tensors are asked for in two ways.
        ContainerError: a stack lacks parts, or has parts that do not belong together.
    """
    units: dict[str, list[PackedEntry]] = {}
    for entry in file.entries.values():
        units.setdefault(_unit_name(entry), []).append(entry)
    tensors = [_tensor(file, name, parts, request.dtype) for name, parts in _chosen(file, units, request).items()]
    if not tensors:
        raise SelectionError(f"{file.path}: nothing to unpack: every packed tensor is left out")
    taken = {part.name for tensor in tensors for part in tensor.parts}
    return tensors, [entry for entry in file.entries.values() if entry.name not in taken]


def _unit_name(entry: PackedEntry) -> str:
    return entry.stack or entry.name


def _chosen(
    file: PackedFile, units: Mapping[str, list[PackedEntry]], request: UnpackRequest
) -> dict[str, list[PackedEntry]]:
    """Return what is wanted, in the order of the file: whole tensors, or by name single parts of a stack."""
    if request.tensors and request.include:
        raise SelectionError("tensors are asked for by --tensor and by --include", hint="--include takes names too")
    spellings = {alias: name for name, parts in units.items() for part in parts for alias in (name, *part.aliases)}
    included = _matched(file, "include", request.include, spellings) if request.include else set(units)
    excluded = _matched(file, "exclude", request.exclude, spellings)
    if not request.tensors:
        return {name: parts for name, parts in units.items() if name in included and name not in excluded}
    wanted = {name if name in units else file.entry(name).name for name in request.tensors}
    if both := wanted & excluded:
        raise SelectionError(f"tensor '{min(both)}' is both asked for and excluded")
    chosen: dict[str, list[PackedEntry]] = {}
    for name, parts in units.items():
        if name in wanted:
            chosen[name] = parts
        else:
            chosen |= {part.name: [part] for part in parts if part.name in wanted}
    return chosen


def _matched(file: PackedFile, option: str, patterns: Iterable[str], spellings: Mapping[str, str]) -> set[str]:
    """Return the tensors of which a name or alias is matched.

    Args:
        file: for messages.
        option: for messages.
        patterns: as `name_patterns` has them.
        spellings: the tensor of each name.
    """
    matched: set[str] = set()
    for pattern in patterns:
        found = find_names(spellings, pattern)
        if not found:
            raise UnknownTensorError(
                f"{file.path}: --{option} '{pattern}' matches no packed tensor",
                hint=did_you_mean(pattern, spellings) or "--dry-run lists the names",
            )
        matched |= {spellings[name] for name in found}
    return matched


def _tensor(file: PackedFile, name: str, parts: Sequence[PackedEntry], dtype: str) -> FloatTensor:
    is_stack = parts[0].stack == name
    if is_stack:
        parts = _in_order(file, name, parts)
    first = parts[0]
    shape = (first.out_features, first.in_features)
    shape = shape[::-1] if first.transposed else shape
    return FloatTensor(
        name,
        DTYPES[dtype] or _source_dtype(first.source_dtype),
        (len(parts), *shape) if is_stack else shape,
        tuple(parts),
        first.aliases,
    )


def _source_dtype(said: str) -> str:
    """Return the dtype to write for what a file says of its source: fp8 came with scales that are used up."""
    return said if said in STORAGE else "BF16" if said.startswith("F8_") else "F32"


def _in_order(file: PackedFile, stack: str, parts: Sequence[PackedEntry]) -> list[PackedEntry]:
    """Return the matrices of a stack by their number.

    Raises:
        ContainerError: one is missing or too many, or they do not fit together.
    """
    where = f"{file.path}: stack '{stack}'"
    by_number: dict[int, PackedEntry] = {}
    for part in parts:
        number = re.fullmatch(r"\.(0|[1-9][0-9]{0,8})", part.name.removeprefix(stack))
        if not part.name.startswith(stack) or number is None:
            raise ContainerError(f"{where} has a part '{part.name}', expected '{stack}.NUMBER'")
        by_number[int(number[1])] = part
    first = parts[0]
    if any(part.stack_parts != first.stack_parts for part in parts):
        raise ContainerError(f"{where}: its parts do not say the same number of parts")
    count = first.stack_parts or max(by_number) + 1
    missing = [number for number in range(min(count, len(by_number) + 1)) if number not in by_number]
    if missing:
        lacking = count - sum(number < count for number in by_number)
        raise ContainerError(
            f"{where}: part '{stack}.{missing[0]}'"
            + (f" and {lacking - 1:,} more are missing" if lacking > 1 else " is missing")
            + f", it has {count:,}",
            hint="--tensor NAME.NUMBER unpacks a part by itself",
        )
    extra = [by_number[number].name for number in sorted(by_number) if number >= count]
    if extra:
        raise ContainerError(f"{where} has a part '{extra[0]}', its parts say that there are {count:,}")
    ordered = [by_number[number] for number in range(count)]
    for part in ordered:
        for what in ("out_features", "in_features", "transposed", "source_dtype"):
            if getattr(part, what) != getattr(ordered[0], what):
                raise ContainerError(
                    f"{where}: '{part.name}' has {what} {getattr(part, what)}, "
                    f"'{ordered[0].name}' {getattr(ordered[0], what)}; the parts of one tensor have the same"
                )
        if part.aliases:
            raise ContainerError(f"{where}: its part '{part.name}' has an alias '{part.aliases[0]}' of its own")
    return ordered
