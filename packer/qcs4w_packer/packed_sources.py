"""Opening a file of packed linears of any format, by what it is."""

import os
from pathlib import Path

from .blob_file import Blob, BlobFile
from .container import Container
from .packed_file import PackedFile


def open_packed(path: str | os.PathLike[str], blob: Blob | None = None) -> PackedFile:
    """Open a file of packed linears; their bytes are read when they are asked for.

    Args:
        path: a qcs4w container, or any file with `blob`.
        blob: what the user knows of bytes that nothing describes.

    Raises:
        SourceError: no such file, or one that is not sound.
        ContainerError: not a file of packed linears, or one that this version does not read.
    """
    path = Path(path)
    if blob is not None:
        return BlobFile(path, blob)
    return Container(path)
