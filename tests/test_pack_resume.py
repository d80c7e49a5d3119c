"""A pack that is broken off: what stays, what the same command goes on with, and who may work at one time."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from making import PACKER, run_python, save_floats, save_folder, time_limit

from qcs4w_packer import (
    NonFiniteError,
    OutputError,
    PackedTensor,
    Request,
    SourceError,
    Step,
    Tally,
    Watch,
    WorkFolder,
    finish,
    open_source,
    pack_file,
    pack_shard,
    pack_weight,
    plan_pack,
    save_container,
)
from qcs4w_packer import journal as journal_module

SHARD_NBYTES = 400_000
KILLS = int(os.environ.get("QCS4W_KILLS", "4"))

# Packs, with a journal line for every tensor, and kills itself at the step that is given, if any.
CHILD = """
import os, signal, sys
from qcs4w_packer import Watch, journal, pack_file
journal._FLUSH_NBYTES = 1
source, output, shard_nbytes, last = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
left = [last]
def step(done):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
watch = Watch(step=step, note=lambda text: print(text, flush=True))
pack_file(source, output, max_shard_size=shard_nbytes or None, force=True, watch=watch)
"""


@pytest.fixture(autouse=True)
def _every_tensor_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors would all fit between two flushes of the journal."""
    monkeypatch.setattr(journal_module, "_FLUSH_NBYTES", 1)


@pytest.fixture
def source(tmp_path: Path, rng: np.random.Generator) -> Path:
    """Twelve linears and as many biases, about 4 MB."""
    arrays: dict[str, np.ndarray] = {}
    for index in range(12):
        arrays[f"layers.{index}.fc.weight"] = rng.standard_normal((251 + index, 300))
        arrays[f"layers.{index}.fc.bias"] = rng.standard_normal(251 + index)
    return save_floats(tmp_path / "model.safetensors", arrays, {"format": "pt"})


def content(path: Path) -> dict[str, bytes]:
    """Every file of a folder, or the one file, by name."""
    return {file.name: file.read_bytes() for file in (path.iterdir() if path.is_dir() else [path])}


def stop_after(count: int, error: type[BaseException] = KeyboardInterrupt) -> Watch:
    """A watch that raises an error when so many tensors have been packed."""
    seen: list[str] = []

    def packed(tensor: PackedTensor) -> None:
        seen.append(tensor.entry.name)
        if len(seen) == count:
            raise error

    return Watch(packed=packed)


def work_of(output: Path) -> Path:
    """The work folder of an output."""
    return output.parent / f".{output.name}.qcs4w"


# --- kill -9


def broken_runs(source: Path, output: Path, shards: int, chance: random.Random, seconds: float) -> Iterator[bool]:
    """Run until it ends well, killed at a random moment each time; yield after each run whether the last resumed."""
    said = ""
    while True:
        last = chance.randint(1, 30) if chance.random() < 0.5 else 0
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(source), str(output), str(shards), str(last)],
            env={**os.environ, "PYTHONPATH": str(PACKER)},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            child.wait(chance.uniform(0.4, 1.2) * seconds)
        except subprocess.TimeoutExpired:
            child.kill()
        said += child.communicate(timeout=60)[0]
        if child.returncode == 0:
            yield "resumed" in said
            return
        assert child.returncode == -signal.SIGKILL
        yield False


