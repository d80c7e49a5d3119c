"""Every kernel against whole-number arithmetic, at every awkward shape."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from cases import (
    KERNELS,
    ROWS,
    SMALL_SHAPES,
    WEBGPU_LIMITS,
    edited,
    exact_case,
    open_gpu,
    packed_of,
    random_codes,
    run_with_limits,
    shapes,
)

from qcs4w_gpu import (
    FAST_KERNELS,
    Gpu,
    GpuError,
    Kernel,
    KernelError,
    LimitError,
    Linear,
    PrecisionError,
    choose_kernel,
    parse_kernel,
    plan_linear,
    shipped_kernel,
)
from qcs4w_gpu.judge import reference
from qcs4w_gpu.linear import _pad_rows
from qcs4w_gpu.plan import row_stride
from qcs4w_packer import PackedLinear
from qcs4w_packer.errors import NonFiniteError, UsageError
from qcs4w_packer.rowpack import pack_weight

pytestmark = pytest.mark.gpu

FOLDED_SHAPES = (
    (65, 129, 7),
    (33, 113, 64),
    (1, 129, 9),
    (5, 127, 3),
    (33, 400, 3),
    (129, 65, 1),
    (3, 13, 9),
    (129, 257, 3),
    (257, 513, 3),
    (513, 513, 2),
)


@pytest.fixture(scope="module")
def default_gpu() -> Iterator[Gpu]:
    """A device with no more than WebGPU's default limits, and no feature."""
    with open_gpu(limits=WEBGPU_LIMITS, features=()) as device:
        yield device


def fault(gpu: Gpu, kernel: Kernel | None, rows: int, out_features: int, in_features: int) -> str | None:
    """Run one exact case; return what is wrong with the answer, or None."""
    packed, x, y = exact_case(rows, out_features, in_features)
    linear = Linear(gpu, packed, kernel=kernel)
    run = linear.run(x, guard_words=64)
    linear.close()
    shape = f"M {rows} N {out_features} K {in_features}"
    if run.unwritten.any():
        return f"{shape}: {int(run.unwritten.sum())} elements not written"
    if not run.guards_intact:
        return f"{shape}: wrote behind y"
    if not np.array_equal(run.y, y):
        return f"{shape}: {int((run.y != y).sum())} of {y.size} elements wrong"
    return None


def foreign(name: str, row_align: int) -> Kernel:
    """Return a shipped kernel as if it came from a user's file, with a row_align of its own."""
    source = shipped_kernel(name).source
    now = f"//! row_align = {shipped_kernel(name).row_align}"
    return parse_kernel(f"{name}_{row_align}", edited(source, (now, f"//! row_align = {row_align}")))


@pytest.mark.parametrize("rows", ROWS, ids=lambda m: f"M{m}")
@pytest.mark.parametrize("name", KERNELS)
def test_exact_at_every_shape(gpu: Gpu, name: str, rows: int) -> None:
    """Integer inputs give exactly the whole-number answer, each element is written, and nothing behind y."""
    kernel = shipped_kernel(name)
    faults = [found for n, k in shapes() if (found := fault(gpu, kernel, rows, n, k))]
    assert not faults


@pytest.mark.parametrize(
    ("name", "row_align"),
    [
        *(("linear_naive", align) for align in (1, 4, 24)),
        *(("linear_gemv", align) for align in (16, 48)),
        *(("linear_tiled", align) for align in (4, 64)),
        *((name, 48) for name in FAST_KERNELS),
    ],
)
def test_exact_at_any_row_stride(gpu: Gpu, name: str, row_align: int) -> None:
    """A kernel honours K_packed: packed rows may lie unpadded or padded to more than they need."""
    kernel = foreign(name, row_align)
    for rows, out_features, in_features in SMALL_SHAPES:
        assert row_stride(in_features, kernel) % row_align == 0
        assert fault(gpu, kernel, rows, out_features, in_features) is None


def test_rows_are_unpadded_for_a_foreign_kernel() -> None:
    """A user's kernel gets K_packed = ceil(K / 2), ours get what the most demanding of them asks for."""
    copy = replace(shipped_kernel("linear_naive"), name="copy")
    assert [row_stride(k, copy) for k in (1, 2, 3, 7, 8, 9)] == [1, 1, 2, 4, 4, 5]
    assert [row_stride(k) for k in (1, 32, 33)] == [16, 16, 32]
    assert [row_stride(k, shipped_kernel("linear_naive")) for k in (1, 32, 33)] == [16, 16, 32]


