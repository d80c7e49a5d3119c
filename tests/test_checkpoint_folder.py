"""Checkpoint folders: shards, indexes, what lies beside them, and every fault of them told before any work."""

import json
import os
import resource
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from making import bytes_read, raw_safetensors, save_floats, write_safetensors

from qcs4w_packer import SourceError, UnsafePickleError, open_source
from qcs4w_packer.open_files import OpenFiles
from qcs4w_packer.safetensors_file import stamp_of

INDEX = "model.safetensors.index.json"
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
ONE = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}
TWO = {"b.weight": np.arange(12, dtype=np.float32).reshape(3, 4), "b.bias": np.ones(3, np.float32)}


def write_index(path: Path, weight_map: Any, total_size: Any = None) -> Path:
    """Write an index as it is given."""
    metadata = {} if total_size is None else {"metadata": {"total_size": total_size}}
    path.write_text(json.dumps({**metadata, "weight_map": weight_map}))
    return path


def sharded(folder: Path) -> Path:
    """Make a checkpoint of two shards."""
    folder.mkdir(exist_ok=True)
    save_floats(folder / A, ONE, {"format": "pt"})
    save_floats(folder / B, TWO, {"format": "pt"})
    write_index(folder / INDEX, {"a.weight": A, "b.weight": B, "b.bias": B}, 84)
    return folder


def refusal(path: Path) -> str:
    """The message and hint of the refusal to open a folder."""
    with pytest.raises(SourceError) as caught:
        open_source(path)
    return f"{caught.value} / {caught.value.hint}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound checkpoint of two shards."""
    return sharded(tmp_path / "checkpoint")


def test_shards_are_one_source(folder: Path) -> None:
    """Every tensor is there, knows its shard, and reads as it was written; one metadata for all."""
    with open_source(folder) as source:
        assert source.path == folder
        assert source.shards == (folder / A, folder / B)
        assert {name: tensor.file for name, tensor in source.tensors.items()} == {
            "a.weight": folder / A,
            "b.weight": folder / B,
            "b.bias": folder / B,
        }
        assert source.metadata == {"format": "pt"}
        assert source.left_out == ()
        for name, expected in {**ONE, **TWO}.items():
            np.testing.assert_array_equal(source.tensors[name].read(), expected, strict=True)


@pytest.mark.parametrize("name", ["model.safetensors", "adapter_model.safetensors", "model.fp16.safetensors"])
def test_a_single_file_needs_no_index(name: str, tmp_path: Path) -> None:
    """The usual name, or the only one there is."""
    save_floats(tmp_path / name, ONE)
    with open_source(tmp_path) as source:
        assert source.shards == (tmp_path / name,)
        assert source.tensors["a.weight"].file == tmp_path / name
        np.testing.assert_array_equal(source.tensors["a.weight"].read(), ONE["a.weight"])


def test_an_index_may_name_one_file(tmp_path: Path) -> None:
    """Some tools write an index for a single model.safetensors."""
    save_floats(tmp_path / "model.safetensors", ONE)
    write_index(tmp_path / INDEX, {"a.weight": "model.safetensors"})
    with open_source(tmp_path) as source:
        assert source.shards == (tmp_path / "model.safetensors",)


@pytest.mark.parametrize(
    "names",
    [
        ("model_00001-of-00002.safetensors", "model_00002-of-00002.safetensors"),
        ("model-1-of-2.safetensors", "model-2-of-2.safetensors"),
        ("shard_00.safetensors", "shard_01.safetensors"),
        ("layers.safetensors", "rest.safetensors"),
    ],
    ids=lambda names: names[0],
)
def test_shards_of_any_name(names: tuple[str, str], tmp_path: Path) -> None:
    """The index alone says how shards are named."""
    save_floats(tmp_path / names[0], ONE)
    save_floats(tmp_path / names[1], TWO)
    write_index(tmp_path / INDEX, {"a.weight": names[0], "b.weight": names[1], "b.bias": names[1]})
    with open_source(tmp_path) as source:
        assert [path.name for path in source.shards] == list(names)


def test_a_variant_is_taken_by_naming_it(folder: Path) -> None:
    """Beside the usual weights, a variant's file or index is read when it is named, and told when it is not."""
    variant = {"a.weight": ONE["a.weight"] + 1}
    save_floats(folder / "model.fp16-00001-of-00001.safetensors", variant)
    index = write_index(
        folder / "model.safetensors.index.fp16.json", {"a.weight": "model.fp16-00001-of-00001.safetensors"}
    )
    with open_source(folder) as source:
        np.testing.assert_array_equal(source.tensors["a.weight"].read(), ONE["a.weight"])
        assert any("model.fp16-00001-of-00001.safetensors" in what for what in source.left_out)
    with open_source(index) as source:
        assert source.path == folder
        np.testing.assert_array_equal(source.tensors["a.weight"].read(), variant["a.weight"])


