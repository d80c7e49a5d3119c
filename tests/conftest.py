"""Fixtures that many tests share."""

import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import open_gpu
from command_line import CommandLine
from safetensors.numpy import load_file, save_file

from qcs4w_gpu import Gpu, NoAdapterError
from qcs4w_packer import pack_file

# Commands in processes of their own find the packages as pytest does, installed or not.
ROOTS = [str(Path(__file__).parent.parent / root) for root in ("cli", "packer", "gpu")]
os.environ["PYTHONPATH"] = os.pathsep.join([*ROOTS, *filter(None, [os.environ.get("PYTHONPATH")])])

# A shell starts background jobs with Ctrl-C switched off, which the tests of it and their children would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

GOLDEN = Path(__file__).parent / "golden"
EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="session")
def gpu() -> Iterator[Gpu]:
    """One device for all tests. Without an adapter they skip, or fail where QCS4W_REQUIRE_ADAPTER is set."""
    try:
        device = open_gpu()
    except NoAdapterError as error:
        if os.environ.get("QCS4W_REQUIRE_ADAPTER"):
            pytest.fail(f"no WebGPU adapter, and QCS4W_REQUIRE_ADAPTER is set: {error}")
        pytest.skip(f"no WebGPU adapter: {error}")
    with device:
        yield device


@pytest.fixture(scope="session")
def manifest() -> dict[str, Any]:
    """Every golden case by name: N, K and sha256 of its arrays."""
    content: dict[str, Any] = json.loads((GOLDEN / "manifest.json").read_text())
    return content


@pytest.fixture(scope="session")
def golden() -> dict[str, np.ndarray]:
    """The stored golden arrays: <case>/w, /q, /scales, /packed."""
    return load_file(GOLDEN / "golden.safetensors")


@pytest.fixture
def rng() -> np.random.Generator:
    """A seeded random generator."""
    return np.random.default_rng(20261201)


@pytest.fixture(scope="session")
def model() -> Path:
    """The folder with the weights of all-MiniLM-L6-v2, fetched by the demo's own script and checked by its sha256."""
    script = EXAMPLES / "demo" / "fetch_model.py"
    spec = importlib.util.spec_from_file_location("fetch_model", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder: Path = module.fetch_model()
    return folder


@pytest.fixture
def qcs4w(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """The command line, called in this process."""
    return CommandLine(capsys)


@pytest.fixture
def checkpoint(tmp_path: Path, rng: np.random.Generator) -> Path:
    """A small checkpoint: two linears (one with an odd K and a bias), an embedding and a norm."""
    path = tmp_path / "model.safetensors"
    save_file(
        {
            "embed_tokens.weight": rng.standard_normal((10, 8), np.float32),
            "layers.0.fc.weight": rng.standard_normal((12, 33), np.float32),
            "layers.0.fc.bias": rng.standard_normal(12, np.float32),
            "layers.0.norm.weight": np.ones(12, np.float32),
            "layers.1.fc.weight": rng.standard_normal((8, 12), np.float32).astype(np.float16),
        },
        path,
    )
    return path


@pytest.fixture
def packed_file(checkpoint: Path, tmp_path: Path) -> Path:
    """The checkpoint, packed."""
    path = tmp_path / "packed.safetensors"
    pack_file(checkpoint, path)
    return path
