"""What all commands share: start-up, exit codes, streams, JSON, completion."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from command_line import CommandLine, child_process, command, on_a_terminal, process
from making import save_folder
from safetensors.numpy import save_file

from qcs4w_cli.main import COMMANDS, cli
from qcs4w_gpu import Gpu


def test_help_loads_nothing_heavy() -> None:
    """`qcs4w --help` answers before torch, wgpu, numpy or rich is loaded."""
    script = (
        "import sys; from qcs4w_cli.main import run; code = run(['--help']); "
        "heavy = {'torch', 'wgpu', 'numpy', 'rich', 'safetensors'} & set(sys.modules); "
        "print(heavy, file=sys.stderr); sys.exit(code or len(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "pack" in done.stdout


def test_help_loads_hardly_more_than_click() -> None:
    """`qcs4w --help` costs little more than any help of click: beside that it loads our own shell, and no more."""
    script = (
        "import sys, click; click.Command('any').main(['--help'], standalone_mode=False); before = set(sys.modules); "
        "from qcs4w_cli.main import run; code = run(['--help']); "
        "print(*sorted(set(sys.modules) - before), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert set(done.stderr.split()) - {"signal"} == {"qcs4w_cli", "qcs4w_cli.main"}


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_with_an_example(name: str, qcs4w: CommandLine) -> None:
    """Every command's help shows an example, and its one line stands in the group's help."""
    result = qcs4w(name, "--help")
    assert result.code == 0
    assert f"qcs4w {name} " in result.out or f"qcs4w {name}\n" in result.out
    assert "Example:" in result.out
    group = qcs4w("--help").out
    assert COMMANDS[name] in group
    module = cli.get_command(None, name)  # type: ignore[arg-type]
    assert module is not None
    assert module.short_help == COMMANDS[name]


@pytest.mark.parametrize(
    ("command_name", "heavy"), [("devices", ["torch"]), ("inspect", ["torch", "wgpu"]), ("pack", ["torch", "wgpu"])]
)
def test_commands_load_what_they_need(command_name: str, heavy: list[str], packed_file: Path, checkpoint: Path) -> None:
    """Listing adapters, dumping and packing safetensors need no torch, and all but the first no WebGPU."""
    arguments = {"devices": [], "inspect": [packed_file], "pack": [checkpoint, "-n"]}[command_name]
    script = (
        f"import sys; from qcs4w_cli.main import run; run({[command_name, *map(str, arguments)]!r}); "
        f"sys.exit(len({set(heavy)!r} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 0


def test_version(qcs4w: CommandLine) -> None:
    """`--version` prints name and version."""
    from qcs4w_packer import __version__

    assert qcs4w("--version").out == f"qcs4w {__version__}\n"


def test_completion_is_offered() -> None:
    """The shell gets a completion script, and completes the commands."""
    assert "_QCS4W_COMPLETE" in process(_QCS4W_COMPLETE="bash_source").out
    done = process(_QCS4W_COMPLETE="bash_complete", COMP_WORDS="qcs4w ", COMP_CWORD="1")
    assert set(COMMANDS) == {line.partition(",")[2] for line in done.out.split()}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pak"], "Did you mean 'pack'"),
        (["frobnicate"], "There are pack, run, verify"),
        (["pack"], "SOURCE"),
        (["pack", "x.npy", "--no-such-option"], "--no-such-option"),
        (["pack", "missing.npy", "-n"], "missing.npy: does not exist"),
        (["pack", "x.npy"], "-o OUT.safetensors"),
        (["verify"], "nothing to verify"),
        (["verify", "--rows", "0", "p.safetensors"], "--rows"),
        (["inspect", "missing.safetensors"], "missing.safetensors: does not exist"),
        (["inspect", "p.safetensors", "--rows", "a:b"], "not a range"),
        (["run", "missing.safetensors", "-x", "x.npy"], "missing.safetensors"),
        (["devices", "--adapter", "no such GPU"], "no such GPU"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_done_is_exit_code_2(arguments: list[str], words: str, qcs4w: CommandLine) -> None:
    """Wrong calls and missing files are an error on stderr with exit code 2, and say what is wrong."""
    assert words in qcs4w.refused(*arguments)


@pytest.mark.parametrize("arguments", [["pack", "missing.npy", "-n"], ["pack", "--nope"], ["verify"], ["nope"]])
def test_errors_are_json_too(arguments: list[str], qcs4w: CommandLine) -> None:
    """With --json an error is one document on stdout, and stderr is empty."""
    result = qcs4w(*arguments, "--json")
    assert result.code == 2
    assert result.document["error"]["message"]
    assert result.err == ""


def test_an_internal_error_is_exit_code_2(qcs4w: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of our own is named as one, without a traceback unless -v asks for it."""
    import qcs4w_packer

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(qcs4w_packer, "pack_file", fail)
    quiet = qcs4w("pack", "x.npy", "-n")
    assert quiet.code == 2
    assert "internal error: ZeroDivisionError: on purpose" in quiet.err
    assert "Traceback" not in quiet.err
    assert "Traceback" in qcs4w("pack", "x.npy", "-n", "-v").err


