"""PyTorch's files: every kind of tensor that can be read, and pickles that must not run."""

import argparse
import os
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from making import mutated, run_python, save_floats, time_limit

from qcs4w_packer import Qcs4wError, SourceError, UnsafePickleError, load_packed, open_source, pack_file, pack_weight

FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


def save(content: object, path: Path, *, zipped: bool = True) -> Path:
    """Save by torch, in its zip format or the old one."""
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    return path


def all_bytes(path: Path, name: str = "weight") -> bytes:
    """Every byte of one tensor of a file."""
    with open_source(path) as source:
        return b"".join(data for _, data in source.tensors[name].chunks())


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes in C order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


BASE = torch.arange(24, dtype=torch.float32).reshape(4, 6) / 7
TENSORS = {
    "plain": BASE,
    "parameter": torch.nn.Parameter(BASE),
    "transposed": BASE.T,
    "strided rows": BASE[::2],
    "strided columns": BASE[:, 1::2],
    "offset": BASE[1:, 2:],
    "expanded": BASE[:1].expand(5, 6),
    "expanded columns": BASE[:, :1].expand(4, 9),
    "permuted": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(3, 0),
    "no rows": torch.empty(0, 3),
    "conjugate": torch.ones(2, 2, dtype=torch.complex64).mul(1j).conj(),
    "negated": torch.ones(2, 2, dtype=torch.complex64).mul(1j).conj().imag,
}


@FORMATS
@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_every_view_is_read_as_it_looks(tensor: torch.Tensor, zipped: bool, tmp_path: Path) -> None:
    """Strides, offsets and flags of a view leave no trace: the bytes are those of its contiguous copy."""
    path = save({"weight": tensor}, tmp_path / "a.pt", zipped=zipped)
    with open_source(path) as source:
        assert source.tensors["weight"].shape == tuple(tensor.shape)
        assert not source.nameless
    assert all_bytes(path) == raw(tensor.detach().resolve_conj().resolve_neg())


DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), DTYPES.items(), ids=DTYPES)
def test_every_dtype_keeps_its_bytes(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Each dtype has its safetensors name, and its bytes are not touched."""
    tensor = torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, 4.0]]).to(dtype)
    path = save({"weight": tensor}, tmp_path / "a.pt")
    with open_source(path) as source:
        assert source.tensors["weight"].dtype == name
    assert all_bytes(path) == raw(tensor)


@FORMATS
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".PT"])
def test_a_bare_tensor_is_nameless(suffix: str, zipped: bool, tmp_path: Path) -> None:
    """A file that is one tensor names it nothing; here it is called weight."""
    path = save(BASE, tmp_path / f"a{suffix}", zipped=zipped)
    with open_source(path) as source:
        assert source.nameless
        assert list(source.tensors) == ["weight"]
    assert all_bytes(path) == raw(BASE)


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model"])
def test_a_nested_state_dict_is_found(key: str, tmp_path: Path) -> None:
    """Trainers' checkpoints hold the weights under a usual key; what lies beside it is named."""
    content = {"epoch": 3, key: OrderedDict({"a.weight": BASE}), "optimizer": {"lr": 0.1}}
    with open_source(save(content, tmp_path / "a.pt")) as source:
        assert list(source.tensors) == ["a.weight"]
        assert source.left_out == (f"epoch (beside '{key}')", f"optimizer (beside '{key}')")


def test_a_key_that_only_sounds_like_weights_is_passed_over(tmp_path: Path) -> None:
    """A mapping of settings under `model` does not hide the tensors beside it."""
    with open_source(save({"model": {"layers": 2}, "a.weight": BASE}, tmp_path / "a.pt")) as source:
        assert list(source.tensors) == ["a.weight"]
        assert source.left_out == ("model (a dict, not a tensor)",)


@pytest.mark.filterwarnings("ignore")
def test_what_is_no_dense_tensor_is_left_out_by_name(tmp_path: Path) -> None:
    """Sparse, quantized, nested and meta tensors, and anything else, are told with the reason."""
    content = {
        "good": BASE,
        "sparse": BASE.to_sparse(),
        "csr": BASE.to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(BASE, 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "meta": torch.empty(2, 2, device="meta"),
        "double complex": torch.ones(2, dtype=torch.complex128),
        "number": 3,
        "text": "hello",
        "__metadata__": torch.ones(2),
        "bad\udc80": torch.ones(2),
    }
    with open_source(save(content, tmp_path / "a.pt")) as source:
        assert list(source.tensors) == ["good"]
        assert [what.split(" (")[0] for what in source.left_out] == [
            "sparse", "csr", "quantized", "nested", "meta", "double complex", "number", "text",
            "'__metadata__'", "'bad\\udc80'",
        ]  # fmt: skip
        "\n".join(source.left_out).encode()  # fit to be printed


def test_tied_tensors_are_one_storage(tmp_path: Path) -> None:
    """The same view of the same memory is one tensor; equal bytes or another view are not."""
    content = {"a": BASE, "b": BASE, "copy": BASE.clone(), "turned": BASE.T, "part": BASE[:2], "view": BASE[:]}
    for zipped in (True, False):
        with open_source(save(content, tmp_path / "a.pt", zipped=zipped)) as source:
            tensors = source.tensors
            assert tensors["a"].storage == tensors["b"].storage == tensors["view"].storage
            others = {tensors[name].storage for name in ("a", "copy", "turned", "part")}
            assert len(others) == 4


def test_keys_that_are_no_text(tmp_path: Path) -> None:
    """Numbers become names, unless two keys would become one."""
    with open_source(save({0: BASE, 1: BASE}, tmp_path / "a.pt")) as source:
        assert list(source.tensors) == ["0", "1"]
    with pytest.raises(SourceError, match="two tensors are named '0'"):
        open_source(save({0: BASE, "0": BASE}, tmp_path / "b.pt"))


def test_keys_that_are_no_names(tmp_path: Path) -> None:
    """A tuple cannot name a tensor, whatever is in it, and is not spelled out."""
    with open_source(save({("x" * 10_000, 1): BASE, (2,): 3, "a": BASE, "\udc80": 4}, tmp_path / "a.pt")) as source:
        assert list(source.tensors) == ["a"]
        assert source.left_out == (
            "a tuple as key (a tensor without a name)",
            "a tuple as key (a int, not a tensor)",
            "'\\udc80' (a int, not a tensor)",
        )


class Trap:
    """Runs a shell command when it is unpickled."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@FORMATS
@pytest.mark.parametrize("place", ["alone", "beside", "key", "inside"])
def test_a_malicious_pickle_does_not_run(place: str, zipped: bool, tmp_path: Path) -> None:
    """os.system in a pickle is refused by name, and the file that it would have made is not there."""
    trap = Trap(f"touch {tmp_path}/ran")
    content: object = {
        "alone": trap,
        "beside": {"weight": BASE, "x": trap},
        "key": {"state_dict": {"weight": BASE}, "args": trap},
        "inside": [(BASE, {"deep": [trap]})],
    }[place]
    path = save(content, tmp_path / "a.pt", zipped=zipped)
    with pytest.raises(
        UnsafePickleError, match=r"more than tensors \(posix\.system\); nothing in it was run"
    ) as caught:
        pack_file(path, tmp_path / "out.safetensors")
    assert "safetensors.torch.save_file" in (caught.value.hint or "")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out.safetensors").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "ran").exists(), "the trap itself does not work"


def test_the_environment_cannot_unlock_pickles(tmp_path: Path) -> None:
    """The switch of torch for unsafe loading does not reach us."""
    path = save(Trap(f"touch {tmp_path}/ran"), tmp_path / "a.pt")
    done = run_python(
        "import os, sys; os.environ['TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD'] = '1'\n"
        "from qcs4w_packer import open_source, UnsafePickleError\n"
        "try: open_source(sys.argv[1])\n"
        "except UnsafePickleError: print('refused')",
        path,
    )
    assert done.stdout.strip() == "refused", done.stderr
    assert not (tmp_path / "ran").exists()


@FORMATS
@pytest.mark.parametrize(
    ("content", "name"),
    [
        ({"args": argparse.Namespace(lr=1)}, "argparse.Namespace"),
        (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
    ],
    ids=["arguments", "module"],
)
def test_harmless_objects_are_refused_by_name(content: object, name: str, zipped: bool, tmp_path: Path) -> None:
    """A namespace or a whole module is refused with the way to make the file safe."""
    with pytest.raises(UnsafePickleError, match=rf"\({name}\)") as caught:
        open_source(save(content, tmp_path / "a.pth", zipped=zipped))
    assert "state_dict" in (caught.value.hint or "")


DAMAGED = {
    "empty": b"",
    "text": b"hello, this is a text file\n" * 30,
    "html": b"<!DOCTYPE html><html>" * 30,
    "random bytes": np.random.default_rng(1).bytes(2000),
    "zeros": bytes(1000),
    "zip magic": b"PK\x03\x04" + bytes(500),
    "empty zip": b"PK\x05\x06" + bytes(18),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_what_is_no_torch_file_is_damage_and_not_danger(content: bytes, tmp_path: Path) -> None:
    """Other files are told to be unreadable, not to hold something unsafe."""
    path = tmp_path / "a.pt"
    path.write_bytes(content)
    with time_limit(5), pytest.raises(SourceError, match=r"a\.pt: not a file that torch\.load can read: .") as caught:
        open_source(path)
    assert type(caught.value) is SourceError
    assert len(str(caught.value)) < 300 + len(str(path))


@FORMATS
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(share: float, zipped: bool, tmp_path: Path) -> None:
    """A download that broke off is told as such, wherever it broke."""
    path = save({"weight": torch.ones(100, 100)}, tmp_path / "a.pt", zipped=zipped)
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(SourceError):
        all_bytes(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([BASE], "holds a list"),
        (3, "holds a int"),
        ({}, "holds no tensors"),
        ({"lr": 1}, "holds no tensors"),
        (BASE.to_sparse(), "sparse"),
    ],
    ids=["list", "number", "empty", "no tensors", "bare sparse"],
)
def test_a_file_without_a_state_dict_is_refused(content: object, words: str, tmp_path: Path) -> None:
    """What torch reads and we have no use for is named."""
    with pytest.raises(SourceError, match=words):
        open_source(save(content, tmp_path / "a.pt"))


def test_a_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    """A clone without Git LFS has a text in place of the weights."""
    (tmp_path / "a.bin").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5678\n")
    with pytest.raises(SourceError, match="is a Git LFS pointer to a file of 5,678 bytes"):
        open_source(tmp_path / "a.bin")


@FORMATS
def test_a_file_that_is_cut_short_while_open_is_told(zipped: bool, tmp_path: Path) -> None:
    """Before the first read it has changed; between two reads the first missing byte is named."""
    path = save({"weight": torch.ones(2000, 2000)}, tmp_path / "a.pt", zipped=zipped)
    with open_source(path) as source:
        os.truncate(path, 10_000_000)
        with pytest.raises(SourceError, match="has been changed"):
            source.tensors["weight"].read()
    save({"weight": torch.ones(2000, 2000)}, path, zipped=zipped)
    with open_source(path) as source:
        source.tensors["weight"].fetch(0, 1)
        os.truncate(path, 10_000_000)
        with pytest.raises(SourceError, match=r"a\.pt: ends at byte 10,000,000, .* more were expected"):
            source.tensors["weight"].fetch(1000, 2000)


def rewritten(path: Path, change: Any, compression: int = zipfile.ZIP_STORED) -> Path:
    """Write a zip file's records anew, each as `change` makes it of name and bytes."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(name, change(name, data))
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.uint8], ids=str)
def test_a_file_from_a_big_endian_machine(dtype: torch.dtype, tmp_path: Path) -> None:
    """The archive says in which order its bytes are; torch is the witness."""
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    path = rewritten(
        save({"weight": tensor.T}, tmp_path / "a.pt"),
        lambda name, data: b"big" if name.endswith("byteorder") else data,
    )
    assert all_bytes(path) == raw(torch.load(path, weights_only=True)["weight"])


