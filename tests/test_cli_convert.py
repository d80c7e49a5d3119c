"""The convert command."""

import json
import os
import resource
import shutil
import signal
from pathlib import Path

import foreign
import numpy as np
import pytest
from command_line import CommandLine
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from qcs4w_packer import open_packed, pack_weight, save_container
from qcs4w_packer.convert import convert_file
from qcs4w_packer.formats.outputs import OnnxTarget


@pytest.fixture
def weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Two float weights, one with an odd K."""
    shapes = {"a.fc.weight": (12, 33), "b.fc.weight": (4, 64)}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


@pytest.fixture
def packed(weights: dict[str, np.ndarray], tmp_path: Path) -> Path:
    """A container of both, with a bias for the first."""
    path = tmp_path / "packed.safetensors"
    bias = np.linspace(-1, 1, 12, dtype=np.float32)
    save_container(path, {name: pack_weight(w) for name, w in weights.items()}, biases={"a.fc.weight": bias})
    return path


@pytest.mark.parametrize(
    ("target", "output"),
    [
        ("q4gsw", "out.safetensors"),
        ("compressed-tensors", "out"),
        ("onnx", "out.onnx"),
        ("raw", "out"),
        ("npy", "out"),
        ("qcs4w", "out.safetensors"),
    ],
)
def test_there_and_back(target: str, output: str, packed: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """Each target is written, named in table and JSON, and read back to the same container bytes."""
    there = qcs4w("convert", packed, "--to", target, "-o", tmp_path / output)
    assert there.code == 0, there
    assert f"converted 2 tensors from qcs4w to {target}, codes equal; 1 other copied" in there.out
    back = qcs4w("convert", tmp_path / output, "-o", tmp_path / "back.safetensors", "--json").document
    assert (back["from"], back["to"], back["carried"]) == (target, "qcs4w", ["a.fc.bias"])
    assert [t["codes_equal"] and t["scale_loss"] for t in back["tensors"]] == [0, 0]
    before, after = load_file(packed), load_file(tmp_path / "back.safetensors")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.gpu
@pytest.mark.parametrize("target", ["compressed-tensors", "raw"])
def test_verify_and_run_take_what_convert_wrote(
    target: str, packed: Path, tmp_path: Path, qcs4w: CommandLine, gpu: object
) -> None:
    """A foreign layout runs on the GPU as our own does."""
    qcs4w("convert", packed, "--to", target, "-o", tmp_path / "out")
    assert qcs4w("verify", tmp_path / "out").code == 0
    np.save(tmp_path / "x.npy", np.eye(33, dtype=np.float32))
    for name, path in (("theirs", tmp_path / "out"), ("ours", packed)):
        result = qcs4w("run", path, "--tensor", "a.fc", "-x", tmp_path / "x.npy", "-o", tmp_path / f"{name}.npy")
        assert result.code == 0, result
    assert np.array_equal(np.load(tmp_path / "theirs.npy"), np.load(tmp_path / "ours.npy"))


def test_a_checkpoint_of_gptq(tmp_path: Path, qcs4w: CommandLine) -> None:
    """A GPTQ file becomes a container, the version that it was read as is noted, and other tensors go along."""
    codes = np.arange(-8, 8)[None].repeat(8, axis=0)
    norm = ("F32", (3,), np.float32([1, 2, 3]).tobytes())
    (tmp_path / "model").mkdir()
    path = foreign.gptq(tmp_path / "model" / "model.safetensors", codes, extra={"norm.weight": norm})
    result = qcs4w("convert", tmp_path / "model", "-o", tmp_path / "out.safetensors")
    assert result.code == 0, result
    assert "read as GPTQ version 1: zero points are stored as 7" in result.err
    with open_packed(tmp_path / "out.safetensors") as file:
        assert np.array_equal(file.load("fc").codes(), codes)
        assert file.carried_tensor("norm.weight").read().tolist() == [1, 2, 3]
        assert file.entry("fc").method == "unknown"
    assert path.exists()


def test_what_would_be_lost_is_said(tmp_path: Path, qcs4w: CommandLine) -> None:
    """Groups with scales of their own are refused with exit 2, the reason and a way out; nothing is written."""
    scales = foreign.scales_of(2, 8)
    scales[1] *= 2
    path = foreign.awq(tmp_path / "a.safetensors", np.zeros((8, 32), int), scales=scales)
    error = qcs4w.refused("convert", path, "-o", tmp_path / "out.safetensors")
    assert "8 of 8 rows have more than one scale" in error
    assert "Hint: unpack it to floats" in error
    assert not (tmp_path / "out.safetensors").exists()
    assert json.loads(qcs4w("convert", path, "-n", "--json").out)["error"]["code"] == "lossy"


def test_floats_are_for_pack(tmp_path: Path, qcs4w: CommandLine) -> None:
    """A file of floats is refused with the command that packs it."""
    np.save(tmp_path / "w.npy", np.ones((2, 4), np.float32))
    save_file({"fc.weight": np.ones((2, 4), np.float32)}, tmp_path / "w.safetensors")
    for name in ("w.npy", "w.safetensors"):
        error = qcs4w.refused("convert", tmp_path / name, "-o", tmp_path / "out.safetensors")
        assert f"qcs4w pack {tmp_path / name}" in error


def test_raw_bytes_with_a_shape(weights: dict[str, np.ndarray], tmp_path: Path, qcs4w: CommandLine) -> None:
    """Bytes that describe nothing are converted by what the user says of them."""
    weight = pack_weight(weights["a.fc.weight"])
    (tmp_path / "w.bin").write_bytes(b"head" + weight.packed.tobytes())
    np.save(tmp_path / "s.npy", weight.scales)
    said = ["--shape", "12,33", "--offset", "4", "--scales", tmp_path / "s.npy"]
    assert qcs4w("convert", tmp_path / "w.bin", *said, "-o", tmp_path / "out.safetensors").code == 0
    with open_packed(tmp_path / "out.safetensors") as file:
        assert np.array_equal(file.load("weight").packed, weight.packed)


def test_scales_of_float16_cost_what_is_said(packed: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """--scale-dtype f16 reports the largest relative error, which is the one of the scales written."""
    document = qcs4w(
        "convert", packed, "--to", "compressed-tensors", "-o", tmp_path / "ct", "--scale-dtype", "f16", "--json"
    ).document
    stored = load_file(tmp_path / "ct" / "model.safetensors")["a.fc.weight_scale"]
    assert stored.dtype == np.float16
    scales = load_file(packed)["a.fc.weight.qcs4w_scale"].astype(np.float64)
    loss = np.max(np.abs(stored[:, 0].astype(np.float64) - scales) / scales)
    assert document["tensors"][0]["scale_loss"] == loss > 0
    assert f"{loss:.2g}" in qcs4w("convert", packed, "--to", "onnx", "-n", "--scale-dtype", "f16").out
    assert "q4gsw keeps scales as f32" in qcs4w.refused(
        "convert", packed, "--to", "q4gsw", "-n", "--scale-dtype", "f16"
    )


def test_scales_beyond_float16(tmp_path: Path, qcs4w: CommandLine) -> None:
    """A scale too large for float16 is refused, one too small becomes 0 with a warning."""
    codes = pack_weight(np.ones((1, 2), np.float32))
    for scale, name in ((1e5, "large"), (1e-9, "small")):
        linear = type(codes)(codes.packed, np.float32([scale]), 2)
        save_container(tmp_path / f"{name}.safetensors", {"fc.weight": linear})
    options = ["--to", "onnx", "-n", "--scale-dtype", "f16"]
    assert "is beyond f16" in qcs4w.refused("convert", tmp_path / "large.safetensors", *options)
    result = qcs4w("convert", tmp_path / "small.safetensors", *options)
    assert (result.code, "became 0: 'fc.weight'" in result.err) == (0, True)


def test_one_tensor(packed: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """--tensor converts what it names, and says what is not in the output."""
    result = qcs4w("convert", packed, "--to", "raw", "-o", tmp_path / "out", "--tensor", "b.fc")
    assert result.code == 0
    assert "packed tensor 'a.fc.weight' (not chosen)" in result.err
    assert sorted(os.listdir(tmp_path / "out")) == ["0000.packed.bin", "0000.scales.bin", "qcs4w.json"]
    assert "did you mean 'b.fc.weight'" in qcs4w.refused("convert", packed, "-n", "--tensor", "b.fd.weight")


def test_what_a_target_cannot_hold_is_named(weights: dict[str, np.ndarray], tmp_path: Path, qcs4w: CommandLine) -> None:
    """A norm does not fit into raw pairs: it is left out with a warning, on stderr and in the JSON."""
    save_file({**weights, "norm.weight": np.ones(3, np.float32)}, tmp_path / "w.safetensors")
    qcs4w("pack", tmp_path / "w.safetensors", "-o", tmp_path / "p.safetensors")
    result = qcs4w("convert", tmp_path / "p.safetensors", "--to", "raw", "-o", tmp_path / "out")
    assert "not in the output: tensor 'norm.weight'" in result.err
    document = qcs4w("convert", tmp_path / "p.safetensors", "--to", "npy", "-n", "--json").document
    assert document["left_out"] == ["tensor 'norm.weight'"]


def test_a_dry_run_writes_nothing(packed: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """--dry-run needs no output, checks all, and leaves the folder as it was."""
    before = sorted(tmp_path.iterdir())
    result = qcs4w("convert", packed, "--to", "npy", "--dry-run")
    assert result.code == 0
    assert "would convert 2 tensors" in result.out
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "onnx", "-o", "out.safetensors"], "onnx is written to a .onnx file"),
        (["--to", "q4gsw", "-o", "out"], "-o out.safetensors"),
        (["--to", "raw", "-o", "packed.safetensors", "--force"], "is there already, and no folder"),
        (["--to", "onnx", "-o", "o.onnx", "--block", "24"], "a power of two from 16"),
        (["--to", "onnx", "-o", "o.onnx", "--block", "8"], "a power of two from 16"),
        (["--to", "raw", "-o", "out", "--block", "32"], "are of an ONNX model"),
        (["--to", "qcs4w", "-o", "packed.safetensors", "--force"], "sources are never changed"),
        (["--to", "gptq", "-o", "out"], "is not one of"),
        ([], "there is no output"),
    ],
)
def test_what_is_refused(
    arguments: list[str], message: str, packed: Path, qcs4w: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options that contradict each other or the target are refused, and the source is as it was."""
    monkeypatch.chdir(packed.parent)
    before = packed.read_bytes()
    assert message in qcs4w.refused("convert", packed.name, *arguments)
    assert packed.read_bytes() == before
    assert os.listdir(packed.parent) == [packed.name]


