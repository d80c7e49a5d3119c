"""Folders of containers that are one checkpoint: read as one file, refused by name, and unpacked shard by shard."""

import json
import os
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from making import leftovers, mutated, poke, time_limit, write_safetensors
from packed_folders import INDEX, shard_name, write_container, write_index
from safetensors import safe_open
from safetensors.numpy import load_file

from qcs4w_packer import (
    ContainerError,
    DigestError,
    OutputError,
    PackedFile,
    PackedLinear,
    Qcs4wError,
    SourceError,
    UnpackRequest,
    UsageError,
    diff_files,
    open_packed,
    pack_weight,
    unpack_file,
)
from qcs4w_packer.metadata import PackedEntry
from qcs4w_packer.packed_folder import PackedFolder
from qcs4w_packer.packed_sources import is_packed_file

A, B, C = (shard_name(number, 3) for number in (1, 2, 3))
EMBEDDING = ("BF16", (2, 3), bytes(range(12)))
NORM = ("F32", (2,), np.float32([1, 2]).tobytes())


def weight(seed: int, out_features: int = 6, in_features: int = 9) -> PackedLinear:
    """A weight of its own for each seed."""
    return pack_weight(np.random.default_rng(seed).standard_normal((out_features, in_features), np.float32))


def values(packed: PackedLinear) -> np.ndarray:
    """What a packed weight stands for, without the code under test."""
    both = np.stack([packed.packed >> 4, packed.packed & 15], axis=-1).reshape(packed.out_features, -1)
    product: np.ndarray = (both[:, : packed.in_features].astype(np.float32) - 8) * packed.scales[:, None]
    return product


