"""The engine process of one server: started, watched, started again when it dies, stopped at the end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import multiprocessing.process
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import uvloop

from dsuf import wire
from dsuf.cli.child import own_process, start_deaf
from dsuf.cli.kv import AgentProcess
from dsuf.cli.live import progress, say
from dsuf.cli.session import class_map_of
from dsuf.engine.engine import Engine, Progress, open_engine
from dsuf.engine.options import EngineOptions
from dsuf.engine.service import serve_engine
from dsuf.errors import EngineGone
from dsuf.kv.client import WebClient
from dsuf.server.admin import SOCKET_NAME
from dsuf.server.app import build_app, serve
from dsuf.server.link import EngineLink
from dsuf.server.options import ServerOptions
from dsuf.server.prefixes import Prefixes
from dsuf.text.prompt import ChatText

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 16.0  # before a restart; doubled each time
RESTARTS, WITHIN_S = 5, 600.0
HANG_UP_S, STOP_WITHIN_S = 1.0, 5.0  # to end by itself after the pipe closed; after each signal
LOOK_EVERY_S = 1.0  # as often as the web process asks the engine for its status


class EngineProcess:
    """Runs `serve_engine` in a process of its own, so that steps never wait for HTTP work in this interpreter.

    One that is ready and says nothing for `silence_s` seconds hangs, and is killed; 0: however long it takes.
    """

    def __init__(
        self, socket_path: Path, options: EngineOptions, kv_socket: Path | None = None, silence_s: float = 0.0
    ) -> None:
        self.socket_path, self._options, self._kv_socket = socket_path, options, kv_socket
        self._silence_s, self._hung = silence_s, ""
        self._process: multiprocessing.process.BaseProcess | None = None
        self._deaths: list[float] = []
        self.was_ready = False  # an engine that was never ready is not started again: it would end the same way
        self._kept: int | None = None  # descriptor of memory that outlives an engine
        self.failure: EngineGone | None = None  # set when the restarts are used up

    def start(self) -> None:
        """Start it; it connects to the socket as soon as somebody listens."""
        opened = functools.partial(_open, self._options, self._kv_socket)
        process = own_process("dsuf-engine", serve_engine, self.socket_path, opened)
        self._process = process  # before it is there: an interrupt on the way leaves one that `stop` can end
        start_deaf(process)  # it goes on until the web process has drained

    def keep(self, memory: str | int | float | None) -> None:
        """Hold host memory that the engine filled (a path under /proc), so that the next one need not fill it again."""
        if not isinstance(memory, str) or self._kept is not None:
            return
        with contextlib.suppress(OSError):  # the engine ended meanwhile
            self._kept = os.open(memory, os.O_RDWR | os.O_CLOEXEC)
            kept = Path(f"/proc/{os.getpid()}/fd/{self._kept}")
            self._options = replace(self._options, engram_memory=kept)

    async def watch(self, link: EngineLink, draining: Callable[[], bool]) -> None:
        """Tell `link` of each death and start anew; ends the server by SIGTERM when the restarts are used up.

        While the server is `draining` none is started: a service manager's SIGTERM reaches the engine as well.
        """
        guard = asyncio.create_task(self._kill_when_silent(link)) if self._silence_s else None
        try:
            await self._restart(link, draining)
        finally:
            if guard is not None:
                guard.cancel()

    async def _restart(self, link: EngineLink, draining: Callable[[], bool]) -> None:
        while True:
            await self._ended()
            why, self._hung = self._hung or f"the engine process ended with exit status {self._process.exitcode}", ""
            now = time.monotonic()
            self._deaths = [death for death in self._deaths if now - death < WITHIN_S] + [now]
            used_up = len(self._deaths) > RESTARTS
            link.lost(why, for_good=used_up)
            if not self.was_ready or draining():
                return  # the server ends, with the engine's own error if it was never ready
            if used_up:
                self.failure = EngineGone(
                    f"The engine process ended {len(self._deaths)} times in {WITHIN_S / 60:.0f} minutes; its messages "
                    "are above. Correct what they name and start the server again."
                )
                signal.raise_signal(signal.SIGTERM)
                return
            wait_s = min(FIRST_WAIT_S * 2 ** (len(self._deaths) - 1), LONGEST_WAIT_S)
            say(f"{why}; it is started again in {wait_s:.0f} s")
            await asyncio.sleep(wait_s)
            if draining():
                return
            self.start()

    async def _kill_when_silent(self, link: EngineLink) -> None:
        """Count looks, not time: while this process stood still, it heard nothing either."""
        heard = looks = 0
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            silent = link.state == "ready" and link.heard == heard
            heard, looks = link.heard, looks + 1 if silent else 0
            if looks * LOOK_EVERY_S >= self._silence_s:
                self._hung = f"the engine process hung: it said nothing for {self._silence_s:g} s, and was killed"
                link.hang_up(self._hung)
                self._process.kill()

    async def _ended(self) -> None:
        await wire.readable(self._process.sentinel)
        self._process.join()

    def stop(self) -> None:
        """End it: it stops by itself when the pipe is closed, else by SIGTERM, else by SIGKILL."""
        if self._process is None or self._process.pid is None:
            return
        self._process.join(HANG_UP_S)
        for end in (self._process.terminate, self._process.kill):
            if self._process.exitcode is not None:
                return
            end()
            self._process.join(STOP_WITHIN_S)


def serve_with_engine(
    process: EngineProcess,
    text: ChatText,
    options: ServerOptions,
    sock: socket.socket,
    ready_line: str,
    agent: AgentProcess | None = None,
) -> int:
    """Start engine and kv agent, serve HTTP on `sock` until a signal; the exit code. Prints `ready_line` once.

    Raises the engine's own error when it cannot start, EngineGone when its restarts are used up.
    """
    link = EngineLink(process.socket_path)
    prefixes = Prefixes(WebClient(agent.options.socket_path)) if agent is not None else None
    app = build_app(link, text, options, prefixes=prefixes)
    service = app.state.service

    def on_ready() -> None:
        process.was_ready = True
        process.keep(link.status.info.get("engram_memory") if link.status is not None else None)
        print(ready_line, flush=True)

    async def until_stopped() -> int:
        watched = process.watch(link, lambda: service.draining)
        tasks = [asyncio.create_task(watched), asyncio.create_task(_show_loading(link))]
        if agent is not None:
            watched = agent.watch(lambda: service.draining)
            tasks += [asyncio.create_task(watched), asyncio.create_task(agent.kill_when_silent(prefixes.answers))]
        try:
            return await serve(app, sock, on_ready, process.socket_path.with_name(SOCKET_NAME))
        finally:
            for task in tasks:
                task.cancel()

    try:
        if agent is not None:
            agent.start()
        process.start()
        code = asyncio.Runner(loop_factory=uvloop.new_event_loop).run(until_stopped())
    finally:
        process.stop()
        if agent is not None:
            agent.stop()
    for failure in (process.failure, agent.failure if agent is not None else None):
        if failure is not None:
            raise failure
    return code


async def _show_loading(link: EngineLink) -> None:
    with progress("loading the engine", "%") as update:
        while link.state == "starting":
            if link.status is not None:
                update(round(link.status.loaded * 100), 100)
            await asyncio.sleep(0.1)


def _open(options: EngineOptions, kv_socket: Path | None, progress: Progress) -> Engine:
    """In the engine process."""
    from dsuf.engine.kv_tier import connect_tier
    from dsuf.text.grammar import checkpoint_grammars

    tier = functools.partial(connect_tier, kv_socket) if kv_socket is not None else None
    engine = open_engine(options, progress, class_map_of, checkpoint_grammars, tier)
    engine.backend.warm_up()
    gc.collect()
    gc.freeze()  # collections look at what requests leave, not at everything that was imported
    return engine
