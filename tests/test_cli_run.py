"""The run command."""

from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import CommandLine, process
from safetensors.numpy import load_file, save_file

from qcs4w_packer import Container

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _adapter(gpu: object) -> None:
    """These tests need an adapter."""


def expected(packed_file: Path, name: str, x: np.ndarray, *, bias: bool = True) -> np.ndarray:
    """The product with the dequantized weight, and the bias, in float64."""
    with Container(packed_file) as container:
        weight = container.load(name).dequantize().astype(np.float64)
        added = container.bias(container.entry(name)) if bias else None
    return x.astype(np.float64) @ weight.T + (0 if added is None else added)


def test_one_tensor_with_its_bias(
    packed_file: Path, tmp_path: Path, rng: np.random.Generator, qcs4w: CommandLine
) -> None:
    """A nameless input runs the tensor that is asked for; the bias of the file is added, unless it is not wanted."""
    x = rng.standard_normal((2, 3, 33), np.float32)
    np.save(tmp_path / "x.npy", x)
    result = qcs4w("run", packed_file, "-x", tmp_path / "x.npy", "-o", tmp_path / "y.npy", "--tensor", "layers.0.fc")
    assert result.code == 0
    assert "adapter: " in result.err
    y = np.load(tmp_path / "y.npy")
    assert y.shape == (2, 3, 12)
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, expected(packed_file, "layers.0.fc.weight", x), rtol=0, atol=1e-4)
    arguments = ("-x", tmp_path / "x.npy", "-o", tmp_path / "y.npy", "--tensor", "layers.0.fc", "--no-bias", "--force")
    document = qcs4w("run", packed_file, *arguments, "--json").document
    assert document["results"][0]["bias"] is False
    plain = expected(packed_file, "layers.0.fc.weight", x, bias=False)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), plain, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("suffix", "dtype"),
    [(s, d) for s in (".npz", ".safetensors", ".pt") for d in ("f32", "f16", "bf16") if (s, d) != (".npz", "bf16")],
)  # NumPy has no bfloat16
def test_all_tensors_that_the_input_names(
    suffix: str, dtype: str, packed_file: Path, tmp_path: Path, rng: np.random.Generator, qcs4w: CommandLine
) -> None:
    """An input file with names runs each tensor named in it, in any of the formats and float types."""
    names = {"layers.0.fc.weight": (5, 33), "layers.1.fc": (4, 2, 12)}
    torch_type = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    x = {n: torch.from_numpy(rng.standard_normal(s, np.float32)).to(torch_type) for n, s in names.items()}
    path = tmp_path / f"x{suffix}"
    if suffix == ".pt":
        torch.save(x, path)
    elif suffix == ".safetensors":
        from safetensors.torch import save_file as save_torch

        save_torch(x, path)
    else:
        np.savez(path, **{n: t.numpy() for n, t in x.items()})
    out = tmp_path / f"y{suffix}"
    result = qcs4w("run", packed_file, "-x", path, "-o", out, "--json")
    assert [r["tensor"] for r in result.document["results"]] == ["layers.0.fc.weight", "layers.1.fc.weight"]
    if suffix == ".pt":
        y = {n: t.numpy() for n, t in torch.load(out).items()}
    else:
        y = dict(load_file(out) if suffix == ".safetensors" else np.load(out))
    assert set(y) == set(names)
    for name, tensor in x.items():
        full = name if name.endswith(".weight") else f"{name}.weight"
        want = expected(packed_file, full, tensor.float().numpy())
        np.testing.assert_allclose(y[name], want, rtol=0, atol=1e-4)


