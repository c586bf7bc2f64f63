"""What goes wrong before the engine: statuses and the one envelope."""

from __future__ import annotations

import socket

import httpx
import pytest

from dsuf.engine.messages import Rejected
from dsuf.server.options import ServerOptions
from tests.support.peer import Script
from tests.support.serving import running_server, says, v41_text

HI = {"model": "deepseek-chat", "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server():
    options = ServerOptions(max_body_bytes=20_000, drain_delay_s=0)
    with running_server(says("never"), v41_text(context_limit=64), options) as running:
        yield running
        assert not running.peer.requests


def problem(answer, status, kind="invalid_request_error"):
    """The message of an error answer, after its shape was checked."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["param"] is None
    assert error["type"] == kind and error["message"]
    assert "Traceback" not in answer.text
    return error["message"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": "gpt-5"}, "supported API model names are"),
        ({"messages": []}, ""),
        ({"temperature": 3}, "temperature"),
        ({"seed": -1}, "invalid request body"),
        ({"n": 2}, "n value"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"top_k": -7}, "top_k"),
        ({"min_tokens": 10**9}, "min_tokens"),
        ({"messages": [{"role": "user", "content": "word " * 200}]}, "maximum context length is 64 tokens"),
        ({"stop": ["x"] * 17}, "Stop string"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
                    }
                ]
            },
            "image input is not supported by this build",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_bodies_are_400_even_for_streams(server, change, told, stream):
    answer = httpx.post(server.url + CHAT, json={**HI, "stream": stream, **change})
    assert told in problem(answer, 400)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff\xfe", b'{"model":', b"[" * 10_000])
def test_malformed_json_is_400(server, raw):
    assert "invalid" in problem(httpx.post(server.url + CHAT, content=raw), 400)


def test_a_large_body_is_413(server):
    assert "20000 bytes" in problem(httpx.post(server.url + CHAT, content=b"x" * 30_000), 413)

    def parts():
        for _ in range(30):
            yield b"x" * 1000

    assert "20000 bytes" in problem(httpx.post(server.url + CHAT, content=parts()), 413)


@pytest.mark.parametrize("path", ["/", "/v1", "/nowhere", "/v1/files", "/files", "/v1/responses/resp_1", "/v1/chat"])
def test_unknown_paths_are_404(server, path):
    assert "no such path" in problem(httpx.post(server.url + path, json=HI), 404)
    problem(httpx.get(server.url + path), 404)


@pytest.mark.parametrize(
    ("method", "path"), [("GET", CHAT), ("PUT", CHAT), ("POST", "/v1/models"), ("DELETE", "/livez")]
)
def test_a_wrong_method_is_405(server, method, path):
    answer = httpx.request(method, server.url + path)
    problem(answer, 405)
    assert answer.headers["allow"]


def test_an_unknown_model_is_404_by_get(server):
    assert "deepseek-v4.1-flash" in problem(httpx.get(server.url + "/v1/models/gpt-5"), 404)


def test_a_client_that_breaks_off_its_body_leaves_nothing_behind(server):
    before = len(server.log())
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
    line = server.request_end(before + 1)
    assert line["status"] == "cancelled" and server.service.admission.open == 0


def test_keys_guard_everything_but_health_and_metrics():
    options = ServerOptions(api_keys=("first", "sécond"), drain_delay_s=0)
    with running_server(says("yes"), options=options) as server:
        for path in ("/v1/chat/completions", "/chat/completions", "//beta//chat/completions"):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "firs"}, {"authorization": "first"}):
                answer = httpx.post(server.url + path, json=HI, headers=headers)
                assert "API key" in problem(answer, 401, "authentication_error")
                assert answer.headers["www-authenticate"] == "Bearer" and answer.headers["x-request-id"]
        for path in ("/v1/models", "/models", "/version", "/nowhere"):
            problem(httpx.get(server.url + path), 401, "authentication_error")
        for path in ("/livez", "/readyz", "/health", "/metrics"):
            assert httpx.get(server.url + path).status_code == 200
        for headers in (
            {"authorization": "Bearer first"},
            {"authorization": "bearer first"},
            {"x-api-key": "first"},
            {b"x-api-key": "sécond".encode()},
        ):
            assert httpx.post(server.url + CHAT, json=HI, headers=headers).status_code == 200


def test_too_many_waiting_requests_are_429_and_soon_welcome_again():
    options = ServerOptions(max_queued_requests=1, drain_delay_s=0)
    scripts = iter([Script(queue_s=0.4), Script()])
    with running_server(lambda request: next(scripts), options=options) as server:
        with httpx.stream("POST", server.url + CHAT, json={**HI, "stream": True}) as first:
            answer = httpx.post(server.url + CHAT, json=HI)
            message = problem(answer, 429, "rate_limit_error")
            assert 1 <= int(answer.headers["retry-after"]) <= 10
            assert not any(word in message for word in ("quota", "balance"))
            first.read()
        assert httpx.post(server.url + CHAT, json=HI).status_code == 200
        assert 'admission_rejections_total{model_name="deepseek-v4.1-flash",status="429"} 1.0' in (
            httpx.get(server.url + "/metrics").text
        )


def test_what_the_engine_rejects_keeps_its_status():
    def script(request):
        return Script(rejects=Rejected(request.id, "PromptError", "token id 7 is out of range"))

    with running_server(script) as server:
        assert "out of range" in problem(httpx.post(server.url + CHAT, json=HI), 400)
        assert server.request_end()["status"] == "rejected"


def test_a_parser_fault_is_a_500_that_tells_nothing(monkeypatch):
    def broken(self, event):
        raise ZeroDivisionError("inner detail")

    with running_server(says("yes"), expect_faults=2) as server:
        monkeypatch.setattr("dsuf.text.output.Reply.tokens", broken)
        answer = httpx.post(server.url + CHAT, json=HI)
        assert "inner detail" not in problem(answer, 500, "server_error")
        with (
            pytest.raises(httpx.RemoteProtocolError),
            httpx.stream("POST", server.url + CHAT, json={**HI, "stream": True}) as stream,
        ):
            for line in stream.iter_lines():
                assert "inner detail" not in line and "[DONE]" not in line
        assert server.log("fault")[0]["request_id"] == server.request_end()["request_id"]