@pytest.mark.parametrize("shards", [0, SHARD_NBYTES], ids=["file", "folder"])
def test_killed_at_any_moment(shards: int, source: Path, tmp_path: Path) -> None:
    """After each kill -9 the old output stands whole, and in the end the new one equals that of an unbroken run.

    QCS4W_KILLS=50 makes at least fifty kills of each kind.
    """
    name = "out" if shards else "out.safetensors"
    began = time.monotonic()
    done = run_python(CHILD, source, tmp_path / f"unbroken.{name}", shards, 0)
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    unbroken = content(tmp_path / f"unbroken.{name}")
    if not shards:
        unbroken = {name: unbroken.popitem()[1]}
    chance = random.Random(20261201)
    kills = resumed = 0
    output = tmp_path / name
    while kills < KILLS:
        shutil.rmtree(output, ignore_errors=True)
        if shards:
            output.mkdir()
        old_file = output / "old.safetensors" if shards else output
        save_container(old_file, {"x.weight": pack_weight(np.ones((2, 2)))}, force=True)
        old = content(output)
        for has_resumed in broken_runs(source, output, shards, chance, seconds):
            now = content(output)
            assert now in (old, unbroken)
            kills += 1
            resumed += has_resumed
        assert now == unbroken
        assert not work_of(output).exists()
        kills -= 1  # the last of them ended well
    assert resumed, "no run went on where another had been"


# --- what is kept


def test_ctrl_c_keeps_what_is_finished(source: Path, tmp_path: Path) -> None:
    """The same command goes on, says how much it found, does not do it again, and gives the same bytes and figures."""
    whole = pack_file(source, tmp_path / "whole.safetensors")
    out = tmp_path / "out.safetensors"
    with pytest.raises(KeyboardInterrupt):
        pack_file(source, out, watch=stop_after(5))
    assert not out.exists()
    told: list[str] = []
    steps: list[Step] = []
    tensors: list[PackedTensor] = []
    report = pack_file(source, out, watch=Watch(step=steps.append, packed=tensors.append, note=told.append))
    assert told == ["resumed out.safetensors: 5 of 24 tensors were finished"]
    assert out.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    assert [t.error for t in report.packed] == [t.error for t in whole.packed]
    assert [t.entry for t in report.packed] == [t.entry for t in whole.packed]
    assert [t.resumed for t in tensors] == [True] * 5 + [False] * 7
    assert not {step.tensor for step in steps} & {t.entry.name for t in tensors if t.resumed}
    assert {step.total for step in steps} == {steps[-1].done}
    assert not work_of(out).exists()


def test_the_message_says_what_is_kept(source: Path, tmp_path: Path) -> None:
    """Ctrl-C, too, is told where the work lies and that the same command goes on."""
    told: list[str] = []
    watch = stop_after(3)
    with pytest.raises(KeyboardInterrupt):
        pack_file(source, tmp_path / "out.safetensors", watch=Watch(packed=watch.packed, note=told.append))
    (note,) = told
    assert "(3 of 24 tensors) is kept in" in note
    assert "the same command goes on" in note


def test_an_error_that_would_come_again_keeps_nothing(source: Path, tmp_path: Path) -> None:
    """NaN in the last weight of a single file: what mends it changes the file or the options, so nothing stays."""
    arrays = {f"{i}.weight": np.ones((50, 50)) for i in range(4)}
    arrays["3.weight"][7, 5] = np.nan
    path = save_floats(tmp_path / "nan.safetensors", arrays)
    with pytest.raises(NonFiniteError, match=r"tensor '3\.weight' holds nan at row 7, column 5"):
        pack_file(path, tmp_path / "out.safetensors")
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "nan.safetensors"]


def test_shards_that_are_finished_outlive_a_bad_weight(tmp_path: Path) -> None:
    """With --exclude for the bad one, the shards that do not hold it are not made again."""
    arrays = {f"{i}.weight": np.full((100, 200), i + 1.0) for i in range(6)}
    arrays["5.weight"][7, 5] = np.nan
    folder, out = save_folder(tmp_path / "nan", arrays), tmp_path / "out"
    with pytest.raises(NonFiniteError) as caught:
        pack_file(folder, out)
    assert "--exclude" in (caught.value.hint or "")
    assert "is kept in" in (caught.value.hint or "")
    told: list[str] = []
    pack_file(folder, out, request=Request(exclude=("5.weight",)), watch=Watch(note=told.append))
    assert told[0] == "starting clean: the options have changed (2 of 3 files are as they were and stay)"
    assert told[1] == "resumed model-00001-of-00003.safetensors: 2 of 2 tensors were finished"
    pack_file(folder, tmp_path / "whole", request=Request(exclude=("5.weight",)))
    assert content(out) == content(tmp_path / "whole")


