"""What holds a file or a device is a context manager."""

from types import TracebackType
from typing import Self


class Closing:
    """Calls `close` when its `with` block ends."""

    def close(self) -> None:
        """Give back what is held; using it afterwards is an error."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
