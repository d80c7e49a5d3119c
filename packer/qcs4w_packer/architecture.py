"""What config.json says of the weights: which way round they lie, which are stacks of experts, which are tied.

Only what the code of the model itself shows is said here, and only where the shapes agree; all else is asked for.
Source: huggingface/transformers 5.24.0, models/*/modeling_*.py and conversion_mapping.py.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from .weights import Source, SourceTensor

Direction = Literal["out-in", "in-out"]

#: GPT-2's layers, which are Conv1D there and hold [in, out]; other models have ordinary linears of these names.
CONV1D_MODULES = ("c_attn", "c_proj", "c_fc", "q_attn")

# Models whose layers of those names are transformers' Conv1D, and models where they are nn.Linear.
_CONV1D_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp", "clvp_decoder")
_LINEAR_MODELS = ("gpt_bigcode", "gpt_neo", "starcoder2", "bridgetower")

# Composite models: the part of the config, and what the names of its weights begin with.
_COMPOSITES = ("encoder-decoder", "vision-encoder-decoder", "speech-encoder-decoder")

# Stacks of experts, [E, out, in] or [E, in, out]: the last part of the name, and what it leads from and to.
# "2i" is gate and up in one.
_STACKS = {
    "experts.gate_up_proj": ("2i", "h"),
    "experts.down_proj": ("h", "i"),
    "input_linear.weight": ("2i", "h"),  # GraniteMoE, JetMoE
    "output_linear.weight": ("h", "i"),
}
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERT_WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size")

# Models whose files hold [E, in, out]; it counts only where the two sizes are equal, so that a shape shows nothing.
_IN_OUT_STACKS = ("llama4", "llama4_text", "gpt_oss")


_HEAD = "lm_head.weight"

# Models whose head is tied where their config.json does not say.
_TIED_BY_DEFAULT = (
    "gpt2", "gpt_neo", "gpt_bigcode", "opt", "gemma", "gemma2", "gemma3_text", "cohere", "cohere2", "starcoder2",
    "smollm3",
)  # fmt: skip
_OTHER_HEADS = ("whisper", "trocr")  # causal models whose head is not lm_head


@dataclass(frozen=True)
class Said:
    """Which way round a weight lies, and who says so, for people."""

    direction: Direction
    why: str


def said_direction(source: Source, tensor: SourceTensor) -> Said | None:
    """Return which way round the file or its config says that a weight lies, or None."""
    if tensor.direction is not None:
        return Said(tensor.direction, "as the file says")
    if len(tensor.shape) == 3:
        return _stack_direction(source, tensor)
    if not is_conv1d_name(tensor.name):
        return None
    model = _model_type(source.config, tensor.name)
    if model in _CONV1D_MODELS:
        return Said("in-out", f"{model}'s Conv1D stores [in, out]")
    return (
        Said("out-in", f"{model}'s {_module(tensor.name)} is an ordinary linear") if model in _LINEAR_MODELS else None
    )


def is_conv1d_name(name: str) -> bool:
    """Tell whether a weight has the name of one of GPT-2's Conv1D layers."""
    return name.endswith(".weight") and _module(name) in CONV1D_MODULES


def is_told_apart_by_config(name: str) -> bool:
    """Tell whether some models store weights of this name [out, in] and others [in, out]."""
    return is_conv1d_name(name) or f".{name}".endswith((".experts.gate_up_proj", ".experts.down_proj"))


def stored_name(source: Source, name: str) -> str | None:
    """Return the stored tensor that a missing name is tied to, by the file's metadata or by config.json."""
    owner = source.metadata.get(name)
    if owner in source.tensors:
        return owner
    return _tied_embedding(source) if name == _HEAD else None


def tied_names(source: Source, name: str) -> list[str]:
    """Return the other names of a stored tensor that are not stored themselves."""
    found = source.aliases_of(name)
    if _HEAD in found or not _is_embedding(name) or name != _tied_embedding(source):
        return found
    return [*found, _HEAD]


def _module(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def _configs(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield config
    for key in ("text_config", "llm_config"):
        if isinstance(inner := config.get(key), Mapping):
            yield inner


def _model_type(config: Mapping[str, Any], name: str) -> str | None:
    """Return the model type that the weight's code is of; None of a model whose code is its own."""
    if config.get("model_type") in _COMPOSITES:
        inner = config.get(name.partition(".")[0])
        config = inner if isinstance(inner, Mapping) else {}
    model = config.get("model_type")
    return model if isinstance(model, str) and not config.get("auto_map") else None


def _stack_direction(source: Source, tensor: SourceTensor) -> Said | None:
    """Read the direction of a stack of experts off its shape and the sizes in the config."""
    kind = next((sizes for ending, sizes in _STACKS.items() if f".{tensor.name}".endswith(f".{ending}")), None)
    if kind is None:
        return None
    for config in _configs(source.config):
        hidden = config.get("hidden_size")
        counts = [config.get(key) for key in _EXPERT_COUNTS]
        widths = [config.get(key) for key in _EXPERT_WIDTHS]
        if type(hidden) is not int or tensor.shape[0] not in counts:
            continue
        found: set[Direction] = set()
        for width in widths:
            if type(width) is int:
                sizes = {"h": hidden, "i": width, "2i": 2 * width}
                out_in = (sizes[kind[0]], sizes[kind[1]])
                found |= {"out-in"} if tensor.shape[1:] == out_in else set()
                found |= {"in-out"} if tensor.shape[1:] == out_in[::-1] else set()
        model = config.get("model_type")
        if len(found) == 2:
            found = {"in-out"} if model in _IN_OUT_STACKS else set()
        if found:
            (direction,) = found
            return Said(
                direction, f"experts of {model}, [E, {direction.replace('-', ', ')}] by the sizes in config.json"
            )
    return None


def _is_embedding(name: str) -> bool:
    return f".{name}".endswith((".embed_tokens.weight", ".wte.weight"))


def _tied_embedding(source: Source) -> str | None:
    """Return the embedding that serves as the output head too, where no head is stored."""
    if _HEAD in source.tensors or not _ties_head(source.config):
        return None
    found = list(islice(filter(_is_embedding, source.tensors), 2))
    return found[0] if len(found) == 1 else None


def _ties_head(config: Mapping[str, Any]) -> bool:
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    if not any(isinstance(name, str) and name.endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        return False  # others call their heads otherwise
    if config.get("model_type") in _OTHER_HEADS:
        return False
    tied = config.get("tie_word_embeddings")
    return tied is True or (tied is None and config.get("model_type") in _TIED_BY_DEFAULT)
