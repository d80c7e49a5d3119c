"""GGUF files: the gguf package writes and reads the sound ones, hostile ones are made byte by byte."""

import os
import struct
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from making import mutated, time_limit

from qcs4w_packer import Qcs4wError, Request, SelectionError, SourceError, open_source, pack_file
from qcs4w_packer.gguf_file import _DTYPES, _QUANTIZED
from qcs4w_packer.select import choose

TYPES = GGMLQuantizationType
RNG = np.random.default_rng(5)


def write(path: Path, tensors: Mapping[str, tuple[TYPES, np.ndarray]], *, alignment: int = 32) -> Path:
    """Write tensors by the gguf package, with metadata of every kind."""
    writer = gguf.GGUFWriter(path, "llama")
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    writer.add_block_count(3)
    writer.add_rope_freq_base(1e4)
    writer.add_description("x" * 1000)
    writer.add_token_list(["<s>", "</s>", "ä"] * 100)
    writer.add_token_scores([0.5] * 300)
    writer.add_array("some.flags", [True, False])
    for name, (kind, array) in tensors.items():
        writer.add_tensor(name, array, raw_shape=array.shape, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def floats(*shape: int) -> np.ndarray:
    """Random float32."""
    return RNG.standard_normal(shape, np.float32)


def bf16(*shape: int) -> tuple[TYPES, np.ndarray]:
    """Random bfloat16, as the bytes that gguf wants."""
    bits = (floats(*shape).view("<u4") >> 16).astype("<u2")
    return TYPES.BF16, bits.view(np.uint8).reshape(*shape[:-1], 2 * shape[-1])


TENSORS = {
    "token_embd.weight": (TYPES.F16, floats(20, 8).astype(np.float16)),
    "blk.0.attn_norm.weight": (TYPES.F32, floats(8)),
    "blk.0.attn_q.weight": (TYPES.F32, floats(6, 8)),
    "blk.0.ffn_down.weight": (TYPES.F16, floats(7, 33).astype(np.float16)),
    "blk.0.ffn_up.weight": bf16(5, 12),
    "blk.0.ffn_gate_inp.weight": (TYPES.F32, floats(4, 8)),
    "blk.0.ffn_gate_exps.weight": (TYPES.F32, floats(4, 6, 8)),
    "blk.0.odd.weight": (TYPES.F64, RNG.standard_normal((3, 4))),
    "positions": (TYPES.I32, np.arange(5, dtype=np.int32)),
    "output.weight": (TYPES.F32, floats(20, 8)),
}


@pytest.mark.parametrize("alignment", [32, 8, 4096])
def test_tensors_are_those_that_the_gguf_package_reads(alignment: int, tmp_path: Path) -> None:
    """Names, shapes in the order of a matrix, and every byte."""
    path = write(tmp_path / "a.gguf", TENSORS, alignment=alignment)
    witness = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    with open_source(path) as source:
        assert list(source.tensors) == list(witness) == list(TENSORS)
        for name, tensor in source.tensors.items():
            assert tensor.dtype == TENSORS[name][0].name
            assert tensor.shape == tuple(reversed(witness[name].shape.tolist()))
            assert b"".join(data for _, data in tensor.chunks()) == witness[name].data.tobytes()
        expected = TENSORS["blk.0.ffn_down.weight"][1].astype(np.float32)
        np.testing.assert_array_equal(source.tensors["blk.0.ffn_down.weight"].read(), expected, strict=True)
        assert len(source.left_out) == 1
        assert "keys of GGUF metadata of architecture 'llama'" in source.left_out[0]


def test_every_type_has_the_size_that_the_gguf_package_states() -> None:
    """Names, blocks and bytes of all types that this version of the package knows."""
    ours = {kind: (name, block, nbytes) for kind, (name, block, nbytes) in _QUANTIZED.items()}
    for kind in GGMLQuantizationType:
        if kind in _DTYPES:
            assert _DTYPES[kind] == kind.name
        else:
            assert ours[kind] == (kind.name, *GGML_QUANT_SIZES[kind])


def test_what_is_packed_by_default(tmp_path: Path) -> None:
    """Linear weights by GGUF's names; no embeddings, norms, heads, routers or stacks."""
    with open_source(write(tmp_path / "a.gguf", TENSORS)) as source:
        packed = [choice.tensor.name for choice in choose(source) if choice.action == "pack"]
        reasons = {choice.tensor.name: choice.reason for choice in choose(source)}
    assert packed == [f"blk.0.{name}.weight" for name in ("attn_q", "ffn_down", "ffn_up", "odd")]
    assert reasons["token_embd.weight"] == "embedding"
    assert reasons["blk.0.ffn_gate_inp.weight"] == "router of experts"
    assert "head" in reasons["output.weight"]


def quantized(kind: TYPES, rows: int = 4, columns: int = 256) -> tuple[TYPES, np.ndarray]:
    """Bytes of a quantized type."""
    block, nbytes = GGML_QUANT_SIZES[kind]
    return kind, RNG.integers(0, 256, (rows, columns // block * nbytes), np.uint8)


def test_quantized_tensors_are_told_by_type(tmp_path: Path) -> None:
    """They are named among what is left out, and asking for one is refused with its type."""
    tensors = {
        "blk.0.attn_q.weight": quantized(TYPES.Q4_K),
        "blk.0.attn_k.weight": quantized(TYPES.Q4_K),
        "blk.0.attn_v.weight": quantized(TYPES.Q8_0),
        "blk.0.attn_output.weight": (TYPES.F32, floats(8, 8)),
    }
    path = write(tmp_path / "a.gguf", tensors)
    with open_source(path) as source:
        assert list(source.tensors) == ["blk.0.attn_output.weight"]
        told = source.left_out
    assert "blk.0.attn_q.weight, blk.0.attn_k.weight (Q4_K is a quantized type" in told[1]
    assert "blk.0.attn_v.weight (Q8_0 is a quantized type" in told[2]
    with pytest.raises(SelectionError, match=r"'blk\.0\.attn_q\.weight' cannot be packed: Q4_K is a quantized type"):
        pack_file(path, None, request=Request(tensors=("blk.0.attn_q.weight",)), dry_run=True)
    report = pack_file(path, tmp_path / "out.safetensors")
    assert [tensor.entry.name for tensor in report.packed] == ["blk.0.attn_output.weight"]
    assert any("Q4_K" in what for what in report.left_out)


def test_a_quantized_file_is_refused(tmp_path: Path) -> None:
    """With nothing to read the message says what to take, with only norms it names the quantized ones."""
    path = write(tmp_path / "a.gguf", {"a.weight": quantized(TYPES.Q6_K)})
    with pytest.raises(SourceError, match=r"no tensor that can be read: 'a\.weight': Q6_K") as caught:
        open_source(path)
    assert "F16 or BF16" in (caught.value.hint or "")
    path = write(tmp_path / "b.gguf", {"a.weight": quantized(TYPES.Q6_K), "norm.weight": (TYPES.F32, floats(8))})
    with pytest.raises(SelectionError) as refused:
        pack_file(path, None, dry_run=True)
    assert "a.weight (Q6_K is" in (refused.value.hint or "")


# ---- hostile files


def text(value: str | bytes) -> bytes:
    """A string as GGUF has it."""
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    """One key and its value."""
    return text(key) + struct.pack("<I", kind) + value


def info(name: str | bytes = "w", dims: tuple[int, ...] = (3, 2), kind: int = 0, offset: int = 0) -> bytes:
    """One tensor's entry."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def raw(
    *, pairs: tuple[bytes, ...] = (), infos: tuple[bytes, ...] = (info(),), data: int = 24, version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:  # fmt: skip
    """A GGUF file of parts, taken as they are."""
    head = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(infos), len(pairs)))) + b"".join(pairs + infos)
    return head + bytes(-len(head) % 32) + bytes(data)


HOSTILE = {
    "empty": (b"", "does not begin with GGUF"),
    "other": (b"PK" * 50, "does not begin with GGUF"),
    "version 1": (raw(version=1), "version 1 is not known"),
    "big endian": (raw(version=0x03000000), "of a big-endian machine"),
    "truncated data": (raw(data=23), r"the header describes 120 bytes, the file has 119: it is truncated"),
    "truncated header": (raw()[:60], "its header goes on"),
    "many tensors": (raw(counts=(1 << 62, 0)), "tensor '' occurs twice"),
    "many pairs": (raw(counts=(0, 1 << 62)), "not known|its header goes on|name at byte"),
    "long name": (raw(infos=(struct.pack("<Q", 1 << 62),)), "a name at byte"),
    "name not text": (raw(infos=(info(b"\xff\xff"),)), "is not UTF-8"),
    "ranks": (raw(infos=(info(dims=(1,) * 65),)), "has 65 dimensions"),
    "huge": (raw(infos=(info(dims=(1 << 62, 1 << 62)),)), "it is truncated"),
    "negative": (raw(infos=(info(dims=((1 << 64) - 1, 1)),)), "no file has"),
    "offset": (raw(infos=(info(offset=1 << 40),)), "it is truncated"),
    "twice": (raw(infos=(info(), info()), data=48), "tensor 'w' occurs twice"),
    "overlap": (raw(infos=(info("a"), info("b", offset=8)), data=48), "inside of another"),
    "blocks": (raw(infos=(info(kind=2),)), "no whole blocks"),
    "key twice": (raw(pairs=(pair("a", 7, b"\1"),) * 2), "key 'a' occurs twice"),
    "value type": (raw(pairs=(pair("a", 99, b""),)), "type 99, which is not known"),
    "alignment 0": (raw(pairs=(pair("general.alignment", 4, bytes(4)),)), "its alignment is 0"),
    "alignment text": (raw(pairs=(pair("general.alignment", 8, text("x")),)), "its alignment is 'x'"),
    "long array": (raw(pairs=(pair("a", 9, struct.pack("<IQ", 4, 1 << 62)),)), "its header goes on"),
    "many strings": (raw(pairs=(pair("a", 9, struct.pack("<IQ", 8, 1 << 62)),)), "its header goes on"),
    "arrays in arrays": (raw(pairs=(pair("a", 9, struct.pack("<IQ", 9, 1) * 100),)), "type 9, which is not known"),
}


@pytest.mark.parametrize(("content", "words"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_are_refused(content: bytes, words: str, tmp_path: Path) -> None:
    """One clear error for each, at once."""
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with time_limit(2), pytest.raises(SourceError, match=words) as caught:
        open_source(path)
    assert len(str(caught.value)) < 300 + len(str(path))


def test_the_sound_one_of_the_hostile_files_is_read(tmp_path: Path) -> None:
    """What the others are made of is sound by itself."""
    path = tmp_path / "a.gguf"
    path.write_bytes(raw())
    with open_source(path) as source:
        np.testing.assert_array_equal(source.tensors["w"].read(), np.zeros((2, 3), np.float32))


def test_a_type_of_the_future_is_left_out(tmp_path: Path) -> None:
    """Other tensors are read all the same."""
    path = tmp_path / "a.gguf"
    path.write_bytes(raw(infos=(info(), info("new", kind=77))))
    with open_source(path) as source:
        assert list(source.tensors) == ["w"]
        assert "new (type 77 is not known)" in source.left_out[0]


def test_a_part_of_a_split_file_says_so(tmp_path: Path) -> None:
    """The other parts are named among what is left out."""
    path = tmp_path / "a-00001-of-00003.gguf"
    path.write_bytes(raw(pairs=(pair("split.count", 2, struct.pack("<H", 3)),)))
    with open_source(path) as source:
        assert any("other parts of this GGUF, which has 3" in what for what in source.left_out)


def test_a_file_cut_short_while_open_names_the_offset(tmp_path: Path) -> None:
    """The first byte that is not there."""
    path = write(tmp_path / "a.gguf", TENSORS)
    with open_source(path) as source:
        source.tensors["output.weight"].fetch(0, 1)
        os.truncate(path, path.stat().st_size - 100)
        with pytest.raises(SourceError, match=r"a\.gguf: ends at byte [\d,]+, \d+ more were expected"):
            source.tensors["output.weight"].read()


def test_damaged_files_are_refused_or_read(tmp_path: Path) -> None:
    """400 damaged files: one Qcs4wError, or tensors of the size that they state."""
    path = tmp_path / "a.gguf"
    sound = write(path, TENSORS).read_bytes()
    rng, read = np.random.default_rng(3), 0
    for _ in range(400):
        path.write_bytes(mutated(sound, rng))
        try:
            with time_limit(5), open_source(path) as source:
                for tensor in source.tensors.values():
                    assert sum(len(data) for _, data in tensor.chunks()) == tensor.nbytes
            read += 1
        except Qcs4wError:
            pass
    assert 20 < read < 380