@pytest.mark.parametrize("name", KERNELS)
def test_one_hot_input_reads_single_codes(gpu: Gpu, name: str) -> None:
    """An identity as x gives the codes themselves, column by column."""
    codes = random_codes(19, 37)
    y = Linear(gpu, packed_of(codes), kernel=shipped_kernel(name))(np.eye(37, dtype=np.float32))
    np.testing.assert_array_equal(y, codes.T.astype(np.float32))


@pytest.mark.parametrize("name", KERNELS)
def test_every_byte_is_read_right(gpu: Gpu, name: str) -> None:
    """Each of the 256 bytes gives its high nibble to the even column and its low nibble to the odd one."""
    packed = PackedLinear(np.arange(256, dtype=np.uint8)[:, None], np.ones(256, np.float32), 2)
    y = Linear(gpu, packed, kernel=shipped_kernel(name))(np.eye(2, dtype=np.float32))
    assert y[0].tolist() == [byte // 16 - 8 for byte in range(256)]
    assert y[1].tolist() == [byte % 16 - 8 for byte in range(256)]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("limit", [4, 5, 16])
def test_folded_grids_are_exact(gpu: Gpu, name: str, limit: int) -> None:
    """A grid folded into two dimensions, with workgroups to spare, computes each element once."""
    kernel = shipped_kernel(name)
    limits = {**gpu.limits, "max-compute-workgroups-per-dimension": limit}
    folded = 0
    for rows, out_features, in_features in FOLDED_SHAPES:
        packed, x, y = exact_case(rows, out_features, in_features)
        groups = kernel.workgroups({"M": rows, "N": out_features, "K": in_features, "K_packed": 4})
        if groups > limit * limit:
            continue
        plan, seen, guards = run_with_limits(gpu, kernel, packed, x, limits, row_stride(in_features))
        folded += plan.grid[1] > 1
        assert max(plan.grid) <= limit
        assert guards
        np.testing.assert_array_equal(seen, y)
    assert folded


@pytest.mark.parametrize("name", KERNELS)
def test_exact_under_default_limits(default_gpu: Gpu, name: str) -> None:
    """A device with WebGPU's default limits runs every kernel."""
    assert {k: v for k, v in default_gpu.limits.items() if k in WEBGPU_LIMITS} == WEBGPU_LIMITS
    faults = [found for shape in SMALL_SHAPES if (found := fault(default_gpu, shipped_kernel(name), *shape))]
    assert not faults


@pytest.mark.parametrize("in_features", [21, 1023, 1025])
@pytest.mark.parametrize("rows", [1, 11, 12, 13, 33])
def test_the_chosen_kernel_is_exact(gpu: Gpu, rows: int, in_features: int) -> None:
    """What runs when no kernel is named is right on both sides of the choice."""
    assert fault(gpu, None, rows, 37, in_features) is None


@pytest.mark.parametrize("in_features", [15, 1031])
def test_one_linear_serves_all_kernels(gpu: Gpu, in_features: int) -> None:
    """Weights uploaded once serve few rows and many."""
    packed, _, _ = exact_case(1, 33, in_features)
    linear = Linear(gpu, packed)
    for rows in (1, 40, 2):
        run = linear.run(np.ones((rows, in_features), np.float32))
        assert run.plan.kernel == choose_kernel(rows, 33, in_features, gpu.facts).kernel
        np.testing.assert_array_equal(run.y, np.ones((rows, in_features)) @ packed.dequantize().T)


@pytest.mark.parametrize("name", KERNELS)
def test_more_rows_than_columns(gpu: Gpu, name: str) -> None:
    """M may exceed K, and K / 2."""
    assert fault(gpu, shipped_kernel(name), 257, 3, 5) is None


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("in_features", [53_248, 65_537, 100_003])
def test_long_rows_are_summed_to_their_end(gpu: Gpu, name: str, in_features: int) -> None:
    """Rows longer than the 65,535 turns after which Mesa's llvmpipe leaves a loop are exact."""
    assert fault(gpu, shipped_kernel(name), 2, 3, in_features) is None


@pytest.mark.parametrize("name", KERNELS)
def test_sums_are_kept_in_float32(gpu: Gpu, name: str) -> None:
    """256 times 4096 weights of 0.7 give about 734003.2, where a 16-bit sum is infinite."""
    packed = packed_of(np.full((2, 4096), 7, np.int8), np.full(2, 0.1))
    x = np.full((1, 4096), 256, np.float32)
    y = Linear(gpu, packed, kernel=shipped_kernel(name))(x)
    wanted = reference(packed, x)
    assert (np.abs(y - wanted.y) <= wanted.bound).all()
    np.testing.assert_allclose(y, 734003.2, rtol=1e-5)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("seed", range(3))
def test_float_inputs_stay_within_the_bound(gpu: Gpu, name: str, seed: int) -> None:
    """Real scales and wide-ranging inputs stay within the judge's bound."""
    draw = np.random.default_rng(seed)
    packed = pack_weight(draw.standard_normal((71, 515), np.float32))
    x = (draw.standard_normal((33, 515)) * np.exp2(draw.integers(-60, 60, (33, 515)))).astype(np.float32)
    wanted = reference(packed, x)
    assert (np.abs(Linear(gpu, packed, kernel=shipped_kernel(name))(x) - wanted.y) <= wanted.bound).all()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("power", [-148, -130, -127])
def test_subnormals_stay_within_the_bound(gpu: Gpu, name: str, power: int) -> None:
    """Subnormal x, and subnormal scales beside large x, may be flushed to zero, and the bound knows it."""
    codes = random_codes(5, 33)
    small = np.full((2, 33), 2.0**power, np.float32)
    for packed, x in (
        (packed_of(codes), small),
        (packed_of(codes, np.full(5, 2.0**20)), small),
        (packed_of(codes, np.full(5, 2.0**power)), np.full((2, 33), 2.0**100, np.float32)),
    ):
        wanted = reference(packed, x)
        y = Linear(gpu, packed, kernel=shipped_kernel(name))(x)
        assert (np.abs(y - wanted.y) <= wanted.bound).all()


def adversarial(in_features: int) -> dict[str, np.ndarray]:
    """Return rows of x, (K,), made to find a kernel that rounds x itself, and not only sums of products."""
    draw = np.random.default_rng(in_features)
    x, at = draw.standard_normal(in_features), np.arange(in_features)
    rows = {
        "one 1e6 beside ones": np.where(at == in_features // 2, 1e6, 1),
        "some 1e6 beside 1e-6": np.where(at % 37 == 0, 1e6, 1e-6 * x),
        "every range": x * np.exp2(draw.integers(-40, 40, in_features)),
        "subnormal": x * 1e-39,
        "subnormal beside normal": np.where(at % 3 == 0, 1e-40, x),
        "near the least normal": x * 1e-36,
        "one sign": np.abs(x),
        "huge": x * 1e30,
        "zero": np.zeros(in_features),
    }
    return {name: row.astype(np.float32) for name, row in rows.items()}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("in_features", [1, 33, 515, 2080])
def test_adversarial_inputs_stay_within_the_bound(gpu: Gpu, name: str, in_features: int) -> None:
    """The bound holds for every x, also where the only weights that are not zero meet the smallest of them."""
    draw = np.random.default_rng(0)
    rows = adversarial(in_features)
    codes = random_codes(21, in_features)
    lone = np.zeros_like(codes)
    lone[np.arange(21), draw.integers(0, in_features, 21)] = draw.integers(1, 8, 21)
    sparse = np.where(draw.random(codes.shape) < 0.02, codes, 0).astype(np.int8)
    for weights in (codes, lone, sparse):
        packed = packed_of(weights, draw.uniform(0.01, 3, 21).astype(np.float32))
        x = np.stack(list(rows.values()))
        wanted = reference(packed, x)
        with Linear(gpu, packed, kernel=shipped_kernel(name)) as linear:
            wrong = ~(np.abs(linear(x) - wanted.y) <= wanted.bound)
        assert not wrong.any(), [list(rows)[m] for m in np.flatnonzero(wrong.any(axis=1))]


@pytest.mark.parametrize("splits", [2, 3, 8])
@pytest.mark.parametrize("name", ["linear_few4", "linear_few8", "linear_prefill"])
def test_parts_of_k_are_added_up(gpu: Gpu, name: str, splits: int) -> None:
    """Sums of parts of K, more parts than there is K for among them, give the exact y, and nothing behind it."""
    kernel = shipped_kernel(name, SPLITS=splits)
    for shape in (*SMALL_SHAPES, (9, 131, 1031), (130, 5, 300)):
        assert fault(gpu, kernel, *shape) is None


def test_a_prepared_linear_runs_many_times(gpu: Gpu) -> None:
    """What was made ready once gives the answer to each x that is written to it."""
    packed, x, y = exact_case(5, 37, 33)
    with Linear(gpu, packed) as linear, linear.prepare(5) as prepared:
        for sign in (1, -1):
            prepared.write(sign * x)
            prepared.run()
            np.testing.assert_array_equal(prepared.read(), sign * y)


@pytest.mark.parametrize("rows", [1, 33])
def test_a_precision_that_is_not_there_is_refused(gpu: Gpu, rows: int) -> None:
    """Asked for f16, a device without subgroup matrices says so, and one with them stays within the wider bound."""
    packed = packed_of(random_codes(40, 515), np.full(40, 0.3))
    x = np.random.default_rng(0).standard_normal((rows, 515), np.float32)
    if not gpu.facts.has_matrices:
        with pytest.raises(PrecisionError, match="subgroup matrices") as caught:
            Linear(gpu, packed, precision="f16")
        assert caught.value.hint
        return
    wanted = reference(packed, x, half=True)
    assert (np.abs(Linear(gpu, packed, precision="f16")(x) - wanted.y) <= wanted.bound).all()


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (65, 129, 8)], ids=str)
def test_bias_is_one_float32_addition(gpu: Gpu, shape: tuple[int, int, int]) -> None:
    """A bias changes y by exactly one float32 addition, and nothing behind y."""
    rows, out_features, in_features = shape
    draw = np.random.default_rng(0)
    packed = pack_weight(draw.standard_normal((out_features, in_features), np.float32))
    x, bias = draw.standard_normal((rows, in_features), np.float32), draw.standard_normal(out_features, np.float32)
    plain, biased = Linear(gpu, packed), Linear(gpu, packed, bias=bias)
    run = biased.run(x, guard_words=64)
    assert biased.has_bias
    assert not plain.has_bias
    assert run.guards_intact
    np.testing.assert_array_equal(run.y, plain(x) + bias)


