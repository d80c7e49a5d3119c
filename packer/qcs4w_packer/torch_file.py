"""PyTorch's .pt, .pth and .bin as sources: tensors and state dicts, read with `weights_only`."""

import os
import pickle
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from .errors import SourceError, UnsafePickleError
from .safetensors_file import closer_of, name_fault, open_for_reading
from .weights import NAMELESS, Source, SourceTensor

_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.uint16: "U16", torch.int16: "I16",
    torch.uint32: "U32", torch.int32: "I32", torch.uint64: "U64", torch.int64: "I64",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip

if hasattr(torch, "float8_e8m0fnu"):  # since torch 2.7
    _DTYPES[torch.float8_e8m0fnu] = "F8_E8M0"

# Where trainers put the weights when they save more than weights.
_STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model")


# How torch's restricted unpickler words a refusal; all else that it raises is damage.
_UNSAFE_SIGNS = ("GLOBAL ", "Can only create new object", "Can only build", "unrecognized function", "must be imported")


def open_torch(path: Path) -> Source:
    """Open a .pt file: a tensor, a state dict, or a checkpoint that holds a state dict under a usual key.

    Raises:
        SourceError: not a file that torch can read, or no tensor in it.
        UnsafePickleError: it would need more than tensors to be unpickled; nothing is run.
    """
    fd = open_for_reading(path)
    try:
        return _source(path, _load(path), _Mapped(path, fd))
    except BaseException:
        os.close(fd)
        raise


class _Mapped:
    """A file mapped into memory: touching pages that are no longer there would kill the process."""

    def __init__(self, path: Path, fd: int):
        self._path, self._fd = path, fd
        self._nbytes = os.fstat(fd).st_size
        self.close = closer_of(fd)  # tensors that are mapped stay so

    def check(self) -> None:
        """Raise SourceError when the file has been cut short since it was opened."""
        nbytes = os.fstat(self._fd).st_size
        if nbytes < self._nbytes:
            raise SourceError(f"{self._path}: had {self._nbytes:,} bytes and now has {nbytes:,}: it is truncated")


def _source(path: Path, content: Any, mapped: _Mapped) -> Source:
    if isinstance(content, torch.Tensor):
        tensor = _source_tensor(NAMELESS, content, mapped)
        if isinstance(tensor, str):
            raise SourceError(f"{path}: {tensor}")
        return Source(path, {NAMELESS: tensor}, nameless=True, closer=mapped.close)
    if not isinstance(content, Mapping):
        raise SourceError(
            f"{path}: holds a {type(content).__name__}, expected a tensor or a state dict",
            hint="save it again with torch.save(model.state_dict(), path)",
        )
    left_out: list[str] = []
    for key in _STATE_DICT_KEYS:
        inner = content.get(key)
        if isinstance(inner, Mapping) and any(isinstance(value, torch.Tensor) for value in inner.values()):
            left_out += [f"{other} (beside '{key}')" for other in content if other != key]
            content = inner
            break
    tensors: dict[str, SourceTensor] = {}
    for name, value in content.items():
        if not isinstance(value, torch.Tensor):
            left_out.append(f"{name} (a {type(value).__name__}, not a tensor)")
            continue
        tensor = _source_tensor(str(name), value, mapped)
        if isinstance(tensor, str):
            left_out.append(tensor)
        elif tensor.name in tensors:
            raise SourceError(f"{path}: two tensors are named '{name}' (one key is no text)")
        else:
            tensors[tensor.name] = tensor
    if not tensors:
        raise SourceError(f"{path}: holds no tensors", hint="save a state dict: torch.save(model.state_dict(), path)")
    return Source(path, tensors, left_out=tuple(left_out), closer=mapped.close)


def _load(path: Path) -> Any:
    try:
        # Mapping keeps a large file out of memory until its rows are read; only the zip format can be mapped.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of prototypes and deprecations, none of which the user can mend here
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        text = str(error)
        if any(sign in text for sign in _UNSAFE_SIGNS):
            raise UnsafePickleError(
                f"{path}: refused, since it holds more than tensors{_unsupported_name(text)}; nothing in it was run",
                hint="where you trust the file, load it there and save only "
                "its weights: safetensors.torch.save_file(model.state_dict(), 'model.safetensors')",
            ) from None
        raise _unreadable(path, text.rpartition("WeightsUnpickler error:")[2]) from None
    except Exception as error:  # a damaged pickle makes torch.load raise almost anything
        raise _unreadable(path, f"{type(error).__name__}: {error}") from None


def _unreadable(path: Path, reason: str) -> SourceError:
    return SourceError(
        f"{path}: not a file that torch.load can read: {reason.strip().partition(chr(10))[0][:200]}",
        hint="raw packed bytes? say --shape N,K"
        if path.suffix.lower() == ".bin"
        else "download or save it again; it may be truncated",
    )


def _unsupported_name(message: str) -> str:
    """Find the global that torch refused, in its message."""
    _, found, rest = message.partition("GLOBAL ")
    return f" ({rest.split()[0].rstrip('.')})" if found and rest.split() else ""


def _source_tensor(name: str, tensor: torch.Tensor, mapped: _Mapped) -> SourceTensor | str:
    """Make a tensor readable by rows, or say why it cannot be."""
    if fault := name_fault(name):
        return f"{name!r} ({fault})"
    tensor = tensor.detach()
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return f"{name} (layout {tensor.layout}, dtype {tensor.dtype}: not a plain dense tensor)"
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        return f"{name} (dtype {tensor.dtype} has no safetensors counterpart)"
    if tensor.is_meta:
        return f"{name} (on the meta device: it has no data)"
    place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.stride()), tuple(tensor.shape))
    return SourceTensor(name, dtype, tuple(tensor.shape), _fetch(tensor, mapped), storage=(place, dtype))


def _fetch(tensor: torch.Tensor, mapped: _Mapped) -> Callable[[int, int], bytes]:
    def fetch(start: int, stop: int) -> bytes:
        mapped.check()
        rows = tensor.reshape(-1, tensor.shape[-1] if tensor.ndim else 1)  # a view where strides allow it
        part = rows[start:stop].resolve_conj().resolve_neg().contiguous()
        return part.view(torch.uint8).numpy().tobytes()

    return fetch
