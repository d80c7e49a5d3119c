"""Which tensors of a file are packed: by default from their names and shapes, by request from patterns."""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase, translate
from itertools import islice
from typing import Literal

from .architecture import is_conv1d_name, is_told_apart_by_config, said_direction, stored_name
from .errors import SelectionError, UnknownTensorError
from .fp8_scales import activation_scales, find_scale, is_fp8_weight, with_scales
from .metadata import bias_name
from .name_patterns import find_names
from .weights import FLOAT_DTYPES, Source, SourceTensor, split_stack


@dataclass(frozen=True)
class Rule:
    """A name pattern (case is ignored) and what it says about the tensor."""

    pattern: str
    reason: str


_HEAD = "output head, packed on request"
_ROUTER = "router of experts"  # `*.gate.weight` is one too, where its block has experts: see _skip_reason

#: Tensors that look like linear weights and are not taken unless asked for.
SKIP_RULES = (
    Rule("*embed*", "embedding"),
    Rule("*emb.weight", "embedding"),
    Rule("*wte.weight", "embedding"),
    Rule("*wpe.weight", "embedding"),
    Rule("*shared.weight", "embedding"),
    Rule("*_embd*", "embedding"),  # GGUF's names: token_embd, position_embd, …
    Rule("token_types.weight", "embedding"),
    Rule("*relative_attention_bias*", "position bias"),
    Rule("*attn_rel_b.weight", "position bias"),
    Rule("*ssm_conv1d*", "convolution"),
    Rule("*norm.weight", "norm"),
    Rule("*norm?.weight", "norm"),
    Rule("*ln_?.weight", "norm"),
    Rule("*lm_head*", _HEAD),
    Rule("head.weight", _HEAD),
    Rule("*.head.weight", _HEAD),
    Rule("output.weight", _HEAD),
    Rule("cls.output.weight", _HEAD),
    Rule("*.router.weight", _ROUTER),
    Rule("*.router.layer.weight", _ROUTER),
    Rule("*.shared_expert_gate.weight", _ROUTER),
    Rule("*.ffn_gate_inp*.weight", _ROUTER),  # GGUF
)

_ANY_RULE = re.compile("|".join(translate(rule.pattern) for rule in SKIP_RULES))  # one look for most names

_MOST_IN_A_STACK = 65_536

_MOST_COMPARED, _LONGEST_COMPARED = 5_000, 200  # names, and their characters, when a similar one is looked for

#: What the last parts of linear weights' names are. A bare `weight` is what a nameless file gives.
_LINEAR_NAMES = ("weight", "in_proj_weight")

_PATTERN_OPTIONS = ("include", "also", "exclude", "transpose", "no_transpose")