def test_several_files_without_the_usual_name(tmp_path: Path) -> None:
    """Nothing is guessed."""
    save_floats(tmp_path / "model.fp16.safetensors", ONE)
    save_floats(tmp_path / "model.fp32.safetensors", ONE)
    told = refusal(tmp_path)
    assert "model.fp16.safetensors, model.fp32.safetensors" in told
    assert "name the one to read" in told


def test_a_folder_without_weights(tmp_path: Path) -> None:
    """What was looked for is named."""
    (tmp_path / "config.json").write_text("{}")
    assert "holds no weights, expected model.safetensors, model.safetensors.index.json" in refusal(tmp_path)


# ---- what lies beside


def test_what_is_carried_along(folder: Path) -> None:
    """Config, tokenizer, templates, code and licences; no other weights, subfolders or hidden files."""
    carried = [
        "LICENSE", "README.md", "chat_template.jinja", "config.json", "generation_config.json", "merges.txt",
        "modeling_x.py", "qwen.tiktoken", "special_tokens_map.json", "tokenizer.json", "tokenizer.model",
        "tokenizer_config.json", "vocab.txt",
    ]  # fmt: skip
    for name in carried:
        (folder / name).write_text('{"model_type": "x"}')
    weights = ["flax_model.msgpack", "pytorch_model-00001-of-00001.bin", "training_args.bin"]
    for name in (*weights, ".gitattributes", "x.exe"):
        (folder / name).write_text("x")
    for name in (".git", "onnx", "original"):
        (folder / name).mkdir()
    with open_source(folder) as source:
        assert source.beside == tuple(folder / name for name in carried)
        assert source.config == {"model_type": "x"}
        assert len(source.left_out) == 3, source.left_out
        told = " | ".join(source.left_out)
    for name in ("x.exe", ", ".join(weights), "onnx, original (subfolders are not read)"):
        assert name in told


def test_metadata_in_which_shards_differ_is_left_out(folder: Path) -> None:
    """One file's word is not given for all."""
    save_floats(folder / A, ONE, {"format": "pt", "part": "1"})
    save_floats(folder / B, TWO, {"format": "pt", "part": "2"})
    with open_source(folder) as source:
        assert source.metadata == {"format": "pt"}
        assert source.left_out == ("metadata 'part' (shards differ in it)",)


def test_links_into_a_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    """The cache of huggingface_hub is a folder of links into a folder of blobs without suffixes."""
    (folder / "config.json").write_text('{"model_type": "x"}')
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    with open_source(snapshot) as source:
        assert source.shards == (snapshot / A, snapshot / B)
        assert source.beside == (snapshot / "config.json",)
        np.testing.assert_array_equal(source.tensors["b.weight"].read(), TWO["b.weight"])


def test_a_link_to_a_private_file_is_not_carried(folder: Path, tmp_path: Path) -> None:
    """A folder from elsewhere cannot bring a file of the user's into the output; it is told."""
    (tmp_path / "secret").write_text("key")
    (folder / "vocab.txt").symlink_to(tmp_path / "secret")
    with open_source(folder) as source:
        assert source.beside == ()
        assert source.left_out == ("vocab.txt (a link that leaves the folder)",)


def test_what_is_no_file_is_not_waited_for(folder: Path) -> None:
    """Pipes, dangling links and links in a circle beside the weights are told and not opened."""
    os.mkfifo(folder / "vocab.txt")
    (folder / "merges.txt").symlink_to("nowhere")
    with open_source(folder) as source:
        assert source.beside == ()
        assert source.left_out == ("merges.txt, vocab.txt (no regular file of at most 1,073,741,824 bytes)",)
    (folder / "round.json").symlink_to("round.json")
    assert "round.json: cannot be read" in refusal(folder)


# ---- faults


def test_missing_shards_are_told_with_their_size(folder: Path) -> None:
    """Names, how many tensors they hold, and how many bytes by the index."""
    (folder / B).unlink()
    told = refusal(folder)
    assert f"{B} is missing; {INDEX} places 2 of its 3 tensors there, 60 bytes" in told
    (folder / A).unlink()
    assert f"{A}, {B} are missing; {INDEX} places 3 of its 3 tensors there, 84 bytes" in refusal(folder)


