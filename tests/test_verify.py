"""verify on a real device: right kernels pass, every seeded fault is caught, and named where its name is known."""

import sys
from pathlib import Path

import numpy as np
import pytest
from cases import KERNELS, edited, packed_of, random_codes
from mutants import MUTANTS, NAIVE_CODE, Mutant

from qcs4w_gpu import (
    DomainError,
    Gpu,
    Verdict,
    Watchdog,
    check_source,
    choose_kernel,
    parse_kernel,
    read_kernel,
    shipped_kernel,
    verify,
)
from qcs4w_gpu.judge import EXACT_WINDOW
from qcs4w_gpu.verify import rounding_factor_of
from qcs4w_packer import PackedLinear
from qcs4w_packer.errors import NonFiniteError, UsageError
from qcs4w_packer.nibbles import pack_codes
from qcs4w_packer.quantize import quantize
from qcs4w_packer.rowpack import pack_weight

pytestmark = pytest.mark.gpu

ONE_WRONG_CODE = Path(__file__).parent / "kernels" / "one_wrong_code.wgsl"


def random_weight(out_features: int, in_features: int, seed: int = 0) -> np.ndarray:
    """Return float32 (N, K)."""
    return np.random.default_rng(seed).standard_normal((out_features, in_features), np.float32)


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_every_seeded_fault_is_caught(gpu: Gpu, mutant: Mutant) -> None:
    """A kernel with a fault fails, by the probe that has to see it, under the name of the fault where it has one."""
    kernel = parse_kernel("mutant", edited(shipped_kernel(mutant.kernel).source, *mutant.edits))
    verdict = verify(gpu, pack_weight(random_weight(*mutant.shape)), kernel=kernel, rows=mutant.rows)
    assert verdict.status == "fail"
    assert verdict.kernel == "mutant"
    if mutant.probe == "exact":
        assert not verdict.exact.is_match
        assert verdict.exact.failures
    elif mutant.probe == "bounded":
        assert verdict.exact.is_match
        assert verdict.bounded.failures
    else:
        assert not verdict.exact.guards_intact
        assert not verdict.bounded.guards_intact
    assert [cause.name for cause in verdict.causes[:1]] == ([mutant.cause] if mutant.cause else [])


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (5, 3), (37, 67), (129, 64)], ids=str)
@pytest.mark.parametrize("rows", [1, 4, 8, 33])
@pytest.mark.parametrize("name", [None, *KERNELS])
def test_right_kernels_pass(gpu: Gpu, name: str | None, rows: int, shape: tuple[int, int]) -> None:
    """Our kernels pass both probes at any shape, with nothing to warn of and no cause."""
    kernel = None if name is None else shipped_kernel(name)
    verdict = verify(gpu, pack_weight(random_weight(*shape)), kernel=kernel, rows=rows)
    assert verdict.status == "pass"
    assert (verdict.causes, verdict.warnings, verdict.source) == ((), (), None)
    assert verdict.rows == rows
    assert verdict.kernel == (kernel or choose_kernel(rows, *shape, gpu.facts).kernel).name
    assert verdict.bounded.elements == rows * shape[0]
    assert verdict.exact.elements == max(4, rows) * shape[0]
    assert verdict.exact.worst.error == 0


