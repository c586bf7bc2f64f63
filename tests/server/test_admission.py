"""Who is let in, who is refused and for how long, and who is given up while it waits or does not read."""

from __future__ import annotations

import json
import socket
import threading
import time

import httpx
import pytest

from dsuf.engine.messages import Stats
from dsuf.errors import ConfigError
from dsuf.server.admission import Admission, PrefillSpeed
from dsuf.server.options import ServerOptions
from dsuf.server.problems import HttpProblem
from tests.support.peer import Script
from tests.support.serving import encode, in_steps, running_server, says, v41_text, wait_until

CHAT = "/v1/chat/completions"
HI = {"model": "deepseek-chat", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**HI, "stream": True}


def queued(admission, tokens):
    slot = admission.enter()
    slot.queue(tokens)
    return slot


class TestLimits:
    def test_a_request_that_finds_nobody_waiting_is_let_in_whatever_the_limits(self):
        admission = Admission(0, 0)
        queued(admission, 1_000_000).started()
        queued(admission, 1_000_000)
        with pytest.raises(HttpProblem):
            admission.enter()

    def test_the_limit_on_requests_counts_those_ahead(self):
        admission = Admission(2)
        first, _ = queued(admission, 5), queued(admission, 5)
        with pytest.raises(HttpProblem, match="2 requests are waiting already, at most 2") as caught:
            admission.enter()
        assert caught.value.status == 429
        first.started()
        admission.enter()

    def test_the_limit_on_tokens_counts_those_ahead(self):
        admission = Admission(100, max_queued_tokens=1000)
        queued(admission, 999)
        last = queued(admission, 50_000)  # 999 are fewer than 1000
        slot = admission.enter()
        with pytest.raises(HttpProblem, match="50999 prompt tokens are waiting already, at most 1000") as caught:
            slot.queue(1)
        assert caught.value.status == 429
        slot.leave()
        last.leave()
        queued(admission, 1)

    def test_counts_return_to_zero_however_a_request_ends(self):
        admission = Admission(10)
        slots = [queued(admission, 7) for _ in range(3)] + [admission.enter()]
        slots[0].started()
        slots[0].started()
        slots[1].started()
        assert (admission.waiting, admission.running, admission.waiting_tokens, admission.open) == (2, 2, 7, 4)
        for slot in slots * 2:
            slot.leave(Stats())
        assert (admission.waiting, admission.running, admission.waiting_tokens) == (0, 0, 0)

    def test_without_a_number_twenty_seconds_of_measured_prefill_may_wait(self):
        admission = Admission(10)
        assert admission.max_queued_tokens is None
        slot = queued(admission, 10_000)
        slot.started()
        slot.leave(Stats(prompt_tokens=10_000, cached_tokens=2_000, prefill_s=4.0))
        assert admission.max_queued_tokens == 40_000

    @pytest.mark.parametrize(("over", "seconds"), [(500, 1), (9_000, 5), (10**6, 10)])
    def test_retry_after_is_the_time_to_prefill_what_is_too_much_and_never_above_ten(self, over, seconds):
        admission = Admission(10, max_queued_tokens=1)
        admission.speed.observe(Stats(prompt_tokens=2_000, prefill_s=1.0))
        queued(admission, over + 1)
        with pytest.raises(HttpProblem) as caught:
            queued(admission, 1)
        assert caught.value.headers["retry-after"] == str(seconds)


class TestPrefillSpeed:
    def test_is_tokens_over_time_of_long_prompts_without_what_was_cached(self):
        speed = PrefillSpeed()
        speed.observe(Stats(prompt_tokens=100, prefill_s=1.0))
        speed.observe(Stats(prompt_tokens=90_000, cached_tokens=89_900, prefill_s=1.0))
        assert speed.tokens_per_s is None
        speed.observe(Stats(prompt_tokens=1_000, prefill_s=1.0))
        speed.observe(Stats(prompt_tokens=3_000, prefill_s=1.0))
        assert 1_990 < speed.tokens_per_s < 2_050

    def test_forgets_what_was_long_ago(self):
        speed = PrefillSpeed()
        for rate in [1_000] * 50 + [5_000] * 50:
            speed.observe(Stats(prompt_tokens=rate * 10, prefill_s=10.0))
        assert 4_900 < speed.tokens_per_s <= 5_000


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_queued_tokens": -1},
        {"queue_timeout_s": 0},
        {"stall_timeout_s": float("nan")},
        {"stall_timeout_s": float("inf")},
        {"metrics_names": "sglang"},
    ],
)
def test_options_out_of_range_are_refused(wrong):
    flag = "--" + next(iter(wrong)).removesuffix("_s").replace("_", "-")
    with pytest.raises(ConfigError, match=f"^{flag} is .* expected"):
        ServerOptions(**wrong)


