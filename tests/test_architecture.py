"""What config.json decides, and what it does not; no data is read."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qcs4w_packer import Qcs4wError, Request, SelectionError, UnknownTensorError
from qcs4w_packer.architecture import tied_names
from qcs4w_packer.select import Choice, choose, notices
from qcs4w_packer.weights import Source, SourceTensor

Shape = tuple[int, ...]


def source_of(tensors: dict[str, Shape], config: dict[str, Any], metadata: dict[str, str] | None = None) -> Source:
    """A folder of these shapes with this config."""

    def fetch(start: int, stop: int) -> bytes:
        raise AssertionError("data was read")

    made = {name: SourceTensor(name, "BF16", shape, fetch) for name, shape in tensors.items()}
    return Source(Path("folder"), made, config=config, metadata=metadata or {})


def packed(source: Source, request: Request | None = None) -> dict[str, Choice]:
    """What is packed, by name."""
    return {choice.tensor.name: choice for choice in choose(source, request) if choice.action == "pack"}


GPT2: dict[str, Shape] = {
    "h.0.attn.c_attn.weight": (6, 18),
    "h.0.attn.c_attn.bias": (18,),
    "h.0.attn.c_proj.weight": (6, 6),
    "h.0.attn.c_proj.bias": (6,),
    "h.0.mlp.c_fc.weight": (6, 24),
    "h.0.crossattention.q_attn.weight": (6, 6),
    "score.weight": (2, 6),
}


@pytest.mark.parametrize("model", ["gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp"])
def test_conv1d_is_turned_with_a_notice(model: str) -> None:
    """The config says that they are [in, out], the square ones too; what is no Conv1D is not turned."""
    found = packed(source_of(GPT2, {"model_type": model}))
    assert {name for name, choice in found.items() if choice.transposed} == {
        n for n in GPT2 if ".c_" in n or "q_" in n
    } - {
        "h.0.attn.c_attn.bias",
        "h.0.attn.c_proj.bias",
    }
    turned = found["h.0.mlp.c_fc.weight"]
    assert (turned.out_features, turned.in_features) == (24, 6)
    assert turned.notice == f"{model}'s Conv1D stores [in, out]"
    assert turned.reason == f"linear weight by name; {model}'s Conv1D stores [in, out]"
    assert found["score.weight"].notice is None
    assert notices(found.values()) == [
        f"transposed: {model}'s Conv1D stores [in, out]: 'h.0.attn.c_attn.weight' and 3 more"
    ]


@pytest.mark.parametrize("model", ["gpt_bigcode", "gpt_neo", "starcoder2", "bridgetower"])
def test_ordinary_linears_of_those_names(model: str) -> None:
    """Models whose c_fc is nn.Linear need no option either."""
    found = packed(source_of({"h.0.mlp.c_fc.weight": (24, 6), "h.0.mlp.c_proj.weight": (6, 24)}, {"model_type": model}))
    assert {choice.transposed for choice in found.values()} == {False}


@pytest.mark.parametrize(
    "config",
    [{}, {"model_type": "qwen"}, {"model_type": ["gpt2"]}, {"model_type": "gpt2", "auto_map": {"AutoModel": "x.Y"}}],
    ids=["none", "unknown", "no text", "own code"],
)
def test_it_is_asked_for_where_the_config_does_not_say(config: dict[str, Any]) -> None:
    """No config, an unknown model, or a model with code of its own."""
    with pytest.raises(SelectionError, match=r"c_fc\.weight' \[6, 6\] has the name of a GPT-2 Conv1D"):
        packed(source_of({"c_fc.weight": (6, 6)}, config))


def test_the_user_has_the_last_word() -> None:
    """--no-transpose beats the config and the file, and --transpose needs no notice."""
    source = source_of(GPT2, {"model_type": "gpt2"})
    found = packed(source, Request(no_transpose=("*.c_fc.weight",), transpose=("*.c_attn.weight",)))
    assert not found["h.0.mlp.c_fc.weight"].transposed
    assert found["h.0.attn.c_attn.weight"].transposed
    assert found["h.0.attn.c_attn.weight"].notice is None
    assert found["h.0.attn.c_proj.weight"].notice


def test_a_bias_against_the_config_is_an_error() -> None:
    """Where the bias shows the other direction, nobody is believed."""
    tensors: dict[str, Shape] = {"h.0.c_fc.weight": (24, 6), "h.0.c_fc.bias": (24,)}
    source = source_of(tensors, {"model_type": "gpt2"})
    with pytest.raises(
        SelectionError, match=r"should be \[in, out\] \(gpt2's Conv1D .* its bias of 24 says \[out, in\]"
    ):
        packed(source)
    assert packed(source, Request(transpose=("*.c_fc.weight",)))
    assert packed(source, Request(no_transpose=("*.c_fc.weight",)))


def test_a_composite_model_has_a_config_for_each_part() -> None:
    """The decoder is GPT-2, the encoder is not."""
    config = {
        "model_type": "vision-encoder-decoder",
        "encoder": {"model_type": "vit"},
        "decoder": {"model_type": "gpt2"},
    }
    found = packed(source_of({"decoder.h.0.c_fc.weight": (6, 24), "encoder.fc.weight": (6, 24)}, config))
    assert found["decoder.h.0.c_fc.weight"].transposed
    assert not found["encoder.fc.weight"].transposed
    with pytest.raises(SelectionError, match="GPT-2 Conv1D"):
        packed(source_of({"encoder.h.0.c_fc.weight": (6, 24)}, config))


@pytest.mark.parametrize("direction", ["out-in", "in-out"])
def test_a_file_may_say_it_itself(direction: Literal["out-in", "in-out"]) -> None:
    """An ONNX initialiser is a linear weight whatever its name, and beats the config."""
    source = source_of({"onnx::MatMul_7": (6, 24), "c_fc.weight": (6, 24)}, {"model_type": "gpt2"})
    source = replace(source, tensors={n: replace(t, direction=direction) for n, t in source.tensors.items()})
    for choice in packed(source).values():
        assert choice.transposed == (direction == "in-out")
        assert choice.notice == ("as the file says" if choice.transposed else None)


MOE = {"hidden_size": 8, "moe_intermediate_size": 12, "intermediate_size": 40, "num_experts": 3}

STACKS: dict[str, tuple[str, Shape, bool]] = {
    "gate and up, out-in": ("mlp.experts.gate_up_proj", (3, 24, 8), False),
    "gate and up, in-out": ("mlp.experts.gate_up_proj", (3, 8, 24), True),
    "down, out-in": ("mlp.experts.down_proj", (3, 8, 12), False),
    "down, in-out": ("mlp.experts.down_proj", (3, 12, 8), True),
    "granite": ("block_sparse_moe.input_linear.weight", (3, 80, 8), False),
}


@pytest.mark.parametrize(("name", "shape", "is_turned"), STACKS.values(), ids=STACKS)
@pytest.mark.parametrize("nested", [False, True])
def test_experts_are_split_where_their_sizes_show_the_direction(
    name: str, shape: Shape, is_turned: bool, nested: bool
) -> None:
    """The sizes of the config tell out from in, for the text part of a larger model too."""
    config = (
        {"model_type": "x", "text_config": {"model_type": "qwen3_moe", **MOE}} if nested else {"model_type": "m", **MOE}
    )
    found = packed(source_of({f"layers.0.{name}": shape}, config))
    assert list(found) == [f"layers.0.{name}.{i}" for i in range(3)]
    for choice in found.values():
        assert (choice.transposed, choice.stack) == (is_turned, f"layers.0.{name}")
        assert choice.out_features in (8, 24, 80)
        assert bool(choice.notice) == is_turned


@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ((3, 24, 8), {}),
        ((4, 24, 8), MOE),
        ((3, 24, 9), MOE),
        ((3, 24, 24), {**MOE, "hidden_size": 24}),
        ((3, 24, 8), {**MOE, "hidden_size": [8]}),
    ],
    ids=["no config", "another number", "other sizes", "square", "hostile"],
)
def test_experts_of_unknown_direction_are_asked_for(shape: Shape, config: dict[str, Any]) -> None:
    """Carried by default; by request they need a direction, since models differ."""
    tensors: dict[str, Shape] = {"mlp.experts.gate_up_proj": shape, "fc.weight": (4, 6)}
    source = source_of(tensors, {"model_type": "m", **config})
    assert list(packed(source)) == ["fc.weight"]
    with pytest.raises(SelectionError, match=r"stacked experts, which some models store \[E, in, out\]") as caught:
        packed(source, Request(also=("*experts*",)))
    pattern = (caught.value.hint or "").split("'")[1]
    assert pattern == "*gate_up_proj"
    for option in ("transpose", "no_transpose"):
        found = packed(source, Request(also=("*experts*",), **{option: (pattern,)}))
        assert found["mlp.experts.gate_up_proj.0"].transposed == (option == "transpose")


def test_square_experts_by_the_model() -> None:
    """gpt-oss has [E, in, out], whatever the sizes."""
    found = packed(
        source_of({"mlp.experts.down_proj": (3, 8, 8)}, {"model_type": "gpt_oss", **MOE, "intermediate_size": 8})
    )
    assert found["mlp.experts.down_proj.0"].transposed


@pytest.mark.parametrize(
    ("embedding", "config"),
    [
        ("model.embed_tokens.weight", {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}),
        ("transformer.wte.weight", {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}),
    ],
)
def test_a_tied_head_is_the_embedding(embedding: str, config: dict[str, Any]) -> None:
    """A head that is not stored is named with what is stored; packing that records both names."""
    source = source_of({embedding: (9, 6), "fc.weight": (4, 6)}, config)
    for request in (
        Request(also=("lm_head.weight",)),
        Request(tensors=("lm_head.weight",)),
        Request(include=("lm_head.weight",)),
    ):
        with pytest.raises(UnknownTensorError, match=rf"it is tied to '{embedding}'") as caught:
            packed(source, request)
        assert f"--also '{embedding}'" in (caught.value.hint or "")
    assert embedding in packed(source, Request(also=(embedding,)))
    assert tied_names(source, embedding) == ["lm_head.weight"]
    assert tied_names(source, "fc.weight") == []


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        ({"model.embed_tokens.weight": (9, 6)}, {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}),
        ({"model.embed_tokens.weight": (9, 6)}, {"architectures": ["LlamaForCausalLM"]}),
        ({"model.embed_tokens.weight": (9, 6)}, {"tie_word_embeddings": True}),
        ({"model.embed_tokens.weight": (9, 6)}, {"architectures": "ForCausalLM", "tie_word_embeddings": True}),
        ({"model.decoder.embed_tokens.weight": (9, 6)},
         {"architectures": ["WhisperForCausalLM"], "model_type": "whisper", "tie_word_embeddings": True}),
        ({"a.embed_tokens.weight": (9, 6), "b.embed_tokens.weight": (9, 6)},
         {"architectures": ["TwoForCausalLM"], "tie_word_embeddings": True}),
        ({"model.embed_tokens.weight": (9, 6), "lm_head.weight": (9, 6)},
         {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}),
    ],
    ids=["untied", "not said", "no head", "no list", "another head", "two embeddings", "stored"],
)  # fmt: skip
def test_ties_are_not_made_up(tensors: dict[str, Shape], config: dict[str, Any]) -> None:
    """No head, another head, two embeddings, or a head that is stored: no alias."""
    source = source_of(tensors, config)
    assert [tied_names(source, name) for name in tensors] == [[]] * len(tensors)


def test_a_name_that_the_metadata_ties() -> None:
    """safetensors.torch.save_model drops one of two tied tensors and notes it."""
    source = source_of({"embed.weight": (9, 6)}, {}, {"head.weight": "embed.weight", "format": "pt"})
    with pytest.raises(UnknownTensorError, match=r"it is tied to 'embed\.weight'"):
        packed(source, Request(also=("head.weight",)))
    assert tied_names(source, "embed.weight") == ["head.weight"]


KEYS = [
    "model_type", "architectures", "tie_word_embeddings", "auto_map", "hidden_size", "moe_intermediate_size",
    "num_experts", "num_local_experts", "intermediate_size", "quantization_config", "compression_config",
    "weight_block_size", "config_groups", "group_0", "weights", "block_structure", "text_config", "encoder", "decoder",
]  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from([1, 2, 3, 4, 128, 1 << 70])
    | st.sampled_from(["", "gpt2", "llama4", "encoder-decoder", "whisper", "XForCausalLM", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6),
    max_leaves=12,
)  # fmt: skip
NAMES = [
    "encoder.c_fc.weight", "c_proj.weight", "c_proj.bias", "mlp.experts.gate_up_proj", "experts.down_proj",
    "lm_head.weight", "input_linear.weight", "model.embed_tokens.weight", "a.weight", "a.weight_scale",
    "a.scale", "a.input_scale",
]  # fmt: skip
TENSORS = st.dictionaries(
    st.sampled_from(NAMES),
    st.tuples(
        st.sampled_from(["BF16", "F8_E4M3", "F8_E8M0", "U8", "F32"]),
        st.lists(st.sampled_from([0, 1, 2, 3, 4, 129]), max_size=4).map(tuple),
    ),
)


@settings(max_examples=150, deadline=None)
@given(TENSORS, st.dictionaries(st.sampled_from(KEYS), VALUES), st.sets(st.sampled_from(NAMES)))
def test_whatever_a_config_says(tensors: dict[str, tuple[str, Shape]], config: dict[str, Any], also: set[str]) -> None:
    """A hostile config gives a choice in which every tensor has its place, or one of our errors."""
    source = source_of({name: shape for name, (_, shape) in tensors.items()}, config)
    source = replace(source, tensors={n: replace(t, dtype=tensors[n][0]) for n, t in source.tensors.items()})
    with suppress(Qcs4wError):
        choices = choose(source, Request(also=tuple(also)))
        assert {choice.stack or choice.tensor.name for choice in choices} == set(tensors)
