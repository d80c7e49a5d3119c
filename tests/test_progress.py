"""What is shown while tensors are worked on."""

import io

import pytest
from rich.console import Console

from qcs4w_cli.progress import _Bars, _clock, name_to_log, tensor_progress


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (7.4, "0:07"), (754, "12:34"), (11045, "3:04:05")])
def test_times_for_people(seconds: float, shown: str) -> None:
    """Minutes and seconds, and hours only where there are any."""
    assert _clock(seconds) == shown


def test_a_log_counts_what_an_earlier_run_has_done_and_does_not_tell_it() -> None:
    """Numbers go on, lines are of this run only."""
    lines: list[str] = []
    with tensor_progress("packing", None, lines.append, is_terminal=False, wanted=True) as progress:
        progress.begin({"a": 1, "b": 1}, 10)
        progress.finished("a", is_news=False)
        progress.step("b", 1, 1)
        progress.finished("b")
    assert lines == [" 2/10 b"]
    assert progress.done == 1


def test_bars_keep_their_place() -> None:
    """Whatever the tensor, both lines are exactly as wide as the terminal allows, and no name can break them."""
    bars = _Bars("packing", io.StringIO())
    names = ["a", "model." + 40 * "long." + "weight", "new\nline"]
    bars.begin(dict.fromkeys(names, 1 << 20), 300)
    shown = []
    for name in names:
        bars.step(name, 1 << 19, 3 << 20)
        console = Console(file=io.StringIO(), width=80)
        console.print(bars._drawn())
        shown.append(console.file.getvalue().splitlines())  # type: ignore[attr-defined]
    assert [len(lines) for lines in shown] == [2, 2, 2]
    assert {len(line) for lines in shown for line in lines} == {80}
    assert {lines[0].index(" of 3.0 MiB") for lines in shown} == {shown[0][0].index(" of 3.0 MiB")}
    assert shown[1][1].rstrip().endswith("…")
    assert "new\\nline" in shown[2][1]


def test_a_name_in_a_log_has_an_end() -> None:
    """A name of a million letters does not fill the log."""
    assert len(name_to_log("x" * 1_000_000)) == 201
    assert name_to_log("fc.weight") == "fc.weight"
