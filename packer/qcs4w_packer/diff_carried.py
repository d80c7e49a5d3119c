"""Where the tensors beside the packed ones differ in two files, byte by byte."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .packed_file import PackedFile


@dataclass(frozen=True)
class CarriedDiff:
    """A tensor beside the packed ones that differs.

    Attributes:
        name: of the tensor.
        fault: what differs, in words.
        bytes: how many bytes differ, where dtype and shape are the same.
        a_offset: where the first of them lies in the first file.
        b_offset: the same in the second file.
    """

    name: str
    fault: str
    bytes: int = 0
    a_offset: int | None = None
    b_offset: int | None = None


def diff_carried(a: PackedFile, b: PackedFile) -> Iterator[CarriedDiff | None]:
    """Yield each difference of the tensors beside the packed ones, None for one that is equal."""
    b_names = set(b.carried)
    for name in a.carried:
        yield _diff_carried_tensor(a, b, name) if name in b_names else CarriedDiff(name, "only in A")
    a_names = set(a.carried)
    yield from (CarriedDiff(name, "only in B") for name in b.carried if name not in a_names)


def _diff_carried_tensor(a: PackedFile, b: PackedFile, name: str) -> CarriedDiff | None:
    one, other = a.carried_tensor(name), b.carried_tensor(name)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return CarriedDiff(name, f"{one.dtype} {list(one.shape)}, {other.dtype} {list(other.shape)} in B")
    count, first, at = 0, -1, 0
    for (_, a_bytes), (_, b_bytes) in zip(one.chunks(), other.chunks(), strict=True):
        if a_bytes != b_bytes:
            different = np.flatnonzero(np.frombuffer(a_bytes, np.uint8) != np.frombuffer(b_bytes, np.uint8))
            count += len(different)
            first = at + int(different[0]) if first < 0 else first
        at += len(a_bytes)
    if not count:
        return None
    places = (None if place is None else place + first for place in (a.carried_place(name), b.carried_place(name)))
    return CarriedDiff(name, f"{count:,} of {one.nbytes:,} bytes differ, first at byte {first:,} of it", count, *places)
