"""Names that differ in numbers only are told as one."""

from fnmatch import fnmatchcase

import pytest

from qcs4w_cli.report import Table
from qcs4w_cli.report_groups import numbers, pattern, shortened, told


@pytest.mark.parametrize(
    ("name", "kind", "found"),
    [
        ("model.layers.12.self_attn.q_proj.weight", "model.layers.*.self_attn.q_proj.weight", "12"),
        ("layers.3.experts.7.w1.weight", "layers.*.experts.*.w1.weight", "3.7"),
        ("0.weight", "*.weight", "0"),
        ("experts.gate_up_proj.31", "experts.gate_up_proj.*", "31"),
        ("ln_2.weight", "ln_2.weight", ""),  # a number in a word tells kinds apart
        ("model/layer/5/kernel", "model/layer/*/kernel", "5"),
        ("tensor 'a.1.b' (1-D)", "tensor 'a.*.b' (1-D)", "1"),
    ],
)
def test_a_pattern_stands_for_a_kind(name: str, kind: str, found: str) -> None:
    """Only whole parts are numbers; as a glob the pattern matches the name."""
    assert (pattern(name), numbers(name)) == (kind, found)
    assert fnmatchcase(name, kind)


def test_sentences_are_told_once() -> None:
    """Few are told as they are, many by kind, too many kinds by their number."""
    few = ["tensor 'a.1'", "tensor 'a.2'"]
    assert told(few, everything=False) == few
    many = [f"tensor '{letter}.{number}'" for letter in "abcde" for number in range(2)] + ["x"]
    assert told(many, everything=False) == [
        "tensor 'a.*' (2 times)",
        "tensor 'b.*' (2 times)",
        "tensor 'c.*' (2 times)",
        "3 more kinds (-v lists all)",
    ]
    assert told(many, everything=True) == many


def test_a_long_table_says_what_it_leaves_out() -> None:
    """The rows beyond the limit are counted."""
    table = Table(("a", "b"), [(str(i), "") for i in range(43)])
    assert shortened(table).rows[-1] == ("… 3 more rows (-v lists all)", "")
    assert shortened(Table(("a",), [("1",)])).rows == [("1",)]
