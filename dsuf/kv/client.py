"""The agent's clients: `EngineClient` for a thread that must not wait, `WebClient` for asyncio.

A lost agent is no error: every question in flight and every later one is answered with `Nothing` until the connection
is made again, and the engine computes. Nothing may be written to the arena once the connection is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
import os
import socket
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from dsuf import wire
from dsuf.kv import messages as m
from dsuf.kv.names import ids_bytes
from dsuf.kv.service import memory_socket

RETRY_S = 1.0
LOOKUP_S = 1.5  # a look-up connects and leases at a peer; the pull has a deadline of its own
ALIAS_S = 0.5
_GONE = "the kv agent is not there"


class EngineClient:
    """The engine's way to the agent: questions return a Future that is answered by a reader thread.

    `memory` is the arena as uint8 [nbytes], None while there is no agent. Made once; connects by itself, and again.
    """

    def __init__(self, socket_path: Path) -> None:
        self.memory: np.ndarray | None = None
        self.view: memoryview | None = None  # the same bytes
        self.geometry: m.Geometry | None = None
        self._path = socket_path
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {}
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._connection: wire.Connection | None = None
        self._tried_s = float("-inf")
        self._answered = threading.Event()

    @property
    def connected(self) -> bool:
        """Whether there is an agent; tries to connect, at most once a second."""
        return self.connect(RETRY_S)

    def connect(self, pause_s: float = 0.0) -> bool:
        """Whether there is an agent; tries to connect unless it was tried less than `pause_s` ago."""
        if self._connection is None:
            with self._sending:
                if self._connection is None and time.monotonic() - self._tried_s >= pause_s:
                    self._tried_s = time.monotonic()
                    with contextlib.suppress(OSError, wire.WireError):
                        self._connect()
        return self._connection is not None

    def lookup_ids(self, request: str, tenant: str, ids: list[int]) -> Future[m.Found | m.Nothing]:
        """The longest saved prefix of these ids, for a caller that has no text."""
        return self._ask(lambda number: m.Lookup(number, request, tenant, ids=ids_bytes(ids)))

    def claim(self, request: str) -> Future[m.Claimed | m.Nothing]:
        """What was found for a request, once its bytes are in the arena."""
        return self._ask(lambda number: m.Claim(number, request))

    def release(self, request: str) -> Future[m.Done | m.Nothing]:
        """The claimed bytes were copied out; `ok` says whether they stood still until now."""
        return self._ask(lambda number: m.Release(number, request))

    def reserve(self, ask: m.Reserve) -> Future[m.Reserved | m.Nothing]:
        """Room for a prefix; the id in `ask` is filled in."""
        fields = {name: getattr(ask, name) for name in ask.__struct_fields__ if name != "id"}
        return self._ask(lambda number: m.Reserve(number, **fields))

    def ready(self, entry: int) -> Future[m.Done | m.Nothing]:
        """A reserved entry is filled."""
        return self._ask(lambda number: m.Ready(number, entry))

    def status(self) -> Future[m.State | m.Nothing]:
        """Counters."""
        return self._ask(m.StatusAsk)

    def tell(self, message: m.Abandon | m.Forget | m.Prefilled) -> None:
        """Say something that has no answer."""
        connection = self._connection
        if connection is not None:
            self._send(connection, message)

    def wait(self, seconds: float) -> None:
        """Until an answer comes, or so long."""
        self._answered.wait(seconds)
        self._answered.clear()

    def slots(self, numbers: bytes) -> np.ndarray:
        """uint8 [n, slot_bytes]: a copy of these slots, in order."""
        return self.pages()[np.frombuffer(numbers, "<u4")]

    def pages(self) -> np.ndarray:
        """The arena as uint8 [slots, slot_bytes], to be read and written."""
        geometry = self.geometry
        return self.memory[: geometry.slots * geometry.slot_bytes].reshape(geometry.slots, geometry.slot_bytes)

    def close(self) -> None:
        """Hang up: what was half-written is freed, what was claimed is let go."""
        if self._connection is not None:
            self._lost(self._connection)

    def _connect(self) -> None:
        connection = wire.connect(self._path, m.FromAgent, timeout_s=0.0)
        try:
            geometry = connection.receive()
            if not isinstance(geometry, m.Geometry):
                raise wire.WireError("the kv agent hung up at once.")
            self.view = memoryview(_map_arena(memory_socket(self._path), geometry.nbytes))
            self.memory = np.frombuffer(self.view, np.uint8)
        except BaseException:
            connection.close()
            raise
        self.geometry, self._connection = geometry, connection
        threading.Thread(target=self._receive, args=(connection,), name="dsuf-kv-client", daemon=True).start()

    def _ask(self, make: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if not self.connected:
            future.set_result(m.Nothing(0, "agent", _GONE))
            return future
        number, connection = next(self._numbers), self._connection
        with self._lock:
            self._waiting[number] = future
        self._send(connection, make(number))
        return future

    def _send(self, connection: wire.Connection | None, message: Any) -> None:
        try:
            if connection is None:
                raise OSError(_GONE)
            with self._sending:
                connection.send(message)
        except (OSError, wire.WireError):
            self._lost(connection)

    def _receive(self, connection: wire.Connection) -> None:
        with contextlib.suppress(OSError, wire.WireError):
            while (message := connection.receive()) is not None:
                with self._lock:
                    future = self._waiting.pop(message.id, None)
                if future is not None and future.set_running_or_notify_cancel():
                    future.set_result(message)
                self._answered.set()
        self._lost(connection)

    def _lost(self, connection: wire.Connection | None) -> None:
        with self._lock:
            if connection is self._connection:
                self._connection = None
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if future.set_running_or_notify_cancel():
                future.set_result(m.Nothing(0, "agent", _GONE))
        if connection is not None:
            connection.close()


def _map_arena(path: Path, nbytes: int) -> mmap.mmap:
    """Map the arena whose descriptor the memory socket hands out."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(2.0)
        sock.connect(str(path))
        _, fds, _, _ = socket.recv_fds(sock, 1, 1)
    if len(fds) != 1:
        raise wire.WireError("the kv agent gave no memory.")
    try:
        return mmap.mmap(fds[0], nbytes)
    finally:
        os.close(fds[0])


