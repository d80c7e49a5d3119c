"""Outputs are whole or not there, and nothing else is touched."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from making import leftovers, run_python

from qcs4w_packer import OutputError
from qcs4w_packer.files import check_folder, check_target, replacing, replacing_folder, write_at, write_file


def test_a_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    """Until the end there is no target; then it is whole, and nothing is left beside it."""
    target = tmp_path / "out"
    with replacing(target) as fd:
        write_at(fd, b"hello", 0)
        assert not target.exists()
        assert len(leftovers(tmp_path)) == 1
    assert target.read_bytes() == b"hello"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, OSError, MemoryError])
@pytest.mark.parametrize("force", [False, True])
def test_an_exception_changes_nothing(error: type[BaseException], force: bool, tmp_path: Path) -> None:
    """Whatever happens in the middle, the old file stands and no part is left."""
    target = tmp_path / "out"
    if force:
        target.write_bytes(b"old")
    with pytest.raises(OutputError if error is OSError else error), replacing(target, force=force) as fd:  # noqa: PT012
        write_at(fd, b"new", 0)
        raise error("in the middle")
    assert os.listdir(tmp_path) == (["out"] if force else [])
    assert not force or target.read_bytes() == b"old"


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    """A real SIGINT in the middle of writing."""
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "out") as fd:  # noqa: PT012
        write_at(fd, b"new", 0)
        signal.raise_signal(signal.SIGINT)
    assert os.listdir(tmp_path) == []


def test_an_existing_file_needs_force(tmp_path: Path) -> None:
    """Without force the refusal comes before any work; with it the file is replaced."""
    target = tmp_path / "out"
    target.write_bytes(b"old")
    with pytest.raises(OutputError, match="exists already") as caught:
        write_file(target, b"new")
    assert "--force" in (caught.value.hint or "")
    assert target.read_bytes() == b"old"
    write_file(target, b"new", force=True)
    assert target.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["out"]


def test_a_target_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    """What another process wrote during the work stays, unless force was asked for."""
    target = tmp_path / "out"
    with pytest.raises(OutputError, match="has appeared meanwhile"), replacing(target) as fd:  # noqa: PT012
        write_at(fd, b"ours", 0)
        target.write_bytes(b"theirs")
    assert target.read_bytes() == b"theirs"
    assert os.listdir(tmp_path) == ["out"]
    with replacing(target, force=True) as fd:
        write_at(fd, b"ours", 0)
    assert target.read_bytes() == b"ours"


@pytest.mark.parametrize("kind", ["same", "symlink", "hard link", "other spelling"])
@pytest.mark.parametrize("force", [False, True])
def test_a_source_is_never_the_target(kind: str, force: bool, tmp_path: Path) -> None:
    """The file being read is refused as target, by any of its names, even with force."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"weights")
    if kind == "symlink":
        target.symlink_to(source)
    elif kind == "hard link":
        target.hardlink_to(source)
    else:
        target = source if kind == "same" else tmp_path / ".." / tmp_path.name / "source"
    with pytest.raises(OutputError, match="is the file being read"):
        write_file(target, b"new", force=force, sources=(tmp_path / "missing", source))
    assert source.read_bytes() == b"weights"


@pytest.mark.parametrize("exists", [True, False])
def test_a_symlink_is_followed(exists: bool, tmp_path: Path) -> None:
    """The file behind a link is written, the link stays, and the part lies beside the real file."""
    (tmp_path / "far").mkdir()
    real, link = tmp_path / "far" / "real", tmp_path / "link"
    if exists:
        real.write_bytes(b"old")
    link.symlink_to(real)
    with replacing(link, force=exists) as fd:
        write_at(fd, b"new", 0)
        assert leftovers(tmp_path / "far")
        assert not leftovers(tmp_path)
    assert link.is_symlink()
    assert real.read_bytes() == b"new"


