"""The agent as a process under `serve`, or as a thread under `run` and `bench`."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import threading
from typing import NoReturn

from dsuf.errors import DsufError
from dsuf.kv.agent import Agent, AgentOptions

_PR_SET_PDEATHSIG = 1


def serve_agent(options: AgentOptions) -> NoReturn:
    """Main function of the agent process: serve until SIGTERM, or until the parent is gone."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the web process, which drains first
    if os.getppid() != parent:
        raise SystemExit(0)
    try:
        asyncio.run(_serve(options))
    except DsufError as error:
        print(f"dsuf kv agent: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from None
    raise SystemExit(0)


async def _serve(options: AgentOptions) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    agent = Agent(options)
    try:
        await agent.open()
        for line in agent.lines:
            print(line, file=sys.stderr, flush=True)
        await agent.run(stop)
    finally:
        await agent.close()


class AgentThread:
    """The same agent in this process; `start` returns when clients can connect."""

    def __init__(self, options: AgentOptions) -> None:
        self._options = options
        self._opened = threading.Event()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="dsuf-kv-agent", daemon=True)

    def start(self) -> None:
        """Raises what `Agent.open` raises."""
        self._thread.start()
        self._opened.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End it and wait for it."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        agent = Agent(self._options)
        try:
            await agent.open()
            self._opened.set()
            await agent.run(self._stop)
        except DsufError as error:
            self._failure = error
        finally:
            self._opened.set()
            await agent.close()
