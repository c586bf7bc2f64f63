"""The application and the process that serves it: `build_app`, `bind`, `run`.

Starlette on uvicorn with uvloop and httptools, one worker: the engine is another process. On a signal uvicorn would
close its socket first and end by raising the signal again, so signals are ours: the server answers while it drains.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from dsuf.errors import DsufError, EngineGone, EnvironmentProblem
from dsuf.server.admin import Admin
from dsuf.server.connection import Connection
from dsuf.server.drain import Drain
from dsuf.server.front import Front, problem_response
from dsuf.server.link import EngineLink
from dsuf.server.options import ServerOptions
from dsuf.server.prefixes import Prefixes
from dsuf.server.problems import HttpProblem
from dsuf.server.routes import routes
from dsuf.server.service import Service, to_stderr
from dsuf.text.prompt import ChatText

_BACKLOG = 2048
_KEEP_ALIVE_S = 75
_STATUS_EVERY_S = 1.0


def build_app(
    link: EngineLink,
    text: ChatText,
    options: ServerOptions | None = None,
    write_line: Callable[[str], None] = to_stderr,
    prefixes: Prefixes | None = None,
) -> Starlette:
    """The application over one engine, with saved prefixes if there are any. Log lines go to `write_line`."""
    service = Service(link, text, options or ServerOptions(), write_line, int(time.time()), prefixes)

    app = Starlette(
        routes=routes(),
        middleware=[Middleware(Front, service.options, service.log)],
        exception_handlers={kind: problem_response for kind in (HTTPException, HttpProblem, DsufError)},
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def bind(host: str, port: int) -> socket.socket:
    """A listening address, taken before anything slow is loaded. Port 0 takes a free one.

    Raises EnvironmentProblem when it cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        sock.close()
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise EnvironmentProblem(
                f"port {port} of {host} is taken by another program. Stop it, or choose a free one with --port."
            ) from None
        raise EnvironmentProblem(f"cannot listen on {host} port {port}: {error}. Change --host or --port.") from None
    return sock


def run(
    app: Starlette,
    sock: socket.socket,
    on_ready: Callable[[], None] | None = None,
    admin_path: Path | None = None,
) -> int:
    """Serve until a signal, or an order over the socket at `admin_path`; the exit code.

    `on_ready` is called once, when the engine is ready.
    SIGTERM and SIGINT drain, a second one stops at once. Raises the engine's error when it fails before it was ready.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(app, sock, on_ready, admin_path))


async def serve(
    app: Starlette,
    sock: socket.socket,
    on_ready: Callable[[], None] | None = None,
    admin_path: Path | None = None,
) -> int:
    """`run` inside a loop; signals are handled in the main thread only."""
    service: Service = app.state.service
    server = _Server(
        uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
    )
    app.state.drain = Drain(service, server.stop)
    start = _Start(service, on_ready, server.stop)
    service.link.on_change = start.engine_changed
    _allow_many_files()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, app.state.drain.on_signal, number)
    async with contextlib.AsyncExitStack() as stack:
        await service.link.open()
        stack.push_async_callback(service.link.close)
        if admin_path is not None:
            host, port = sock.getsockname()[:2]
            admin = Admin(admin_path, service, app.state.drain, f"{host}:{port}", os.getpid())
            await admin.open()
            stack.push_async_callback(admin.close)
        asking = asyncio.create_task(_ask_status(service.link))
        stack.callback(asking.cancel)
        _spare_the_collector()
        await server.serve(sockets=[sock])
    # a service manager's SIGTERM ends an engine that is starting as well, which then says nothing
    if start.failure is not None and not (service.draining and isinstance(start.failure, EngineGone)):
        raise start.failure
    return 0


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        """Close the listening socket and idle connections, then end."""
        self.should_exit = True


async def _ask_status(link: EngineLink) -> None:
    """Keep the engine's own counts fresh, for /load and /metrics."""
    while True:
        await asyncio.sleep(_STATUS_EVERY_S)
        if link.state == "ready":
            link.ask_status()


def _allow_many_files() -> None:
    """A connection is a file, and many systems start processes with room for 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _spare_the_collector() -> None:
    """Keep the vocabulary and the modules out of garbage collections, which would look at them again and again."""
    gc.collect()
    gc.freeze()


class _Start:
    """Watches the engine: says once that it is ready, and ends the server when it never will be."""

    def __init__(self, service: Service, on_ready: Callable[[], None] | None, stop: Callable[[], None]) -> None:
        self.failure: DsufError | None = None
        self._service, self._on_ready, self._stop = service, on_ready, stop
        self._was_ready = False

    def engine_changed(self) -> None:
        """The link's state is another one."""
        link = self._service.link
        if link.state == "ready" and not self._was_ready:
            self._was_ready = True
            if self._on_ready is not None:
                self._on_ready()
        elif link.state == "gone" and not self._service.draining:
            self._service.log({"event": "engine_gone", "error": str(link.failure)})
            if not self._was_ready:
                self.failure = link.failure
                self._stop()
