"""The dispatcher: what goes wrong in a kernel or on the device is an error with the driver's words."""

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from cases import ENGINE, KERNELS, WEBGPU_LIMITS, edited, open_gpu

from qcs4w_gpu import (
    DeviceLostError,
    Gpu,
    GpuError,
    Kernel,
    KernelError,
    LimitError,
    parse_kernel,
    shipped_kernel,
)
from qcs4w_gpu.dispatcher import Buffer

pytestmark = pytest.mark.gpu

ONE = {"M": 1, "N": 1, "K": 1, "K_packed": 1}
NAIVE = shipped_kernel("linear_naive").source


@pytest.fixture
def buffers(gpu: Gpu) -> Iterator[dict[int, Buffer]]:
    """Four small buffers, as the linear binds them."""
    made = {index: gpu.empty(64, label=f"buffer {index}") for index in range(4)}
    yield made
    for buffer in made.values():
        buffer.close()


def mutant(old: str, new: str, name: str = "mutant") -> Kernel:
    """Return the naive kernel with one part of its text replaced."""
    return parse_kernel(name, edited(NAIVE, (old, new)))


# What is wrong with a kernel, and what naga or Tint says of it.
BROKEN = {
    "syntax": ("var sum = 0.0;", "var sum = = 0.0;", "expected expression|missing initializer"),
    "type": ("var sum = 0.0;", "var sum = 0u;", "type|no matching overload"),
    "unknown name": ("var sum = 0.0;", "var sum = device_lost;", "no definition|unresolved"),
    "store to a read-only buffer": ("var sum = 0.0;", "x[0] = 1.0; var sum = 0.0;", "not permitted|cannot store"),
    "feature not asked for": ("var sum = 0.0;", "var sum = f32(f16(0.0));", "f16"),
    "garbage": ("struct Params", "☃ struct Params", "☃|expected"),
}


