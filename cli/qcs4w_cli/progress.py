"""What is shown while tensor after tensor is worked on: bars on a terminal, a line for each in a log, or nothing."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .report import clean_line, size

if TYPE_CHECKING:
    from rich.text import Text

_PERIOD_S = 20.0  # over which the rate is measured
_STEP_S = 0.05  # what comes closer together is counted as one
_FRAMES_PER_S = 5
_LONGEST_NAME = 200  # characters of it in a log


class TensorProgress:
    """Shows nothing; what else there is to show is for those below.

    Attributes:
        done: bytes of work done by this run.
    """

    def __init__(self) -> None:
        self.done = 0

    def begin(self, sizes: Mapping[str, int], count: int) -> None:
        """Say what there is to do.

        Args:
            sizes: bytes of work by the name of every tensor.
            count: how many of them `finished` will tell of.
        """

    def step(self, name: str, nbytes: int, total: int) -> None:
        """Say that some bytes of a tensor are done, and how many there are to do in all."""
        self.done += nbytes

    def finished(self, line: str, *, is_news: bool = True) -> None:
        """Say that a tensor is finished.

        Args:
            line: what became of it, for a log.
            is_news: this run has done it.
        """


class _Lines(TensorProgress):
    """A line for each tensor that this run finishes: `12/300 model.layers.0.…`."""

    def __init__(self, write: Callable[[str], None]):
        super().__init__()
        self._write = write
        self._count = self._finished = 0

    def begin(self, sizes: Mapping[str, int], count: int) -> None:
        self._count = count

    def finished(self, line: str, *, is_news: bool = True) -> None:
        self._finished += 1
        if is_news:
            width = len(str(self._count))
            self._write(f"{self._finished:>{width}}/{self._count} {line}")


class _Bars(TensorProgress):
    """One bar for all bytes with rate and time left, and under it one for the tensor in hand."""

    def __init__(self, what: str, stream: Any):
        from rich.console import Console as RichConsole
        from rich.live import Live

        super().__init__()
        self._what = what
        self._total = self._count = self._finished = 0
        self._sizes: Mapping[str, int] = {}
        self._name, self._in_hand = "", 0
        self._rate = _Rate()
        console = RichConsole(file=stream, highlight=False)
        self.live = Live(
            console=console,
            refresh_per_second=_FRAMES_PER_S,
            transient=True,
            redirect_stdout=False,
            get_renderable=self._drawn,
        )

    def begin(self, sizes: Mapping[str, int], count: int) -> None:
        self._sizes, self._count = sizes, count
        self._total = sum(sizes.values())

    def step(self, name: str, nbytes: int, total: int) -> None:
        super().step(name, nbytes, total)
        self._in_hand = nbytes + (self._in_hand if name == self._name else 0)
        self._name, self._total = name, total
        self._rate.add(nbytes)

    def finished(self, line: str, *, is_news: bool = True) -> None:
        self._finished += 1

    def _drawn(self) -> Any:
        """Return both lines; every figure has its place, so that nothing jumps."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        rate = self._rate.value()
        left = f"{_clock(max(0, self._total - self.done) / rate)} left" if rate and self._total else ""
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        for width in (19, 11, 13):
            grid.add_column(no_wrap=True, justify="right", min_width=width)
        grid.add_row(
            Text(self._what),
            ProgressBar(total=self._total or None, completed=self.done, pulse=not self._total),
            Text(f"{size(self.done)} of {size(self._total)}" if self._total else "", style="green"),
            Text(f"{size(int(rate))}/s" if rate else "", style="red"),
            Text(left, style="cyan"),
        )
        if not self._name:
            return grid
        hand = Table.grid(padding=(0, 1), expand=True)
        hand.add_column(no_wrap=True, justify="right", min_width=2 * len(f"{self._count:,}") + 1)
        hand.add_column(width=16)
        hand.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        total = self._sizes.get(self._name, 0)
        hand.add_row(
            Text(f"{self._finished:,}/{self._count:,}"),
            ProgressBar(total=total or 1, completed=self._in_hand, width=16),
            self._name_to_show(),
        )
        stack = Table.grid(expand=True)
        stack.add_row(grid)
        stack.add_row(hand)
        return stack

    def _name_to_show(self) -> "Text":
        from rich.text import Text

        nbytes = self._sizes.get(self._name)
        return Text(clean_line(self._name) + (f"  {size(nbytes)}" if nbytes else ""))


class _Rate:
    """Bytes a second over the last while."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque()  # (when, bytes since the one before)
        self._nbytes = self._gathered = 0

    def add(self, nbytes: int) -> None:
        now = time.monotonic()
        if not self._steps:  # nobody knows when this first piece was begun
            self._steps.append((now, 0))
            return
        self._gathered += nbytes
        if now - self._steps[-1][0] < _STEP_S:
            return
        self._steps.append((now, self._gathered))
        self._nbytes += self._gathered
        self._gathered = 0
        while now - self._steps[0][0] > _PERIOD_S:
            self._nbytes -= self._steps.popleft()[1]

    def value(self) -> float:
        """Return the rate, 0 while it is not known. Any thread may ask."""
        if not self._nbytes:
            return 0.0
        first = self._steps[0]
        return (self._nbytes - first[1]) / max(time.monotonic() - first[0], _STEP_S)


def _clock(seconds: float) -> str:
    """Return a time for people: 0:07, 12:34, 3:04:05."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


@contextmanager
def tensor_progress(
    what: str, stream: Any, write: Callable[[str], None], *, is_terminal: bool, wanted: bool
) -> Iterator[TensorProgress]:
    """Yield what shows the work on tensors.

    Args:
        what: the work: "packing".
        stream: the terminal, where there is one.
        write: takes a line of the log, where there is none.
        is_terminal: lines of the stream can be drawn again.
        wanted: show something.
    """
    if not wanted:
        yield TensorProgress()
    elif not is_terminal:
        yield _Lines(write)
    else:
        bars = _Bars(what, stream)
        with bars.live:
            yield bars


def name_to_log(name: str) -> str:
    """Return a tensor's name, cut where it is too long for a line."""
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…"
