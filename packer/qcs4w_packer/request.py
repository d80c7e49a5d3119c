"""What a user asks to be packed, by names and patterns, and which tensors of a file that means."""

from dataclasses import dataclass, replace

from .architecture import stored_name
from .errors import SelectionError, UnknownTensorError
from .fp8_scales import is_fp8_weight
from .name_patterns import did_you_mean, find_names
from .weights import FLOAT_DTYPES, Source, SourceTensor

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
class Asked:
    """A request, with the names that its patterns match; None where an option was not given."""

    tensors: frozenset[str] | None
    include: frozenset[str] | None
    also: frozenset[str]
    exclude: frozenset[str]
    transpose: frozenset[str]
    no_transpose: frozenset[str]
    by_name: frozenset[str]  # what stands in --tensor, --include or --also in full


def resolve(source: Source, request: Request) -> Asked:
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
    asked = Asked(
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


def with_full_names(request: Request, source: Source) -> Request:
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
    matrices = [other for other, tensor in source.tensors.items() if unfit(tensor) is None]
    return UnknownTensorError(
        f"{source.path}: {what}", hint=did_you_mean(name, matrices or source.tensors) or "--dry-run lists the names"
    )


def unfit(tensor: SourceTensor) -> str | None:
    """Say why a tensor cannot be packed at all, or None."""
    if len(tensor.shape) not in (2, 3):
        return f"{len(tensor.shape)}-D, not a matrix (N, K)"
    if not tensor.is_float and not is_fp8_weight(tensor):
        return f"dtype {tensor.dtype}, expected one of {', '.join(FLOAT_DTYPES)}"
    if 0 in tensor.shape:
        return f"shape {list(tensor.shape)} has no elements"
    return None
