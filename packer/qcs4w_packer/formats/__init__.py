"""Four-bit layouts of other tools: reading them where every row has one scale, writing them, and a table of them."""

from .detect import foreign_opener
from .known import KNOWN, KnownFormat

__all__ = ["KNOWN", "KnownFormat", "foreign_opener"]
