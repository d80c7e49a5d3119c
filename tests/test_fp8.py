"""Weights of 8-bit floats: torch's own float8 types, which share nothing with our table, say what is right."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from qcs4w_packer import NonFiniteError, Request, SelectionError, pack_file, pack_weight
from qcs4w_packer.fp8 import WEIGHT_DTYPES, fp8_values
from qcs4w_packer.packed_sources import open_packed
from qcs4w_packer.packing import source_weight
from qcs4w_packer.safetensors_file import SafetensorsFile
from qcs4w_packer.select import choose
from qcs4w_packer.sources import open_source

DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}

SHAPES = [(1, 1), (1, 2), (5, 3), (127, 129), (128, 128), (129, 257), (300, 7), (2, 300)]


def codes(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn, seed: int = 0) -> torch.Tensor:
    """Random fp8 numbers, all of them finite: of every exponent, subnormals and both zeros among them."""
    made = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return torch.where(made.view(dtype).float().isfinite(), made, 3).view(dtype)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    """Random scales of about 0.01."""
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.01 + 0.001).to(dtype)


def spread(scale: torch.Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> torch.Tensor:
    """Blow a scale per block up to one per element."""
    tiles = scale.float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return tiles[..., : shape[-2], : shape[-1]]


def saved(path: Path, tensors: dict[str, torch.Tensor], name: str = "m.safetensors") -> Path:
    """A safetensors file, by the package of that name."""
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path / name)
    return path / name


def read(path: Path, name: str, config: dict[str, Any] | None = None) -> np.ndarray:
    """The weight as float32, as pack, verify and inspect read it."""
    with open_source(path) as source:
        return source.tensors[name].read()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_means_what_torch_says(dtype: str) -> None:
    """All 256 of each kind, NaN, infinities and the sign of zero among them."""
    ours = fp8_values(dtype)
    theirs = torch.arange(256, dtype=torch.uint8).view(DTYPES[dtype]).float().numpy()
    assert ours.dtype == np.float32
    assert np.array_equal(np.isnan(ours), np.isnan(theirs))
    finite = ~np.isnan(ours)
    assert ours[finite].tobytes() == theirs[finite].tobytes()
    assert tuple(DTYPES)[:4] == WEIGHT_DTYPES


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize("kind", ["scalar", "[1]", "[1, 1]", "[N]", "[N, 1]", "blocks"])
def test_each_layout_of_scales(tmp_path: Path, shape: tuple[int, int], dtype: str, kind: str) -> None:
    """Code × scale in float32, to the bit, whatever a scale stands for; blocks are cut at the edge."""
    weight = codes(*shape, dtype=DTYPES[dtype])
    tiles = (-(-shape[0] // 128), -(-shape[1] // 128))
    of = {"scalar": (), "[1]": (1,), "[1, 1]": (1, 1), "[N]": shape[:1], "[N, 1]": (shape[0], 1), "blocks": tiles}
    scale = numbers(*of[kind])
    if kind == "blocks":
        expected = weight.float() * spread(scale, shape, (128, 128))
    else:
        expected = weight.float() * (scale.reshape(-1, 1) if scale.numel() > 1 else scale)
    found = read(saved(tmp_path, {"a.weight": weight, "a.weight_scale": scale}), "a.weight")
    assert found.dtype == np.float32
    assert found.tobytes() == expected.numpy().tobytes()


@pytest.mark.parametrize(
    "name",
    ["a.weight_scale_inv", "a.weight_scale", "a.scale", "a.scale_inv", "a.scale_weight", "a.qscale_weight"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_usual_names_and_dtypes(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Every usual sibling is multiplied, `_inv` or not, after it has been widened."""
    weight, scale = codes(5, 3), numbers(5, 1, dtype=dtype)
    found = read(saved(tmp_path, {"a.weight": weight, name: scale}), "a.weight")
    assert found.tobytes() == (weight.float() * scale.float()).numpy().tobytes()


