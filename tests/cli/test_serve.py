"""`dsuf serve` as a process: ready, answers, ends; a dead engine comes back; nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from dsuf.cli.app import run_command
from tests.support.serving import spawned_by, status_of

START_S, STOP_S = 60, 20


class Served:
    """A running `dsuf serve` and what it said."""

    def __init__(self, process, log):
        self.process, self.log = process, log

    def wait_ready(self):
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            found = re.search(r"ready on (http://\S+)", self.log.read_text())
            if found:
                self.url = found.group(1)
                return
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise AssertionError(f"not ready after {START_S} s:\n{self.log.read_text()}")

    def status_of(self, path):
        return status_of(self.url + path)

    def engine_pid(self):
        """The kv agent is started first, so the engine is the second of two, also when it has been started again."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            if len(own := spawned_by(self.process.pid)) == 2:
                return max(own)
            time.sleep(0.02)
        raise AssertionError(f"no engine beside the agent:\n{self.log.read_text()}")

    def wait_status(self, wanted):
        """Until /readyz says so."""
        deadline = time.monotonic() + START_S
        while (found := self.status_of("/readyz")) != wanted:
            assert time.monotonic() < deadline, f"/readyz says {found}, not {wanted}:\n{self.log.read_text()}"
            time.sleep(0.02)

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.wait(STOP_S)


@pytest.fixture
def serve(environ, tmp_path, brief_noise):
    """Start a server; whatever the test does, it is gone afterwards."""
    with contextlib.ExitStack() as stack:

        def start(*flags, ckpt=brief_noise):
            log = tmp_path / "log"
            command = [sys.executable, "-m", "dsuf.cli.app", "serve", "--ckpt", str(ckpt), "--port", "0"]
            with log.open("wb") as written:
                process = subprocess.Popen(
                    [*command, "--drain-delay", "0", *flags], stdout=written, stderr=subprocess.STDOUT, env=environ
                )
            stack.callback(process.wait, STOP_S)
            stack.callback(process.kill)
            return Served(process, log)

        yield start


def gone(pid):
    deadline = time.monotonic() + STOP_S
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def sockets(environ):
    return list(Path(environ["XDG_RUNTIME_DIR"]).rglob("*.sock"))