def test_compressed_records_are_refused(tmp_path: Path) -> None:
    """A zip file that was packed again by another program has no places to read tensors from."""
    path = rewritten(save({"weight": BASE}, tmp_path / "a.pt"), lambda _, data: data, zipfile.ZIP_DEFLATED)
    with pytest.raises(SourceError, match="is compressed"):
        open_source(path)


def test_a_record_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    """Readers would differ in which they take."""
    path = save({"weight": BASE}, tmp_path / "a.pt")
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("a/data.pkl", b"")
    with pytest.raises(SourceError, match=r"record 'data\.pkl' occurs twice"):
        open_source(path)


def test_torchscript_is_refused(tmp_path: Path) -> None:
    """A compiled module, which has its constants in a record of their own, is named as such."""
    path = save({"weight": BASE}, tmp_path / "a.pt")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("a/constants.pkl", b"")
    with pytest.raises(SourceError, match="is a TorchScript archive"):
        open_source(path)


class Bytes:
    """Asks for memory when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray, (1 << 40,)


@FORMATS
@pytest.mark.parametrize(
    "content",
    [{"a": Bytes(), "weight": BASE}, {"weight": BASE[:1, :1].expand(1 << 20, 1 << 20)}],
    ids=["bytearray", "expanded"],
)
def test_bombs_are_refused(content: object, zipped: bool, tmp_path: Path) -> None:
    """A small file cannot ask for a terabyte of memory or of output."""
    path = save(content, tmp_path / "a.pt", zipped=zipped)
    with time_limit(5), pytest.raises(SourceError, match=r"bytearray|repeats 96 bytes up to 4,398,046,511,104"):
        open_source(path)


@FORMATS
def test_memory_stays_near_one_tensor(zipped: bool, tmp_path: Path) -> None:
    """Eight tensors of 32 MiB, one of them transposed, are read in less than three of them; no map stays resident."""
    tensors = {str(i): torch.full((2048, 4096), float(i)) for i in range(7)}
    path = save({**tensors, "t": torch.full((4096, 2048), 7.0).T}, tmp_path / "a.pt", zipped=zipped)
    done = run_python(
        "import resource, sys, torch\n"
        "from qcs4w_packer import open_source\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10\n"
        "open_source(sys.argv[1]).close()\n"
        "before = peak()\n"
        "with open_source(sys.argv[1]) as source:\n"
        "    sums = [sum(rows.sum(dtype=float) for _, rows in t.float_rows()) for t in source.tensors.values()]\n"
        "assert sums == [i * 2048.0 * 4096 for i in range(8)], sums\n"
        "print(peak() - before)",
        path,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 96


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_packing_equals_packing_the_tensor(dtype: torch.dtype, zipped: bool, tmp_path: Path) -> None:
    """A state dict packs to the same bytes as its float32 widening in memory."""
    weight = torch.randn(17, 33, generator=torch.Generator().manual_seed(1)).to(dtype)
    path = save({"weight": weight.T.contiguous().T}, tmp_path / "a.pt", zipped=zipped)
    pack_file(path, tmp_path / "out.safetensors")
    expected = pack_weight(weight.float().numpy())
    np.testing.assert_array_equal(load_packed(tmp_path / "out.safetensors").packed, expected.packed)


@FORMATS
@pytest.mark.filterwarnings("ignore")
def test_damaged_files_are_refused_or_read(zipped: bool, tmp_path: Path) -> None:
    """300 damaged files in a process of its own: one Qcs4wError, or tensors of the size that they state; no crash."""
    sound = save(
        {"a.weight": BASE, "b": torch.ones(3, dtype=torch.bfloat16), "c": BASE.T}, tmp_path / "a.pt", zipped=zipped
    )
    folder = tmp_path / "spoilt"
    folder.mkdir()
    rng = np.random.default_rng(7)
    for i in range(300):
        (folder / f"{i}.pt").write_bytes(mutated(sound.read_bytes(), rng))
    done = run_python(
        "import sys, pathlib, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "from qcs4w_packer import open_source, Qcs4wError\n"
        "read = 0\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):\n"
        "    print(path.name, file=sys.stderr)\n"
        "    try:\n"
        "        with open_source(path) as source:\n"
        "            for tensor in source.tensors.values():\n"
        "                assert sum(len(data) for _, data in tensor.chunks()) == tensor.nbytes\n"
        "        read += 1\n"
        "    except Qcs4wError: pass\n"
        "print(read)",
        folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 5, "the mutator leaves too few files readable to prove anything"


def test_safetensors_sources_do_not_need_torch(tmp_path: Path) -> None:
    """A safetensors file packs in a process where torch cannot be imported."""
    path = save_floats(tmp_path / "a.safetensors", {"a.weight": np.ones((2, 3))})
    done = run_python(
        "import sys; sys.modules['torch'] = None\n"
        "from qcs4w_packer import pack_file\n"
        "print(len(pack_file(sys.argv[1], sys.argv[2]).packed))",
        path,
        tmp_path / "out.safetensors",
    )
    assert done.stdout.strip() == "1", done.stderr


def test_an_error_is_ours(tmp_path: Path) -> None:
    """Every refusal is one Qcs4wError with a stable code for scripts."""
    with pytest.raises(Qcs4wError) as caught:
        open_source(save(Trap("true"), tmp_path / "a.pt"))
    assert caught.value.code == "unsafe_pickle"
