"""Raw packed bytes: a stretch of any file with what the user knows about it."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from qcs4w_packer import Blob, PackedLinear, SourceError, UsageError, open_packed, pack_weight
from qcs4w_packer.readings import NAMED


@pytest.fixture
def packed(rng: np.random.Generator) -> PackedLinear:
    """A weight of 6 × 33."""
    return pack_weight(rng.standard_normal((6, 33)).astype(np.float32))


def save_scales(path: Path, scales: NDArray[np.float32]) -> Path:
    """Write scales by suffix."""
    match path.suffix:
        case ".npy":
            np.save(path, scales)
        case ".safetensors":
            save_file({"s": scales}, path)
        case ".pt":
            import torch

            torch.save(torch.from_numpy(scales), path)
        case _:
            scales.tofile(path)
    return path


def same(found: PackedLinear, expected: PackedLinear) -> bool:
    """Tell whether two weights are equal to the bit."""
    return np.array_equal(found.packed, expected.packed) and np.array_equal(found.scales, expected.scales)


@pytest.mark.parametrize("suffix", [".npy", ".safetensors", ".pt", ".bin", ".raw", ""])
@pytest.mark.parametrize("offset", [0, 7])
def test_a_stretch_of_a_file_is_read(suffix: str, offset: int, packed: PackedLinear, tmp_path: Path) -> None:
    """Bytes from an offset on, and their scales from any file, are the weight."""
    path = tmp_path / "any.thing"
    path.write_bytes(b"x" * offset + packed.packed.tobytes() + b"tail")
    scales = save_scales(tmp_path / f"scales{suffix}", packed.scales)
    with open_packed(path, Blob((6, 33), offset, scales)) as file:
        assert same(file.load("weight"), packed)
        assert file.place(file.only()) == (path, offset)


def test_a_npy_counts_from_its_data(packed: PackedLinear, tmp_path: Path) -> None:
    """The header of a .npy is no part of the bytes."""
    np.save(tmp_path / "w.npy", packed.packed)
    np.save(tmp_path / "s.npy", packed.scales.reshape(1, -1))
    with open_packed(tmp_path / "w.npy", Blob((6, 33), scales=tmp_path / "s.npy")) as file:
        assert same(file.load("weight"), packed)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_scales_lie_anywhere_in_any_float(dtype: str, packed: PackedLinear, tmp_path: Path) -> None:
    """Raw scales may lie in the middle of a file, the same one too, as float32, float16 or bfloat16."""
    bits = packed.scales.view(np.uint32) & 0xFFFF0000
    scales = bits.view(np.float32)
    raw = {
        "F32": scales.tobytes(),
        "F16": scales.astype(np.float16).tobytes(),
        "BF16": (bits >> 16).astype("<u2").tobytes(),
    }[dtype]
    expected = scales.astype(np.float16).astype(np.float32) if dtype == "F16" else scales
    path = tmp_path / "all.bin"
    path.write_bytes(b"....." + raw + packed.packed.tobytes())
    blob = Blob((6, 33), 5 + len(raw), path, 5, dtype)
    with open_packed(path, blob) as file:
        assert same(file.load("weight"), PackedLinear(packed.packed, expected, 33))


@pytest.mark.parametrize("label", [label for label in NAMED if "q4_0" not in label])
def test_other_layouts_are_brought_into_ours(label: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """Whatever the bytes' layout, the codes come out in ours."""
    reading, shape = NAMED[label], (8, 64)
    data = rng.integers(0, 256, reading.nbytes(*shape), np.uint8)
    data.tofile(tmp_path / "w.bin")
    np.ones(8, np.float32).tofile(tmp_path / "s.bin")
    with open_packed(tmp_path / "w.bin", Blob(shape, scales=tmp_path / "s.bin", layout=reading)) as file:
        assert np.array_equal(file.load("weight").codes(), reading.matrix(data, *shape))
        assert (file.place(file.only()) is None) == (label != "even-high")


def test_without_scales_only_the_codes_are_there(packed: PackedLinear, tmp_path: Path) -> None:
    """The bytes can be looked at, but there is no weight without scales."""
    packed.packed.tofile(tmp_path / "w.bin")
    with open_packed(tmp_path / "w.bin", Blob((6, 33))) as file:
        assert np.array_equal(file.arrays(file.only())[0], packed.packed)
        with pytest.raises(UsageError, match="raw packed bytes have no scales") as caught:
            file.load("weight")
    assert caught.value.hint == "name their file with --scales"


FAULTS = {
    "no shape": (Blob(), UsageError, "do not tell their size"),
    "zero": (Blob((0, 33)), UsageError, "the shape is 0,33, expected N,K of at least 1"),
    "too short": (Blob((6, 35)), SourceError, r"has 102 bytes, 6 × 35 packed from byte 0 on end at 108"),
    "offset": (Blob((6, 33), 1), SourceError, r"packed from byte 1 on end at 103"),
    "far offset": (Blob((6, 33), 2**62), SourceError, r"packed from byte 4,611,686"),
    "no such layout": (Blob((6, 33), layout=NAMED["halves"]), UsageError, "6 × 33 cannot lie as halves"),
    "few scales": (Blob((6, 33), scales=Path("five.npy")), UsageError, "holds 5 scales, expected 6, one a row"),
    "few raw scales": (Blob((6, 33), scales=Path("five.bin")), UsageError, "has 20 bytes, 6 scales of F32 have 24"),
    "integer scales": (Blob((6, 33), scales=Path("ints.npy")), UsageError, r"is I64 \[6\], expected floats"),
    "no scales file": (Blob((6, 33), scales=Path("none.bin")), SourceError, "none.bin: does not exist"),
    "past the end": (Blob((6, 33), scales=Path("five.bin"), scales_offset=8), SourceError, "it is truncated"),
    "two arrays": (Blob((6, 33), scales=Path("two.npz")), UsageError, "holds 2 arrays, expected the scales alone"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_be_is_refused(
    name: str, packed: PackedLinear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes, offsets and scales that do not fit the file are one error each, with the numbers."""
    monkeypatch.chdir(tmp_path)
    packed.packed.tofile("w.bin")
    np.save("five.npy", packed.scales[:5])
    packed.scales[:5].tofile("five.bin")
    np.save("ints.npy", np.arange(6))
    np.savez("two.npz", a=packed.scales, b=packed.scales)
    blob, kind, words = FAULTS[name]
    with pytest.raises(kind, match=words):
        open_packed("w.bin", blob)
