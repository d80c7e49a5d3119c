"""What other runtimes refuse."""

from itertools import product

import pytest

from qcs4w_packer import PackedEntry
from qcs4w_packer.targets import EXECUTORCH_WEBGPU, TARGETS, WEBGPU_DEFAULT, Case, Target, refusals

MIB = 1 << 20


def names(case: Case, target: Target = EXECUTORCH_WEBGPU) -> list[str]:
    """The rules that a case breaks."""
    return [refusal.rule.name for refusal in refusals(case, target)]


@pytest.mark.parametrize(
    ("rows", "columns", "broken"),
    [
        (1, 1, ["odd-columns", "part-words"]),
        (4, 1, ["odd-columns"]),
        (1, 8, []),
        (2, 3, ["odd-columns"]),
        (2, 4, []),
        (3, 10, ["part-words"]),
        (2, 10, ["part-words"]),
    ],
)
def test_shapes(rows: int, columns: int, broken: list[str]) -> None:
    """An odd K fails at export, N · ceil(K / 2) that is no multiple of 4 in the runtime."""
    assert names(Case(rows, columns)) == broken
    told = [refusal.rule.name for refusal in PackedEntry("w", rows, columns).executorch_refusals]
    assert told == [name for name in broken if name == "part-words"]


def test_the_advice_mends() -> None:
    """The N and K that are proposed are accepted, and no smaller N is."""
    for rows, columns in product(range(1, 14), range(1, 20)):
        for refusal in refusals(Case(rows, columns), EXECUTORCH_WEBGPU):
            wanted = int(refusal.mend.partition(" = ")[2].split()[0].rstrip("),"))
            if refusal.rule.name == "odd-columns":
                assert "odd-columns" not in names(Case(rows, wanted))
            else:
                assert "part-words" not in names(Case(wanted, columns))
                assert all("part-words" in names(Case(fewer, columns)) for fewer in range(rows, wanted))


def test_half_scales_are_refused() -> None:
    """The runtime takes float32 scales only."""
    (refusal,) = refusals(Case(4, 4, scale_dtype="F16"), EXECUTORCH_WEBGPU)
    assert refusal.rule.name == "scale-dtype"
    assert refusal.fault == "the scales are F16"


@pytest.mark.parametrize(
    ("case", "rule", "fault"),
    [
        (Case(4, 4, input_dtype="F16", output_dtype="F16"), "activation-dtype", "x is F16, y is F16"),
        (Case(4, 4, output_dtype="F16"), "activation-dtype", "y is F16"),
        (Case(4, 4, rows=0), "shapes", "M is 0"),
        (Case(4, 4, misfit="x has no dimensions"), "shapes", "x has no dimensions"),
        (Case(2**18, 4, rows=2**18, max_binding=1 << 60), "grid", "y has 4,294,967,296 tiles of 4 × 4"),
    ],
)
def test_programs_are_refused_by_more_than_their_weights(case: Case, rule: str, fault: str) -> None:
    """Activations that are not float32, shapes that do not fit and grids beyond 32 bits are refused."""
    (refusal,) = refusals(case, EXECUTORCH_WEBGPU)
    assert refusal.rule.name == rule
    assert refusal.fault.startswith(fault)
    assert names(Case(2**18, 4, rows=2**18 - 4, max_binding=1 << 60)) == []


@pytest.mark.parametrize("target", [EXECUTORCH_WEBGPU, WEBGPU_DEFAULT], ids=lambda target: target.name)
def test_bindings(target: Target) -> None:
    """128256 × 2048 (125.25 MiB) fits what every device binds, 128256 × 4096 does not, nor a large y."""
    assert names(Case(128256, 2048), target) == []
    (weight,) = refusals(Case(128256, 4096), target)
    assert weight.rule.name == "binding-size"
    assert "the packed weight takes 262,668,288 bytes" in weight.fault
    assert "split the weight" in weight.mend
    assert "--rows" not in weight.mend
    assert names(Case(128256, 4096, max_binding=256 * MIB), target) == []
    (output,) = refusals(Case(128256, 2048, rows=2048), target)
    assert "y for M = 2048 takes 1,050,673,152 bytes" in output.fault
    assert "packed weight" not in output.fault
    assert "split" not in output.mend
    assert names(Case(1, 2, max_binding=8), target)[:1] != ["binding-size"]
    assert names(Case(2, 4, max_binding=15), target) == ["binding-size"], "x takes 16 bytes"
    assert names(Case(2, 4, max_binding=16), target) == []


def test_the_table_is_whole() -> None:
    """Every rule has a name of its own in its target, and says what, why and where that was read."""
    for name, target in TARGETS.items():
        assert name == target.name
        assert len({rule.name for rule in target.rules}) == len(target.rules)
        for rule in target.rules:
            assert rule.what
            assert rule.why
            assert rule.source