@pytest.mark.parametrize("force", [False, True])
def test_what_cannot_be_a_target(force: bool, tmp_path: Path) -> None:
    """Folders, pipes, devices, missing folders, files as folders and impossible names are refused in words."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for target, words in {
        tmp_path / "folder": "is not a regular file",
        tmp_path / "pipe": "is not a regular file",
        Path("/dev/null"): "is not a regular file",
        tmp_path / "missing" / "out": "there is no folder",
        tmp_path / "file" / "out": "there is no folder|cannot be written",
        tmp_path / "a\0b": "cannot be written",
        tmp_path / ("x" * 300): "cannot be written",
    }.items():
        with pytest.raises(OutputError, match=words):
            write_file(target, b"new", force=force)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "loop", "pipe"]


@pytest.fixture
def foreign_folder() -> Iterator[Path]:
    """A folder that everyone can enter and nobody else can write."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o555)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_a_folder_that_may_not_be_written(foreign_folder: Path) -> None:
    """Without permission it is an OutputError that says so before any work; root gives its rights up for this."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        for refuse in (check_target, check_folder):
            with pytest.raises(OutputError, match=r"cannot be written: the folder .* is closed to you"):
                refuse(foreign_folder / "out")
        with pytest.raises(OutputError, match=r"cannot be written: the folder .* is closed to you"):
            write_file(foreign_folder / "out", b"new")
    finally:
        if is_root:
            os.seteuid(0)
    assert os.listdir(foreign_folder) == []


def test_too_little_room_is_told_before_writing(tmp_path: Path) -> None:
    """More bytes than the disk has free are refused with both numbers."""
    needed = shutil.disk_usage(tmp_path).total + 1
    with (
        pytest.raises(OutputError, match=f"needs {needed:,} bytes, the disk has .* free"),
        replacing(tmp_path / "out", nbytes=needed),
    ):
        raise AssertionError("the block was entered")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("step", ["ftruncate(fd, 100_000)", "pwrite(fd, bytes(100_000), 0)"], ids=["begin", "middle"])
def test_a_full_disk_leaves_the_old_file(step: str, tmp_path: Path) -> None:
    """With a limit on file sizes the write fails for real: one OutputError, the old file, no part."""
    (tmp_path / "out").write_bytes(b"old")
    done = run_python(
        "import os, resource, sys\n"
        "from qcs4w_packer import OutputError\n"
        "from qcs4w_packer.files import replacing, write_at\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n"
        "    with replacing(sys.argv[1], force=True) as fd:\n"
        "        write_at(fd, b'start', 0)\n"
        f"        {'os.' + step if 'ftruncate' in step else 'write_at(fd, bytes(100_000), 0)'}\n"
        "except OutputError as error: print(error, error.hint)",
        tmp_path / "out",
    )
    assert "cannot be written: File too large; nothing was changed make room" in done.stdout, done.stderr
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out").read_bytes() == b"old"


def test_checking_a_target_makes_nothing(tmp_path: Path) -> None:
    """The check before the work gives the real path and leaves no trace."""
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert check_target(tmp_path / "link") == (tmp_path / "real").resolve()
    assert os.listdir(tmp_path) == ["link"]


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127, "a b\nc", "-o", ".hidden"], ids=range(5))
def test_odd_names_are_names(name: str, tmp_path: Path) -> None:
    """Whatever the system takes as a name of a file is one, up to its longest."""
    write_file(tmp_path / name, b"new")
    assert os.listdir(tmp_path) == [name]


def test_writing_at_an_offset_writes_all(tmp_path: Path) -> None:
    """Arrays of any item size are written as their bytes, empty ones too."""
    with replacing(tmp_path / "out") as fd:
        write_at(fd, memoryview(b"abcdefgh").cast("I"), 4)
        write_at(fd, b"", 100)
    assert (tmp_path / "out").read_bytes() == bytes(4) + b"abcdefgh"


def test_what_replaces_a_private_file_is_private(tmp_path: Path) -> None:
    """--force keeps the permissions of the file that was there."""
    path = tmp_path / "private"
    path.write_bytes(b"old")
    path.chmod(0o600)
    write_file(path, b"new", force=True)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_folder_appears_when_the_block_ends(tmp_path: Path) -> None:
    """Until the end there is no folder; then it is whole. An empty one that is there is taken."""
    for target in (tmp_path / "new", tmp_path / "empty"):
        if target.name == "empty":
            target.mkdir()
        with replacing_folder(target) as folder:
            (folder / "a").write_bytes(b"hello")
            assert not target.exists() or not any(target.iterdir())
        assert (target / "a").read_bytes() == b"hello"
    assert sorted(os.listdir(tmp_path)) == ["empty", "new"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, OSError])
@pytest.mark.parametrize("force", [False, True])
def test_an_exception_leaves_the_folder(error: type[BaseException], force: bool, tmp_path: Path) -> None:
    """Whatever happens in the middle, the old folder stands and nothing is left beside it."""
    target = tmp_path / "out"
    if force:
        target.mkdir()
        (target / "old").write_bytes(b"old")
    expected = pytest.raises(OutputError if error is OSError else error)
    with expected, replacing_folder(target, force=force, is_ours=lambda path: True) as folder:
        (folder / "new").write_bytes(b"new")
        raise error("in the middle")
    assert os.listdir(tmp_path) == (["out"] if force else [])
    assert not force or os.listdir(target) == ["old"]


def test_a_folder_that_is_not_ours_is_never_replaced(tmp_path: Path) -> None:
    """Files of others survive: without force, with it, in the place of a file, and if they appear meanwhile."""
    target = tmp_path / "out"
    target.mkdir()
    (target / "theirs").write_bytes(b"theirs")
    for force, words in ((False, "exists already"), (True, "does not remove that")):
        with pytest.raises(OutputError, match=words), replacing_folder(target, force=force, is_ours=lambda path: False):
            pytest.fail("the refusal comes before any work")
    with pytest.raises(OutputError, match="no folder"), replacing_folder(target / "theirs", force=True):
        pytest.fail("the refusal comes before any work")
    with pytest.raises(OutputError, match="exists already"), replacing_folder(tmp_path / "late") as folder:  # noqa: PT012
        (folder / "new").write_bytes(b"new")
        (tmp_path / "late").mkdir()
        (tmp_path / "late" / "theirs").write_bytes(b"theirs")
    assert (tmp_path / "late" / "theirs").read_bytes() == b"theirs"
    assert sorted(os.listdir(tmp_path)) == ["late", "out"]


def test_a_folder_of_ours_is_replaced_whole(tmp_path: Path) -> None:
    """With force the old files go; a link to the folder stays a link."""
    target, link = tmp_path / "out", tmp_path / "link"
    link.symlink_to(target)
    for name in ("old", "new"):
        with replacing_folder(link, force=True, is_ours=lambda path: True) as folder:
            (folder / name).write_bytes(b"")
    assert link.is_symlink()
    assert os.listdir(target) == ["new"]
    assert sorted(os.listdir(tmp_path)) == ["link", "out"]


def test_the_old_folder_comes_back_if_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename that fails at the very end leaves what was there."""
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").write_bytes(b"old")
    rename = Path.rename

    def fails(self: Path, to: Path) -> Path:
        if self.suffix == ".part":
            raise OSError(5, "the disk is gone")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fails)
    with (
        pytest.raises(OutputError, match="the disk is gone"),
        replacing_folder(target, force=True, is_ours=lambda path: True) as folder,
    ):
        (folder / "new").write_bytes(b"new")
    assert os.listdir(target) == ["old"]
    assert os.listdir(tmp_path) == ["out"]
