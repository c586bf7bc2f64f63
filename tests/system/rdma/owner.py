"""An owner of caches with an RDMA transport, and the reader's hold on it: a plain control connection for the checks.

Requests are msgpack lists of an operation and its arguments. Each connection is one peer of the owner's transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import signal
import socket
import struct
from pathlib import Path
from typing import Any

import msgspec

from dsuf.kv.arena import Arena
from dsuf.kv.transport.base import Extent, Read, TransferFailed
from dsuf.kv.transport.rdma import RdmaTransport

PORT = 7000
SLOT_BYTES = 113_920  # a cache page of the full-width model
ARENA_BYTES = 64 << 20


def make_arena(*, filled: bool) -> Arena:
    """64 MiB; filled: every slot has its own bytes."""
    arena = Arena(ARENA_BYTES, SLOT_BYTES, 128)
    if filled:
        noise = os.urandom(SLOT_BYTES)
        for slot in range(arena.slots):
            mine = arena.bytes_of(slot)
            mine[:] = noise
            mine[:8] = mine[-8:] = struct.pack("<Q", slot)
    return arena


class Owner:
    """Serves its arena on `address` until told to quit."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._arena = make_arena(filled=True)
        self._transport = RdmaTransport.open(self._arena)
        self._leases, self._peers = itertools.count(1), itertools.count(1)
        self._over = asyncio.Event()

    async def serve(self) -> None:
        await self._transport.start()
        async with await asyncio.start_server(self._answer, self._address, PORT):
            await self._over.wait()
        await self._transport.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = f"reader{next(self._peers)}"
        try:
            while True:
                operation, *arguments = await receive(reader)
                try:
                    result = await getattr(self, f"do_{operation}")(peer, *arguments)
                except TransferFailed as error:
                    await send(writer, ["failed", str(error)])
                else:
                    await send(writer, ["done", result])
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._transport.gone(peer)
        finally:
            writer.close()

    async def do_hello(self, peer: str) -> Any:
        return self._transport.offer(), self._arena.nbytes

    async def do_answer(self, peer: str, body: bytes) -> Any:
        return await self._transport.answer(peer, body)

    async def do_expose(self, peer: str, ranges: list[tuple[int, int]]) -> Any:
        lease = next(self._leases)
        return lease, await self._transport.expose(peer, lease, [Extent(*each) for each in ranges])

    async def do_revoke(self, peer: str, lease: int) -> None:
        await self._transport.revoke(lease)

    async def do_digests(self, peer: str) -> Any:
        return [self._arena.digest(slot) for slot in range(self._arena.slots)]

    async def do_report(self, peer: str) -> Any:
        return self._transport.report()

    async def do_windows(self, peer: str, present: bool) -> None:
        for device in self._transport._rails._devices.values():
            device.has_windows = present

    async def do_set_link(self, peer: str, up: bool) -> None:
        set_link(up)

    async def do_die(self, peer: str) -> None:
        asyncio.get_running_loop().call_later(0.02, os.kill, os.getpid(), signal.SIGKILL)

    async def do_reset(self, peer: str) -> None:
        """The whole machine stops, without a word to anybody."""
        asyncio.get_running_loop().call_later(0.02, Path("/proc/sysrq-trigger").write_text, "b")

    async def do_quit(self, peer: str) -> None:
        asyncio.get_running_loop().call_later(0.1, self._over.set)


class RemoteOwner:
    """The reader's control connection, and the `Peer` that its transport is given."""

    def __init__(self, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.key, self.host, self.offer = "owner@boot", host, b""
        self.nbytes = 0
        self._reader, self._writer, self._lock = reader, writer, asyncio.Lock()

    @classmethod
    async def connect(cls, host: str) -> RemoteOwner:
        """Waits until the owner listens."""
        while True:
            with contextlib.suppress(OSError):
                owner = cls(host, *await asyncio.open_connection(host, PORT))
                owner.offer, owner.nbytes = await owner.call("hello")
                return owner
            await asyncio.sleep(0.2)

    async def call(self, operation: str, *arguments: Any) -> Any:
        async with self._lock:
            await send(self._writer, [operation, *arguments])
            how, result = await receive(self._reader)
        if how == "failed":
            raise TransferFailed(result)
        return result

    async def ask(self, body: bytes) -> bytes:
        return await self.call("answer", body)

    async def expose(self, ranges: list[tuple[int, int]]) -> tuple[int, bytes]:
        """(lease, ticket)."""
        return tuple(await self.call("expose", ranges))

    def close(self) -> None:
        self._writer.close()


def slot_reads(remote: list[int], local: list[int]) -> list[Read]:
    """Reads of whole slots."""
    return [
        Read(theirs * SLOT_BYTES, ours * SLOT_BYTES, SLOT_BYTES) for theirs, ours in zip(remote, local, strict=True)
    ]


def set_link(up: bool) -> None:
    """Switch the network device of the second port on or off, without a program that would wait for its turn."""
    get_flags, set_flags, is_up = 0x8913, 0x8914, 1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, get_flags, struct.pack("16sH14x", b"eth1", 0))
        flags = struct.unpack("16sH14x", answer)[1] & ~is_up | (is_up if up else 0)
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sH14x", b"eth1", flags))


async def send(writer: asyncio.StreamWriter, message: Any) -> None:
    body = msgspec.msgpack.encode(message)
    writer.write(struct.pack("<I", len(body)) + body)
    await writer.drain()


async def receive(reader: asyncio.StreamReader) -> Any:
    (length,) = struct.unpack("<I", await reader.readexactly(4))
    return msgspec.msgpack.decode(await reader.readexactly(length))