def test_a_current_folder_that_is_gone(qcs4w: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the shell stands in a folder that has been removed, that is said; it is no fault of ours."""
    model = save_folder(tmp_path / "model", {"a.fc.weight": np.ones((2, 2))})
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "has been removed" in qcs4w.refused("pack", model, "-o", "out")


def test_a_closed_pipe_is_quiet(packed_file: Path) -> None:
    """A reader that goes away (`| head -1`) causes no message and does not change the exit code."""
    for arguments in (
        ["inspect", packed_file, "--tensor", "layers.0.fc", "--rows", "0:12", "--cols", "0:33"],
        ["--help"],
    ):
        child = subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait() == 0


def test_ctrl_c_is_exit_code_130_and_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C in the middle of packing: exit code 130, the old output as it was, nothing beside it."""
    source, output = tmp_path / "big.safetensors", tmp_path / "out.safetensors"
    with source.open("wb") as file:  # 2 GiB of holes, enough for a signal to come in time
        header = json.dumps({"weight": {"dtype": "F32", "shape": [65536, 8192], "data_offsets": [0, 1 << 31]}}).encode()
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (1 << 31))
    output.write_bytes(b"old")
    with child_process("pack", source, "-o", output, "--force") as child:
        while not list(tmp_path.glob(".*.qcs4w/*.part")):
            assert child.poll() is None, child.communicate()
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate()
    assert child.returncode == 130
    assert err.strip() == b"Interrupted."
    assert output.read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["big.safetensors", "out.safetensors"]


@pytest.mark.gpu
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_ends_a_wait_for_the_gpu(number: signal.Signals, packed_file: Path, tmp_path: Path, gpu: Gpu) -> None:
    """A kernel that computes for hours is ended by Ctrl-C within seconds, though the wait is inside the driver."""
    if not gpu.adapter.is_software:
        pytest.skip("a real GPU is too quick for this kernel, and its watchdog may come first")
    source = (Path(__file__).parent.parent / "examples" / "my_kernel.wgsl").read_text()
    endless = "for (var turn = 0u; turn < 60000u; turn += 1u) { sum += x[turn % params.K] * scales[0]; }\n  y[index]"
    kernel = tmp_path / "endless.wgsl"
    kernel.write_text(
        source.replace("  y[index]", f"  {endless}")
        .replace("ceil(M * N / WORKGROUP)", "65535 * 64")
        .replace("if (index >= params.M * params.N) { return; }", "let many = index;")
        .replace("let m = index / params.N;", "let m = 0u;")
        .replace("let n = index % params.N;", "let n = 0u;")
    )
    with child_process("verify", packed_file, "--kernel", kernel) as child:
        assert child.stderr is not None
        assert b"adapter: " in child.stderr.readline()
        time.sleep(3)
        assert child.poll() is None
        child.send_signal(number)
        started = time.monotonic()
        assert child.wait(60) == 128 + number
        assert time.monotonic() - started < 30
        assert b"Traceback" not in child.stderr.read()