@pytest.mark.parametrize(
    ("shape", "block"), [((130, 300), (128, 128)), ((3, 70), (1, 32)), ((1, 33), (1, 32))], ids=str
)
def test_scales_that_are_powers_of_two(tmp_path: Path, shape: tuple[int, int], block: tuple[int, int]) -> None:
    """E8M0 scales, in bytes or in a dtype of their own, over DeepSeek's blocks and over Microscaling's 32 columns."""
    tiles = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    scale = torch.randint(100, 140, tiles, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    weight = codes(*shape)
    for stored in (scale, scale.view(torch.uint8)):
        found = read(saved(tmp_path, {"a.weight": weight, "a.scale": stored}), "a.weight")
        assert found.tobytes() == (weight.float() * spread(scale, shape, block)).numpy().tobytes()


@pytest.mark.parametrize("kind", ["one", "[E]", "[E, 1, 1]", "[E, N]", "[E, N, 1]", "blocks", "[E, 1, K]"])
def test_a_stack_of_experts(tmp_path: Path, kind: str) -> None:
    """Each expert has its own rows of scales, as a whole and split."""
    experts, rows, columns = 3, 130, 200
    of = {
        "one": (1,), "[E]": (3,), "[E, 1, 1]": (3, 1, 1), "[E, N]": (3, 130), "[E, N, 1]": (3, 130, 1),
        "blocks": (3, 2, 2), "[E, 1, K]": (3, 1, 200),
    }  # fmt: skip
    weight, scale = codes(experts, rows, columns), numbers(*of[kind])
    if kind == "blocks":
        wide = spread(scale, (rows, columns), (128, 128))
    else:
        wide = scale.float() if scale.ndim == 3 else scale.float().reshape(-1, rows if kind == "[E, N]" else 1, 1)
    expected = (weight.float() * wide).numpy()
    path = saved(tmp_path, {"mlp.experts.up_proj": weight, "mlp.experts.up_proj_scale_inv": scale})
    assert read(path, "mlp.experts.up_proj").tobytes() == expected.tobytes()
    with open_source(path) as source:
        parts = [c for c in choose(source, Request(include=("mlp.experts.up_proj",))) if c.action == "pack"]
        assert [c.tensor.name for c in parts] == [f"mlp.experts.up_proj.{index}" for index in range(experts)]
        for index, choice in enumerate(parts):
            assert choice.tensor.read().tobytes() == expected[index].tobytes()
            assert choice.tensor.read_rows(3).tobytes() == expected[index][:3].tobytes()


def test_rows_may_be_read_from_anywhere(tmp_path: Path) -> None:
    """Any rows give what they are in the whole, blocks that begin before them included."""
    weight, scale = codes(300, 130), numbers(3, 2)
    expected = (weight.float() * spread(scale, (300, 130), (128, 128))).numpy()
    with open_source(saved(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scale})) as source:
        tensor = source.tensors["a.weight"]
        for start, stop in [(0, 1), (127, 129), (128, 256), (200, 300), (299, 300), (5, 5)]:
            assert tensor.floats(start, stop).tobytes() == expected[start:stop].tobytes()


def test_a_large_weight_is_read_in_chunks(tmp_path: Path) -> None:
    """More than 16 MiB come in several parts, each with its own scales."""
    weight, scale = codes(8200, 2050), numbers(65, 17)
    expected = (weight.float() * spread(scale, (8200, 2050), (128, 128))).numpy()
    with open_source(saved(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scale})) as source:
        parts = list(source.tensors["a.weight"].float_rows())
    assert len(parts) > 1
    assert np.array_equal(np.concatenate([rows for _, rows in parts]), expected)


def test_the_config_gives_the_size_of_a_block(tmp_path: Path) -> None:
    """weight_block_size of config.json, and the block_structure of compressed-tensors."""
    from dataclasses import replace

    from qcs4w_packer.fp8_scales import with_scales

    weight, scale = codes(100, 70), numbers(4, 3)
    expected = (weight.float() * spread(scale, (100, 70), (32, 24))).numpy()
    groups = {"config_groups": {"group_0": {"weights": {"block_structure": [32, 24]}}}}
    with open_source(saved(tmp_path, {"a.weight": weight, "a.weight_scale": scale})) as source:
        assert source.tensors["a.weight"].fp8 is None
        for said in ({"weight_block_size": [32, 24]}, groups):
            for config in ({"quantization_config": said}, {"text_config": {"quantization_config": said}}):
                found = with_scales(replace(source, config=config)).tensors["a.weight"].read()
                assert found.tobytes() == expected.tobytes()
        huge = {"quantization_config": {"weight_block_size": [25, 1 << 80]}}
        tall = replace(source.tensors["a.weight_scale"], shape=(4, 1))
        wide = with_scales(replace(source, config=huge, tensors={**source.tensors, "a.weight_scale": tall}))
        assert wide.tensors["a.weight"].fp8.block == (25, 70)
        assert wide.tensors["a.weight"].read().shape == (100, 70)
        for wrong in ([32], [0, 24], [True, 24], "32", [32.0, 24]):
            config = {"quantization_config": {"weight_block_size": wrong}}
            with pytest.raises(SelectionError, match="block size of its quantization_config is"):
                choose(replace(source, config=config))


