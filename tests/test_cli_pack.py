"""The pack command."""

from pathlib import Path

import numpy as np
import pytest
from command_line import CommandLine
from making import write_safetensors
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
    assert document["carried"][0] | {"nbytes": 4} == {
        "tensor": "a.weight_scale", "dtype": "F32", "shape": [], "nbytes": 4,
        "reason": "used up: scale of a.weight", "left_out": True,
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
