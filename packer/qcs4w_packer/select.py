"""Which tensors of a file are packed: by default from their names and shapes, by request from patterns."""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from .errors import SelectionError, UnknownTensorError
from .metadata import bias_name
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
    Rule("*.shared_expert_gate.weight", _ROUTER),
    Rule("*.ffn_gate_inp*.weight", _ROUTER),  # GGUF
)

_MOST_IN_A_STACK = 65_536

#: Names of linear weights. A bare `weight` is what a nameless file gives.
LINEAR_NAMES = ("weight", "*.weight", "in_proj_weight", "*.in_proj_weight")

#: GPT-2's Conv1D layers, which store [in, out]: never packed before somebody has said which way round they are.
CONV1D_NAMES = tuple(
    f"{prefix}{module}.weight" for module in ("c_attn", "c_proj", "c_fc", "q_attn") for prefix in ("", "*.")
)


@dataclass(frozen=True)
class Request:
    """What the user asked for. Patterns are globs on whole names; a name itself always matches.

    Attributes:
        tensors: exact names; with them nothing else is packed.
        include: in place of the default choice, the matrices that these match.
        exclude: taken out again, whatever chose it.
        transpose: packed the other way round, since the file stores [in, out].
        no_transpose: names that look like GPT-2's Conv1D but are ordinary [out, in] weights.
    """

    tensors: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    transpose: tuple[str, ...] = ()
    no_transpose: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choice:
    """What happens to one tensor, and why.

    Attributes:
        tensor: as the file has it, or one matrix of a stack.
        action: "pack", or "carry" (copied as it is).
        reason: for people.
        transposed: the file stores [K, N].
        stack: name of the 3-D tensor that this matrix was split from.
        alias_of: the tensor with the very same memory that is packed in its place.
    """

    tensor: SourceTensor
    action: Literal["pack", "carry"]
    reason: str
    transposed: bool = False
    stack: str | None = None
    alias_of: str | None = None

    @property
    def out_features(self) -> int:
        """N of a tensor that is packed."""
        return self.tensor.shape[1 if self.transposed else 0]

    @property
    def in_features(self) -> int:
        """K of a tensor that is packed."""
        return self.tensor.shape[0 if self.transposed else 1]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Tell whether a name is, or is matched by, one of the patterns."""
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


def choose(source: Source, request: Request | None = None) -> list[Choice]:
    """Decide for every tensor of a file, in the file's order. Reads no data.

    Raises:
        UnknownTensorError: a name or a pattern matches nothing.
        SelectionError: a tensor that was asked for cannot be packed, a Conv1D weight has no direction,
            an fp8 weight would be chosen, or nothing is left to pack.
    """
    request = _with_full_names(request or Request(), source)
    _check_patterns(source, request)
    skips = _skips(source)
    choices: list[Choice] = []
    for tensor in source.tensors.values():
        chosen, reason = _wanted(tensor, source, request, skips)
        if not chosen:
            choices.append(Choice(tensor, "carry", reason))
            continue
        transposed = matches(tensor.name, request.transpose)
        if len(tensor.shape) == 3:
            if tensor.shape[0] > _MOST_IN_A_STACK:
                raise SelectionError(
                    f"{source.path}: tensor '{tensor.name}' {list(tensor.shape)} would be split into "
                    f"{tensor.shape[0]:,} matrices, {_MOST_IN_A_STACK:,} are the most",
                    hint="--exclude it, or reshape it: is its first dimension really one of experts?",
                )
            choices += [
                Choice(part, "pack", f"split from {tensor.name}", transposed, stack=tensor.name)
                for part in split_stack(tensor)
            ]
        else:
            choices.append(Choice(tensor, "pack", reason, transposed))
    if not any(choice.action == "pack" for choice in choices):
        raise _nothing_to_pack(source, choices)
    _check_directions(choices, source, request)
    return _mark_tied(choices)


def did_you_mean(name: str, known: Collection[str]) -> str | None:
    """Return a hint that names the known names closest to `name`, or None."""
    close = [other for other in known if name in other][:3] if len(name) > 2 else []
    close = close or difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(f"'{other}'" for other in close) + "?"
    if len(known) <= 5:
        return "there is " + ", ".join(f"'{other}'" for other in known) if known else None
    return None


def _check_patterns(source: Source, request: Request) -> None:
    for name in request.tensors:
        if name in source.unreadable:
            raise SelectionError(f"{source.path}: tensor '{name}' cannot be packed: {source.unreadable[name]}")
        if name not in source.tensors:
            matrices = [n for n, tensor in source.tensors.items() if _unfit(tensor) is None]
            raise UnknownTensorError(f"{source.path}: no tensor '{name}'", hint=did_you_mean(name, matrices))
    if request.tensors and request.include:
        raise SelectionError("tensors are asked for by --tensor and by --include", hint="--include takes names too")
    for option in ("include", "exclude", "transpose", "no_transpose"):
        patterns: tuple[str, ...] = getattr(request, option)
        for pattern in patterns:
            if not any(matches(name, [pattern]) for name in source.tensors):
                raise UnknownTensorError(
                    f"{source.path}: --{option.replace('_', '-')} '{pattern}' matches no tensor",
                    hint=did_you_mean(pattern, source.tensors) or "--dry-run lists the names",
                )
    both = [n for n in source.tensors if matches(n, request.transpose) and matches(n, request.no_transpose)]
    if both:
        raise SelectionError(f"tensor '{both[0]}' is matched by both --transpose and --no-transpose")


def _with_full_names(request: Request, source: Source) -> Request:
    """Let a module's name stand for its weight's, as the other commands do."""
    full = (n if n in source.tensors or f"{n}.weight" not in source.tensors else f"{n}.weight" for n in request.tensors)
    return replace(request, tensors=tuple(full))


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


def _wanted(tensor: SourceTensor, source: Source, request: Request, skips: Mapping[str, str]) -> tuple[bool, str]:
    """Say whether a tensor is to be packed, and why."""
    name = tensor.name
    by_name = name in request.tensors
    if matches(name, request.exclude):
        if by_name:
            raise SelectionError(f"tensor '{name}' is both asked for and excluded")
        return False, "excluded"
    unfit = _unfit(tensor)
    if by_name:
        if unfit:
            raise SelectionError(f"{source.path}: tensor '{name}' cannot be packed: {unfit}")
        return True, "asked for by --tensor"
    if request.tensors:
        return False, "not asked for"
    if request.include:
        if not matches(name, request.include):
            return False, "not included"
        if unfit and name in request.include:
            raise SelectionError(f"{source.path}: tensor '{name}' cannot be packed: {unfit}")
        _refuse_fp8(tensor, source)
        return not unfit, unfit or "included"
    if matches(name, request.transpose) and not unfit:
        return True, "asked for by --transpose"
    if len(tensor.shape) == 3:
        return False, f"3-D {list(tensor.shape)}: split into matrices by request (--include '{name}')"
    skip = skips.get(name)
    if skip or not matches(name, LINEAR_NAMES):
        return False, skip or unfit or "not a linear weight by name"
    _refuse_fp8(tensor, source)
    return not unfit, unfit or "linear weight by name"


def _refuse_fp8(tensor: SourceTensor, source: Source) -> None:
    """Refuse an fp8 weight that would be chosen: leaving it out in silence would look like success."""
    if tensor.dtype.startswith(("F8_E4M3", "F8_E5M2")) and len(tensor.shape) in (2, 3):
        raise SelectionError(
            f"{source.path}: tensor '{tensor.name}' is {tensor.dtype}, which cannot be packed yet",
            hint="dequantize it to bf16 with its scales first (codes without them are garbage), or --exclude it",
        )


def _unfit(tensor: SourceTensor) -> str | None:
    """Say why a tensor cannot be packed at all, or None."""
    if len(tensor.shape) not in (2, 3):
        return f"{len(tensor.shape)}-D, not a matrix (N, K)"
    if tensor.dtype not in FLOAT_DTYPES:
        return f"dtype {tensor.dtype}, expected one of {', '.join(FLOAT_DTYPES)}"
    if 0 in tensor.shape:
        return f"shape {list(tensor.shape)} has no elements"
    return None


def _skip_reason(name: str, with_experts: Collection[str]) -> str | None:
    lower = name.lower()
    for rule in SKIP_RULES:
        if fnmatchcase(lower, rule.pattern):
            return rule.reason
    block, gate, _ = name.rpartition(".gate.weight")
    return _ROUTER if gate and block in with_experts else None


def _check_directions(choices: Sequence[Choice], source: Source, request: Request) -> None:
    """Refuse Conv1D weights whose direction nobody has given, and directions given to what is not packed."""
    packed = {choice.stack or choice.tensor.name: choice for choice in choices if choice.action == "pack"}
    for option, patterns in (("transpose", request.transpose), ("no-transpose", request.no_transpose)):
        for pattern in patterns:
            if not any(matches(name, [pattern]) for name in packed):
                raise SelectionError(f"{source.path}: --{option} '{pattern}' matches no tensor that is packed")
    told = (*request.transpose, *request.no_transpose)
    untold = [name for name in packed if matches(name, CONV1D_NAMES) and not matches(name, told)]
    if not untold:
        return
    name = untold[0]
    tensor = packed[name].tensor
    bias = source.tensors.get(bias_name(name))
    seen = ""
    if bias is not None and len(bias.shape) == 1 and tensor.shape[0] != tensor.shape[1]:
        seen = f"; its bias of {bias.shape[0]} says {'[in, out]' if bias.shape[0] == tensor.shape[1] else '[out, in]'}"
    others = f" (and {len(untold) - 1} more)" if len(untold) > 1 else ""
    modules = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in untold})
    options = " ".join(f"--transpose '*{module}.weight'" for module in modules)
    raise SelectionError(
        f"{source.path}: tensor '{name}' {list(tensor.shape)}{others} has the name of a GPT-2 Conv1D, "
        f"which stores [in, out]{seen}",
        hint=f"{options} packs them the right way round; --no-transpose says that they are ordinary [out, in] weights",
    )


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