WRONG: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "none": ({}, r"has no scale: none of a\.weight_scale_inv, a\.weight_scale, .* is there"),
    "of another layer": ({"b.weight_scale": numbers(1)}, "has no scale"),
    "two": ({"a.weight_scale": numbers(1), "a.scale": numbers(1)}, r"more than one scale: a\.weight_scale, a\.scale"),
    "columns": ({"a.weight_scale": numbers(7)}, r"shape \[7\], expected \[\] or \[5\] or \[5, 1\] or \[1, 1\]"),
    "a row": ({"a.weight_scale": numbers(1, 5)}, r"has shape \[1, 5\], expected"),
    "fused": ({"a.weight_scale": numbers(3)}, r"has shape \[3\], expected"),
    "other blocks": ({"a.weight_scale": numbers(2, 2)}, r"has shape \[2, 2\], expected"),
    "integers": ({"a.weight_scale": torch.ones(5, dtype=torch.int32)}, r"'a\.weight_scale' is I32, expected one of"),
    "zero point": ({"a.weight_scale": numbers(1), "a.weight_zero_point": torch.zeros(1)}, "with a zero point"),
}


@pytest.mark.parametrize(("siblings", "message"), WRONG.values(), ids=WRONG)
def test_scales_are_not_guessed(tmp_path: Path, siblings: dict[str, torch.Tensor], message: str) -> None:
    """Without one sound scale the weight is refused, by default, by name, and as a source to compare with."""
    other = {"c.weight": torch.ones(4, 4)}
    with open_source(saved(tmp_path, {"a.weight": codes(5, 7), **siblings, **other})) as source:
        for request in (
            Request(),
            Request(tensors=("a.weight",)),
            Request(include=("a.*",)),
            Request(also=("a.weight",)),
        ):
            with pytest.raises(SelectionError, match=message):
                choose(source, request)
        kept = choose(source, Request(exclude=("a.weight",)))
        assert {c.tensor.name for c in kept if c.action == "carry"} == {"a.weight", *siblings}
        from qcs4w_packer.metadata import PackedEntry

        with pytest.raises(SelectionError, match=message):
            source_weight(source, PackedEntry("a.weight", 5, 7))


@pytest.mark.parametrize(
    ("code", "dtype", "message"),
    [
        (0x7F, "F8_E4M3", r"the F8_E4M3 code 0x7F \(nan\)"),
        (0xFF, "F8_E4M3", r"the F8_E4M3 code 0xFF \(nan\)"),
        (0x7C, "F8_E5M2", r"the F8_E5M2 code 0x7C \(inf\)"),
        (0xFC, "F8_E5M2", r"the F8_E5M2 code 0xFC \(-inf\)"),
        (0x7D, "F8_E5M2", r"the F8_E5M2 code 0x7D \(nan\)"),
        (0x80, "F8_E4M3FNUZ", r"the F8_E4M3FNUZ code 0x80 \(nan\)"),
    ],
)
def test_codes_that_are_no_numbers(tmp_path: Path, code: int, dtype: str, message: str) -> None:
    """NaN and infinities are refused with tensor, row and column, as the file counts them."""
    weight = codes(4000, 300, dtype=DTYPES[dtype]).view(torch.uint8)
    weight[3999, 299] = 0x7F if dtype == "F8_E4M3" else code
    weight[3001, 257] = code
    path = saved(tmp_path, {"a.weight": weight.view(DTYPES[dtype]), "a.weight_scale_inv": numbers(32, 3)})
    with pytest.raises(NonFiniteError, match=rf"tensor 'a\.weight' holds {message} at row 3001, column 257"):
        pack_file(path, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (np.nan, r"'a\.weight_scale' holds nan as the scale of 'a\.weight' at row 3, column 0"),
        (np.inf, r"'a\.weight_scale' holds inf as the scale"),
        (3e38, r"holds 448\.0 at row 3, column 1, and times its scale 3e\+38 .* beyond float32"),
    ],
)
def test_scales_that_make_no_numbers(tmp_path: Path, scale: float, message: str) -> None:
    """A scale that is not finite, or that carries a code beyond float32, is named."""
    weight, scales = torch.ones(5, 2).to(torch.float8_e4m3fn), numbers(5, 1)
    weight[3, 1], scales[3] = 448.0, scale
    with pytest.raises(NonFiniteError, match=message):
        read(saved(tmp_path, {"a.weight": weight, "a.weight_scale": scales}), "a.weight")


