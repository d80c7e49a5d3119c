"""JSON files that other programs wrote: bounded, no key twice, one clear error."""

import json
import os
from pathlib import Path
from typing import Any

from .errors import SourceError
from .safetensors_file import no_duplicates, open_for_reading, read_at

_LARGEST = 16 << 20  # bytes


def read_json(path: Path, *, largest: int = _LARGEST) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        path: a regular file.
        largest: bytes that it may have.

    Raises:
        SourceError: it cannot be read, is too large, or is no JSON object.
    """
    fd = open_for_reading(path)
    try:
        nbytes = os.fstat(fd).st_size
        if nbytes > largest:
            raise SourceError(f"{path}: has {nbytes:,} bytes, expected JSON of at most {largest:,}")
        data = read_at(fd, path, 0, nbytes)
    finally:
        os.close(fd)
    try:
        document = json.loads(data.decode("utf-8"), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: is not JSON ({error})") from None
    if not isinstance(document, dict):
        raise SourceError(f"{path}: is not a JSON object")
    return document
