"""The bench: times are those of what was run, and nothing is timed that has not been judged."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
from cases import edited, open_gpu

from qcs4w_gpu import Gpu, GpuError, parse_kernel, shipped_kernel
from qcs4w_gpu.bench import Bench, random_weight

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def bench(gpu: Gpu) -> Iterator[Bench]:
    """A bench on the tests' device."""
    if "timestamp-query" not in gpu.features:
        pytest.skip(f"{gpu.adapter} has no clock")
    with Bench(gpu) as made:
        yield made


def test_a_linear_is_judged_and_timed(bench: Bench) -> None:
    """What is told of a shape follows from its sizes and its time."""
    timed = bench.linear((3, 65, 257), repeats=2)
    assert timed.is_right
    assert 0 < timed.relative_error < 1e-5
    assert 0 < timed.time.least_ms <= timed.time.median_ms <= timed.time.most_ms
    assert timed.time.count == 2
    assert timed.weight_bytes == 65 * 129 + 4 * 65
    assert timed.flops == 2 * 3 * 65 * 257
    seconds = timed.time.median_ms / 1e3
    assert math.isclose(timed.flops_per_s, timed.flops / seconds)
    assert math.isclose(timed.bytes_per_s, (timed.weight_bytes + 4 * 3 * (65 + 257)) / seconds)


def test_a_wrong_kernel_is_not_right(bench: Bench) -> None:
    """A kernel that drops the offset is timed, and told to be wrong."""
    wrong = parse_kernel("wrong", edited(shipped_kernel("linear_naive").source, ("i32(nibble) - 8", "i32(nibble)")))
    assert not bench.linear((2, 33, 64), kernel=wrong, repeats=1).is_right


def test_a_chain_gives_the_time_of_one_step(bench: Bench) -> None:
    """Ten steps in a pass take longer than one, and what is told is the time of one."""
    once = bench.gpu.run([[bench.shortest]])[0]
    spread = bench.chain([bench.shortest] * 10, repeats=2)
    assert once is not None
    assert spread.count == 2
    assert 0 < spread.median_ms < 100 * once


def test_ceilings_are_measured(bench: Bench) -> None:
    """A device moves and computes something."""
    ceilings = bench.ceilings()
    assert ceilings.copy_bytes_per_s > 0
    assert ceilings.fma_flops_per_s > 0


def test_a_device_without_a_clock_is_refused() -> None:
    """Without timestamps there is nothing to tell."""
    with open_gpu(features=()) as plain, pytest.raises(GpuError, match="has no clock"):
        Bench(plain)


def test_random_weights_keep_the_format() -> None:
    """The last nibble of a row of odd length is a code of zero."""
    packed = random_weight(np.random.default_rng(0), 7, 33)
    assert packed.packed.shape == (7, 17)
    assert ((packed.packed[:, -1] & 15) == 8).all()