def test_it_answers_and_a_dead_engine_comes_back_and_sigterm_leaves_nothing(serve, environ):
    served = serve()
    served.wait_ready()
    assert served.status_of("/readyz") == 200
    assert {sock.parent.stat().st_mode & 0o777 for sock in sockets(environ)} == {0o700}
    body = {"model": "deepseek-v4.1-flash", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    body["thinking"] = {"type": "disabled"}
    request = urllib.request.Request(served.url + "/v1/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 3

    first = served.engine_pid()
    os.kill(first, signal.SIGKILL)
    assert gone(first)
    served.wait_status(503)
    served.wait_status(200)
    second = served.engine_pid()
    assert second != first
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200

    assert served.end() == 0
    assert gone(second)
    assert list(Path(environ["XDG_RUNTIME_DIR"]).rglob("serve-*")) == []
    assert served.log.read_text().count("ready on") == 1
    assert "the engine process ended with exit status -9" in served.log.read_text()
    assert "Traceback" not in served.log.read_text()


def test_ctrl_c_while_it_loads_leaves_nothing(serve, environ):
    served = serve()
    deadline = time.monotonic() + START_S
    while not sockets(environ) and time.monotonic() < deadline:
        assert served.process.poll() is None, served.log.read_text()
        time.sleep(0.02)
    engine = served.engine_pid()
    assert served.end(signal.SIGINT) in (0, 130)
    assert gone(engine)
    assert list(Path(environ["XDG_RUNTIME_DIR"]).rglob("serve-*")) == []
    assert "Traceback" not in served.log.read_text()


def test_an_engine_without_its_web_process_ends_by_itself(serve):
    served = serve()
    served.wait_ready()
    engine = served.engine_pid()
    served.process.kill()
    assert gone(engine)


def test_what_only_the_engine_can_see_ends_the_server_with_its_status(serve):
    served = serve("--max-context", "200000000")
    assert served.process.wait(START_S) == 2
    assert "max_context is 200000000" in served.log.read_text()


def test_a_port_that_is_taken_ends_with_3_before_anything_is_loaded(capsys, monkeypatch):
    monkeypatch.setattr("dsuf.cli.serve.prepare", lambda *arguments: pytest.fail("loaded before the port was bound"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run_command(["serve", "--port", str(port)]) == 3
    assert f"port {port} of 127.0.0.1 is taken" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "status"),
    [
        (["--port", "70000"], 2),
        (["--port", "-1"], 2),
        (["--host", "256.0.0.1"], 3),
        (["--max-queued-requests", "-1"], 2),
        (["--max-queued-tokens", "-1"], 2),
        (["--queue-timeout", "0"], 2),
        (["--stall-timeout", "nan"], 2),
        (["--metrics-names", "sglang"], 2),
        (["--drain-timeout", "nan"], 2),
        (["--log-format", "xml"], 2),
        (["--api-key", " "], 2),
        (["--gpus", "64"], 3),
        (["--ckpt", "nowhere"], 3),
    ],
)
def test_wrong_flags_end_with_their_status(environ, capsys, flags, status):
    assert run_command(["serve", "--port", "0", *flags]) == status
    assert capsys.readouterr().err.startswith("dsuf: ")


def test_a_checkpoint_without_a_tokenizer_is_not_served(environ, tiny, capsys):
    assert run_command(["serve", "--port", "0", "--ckpt", str(tiny)]) == 3
    assert "no tokenizer.json" in capsys.readouterr().err


def test_a_tokenizer_of_another_model_is_not_served(environ, brief_noise, tmp_path, capsys):
    folder = tmp_path / "wrong"
    folder.mkdir()
    for file in brief_noise.iterdir():
        if file.name != "tokenizer.json":
            os.link(file, folder / file.name)
    tokenizer = (brief_noise / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(tokenizer.replace("<｜System｜>", "<｜Other｜>"))
    assert run_command(["serve", "--port", "0", "--ckpt", str(folder)]) == 3
    assert "does not fit this checkpoint" in capsys.readouterr().err


def test_repro_starts_its_own_server_and_stops_it(environ, brief_noise, tmp_path, capsys):
    flags = ["repro", "tetris", "--ckpt", str(brief_noise), "--quiet", "--output", str(tmp_path / "a.json")]
    assert run_command(flags) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(r"8 tokens at [\d,]+ tokens/s \(first token after \d+\.\d\d s\)\n", out)
    assert re.search(r"ms a step +\d", err)
    assert re.search(r"tokens a step +\d", err)
    metrics = json.loads((tmp_path / "a.json").read_text())["metrics"]
    assert 1.0 <= metrics["average_accept_length"] <= 6.0
    assert sockets(environ) == []


def test_repro_hands_on_why_its_server_did_not_start(environ, tiny, capsys):
    assert run_command(["repro", "tetris", "--ckpt", str(tiny)]) == 3
    err = capsys.readouterr().err
    assert "before it was ready" in err
    assert "no tokenizer.json" in err


def test_an_interrupted_repro_takes_its_server_with_it(environ, brief_noise, tmp_path):
    log = tmp_path / "log"
    with log.open("wb") as written:
        process = subprocess.Popen(
            [sys.executable, "-m", "dsuf.cli.app", "repro", "tetris", "--ckpt", str(brief_noise), "--runs", "500"],
            stdout=subprocess.DEVNULL,
            stderr=written,
            env=environ,
        )
    deadline = time.monotonic() + START_S
    while "run 1 of" not in log.read_text() and time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 1
    process.send_signal(signal.SIGINT)
    assert process.wait(STOP_S) == 130
    assert gone(children[0])
    assert list(Path(environ["XDG_RUNTIME_DIR"]).rglob("serve-*")) == []
    assert "Traceback" not in log.read_text()
