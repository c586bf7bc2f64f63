"""Signals to a server process: what new calls, running streams and the shell see."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from dsuf.errors import EnvironmentProblem
from dsuf.server.app import bind

ROOT = Path(__file__).parents[2]
STREAM = {"model": "deepseek-chat", "stream": True, "messages": [{"role": "user", "content": "hi"}]}


class Process:
    def __init__(self, process, port):
        self.process, self.url = process, f"http://127.0.0.1:{port}"

    def signal(self, number):
        self.process.send_signal(number)

    def wait(self):
        """Exit code and log lines."""
        _, err = self.process.communicate(timeout=10)
        return self.process.returncode, [json.loads(line) for line in err.decode().splitlines()]


@contextmanager
def server_process(folder, drain_delay_s=0.0, drain_timeout_s=10.0):
    command = [sys.executable, "-m", "tests.support.serve_scripted", folder, drain_delay_s, drain_timeout_s]
    process = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, start_new_session=True
    )
    try:
        port = int(process.stdout.readline())
        assert process.stdout.readline() == b"ready\n"
        yield Process(process, port)
    finally:
        process.kill()
        process.wait()


class Stream(threading.Thread):
    """Reads a stream to its end, proper or not."""

    def __init__(self, url):
        super().__init__(daemon=True)
        self.url, self.lines, self.error = url, [], None
        self.begun = threading.Event()
        self.start()
        assert self.begun.wait(5)

    def run(self):
        try:
            with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=STREAM, timeout=20) as stream:
                for line in stream.iter_lines():
                    self.lines += [line] if line else []
                    if '"content":"word' in line or '"content":" word' in line:
                        self.begun.set()
        except httpx.HTTPError as error:
            self.error = error


def test_sigterm_lets_streams_end_and_refuses_new_calls(tmp_path):
    with server_process(tmp_path, drain_delay_s=0.3) as server:
        stream = Stream(server.url)
        server.signal(signal.SIGTERM)
        time.sleep(0.15)
        ready = httpx.get(f"{server.url}/readyz")
        assert ready.status_code == 503 and ready.json()["status"] == "draining"
        assert httpx.get(f"{server.url}/livez").status_code == 200
        refused = httpx.post(f"{server.url}/v1/chat/completions", json=STREAM)
        assert refused.status_code == 503 and 1 <= int(refused.headers["retry-after"]) <= 10
        stream.join(10)
        code, log = server.wait()
    assert code == 0
    assert stream.error is None and stream.lines[-1] == "data: [DONE]"
    assert [line["status"] for line in log if line["event"] == "request_end"] == ["rejected", "ok"]
    assert [line["event"] for line in log if line["event"] != "request_end"] == ["drain_begin", "drain_end"]


def test_an_idle_server_waits_only_for_load_balancers(tmp_path):
    with server_process(tmp_path, drain_delay_s=0.3) as server:
        begin = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.wait()[0] == 0
        assert 0.3 <= time.monotonic() - begin < 5


def test_ctrl_c_on_an_idle_server_is_quick(tmp_path):
    with server_process(tmp_path, drain_delay_s=30) as server:
        begin = time.monotonic()
        server.signal(signal.SIGINT)
        assert server.wait()[0] == 0
        assert time.monotonic() - begin < 5


def test_streams_that_outlast_the_timeout_get_an_error_event(tmp_path):
    with server_process(tmp_path, drain_timeout_s=0.2) as server:
        stream = Stream(server.url)
        server.signal(signal.SIGTERM)
        stream.join(10)
        code, log = server.wait()
    assert code == 0 and isinstance(stream.error, httpx.RemoteProtocolError)
    assert "shutting down" in json.loads(stream.lines[-1].removeprefix("data: "))["error"]["message"]
    assert not any("[DONE]" in line for line in stream.lines)
    assert [line["status"] for line in log if line["event"] == "request_end"] == ["error"]
    assert log[-1]["event"] == "drain_end" and log[-1]["broken_off"] == 1


def test_a_second_signal_stops_at_once(tmp_path):
    with server_process(tmp_path, drain_delay_s=30, drain_timeout_s=30) as server:
        stream = Stream(server.url)
        server.signal(signal.SIGTERM)
        time.sleep(0.1)
        begin = time.monotonic()
        server.signal(signal.SIGTERM)
        code, _ = server.wait()
        assert code == 0 and time.monotonic() - begin < 5
        stream.join(5)
    assert "shutting down" in stream.lines[-1]


def test_a_taken_port_is_said_before_anything_is_loaded():
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(EnvironmentProblem, match=rf"port {port} .* taken.*--port") as caught:
            bind("127.0.0.1", port)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 8000), ("no.such.host.invalid", 8000), ("127.0.0.1", 70_000)])
def test_an_impossible_address_is_an_environment_problem(host, port):
    with pytest.raises(EnvironmentProblem, match="--host or --port"):
        bind(host, port)