def test_both_probes_judge_the_kernel_that_is_chosen(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the rows choose a kernel for many of them, the exact probe runs it too."""
    ran = []
    step = gpu.step

    def record(kernel, *given):  # type: ignore[no-untyped-def]
        ran.append(kernel.name)
        return step(kernel, *given)

    monkeypatch.setattr(gpu, "step", record)
    verify(gpu, pack_weight(random_weight(3, 9)), rows=65, rounding_factor=1)
    chosen = choose_kernel(65, 3, 9, gpu.facts).kernel.name
    assert chosen != choose_kernel(4, 3, 9, gpu.facts).kernel.name
    assert [name for name in ran if name.startswith("linear_")] == [chosen, chosen]


def test_one_wrong_code_of_8192_is_seen_by_the_exact_probe_alone(gpu: Gpu) -> None:
    """The bounded probe passes a kernel that reads one code of 8192 wrong; the exact probe fails it, at its column."""
    kernel = read_kernel(ONE_WRONG_CODE)
    verdict = verify(gpu, pack_weight(random_weight(3, 8192)), kernel=kernel)
    assert verdict.bounded.is_match
    assert verdict.exact.failures == 4
    assert verdict.exact.wrong_columns == (0,)
    assert verdict.causes == ()
    assert verify(gpu, pack_weight(random_weight(3, 8191)), kernel=kernel).status == "pass"


def test_longer_rows_than_a_window_are_judged(gpu: Gpu) -> None:
    """Beyond 524,288 columns the exact probe still demands equality, and still sees one wrong code."""
    packed = packed_of(random_codes(1, EXACT_WINDOW + 777))
    assert verify(gpu, packed, rows=1).status == "pass"
    source = edited(
        shipped_kernel("linear_naive").source,
        (NAIVE_CODE, f"return f32(i32(nibble) - 8 + select(0, 1, k == {EXACT_WINDOW + 5}u));"),
    )
    verdict = verify(gpu, packed, rows=1, kernel=parse_kernel("late", source))
    assert verdict.bounded.is_match
    assert verdict.exact.failures == 4


def test_a_fault_of_the_scales_has_no_false_name(gpu: Gpu) -> None:
    """Where all scales are equal, taking a neighbour's is no fault that could be seen."""
    weight = random_weight(8, 33)
    weight[:, 0] = 5
    source = edited(shipped_kernel("linear_naive").source, ("* scales[n]", "* scales[(n + 1u) % params.N]"))
    assert verify(gpu, pack_weight(weight), kernel=parse_kernel("neighbour", source)).status == "pass"


def test_an_input_of_the_user_is_judged(gpu: Gpu) -> None:
    """The bounded probe takes the user's x, of any rank and float type."""
    packed = pack_weight(random_weight(5, 9))
    verdict = verify(gpu, packed, x=np.ones((2, 3, 9), np.float64))
    assert (verdict.status, verdict.rows) == ("pass", 6)
    assert verify(gpu, packed, x=np.zeros((1, 9), np.float32)).status == "pass"
    assert verify(gpu, packed, x=np.full((1, 9), 1e-42, np.float32)).status == "pass"


def test_the_seed_decides(gpu: Gpu) -> None:
    """The same seed gives the same figures, another seed gives others."""
    packed = pack_weight(random_weight(65, 333))

    def figures(seed: int) -> Verdict:
        return verify(gpu, packed, seed=seed)

    assert figures(3) == figures(3)
    assert figures(3).bounded != figures(4).bounded


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"rows": 0}, UsageError),
        ({"x": np.ones((1, 8), np.float32)}, UsageError),
        ({"x": np.ones((0, 9), np.float32)}, UsageError),
        ({"x": np.full((1, 9), np.nan, np.float32)}, NonFiniteError),
        ({"x": np.full((1, 9), 3e38, np.float32)}, DomainError),
        ({"source": np.ones((5, 8), np.float32)}, UsageError),
        ({"source": np.full((5, 9), np.nan, np.float32)}, NonFiniteError),
    ],
    ids=["no rows", "columns", "empty", "nan", "domain", "source shape", "source nan"],
)
def test_what_cannot_be_judged_is_refused(gpu: Gpu, given: dict[str, np.ndarray], error: type[Exception]) -> None:
    """An input that cannot be judged is an error and never a verdict."""
    with pytest.raises(error):
        verify(gpu, pack_weight(random_weight(5, 9)), **given)  # type: ignore[arg-type]


def test_a_wrong_pad_is_a_warning(gpu: Gpu) -> None:
    """A pad nibble that is not 8 changes no y: the verdict is a pass, with a warning that counts the rows."""
    packed = pack_weight(random_weight(5, 9))
    data = packed.packed.copy()
    data[1:3, -1] &= 0xF0
    verdict = verify(gpu, PackedLinear(data, packed.scales, 9))
    assert verdict.status == "pass"
    assert verdict.warnings == (
        "K is odd, and the pad nibble of 2 rows is not 8: padded after the shift, or the nibbles are swapped",
    )


def test_rounding_is_probed(gpu: Gpu) -> None:
    """The adapter's rounding is found; every driver seen so far rounds to nearest."""
    assert rounding_factor_of(gpu) == 1


def test_the_watchdog_sleeps_while_rounding_is_probed(gpu: Gpu) -> None:
    """A watchdog is for what the user runs: our own probe on a busy machine is not told to be a loop without end."""
    barked: list[str] = []
    gpu.watchdog = Watchdog(1e-6, barked.append)
    try:
        rounding_factor_of(gpu)
        assert not barked
        assert gpu.watchdog is not None
        verify(gpu, pack_weight(random_weight(2, 3)), rounding_factor=1)
        assert barked
    finally:
        gpu.watchdog = None


