"""The verify command."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from command_line import CommandLine, command, process
from safetensors.numpy import load_file
from test_cli_run import flip

from qcs4w_packer import PackedLinear, load_packed, save_container

KERNELS = Path(__file__).parent / "kernels"

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _adapter(gpu: object) -> None:
    """These tests need an adapter."""


def swap_nibbles(path: Path, name: str, out: Path) -> None:
    """Write a container with one tensor's nibbles swapped and fresh digests."""
    packed = load_packed(path, name)
    save_container(
        out, {name: PackedLinear(packed.packed << 4 | packed.packed >> 4, packed.scales, packed.in_features)}
    )


def test_a_sound_file_passes(packed_file: Path, checkpoint: Path, qcs4w: CommandLine) -> None:
    """Every tensor has one line, a verdict and its worst element; the exit code is 0."""
    result = qcs4w("verify", packed_file, "--source", checkpoint)
    assert result.code == 0
    lines = result.out.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["pass", f"layers.{i}.fc.weight"] for i in (0, 1)]
    assert all("y[" in line and "source equal" in line for line in lines[:2])
    assert lines[-1] == "2 tensors: 2 passed, 0 failed, 0 could not be checked"


def test_json_in_a_pipe(packed_file: Path) -> None:
    """`qcs4w verify FILE --json | python -m json.tool` works."""
    child = subprocess.Popen(command("verify", packed_file, "--json"), stdout=subprocess.PIPE)
    tool = subprocess.run(["python", "-m", "json.tool"], stdin=child.stdout, capture_output=True, check=False)
    assert tool.returncode == 0
    assert child.wait() == 0


def test_the_document_names_everything(packed_file: Path, qcs4w: CommandLine) -> None:
    """The JSON names tool, engine, adapter, driver, seed and, per tensor, kernel and worst element."""
    document = qcs4w("verify", packed_file, "--json", "--seed", "7", "--rows", "3").document
    assert document["seed"] == 7
    assert document["engine"].startswith("wgpu ")
    assert document["adapter"]["driver"]
    assert document["summary"] == {"pass": 2, "fail": 0, "error": 0}
    first = document["results"][0]
    assert first["rows"] == 3
    assert first["bounded"]["worst"]["error"] <= first["bounded"]["worst"]["bound"]


def test_a_flipped_bit_is_exit_code_2(packed_file: Path, qcs4w: CommandLine) -> None:
    """One flipped bit: the digest is named, the other tensor is still verified, and 2 beats 0."""
    flip(packed_file, "layers.0.fc.weight")
    result = qcs4w("verify", packed_file)
    assert result.code == 2
    assert "tensor 'layers.0.fc.weight': the packed bytes have sha256" in result.err
    assert "1 passed, 0 failed, 1 could not be checked" in result.out
    assert "ERROR  layers.0.fc.weight  not checked" in result.out
    assert "Traceback" not in result.err
    assert "Traceback" in qcs4w("verify", packed_file, "-v").err
    document = qcs4w("verify", packed_file, "--json").document
    assert document["results"][0]["error"]["code"] == "digest"
    assert document["summary"] == {"pass": 1, "fail": 0, "error": 1}


