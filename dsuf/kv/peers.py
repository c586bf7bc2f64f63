"""The reader's side of control connections: one to each owner, shared by all pulls, each question with its answer.

A connection that breaks fails every question at once; the next pull makes a new one, unless the peer is left alone for
a while after a failure. Data links are kept idle for the next pull, one for each that ran at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Mapping
from typing import Any

from dsuf.kv.channel import Channel, ChannelBroken, Identity, Refused
from dsuf.kv.directory import Holder
from dsuf.kv.frames import Answer, Ask, Grant, Held, LeaseAsk, Miss, More, Part, Release, Renew, ToReader
from dsuf.kv.rates import Circuits
from dsuf.kv.transport.base import Link, TransferFailed, Transport, TransportUnavailable
from dsuf.kv.transport.tcp import Dial, is_loopback

CONNECT_S, ANSWER_S = 0.5, 0.25
LINK_S = 1.0
IDLE_LINKS = 4


class Connection:
    """An authenticated control connection to one owner."""

    def __init__(self, address: str, channel: Channel) -> None:
        self.address, self.host_id = address, channel.peer.host_id
        self.key = f"{channel.peer.sid}@{channel.peer.boot}"
        self.offers = channel.peer.offers
        self.alive = True
        self._channel, self._numbers = channel, itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._task = asyncio.create_task(self._receive())

    async def lease(self, key: bytes, entry: int, boot: str, path: str, ttl_s: float) -> Grant | Miss:
        """Ask for an entry. Raises TransferFailed when no answer comes, as all the others do."""
        number = next(self._numbers)
        return await self._ask(LeaseAsk(number, key, entry, boot, path, int(ttl_s * 1000)), Grant | Miss)

    async def more_ids(self, lease: int, start: int) -> bytes:
        """Further ids of a leased entry."""
        return (await self._ask(More(next(self._numbers), lease, start), Part)).ids

    async def renew(self, lease: int, ttl_s: float) -> bool:
        """Hold a lease longer; False when it has lapsed."""
        return (await self._ask(Renew(next(self._numbers), lease, int(ttl_s * 1000)), Held)).held

    async def release(self, lease: int) -> bool:
        """Give a lease back; whether it was held without a gap."""
        return (await self._ask(Release(next(self._numbers), lease), Held)).held

    async def ask(self, path: str, body: bytes) -> bytes:
        """A transport's question to its twin."""
        answer = await self._ask(Ask(next(self._numbers), path, body), Answer, LINK_S)
        if answer.error:
            raise TransferFailed(f"{path}: {answer.error}")
        return answer.body

    def close(self) -> None:
        """Hang up; the owner then ends every lease of this connection."""
        self._task.cancel()
        self._channel.close()
        self._fail("the control connection was closed")

    async def _ask(self, message: Any, expected: Any, within_s: float = ANSWER_S) -> Any:
        if not self.alive:
            raise TransferFailed("the control connection is gone")
        future = asyncio.get_running_loop().create_future()
        self._waiting[message.id] = future
        try:
            async with asyncio.timeout(within_s):
                await self._channel.send(message)
                answer = await future
        except (ChannelBroken, TimeoutError) as error:
            raise TransferFailed(f"no answer from the owner: {error or 'too late'}") from None
        finally:
            self._waiting.pop(message.id, None)
        if not isinstance(answer, expected):
            raise TransferFailed("the owner answered something else")
        return answer

    async def _receive(self) -> None:
        reason = "the owner hung up"
        try:
            while True:
                message = await self._channel.receive(ToReader)
                future = self._waiting.pop(message.id, None)
                if future is not None and not future.done():
                    future.set_result(message)
        except ChannelBroken as error:
            reason = str(error)
        finally:
            self._channel.close()
            self._fail(reason)

    def _fail(self, reason: str) -> None:
        self.alive = False
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(TransferFailed(reason))
        self._waiting.clear()


class _Twin:
    """One owner as one transport sees it; see `Peer`."""

    def __init__(self, connection: Connection, path: str) -> None:
        self.key, self.host, self.offer = connection.key, connection.address, connection.offers[path]
        self._connection, self._path = connection, path

    async def ask(self, body: bytes) -> bytes:
        return await self._connection.ask(self._path, body)