def test_bias_in_a_folded_grid(gpu: Gpu) -> None:
    """Bias is added once to each element, however the grid is folded."""
    kernel = shipped_kernel("bias_add")
    limits = {**gpu.limits, "max-compute-workgroups-per-dimension": 3}
    plan = plan_linear(5, 101, 1, kernel=kernel, stride=1, limits=limits)
    assert plan.grid == (3, 3)
    y, bias = np.arange(505, dtype=np.float32), np.arange(101, dtype=np.float32)
    out = gpu.upload(y)
    gpu.dispatch(kernel, {0: out, 1: gpu.upload(bias)}, plan.sizes, plan.grid)
    np.testing.assert_array_equal(gpu.read(out).view(np.float32), y + np.tile(bias, 5))


def test_leading_dimensions_are_kept(gpu: Gpu) -> None:
    """An x of shape (2, 3, K) gives y of shape (2, 3, N), one of shape (K,) gives (N,)."""
    packed, x, y = exact_case(6, 4, 5)
    linear = Linear(gpu, packed)
    np.testing.assert_array_equal(linear(x.reshape(2, 3, 5)), y.reshape(2, 3, 4))
    np.testing.assert_array_equal(linear(x[0]), y[0])


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ">f4"])
def test_any_float_input_is_rounded_to_float32(gpu: Gpu, dtype: str) -> None:
    """Inputs of another float type or byte order, or not contiguous, are converted, never misread."""
    packed, x, y = exact_case(6, 4, 5)
    linear = Linear(gpu, packed)
    np.testing.assert_array_equal(linear.run(x.astype(dtype)).y, y)
    np.testing.assert_array_equal(linear(np.asfortranarray(x.astype(dtype))), y)
    np.testing.assert_array_equal(Linear(gpu, packed, scales=packed.scales.astype(np.float64))(x), y)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("x", "error"),
    [
        (np.ones((2, 4), np.float32), UsageError),
        (np.ones((0, 5), np.float32), UsageError),
        (np.float32(1), UsageError),
        (np.full((1, 5), np.nan, np.float32), NonFiniteError),
        (np.full((1, 5), np.inf, np.float32), NonFiniteError),
        (np.full((1, 5), 1e300), NonFiniteError),
    ],
    ids=["columns", "no rows", "scalar", "nan", "inf", "beyond float32"],
)
def test_wrong_inputs_are_refused(gpu: Gpu, x: np.ndarray, error: type[Exception]) -> None:
    """An input that does not fit the weight, or is not finite, is an error and never an answer."""
    linear = Linear(gpu, exact_case(1, 4, 5)[0])
    with pytest.raises(error, match="input of 'weight'"):
        linear(x)
    with pytest.raises(error, match="input of 'weight'"):
        linear.run(x)