def test_too_many_waiting_tokens_are_429_over_http():
    options = ServerOptions(max_queued_tokens=4, drain_delay_s=0)
    with (
        running_server(lambda request: Script(queue_s=60), options=options) as server,
        httpx.stream("POST", server.url + CHAT, json=STREAM),
    ):
        answer = httpx.post(server.url + CHAT, json=HI)
        assert answer.status_code == 429 and answer.json()["error"]["type"] == "rate_limit_error"
        assert "prompt tokens are waiting" in answer.json()["error"]["message"]
        assert 1 <= int(answer.headers["retry-after"]) <= 10
        load = httpx.get(server.url + "/load").json()
        assert (load["waiting"], load["waiting_tokens"], load["max_queued_tokens"]) == (1, 5, 4)
        assert len(server.peer.requests) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_waits_too_long_is_told_and_taken_back(stream):
    options = ServerOptions(queue_timeout_s=0.2, drain_delay_s=0)
    with running_server(lambda request: Script(queue_s=60), options=options) as server:
        if stream:
            lines = []
            with (
                pytest.raises(httpx.RemoteProtocolError),
                httpx.stream("POST", server.url + CHAT, json=STREAM) as answer,
            ):
                lines.extend(answer.iter_lines())
            told = [json.loads(line[6:]) for line in lines if line.startswith("data:")][-1]["error"]["message"]
        else:
            answer = httpx.post(server.url + CHAT, json=HI)
            assert answer.status_code == 503 and 1 <= int(answer.headers["retry-after"]) <= 10
            told = answer.json()["error"]["message"]
        assert "waited too long" in told
        line = server.request_end()
        assert (line["status"], line["http_status"]) == ("error", 503)
        wait_until(lambda: not server.peer.running)
        assert server.service.admission.open == 0


def test_the_wait_ends_with_prefill_and_not_with_the_answer():
    options = ServerOptions(queue_timeout_s=0.3, drain_delay_s=0)
    with running_server(says("one two three", prefill_s=0.5, step_s=0.1), options=options) as server:
        assert httpx.post(server.url + CHAT, json=HI).status_code == 200


def raw_post(server, body, send=None, buffer=None):
    """A bare socket that has sent a request, or the first `send` bytes of its body."""
    raw = json.dumps(body).encode()
    sock = socket.socket()
    if buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    sock.connect(("127.0.0.1", server.port))
    sock.settimeout(10)
    sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw[:send])
    return sock


BULKY = {**STREAM, "max_tokens": 120_000, "logprobs": True, "top_logprobs": 2}  # 30 MB, more than the kernel buffers


def bulky(request):
    return Script(in_steps(encode("a b c d e f ") * 20_000, 500), reason="length", step_s=0.001)


def test_a_client_that_does_not_read_is_cut_off_and_its_sequence_freed():
    options = ServerOptions(stall_timeout_s=0.3, drain_delay_s=0)
    with running_server(bulky, v41_text(context_limit=500_000), options) as server:
        sock = raw_post(server, BULKY, buffer=4096)
        line = server.request_end()
        assert (line["status"], line["http_status"]) == ("cancelled", 499)
        wait_until(lambda: not server.peer.running)
        with pytest.raises(OSError):  # reset, or ended without the last chunk
            while data := sock.recv(1 << 20):
                last = data
            raise OSError("cut" if not last.endswith(b"0\r\n\r\n") else None)
        assert "stream_stalls_total" in httpx.get(server.url + "/metrics").text
        assert server.service.admission.open == 0