@pytest.mark.parametrize(
    "edit",
    [
        ("a[id.x] + b[id.x]", "bitcast<f32>(bitcast<u32>(a[id.x] + b[id.x]) - (id.x & 1u))"),
        ("a[id.x] * b[id.x]", "bitcast<f32>(bitcast<u32>(a[id.x] * b[id.x]) + 1u)"),
    ],
    ids=["sums", "products"],
)
def test_other_rounding_doubles_the_bound(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, edit: tuple[str, str]) -> None:
    """An adapter whose sums or products are one unit off gets the doubled bound."""
    source = edited(shipped_kernel("probe_rounding").source, edit)
    monkeypatch.setattr(sys.modules["qcs4w_gpu.verify"], "shipped_kernel", lambda _: parse_kernel("probe", source))
    assert rounding_factor_of(gpu) == 2


def swapped(packed: PackedLinear) -> PackedLinear:
    """Return a weight with the nibbles of each byte swapped, as a file with fresh digests would hold it."""
    return PackedLinear((packed.packed >> 4 | packed.packed << 4).astype(np.uint8), packed.scales, packed.in_features)


def test_absmax_must_give_equal_bytes(gpu: Gpu) -> None:
    """Bytes that packing the source again gives are a match."""
    weight = random_weight(33, 65)
    verdict = verify(gpu, pack_weight(weight), source=weight)
    assert verdict.status == "pass"
    assert verdict.source is not None
    assert verdict.source.is_match
    assert verdict.source.equal_bytes
    assert verdict.source.first_difference is None
    assert 0 < verdict.source.error.relative < 0.2


@pytest.mark.parametrize("method", ["absmax", "mse", "imported"])
@pytest.mark.parametrize("shape", [(4, 8), (33, 64), (33, 65)], ids=str)
def test_swapped_nibbles_fail_against_their_source(gpu: Gpu, method: str, shape: tuple[int, int]) -> None:
    """Swapped nibbles pass a self-check, for GPU and judge read the same; against the source they fail by name."""
    weight = random_weight(*shape)
    wrong = swapped(pack_weight(weight))
    assert verify(gpu, wrong).status == "pass"
    verdict = verify(gpu, wrong, source=weight, method=method)
    assert verdict.status == "fail"
    assert verdict.exact.is_match
    assert verdict.bounded.is_match
    assert verdict.source is not None
    assert not verdict.source.equal_bytes
    assert verdict.source.first_difference is not None
    assert verdict.causes[0].name == "nibbles swapped"


def test_one_changed_code_fails_absmax_at_its_place() -> None:
    """One code that differs from what the source packs to is found, with both codes."""
    weight = random_weight(9, 12)
    packed = pack_weight(weight)
    codes = packed.codes().copy()
    right = int(codes[4, 7])
    codes[4, 7] = right + 1 if right < 7 else right - 1
    check = check_source(PackedLinear(pack_codes(codes), packed.scales, 12), weight, "absmax")
    assert not check.is_match
    assert check.first_difference == (4, 7, codes[4, 7], right)
    assert check_source(PackedLinear(pack_codes(codes), packed.scales, 12), weight, "mse").is_match


def test_changed_scales_fail_absmax() -> None:
    """Scales are compared bit for bit; codes that agree show no difference."""
    weight = random_weight(9, 12)
    packed = pack_weight(weight)
    scales = packed.scales.copy()
    scales[3] = np.nextafter(scales[3], np.float32(1))
    check = check_source(PackedLinear(packed.packed, scales, 12), weight, "absmax")
    assert (check.is_match, check.equal_bytes, check.first_difference) == (False, False, None)


def test_a_wrong_pad_fails_absmax() -> None:
    """Equal bytes means all of them, the pad included."""
    weight = random_weight(9, 11)
    packed = pack_weight(weight)
    data = packed.packed.copy()
    data[:, -1] &= 0xF0
    assert not check_source(PackedLinear(data, packed.scales, 11), weight, "absmax").is_match


def test_another_method_passes_when_our_reading_is_best() -> None:
    """Scales chosen otherwise give other bytes, which are right when no other reading explains the source better."""
    weight = random_weight(33, 64)
    codes, scales = quantize(weight, pack_weight(weight).scales * np.float32(0.8))
    packed = PackedLinear(pack_codes(codes), scales, 64)
    assert not check_source(packed, weight, "absmax").is_match
    check = check_source(packed, weight, "mse")
    assert check.is_match
    assert not check.equal_bytes
