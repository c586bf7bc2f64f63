"""Bytes over TCP: data connections beside the control connection, received straight into the arena.

    reader -> owner   Get   lease, ranges
    owner -> reader   Data  bytes to come, 0 for a refusal; then the raw bytes of the ranges, one after the other

The requests are authenticated frames of a channel of their own; the raw bytes are proved by the digests of the grant.
A connection on loopback saturates it; between machines one flow rarely fills the wire, so there are several.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from dsuf.errors import EnvironmentProblem
from dsuf.kv.arena import Arena
from dsuf.kv.channel import Channel, ChannelBroken, Identity
from dsuf.kv.transport.base import Extent, Place, Read, TransferFailed

CONNECTIONS = 4  # to another machine
RANGES_IN_GET = 16_384
YIELD_BYTES = 4 << 20  # others in this loop get a turn after as much
_RECEIVE_BYTES = 1 << 20
Dial = Callable[[str], Awaitable[socket.socket]]  # to the peer's control address


class Get(msgspec.Struct, frozen=True, tag="get"):
    """Send me these ranges of the leased entry."""

    lease: int
    ranges: bytes  # u64 offset and length of each


class Data(msgspec.Struct, frozen=True, tag="data"):
    """What follows this frame."""

    nbytes: int


@dataclass(eq=False)
class _Exposure:
    """One lease: who may read which ranges, and the connections that are sending them."""

    reader: str  # sid@boot
    extents: list[Extent]  # sorted
    starts: list[int]
    sending: dict[Channel, asyncio.Event] = field(default_factory=dict)

    def covers(self, offset: int, length: int) -> bool:
        """Whether the range lies inside one extent."""
        at = bisect_right(self.starts, offset) - 1
        return at >= 0 and length > 0 and offset + length <= self.extents[at].end


class TcpTransport:
    """See `Transport`."""

    name = "tcp"

    def __init__(self, arena: Arena, dial: Dial, key: bytes, me: Identity) -> None:
        self._arena, self._dial, self._key, self._me = arena, dial, key, me
        self._exposed: dict[int, _Exposure] = {}

    def offer(self) -> bytes | None:
        return b""

    def report(self) -> list[str]:
        return ["tcp: always there"]

    async def answer(self, peer: str, body: bytes) -> bytes:
        raise TransferFailed("tcp answers no questions")

    async def expose(self, peer: str, lease: int, extents: Sequence[Extent]) -> bytes:
        ordered = sorted(extents, key=lambda extent: extent.offset)
        starts = [extent.offset for extent in ordered]
        self._exposed[lease] = _Exposure(peer.rpartition("#")[0], ordered, starts)
        return lease.to_bytes(8, "little")

    async def revoke(self, lease: int) -> None:
        exposure = self._exposed.pop(lease, None)
        for channel, done in list(exposure.sending.items()) if exposure else ():
            channel.close()
            await done.wait()

    async def gone(self, peer: str) -> None:
        return None

    async def serve(self, channel: Channel) -> None:
        """Owner: serve one data connection until it ends."""
        reader = f"{channel.peer.sid}@{channel.peer.boot}"
        while True:
            get = await channel.receive(Get)
            ranges = _ranges(get.ranges)
            exposure = self._exposed.get(get.lease)
            allowed = exposure is not None and exposure.reader == reader
            if not allowed or not ranges or not all(exposure.covers(*one) for one in ranges):
                await channel.send(Data(0))
                continue
            done = exposure.sending[channel] = asyncio.Event()
            try:
                await channel.send(Data(sum(length for _, length in ranges)))
                await self._send(channel, ranges)
            finally:
                exposure.sending.pop(channel, None)
                done.set()

    async def _send(self, channel: Channel, ranges: list[tuple[int, int]]) -> None:
        loop, sent = asyncio.get_running_loop(), 0
        for offset, length in ranges:
            for at in range(offset, offset + length, YIELD_BYTES):
                end = min(at + YIELD_BYTES, offset + length)
                try:
                    await loop.sock_sendall(channel.sock, self._arena.view[at:end])
                except (OSError, ValueError) as error:
                    raise ChannelBroken(f"the data connection broke: {error}") from None
                sent += end - at
                if sent >= YIELD_BYTES:
                    sent = 0
                    await asyncio.sleep(0)

    async def link(self, peer: Place) -> TcpLink:
        channels: list[Channel] = []
        try:
            for _ in range(1 if is_loopback(peer.host) else CONNECTIONS):
                channels.append(Channel(await self._dial(peer.host)))
                await channels[-1].meet(self._key, self._me, {}, "tcp")
        except (OSError, TimeoutError, EnvironmentProblem) as error:
            for channel in channels:
                channel.close()
            raise TransferFailed(f"no data connection: {error or type(error).__name__}") from None
        return TcpLink(self._arena, channels)

    async def close(self) -> None:
        for lease in list(self._exposed):
            await self.revoke(lease)


class TcpLink:
    """Several data connections to one owner; see `Link`."""

    def __init__(self, arena: Arena, channels: list[Channel]) -> None:
        self._view, self._channels = arena.view, channels
        self._turns = [asyncio.Lock() for _ in channels]
        self.alive = True

    async def read(self, ticket: bytes, reads: Sequence[Read]) -> None:
        lease = int.from_bytes(ticket, "little")
        shares = _deal(reads, len(self._channels))
        tasks = [
            asyncio.create_task(self._read(channel, turn, lease, share))
            for channel, turn, share in zip(self._channels, self._turns, shares, strict=True)
            if share
        ]
        try:
            await asyncio.gather(*tasks)
        except (ChannelBroken, OSError, ValueError) as error:
            self.alive = False
            raise TransferFailed(f"tcp: {error}") from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, channel: Channel, turn: asyncio.Lock, lease: int, reads: list[Read]) -> None:
        async with turn:
            for at in range(0, len(reads), RANGES_IN_GET):
                some = reads[at : at + RANGES_IN_GET]
                pairs = np.array([(read.remote, read.length) for read in some], "<u8")
                await channel.send(Get(lease, pairs.tobytes()))
                if (await channel.receive(Data)).nbytes != sum(read.length for read in some):
                    raise TransferFailed("tcp: the owner refused the lease")
                await self._receive(channel.sock, some)

    async def _receive(self, sock: socket.socket, reads: list[Read]) -> None:
        loop, since = asyncio.get_running_loop(), 0
        for read in reads:
            at, end = read.local, read.local + read.length
            while at < end:
                got = await loop.sock_recv_into(sock, self._view[at : min(end, at + _RECEIVE_BYTES)])
                if not got:
                    raise ChannelBroken("the owner closed the data connection")
                at += got
                since += got
                if since >= YIELD_BYTES:
                    since = 0
                    await asyncio.sleep(0)

    async def abort(self) -> None:
        # Bytes arrive only while `read` runs, which has ended; those that are still under way meet a closed socket.
        await self.close()

    async def close(self) -> None:
        self.alive = False
        for channel in self._channels:
            channel.close()


def _deal(reads: Sequence[Read], parts: int) -> list[list[Read]]:
    """About as many bytes to each of `parts`; long reads are cut."""
    total = sum(read.length for read in reads)
    most = -(-total // parts)
    shares: list[list[Read]] = [[]]
    room = most
    for read in reads:
        remote, local, left = read.remote, read.local, read.length
        while left:
            if not room:
                shares.append([])
                room = most
            some = min(left, room)
            shares[-1].append(Read(remote, local, some))
            remote, local, left, room = remote + some, local + some, left - some, room - some
    return shares + [[] for _ in range(parts - len(shares))]


def _ranges(data: bytes) -> list[tuple[int, int]]:
    """Pairs of a Get; none for bytes that are no pairs, or too many."""
    if len(data) % 16 or len(data) > 16 * RANGES_IN_GET:
        return []
    pairs = np.frombuffer(data, "<u8").reshape(-1, 2)
    return [(offset, length) for offset, length in pairs.tolist()]


def is_loopback(host: str) -> bool:
    """Whether host:port means this machine."""
    name = host.rpartition(":")[0].strip("[]")
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return name == "localhost"
