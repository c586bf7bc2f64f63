"""`python -m tests.support.load_servers STACK FOLDER RATE`: one server process of the load measurement.

`raw` is asyncio with httptools alone, `starlette` a streaming response on uvicorn with a timer for each stream: what a
chunk costs where nothing is parsed, counted or limited. `dsuf` is our server over `load_engine`. All on uvloop. Prints
its port.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httptools
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from dsuf.server.app import bind, build_app, run
from dsuf.server.link import EngineLink
from dsuf.server.options import ServerOptions
from tests.support.serving import encode, v41_text

CHUNK = b"data: " + b"x" * 254 + b"\n\n"  # as long as one event of a chat stream
PATH = "/v1/chat/completions"
SIX = " one two three four five six"


class _Raw(asyncio.Protocol):
    """One connection of the raw server."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport, self.parser = transport, httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_complete(self) -> None:
        self.task = asyncio.ensure_future(self.stream())

    def connection_lost(self, error: Exception | None) -> None:
        self.task.cancel()

    async def stream(self) -> None:
        self.transport.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        async for chunk in paced(self.rate):
            self.transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))


async def paced(rate: float) -> AsyncIterator[bytes]:
    """A chunk every 1 / rate seconds, without end."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        due = max(due + 1 / rate, loop.time())
        await asyncio.sleep(due - loop.time())
        yield CHUNK


async def _serve_raw(rate: float) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: _Raw(rate), sock=bind("127.0.0.1", 0))
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def _serve_starlette(rate: float) -> None:
    async def answer(request: Request) -> StreamingResponse:
        await request.body()
        return StreamingResponse(paced(rate))

    sock = bind("127.0.0.1", 0)
    print(sock.getsockname()[1], flush=True)
    app = Starlette(routes=[Route(PATH, answer, methods=["POST"])])
    config = uvicorn.Config(app, http="httptools", loop="uvloop", ws="none", log_config=None, access_log=False)
    uvicorn.Server(config).run([sock])


def _serve_dsuf(rate: float, folder: Path) -> None:
    path = folder / "engine.sock"
    command = [sys.executable, "-m", "tests.support.load_engine", str(path), str(rate), json.dumps(encode(SIX))]
    app = build_app(EngineLink(path), v41_text(1 << 20), ServerOptions(max_queued_requests=100_000, drain_delay_s=0))
    sock = bind("127.0.0.1", 0)
    engine = subprocess.Popen(command)
    try:
        run(app, sock, lambda: print(sock.getsockname()[1], flush=True))
    finally:
        engine.kill()
        engine.wait()


def main() -> None:
    stack, folder, rate = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    if stack == "raw":
        uvloop.run(_serve_raw(rate))
    elif stack == "starlette":
        _serve_starlette(rate)
    else:
        _serve_dsuf(rate, folder)


if __name__ == "__main__":
    main()