def test_swapped_nibbles_are_named(packed_file: Path, checkpoint: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """Swapped nibbles with fresh digests pass a self-check; against the source they fail and are named."""
    swapped = tmp_path / "swapped.safetensors"
    swap_nibbles(packed_file, "layers.1.fc.weight", swapped)
    assert qcs4w("verify", swapped).code == 0
    result = qcs4w("verify", swapped, "--source", checkpoint)
    assert result.code == 1
    assert "likely cause: nibbles swapped" in result.out
    assert qcs4w("verify", swapped, "--source", checkpoint, "--json").document["results"][0]["causes"][0]["name"] == (
        "nibbles swapped"
    )


def test_one_wrong_code_is_exit_code_1(tmp_path: Path, rng: np.random.Generator, qcs4w: CommandLine) -> None:
    """A kernel with one wrong code at K = 8192 fails, though the bounded probe alone could miss it."""
    from qcs4w_packer import pack_weight

    path = tmp_path / "w.safetensors"
    save_container(path, {"fc.weight": pack_weight(rng.standard_normal((4, 8192), np.float32))})
    assert qcs4w("verify", path).code == 0
    result = qcs4w("verify", path, "--kernel", KERNELS / "one_wrong_code.wgsl")
    assert result.code == 1
    assert "exact DIFFERS" in result.out
    assert "in 1 column" in result.out


def test_failures_and_errors_together(packed_file: Path, checkpoint: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """In a batch 2 beats 1, both counts stand in the JSON, and a file that cannot be read does not stop the rest."""
    swapped = tmp_path / "swapped.safetensors"
    swap_nibbles(packed_file, "layers.1.fc.weight", swapped)
    arguments = (tmp_path / "missing.safetensors", swapped, packed_file, "--source", checkpoint)
    result = qcs4w("verify", *arguments, "--json")
    assert result.code == 2
    assert result.document["summary"] == {"pass": 2, "fail": 1, "error": 1}
    assert result.document["results"][0]["tensor"] is None


def test_paths_from_a_list(packed_file: Path, tmp_path: Path) -> None:
    """--files-from reads paths from a file or from stdin."""
    listing = f"{packed_file}\n{packed_file}\n"
    (tmp_path / "list").write_text(listing)
    assert "4 tensors: 4 passed" in process("verify", "--files-from", tmp_path / "list").out
    assert "4 tensors: 4 passed" in process("verify", "--files-from", "-", stdin=listing.encode()).out
    assert process("verify", "--files-from", tmp_path / "no list").code == 2


def test_a_list_with_names_that_no_file_can_have(packed_file: Path) -> None:
    """A name of 300 letters, or with a NUL in it, is an error of its own and does not end the batch."""
    listing = f"{'a' * 300}\na\0b.safetensors\n{packed_file}\n"
    result = process("verify", "--files-from", "-", stdin=listing.encode())
    assert result.code == 2
    assert "2 passed, 0 failed, 2 could not be checked" in result.out
    assert "internal error" not in result.err


def test_own_inputs(packed_file: Path, tmp_path: Path, rng: np.random.Generator, qcs4w: CommandLine) -> None:
    """-x judges on the user's inputs, for the tensors that they name."""
    np.savez(tmp_path / "x.npz", **{"layers.1.fc": rng.standard_normal((2, 9, 12), np.float32)})
    (result,) = qcs4w("verify", packed_file, "-x", tmp_path / "x.npz", "--json").document["results"]
    assert (result["tensor"], result["rows"], result["kernel"]) == ("layers.1.fc.weight", 18, "linear_tiled")


def test_an_input_that_fits_no_tensor_is_one_complaint(packed_file: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """Where an input without a name could be that of several tensors, that is said, and nothing of a name it lacks."""
    np.save(tmp_path / "x.npy", np.ones((2, 12), np.float32))
    result = qcs4w("verify", packed_file, "-x", tmp_path / "x.npy")
    assert result.code == 2
    assert "choose one with --tensor" in result.err
    assert "no packed tensor is named" not in result.err


def test_what_the_inputs_do_not_reach_is_said(packed_file: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """Tensors without an input, and arrays without a tensor, are named: a green answer hides neither."""
    np.savez(tmp_path / "x.npz", **{"layers.1.fc": np.ones((2, 12), np.float32), "typo": np.ones((2, 12), np.float32)})
    result = qcs4w("verify", packed_file, "-x", tmp_path / "x.npz")
    assert result.code == 0
    assert "not checked, for want of an input: 'layers.0.fc.weight'" in result.err
    assert "no packed tensor is named 'typo'" in result.err
    document = qcs4w("verify", packed_file, "-x", tmp_path / "x.npz", "--json").document
    assert document["unused_inputs"] == ["typo"]
    assert [item["tensor"] for item in document["unchecked"]] == ["layers.0.fc.weight"]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (("* scales[n]", "* scales[0]"), ["exact equal", "BEYOND bound", "look at the scales"]),
        (("//! grid = ceil(M * N / WORKGROUP)", "//! grid = 1"), ["never written"]),
        (("index >= params.M * params.N", "index > params.M * params.N"), ["exact equal", "within bound", "behind y"]),
    ],
    ids=["scales", "grid", "guard"],
)
def test_a_fault_is_told_as_what_it_is(
    edit: tuple[str, str], words: list[str], tmp_path: Path, rng: np.random.Generator, qcs4w: CommandLine
) -> None:
    """Wrong scales, too few workgroups and a store too many are told apart, and no line contradicts another."""
    from qcs4w_packer import pack_weight

    source = (KERNELS.parent.parent / "examples" / "my_kernel.wgsl").read_text()
    assert source.count(edit[0]) == 1
    kernel, path = tmp_path / "mine.wgsl", tmp_path / "w.safetensors"
    kernel.write_text(source.replace(*edit))
    save_container(path, {"fc.weight": pack_weight(rng.standard_normal((70, 21), np.float32))})
    result = qcs4w("verify", path, "--kernel", kernel)
    assert result.code == 1
    assert all(word in result.out for word in words)
    assert ("none of the known ones" in result.out) == ("scales" in edit[0])


PATTERNS = {
    "wrong_tile": ("one tile: rows 16..31, columns 64..127", None),
    "missing_tail": ("columns 128.. of every row", "columns 128.. of every row"),
    "out_of_bounds": (None, None),
}


@pytest.mark.parametrize("kernel", PATTERNS)
def test_a_fault_in_a_part_is_told_by_its_place(
    kernel: str, tmp_path: Path, rng: np.random.Generator, qcs4w: CommandLine
) -> None:
    """A wrong tile, a missing tail and a store out of bounds are each reported as what they are."""
    from qcs4w_packer import pack_weight

    path = tmp_path / "w.safetensors"
    save_container(path, {"fc.weight": pack_weight(rng.standard_normal((131, 21), np.float32))})
    arguments = ("verify", path, "--rows", "33", "--kernel", KERNELS / f"{kernel}.wgsl")
    result = qcs4w(*arguments)
    assert result.code == 1
    wrong, unwritten = PATTERNS[kernel]
    (verdict,) = qcs4w(*arguments, "--json").document["results"]
    for probe in (verdict["exact"], verdict["bounded"]):
        assert (probe["pattern"], probe["unwritten_pattern"]) == (wrong, unwritten)
        assert probe["guards_intact"] == (kernel != "out_of_bounds")
    if kernel == "wrong_tile":
        assert f"in 64 columns (n = 64, 65, 66, 67, 68, 69, 70, 71, …), {wrong}; worst" in result.out
    elif kernel == "missing_tail":
        assert f"99 elements never written, {unwritten}: too few workgroups, or a store left out" in result.out
        assert "worst y[" not in result.out
    else:
        assert "exact equal" in result.out
        assert "something was written behind y" in result.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tensor", "layers.9.fc"], "no packed tensor 'layers.9.fc'"),
        (["--kernel", "linear_fast"], "no kernel 'linear_fast'"),
        (["--kernel", "missing.wgsl"], "missing.wgsl: cannot be read"),
        (["--source", "missing.npy"], "missing.npy: does not exist"),
        (["-x", "missing.npy"], "missing.npy: does not exist"),
        (["--adapter", "42"], "no adapter '42'"),
    ],
    ids=["tensor", "kernel", "kernel file", "source", "input", "adapter"],
)
def test_what_is_missing_is_said(options: list[str], words: str, packed_file: Path, qcs4w: CommandLine) -> None:
    """A tensor, kernel, source, input or adapter that is not there is exit code 2, by name."""
    result = qcs4w("verify", packed_file, *options)
    assert result.code == 2
    assert words in result.err
    assert "Traceback" not in result.err


