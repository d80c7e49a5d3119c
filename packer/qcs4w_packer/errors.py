"""What can go wrong, as types. Each message says what, where and what was found; `hint` says how to mend it."""


class Qcs4wError(Exception):
    """The base of every error that this project raises on purpose."""

    code = "error"  # stable name for scripts, printed in the JSON

    def __init__(self, message: str, *, hint: str | None = None):
        super().__init__(message)
        self.hint = hint


class UsageError(Qcs4wError):
    """Raised when options or arguments contradict each other or the file."""

    code = "usage"


class SourceError(Qcs4wError):
    """Raised when a file is missing, truncated, or not what its name says."""

    code = "source"


class UnsafePickleError(SourceError):
    """Raised when a .pt file holds more than tensors; nothing in it has been executed."""

    code = "unsafe_pickle"


class UnknownTensorError(Qcs4wError):
    """Raised when a tensor name or a pattern matches nothing in the file."""

    code = "unknown_tensor"


class SelectionError(Qcs4wError):
    """Raised when a tensor that was asked for cannot be packed as a linear weight."""

    code = "selection"


class NonFiniteError(Qcs4wError):
    """Raised when a value is NaN, infinite, or leaves the range of float32; names tensor, row and column."""

    code = "non_finite"


class CodeRangeError(Qcs4wError):
    """Raised when a code lies outside [-8, 7]."""

    code = "code_range"


class ContainerError(Qcs4wError):
    """Raised when a file is not a qcs4w container, or one that this version cannot read."""

    code = "container"


class DigestError(ContainerError):
    """Raised when stored bytes do not match the sha256 that was written with them."""

    code = "digest"


class LossyError(Qcs4wError):
    """Raised when a conversion would lose something; the message says what would be lost."""

    code = "lossy"


class OutputError(Qcs4wError):
    """Raised when an output exists already or cannot be written; whatever stood there is untouched."""

    code = "output"
