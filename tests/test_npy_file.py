"""NumPy's files: every order and dtype that can be read, and what must be refused."""

import io
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from making import mutated, npy_header, time_limit

from qcs4w_packer import Qcs4wError, SourceError, open_source
from qcs4w_packer.weights import Source

DTYPES = {
    "b1": "BOOL", "u1": "U8", "i1": "I8", "u2": "U16", "i2": "I16", "f2": "F16", "u4": "U32", "i4": "I32",
    "f4": "F32", "u8": "U64", "i8": "I64", "f8": "F64", "c8": "C64",
}  # fmt: skip
SHAPES = [(), (1,), (5,), (0,), (2, 3), (3, 0), (0, 3), (2, 3, 5), (1, 1)]


def all_bytes(source: Source, name: str = "weight") -> bytes:
    """Every byte of one tensor, through its chunks."""
    return b"".join(data for _, data in source.tensors[name].chunks())


def array_of(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """An array of random bytes, or of random truths."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape))
    flat = (
        rng.integers(0, 2, size).astype(kind) if dtype == "b1" else np.frombuffer(rng.bytes(size * kind.itemsize), kind)
    )
    return flat.reshape(shape)  # fmt: skip


def member(array: np.ndarray) -> bytes:
    """An array as the bytes of a .npy file."""
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


@pytest.mark.parametrize("byte_order", ["<", ">"], ids=["little", "big"])
@pytest.mark.parametrize("memory_order", ["C", "F"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_order_gives_the_same_bytes(
    dtype: str, memory_order: Any, byte_order: Any, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Byte order and memory order leave no trace: bytes are little-endian, C order, for .npy and .npz alike."""
    for shape in SHAPES:
        array = array_of(dtype, shape, rng)
        stored = np.asarray(array.astype(array.dtype.newbyteorder(byte_order)), order=memory_order)
        np.save(tmp_path / "a.npy", stored)
        np.savez(tmp_path / "a.npz", weight=stored)
        for name in ("a.npy", "a.npz"):
            with open_source(tmp_path / name) as source:
                tensor = source.tensors["weight"]
                assert (tensor.dtype, tensor.shape, tensor.nbytes) == (DTYPES[dtype], shape, array.nbytes)
                assert all_bytes(source) == array.tobytes(), (name, shape)


@pytest.mark.parametrize("order", ["False", "True"])
@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("descr", ["'<f4'", "'>f4'"])
@pytest.mark.parametrize("shape", ["(3, 0)", "(0,)", "(6,)", "()", "(2, 3)"])
def test_headers_written_by_hand(shape: str, descr: str, version: int, order: str, tmp_path: Path) -> None:
    """Every version, and orders that numpy itself would not write for such shapes."""
    sizes = tuple(eval(shape))
    values = np.arange(int(np.prod(sizes)), dtype=np.float32)
    (tmp_path / "a.npy").write_bytes(
        npy_header(shape, descr, order=order, version=version) + values.astype(descr.strip("'")).tobytes()
    )
    with open_source(tmp_path / "a.npy") as source:
        expected = values.reshape(sizes, order="F" if order == "True" else "C")
        np.testing.assert_array_equal(source.tensors["weight"].read(), expected, strict=True)


HEADERS = {
    "empty": (b"", "not a sound .npy file"),
    "only magic": (b"\x93NUMPY\x01\x00", "not a sound .npy file"),
    "text": (b"1.0 2.0 3.0\n" * 20, "not a sound .npy file"),
    "version 4": (npy_header(version=4) + bytes(24), "version"),
    "no such dtype": (npy_header(descr="'<q9'") + bytes(24), "not a sound .npy file"),
    "dtype an empty tuple": (npy_header(descr="()") + bytes(24), "not a sound .npy file"),
    "dtype a number": (npy_header(descr="1") + bytes(24), "not a sound .npy file"),
    "dtype a surrogate": (npy_header(descr="'\\ud800'") + bytes(24), "not a sound .npy file"),
    "open bracket": (npy_header(shape="(2, 3") + bytes(24), "not a sound .npy file"),
    "open bracket v3": (npy_header(shape="(2, 3", version=3) + bytes(24), "not a sound .npy file"),
    "code in the header": (npy_header(shape="__import__('os').getpid()") + bytes(24), "not a sound .npy file"),
    "deep nesting": (npy_header(shape="(" * 9000) + bytes(24), "not a sound .npy file"),
    "unknown key": (npy_header(extra="'x': 1") + bytes(24), "not a sound .npy file"),
    "shape of floats": (npy_header("(2.0, 3)") + bytes(24), "not a sound .npy file"),
    "shape a list": (npy_header("[2, 3]") + bytes(24), "not a sound .npy file"),
    "negative sizes": (npy_header("(-2, -3)") + bytes(24), "is not one of an array"),
    "rank 65": (npy_header("(" + "1," * 65 + ")") + bytes(4), "is not one of an array"),
    "far beyond the file": (npy_header(f"({2**50}, {2**50})") + bytes(24), "the file has 24"),
    "beyond 64 bits": (npy_header(f"({2**64 + 2}, 3)") + bytes(24), "the file has 24"),
    "truncated": (npy_header() + bytes(23), "needs 24 bytes of data, the file has 23"),
    "trailing garbage": (npy_header() + bytes(25), "needs 24 bytes of data, the file has 25"),
    "objects": (npy_header("(3,)", "'|O'") + bytes(24), "holds Python objects"),
    "structure with objects": (npy_header("(1,)", "[('a', '|O'), ('b', '<f4')]") + bytes(12), "Python objects"),
    "header of a gigabyte": (b"\x93NUMPY\x02\x00\xff\xff\xff\x3f{", "not a sound .npy file"),
}


@pytest.mark.parametrize(("content", "words"), HEADERS.values(), ids=HEADERS)
def test_a_hostile_npy_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    """Each fault is one SourceError, at once, whether the array is a file or a member of an archive."""
    (tmp_path / "a.npy").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("weight.npy", content)
    for name in ("a.npy", "a.npz"):
        with time_limit(5), pytest.raises(SourceError, match=f"(?s){name}: .*{words}"):
            open_source(tmp_path / name)


@pytest.mark.parametrize("dtype", ["f4,i4", "M8[ns]", "U5", "S5", "c16", "V2"])
def test_other_dtypes_are_named(dtype: str, tmp_path: Path) -> None:
    """A dtype that safetensors has no name for is refused alone, and left out by name beside others."""
    array = np.zeros(3, dtype)
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(SourceError, match="cannot be read as a tensor"):
        open_source(tmp_path / "a.npy")
    np.savez(tmp_path / "a.npz", odd=array, weight=np.ones((2, 2), np.float32))
    with open_source(tmp_path / "a.npz") as source:
        assert list(source.tensors) == ["weight"]
        assert source.left_out[0].startswith("odd (dtype ")


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["a.npy", "a.npz"])
def test_objects_are_never_unpickled(name: str, tmp_path: Path) -> None:
    """An object array is refused, and what it would have run has not run."""
    array = np.array([Trap(tmp_path / "ran")], object)
    save = np.save if name == "a.npy" else np.savez
    save(tmp_path / name, array)
    with pytest.raises(SourceError, match=r"holds Python objects .* nothing was run"):
        open_source(tmp_path / name)
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Trap(tmp_path / "ran")))
    assert (tmp_path / "ran").exists(), "the trap itself does not work"