def test_an_input_beyond_the_domain_is_refused(packed_file: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """Inputs so large that float32 could overflow cannot be judged: exit code 2, with the rule."""
    np.save(tmp_path / "x.npy", np.full((1, 12), 3e37, np.float32))
    result = qcs4w("verify", packed_file, "--tensor", "layers.1.fc", "-x", tmp_path / "x.npy")
    assert result.code == 2
    assert "2^127" in result.err


def test_a_source_that_does_not_fit(packed_file: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """A source without the tensor, or with another shape, is an error of that tensor."""
    np.savez(tmp_path / "s.npz", **{"layers.0.fc.weight": np.ones((3, 3), np.float32)})
    document = qcs4w("verify", packed_file, "--source", tmp_path / "s.npz", "--json").document
    codes = [result["error"]["code"] for result in document["results"]]
    assert codes == ["usage", "unknown_tensor"]


def test_a_real_model(model: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """All 37 linears of all-MiniLM-L6-v2 are packed, verified on the GPU, and equal to their source packed again."""
    source, packed = model / "model.safetensors", tmp_path / "packed.safetensors"
    assert len(qcs4w("pack", source, "-o", packed, "--json").document["packed"]) == 37
    result = qcs4w("verify", packed, "--source", source, "--json")
    assert result.code == 0
    assert result.document["summary"] == {"pass": 37, "fail": 0, "error": 0}
    assert all(r["source"]["equal_bytes"] for r in result.document["results"])
    original, copied = load_file(source), load_file(packed)
    for name in set(original) & set(copied):
        assert original[name].tobytes() == copied[name].tobytes()
    assert len(set(original) & set(copied)) == len(original) - 37


def test_defaults_are_the_librarys() -> None:
    """The defaults of --rows and --seed are those of the Python call."""
    from qcs4w_cli.verify import command as verify_command
    from qcs4w_gpu.verify import DEFAULT_ROWS, DEFAULT_SEED

    defaults = {parameter.name: parameter.default for parameter in verify_command.params}
    assert (defaults["rows"], defaults["seed"]) == (DEFAULT_ROWS, DEFAULT_SEED)
