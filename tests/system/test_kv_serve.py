"""Two `dsuf serve` on one machine, no flags but ports: the second goes on where the first was."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.system
QUESTION = {"role": "user", "content": "Who are you, and what can you tell me about yourself?"}


@contextlib.contextmanager
def dsuf_serve(folder, *flags):
    """(url, process, log file) of a server that is ready."""
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    log = folder / f"log-{len(list(folder.glob('log-*')))}"
    command = [sys.executable, "-m", "dsuf.cli.app", "serve", "--port", "0", "--drain-delay", "0", *flags]
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=file, text=True)
    try:
        line = process.stdout.readline()
        assert "ready on" in line, log.read_text()
        yield line.split()[-1], process, log
    finally:
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(20) == 0
        finally:
            process.kill()


def ask(url, messages, **more):
    body = {"model": "deepseek-chat", "messages": messages, "max_tokens": 48, "temperature": 0, **more}
    document = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    return document["choices"][0]["message"], document["usage"]


def last_line(log):
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == "request_end"][-1]


@pytest.mark.parametrize("flags", [(), ("--kv-transport", "tcp"), ("--prefill", "exact")])
def test_the_next_turn_goes_on_at_another_server_as_if_it_had_stayed(tmp_path, flags):
    tmp_path.chmod(0o700)
    with dsuf_serve(tmp_path, *flags) as (a, _, log_a), dsuf_serve(tmp_path, *flags) as (b, _, log_b):
        reply, usage = ask(a, [QUESTION])
        messages = [QUESTION, reply, {"role": "user", "content": "And what else?"}]
        moved, there = ask(b, messages)
        assert there["prompt_cache_hit_tokens"] >= usage["prompt_tokens"] + usage["completion_tokens"] - 2
        time.sleep(0.2)
        assert last_line(log_b)["cache_source"] == "remote"
        stayed, _ = ask(a, messages)
        time.sleep(0.2)
        assert stayed == moved
        same = ("iterations", "average_accept_length", "completion_tokens")
        assert [last_line(log_a)[name] for name in same] == [last_line(log_b)[name] for name in same]
        if "exact" in flags:
            with dsuf_serve(tmp_path, *flags, "--kv-host-bytes", "0") as (c, _, _):
                cold, usage = ask(c, messages)
                assert usage["prompt_cache_hit_tokens"] == 0 and cold == moved


def test_what_was_saved_outlives_a_killed_engine(tmp_path):
    tmp_path.chmod(0o700)
    with dsuf_serve(tmp_path) as (a, process, _):
        reply, usage = ask(a, [QUESTION])
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        engine = next(pid for pid in children if _is_engine(pid))
        os.kill(int(engine), signal.SIGKILL)
        deadline = time.monotonic() + 60
        while httpx.get(f"{a}/readyz").status_code == 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        while httpx.get(f"{a}/readyz").status_code != 200 and time.monotonic() < deadline:
            time.sleep(0.2)
        messages = [QUESTION, reply, {"role": "user", "content": "And what else?"}]
        _, after = ask(a, messages)
        assert after["prompt_cache_hit_tokens"] >= usage["prompt_tokens"] + usage["completion_tokens"] - 2


def _is_engine(pid):
    """The engine is the one that has mapped a checkpoint."""
    return "safetensors" in Path(f"/proc/{pid}/maps").read_text()


def test_a_server_that_must_have_rdma_and_has_none_does_not_start(tmp_path):
    tmp_path.chmod(0o700)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "dsuf.cli.app", "serve", "--port", "0", "--kv-require-rdma"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 3 and "--kv-require-rdma" in ended.stderr