def test_fortran_data_is_read_only_when_asked_for(tmp_path: Path) -> None:
    """Opening a Fortran-order file of a terabyte reads its header alone."""
    path = tmp_path / "a.npy"
    head = npy_header(f"({1 << 19}, {1 << 19})", order="True")
    path.write_bytes(head)
    os.truncate(path, len(head) + (1 << 40))
    with time_limit(5), open_source(path) as source:
        assert source.tensors["weight"].nbytes == 1 << 40


def test_big_endian_rows_are_read_where_they_lie(tmp_path: Path) -> None:
    """One row of a big-endian terabyte is read alone."""
    path = tmp_path / "a.npy"
    head = npy_header(f"({1 << 36}, 4)", "'>f4'")
    path.write_bytes(head)
    os.truncate(path, len(head) + (1 << 40))
    with path.open("r+b") as file:
        file.seek(len(head) + (1 << 39))
        file.write(struct.pack(">4f", 1, 2, 3, 4))
    with time_limit(5), open_source(path) as source:
        assert source.tensors["weight"].fetch(1 << 35, (1 << 35) + 1) == struct.pack("<4f", 1, 2, 3, 4)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=["stored", "deflated"])
def test_an_archive_gives_its_arrays_by_name(save: Any, tmp_path: Path, rng: np.random.Generator) -> None:
    """Names, order and bytes of a .npz, compressed or not, whichever array is asked for first."""
    arrays = {
        f"layer {i}/é": np.asarray(rng.standard_normal((7, 5 + i)), order="F" if i % 2 else "C") for i in range(4)
    }
    save(tmp_path / "a.npz", **arrays)
    with open_source(tmp_path / "a.npz") as source:
        assert list(source.tensors) == list(arrays)
        assert not source.nameless
        for name in [*arrays, *reversed(arrays)]:
            assert all_bytes(source, name) == arrays[name].tobytes()
            assert source.tensors[name].fetch(2, 3) == arrays[name][2].tobytes()


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA], ids=["bzip2", "lzma"])
def test_other_compressions_are_read_or_refused(compression: int, tmp_path: Path, rng: np.random.Generator) -> None:
    """What zipfile can decompress is read; a damaged stream is an error of ours."""
    array = rng.standard_normal((40, 40))
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("weight.npy", member(array))
    with open_source(path) as source:
        assert all_bytes(source) == array.tobytes()
    sound = path.read_bytes()
    for place in (45, 60, 5000):
        path.write_bytes(sound[:place] + bytes(b ^ 0xFF for b in sound[place : place + 8]) + sound[place + 8 :])
        with pytest.raises(SourceError, match=r"member 'weight\.npy'"), open_source(path) as source:
            all_bytes(source)


