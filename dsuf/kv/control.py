"""The owner's side: whoever knows the fleet key may lease entries, and is cut off before their bytes are used again.

A reader that stalls cannot be asked to stop, and an RDMA read tells the owner nothing. So a lease that lapses ends in a
fence: revoke what was exposed, close that reader's connection, and only then unpin the entry. The same happens to all
leases of a connection that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from dsuf.kv.arena import runs
from dsuf.kv.channel import Channel, ChannelBroken, Identity, Refused
from dsuf.kv.entries import Store
from dsuf.kv.entry import Entry, Lease
from dsuf.kv.frames import (
    IDS_IN_GRANT,
    MAX_TTL_MS,
    Answer,
    Ask,
    Grant,
    Held,
    LeaseAsk,
    Miss,
    More,
    Part,
    Renew,
    ToOwner,
    ToReader,
)
from dsuf.kv.names import ids_bytes
from dsuf.kv.transport.base import Extent, TransferFailed, Transport

MAX_CONNECTIONS = 1024
MAX_LEASES = 256  # of one reader
MAX_ASK_BYTES = 64 << 10
Serve = Callable[[Channel], Awaitable[None]]


@dataclass(eq=False)
class _Reader:
    """One control connection."""

    key: str  # sid@boot#number
    channel: Channel
    leases: dict[int, Transport] = field(default_factory=dict)


class ControlServer:
    """Serves control connections, and hands data connections to the transport that they are for."""

    def __init__(
        self,
        store: Store,
        transports: Mapping[str, Transport],
        data: Mapping[str, Serve],
        key: bytes,
        me: Identity,
    ) -> None:
        self.store, self.me = store, me
        self.leaving = self._closed = False
        self.fences = self.refused = 0
        self._transports, self._data, self._key = transports, data, key
        self._numbers = itertools.count(1)
        self._connections: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()  # those, and what is carried through when they end
        self._listeners: list[tuple[socket.socket, asyncio.Task[None]]] = []
        self._loop = asyncio.get_running_loop()

    def listen(self, sock: socket.socket) -> None:
        """Accept connections on a listening socket until `close`."""
        sock.setblocking(False)
        self._listeners.append((sock, asyncio.create_task(self._accept(sock))))

    async def close(self) -> None:
        """Stop listening, cut every reader off."""
        self._closed = True
        for sock, task in self._listeners:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            sock.close()
        for task in self._connections:
            task.cancel()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def serve(self, sock: socket.socket) -> None:
        """Serve one accepted connection, unless there are too many."""
        if self._closed or len(self._connections) >= MAX_CONNECTIONS:
            sock.close()
            return
        task = self._keep(asyncio.create_task(self._serve(sock)))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    def _keep(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, sock: socket.socket) -> None:
        while True:
            try:
                accepted, _ = await self._loop.sock_accept(sock)
            except OSError:  # out of descriptors, or a peer that went away at once
                await asyncio.sleep(0.1)
                continue
            self.serve(accepted)

    async def _serve(self, sock: socket.socket) -> None:
        channel = Channel(sock)
        try:
            peer = await channel.greet(self._key, self.me, self._offers())
            if peer.purpose == "control":
                await self._serve_reader(_Reader(f"{peer.sid}@{peer.boot}#{next(self._numbers)}", channel))
            elif peer.purpose in self._data:
                await self._data[peer.purpose](channel)
        except (Refused, TimeoutError):
            self.refused += 1
        except ChannelBroken:
            pass
        finally:
            channel.close()

    def _offers(self) -> dict[str, bytes]:
        offers = {name: transport.offer() for name, transport in self._transports.items()}
        return {name: offer for name, offer in offers.items() if offer is not None}

    async def _serve_reader(self, reader: _Reader) -> None:
        answering: set[asyncio.Task[None]] = set()
        try:
            while True:
                message = await reader.channel.receive(ToOwner)
                if len(answering) >= MAX_LEASES:
                    raise ChannelBroken("the peer asks more than it waits for.")
                task = asyncio.create_task(self._answer(reader, message))
                answering.add(task)
                task.add_done_callback(answering.discard)
        finally:
            for task in answering:
                task.cancel()
            await asyncio.gather(*answering, return_exceptions=True)
            await asyncio.shield(self._keep(asyncio.create_task(self._gone(reader))))

    async def _answer(self, reader: _Reader, message: ToOwner) -> None:
        with contextlib.suppress(ChannelBroken):
            await reader.channel.send(await self._reply(reader, message))

    async def _reply(self, reader: _Reader, message: ToOwner) -> ToReader:
        now = self._loop.time()
        if isinstance(message, LeaseAsk):
            return await self._lease(reader, message)
        if isinstance(message, Ask):
            return await self._ask(reader, message)
        if isinstance(message, Renew):
            owned = message.lease in reader.leases
            ttl_s = min(message.ttl_ms, MAX_TTL_MS) / 1000
            return Held(message.id, owned and self.store.renew(message.lease, ttl_s, now))
        if isinstance(message, More):
            lease = self.store.leases.get(message.lease) if message.lease in reader.leases else None
            return Part(message.id, self._ids(lease.entry, message.start) if lease else b"")
        return Held(message.id, await self._end(reader, message.lease, now))

    # ---- leases

    async def _lease(self, reader: _Reader, ask: LeaseAsk) -> Grant | Miss:
        entry, transport = self.store.find(ask.key), self._transports.get(ask.path)
        reason = (
            "leaving" if self.leaving
            else "boot" if ask.boot != self.me.boot
            else "gone" if entry is None or entry.id != ask.entry
            else "path" if transport is None
            else "busy" if len(reader.leases) >= MAX_LEASES
            else ""
        )  # fmt: skip
        if reason:
            return Miss(ask.id, reason)
        ttl_ms = max(1, min(ask.ttl_ms, MAX_TTL_MS))
        lease = self.store.lease(entry, reader.key, ttl_ms / 1000, self._loop.time())
        reader.leases[lease.id] = transport
        try:
            ticket = await transport.expose(reader.key, lease.id, self._extents(entry))
        except TransferFailed:
            await self._end(reader, lease.id, self._loop.time())
            return Miss(ask.id, "path")
        self._watch(reader, lease)
        return self._grant(ask, lease, ttl_ms, ticket)

    def _grant(self, ask: LeaseAsk, lease: Lease, ttl_ms: int, ticket: bytes) -> Grant:
        entry, arena = lease.entry, self.store.arena
        return Grant(
            id=ask.id,
            lease=lease.id,
            ttl_ms=ttl_ms,
            name=entry.name,
            tokens=entry.tokens,
            known_ids=self.store.known_ids(entry),
            keys=[(key, ids) for key, ids in entry.keys.items() if key != entry.name],
            pages=len(entry.pages),
            slots=entry.slots.astype("<u4").tobytes(),
            digests=arena.digests[entry.slots].tobytes(),
            ids=self._ids(entry, 0),
            ticket=ticket,
        )

    def _ids(self, entry: Entry, start: int) -> bytes:
        known = self.store.known_ids(entry)
        return ids_bytes(self.store.ids(entry, min(known, start + IDS_IN_GRANT))[start:]) if start >= 0 else b""

    def _extents(self, entry: Entry) -> list[Extent]:
        size = self.store.arena.slot_bytes
        return [Extent(first * size, count * size) for first, count in runs(np.sort(entry.slots))]

    def _watch(self, reader: _Reader, lease: Lease) -> None:
        """Fence the reader when the lease lapses."""
        self._loop.call_at(lease.until_s, self._look, reader, lease.id)

    def _look(self, reader: _Reader, lease_id: int) -> None:
        if lease_id not in reader.leases or lease_id not in self.store.leases:
            return
        lease = self.store.lapse(lease_id, self._loop.time())
        if lease is None:
            self._watch(reader, self.store.leases[lease_id])  # it was renewed
            return
        self.fences += 1
        reader.channel.close()
        self._keep(asyncio.create_task(self._cut_off(reader, lease)))

    async def _cut_off(self, reader: _Reader, lease: Lease) -> None:
        """After `revoke` no read can succeed: the entry may go."""
        transport = reader.leases.pop(lease.id, None)
        if transport is not None:
            await transport.revoke(lease.id)
            self.store.unpin(lease.id, lease.entry)

    async def _end(self, reader: _Reader, lease_id: int, now: float) -> bool:
        """End a lease of this reader, whatever its state; whether it had not lapsed."""
        lease = self.store.leases.get(lease_id)
        if lease_id not in reader.leases or lease is None:
            return False
        held = self.store.end(lease_id, now) is not None
        # Once begun it is carried through, also when the connection that asked for it ends.
        await asyncio.shield(self._keep(asyncio.create_task(self._cut_off(reader, lease))))
        return held

    async def _gone(self, reader: _Reader) -> None:
        now = self._loop.time()
        for lease_id in list(reader.leases):
            await self._end(reader, lease_id, now)
        for transport in self._transports.values():
            await transport.gone(reader.key)

    async def _ask(self, reader: _Reader, ask: Ask) -> Answer:
        transport = self._transports.get(ask.path)
        if transport is None or len(ask.body) > MAX_ASK_BYTES:
            return Answer(ask.id, b"", f"there is no path {ask.path!r} here")
        try:
            return Answer(ask.id, await transport.answer(reader.key, ask.body))
        except TransferFailed as error:
            return Answer(ask.id, b"", str(error))
