"""Writing a safetensors file tensor by tensor, once names, dtypes and shapes are known."""

import os
from collections.abc import Iterable, Mapping

from .errors import OutputError
from .files import write_at
from .safetensors_file import Planned, SafetensorsLayout, name_fault


class SafetensorsWriter:
    """Writes planned tensors, in any order, into an open file.

    Args:
        tensors: all that will be written.
        metadata: the header's string metadata.

    Raises:
        OutputError: two tensors would have one name, or a name that the format cannot hold.
    """

    def __init__(self, tensors: Iterable[Planned], metadata: Mapping[str, str]):
        planned = list(tensors)
        refuse_twins(tensor.name for tensor in planned)
        self._layout = SafetensorsLayout(planned, metadata)
        self._header = self._layout.header(metadata)
        self._nbytes = {tensor.name: tensor.nbytes for tensor in planned}

    @property
    def nbytes(self) -> int:
        """Size of the finished file."""
        return self._layout.nbytes

    def begin(self, fd: int) -> None:
        """Give the file its size and write the header."""
        os.ftruncate(fd, self.nbytes)
        write_at(fd, self._header, 0)

    def write(self, fd: int, name: str, data: bytes | memoryview, offset: int = 0) -> None:
        """Write bytes of a tensor, `offset` bytes from its beginning."""
        end = offset + memoryview(data).nbytes
        if end > self._nbytes[name]:
            raise RuntimeError(f"tensor '{name}' has {self._nbytes[name]} bytes, {end} were given")
        write_at(fd, data, self._layout.offsets[name] + offset)


def refuse_twins(names: Iterable[str]) -> None:
    """Refuse names that occur twice or that the format cannot hold.

    Raises:
        OutputError: there is such a name.
    """
    seen: set[str] = set()
    for name in names:
        if fault := name_fault(name):
            raise OutputError(f"a container cannot hold a tensor {name!r}: {fault}")
        if name in seen:
            raise OutputError(
                f"two tensors of the output would be named '{name}'",
                hint="leave one of the two out: pack and unpack with --exclude, convert with --tensor",
            )
        seen.add(name)
