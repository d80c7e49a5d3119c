"""What looks like a linear weight and is none, or is packed on request only: one table of names."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase, translate

from .weights import Source


@dataclass(frozen=True)
class Rule:
    """A name pattern (case is ignored) and what it says about the tensor."""

    pattern: str
    reason: str


_HEAD = "output head, packed on request"
_ROUTER = "router of experts"  # `*.gate.weight` is one too, where its block has experts: see _skip_reason

#: Tensors that look like linear weights and are not taken unless asked for.
SKIP_RULES = (
    Rule("*embed*", "embedding"),
    Rule("*emb.weight", "embedding"),
    Rule("*wte.weight", "embedding"),
    Rule("*wpe.weight", "embedding"),
    Rule("*shared.weight", "embedding"),
    Rule("*_embd*", "embedding"),  # GGUF's names: token_embd, position_embd, …
    Rule("token_types.weight", "embedding"),
    Rule("*relative_attention_bias*", "position bias"),
    Rule("*attn_rel_b.weight", "position bias"),
    Rule("*ssm_conv1d*", "convolution"),
    Rule("*norm.weight", "norm"),
    Rule("*norm?.weight", "norm"),
    Rule("*ln_?.weight", "norm"),
    Rule("*lm_head*", _HEAD),
    Rule("head.weight", _HEAD),
    Rule("*.head.weight", _HEAD),
    Rule("output.weight", _HEAD),
    Rule("cls.output.weight", _HEAD),
    Rule("*.router.weight", _ROUTER),
    Rule("*.router.layer.weight", _ROUTER),
    Rule("*.shared_expert_gate.weight", _ROUTER),
    Rule("*.ffn_gate_inp*.weight", _ROUTER),  # GGUF
)

_ANY_RULE = re.compile("|".join(translate(rule.pattern) for rule in SKIP_RULES))  # one look for most names


def skip_reasons(source: Source) -> dict[str, str]:
    """Return the reason for each tensor that the default choice leaves alone: by its name, an alias, or a tie."""
    found = (re.match(r"(.*?)\.(?:experts\.|shared_expert)", name) for name in source.tensors)
    with_experts = frozenset(match[1] for match in found if match)
    skips: dict[str, str] = {}
    for name in source.tensors:
        reasons = (_skip_reason(spelling, with_experts) for spelling in (name, *source.aliases_of(name)))
        if reason := next(filter(None, reasons), None):
            skips[name] = reason
    memory = {source.tensors[name].storage: name for name in skips if source.tensors[name].storage is not None}
    for name, tensor in source.tensors.items():
        if name not in skips and tensor.storage in memory:
            owner = memory[tensor.storage]
            skips[name] = f"tied to {owner} ({skips[owner]})"
    return skips


def _skip_reason(name: str, with_experts: Collection[str]) -> str | None:
    lower = name.lower()
    if _ANY_RULE.match(lower):
        return next(rule.reason for rule in SKIP_RULES if fnmatchcase(lower, rule.pattern))
    block, gate, _ = name.rpartition(".gate.weight")
    return _ROUTER if gate and block in with_experts else None
