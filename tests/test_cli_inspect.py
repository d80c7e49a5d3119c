"""The inspect and devices commands."""

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import CommandLine
from safetensors.numpy import load_file, save_file
from test_cli_run import flip

from qcs4w_packer import Container, PackedLinear, pack_codes, save_container


@pytest.fixture
def ramp(tmp_path: Path) -> Path:
    """A container with one row of the codes -8 … 7 at scale 0.5, and one odd row more."""
    path = tmp_path / "ramp.safetensors"
    codes = np.arange(-8, 8, dtype=np.int8)[None]
    save_container(path, {"ramp.weight": PackedLinear(pack_codes(codes), np.array([0.5], np.float32), 16)})
    return path


def test_the_overview(packed_file: Path, qcs4w: CommandLine) -> None:
    """Metadata, tensors, sizes and digests are shown; the exit code is 0."""
    result = qcs4w("inspect", packed_file)
    assert result.code == 0
    for words in ("version 1", "even-high", "offset 8", "layers.0.fc.weight", "ok", "and 3 tensors as in the source"):
        assert words in result.out
    document = qcs4w("inspect", packed_file, "--json").document
    assert document["document"]["nibble_order"] == "even-high"
    assert [t["digest_ok"] for t in document["tensors"]] == [True, True]
    assert len(document["carried"]) == 3


def test_a_dump_puts_k_above_each_nibble(ramp: Path, qcs4w: CommandLine) -> None:
    """Bytes, nibbles, codes and values stand under their k, high and low told apart."""
    out = qcs4w("inspect", ramp, "--tensor", "ramp.weight").out
    lines = [line.split() for line in out.splitlines()]
    first = {line[0]: line[1:] for line in lines[3:9]}
    assert first["k"] == [str(k) for k in range(8)]
    assert first["byte"] == ["01", "23", "45", "67"]
    assert first["half"] == ["high", "low"] * 4
    assert first["nibble"] == [str(k) for k in range(8)]
    assert first["code"] == [str(k - 8) for k in range(8)]
    assert first["value"] == [f"{(k - 8) / 2:.4g}" for k in range(8)]


@pytest.mark.parametrize(
    ("layout", "nibbles", "codes"),
    [
        ("even-high", [0, 1, 2, 3], [-8, -7, -6, -5]),
        ("even-low", [1, 0, 3, 2], [-7, -8, -5, -6]),
        ("even-high-twos", [0, 1, 2, 3], [0, 1, 2, 3]),
        ("even-low-twos", [1, 0, 3, 2], [1, 0, 3, 2]),
    ],
)
def test_each_layout_reads_its_own_way(
    layout: str, nibbles: list[int], codes: list[int], ramp: Path, qcs4w: CommandLine
) -> None:
    """--layout changes how the same bytes are read."""
    document = qcs4w("inspect", ramp, "--tensor", "ramp", "--layout", layout, "--cols", "0:4", "--json").document
    (row,) = document["dump"]["rows"]
    assert (row["bytes"], row["nibbles"], row["codes"]) == (["01", "23"], nibbles, codes)


def test_ranges(packed_file: Path, qcs4w: CommandLine) -> None:
    """--rows and --cols cut out any rectangle; it may begin or end in the middle of a byte."""
    with Container(packed_file) as container:
        codes = container.load("layers.0.fc.weight").codes()
        packed = container.load("layers.0.fc.weight").packed
    arguments = ("inspect", packed_file, "--tensor", "layers.0.fc", "--rows", "3:5", "--cols", "5:14")
    rows = qcs4w(*arguments, "--json").document["dump"]["rows"]
    assert [row["row"] for row in rows] == [3, 4]
    assert [row["codes"] for row in rows] == codes[3:5, 5:14].tolist()
    assert [row["bytes"] for row in rows] == [[f"{b:02X}" for b in line] for line in packed[3:5, 2:7].tolist()]
    plain = qcs4w(*arguments).out
    assert plain.count("row ") == 2
    (last,) = qcs4w(
        "inspect", packed_file, "--tensor", "layers.0.fc", "--rows", "11", "--cols", "32:", "--json"
    ).document["dump"]["rows"]
    assert last["codes"] == codes[11, 32:].tolist()
    drawn = qcs4w("inspect", packed_file, "--tensor", "layers.0.fc", "--rows", "0", "--cols", "30:").out.splitlines()
    assert drawn[3].split() == ["k", "30", "31", "32", "pad"]
    assert drawn[5].split() == ["half", "high", "low", "high", "low"]
    assert drawn[6].split()[-1] == "8"
    assert "0:12" in qcs4w.refused("inspect", packed_file, "--tensor", "layers.0.fc", "--rows", "12:20")


