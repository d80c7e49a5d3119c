"""pack --ray on a real local cluster of two workers."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from making import leftovers, save_folder

from qcs4w_packer import Step, Watch, pack_file
from qcs4w_packer.errors import NonFiniteError, OutputError, UsageError
from qcs4w_packer.work_folder import work_path


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray of two workers, used by every pack in this process."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of six shards."""
    rng = np.random.default_rng(7)
    arrays = {f"layers.{i}.fc.weight": rng.standard_normal((600, 1500), np.float32) for i in range(12)}
    return save_folder(tmp_path_factory.mktemp("ray") / "source", arrays)


@pytest.fixture(scope="module")
def whole(source: Path) -> dict[str, bytes]:
    """The bytes of an unbroken run without Ray."""
    pack_file(source, source.parent / "whole")
    return content(source.parent / "whole")


def content(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file of an output."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def kill_a_worker(work: Path, killed: list[str], stop: threading.Event) -> None:
    """Kill one worker with -9 while it holds the lock of a shard that it has not finished."""
    while not killed and not stop.is_set():
        for lock in work.glob("*.safetensors.lock"):
            shard = lock.name.removesuffix(".lock")
            found = re.match(r"process (\d+) ", lock.read_text())
            if not found or int(found[1]) == os.getpid() or not (work / f"{shard}.part").is_file():
                continue
            pid = int(found[1])
            os.kill(pid, signal.SIGSTOP)  # so that it cannot finish while we look
            if (work / f"{shard}.part").is_file() and not (work / "out" / shard).exists():
                os.kill(pid, signal.SIGKILL)
                killed.append(shard)
                return
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.0005)


def test_a_cluster_makes_the_same_bytes(cluster: None, source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    """Files made by two workers equal those of one process, and every tensor is reported."""
    steps: list[Step] = []
    report = pack_file(source, tmp_path / "out", ray="local", watch=Watch(step=steps.append))
    assert content(tmp_path / "out") == whole
    assert report.is_complete
    assert [tensor.entry.name for tensor in report.packed] == [f"layers.{i}.fc.weight" for i in range(12)]
    assert (len(steps), steps[-1].done) == (6, steps[-1].total)
    assert leftovers(tmp_path) == []


def test_a_worker_that_is_killed(cluster: None, source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    """Kill -9 of a worker in the middle of a file: another makes it, and the bytes are the same."""
    killed: list[str] = []
    stop = threading.Event()
    killer = threading.Thread(target=kill_a_worker, args=(work_path(tmp_path / "out"), killed, stop))
    killer.start()
    try:
        pack_file(source, tmp_path / "out", ray="local")
    finally:
        stop.set()
        killer.join()
    assert killed, "no worker was caught at work"
    assert content(tmp_path / "out") == whole
    assert leftovers(tmp_path) == []


def test_an_error_on_a_node_keeps_its_kind(cluster: None, tmp_path: Path) -> None:
    """What a worker meets is raised here as what it is, with the node's name."""
    arrays = {f"layers.{i}.fc.weight": np.ones((8, 6), np.float32) for i in range(4)}
    arrays["layers.3.fc.weight"][2, 5] = np.nan
    save_folder(tmp_path / "source", arrays)
    with pytest.raises(NonFiniteError, match=r"node .*'layers.3.fc.weight' holds nan at row 2, column 5"):
        pack_file(tmp_path / "source", tmp_path / "out", ray="local")
    assert not (tmp_path / "out").exists()


def test_a_node_that_does_not_see_the_output(cluster: None, source: Path, tmp_path: Path) -> None:
    """A work folder that is not there for the worker: the path is named, and what to do."""
    work = work_path(tmp_path / "out")

    def hide(plan: object) -> None:
        def rename() -> None:
            while not stop.is_set():
                with contextlib.suppress(OSError):
                    (work / "plan.json").unlink()
                time.sleep(0.0005)

        threading.Thread(target=rename, daemon=True).start()

    stop = threading.Event()
    try:
        with pytest.raises(OutputError, match="is not being written there") as caught:
            pack_file(source, tmp_path / "out", ray="local", watch=Watch(planned=hide))
    finally:
        stop.set()
    assert "on a disk that every node sees" in str(caught.value.hint)


def test_the_command_starts_and_ends_a_ray_of_its_own(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    """--ray alone: one line of result, no noise of Ray's, and the same bytes."""
    command = [sys.executable, "-m", "qcs4w_cli", "pack", str(source), "-o", str(tmp_path / "out"), "-q", "--ray"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert content(tmp_path / "out") == whole


def test_an_address_where_no_cluster_is(source: Path, tmp_path: Path) -> None:
    """An address without a cluster is told in words, and nothing is left."""
    command = [sys.executable, "-m", "qcs4w_cli", "pack", str(source), "-o", str(tmp_path / "out")]
    done = subprocess.run([*command, "--ray=127.0.0.1:1"], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2
    assert "no Ray cluster answers at '127.0.0.1:1'" in done.stderr
    assert "Traceback" not in done.stderr
    assert UsageError.code in ("usage", "usage_error")
    assert leftovers(tmp_path) == []