@pytest.mark.parametrize("change", ["source", "options", "tool", "restart"])
def test_other_work_starts_clean(change: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was finished of another source, with other options or by another version is not taken, and that is said."""
    out = tmp_path / "out.safetensors"
    with pytest.raises(KeyboardInterrupt):
        pack_file(source, out, watch=stop_after(5))
    request = None
    if change == "source":
        data = bytearray(source.read_bytes())
        data[-1] ^= 1
        source.write_bytes(data)
    elif change == "options":
        request = Request(exclude=("layers.0.fc.weight",))
    elif change == "tool":
        monkeypatch.setattr("qcs4w_packer.work_statement.__version__", "99")
    told: list[str] = []
    pack_file(source, out, request=request, restart=change == "restart", watch=Watch(note=told.append))
    (note,) = told
    why = {
        "source": f"{source} has changed",
        "options": "the options have changed",
        "tool": "it was begun by qcs4w",
        "restart": "asked for",
    }
    assert note.startswith(f"starting clean: {why[change]}")
    pack_file(source, tmp_path / "whole.safetensors", request=request)
    assert out.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": lambda work: flip(work / "out.safetensors.part"),
    "data cut short": lambda work: os.truncate(work / "out.safetensors.part", 3000),
    "data gone": lambda work: (work / "out.safetensors.part").unlink(),
    "a torn line": lambda work: os.truncate(
        work / "out.safetensors.jsonl", (work / "out.safetensors.jsonl").stat().st_size - 9
    ),
    "journal gone": lambda work: (work / "out.safetensors.jsonl").unlink(),
    "journal of bytes": lambda work: (work / "out.safetensors.jsonl").write_bytes(b"\xff\xfe\n[]\n"),
    "plan gone": lambda work: (work / "plan.json").unlink(),
    "plan of bytes": lambda work: (work / "plan.json").write_bytes(b"\xff[}"),
    "lines of another tensor": lambda work: (work / "out.safetensors.jsonl").write_text(
        (work / "out.safetensors.jsonl").read_text().replace("layers.1.fc", "layers.77.fc")
    ),
    "lines of odd shape": lambda work: (work / "out.safetensors.jsonl").write_text(
        (work / "out.safetensors.jsonl").read_text() + '{"packed": 7}\n{"carried": "x", "sha256": 3}\n{}\n'
    ),
    "a stray file": lambda work: (work / "out" / "stray").write_bytes(b"x"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_a_broken_run_has_left_is_not_believed(
    damage: Callable[[Path], object], source: Path, tmp_path: Path
) -> None:
    """Whatever has happened to the work folder meanwhile, the result is that of an unbroken run."""
    out = tmp_path / "out.safetensors"
    with pytest.raises(KeyboardInterrupt):
        pack_file(source, out, watch=stop_after(6))
    damage(work_of(out))
    pack_file(source, out)
    pack_file(source, tmp_path / "whole.safetensors")
    assert out.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    assert not work_of(out).exists()


def test_the_finished_are_read_again(source: Path, tmp_path: Path) -> None:
    """A bit that has flipped on the disk in a finished shard is noticed, and the tensor is made again."""
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        pack_file(source, out, max_shard_size=SHARD_NBYTES, watch=stop_after(11))
    finished = sorted((work_of(out) / "out").iterdir())
    assert finished
    flip(finished[0])
    told: list[str] = []
    pack_file(source, out, max_shard_size=SHARD_NBYTES, watch=Watch(note=told.append))
    assert any("their bytes are no longer what was written" in text for text in told)
    pack_file(source, tmp_path / "whole", max_shard_size=SHARD_NBYTES)
    assert content(out) == content(tmp_path / "whole")


def test_a_shard_that_is_made_again_does_not_pass_for_finished(source: Path, tmp_path: Path) -> None:
    """It leaves the place of finished ones first, so that no other process can publish it half made."""
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        pack_file(source, out, max_shard_size=SHARD_NBYTES, watch=stop_after(11))
    finished = sorted((work_of(out) / "out").iterdir())[0]
    flip(finished)

    def stop(step: Step) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_file(source, out, max_shard_size=SHARD_NBYTES, watch=Watch(step=stop))
    assert not finished.exists()
    assert (work_of(out) / f"{finished.name}.part").exists()


def test_a_source_that_changes_under_way_is_refused(source: Path, tmp_path: Path) -> None:
    """Half of the old file and half of the new one are no checkpoint."""

    def touch(step: Step) -> None:
        os.utime(source, ns=(1, 1))

    with pytest.raises(SourceError, match="changed while it was read"):
        pack_file(source, tmp_path / "out.safetensors", watch=Watch(step=touch))
    assert not (tmp_path / "out.safetensors").exists()


def test_a_source_cut_short_names_file_and_offset(tmp_path: Path) -> None:
    """A read that meets the end names the file and the byte; the finished tensors stay."""
    arrays = {f"{i}.weight": np.ones((1000, 3000), np.float32) for i in range(4)}
    path = save_floats(tmp_path / "a.safetensors", arrays)

    def cut(tensor: PackedTensor) -> None:
        os.truncate(path, 25_000_000)

    with pytest.raises(SourceError, match=r"a\.safetensors: ends at byte 25,000,000, .* truncated") as caught:
        pack_file(path, tmp_path / "out.safetensors", watch=Watch(packed=cut))
    assert "is kept in" in (caught.value.hint or "")


# --- a full disk


def test_a_disk_that_fills_up_in_the_middle(source: Path, tmp_path: Path) -> None:
    """With a limit on file sizes the write fails for real: one error, the old output stands, and then it goes on."""
    out = tmp_path / "out.safetensors"
    whole = pack_file(source, tmp_path / "whole.safetensors")
    out.write_bytes(b"old")
    limit = whole.output_nbytes * 2 // 3
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit},) * 2)\nimport os,"
    code = CHILD.replace("import os,", limited)
    code = code.replace("pack_file(source", "from qcs4w_packer import OutputError\ntry: pack_file(source")
    code += "except OutputError as error: print(error, '|', error.hint)\n"
    done = run_python(code, source, out, 0, 0)
    assert f"cannot be written: File too large: out.safetensors will have {whole.output_nbytes:,} bytes" in done.stdout
    assert "nothing was changed | make room" in done.stdout, done.stderr
    assert "is kept in" in done.stdout
    assert out.read_bytes() == b"old"
    told: list[str] = []
    pack_file(source, out, force=True, watch=Watch(note=told.append))
    assert "resumed" in told[0]
    assert not told[0].startswith("resumed out.safetensors: 0")
    assert out.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def test_too_little_room_is_told_before_any_work(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that are missing are named, and nothing is left."""
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(OutputError, match=r"needs [\d,]+ bytes, the disk has 1,000 free: [\d,]+ are missing"):
        pack_file(source, tmp_path / "out.safetensors")
    assert os.listdir(tmp_path) == [source.name]


# --- two at one time


def test_two_runs_on_one_output(source: Path, tmp_path: Path) -> None:
    """The second is refused at once with the process that works there; the first is not disturbed."""
    out = tmp_path / "out.safetensors"
    refused: list[str] = []

    def second(step: Step) -> None:
        done = run_python(CHILD, source, out, 0, 0)
        refused.append(done.stderr.splitlines()[-1])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_file(source, out, watch=Watch(step=second))
    assert f"is being written by another run (process {os.getpid()} on " in refused[0]
    pack_file(source, out)


def test_a_lock_of_the_dead_holds_nobody(source: Path, tmp_path: Path) -> None:
    """A process that was killed leaves its lock file and not its lock."""
    out = tmp_path / "out.safetensors"
    done = run_python(CHILD, source, out, 0, 4)
    assert done.returncode == -signal.SIGKILL
    assert "process" in (work_of(out) / "lock").read_text()
    pack_file(source, out)


# Packs one shard of a plan as one process of several does.
ONE_SHARD = """
import sys
from pathlib import Path
from qcs4w_packer import Tally, Watch, WorkFolder, finish, open_source, pack_shard, plan_pack
source, output, size, index = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
with open_source(source) as opened:
    plan = plan_pack(opened, output, max_shard_size=size)
    work = WorkFolder(plan, shared=True)
    pack_shard(work, plan.shards[index], Tally(Watch(), plan.shards[index].source_nbytes))
    print(finish(work))
    work.close()
"""


def test_shards_by_several_processes(source: Path, tmp_path: Path) -> None:
    """Each makes its shard, at the same time; the last one, whichever that is, makes the output."""
    out = tmp_path / "out"
    with open_source(source) as opened:
        count = len(plan_pack(opened, out, max_shard_size=SHARD_NBYTES).shards)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", ONE_SHARD, str(source), str(out), str(SHARD_NBYTES), str(index)],
            env={**os.environ, "PYTHONPATH": str(PACKER)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    answers = [child.communicate(timeout=120)[0].strip() for child in children]
    assert [child.returncode for child in children] == [0] * count
    assert sorted(answers) == ["False"] * (count - 1) + ["True"]
    pack_file(source, tmp_path / "whole", max_shard_size=SHARD_NBYTES)
    assert content(out) == content(tmp_path / "whole")
    assert not work_of(out).exists()


def test_shards_of_other_options_do_not_mix(source: Path, tmp_path: Path) -> None:
    """Who shares the folder makes the same; anybody else is refused, as is a second worker on one shard."""
    out = tmp_path / "out"
    with open_source(source) as opened:
        plan = plan_pack(opened, out, max_shard_size=SHARD_NBYTES)
        other = plan_pack(opened, out, Request(exclude=("layers.0.fc.weight",)), max_shard_size=SHARD_NBYTES)
        work, beside = WorkFolder(plan, shared=True), WorkFolder(plan, shared=True)
        with pytest.raises(OutputError, match="another run with other options"):
            WorkFolder(other, shared=True)
        with pytest.raises(OutputError, match="is being written by another run"):
            WorkFolder(plan)
        new = work.journal(plan.shards[0]).with_name(f"{work.journal(plan.shards[0]).name}.new")
        new.touch()  # another worker's journal, just before it takes its name
        WorkFolder(plan, shared=True).close()
        assert new.exists()
        with work.holding(plan.shards[0]), pytest.raises(OutputError, match=f"shard {plan.shards[0].name} is being"):
            pack_shard(beside, plan.shards[0], Tally(Watch(), 1))
        assert not finish(work)
        work.close()
        beside.close()


def test_the_journal_can_be_read(source: Path, tmp_path: Path) -> None:
    """One JSON document a line, and a plan that says what is made of what."""
    out = tmp_path / "out.safetensors"
    with pytest.raises(KeyboardInterrupt):
        pack_file(source, out, watch=stop_after(2))
    lines = [json.loads(line) for line in (work_of(out) / "out.safetensors.jsonl").read_text().splitlines()]
    assert list(lines[0]) == ["fingerprint"]
    assert [line["packed"] for line in lines[1:]] == ["layers.0.fc.weight", "layers.1.fc.weight"]
    plan = json.loads((work_of(out) / "plan.json").read_text())
    assert set(plan) == {"tool", "sources", "options", "shards"}
    assert list(plan["sources"]) == [str(source)]


def put_link(work: Path, precious: Path) -> None:
    """Someone's folder goes by the work folder's name."""
    work.symlink_to(precious.parent)


def put_folder(work: Path, precious: Path) -> None:
    """Someone has moved a folder of their own there."""
    precious.parent.rename(work)


def put_linked_lock(work: Path, precious: Path) -> None:
    """The lock is a link to someone's file, which would be signed."""
    work.mkdir()
    (work / "lock").symlink_to(precious)


def put_linked_part(work: Path, precious: Path) -> None:
    """So is a shard to be written."""
    work.mkdir()
    (work / "model-00001-of-00011.safetensors.part").symlink_to(precious)


def put_linked_out(work: Path, precious: Path) -> None:
    """And the folder of finished shards, of which what is not known is removed."""
    work.mkdir()
    (work / "out").symlink_to(precious.parent)


def put_pipe(work: Path, precious: Path) -> None:
    """A pipe, for which a reader would wait for ever."""
    work.mkdir()
    os.mkfifo(work / "plan.json")


def put_file(work: Path, precious: Path) -> None:
    """A file that is no folder at all."""
    precious.rename(work)


@pytest.mark.parametrize(
    "put", [put_link, put_folder, put_linked_lock, put_linked_part, put_linked_out, put_pipe, put_file]
)
def test_what_is_no_work_folder_is_left_alone(put: Callable[[Path, Path], None], source: Path, tmp_path: Path) -> None:
    """Something else under the name of the work folder is refused by name; nothing of it is removed or overwritten."""
    output = tmp_path / "out"
    work = work_of(output)
    precious = tmp_path / "diary" / "pages.txt"
    precious.parent.mkdir()
    precious.write_text("precious")
    put(work, precious)
    before = sorted(tmp_path.rglob("*"))
    with time_limit(20), pytest.raises(OutputError, match="is in the way") as caught:
        pack_file(source, output, max_shard_size=SHARD_NBYTES)
    assert str(work) in str(caught.value)
    assert caught.value.hint is not None
    assert "move it elsewhere" in caught.value.hint
    assert sorted(tmp_path.rglob("*")) == before
    assert [
        path.read_text() for path in tmp_path.rglob("*") if path.name in (precious.name, work.name) and path.is_file()
    ]


def test_a_file_that_has_its_place_already_is_not_written_to(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between the output's name and the end leaves it two; when it is made again, it is whole until replaced."""
    output = tmp_path / "out.safetensors"

    def killed(work: WorkFolder) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "remove", killed)
        with pytest.raises(KeyboardInterrupt):
            pack_file(source, output)
    before = output.read_bytes()
    assert output.stat().st_nlink == 2
    (work_of(output) / f"{output.name}.jsonl").unlink(missing_ok=True)  # of a small file it has not been written yet
    with pytest.raises(KeyboardInterrupt):
        pack_file(source, output, force=True, watch=stop_after(1))
    assert output.read_bytes() == before


@pytest.mark.parametrize("name", ["plan.json", "out.safetensors.jsonl"])
def test_a_record_of_brackets_only(name: str, source: Path, tmp_path: Path) -> None:
    """A plan or a journal nested deeper than Python can read is as good as none."""
    output = tmp_path / "out.safetensors"
    work_of(output).mkdir()
    (work_of(output) / name).write_text("[" * 100_000 + "\n")
    assert pack_file(source, output).is_complete


def test_room_for_what_lies_beside(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files beside the weights are counted too: a disk that only they do not fit on is full before any work."""
    folder = save_folder(tmp_path / "model", {"a.fc.weight": rng.standard_normal((64, 64))})
    (folder / "tokenizer.json").write_bytes(b"x" * 1_000_000)
    usage = shutil.disk_usage(tmp_path)._replace(free=500_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OutputError, match="are missing"):
        pack_file(folder, tmp_path / "out")


def test_a_file_beside_that_goes_meanwhile(tmp_path: Path, rng: np.random.Generator) -> None:
    """A tokenizer that is removed while weights are packed is named, and not taken for trouble with the output."""
    folder = save_folder(tmp_path / "model", {"a.fc.weight": rng.standard_normal((64, 64))})
    beside = folder / "tokenizer.json"
    beside.write_text("{}")
    with pytest.raises(SourceError, match=r"tokenizer\.json: cannot be read any more: No such file"):
        pack_file(folder, tmp_path / "out", watch=Watch(packed=lambda tensor: beside.unlink()))
    beside.write_text("{}")
    assert pack_file(folder, tmp_path / "out").is_complete