def test_pack_uses_the_scales_up(tmp_path: Path) -> None:
    """The bytes are the dequantized weight's, what belonged to fp8 is gone, and what stays fp8 keeps its scale."""
    a, b, head = codes(130, 7, seed=1), codes(6, 5, seed=2), codes(9, 5, seed=3)
    tensors = {
        "a.weight": a, "a.weight_scale_inv": numbers(2, 1), "a.input_scale": numbers(1), "a.bias": torch.ones(130),
        "b.weight": b, "b.weight_scale": numbers(1, seed=2), "b.activation_scale": numbers(1), "b.k_scale": numbers(1),
        "lm_head.weight": head, "lm_head.weight_scale": numbers(9, 1, seed=3), "lm_head.input_scale": numbers(1),
    }  # fmt: skip
    path = saved(tmp_path, tensors)
    report = pack_file(path, tmp_path / "out.safetensors")
    dropped = {c.tensor.name: c.reason for c in report.dropped}
    assert dropped == {
        "a.weight_scale_inv": "used up: scale of a.weight", "a.input_scale": "used up: scale of a.weight",
        "b.weight_scale": "used up: scale of b.weight", "b.activation_scale": "used up: scale of b.weight",
    }  # fmt: skip
    with SafetensorsFile(tmp_path / "out.safetensors") as file:
        carried = {name for name in file.slots if ".qcs4w_" not in name}
    assert carried == {
        "a.bias", "b.k_scale", "lm_head.weight", "lm_head.weight_scale", "lm_head.input_scale"
    }  # fmt: skip
    floats = {
        "a.weight": a.float() * spread(tensors["a.weight_scale_inv"], (130, 7), (128, 128)),
        "b.weight": b.float() * tensors["b.weight_scale"],
    }
    with open_packed(tmp_path / "out.safetensors") as packed, open_source(path) as source:
        for name, weight in floats.items():
            assert packed.entries[name].source_dtype == "F8_E4M3"
            again, ours = pack_weight(weight.numpy()), packed.load(name)
            assert again.packed.tobytes() == ours.packed.tobytes()
            assert again.scales.tobytes() == ours.scales.tobytes()
            assert np.array_equal(source_weight(source, packed.entries[name]), weight.numpy())


def test_a_scale_that_is_used_up_cannot_be_packed(tmp_path: Path) -> None:
    """A glob passes it over; its own name is a contradiction."""
    path = saved(tmp_path, {"a.weight": codes(130, 300), "a.weight_scale": numbers(2, 3)})
    with open_source(path) as source:
        actions = {c.tensor.name: c.action for c in choose(source, Request(include=("*",)))}
        assert actions == {"a.weight": "pack", "a.weight_scale": "drop"}
        with pytest.raises(SelectionError, match=r"'a\.weight_scale' cannot be packed: it is a scale of 'a\.weight'"):
            choose(source, Request(also=("a.weight_scale",)))
        (used,) = {c.used for c in choose(source, Request(tensors=("a.weight",))) if c.action == "pack"}
        assert used == ("a.weight_scale",)


def test_the_scale_of_what_stays_fp8_stays_too(tmp_path: Path) -> None:
    """A glob that fits the scales of a weight that is left alone does not pack them."""
    tensors = {"a.weight": codes(130, 300), "a.weight_scale": numbers(2, 3), "b.weight": torch.ones(4, 6)}
    with open_source(saved(tmp_path, tensors)) as source:
        found = {c.tensor.name: c for c in choose(source, Request(include=("*",), exclude=("a.weight",)))}
        assert {name: choice.action for name, choice in found.items()} == {
            "a.weight": "carry", "a.weight_scale": "carry", "b.weight": "pack"
        }  # fmt: skip
        assert found["a.weight_scale"].reason == "it is a scale of 'a.weight'"


def test_tied_codes_with_scales_of_their_own_are_two_weights(tmp_path: Path) -> None:
    """One memory is one weight only where the scale is one memory too."""
    weight, scale = codes(5, 7), numbers(1)
    both = {"a.weight": weight, "b.weight": weight}
    for scales, alias in (
        ({"a.weight_scale": scale, "b.weight_scale": scale}, "a.weight"),
        ({"a.weight_scale": scale, "b.weight_scale": scale.clone()}, None),
    ):
        torch.save(both | scales, tmp_path / "m.pt")
        with open_source(tmp_path / "m.pt") as source:
            found = {c.tensor.name: c for c in choose(source)}
        assert found["b.weight"].alias_of == alias
        assert found["b.weight_scale"].action == "drop"
