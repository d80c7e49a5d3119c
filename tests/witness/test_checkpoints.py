"""Checkpoints of transformers: packed, verified, unpacked, and loaded into their models with just the weights meant."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from command_line import CommandLine
from safetensors import safe_open
from safetensors.torch import save_file

Weights = dict[str, torch.Tensor]


def gpt2() -> Any:
    """Conv1D layers, which store [in, out]; the head is tied."""
    return transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=100, n_positions=20)


def llama(**changes: Any) -> Any:
    """Odd sizes, in bfloat16."""
    sizes = {"hidden_size": 36, "intermediate_size": 65, "num_hidden_layers": 2, "vocab_size": 101}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return transformers.LlamaConfig(**{**sizes, **heads, "dtype": "bfloat16", **changes})


def mixtral() -> Any:
    """Experts that are stored one by one and that the model joins."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 100}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 3}
    return transformers.MixtralConfig(**sizes, **heads)


def gpt_oss() -> Any:
    """Experts in stacks of matrices that are stored [in, out], with biases."""
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 100, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 3, "num_experts_per_tok": 2}
    return transformers.GptOssConfig(**sizes, **heads, layer_types=["full_attention"] * 2)


@dataclass(frozen=True)
class Case:
    """A checkpoint, and how it is packed.

    Attributes:
        config: of the model.
        packed: how many tensors are packed at least.
        options: of pack.
        shard_size: of the files that transformers writes.
        as_bin: write pytorch_model.bin, where tied weights have all their names.
        tied: one of them is packed.
    """

    config: Callable[[], Any]
    packed: int
    options: tuple[str, ...] = ()
    shard_size: str = "50KB"
    as_bin: bool = False
    tied: bool = False


STACKS = r"re:.*experts\.(gate_up|down)_proj"
CASES = {
    "gpt2": Case(gpt2, 8),
    "llama": Case(llama, 14),
    "llama in one file": Case(llama, 14, shard_size="1GB"),
    "llama, tied and packed": Case(
        lambda: llama(tie_word_embeddings=True), 15, ("--also", "*embed_tokens*", "--also", "lm_head*"),
        as_bin=True, tied=True,
    ),
    "mixtral": Case(mixtral, 26),
    "gpt-oss": Case(gpt_oss, 8 + 12, ("--also", STACKS, "--transpose", STACKS)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_there_and_back(case: Case, tmp_path: Path, qcs4w: CommandLine) -> None:
    """A model made of the unpacked folder has (nibble - 8) · scale where weights were packed, all else as it was."""
    torch.manual_seed(4)
    model = transformers.AutoModelForCausalLM.from_config(case.config())
    source = tmp_path / "source"
    model.save_pretrained(source, max_shard_size=case.shard_size)
    if case.as_bin:
        for path in source.glob("model*.safetensors*"):
            path.unlink()
        torch.save(model.state_dict(), source / "pytorch_model.bin")
    expect(case, source, tmp_path, qcs4w)


def test_fp8_blocks(tmp_path: Path, qcs4w: CommandLine) -> None:
    """Weights in fp8 with a scale for each block are dequantized, packed, and come back as floats of a plain model."""
    torch.manual_seed(4)
    config = llama(hidden_size=160, intermediate_size=200, num_attention_heads=2)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "source", max_shard_size="1GB")
    tensors = dict(stored(tmp_path / "source"))
    floats = dict(tensors)
    for name, weight in tensors.items():
        if name.endswith("_proj.weight"):
            scales = torch.rand(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128)) + 0.01
            each = scales.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)[:, : weight.shape[1]]
            floats[name] = (weight.float() / each).to(torch.float8_e4m3fn)
            floats[f"{name}_scale_inv"] = scales
            tensors[name] = floats[name].float() * each
    save_file(floats, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    edit(
        tmp_path / "source" / "config.json",
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
    )
    expect(Case(lambda: config, 14), tmp_path / "source", tmp_path, qcs4w, tensors)


def expect(case: Case, source: Path, tmp_path: Path, qcs4w: CommandLine, tensors: Weights | None = None) -> None:
    """Pack, verify and unpack a folder, load it, and hold the model against one of weights made without qcs4w."""
    packed, floats, made = tmp_path / "packed", tmp_path / "floats", tmp_path / "made"
    document = qcs4w("pack", source, "-o", packed, *case.options, "--json").document
    assert document["exit_code"] == 0, document
    assert len(document["packed"]) >= case.packed, [tensor["tensor"] for tensor in document["packed"]]
    assert any(tensor["aliases"] for tensor in document["packed"]) == case.tied
    verified = qcs4w("verify", packed, "--source", source)
    assert verified.code == 0, verified
    unpacked = qcs4w("unpack", packed, "-o", floats)
    assert unpacked.code == 0, unpacked

    before = tensors or dict(stored(source))
    changed = meant(packed)
    for name, weight in changed.items():
        assert weight.shape == before[name].shape
        assert not torch.equal(weight, before[name].float()), name
    after = before | changed
    made.mkdir()
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in after.items()},
        made / "model.safetensors",
        {"format": "pt"},
    )
    (made / "config.json").write_bytes((source / "config.json").read_bytes())
    edit(made / "config.json", quantization_config=None)

    got, loading = transformers.AutoModelForCausalLM.from_pretrained(floats, output_loading_info=True)
    assert not any(loading[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
    wanted = transformers.AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    assert got.state_dict().keys() == wanted.state_dict().keys()
    for name, tensor in wanted.state_dict().items():
        assert got.state_dict()[name].dtype == tensor.dtype
        assert torch.equal(got.state_dict()[name], tensor), name
    ids = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(got(ids).logits, wanted(ids).logits)


def stored(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Read all weights of a folder."""
    if (folder / "pytorch_model.bin").exists():
        yield from torch.load(folder / "pytorch_model.bin", weights_only=True).items()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 - not a dict


def meant(packed: Path) -> Weights:
    """Return what the packed tensors of a folder stand for, read by the rules of the README alone."""
    tensors: dict[str, np.ndarray] = {}
    said: dict[str, Any] = {}
    for path in packed.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            said |= json.loads(file.metadata()["qcs4w"])["tensors"]
            for name in file.keys():  # noqa: SIM118 - not a dict
                if ".qcs4w_" in name:
                    tensors[name] = file.get_tensor(name)
    assert said
    weights: Weights = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, about in said.items():
        both = np.stack([tensors[f"{name}.qcs4w_packed"] // 16, tensors[f"{name}.qcs4w_packed"] % 16], -1)
        codes = both.reshape(len(both), -1)[:, : tensors[f"{name}.qcs4w_shape"][1]].astype(np.float32) - 8
        weight = torch.from_numpy(codes * tensors[f"{name}.qcs4w_scale"][:, None])
        weight = weight.T if about["transposed"] else weight
        if about.get("stack"):
            stacks.setdefault(about["stack"], {})[int(name.rpartition(".")[2])] = weight
        else:
            weights |= dict.fromkeys([name, *about["aliases"]], weight)
    return weights | {name: torch.stack([parts[i] for i in range(len(parts))]) for name, parts in stacks.items()}


def edit(path: Path, **changes: Any) -> None:
    """Change a config; None takes a key out."""
    config = json.loads(path.read_text()) | changes
    path.write_text(
        json.dumps({key: value for key, value in config.items() if value is not None or key not in changes})
    )
