"""Request heads that are too long or do not come, and connections that wait for the next request."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest

from tests.support.serving import running_server, says, wait_until

HI = {"model": "deepseek-chat", "messages": [{"role": "user", "content": "hi"}]}


def request(body=HI, extra=b""):
    raw = json.dumps(body).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n%b" % (extra, len(raw), raw)


@pytest.fixture(scope="module")
def server():
    with running_server(says("yes")) as running:
        yield running


@pytest.fixture
def sock(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as opened:
        yield opened


def rest(sock):
    data = b""
    while part := sock.recv(1 << 16):
        data += part
    return data


def test_long_headers_within_the_limit_are_fine(sock):
    sock.sendall(request(extra=b"x-long: " + b"a" * 50_000 + b"\r\nconnection: close\r\n"))
    assert rest(sock).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("line", [b"x-more: 1\r\n", b"x-endless: " + b"a" * 1000])
def test_endless_headers_are_answered_431_and_cut_off(sock, line):
    sock.sendall(b"POST / HTTP/1.1\r\n")
    try:
        for _ in range(20_000):
            sock.sendall(line)
    except OSError:
        return  # cut off while it was still sending
    assert rest(sock).startswith(b"HTTP/1.1 431")


def test_a_large_body_is_not_a_large_head(sock):
    body = {**HI, "messages": [{"role": "user", "content": "word " * 700}], "metadata": {"x": "y" * 200_000}}
    sock.sendall(request(body, b"connection: close\r\n"))
    assert rest(sock).startswith(b"HTTP/1.1 200")


def test_many_requests_on_one_connection_do_not_add_up_to_a_large_head(sock):
    padding = b"x-pad: " + b"a" * 20_000 + b"\r\n"
    for _ in range(5):
        sock.sendall(request(extra=padding))
        data = b""
        while b'"choices"' not in data:
            data += sock.recv(1 << 16)
        assert data.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/comp", b"POST / HTTP/1.1\r\nhost: x\r\nx-a: b"])
def test_a_head_that_does_not_come_ends_the_connection(monkeypatch, sent):
    monkeypatch.setattr("dsuf.server.connection._HEAD_S", 0.2)
    with running_server(says("yes")) as server:
        for before in (b"", request()):
            if before and not sent:
                continue  # an idle connection after an answer is kept for the next request
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
                if before:
                    sock.sendall(before)
                    assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")
                sock.sendall(sent)
                with contextlib.suppress(ConnectionResetError):
                    assert rest(sock) == b""
        wait_until(lambda: not server.service.exchanges)


def test_a_stream_may_last_longer_than_a_head_may_take(monkeypatch):
    monkeypatch.setattr("dsuf.server.connection._HEAD_S", 0.2)
    slow = says("one two three four five", size=1, step_s=0.15)
    with running_server(slow) as server, socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(request({**HI, "stream": True}, b"connection: close\r\n"))
        assert b"[DONE]" in rest(sock)