class WebClient:
    """The web process's way to the agent; lives in one event loop."""

    def __init__(self, socket_path: Path) -> None:
        self._path = socket_path
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._connection: wire.AsyncConnection | None = None
        self._connecting = asyncio.Lock()
        self._tried_s = float("-inf")
        self._reader: asyncio.Task[None] | None = None

    async def lookup(
        self,
        request: str,
        tenant: str,
        *,
        segments: list[bytes] | None = None,
        ids: list[int] | None = None,
        beyond: int = 0,
    ) -> m.Found | m.Nothing:
        """The longest saved prefix by digests of rendered text (the longest first) or by ids; held for the request."""
        number = next(self._numbers)
        data = b"" if ids is None else ids_bytes(ids)
        return await self._ask(m.Lookup(number, request, tenant, segments or [], data, beyond), LOOKUP_S)

    async def alias(self, request: str, digest: bytes, boundary: int, last: list[int]) -> bool:
        """The end of a reply, by its rendered bytes; True when the next turn will find it."""
        number = next(self._numbers)
        answer = await self._ask(m.Alias(number, request, digest, boundary, ids_bytes(last)), ALIAS_S)
        return isinstance(answer, m.Done) and answer.ok

    async def status(self, within_s: float = ALIAS_S) -> m.State | None:
        """Counters, None while there is no agent, or none that answers in time."""
        answer = await self._ask(m.StatusAsk(next(self._numbers)), within_s)
        return answer if isinstance(answer, m.State) else None

    async def tell(self, message: m.Forget | m.Leave) -> None:
        """Say something that has no answer."""
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError, wire.WireError):
                await connection.send(message)

    async def close(self) -> None:
        """Hang up."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    async def _ask(self, message: Any, within_s: float) -> Any:
        if not await self._connected():
            return m.Nothing(message.id, "agent", _GONE)
        future = self._waiting[message.id] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(within_s):
                await self._connection.send(message)
                return await future
        except (OSError, AttributeError, wire.WireError):
            return m.Nothing(message.id, "agent", _GONE)
        except TimeoutError:
            return m.Nothing(message.id, "deadline", "the kv agent did not answer in time")
        finally:
            self._waiting.pop(message.id, None)

    async def _connected(self) -> bool:
        async with self._connecting:
            if self._connection is None and time.monotonic() - self._tried_s >= RETRY_S:
                self._tried_s = time.monotonic()
                with contextlib.suppress(wire.WireError):
                    self._connection = await wire.connect_async(self._path, m.FromAgent)
                    self._reader = asyncio.create_task(self._receive(self._connection))
        return self._connection is not None

    async def _receive(self, connection: wire.AsyncConnection) -> None:
        try:
            while (message := await connection.receive()) is not None:
                future = self._waiting.get(getattr(message, "id", 0))
                if future is not None and not future.done():
                    future.set_result(message)
        except (OSError, wire.WireError):
            pass
        finally:
            self._connection = None
            for future in self._waiting.values():
                if not future.done():
                    future.set_result(m.Nothing(0, "agent", _GONE))
            await connection.close()
