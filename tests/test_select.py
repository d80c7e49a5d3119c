"""Which tensors are packed, from names and shapes alone: every source here fails when its data is touched."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from making import time_limit

from qcs4w_packer import Request, SelectionError, UnknownTensorError, UsageError
from qcs4w_packer.architecture import tied_names
from qcs4w_packer.name_patterns import did_you_mean, matches
from qcs4w_packer.select import Choice, choose
from qcs4w_packer.skip_rules import SKIP_RULES
from qcs4w_packer.weights import Source, SourceTensor

Shape = tuple[int, ...]
Tensors = dict[str, Shape | tuple[str, Shape]]


def untouchable(start: int, stop: int) -> bytes:
    """Fail, since choosing reads no data."""
    raise AssertionError("data was read")


def source_of(tensors: Tensors, storage: dict[str, object] | None = None) -> Source:
    """A file of these shapes, F32 unless a dtype is given."""
    made = {}
    for name, said in tensors.items():
        dtype, shape = (said[0], said[1]) if said and isinstance(said[0], str) else ("F32", said)
        made[name] = SourceTensor(name, dtype, shape, untouchable, (storage or {}).get(name))
    return Source(Path("model.safetensors"), made)


def packed(tensors: Tensors, /, **request: tuple[str, ...]) -> list[str]:
    """Names of what is packed."""
    return [choice.tensor.name for choice in choose(source_of(tensors), Request(**request)) if choice.action == "pack"]


def reasons(tensors: Tensors, /, **request: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """What happens to each tensor, and why."""
    return {c.tensor.name: (c.action, c.reason) for c in choose(source_of(tensors), Request(**request))}


LINEAR = [
    "weight", "layers.0.q_proj.weight", "model.layers.0.mlp.gate_proj.weight", "in_proj_weight",
    "attn.in_proj_weight", "encoder.layer.0.attention.self.query.weight", "mlp.gate.weight", "classifier.weight",
    "header.weight", "blocks.0.normalizer.weight", "heads.0.weight",
]  # fmt: skip

SKIPPED = {
    "model.embed_tokens.weight": "embedding",
    "embeddings.word_embeddings.weight": "embedding",
    "Patch_Embed.proj.weight": "embedding",
    "transformer.wte.weight": "embedding",
    "wpe.weight": "embedding",
    "shared.weight": "embedding",
    "encoder.block.0.SelfAttention.relative_attention_bias.weight": "position bias",
    "lm_head.weight": "output head, packed on request",
    "head.weight": "output head, packed on request",
    "model.head.weight": "output head, packed on request",
    "layers.0.input_layernorm.weight": "norm",
    "norm1.weight": "norm",
    "h.0.ln_1.weight": "norm",
    "h.0.LN_f.weight": "norm",
    "mlp.router.weight": "router of experts",
    "mlp.shared_expert_gate.weight": "router of experts",
    # GGUF
    "token_embd.weight": "embedding",
    "per_layer_token_embd.weight": "embedding",
    "token_types.weight": "embedding",
    "enc.blk.0.attn_rel_b.weight": "position bias",
    "blk.0.attn_norm.weight": "norm",
    "output.weight": "output head, packed on request",
    "cls.output.weight": "output head, packed on request",
    "blk.0.ffn_gate_inp.weight": "router of experts",
    "blk.0.ffn_gate_inp_shexp.weight": "router of experts",
    "blk.0.ssm_conv1d.weight": "convolution",
}

UNFIT: dict[str, tuple[str, Shape, str]] = {
    "1-D": ("F32", (4,), "1-D, not a matrix (N, K)"),
    "0-D": ("F32", (), "0-D, not a matrix (N, K)"),
    "4-D": ("F32", (2, 2, 3, 3), "4-D, not a matrix (N, K)"),
    "int8": ("I8", (4, 4), "dtype I8, expected one of F64, F32, F16, BF16"),
    "int64": ("I64", (4, 4), "dtype I64, expected one of F64, F32, F16, BF16"),
    "bool": ("BOOL", (4, 4), "dtype BOOL, expected one of F64, F32, F16, BF16"),
    "no rows": ("F32", (0, 4), "shape [0, 4] has no elements"),
    "no columns": ("F32", (4, 0), "shape [4, 0] has no elements"),
}


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_a_linear_weight_is_taken_by_name(name: str, dtype: str) -> None:
    """2-D floats with the name of a linear weight are packed by default; gate_proj is no router."""
    assert reasons({name: (dtype, (4, 6))}) == {name: ("pack", "linear weight by name")}


@pytest.mark.parametrize(("name", "reason"), SKIPPED.items(), ids=SKIPPED)
def test_the_table_of_skips(name: str, reason: str) -> None:
    """What looks like a linear weight and is none is carried, with its reason, and packed by request."""
    tensors: Tensors = {name: (4, 6), "fc.weight": (4, 6)}
    assert reasons(tensors)[name] == ("carry", reason)
    for request in ({"include": (name,)}, {"tensors": (name,)}, {"include": ("*",)}):
        assert name in packed(tensors, **request)


def test_every_rule_is_covered() -> None:
    """No reason of the table is without an example here."""
    assert {rule.reason for rule in SKIP_RULES} == set(SKIPPED.values())


@pytest.mark.parametrize(
    "others",
    [
        ("b.mlp.experts.0.w1.weight",),
        ("b.mlp.experts.gate_up_proj",),
        ("b.mlp.shared_expert.up_proj.weight",),
        ("b.mlp.shared_experts.up_proj.weight",),
    ],
    ids=str,
)
def test_a_router_is_skipped_where_experts_exist(others: tuple[str, ...]) -> None:
    """`gate` beside experts routes tokens; the same name in another block is an ordinary gate."""
    tensors: Tensors = dict.fromkeys(others, (4, 6))
    tensors |= {"b.mlp.gate.weight": (8, 6), "c.mlp.gate.weight": (8, 6), "b.mlp.gate_proj.weight": (8, 6)}
    found = reasons(tensors)
    assert found["b.mlp.gate.weight"] == ("carry", "router of experts")
    assert found["c.mlp.gate.weight"] == found["b.mlp.gate_proj.weight"] == ("pack", "linear weight by name")


@pytest.mark.parametrize("name", ["fc.bias", "weights", "fc.weight_scale", "rotary.inv_freq", "A_log", "fc.qweight"])
def test_other_names_are_no_linear_weights(name: str) -> None:
    """A matrix of another name is carried and can be asked for."""
    tensors: Tensors = {name: (4, 6), "fc.weight": (4, 6)}
    assert reasons(tensors)[name] == ("carry", "not a linear weight by name")
    assert packed(tensors, include=(name,)) == [name]


@pytest.mark.parametrize(("dtype", "shape", "reason"), UNFIT.values(), ids=UNFIT)
def test_what_cannot_be_packed_is_refused_by_name(dtype: str, shape: Shape, reason: str) -> None:
    """Carried by default and by a glob; an error when it was asked for by its very name."""
    tensors: Tensors = {"odd.weight": (dtype, shape), "fc.weight": (4, 6)}
    assert reasons(tensors)["odd.weight"] == ("carry", reason)
    assert packed(tensors, include=("*weight",)) == ["fc.weight"]
    for request in ({"tensors": ("odd.weight",)}, {"include": ("odd.weight",)}):
        with pytest.raises(
            SelectionError, match=r"model\.safetensors: tensor 'odd\.weight' cannot be packed"
        ) as caught:
            packed(tensors, **request)
        assert reason in str(caught.value)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"])
def test_fp8_is_refused_and_not_passed_over(dtype: str) -> None:
    """An fp8 weight without a scale that would be chosen is an error; excluding it is the way round."""
    tensors: Tensors = {"a.weight": (4, 6), "q.weight": (dtype, (4, 6))}
    for request in ({}, {"include": ("*",)}, {"include": ("*.weight",)}):
        with pytest.raises(SelectionError, match=rf"tensor 'q\.weight' \[4, 6\] is {dtype} and has no scale") as caught:
            packed(tensors, **request)
        assert "--exclude" in (caught.value.hint or "")
    for named in ("tensors", "include"):
        with pytest.raises(SelectionError, match=dtype):
            packed(tensors, **{named: ("q.weight",)})
    assert packed(tensors, exclude=("q.*",)) == ["a.weight"]
    assert packed(tensors, tensors=("a.weight",)) == packed(tensors, include=("a.*",)) == ["a.weight"]


def test_an_fp8_scale_is_no_weight() -> None:
    """Exponent-only scales are carried like any other number."""
    tensors: Tensors = {"a.weight": (4, 6), "q.weight_scale": ("F8_E8M0", (4, 1))}
    assert packed(tensors, include=("*",)) == ["a.weight"]


GPT2: Tensors = {
    "h.0.attn.c_attn.weight": (6, 18),
    "h.0.attn.c_attn.bias": (18,),
    "h.0.attn.c_proj.weight": (6, 6),
    "h.0.mlp.c_fc.weight": (6, 24),
}


@pytest.mark.parametrize("name", ["c_attn.weight", "c_fc.weight", "c_proj.weight", "q_attn.weight"])
@pytest.mark.parametrize("prefix", ["", "transformer.h.0.attn."])
@pytest.mark.parametrize("asked", [{}, {"include": ("*",)}, {"tensors": None}], ids=["default", "glob", "by name"])
def test_a_conv1d_is_refused_until_its_direction_is_known(
    name: str, prefix: str, asked: dict[str, tuple[str, ...] | None]
) -> None:
    """GPT-2's layers are [in, out]: refused by name, and either answer of the hint works."""
    full = prefix + name
    request = {option: patterns or (full,) for option, patterns in asked.items()}
    with pytest.raises(SelectionError, match=rf"tensor '{full}' \[6, 18\] has the name of a GPT-2 Conv1D") as caught:
        packed({full: (6, 18)}, **request)
    hint = caught.value.hint or ""
    pattern = hint.split("'")[1]
    assert f"--transpose '{pattern}'" in hint
    assert "--no-transpose" in hint
    (turned,) = choose(source_of({full: (6, 18)}), Request(**request, transpose=(pattern,)))
    assert (turned.transposed, turned.out_features, turned.in_features) == (True, 18, 6)
    (kept,) = choose(source_of({full: (6, 18)}), Request(**request, no_transpose=(pattern,)))
    assert (kept.transposed, kept.out_features, kept.in_features) == (False, 6, 18)