def test_a_link_that_leads_nowhere_is_a_missing_shard(folder: Path) -> None:
    """A cache whose blob was deleted."""
    (folder / B).unlink()
    (folder / B).symlink_to("../blobs/gone")
    assert f"{B} is missing ({B}: a link that leads nowhere)" in refusal(folder)


@pytest.mark.parametrize("stray", ["model-00003-of-00003.safetensors", "model-00003-of-00002.safetensors"])
def test_a_stray_shard_is_refused(stray: str, folder: Path) -> None:
    """A shard that the index does not name is of another save, or the index is."""
    save_floats(folder / stray, {"c.weight": ONE["a.weight"]})
    told = refusal(folder)
    assert f"{INDEX} does not name {stray}" in told
    assert "move them elsewhere" in told


def test_a_single_file_beside_the_shards_is_refused(folder: Path) -> None:
    """Two checkpoints in one folder: loaders differ in which they take."""
    save_floats(folder / "model.safetensors", ONE)
    assert f"{INDEX} does not name model.safetensors" in refusal(folder)


@pytest.mark.parametrize("single", [False, True])
def test_shards_without_an_index_are_refused(single: bool, folder: Path) -> None:
    """Nobody can tell whether all are there."""
    (folder / INDEX).unlink()
    if single:
        save_floats(folder / "model.safetensors", ONE)
    assert f"holds shards ({A}, {B}) and no {INDEX}" in refusal(folder)


STALE: dict[str, tuple[Mapping[str, str], str]] = {
    "a tensor that no shard has": (
        {"a.weight": A, "b.weight": B, "b.bias": B, "c": A},
        f"places tensor 'c' in {A}, which has none of that name",
    ),
    "a tensor that the index lacks": ({"a.weight": A, "b.weight": B}, f"{B} holds tensor 'b.bias', which {INDEX} does"),
    "a tensor in another shard": ({"a.weight": A, "b.weight": B, "b.bias": A}, f"in {A}, it lies in {B}"),
}


@pytest.mark.parametrize(("weight_map", "words"), STALE.values(), ids=STALE)
def test_a_stale_index_is_refused(weight_map: Mapping[str, str], words: str, folder: Path) -> None:
    """Index and headers must say the same of every tensor."""
    write_index(folder / INDEX, weight_map)
    told = refusal(folder)
    assert words in told
    assert "different saves" in told


def test_a_tensor_in_two_shards_is_refused(folder: Path) -> None:
    """Which of the two is meant cannot be known."""
    save_floats(folder / A, {**ONE, "b.bias": TWO["b.bias"]})
    assert f"tensor 'b.bias' lies in {A} and in {B}" in refusal(folder)


def test_truncated_shards_are_all_told(folder: Path) -> None:
    """Each with the size that its header describes and the size that it has."""
    size = (folder / B).stat().st_size
    os.truncate(folder / B, size - 5)
    assert (
        f"{B}: not a sound safetensors file: the header describes {size:,} bytes, the file has {size - 5:,}"
        in refusal(folder)
    )
    os.truncate(folder / A, 20)
    told = refusal(folder)
    assert "2 of 2 weight files are not sound" in told
    assert A in told
    assert B in told


def test_a_git_lfs_pointer_is_named(folder: Path) -> None:
    """A clone without Git LFS has texts in place of weights; the size of the real file stands in them."""
    (folder / B).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9950994832\n")
    told = refusal(folder)
    assert "is a Git LFS pointer to a file of 9,950,994,832 bytes" in told
    assert "git lfs pull" in told


OUTSIDE = [
    "../x.safetensors", "/tmp/x.safetensors", "sub/x.safetensors", "..\\x.safetensors", "..", ".", "",
    "a\0.safetensors", "x" * 250 + ".safetensors", "\ud800.safetensors", "x.bin", "config.json", 3, None, ["x"],
]  # fmt: skip


@pytest.mark.parametrize("place", OUTSIDE, ids=lambda place: ascii(place)[:30])
def test_places_outside_the_folder_are_refused(place: object, folder: Path) -> None:
    """An index names files of its own folder, of its own format."""
    write_index(folder / INDEX, {"a.weight": place})
    assert "expected a .safetensors file of this folder" in refusal(folder)


HOSTILE = {
    "no json": (b"{", "is not JSON"),
    "no object": (b"[]", "is not a JSON object"),
    "key twice": (b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "key 'a' occurs twice"),
    "no map": (b'{"metadata": {}}', "has no weight_map"),
    "map of another type": (b'{"weight_map": []}', "has no weight_map"),
    "empty map": (b'{"weight_map": {}}', "has no weight_map"),
    "deep": (b"[" * 100_000, "is not JSON"),
    "reserved name": (b'{"weight_map": {"__metadata__": "x.safetensors"}}', "reserved"),
    "surrogate": (b'{"weight_map": {"\\ud800": "x.safetensors"}}', "not valid Unicode"),
}