def test_hex_shows_offsets_in_the_file(packed_file: Path, qcs4w: CommandLine) -> None:
    """--hex shows the bytes with offsets at which the file really has them."""
    out = qcs4w("inspect", packed_file, "--tensor", "layers.0.fc", "--hex", "--rows", "1:3", "--cols", "0:33").out
    data = packed_file.read_bytes()
    shown = [line.split() for line in out.splitlines() if not line.startswith("row")]
    assert len(shown) == 4
    for offset, *values in shown:
        assert data[int(offset, 16) :][: len(values)] == bytes.fromhex("".join(values))


def test_a_damaged_file_is_shown_all_the_same(packed_file: Path, qcs4w: CommandLine) -> None:
    """A digest that does not match is reported, the rest is shown, and the exit code is 1."""
    flip(packed_file, "layers.0.fc.weight")
    result = qcs4w("inspect", packed_file)
    assert result.code == 1
    assert "MISMATCH" in result.out
    assert "tensor 'layers.0.fc.weight': the packed bytes have sha256" in result.err
    dumped = qcs4w("inspect", packed_file, "--tensor", "layers.0.fc", "--json")
    assert dumped.code == 1
    assert len(dumped.document["dump"]["rows"]) == 4


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("version", 2, "container version 2"),
        ("nibble_order", "even-low", "nibble_order 'even-low'"),
        ("offset", 7, "offset 7"),
        (None, None, "no 'qcs4w' metadata"),
    ],
    ids=["version", "order", "offset", "no metadata"],
)
def test_what_a_reader_refuses_is_reported(
    key: str | None, value: object, words: str, packed_file: Path, tmp_path: Path, qcs4w: CommandLine
) -> None:
    """Another version, order or offset, or no metadata at all: inspect shows and says 1, verify refuses and says 2."""
    with Container(packed_file) as container:
        document = container.document
    if key:
        document[key] = value
    odd = tmp_path / "odd.safetensors"
    save_file(load_file(packed_file), odd, metadata={"qcs4w": json.dumps(document)} if key else None)
    result = qcs4w("inspect", odd)
    assert result.code == 1
    assert words in result.err
    assert "layers.0.fc.weight" in result.out
    assert qcs4w("inspect", odd, "--json").document["problems"]
    assert words in qcs4w("verify", odd).err
    assert qcs4w("verify", odd).code == 2


def described(packed_file: Path, change: dict[str, object]) -> Path:
    """The packed file with a changed description of its first tensor, or other keys of the document."""
    with Container(packed_file) as container:
        document = container.document
    for key, value in change.items():
        (document if key in document else document["tensors"]["layers.0.fc.weight"])[key] = value
    path = packed_file.with_name("changed.safetensors")
    save_file(load_file(packed_file), path, metadata={"qcs4w": json.dumps(document)})
    return path