def test_nothing_is_replaced_without_force(packed: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """A folder that is there stays, --force replaces what convert made, and never one with other files."""
    arguments = ["convert", packed, "--to", "raw", "-o", tmp_path / "out"]
    assert qcs4w(*arguments).code == 0
    assert "exists already" in qcs4w.refused(*arguments)
    assert qcs4w(*arguments, "--force").code == 0
    (tmp_path / "out" / "thesis.txt").write_text("precious")
    assert "holds more than what was written here before" in qcs4w.refused(*arguments, "--force")
    assert (tmp_path / "out" / "thesis.txt").read_text() == "precious"


def test_the_folder_being_read_is_never_the_output(packed: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """Not even by force, and not when it is named by its own file."""
    folder = tmp_path / "out"
    qcs4w("convert", packed, "--to", "compressed-tensors", "-o", folder)
    before = (folder / "model.safetensors").read_bytes()
    arguments = ["--to", "compressed-tensors", "-o", folder, "--force"]
    for source in (folder, folder / "model.safetensors"):
        assert "sources are never changed" in qcs4w.refused("convert", source, *arguments)
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_container_stays_one_whatever_it_carries(tmp_path: Path, qcs4w: CommandLine) -> None:
    """Tensors of another tool's packing, carried along in a container, do not make it another file."""
    path = foreign.gptq(tmp_path / "g.safetensors", np.zeros((8, 16), int))
    ours = tmp_path / "ours.safetensors"
    save_container(ours, {"fc2.weight": pack_weight(np.ones((2, 4), np.float32))})
    with safe_open(ours, "np") as file:
        save_file({**load_file(ours), **load_file(path)}, tmp_path / "p.safetensors", file.metadata())
    assert qcs4w("convert", tmp_path / "p.safetensors", "-n", "--json").document["from"] == "qcs4w"


def test_damage_is_found_before_it_is_converted(packed: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """A container whose digest does not match is refused, and nothing is written."""
    data = bytearray(packed.read_bytes())
    data[-5] ^= 1
    packed.write_bytes(data)
    error = qcs4w.refused("convert", packed, "--to", "raw", "-o", tmp_path / "out")
    assert "sha256" in error
    assert os.listdir(tmp_path) == [packed.name]


# What is being read is never written to


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file below a folder."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def with_external_data(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same linears as an ONNX model whose tensors lie in model.onnx.data."""
    monkeypatch.setattr(OnnxTarget, "inline_nbytes", 0)
    convert_file(packed, tmp_path / "model.onnx", to="onnx")
    return tmp_path / "model.onnx"


@pytest.mark.parametrize("name", ["a.safetensors", "a.onnx"])
def test_external_data_of_an_onnx_source_is_not_replaced(
    name: str, with_external_data: Path, tmp_path: Path, qcs4w: CommandLine
) -> None:
    """Not where -o leads to it, and not where it would be the data file of the target."""
    import onnx

    model = onnx.load(with_external_data, load_external_data=False)
    for tensor in model.graph.initializer:
        next(item for item in tensor.external_data if item.key == "location").value = f"{name}.data"
    with_external_data.write_bytes(model.SerializeToString())
    data = (tmp_path / "model.onnx.data").rename(tmp_path / f"{name}.data")
    if name == "a.safetensors":
        (tmp_path / name).symlink_to(data)
    before = contents(tmp_path)
    arguments = ["--to", "onnx" if name == "a.onnx" else "qcs4w", "-o", tmp_path / name, "--force"]
    error = qcs4w.refused("convert", with_external_data, *arguments)
    assert "is the file being read" in error
    assert "Hint: write elsewhere" in error
    assert contents(tmp_path) == before


@pytest.mark.parametrize("target", ["raw", "npy"])
def test_scales_are_not_replaced(target: str, packed: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """The file of --scales is a source, as a file and within the folder that --force would replace."""
    qcs4w("convert", packed, "--to", target, "-o", tmp_path / "pairs")
    suffix = {"raw": ".bin", "npy": ".npy"}[target]
    (tmp_path / "w.bin").write_bytes(bytes(12 * 17))
    scales = tmp_path / "pairs" / f"0000.scales{suffix}"
    said = [tmp_path / "w.bin", "--shape", "12,33", "--scales", scales]
    (tmp_path / "link.safetensors").symlink_to(scales)
    before = contents(tmp_path)
    error = qcs4w.refused("convert", *said, "--to", target, "-o", tmp_path / "pairs", "--force")
    assert "holds the file being read" in error
    assert "is the file being read" in qcs4w.refused("convert", *said, "-o", tmp_path / "link.safetensors", "--force")
    assert contents(tmp_path) == before


def test_files_that_an_index_names_are_not_replaced(packed: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """Neither a file of a raw folder nor anything else within it is written, whichever way it is named."""
    folder = tmp_path / "raw"
    qcs4w("convert", packed, "--to", "raw", "-o", folder)
    (tmp_path / "link.safetensors").symlink_to(folder / "0000.packed.bin")
    before = contents(tmp_path)
    for source in (folder, folder / "qcs4w.json"):
        for output, message in (
            (tmp_path / "link.safetensors", "is the file being read"),
            (folder / "new.safetensors", "lies in the folder being read"),
        ):
            assert message in qcs4w.refused("convert", source, "-o", output, "--force")
        for output, message in ((folder, "the file being read"), (folder / "new", "lies in the folder being read")):
            assert message in qcs4w.refused("convert", source, "--to", "raw", "-o", output, "--force")
    assert contents(tmp_path) == before


def test_data_files_of_a_program_are_not_replaced(tmp_path: Path, qcs4w: CommandLine) -> None:
    """The .ptd files that hold a program's constants are sources as well."""
    for path in (Path(__file__).parent / "golden" / "pte").glob("external*"):
        shutil.copy(path, tmp_path)
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "external.1.ptd")
    before = contents(tmp_path)
    error = qcs4w.refused("convert", tmp_path / "external.pte", "-o", tmp_path / "link.safetensors", "--force")
    assert "is the file being read" in error
    assert contents(tmp_path) == before


def test_a_link_in_the_folder_to_be_replaced_is_a_source(packed: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """A checkpoint whose weights are a link to elsewhere, as in a download cache, is not removed under its reader."""
    folder = tmp_path / "out"
    qcs4w("convert", packed, "--to", "compressed-tensors", "-o", folder)
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    arguments = ["--to", "compressed-tensors", "-o", folder, "--force"]
    assert "holds the file being read" in qcs4w.refused("convert", folder / "model.safetensors", *arguments)
    assert (folder / "model.safetensors").is_symlink()


def test_run_does_not_replace_what_it_reads(packed: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """The scales of an npy folder are refused as output of run."""
    qcs4w("convert", packed, "--to", "npy", "-o", tmp_path / "npy")
    np.save(tmp_path / "x.npy", np.ones((1, 33), np.float32))
    arguments = ["--tensor", "a.fc", "-x", tmp_path / "x.npy", "-o", tmp_path / "npy" / "0000.scales.npy", "--force"]
    assert "is the file being read" in qcs4w.refused("run", tmp_path / "npy", *arguments)


@pytest.mark.parametrize(
    "config",
    [
        None,
        {"model_type": "bert"},
        {"quantization_config": {"quant_method": "gptq", "format": "pack-quantized"}},
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "marlin-24"}},
        {
            "architectures": ["BertModel"],
            "quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        },
        [],
    ],
    ids=["none", "floats", "gptq", "another format", "of a whole model", "no object"],
)
def test_a_model_of_the_user_is_not_taken_for_ours(
    config: object, packed: Path, tmp_path: Path, qcs4w: CommandLine
) -> None:
    """A folder with the names that convert writes, but other content, is not replaced by force."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"precious")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    before = contents(folder)
    arguments = ["--to", "compressed-tensors", "-o", folder, "--force"]
    assert "holds more than what was written here before" in qcs4w.refused("convert", packed, *arguments)
    assert contents(folder) == before


def test_what_convert_made_is_replaced_whatever_it_holds(packed: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """Another choice of tensors or another kind of pairs than before is no obstacle to --force; an odd index is."""
    for target in ("raw", "npy", "raw"):
        chosen = ["--tensor", "b.fc"] if target == "npy" else []
        result = qcs4w("convert", packed, "--to", target, "-o", tmp_path / "out", "--force", *chosen)
        assert result.code == 0, result
    for _ in range(2):
        arguments = ["--to", "compressed-tensors", "-o", tmp_path / "ct", "--force"]
        assert qcs4w("convert", packed, *arguments).code == 0
    (tmp_path / "out" / "qcs4w.json").write_text("{}")
    before = contents(tmp_path)
    arguments = ["--to", "raw", "-o", tmp_path / "out", "--force"]
    assert "holds more than what was written here before" in qcs4w.refused("convert", packed, *arguments)
    assert contents(tmp_path) == before


# Odd names


@pytest.mark.parametrize(("output", "named"), [(".", "out"), ("", "out"), ("/", "/out"), ("..", "../out")])
@pytest.mark.parametrize("target", ["qcs4w", "q4gsw", "onnx"])
def test_an_output_without_a_name(output: str, named: str, target: str, packed: Path, qcs4w: CommandLine) -> None:
    """A folder where a file is meant is refused with a name that would do."""
    suffix = ".onnx" if target == "onnx" else ".safetensors"
    error = qcs4w.refused("convert", packed, "--to", target, "-o", output)
    assert f"Hint: -o {named}{suffix}" in error


@pytest.mark.parametrize("command", [["inspect"], ["check"], ["diff"], ["convert", "-n"], ["verify"], ["pack", "-n"]])
@pytest.mark.parametrize("suffix", ["", ".safetensors", ".onnx", ".npy"])
def test_a_name_that_no_file_can_have(command: list[str], suffix: str, packed: Path, qcs4w: CommandLine) -> None:
    """A name of 300 letters is one error like any other file that is not there."""
    second = [packed] if command == ["diff"] else []
    result = qcs4w(*command, packed.parent / f"{'a' * 300}{suffix}", *second)
    assert result.code == 2, result
    assert "File name too long" in result.err
    assert "internal error" not in result.err


def test_two_tensors_of_one_name(tmp_path: Path, qcs4w: CommandLine) -> None:
    """Names that become one in the target are refused, with an option that convert has."""
    weight = pack_weight(np.ones((2, 8), np.float32))
    save_container(tmp_path / "p.safetensors", {"a": weight, "a.weight": weight})
    arguments = ["--to", "compressed-tensors", "-o", tmp_path / "out"]
    error = qcs4w.refused("convert", tmp_path / "p.safetensors", *arguments)
    assert "two tensors of the output would be named" in error
    assert "convert with --tensor" in error


def test_a_full_disk_names_the_target(packed: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """The folder's own name stands in the message, not the one that it has while it is written."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        errors = {
            target: qcs4w.refused("convert", packed, "--to", target, "-o", tmp_path / "out")
            for target in ("raw", "compressed-tensors")
        }
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    for error in errors.values():
        assert f"{tmp_path / 'out'}/" in error
        assert ".part" not in error
    assert os.listdir(tmp_path) == [packed.name]
