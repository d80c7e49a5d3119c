"""Two engines behind one dispatcher: wgpu and Dawn."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import KERNELS, SMALL_SHAPES, WEBGPU_LIMITS, exact_case, open_gpu, with_subgroups
from chromium import swiftshader_icd
from command_line import CommandLine, process

from qcs4w_cli.options import ENGINES as OFFERED
from qcs4w_gpu import Gpu, GpuError, KernelError, Linear, NoAdapterError, parse_kernel, shipped_kernel
from qcs4w_gpu.device import choose_adapter, list_adapters
from qcs4w_gpu.errors import DeviceLostError, MissingEngineError
from qcs4w_gpu.native_stderr import captured_stderr
from qcs4w_gpu.webgpu import _REFUSAL, ENGINES, _without_subgroups, engine

NAIVE = shipped_kernel("linear_naive").source

#: What every device has to get by with: each alone, and all at once.
LESS: dict[str, dict[str, Any]] = {
    "no subgroups": {"features": ("timestamp-query", "shader-f16")},
    "no f16": {"features": ("timestamp-query", "subgroups")},
    "no clock": {"features": ("shader-f16", "subgroups")},
    "128 MiB bindings": {"limits": {"max-storage-buffer-binding-size": 128 << 20}},
    "256 invocations": {"limits": {"max-compute-invocations-per-workgroup": 256}},
    "16 KiB of workgroup memory": {"limits": {"max-compute-workgroup-storage-size": 16384}},
    "WebGPU's default limits, no features": {"limits": WEBGPU_LIMITS, "features": ()},
}


def in_a_process(script: str, **environment: str) -> Any:
    """Run a script in a process of its own; return the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_engines_are_named_once() -> None:
    """What the command line offers is what there is."""
    assert OFFERED == ENGINES


def test_an_unknown_engine_is_an_error() -> None:
    """A name that is none of them is refused, with those that are."""
    with pytest.raises(MissingEngineError, match="there is no engine 'cuda'") as caught:
        Gpu(engine="cuda")
    assert caught.value.hint == "the engines are wgpu, dawn"


def test_a_missing_engine_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without wgpudawn `Gpu(engine="dawn")` is one error with the command to type."""
    monkeypatch.setitem(sys.modules, "wgpudawn", None)
    with pytest.raises(MissingEngineError, match="the engine 'dawn' is not installed") as caught:
        engine.__wrapped__("dawn")
    assert caught.value.hint == "pip install 'qcs4w[dawn]'"


def test_the_command_line_says_how_to_install_an_engine(tmp_path: Path) -> None:
    """QCS4W_ENGINE names an engine that is not there: exit code 2, a hint, no traceback."""
    (tmp_path / "wgpudawn.py").write_text("raise ModuleNotFoundError(\"No module named 'wgpudawn'\", name='wgpudawn')")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    result = process("devices", PYTHONPATH=path, QCS4W_ENGINE="dawn")
    assert result.code == 2
    assert result.out == ""
    assert "Error: the engine 'dawn' is not installed\nHint: pip install 'qcs4w[dawn]'" in result.err
    assert "Traceback" not in result.err


@pytest.mark.gpu
def test_devices_lists_both_engines(gpu: Gpu, qcs4w: CommandLine) -> None:
    """Each engine is there with its version, and with its adapters or with what keeps it from having any."""
    document = qcs4w("devices", "--json").document
    assert [each["name"] for each in document["engines"]] == ["wgpu", "dawn"]
    for each in document["engines"]:
        assert each["version"].startswith(f"{each['name']} 0.32.")
        has_adapters = any(adapter["engine"] == each["name"] for adapter in document["adapters"])
        assert has_adapters or each["problem"]
    assert document["engine"] == gpu.engine.version
    (taken,) = (adapter for adapter in document["adapters"] if adapter["taken"])
    assert taken["engine"] == gpu.engine.name


@pytest.mark.gpu
@pytest.mark.parametrize("name", ENGINES)
def test_a_lost_device_is_an_error(name: str) -> None:
    """A device that goes away is a DeviceLostError at whatever is tried next, and no crash."""
    environment: dict[str, str] = {}
    # In a process of its own: a crash would be the end of this one.
    script = f"""
import gc, json, sys
import numpy as np
from qcs4w_gpu import Gpu, NoAdapterError, shipped_kernel
from qcs4w_gpu.errors import DeviceLostError
try:
    gpu = Gpu(engine={name!r})
