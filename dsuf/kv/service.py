"""The agent's Unix socket for this server's web and engine, and the one that hands out the arena's descriptor.

A client that ends takes its requests with it, and what it was writing. A half-written entry of a process that still
lives, though its connection broke, keeps its memory until the process ends: it may be writing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import struct
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsuf import wire
from dsuf.kv import messages as m

if TYPE_CHECKING:
    from dsuf.kv.agent import Agent

MAX_RUNNING = 10_000  # questions of one client at once
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def memory_socket(socket_path: Path) -> Path:
    """Where the descriptor is to be had."""
    return socket_path.with_name(socket_path.name + ".m")


class Service:
    """Serves an agent's clients."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._serving: set[asyncio.Task[Any]] = set()
        self._connections: set[wire.AsyncConnection] = set()
        self._loop = asyncio.get_running_loop()

    async def open(self, path: Path) -> None:
        """Listen. Raises WireError."""
        self._paths = (memory_socket(path), path)
        for stale in self._paths:
            stale.unlink(missing_ok=True)
        self._memory = wire.listen(self._paths[0])
        self._memory.setblocking(False)
        self._keep(self._give_memory())
        self._server = await asyncio.start_unix_server(self._serve, sock=wire.listen(path))

    async def close(self) -> None:
        """Hang up on everybody."""
        self._server.close()
        await asyncio.gather(*(connection.close() for connection in self._connections))
        await asyncio.sleep(0)  # the tasks that served them end by themselves
        for task in self._tasks - self._serving:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._memory.close()
        for path in self._paths:
            path.unlink(missing_ok=True)

    def _keep(self, work: Awaitable[Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _give_memory(self) -> None:
        while True:
            sock, _ = await self._loop.sock_accept(self._memory)
            with sock, contextlib.suppress(OSError):
                if _credentials(sock)[1] == os.getuid():
                    socket.send_fds(sock, [b"m"], [self._agent.arena.fd])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving.add(self._keep(asyncio.current_task()))
        connection = wire.AsyncConnection(reader, writer, m.ToAgent)
        self._connections.add(connection)
        pid, _, _ = _credentials(writer.get_extra_info("socket"))
        client, running = f"client {next(self._numbers)}", set()
        arena, store = self._agent.arena, self._agent.store
        try:
            await connection.send(
                m.Geometry(
                    arena.nbytes, arena.slot_bytes, arena.slots, store.snapshot_slots, self._agent.options.backend
                )
            )
            while (message := await connection.receive()) is not None and len(running) < MAX_RUNNING:
                task = asyncio.create_task(self._answer(connection, message, client))
                running.add(task)
                task.add_done_callback(running.discard)
        except (OSError, wire.WireError):
            pass
        finally:
            for task in list(running):
                task.cancel()
            self._agent.desk.client_gone(client)
            self._keep(self._drop_writes(client, pid))
            self._connections.discard(connection)
            self._serving.discard(asyncio.current_task())
            await connection.close()

    async def _drop_writes(self, client: str, pid: int) -> None:
        """Free what the client left half-written, once it cannot write any more."""
        if pid != os.getpid():
            await _ended(pid)
        self._agent.store.drop_writer(client)

    async def _answer(self, connection: wire.AsyncConnection, message: Any, client: str) -> None:
        answer = await self._reply(message, client)
        if answer is not None:
            with contextlib.suppress(OSError):
                await connection.send(answer)

    async def _reply(self, message: Any, client: str) -> Any:
        desk = self._agent.desk
        match message:
            case m.Lookup():
                return await desk.lookup(message, client)
            case m.Claim():
                return await desk.claim(message, client)
            case m.Release():
                return m.Done(message.id, desk.release(message.request))
            case m.Reserve():
                return desk.reserve(message, client)
            case m.Ready():
                return await desk.saves.ready(message, client)
            case m.Alias():
                return await desk.alias(message)
            case m.Abandon():
                return desk.saves.abandon(message.entry, client)
            case m.Forget():
                return desk.forget(message.request, client)
            case m.Prefilled():
                return self._agent.rates.prefilled(message.tokens_per_s)
            case m.Leave():
                return await self._agent.leave(message.draining)
            case m.StatusAsk():
                return m.State(message.id, self._agent.numbers(), self._agent.lines)


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    """pid, uid and gid of the process at the other end."""
    return _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))


async def _ended(pid: int) -> None:
    """Wait until a process is gone."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        await wire.readable(pidfd)
    finally:
        os.close(pidfd)
