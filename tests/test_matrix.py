"""The judge of the execution matrix: what it must not let pass."""

import re
from dataclasses import replace
from typing import Any

import matrix
import numpy as np
import pytest
from cases import KERNELS
from matrix_cases import GUARD_WORDS, Case, _bias, _exact, _linear, _probe

from qcs4w_gpu import Gpu, shipped_kernel
from qcs4w_gpu.linear import POISON


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> tuple[Case, ...]:
    """One case of each kind, in place of all."""
    kernel = shipped_kernel("linear_naive")
    bounded = next(case for case in _linear(kernel) if case.kind == "bounded")
    few = (_probe(), _exact(kernel, 3, 5, 7), bounded, next(_bias()))
    monkeypatch.setattr(matrix, "matrix_cases", lambda: few)
    return few


def right(cases: tuple[Case, ...]) -> matrix.Ran:
    """Return what a cell without a fault would give."""
    guards = np.full(GUARD_WORDS, POISON)
    outputs = [np.concatenate([case.wanted.astype(np.float32).view(np.uint32), guards]) for case in cases]
    return matrix.Ran("here", 0.0, list(outputs))


def spoilt(ran: matrix.Ran, index: int, at: int, word: Any) -> matrix.Ran:
    """Return a run with one word of one output replaced."""
    outputs = [None if words is None else words.copy() for words in ran.outputs]
    outputs[index][at] = word  # type: ignore[index]
    return replace(ran, outputs=outputs)


def test_a_cell_without_fault_passes(cases: tuple[Case, ...]) -> None:
    """Right answers are counted by kind."""
    shown, faults = matrix.judge(right(cases))
    assert faults == []
    assert shown == {"probe_rounding": "rounds to nearest", "linear_naive": "1 exact, 1 bounded", "bias_add": "1 exact"}


@pytest.mark.parametrize(
    ("index", "at", "word", "words"),
    [
        (1, 0, POISON, "linear_naive .*: 1 of 15 elements wrong"),
        (1, 3, np.float32(0.5).view(np.uint32), "linear_naive .*: 1 of 15 elements wrong"),
        (1, -1, np.uint32(0), "linear_naive .*: wrote behind its output"),
        (2, 0, np.float32(1e9).view(np.uint32), "linear_naive .*: 1 of 33 elements wrong"),
        (2, 1, POISON, "linear_naive .*: 1 of 33 elements wrong"),
        (3, 0, np.float32(1).view(np.uint32), "bias_add .*: 1 of 1 elements wrong"),
    ],
)
def test_a_fault_is_found(cases: tuple[Case, ...], index: int, at: int, word: Any, words: str) -> None:
    """A wrong, an unwritten and an overwritten element fail the cell, and the table says so."""
    shown, faults = matrix.judge(spoilt(right(cases), index, at, word))
    assert len(faults) == 1
    assert re.fullmatch(words, faults[0])
    assert shown[cases[index].kernel.name] == "**FAILS**"


def test_directed_rounding_widens_the_bound_and_is_told(cases: tuple[Case, ...]) -> None:
    """An adapter that does not round to nearest is named, and is no fault: WGSL permits it."""
    shown, faults = matrix.judge(spoilt(right(cases), 0, 0, np.float32(1).view(np.uint32)))
    assert faults == []
    assert shown["probe_rounding"] == "does not round to nearest"


def test_bits_are_compared(cases: tuple[Case, ...]) -> None:
    """Two runs that differ in one bit differ; what one of them could not run is not compared."""
    one = right(cases)
    count = sum(case.buffers[0].size for case in cases)
    assert matrix.differing(one, one) == (count, 0)
    assert matrix.differing(one, spoilt(one, 2, 5, one.outputs[2][5] ^ 1)) == (count, 1)  # type: ignore[index]
    without = replace(one, outputs=[None, *one.outputs[1:]])
    assert matrix.differing(one, without) == (count - cases[0].buffers[0].size, 0)


def test_every_kernel_is_in_the_table() -> None:
    """The table in the kernels' README has a row for each shipped kernel, and no cell that fails."""
    text = matrix.README.read_text("utf-8")
    marked = matrix.MARKED.search(text)
    assert marked
    for name in (*KERNELS, "bias_add", "probe_rounding", "my_kernel"):
        assert f"| `{name}` |" in marked[0], f"{name}: make conformance writes the table"
    assert "FAILS" not in marked[0]
    for cell in matrix.CELLS:
        assert f"{cell.title}, {cell.driver}" in marked[0]


@pytest.mark.gpu
def test_a_cell_runs_every_case(gpu: Gpu, cases: tuple[Case, ...]) -> None:
    """The cell that runs through the dispatcher gives right answers here."""
    result = matrix.run_here(gpu.engine.name)
    assert result["missing"] == []
    assert result["where"].startswith(gpu.engine.version)
    ran = matrix.unpacked(result, 0.0)
    assert matrix.judge(ran)[1] == []
