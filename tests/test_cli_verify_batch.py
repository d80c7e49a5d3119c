"""verify: batches from manifests, folders and globs, cut into shards."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from cases import open_gpu
from command_line import CommandLine, process
from test_cli_run import flip
from test_cli_verify import swap_nibbles

from qcs4w_cli.verify_batch import Batch
from qcs4w_cli.verify_requests import Request, Thresholds
from qcs4w_cli.verify_work import Device, Setting, Work
from qcs4w_gpu import Kernel, Verdict
from qcs4w_packer import pack_weight, save_container

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _adapter(gpu: object) -> None:
    """These tests need an adapter."""


def save_packed(path: Path, *names: str, size: tuple[int, int] = (8, 12)) -> Path:
    """Write a container with random weights of these names."""
    draw = np.random.default_rng(len(path.name))
    save_container(path, {name: pack_weight(draw.standard_normal(size, np.float32)) for name in names})
    return path


def manifest_of(path: Path, *lines: "dict[str, Any] | str") -> Path:
    """Write a manifest; strings as they are."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def places(document: dict[str, Any]) -> list[tuple[str, str | None]]:
    """The file name and tensor of each result."""
    return [(Path(result["file"]).name, result["tensor"]) for result in document["results"]]


def test_a_manifest_says_what_goes_with_what(
    packed_file: Path, checkpoint: Path, tmp_path: Path, rng: np.random.Generator, qcs4w: CommandLine
) -> None:
    """Each line has its own file, tensor, input, source, rows, seed; paths are relative to the manifest."""
    np.save(tmp_path / "x.npy", rng.standard_normal((7, 12), np.float32))
    (tmp_path / "lists").mkdir()
    source = {"source": f"../{checkpoint.name}"}
    manifest = manifest_of(
        tmp_path / "lists" / "batch.jsonl",
        {"file": "../packed.safetensors", "tensor": "layers.1.fc", "input": "../x.npy"} | source,
        "",
        {"file": "../packed.safetensors", "rows": 3, "seed": 5},
    )
    document = qcs4w("verify", "--manifest", manifest, "--json").document
    assert document["summary"] == {"pass": 3, "fail": 0, "error": 0}
    assert [(r["line"], r["tensor"], r["rows"]) for r in document["results"]] == [
        (1, "layers.1.fc.weight", 7),
        (3, "layers.0.fc.weight", 3),
        (3, "layers.1.fc.weight", 3),
    ]
    assert document["results"][0]["source"]["equal_bytes"]
    assert document["results"][1]["source"] is None


BAD_LINES = {
    "no JSON": ('{"file": }', "is no JSON: Expecting value, at column 10"),
    "not UTF-8": ('{"file": "\udcff"}', "is no JSON"),
    "a list": ("[1]", "is no JSON object"),
    "no file": ('{"tensor": "a"}', "names no file"),
    "two files": ('{"file": "packed.safetensors", "file": "other.safetensors"}', "says 'file' twice"),
    "a typo": ('{"file": "a", "tensors": "b"}', "'tensors' is not known"),
    "no path": ('{"file": 7}', "file is 7, expected a path"),
    "no rows": ('{"file": "a", "rows": 0}', "rows is 0, expected a whole number from 1 to 4294967295"),
    "no seed": ('{"file": "a", "seed": 18446744073709551616}', "expected a whole number from 0 to 1844674407370955"),
    "half a row": ('{"file": "a", "rows": 1.5}', "rows is 1.5"),
    "true rows": ('{"file": "a", "rows": true}', "rows is true"),
    "no number": ('{"file": "a", "source": "s", "max_quant_error": NaN}', "max_quant_error is NaN"),
    "no source": ('{"file": "a", "max_quant_error": 0.1}', "names no source, to measure"),
    "no input": ('{"file": "a", "output": "y.npy"}', "names an output without its input"),
    "too long": ('{"file": "' + "a" * (1 << 20) + '"}', "is longer than"),
    "too deep": ("[" * 100_000, "is no JSON"),
}


