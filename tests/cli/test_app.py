"""The command itself: version, help, exit statuses, interrupts, and one message without a traceback."""

from __future__ import annotations

import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsuf import __version__
from dsuf.cli import app


def dsuf(*arguments, **changes):
    command = [sys.executable, "-m", "dsuf.cli.app", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **changes)


def test_version():
    done = dsuf("--version")
    assert (done.returncode, done.stdout) == (0, f"dsuf {__version__}\n")


def test_help_lists_every_command_and_answers_at_once():
    times = []
    for _ in range(3):
        begin = children_s()
        done = dsuf("--help")
        times.append(children_s() - begin)
    for name in ("run", "serve", "repro", "bench", "synth", "doctor", "build", "drain"):
        assert f"\n  {name} " in done.stdout
    assert min(times) < 0.5  # of processor time, which other work on the machine does not take


def children_s():
    """Processor time of all commands that have ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def test_help_loads_no_arithmetic_and_no_gpu_part():
    heavy = ("numpy", "numba", "cuda", "tokenizers", "starlette", "deepseek_recipe")
    code = (
        "import sys; from dsuf.cli.app import run_command; run_command(['--help']);"
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("arguments", [[], ["bench"]])
def test_help_cuts_no_line_short(arguments, capsys):
    assert app.run_command([*arguments, "--help"]) == 0
    assert "..." not in capsys.readouterr().out.replace("[ARGS]...", "")


def test_every_flag_of_the_readme_is_one_of_some_command(capsys):
    commands = [[name] for name in ("run", "serve", "repro", "synth", "doctor", "build", "drain")]
    commands += [["bench", name] for name in ("decode", "prefill", "kernels", "kv", "serve", "compare")]
    for command in commands:
        assert app.run_command([*command, "--help"]) == 0
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    others = {"--no-install-recommends", "--extra", "--profile"}  # of apt-get, uv and dsh
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"--[a-z][a-z-]+", readme)) - others <= known


@pytest.mark.parametrize("arguments", [["nope"], ["run", "--nope"], ["bench", "nope"], ["repro"]])
def test_wrong_usage_ends_with_2(arguments, capsys):
    assert app.run_command(arguments) == 2
    assert capsys.readouterr().err


def test_an_interrupt_ends_with_130_and_without_a_traceback(monkeypatch, capsys):
    def interrupted(*arguments, **changes):
        raise KeyboardInterrupt

    monkeypatch.setattr("dsuf.cli.repro.load_recipe", interrupted)
    assert app.run_command(["repro", "tetris"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_sigterm_unwinds_like_an_interrupt(tmp_path):
    # a server that never answers keeps the client waiting in a read
    code = (
        "import socket, sys, dsuf.cli.app as app\n"
        "sock = socket.create_server(('127.0.0.1', 0))\n"
        "sys.argv = ['dsuf', 'repro', 'tetris', '--url', f'http://127.0.0.1:{sock.getsockname()[1]}']\n"
        "print('up', flush=True)\n"
        "try:\n"
        "    app.main()\n"
        "finally:\n"
        "    print('unwound', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=10)
    assert process.returncode == 143
    assert out == "unwound\n"
    assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["bench", "--help"]])
def test_an_output_that_is_full_is_told_without_a_traceback(arguments):
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "dsuf.cli.app", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (3, "dsuf: the output cannot be written: No space left on device.\n")


def test_a_character_that_the_terminal_lacks_does_not_end_a_command():
    code = "from dsuf.cli import app; app.run_command = lambda _: print('a 🐳') or 0; app.main()"
    poor = {"PYTHONIOENCODING": "ascii", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False, env=poor)
    assert (done.returncode, done.stdout) == (0, b"a ?\n"), done.stderr


@pytest.mark.parametrize("closed", ["1>&-", "2>&-"])
def test_a_closed_stream_does_not_end_a_command(closed):
    code = (
        "import sys; from dsuf.cli import app; app.run_command = lambda _: print(sys.stderr.isatty()) or 5; app.main()"
    )
    done = subprocess.run(["sh", "-c", f'"$0" -c "$1" {closed}', sys.executable, code], timeout=60, check=False)
    assert done.returncode == 5


def test_an_interrupt_while_the_command_is_imported_ends_without_a_traceback():
    code = (
        "import builtins, sys\n"
        "real = builtins.__import__\n"
        "def interrupted(name, *rest):\n"
        "    if name == 'typer':\n"
        "        raise KeyboardInterrupt\n"
        "    return real(name, *rest)\n"
        "builtins.__import__ = interrupted\n"
        "import dsuf.cli.app\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["bench", "decode", "--steps", "5", "--profile"], "--steps, --profile are for a --config. Leave them out."),
        (["bench", "decode", "--config", "tiny", "--tokens", "x"], "--tokens is not for a --config"),
        (["bench", "prefill", "--profile"], "--profile is for a --config. Leave it out."),
        (["bench", "decode", "--max-tokens", "0"], "--max-tokens is 0; expected a whole number from 1"),
        (["bench", "decode", "--max-new", "0"], "--max-tokens is 0; expected a whole number from 1"),
        (
            ["bench", "decode", "--config", "tiny", "--max-tokens", "9", "--ignore-eos"],
            "--max-tokens, --ignore-eos are",
        ),
    ],
)
def test_a_benchmark_refuses_flags_that_would_have_no_effect(arguments, told, capsys):
    assert app.run_command(arguments) == 2
    assert told in capsys.readouterr().err
