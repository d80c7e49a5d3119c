"""Makes .pte and .ptd files for tests field by field, sound ones and hostile ones, without the code under test.

A flatbuffer is written from plain values: a table is a dict of field number -> value, a number is (struct code, value),
a text is a str, a list of tables is a list, a list of numbers is (struct code, [values]), bytes are a list of bytes.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

CALL, PREPACK = "et_vk.linear_qcs4w.default", "et_vk.prepack.default"
NAMED = 2**64 - 1

Fields = dict[int, Any]


def flatbuffer(root: Fields, identifier: bytes, header: bytes = b"") -> bytes:
    """Write a flatbuffer, with a header behind its identifier."""
    data = bytearray(bytes(4) + identifier + header)
    struct.pack_into("<I", data, 0, _table(data, root))
    return bytes(data)


def _table(data: bytearray, fields: Fields) -> int:
    data += bytes(-len(data) % 8)
    slots = [fields.get(number) for number in range(max(fields, default=-1) + 1)]
    places, body = [], bytearray(4)
    for value in slots:
        number = isinstance(value, tuple) and not isinstance(value[1], list)
        size = struct.calcsize("<" + value[0]) if number else 4
        body += bytes(-len(body) % size)
        places.append(0 if value is None else len(body))
        if value is not None:
            body += struct.pack("<" + value[0], value[1]) if number else bytes(size)
    vtable = len(data)
    data += struct.pack(f"<{2 + len(places)}H", 4 + 2 * len(places), len(body), *places)
    data += bytes(-len(data) % 8)
    table = len(data)
    struct.pack_into("<i", body, 0, table - vtable)
    data += body
    for value, place in zip(slots, places, strict=True):
        if place and not (isinstance(value, tuple) and not isinstance(value[1], list)):
            target = _table(data, value) if isinstance(value, dict) else _vector(data, value)
            struct.pack_into("<I", data, table + place, target - table - place)
    return table


def _vector(data: bytearray, value: Any) -> int:
    data += bytes(-len(data) % 8 + 4)  # so that items of 8 bytes are aligned
    start = len(data)
    if isinstance(value, str | bytes):
        text = value.encode() if isinstance(value, str) else value
        data += struct.pack("<I", len(text)) + text + b"\0"
    elif isinstance(value, tuple):
        data += struct.pack(f"<I{len(value[1])}{value[0]}", len(value[1]), *value[1])
    else:
        data += struct.pack("<I", len(value)) + bytes(4 * len(value))
        for index, item in enumerate(value):
            place = start + 4 + 4 * index
            target = _table(data, item)
            struct.pack_into("<I", data, place, target - place)
    return start


def tensor(dims: Sequence[int], dtype: int = 5, constant: int | None = -1) -> Fields:
    """Describe a tensor value; a constant of None leaves the field out."""
    fields: Fields = {0: ("b", dtype), 1: ("I", list(dims))}
    if constant is not None:
        fields[2] = ("i", constant)
    return {0: ("B", 5), 1: fields}


def call(name: str, *arguments: int) -> Fields:
    """Describe a call."""
    return {1: name, 2: ("i", list(arguments))}


def constant(nbytes: int, key: str | None = None, offset: int = NAMED) -> Fields:
    """Describe a constant."""
    return {0: ("Q", offset), 1: ("Q", nbytes), **({} if key is None else {2: key})}


def blob(graph: Fields, data: bytes = b"", header: bytes | None = None, identifier: bytes = b"VK00") -> bytes:
    """Make a delegate's blob of a graph and the bytes behind it."""
    written = flatbuffer(graph, identifier)
    written += bytes(-len(written) % 16)
    if header is None:
        header = struct.pack("<HIIIQ", 30, 32, len(written), 32 + len(written), len(data))
    return (bytes(4) + b"VH00" + header).ljust(32, b"\0") + written + data


def sha256(data: bytes) -> str:
    """Return the digest in hex."""
    return hashlib.sha256(data).hexdigest()


@dataclass
class Pte:
    """A program with one method and one delegate, sound until something is changed.

    Attributes:
        weight, scales: their bytes.
        graph: of the delegate.
        named: data by key.
    """

    weight: bytes = bytes(range(0, 256, 2))  # N = 8, K_packed = 16
    scales: bytes = np.linspace(0.1, 0.8, 8, dtype="<f4").tobytes()
    graph: Fields = field(default_factory=dict)
    named: dict[str, bytes] = field(default_factory=dict)
    plans: list[Fields] | None = None
    inline: list[bytes] = field(default_factory=list)
    segments: list[Fields] | None = None
    backend: str = "VulkanBackend"
    made: bytes | None = None

    def __post_init__(self) -> None:
        keys = [sha256(self.scales), sha256(self.weight)]
        self.named = self.named or dict(zip(keys, (self.scales, self.weight), strict=True))
        self.graph = self.graph or {
            0: "0",
            1: [call(CALL, 0, 1, 2, 3)],
            2: [tensor([4, 32]), tensor([8, 16], 1, 1), tensor([8], 5, None), tensor([4, 8])],
            3: ("I", [0]),
            4: ("I", [3]),
            5: [constant(len(self.scales), keys[0]), constant(len(self.weight), keys[1])],
            6: [],
        }

    def to_bytes(self) -> bytes:
        """Write the file."""
        self.made = self.made if self.made is not None else blob(self.graph)
        data = [self.made, *dict.fromkeys(self.named.values())]
        where, body = [], b""
        for piece in data:
            body += bytes(-len(body) % 128)
            where.append({0: ("Q", len(body)), 1: ("Q", len(piece))})
            body += piece
        delegate = {0: self.backend, 1: {0: ("b", 1), 1: ("I", 0)}}
        root = {
            1: self.plans if self.plans is not None else [{0: "forward", 7: [delegate]}],
            3: [{0: piece} for piece in self.inline],
            4: self.segments if self.segments is not None else where,
            7: [{0: key, 1: ("I", data.index(piece))} for key, piece in self.named.items()],
        }
        return with_segments(root, b"ET12", body)


def with_segments(root: Fields, identifier: bytes, body: bytes) -> bytes:
    """Write a .pte (ET12) or .ptd (FT01) file: its flatbuffer, the header in it, and its segments."""
    size = 32 if identifier == b"ET12" else 48
    program = flatbuffer(root, identifier, bytes(size))
    start = len(program) + -len(program) % 128
    if identifier == b"ET12":
        header = struct.pack("<4sIQQQ", b"eh00", 32, len(program), start, len(body))
    else:
        header = struct.pack("<4sIQQQQ", b"FH01", 40, size, len(program) - size, start, len(body))
    return (program[:8] + header.ljust(size, b"\0") + program[8 + size :]).ljust(start, b"\0") + body


def ptd(named: Mapping[str, bytes]) -> bytes:
    """Write a .ptd file."""
    where, body = [], b""
    for piece in named.values():
        body += bytes(-len(body) % 128)
        where.append({0: ("Q", len(body)), 1: ("Q", len(piece))})
        body += piece
    return with_segments({1: where, 2: [{0: key, 1: ("I", index)} for index, key in enumerate(named)]}, b"FT01", body)