def test_a_client_too_far_behind_is_given_up_before_memory_is_spent(monkeypatch):
    monkeypatch.setattr("dsuf.server.link._MOST_PENDING", 20_000)
    with running_server(bulky, v41_text(context_limit=500_000)) as server:
        sock = raw_post(server, BULKY, buffer=4096)
        assert server.request_end()["status"] == "cancelled"
        wait_until(lambda: not server.peer.running)
        sock.close()


def test_a_body_that_does_not_come_frees_its_place():
    options = ServerOptions(stall_timeout_s=0.2, drain_delay_s=0)
    with running_server(says("x"), options=options) as server:
        sock = raw_post(server, HI, send=5)
        answer = sock.recv(4096)
        assert answer.startswith(b"HTTP/1.1 408") and b"did not arrive in time" in answer
        assert server.request_end()["http_status"] == 408 and server.service.admission.open == 0
        sock.close()


def test_an_answer_in_one_piece_gets_empty_lines_while_it_is_silent():
    options = ServerOptions(keepalive_s=0.1, drain_delay_s=0)
    with running_server(says("yes", prefill_s=0.6), options=options) as server:
        with httpx.stream("POST", server.url + CHAT, json=HI) as answer:
            assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
            parts = list(answer.iter_raw())
        body = b"".join(parts)
        assert body.startswith(b"\n\n") and json.loads(body)["choices"][0]["message"]["content"] == "yes"
        assert server.request_end()["status"] == "ok"


def test_an_answer_in_one_piece_that_fails_after_an_empty_line_is_cut_off():
    options = ServerOptions(keepalive_s=0.1, drain_delay_s=0)
    failing = Script([], prefill_s=0.3, reason="error", message="device fault")
    with running_server(lambda request: failing, options=options) as server:
        body = b""
        with (
            pytest.raises(httpx.RemoteProtocolError),
            httpx.stream("POST", server.url + CHAT, json=HI) as answer,
        ):
            for part in answer.iter_raw():
                body += part
        assert "device fault" in json.loads(body)["error"]["message"]
        assert server.request_end()["http_status"] == 503


def test_pipelined_requests_are_answered_in_order_and_all_freed_when_the_client_leaves():
    def script(request):
        return Script(in_steps(encode("one two three"), 1), hangs=request.max_tokens == 7)

    raw = [json.dumps({**STREAM, "max_tokens": most}).encode() for most in (5, 7, 6)]
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    with running_server(script) as server:
        sock = socket.create_connection(("127.0.0.1", server.port))
        sock.sendall(b"".join(head % len(body) + body for body in raw))
        wait_until(lambda: len(server.peer.requests) == 2 and server.log())
        sock.close()
        wait_until(lambda: not server.peer.running and not server.service.admission.open)
        assert [line["status"] for line in server.log()][:2] == ["ok", "cancelled"]


def test_nothing_is_fetched_for_a_remote_image():
    with socket.create_server(("127.0.0.1", 0)) as bait, running_server(says("x")) as server:
        bait.settimeout(0.2)
        url = f"http://127.0.0.1:{bait.getsockname()[1]}/secret.png"
        content = [{"type": "image_url", "image_url": {"url": url}}]
        answer = httpx.post(server.url + CHAT, json={**HI, "messages": [{"role": "user", "content": content}]})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "image input is not supported by this build"
        with pytest.raises(TimeoutError):
            bait.accept()


def test_slow_and_fast_readers_side_by_side_both_get_everything():
    text = "".join(f"{number} " for number in range(400))
    with running_server(says(text, size=6, step_s=0.002), v41_text(context_limit=100_000)) as server:
        body = {**STREAM, "max_tokens": 50_000}
        results = {}

        def read(name, pause_s):
            sock = raw_post(server, body, buffer=4096 if pause_s else None)
            data = b""
            while not data.endswith(b"0\r\n\r\n"):
                data += sock.recv(2048 if pause_s else 1 << 16)
                time.sleep(pause_s)
            results[name] = data.count(b"[DONE]"), len(server.service.exchanges)

        threads = [threading.Thread(target=read, args=(f"r{i}", 0.002 * (i % 2))) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(results) == 6 and all(done == 1 for done, _ in results.values())
        wait_until(lambda: not server.service.exchanges)
        assert {line["completion_tokens"] for line in map(server.request_end, range(1, 7))} == {len(encode(text))}