class Peers:
    """All owners that this server reads from."""

    def __init__(
        self, transports: Mapping[str, Transport], dial: Dial, key: bytes, me: Identity, circuits: Circuits
    ) -> None:
        self.circuits = circuits
        self._transports, self._dial, self._key, self._me = transports, dial, key, me
        self._connections: dict[tuple[str, str], asyncio.Task[Connection]] = {}
        self._idle: dict[tuple[str, str], list[Link]] = {}

    async def connection(self, holder: Holder) -> Connection:
        """The connection to a holder, made by the first who wants it. Raises TransferFailed."""
        pair = (holder.sid, holder.boot)
        if is_loopback(holder.address) and holder.host_id != self._me.host_id:
            raise TransferFailed("the owner listens on its own machine only (--kv-listen)")
        if self.circuits.is_open(*pair):
            raise TransferFailed("the owner failed a moment ago")
        task = self._connections.get(pair)
        if task is None or (task.done() and (task.cancelled() or task.exception() or not task.result().alive)):
            task = self._connections[pair] = asyncio.create_task(self._connect(holder))
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(task)

    def paths(self, connection: Connection) -> list[str]:
        """Paths to try, the best first: those that both sides offer and that did not fail a moment ago."""
        here = connection.host_id == self._me.host_id
        order = ["shm", "rdma", "tcp"] if here else ["rdma", "tcp"]
        mine = [path for path in order if path in self._transports and self._transports[path].offer() is not None]
        return [path for path in mine if path in connection.offers and not self.circuits.is_open(connection.key, path)]

    async def link(self, connection: Connection, path: str) -> Link:
        """An idle link, or a new one. Raises TransferFailed; the path is then left alone for a while."""
        idle = self._idle.get((connection.key, path), [])
        while idle:
            link = idle.pop()
            if link.alive:
                return link
            await link.close()
        try:
            async with asyncio.timeout(LINK_S):
                return await self._transports[path].link(_Twin(connection, path))
        except (TransportUnavailable, TransferFailed, TimeoutError) as error:
            self.circuits.open(connection.key, path)
            raise TransferFailed(f"{path}: {error or 'no link in time'}") from None

    async def give_back(self, connection: Connection, path: str, link: Link) -> None:
        """Keep a link for the next pull."""
        idle = self._idle.setdefault((connection.key, path), [])
        if link.alive and connection.alive and len(idle) < IDLE_LINKS:
            idle.append(link)
        else:
            await link.close()

    async def close(self) -> None:
        """Hang up everywhere."""
        for task in self._connections.values():
            if task.done() and not task.cancelled() and not task.exception():
                task.result().close()
            task.cancel()
        links = [link for idle in self._idle.values() for link in idle]
        await asyncio.gather(*(link.close() for link in links), return_exceptions=True)

    async def _connect(self, holder: Holder) -> Connection:
        await self._close_links(f"{holder.sid}@{holder.boot}")
        offers = {name: transport.offer() for name, transport in self._transports.items()}
        channel = None
        try:
            async with asyncio.timeout(CONNECT_S):
                channel = Channel(await self._dial(holder.address))
                offered = {name: offer for name, offer in offers.items() if offer is not None}
                peer = await channel.meet(self._key, self._me, offered, "control")
            if (peer.sid, peer.boot) != (holder.sid, holder.boot):
                raise Refused("another server answers at that address by now")
        except (OSError, TimeoutError, Refused, ChannelBroken) as error:
            if channel is not None:
                channel.close()
            self.circuits.open(holder.sid, holder.boot)
            raise TransferFailed(f"no connection to the owner: {error or 'too late'}") from None
        return Connection(holder.address, channel)

    async def _close_links(self, key: str) -> None:
        for pair in [pair for pair in self._idle if pair[0] == key]:
            for link in self._idle.pop(pair):
                await link.close()


async def dial(address: str) -> socket.socket:
    """Connect to host:port. Raises OSError."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    family, kind, proto, _, target = found[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setblocking(False)
        # A host that lost power says nothing; without this a connection to it would look alive for ever.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        await loop.sock_connect(sock, target)
    except BaseException:
        with contextlib.suppress(OSError):
            sock.close()
        raise
    return sock
