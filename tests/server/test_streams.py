"""Streams in time: silence, slow readers, clients that leave, stop strings, and an engine that fails."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time

import httpx
import pytest

from dsuf.server.options import ServerOptions
from tests.support.peer import Peer, Script
from tests.support.serving import encode, in_steps, running_server, says, v41_text, wait_until

CHAT = "/v1/chat/completions"
HI = {"model": "deepseek-chat", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**HI, "stream": True}
WORDS = in_steps(encode("one two three four five six seven eight nine ten"), 2)


def open_stream(server, body=None):
    return httpx.stream("POST", server.url + CHAT, json=body or STREAM, timeout=10)


def send_and_reset(server, body, wait_for):
    """Send a request on a bare socket, wait, then vanish as a killed client does."""
    raw = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw)
    wait_until(wait_for)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_headers_leave_before_the_first_token():
    with running_server(lambda request: Script(WORDS, queue_s=60)) as server, open_stream(server) as stream:
        assert stream.status_code == 200 and server.service.admission.waiting == 1


def test_the_role_chunk_waits_for_prefill():
    options = ServerOptions(keepalive_s=0.05, drain_delay_s=0)
    with (
        running_server(lambda request: Script(WORDS, queue_s=0.3), options=options) as server,
        open_stream(server) as stream,
    ):
        lines = [line for line in stream.iter_lines() if line]
    first = next(i for i, line in enumerate(lines) if line.startswith("data:"))
    assert first > 0 and all(line.startswith(":") for line in lines[:first])
    assert json.loads(lines[first][6:])["choices"][0]["delta"]["role"] == "assistant"


def test_comments_come_only_after_real_silence_and_keep_coming():
    options = ServerOptions(keepalive_s=0.3, drain_delay_s=0)
    slow = Script(WORDS, prefill_s=1.0)
    with running_server(lambda request: slow, options=options) as server, open_stream(server) as stream:
        at = [(time.monotonic(), line) for line in stream.iter_lines() if line]
    role = next(i for i, (_, line) in enumerate(at) if "assistant" in line)
    comments = [moment - at[role][0] for moment, line in at[role:] if line == ": keep-alive"]
    assert len(comments) == 3
    assert all(0.3 * (i + 1) - 0.05 < moment < 0.3 * (i + 1) + 0.25 for i, moment in enumerate(comments))


def test_a_brisk_stream_has_no_comments():
    options = ServerOptions(keepalive_s=2.0, drain_delay_s=0)
    brisk = Script(WORDS, step_s=0.6)
    with running_server(lambda request: brisk, options=options) as server, open_stream(server) as stream:
        assert not [line for line in stream.iter_lines() if line.startswith(":")]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
def test_a_client_that_leaves_frees_its_sequence_within_a_second(phase, stream):
    slow = {"queue": {"queue_s": 60}, "prefill": {"prefill_s": 60}, "decode": {"hangs": True}}[phase]
    with running_server(lambda request: Script(WORDS, **slow)) as server:

        def far_enough():
            admission = server.service.admission
            return server.peer.running and (phase == "queue" or admission.running == 1)

        send_and_reset(server, {**HI, "stream": stream}, far_enough)
        wait_until(lambda: not server.peer.running and not server.service.admission.open, seconds=1.0)
        line = server.request_end()
        assert (line["status"], line["http_status"], line["stream"]) == ("cancelled", 499, stream)
        assert server.peer.cancelled == [server.peer.requests[0].id]
        metrics = httpx.get(server.url + "/metrics").text
    assert f'client_disconnects_total{{model_name="deepseek-v4.1-flash",phase="{phase}"}} 1.0' in metrics


def test_a_stop_string_stops_the_engine():
    script = Script(WORDS, hangs=True)
    for stream in (True, False):
        with running_server(lambda request: script) as server:
            answer = httpx.post(server.url + CHAT, json={**HI, "stop": "six", "stream": stream})
            assert "five" in answer.text and "seven" not in answer.text
            wait_until(lambda server=server: not server.peer.running, seconds=1.0)
            line = server.request_end()
            assert (line["status"], line["finish_reason"]) == ("ok", "stop")


def broken_stream(server):
    """Every line of a stream that ends without a proper end."""
    lines = []
    with pytest.raises(httpx.RemoteProtocolError), open_stream(server) as stream:
        for line in stream.iter_lines():
            lines.append(line)
    return [line for line in lines if line]


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (Script(WORDS, reason="error", message="device fault in rank 0"), "device fault in rank 0"),
        (Script(WORDS, dies=True), "engine process ended"),
        (Script([], reason="error", message="out of memory"), "out of memory"),
    ],
)
def test_an_engine_failure_in_a_stream_is_an_error_event_and_a_dropped_connection(script, told):
    with running_server(lambda request: script) as server:
        lines = broken_stream(server)
        error = json.loads(lines[-1].removeprefix("data: "))["error"]
        assert told in error["message"] and error["type"] == "server_error"
        assert not any("[DONE]" in line or '"finish_reason":"stop"' in line for line in lines)
        line = server.request_end()
        assert (line["status"], line["http_status"], line["finish_reason"]) == ("error", 503, None)
        assert server.service.admission.open == 0


@pytest.mark.parametrize("script", [Script(WORDS, reason="error", message="device fault"), Script(WORDS, dies=True)])
def test_an_engine_failure_without_a_stream_is_a_503(script):
    with running_server(lambda request: script) as server:
        answer = httpx.post(server.url + CHAT, json=HI)
        assert answer.status_code == 503 and answer.json()["error"]["type"] == "server_error"
        assert 1 <= int(answer.headers["retry-after"]) <= 10


def test_a_dead_engine_is_noticed_at_once():
    with running_server(lambda request: Script(WORDS, hangs=True)) as server:
        assert httpx.get(server.url + "/readyz").status_code == 200
        with pytest.raises(httpx.RemoteProtocolError), open_stream(server) as stream:
            for line in stream.iter_lines():
                if '" ten"' in line or 'nine ten"' in line:
                    server.peer.die()
                    died = time.monotonic()
        assert time.monotonic() - died < 1
        for path in ("/readyz", "/health"):
            answer = httpx.get(server.url + path)
            assert answer.status_code == 503 and answer.json()["reason"] == "the engine is gone"
        answer = httpx.post(server.url + CHAT, json=HI)
        assert answer.status_code == 503 and "retry-after" in answer.headers
        assert len(server.log("engine_gone")) == 1
        assert httpx.get(server.url + "/livez").status_code == 200


def test_a_restarted_engine_is_taken_on():
    with running_server(says("first")) as server:
        server.peer.die()
        wait_until(lambda: httpx.get(server.url + "/readyz").status_code == 503)
        peer = Peer(server.service.link.socket_path, says("second"))
        wait_until(lambda: httpx.get(server.url + "/readyz").status_code == 200)
        assert httpx.post(server.url + CHAT, json=HI).json()["choices"][0]["message"]["content"] == "second"
        impostor = Peer(server.service.link.socket_path, says("third"))
        impostor.join()
        assert httpx.post(server.url + CHAT, json=HI).json()["choices"][0]["message"]["content"] == "second"
    peer.join()


def test_an_engine_lost_for_good_ends_liveness():
    with running_server(says("x")) as server:
        server.peer.die()
        server.service.link.lost("it died too often", for_good=True)
        answer = httpx.get(server.url + "/livez")
        assert answer.status_code == 503 and answer.json()["reason"] == "the engine is gone for good"


def test_a_slow_reader_does_not_hold_up_others_and_loses_nothing():
    ids = encode("a b c d e f ") * 20_000
    scripts = {"slow": Script(in_steps(ids, 600), reason="length"), "fast": Script(WORDS)}

    def script(request):
        return scripts["slow" if request.max_tokens > 5000 else "fast"]

    with running_server(script, v41_text(context_limit=500_000)) as server:
        body = {**STREAM, "max_tokens": len(ids)}
        with open_stream(server, body) as slow:
            time.sleep(0.3)  # the kernel's buffers are full by now
            begin = time.monotonic()
            assert httpx.post(server.url + CHAT, json=HI).status_code == 200
            assert time.monotonic() - begin < 1
            events = [json.loads(line[6:]) for line in slow.iter_lines() if line.startswith("data: {")]
        assert "".join(event["choices"][0]["delta"]["content"] for event in events) == "a b c d e f " * 20_000
        assert events[-1]["usage"]["completion_tokens"] == len(ids)


def test_many_streams_at_once_all_end():
    with running_server(says("one two three four five", size=1, step_s=0.003)) as server:
        answers = []
        threads = [
            threading.Thread(target=lambda: answers.append(httpx.post(server.url + CHAT, json=STREAM, timeout=10)))
            for _ in range(24)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [answer.text.count("[DONE]") for answer in answers] == [1] * 24
        wait_until(lambda: len(server.log()) == 24)
        assert server.service.admission.open == 0 and not server.service.link.calls
