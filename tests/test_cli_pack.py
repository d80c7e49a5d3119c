"""The pack command."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from command_line import CommandLine, child_process, on_a_terminal, process
from making import raw_safetensors, save_floats, save_folder, write_safetensors
from packed_folders import write_index
from safetensors import safe_open
from safetensors.numpy import save_file


def test_a_checkpoint_becomes_a_container(checkpoint: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """Two linears are packed, the rest is copied, and the safetensors package opens the result."""
    out = tmp_path / "packed.safetensors"
    result = qcs4w("pack", checkpoint, "-o", out)
    assert result.code == 0
    assert "packed 2 tensors, 3 others copied" in result.out
    with safe_open(out, "np") as file:
        assert set(file.keys()) == {
            *(f"layers.{i}.fc.weight.qcs4w_{part}" for i in (0, 1) for part in ("packed", "scale", "shape")),
            *("embed_tokens.weight", "layers.0.fc.bias", "layers.0.norm.weight"),
        }
        assert file.get_tensor("layers.0.fc.weight.qcs4w_shape").tolist() == [12, 33]


def test_the_table_says_what_it_cost(checkpoint: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """Each packed tensor has its N, K, bytes before and after, relative error and SNR; warnings stand beside it."""
    result = qcs4w("pack", checkpoint, "-o", tmp_path / "p.safetensors", "--json")
    first, second = result.document["packed"]
    assert (first["out_features"], first["in_features"]) == (12, 33)
    assert (first["source_nbytes"], first["packed_nbytes"]) == (12 * 33 * 4, 12 * 17 + 12 * 4)
    assert 0.05 < first["quantization_error"]["relative"] < 0.2
    assert first["warnings"] == []
    assert second["source_dtype"] == "F16"
    plain = qcs4w("pack", checkpoint, "-o", tmp_path / "q.safetensors").out
    assert "1.5 KiB → 252 B" in plain
    assert f"{first['quantization_error']['snr_db']:.1f} dB" in plain


def test_warnings_are_named(tmp_path: Path, qcs4w: CommandLine) -> None:
    """Rows at the scale floor, and a size that ExecuTorch's WebGPU runtime refuses, are said per tensor."""
    np.save(tmp_path / "w.npy", np.array([[1.0, 2.0], [1e-8, 0.0], [0.0, 0.0]], np.float32))
    result = qcs4w("pack", tmp_path / "w.npy", "-o", tmp_path / "p.safetensors", "--json")
    (tensor,) = result.document["packed"]
    assert tensor["floored_rows"] == 1
    assert any("scale floor" in text for text in tensor["warnings"])
    assert any("ExecuTorch's WebGPU runtime will refuse" in text for text in tensor["warnings"])


