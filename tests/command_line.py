"""Running qcs4w in tests: in this process for its speed, or in one of its own where that is the point."""

import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from qcs4w_cli.main import run

SCHEMA = json.loads((Path(__file__).parent.parent / "cli" / "qcs4w_cli" / "schema.json").read_text())


@dataclass(frozen=True)
class Result:
    """What a command did: its exit code and both streams."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document on stdout, checked against the schema and against the exit code."""
        import jsonschema

        document: dict[str, Any] = json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
        jsonschema.validate(document, SCHEMA)
        assert document["exit_code"] == self.code
        return document


class CommandLine:
    """Calls commands in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]):
        self._capsys = capsys

    def __call__(self, *args: str | Path) -> Result:
        """Run qcs4w with these arguments."""
        self._capsys.readouterr()
        code = run([str(arg) for arg in args])
        captured = self._capsys.readouterr()
        return Result(code, captured.out, captured.err)

    def refused(self, *args: str | Path) -> str:
        """Run what must be an error; return stderr, once it is known to be one error without a traceback."""
        result = self(*args)
        assert result.code == 2, result
        assert result.out == ""
        assert "Error: " in result.err
        assert "Traceback" not in result.err
        assert "internal error" not in result.err
        return result.err


def command(*args: str | Path) -> list[str]:
    """The command line of a process of its own."""
    return [sys.executable, "-m", "qcs4w_cli", *map(str, args)]


@contextlib.contextmanager
def child_process(*args: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run qcs4w beside the test, and end it with the block at the latest."""
    child = subprocess.Popen(command(*args), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stderr is not None
        child.stderr.close()


def process(*args: str | Path, stdin: bytes = b"", cwd: Path | None = None, **environment: str) -> Result:
    """Run qcs4w in a process of its own."""
    done = subprocess.run(
        command(*args), input=stdin, capture_output=True, cwd=cwd, env={**os.environ, **environment}, check=False
    )
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


def on_a_terminal(*arguments: str | Path, **environment: str) -> str:
    """Run qcs4w with a terminal as all three streams and return what it drew."""
    master, slave = pty.openpty()
    child = subprocess.Popen(
        command(*arguments),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "160", **environment},
    )
    os.close(slave)
    drawn = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        drawn += part
    child.wait()
    os.close(master)
    return drawn.decode()
