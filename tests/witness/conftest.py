"""Reports what was compared with the witnesses at the end of a run."""

from collections.abc import Callable

import pytest
from tally import Tally

TALLIES = pytest.StashKey[list[Tally]]()


@pytest.fixture
def new_tally(request: pytest.FixtureRequest) -> Callable[[str], Tally]:
    """Make a tally that the end of the run reports."""

    def new(what: str) -> Tally:
        tally = Tally(what)
        request.config.stash.setdefault(TALLIES, []).append(tally)
        return tally

    return new


def pytest_configure(config: pytest.Config) -> None:
    """Leave out what the witnesses warn of among themselves."""
    for category in ("DeprecationWarning", "FutureWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::{category}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write every tally, whatever became of its test."""
    tallies = config.stash.get(TALLIES, [])
    if tallies:
        terminalreporter.section("compared bit for bit")
    for tally in tallies:
        for line in tally.lines():
            terminalreporter.write_line(line)