@pytest.mark.parametrize("what", ["bias", "scales"])
def test_wrong_vectors_are_refused(gpu: Gpu, what: str) -> None:
    """A bias or scales of another length than N are an error."""
    packed = exact_case(1, 4, 5)[0]
    with pytest.raises(UsageError, match=rf"{what} has shape \[5\], expected \[4\]"):
        Linear(gpu, packed, **{what: np.ones(5, np.float32)})  # type: ignore[arg-type]


def test_a_kernel_of_another_contract_is_refused(gpu: Gpu) -> None:
    """A kernel without the linear's bindings is refused before anything is uploaded."""
    with pytest.raises(KernelError, match="bias_add"):
        Linear(gpu, exact_case(1, 4, 5)[0], kernel=shipped_kernel("bias_add"))


def test_too_large_weights_are_refused_before_upload(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights beyond the binding limit are refused by the name of the limit, with nothing allocated on the device."""
    monkeypatch.setattr(gpu, "limits", {**gpu.limits, "max-storage-buffer-binding-size": 1000})
    monkeypatch.setattr(gpu, "empty", lambda *_, **__: pytest.fail("allocated"))
    with pytest.raises(LimitError, match="max-storage-buffer-binding-size"):
        Linear(gpu, packed_of(random_codes(251, 8)))


def test_too_large_inputs_are_refused_before_upload(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """An x or y beyond the binding limit is refused by the name of the limit, with nothing allocated on the device."""
    linear = Linear(gpu, packed_of(random_codes(3, 8)), kernel=shipped_kernel("linear_naive"))
    monkeypatch.setattr(gpu, "limits", {**gpu.limits, "max-storage-buffer-binding-size": 1000})
    monkeypatch.setattr(gpu, "empty", lambda *_, **__: pytest.fail("allocated"))
    with pytest.raises(LimitError, match=r"x \(M 32 × K 8.* 1,024 bytes .*max-storage-buffer-binding-size is 1,000"):
        linear.run(np.ones((32, 8), np.float32))


def test_real_sizes_meet_the_default_limit(default_gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of 128,256 × 4,096 and 8,193 rows of 4,096 are beyond WebGPU's 128 MiB binding, and refused at once."""
    linear = Linear(default_gpu, packed_of(random_codes(1, 4096)))
    monkeypatch.setattr(default_gpu, "empty", lambda *_, **__: pytest.fail("allocated"))
    head = PackedLinear(np.zeros((128_256, 2048), np.uint8), np.ones(128_256, np.float32), 4096)
    with pytest.raises(LimitError, match=r"needs 262,668,288 bytes .*max-storage-buffer-binding-size is 134,217,728"):
        Linear(default_gpu, head)
    with pytest.raises(LimitError, match=r"needs 134,234,112 bytes .*max-storage-buffer-binding-size is 134,217,728"):
        linear(np.zeros((8193, 4096), np.float32))


def test_rows_are_padded_with_codes_of_zero() -> None:
    """Bytes between a row's end and the next row are 0x88; rows that need none are not copied."""
    packed = np.array([[1, 2, 3], [4, 5, 6]], np.uint8)
    assert _pad_rows(packed, 4).tolist() == [[1, 2, 3, 0x88], [4, 5, 6, 0x88]]
    assert _pad_rows(packed, 3) is packed


def test_a_closed_linear_refuses_to_run(gpu: Gpu) -> None:
    """After close a run is an error; handing freed buffers to the implementation would end the process."""
    linear = Linear(gpu, packed_of(random_codes(3, 8)), bias=np.zeros(3, np.float32))
    linear.close()
    linear.close()
    with pytest.raises(GpuError, match="packed weights has been freed"):
        linear(np.ones((1, 8), np.float32))


def test_times_are_reported(gpu: Gpu) -> None:
    """Times are positive; the kernel's own is None where the device has no clock."""
    linear = Linear(gpu, packed_of(random_codes(3, 8)))
    timing = linear.run(np.ones((1, 8), np.float32)).timing
    assert linear.upload_ms > 0
    assert timing.upload_ms > 0
    assert timing.readback_ms > 0
    assert timing.kernel_ms is None or 0 < timing.kernel_ms < 10_000


def test_a_run_that_fails_frees_its_buffers(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither x and y of a failed run nor the weights of a failed upload stay on the device."""
    made = []
    empty = gpu.empty

    def record(nbytes: int, *, label: str = "buffer"):  # type: ignore[no-untyped-def]
        if label == "bias":
            raise GpuError("on purpose")
        made.append(empty(nbytes, label=label))
        return made[-1]

    monkeypatch.setattr(gpu, "empty", record)
    broken = parse_kernel("broken", shipped_kernel("linear_naive").source.replace("var sum = 0.0;", "var sum = 0u;"))
    packed, x, _ = exact_case(2, 3, 5)
    with Linear(gpu, packed, kernel=broken) as linear, pytest.raises(KernelError):
        linear.run(x)
    with pytest.raises(GpuError, match="on purpose"):
        Linear(gpu, packed, bias=np.zeros(3, np.float32))
    assert len(made) == 6
    assert all(buffer.handle is None for buffer in made)