@dataclass(frozen=True)
class Request:
    """What the user asked for. Patterns fit whole names: globs, `re:` and a regular expression, or the name itself.

    Attributes:
        tensors: exact names; with them nothing else is packed. None is not to ask by name.
        include: the matrices that these match, in place of the default choice, which is None.
        exclude: taken out again, whatever chose it.
        transpose: packed the other way round, since the file stores [in, out].
        no_transpose: ordinary [out, in] weights, whatever their names or the config say.
        also: the matrices that these match, beside the default choice or `include`.
    """

    tensors: tuple[str, ...] | None = None
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    transpose: tuple[str, ...] = ()
    no_transpose: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choice:
    """What happens to one tensor, and why.

    Attributes:
        tensor: as the file has it, or one matrix of a stack.
        action: "pack", "carry" (copied as it is), or "drop" (left out: it says something of a weight that is packed).
        reason: for people.
        transposed: the file stores [K, N].
        stack: name of the 3-D tensor that this matrix was split from.
        stack_parts: how many matrices were split from it.
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
    stack_parts: int | None = None

    @property
    def out_features(self) -> int:
        """N of a tensor that is packed."""
        return self.tensor.shape[1 if self.transposed else 0]

    @property
    def in_features(self) -> int:
        """K of a tensor that is packed."""
        return self.tensor.shape[0 if self.transposed else 1]


@dataclass(frozen=True)
class _Asked:
    """A request, with the names that its patterns match; None where an option was not given."""

    tensors: frozenset[str] | None
    include: frozenset[str] | None
    also: frozenset[str]
    exclude: frozenset[str]
    transpose: frozenset[str]
    no_transpose: frozenset[str]
    by_name: frozenset[str]  # what stands in --tensor, --include or --also in full


def choose(source: Source, request: Request | None = None) -> list[Choice]:
    """Decide for every tensor of a file, in the file's order. Reads no data.

    Raises:
        UsageError: a regular expression is not sound.
        UnknownTensorError: a name or a pattern matches nothing.
        SelectionError: a tensor that was asked for cannot be packed, a Conv1D weight has no direction,
            an fp8 weight has no scale, or nothing is left to pack.
    """
    source = with_scales(source)
    request = _with_full_names(request or Request(), source)
    asked = _resolve(source, request)
    skips = _skips(source)
    wanted = {name: _wanted(tensor, source, asked, skips) for name, tensor in source.tensors.items()}
    users = _users(source, {name for name, (chosen, _) in wanted.items() if chosen}, asked)
    choices: list[Choice] = []
    for name, (chosen, reason) in wanted.items():
        tensor = source.tensors[name]
        if name in users:
            choices.append(Choice(tensor, "drop", f"used up: scale of {users[name]}"))
        elif chosen:
            choice = _directed(Choice(tensor, "pack", reason, used=_used_up(tensor, source)), source, asked)
            choices += _split(choice, source) if len(tensor.shape) == 3 else [choice]
        else:
            choices.append(Choice(tensor, "carry", reason))
    if not any(choice.action == "pack" for choice in choices):
        raise _nothing_to_pack(source, choices)
    _check_directions(choices, source, asked, request)
    return _mark_tied(choices)


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


def did_you_mean(name: str, known: Collection[str]) -> str | None:
    """Return a hint that names the known names closest to `name`, or None."""
    if len(known) > _MOST_COMPARED or len(name) > _LONGEST_COMPARED:  # comparing takes the product of the lengths
        known = [other for other in islice(known, _MOST_COMPARED) if len(other) <= _LONGEST_COMPARED]
    close = [other for other in known if name in other][:3] if len(name) > 2 else []
    close = close or difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(f"'{other}'" for other in close) + "?"
    if len(known) <= 5:
        return "there is " + ", ".join(f"'{other}'" for other in known) if known else None
    return None


def _resolve(source: Source, request: Request) -> _Asked:
    """Find what every name and pattern of a request means in this file.

    Raises:
        UnknownTensorError: one of them means nothing.
        SelectionError: two of them contradict each other.
    """
    names = source.tensors
    if request.tensors is not None and (request.include is not None or request.also):
        option = "--include" if request.include is not None else "--also"
        raise SelectionError(f"tensors are asked for by --tensor and by {option}", hint=f"{option} takes names too")
    for name in request.tensors or ():
        if name in source.unreadable:
            raise SelectionError(f"{source.path}: tensor '{name}' cannot be packed: {source.unreadable[name]}")
        if name not in names:
            raise _unknown(source, name, f"no tensor '{name}'")
    found: dict[str, frozenset[str]] = {}
    for option in _PATTERN_OPTIONS:
        patterns: tuple[str, ...] = getattr(request, option) or ()
        matched: set[str] = set()
        for pattern in patterns:
            if not (these := find_names(names, pattern)):
                raise _unknown(source, pattern, f"--{option.replace('_', '-')} '{pattern}' matches no tensor")
            matched.update(these)
        found[option] = frozenset(matched)
    asked = _Asked(
        None if request.tensors is None else frozenset(request.tensors),
        None if request.include is None else found["include"],
        found["also"],
        found["exclude"],
        found["transpose"],
        found["no_transpose"],
        by_name=frozenset((*(request.tensors or ()), *(request.include or ()), *request.also)),
    )
    if both := sorted(asked.transpose & asked.no_transpose):
        raise SelectionError(f"tensor '{both[0]}' is matched by both --transpose and --no-transpose")
    return asked


def _with_full_names(request: Request, source: Source) -> Request:
    """Let a module's name stand for its weight's, as the other commands do."""

    def full(name: str) -> str:
        return name if name in source.tensors or f"{name}.weight" not in source.tensors else f"{name}.weight"

    given = {option: names for option, names in vars(request).items() if names}
    return replace(request, **{option: tuple(map(full, names)) for option, names in given.items()})


def _unknown(source: Source, name: str, what: str) -> UnknownTensorError:
    if owner := stored_name(source, name):
        return UnknownTensorError(
            f"{source.path}: {what}: it is tied to '{owner}', which is stored in its place",
            hint=f"--also '{owner}' packs the one weight under both names; whatever reads '{owner}' must then "
            "be able to read packed rows",
        )
    matrices = [other for other, tensor in source.tensors.items() if _unfit(tensor) is None]
    return UnknownTensorError(
        f"{source.path}: {what}", hint=did_you_mean(name, matrices or source.tensors) or "--dry-run lists the names"
    )


def _skips(source: Source) -> dict[str, str]:
    """Return the reason for each tensor that the default choice leaves alone: by its name, an alias, or a tie."""
    found = (re.match(r"(.*?)\.(?:experts\.|shared_expert)", name) for name in source.tensors)
    with_experts = frozenset(match[1] for match in found if match)
    skips: dict[str, str] = {}
    for name in source.tensors:
        reasons = (_skip_reason(spelling, with_experts) for spelling in (name, *source.aliases_of(name)))
        if reason := next(filter(None, reasons), None):
            skips[name] = reason
    memory = {source.tensors[name].storage: name for name in skips if source.tensors[name].storage is not None}
    for name, tensor in source.tensors.items():
        if name not in skips and tensor.storage in memory:
            owner = memory[tensor.storage]
            skips[name] = f"tied to {owner} ({skips[owner]})"
    return skips


def _wanted(tensor: SourceTensor, source: Source, asked: _Asked, skips: Mapping[str, str]) -> tuple[bool, str]:
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
    unfit = _unfit(tensor)
    if unfit and name in asked.by_name:
        raise SelectionError(f"{source.path}: tensor '{name}' cannot be packed: {unfit}")
    return not unfit, unfit or reason


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
    return None, _unfit(tensor) or "not a linear weight by name"


def _directed(choice: Choice, source: Source, asked: _Asked) -> Choice:
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
    stack = replace(choice, reason=reason, stack=tensor.name, stack_parts=tensor.shape[0])
    return [replace(stack, tensor=part) for part in split_stack(tensor)]


def _used_up(tensor: SourceTensor, source: Source) -> tuple[str, ...]:
    """Name the siblings of an fp8 weight that mean nothing once it is packed.

    The scale is in the packed weight then. A scale of the layer's inputs is for a product in fp8, which there is
    none of any more; a loader that is strict about names would stumble over it.
    """
    if tensor.fp8 is None:
        return ()
    return (tensor.fp8.scale_name, *activation_scales(tensor.name, source.tensors))


def _users(source: Source, packed: Collection[str], asked: _Asked) -> dict[str, str]:
    """Return what is used up, each with the weight that uses it; what a weight that stays fp8 needs is not."""
    users = {used: name for name in packed for used in _used_up(source.tensors[name], source)}
    for name, tensor in source.tensors.items():
        if name not in packed and tensor.fp8 is not None:
            users.pop(tensor.fp8.scale_name, None)
    for name, user in users.items():
        if name in asked.by_name:
            raise SelectionError(
                f"{source.path}: tensor '{name}' cannot be packed: it is a scale of '{user}', which is"
            )
    return users


def _unfit(tensor: SourceTensor) -> str | None:
    """Say why a tensor cannot be packed at all, or None."""
    if len(tensor.shape) not in (2, 3):
        return f"{len(tensor.shape)}-D, not a matrix (N, K)"
    if not tensor.is_float and not is_fp8_weight(tensor):
        return f"dtype {tensor.dtype}, expected one of {', '.join(FLOAT_DTYPES)}"
    if 0 in tensor.shape:
        return f"shape {list(tensor.shape)} has no elements"
    return None


def _skip_reason(name: str, with_experts: Collection[str]) -> str | None:
    lower = name.lower()
    if _ANY_RULE.match(lower):
        return next(rule.reason for rule in SKIP_RULES if fnmatchcase(lower, rule.pattern))
    block, gate, _ = name.rpartition(".gate.weight")
    return _ROUTER if gate and block in with_experts else None


def _check_directions(choices: Sequence[Choice], source: Source, asked: _Asked, request: Request) -> None:
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
    matrices = [c for c in choices if _unfit(c.tensor) is None]
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


def _mark_tied(choices: list[Choice]) -> list[Choice]:
    """Let tensors that are one memory be packed once: the later names become aliases of the first."""
    first: dict[object, str] = {}
    marked: list[Choice] = []
    for choice in choices:
        if choice.action == "pack" and choice.tensor.storage is not None:
            key = (choice.tensor.storage, choice.transposed)
            owner = first.setdefault(key, choice.tensor.name)
            if owner != choice.tensor.name:
                choice = Choice(choice.tensor, "pack", f"tied to {owner}", choice.transposed, alias_of=owner)
        marked.append(choice)
    return marked
