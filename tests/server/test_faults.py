"""The engine killed at any moment and a server told to end, both with many calls open: what every client sees.

Real processes: the engine of the killed ones is scripted, so that prefill and decode last as long as a test needs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.support.serving import spawned_by

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
HI = {"model": "deepseek-chat", "messages": [{"role": "user", "content": "hi"}]}
STEPS_A_S = 100
WAIT_S = 40.0


def wait_for(condition, seconds=WAIT_S):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)
    return found


class Served:
    """A server process with an engine process that is started again when it dies."""

    def __init__(self, folder, *flags):
        self.log = folder / "log"
        command = [sys.executable, "-m", "tests.support.serve_restarting", str(folder), *map(str, flags)]
        with self.log.open("wb") as written:
            self.process = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT, cwd=ROOT)
        found = wait_for(lambda: re.search(r"ready on (\S+)", self.log.read_text()) or self.process.poll() is not None)
        assert found is not True, self.log.read_text()
        self.url = found.group(1)

    def engine(self):
        """Process id of the engine that runs now."""
        return spawned_by(self.process.pid)[0]

    def ready(self):
        return httpx.get(self.url + "/readyz").status_code

    def gauge(self, name):
        return httpx.get(self.url + "/load").json()[name]

    def lines(self, event="request_end"):
        logged = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in logged if line["event"] == event]


@pytest.fixture
def served(tmp_path):
    """Start servers; all are gone afterwards."""
    with contextlib.ExitStack() as stack:

        def start(*flags):
            server = Served(tmp_path, *flags)
            stack.callback(server.process.wait, 10)
            stack.callback(server.process.kill)
            return server

        yield start


class Caller(threading.Thread):
    """One call and how it ended: `complete`, `error event`, `status N`, or `cut` without a word."""

    def __init__(self, url, stream=True, **fields):
        super().__init__(daemon=True)
        self.url, self.body = url, {**HI, "stream": stream, **fields}
        self.lines, self.outcome, self.told = [], None, ""
        self.start()

    def run(self):
        try:
            with httpx.stream("POST", self.url + CHAT, json=self.body, timeout=60) as answer:
                for line in answer.iter_lines():
                    if line.startswith(("data:", "{")):
                        self.lines.append(line)
                done = not self.body["stream"] or self.lines[-1] == "data: [DONE]"
                self.outcome = f"status {answer.status_code}" if answer.status_code != 200 else "complete"
                assert done or answer.status_code != 200
                self.told = self.lines[-1]
        except httpx.RemoteProtocolError:
            last = json.loads(self.lines[-1].removeprefix("data: ")) if self.lines else {}
            self.outcome = "error event" if "error" in last else "cut"
            self.told = str(last.get("error"))

    @property
    def tokens(self):
        return sum('"content":"' in line and '"content":""' not in line for line in self.lines)  # not the role's event


def outcomes(callers):
    for caller in callers:
        caller.join(WAIT_S)
    return Counter(caller.outcome for caller in callers)


def test_kill_in_decode_prefill_and_idle_and_each_time_it_comes_back(served):
    server = served()
    long = {"messages": [{"role": "user", "content": "word " * 60_000}]}

    # decode: ten streams and two whole answers run, and more wait for a place
    callers = [Caller(server.url, max_tokens=9000) for _ in range(10)]
    callers += [Caller(server.url, stream=False, max_tokens=9000) for _ in range(2)]
    wait_for(lambda: sum(caller.tokens > 2 for caller in callers) >= 3 and server.gauge("server_load") == 12)
    first = server.engine()
    os.kill(first, signal.SIGKILL)
    killed = time.monotonic()
    wait_for(lambda: server.ready() == 503)
    noticed = time.monotonic() - killed
    assert outcomes(callers) == {"error event": 10, "status 503": 2}
    assert all("engine process ended" in caller.told for caller in callers)
    assert noticed < 5  # at once, on a machine that is busy with other things
    refused = httpx.post(server.url + CHAT, json=HI)
    assert refused.status_code == 503 and 1 <= int(refused.headers["retry-after"]) <= 10
    assert httpx.get(server.url + "/livez").status_code == 200
    wait_for(lambda: server.gauge("server_load") == 0)
    wait_for(lambda: server.ready() == 200)
    second = server.engine()
    assert second != first
    assert outcomes([Caller(server.url, max_tokens=5)]) == {"complete": 1}

    # prefill: a long prompt that has not got its first token
    callers = [Caller(server.url, **long)]
    wait_for(lambda: callers[0].lines)  # admitted: its answer has begun
    callers.append(Caller(server.url, stream=False, **long))
    wait_for(lambda: server.gauge("server_load") == 2)
    os.kill(second, signal.SIGKILL)
    assert outcomes(callers) == {"error event": 1, "status 503": 1}
    assert not any(caller.tokens for caller in callers)
    wait_for(lambda: server.ready() == 200)

    # idle
    os.kill(server.engine(), signal.SIGKILL)
    wait_for(lambda: server.ready() == 503)
    wait_for(lambda: server.ready() == 200)
    assert outcomes([Caller(server.url, max_tokens=5)]) == {"complete": 1}

    wait_for(lambda: len(server.lines()) == 17)  # a line is written when the client has its answer
    statuses = Counter((line["status"], line["http_status"]) for line in server.lines())
    assert statuses == {("error", 503): 14, ("rejected", 503): 1, ("ok", 200): 2}
    assert len(server.lines("engine_gone")) == 3 and not server.lines("fault")


@pytest.mark.parametrize("busy", [True, False])
def test_an_engine_that_hangs_is_killed_and_comes_back(served, busy):
    server = served("5", "3")
    callers = [Caller(server.url, stream=stream, max_tokens=9000) for stream in (True, False)] if busy else []
    wait_for(lambda: server.gauge("server_load") == len(callers) and all(one.tokens for one in callers[:1]))
    first = server.engine()
    os.kill(first, signal.SIGSTOP)
    wait_for(lambda: server.ready() == 503)
    assert outcomes(callers) == ({"error event": 1, "status 503": 1} if busy else {})
    wait_for(lambda: server.ready() == 200)
    assert server.engine() != first and not Path(f"/proc/{first}").exists()
    assert outcomes([Caller(server.url, max_tokens=5)]) == {"complete": 1}
    assert "said nothing for 3 s" in server.lines("engine_gone")[0]["error"]
    assert "hung" in server.log.read_text()


def test_sigterm_with_twenty_open_streams_lets_all_of_them_end(served):
    server = served("35")
    callers = [Caller(server.url, max_tokens=150 + number) for number in range(20)]
    wait_for(lambda: any(caller.tokens for caller in callers) and server.gauge("server_load") == 20)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(WAIT_S) == 0
    assert outcomes(callers) == {"complete": 20}
    ends = server.lines()
    assert Counter(line["status"] for line in ends) == {"ok": 20}
    assert sorted(line["completion_tokens"] for line in ends) == [150 + number for number in range(20)]
    assert server.lines("drain_end")[0]["broken_off"] == 0


def test_sigterm_with_twenty_streams_that_outlast_the_drain_tells_every_one(served):
    server = served("0.5")
    callers = [Caller(server.url, stream=number % 4 > 0, max_tokens=9000) for number in range(20)]
    wait_for(lambda: server.gauge("server_load") == 20)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(WAIT_S) == 0
    assert outcomes(callers) == {"error event": 15, "status 503": 5}
    assert all("shutting down" in caller.told for caller in callers)
    assert Counter(line["status"] for line in server.lines()) == {"error": 20}
    assert server.lines("drain_end")[0]["broken_off"] == 20


def test_an_engine_that_dies_again_and_again_ends_the_server(served):
    server = served("5", "fast")
    for _ in range(2):
        wait_for(lambda: server.ready() == 200)
        caller = Caller(server.url, max_tokens=9000)
        wait_for(lambda caller=caller: caller.tokens)
        os.kill(server.engine(), signal.SIGKILL)
        assert outcomes([caller]) == {"error event": 1}
        if server.process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                wait_for(lambda: server.ready() == 503)
    assert server.process.wait(WAIT_S) == 3
    assert "ended 2 times in 10 minutes" in server.log.read_text()
