"""What a search found: places of a tensor's codes, whole or in part, and of its scales."""

from dataclasses import dataclass

from .matching import Match
from .metadata import PackedEntry
from .placements import Placement
from .readings import Reading
from .safetensors_file import DTYPE_BITS


@dataclass(frozen=True)
class ScalesPlace:
    """Where scales lie.

    Attributes:
        dtype: F32, F16 or BF16.
        offset: of the first scale in the file.
        stride: bytes from scale to scale; more than the dtype's size where they lie between the rows.
    """

    dtype: str
    offset: int
    stride: int

    @property
    def is_between(self) -> bool:
        """Whether something lies between two scales."""
        return self.stride * 8 != DTYPE_BITS[self.dtype]


@dataclass(frozen=True)
class Hit:
    """A place at which a tensor lies, whole or in part.

    Attributes:
        entry: the tensor.
        placements: how its bytes may be read; several where they are the same bytes.
        match: where its rows lie, and how many of them are there.
        scales: places of its scales, the nearest first.
    """

    entry: PackedEntry
    placements: tuple[Placement, ...]
    match: Match
    scales: tuple[ScalesPlace, ...] = ()

    @property
    def row_stride(self) -> int:
        """Bytes from one row to the next; short rows that were searched for together are rows here."""
        return self.match.stride - self.match.width + self.placements[0].shape(*self._size)[1]

    @property
    def has_gaps(self) -> bool:
        """Whether something lies between the rows."""
        return self.match.stride != self.match.width

    @property
    def readings(self) -> tuple[Reading, ...]:
        """What turns the bytes from here on into codes; where there are gaps of a kind of their own, the rows alone."""
        return tuple(p.filled_up(self._size, self.row_stride) or p.reading for p in self.placements)

    @property
    def is_read(self) -> bool:
        """Whether `readings` do so, gaps included."""
        return self.match.is_whole and self.placements[0].filled_up(self._size, self.row_stride) is not None

    @property
    def _size(self) -> tuple[int, int]:
        return self.entry.out_features, self.entry.in_features


@dataclass(frozen=True)
class TensorFound:
    """What a search says about one tensor.

    Attributes:
        entry: the tensor.
        hits: where all of its codes lie, by offset.
        parts: where some of its rows lie; looked at only where nothing is whole.
        scales: every place of its scales, with or without the codes.
        has_more: there are more hits than are listed.
        is_cut_short: the file repeats itself so much that the search was given up; there may be more.
        is_ambiguous: so short or so uniform that a file of this size holds it by chance.
    """

    entry: PackedEntry
    hits: tuple[Hit, ...]
    parts: tuple[Hit, ...]
    scales: tuple[ScalesPlace, ...]
    has_more: bool
    is_cut_short: bool
    is_ambiguous: bool

    @property
    def is_found(self) -> bool:
        """Whether all codes of the tensor lie in the file."""
        return bool(self.hits)


@dataclass(frozen=True)
class SearchReport:
    """What a search found.

    Attributes:
        nbytes: size of the file that was searched.
        tensors: one answer for each tensor that was looked for.
    """

    nbytes: int
    tensors: list[TensorFound]
