"""Where two files of packed linears differ: which tensors pair up, what lies beside them, what is said of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .container import Container
from .diff import TensorDiff, diff_tensors
from .diff_carried import CarriedDiff, diff_carried
from .errors import ContainerError, UnknownTensorError
from .metadata import PackedEntry
from .packed_file import PackedFile

#: What a document may say that changes how the same bytes are read.
_MEANING = ("version", "nibble_order", "offset")
_SAID = ("method", "source_dtype", "transposed", "stack", "aliases")


@dataclass(frozen=True)
class PairDiff:
    """Two packed tensors that were held against each other.

    Attributes:
        a_name: in the first file.
        b_name: in the second file; mostly the same.
        a_shape: N, K in the first file.
        b_shape: N, K in the second file.
        tensors: how they differ; None where their shapes do.
        bias: how their biases differ, where the files' other tensors were not compared one by one.
        said: what the files say of them differently; no verdict.
    """

    a_name: str
    b_name: str
    a_shape: tuple[int, int]
    b_shape: tuple[int, int]
    tensors: TensorDiff | None
    bias: str | None = None
    said: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether shape, packed bytes, scales and bias are the same."""
        return self.tensors is not None and self.tensors.is_equal and self.bias is None


@dataclass(frozen=True)
class FileDiff:
    """How two files differ.

    Attributes:
        pairs: the packed tensors that both have, in the first file's order.
        only_a: packed tensors that only the first file has.
        only_b: packed tensors that only the second file has.
        carried: tensors beside them that differ or that one file lacks.
        carried_equal: how many of these are equal.
        carried_left: why they were not compared, or None.
        scales_compared: whether both files have scales.
        meaning: what the files say differently that changes how bytes are read: a difference.
        said: what they say differently otherwise: none.
    """

    pairs: tuple[PairDiff, ...] = ()
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    carried: tuple[CarriedDiff, ...] = ()
    carried_equal: int = 0
    carried_left: str | None = None
    scales_compared: bool = True
    meaning: tuple[str, ...] = ()
    said: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether all that was compared is the same."""
        return all(pair.is_equal for pair in self.pairs) and not (
            self.only_a or self.only_b or self.carried or self.meaning
        )


#: Called with one compared pair done, how many there are in all, and its name.
Progress = Callable[[int, int, str], None]


def diff_files(
    a: PackedFile,
    b: PackedFile,
    *,
    names: tuple[str, ...] = (),
    packed_only: bool = False,
    progress: Progress | None = None,
) -> FileDiff:
    """Compare two files of packed linears, whatever their digests say.

    Args:
        a: the first file, opened to be read leniently.
        b: the second file.
        names: compare these tensors only: a name of both files, or NAME_IN_A=NAME_IN_B.
        packed_only: do not compare the tensors beside the packed ones.
        progress: called after each pair.

    Raises:
        ContainerError: a file holds no packed tensor that can be read.
        UnknownTensorError: a file has no tensor of a name.
    """
    for file in (a, b):
        if not file.entries:
            what = file.problems[0] if file.problems else "holds no packed tensor"
            raise ContainerError(f"{file.path}: {what}")
    if names:
        pairs = [_named_pair(a, b, name) for name in names]
        only_a, only_b = list[str](), list[str]()
    else:
        pairs, only_a, only_b = _pair_up(a, b)
    left = _why_not_carried(a, b, names, packed_only)
    done = []
    for a_entry, b_entry in pairs:
        done.append(_diff_pair(a, a_entry, b, b_entry, with_bias=left is not None and not packed_only))
        if progress:
            progress(1, len(pairs), a_entry.name)
    meaning, said = _said_of_files(a, b)
    compared = list(diff_carried(a, b)) if left is None else []
    return FileDiff(
        tuple(done),
        tuple(only_a),
        tuple(only_b),
        tuple(diff for diff in compared if diff is not None),
        carried_equal=sum(diff is None for diff in compared),
        carried_left=left,
        scales_compared=a.has_scales and b.has_scales,
        meaning=tuple(meaning),
        said=tuple(said),
    )


def _pair_up(a: PackedFile, b: PackedFile) -> tuple[list[tuple[PackedEntry, PackedEntry]], list[str], list[str]]:
    """Pair the tensors of two files by name, alias or module; two single tensors pair up whatever they are called."""
    if len(a.entries) == len(b.entries) == 1:
        return [(a.only(), b.only())], [], []
    pairs, only_a = [], []
    for entry in a.entries.values():
        partner = _find(b, entry)
        if partner is None:
            only_a.append(entry.name)
        else:
            pairs.append((entry, partner))
    met = {partner.name for _, partner in pairs}
    only_b = []
    for entry in b.entries.values():
        if entry.name in met:
            continue
        partner = _find(a, entry)  # tied in A, by an alias, and stored by itself in B
        if partner is None:
            only_b.append(entry.name)
        else:
            pairs.append((partner, entry))
    return pairs, only_a, only_b


def _find(file: PackedFile, entry: PackedEntry) -> PackedEntry | None:
    for name in (entry.name, entry.name.removesuffix(".weight"), *entry.aliases):
        try:
            return file.entry(name)
        except UnknownTensorError:
            continue
    return None


def _named_pair(a: PackedFile, b: PackedFile, name: str) -> tuple[PackedEntry, PackedEntry]:
    try:
        return a.entry(name), b.entry(name)
    except UnknownTensorError:
        a_name, equals, b_name = name.partition("=")
        if not equals:
            raise
        return a.entry(a_name), b.entry(b_name)


def _diff_pair(
    a: PackedFile, a_entry: PackedEntry, b: PackedFile, b_entry: PackedEntry, *, with_bias: bool
) -> PairDiff:
    a_shape, b_shape = ((e.out_features, e.in_features) for e in (a_entry, b_entry))
    is_one_format = a.format == b.format
    bias, said = None, list(_said_of_entries(a_entry, b_entry)) if is_one_format else []
    if with_bias:
        a_bias, b_bias = a.bias(a_entry), b.bias(b_entry)
        if (a_bias is None) != (b_bias is None):
            text = f"only {'B' if a_bias is None else 'A'} has a bias"
            if is_one_format:
                bias = text
            else:  # not every format keeps a bias beside its weight
                said.append(text)
        elif a_bias is not None and b_bias is not None:
            bias = _diff_bias(a_bias, b_bias)
    tensors = diff_tensors(a, a_entry, b, b_entry) if a_shape == b_shape else None
    return PairDiff(a_entry.name, b_entry.name, a_shape, b_shape, tensors, bias, tuple(said))


def _diff_bias(a: NDArray[np.float32], b: NDArray[np.float32]) -> str | None:
    if a.shape != b.shape:
        return f"A has {len(a)} values, B {len(b)}"
    rows = np.flatnonzero(a.view(np.uint32) != b.view(np.uint32))
    if not len(rows):
        return None
    row = int(rows[0])
    return f"{len(rows):,} of {len(a):,} values, first at n {row}: {a[row]:.9g}, {b[row]:.9g} in B"


def _said_of_entries(a: PackedEntry, b: PackedEntry) -> Iterator[str]:
    for key in _SAID:
        a_value, b_value = getattr(a, key), getattr(b, key)
        if a_value != b_value:
            yield f"{key}: {_shown(a_value)}, {_shown(b_value)} in B"


def _said_of_files(a: PackedFile, b: PackedFile) -> tuple[list[str], list[str]]:
    """Return what two files of one format state differently: what changes the meaning of bytes, and all else."""
    meaning: list[str] = []
    said: list[str] = []
    if a.format != b.format:
        return meaning, said
    for key in sorted({*a.statement, *b.statement}):
        a_value, b_value = a.statement.get(key), b.statement.get(key)
        if a_value != b_value:
            text = f"{key}: {_shown(a_value)}, {_shown(b_value)} in B"
            (meaning if key in _MEANING and a.statement and b.statement else said).append(text)
    if a.format == Container.format:
        for key in sorted({*a.metadata, *b.metadata}):
            a_text, b_text = a.metadata.get(key), b.metadata.get(key)
            if a_text != b_text:
                said.append(f"metadata '{key}': {_shown(a_text)}, {_shown(b_text)} in B")
    return meaning, said


def _why_not_carried(a: PackedFile, b: PackedFile, names: tuple[str, ...], packed_only: bool) -> str | None:
    if packed_only:
        return "as you asked"
    if names:
        return "tensors were named"
    for one, other in ((a, b), (b, a)):
        if one.format != other.format and one.carried and not other.carried:
            return f"{other.path} is no checkpoint"
    return None


def _shown(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, tuple | list) else "" if value is None else str(value)
    text = text or "nothing"
    return text if len(text) <= 100 else text[:100] + "…"