def test_all_conv1d_layers_are_named_at_once() -> None:
    """The hint turns every layer of the file round, not one after the other."""
    with pytest.raises(SelectionError, match=r"\(and 2 more\)") as caught:
        packed(GPT2)
    hint = caught.value.hint or ""
    patterns = tuple(hint.split("'")[1:6:2])
    assert patterns == ("*c_attn.weight", "*c_fc.weight", "*c_proj.weight")
    assert [choice.transposed for choice in choose(source_of(GPT2), Request(transpose=patterns))][0::2] == [True, True]


@pytest.mark.parametrize("option", ["transpose", "no_transpose"])
def test_a_direction_of_what_is_not_packed_is_an_error(option: str) -> None:
    """A pattern that reaches no packed tensor would be ignored in silence."""
    tensors: Tensors = {"fc.weight": (4, 6), "fc.bias": (4,), "embed.weight": (9, 6)}
    for pattern in ("fc.bias",) if option == "transpose" else ("fc.bias", "embed.*"):
        with pytest.raises(SelectionError, match="matches no tensor that is packed"):
            packed(tensors, **{option: (pattern,)})


def test_routers_by_their_own_names() -> None:
    """A module called router, or the gate of a shared expert, is left alone; a gate_proj is a linear."""
    tensors: Tensors = {
        "mlp.router.weight": (4, 6),
        "mlp.shared_expert_gate.weight": (1, 6),
        "mlp.gate_proj.weight": (4, 6),
    }
    assert packed(tensors) == ["mlp.gate_proj.weight"]