def test_a_dry_run_lists_everything_and_writes_nothing(checkpoint: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """--dry-run shows what would be packed and what not and why, with sizes, and writes nothing."""
    before = sorted(tmp_path.iterdir())
    result = qcs4w("pack", checkpoint, "--dry-run")
    assert result.code == 0
    for words in ("layers.0.fc.weight", "linear weight", "embed_tokens.weight", "embedding", "norm", "would pack 2"):
        assert words in result.out
    assert sorted(tmp_path.iterdir()) == before
    document = qcs4w("pack", checkpoint, "-n", "--json").document
    assert document["dry_run"] is True
    assert document["packed"][0]["quantization_error"] is None
    real = qcs4w("pack", checkpoint, "-o", tmp_path / "real.safetensors", "--json").document
    assert real["output_nbytes"] == document["output_nbytes"] == (tmp_path / "real.safetensors").stat().st_size


def test_nothing_is_replaced_without_force(checkpoint: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """An output that is there stays as it is, and --force replaces it."""
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"precious")
    assert "exists already" in qcs4w.refused("pack", checkpoint, "-o", out)
    assert out.read_bytes() == b"precious"
    assert qcs4w("pack", checkpoint, "-o", out, "--force").code == 0
    assert out.stat().st_size > 100


def test_the_source_is_never_the_output(checkpoint: Path, qcs4w: CommandLine) -> None:
    """Even with --force a file is not packed onto itself."""
    before = checkpoint.read_bytes()
    assert "sources are never changed" in qcs4w.refused("pack", checkpoint, "-o", checkpoint, "--force")
    assert checkpoint.read_bytes() == before


@pytest.mark.parametrize(
    ("options", "packed"),
    [
        (["--tensor", "layers.1.fc.weight"], ["layers.1.fc.weight"]),
        (["--include", "embed*"], ["embed_tokens.weight"]),
        (["--include", "layers.*", "--exclude", "*.0.*"], ["layers.1.fc.weight"]),
        (["--exclude", "layers.1.*"], ["layers.0.fc.weight"]),
        (["--transpose", "layers.1.fc.weight"], ["layers.0.fc.weight", "layers.1.fc.weight"]),
    ],
    ids=["tensor", "include", "include and exclude", "exclude", "transpose"],
)
def test_selection(options: list[str], packed: list[str], checkpoint: Path, qcs4w: CommandLine) -> None:
    """--tensor, --include, --exclude and --transpose choose what is packed."""
    document = qcs4w("pack", checkpoint, "-n", "--json", *options).document
    if options[0] == "--transpose":
        assert [t["transposed"] for t in document["packed"]] == [False, True]
        assert document["packed"][1]["out_features"] == 12
    assert [t["tensor"] for t in document["packed"]] == packed


def test_the_names_of_near_misses_are_suggested(checkpoint: Path, qcs4w: CommandLine) -> None:
    """A tensor or pattern that is not there brings the closest names."""
    assert "did you mean 'layers.0.fc.weight'" in qcs4w.refused(
        "pack", checkpoint, "-n", "--tensor", "layers.0.fc.weigth"
    )
    assert "matches no tensor" in qcs4w.refused("pack", checkpoint, "-n", "--exclude", "blocks.*")


def test_packed_only_leaves_the_rest_out(checkpoint: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """--packed-only writes packed tensors only."""
    out = tmp_path / "p.safetensors"
    assert "3 others left out" in qcs4w("pack", checkpoint, "-o", out, "--packed-only").out
    with safe_open(out, "np") as file:
        assert all("qcs4w_" in name for name in file.keys())  # noqa: SIM118 - no iteration over a safe_open


def test_what_cannot_be_carried_is_said(tmp_path: Path, qcs4w: CommandLine) -> None:
    """What safetensors cannot hold is left out with a warning, on stderr and in the JSON."""
    np.savez(tmp_path / "w.npz", **{"fc.weight": np.ones((2, 4), np.float32), "labels": np.array(["a", "b"])})
    result = qcs4w("pack", tmp_path / "w.npz", "-o", tmp_path / "p.safetensors")
    assert result.code == 0
    assert "not in the output: labels" in result.err
    again = qcs4w("pack", tmp_path / "w.npz", "-n", "--json").document
    assert "labels" in again["left_out"][0]


def test_a_bad_weight_leaves_the_old_output(tmp_path: Path, qcs4w: CommandLine) -> None:
    """NaN in a weight: tensor, row and column are named, and the old output is as it was."""
    weight = np.ones((4, 6), np.float32)
    weight[2, 5] = np.nan
    save_file({"fc.weight": weight}, tmp_path / "w.safetensors")
    (tmp_path / "out.safetensors").write_bytes(b"old")
    error = qcs4w.refused("pack", tmp_path / "w.safetensors", "-o", tmp_path / "out.safetensors", "--force")
    assert "tensor 'fc.weight' holds nan at row 2, column 5" in error
    assert (tmp_path / "out.safetensors").read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_container_is_not_packed_again(packed_file: Path, qcs4w: CommandLine) -> None:
    """Packing a packed file is refused by name."""
    assert "is a qcs4w container already" in qcs4w.refused("pack", packed_file, "-n")


def test_the_output_is_named_as_what_it_is(checkpoint: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """An output with another suffix than .safetensors is refused, with the right name as the hint."""
    assert "p.safetensors" in qcs4w.refused("pack", checkpoint, "-o", tmp_path / "p.npz")


def test_fp8_is_dequantized_and_its_scale_left_out(tmp_path: Path, qcs4w: CommandLine) -> None:
    """The dry run and the JSON say what is used up, and `verify --source` and `inspect --against` read the floats."""
    weight = np.random.default_rng(0).integers(0, 0x7E, (5, 7), np.uint8)
    tensors = {"a.weight": ("F8_E4M3", (5, 7), weight.tobytes()), "a.weight_scale": ("F32", (), b"\0\0\0\x3c")}
    source = write_safetensors(tmp_path / "m.safetensors", tensors)
    assert "used up: scale of a.weight" in qcs4w("pack", source, "--dry-run").out
    out = tmp_path / "p.safetensors"
    document = qcs4w("pack", source, "-o", out, "--json").document
    assert document["packed"][0]["source_dtype"] == "F8_E4M3"
    assert document["packed"][0]["fp8_scale"] == "a.weight_scale"
    assert document["carried"][0] | {"nbytes": 4} == {
        "tensor": "a.weight_scale", "dtype": "F32", "shape": [], "nbytes": 4,
        "reason": "used up: scale of a.weight", "left_out": True, "shard": None,
    }  # fmt: skip
    assert "source equal" in qcs4w("verify", out, "--source", source).out
    assert qcs4w("inspect", out, "--against", source).code == 0
    lone = write_safetensors(tmp_path / "lone.safetensors", {"a.weight": tensors["a.weight"]})
    assert "has no scale: none of a.weight_scale_inv, " in qcs4w.refused("pack", lone, "--dry-run")


def test_patterns_and_additions(checkpoint: Path, qcs4w: CommandLine) -> None:
    """--also adds to the default choice; `re:` stands wherever a glob does."""
    document = qcs4w("pack", checkpoint, "-n", "--json", "--also", "re:embed.*", "--exclude", r"re:.*\.1\..*").document
    assert [tensor["tensor"] for tensor in document["packed"]] == ["embed_tokens.weight", "layers.0.fc.weight"]
    assert "unterminated character set at character 2" in qcs4w.refused("pack", checkpoint, "-n", "--also", "re:a[b")


def test_what_is_turned_round_unasked_is_said(tmp_path: Path, qcs4w: CommandLine) -> None:
    """GPT-2's config.json settles the direction: a note on stderr, and a text in the JSON."""
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    weight = np.arange(12, dtype=np.float32).reshape(2, 6)
    save_file({f"h.{i}.mlp.c_fc.weight": weight for i in (0, 1)}, folder / "model.safetensors")
    result = qcs4w("pack", folder, "-o", tmp_path / "p")
    said = "transposed: gpt2's Conv1D stores [in, out]: 'h.0.mlp.c_fc.weight' and 1 more"
    assert said in result.err
    document = qcs4w("pack", folder, "-n", "--json").document
    assert document["notices"] == [said]
    assert [(t["out_features"], t["in_features"]) for t in document["packed"]] == [(6, 2), (6, 2)]
    assert "source equal" in qcs4w("verify", tmp_path / "p", "--source", folder).out
    (folder / "config.json").write_text("{}")
    assert "has the name of a GPT-2 Conv1D" in qcs4w.refused("pack", folder, "-n")


LAYERS = 25


@pytest.fixture
def llama(tmp_path: Path, rng: np.random.Generator) -> Path:
    """A checkpoint of two shards with 50 linears, a norm a layer and an embedding, and files beside them."""
    folder = tmp_path / "llama"
    folder.mkdir()
    tensors = {"model.embed_tokens.weight": rng.standard_normal((10, 6))}
    for layer in range(LAYERS):
        for name, shape in (("self_attn.q_proj", (4, 6)), ("mlp.up_proj", (5, 6)), ("input_layernorm", (6,))):
            tensors[f"model.layers.{layer}.{name}.weight"] = rng.standard_normal(shape)
    names = list(tensors)
    for number, part in enumerate((names[:40], names[40:]), 1):
        save_floats(folder / f"model-{number:05}-of-00002.safetensors", {name: tensors[name] for name in part})
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "picture.png").write_bytes(b"")
    return write_index(folder)


def test_a_log_has_a_line_for_each_tensor(checkpoint: Path, llama: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """Where stderr is no terminal each packed tensor is told once, with its number, shape, size, error and shard."""
    lines = qcs4w("pack", checkpoint, "-o", tmp_path / "p.safetensors").err.splitlines()
    assert [line[:31] for line in lines] == ["1/2 layers.0.fc.weight 12 × 33 ", "2/2 layers.1.fc.weight 8 × 12 F"]
    assert "12 × 33 F32 → 252 B, error " in lines[0]
    assert lines[0].endswith(" %")
    lines = qcs4w("pack", llama, "-o", tmp_path / "packed").err.splitlines()
    told = [line for line in lines if "/50 " in line]
    assert len(told) == 50
    assert told[0].startswith(" 1/50 model.layers.0.self_attn.q_proj.weight 4 × 6 F32 → 28 B, error ")
    assert told[-1].endswith(", model-00002-of-00002.safetensors")
    assert told[-1].startswith("50/50 ")
    for option in ("--quiet", "--json", "--dry-run"):
        assert "/50 " not in qcs4w("pack", llama, "-o", tmp_path / "packed", "--force", option).err


def test_bars_on_a_terminal(llama: Path, tmp_path: Path) -> None:
    """A terminal gets one bar for all bytes and one for the tensor in hand, both gone at the end; --quiet gets none."""
    drawn = on_a_terminal("pack", llama, "-o", tmp_path / "a")
    assert "packing" in drawn
    assert "50/50" in drawn
    assert " of 6.1 KiB" in drawn
    assert drawn.count("\x1b[?25l") == drawn.count("\x1b[?25h") == 1  # the cursor comes back
    assert "50/50 model" not in drawn  # no log
    assert drawn.rstrip().splitlines()[-1].startswith(f"wrote {tmp_path / 'a'}")
    plain = on_a_terminal("pack", llama, "-o", tmp_path / "b", NO_COLOR="1")
    assert "50/50" in plain
    assert "\x1b[3" not in plain
    quiet = on_a_terminal("pack", llama, "-o", tmp_path / "c", "--quiet")
    assert "50/50" not in quiet
    assert "\x1b[?25l" not in quiet
    dumb = on_a_terminal("pack", llama, "-o", tmp_path / "d", TERM="dumb")
    assert "50/50 model.layers.24.mlp.up_proj.weight" in dumb
    assert "\x1b" not in dumb


def test_many_tensors_are_told_by_file_and_kind(llama: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """The table of a large checkpoint has a row for each shard and for each kind of name; -v has every tensor."""
    result = qcs4w("pack", llama, "-o", tmp_path / "packed")
    rows = [line.split() for line in result.out.splitlines()]
    assert ["model-00001-of-00002.safetensors", "26", "14", "3.3", "KiB", "→"] in [row[:6] for row in rows]
    assert [row[:7] for row in rows if row and row[0].startswith("model.layers.")] == [
        ["model.layers.*.self_attn.q_proj", "25", "4", "×", "6", "700", "B"],
        ["model.layers.*.mlp.up_proj", "25", "5", "×", "6", "875", "B"],
    ]
    document = qcs4w("pack", llama, "-o", tmp_path / "packed", "--force", "--json").document
    errors = {t["tensor"]: t["quantization_error"]["relative"] for t in document["packed"]}
    worst = max(errors, key=errors.__getitem__)
    assert f"largest error {100 * errors[worst]:.1f} %: {worst}" in result.out
    assert "packed 50 tensors, 26 others copied; " in result.out
    assert f"wrote {tmp_path / 'packed'} (2 weight files; beside them 'config.json')" in result.out
    assert "model.layers.17.mlp.up_proj.weight" in qcs4w("pack", llama, "-n", "-v").out


def test_the_dry_run_of_a_large_checkpoint(llama: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """What is skipped is told by kind with its reason, the rest with sizes of files and of the disk; -v lists all."""
    result = qcs4w("pack", llama, "-n", "-o", tmp_path / "packed", "--exclude", "*.mlp.*")
    skipped = [line for line in result.out.splitlines() if line.endswith(("embedding", "norm", "excluded"))]
    assert [line.split()[:2] for line in skipped] == [
        ["model.embed_tokens.weight", "1"],
        ["model.layers.*.mlp.up_proj.weight", "25"],
        ["model.layers.*.input_layernorm.weight", "25"],
    ]
    assert "Warning: not in the output: picture.png (not what a checkpoint needs)" in result.err
    document = qcs4w("pack", llama, "-n", "-o", tmp_path / "packed", "--exclude", "*.mlp.*", "--json").document
    assert f"{document['output_nbytes'] / 1024:.1f} KiB of disk, " in result.err
    assert document["free_nbytes"] > 0
    assert "layers.17.input_layernorm" in qcs4w("pack", llama, "-n", "-v").out


def test_the_document_tells_all(llama: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """Shards with their sizes, where each tensor went, why it was turned round, what lies beside, and the time."""
    out = tmp_path / "packed"
    document = qcs4w("pack", llama, "-o", out, "--json", "--transpose", "*.0.mlp.*").document
    assert {shard["file"]: shard["nbytes"] for shard in document["shards"]} == {
        path.name: path.stat().st_size for path in out.glob("*.safetensors")
    }
    assert sum(shard["packed"] for shard in document["shards"]) == 50
    assert (document["resumed"], document["beside"], document["free_nbytes"]) == (0, ["config.json"], None)
    assert document["elapsed_ms"] > 0
    (turned,) = [tensor for tensor in document["packed"] if tensor["transposed"]]
    assert turned["transposed_why"] == "asked for by --transpose"
    assert document["packed"][-1]["shard"] == document["carried"][-1]["shard"] == "model-00002-of-00002.safetensors"
    assert document["packed"][0]["transposed_why"] is document["packed"][0]["stack"] is None


def test_a_stack_is_told_as_one_kind(tmp_path: Path, rng: np.random.Generator, qcs4w: CommandLine) -> None:
    """Experts name their stack in the JSON, and the summary counts them."""
    source = save_floats(tmp_path / "m.safetensors", {"block.experts.w": rng.standard_normal((45, 2, 4))})
    result = qcs4w("pack", source, "-o", tmp_path / "p.safetensors", "--also", "*")
    assert "packed 45 tensors (45 out of 1 stack of experts), 0 others copied" in result.out
    assert "block.experts.w.*  45  2 × 4" in result.out
    document = qcs4w("pack", source, "-n", "--also", "*", "--json").document
    assert {tensor["stack"] for tensor in document["packed"]} == {"block.experts.w"}


def test_an_interrupted_run_goes_on(tmp_path: Path, qcs4w: CommandLine) -> None:
    """Ctrl-C in the middle: exit code 130 and where the work is kept; the dry run and the next run speak of it."""
    count, nbytes = 8, 4 * 2048 * 4096
    slots = {f"layers.{i}.weight": (i * nbytes, (i + 1) * nbytes) for i in range(count)}
    header = {name: {"dtype": "F32", "shape": [2048, 4096], "data_offsets": place} for name, place in slots.items()}
    source = raw_safetensors(tmp_path / "m.safetensors", header)
    os.truncate(source, source.stat().st_size + count * nbytes)
    out = tmp_path / "p.safetensors"
    with child_process("pack", source, "-o", out) as child:
        assert child.stderr is not None
        assert child.stderr.readline().startswith(b"1/8 layers.0.weight 2048")
        os.kill(child.pid, signal.SIGINT)
        told = child.stderr.read().decode()
        assert child.wait(60) == 130
    assert f"kept in {tmp_path / '.p.safetensors.qcs4w'}: the same command goes on from there" in told
    assert told.endswith("Interrupted.\n")
    assert not out.exists()
    assert "an earlier run has left its work in" in qcs4w("pack", source, "-n", "-o", out).err
    result = process("pack", source, "-o", out)
    assert result.code == 0
    assert "of 8 tensors were finished" in result.err
    assert "1/8" not in result.err  # told by the run that did it
    assert "of the tensors had been finished before" in result.out


def test_a_source_that_is_not_there_is_the_error(tmp_path: Path, qcs4w: CommandLine) -> None:
    """A mistyped folder is named itself; the name of the output, right for a folder, is not what is wrong."""
    told = qcs4w.refused("pack", tmp_path / "chekpoint", "-o", tmp_path / "packed")
    assert f"{tmp_path / 'chekpoint'}: does not exist" in told
    assert "a container is a .safetensors file" not in told


def test_a_limit_below_one_tensor_is_told(checkpoint: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """Where --max-shard-size cannot be kept, a note counts the files; where it can, there is none."""
    told = qcs4w("pack", checkpoint, "-o", tmp_path / "small", "--max-shard-size", "5").err
    assert "5 files of one tensor are larger than --max-shard-size, up to " in told
    assert "larger than --max-shard-size" not in qcs4w("pack", checkpoint, "-n", "--max-shard-size", "1GB").err


def test_what_lies_beside_one_file(tmp_path: Path, rng: np.random.Generator, qcs4w: CommandLine) -> None:
    """A folder of one weight file has its config beside it, not beside them; back from unpack too."""
    folder = save_folder(tmp_path / "one", {"fc.weight": rng.standard_normal((4, 6))})
    for file in folder.glob("model*"):
        if file.suffix == ".safetensors":
            file.rename(folder / "model.safetensors")
        else:
            file.unlink()
    assert "(beside it 'config.json')" in qcs4w("pack", folder, "-o", tmp_path / "packed").out
    assert "(beside it 'config.json')" in qcs4w("unpack", tmp_path / "packed", "-o", tmp_path / "floats").out


def test_a_bin_that_is_no_checkpoint(tmp_path: Path, qcs4w: CommandLine) -> None:
    """The hint offers pack no option that it does not have."""
    (tmp_path / "weights.bin").write_bytes(b"\x80\x04\x95" * 50)
    told = qcs4w.refused("pack", tmp_path / "weights.bin", "-o", tmp_path / "p.safetensors")
    assert "raw packed bytes are read by inspect and verify, with --shape N,K" in told
