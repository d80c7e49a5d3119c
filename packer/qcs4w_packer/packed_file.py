"""What every file of packed linears offers, whatever its format."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .closing import Closing
from .errors import ContainerError, DigestError, NonFiniteError, UnknownTensorError
from .metadata import PackedEntry, bias_name
from .name_patterns import did_you_mean
from .packed import PackedLinear
from .targets import Case
from .weights import FLOAT_DTYPES, SourceTensor


class PackedFile(Closing):
    """A file of packed linears, opened for reading. Use it as a context manager.

    A format supplies `arrays`; what that cannot tell (carried tensors, places in the file) has a default.

    Attributes:
        format: what it is, for people and JSON: "qcs4w", "pte", "raw", "gptq", …
        path: where it lies.
        entries: what is known of each packed tensor, by name.
        carried: names of the tensors beside them.
        problems: what a strict reader would have refused.
        notes: what was decided while reading and a reader of a report should know.
    """

    format: str
    path: Path
    entries: dict[str, PackedEntry]
    carried: list[str]
    problems: list[str]
    notes: Sequence[str] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that reading depends on, and the folder where it is one: none of them may be written to."""
        return (self.path,)

    @property
    def metadata(self) -> Mapping[str, str]:
        """The file's own string metadata, without what describes packed tensors."""
        return {}

    @property
    def statement(self) -> dict[str, str | int]:
        """What the file as a whole says of itself, by key."""
        return {}

    @property
    def has_scales(self) -> bool:
        """Whether scales are known; where they are not, `arrays` returns ones."""
        return True

    def arrays(self, entry: PackedEntry) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Read packed bytes (N, K_packed) in qcs4w's own layout, and scales (N,), whatever their digests say."""
        raise NotImplementedError

    def scales(self, entry: PackedEntry) -> NDArray[np.float32]:
        """Read the scales (N,) alone."""
        return self.arrays(entry)[1]

    def row_reader(self, entry: PackedEntry) -> Callable[[int, int], NDArray[np.uint8]]:
        """Return a function (first row, end) -> packed rows, as `arrays` has them."""
        packed, _ = self.arrays(entry)
        return lambda start, stop: packed[start:stop]

    def place(self, entry: PackedEntry) -> tuple[Path, int] | None:
        """Return the file and the offset at which the bytes that `arrays` returns lie; None if they lie otherwise."""
        return None

    def scales_place(self, entry: PackedEntry) -> tuple[Path, int] | None:
        """Return the file and the offset at which a tensor's float32 scales lie; None if they lie otherwise."""
        return None

    def case(self, entry: PackedEntry) -> Case:
        """Return what a runtime would meet: shape, rows of input where the file bounds them, stored dtype of scales."""
        return Case(entry.out_features, entry.in_features)

    def carried_place(self, name: str) -> int | None:
        """Return the offset in the file at which a carried tensor lies; None if its bytes lie otherwise."""
        return None

    def carried_tensor(self, name: str) -> SourceTensor:
        """Return a tensor that lies beside the packed ones, by its name."""
        raise NotImplementedError

    def bias(self, entry: PackedEntry) -> NDArray[np.float32] | None:
        """Return the bias that the file holds for a packed tensor, float32 (N,), or None.

        Raises:
            ContainerError: a tensor of that name is not N floats.
            NonFiniteError: it holds NaN or an infinity.
        """
        for name in map(bias_name, (entry.name, *entry.aliases)):
            if name not in self.carried:
                continue
            tensor = self.carried_tensor(name)
            if tensor.dtype not in FLOAT_DTYPES or tensor.shape != (entry.out_features,):
                raise ContainerError(
                    f"{self.path}: bias '{name}' is {tensor.dtype} {list(tensor.shape)}, "
                    f"expected {entry.out_features} floats",
                    hint="--no-bias runs without it",
                )
            bias = tensor.read()
            if not np.isfinite(bias).all():
                column = int(np.flatnonzero(~np.isfinite(bias))[0])
                raise NonFiniteError(f"{self.path}: bias '{name}' holds {bias[column]} at column {column}")
            return bias
        return None

    def entry(self, name: str) -> PackedEntry:
        """Return what is said about a packed tensor, found by its name, an alias, or its module's name.

        Raises:
            UnknownTensorError: there is none of that name.
        """
        names = self.names()
        for candidate in (name, f"{name}.weight"):
            if candidate in names:
                return self.entries[names[candidate]]
        hint = did_you_mean(name, names)
        if name in self.carried:
            hint = "it is in the file as it was in the source, not packed"
        raise UnknownTensorError(f"{self.path}: no packed tensor '{name}'", hint=hint)

    def names(self) -> Mapping[str, str]:
        """Return every name by which a packed tensor may be asked for, with its key in `entries`."""
        return {name: name for name in self.entries}

    def only(self) -> PackedEntry:
        """Return the single packed tensor.

        Raises:
            UnknownTensorError: there are several, or none.
        """
        if len(self.entries) == 1:
            return next(iter(self.entries.values()))
        if not self.entries:
            raise UnknownTensorError(f"{self.path}: holds no packed tensor that can be read")
        some = ", ".join(f"'{name}'" for name in list(self.entries)[:3]) + ", …" * (len(self.entries) > 3)
        raise UnknownTensorError(
            f"{self.path}: holds {len(self.entries)} packed tensors ({some})", hint="choose one with --tensor"
        )

    def load(self, name: str) -> PackedLinear:
        """Read one packed tensor, checked against its digests.

        Raises:
            UnknownTensorError: there is none of that name.
            DigestError: the bytes are not those that were written.
        """
        entry = self.entry(name)
        packed, scales = self.arrays(entry)
        self.refuse_digests(digest_faults(entry, packed, scales))
        try:
            return PackedLinear(packed, scales, entry.in_features)
        except ContainerError as error:
            raise ContainerError(f"{self.path}: tensor '{entry.name}': {error}") from None

    def checked_rows(
        self, entry: PackedEntry, step: int
    ) -> Iterator[tuple[int, NDArray[np.uint8], NDArray[np.float32]]]:
        """Yield (first row, packed rows, their scales) of a tensor, `step` rows at a time, in order.

        Raises:
            DigestError: the bytes are not those that were written, which may be known after the last row only.
        """
        weight = self.load(entry.name)
        for start in range(0, entry.out_features, step):
            yield start, weight.packed[start : start + step], weight.scales[start : start + step]

    def refuse_digests(self, wrong: Sequence[str]) -> None:
        """Raise DigestError with these faults, if there are any."""
        if wrong:
            raise DigestError(
                f"{self.path}: {'; '.join(wrong)}",
                hint="the file was damaged or edited after packing: pack it again, or look with qcs4w inspect",
            )

    def wrong_digests(self, entry: PackedEntry) -> list[str]:
        """Recompute a tensor's digests and describe each that differs from what the file says."""
        if entry.packed_sha256 is None and entry.scale_sha256 is None:
            return []
        return digest_faults(entry, *self.arrays(entry))

    def odd_scales(self, entry: PackedEntry) -> list[str]:
        """Describe scales that no reader takes: NaN and infinities."""
        scales = self.scales(entry)
        rows = np.flatnonzero(~np.isfinite(scales))
        return [f"tensor '{entry.name}': the scale of row {row} is {scales[row]}" for row in rows[:1]]


def digest_faults(entry: PackedEntry, packed: NDArray[np.uint8], scales: NDArray[np.float32]) -> list[str]:
    """Describe each digest that the arrays do not have though the file says so."""
    return sha256_faults(entry, hashlib.sha256(packed.data).hexdigest(), hashlib.sha256(scales.data).hexdigest())


def sha256_faults(entry: PackedEntry, packed_sha256: str, scale_sha256: str) -> list[str]:
    """Describe each digest that differs from the one that the file states."""
    found = (("packed bytes", packed_sha256, entry.packed_sha256), ("scales", scale_sha256, entry.scale_sha256))
    return [
        f"tensor '{entry.name}': the {what} have sha256 {digest}, the file says {stated}"
        for what, digest, stated in found
        if stated is not None and digest != stated
    ]