@pytest.mark.parametrize(
    ("shape", "bias", "words"),
    [((6, 18), (18,), r"its bias of 18 says \[in, out\]"), ((18, 6), (18,), r"its bias of 18 says \[out, in\]")],
    ids=["conv1d", "linear"],
)
def test_a_bias_shows_the_direction(shape: Shape, bias: Shape, words: str) -> None:
    """The message says which way round the bias points."""
    with pytest.raises(SelectionError, match=words):
        packed({"c_attn.weight": shape, "c_attn.bias": bias})


def test_a_square_conv1d_is_not_guessed() -> None:
    """With N = K a bias shows nothing."""
    with pytest.raises(SelectionError) as caught:
        packed({"c_attn.weight": (6, 6), "c_attn.bias": (6,)})
    assert "its bias" not in str(caught.value)


def test_gpt2_packs_with_one_pattern() -> None:
    """One --transpose turns all of them."""
    choices = choose(source_of(GPT2), Request(transpose=("*.c_*.weight",)))
    turned = {c.tensor.name: (c.out_features, c.in_features) for c in choices if c.action == "pack" and c.transposed}
    assert list(turned.values()) == [(18, 6), (6, 6), (24, 6)]


def test_an_excluded_conv1d_needs_no_direction() -> None:
    """What is not packed is not asked about."""
    assert packed({**GPT2, "fc.weight": (4, 6)}, exclude=("*.c_*",)) == ["fc.weight"]


