# A literal: reading it through importlib.metadata would double the time of `qcs4w --version`.
__version__ = "0.1.0"
