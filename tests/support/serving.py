"""A real server on a real port over a scripted engine, in threads of this process; and V4.1's text side, made once."""

from __future__ import annotations

import asyncio
import functools
import json
import signal
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import uvloop

from dsuf.engine.messages import Request
from dsuf.server.app import bind, build_app, serve
from dsuf.server.link import EngineLink
from dsuf.server.options import ServerOptions
from dsuf.spec import Spec
from dsuf.text.prompt import ChatText, GenerationDefaults
from dsuf.text.tokenizer import v41_tokenizer_json
from dsuf.text.vocabulary import Vocabulary, read_vocabulary
from tests.support.peer import Peer, Script


@functools.cache
def v41_spec() -> Spec:
    return Spec.load(Path(str(files("dsuf") / "configs" / "v41-flash.json")))


@functools.cache
def v41_vocabulary() -> Vocabulary:
    return read_vocabulary(v41_tokenizer_json().decode(), v41_spec())


def v41_text(context_limit: int = 4096, defaults: GenerationDefaults | None = None, **options: Any) -> ChatText:
    return ChatText(v41_vocabulary(), context_limit=context_limit, defaults=defaults or GenerationDefaults(), **options)


def encode(text: str) -> list[int]:
    """Ids of a model's output; special tokens by their spelling."""
    return v41_vocabulary().tokenizer.encode(text)


def in_steps(ids: list[int], size: int = 3) -> list[list[int]]:
    return split(ids, [size])


def split(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """`ids` cut into pieces of the given sizes, the last of which repeats."""
    pieces, at = [], 0
    while at < len(ids):
        size = sizes[min(len(pieces), len(sizes) - 1)]
        pieces.append(ids[at : at + size])
        at += size
    return pieces


def says(text: str, size: int = 3, **script: Any) -> Callable[[Request], Script]:
    """Every request gets this answer."""
    return lambda request: Script(in_steps(encode(text), size), **script)


class Server:
    """What a test can see of a running server."""

    def __init__(self, peer: Peer, port: int, service: Any, lines: list[str]) -> None:
        self.peer, self.port, self.service, self._lines = peer, port, service, lines
        self.url = f"http://127.0.0.1:{port}"

    def log(self, event: str = "request_end") -> list[dict[str, Any]]:
        return [line for line in map(json.loads, self._lines) if line["event"] == event]

    def forget(self) -> None:
        """What was logged and asked so far."""
        self._lines.clear()
        self.peer.requests.clear()

    def request_end(self, count: int = 1) -> dict[str, Any]:
        """The count-th request_end line, waited for."""
        wait_until(lambda: len(self.log()) >= count)
        return self.log()[count - 1]


@contextmanager
def running_server(
    script: Callable[[Request], Script],
    text: ChatText | None = None,
    options: ServerOptions | None = None,
    engine_ready: bool = True,
    expect_faults: int = 0,
) -> Iterator[Server]:
    """Serve until the block ends, then drain; a fault of the server that was not expected fails the test."""
    lines: list[str] = []
    options = options or ServerOptions(drain_delay_s=0, drain_timeout_s=2)
    with tempfile.TemporaryDirectory(prefix="dsuf-") as folder:
        path = Path(folder) / "engine.sock"
        app = build_app(EngineLink(path), text or v41_text(), options, lines.append)
        sock = bind("127.0.0.1", 0)
        loop = uvloop.new_event_loop()
        result: list[Any] = []

        def run() -> None:
            asyncio.set_event_loop(loop)
            try:
                result.append(loop.run_until_complete(serve(app, sock)))
            except Exception as error:
                result.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        peer = Peer(path, script, engine_ready)
        server = Server(peer, sock.getsockname()[1], app.state.service, lines)
        wait_until(lambda: result or app.state.service.link.status is not None, 30)  # machines stand still at times
        assert not result, f"the server ended at once: {result[0]!r}"
        try:
            yield server
        finally:
            if thread.is_alive():
                loop.call_soon_threadsafe(app.state.drain.on_signal, signal.SIGINT)
            thread.join(10)
            assert not thread.is_alive(), "the server did not stop"
            peer.join()
            loop.close()
        server.result = result[0]
    assert len(server.log("fault")) == expect_faults, server.log("fault")


def spawned_by(pid: int) -> list[int]:
    """The processes that a server has started for itself: kv agent and engine, those of them that run now."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def status_of(url: str) -> int:
    """The HTTP status of a GET."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.002)
