"""The documents are true: every example in them runs."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from making import save_floats
from packed_folders import shard_name, write_index
from safetensors.numpy import load_file

from qcs4w_cli.main import COMMANDS, cli
from qcs4w_packer import pack_file, pack_weight

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _adapter(gpu: object) -> None:
    """The examples need an adapter."""


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """A folder with the files that the examples speak of."""
    (tmp_path / "model.safetensors").symlink_to(model / "model.safetensors")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    shutil.copy(ROOT / "tests" / "golden" / "pte" / "two_layer_bias.pte", tmp_path / "model.pte")
    x = np.random.default_rng(0).standard_normal((3, 384), np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y_phone.npy", pooled(model / "model.safetensors", x))
    (tmp_path / "batch.jsonl").write_text('{"file": "packed.safetensors", "tensor": "pooler.dense", "rows": 3}\n' * 2)
    np.savez(tmp_path / "activations.npz", **{"encoder.layer.0.attention.self.query": x, "pooler.dense": x})
    weight = np.random.default_rng(1).standard_normal((384, 384), np.float32)
    np.save(tmp_path / "weight.npy", weight)
    pack_weight(weight).packed.tofile(tmp_path / "packed.bin")
    make_checkpoint(tmp_path / "checkpoint")
    return tmp_path


def make_checkpoint(folder: Path) -> None:
    """Make a Llama-like checkpoint of two shards."""
    folder.mkdir()
    rng = np.random.default_rng(2)
    tensors = {name: rng.standard_normal((16, 8)) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    for layer in (0, 1):
        shapes = {"self_attn.q_proj": (8, 8), "mlp.up_proj": (24, 8), "input_layernorm": (8,)}
        part = {f"model.layers.{layer}.{name}.weight": rng.standard_normal(shape) for name, shape in shapes.items()}
        save_floats(folder / shard_name(layer + 1, 2), part | (tensors if layer else {}))
    (folder / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    write_index(folder)


def pooled(path: Path, x: np.ndarray) -> np.ndarray:
    """Return what pooler.dense makes of x once it is packed, as a phone would answer."""
    tensors = load_file(path)
    packed = pack_weight(tensors["pooler.dense.weight"])
    y: np.ndarray = x @ (packed.codes().astype(np.float32) * packed.scales[:, None]).T + tensors["pooler.dense.bias"]
    return y


def examples_of_help() -> Iterator[tuple[str, str]]:
    """The example lines of every command's help."""
    for name in COMMANDS:
        command = cli.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None
        assert command.help is not None
        _, _, examples = command.help.partition("Example:")
        yield from ((name, line.strip()) for line in examples.splitlines() if line.strip())


def call(line: str, folder: Path) -> None:
    """Run one line as a shell would, with this environment's qcs4w and python first on the path."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    assert done.stdout, line


def test_every_sh_block_of_the_readme_runs(folder: Path) -> None:
    """The README's commands run in its order, one after another, as they stand there."""
    lines = [line for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]
    assert len(lines) >= 12
    assert {shlex.split(line)[1] for line in lines} >= {"pack", "run", "verify", "inspect"}
    for line in lines:
        call(line, folder)


@pytest.mark.parametrize(("name", "line"), list(examples_of_help()), ids=lambda value: value)
def test_every_example_of_the_help_runs(name: str, line: str, folder: Path) -> None:
    """Each example in a command's help runs as it stands there."""
    assert line.startswith(f"qcs4w {name}")
    if name != "pack":
        pack_file(folder / "model.safetensors", folder / "packed.safetensors")
        pack_file(folder / "checkpoint", folder / "packed_checkpoint")
    for copy in ("again", "other") if name in ("diff", "verify") else ():
        shutil.copy(folder / "packed.safetensors", folder / f"{copy}.safetensors")
    call(line, folder)


def test_the_python_example_runs_and_stands_in_the_readme(tmp_path: Path) -> None:
    """examples/quickstart.py runs, and the README shows its lines."""
    script = ROOT / "examples" / "quickstart.py"
    (shown,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert script.read_text().startswith(shown)
    subprocess.run([sys.executable, script], cwd=tmp_path, check=True)


def test_the_readme_names_files_that_are_there() -> None:
    """Every link of the README to a file of the repository leads somewhere."""
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
