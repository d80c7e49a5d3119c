"""Damages checkpoints of every format in seeded ways, and asks other packages what is left in them."""

import contextlib
import io
import json
import os
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import safetensors
import torch
from making import mutated, save_floats

#: What a witness finds: bytes in C order by name, or None where it refuses the file.
Found = dict[str, bytes] | None

_ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 7, 2**31, 2**53 + 1, 2**63, 2**64, 10**30, 0.5, 1e308, "", "F32", "BF16", "a.weight",
    "\ud800", "../x.safetensors", "model.safetensors", "__metadata__", "\0", "x" * 300, [], [0], [2, 3], [-1, 2],
    {}, {"a": 1},
)  # fmt: skip


def rng_of(seed: int) -> np.random.Generator:
    """The generator of one case."""
    return np.random.default_rng([20261201, seed])


def odd_json(document: Any, rng: np.random.Generator) -> bytes:
    """A JSON document with a few values changed, moved, removed or doubled."""
    for _ in range(int(rng.integers(1, 3))):
        places: list[tuple[Any, Any]] = []

        def visit(node: Any, places: list[tuple[Any, Any]] = places) -> None:
            for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
                places.append((node, key))
                visit(node[key])

        visit(document)
        if not places:
            break
        node, key = places[int(rng.integers(len(places)))]
        other, other_key = places[int(rng.integers(len(places)))]
        match int(rng.integers(5)):
            case 0:
                del node[key]
            case 1:
                node[key] = _ODD_VALUES[int(rng.integers(len(_ODD_VALUES)))]
            case 2:
                node[key] = json.loads(json.dumps(other[other_key]))
            case 3 if isinstance(node, dict):
                node[str(_ODD_VALUES[int(rng.integers(len(_ODD_VALUES)))])] = node.pop(key)
            case _ if isinstance(node[key], int):
                node[key] += int(rng.choice([-8, -4, -1, 1, 4, 8, 24]))
    text = json.dumps(document).encode()
    if rng.random() < 0.1:
        text = text[:1] + text[1:-1] + b"," + text[1:]  # every key twice
    return text


# ---- safetensors


def _safetensors(folder: Path) -> Path:
    rng = np.random.default_rng(1)
    tensors = {
        "a.weight": rng.standard_normal((2, 3), np.float32),
        "b.weight": rng.standard_normal((5, 4), np.float32),
        "b.bias": np.ones(5, np.float32),
    }
    return save_floats(folder / "model.safetensors", tensors, {"format": "pt"})


def _damage_safetensors(path: Path, rng: np.random.Generator) -> None:
    data = path.read_bytes()
    if rng.random() < 0.5:
        path.write_bytes(mutated(data, rng))
        return
    (length,) = struct.unpack("<Q", data[:8])
    header = odd_json(json.loads(data[8 : 8 + length]), rng)
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])


def _ask_safetensors(path: Path) -> Found:
    try:
        return {name: bytes(entry["data"]) for name, entry in safetensors.deserialize(path.read_bytes())}
    except safetensors.SafetensorError:
        return None


# ---- a folder of shards

_A, _B, _INDEX = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"


_NAMES = [_A, _B, "model-00003-of-00003.safetensors", "model.safetensors", "config.json", "x.json"]


