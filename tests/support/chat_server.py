"""A tiny HTTP server in a thread that plays a chat server: what it streams and counts is given by the test."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def event(text: str | None = None, usage: int | None = None, finish: str | None = None) -> bytes:
    """One SSE event of a chat stream."""
    delta = {} if text is None else {"content": text}
    body = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    if usage is not None:
        body["usage"] = {"completion_tokens": usage}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


class PlayedServer:
    """`pieces` are written one by one with `gap_s` between; `status` other than 200 sends `error` instead."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.gap_s = 0.0
        self.status, self.error = 200, ""
        self.metrics: list[str] = []  # one text a reading, the last one stays
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.url = ""


@contextmanager
def played_server() -> Iterator[PlayedServer]:
    """Serve on a free port of loopback until the block ends."""
    played = PlayedServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            played.requests.append((self.path, dict(self.headers), body))
            self.send_response(played.status)
            self.end_headers()
            if played.status != 200:
                self.wfile.write(json.dumps({"error": {"message": played.error}}).encode())
                return
            for piece in played.pieces:
                self.wfile.write(piece)
                self.wfile.flush()
                time.sleep(played.gap_s)

        def do_GET(self) -> None:
            texts = played.metrics
            text = texts.pop(0) if len(texts) > 1 else (texts[0] if texts else "")
            self.send_response(200 if text else 404)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    played.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield played
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
