"""Checkpoints as transformers writes them: packed, verified, unpacked, and loaded by transformers again.

What the loaded model must hold is made without our code: the stored tensors, as the safetensors package reads them,
quantized and dequantized by torch where they are linear weights, saved again and loaded by transformers too.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from command_line import CommandLine
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoConfig,
    GptOssConfig,
    GraniteMoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
    Starcoder2Config,
)

SMALL = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ODD = {"hidden_size": 33, "intermediate_size": 37, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6}
LARGE = {"hidden_size": 144, "intermediate_size": 300, "num_attention_heads": 4, "num_key_value_heads": 2}
GPT2 = {
    "vocab_size": 61,
    "n_positions": 32,
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Case:
    """A model, and which of its stored tensors are linear weights.

    Attributes:
        config: of the model.
        packed: fits the names of what is to be packed, [out, in].
        turned: fits those of the packed that are stored [in, out].
        options: of `pack`.
        dtype: of the weights.
        fp8: whether the linear weights are stored as fp8 with a scale for each block of 128×128.
    """

    config: PretrainedConfig
    packed: str
    turned: str = "-"
    options: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32
    fp8: bool = False


CONV1D = r".*\.(c_attn|c_proj|c_fc)\.weight"
LINEARS = r".*_proj\.weight"

CASES = {
    "gpt2": Case(GPT2Config(**GPT2), CONV1D, turned=CONV1D),
    "gpt2, embedding and head": Case(
        GPT2Config(**GPT2), rf"{CONV1D}|.*\.wte\.weight", turned=CONV1D, options=("--also", "*.wte.weight")
    ),
    "starcoder2": Case(Starcoder2Config(**SMALL), rf"{LINEARS}|{CONV1D}"),
    "llama": Case(LlamaConfig(**SMALL), LINEARS),
    "llama, bf16, a head": Case(
        LlamaConfig(**SMALL), rf"{LINEARS}|lm_head\.weight", options=("--also", "lm_head"), dtype=torch.bfloat16
    ),
    "llama, tied": Case(LlamaConfig(**SMALL, tie_word_embeddings=True), LINEARS),
    "llama, tied, embedding and head": Case(
        LlamaConfig(**SMALL, tie_word_embeddings=True),
        rf"{LINEARS}|.*embed_tokens\.weight",
        options=("--also", "re:.*embed_tokens.*"),
    ),
    "llama, odd": Case(LlamaConfig(**SMALL | ODD), LINEARS, dtype=torch.float16),
    "llama, fp8": Case(LlamaConfig(**SMALL | LARGE), LINEARS, fp8=True),
    "mixtral": Case(
        MixtralConfig(**SMALL, num_local_experts=3, num_experts_per_tok=2), rf"{LINEARS}|.*\.experts\.\d+\.w\d\.weight"
    ),
    "qwen3_moe": Case(
        Qwen3MoeConfig(**SMALL, moe_intermediate_size=20, num_experts=3, num_experts_per_tok=2, head_dim=6), LINEARS
    ),
    "granite_moe": Case(
        GraniteMoeConfig(**SMALL, num_local_experts=3, num_experts_per_tok=2),
        rf"{LINEARS}|.*(input|output)_linear\.weight|.*experts\..*_proj",
    ),
    "llama4": Case(
        Llama4TextConfig(**SMALL, intermediate_size_mlp=40, num_local_experts=3, head_dim=6, moe_layers=[0]),
        rf"{LINEARS}|.*experts\..*_proj",
        turned=r".*experts\.(gate_up|down)_proj",
    ),
    "gpt_neo": Case(
        GPTNeoConfig(
            vocab_size=61,
            hidden_size=24,
            num_layers=2,
            num_heads=2,
            attention_types=[[["global", "local"], 1]],
            max_position_embeddings=32,
            bos_token_id=1,
            eos_token_id=2,
        ),
        rf"{LINEARS}|{CONV1D}",
    ),
    "gpt_oss": Case(
        GptOssConfig(**SMALL, num_local_experts=3, num_experts_per_tok=2, head_dim=6),
        rf"{LINEARS}|.*experts\..*_proj",
        turned=r".*experts\..*_proj",
    ),
}


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Quantize to 4 bits and back, [..., N, K], by the rule of DESIGN in torch alone."""
    wide = weight.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 7.5).clamp_min(2.0**-23)
    return (wide * (1 / scale)).round().clamp(-8, 7) * scale