@pytest.mark.parametrize(("old", "new", "words"), BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("name", ["mutant", "lost"])
def test_a_kernel_that_does_not_compile_is_an_error(
    gpu: Gpu, buffers: dict[int, Buffer], name: str, old: str, new: str, words: str
) -> None:
    """Syntax and validation errors name the kernel and the adapter and keep the compiler's text."""
    with pytest.raises(KernelError, match=words) as caught:
        gpu.dispatch(mutant(old, new, name), buffers, ONE, (1, 1))
    assert f"kernel '{name}' does not compile" in str(caught.value)
    assert gpu.adapter.name in str(caught.value)
    assert "unreachable" not in str(caught.value)
    gpu.dispatch(shipped_kernel("linear_naive"), buffers, ONE, (1, 1))  # and the device lives on


def test_the_same_error_is_reported_each_time(gpu: Gpu, buffers: dict[int, Buffer]) -> None:
    """A broken kernel is an error at every try; an implementation that goes silent after ten would hide it."""
    for _ in range(15):
        with pytest.raises(KernelError, match=BROKEN["syntax"][2]):
            gpu.dispatch(mutant(*BROKEN["syntax"][:2]), buffers, ONE, (1, 1))


def test_too_many_invocations_are_refused(gpu: Gpu, buffers: dict[int, Buffer]) -> None:
    """A workgroup larger than the device allows is refused by the name of the limit."""
    size = gpu.limits["max-compute-invocations-per-workgroup"] + 1
    kernel = mutant("const WORKGROUP: u32 = 64u;", f"const WORKGROUP: u32 = {size}u;")
    with pytest.raises(KernelError, match=rf"'mutant' asks for {size:,}, .*max-compute-invocations-per-workgroup"):
        gpu.dispatch(kernel, buffers, ONE, (1, 1))


def test_too_much_workgroup_memory_is_refused(gpu: Gpu, buffers: dict[int, Buffer]) -> None:
    """Workgroup memory beyond the limit is refused here, for the implementation lets it through."""
    words = gpu.limits["max-compute-workgroup-storage-size"] // 4 + 1
    source = edited(
        NAIVE,
        ("const WORKGROUP: u32 = 64u;", f"const WORKGROUP: u32 = 64u;\nvar<workgroup> big: array<f32, {words}>;"),
        ("var sum = 0.0;", "big[local] = 1.0; var sum = 0.0;"),
    )
    with pytest.raises(KernelError, match="max-compute-workgroup-storage-size"):
        gpu.dispatch(parse_kernel("big", source), buffers, ONE, (1, 1))


def test_a_workgroup_too_wide_is_an_error(gpu: Gpu, buffers: dict[int, Buffer]) -> None:
    """What only the driver checks, the width of one dimension say, is an error with its words."""
    depth = gpu.limits["max-compute-workgroup-size-z"] + 1
    kernel = mutant("@workgroup_size(WORKGROUP)", f"@workgroup_size(1, 1, {depth})")
    with pytest.raises(KernelError, match="mutant"):
        gpu.dispatch(kernel, buffers, ONE, (1, 1))


@pytest.mark.parametrize("grid", [(65_536, 1), (1, 65_536)], ids=str)
def test_a_grid_beyond_the_limit_is_an_error(gpu: Gpu, buffers: dict[int, Buffer], grid: tuple[int, int]) -> None:
    """A validation error of a dispatch names kernel and sizes, and is never ignored."""
    with pytest.raises(GpuError, match=r"kernel 'linear_naive' \(M 1, N 1, K 1, K_packed 1\) on ") as caught:
        gpu.dispatch(shipped_kernel("linear_naive"), buffers, ONE, grid)
    assert "65535" in str(caught.value)


def test_one_buffer_for_reading_and_writing_is_an_error(gpu: Gpu, buffers: dict[int, Buffer]) -> None:
    """The same buffer as output and input is refused by the implementation, and reported."""
    with pytest.raises(GpuError, match=r"conflicting usages|writable usage and another"):
        gpu.dispatch(shipped_kernel("linear_naive"), buffers | {1: buffers[0]}, ONE, (1, 1))


def test_a_missing_buffer_is_an_error(gpu: Gpu, buffers: dict[int, Buffer]) -> None:
    """A binding that no buffer is given for is named."""
    del buffers[2]
    with pytest.raises(KernelError, match="'linear_naive' has a binding 2 that no buffer"):
        gpu.dispatch(shipped_kernel("linear_naive"), buffers, ONE, (1, 1))


def test_a_pipeline_is_made_once_per_text(
    gpu: Gpu, buffers: dict[int, Buffer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second dispatch of a kernel does not compile it again; another text does."""
    compiled = []
    create = gpu._device.create_shader_module
    monkeypatch.setattr(gpu._device, "create_shader_module", lambda **given: compiled.append(1) or create(**given))
    kernel = parse_kernel("once", NAIVE + "// a text of its own\n")
    for again in (kernel, kernel, replace(kernel, name="twin")):
        gpu.dispatch(again, buffers, ONE, (1, 1))
    assert len(compiled) == 1
    gpu.dispatch(parse_kernel("once", NAIVE + "// another\n"), buffers, ONE, (1, 1))
    assert len(compiled) == 2


def test_the_clock_is_positive_or_missing(gpu: Gpu, buffers: dict[int, Buffer]) -> None:
    """A time is a positive number of milliseconds, or None; it grows with the work."""
    times = [gpu.dispatch(shipped_kernel("linear_naive"), buffers, ONE, (1, 1)) for _ in range(20)]
    assert all(time is None or 0 < time < 10_000 for time in times)
    if "timestamp-query" not in gpu.features:
        assert times == [None] * 20
        return
    large = {"M": 64, "N": 64, "K": 4096, "K_packed": 2048}
    made = {0: gpu.empty(64 * 64 * 4), 1: gpu.empty(64 * 4096 * 4), 2: gpu.empty(64 * 2048), 3: gpu.empty(64 * 4)}
    longer = gpu.dispatch(shipped_kernel("linear_naive"), made, large, (64, 1))
    assert longer is not None
    assert longer > min(time for time in times if time is not None)


def test_a_device_without_a_clock_runs(buffers: dict[int, Buffer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without timestamps a dispatch gives no time, and still waits for its result."""
    monkeypatch.setattr("qcs4w_gpu.dispatcher._USEFUL_FEATURES", ())
    with open_gpu() as plain:
        out = plain.upload(np.arange(3, dtype=np.float32))
        bias = plain.upload(np.ones(3, np.float32))
        sizes = {"M": 1, "N": 3, "K": 1, "K_packed": 1}
        assert plain.dispatch(shipped_kernel("bias_add"), {0: out, 1: bias}, sizes, (1, 1)) is None
        assert plain.read(out).view(np.float32).tolist() == [1, 2, 3]


@pytest.mark.parametrize("nbytes", [1, 2, 3, 4, 5, 7, 8, 1021])
def test_any_number_of_bytes_is_uploaded(gpu: Gpu, nbytes: int) -> None:
    """Bytes that are no multiple of 4 come back as they were, padded with zeros."""
    data = np.arange(1, nbytes + 1).astype(np.uint8)
    words = gpu.read(gpu.upload(data))
    assert words.nbytes == -(-nbytes // 4) * 4
    seen = words.view(np.uint8)
    assert seen[:nbytes].tolist() == data.tolist()
    assert not seen[nbytes:].any()


def test_uploads_larger_than_a_piece_are_whole(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload in several pieces leaves nothing out."""
    monkeypatch.setattr("qcs4w_gpu.dispatcher._UPLOAD_BYTES", 64)
    data = np.arange(1000, dtype=np.uint8)
    assert gpu.read(gpu.upload(data)).view(np.uint8).tolist() == data.tolist()


def test_an_empty_buffer_holds_zeros(gpu: Gpu) -> None:
    """A new buffer is zero, and even one of no bytes can be bound and read."""
    assert not gpu.read(gpu.empty(1000)).any()
    assert gpu.read(gpu.empty(0)).tolist() == [0]


def test_reading_gives_a_copy(gpu: Gpu) -> None:
    """What was read can be changed, and does not change with the buffer."""
    buffer = gpu.upload(np.array([1, 2], np.uint32))
    words = gpu.read(buffer)
    words[0] = 7
    gpu.write(buffer, np.array([3], np.uint32))
    assert words.tolist() == [7, 2]
    assert gpu.read(buffer).tolist() == [3, 2]


def test_arrays_are_written_in_c_order(gpu: Gpu) -> None:
    """A transposed or strided array is written in its logical order."""
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert gpu.read(gpu.upload(array.T)).view(np.float32).tolist() == array.T.ravel().tolist()
    assert gpu.read(gpu.upload(array[:, ::2])).view(np.float32).tolist() == array[:, ::2].ravel().tolist()


def test_writing_too_much_is_an_error(gpu: Gpu) -> None:
    """Bytes that do not fit are refused, with both sizes."""
    with pytest.raises(GpuError, match="12 bytes do not fit into small of 8 bytes"):
        gpu.write(gpu.empty(8, label="small"), np.zeros(3, np.float32))


def test_a_buffer_beyond_the_limits_is_refused(gpu: Gpu) -> None:
    """A buffer larger than the device allows is refused by the name of the limit, before the driver is asked."""
    limit = "max-(buffer-size|storage-buffer-binding-size)"
    with pytest.raises(LimitError, match=rf"huge needs 1,099,511,627,776 bytes, the device's {limit} is"):
        gpu.empty(1 << 40, label="huge")


def test_freed_buffers_are_refused(gpu: Gpu, buffers: dict[int, Buffer]) -> None:
    """A freed buffer is an error wherever it is used; the implementation would end the process."""
    gone = gpu.empty(4, label="gone")
    gone.close()
    gone.close()
    with pytest.raises(GpuError, match="gone has been freed"):
        gpu.read(gone)
    with pytest.raises(GpuError, match="gone has been freed"):
        gpu.write(gone, np.zeros(1, np.float32))
    with pytest.raises(GpuError, match="gone has been freed"):
        gpu.dispatch(shipped_kernel("linear_naive"), buffers | {1: gone}, ONE, (1, 1))


def test_buffers_of_another_device_are_refused(gpu: Gpu, buffers: dict[int, Buffer]) -> None:
    """A buffer is an error on any device but its own; the implementation would end the process."""
    with open_gpu() as other:
        strange = other.empty(4, label="strange")
        with pytest.raises(GpuError, match="strange belongs to another device"):
            gpu.read(strange)
        with pytest.raises(GpuError, match="strange belongs to another device"):
            gpu.dispatch(shipped_kernel("linear_naive"), buffers | {1: strange}, ONE, (1, 1))


def test_a_closed_device_refuses_everything(gpu: Gpu) -> None:
    """After close each call is an error that says so; other devices are not disturbed."""
    with open_gpu() as closed:
        buffer = closed.empty(4)
    closed.close()
    for use in (
        lambda: closed.empty(4),
        lambda: closed.upload(np.ones(3, np.float32)),
        lambda: closed.write(buffer, np.ones(1, np.float32)),
        lambda: closed.read(buffer),
        lambda: closed.finish(),
        lambda: closed.dispatch(shipped_kernel("linear_naive"), dict.fromkeys(range(4), buffer), ONE, (1, 1)),
    ):
        with pytest.raises(GpuError, match="the device has been closed") as caught:
            use()
        assert not isinstance(caught.value, DeviceLostError)
    gpu.finish()


@pytest.mark.parametrize("text", ["Parent device is lost", "Device lost", "The WGPU device was lost (Unknown):\nwhy"])
def test_a_lost_device_is_reported_as_such(gpu: Gpu, text: str) -> None:
    """What the implementation says of a lost device becomes an error of that name, with a hint."""
    with pytest.raises(DeviceLostError, match=re.escape(text)) as caught, gpu._reporting("working"):
        raise RuntimeError(text)
    assert caught.value.hint
    assert "watchdog" in caught.value.hint


def test_a_late_report_is_not_ignored(gpu: Gpu) -> None:
    """An error that the implementation only logs is raised by the next call, once."""
    import logging

    logging.getLogger({"dawn": "wgpudawn"}.get(ENGINE, ENGINE)).error("Validation Error: something happened")
    with pytest.raises(GpuError, match="something happened"):
        gpu.finish()
    gpu.finish()


@pytest.mark.parametrize("limits", [{"max-buffer-size": 1 << 60}, {"max-compute-invocations-per-workgroup": 1 << 20}])
def test_limits_beyond_the_adapter_are_refused(limits: dict[str, int]) -> None:
    """Asking for more than the adapter has is an error with the driver's words."""
    with pytest.raises(GpuError, match="opening the device on"):
        open_gpu(limits=limits)


def test_no_kernel_needs_more_than_default_limits() -> None:
    """Every shipped kernel compiles on a device with WebGPU's default limits."""
    with open_gpu(limits=WEBGPU_LIMITS) as small:
        for name in (*KERNELS, "bias_add", "probe_rounding", "split_sum", "bench_copy", "bench_fma"):
            kernel = shipped_kernel(name)
            made = {index: small.empty(64) for index in kernel.bindings if index != 4}
            small.dispatch(kernel, made, ONE, (1, 1))
