"""Every command that reads packed files takes a folder of shards as one checkpoint."""

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import CommandLine
from making import poke, save_floats, save_folder
from packed_folders import shard_name, write_container, write_index
from safetensors.numpy import load_file

from qcs4w_packer import PackedLinear, load_packed, pack_weight, save_container
from qcs4w_packer.metadata import PackedEntry

A, B, C = (shard_name(number, 3) for number in (1, 2, 3))
FLOATS = {
    name: np.random.default_rng(seed).standard_normal((12, 16), np.float32)
    for seed, name in enumerate(("a.weight", "b.weight"))
}
BIAS = np.linspace(-1, 1, 12, dtype=np.float32)


def packed(name: str) -> PackedLinear:
    """One of the weights, packed."""
    return pack_weight(FLOATS[name])


def make(folder: Path) -> Path:
    """Make a packed checkpoint of three shards: a weight, another with a tied name, and biases alone."""
    folder.mkdir()
    write_container(folder / A, [(PackedEntry("a.weight", 12, 16), packed("a.weight"))])
    write_container(folder / B, [(PackedEntry("b.weight", 12, 16, aliases=("tied.weight",)), packed("b.weight"))])
    write_container(folder / C, [], {"a.bias": ("F32", (12,), BIAS.tobytes())})
    (folder / "config.json").write_text('{"model_type": "bert"}')
    (folder / "tokenizer.json").write_text('{"a": 1}\n')
    return write_index(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound packed checkpoint."""
    return make(tmp_path / "packed")


def test_inspect_lists_all_shards(folder: Path, qcs4w: CommandLine) -> None:
    """One table, with the shard of each tensor, and what lies beside; exit code 0."""
    result = qcs4w("inspect", folder)
    assert result.code == 0, result
    assert f"{folder}: qcs4w checkpoint of 3 shards, version 1" in result.out
    rows = [line.split() for line in result.out.splitlines() if ".weight" in line]
    assert [(row[0], row[5]) for row in rows] == [("a.weight", A), ("b.weight", B)]
    assert "also tied.weight" in result.out
    assert "beside the weights: config.json, tokenizer.json" in result.out
    document = qcs4w("inspect", folder, "--json").document
    assert (document["shards"], document["beside"]) == ([A, B, C], ["config.json", "tokenizer.json"])
    assert [(t["tensor"], t["shard"], t["digest_ok"]) for t in document["tensors"]] == [
        ("a.weight", A, True),
        ("b.weight", B, True),
    ]
    assert document["nbytes"] == sum((folder / name).stat().st_size for name in (A, B, C))
    assert [t["tensor"] for t in document["carried"]] == ["a.bias"]


def test_inspect_of_one_tensor(folder: Path, qcs4w: CommandLine) -> None:
    """A dump by an alias, and the file in which its offsets count."""
    result = qcs4w("inspect", folder, "--tensor", "tied", "--hex")
    assert result.code == 0, result
    assert f"offsets are in {folder / B}" in result.err
    document = qcs4w("inspect", folder, "--tensor", "tied", "--rows", "3", "--json").document
    (row,) = document["dump"]["rows"]
    start = row["file_offset"]
    assert (folder / B).read_bytes()[start : start + 8] == packed("b.weight").packed[3].tobytes()


def test_inspect_of_one_tensor_looks_at_its_shard_alone(folder: Path, qcs4w: CommandLine) -> None:
    """Faults elsewhere do not matter to a tensor whose shard the index names; an alias is looked for in all."""
    (folder / A).unlink()
    result = qcs4w("inspect", folder, "--tensor", "b.weight", "--json")
    assert (result.code, result.document["shards"]) == (0, [B])
    assert qcs4w("inspect", folder, "--tensor", "b").code == 0
    result = qcs4w("inspect", folder, "--tensor", "tied")
    assert result.code == 1
    assert f"{A} is missing" in result.err
    assert f"{A} is missing" in qcs4w.refused("inspect", folder, "--tensor", "a.weight")


def test_inspect_of_a_single_file_has_no_column(tmp_path: Path, qcs4w: CommandLine) -> None:
    """A folder with model.safetensors is shown as the file is."""
    save_container(tmp_path / "model.safetensors", {"a.weight": packed("a.weight")})
    result = qcs4w("inspect", tmp_path)
    assert result.code == 0
    assert "qcs4w container, version 1" in result.out
    assert "shard" not in result.out


def test_inspect_of_a_broken_folder(folder: Path, qcs4w: CommandLine) -> None:
    """What is missing is told, what is there is shown, and the exit code is 1."""
    (folder / A).unlink()
    result = qcs4w("inspect", folder)
    assert result.code == 1
    assert f"Warning: {A} is missing" in result.err
    assert "b.weight" in result.out
    poke(folder / B, (folder / B).stat().st_size - 1, b"\x5a")
    result = qcs4w("inspect", folder)
    assert result.code == 1
    assert "MISMATCH" in result.out


def test_inspect_against_the_floats(folder: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """The layout of a tensor of a shard is named by the weights of the source."""
    save_floats(tmp_path / "floats.safetensors", FLOATS)
    result = qcs4w("inspect", folder, "--tensor", "b", "--against", tmp_path / "floats.safetensors")
    assert result.code == 0, result


def test_unpack(folder: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """A folder of floats with every name, its index, and what lay beside."""
    result = qcs4w("unpack", folder, "-o", tmp_path / "floats")
    assert result.code == 0, result
    assert "unpacked 2 tensors, 1 other copied" in result.out
    assert f"wrote {tmp_path / 'floats'} (3 weight files" in result.out
    assert "tied weights are written under each of their names, which takes 768 B" in result.err
    stored = load_file(tmp_path / "floats" / B)
    codes = packed("b.weight").codes().astype(np.float32)
    np.testing.assert_array_equal(stored["tied.weight"], codes * packed("b.weight").scales[:, None])
    document = qcs4w(
        "unpack", folder, "-o", tmp_path / "floats", "--force", "--max-shard-size", "1KiB", "--json"
    ).document
    assert document["files"] == [A, B, C]
    assert document["beside"] == ["config.json", "tokenizer.json"]
    assert [t["file"] for t in document["tensors"]] == [A, B]
    assert document["alias_nbytes"] == 768


@pytest.mark.gpu
def test_run_and_verify(folder: Path, tmp_path: Path, qcs4w: CommandLine, gpu: object) -> None:
    """The GPU answers for tensors of any shard, with the bias of another; verify checks all of them under one name."""
    x = np.random.default_rng(9).standard_normal((2, 16), np.float32)
    np.savez(tmp_path / "x.npz", **{"a": x, "tied": x})
    result = qcs4w("run", folder, "-x", tmp_path / "x.npz", "-o", tmp_path / "y.npz")
    assert result.code == 0, result
    y = np.load(tmp_path / "y.npz")
    for name, array, bias in (("a.weight", "a", BIAS), ("b.weight", "tied", np.zeros(12, np.float32))):
        expected = x @ packed(name).dequantize().T + bias
        np.testing.assert_allclose(y[array], expected, rtol=1e-4, atol=1e-4)
    document = qcs4w("verify", folder, "--json").document
    assert document["exit_code"] == 0
    assert [(r["file"], r["tensor"]) for r in document["results"]] == [(str(folder), n) for n in FLOATS]


@pytest.mark.gpu
def test_verify_against_a_folder_of_floats(folder: Path, tmp_path: Path, qcs4w: CommandLine, gpu: object) -> None:
    """--source may be the checkpoint's own folder, sharded otherwise."""
    source = tmp_path / "source"
    source.mkdir()
    for number, (name, weight) in enumerate(FLOATS.items(), 1):
        save_floats(source / shard_name(number, 2), {name: weight})
    write_index(source)
    result = qcs4w("verify", folder, "--source", source)
    assert result.code == 0, result
    save_floats(source / shard_name(2, 2), {"b.weight": -FLOATS["b.weight"]})
    assert qcs4w("verify", folder, "--source", source).code == 1


@pytest.mark.gpu
def test_verify_of_a_broken_folder(folder: Path, tmp_path: Path, qcs4w: CommandLine, gpu: object) -> None:
    """A folder with a missing shard could not be verified: exit code 2, though others are there."""
    make(tmp_path / "sound")
    (folder / C).unlink()
    result = qcs4w("verify", folder, tmp_path / "sound")
    assert result.code == 2
    assert f"{C} is missing" in result.out + result.err


def test_diff(folder: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """Two folders, and a folder and one file of the same tensors."""
    other = make(tmp_path / "other")
    assert qcs4w("diff", folder, other).code == 0
    assert qcs4w("convert", folder, "-o", tmp_path / "one.safetensors").code == 0
    assert qcs4w("diff", folder, tmp_path / "one.safetensors").code == 0
    poke(other / B, (other / B).stat().st_size - 1, b"\x5a")
    result = qcs4w("diff", folder, other, "--json")
    assert result.code == 1
    assert [t["equal"] for t in result.document["tensors"]] == [True, False]


def test_check(folder: Path, qcs4w: CommandLine) -> None:
    """Every tensor of every shard."""
    document = qcs4w("check", folder, "--json").document
    assert [result["tensor"] for result in document["results"]] == ["a.weight", "b.weight"]


def test_convert_to_one_container(folder: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """All shards in one file; what lies beside is told to be left out."""
    result = qcs4w("convert", folder, "-o", tmp_path / "one.safetensors")
    assert result.code == 0
    assert "not in the output: config.json of the folder" in result.err
    loaded = load_packed(tmp_path / "one.safetensors", "tied")
    np.testing.assert_array_equal(loaded.packed, packed("b.weight").packed)
    np.testing.assert_array_equal(load_file(tmp_path / "one.safetensors")["a.bias"], BIAS)


def test_convert_to_a_checkpoint_of_another_tool(folder: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """The compressed-tensors folder has the model's config with the quantization added, and the tokenizer; and back."""
    (folder / "config.json").write_text('{"model_type": "bert", "quantization_config": {"quant_method": "fp8"}}')
    out = tmp_path / "ct"
    result = qcs4w("convert", folder, "--to", "compressed-tensors", "-o", out)
    assert result.code == 0, result
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["quantization_config"]["format"]) == ("bert", "pack-quantized")
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert qcs4w("convert", folder, "--to", "compressed-tensors", "-o", out, "--force").code == 0
    assert qcs4w("diff", folder, out).code == 0
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    error = qcs4w.refused("convert", folder, "--to", "compressed-tensors", "-o", out, "--force")
    assert "holds more than what was written here before" in error


def test_a_folder_of_floats_is_told_to_be_packed_first(
    tmp_path: Path, rng: np.random.Generator, qcs4w: CommandLine
) -> None:
    """Shards that were never packed: the error says what is not there, and the hint how to make it."""
    floats = save_folder(tmp_path / "floats", {f"{i}.weight": rng.standard_normal((4, 6)) for i in range(4)})
    told = qcs4w.refused("unpack", floats, "-o", tmp_path / "out")
    assert "none of its 2 .safetensors files is one that qcs4w pack has made" in told
    assert "float weights are packed by qcs4w pack" in told
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "pytorch_model.bin").write_bytes(b"")
    told = qcs4w.refused("unpack", tmp_path / "torch", "-o", tmp_path / "out")
    assert "holds no packed linears, and no .safetensors file" in told
