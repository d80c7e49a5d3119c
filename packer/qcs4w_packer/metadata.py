"""What a container says about itself: the names of its tensors and the JSON document in its metadata.

A source tensor T becomes T.qcs4w_packed (U8 [N, ceil(K/2)]), T.qcs4w_scale (F32 [N]) and T.qcs4w_shape (I64 [2] =
N, K). The names are ours on purpose: X.weight_packed belongs to compressed-tensors, whose nibbles lie the other way.
`__metadata__` has one key of ours, `qcs4w`, a JSON document.

A stack T of E matrices, [E, N, K] or transposed [E, K, N], becomes T.0, T.1, … T.(E-1), each an entry of its own whose
`stack` is T and whose `stack_parts` is E. A weight in fp8 keeps its name for a source dtype, F8_E4M3 say, and stands
for code × scale: the tensors that held its scales are not in the container any more. `aliases` are the names of tied
tensors that have no bytes of their own.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ._version import __version__
from .nibbles import EVEN_HIGH, OFFSET, packed_width
from .safetensors_file import is_unicode
from .targets import EXECUTORCH_WEBGPU, Case, Refusal, refusals

METADATA_KEY = "qcs4w"
VERSION = 1
PACKED, SCALE, SHAPE = ".qcs4w_packed", ".qcs4w_scale", ".qcs4w_shape"
_PENDING = "0" * 64  # holds a digest's place until the data has been written


@dataclass(frozen=True)
class PackedEntry:
    """What a container says about one packed tensor.

    Attributes:
        name: T, the source tensor's name.
        out_features: N.
        in_features: K.
        source_dtype: dtype of the float weight, as safetensors names it.
        method: how scales were chosen; "absmax" is ExecuTorch's rule.
        transposed: the source stored [K, N].
        aliases: other names of the very same weight (tied tensors).
        stack: the 3-D source tensor that this matrix was split from.
        stack_parts: the number of matrices that were split from it; None where it is not known.
        packed_sha256: of the packed bytes as stored; None where it is not known.
        scale_sha256: of the scales as stored; None where it is not known.
    """

    name: str
    out_features: int
    in_features: int
    source_dtype: str = "F32"
    method: str = "absmax"
    transposed: bool = False
    aliases: tuple[str, ...] = ()
    stack: str | None = None
    stack_parts: int | None = None
    packed_sha256: str | None = None
    scale_sha256: str | None = None

    @property
    def packed_nbytes(self) -> int:
        """Bytes of packed codes and scales."""
        return self.out_features * (packed_width(self.in_features) + 4)

    @property
    def executorch_refusals(self) -> list[Refusal]:
        """Why ExecuTorch's WebGPU runtime will refuse it on every device; empty where it will not."""
        found = refusals(Case(self.out_features, self.in_features), EXECUTORCH_WEBGPU)
        return [refusal for refusal in found if refusal.rule.stage == "runtime"]

    def to_json(self) -> dict[str, Any]:
        """Return the entry as it stands in the metadata; shapes are left to the tensors themselves."""
        entry: dict[str, Any] = {
            "source_dtype": self.source_dtype,
            "method": self.method,
            "packed_sha256": self.packed_sha256 or _PENDING,
            "scale_sha256": self.scale_sha256 or _PENDING,
            "transposed": self.transposed,
            "aliases": list(self.aliases),
        }
        if self.stack:
            entry["stack"] = self.stack
        if self.stack_parts:
            entry["stack_parts"] = self.stack_parts
        return entry


def bias_name(name: str) -> str:
    """Return the name that the bias of a weight has by custom."""
    return name.removesuffix("weight") + "bias" if name.endswith("weight") else f"{name}.bias"


def to_document(entries: Iterable[PackedEntry]) -> str:
    """Return the JSON document of a container; its length does not depend on the digests."""
    document = {
        "version": VERSION,
        "nibble_order": EVEN_HIGH.name,
        "offset": OFFSET,
        "tool": f"qcs4w {__version__}",
        "tensors": {entry.name: entry.to_json() for entry in entries},
    }
    return json.dumps(document, separators=(",", ":"))


def entry_from_json(entry: PackedEntry, said: Any) -> PackedEntry:
    """Fill an entry of known name and shape with what the document says about it.

    Raises:
        KeyError, TypeError, ValueError: the description is not sound.
    """
    if not isinstance(said, dict):
        raise TypeError("not an object")
    aliases = said.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise TypeError("aliases are not a list of names")
    texts = {key: said[key] for key in ("source_dtype", "method", "packed_sha256", "scale_sha256")}
    if not all(isinstance(text, str) for text in texts.values()):
        raise TypeError("a text is missing")
    if not all(is_unicode(text) for text in (*texts.values(), *aliases)):
        raise ValueError("a text is not valid Unicode")
    for key in ("packed_sha256", "scale_sha256"):
        if not re.fullmatch(r"[0-9a-f]{64}", texts[key]):
            raise ValueError(f"{key} is not the hex of a sha256")
    stack = said.get("stack")
    if stack is not None and not isinstance(stack, str):
        raise TypeError("stack is not a name")
    stack_parts = said.get("stack_parts")
    if stack_parts is not None and (type(stack_parts) is not int or not 1 <= stack_parts < 1 << 31):
        raise TypeError("stack_parts is not a number of parts")
    return PackedEntry(
        entry.name,
        entry.out_features,
        entry.in_features,
        transposed=said.get("transposed") is True,
        aliases=tuple(aliases),
        stack=stack,
        stack_parts=stack_parts,
        **texts,
    )
