"""A call of et_vk.linear_qcs4w in a program, and its constants: places, keys and digests."""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from .metadata import PackedEntry
from .targets import EXECUTORCH_WEBGPU, Case, Refusal, refusals

_SHA256 = re.compile("[0-9a-f]{64}")
_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class PteConstant:
    """A constant of a call: where its bytes lie.

    Attributes:
        path: the .pte file, or a .ptd file beside it.
        offset: of the first byte in that file.
        nbytes: its size.
        key: by which the program names it; None for one in the delegate's blob.
        dtype: U8, F32 or F16.
        fetch: (file offset, nbytes) -> bytes, while the PteFile is open.
    """

    path: Path
    offset: int
    nbytes: int
    key: str | None
    dtype: str
    fetch: Callable[[int, int], bytes] = field(repr=False, compare=False)

    def read(self) -> bytes:
        """Return its bytes."""
        return self.fetch(self.offset, self.nbytes)

    @property
    def stated_sha256(self) -> str | None:
        """The digest that its key states; None where the key is no digest."""
        return self.key if self.key is not None and _SHA256.fullmatch(self.key) else None

    @cached_property
    def sha256(self) -> str:
        """The digest of its bytes, which are read for it once, a part at a time."""
        digest = hashlib.sha256()
        for start in range(0, self.nbytes, _CHUNK_BYTES):
            digest.update(self.fetch(self.offset + start, min(_CHUNK_BYTES, self.nbytes - start)))
        return digest.hexdigest()

    @property
    def key_matches(self) -> bool | None:
        """Whether its key is the digest of its bytes; None where the key is no digest."""
        return None if self.stated_sha256 is None else self.stated_sha256 == self.sha256


@dataclass(frozen=True)
class PteCall:
    """One call of et_vk.linear_qcs4w.

    Attributes:
        name: METHOD.linear_I. A program keeps no names of parameters, and its numbers of values and nodes change with
            every edit of the model: the method and the place among its linears are what stays and what people count.
        method: the plan's name.
        delegate: number of the delegate in its method.
        backend: the delegate's id.
        order: number of the call in the delegate's chain of calls.
        rows: M, for a dynamic shape the most that it may be; None where x has no dimensions.
        case: shape and dtypes, as a runtime meets them.
        weight: the packed bytes, uint8 (N, ceil(K/2)).
        scales: the scales (N,), F32 or F16.
    """

    name: str
    method: str
    delegate: int
    backend: str
    order: int
    rows: int | None
    case: Case
    weight: PteConstant
    scales: PteConstant

    @property
    def out_features(self) -> int:
        """N."""
        return self.case.out_features

    @property
    def in_features(self) -> int:
        """K, the last dimension of x."""
        return self.case.in_features

    @property
    def scale_dtype(self) -> str:
        """F32 or F16."""
        return self.scales.dtype

    @property
    def refusals(self) -> list[Refusal]:
        """Why ExecuTorch's WebGPU runtime would refuse this call; its delegate may hold others that it refuses."""
        return [found for found in refusals(self.case, EXECUTORCH_WEBGPU) if found.rule.stage != "export"]

    def to_entry(self) -> PackedEntry:
        """Return it as a packed tensor. Of what dtype the weight was and how scales were chosen, no program says."""
        return PackedEntry(
            self.name,
            self.out_features,
            self.in_features,
            source_dtype="unknown",
            method="unknown",
            packed_sha256=self.weight.stated_sha256,
            # That of F16 scales is not the digest of the F32 ones that a reader gets.
            scale_sha256=self.scales.stated_sha256 if self.scale_dtype == "F32" else None,
        )