def test_transpose_takes_other_names_too() -> None:
    """Asking for a transposition asks for the tensor."""
    found = reasons({"kernel": (4, 6), "fc.weight": (4, 6)}, transpose=("kernel",))
    assert found["kernel"] == ("pack", "asked for by --transpose")


def test_both_directions_at_once_are_refused() -> None:
    """A tensor cannot be turned and not turned."""
    with pytest.raises(SelectionError, match=r"'a\.weight' is matched by both --transpose and --no-transpose"):
        packed({"a.weight": (4, 6)}, transpose=("a*",), no_transpose=("*weight",))


THREE: Tensors = {
    "a.weight": (4, 6),
    "b.weight": (4, 6),
    "c.table": (4, 6),
    "d.bias": (4,),
}

REQUESTS: dict[str, tuple[dict[str, tuple[str, ...]], list[str]]] = {
    "default": ({}, ["a.weight", "b.weight"]),
    "tensor": ({"tensors": ("b.weight",)}, ["b.weight"]),
    "two tensors": ({"tensors": ("c.table", "a.weight")}, ["a.weight", "c.table"]),
    "include": ({"include": ("c.*",)}, ["c.table"]),
    "include all": ({"include": ("*",)}, ["a.weight", "b.weight", "c.table"]),
    "include one letter": ({"include": ("?.weight",)}, ["a.weight", "b.weight"]),
    "include a set": ({"include": ("[bc].*",)}, ["b.weight", "c.table"]),
    "exclude": ({"exclude": ("a.*",)}, ["b.weight"]),
    "exclude beats include": ({"include": ("*",), "exclude": ("*.weight",)}, ["c.table"]),
}


@pytest.mark.parametrize(("request_", "names"), REQUESTS.values(), ids=REQUESTS)
def test_requests(request_: dict[str, tuple[str, ...]], names: list[str]) -> None:
    """What each combination of options packs, in the file's order; all else is carried."""
    choices = choose(source_of(THREE), Request(**request_))
    assert [choice.tensor.name for choice in choices if choice.action == "pack"] == names
    assert [choice.tensor.name for choice in choices] == list(THREE)


@pytest.mark.parametrize("option", ["tensors", "include", "exclude", "transpose", "no_transpose"])
def test_a_pattern_without_a_match_is_an_error(option: str) -> None:
    """A name or pattern that matches nothing is never ignored, and close names are suggested."""
    with pytest.raises(UnknownTensorError, match=r"'a\.weigth'") as caught:
        packed(THREE, **{option: ("a.weight", "a.weigth")})
    assert "did you mean 'a.weight'" in (caught.value.hint or "")


