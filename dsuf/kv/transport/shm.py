"""Bytes between two servers of one user on one machine: the owner's memory, mapped for reading, and a copy.

The descriptor is passed over a Unix socket in the user's 0700 folder, after the same handshake as everywhere; it cannot
be mapped for writing, and its size is sealed. What was mapped cannot be taken away again, so an owner has no fence on
this path: the reader proves every byte it copied by its digest, and asks at the end whether its lease held all along.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import mmap
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from dsuf.errors import EnvironmentProblem
from dsuf.kv.arena import SIZE_SEALS, Arena
from dsuf.kv.channel import Channel, Identity
from dsuf.kv.transport.base import Extent, Place, Read, TransferFailed, TransportUnavailable

COPY_BYTES = 8 << 20  # of one call; an abort waits for one call at most


class Memory(msgspec.Struct, frozen=True, tag="memory"):
    """The descriptor that follows is of so many bytes."""

    nbytes: int


class ShmTransport:
    """See `Transport`. `socket_path` is where this server listens; None if it only reads."""

    name = "shm"

    def __init__(self, arena: Arena, socket_path: Path | None, key: bytes, me: Identity) -> None:
        self._arena, self._path, self._key, self._me = arena, socket_path, key, me

    def offer(self) -> bytes | None:
        return str(self._path).encode() if self._path else None

    def report(self) -> list[str]:
        return ["shm: servers of this user on this machine"]

    async def answer(self, peer: str, body: bytes) -> bytes:
        raise TransferFailed("shm answers no questions")

    async def expose(self, peer: str, lease: int, extents: Sequence[Extent]) -> bytes:
        return b""

    async def revoke(self, lease: int) -> None:
        return None

    async def gone(self, peer: str) -> None:
        return None

    async def serve(self, channel: Channel) -> None:
        """Owner: give the descriptor to whoever passed the handshake on the Unix socket."""
        if channel.sock.family != socket.AF_UNIX:
            return
        await channel.send(Memory(self._arena.nbytes))
        fd = self._arena.read_only_fd()
        try:
            socket.send_fds(channel.sock, [b"m"], [fd])
        finally:
            os.close(fd)

    async def link(self, peer: Place) -> ShmLink:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, peer.offer.decode())
            channel = Channel(sock)
            owner = await channel.meet(self._key, self._me, {}, "shm")
            if f"{owner.sid}@{owner.boot}" != peer.key:
                raise TransportUnavailable("another server listens on that socket by now")
            nbytes = (await channel.receive(Memory)).nbytes
            return ShmLink(self._arena, *await _map_descriptor(sock, nbytes))
        except (OSError, ValueError, TimeoutError, EnvironmentProblem) as error:
            raise TransportUnavailable(f"shm: {error or type(error).__name__}") from None
        finally:
            sock.close()

    async def close(self) -> None:
        return None


class ShmLink:
    """A peer's arena, mapped; see `Link`."""

    def __init__(self, arena: Arena, mapping: mmap.mmap, nbytes: int) -> None:
        self._mapping, self._nbytes = mapping, nbytes
        self._source = np.frombuffer(mapping, np.uint8).ctypes.data
        self._target, self._room = arena.address, arena.nbytes
        self._running: asyncio.Future[None] | None = None
        self._stop = False
        self.alive = True

    async def read(self, ticket: bytes, reads: Sequence[Read]) -> None:
        for read in reads:
            inside = 0 <= read.remote <= read.remote + read.length <= self._nbytes
            if not inside or not 0 <= read.local <= read.local + read.length <= self._room:
                raise TransferFailed("shm: a range lies outside the memory")
        self._running = asyncio.get_running_loop().run_in_executor(None, self._copy, list(reads))
        await asyncio.shield(self._running)

    def _copy(self, reads: list[Read]) -> None:
        """In a thread; memmove runs without the interpreter lock."""
        for read in reads:
            for at in range(0, read.length, COPY_BYTES):
                if self._stop:
                    return
                count = min(COPY_BYTES, read.length - at)
                ctypes.memmove(self._target + read.local + at, self._source + read.remote + at, count)

    async def abort(self) -> None:
        self._stop = True
        if self._running is not None:
            await asyncio.wait({self._running})
        await self.close()

    async def close(self) -> None:
        self.alive = False


async def _map_descriptor(sock: socket.socket, nbytes: int) -> tuple[mmap.mmap, int]:
    """The mapping of the descriptor that comes next on `sock`. Raises TransportUnavailable for an unsafe one."""
    await _readable(sock)
    _, fds, _, _ = socket.recv_fds(sock, 1, 1)
    if len(fds) != 1:
        raise TransportUnavailable("the peer sent no descriptor")
    try:
        if fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & SIZE_SEALS != SIZE_SEALS or os.fstat(fds[0]).st_size != nbytes:
            raise TransportUnavailable("the peer's memory could shrink while it is read")
        return mmap.mmap(fds[0], nbytes, prot=mmap.PROT_READ), nbytes
    finally:
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)


async def _readable(sock: socket.socket) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        async with asyncio.timeout(2.0):
            await ready.wait()
    finally:
        loop.remove_reader(sock)