@pytest.mark.parametrize(
    "change",
    [
        {"packed_sha256": "xyz"},
        {"aliases": ["\ud800"]},
        {"method": 7},
        {"tool": [[[[]]]]},
        {"tool": "\x1b[31mEVIL\npass"},
        {"nibble_order": "\x1b]0;EVIL\x07"},
        {"nibble_order": "\ud800"},
        {"version": 10**40},
    ],
    ids=repr,
)
def test_odd_metadata_is_shown_safely(change: dict[str, object], packed_file: Path, qcs4w: CommandLine) -> None:
    """Whatever a document says, it is reported in the schema's terms and without control characters."""
    path = described(packed_file, change)
    result = qcs4w("inspect", path)
    assert result.code in (0, 1)
    assert "\x1b" not in result.out + result.err
    assert not [line for line in result.out.splitlines() if line.startswith("pass")]
    assert qcs4w("inspect", path, "--json").document["tensors"]
    assert qcs4w("inspect", path, "--tensor", "layers.1.fc", "--json").document["dump"]


def test_a_scale_that_is_not_finite(packed_file: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """Inspect reports a NaN among the scales, exit code 1, and dumps the row all the same."""
    from qcs4w_packer.container_writer import ContainerWriter
    from qcs4w_packer.files import replacing
    from qcs4w_packer.metadata import PackedEntry

    path = tmp_path / "nan.safetensors"
    writer = ContainerWriter([PackedEntry("fc.weight", 1, 2)])
    with replacing(path) as fd:
        writer.begin(fd)
        writer.write_rows("fc.weight", 0, np.full((1, 1), 0x9A, np.uint8), np.array([np.nan], np.float32))
        writer.finish()
    result = qcs4w("inspect", path)
    assert result.code == 1
    assert "the scale of row 0 is nan" in result.err
    (row,) = qcs4w("inspect", path, "--tensor", "fc", "--json").document["dump"]["rows"]
    assert (row["codes"], row["scale"]) == ([1, 2], "nan")


def test_digests_that_nobody_has_stated(packed_file: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """Without metadata there are no digests: none is shown, and none is called wrong."""
    path = tmp_path / "bare.safetensors"
    save_file(load_file(packed_file), path)
    result = qcs4w("inspect", path)
    assert "MISMATCH" not in result.out
    assert "000000000000" not in result.out + result.err
    tensor = qcs4w("inspect", path, "--json").document["tensors"][0]
    assert (tensor["digest_ok"], tensor["packed_sha256"]) == (None, None)


def test_options_of_a_dump_need_a_tensor(packed_file: Path, checkpoint: Path, qcs4w: CommandLine) -> None:
    """An option that would be ignored is an error."""
    for option in (["--rows", "1"], ["--cols", "1"], ["--layout", "even-low"]):
        assert "--tensor" in qcs4w.refused("inspect", packed_file, *option)
    assert "pack it first" in qcs4w.refused("inspect", checkpoint, "--hex")


def test_any_weight_file_is_listed(checkpoint: Path, packed_file: Path, qcs4w: CommandLine) -> None:
    """A file that is no container is listed, and dumping a tensor of it is refused with what to do."""
    result = qcs4w("inspect", checkpoint)
    assert result.code == 0
    assert "not a qcs4w container" in result.out
    assert "[12, 33]" in result.out
    assert qcs4w("inspect", checkpoint, "--json").document["container"] is False
    assert "pack it first" in qcs4w.refused("inspect", checkpoint, "--tensor", "layers.0.fc.weight")
    assert "--tensor" in qcs4w.refused("inspect", packed_file, "--hex")


@pytest.mark.gpu
def test_devices(gpu: object, qcs4w: CommandLine) -> None:
    """Every adapter is listed with kind, backend, driver, limits and features; the one taken is marked, with why."""
    result = qcs4w("devices")
    assert result.code == 0
    for words in ("Vulkan", "max-storage-buffer-binding-size", "taken: "):
        assert words in result.out
    document = qcs4w("devices", "--json").document
    assert sum(adapter["taken"] for adapter in document["adapters"]) == 1
    assert document["reason"]
    name = document["adapters"][0]["name"]
    assert qcs4w("devices", "--adapter", name[:6].upper()).code == 0