def test_a_tensor_cannot_be_asked_for_and_excluded() -> None:
    """A contradiction is told."""
    with pytest.raises(SelectionError, match="both asked for and excluded"):
        packed(THREE, tensors=("a.weight",), exclude=("a.*",))


def test_a_name_matches_itself_whatever_it_holds() -> None:
    """Brackets and stars in a name are not needed as patterns, and case counts."""
    assert matches("layers[0].weight", ["layers[0].weight"])
    assert matches("a*b", ["a*b"])
    assert not matches("A.weight", ["a.*"])
    assert packed({"layers[0].weight": (4, 6), "fc.weight": (4, 6)}, include=("layers[0].weight",)) == [
        "layers[0].weight"
    ]


def test_a_stack_is_split_by_request() -> None:
    """[E, N, K] is carried by default, and becomes T.0, T.1, … when it is asked for, transposed or not."""
    tensors: Tensors = {"experts.weight": (3, 4, 6), "fc.weight": (4, 6)}
    action, reason = reasons(tensors)["experts.weight"]
    assert action == "carry"
    assert "split into matrices by request (--also 'experts.weight')" in reason
    requests: list[dict[str, tuple[str, ...]]] = [
        {"include": ("experts.*",)}, {"tensors": ("experts.weight",)}, {"transpose": ("experts.*",)},
    ]  # fmt: skip
    for request in requests:
        parts = [c for c in choose(source_of(tensors), Request(**request)) if c.stack]
        assert [c.tensor.name for c in parts] == ["experts.weight.0", "experts.weight.1", "experts.weight.2"]
        assert {(c.stack, c.out_features) for c in parts} == {("experts.weight", 6 if "transpose" in request else 4)}


@pytest.mark.parametrize(
    ("tensors", "words", "hint"),
    [
        ({}, "no tensors at all", ""),
        ({"a.bias": (4,)}, r"no float matrix among 'a\.bias'", ""),
        ({"ids": ("I64", (4, 4))}, r"'ids' \(.*I64", ""),
        ({"lm_head.weight": (4, 6)}, r"'lm_head\.weight' \(output head", "--include 'lm_head.weight'"),
        ({f"embed.{i}": (4, 6) for i in range(9)}, "and 6 more", "--include 'embed.0'"),
    ],
    ids=["empty", "bias only", "integers", "head only", "many"],
)
def test_nothing_to_pack_is_an_error(tensors: Tensors, words: str, hint: str) -> None:
    """An output without a packed tensor is never written; the reasons stand in the message, and the hint works."""
    with pytest.raises(SelectionError, match=f"nothing to pack: .*{words}") as caught:
        packed(tensors)
    assert hint in (caught.value.hint or "")
    if hint:
        assert packed(tensors, include=(hint.split("'")[1],))


def aliases(storage: dict[str, object], **request: tuple[str, ...]) -> dict[str, str | None]:
    """Who is whose alias among three matrices."""
    tensors: Tensors = dict.fromkeys(("a.weight", "b.weight", "c.weight"), (4, 6))
    choices: list[Choice] = choose(source_of(tensors, storage), Request(**request))
    return {choice.tensor.name: choice.alias_of for choice in choices if choice.action == "pack"}


def test_tied_tensors_are_packed_once() -> None:
    """The later names of one memory are aliases of the first; unknown memories are never equal."""
    assert aliases({"a.weight": 1, "b.weight": 2, "c.weight": 1}) == {
        "a.weight": None, "b.weight": None, "c.weight": "a.weight",
    }  # fmt: skip
    assert set(aliases({}).values()) == {None}


def test_a_tied_tensor_turned_the_other_way_is_packed_itself() -> None:
    """The same memory in the other direction gives other bytes."""
    assert aliases({"a.weight": 1, "b.weight": 1}, include=("*",), transpose=("b.*",)) == dict.fromkeys(
        ("a.weight", "b.weight", "c.weight")
    )


