"""ONNX models as files: the model itself is read whole, external data at their place. Needs the onnx package."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import Qcs4wError, SourceError
from .safetensors_file import open_for_reading

_MOST_DIGITS = 18  # of an offset in a file
_EXTERNAL_KEYS = ("location", "offset", "length", "checksum", "basepath")


def onnx_package() -> Any:
    """Import onnx.

    Raises:
        Qcs4wError: it is not installed.
    """
    try:
        import onnx
    except ImportError:
        raise Qcs4wError(
            "ONNX files need the onnx package, which is not installed", hint="pip install 'qcs4w[onnx]'"
        ) from None
    return onnx


def load_model(path: Path) -> Any:
    """Read an ONNX model (a ModelProto), without external data.

    Raises:
        Qcs4wError: the onnx package is not installed.
        SourceError: not a sound ONNX model.
    """
    onnx = onnx_package()
    os.close(open_for_reading(path))  # for its messages
    try:
        return onnx.load_model(str(path), format="protobuf", load_external_data=False)
    except Exception as error:  # protobuf and onnx raise types of their own
        raise SourceError(f"{path}: not a sound ONNX model: {error!s:.300}") from None


def is_external(tensor: Any) -> bool:
    """Tell whether a tensor's data lie in another file."""
    return bool(tensor.data_location == onnx_package().TensorProto.EXTERNAL)


def external_file(tensor: Any, model: Path) -> Path | None:
    """Return the file of a tensor's external data, or None where it is none that belongs to the model.

    That is one of the model's folder, or of the folder that a link to the model leads to: caches are folders of links.
    """
    location = _said(tensor).get("location")
    if not isinstance(location, str) or not location or "\0" in location:  # bytes where it is no UTF-8
        return None
    folder = Path(os.path.realpath(model.parent))
    if not Path(os.path.normpath(folder / location)).is_relative_to(folder):
        return None
    place = Path(os.path.realpath(folder / location))
    linked = Path(os.path.realpath(model)).parent
    return place if place.is_relative_to(folder) or place.parent == linked else None


def external_place(tensor: Any, model: Path, nbytes: int) -> tuple[Path, int]:
    """Return file and offset of a tensor's external data.

    Args:
        tensor: a TensorProto with `is_external`.
        model: the model's own file.
        nbytes: bytes that it must have.

    Raises:
        SourceError: the place is none of the model's folder, or the size is another.
    """
    said, place = _said(tensor), external_file(tensor, model)
    if unknown := [key for key in said if key not in _EXTERNAL_KEYS]:
        raise SourceError(f"{model}: initialiser '{tensor.name:.100}' says {unknown[0]!r:.40} of where its data lie")
    offset, length = _size(said.get("offset", "0")), _size(said.get("length", str(nbytes)))
    if place is None or offset is None:
        raise SourceError(
            f"{model}: initialiser '{tensor.name:.100}' lies at {said.get('location', '')!r:.200}, "
            f"offset {said.get('offset', '0')!r:.40}, expected a file of the model's folder"
        )
    if length != nbytes:
        raise SourceError(
            f"{model}: initialiser '{tensor.name:.100}' says {said['length']!r:.40} bytes, expected {nbytes:,}"
        )
    return place, offset


def all_tensors(graph: Any) -> Iterator[Any]:
    """Yield every tensor of a graph: initialisers, and what stands in nodes and their subgraphs."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for inner in (attribute.g, *attribute.graphs):
                yield from all_tensors(inner)


def _said(tensor: Any) -> dict[Any, Any]:
    """Return what a tensor says of its external data."""
    return {item.key: item.value for item in tensor.external_data}


def _size(text: Any) -> int | None:
    """Return a number of bytes that is stated in decimal digits, or None where it is none that a file can have."""
    if not isinstance(text, str) or not (text.isascii() and text.isdecimal()) or len(text) > _MOST_DIGITS:
        return None
    return int(text)
