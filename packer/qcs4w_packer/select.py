"""Which tensors of a file are packed: by default from their names and shapes, by request from patterns."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .architecture import is_conv1d_name, is_told_apart_by_config, said_direction
from .errors import SelectionError
from .fp8_scales import activation_scales, find_scale, is_fp8_weight, with_scales
from .metadata import bias_name
from .name_patterns import find_names
from .request import Asked, Request, resolve, unfit, with_full_names
from .skip_rules import skip_reasons
from .weights import Source, SourceTensor, split_stack

_MOST_IN_A_STACK = 65_536

#: What the last parts of linear weights' names are. A bare `weight` is what a nameless file gives.
_LINEAR_NAMES = ("weight", "in_proj_weight")


@dataclass(frozen=True)
class Choice:
    """What happens to one tensor, and why.

    Attributes:
        tensor: as the file has it, or one matrix of a stack.
        action: "pack", "carry" (copied as it is), or "drop" (left out: it says something of a weight that is packed).
        reason: for people.
        transposed: the file stores [K, N].
        stack: name of the 3-D tensor that this matrix was split from.
        alias_of: the tensor with the very same memory that is packed in its place.
        used: siblings that are used up when this one is packed, the scales of an fp8 weight; they are dropped.
        notice: why it is transposed though nobody asked for it; None where somebody did, or it is not.
    """

    tensor: SourceTensor
    action: Literal["pack", "carry", "drop"]
    reason: str
    transposed: bool = False
    stack: str | None = None
    alias_of: str | None = None
    used: tuple[str, ...] = ()
    notice: str | None = None

    @property
    def out_features(self) -> int:
        """N of a tensor that is packed."""
        return self.tensor.shape[1 if self.transposed else 0]

    @property
    def in_features(self) -> int:
        """K of a tensor that is packed."""
        return self.tensor.shape[0 if self.transposed else 1]


def choose(source: Source, request: Request | None = None) -> list[Choice]:
    """Decide for every tensor of a file, in the file's order. Reads no data.

    Raises:
        UsageError: a regular expression is not sound.
        UnknownTensorError: a name or a pattern matches nothing.
        SelectionError: a tensor that was asked for cannot be packed, a Conv1D weight has no direction,
            an fp8 weight has no scale, or nothing is left to pack.
    """
    source = with_scales(source)
    request = with_full_names(request or Request(), source)
    asked = resolve(source, request)
    skips = skip_reasons(source)
    users = _users(source)
    wanted = {name: _wanted(tensor, source, asked, skips, users) for name, tensor in source.tensors.items()}
    choices: list[Choice] = []
    for name, (chosen, reason) in wanted.items():
        tensor = source.tensors[name]
        packed_users = [user for user in users.get(name, ()) if wanted[user][0]]
        if chosen:
            choice = _directed(Choice(tensor, "pack", reason, used=_used_up(tensor, source)), source, asked)
            choices += _split(choice, source) if len(tensor.shape) == 3 else [choice]
        elif packed_users and packed_users == users[name]:
            choices.append(Choice(tensor, "drop", f"used up: scale of {packed_users[0]}"))
        else:
            choices.append(Choice(tensor, "carry", reason))
    if not any(choice.action == "pack" for choice in choices):
        raise _nothing_to_pack(source, choices)
    _check_directions(choices, source, asked, request)
    return _mark_tied(choices, source)


def notices(choices: Iterable[Choice]) -> list[str]:
    """Return what was decided though nobody asked for it, each kind once."""
    found: dict[str, dict[str, None]] = {}  # a stack once
    for choice in choices:
        if choice.notice:
            found.setdefault(choice.notice, {})[choice.stack or choice.tensor.name] = None
    return [
        f"transposed: {why}: '{next(iter(names))}'" + f" and {len(names) - 1:,} more" * (len(names) > 1)
        for why, names in found.items()
    ]


def _wanted(
    tensor: SourceTensor, source: Source, asked: Asked, skips: Mapping[str, str], users: Mapping[str, list[str]]
) -> tuple[bool, str]:
    """Say whether a tensor is to be packed, and why."""
    name = tensor.name
    if name in asked.exclude:
        if asked.tensors and name in asked.tensors:
            raise SelectionError(f"tensor '{name}' is both asked for and excluded")
        return False, "excluded"
    reason = skip = None
    if asked.tensors is not None:
        reason, skip = ("asked for by --tensor" if name in asked.tensors else None), "not asked for"
    elif name in asked.also:
        reason = "asked for by --also"
    elif asked.include is not None:
        reason, skip = ("included" if name in asked.include else None), "not included"
    elif name in asked.transpose:
        reason = "asked for by --transpose"
    else:
        reason, skip = _by_default(tensor, source, skips)
    if reason is None:
        return False, skip or ""
    if is_fp8_weight(tensor) and 0 not in tensor.shape and tensor.fp8 is None:
        find_scale(source, tensor)  # says what is wrong: leaving it out in silence would look like success
    fault = f"it is a scale of '{users[name][0]}'" if name in users else unfit(tensor)
    if fault and name in asked.by_name:
        raise SelectionError(f"{source.path}: tensor '{name}' cannot be packed: {fault}")
    return not fault, fault or reason


def _by_default(tensor: SourceTensor, source: Source, skips: Mapping[str, str]) -> tuple[str | None, str]:
    """Return why a tensor is chosen without being asked for, or None and why it is not."""
    name = tensor.name
    if len(tensor.shape) == 3:
        if name not in skips and (said := said_direction(source, tensor)):
            return said.why, ""
        return None, f"3-D {list(tensor.shape)}: split into matrices by request (--also '{name}')"
    if skip := skips.get(name):
        return None, skip
    if tensor.direction is not None:
        return "linear weight, as the file says", ""
    if name.rpartition(".")[2] in _LINEAR_NAMES:
        return "linear weight by name", ""
    return None, unfit(tensor) or "not a linear weight by name"


def _directed(choice: Choice, source: Source, asked: Asked) -> Choice:
    """Say which way round a tensor is packed: the user has the last word, then the file, then its config."""
    name = choice.tensor.name
    if name in asked.transpose:
        return replace(choice, transposed=True)
    said = None if name in asked.no_transpose else said_direction(source, choice.tensor)
    if said is None or said.direction == "out-in":
        return choice
    bias = source.tensors.get(bias_name(name))
    rows, columns = choice.tensor.shape[-2:]
    if bias is not None and len(choice.tensor.shape) == 2 and bias.shape == (rows,) and rows != columns:
        raise SelectionError(
            f"{source.path}: tensor '{name}' {[rows, columns]} should be [in, out] ({said.why}), "
            f"and its bias of {rows} says [out, in]",
            hint=f"say which it is: --transpose '{name}' or --no-transpose '{name}'",
        )
    reason = choice.reason if said.why in choice.reason else f"{choice.reason}; {said.why}"
    return replace(choice, transposed=True, reason=reason, notice=said.why)


def _split(choice: Choice, source: Source) -> list[Choice]:
    """Split a stack of matrices into one choice for each."""
    tensor = choice.tensor
    if tensor.shape[0] > _MOST_IN_A_STACK:
        raise SelectionError(
            f"{source.path}: tensor '{tensor.name}' {list(tensor.shape)} would be split into "
            f"{tensor.shape[0]:,} matrices, {_MOST_IN_A_STACK:,} are the most",
            hint="--exclude it, or reshape it: is its first dimension really one of experts?",
        )
    reason = f"split from {tensor.name}; {choice.reason}"
    stack = replace(choice, reason=reason, stack=tensor.name)
    return [replace(stack, tensor=part) for part in split_stack(tensor)]


def _used_up(tensor: SourceTensor, source: Source) -> tuple[str, ...]:
    """Name the siblings of an fp8 weight that mean nothing once it is packed.

    The scale is in the packed weight then. A scale of the layer's inputs is for a product in fp8, which there is
    none of any more; a loader that is strict about names would stumble over it.
    """
    if tensor.fp8 is None:
        return ()
    return (tensor.fp8.scale_name, *activation_scales(tensor.name, source.tensors))


def _users(source: Source) -> dict[str, list[str]]:
    """Return the fp8 weights, mostly one, that each of their scales belongs to."""
    users: dict[str, list[str]] = {}
    for name, tensor in source.tensors.items():
        for used in _used_up(tensor, source):
            users.setdefault(used, []).append(name)
    return users


def _check_directions(choices: Sequence[Choice], source: Source, asked: Asked, request: Request) -> None:
    """Refuse weights that may lie either way while nobody has said which, and directions of what is not packed."""
    packed = {choice.stack or choice.tensor.name for choice in choices if choice.action == "pack"}
    for option, patterns in (("transpose", request.transpose), ("no-transpose", request.no_transpose)):
        for pattern in patterns:
            if not find_names(packed, pattern):
                raise SelectionError(f"{source.path}: --{option} '{pattern}' matches no tensor that is packed")
    untold = [
        name
        for name, tensor in source.tensors.items()
        if name in packed
        and name not in asked.transpose
        and name not in asked.no_transpose
        and is_told_apart_by_config(name)
        and said_direction(source, tensor) is None
    ]
    if not untold:
        return
    name = untold[0]
    tensor = source.tensors[name]
    others = f" (and {len(untold) - 1} more)" if len(untold) > 1 else ""
    modules = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in untold})
    options = " ".join(f"--transpose '*{module}{'.weight' * is_conv1d_name(name)}'" for module in modules)
    raise SelectionError(
        f"{source.path}: tensor '{name}' {list(tensor.shape)}{others} has the name of "
        + (
            f"a GPT-2 Conv1D, which stores [in, out]{_bias_says(source, tensor)}"
            if is_conv1d_name(name)
            else "stacked experts, which some models store [E, in, out] and others [E, out, in]"
        ),
        hint=f"{options} packs them the right way round; --no-transpose says that they are ordinary [out, in] weights",
    )


def _bias_says(source: Source, tensor: SourceTensor) -> str:
    bias = source.tensors.get(bias_name(tensor.name))
    rows, columns = tensor.shape[-2:]
    if bias is None or len(bias.shape) != 1 or rows == columns:
        return ""
    return f"; its bias of {bias.shape[0]} says {'[in, out]' if bias.shape[0] == columns else '[out, in]'}"


def _nothing_to_pack(source: Source, choices: Sequence[Choice]) -> SelectionError:
    matrices = [c for c in choices if unfit(c.tensor) is None]
    if not matrices:
        kinds = ", ".join(f"'{c.tensor.name}' ({c.reason})" for c in choices[:3]) or "no tensors at all"
        beside = f"the file also has {source.left_out[-1]}" if source.unreadable else None
        return SelectionError(f"{source.path}: nothing to pack: no float matrix among {kinds}", hint=beside)
    listed = ", ".join(f"'{c.tensor.name}' ({c.reason})" for c in matrices[:3])
    more = f" and {len(matrices) - 3} more" if len(matrices) > 3 else ""
    return SelectionError(
        f"{source.path}: nothing to pack: {listed}{more}",
        hint=f"name what you want, for example --include '{matrices[0].tensor.name}'",
    )


def _mark_tied(choices: list[Choice], source: Source) -> list[Choice]:
    """Let tensors that are one memory be packed once: the later names become aliases of the first."""
    first: dict[object, str] = {}
    marked: list[Choice] = []
    for choice in choices:
        tensor = choice.tensor
        if choice.action == "pack" and tensor.storage is not None:
            scale = None if tensor.fp8 is None else source.tensors[tensor.fp8.scale_name]
            key = (tensor.storage, choice.transposed, scale and (scale.storage or scale.name))
            owner = first.setdefault(key, tensor.name)
            if owner != tensor.name:
                choice = replace(choice, reason=f"tied to {owner}", alias_of=owner)
        marked.append(choice)
    return marked
