"""`dsuf drain`: which server it finds, and what that server and its streams do."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from dsuf.cli.app import run_command

ROOT = Path(__file__).parents[2]
STREAM = {"model": "deepseek-chat", "stream": True, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    """The runtime folder of this user, for servers and for `dsuf drain`."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / "dsuf"
    folder.mkdir(mode=0o700)
    return folder


@contextmanager
def server(runtime, name="serve-a"):
    """(process, port) of a scripted server with its admin socket."""
    folder = runtime / name
    folder.mkdir()
    command = [sys.executable, "-m", "tests.support.serve_scripted", str(folder), "0", "20"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    try:
        port = int(process.stdout.readline())
        assert process.stdout.readline() == b"ready\n"
        yield process, port
    finally:
        process.kill()
        process.wait()


def test_it_waits_for_running_streams_and_ends_when_the_server_has(runtime, capfd):
    with server(runtime) as (process, port):
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        with httpx.stream("POST", url, json=STREAM, timeout=30) as stream:
            lines = stream.iter_lines()
            next(lines)
            codes = []
            drain = threading.Thread(target=lambda: codes.append(run_command(["drain"])))
            drain.start()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        drain.join(20)
        assert codes == [0] and process.wait(5) == 0
        log = [json.loads(line) for line in process.stderr.read().decode().splitlines()]
        assert [line["event"] for line in log] == ["drain_begin", "request_end", "drain_end"]
        assert log[1]["status"] == "ok" and log[2]["broken_off"] == 0
    out, err = capfd.readouterr()
    assert f"127.0.0.1:{port} has stopped" in out
    assert f"127.0.0.1:{port}: draining, open requests: 1" in err


def test_now_breaks_off_what_runs(runtime):
    with server(runtime) as (process, port):
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        with (
            pytest.raises(httpx.RemoteProtocolError),
            httpx.stream("POST", url, json={**STREAM, "max_tokens": 300}, timeout=30) as stream,
        ):
            lines = []
            for line in stream.iter_lines():
                lines.append(line)
                if len(lines) == 3:
                    began = time.monotonic()
                    assert run_command(["drain", "--now"]) == 0
        assert time.monotonic() - began < 5 and process.wait(5) == 0
        assert "shutting down" in [line for line in lines if line][-1]


def test_several_servers_need_a_port(runtime, capsys):
    with server(runtime, "serve-a") as (_, first), server(runtime, "serve-b") as (process, second):
        assert run_command(["drain"]) == 2
        assert f"127.0.0.1:{first}" in (told := capsys.readouterr().err) and f"127.0.0.1:{second}" in told
        assert run_command(["drain", "--port", "1"]) == 3
        assert run_command(["drain", "--port", str(second)]) == 0
        assert process.wait(5) == 0
        assert httpx.get(f"http://127.0.0.1:{first}/readyz").status_code == 200


def test_without_a_server_it_says_so(runtime, capsys):
    assert run_command(["drain"]) == 3
    assert "No server of this user runs" in capsys.readouterr().err


def test_a_socket_that_a_killed_server_left_is_no_server(runtime, capsys):
    with server(runtime) as (process, _):
        process.kill()
        process.wait()
        assert list(runtime.rglob("admin.sock"))
        assert run_command(["drain"]) == 3
