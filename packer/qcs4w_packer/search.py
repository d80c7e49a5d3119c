"""Finding packed weights in a file of any kind and size: where, in which layout, and the scales beside them."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from .anchors import MAX_STEP, Anchor, AnchorTable, Known, choose_anchors
from .errors import UsageError
from .findings import Hit, ScalesPlace, SearchReport, TensorFound
from .haystack import CARRIED, Haystack
from .matching import Budget, Match, Matcher
from .metadata import PackedEntry
from .needles import SCALE_DTYPES, CodesNeedle, Needle, ScalesNeedle, Tensors, information_bits, scale_bytes
from .packed_file import PackedFile
from .placements import PLACEMENTS, Placement

_WINDOW = 2 << 20  # bytes
_MOST_WORDS = 1 << 21  # in all tables together
_MOST_ANCHORS = 9  # of one needle by rows: any eighth of a tensor, as shards have it, holds one
_OTHER_ANCHORS = 3  # of any other needle
_WIDEST_GAP = 64  # bytes beside a row in which its scale is looked for
_NEAR = 1 << 16  # bytes around the weights in which short scales are looked for
_FREE = 1 << 28  # bytes that may be compared besides twice the size of the file
_LEAST_SURPRISE = 10  # bits by which a needle must exceed the size of the file not to be found by chance

Progress = Callable[[int, int, str], None]


def search(
    haystack: str | os.PathLike[str],
    packed: PackedFile,
    *,
    entries: Sequence[PackedEntry] | None = None,
    placements: Sequence[Placement] = PLACEMENTS,
    progress: Progress = lambda count, total, name: None,
    window_nbytes: int = _WINDOW,
) -> SearchReport:
    """Search a file for packed tensors in every placement, in one pass.

    Memory is bounded by the largest tensor, whatever the size of the file.

    Args:
        haystack: any regular file.
        packed: the file of the packed tensors.
        entries: which of them; by default all.
        placements: which ones are tried.
        progress: told (bytes advanced, bytes in all, name of the file).
        window_nbytes: how much is read at a time, a multiple of MAX_STEP.

    Returns:
        One answer for each tensor, in the order of `entries`.

    Raises:
        SourceError: the file cannot be read.
        DigestError: a tensor's bytes are not those that were written.
    """
    if window_nbytes < CARRIED or window_nbytes % MAX_STEP:
        raise UsageError(f"a window has {window_nbytes} bytes, expected a multiple of {MAX_STEP}")
    wanted = list(packed.entries.values()) if entries is None else list(entries)
    tensors = Tensors(packed)
    with Haystack(haystack) as file:
        budget = Budget(2 * file.nbytes + _FREE)
        most = _MOST_WORDS // (MAX_STEP * max(1, len(wanted) * (len(placements) + len(SCALE_DTYPES))))
        hunts, anchors = [], []
        needle_count = 0
        for entry in wanted:  # all that needs a tensor's bytes at a time: they are read once before the search
            codes, scales = tensors.arrays(entry)
            needles: list[Needle] = [
                CodesNeedle(tensors, entry, placement)
                for placement in placements
                if placement.fits(entry.out_features, entry.in_features)
            ]
            if packed.has_scales:
                needles += (ScalesNeedle(entry, scales, dtype) for dtype in SCALE_DTYPES)
            hunt = _Hunt(entry, scales if packed.has_scales else None, information_bits(codes))
            for index, needle in enumerate(needles, needle_count):
                hunt.matchers.append(Matcher(file, needle, budget))
                chosen = choose_anchors(needle, index, max(1, min(most, _anchors_of(needle))))
                anchors += chosen
                if not chosen and isinstance(needle, CodesNeedle):
                    hunt.plain.append((hunt.matchers[-1], needle.opening(CARRIED)))
            needle_count += len(needles)
            hunts.append(hunt)
        _run(file, hunts, anchors, progress, window_nbytes)
        return SearchReport(file.nbytes, [_answer(file, hunt) for hunt in hunts])


@dataclass(frozen=True)
class _Hunt:
    """What is searched for of one tensor.

    Attributes:
        entry, scales: the tensor; no scales where they are not known.
        bits: how much its codes tell.
        matchers: one for each layout of the codes and each dtype of the scales.
        plain: those without anchors, and how their bytes begin.
    """

    entry: PackedEntry
    scales: NDArray[np.float32] | None
    bits: float
    matchers: list[Matcher] = field(default_factory=list)
    plain: list[tuple[Matcher, bytes]] = field(default_factory=list)


def _anchors_of(needle: Needle) -> int:
    return _MOST_ANCHORS if isinstance(needle, CodesNeedle) and needle.placement.is_by_rows else _OTHER_ANCHORS


def _run(file: Haystack, hunts: Sequence[_Hunt], anchors: list[Anchor], progress: Progress, window_nbytes: int) -> None:
    """Go through the file once and hand every candidate to the matcher of its needle."""
    matchers = [matcher for hunt in hunts for matcher in hunt.matchers]
    plain = [pair for hunt in hunts for pair in hunt.plain]
    anchors.sort(key=lambda anchor: anchor.step)
    tables = [AnchorTable(list(group)) for _, group in groupby(anchors, key=lambda anchor: anchor.step)]

    def glance(window: NDArray[np.uint8]) -> list[Known]:
        return [table.glance(window) for table in tables]

    for offset, buffer, nbytes, glanced in file.windows(window_nbytes, glance):
        window = np.frombuffer(buffer, np.uint8, nbytes, CARRIED)
        for table, known in zip(tables, glanced, strict=True):
            for which, places in table.candidates(window, known):
                for anchor, place in _wanted(table, which, places, matchers):
                    matchers[anchor.needle].try_row(anchor.row, offset + place)
        for matcher, opening in plain:
            # From where the opening could not have been whole in the window before.
            at = CARRIED - min(offset, len(opening) - 1) - 1
            while not matcher.is_done and (at := buffer.find(opening, at + 1, CARRIED + nbytes)) >= 0:
                matcher.try_row(0, offset + at - CARRIED)
        progress(nbytes, file.nbytes, file.path.name)


def _wanted(
    table: AnchorTable, which: NDArray[np.int32], places: NDArray[np.int64], matchers: Sequence[Matcher]
) -> Iterator[tuple[Anchor, int]]:
    """Yield candidates, but for those of needles that have been found often enough."""
    if len(which) > len(table.anchors):
        is_done = np.array([matchers[anchor.needle].is_done for anchor in table.anchors])
        which, places = which[~is_done[which]], places[~is_done[which]]
    for index, place in zip(which.tolist(), places.tolist(), strict=True):
        yield table.anchors[index], place


def _answer(file: Haystack, hunt: _Hunt) -> TensorFound:
    """Put together what was found of one tensor."""
    entry, matchers = hunt.entry, hunt.matchers
    codes = [(m, m.needle.placement) for m in matchers if isinstance(m.needle, CodesNeedle)]
    places = [
        ScalesPlace(m.needle.dtype, match.offset, m.needle.width // entry.out_features)
        for m in matchers
        if isinstance(m.needle, ScalesNeedle)
        for match in m.whole
    ]
    places.sort(key=lambda place: place.offset)
    whole = _merged(entry, [(match, placement) for m, placement in codes for match in m.whole])
    parts = [] if whole else _merged(entry, [(match, placement) for m, placement in codes for match in m.parts])
    parts.sort(key=lambda hit: -hit.match.rows_equal)

    def with_scales(hit: Hit) -> Hit:
        if hunt.scales is None:
            return hit
        near = places + _scales_between(file, hit, hunt.scales)
        near += _short_scales_near(file, hit.match, hunt.scales, places)
        near.sort(key=lambda place: abs(place.offset - hit.match.start))
        return replace(hit, scales=tuple(near))

    return TensorFound(
        entry,
        hits=tuple(map(with_scales, whole)),
        parts=tuple(map(with_scales, parts)),
        scales=tuple(places),
        has_more=any(m.has_more for m, _ in codes),
        is_cut_short=any(m.is_cut_short for m, _ in codes),
        is_ambiguous=hunt.bits < (file.nbytes + 1).bit_length() + _LEAST_SURPRISE,
    )


def _merged(entry: PackedEntry, found: list[tuple[Match, Placement]]) -> list[Hit]:
    """Make one hit of all placements that are the same bytes at the same place."""
    by_place: dict[tuple[int, int], list[tuple[Match, Placement]]] = {}
    for match, placement in found:
        # Whole ones are the same bytes if they begin and end alike, whatever they take for a row.
        by_place.setdefault((match.offset, match.end), []).append((match, placement))
    return [
        Hit(entry, tuple(placement for _, placement in group), group[0][0]) for _, group in sorted(by_place.items())
    ]


def _scales_between(file: Haystack, hit: Hit, scales: NDArray[np.float32]) -> list[ScalesPlace]:
    """Find scales that lie in the gaps between the rows, one beside each."""
    match = hit.match
    gap = min(match.stride - match.width, _WIDEST_GAP)
    if not match.is_whole or not hit.placements[0].is_by_rows or match.rows != len(scales):
        return []
    for dtype in SCALE_DTYPES:
        wanted = scale_bytes(scales, dtype).reshape(len(scales), -1)
        first, size = wanted[0].tobytes(), wanted.shape[1]
        for start in (match.offset - gap, match.offset + match.width):
            offset, data = file.stretch(start, start + gap)
            at = data.find(first)
            while at >= 0:
                if offset + at + (match.rows - 1) * match.stride + size <= file.nbytes:
                    there = file.rows(offset + at, match.stride, match.rows, size)
                    if np.array_equal(there, wanted):
                        return [ScalesPlace(dtype, offset + at, match.stride)]
                at = data.find(first, at + 1)
    return []


def _short_scales_near(
    file: Haystack, match: Match, scales: NDArray[np.float32], known: Sequence[ScalesPlace]
) -> list[ScalesPlace]:
    """Find scales that were too few, or too alike, to be searched for in the whole file, close to the weights."""
    found: list[ScalesPlace] = []
    for dtype in SCALE_DTYPES:  # the widest first: half of a float32 is a bfloat16
        wanted = scale_bytes(scales, dtype)
        if any(place.dtype == dtype for place in known):
            continue
        # So near that the bytes are there by chance in one of a hundred searches at most.
        reach = int(min(_NEAR, 256.0 ** min(len(wanted), 8) / 200))
        before, after = file.stretch(match.start - reach, match.start), file.stretch(match.end, match.end + reach)
        for (offset, _), at in ((before, before[1].rfind(wanted)), (after, after[1].find(wanted))):
            place = ScalesPlace(dtype, offset + at, len(wanted) // len(scales))
            within = (0 <= place.offset - other.offset < len(scales) * other.stride for other in (*known, *found))
            if at >= 0 and not any(within):
                found.append(place)
    return found
