"""Every .wgsl as it is shipped compiles under both compilers, and what only one of them takes is refused."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cases import WEBGPU_LIMITS, edited, open_gpu, with_subgroups

from qcs4w_gpu import TINT_KERNELS, Gpu, KernelError, parse_kernel, read_kernel, shipped_kernel
from qcs4w_gpu.device import describe_adapter
from qcs4w_gpu.kernel import Kernel
from qcs4w_gpu.webgpu import engine

ROOT = Path(__file__).parent.parent
SHADERS = sorted(
    path.relative_to(ROOT) for folder in ("gpu", "examples", "tests") for path in ROOT.glob(f"{folder}/**/*.wgsl")
)
NAIVE = shipped_kernel("linear_naive").source

Compile = Callable[[Kernel], None]


@pytest.fixture(scope="module")
def tint() -> Iterator[Compile]:
    """Compiles with Tint for WebGPU's default limits, on Dawn's Null backend: it needs no driver and runs nothing."""
    dawn = engine("dawn")

    def open_null(features: frozenset[str]) -> Gpu:
        with pytest.MonkeyPatch.context() as patch:  # each adapter of Dawn's opens one device
            patch.setenv("WGPU_BACKEND_TYPE", "Null")
            adapter = describe_adapter(dawn, 0, dawn.api.gpu.request_adapter_sync())
        assert adapter.backend == "Null"
        return opened.enter_context(Gpu(adapter, limits=WEBGPU_LIMITS, features=features))

    with ExitStack() as opened:
        yield _compiler(open_null)


@pytest.fixture(scope="module")
def naga(gpu: Gpu) -> Iterator[Compile]:
    """Compiles with naga for WebGPU's default limits."""
    if gpu.engine.name != "wgpu":
        pytest.skip(f"the engine of this run is {gpu.engine.version}")
    with ExitStack() as opened:
        yield _compiler(lambda features: opened.enter_context(open_gpu(limits=WEBGPU_LIMITS, features=features)))


def _compiler(open_device: Callable[[frozenset[str]], Gpu]) -> Compile:
    """Return what compiles a kernel on a device that has no feature but those that the kernel enables."""
    devices: dict[frozenset[str], Gpu] = {}

    def compile_one(kernel: Kernel) -> None:
        if kernel.features not in devices:
            devices[kernel.features] = open_device(kernel.features)
        assert {name: devices[kernel.features].limits[name] for name in WEBGPU_LIMITS} == WEBGPU_LIMITS
        devices[kernel.features].compile(kernel)

    return compile_one


#: What naga takes and Tint does not: users of Chrome and ExecuTorch would find it.
ONLY_NAGA = {
    "a barrier that not every invocation reaches": ("var sum = 0.0;", "workgroupBarrier(); var sum = 0.0;"),
    "a subgroup operation that nothing enables": ("= sum * scales[n]", "= subgroupAdd(sum) * scales[n]"),
    "a division by a constant of zero": ("var sum = 0.0;", "var sum = f32(params.M / 0u);"),
}
NEITHER = {
    "a sum of another type": ("var sum = 0.0;", "var sum = 0u;"),
    "a store into a read-only buffer": ("var sum = 0.0;", "x[0] = 1.0; var sum = 0.0;"),
    "a workgroup beyond default limits": ("const WORKGROUP: u32 = 64u;", "const WORKGROUP: u32 = 257u;"),
    "a reserved word": ("const WORKGROUP: u32 = 64u;", "const WORKGROUP: u32 = 64u; const ref: u32 = 1u;"),
}


def mutant(old: str, new: str) -> Kernel:
    """Return the naive kernel with one part of its text replaced."""
    return parse_kernel("mutant", edited(NAIVE, (old, new)))


@pytest.mark.parametrize("path", SHADERS, ids=str)
def test_tint_takes_every_shader(tint: Compile, path: Path) -> None:
    """Dawn's and Chrome's compiler takes each file with WebGPU's default limits."""
    tint(read_kernel(ROOT / path))


@pytest.mark.gpu
@pytest.mark.parametrize("path", [path for path in SHADERS if path.stem not in TINT_KERNELS], ids=str)
def test_naga_takes_every_shader(naga: Compile, path: Path) -> None:
    """The compiler of wgpu takes each file with default limits, but for those that are meant for Tint alone."""
    naga(read_kernel(ROOT / path))


def test_what_naga_does_not_take_says_so() -> None:
    """Only what enables subgroup matrices, or f16 for them, or mends what they do, is left to Tint alone."""
    for name in TINT_KERNELS:
        source = shipped_kernel(name).source
        assert "subgroup_matrix" in source or "linear_matrix" in source


def test_tint_takes_what_a_kernel_enables(tint: Compile) -> None:
    """A text with `enable subgroups;` compiles as it stands, and so does one with `enable f16;`."""
    tint(parse_kernel("with_subgroups", with_subgroups(NAIVE)))
    tint(parse_kernel("with_f16", "enable f16;\n" + edited(NAIVE, ("var sum = 0.0;", "var sum = f32(0.0h);"))))


@pytest.mark.gpu
def test_naga_takes_what_a_kernel_enables(naga: Compile, gpu: Gpu) -> None:
    """The same text with `enable subgroups;` compiles under naga, by the one change that the dispatcher makes."""
    kernel = parse_kernel("with_subgroups", with_subgroups(NAIVE))
    if kernel.features - gpu.adapter.features:
        pytest.skip(f"{gpu.adapter} has no subgroups")
    naga(kernel)


def test_no_shader_is_missed() -> None:
    """The kernels, the example and the tests' own are among what is compiled."""
    names = {path.stem for path in SHADERS}
    assert {"linear_naive", "linear_gemv", "linear_tiled", "bias_add", "my_kernel", "one_wrong_code"} <= names


@pytest.mark.parametrize(("old", "new"), (ONLY_NAGA | NEITHER).values(), ids=ONLY_NAGA | NEITHER)
def test_tint_refuses(tint: Compile, old: str, new: str) -> None:
    """The check bites: what WGSL forbids is refused, also where naga lets it through."""
    with pytest.raises(KernelError, match="mutant"):
        tint(mutant(old, new))


@pytest.mark.gpu
@pytest.mark.parametrize(("old", "new"), NEITHER.values(), ids=NEITHER)
def test_naga_refuses(naga: Compile, old: str, new: str) -> None:
    """The check by naga bites too."""
    with pytest.raises(KernelError, match="mutant"):
        naga(mutant(old, new))


@pytest.mark.gpu
@pytest.mark.parametrize(("old", "new"), ONLY_NAGA.values(), ids=ONLY_NAGA)
def test_naga_alone_is_not_enough(naga: Compile, gpu: Gpu, old: str, new: str) -> None:
    """What Tint refuses passes naga, so that wgpu alone proves little. Should naga learn, this test may go."""
    kernel = mutant(old, new)
    if "subgroup" in new:
        if "subgroups" not in gpu.adapter.features:
            pytest.skip(f"{gpu.adapter} has no subgroups")
        with open_gpu(features={"subgroups"}) as able:
            able.compile(kernel)
    else:
        naga(kernel)