def test_a_tied_tensor_that_is_not_packed_owns_nothing() -> None:
    """An alias points to what is packed, not to what is carried."""
    assert aliases({"a.weight": 1, "b.weight": 1}, exclude=("a.*",)) == {"b.weight": None, "c.weight": None}


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("fc.wieght", ["fc.weight", "other"], "did you mean 'fc.weight'?"),
        ("zzz", ["alpha", "beta"], "there is 'alpha', 'beta'"),
        ("zzz", [f"alpha{i}" for i in range(6)], None),
        ("zzz", [], None),
    ],
    ids=["close", "few", "many", "none"],
)
def test_suggestions(name: str, known: list[str], hint: str | None) -> None:
    """Close names first, a short list in full, else silence."""
    assert did_you_mean(name, known) == hint


def test_what_is_tied_to_an_embedding_is_left_alone() -> None:
    """A weight in the memory of one that the table skips is skipped with it, and packed by request."""
    tensors: Tensors = {"tok.weight": (9, 6), "lm_head.weight": (9, 6), "fc.weight": (4, 6)}
    choices = {c.tensor.name: c for c in choose(source_of(tensors, {"tok.weight": 1, "lm_head.weight": 1}), Request())}
    assert choices["tok.weight"].action == "carry"
    assert choices["tok.weight"].reason == "tied to lm_head.weight (output head, packed on request)"
    assert choices["fc.weight"].action == "pack"
    assert packed(tensors, tensors=("tok.weight",)) == ["tok.weight"]


@pytest.mark.parametrize("name", ["tok_emb.weight", "emb.weight", "output.weight"])
def test_other_usual_names_of_embeddings_and_heads(name: str) -> None:
    """Embeddings called emb and Llama's own head are known; a projection called attn.output is a linear."""
    assert packed({name: (4, 6), "attn.output.weight": (4, 6)}) == ["attn.output.weight"]


def test_a_module_stands_for_its_weight() -> None:
    """Every option takes the module's name as the other commands do; a tensor of that very name comes first."""
    tensors: Tensors = {"fc.weight": (4, 6), "fc.bias": (4,), "lm_head.weight": (9, 6)}
    assert packed(tensors, also=("lm_head",)) == ["fc.weight", "lm_head.weight"]
    assert packed(tensors, include=("lm_head",), transpose=("lm_head",)) == ["lm_head.weight"]
    assert packed(tensors, include=("*.weight",), exclude=("fc",)) == ["lm_head.weight"]
    assert packed({"fc.weight": (4, 6), "fc.bias": (4,), "g.weight": (4, 6)}, tensors=("fc",)) == ["fc.weight"]
    assert packed({"fc": (4, 6), "fc.weight": (4, 6)}, tensors=("fc",)) == ["fc"]
    with pytest.raises(UnknownTensorError) as caught:
        packed({"fc1.weight": (4, 6), "fc1.bias": (4,)}, tensors=("fc2",))
    assert "fc1.bias" not in (caught.value.hint or "")


def test_a_stack_of_too_many_is_no_stack() -> None:
    """A first dimension of a million is not one of experts."""
    with pytest.raises(SelectionError, match="1,000,000 matrices"):
        packed({"a.weight": (1_000_000, 1, 1)}, include=("*",))


def test_many_gates_are_looked_at_once() -> None:
    """Forty thousand gates in one file take no time that grows with their square."""
    with time_limit(20):
        assert len(packed({f"l{i}.gate.weight": (1, 1) for i in range(40_000)})) == 40_000


def test_tensor_and_include_contradict_each_other() -> None:
    """--tensor says "only these": a pattern beside it is an error."""
    with pytest.raises(SelectionError, match="by --tensor and by --include"):
        packed({"a.weight": (4, 6), "b.weight": (4, 6)}, tensors=("a.weight",), include=("b.*",))


