"""What pack plans before it does anything: which tensor goes into which file, sizes, names, and the list of them."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from making import bytes_read, raw_safetensors, run_python, save_floats, save_folder, sparse_safetensors, time_limit
from safetensors import safe_open

from qcs4w_packer import Container, OutputError, PackPlan, Request, open_source, pack_file, plan_pack

WORK = ".out.qcs4w"


@pytest.fixture
def arrays(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Five linears of different sizes with biases, an embedding and a norm."""
    arrays: dict[str, np.ndarray] = {"embed_tokens.weight": rng.standard_normal((40, 32))}
    for index, rows in enumerate((33, 64, 65, 128, 17)):
        arrays[f"layers.{index}.fc.weight"] = rng.standard_normal((rows, 61))
        arrays[f"layers.{index}.fc.bias"] = rng.standard_normal(rows)
    arrays["norm.weight"] = np.ones(61)
    return arrays


def planned(path: Path, size: int | None = None, **options: bool) -> PackPlan:
    """Plan a source whose output would be `out` beside it."""
    with open_source(path) as source:
        return plan_pack(source, path.parent / "out", max_shard_size=size, **options)


def test_a_file_becomes_a_file(arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    """Without --max-shard-size a file gives one file of the output's name, and no list."""
    plan = planned(save_floats(tmp_path / "model.safetensors", arrays))
    (shard,) = plan.shards
    assert (plan.is_folder, shard.name, plan.index()) == (False, "out", None)
    assert [entry.name for entry in shard.entries] == [f"layers.{i}.fc.weight" for i in range(5)]


def test_a_folder_keeps_its_shards(arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    """Every file of the source has its counterpart of the same name, with the tensors that were in it."""
    folder = save_folder(tmp_path / "model", arrays, per_shard=4)
    plan = planned(folder)
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert [shard.name for shard in plan.shards] == names
    for shard in plan.shards:
        with safe_open(folder / shard.name, "np") as file:
            held = set(file.keys())
        assert {t.name for t in shard.carried} | {e.name for e in shard.entries} == held


def test_a_shard_without_packed_tensors(tmp_path: Path) -> None:
    """A file that holds none keeps its place, and says itself that it packs nothing."""
    arrays = {"embed_tokens.weight": np.ones((8, 8)), "norm.weight": np.ones(8), "fc.weight": np.ones((8, 8))}
    folder = save_folder(tmp_path / "model", arrays, per_shard=2)
    pack_file(folder, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model-00001-of-00002.safetensors", "np") as file:
        assert json.loads(file.metadata()["qcs4w"])["tensors"] == {}
        assert set(file.keys()) == {"embed_tokens.weight", "norm.weight"}


@pytest.mark.parametrize("size", [5_000, 9_000, 20_000, 1_000_000])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_no_file_is_larger_than_asked_for(size: int, kind: str, arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    """Files stay within the size, header included, but for one that holds a single tensor; all hold as much as fits."""
    path = save_floats(tmp_path / "model.safetensors", arrays)
    if kind == "folder":
        path = save_folder(tmp_path / "model", arrays, per_shard=3)
    report = pack_file(path, tmp_path / "out", max_shard_size=size)
    plan = planned(path, size)
    assert [shard.name for shard in report.shards] == [shard.name for shard in plan.shards]
    for shard in report.shards:
        assert (tmp_path / "out" / shard.name).stat().st_size == shard.nbytes
        assert shard.nbytes <= size or shard.tensor_count == 1
    for one, following in zip(plan.shards, plan.shards[1:], strict=False):
        assert one.nbytes + following.nbytes > size - 3000  # what headers need is counted generously
    count = len(plan.shards)
    expected = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    assert [shard.name for shard in plan.shards] == (["model.safetensors"] if count == 1 else expected)
    assert (tmp_path / "out" / "model.safetensors.index.json").exists() == (count > 1)


def test_the_list_of_shards(arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    """The index names, for every stored tensor, the file that holds it, and the bytes of all."""
    pack_file(save_folder(tmp_path / "model", arrays, per_shard=4), tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    stored: dict[str, str] = {}
    nbytes = 0
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, "np") as file:
            stored |= dict.fromkeys(file.keys(), path.name)
            nbytes += sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    assert index == {"metadata": {"total_size": nbytes}, "weight_map": stored}
    assert "layers.0.fc.weight.qcs4w_packed" in stored
    assert "layers.0.fc.bias" in stored


@pytest.mark.parametrize("size", [None, 6_000])
def test_division_changes_no_tensor(size: int | None, arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    """Every tensor has the bytes and digests that it has in a single file."""
    pack_file(save_floats(tmp_path / "model.safetensors", arrays), tmp_path / "single.safetensors")
    pack_file(save_folder(tmp_path / "model", arrays, per_shard=4), tmp_path / "out", max_shard_size=size)
    with Container(tmp_path / "single.safetensors") as single:
        for path in (tmp_path / "out").glob("*.safetensors"):
            with Container(path, strict=False) as part:
                for name, entry in part.entries.items():
                    assert entry == single.entries[name]
                    assert part.load(name).packed.tobytes() == single.load(name).packed.tobytes()
                for name in part.carried:
                    assert part.read(name) == single.read(name)


def test_what_lies_beside_comes_along(arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    """config.json and the tokenizer's files are copied byte for byte; the old index is not."""
    folder = save_folder(tmp_path / "model", arrays, per_shard=4)
    (folder / "tokenizer.json").write_bytes(b'{"a": "\xc3\xa9"}\n')
    pack_file(folder, tmp_path / "out")
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    index = (tmp_path / "out" / "model.safetensors.index.json").read_text()
    assert index != (folder / "model.safetensors.index.json").read_text()


def test_two_tensors_of_one_name_in_different_files(tmp_path: Path) -> None:
    """`T.0` of a stack T in one file meets the matrix T.0 of another: refused before any work."""
    arrays = {"T": np.ones((2, 4, 4)), "x.weight": np.ones((4, 4)), "T.0": np.ones((4, 4))}
    folder = save_folder(tmp_path / "model", arrays)
    with pytest.raises(OutputError, match=r"would be named 'T\.0'"):
        pack_file(folder, tmp_path / "out", request=Request(include=("*",)))
    arrays = {"a.weight": np.ones((4, 4)), "b": np.ones(4), "a.weight.qcs4w_scale": np.ones(4)}
    with pytest.raises(OutputError, match=r"would be named 'a\.weight\.qcs4w_scale'"):
        pack_file(save_folder(tmp_path / "other", arrays), tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["model", "other"]


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts bytes as Linux does")
def test_a_dry_run_of_many_terabytes(tmp_path: Path) -> None:
    """Of eight files of a terabyte only headers are read, and the plan says what a run would write."""
    weight_map: dict[str, str] = {}
    (tmp_path / "model").mkdir()
    for index in range(8):
        shard = f"model-{index + 1:05}-of-00008.safetensors"
        names = [f"layers.{index}.{part}.weight" for part in range(64)]
        nbytes = (1 << 16) * (1 << 17) * 2
        header = {
            name: {"dtype": "BF16", "shape": [1 << 16, 1 << 17], "data_offsets": [i * nbytes, (i + 1) * nbytes]}
            for i, name in enumerate(names)
        }
        path = raw_safetensors(tmp_path / "model" / shard, header)
        os.truncate(path, path.stat().st_size + nbytes * len(names))
        weight_map |= dict.fromkeys(names, shard)
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    before = bytes_read()
    with time_limit(20):
        report = pack_file(tmp_path / "model", tmp_path / "out", dry_run=True)
    assert bytes_read() - before < 1 << 20
    assert len(report.packed) == 512
    assert len(report.shards) == 8
    assert report.output_nbytes > report.source_nbytes // 4
    assert os.listdir(tmp_path) == ["model"]


# --- folders that are there already


def test_a_folder_that_is_there(arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    """An empty one is taken; one with an earlier output is replaced with --force; one with other files never."""
    folder, out = save_folder(tmp_path / "model", arrays, per_shard=4), tmp_path / "out"
    out.mkdir(mode=0o700)
    pack_file(folder, out)
    assert out.stat().st_mode & 0o777 == 0o700
    with pytest.raises(OutputError, match="exists already"):
        pack_file(folder, out)
    pack_file(folder, out, max_shard_size=6_000, force=True)
    assert len(list(out.glob("*.safetensors"))) > 4
    assert out.stat().st_mode & 0o777 == 0o700
    pack_file(folder, out, force=True)
    assert len(list(out.glob("*.safetensors"))) == 3
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(OutputError, match="does not remove that"):
        pack_file(folder, out, force=True)
    assert (out / "thesis.txt").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["model", "out"]


@pytest.mark.parametrize("force", [False, True])
def test_the_source_folder_is_never_the_output(force: bool, arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    """Neither the folder being read, nor one that holds it, nor one in it."""
    folder = save_folder(tmp_path / "model", arrays)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for out in (folder, tmp_path, folder / "packed"):
        with pytest.raises(OutputError, match="sources are never changed"):
            pack_file(folder, out, force=force)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_folder_that_has_appeared_meanwhile(arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    """What another program has put there during the work stays, and the work is kept for a --force or another end."""
    folder, out = save_folder(tmp_path / "model", arrays), tmp_path / "out"

    def appear(nbytes: int, total: int, name: str) -> None:
        out.mkdir(exist_ok=True)
        (out / "theirs").write_text("theirs")

    with pytest.raises(OutputError, match="exists already") as caught:
        pack_file(folder, out, progress=appear)
    assert "is kept in" in (caught.value.hint or "")
    assert os.listdir(out) == ["theirs"]
    (out / "theirs").unlink()
    pack_file(folder, out)
    assert not (tmp_path / WORK).exists()


# --- memory

PEAK = """
import sys
from qcs4w_packer import Request, pack_file
options = dict(request=Request(transpose=("*",))) if sys.argv[3] == "transposed" else {}
pack_file(sys.argv[1], sys.argv[2], **options)
assert "torch" not in sys.modules
lines = open("/proc/self/status").read().splitlines()
print(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the peak")
@pytest.mark.parametrize(
    ("dtype", "way"), [("BF16", "as stored"), ("F32", "transposed"), ("BF16", "transposed")], ids=str
)
def test_the_memory_of_a_run(dtype: str, way: str, tmp_path: Path) -> None:
    """A process that packs a folder of 320 MiB takes 60 MB and the blocks in work; turned, one tensor more.

    That is within 1.5 times the largest tensor and 400 MB. Torch, which alone takes as much, is not loaded.
    """
    rows, columns = 2048, (16 << 10) if dtype == "F32" else (32 << 10)
    nbytes = 128 << 20
    (tmp_path / "model").mkdir()
    weight_map: dict[str, str] = {}
    for index, shape in enumerate(((rows, columns), (rows, columns), (rows // 2, columns))):
        shard = f"model-{index + 1:05}-of-00003.safetensors"
        size = nbytes * shape[0] // rows
        header = {f"{index}.weight": {"dtype": dtype, "shape": list(shape), "data_offsets": [0, size]}}
        path = raw_safetensors(tmp_path / "model" / shard, header)
        os.truncate(path, path.stat().st_size + size)
        weight_map[f"{index}.weight"] = shard
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    done = run_python(PEAK, tmp_path / "model", tmp_path / "out", way)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 150e6 + (nbytes if way == "transposed" else 0)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the peak")
@pytest.mark.parametrize("shape", [(20_000_000, 1), (1, 100_000_000)], ids=str)
def test_the_memory_of_an_odd_shape(shape: tuple[int, int], tmp_path: Path) -> None:
    """Nothing is kept of rows that are packed, nor worked out for a whole row: 20 million rows, or one of 400 MB."""
    sparse_safetensors(tmp_path / "model.safetensors", shape)
    done = run_python(PEAK, tmp_path / "model.safetensors", tmp_path / "out.safetensors", "as stored")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1.5 * 4 * shape[0] * shape[1] + 400e6