def test_nohup_keeps_its_promise() -> None:
    """A SIGHUP that was ignored when the command began stays ignored."""
    script = (
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); from qcs4w_cli.main import run; "
        "run(['--version']); raise SystemExit(signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 0


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[bytes]:
    """Run a line in a shell, with `qcs4w` standing for the command of this environment."""
    words = " ".join(command())
    return subprocess.run(["bash", "-c", line.replace("qcs4w", words)], cwd=folder, capture_output=True, check=False)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("qcs4w inspect packed.safetensors >&-", 0),
        ("qcs4w inspect packed.safetensors --json >&- 2>&-", 0),
        ("qcs4w inspect missing.safetensors 2>&-", 2),
        ("qcs4w inspect missing.safetensors 2>/dev/full", 2),
        ("qcs4w inspect packed.safetensors >/dev/full", 2),
        ("qcs4w inspect packed.safetensors --json >/dev/full", 2),
        ("qcs4w pack model.safetensors -o out.safetensors <&- >&- 2>&-", 0),
    ],
)
def test_streams_that_cannot_be_written(line: str, code: int, packed_file: Path) -> None:
    """Closed and full streams: no traceback, never the exit code of a verdict, and no file in their place."""
    done = shell(line, packed_file.parent)
    assert done.returncode == code
    assert b"Traceback" not in done.stderr
    if "out.safetensors" in line:
        from qcs4w_packer import Container

        with Container(packed_file.parent / "out.safetensors") as container:
            assert not [fault for entry in container.entries.values() for fault in container.wrong_digests(entry)]


def test_a_terminal_without_unicode(packed_file: Path, checkpoint: Path) -> None:
    """Where the encoding lacks an arrow, it is spelled out; the work is done all the same."""
    done = process("pack", checkpoint, "-n", PYTHONIOENCODING="ascii")
    assert done.code == 0
    assert "\\u2192" in done.out


def test_a_name_cannot_forge_a_line(tmp_path: Path, qcs4w: CommandLine) -> None:
    """A newline in a name begins no line of its own."""
    from qcs4w_packer import pack_weight, save_container

    path = tmp_path / "forged.safetensors"
    save_container(path, {"a\npass  b": pack_weight(np.ones((2, 2), np.float32))})
    for options in ([], ["--tensor", "a\npass  b"], ["--tensor", "no\nhint"]):
        result = qcs4w("inspect", path, *options)
        assert not [line for line in (result.out + result.err).splitlines() if line.startswith(("pass  b", "hint"))]


def test_colour_on_a_terminal_only(packed_file: Path) -> None:
    """A terminal gets colour, NO_COLOR and a pipe do not."""
    arguments = ("inspect", packed_file, "--tensor", "layers.0.fc")
    assert "\x1b[" in on_a_terminal(*arguments)
    assert "\x1b[" not in on_a_terminal(*arguments, NO_COLOR="1")
    assert "\x1b[" not in process(*arguments).out


@pytest.mark.gpu
def test_every_table_draws_on_a_terminal(packed_file: Path, checkpoint: Path, gpu: object) -> None:
    """Tables, verdicts and progress bars are drawn on a terminal as they are written into a pipe."""
    for arguments, words in (
        (["pack", checkpoint, "-n", "-v"], "would pack 2 tensors"),
        (["pack", checkpoint, "-o", packed_file, "--force"], "packed 2 tensors"),
        (["inspect", packed_file, "-v"], "embed_tokens.weight"),
        (["inspect", checkpoint], "layers.0.fc.bias"),
        (["verify", packed_file], "2 passed"),
        (["devices"], "taken: "),
    ):
        drawn = on_a_terminal(*arguments)
        assert words in drawn, drawn
        assert "Error" not in drawn


def test_a_name_cannot_steer_the_terminal(tmp_path: Path, qcs4w: CommandLine) -> None:
    """Control characters in a tensor's name are spelled out, in tables as in errors."""
    path = tmp_path / "evil.safetensors"
    save_file({"\x1b[2Jevil.weight": np.ones((2, 2), np.float32), "b": np.ones(1, np.float32)}, path)
    listed = qcs4w("pack", path, "-n").out
    assert "\x1b" not in listed
    assert "\\x1b[2Jevil.weight" in listed
    error = qcs4w.refused("pack", path, "-n", "--exclude", "\x1b[31mnothing")
    assert "\x1b" not in error


def test_the_repository_keeps_to_itself() -> None:
    """Imports go one way, only cli prints or exits, and one module knows wgpu and Dawn."""
    root = Path(__file__).parent.parent
    for path in [*root.glob("packer/**/*.py"), *root.glob("gpu/**/*.py")]:
        text = path.read_text()
        forbidden = ["qcs4w_cli", "import click", "import rich", "from rich", " print(", "sys.exit"]
        if "packer" in path.parts:
            forbidden += ["qcs4w_gpu", "wgpu"]
        elif path.name != "webgpu.py":
            forbidden += ["import wgpu", "from wgpu", "import_module"]
        assert not [word for word in forbidden if word in text], path