def test_also_adds_to_the_choice() -> None:
    """--also takes heads and others beside the default choice or --include; --exclude still takes them out."""
    tensors: Tensors = {**THREE, "lm_head.weight": (9, 6), "wte.weight": (9, 6)}
    assert packed(tensors, also=("lm_head.weight",)) == ["a.weight", "b.weight", "lm_head.weight"]
    assert packed(tensors, also=(r"re:(lm_head|wte)\.weight",), include=("c.*",)) == [
        "c.table", "lm_head.weight", "wte.weight"
    ]  # fmt: skip
    assert packed(tensors, also=("*.weight",), exclude=("wte.*",)) == ["a.weight", "b.weight", "lm_head.weight"]
    assert reasons(tensors, also=("lm*",))["lm_head.weight"] == ("pack", "asked for by --also")
    with pytest.raises(SelectionError, match="by --tensor and by --also"):
        packed(tensors, tensors=("a.weight",), also=("wte.weight",))
    with pytest.raises(SelectionError, match=r"'d\.bias' cannot be packed: 1-D"):
        packed(tensors, also=("d.bias",))


def test_an_empty_list_is_empty() -> None:
    """To include nothing is not to leave it to us; to exclude or to add nothing changes nothing."""
    for request in ({"include": ()}, {"tensors": ()}):
        with pytest.raises(SelectionError, match="nothing to pack"):
            packed(THREE, **request)
    assert packed(THREE, include=(), also=("c.table",)) == ["c.table"]
    assert packed(THREE, exclude=(), also=(), transpose=(), no_transpose=()) == ["a.weight", "b.weight"]


@pytest.mark.parametrize("option", ["include", "also", "exclude", "transpose", "no_transpose"])
def test_every_pattern_may_be_a_regular_expression(option: str) -> None:
    """`re:` works wherever a glob does; one that matches nothing is an error there too."""
    request = Request(**{option: (r"re:a\..*",)})
    found = {choice.tensor.name: choice for choice in choose(source_of(THREE), request)}
    assert found["a.weight"].action == ("carry" if option == "exclude" else "pack")
    assert found["a.weight"].transposed == (option == "transpose")
    with pytest.raises(UnknownTensorError, match=r"'re:weight' matches no tensor"):
        packed(THREE, **{option: ("re:weight",)})
    with pytest.raises(UsageError, match="unterminated character set at character 1"):
        packed(THREE, **{option: ("re:[ab",)})


MANY: dict[str, tuple[int, Callable[[int], str]]] = {
    "linears": (100_000, lambda i: f"model.layers.{i}.mlp.up_proj.weight"),
    "dots": (10_000, lambda i: "." * 300 + f"{i}.weight"),
    "experts": (10_000, lambda i: f"b{i}.experts.0.w1.weight"),
    "embeddings": (10_000, lambda i: f"m{i}.embed_tokens.weight"),
    "control characters": (10_000, lambda i: f"\x1b[2J\r\n{i}\t.weight"),
    "long": (10_000, lambda i: f"{i}." + "ab" * 400 + ".weight"),
}


@pytest.mark.parametrize(("count", "name"), MANY.values(), ids=MANY)
def test_many_names_take_no_time_that_grows_with_their_square(count: int, name: Callable[[int], str]) -> None:
    """With patterns, aliases and ties, right or misspelt: 100,000 take seconds."""
    tensors: Tensors = {name(i): (2, 2) for i in range(count)}
    source = replace(
        source_of(tensors, {each: number // 2 for number, each in enumerate(tensors)}),
        metadata={f"alias {each}": each for each in tensors},
        config={"architectures": ["XForCausalLM"], "tie_word_embeddings": True},
    )
    with time_limit(30):
        choices = choose(source, Request(also=("*7*.weight", r"re:(?s).*9.*"), exclude=(name(1),)))
        assert len(choices) == count
        for each in tensors:
            tied_names(source, each)
        with pytest.raises(UnknownTensorError):
            choose(source, Request(exclude=(name(1) + "x",)))