def test_bad_lines_are_named_and_the_rest_goes_on(packed_file: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """Every bad line is an error with its number, the sound ones around it are verified, and the exit code is 2."""
    manifest = tmp_path / "batch.jsonl"
    lines = [
        '{"file": "packed.safetensors"}',
        *(text for text, _ in BAD_LINES.values()),
        '{"file": "packed.safetensors"}',
    ]
    manifest.write_bytes("\n".join(lines).encode(errors="surrogateescape"))  # the last one without an end of line
    result = qcs4w("verify", "--manifest", manifest, "--json")
    assert result.code == 2
    assert result.document["summary"] == {"pass": 4, "fail": 0, "error": len(BAD_LINES)}
    assert not result.document["stopped"]
    bad = [each for each in result.document["results"] if each["status"] == "error"]
    for number, (each, (_, words)) in enumerate(zip(bad, BAD_LINES.values(), strict=True), start=2):
        assert each["line"] == number
        assert each["error"]["message"].startswith(f"{manifest}: line {number}: ")
        assert words in each["error"]["message"]


def test_a_manifest_may_begin_as_some_editors_write_it(packed_file: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """A byte order mark and lines that end in CR LF are no fault; seeds are as large as --seed takes them."""
    line = b'{"file": "packed.safetensors", "seed": 18446744073709551615}\r\n'
    (tmp_path / "m.jsonl").write_bytes(b"\xef\xbb\xbf" + line + line)
    assert qcs4w("verify", "--manifest", tmp_path / "m.jsonl", "--json").document["summary"]["pass"] == 4


def test_a_line_may_name_a_folder(packed_file: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """A folder in a manifest stands for the packed files in it, as it does as an argument; one without any is named."""
    for name in ("some/a", "some/b"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.safetensors").write_bytes(packed_file.read_bytes())
    (tmp_path / "none").mkdir()
    manifest = manifest_of(tmp_path / "m.jsonl", {"file": "some", "rows": 2}, {"file": "none"})
    document = qcs4w("verify", "--manifest", manifest, "--json").document
    assert document["summary"] == {"pass": 4, "fail": 0, "error": 1}
    assert {(result["line"], result.get("rows")) for result in document["results"]} == {(1, 2), (2, None)}
    assert "there is no packed file in this folder" in document["results"][-1]["error"]["message"]


def test_a_fault_of_ours_costs_one_tensor(packed_file: Path) -> None:
    """An error that nobody foresaw, before or after a tensor is judged, is that tensor's, and the rest goes on."""

    def stumble(work: Work, verdict: Verdict) -> None:
        raise ZeroDivisionError(work.entry.name)

    device = Device(open_gpu)
    wrong = Setting(device, kernel=cast(Kernel, object()))  # has none of a kernel's attributes
    requests = [Request(packed_file, ("layers.0.fc",)), Request(packed_file)]
    seen = [outcome.result["error"] for outcome in Batch(wrong).results(requests)]
    assert [error["code"] for error in seen] == ["internal"] * 3
    assert all(error["message"].startswith("internal error: AttributeError: ") for error in seen)
    assert all("please report it" in error["hint"] for error in seen)

    strict = Request(packed_file, source=packed_file.parent / "model.safetensors", thresholds=Thresholds(0.0))
    results = [outcome.result for outcome in Batch(Setting(device), on_failure=stumble).results([strict, *requests])]
    device.close()
    assert [result["status"] for result in results] == ["error"] * 2 + ["pass"] * 3
    assert results[0]["error"]["message"] == "internal error: ZeroDivisionError: layers.0.fc.weight"


def test_a_kernel_is_not_passed_over_in_silence(packed_file: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """A line with an output is an error where a kernel is to be judged: it would not run."""
    np.save(tmp_path / "x.npy", np.ones((1, 12), np.float32))
    line = {"file": "packed.safetensors", "tensor": "layers.1.fc", "input": "x.npy", "output": "x.npy"}
    manifest = manifest_of(tmp_path / "m.jsonl", line)
    result = qcs4w("verify", "--manifest", manifest, "--kernel", "linear_naive")
    assert result.code == 2
    assert "no kernel runs, --kernel has no meaning" in result.err


def test_stdin_is_read_once(packed_file: Path, qcs4w: CommandLine) -> None:
    """Two lists, or a list and an input, from stdin are refused: the second would be empty."""
    for options in (["--manifest", "-", "--files-from", "-"], ["-x", "-", "--manifest", "-"]):
        assert "cannot share stdin" in qcs4w.refused("verify", packed_file, *options)


def test_strict_stops_at_a_bad_line(packed_file: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """--strict: what stands before the bad line is reported, what stands after it is not, and that is said."""
    manifest = manifest_of(tmp_path / "m", {"file": "packed.safetensors"}, "?", {"file": "packed.safetensors"})
    result = qcs4w("verify", "--manifest", manifest, "--strict", "--json")
    assert result.code == 2
    assert result.document["summary"] == {"pass": 2, "fail": 0, "error": 1}
    assert result.document["stopped"]
    assert "stopped there" in qcs4w("verify", "--manifest", manifest, "--strict").err


def test_a_manifest_on_stdin(packed_file: Path) -> None:
    """`-` reads the manifest from stdin, with paths relative to the current folder."""
    done = process("verify", "--manifest", "-", stdin=b'{"file": "packed.safetensors"}\n', cwd=packed_file.parent)
    assert done.code == 0
    assert "2 tensors: 2 passed" in done.out


def test_manifests_that_cannot_be_read(tmp_path: Path, qcs4w: CommandLine) -> None:
    """A manifest that is missing, a folder, or empty is one error."""
    assert "missing: cannot be read" in qcs4w.refused("verify", "--manifest", tmp_path / "missing")
    assert "cannot be read" in qcs4w.refused("verify", "--manifest", tmp_path)
    assert "missing: cannot be read" in qcs4w.refused("verify", tmp_path, "--manifest", tmp_path / "missing")
    (tmp_path / "empty").write_text("\n\n")
    assert "there is nothing to verify" in qcs4w.refused("verify", "--manifest", tmp_path / "empty")


def test_folders_and_globs(packed_file: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """A folder stands for its packed files, sorted, and a glob for what it matches; other files are passed over."""
    folder = tmp_path / "many"
    folder.mkdir()
    for name in ("b", "a", "c"):
        save_packed(folder / f"{name}.safetensors", "fc.weight")
    (folder / "model.safetensors").write_bytes((packed_file.parent / "model.safetensors").read_bytes())
    (folder / "notes.txt").write_text("no weights")
    expected = [(f"{name}.safetensors", "fc.weight") for name in "abc"]
    assert places(qcs4w("verify", folder, "--json").document) == expected
    assert places(qcs4w("verify", folder / "[ab].*", "--json").document) == expected[:2]
    assert places(qcs4w("verify", tmp_path / "**" / "c.*", "--json").document) == expected[2:]
    (folder / "b.safetensors").write_bytes(b"\0" * 7)
    result = qcs4w("verify", folder, "--json")
    assert result.code == 2
    assert result.document["summary"] == {"pass": 2, "fail": 0, "error": 1}


def test_nothing_in_a_folder_or_glob_is_said(tmp_path: Path, packed_file: Path, qcs4w: CommandLine) -> None:
    """A folder without a packed file, and a glob without a match, are errors; the rest goes on."""
    (tmp_path / "none").mkdir()
    result = qcs4w("verify", tmp_path / "none", tmp_path / "*.nothing", packed_file)
    assert result.code == 2
    assert "there is no packed file in this folder\nHint: float weights are packed by qcs4w pack" in result.err
    assert "*.nothing: matches no file" in result.err
    assert "2 passed, 0 failed, 2 could not be checked" in result.out


def test_a_folder_without_packed_files_does_not_end_a_glob(tmp_path: Path, qcs4w: CommandLine) -> None:
    """What a pattern matches after such a folder is verified all the same."""
    (tmp_path / "many" / "a").mkdir(parents=True)
    save_packed(tmp_path / "many" / "b.safetensors", "fc.weight")
    document = qcs4w("verify", tmp_path / "many" / "*", "--json").document
    assert places(document) == [("a", None), ("b.safetensors", "fc.weight")]
    assert document["summary"] == {"pass": 1, "fail": 0, "error": 1}


def test_every_tensor_is_in_exactly_one_shard(packed_file: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """The shards together are the whole batch, errors included, none twice; more shards than tensors is no error."""
    many = save_packed(tmp_path / "many.safetensors", *(f"{i}.weight" for i in range(5)))
    manifest = manifest_of(tmp_path / "m.jsonl", {"file": "many.safetensors"}, "?", {"file": "missing.safetensors"})
    arguments = ("verify", packed_file, many, "--manifest", manifest, "--json")
    whole = places(qcs4w(*arguments).document)
    assert len(whole) == 2 + 5 + 5 + 2
    for count in (2, 9):
        parts = [qcs4w(*arguments, "--shard", f"{i}/{count}").document for i in range(1, count + 1)]
        seen = [place for part in parts for place in places(part)]
        assert sorted(seen, key=str) == sorted(whole, key=str)
        assert all(abs(len(part["results"]) - len(whole) / count) < 1 for part in parts)
        assert parts[0]["shard"] == f"1/{count}"


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2", "1/2/3"])
def test_bad_shards(text: str, packed_file: Path, qcs4w: CommandLine) -> None:
    """A shard that is not i/n with i from 1 to n is refused."""
    assert "is not i/n" in qcs4w.refused("verify", packed_file, "--shard", text)


def test_fail_fast(packed_file: Path, checkpoint: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """--fail-fast stops at the first tensor that fails or cannot be checked; nothing after it is reported."""
    swapped = tmp_path / "swapped.safetensors"
    swap_nibbles(packed_file, "layers.1.fc.weight", swapped)
    arguments = (packed_file, swapped, packed_file, "--source", checkpoint, "--fail-fast", "--json")
    for jobs in ("1", "4"):
        result = qcs4w("verify", *arguments, "--jobs", jobs)
        assert result.code == 1
        assert result.document["summary"] == {"pass": 2, "fail": 1, "error": 0}
        assert result.document["stopped"]
    flip(packed_file, "layers.0.fc.weight")
    result = qcs4w("verify", packed_file, "--fail-fast", "--json")
    assert (result.code, result.document["summary"]) == (2, {"pass": 0, "fail": 0, "error": 1})


def test_two_tensors_of_one_name(tmp_path: Path, qcs4w: CommandLine) -> None:
    """Tensors of one name in two files are two results; the file tells them apart."""
    for name in ("a", "b"):
        save_packed(tmp_path / f"{name}.safetensors", "fc.weight")
    document = qcs4w("verify", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json").document
    assert places(document) == [("a.safetensors", "fc.weight"), ("b.safetensors", "fc.weight")]


def test_jobs_do_not_change_the_answer(packed_file: Path, tmp_path: Path, qcs4w: CommandLine) -> None:
    """Whatever the number of threads, the same results come in the same order."""
    many = save_packed(tmp_path / "many.safetensors", *(f"{i}.weight" for i in range(9)), size=(33, 65))
    documents = [qcs4w("verify", packed_file, many, "--jobs", jobs, "--json").document for jobs in ("1", "2", "7")]
    assert documents[0]["results"] == documents[1]["results"] == documents[2]["results"]


def test_files_are_not_kept_open(tmp_path: Path, qcs4w: CommandLine) -> None:
    """A batch of many files holds a few of them open: descriptors do not run out."""
    import resource

    for index in range(60):
        save_packed(tmp_path / f"{index:02}.safetensors", "fc.weight")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 45, limits[1]))
    try:
        assert qcs4w("verify", tmp_path, "--json").document["summary"]["pass"] == 60
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_thresholds_of_the_quantization_error(packed_file: Path, checkpoint: Path, qcs4w: CommandLine) -> None:
    """--max-quant-error is a verdict of its own; a pattern's own threshold counts before the general one."""
    arguments = ("verify", packed_file, "--source", checkpoint)
    assert qcs4w(*arguments, "--max-quant-error", "0.5").code == 0
    result = qcs4w(*arguments, "--max-quant-error", "0.01")
    assert result.code == 1
    assert result.out.count("is above the threshold of 0.01") == 2
    assert "likely cause" not in result.out
    assert "source equal" in result.out
    limits = ("--max-quant-error", "*.1.*=0.01", "--max-quant-error", "0.5")
    document = qcs4w(*arguments, *limits, "--json").document
    assert [r["status"] for r in document["results"]] == ["pass", "fail"]
    assert [r["max_quant_error"] for r in document["results"]] == [0.5, 0.01]
    assert [r["exceeds_quant_error"] for r in document["results"]] == [False, True]
    assert "no tensor fits '*.9.*'" in qcs4w(*arguments, "--max-quant-error", "*.9.*=0.01").err
    document = qcs4w(
        *arguments, "--max-quant-error", r"re:.*\.1\..*=0.01", "--max-quant-error", "0.5", "--json"
    ).document
    assert [r["max_quant_error"] for r in document["results"]] == [0.5, 0.01]
    assert "unterminated" in qcs4w.refused(*arguments, "--max-quant-error", "re:(=0.01")


def test_thresholds_for_the_lines_of_a_manifest(
    packed_file: Path, checkpoint: Path, tmp_path: Path, qcs4w: CommandLine
) -> None:
    """--max-quant-error holds for lines with a source, a threshold of their own before it; one without is an error."""
    line = {"file": packed_file.name, "tensor": "layers.1.fc", "source": checkpoint.name}
    manifest = manifest_of(tmp_path / "m", line, line | {"max_quant_error": 0.01}, {"file": packed_file.name})
    document = qcs4w("verify", "--manifest", manifest, "--max-quant-error", "0.5", "--json").document
    assert [r["status"] for r in document["results"]] == ["pass", "fail", "error"]
    assert "names no source" in document["results"][2]["error"]["message"]
    assert "needs --source" in qcs4w.refused("verify", packed_file, "--manifest", manifest, "--max-quant-error", "0.5")


def test_bad_thresholds(packed_file: Path, checkpoint: Path, qcs4w: CommandLine) -> None:
    """A threshold without a source, or one that is no number, is refused."""
    assert "needs --source" in qcs4w.refused("verify", packed_file, "--max-quant-error", "0.1")
    for text in ("a", "-1", "nan", "=0.1", "*=inf"):
        assert "neither X nor PATTERN=X" in qcs4w.refused(
            "verify", packed_file, "--source", checkpoint, "--max-quant-error", text
        )


def test_a_lost_device_costs_one_tensor(packed_file: Path) -> None:
    """A device that goes away in the middle: its tensor is named, the rest runs on a new one, nothing counts twice."""
    script = """
import json, sys
from pathlib import Path
from cases import open_gpu
from qcs4w_cli.verify_batch import Batch
from qcs4w_cli.verify_requests import Request
from qcs4w_cli.verify_work import Device, Setting

path, device = Path(sys.argv[1]), Device(open_gpu)

def requests():
    yield Request(path, ("layers.0.fc",))
    device.gpu._device.destroy()
    yield Request(path, ("layers.1.fc",))
    yield Request(path)

results = [outcome.result for outcome in Batch(Setting(device)).results(requests())]
seen = [(r["tensor"], r["error"]["code"] if "error" in r else r["status"]) for r in results]
print(json.dumps([seen, device.opened]))
device.close()
"""
    tests = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ["PYTHONPATH"]])}
    # In a process of its own: engines have been seen to crash after a loss.
    done = subprocess.run(
        [sys.executable, "-c", script, packed_file], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        [
            ["layers.0.fc.weight", "pass"],
            ["layers.1.fc.weight", "device_lost"],
            ["layers.0.fc.weight", "pass"],
            ["layers.1.fc.weight", "pass"],
        ],
        2,
    ]
