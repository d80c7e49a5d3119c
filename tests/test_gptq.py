"""GPTQ, refitted scales and descent against slow references in float64, and the traps of real layers."""

import numpy as np
import pytest
import torch

from qcs4w_packer import dequantize, quantize
from qcs4w_packer.methods.descent import descend, refit, round_backwards
from qcs4w_packer.methods.gptq import DESCENTS, Quantized, gptq, hmse, mse
from qcs4w_packer.methods.hessian import damping_for, factor
from qcs4w_packer.methods.least_squares import least_squares_scales

SHAPES = [(1, 1), (1, 7), (5, 1), (3, 2), (11, 31), (7, 33), (30, 113), (140, 40)]


def inputs(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Activations as layers have them: columns that go together, and some far larger than others."""
    mixed = (rng.standard_normal((rows, columns)) / np.arange(1, columns + 1) ** 0.7) @ rng.standard_normal(
        (columns,) * 2
    )
    return np.asarray((mixed + 0.1 * rng.standard_normal((rows, columns))) * np.exp(rng.standard_normal(columns)))


def damped(hessian: np.ndarray, rows: int) -> np.ndarray:
    """H with its damping, in float64."""
    mean = np.diagonal(hessian).mean()
    return np.asarray(hessian + min(1.0, max(0.01, len(hessian) / rows)) * mean * np.eye(len(hessian)))


def losses(weight: np.ndarray, codes: np.ndarray, scales: np.ndarray, hessian: np.ndarray) -> np.ndarray:
    """(w − ŵ)ᵀ H (w − ŵ) of each row in float64."""
    rest = weight.astype(np.float64) - codes * scales.astype(np.float64)[:, None]
    return np.asarray(np.einsum("nk,kl,nl->n", rest, hessian, rest))


def slow_gptq(weight: np.ndarray, hessian: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Codes of GPTQ in its usual form: columns by falling diagonal, with the inverse of what is left."""
    left = list(np.argsort(np.diagonal(hessian), kind="stable")[::-1])
    w, codes = weight.astype(np.float64), np.zeros(weight.shape, np.int8)
    while left:
        inverse = np.linalg.inv(hessian[np.ix_(left, left)])
        column = left.pop(0)
        codes[:, column] = np.clip(np.rint(w[:, column] / scales), -8, 7)
        lost = w[:, column] - codes[:, column] * scales
        w[:, left] -= np.outer(lost, inverse[0, 1:] / inverse[0, 0])
    return codes


def slow_refit(weight: np.ndarray, codes: np.ndarray, scales: np.ndarray, hessian: np.ndarray) -> np.ndarray:
    """The best scale of each row for given codes, where it is above zero."""
    found = scales.astype(np.float64)
    for row, (w, q) in enumerate(zip(weight.astype(np.float64), codes.astype(np.float64), strict=True)):
        if q @ hessian @ q > 0 and q @ hessian @ w > 0:
            found[row] = (q @ hessian @ w) / (q @ hessian @ q)
    return found


def slow_descent(weight: np.ndarray, codes: np.ndarray, scales: np.ndarray, hessian: np.ndarray) -> np.ndarray:
    """One visit of every code, by falling diagonal, all sixteen values tried."""
    codes = codes.astype(np.float64)
    values = np.arange(-8, 8)
    for w, q, s in zip(weight.astype(np.float64), codes, scales, strict=True):
        for column in np.argsort(np.diagonal(hessian), kind="stable")[::-1]:
            rest = w - s * q
            moves = -s * (values - q[column])
            q[column] = values[np.argmin(2 * moves * (hessian[column] @ rest) + moves**2 * hessian[column, column])]
    return codes.astype(np.int8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_equals_a_slow_reference(shape: tuple[int, int], rng: np.random.Generator) -> None:
    """Codes and scales of the usual form of GPTQ with plain refits and descents, for any number of columns."""
    weight = rng.standard_normal(shape).astype(np.float32)
    rows = 8 * shape[1]
    x = inputs(rng, rows, shape[1])
    hessian = damped(x.T @ x, rows)
    scales = least_squares_scales(weight, np.diagonal(hessian)).astype(np.float64)
    codes = slow_gptq(weight, hessian, scales)
    for _ in range(DESCENTS):
        scales = slow_refit(weight, codes, scales, hessian)
        codes = slow_descent(weight, codes, scales, hessian)
    found = gptq(weight, x.T @ x, rows)
    assert (found.method, found.fallback) == ("gptq", None)
    assert found.damping == pytest.approx(min(1.0, max(0.01, shape[1] / rows)))
    np.testing.assert_array_equal(found.codes, codes)
    np.testing.assert_allclose(found.scales, scales, rtol=1e-5)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", [(3, 5), (40, 70), (9, 200)], ids=str)
def test_no_step_raises_the_loss_of_any_row(shape: tuple[int, int], seed: int) -> None:
    """Each refit and each descent leaves every row's loss where it was or lower, from any codes to start with."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_t(3, shape).astype(np.float32)
    x = inputs(rng, 4 * shape[1], shape[1])
    factored = factor(x.T @ x, len(x))
    assert factored is not None
    matrix = factored.matrix.numpy().astype(np.float64)
    turned = torch.from_numpy(weight).T[factored.order].contiguous()
    scales = torch.from_numpy(least_squares_scales(weight) * np.float32(rng.uniform(0.3, 3)))
    solution = round_backwards(factored, turned, scales)
    if seed % 2:
        solution.codes.copy_(torch.from_numpy(rng.integers(-8, 8, solution.codes.shape).astype(np.float32)))
        torch.addcmul(turned, solution.codes, solution.scales, value=-1, out=solution.rest)

    def now() -> np.ndarray:
        codes = solution.codes.numpy().T
        assert set(np.unique(codes)) <= set(range(-8, 8))
        found = losses(turned.numpy().T, codes, solution.scales.numpy(), matrix)
        np.testing.assert_allclose(solution.losses().numpy(), found, rtol=1e-4)
        return found

    before = now()
    for step in (descend, refit, descend, refit, descend, descend, refit):
        step(solution)
        after = now()
        assert (after <= before * (1 + 1e-5)).all(), step.__name__
        before = after


def test_held_out_outputs_get_better(rng: np.random.Generator) -> None:
    """On inputs that it has not seen, each method beats the one before by a margin."""
    weight = rng.standard_normal((48, 128)).astype(np.float32)
    x = inputs(rng, 128 * 17, 128)
    seen, held_out = x[128:], x[:128]
    hessian = seen.T @ seen
    found = [
        Quantized(*quantize(weight), "absmax"),
        hmse(weight, np.diagonal(hessian)),
        gptq(weight, hessian, len(seen)),
    ]
    errors = [np.linalg.norm(held_out @ (weight - dequantize(q.codes, q.scales)).T) for q in found]
    assert errors[1] < 0.95 * errors[0]
    assert errors[2] < 0.7 * errors[1]


@pytest.mark.parametrize("shape", [(1, 40), (200, 40), (301, 72)], ids=str)
def test_threads_change_nothing(shape: tuple[int, int], rng: np.random.Generator) -> None:
    """One, two and five threads give the same bits, and leave torch's own number of threads as it was."""
    weight = rng.standard_normal(shape).astype(np.float32)
    x = inputs(rng, 500, shape[1])
    before = torch.get_num_threads()
    one, *more = (gptq(weight, x.T @ x, len(x), threads=threads) for threads in (1, 2, 5))
    for other in more:
        assert other.codes.tobytes() == one.codes.tobytes()
        assert other.scales.tobytes() == one.scales.tobytes()
    assert torch.get_num_threads() == before


def test_zero_rows_and_dead_columns(rng: np.random.Generator) -> None:
    """A zero row stays zero with the floor as its scale; a column without inputs is packed as well as it can be."""
    weight = rng.standard_normal((20, 50)).astype(np.float32)
    weight[3] = 0
    x = inputs(rng, 400, 50)
    x[:, [0, 17, 49]] = 0
    found = gptq(weight, x.T @ x, len(x))
    assert found.scales[3] == np.float32(2.0**-23)
    assert not found.codes[3].any()
    off = np.abs(weight - dequantize(found.codes, found.scales))[:, [0, 17, 49]]
    inside = np.abs(weight[:, [0, 17, 49]]) < 7 * found.scales[:, None]
    assert inside.mean() > 0.9
    assert (off[inside] <= 0.501 * np.repeat(found.scales[:, None], 3, axis=1)[inside]).all()


def test_too_few_rows_are_damped(rng: np.random.Generator) -> None:
    """H of a single input is singular, and is used with a damping of 1."""
    weight = rng.standard_normal((8, 40)).astype(np.float32)
    x = inputs(rng, 1, 40)
    found = gptq(weight, x.T @ x, 1)
    assert (found.method, found.damping) == ("gptq", 1.0)
    base = quantize(weight)
    assert np.linalg.norm(x @ (weight - dequantize(found.codes, found.scales)).T) < np.linalg.norm(
        x @ (weight - dequantize(*base)).T
    )


def test_more_damping_is_tried_first(rng: np.random.Generator) -> None:
    """An H that rounding has made slightly indefinite is damped ten times as much, and that is told."""
    x = inputs(rng, 4000, 30)
    hessian = x.T @ x
    values, vectors = np.linalg.eigh(hessian)
    values[0] = -0.05 * np.diagonal(hessian).mean()
    weight = rng.standard_normal((8, 30)).astype(np.float32)
    found = gptq(weight, vectors @ np.diag(values) @ vectors.T, 4000)
    assert (found.method, found.damping, found.fallback) == ("gptq", pytest.approx(0.1), None)


@pytest.mark.parametrize("kind", ["zero", "indefinite", "negative"])
def test_an_h_that_cannot_be_used_has_a_named_fallback(kind: str, rng: np.random.Generator) -> None:
    """Codes and scales are then those of hmse or mse, and the reason is told."""
    weight = rng.standard_normal((8, 30)).astype(np.float32)
    hessian = np.zeros((30, 30))
    if kind == "indefinite":
        hessian = np.diag(rng.uniform(1, 2, 30))
        hessian[0, 1] = hessian[1, 0] = 1e6
    if kind == "negative":
        hessian = -np.eye(30)
    found = gptq(weight, hessian, 500)
    assert found.method == ("hmse" if kind == "indefinite" else "mse")
    assert found.damping == 0
    assert found.fallback
    expected = hmse(weight, np.diagonal(hessian) + 0.06 * np.diagonal(hessian).mean())
    if kind != "indefinite":
        expected = mse(weight)
    np.testing.assert_array_equal(found.codes, expected.codes)
    np.testing.assert_array_equal(found.scales, expected.scales)


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e30], ids=str)
def test_the_size_of_h_does_not_matter(size: float, rng: np.random.Generator) -> None:
    """Very large and very small activations give the codes that moderate ones do."""
    weight = rng.standard_normal((8, 30)).astype(np.float32)
    x = inputs(rng, 500, 30)
    np.testing.assert_array_equal(gptq(weight, x.T @ x * size, 500).codes, gptq(weight, x.T @ x, 500).codes)


def test_damping_falls_with_the_rows() -> None:
    """clamp(K / rows, 0.01, 1)."""
    assert [damping_for(100, rows) for rows in (0, 1, 100, 400, 10_000, 10**6)] == [1, 1, 1, 0.25, 0.01, 0.01]