def make(folder: Path) -> Path:
    """Make a checkpoint of three shards: one without a packed tensor, and one that holds a tied and a turned weight."""
    folder.mkdir()
    tied = PackedEntry("a.weight", 6, 9, aliases=("head.weight",))
    write_container(folder / A, [], {"embed.weight": EMBEDDING}, {"format": "pt"})
    write_container(
        folder / B,
        [(tied, weight(1)), (PackedEntry("b.weight", 4, 8), weight(2, 4, 8))],
        {"norm": NORM},
        {"format": "pt"},
    )
    turned = PackedEntry("c.weight", 6, 9, transposed=True, source_dtype="BF16")
    write_container(folder / C, [(turned, weight(3))], None, {"format": "pt", "only": "here"})
    (folder / "config.json").write_text('{"model_type": "llama", "dtype": "bfloat16"}\n')
    (folder / "tokenizer.model").write_bytes(b"\x00\xff" * 100)
    return write_index(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound packed folder."""
    return make(tmp_path / "packed")


def test_shards_are_one_packed_file(folder: Path) -> None:
    """Entries, aliases, carried tensors, places and metadata of all shards, whatever a shard holds."""
    with open_packed(folder) as file:
        assert isinstance(file, PackedFolder)
        assert (file.format, file.path, file.problems) == ("qcs4w", folder, [])
        assert list(file.entries) == ["a.weight", "b.weight", "c.weight"]
        assert file.carried == ["embed.weight", "norm"]
        assert file.entry("head").name == "a.weight"
        assert [shard.path.name for shard in file.shards] == [A, B, C]
        assert [path.name for path in file.beside] == ["config.json", "tokenizer.model"]
        assert file.metadata == {"format": "pt", "only": "here"}
        assert file.statement["nibble_order"] == "even-high"
        assert set(file.files) >= {folder, folder / INDEX, folder / A, folder / B, folder / C}
        assert file.nbytes == sum((folder / name).stat().st_size for name in (A, B, C))
        for name, packed in (("a.weight", weight(1)), ("c", weight(3))):
            loaded = file.load(name)
            np.testing.assert_array_equal(loaded.packed, packed.packed)
            np.testing.assert_array_equal(loaded.scales, packed.scales)
            entry = file.entry(name)
            place, scales_place = file.place(entry), file.scales_place(entry)
            assert place is not None
            assert place[0].read_bytes()[place[1] :].startswith(packed.packed.tobytes())
            assert scales_place is not None
            assert scales_place[0].read_bytes()[scales_place[1] :].startswith(packed.scales.tobytes())
            assert not file.wrong_digests(entry)
        np.testing.assert_array_equal(file.row_reader(file.entry("b"))(1, 3), weight(2, 4, 8).packed[1:3])
        embedding = file.carried_tensor("embed.weight")
        assert (embedding.dtype, embedding.shape, embedding.fetch(0, 2)) == EMBEDDING
        start = file.carried_place("norm")
        assert (folder / B).read_bytes()[start : start + 8] == NORM[2]


def test_a_single_file_is_a_folder_too(tmp_path: Path) -> None:
    """model.safetensors alone needs no index, and what lies beside it belongs to it."""
    write_container(tmp_path / "model.safetensors", [(PackedEntry("a.weight", 6, 9), weight(1))])
    (tmp_path / "config.json").write_text("{}")
    with open_packed(tmp_path) as file:
        assert isinstance(file, PackedFolder)
        assert (list(file.entries), [path.name for path in file.beside]) == (["a.weight"], ["config.json"])


def edited_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    """Edit the weight map."""
    document = json.loads((folder / INDEX).read_text())
    change(document["weight_map"])
    (folder / INDEX).write_text(json.dumps(document))


def rewritten(folder: Path, name: str, *tensors: tuple[PackedEntry, PackedLinear]) -> None:
    """Write a shard anew."""
    (folder / name).unlink()
    write_container(folder / name, tensors)


def newer(folder: Path) -> None:
    """Let a shard say that it is of a later version."""
    data = (folder / C).read_bytes()
    (folder / C).write_bytes(data.replace(b'{\\"version\\":1', b'{\\"version\\":9'))


def truncated(folder: Path) -> None:
    """Cut a shard's end off."""
    os.truncate(folder / C, (folder / C).stat().st_size - 5)


def tied_as(alias: str) -> Callable[[Path], None]:
    """Give the last shard's tensor an alias."""
    return lambda folder: rewritten(folder, C, (PackedEntry("c.weight", 6, 9, aliases=(alias,)), weight(3)))


def floats_in_first(folder: Path) -> None:
    """Put a file of floats in place of a shard that carries the same."""
    write_safetensors(folder / A, {"embed.weight": EMBEDDING})


#: What is done to a folder, and what the error says of it.
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda f: (f / B).unlink(), f"{B} is missing; {INDEX} places 7 of its 11 tensors there, "),
    "truncated": (truncated, rf"{C}: not a sound safetensors file: the header describes \d+ bytes"),
    "stray": (lambda f: shutil.copy(f / A, f / "model-00004-of-00003.safetensors"), "does not name model-00004"),
    "stale": (lambda f: edited_index(f, lambda m: m.pop("norm")), f"{B} holds tensor 'norm', which {INDEX} does not"),
    "too much": (lambda f: edited_index(f, lambda m: m.update(new=A)), f"tensor 'new' in {A}, which has none"),
    "elsewhere": (lambda f: edited_index(f, lambda m: m.update(norm=A)), f"'norm' in {A}, it lies in {B}"),
    "outside": (lambda f: edited_index(f, lambda m: m.update(norm=f"../{B}")), "expected a .safetensors file of this"),
    "twice": (lambda f: (f / INDEX).write_text('{"weight_map": {"a": "b", "a": "c"}}'), "is not JSON .*occurs twice"),
    "no index": (lambda f: (f / INDEX).unlink(), "holds shards .* and no model.safetensors.index.json"),
    "two of a name": (
        lambda f: rewritten(f, C, *((PackedEntry(f"{name}.weight", 6, 9), weight(3)) for name in "bc")),
        f"tensor 'b.weight.qcs4w_.*' lies in {B} and in {C}",
    ),
    "alias twice": (
        tied_as("head.weight"), f"'head.weight' is a name of tensor 'c.weight' of {C} and of 'a.weight' of {B}"
    ),
    "alias of another": (
        tied_as("b.weight"), f"'b.weight' is a name of tensor 'c.weight' of {C} and of 'b.weight' of {B}"
    ),
    "no metadata": (floats_in_first, f"{A}: is not a qcs4w container"),
    "newer": (newer, f"{C}: has container version 9"),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "message"), FAULTS.values(), ids=FAULTS)
