"""PyTorch's .pt, .pth and .bin as sources: tensors and state dicts, unpickled with `weights_only`, read by rows."""

import os
import pickle
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import torch

from .errors import SourceError, UnsafePickleError
from .open_files import OpenFiles, PooledFile
from .safetensors_file import is_unicode, lfs_pointer_fault, name_fault, open_for_reading, stamp_of
from .strided import LastWhole, Strided, strided_fetch
from .torch_pickle import Unpickled, unpickle
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


# An expanded tensor repeats its storage. Beyond these a small file would make us write for hours.
_MOST_EXPANDED, _ALWAYS_EXPANDED = 1000, 64 << 20  # times the storage, bytes

# How torch's restricted unpickler words a refusal; all else that it raises is damage.
_UNSAFE_SIGNS = ("GLOBAL ", "Can only create new object", "Can only build", "unrecognized function", "must be imported")


def open_torch(path: Path, files: OpenFiles | None = None) -> Source:
    """Open a .pt file: a tensor, a state dict, or a checkpoint that holds a state dict under a usual key.

    Args:
        path: the file; only its pickle is read.
        files: reads it later on, when it is one of many; by default it stays open by itself.

    Raises:
        SourceError: not a file that torch can read, or no tensor in it.
        UnsafePickleError: it would need more than tensors to be unpickled; nothing is run.
    """
    fd = open_for_reading(path)
    try:
        if fault := lfs_pointer_fault(fd, path):
            raise fault
        own = OpenFiles() if files is None else files
        own.add(path, stamp_of(fd))
        opened = _Opened(PooledFile(own, path), _unpickle(fd, path))
    finally:
        os.close(fd)

    def close() -> None:
        opened.whole.clear()
        if files is None:
            own.close()

    return _source(path, opened, close)


class _Opened:
    """A file and what was unpickled from it."""

    def __init__(self, file: PooledFile, unpickled: Unpickled):
        self.file, self.unpickled, self.whole = file, unpickled, LastWhole()


def _source(path: Path, opened: _Opened, closer: Callable[[], None]) -> Source:
    content = opened.unpickled.content
    if isinstance(content, torch.Tensor):
        tensor = _source_tensor(NAMELESS, content, opened)
        if isinstance(tensor, str):
            raise SourceError(f"{path}: {tensor}")
        return Source(path, {NAMELESS: tensor}, nameless=True, closer=closer)
    if not isinstance(content, Mapping):
        raise SourceError(
            f"{path}: holds a {type(content).__name__}, expected a tensor or a state dict",
            hint="save it again with torch.save(model.state_dict(), path)",
        )
    left_out: list[str] = []
    for key in _STATE_DICT_KEYS:
        inner = content.get(key)
        if isinstance(inner, Mapping) and any(isinstance(value, torch.Tensor) for value in inner.values()):
            left_out += [f"{_shown(other)} (beside '{key}')" for other in content if other != key]
            content = inner
            break
    tensors: dict[str, SourceTensor] = {}
    for name, value in content.items():
        if not isinstance(value, torch.Tensor):
            left_out.append(f"{_shown(name)} (a {type(value).__name__}, not a tensor)")
            continue
        if not isinstance(name, str | int):
            left_out.append(f"{_shown(name)} (a tensor without a name)")
            continue
        tensor = _source_tensor(str(name), value, opened)
        if isinstance(tensor, str):
            left_out.append(tensor)
        elif tensor.name in tensors:
            raise SourceError(f"{path}: two tensors are named '{name}' (one key is no text)")
        else:
            tensors[tensor.name] = tensor
    if not tensors:
        raise SourceError(f"{path}: holds no tensors", hint="save a state dict: torch.save(model.state_dict(), path)")
    return Source(path, tensors, left_out=tuple(left_out), closer=closer)


def _shown(key: object) -> str:
    """Return a key as people can read it: it may be anything, of any length."""
    if not isinstance(key, str | int):
        return f"a {type(key).__name__} as key"
    text = str(key)[:200]
    return text if is_unicode(text) else repr(text)


def _unpickle(fd: int, path: Path) -> Unpickled:
    try:
        return unpickle(fd, path)
    except SourceError:
        raise
    except pickle.UnpicklingError as error:
        text = str(error)
        if any(sign in text for sign in _UNSAFE_SIGNS):
            raise UnsafePickleError(
                f"{path}: refused, since it holds more than tensors{_unsupported_name(text)}; nothing in it was run",
                hint="where you trust the file, load it there and save only "
                "its weights: safetensors.torch.save_file(model.state_dict(), 'model.safetensors')",
            ) from None
        raise _unreadable(path, text) from None
    except Exception as error:  # a damaged pickle makes the unpickler raise almost anything
        raise _unreadable(path, f"{type(error).__name__}: {error}") from None


def _unreadable(path: Path, reason: str) -> SourceError:
    return SourceError(
        f"{path}: not a file that torch.load can read: {reason.strip().partition(chr(10))[0][:200]}",
        hint="download or save it again; it may be truncated"
        + ("; raw packed bytes are read by inspect and verify, with --shape N,K" * (path.suffix.lower() == ".bin")),
    )


def _unsupported_name(message: str) -> str:
    """Find the global that torch refused, in its message."""
    _, found, rest = message.partition("GLOBAL ")
    return f" ({rest.split()[0].rstrip('.')})" if found and rest.split() else ""


def _source_tensor(name: str, tensor: torch.Tensor, opened: _Opened) -> SourceTensor | str:
    """Make a tensor readable by rows, or say why it cannot be."""
    if fault := name_fault(name):
        return f"{name!r} ({fault})"
    tensor = tensor.detach()
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return f"{name} (layout {tensor.layout}, dtype {tensor.dtype}: not a plain dense tensor)"
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        return f"{name} (dtype {tensor.dtype} has no safetensors counterpart)"
    storage = opened.unpickled.storages.get(tensor.untyped_storage()._cdata)
    if storage is None:
        return f"{name} (on the meta device: it has no data)"
    shape, itemsize = tuple(tensor.shape), tensor.element_size()
    first = int(tensor.storage_offset())
    array = Strided(
        storage.start + first * itemsize,
        itemsize,
        shape,
        tuple(tensor.stride()),
        _flip(tensor),
        (itemsize // (2 if tensor.is_complex() else 1)) if opened.unpickled.is_big_endian else 0,
    )
    end = (first + array.span) * itemsize
    if end > storage.nbytes:
        raise SourceError(
            f"{opened.file.path}: tensor '{name}' ends at byte {end:,} of a storage that has {storage.nbytes:,}"
        )
    nbytes = prod(shape) * itemsize
    if nbytes > _MOST_EXPANDED * storage.nbytes + _ALWAYS_EXPANDED:
        raise SourceError(
            f"{opened.file.path}: tensor '{name}' {list(shape)} repeats {storage.nbytes:,} bytes up to {nbytes:,}"
        )
    return SourceTensor(
        name,
        dtype,
        shape,
        strided_fetch(opened.file, array, opened.whole),
        storage=(opened.file.path, array, dtype),
        is_held=not array.is_plain,
    )


def _flip(tensor: torch.Tensor) -> int:
    """Return the bits that are inverted in a view that negates or conjugates its storage."""
    sign = 1 << (8 * tensor.element_size() - 1)  # in complex numbers that of the imaginary part, which comes last
    if not tensor.is_complex():
        return sign if tensor.is_neg() else 0
    both = sign | 1 << (4 * tensor.element_size() - 1)
    return (both if tensor.is_neg() else 0) ^ (sign if tensor.is_conj() else 0)
