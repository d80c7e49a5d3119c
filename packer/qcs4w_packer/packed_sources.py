"""Opening a file of packed linears of any format, by what it is."""

import os
from pathlib import Path

from .blob_file import Blob, BlobFile
from .container import Container, is_container_like
from .errors import ContainerError, SourceError
from .formats.detect import checkpoint_file, foreign_opener, safetensors_files
from .packed_file import PackedFile
from .packed_folder import PackedFolder, holds_packed
from .pte_file import PteFile, is_pte
from .safetensors_file import file_kind
from .work_folder import work_path


def open_packed(
    path: str | os.PathLike[str], blob: Blob | None = None, *, strict: bool = True, tensor: str | None = None
) -> PackedFile:
    """Open a file of packed linears; their bytes are read when they are asked for.

    Args:
        path: a qcs4w container, a folder of them that is one checkpoint, an ExecuTorch program (.pte), a file of
            another tool whose layout is known, the folder of a checkpoint of such a tool in one file, or any file with
            `blob`.
        blob: what the user knows of bytes that nothing describes.
        strict: refuse what a reader must refuse; else remember it in `problems` (containers), and open a program that
            has no linear_qcs4w call.
        tensor: the only packed tensor that will be asked for: of a folder, no other shard need be opened.

    Raises:
        SourceError: no such file, or one that is not sound.
        ContainerError: not a file of packed linears, or one that this version does not read.
    """
    path = Path(path)
    if blob is not None:
        return BlobFile(path, blob)
    kind = file_kind(path)
    if fault := unfinished_fault(path):
        raise fault
    if kind == "file" and is_pte(path):
        program = PteFile(path)
        if strict and not program.entries:
            program.close()
            raise ContainerError(f"{path}: is an ExecuTorch program without a call of et_vk.linear_qcs4w")
        return program
    if kind == "folder" and foreign_opener(path) is None:
        if holds_packed(path):
            return PackedFolder(path, strict=strict, tensor=tensor)
        path = checkpoint_file(path)
    opener = foreign_opener(path)
    if opener is not None:
        return opener(path)
    if kind == "file" and path.suffix.lower() != ".safetensors":
        raise ContainerError(
            f"{path}: is no file of packed linears that is known",
            hint="of raw packed bytes say --shape N,K, and --scales; float weights are packed by qcs4w pack",
        )
    return Container(path, strict=strict)


def unfinished_fault(path: Path) -> ContainerError | None:
    """Return the error of an output that is not there because pack was kept from finishing it, or None."""
    work = work_path(path)
    if file_kind(path) is not None or path.name in ("", "..") or file_kind(work) != "folder":
        return None
    return ContainerError(
        f"{path}: is not finished: what qcs4w pack has made of it so far is in {work}",
        hint="run the same qcs4w pack again, it goes on where it was stopped",
    )


def is_packed_file(path: str | os.PathLike[str]) -> bool:
    """Tell a file of packed linears, sound or not, from any other.

    Raises:
        SourceError: a safetensors file that is not sound, or a file that may not be read.
    """
    path = Path(path)
    kind = file_kind(path)
    if kind == "file" and is_pte(path):
        return True
    if kind == "folder" and foreign_opener(path) is None:
        try:
            if holds_packed(path):
                return True
        except SourceError:  # which the reader of float weights tells as well
            return False
        files = safetensors_files(path)
        return len(files) == 1 and is_packed_file(files[0])
    if foreign_opener(path) is not None:
        return True
    return path.suffix.lower() == ".safetensors" and is_container_like(path)