def test_members_that_are_no_arrays_are_left_out_by_name(tmp_path: Path) -> None:
    """Anything without the suffix .npy is told, not read; a reserved name cannot become a tensor."""
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("README", "hello")
        archive.writestr("weight.npy", member(np.ones((2, 2))))
        archive.writestr("__metadata__.npy", member(np.ones(2)))
    with open_source(tmp_path / "a.npz") as source:
        assert list(source.tensors) == ["weight"]
        assert source.left_out == (
            "README (not an array)",
            "'__metadata__' (the name is reserved in safetensors)",
        )


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    """Two members of one name could each be meant."""
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for value in (1.0, 2.0):
            archive.writestr("weight.npy", member(np.full((2, 2), value)))
    with pytest.raises(SourceError, match="array 'weight' occurs twice"):
        open_source(tmp_path / "a.npz")


def test_a_damaged_member_is_told_when_it_is_read(tmp_path: Path) -> None:
    """One flipped bit in the data breaks the archive's checksum."""
    path = tmp_path / "a.npz"
    np.savez(path, weight=np.zeros((50, 50)))
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)
    with open_source(path) as source, pytest.raises(SourceError, match=r"member 'weight\.npy' cannot be read: Bad CRC"):
        all_bytes(source)


def test_a_zip_bomb_is_refused_unread(tmp_path: Path) -> None:
    """A member that claims more than deflate can give is refused before a byte is allocated."""
    path = tmp_path / "a.npz"
    size = 1 << 40
    head = npy_header(f"({size // 4},)")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("weight.npy", head + bytes(1000))
    content = bytearray(path.read_bytes())
    central = content.rfind(b"PK\x01\x02")
    content[central + 24 : central + 28] = struct.pack("<I", 0xFFFF_FFF0)  # the uncompressed size
    path.write_bytes(content)
    with time_limit(5), pytest.raises(SourceError, match="claims 4,294,967,280 bytes from"):
        open_source(path)


@pytest.mark.parametrize(
    "content", [b"", b"PK", b"PK\x05\x06" + bytes(18), b"not a zip" * 100, npy_header() + bytes(24)],
    ids=["empty", "two bytes", "no members", "text", "npy"],
)  # fmt: skip
def test_what_is_no_archive(content: bytes, tmp_path: Path) -> None:
    """What is no zip is refused; an archive without members has no tensors."""
    (tmp_path / "a.npz").write_bytes(content)
    try:
        with open_source(tmp_path / "a.npz") as source:
            assert content.startswith(b"PK\x05\x06")
            assert not source.tensors
    except SourceError as error:
        assert "not a sound .npz file" in str(error)  # noqa: PT017 - one case of five is sound


def test_an_encrypted_member_is_refused(tmp_path: Path) -> None:
    """The flag of encryption makes zipfile ask for a password; we refuse."""
    path = tmp_path / "a.npz"
    np.savez(path, weight=np.zeros((5, 5)))
    content = bytearray(path.read_bytes())
    for signature, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.find(signature) + place] |= 1
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"member 'weight\.npy' cannot be read: .*(encrypted|password)"):
        open_source(path)


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "z.npz"])
@pytest.mark.filterwarnings("ignore")
def test_damaged_files_are_refused_or_read(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """400 damaged files of each kind: one Qcs4wError, or arrays of the size that they state."""
    arrays: dict[str, Any] = {"weight": rng.standard_normal((6, 9)).astype(np.float32), "b": np.zeros((40, 3))}
    path = tmp_path / name
    if name == "a.npy":
        np.save(path, arrays["weight"])
    else:
        (np.savez if name == "a.npz" else np.savez_compressed)(path, **arrays)
    sound = path.read_bytes()
    with time_limit(60):
        for _ in range(400):
            path.write_bytes(mutated(sound, rng))
            try:
                with open_source(path) as source:
                    for key, tensor in source.tensors.items():
                        assert len(all_bytes(source, key)) == tensor.nbytes
            except Qcs4wError:
                pass