def as_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the fp8 codes, a scale for each block of 128×128, and what both together mean."""
    rows, columns = weight.shape
    tiles = -(-rows // 128), -(-columns // 128)
    scale = torch.empty(tiles)
    for r in range(tiles[0]):
        for c in range(tiles[1]):
            scale[r, c] = weight[r * 128 : r * 128 + 128, c * 128 : c * 128 + 128].abs().max() / 448
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    codes = (weight / wide).to(torch.float8_e4m3fn)
    return codes, scale, codes.float() * wide


def stored(folder: Path) -> dict[str, tuple[str, torch.Tensor]]:
    """All tensors of a folder with the name of their file, by the safetensors package."""
    return {
        name: (path.name, tensor)
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def save(folder: Path, tensors: dict[str, tuple[str, torch.Tensor]]) -> None:
    """Write tensors into the files that they belong to, and the index where there is one."""
    for file in {file for file, _ in tensors.values()}:
        save_file({n: t.contiguous() for n, (f, t) in tensors.items() if f == file}, folder / file, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        document = json.loads(index.read_text())
        document["weight_map"] = {name: file for name, (file, _) in tensors.items()}
        index.write_text(json.dumps(document))


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """What transformers loads, once it is known that nothing was missing, unexpected or of another shape."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert {key: found for key, found in info.items() if found} == {}
    tensors: dict[str, torch.Tensor] = model.state_dict()
    return tensors


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_checkpoint_comes_back(case: Case, tmp_path: Path, qcs4w: CommandLine) -> None:
    """pack, verify, unpack, from_pretrained: exactly the dequantized weights, and all else as it was."""
    torch.manual_seed(0)
    source, expected, packed, unpacked = (tmp_path / name for name in ("source", "expected", "packed", "unpacked"))
    model = AutoModelForCausalLM.from_config(case.config, dtype=case.dtype)
    for folder in (source, expected):
        model.save_pretrained(folder, max_shard_size="600KB" if case.fp8 else "30KB")
    tensors = stored(source)
    linears = {name for name in tensors if re.fullmatch(case.packed, name)}
    assert linears
    meant = dict(tensors)
    for name in linears:
        file, tensor = tensors[name]
        if case.fp8:
            codes, scale, tensor = as_fp8(tensor)
            tensors |= {name: (file, codes), f"{name}_scale_inv": (file, scale)}
        is_turned = re.fullmatch(case.turned, name)
        back = rounded(tensor.mT).mT if is_turned else rounded(tensor)
        assert not torch.equal(back, tensor.float())
        meant[name] = (file, back)
    if case.fp8:
        save(source, tensors)
        config = json.loads((source / "config.json").read_text())
        config["quantization_config"] = {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        }  # fmt: skip
        (source / "config.json").write_text(json.dumps(config))
    save(expected, meant)
    config = json.loads((expected / "config.json").read_text())
    (expected / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))

    document = qcs4w("pack", source, "-o", packed, *case.options, "--json").document
    assert {
        re.sub(r"(experts\.\w+|linear\.weight)\.\d+$", r"\1", each["tensor"]) for each in document["packed"]
    } == linears
    assert {each["transposed"] for each in document["packed"] if re.match(case.turned, each["tensor"])} <= {True}
    assert qcs4w("verify", packed, "--source", source).code == 0
    assert qcs4w("unpack", packed, "-o", unpacked).code == 0
    found, right = loaded(unpacked), loaded(expected)
    assert found.keys() == right.keys()
    for name, tensor in right.items():
        assert torch.equal(found[name].float(), tensor.float()), name


def test_tied_tensors_of_a_pickle_are_packed_once(tmp_path: Path, qcs4w: CommandLine) -> None:
    """A .bin holds the head and the embedding as one memory: one packed tensor, and both names are loaded again."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, tie_word_embeddings=True))
    source, packed, unpacked = tmp_path / "source", tmp_path / "packed", tmp_path / "unpacked"
    model.config.save_pretrained(source)
    torch.save(model.state_dict(), source / "pytorch_model.bin")
    document = qcs4w(
        "pack", source, "-o", packed, "--include", "*embed_tokens*", "--also", "lm_head", "--json"
    ).document
    (tensor,) = document["packed"]
    assert {tensor["tensor"], *tensor["aliases"]} == {"model.embed_tokens.weight", "lm_head.weight"}
    assert qcs4w("verify", packed, "--source", source).code == 0
    assert qcs4w("unpack", packed, "-o", unpacked).code == 0
    found = loaded(unpacked)
    for name, before in model.state_dict().items():
        is_packed = name in {"model.embed_tokens.weight", "lm_head.weight"}
        assert torch.equal(found[name], rounded(before) if is_packed else before), name
