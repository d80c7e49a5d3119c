"""Damaged checkpoints of every format, by the hundred in every run: one clear error, or a right answer.

QCS4W_FUZZ=N runs N of each format, for a night; QCS4W_FUZZ_FROM=SEED starts elsewhere.
"""

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from making import time_limit
from mutators import FORMATS, Format, less_memory, rng_of

from qcs4w_packer import Qcs4wError, open_packed, open_source, pack_file

CASES = int(os.environ.get("QCS4W_FUZZ", "200"))
FIRST = int(os.environ.get("QCS4W_FUZZ_FROM", "0"))
SECONDS = 5.0  # for one case
MEMORY = 1 << 30  # bytes of address space beyond what the process has
LONGEST_MESSAGE = 1500  # characters, the path not counted


def examined(kind: Format, seed: int, place: Path) -> str:
    """Damage one checkpoint and open it; return how that went, or raise what should not have happened."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    rng = rng_of(seed)
    path = kind.make(place)
    kind.damage(path, rng)
    before = os.listdir("/proc/self/fd")
    outcome = "refused"
    try:
        with time_limit(SECONDS), less_memory(MEMORY), open_source(path) as source:
            found = {n: b"".join(data for _, data in tensor.chunks()) for n, tensor in source.tensors.items()}
            assert all(len(found[name]) == tensor.nbytes for name, tensor in source.tensors.items())
        outcome = "read"
    except Qcs4wError as error:
        message = str(error).replace(str(place), "")
        assert 0 < len(message) < LONGEST_MESSAGE, message
    if outcome == "read":
        expected = kind.ask(path)
        if expected is None:
            assert not kind.witness_decides, "read, though the witness refuses it"
            outcome = "read alone"
        else:
            assert all(found[name] == expected.get(name) for name in found), "other bytes than the witness has"
    if seed % 10 == 0:
        outcome += packed(path, place)
    assert len(os.listdir("/proc/self/fd")) == len(before), "a descriptor was left open"
    return outcome


def packed(path: Path, place: Path) -> str:
    """Pack a checkpoint; return how that went."""
    output = place.with_name("out" if path.is_dir() else "out.safetensors")
    try:
        with time_limit(SECONDS), less_memory(MEMORY):
            pack_file(path, output)
    except Qcs4wError:
        assert not output.exists(), "an output was left by a pack that failed"
        return ", not packed"
    for file in output.glob("*.safetensors") if output.is_dir() else [output]:
        with open_packed(file) as container:
            assert not any(container.wrong_digests(entry) for entry in container.entries.values())
    shutil.rmtree(output) if output.is_dir() else output.unlink()
    return ", packed"


@pytest.mark.parametrize("kind", FORMATS.values(), ids=FORMATS)
def test_damaged_checkpoints_are_refused_or_read_right(kind: Format, tmp_path: Path) -> None:
    """No crash, no hang, no flood of memory, no descriptor left, no bytes that another package does not see."""
    outcomes: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + CASES):
        try:
            outcomes[examined(kind, seed, tmp_path / "case")] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    print(dict(outcomes))  # noqa: T201  # for the long runs, with -s
    assert sum(count for outcome, count in outcomes.items() if outcome.startswith("read")) > CASES // 100
    assert sum(count for outcome, count in outcomes.items() if outcome.startswith("refused")) > CASES // 10


@pytest.mark.parametrize("kind", FORMATS.values(), ids=FORMATS)
def test_the_sound_ones_are_read(kind: Format, tmp_path: Path) -> None:
    """Without damage every format reads, packs, and agrees with its witness."""
    path = kind.make(tmp_path)
    with open_source(path) as source:
        found = {n: b"".join(data for _, data in tensor.chunks()) for n, tensor in source.tensors.items()}
    assert found == kind.ask(path)