def _folder(folder: Path) -> Path:
    rng = np.random.default_rng(2)
    save_floats(folder / _A, {"a.weight": rng.standard_normal((2, 3), np.float32)})
    save_floats(folder / _B, {"b.weight": rng.standard_normal((5, 4), np.float32), "b.bias": np.ones(5, np.float32)})
    weight_map = {"a.weight": _A, "b.weight": _B, "b.bias": _B}
    (folder / _INDEX).write_text(json.dumps({"metadata": {"total_size": 124}, "weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


def _damage_folder(folder: Path, rng: np.random.Generator) -> None:
    name = str(rng.choice([_A, _B, _INDEX, _INDEX, _INDEX, "config.json", "tokenizer.json"]))
    path = folder / name
    match int(rng.integers(10)):
        case 0:
            path.unlink()
        case 1:
            os.truncate(path, int(rng.integers(path.stat().st_size)))
        case 2:
            path.rename(folder / str(rng.choice(_NAMES)))
        case 3:
            target = folder / str(rng.choice(_NAMES))
            if target != path:
                target.write_bytes(path.read_bytes())
        case 4:
            path.unlink()
            path.symlink_to(str(rng.choice([_A, name, "nowhere", "/etc/passwd", "/proc/self/mem", ".."])))
        case 5:
            path.unlink()
            os.mkfifo(path) if rng.random() < 0.5 else path.mkdir()
        case 6 | 7 if path.suffix == ".json":
            path.write_bytes(odd_json(json.loads(path.read_bytes()), rng))
        case 8 if path.suffix == ".safetensors":
            _damage_safetensors(path, rng)
        case _:
            path.write_bytes(mutated(path.read_bytes(), rng))


def _ask_folder(folder: Path) -> Found:
    """Every tensor of every file that the index names; without an index of the one file there is."""
    index = folder / _INDEX
    files = [folder / "model.safetensors"] if (folder / "model.safetensors").exists() else []
    if index.exists():
        files = [folder / name for name in set(json.loads(index.read_bytes())["weight_map"].values())]
    elif not files:
        files = [path for path in folder.iterdir() if path.suffix == ".safetensors"]
    found: dict[str, bytes] = {}
    for path in files:
        inside = _ask_safetensors(path)
        if inside is None:
            return None
        found |= inside
    return found


# ---- numpy


def _npz(folder: Path) -> Path:
    rng = np.random.default_rng(3)
    weight, ones = rng.standard_normal((4, 6), np.float32), np.ones((3, 2), order="F")
    np.savez(folder / "a.npz", **{"a.weight": weight, "b": np.arange(5), "c.weight": ones})
    return folder / "a.npz"


def _damage_zip(path: Path, rng: np.random.Generator) -> None:
    """Damage a zip file's bytes, or its members', with sound checksums and directory."""
    if rng.random() < 0.4:
        path.write_bytes(mutated(path.read_bytes(), rng))
        return
    with zipfile.ZipFile(path) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    chosen = int(rng.integers(len(members)))
    name, data = members[chosen]
    match int(rng.integers(5)):
        case 0:
            del members[chosen]
        case 1:
            members.append((name, data))
        case 2:
            members[chosen] = (str(rng.choice([name + "x", members[0][0], "x", "../" + name, "x/data.pkl"])), data)
        case _:
            members[chosen] = (name, mutated(data, rng) if data else b"x")
    kind = zipfile.ZIP_DEFLATED if rng.random() < 0.1 else zipfile.ZIP_STORED
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", kind) as archive:
        warnings.simplefilter("ignore")  # of names that occur twice
        for name, data in members:
            archive.writestr(name, data)


def _ask_npz(path: Path) -> Found:
    found: dict[str, bytes] = {}
    with contextlib.suppress(Exception), np.lib.npyio.NpzFile(io.BytesIO(path.read_bytes())) as archive:
        for name in archive.files:
            with contextlib.suppress(Exception):  # an array by itself
                found[name] = archive[name].astype(archive[name].dtype.newbyteorder("<")).tobytes()
    return found


def _npy(folder: Path) -> Path:
    np.save(folder / "a.npy", np.asfortranarray(np.random.default_rng(4).standard_normal((5, 3))))
    return folder / "a.npy"


def _damage_bytes(path: Path, rng: np.random.Generator) -> None:
    path.write_bytes(mutated(path.read_bytes(), rng))


def _ask_npy(path: Path) -> Found:
    try:
        array = np.load(path, allow_pickle=False)
        return {"weight": array.astype(array.dtype.newbyteorder("<")).tobytes()}
    except Exception:  # whatever numpy raises
        return None


# ---- torch


def _state_dict() -> dict[str, torch.Tensor]:
    base = torch.arange(24.0).reshape(4, 6) / 7
    return {"a.weight": base, "b": torch.ones(3, dtype=torch.bfloat16), "c.weight": base.T, "d": base[:, 1::2]}


def _pt(folder: Path) -> Path:
    torch.save(_state_dict(), folder / "a.pt")
    return folder / "a.pt"


def _legacy(folder: Path) -> Path:
    torch.save(_state_dict(), folder / "a.pt", _use_new_zipfile_serialization=False)
    return folder / "a.pt"


def _ask_torch(path: Path) -> Found:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(io.BytesIO(path.read_bytes()), map_location="cpu", weights_only=True)
    except Exception:  # whatever torch raises
        return None
    if isinstance(content, torch.Tensor):
        return {"weight": _raw(content)}
    if not isinstance(content, Mapping):
        return None
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(content.get(key), Mapping):
            content = content[key]
    return {str(name): _raw(value) for name, value in content.items() if isinstance(value, torch.Tensor)}


def _raw(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return tensor.view(torch.uint8).numpy().tobytes() if tensor.layout == torch.strided else b""


# ---- GGUF


def _gguf(folder: Path) -> Path:
    rng = np.random.default_rng(6)
    writer = gguf.GGUFWriter(folder / "a.gguf", "llama")
    writer.add_token_list(["a", "b"])
    writer.add_tensor("blk.0.attn_q.weight", rng.standard_normal((4, 6), np.float32))
    writer.add_tensor("blk.0.ffn_up.weight", rng.standard_normal((3, 5)).astype(np.float16))
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(6, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "a.gguf"


def _ask_gguf(path: Path) -> Found:
    try:
        return {tensor.name: tensor.data.tobytes() for tensor in gguf.GGUFReader(path).tensors}
    except Exception:  # whatever the package raises
        return None


# ---- ONNX


def _onnx(folder: Path) -> Path:
    rng = np.random.default_rng(7)
    inside, beside = (rng.standard_normal(shape, np.float32) for shape in ((4, 6), (5, 3)))
    tensor = onnx.TensorProto(name="b.weight", data_type=1, dims=(5, 3), data_location=onnx.TensorProto.EXTERNAL)
    for key, value in (("location", "a.data"), ("offset", "4"), ("length", "60")):
        tensor.external_data.add(key=key, value=value)
    nodes = [onnx.helper.make_node("Gemm", ["x", name], [name + "_y"], transB=1) for name in ("a.weight", "b.weight")]
    graph = onnx.helper.make_graph(nodes, "g", [], [], [onnx.numpy_helper.from_array(inside, "a.weight"), tensor])
    (folder / "a.onnx").write_bytes(onnx.helper.make_model(graph).SerializeToString())
    (folder / "a.data").write_bytes(bytes(4) + beside.tobytes())
    return folder / "a.onnx"


def _ask_onnx(path: Path) -> Found:
    found: dict[str, bytes] = {}
    with contextlib.suppress(Exception), warnings.catch_warnings():  # of protobuf and onnx
        warnings.simplefilter("ignore")
        model = onnx.load_model(path, format="protobuf", load_external_data=False)
        for tensor in model.graph.initializer:
            with contextlib.suppress(Exception):  # a tensor by itself
                found[tensor.name] = onnx.numpy_helper.to_array(tensor, str(path.parent)).tobytes()
    return found


@dataclass(frozen=True)
class Format:
    """One kind of checkpoint.

    Attributes:
        make: writes a sound one into an empty folder and returns its path.
        damage: changes it.
        ask: what another package finds in it.
        witness_decides: what that package refuses must be refused; it is no stricter than needed.
    """

    make: Callable[[Path], Path]
    damage: Callable[[Path, np.random.Generator], None]
    ask: Callable[[Path], Found]
    witness_decides: bool = True


FORMATS = {
    "safetensors": Format(_safetensors, _damage_safetensors, _ask_safetensors),
    "folder": Format(_folder, _damage_folder, _ask_folder),
    "npz": Format(_npz, _damage_zip, _ask_npz),
    "npy": Format(_npy, _damage_bytes, _ask_npy),
    # torch refuses archives for records that nobody needs (.storage_alignment, version)
    "pt": Format(_pt, _damage_zip, _ask_torch, witness_decides=False),
    "legacy pt": Format(_legacy, _damage_bytes, _ask_torch),
    "onnx": Format(_onnx, _damage_bytes, _ask_onnx),
    "gguf": Format(_gguf, _damage_bytes, _ask_gguf, witness_decides=False),
}


@contextlib.contextmanager
def less_memory(nbytes: int) -> Any:
    """Let this process map only so much more than it has now."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
