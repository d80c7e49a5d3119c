"""Globs and regular expressions over tensor names."""

import threading
import time

import pytest
from making import time_limit

from qcs4w_packer import UsageError, name_patterns
from qcs4w_packer.name_patterns import find_names, matches

NAMES = [f"model.layers.{i}.mlp.{kind}_proj.weight" for i in range(12) for kind in ("up", "down")]


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("re:.*", 24),
        (r"re:model\.layers\.(1[01]|[0-3])\..*", 12),
        (r"re:.*\.(up|gate)_proj\.weight", 12),
        (r"re:.*(?<!1)1\.mlp.up_proj\.weight", 1),
        (r"re:(?i)MODEL\.LAYERS\.7\..*", 2),
        ("re:up_proj", 0),  # a part of a name is not the name
        ("re:", 0),
        (r"model\.layers.*", 0),  # a glob knows no backslash
        ("*.1[01].*up_proj*", 2),
        ("", 0),
    ],
)
def test_patterns_fit_whole_names(pattern: str, count: int) -> None:
    """Globs and expressions alike, and both functions agree."""
    found = find_names(NAMES, pattern)
    assert len(found) == count
    assert found == [name for name in NAMES if matches(name, [pattern])]


def test_a_name_is_its_own_pattern() -> None:
    """Even where it looks like an expression, or like a faulty one."""
    assert find_names(["re:[a", "b"], "b") == ["b"]
    assert matches("layers[0]", ["layers[0]"])
    assert not matches("anything", [])


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("re:layers.(1|2", r"missing \), unterminated subpattern at character 8, here: layers\. ▸ \(1\|2"),
        ("re:*.weight", r"nothing to repeat at character 1, here:  ▸ \*\.weight"),
        ("re:[b-a]", "bad character range b-a at character 2"),
        ("re:a{99999999999}", "is no regular expression"),
        ("re:" + "(" * 900 + ")" * 90, "is no regular expression"),
        ("re:" + "a" * 1001, "1,001 characters, 1,000 are the most"),
    ],
    ids=["open", "star", "range", "huge", "deep", "long"],
)
def test_a_bad_expression_is_a_clear_error(pattern: str, message: str) -> None:
    """What is wrong, and where."""
    with pytest.raises(UsageError, match=message):
        find_names(NAMES, pattern)


@pytest.mark.parametrize("expression", ["(a+)+b", "(a|a)*b", "(.*)*b", "a?" * 40 + "a" * 40])
def test_an_expression_cannot_run_for_ever(expression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's matcher would need years for these; it is stopped, and the clock is put away."""
    monkeypatch.setattr(name_patterns, "_MOST_SECONDS", 0.3)
    began = time.monotonic()
    with pytest.raises(UsageError, match=r"takes more than 0\.3 seconds"):
        find_names(["a" * 39 + "c"] * 2, f"re:{expression}")
    assert time.monotonic() - began < 5
    time.sleep(0.4)  # no signal comes later


def test_other_threads_and_other_clocks_are_left_alone() -> None:
    """A signal cannot be had in another thread; one that is set already stays set."""
    found: list[list[str]] = []
    thread = threading.Thread(target=lambda: found.append(find_names(NAMES, "re:.*")))
    thread.start()
    thread.join()
    assert found == [NAMES]
    with pytest.raises(AssertionError, match="took longer"), time_limit(0.2):
        time.sleep(2 * len(find_names(NAMES, "re:.*")))