@pytest.mark.parametrize(("content", "words"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_indexes_are_refused(content: bytes, words: str, folder: Path) -> None:
    """One short error for each, by the name of the file."""
    (folder / INDEX).write_bytes(content)
    told = refusal(folder)
    assert words in told
    assert INDEX in told
    assert len(told) < 400


@pytest.mark.parametrize("total", [-1, 10**30, "84", 84.5, [], 84.0, True], ids=str)
def test_the_total_size_is_advice(total: object, folder: Path) -> None:
    """Indexes are often wrong in it; nothing but a message depends on it."""
    write_index(folder / INDEX, {"a.weight": A, "b.weight": B, "b.bias": B}, total)
    open_source(folder).close()
    (folder / B).unlink()
    assert "is missing" in refusal(folder)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"a": 1, "a": 2}', b"\xff", b" " * (17 << 20)], ids=range(5))
def test_a_bad_config_is_refused(content: bytes, folder: Path) -> None:
    """The config decides how weights lie: a broken one is no small matter."""
    (folder / "config.json").write_bytes(content)
    assert "config.json: " in refusal(folder)


def test_a_header_bomb_is_refused_before_any_work(folder: Path) -> None:
    """A header longer than the file."""
    (folder / B).write_bytes((1 << 60).to_bytes(8, "little") + bytes(100))
    assert f"{B}: not a sound safetensors file: the header claims" in refusal(folder)


# ---- descriptors, reads and changes


def many(folder: Path, count: int) -> list[str]:
    """Make a checkpoint of many small shards."""
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for i, name in enumerate(names):
        save_floats(folder / name, {f"{i}.weight": np.full((2, 3), i, np.float32)})
    write_index(folder / INDEX, {f"{i}.weight": name for i, name in enumerate(names)})
    return names


def descriptors() -> int:
    """How many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


def test_hundreds_of_shards_need_few_descriptors(tmp_path: Path) -> None:
    """400 shards under a limit of 256 open files, read in order and again; none stays open at the end."""
    many(tmp_path, 400)
    before = descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with open_source(tmp_path) as source:
            for _ in range(2):
                for i in range(400):
                    assert source.tensors[f"{i}.weight"].read()[1, 2] == i
            assert descriptors() < before + 20
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert descriptors() == before


def test_threads_may_read_at_once(tmp_path: Path) -> None:
    """Eight readers of more shards than stay open, each gets its own bytes."""
    from concurrent.futures import ThreadPoolExecutor

    many(tmp_path, 60)
    with open_source(tmp_path) as source, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: float(source.tensors[f"{i % 60}.weight"].read()[0, 0]), range(3000)))
    assert found == [i % 60 for i in range(3000)]


def test_opening_reads_headers_and_no_data(tmp_path: Path) -> None:
    """A checkpoint of 2 GB opens at the cost of its headers."""
    weight_map = {}
    for i in (1, 2):
        name = f"model-0000{i}-of-00002.safetensors"
        raw_safetensors(
            tmp_path / name, {f"{i}": {"dtype": "F32", "shape": [1 << 14, 1 << 14], "data_offsets": [0, 1 << 30]}}
        )
        os.truncate(tmp_path / name, (tmp_path / name).stat().st_size + (1 << 30))
        weight_map[f"{i}"] = name
    write_index(tmp_path / INDEX, weight_map)
    before = bytes_read()
    open_source(tmp_path).close()
    assert bytes_read() - before < 100_000


def test_a_shard_that_changes_is_told(folder: Path) -> None:
    """A file that is replaced after its header was read is not read by offsets of the old one."""
    with open_source(folder) as source:
        save_floats(folder / B, {"b.weight": TWO["b.weight"] + 1, "b.bias": TWO["b.bias"]}, {"format": "pt"})
        with pytest.raises(SourceError, match=f"{B}: has been changed since its header was read"):
            source.tensors["b.weight"].read()
        os.truncate(folder / A, 100)
        with pytest.raises(SourceError, match=f"{A}: "):
            source.tensors["a.weight"].read()


def test_a_shard_cut_short_while_open_names_the_offset(folder: Path) -> None:
    """The file and the first byte that is not there."""
    with open_source(folder) as source:
        source.tensors["b.weight"].fetch(0, 1)
        size = (folder / B).stat().st_size
        os.truncate(folder / B, size - 20)
        with pytest.raises(SourceError, match=rf"{B}: ends at byte {size - 20:,}, 8 more were expected"):
            source.tensors["b.weight"].read()


def test_reading_after_closing_is_an_error(folder: Path) -> None:
    """A closed source gives one error and opens nothing again."""
    before = descriptors()
    with open_source(folder) as source:
        tensor = source.tensors["a.weight"]
    with pytest.raises(SourceError, match="has been closed"):
        tensor.read()
    assert descriptors() == before


def test_a_refusal_leaves_no_descriptor(folder: Path) -> None:
    """Whatever was open is closed again."""
    write_index(folder / INDEX, {"a.weight": A, "b.weight": B})
    before = descriptors()
    for _ in range(3):
        refusal(folder)
    assert descriptors() == before


def test_a_read_error_names_file_and_offset(tmp_path: Path) -> None:
    """A disk that fails: the system's word, the file, and the byte. (No page of a process lies at 4096.)"""
    path = tmp_path / "memory"
    path.symlink_to("/proc/self/mem")
    with OpenFiles() as files, path.open("rb") as memory:
        files.add(path, stamp_of(memory.fileno()))
        with pytest.raises(SourceError, match=r"memory: reading at byte 4,096 failed: Input/output error"):
            files.read(path, 4096, 8)


# ---- PyTorch's .bin

BIN_INDEX = "pytorch_model.bin.index.json"
BIN_A, BIN_B = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"


def torch_save(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Save float arrays as torch does."""
    torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, path)


def sharded_bin(folder: Path) -> Path:
    """Make a checkpoint of two .bin shards."""
    folder.mkdir(exist_ok=True)
    torch_save(folder / BIN_A, ONE)
    torch_save(folder / BIN_B, TWO)
    write_index(folder / BIN_INDEX, {"a.weight": BIN_A, "b.weight": BIN_B, "b.bias": BIN_B}, 84)
    return folder


def names(source_files: Iterable[Path]) -> list[str]:
    """The names of some paths."""
    return [path.name for path in source_files]


def test_bin_shards_are_one_source(tmp_path: Path) -> None:
    """Every tensor reads as it was saved, by its shard."""
    with open_source(sharded_bin(tmp_path)) as source:
        assert names(source.shards) == [BIN_A, BIN_B]
        assert source.tensors["b.bias"].file == tmp_path / BIN_B
        for name, expected in {**ONE, **TWO}.items():
            np.testing.assert_array_equal(source.tensors[name].read(), expected, strict=True)


def test_a_single_bin(tmp_path: Path) -> None:
    """pytorch_model.bin, and no training_args.bin."""
    torch_save(tmp_path / "pytorch_model.bin", ONE)
    (tmp_path / "training_args.bin").write_bytes(b"not to be opened")
    with open_source(tmp_path) as source:
        assert names(source.shards) == ["pytorch_model.bin"]
        assert list(source.tensors) == ["a.weight"]


def test_safetensors_come_before_bin(folder: Path) -> None:
    """Of two formats the one that cannot run code is read, and the other is told."""
    sharded_bin(folder)
    with open_source(folder) as source:
        assert names(source.shards) == [A, B]
        assert source.left_out == (f"{BIN_A}, {BIN_B} (other weight files; those of {INDEX} are read)",)


def test_a_pickle_in_a_shard_is_refused(tmp_path: Path) -> None:
    """Nothing in it runs, and its danger is not hidden among other faults."""
    sharded_bin(tmp_path)
    torch.save({"b.weight": os.system}, tmp_path / BIN_B)
    with pytest.raises(UnsafePickleError, match=f"{BIN_B}: refused"):
        open_source(tmp_path)


def test_truncated_bins_are_all_told(tmp_path: Path) -> None:
    """Both are named."""
    sharded_bin(tmp_path)
    for name in (BIN_A, BIN_B):
        os.truncate(tmp_path / name, 300)
    told = refusal(tmp_path)
    assert "2 of 2 weight files are not sound" in told
    assert BIN_A in told
    assert BIN_B in told


def test_an_empty_tensor_and_an_fp8_one_are_carried(tmp_path: Path) -> None:
    """Every dtype of safetensors passes through a folder."""
    tensors = {"e": ("F32", (0, 3), b""), "q": ("F8_E4M3", (2, 2), b"\x38\x40\xb8\x00")}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with open_source(tmp_path) as source:
        assert {n: (t.dtype, t.shape) for n, t in source.tensors.items()} == {
            "e": ("F32", (0, 3)),
            "q": ("F8_E4M3", (2, 2)),
        }
        assert source.tensors["q"].fetch(0, 2) == b"\x38\x40\xb8\x00"