def test_several_tensors_on_one_input(packed_file: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """--tensor repeats; what the input names besides is said, and --repeat runs each more than once."""
    names = ("layers.1.fc", "layers.0.fc")
    np.savez(
        tmp_path / "x.npz",
        **{"layers.1.fc": np.ones((1, 12), "f4"), "layers.0.fc": np.ones((1, 33), "f4"), "typo": np.ones(2)},
    )
    arguments = ("run", packed_file, "-x", tmp_path / "x.npz", "-o", tmp_path / "y.npz", "--repeat", "3")
    result = qcs4w(*arguments)
    assert "no packed tensor is named 'typo'" in result.err
    assert qcs4w(*arguments, "--force", "--json").document["unused_inputs"] == ["typo"]
    asked = [part for name in names for part in ("--tensor", name)]
    document = qcs4w(*arguments, "--force", "--json", *asked).document
    assert [r["tensor"] for r in document["results"]] == [f"{name}.weight" for name in names]
    assert set(np.load(tmp_path / "y.npz")) == set(names)


def test_times_are_told_apart(packed_file: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """Upload, kernel (by the GPU's clock) and readback are reported each by itself."""
    np.save(tmp_path / "x.npy", np.ones((1, 12), np.float32))
    arguments = ("run", packed_file, "-x", tmp_path / "x.npy", "--tensor", "layers.1.fc")
    (result,) = qcs4w(*arguments, "--json").document["results"]
    assert result["kernel_ms"] is None or result["kernel_ms"] > 0
    assert result["readback_ms"] > 0
    table = qcs4w(*arguments).out
    assert "upload weights ms" in table
    assert "kernel ms" in table


def test_streams(packed_file: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    """`-x - -o -` reads a .npy on stdin and writes one on stdout; the report goes to stderr."""
    import io
    import subprocess

    from command_line import command

    x = rng.standard_normal((3, 12), np.float32)
    stream = io.BytesIO()
    np.save(stream, x)
    done = subprocess.run(
        command("run", packed_file, "-x", "-", "-o", "-", "--tensor", "layers.1.fc"),
        input=stream.getvalue(),
        capture_output=True,
        check=True,
    )
    y = np.load(io.BytesIO(done.stdout))
    np.testing.assert_allclose(y, expected(packed_file, "layers.1.fc.weight", x), rtol=0, atol=1e-4)
    assert b"linear_" in done.stderr


@pytest.mark.parametrize(
    ("array", "options", "words"),
    [
        (np.ones((2, 12), np.float32), [], "choose one with --tensor"),
        (np.ones((2, 13), np.float32), ["--tensor", "layers.1.fc"], "expected [..., 12]"),
        (np.ones((0, 12), np.float32), ["--tensor", "layers.1.fc"], "at least one row"),
        (np.float32(1), ["--tensor", "layers.1.fc"], "expected floats of shape"),
        (np.ones((2, 12), np.int32), ["--tensor", "layers.1.fc"], "expected floats"),
        (np.full((2, 12), np.nan, np.float32), ["--tensor", "layers.1.fc"], "nan at row 0, column 0"),
        (np.full((2, 12), 1e300), ["--tensor", "layers.1.fc"], "beyond float32"),
        (np.ones((2, 12), np.float32), ["--tensor", "layers.7.fc"], "did you mean"),
        (np.ones((2, 12), np.float32), ["--tensor", "embed_tokens.weight"], "not packed"),
        (np.ones((2, 12), np.float32), ["--tensor", "layers.1.fc", "-o", "y.txt"], "suffix '.txt'"),
    ],
    ids=["which", "K", "no rows", "rank 0", "integers", "nan", "beyond f32", "unknown", "not packed", "suffix"],
)
def test_inputs_that_do_not_fit(
    array: np.ndarray, options: list[str], words: str, packed_file: Path, tmp_path: Path, qcs4w: CommandLine
) -> None:
    """An input of the wrong shape, type or value, or for no known tensor, is refused with what was expected."""
    np.save(tmp_path / "x.npy", array)
    assert words in qcs4w.refused("run", packed_file, "-x", tmp_path / "x.npy", *options)


@pytest.mark.parametrize("command", [["run"], ["verify"]], ids=lambda c: c[0])
@pytest.mark.parametrize("shape", ["(100000000000, 12)", "(3, 100000000000)"], ids=["rows", "columns"])
def test_a_huge_input_is_refused_before_it_is_read(
    command: list[str], shape: str, packed_file: Path, tmp_path: Path, qcs4w: CommandLine
) -> None:
    """An input that cannot fit, a terabyte of holes, is refused from its header alone."""
    from making import npy_header

    path = tmp_path / "x.npy"
    head = npy_header(shape)
    size = int(np.prod([int(part) for part in shape.strip("()").split(",")])) * 4
    path.write_bytes(head)
    with path.open("r+b") as file:
        file.truncate(len(head) + size)
    result = qcs4w(*command, packed_file, "-x", path, "--tensor", "layers.1.fc")
    assert result.code == 2
    assert "max-storage-buffer-binding-size" in result.err or "expected [..., 12]" in result.err


def test_names_that_the_output_cannot_hold(tmp_path: Path, qcs4w: CommandLine) -> None:
    """A name too long for a .npz is refused before anything is computed."""
    from qcs4w_packer import pack_weight, save_container

    path = tmp_path / "long.safetensors"
    save_container(path, {"x" * 70_000: pack_weight(np.ones((2, 4), np.float32))})
    np.save(tmp_path / "x.npy", np.ones((1, 4), np.float32))
    assert "cannot hold" in qcs4w.refused("run", path, "-x", tmp_path / "x.npy", "-o", tmp_path / "y.npz")
    assert qcs4w("run", path, "-x", tmp_path / "x.npy", "-o", tmp_path / "y.npy").code == 0


def test_no_array_of_that_name(packed_file: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """An input file whose names fit no packed tensor is refused, with a name that would fit."""
    save_file({"a": np.ones((1, 12), np.float32), "b": np.ones((1, 12), np.float32)}, tmp_path / "x.safetensors")
    error = qcs4w.refused("run", packed_file, "-x", tmp_path / "x.safetensors")
    assert "no array is named after a packed tensor" in error


def test_an_output_is_checked_before_the_work(packed_file: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """An output that is there is not replaced, nor is the input; several outputs do not fit one .npy."""
    np.save(tmp_path / "x.npy", np.ones((1, 12), np.float32))
    (tmp_path / "y.npy").write_bytes(b"old")
    arguments = ("run", packed_file, "-x", tmp_path / "x.npy", "--tensor", "layers.1.fc", "-o")
    assert "exists already" in qcs4w.refused(*arguments, tmp_path / "y.npy")
    assert "sources are never changed" in qcs4w.refused(*arguments, tmp_path / "x.npy", "--force")
    assert (tmp_path / "y.npy").read_bytes() == b"old"
    np.savez(
        tmp_path / "x.npz", **{"layers.0.fc": np.ones((1, 33), np.float32), "layers.1.fc": np.ones((1, 12), np.float32)}
    )
    assert "holds one array" in qcs4w.refused("run", packed_file, "-x", tmp_path / "x.npz", "-o", tmp_path / "z.npy")


def test_a_damaged_tensor_is_not_run(packed_file: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """A tensor whose digest does not match is refused by name."""
    flip(packed_file, "layers.1.fc.weight")
    np.save(tmp_path / "x.npy", np.ones((1, 12), np.float32))
    error = qcs4w.refused("run", packed_file, "-x", tmp_path / "x.npy", "--tensor", "layers.1.fc")
    assert "tensor 'layers.1.fc.weight': the packed bytes have sha256" in error


def test_a_software_adapter_is_no_gpu(packed_file: Path, tmp_path: Path, gpu: object) -> None:
    """--require-gpu fails on a software adapter, and QCS4W_ADAPTER chooses one."""
    from qcs4w_gpu import list_adapters

    np.save(tmp_path / "x.npy", np.ones((1, 12), np.float32))
    arguments = ("run", packed_file, "-x", tmp_path / "x.npy", "--tensor", "layers.1.fc")
    for adapter in list_adapters():
        done = process(*arguments, "--require-gpu", QCS4W_ADAPTER=str(adapter.index))
        assert done.code == (2 if adapter.is_software else 0)
    assert process(*arguments, QCS4W_ADAPTER="99").code == 2


def flip(path: Path, name: str) -> None:
    """Flip one bit of a packed tensor in a file."""
    with Container(path) as container:
        place = container.place(container.entry(name))[1]
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)
