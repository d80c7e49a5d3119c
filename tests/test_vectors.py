"""Test vectors for kernels of others."""

import hashlib
import json
import math
from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from qcs4w_gpu import Gpu, Linear, compare
from qcs4w_gpu.vector_files import HEADER, INDEX, README, holds_vectors_only, write_vectors
from qcs4w_gpu.vectors import DEFAULT_SIZES, KINDS, MAX_ELEMENTS, Kind, Vector, make_vector
from qcs4w_packer import OutputError, PackedLinear, UsageError, __version__

SMALL = ((1, 1, 1), (3, 5, 7), (2, 3, 10))


def exact_product(vector: Vector) -> list[list[Fraction]]:
    """X · Ŵᵀ in rational numbers, from the bytes by hand."""
    rows = [[Fraction(float(v)) for v in row] for row in vector.x]
    weights = []
    for packed, scale in zip(vector.packed.packed.tolist(), vector.packed.scales, strict=True):
        nibbles = [nibble for byte in packed for nibble in (byte // 16, byte % 16)]
        weights.append([(nibble - 8) * Fraction(float(scale)) for nibble in nibbles[: vector.packed.in_features]])
    return [[sum((a * b for a, b in zip(x, w, strict=True)), Fraction()) for w in weights] for x in rows]


@pytest.mark.parametrize("kind", ["exact", "bounded"])
@pytest.mark.parametrize("size", [(1, 1, 1), (3, 5, 7), (2, 3, 10), (5, 7, 129), (2, 3, 1031)], ids=str)
def test_y_is_the_true_value(size: tuple[int, int, int], kind: Kind) -> None:
    """The float64 y equals the product in rational numbers, without any rounding."""
    vector = make_vector(*size, kind=kind, seed=5)
    assert vector.size == size
    assert [[Fraction(v) for v in row] for row in vector.y.tolist()] == exact_product(vector)


def test_exact_cases() -> None:
    """Exact cases have whole x in ±1 … ±4, all of them, scales of 1, every code, and a y that float32 holds."""
    vector = make_vector(17, 33, 129, kind="exact")
    assert set(vector.x.ravel().tolist()) == {-4, -3, -2, -1, 1, 2, 3, 4}
    assert (vector.packed.scales == 1).all()
    assert set(vector.packed.codes().ravel().tolist()) == set(range(-8, 8))
    assert (vector.y.astype(np.float32) == vector.y).all()
    assert vector.bound is None


def test_bounded_cases_are_tight_and_fair() -> None:
    """float32 arithmetic in two orders stays within the bound, one wrong code does not, and neither does bfloat16."""
    vector = make_vector(5, 64, 65, kind="bounded", seed=1)
    assert vector.bound is not None
    weight = vector.packed.dequantize()
    forward = np.zeros((5, 64), np.float32)
    backward = np.zeros((5, 64), np.float32)
    for k in range(65):
        forward += vector.x[:, k, None] * weight[None, :, k]
        backward += vector.x[:, 64 - k, None] * weight[None, :, 64 - k]
    for y in (forward, backward):
        assert (np.abs(y - vector.y) <= vector.bound).all()
    assert (forward != vector.y).any(), "there is something to round"
    codes = vector.packed.codes().astype(np.float64)
    codes[7, 11] += 1
    wrong = vector.x.astype(np.float64) @ (codes * vector.packed.scales[:, None]).T
    assert (np.abs(wrong - vector.y)[:, 7] > vector.bound[:, 7]).sum() >= 4
    coarse = (vector.x.view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert (np.abs(coarse.astype(np.float64) @ weight.T.astype(np.float64) - vector.y) > vector.bound).any()


def test_the_bound_is_rounded_up() -> None:
    """In float32 the bound is never below the judge's own."""
    from qcs4w_gpu import reference

    vector = make_vector(9, 40, 33, kind="bounded")
    assert vector.bound is not None
    bound = reference(vector.packed, vector.x).bound
    assert (vector.bound >= bound).all()
    assert (vector.bound <= bound * (1 + 2.0**-22)).all()


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    """Two folders of one seed are equal file by file, another seed gives other numbers; the stream is pinned."""
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_vectors(tmp_path / name, SMALL, seed=seed)
    a, b, c = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in "abc")
    assert a == b
    assert a.keys() == c.keys()
    assert [name for name in a if name.endswith("5x7.x.bin") and a[name] == c[name]] == []
    assert a["exact_3x5x7.packed.bin"].hex() == "4ccb5988671a13b80365d638491a354834f697b8"
    arrays = b"".join(a[name] for name in sorted(a) if name.endswith(".bin"))
    assert hashlib.sha256(arrays).hexdigest() == "c0eaaa8d1d9d6fe49564d5a1db562b808b2e9af7329a1e17f03b2abea36a7aca"


def test_the_files_are_as_the_index_says(tmp_path: Path) -> None:
    """Every file is listed with shape, dtype, bytes and sha256; read so, the arrays are those of the case."""
    written = write_vectors(tmp_path / "v", SMALL, seed=3)
    index = json.loads((tmp_path / "v" / INDEX).read_text())
    assert index == written.index
    assert (index["seed"], index["tool"], index["byte_order"]) == (3, f"qcs4w {__version__}", "little")
    assert len(index["cases"]) == 2 * len(SMALL)
    files = {INDEX, HEADER, README}
    for case in index["cases"]:
        vector = make_vector(case["M"], case["N"], case["K"], kind=case["kind"], seed=3)
        arrays = {"x": vector.x, "packed": vector.packed.packed, "scales": vector.packed.scales, "y": vector.y}
        if vector.bound is not None:
            arrays["bound"] = vector.bound
        assert case["arrays"].keys() == arrays.keys()
        assert case["K_packed"] == math.ceil(case["K"] / 2)
        for name, entry in case["arrays"].items():
            data = (tmp_path / "v" / entry["file"]).read_bytes()
            files.add(entry["file"])
            assert (len(data), hashlib.sha256(data).hexdigest()) == (entry["nbytes"], entry["sha256"])
            stored = np.frombuffer(data, np.dtype(entry["dtype"]).newbyteorder("<")).reshape(entry["shape"])
            assert (stored == arrays[name]).all()
    assert files == {file.name for file in (tmp_path / "v").iterdir()}
    assert written.nbytes == sum(file.stat().st_size for file in (tmp_path / "v").iterdir())


def test_the_default_is_small_and_odd(tmp_path: Path) -> None:
    """The default sizes fit 2 MB and hold odd K, M of 1, M above K, and bytes that fill words and that do not."""
    assert write_vectors(tmp_path / "v").nbytes < 2_000_000
    remainders = {n * math.ceil(k / 2) % 4 for _, n, k in DEFAULT_SIZES}
    assert remainders == {0, 1, 2, 3}
    assert {k % 2 for *_, k in DEFAULT_SIZES} == {0, 1}
    assert any(m == 1 for m, *_ in DEFAULT_SIZES)
    assert any(m > k for m, _, k in DEFAULT_SIZES)


@pytest.mark.parametrize("size", [(0, 1, 1), (1, -1, 1), (1, 1, 0), (1, MAX_ELEMENTS, 1), (1, 1, 600_000)], ids=str)
def test_sizes_are_refused_before_anything_is_written(size: tuple[int, int, int], tmp_path: Path) -> None:
    """A size below 1, or one too large for a header, is an error and leaves nothing."""
    with pytest.raises(UsageError, match=f"{size[0]},{size[1]},{size[2]}"):
        write_vectors(tmp_path / "v", [(1, 1, 1), size])
    assert list(tmp_path.iterdir()) == []


def test_only_what_was_written_here_is_replaced(tmp_path: Path) -> None:
    """A folder is never replaced without force, nor with it once it holds a file of somebody else."""
    folder = tmp_path / "v"
    write_vectors(folder, SMALL)
    with pytest.raises(OutputError, match="exists already"):
        write_vectors(folder, SMALL)
    write_vectors(folder, SMALL[:1], force=True)
    assert len(list(folder.iterdir())) == 3 + 4 + 5
    (folder / "my_test.c").write_text("int main(void) { return 0; }")
    assert not holds_vectors_only(folder)
    with pytest.raises(OutputError, match="more than what was written here"):
        write_vectors(folder, SMALL, force=True)
    assert (folder / "my_test.c").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["v"]


@pytest.mark.parametrize(
    "index", ["", "[]", "{}", '{"format": "other"}', '{"format": "qcs4w-vectors", "cases": [1]}', "[" * 100_000]
)
def test_a_foreign_index_protects_its_folder(index: str, tmp_path: Path) -> None:
    """Whatever an index.json holds, a folder that is not ours is not taken for ours."""
    (tmp_path / INDEX).write_text(index)
    assert not holds_vectors_only(tmp_path)


def test_a_kernel_that_shares_a_fault_is_caught() -> None:
    """Swapped nibbles, a missing offset or a read pad change every exact y of an odd K."""
    vector = make_vector(3, 8, 33, kind="exact")
    packed = vector.packed
    swapped = PackedLinear(packed.packed >> 4 | packed.packed << 4, packed.scales, 33)
    for weight in (swapped.dequantize(), packed.dequantize() + 8):
        assert ((vector.x @ weight.T != vector.y).any(axis=1)).all()


@pytest.mark.gpu
def test_our_own_kernels_pass(gpu: Gpu) -> None:
    """The GPU's linear, which has not seen these numbers, is equal in every exact case and within every bound."""
    for size, kind in product(DEFAULT_SIZES, KINDS):
        vector = make_vector(*size, kind=kind)
        found = compare(Linear(gpu, vector.packed)(vector.x), vector.y, 0.0 if vector.bound is None else vector.bound)
        assert found.is_match, (vector.name, found.worst)
