"""Which adapter is taken, and why."""

import pytest

from qcs4w_gpu import Adapter, Gpu, NoAdapterError, choose_adapter, list_adapters


def adapter(index: int, name: str, kind: str, driver: str = "") -> Adapter:
    """Return an adapter as the implementation would list it."""
    return Adapter(index, name, kind, "Vulkan", driver, {}, frozenset())


LAPTOP = (
    adapter(0, "llvmpipe (LLVM 15.0.6, 256 bits)", "software", "Mesa 22.3.6"),
    adapter(1, "Intel(R) Iris(R) Xe", "integrated GPU", "Mesa 22.3.6"),
    adapter(2, "NVIDIA GeForce RTX 4090", "discrete GPU", "580.0"),
    adapter(3, "NVIDIA GeForce RTX 3060", "discrete GPU", "580.0"),
)


@pytest.mark.parametrize(
    ("wanted", "taken", "reason"),
    [
        (None, 2, "a discrete GPU comes first among 4 adapters"),
        ("0", 0, "asked for as '0'"),
        ("3", 3, "asked for as '3'"),
        ("iris", 1, "asked for as 'iris'"),
        ("LLVMPIPE", 0, "asked for as 'LLVMPIPE'"),
        ("3060", 3, "asked for as '3060'"),
        ("nvidia", 2, "asked for as 'nvidia', the best of 2 that fit"),
        ("Mesa", 1, "asked for as 'Mesa', the best of 2 that fit"),
    ],
)
def test_an_adapter_is_chosen(wanted: str | None, taken: int, reason: str) -> None:
    """By default a real GPU comes before a software one; else by index or by a part of name or driver."""
    chosen, why = choose_adapter(LAPTOP, wanted)
    assert (chosen.index, why) == (taken, reason)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_the_order_of_the_list_does_not_matter(order: tuple[int, ...]) -> None:
    """Discrete comes before integrated, integrated before software, wherever they stand."""
    assert choose_adapter([LAPTOP[i] for i in order])[0].kind == "discrete GPU"
    assert choose_adapter([LAPTOP[i] for i in order if i != 2])[0].kind == "integrated GPU"


def test_a_lone_adapter_is_taken() -> None:
    """A single adapter is taken, and that is the reason."""
    assert choose_adapter(LAPTOP[:1]) == (LAPTOP[0], "the only adapter")


@pytest.mark.parametrize("wanted", ["4", "-1", "radeon", "1.0", "²"])
def test_an_unknown_adapter_is_refused(wanted: str) -> None:
    """A name or an index that fits nothing is an error that lists what there is."""
    with pytest.raises(NoAdapterError, match=f"no adapter '{wanted}'") as caught:
        choose_adapter(LAPTOP, wanted)
    assert caught.value.hint
    for each in LAPTOP:
        assert f"{each.index}: {each.name}" in caught.value.hint


def test_no_adapter_says_what_to_install() -> None:
    """Where there is no adapter the error says how to install a driver."""
    with pytest.raises(NoAdapterError, match="no WebGPU adapter") as caught:
        choose_adapter([])
    assert caught.value.hint
    assert "mesa-vulkan-drivers" in caught.value.hint


@pytest.mark.parametrize("wanted", [None, "0", "llvm"])
def test_a_required_gpu_is_required(wanted: str | None) -> None:
    """A software adapter is refused where a GPU is required, also when it was asked for by name."""
    with pytest.raises(NoAdapterError, match="a GPU is required, but llvmpipe"):
        choose_adapter(LAPTOP[:1] if wanted is None else LAPTOP, wanted, require_gpu=True)


def test_a_required_gpu_is_found() -> None:
    """A part of a name that fits a software and a real adapter means the real one."""
    assert choose_adapter(LAPTOP, "mesa", require_gpu=True)[0].index == 1
    assert choose_adapter(LAPTOP, require_gpu=True)[0].index == 2


@pytest.mark.gpu
def test_adapters_are_listed(gpu: Gpu) -> None:
    """The real list has an index, a name and limits for each, and the device's own adapter is among them."""
    found = list_adapters()
    assert [each.index for each in found] == list(range(len(found)))
    assert all(each.name and each.limits["max-buffer-size"] > 0 for each in found)
    assert gpu.adapter in found
    assert gpu.adapter.name in str(gpu.adapter)
    assert gpu.adapter.kind in str(gpu.adapter)


@pytest.mark.gpu
def test_a_device_has_the_limits_of_its_adapter(gpu: Gpu) -> None:
    """A device is not left with WebGPU's defaults where the adapter has more."""
    for limit in ("max-storage-buffer-binding-size", "max-compute-invocations-per-workgroup"):
        assert gpu.limits[limit] == gpu.adapter.limits[limit]


@pytest.mark.gpu
def test_a_software_device_is_refused_where_a_gpu_is_required(gpu: Gpu) -> None:
    """Opening a device keeps the same rule."""
    if not all(each.is_software for each in list_adapters()):
        pytest.skip("there is a real GPU")
    with pytest.raises(NoAdapterError, match="computes on the CPU"):
        Gpu(require_gpu=True)
