"""The sweep catches faults of kernels and of the packer. `make mutants` sweeps them all; here is a part of them."""

from dataclasses import replace

import numpy as np
import pytest
from mutants import EQUIVALENT, MUTANTS, PACKING, first_failure, mutant_kernel, mutated_packer

from qcs4w_gpu import Gpu, shipped_kernel
from qcs4w_gpu.sweep import Shape, pack_slowly, sweep, sweep_shapes, sweep_weight
from qcs4w_packer import pack_weight

#: One of each kind, and what shows in small shapes: the whole list takes minutes.
PART = (
    "naive: nibbles swapped",
    "naive: offset missing",
    "naive: row stride for even K",
    "naive: scale of the neighbour",
    "naive: stale accumulator",
    "naive: store unguarded",
    "gemv: last column dropped",
    "tiled: every fourth column unwritten",
)


def test_there_are_enough_mutants() -> None:
    """The list has at least 40 edits, of all three kernels and of the packer; the part here is of the list."""
    assert len(MUTANTS) + len(PACKING) >= 40
    assert {mutant.kernel for mutant in MUTANTS.values()} == {"linear_naive", "linear_gemv", "linear_tiled"}
    assert set(PART) <= set(MUTANTS)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PART)
def test_the_sweep_catches_a_kernel(name: str, gpu: Gpu) -> None:
    """A kernel with a fault fails at some shape of the sweep."""
    assert first_failure(gpu, mutant_kernel(MUTANTS[name])) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("name", PACKING)
def test_the_sweep_catches_the_packer(name: str, gpu: Gpu) -> None:
    """A packer with a fault fails at some shape of the sweep, since its weights are packed by other code."""
    with mutated_packer(*PACKING[name]):
        found = first_failure(gpu, shipped_kernel("linear_naive"))
    assert found is not None
    assert next(sweep(gpu, shipped_kernel("linear_naive"), shapes=[found]))[1].status == "pass"  # mended again


@pytest.mark.gpu
@pytest.mark.parametrize("name", EQUIVALENT)
def test_equivalent_edits_pass(name: str, gpu: Gpu) -> None:
    """What is proved to change nothing is no failure, at the shapes with the most edges."""
    shapes = [shape for shape in sweep_shapes() if shape.in_features < 100 and shape.rows in (3, 17, 33, 65)]
    assert all(verdict.status == "pass" for _, verdict in sweep(gpu, mutant_kernel(EQUIVALENT[name]), shapes=shapes))


@pytest.mark.parametrize("shape", [shape for shape in sweep_shapes() if shape.in_features < 1000][::5], ids=str)
def test_the_slow_packer_agrees(shape: Shape) -> None:
    """Packing number by number and by whole arrays give equal bytes, tiny rows, zeros and ties included."""
    weight = sweep_weight(shape, 0)
    slow, fast = pack_slowly(weight), pack_weight(weight)
    assert np.array_equal(slow.packed, fast.packed)
    assert np.array_equal(slow.scales, fast.scales)


def test_the_sweep_has_every_small_shape() -> None:
    """Every N meets every K, no shape comes twice, and the smallest comes first."""
    shapes = sweep_shapes()
    assert shapes[0] == Shape(1, 1, 1)
    assert len(set(shapes)) == len(shapes)
    assert {(1, 1), (1, 257), (65, 1), (63, 67)} <= {(s.out_features, s.in_features) for s in shapes}
    assert replace(shapes[0], rows=4) > shapes[0]
