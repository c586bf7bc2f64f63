"""`dsuf serve` as a user starts it, on the built-in checkpoint `noise`: two processes, real arithmetic."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import httpx
import pytest

from tests.support.served import Serve
from tests.support.serving import wait_until

HI = {"model": "deepseek-chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "seed": 3}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    running = Serve(tmp_path_factory.mktemp("serve"), "--ckpt", "noise")
    yield running
    running.process.kill()
    running.process.wait()


def metric(server, name):
    text = httpx.get(server.url + "/metrics").text
    return float(re.search(rf"^{name}{{[^}}]*}} (\S+)", text, re.M).group(1))


def test_a_stream_is_the_whole_answer_and_one_seed_one_text(server):
    whole = httpx.post(server.url + CHAT, json=HI, timeout=60).json()
    text = whole["choices"][0]["message"]["content"]
    assert text and whole["usage"]["completion_tokens"] == 8 and whole["choices"][0]["finish_reason"] == "length"
    stream = httpx.post(server.url + CHAT, json={**HI, "stream": True}, timeout=60).text
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"]["content"] for event in events) == text
    assert stream.endswith("data: [DONE]\n\n")
    line = server.lines()[-1]
    assert line["completion_tokens"] == 8 and line["iterations"] >= 1
    speed = 1000 / line["average_iteration_ms"] * line["average_accept_length"]
    assert speed == pytest.approx(line["decode_tokens_per_s"], rel=0.01)


def test_a_killed_client_frees_its_sequence_within_a_second(server):
    body = json.dumps({**HI, "stream": True, "max_tokens": 400})
    script = (
        "import sys, urllib.request\n"
        "with urllib.request.urlopen(sys.argv[1], sys.argv[2].encode()) as stream:\n"
        "    for line in stream: print(flush=True)\n"
    )
    client = subprocess.Popen([sys.executable, "-c", script, server.url + CHAT, body], stdout=subprocess.PIPE)
    for _ in range(5):
        client.stdout.readline()
    assert metric(server, "dsuf_num_requests_running") == 1
    client.kill()
    killed = time.monotonic()
    wait_until(lambda: metric(server, "dsuf_num_requests_running") == 0)
    assert time.monotonic() - killed < 1.5  # a second, and the polling above
    client.wait()
    wait_until(lambda: server.lines()[-1]["status"] == "cancelled")


def test_sigterm_ends_server_and_engine_cleanly(server):
    engines = server.children()
    assert engines
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 0
    for pid in engines:
        wait_until(lambda pid=pid: not os.path.exists(f"/proc/{pid}"))
    assert "Traceback" not in server.text()
