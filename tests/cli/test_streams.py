"""Output that nobody reads (`| head -1`), by real pipes: commands end quietly with 141, a server goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from dsuf.cli import app
from tests.support.chat_server import DONE, event, played_server
from tests.support.serving import spawned_by, status_of, wait_until

DSUF = [sys.executable, "-m", "dsuf.cli.app"]


def unread(arguments, *streams):
    """The command with these streams into a pipe whose reader is gone; what is not said there is returned."""
    reader, writer = os.pipe()
    os.close(reader)
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | dict.fromkeys(streams, writer)
    try:
        return subprocess.run([*DSUF, *arguments], **given, text=True, timeout=60, check=False)
    finally:
        os.close(writer)


@pytest.fixture
def objects(tmp_path):
    """Two bench objects of which the second is worse, so that comparing them is more than a line."""
    sample = {"decode_tokens_per_s": 10.0, "step_ms": 1.0}
    found = []
    for name, factor in (("old", 1.0), ("new", 0.5)):
        values = {key: value * factor for key, value in sample.items()}
        made = {
            "schema": "dsuf.bench/1", "kind": "decode", "label": "", "date": "", "dsuf_version": "", "git_commit": None,
            "backend": "cpu", "machine": {}, "gpu": None, "model": {}, "params": {}, "ceilings": {}, "floor": None,
            "metrics": values, "samples": [values] * 3,
        }  # fmt: skip
        (tmp_path / name).write_text(json.dumps(made))
        found.append(str(tmp_path / name))
    return found


@pytest.fixture(
    params=["help", "version", "doctor", "run", "run --json", "run ids", "synth", "compare", "drain", "usage", "decode"]
)
def arguments(request, tmp_path, tiny, prompt_file, objects, environ):
    ids = ["--ckpt", str(tiny), "--tokens", str(prompt_file), "--gpus", "0"]
    return {
        "help": ["bench", "decode", "--help"],
        "version": ["--version"],
        "doctor": ["doctor"],
        "run": ["run", "hello", "--gpus", "0"],
        "run --json": ["run", *ids, "--max-tokens", "2", "--json"],
        "run ids": ["run", *ids, "--max-tokens", "2"],
        "synth": ["synth", "tiny", str(tmp_path / "out"), "--sparse"],
        "compare": ["bench", "compare", *objects],
        "drain": ["drain"],
        "usage": ["run"],
        "decode": ["bench", "decode", *ids, "--max-tokens", "4", "--repeat", "1", "--warmup", "0", "--ignore-eos"],
    }[request.param]


def test_a_command_that_nobody_reads_ends_quietly_and_says_neither_done_nor_failed(arguments):
    done = unread(arguments, "stdout", "stderr")
    assert done.returncode == 141


@pytest.mark.parametrize("arguments", ["version", "doctor", "run ids", "compare", "decode"], indirect=True)
def test_a_reader_of_stdout_that_is_gone_leaves_stderr_without_a_traceback(arguments):
    done = unread(arguments, "stdout")
    assert (done.returncode, "Traceback" in done.stderr, "Broken" in done.stderr) == (141, False, False)


def test_a_shell_sees_what_it_sees_of_git():
    command = f'set -o pipefail; "{sys.executable}" -m dsuf.cli.app run "$0" --gpus 0 | head -c 1'
    page = "implement the tetris game. output HTML code directly - no explanation."
    done = subprocess.run(["bash", "-c", command, page], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (141, "<")
    assert "Traceback" not in done.stderr


def test_an_answer_that_nobody_reads_is_broken_off_at_the_server():
    with played_server() as server:
        server.pieces, server.gap_s = [*(event("word ") for _ in range(200)), DONE], 0.05
        done = unread(["repro", "tetris", "--url", server.url], "stdout")
    assert (done.returncode, done.stderr) == (141, "")


def test_a_broken_connection_is_no_broken_output(monkeypatch):
    def broken(name):
        raise BrokenPipeError("of a socket")

    monkeypatch.setattr("dsuf.cli.repro.load_recipe", broken)
    with pytest.raises(BrokenPipeError, match="of a socket"):
        app.run_command(["repro", "tetris"])


def test_a_server_outlives_the_readers_of_its_lines_as_do_its_engine_and_its_agent(environ):
    reader, writer = os.pipe()
    flags = ["--ckpt", "noise", "--gpus", "0", "--port", "0", "--drain-delay", "0", "--kv-host-bytes", "64m"]
    process = subprocess.Popen([*DSUF, "serve", *flags], stdout=writer, stderr=writer, env=environ)
    os.close(writer)
    try:
        with os.fdopen(reader) as lines:
            url = next(line.split()[-1] for line in lines if "ready on" in line)
        assert answered(url) == 2
        for child in spawned_by(process.pid):
            os.kill(child, signal.SIGKILL)
        wait_until(lambda: status_of(f"{url}/readyz") == 503, 10)
        wait_until(lambda: status_of(f"{url}/readyz") == 200, 30)
        assert answered(url) == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait(20)


def answered(url):
    """Tokens of a short answer."""
    body = {"model": "deepseek-chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    with urllib.request.urlopen(f"{url}/v1/chat/completions", json.dumps(body).encode(), timeout=30) as answer:
        return json.load(answer)["usage"]["completion_tokens"]
