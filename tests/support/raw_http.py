"""Bytes that are nearly HTTP, as a connection sends them: odd methods, paths, headers and bodies, cut off or broken."""

from __future__ import annotations

import json
import random
import socket
import struct

METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE", "CONNECT", "PRI", "get", "X" * 40)
PATHS = (
    "/v1/chat/completions", "//v1//chat/completions/", "/anthropic/v1/messages", "/%2e%2e/v1/models", "/v1/models/%00",
    "/v1/models/%ff%fe", "/v1/models/" + "a/" * 50, "*", "http://x/v1/models", "/readyz?x=%zz", "/demo?run", "/é", "",
    "/v1/models/deepseek-flash", "/metrics", "/openapi.json", "/beta/completions", "/load#x",
)  # fmt: skip
HEADERS = (
    "Content-Length: 5", "Content-Length: -1", "Content-Length: 99999999999999999999", "Content-Length: 0",
    "Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Expect: 100-continue", "Connection: close",
    "Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x", "Connection: Upgrade\r\nUpgrade: h2c", "Host:",
    "Host: x\r\nHost: y", "X: " + "a" * 70_000, "X-Request-Id: \xff\xfe", "Authorization: \xff", ": x", "X Y: z",
    "Content-Type: multipart/form-data; boundary=x", "Content-Encoding: gzip", "X\r\n folded", "Range: bytes=0-1",
    "Cookie: " + "a=b; " * 500, "x-session-id: \x01",
)  # fmt: skip
_ASKS = {"model": "deepseek-chat", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
BODY = json.dumps(_ASKS).encode()
BODIES = (b"", BODY, BODY[:20], b"5\r\nhello\r\n0\r\n\r\n", b"zz\r\n", b"0\r\n\r\n", b"f" * 16 + b"\r\nx")


def send_raw(port: int, seed: int) -> str:
    """Some requests over one connection; how it went: a status, or why there was none.

    Raises AssertionError for an answer that is not HTTP, or a 5xx.
    """
    rng = random.Random(seed)
    raw = b"".join(_request(rng) for _ in range(rng.choice((1, 1, 1, 2, 5))))
    piece = len(raw) if rng.random() < 0.8 else max(1, len(raw) // 20)
    answer = b""
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        connection.settimeout(rng.choice((0.02, 0.1, 0.2)))
        try:
            for at in range(0, len(raw), piece):
                connection.sendall(raw[at : at + piece])
            while rng.random() < 0.95 and (more := connection.recv(65_536)):
                answer += more
        except (TimeoutError, ConnectionError):
            pass
        if rng.random() < 0.1:  # hang up without a farewell
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert not answer or answer.startswith(b"HTTP/1.1 "), (seed, raw[:2000], answer[:500])
    assert b"HTTP/1.1 5" not in answer, (seed, raw[:2000], answer[:500])
    return answer[9:12].decode() or "no answer"


def _request(rng: random.Random) -> bytes:
    method, path = rng.choice((*METHODS, "GET", "GET", "POST", "POST", "POST")), rng.choice(PATHS)
    headers, body = rng.sample(HEADERS, rng.choice((0, 0, 1, 2, 4))), rng.choice(BODIES)
    if rng.random() < 0.5:
        headers.append(f"Content-Length: {len(body)}")
    version = rng.choice((*["HTTP/1.1"] * 8, "HTTP/1.0", "HTTP/2.0", "HTTP/9"))
    head = "\r\n".join((f"{method} {path} {version}", "Host: t", *headers))
    raw = head.encode("latin-1") + b"\r\n\r\n" + body
    if rng.random() < 0.1:
        raw = raw[: rng.randrange(len(raw))]
    if rng.random() < 0.1:
        at = rng.randrange(len(raw) + 1)
        raw = raw[:at] + rng.randbytes(rng.randint(1, 30)) + raw[at:]
    return raw