except NoAdapterError as error:
    sys.exit(print(json.dumps([str(error)])))
one, kernel = {{"M": 1, "N": 1, "K": 1, "K_packed": 1}}, shipped_kernel("linear_naive")
buffers = {{index: gpu.upload(np.ones(4, np.float32)) for index in range(4)}}
gpu.dispatch(kernel, buffers, one, (1, 1))
gpu._device.destroy()
seen = []
for use in (lambda: gpu.write(buffers[0], np.ones(4, np.float32)), lambda: gpu.read(buffers[0]), gpu.finish,
            lambda: gpu.upload(np.ones(4, np.float32)), lambda: gpu.dispatch(kernel, buffers, one, (1, 1)),
            lambda: gpu.compile(shipped_kernel("bias_add"))):
    try:
        use()
        seen.append("nothing")
    except Exception as error:
        seen.append(type(error).__name__)
    gc.collect()
print(json.dumps(seen))
"""
    # Dawn refuses Debian 12's Mesa; SwiftShader serves both where Chromium is installed.
    with contextlib.suppress(FileNotFoundError):
        environment = {"VK_DRIVER_FILES": str(swiftshader_icd())}
    seen = in_a_process(script, **environment)
    if len(seen) == 1:
        pytest.skip(seen[0])
    assert seen == [DeviceLostError.__name__] * 6


@pytest.mark.gpu
@pytest.mark.parametrize("less", LESS.values(), ids=LESS)
def test_every_kernel_gets_by_with_less(gpu: Gpu, less: dict[str, Any]) -> None:
    """On a device that was given less, every kernel and the choice among them are exact."""
    asked = {**less, "features": [name for name in less.get("features", ()) if name in gpu.adapter.features]}
    with open_gpu(**asked) as lean:
        assert lean.features & {"shader-f16", "subgroups", "timestamp-query"} <= set(asked["features"])
        assert {name: lean.limits[name] for name in less.get("limits", ())} == less.get("limits", {})
        for shape in SMALL_SHAPES:
            packed, x, y = exact_case(*shape)
            for kernel in (None, *(shipped_kernel(name) for name in KERNELS)):
                with Linear(lean, packed, kernel=kernel) as linear:
                    np.testing.assert_array_equal(linear.run(x).y, y)


@pytest.mark.gpu
def test_a_feature_that_is_not_there_is_named(gpu: Gpu) -> None:
    """A kernel that enables what the device was not given is refused by the feature's name, before it is compiled."""
    with pytest.raises(GpuError, match="does not have warp-drive"):
        open_gpu(features={"warp-drive"})
    with open_gpu(features=()) as plain:
        for enabled, feature in (("f16", "shader-f16"), ("subgroups", "subgroups")):
            with pytest.raises(KernelError, match=f"kernel 'k' needs the feature {feature}, which .* does not have"):
                plain.compile(parse_kernel("k", f"enable {enabled};\n{NAIVE}"))


@pytest.mark.gpu
def test_a_kernel_with_subgroups_runs(gpu: Gpu) -> None:
    """A text with `enable subgroups;` runs and is right, also under naga, which does not know the line."""
    if "subgroups" not in gpu.features:
        pytest.skip(f"{gpu.adapter} has no subgroups, or the run has default limits")
    source = with_subgroups(NAIVE)
    packed, x, y = exact_case(3, 65, 7)
    with Linear(gpu, packed, kernel=parse_kernel("with_subgroups", source)) as linear:
        np.testing.assert_array_equal(linear.run(x).y, y)


@pytest.mark.gpu
def test_both_engines_serve_the_command_line(packed_file: Path, tmp_path: Path) -> None:
    """On one driver both engines give y bit by bit alike, and verify works on Dawn too; the JSON names the engine."""
    try:
        driver = {"VK_DRIVER_FILES": str(swiftshader_icd())}
    except FileNotFoundError as error:
        pytest.skip(str(error))
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((3, 33), np.float32))
    verified = process("verify", packed_file, "--engine", "dawn", "--json", **driver)
    assert verified.code == 0, verified
    assert verified.document["engine"] == engine("dawn").version
    outputs = []
    for name in ENGINES:
        out = tmp_path / f"{name}.npy"
        arguments = ("run", packed_file, "-x", tmp_path / "x.npy", "--tensor", "layers.0.fc", "-o", out, "--json")
        ran = process(*arguments, QCS4W_ENGINE=name, **driver)
        assert ran.code == 0, ran
        assert ran.document["engine"] == engine(name).version
        assert ran.document["results"][0]["kernel_ms"] > 0
        outputs.append(np.load(out))
    np.testing.assert_array_equal(outputs[0].view(np.uint32), outputs[1].view(np.uint32))


