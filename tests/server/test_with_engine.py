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

from tests.support.serving import wait_until

HI = {"model": "deepseek-chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "seed": 3}
CHAT = "/v1/chat/completions"


class Serve:
    """A `dsuf serve` process with folders of its own."""

    def __init__(self, folder, *flags):
        self.log = folder / "log"
        environ = {**os.environ, "DSUF_CACHE": str(folder / "cache"), "XDG_RUNTIME_DIR": str(folder)}
        folder.chmod(0o700)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dsuf.cli.app", "serve", "--port", "0", "--drain-delay", "0", *flags],
                stdout=log,
                stderr=log,
                env=environ,
                start_new_session=True,
            )
        wait_until(lambda: re.search(r"ready on (http://\S+)", self.text()) or self.process.poll() is not None, 60)
        found = re.search(r"ready on (http://\S+)", self.text())
        assert found, self.text()
        self.url = found.group(1)

    def text(self):
        return self.log.read_text()

    def lines(self):
        return [json.loads(line) for line in self.text().splitlines() if line.startswith('{"event":"request_end"')]

    def children(self):
        path = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        with open(path) as children:
            return [int(pid) for pid in children.read().split()]


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