def test_what_is_refused(spoil: Callable[[Path], object], message: str, folder: Path, tmp_path: Path) -> None:
    """Each fault is told by name when the folder is opened, before any output is begun."""
    spoil(folder)
    with pytest.raises(Qcs4wError, match=message) as caught:
        open_packed(folder)
    assert isinstance(caught.value, SourceError | ContainerError)
    assert is_packed_file(folder) or isinstance(caught.value, SourceError)
    with pytest.raises(type(caught.value)):
        unpack_file(folder, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed"]


@pytest.mark.parametrize(
    ("fault", "problem", "there"),
    [
        ("missing", f"{B} is missing", "c"),
        ("truncated", "not a sound safetensors file", "ab"),
        ("newer", f"{C}: has container version 9", "abc"),
        ("stale", "holds tensor 'norm', which", "abc"),
    ],
)
def test_a_broken_folder_can_be_looked_at(fault: str, problem: str, there: str, folder: Path) -> None:
    """Without strictness a fault is a problem that is told, and the sound shards are read."""
    FAULTS[fault][0](folder)
    with open_packed(folder, strict=False) as file:
        assert any(problem in text for text in file.problems), file.problems
        assert list(file.entries) == [f"{letter}.weight" for letter in there]
        assert file.load(f"{there[-1]}.weight").out_features


def test_an_output_that_is_not_there_yet(tmp_path: Path) -> None:
    """Where pack was kept from finishing, the name of its output leads to the way on."""
    for name in ("out", "out.safetensors"):
        with pytest.raises(SourceError, match="does not exist"):
            open_packed(tmp_path / name)
        (tmp_path / f".{name}.qcs4w").mkdir()
        with pytest.raises(ContainerError, match="is not finished") as caught:
            open_packed(tmp_path / name)
        assert "run the same qcs4w pack again" in str(caught.value.hint)


def test_a_folder_of_floats_is_not_packed(tmp_path: Path) -> None:
    """A checkpoint that was never packed is told from one that was."""
    for name in (A, B):
        write_safetensors(tmp_path / name, {f"{name}.weight": NORM})
    write_index(tmp_path)
    assert not is_packed_file(tmp_path)
    with pytest.raises(ContainerError):
        open_packed(tmp_path)


def test_a_shard_that_changes_under_the_reader_is_refused(tmp_path: Path) -> None:
    """What was read from a header is not used on a file that has been replaced since."""
    many_shards(tmp_path, 30)
    with open_packed(tmp_path) as file:
        first = tmp_path / shard_name(1, 30)
        data = first.read_bytes()
        first.unlink()
        first.write_bytes(data)
        with pytest.raises(SourceError, match="has been changed since its header was read"):
            file.load("layers.1")


def many_shards(folder: Path, count: int) -> None:
    """Make a checkpoint with one small weight to a shard."""
    for number in range(1, count + 1):
        entry = PackedEntry(f"layers.{number}.weight", 2, 4)
        write_container(folder / shard_name(number, count), [(entry, weight(number, 2, 4))])
    write_index(folder)


def test_hundreds_of_shards_need_few_descriptors(tmp_path: Path) -> None:
    """A hundred shards are opened, listed and read with 40 descriptors to spare."""
    many_shards(tmp_path, 100)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 40, limits[1]))
    try:
        with open_packed(tmp_path) as file:
            assert len(file.entries) == 100
            for number in (100, 1, 50, 2, 99):
                np.testing.assert_array_equal(file.load(f"layers.{number}").scales, weight(number, 2, 4).scales)
            unpack_file(tmp_path, tmp_path.with_name("floats"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(list(tmp_path.with_name("floats").iterdir())) == 101
    shutil.rmtree(tmp_path.with_name("floats"))


def floats_of(folder: Path) -> dict[str, torch.Tensor]:
    """Load every tensor as loaders of Hugging Face folders do, each from the shard that the index names."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    tensors = {}
    for name, shard in weight_map.items():
        with safe_open(folder / shard, "pt") as file:
            tensors[name] = file.get_tensor(name)
    for shard in set(weight_map.values()):
        with safe_open(folder / shard, "pt") as file:
            assert {name for name, place in weight_map.items() if place == shard} == set(file.keys())
    return tensors


def test_a_folder_is_unpacked_shard_by_shard(folder: Path, tmp_path: Path) -> None:
    """The same shards with a new index, both names of a tied weight, the rest as it was."""
    report = unpack_file(folder, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        [A, B, C, INDEX, "config.json", "tokenizer.model"]
    )
    tensors = floats_of(tmp_path / "out")
    assert set(tensors) == {"embed.weight", "norm", "a.weight", "head.weight", "b.weight", "c.weight"}
    for name, expected in (
        ("a.weight", values(weight(1))),
        ("head.weight", values(weight(1))),
        ("b.weight", values(weight(2, 4, 8))),
        ("c.weight", values(weight(3)).T),
    ):
        np.testing.assert_array_equal(tensors[name].numpy(), expected, strict=True)
    assert tensors["embed.weight"].view(torch.uint8).numpy().tobytes() == EMBEDDING[2]
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == (folder / "tokenizer.model").read_bytes()
    assert (report.files, report.beside) == ((A, B, C), ("tokenizer.model", "config.json"))
    assert report.output_nbytes == sum((tmp_path / "out" / name).stat().st_size for name in report.files)
    with safe_open(tmp_path / "out" / C, "pt") as file:
        assert file.metadata()["only"] == "here"
    assert not leftovers(tmp_path)


@pytest.mark.parametrize(
    ("config", "dtype", "expected"),
    [
        ({"dtype": "bfloat16"}, "f32", {"dtype": "float32"}),
        (
            {"torch_dtype": "float16", "text_config": {"dtype": "bfloat16"}}, "f32",
            {"torch_dtype": "float32", "text_config": {"dtype": "float32"}},
        ),
        ({"dtype": "float32"}, "bf16", {"dtype": "float32"}),
        ({"dtype": "bfloat16"}, "bf16", {"dtype": "bfloat16"}),
        ({"dtype": "float16"}, "bf16", {"dtype": "bfloat16"}),
        ({"dtype": "bfloat16"}, "source", {"dtype": "float32"}),
        ({"dtype": None, "a": {"dtype": "bfloat16"}}, "f32", {"dtype": None, "a": {"dtype": "bfloat16"}}),
        ({"quantization_config": {"quant_method": "fp8"}, "x": 1}, "f32", {"x": 1}),
    ],
)  # fmt: skip
def test_a_config_that_loaders_would_round_by(
    config: dict[str, object], dtype: str, expected: dict[str, object], folder: Path, tmp_path: Path
) -> None:
    """config.json goes along byte for byte, unless a loader that believes it would not give the weights written."""
    text = json.dumps(config) + " \n"
    (folder / "config.json").write_text(text)
    report = unpack_file(folder, tmp_path / "out", request=UnpackRequest(dtype))
    written = (tmp_path / "out" / "config.json").read_text()
    assert json.loads(written) == expected
    assert (written == text) == (config == expected) == (not report.notes)


def test_a_quantization_config_that_carried_tensors_need_stays(tmp_path: Path) -> None:
    """Where fp8 tensors go along, what describes them does, and the report says so."""
    fp8 = {"other.weight": ("F8_E4M3", (1, 2), b"\x01\x02")}
    write_container(tmp_path / "model.safetensors", [(PackedEntry("a.weight", 6, 9), weight(1))], fp8)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    report = unpack_file(tmp_path, tmp_path.with_name("out"))
    assert "quantization_config" in json.loads((tmp_path.with_name("out") / "config.json").read_text())
    assert "keeps its quantization_config" in report.notes[0]


def test_a_stack_over_two_shards(tmp_path: Path) -> None:
    """Parts are put together wherever they lie; the tensor goes where its first part was."""
    packed = tmp_path / "packed"
    packed.mkdir()
    parts = [PackedEntry(f"experts.{i}", 6, 9, stack="experts", stack_parts=3) for i in range(3)]
    write_container(packed / A, [(parts[1], weight(1)), (PackedEntry("q.weight", 6, 9), weight(9))])
    write_container(packed / B, [(parts[2], weight(2)), (parts[0], weight(0))])
    write_index(packed)
    unpack_file(packed, tmp_path / "out")
    weight_map = json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]
    assert weight_map == {"q.weight": A, "experts": B}
    np.testing.assert_array_equal(
        floats_of(tmp_path / "out")["experts"].numpy(), np.stack([values(weight(i)) for i in range(3)])
    )


def test_what_is_left_of_a_folder(folder: Path, tmp_path: Path) -> None:
    """A shard of which nothing is chosen is not written; what remains in one file needs no index."""
    request = UnpackRequest(tensors=("a", "c"), packed_only=True)
    report = unpack_file(folder, tmp_path / "two", request=request)
    assert report.files == (B, C)
    assert set(floats_of(tmp_path / "two")) == {"a.weight", "head.weight", "c.weight"}
    report = unpack_file(folder, tmp_path / "one", request=UnpackRequest(tensors=("c",), packed_only=True))
    assert sorted(path.name for path in (tmp_path / "one").glob("model*")) == ["model.safetensors"]


def test_everything_in_one_file(folder: Path, tmp_path: Path) -> None:
    """An output with the suffix is one file of all shards, without what lies beside."""
    report = unpack_file(folder, tmp_path / "out.safetensors")
    assert set(load_file_keys(tmp_path / "out.safetensors")) == {
        "embed.weight", "norm", "a.weight", "head.weight", "b.weight", "c.weight"
    }  # fmt: skip
    assert (report.files, report.beside) == (("out.safetensors",), ())


def load_file_keys(path: Path) -> list[str]:
    """The names in a safetensors file."""
    with safe_open(path, "pt") as file:
        return list(file.keys())


def test_shards_of_a_largest_size(folder: Path, tmp_path: Path) -> None:
    """--max-shard-size deals tensors out in order; one that is larger gets a file of its own."""
    report = unpack_file(folder, tmp_path / "out", request=UnpackRequest(max_shard_size=300))
    assert report.files == (A, B, C)
    tensors = floats_of(tmp_path / "out")
    assert set(tensors) == {"embed.weight", "norm", "a.weight", "head.weight", "b.weight", "c.weight"}
    np.testing.assert_array_equal(tensors["b.weight"].numpy(), values(weight(2, 4, 8)))
    sizes = [sum(t.nbytes for t in load_file_tensors(tmp_path / "out" / name)) for name in report.files]
    assert sizes == [2 * 216, 128, 216 + 12 + 8]
    write_container(tmp_path / "a.safetensors", [(PackedEntry("a.weight", 6, 9), weight(1))])
    unpack_file(tmp_path / "a.safetensors", tmp_path / "b", request=UnpackRequest(max_shard_size=1 << 30))
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["model.safetensors"]
    with pytest.raises(UsageError, match="written to a folder"):
        unpack_file(tmp_path / "a.safetensors", tmp_path / "c.safetensors", request=UnpackRequest(max_shard_size=9))


def load_file_tensors(path: Path) -> list[torch.Tensor]:
    """The tensors in a safetensors file."""
    with safe_open(path, "pt") as file:
        return [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118 - not a dict


def test_damage_leaves_no_folder(folder: Path, tmp_path: Path) -> None:
    """A wrong digest in the last shard: nothing is written, what was there before stays."""
    poke(folder / C, (folder / C).stat().st_size - 2, b"\x99")
    with pytest.raises(DigestError, match=r"tensor 'c\.weight'"):
        unpack_file(folder, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed"]


def test_only_a_folder_of_ours_is_replaced(folder: Path, tmp_path: Path) -> None:
    """--force replaces what unpack made; a checkpoint of the same file names, or a strange file, stays."""
    out = tmp_path / "out"
    unpack_file(folder, out)
    with pytest.raises(OutputError, match="exists already"):
        unpack_file(folder, out)
    unpack_file(folder, out, force=True, request=UnpackRequest("bf16"))
    assert floats_of(out)["a.weight"].dtype == torch.bfloat16
    (out / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="holds more than what was written here before"):
        unpack_file(folder, out, force=True)
    (out / "notes.txt").unlink()
    write_safetensors(out / A, {"embed.weight": EMBEDDING}, {"format": "pt"})
    with pytest.raises(OutputError, match="holds more than what was written here before"):
        unpack_file(folder, out, force=True)
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text("{}")
    with pytest.raises(OutputError, match="holds more than"):
        unpack_file(folder, config, force=True)


def test_a_source_is_never_written_to(folder: Path, tmp_path: Path) -> None:
    """Neither the folder itself, nor a place in it, nor one of its files, even with force."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for output in (folder, folder / "out", folder / A, folder / "new.safetensors"):
        with pytest.raises(OutputError, match="sources are never changed"):
            unpack_file(folder, output, force=True)
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(OutputError, match="sources are never changed"):
        unpack_file(folder, link / "out")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_disk_that_is_too_small(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is told before anything is written."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(OutputError, match=r"out: needs [\d,]+ bytes, the disk has 100 free: [\d,]+ are missing"):
        unpack_file(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_of_another_tool(tmp_path: Path, qcs4w: Callable[..., object]) -> None:
    """A compressed-tensors folder becomes a folder of floats whose config no longer says that it is quantized."""
    write_container(tmp_path / "a.safetensors", [(PackedEntry("fc.weight", 6, 16), weight(1, 6, 16))])
    qcs4w("convert", tmp_path / "a.safetensors", "--to", "compressed-tensors", "-o", tmp_path / "ct")
    config = json.loads((tmp_path / "ct" / "config.json").read_text())
    (tmp_path / "ct" / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    unpack_file(tmp_path / "ct", tmp_path / "out")
    np.testing.assert_array_equal(
        load_file(tmp_path / "out" / "model.safetensors")["fc.weight"], values(weight(1, 6, 16))
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "bert"}


def test_a_file_does_not_become_a_folder_unasked(tmp_path: Path) -> None:
    """Of a single container, -o without the suffix is refused with both ways on."""
    path = write_container(tmp_path / "a.safetensors", [(PackedEntry("a.weight", 6, 9), weight(1))])
    with pytest.raises(UsageError, match=re.escape(".safetensors file")) as caught:
        unpack_file(path, tmp_path / "out")
    assert "--max-shard-size" in str(caught.value.hint)


def test_folders_are_compared(folder: Path, tmp_path: Path) -> None:
    """Two folders are held against each other tensor by tensor, and the one code that differs is found."""
    other = make(tmp_path / "other")

    def compared() -> tuple[bool, list[bool]]:
        with open_packed(folder, strict=False) as a, open_packed(other, strict=False) as b:
            found = diff_files(a, b)
            return found.is_equal, [pair.is_equal for pair in found.pairs]

    assert compared() == (True, [True, True, True])
    with open_packed(other) as file:
        path, offset = place_of(file, "b.weight")
    poke(path, offset + 5, bytes([path.read_bytes()[offset + 5] ^ 0x10]))
    assert compared() == (False, [True, False, True])


def place_of(file: PackedFile, name: str) -> tuple[Path, int]:
    """Where the bytes of a tensor lie."""
    place = file.place(file.entry(name))
    assert place is not None
    return place


@pytest.mark.parametrize("which", [INDEX, A, B, C, "config.json"])
def test_damaged_folders_end_in_one_error_or_the_right_weights(which: str, folder: Path, tmp_path: Path) -> None:
    """Whatever happens to the bytes of a file: one clear error in little time, or floats that were meant."""
    sound = (folder / which).read_bytes()
    rng = np.random.default_rng(len(which))
    messages = []
    for number in range(40):
        (folder / which).write_bytes(mutated(sound, rng))
        out = tmp_path / f"out{number}"
        try:
            with time_limit(20):
                unpack_file(folder, out)
        except Qcs4wError as error:
            messages.append(str(error))
        else:
            if "b.weight" in (tensors := floats_of(out)):
                np.testing.assert_array_equal(tensors["b.weight"].numpy(), values(weight(2, 4, 8)))
            shutil.rmtree(out)
        assert [path.name for path in tmp_path.iterdir()] == ["packed"]
    assert len(messages) > 10
    assert max(map(len, messages)) < 2000