@pytest.mark.gpu
def test_an_adapter_of_the_list_can_be_opened(gpu: Gpu) -> None:
    """A program may choose among what it has listed; the adapter knows its engine."""
    listed = list_adapters(gpu.engine.name)[gpu.adapter.index]
    with Gpu(listed) as opened:
        assert opened.adapter is listed
        assert opened.engine is gpu.engine
        assert opened.reason == "given by the program"


@pytest.mark.parametrize(
    ("source", "for_naga"),
    [
        ("enable subgroups;\nfn f() {}", "                 \nfn f() {}"),
        ("enable f16, subgroups;", "enable f16;           "),
        ("enable subgroups, f16,;", "enable f16;            "),
        ("enable f16; enable subgroups; const a = 1;", "enable f16;                   const a = 1;"),
        ("enable\n  subgroups\n;const a = 1;", "\n\nconst a = 1;"),
        ("enable f16;", "enable f16;"),
        ("enable f16, subgroups_f16;", "enable f16, subgroups_f16;"),
        ("// enable subgroups\nvar<private> a: u32;", "// enable subgroups\nvar<private> a: u32;"),
        ("requires subgroup_id;\nconst subgroups = 1;", "requires subgroup_id;\nconst subgroups = 1;"),
    ],
)
def test_one_line_is_changed_for_naga(source: str, for_naga: str) -> None:
    """Only `subgroups` goes from the enable lines, and what follows keeps its line and column."""
    assert _without_subgroups(source) == for_naga


def test_the_text_for_tint_is_the_file() -> None:
    """Dawn compiles a kernel as it was written."""
    text = "enable subgroups;\n" + NAIVE
    assert engine("dawn").own_wgsl(text) == text


@pytest.mark.parametrize(
    ("head", "features"),
    [
        ("enable f16;", {"shader-f16"}),
        ("// a word\nenable f16, subgroups;", {"shader-f16", "subgroups"}),
        ("requires pointer_composite_access; enable subgroups;\nenable f16;", {"shader-f16", "subgroups"}),
        ("// enable f16;", set()),
        ("/* enable f16; */", set()),
        ("enable something_else;", set()),
        ("", set()),
    ],
)
def test_a_kernel_says_what_it_enables(head: str, features: set[str]) -> None:
    """The features that a kernel needs are read from its enable lines, and from nowhere else."""
    assert parse_kernel("k", f"{head}\n{NAIVE}").features == features


def test_a_refused_driver_is_explained() -> None:
    """Where Dawn refuses the only driver the error says so, in Dawn's words, and what to do."""
    printed = (
        "Warning: Vulkan shaderUniform*ArrayDynamicIndexing required.\n"
        " - While initializing adapter (backend=BackendType::Vulkan)\n    at InitializeImpl (PhysicalDeviceVk.cpp:25)\n"
    )
    with pytest.raises(NoAdapterError, match="the engine refuses it: Vulkan shaderUniform") as caught:
        choose_adapter([], refused=_REFUSAL.findall(printed))
    assert caught.value.hint
    assert "--engine wgpu" in caught.value.hint
    assert "VK_DRIVER_FILES" in caught.value.hint


def test_what_native_code_prints_is_caught(capfd: pytest.CaptureFixture[str]) -> None:
    """Descriptor 2 is caught while a block runs, and is as before after it, also when the block fails."""
    with captured_stderr() as printed:
        os.write(2, b"said\n")
    assert printed.text == "said\n"
    with pytest.raises(KeyError), captured_stderr() as printed:
        raise KeyError(os.write(2, b"lost"))
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"
    with captured_stderr() as printed:
        pass
    assert printed.text == ""


def test_dawn_is_quiet_where_there_is_no_driver() -> None:
    """Without any driver Dawn's chatter is not shown, and the error says what to install."""
    result = process("devices", "--engine", "dawn", VK_DRIVER_FILES="/nowhere", VK_ICD_FILENAMES="/nowhere")
    assert result.code == 2
    assert re.fullmatch(r"Error: there is no WebGPU adapter on this machine\nHint: install .*\n", result.err)
