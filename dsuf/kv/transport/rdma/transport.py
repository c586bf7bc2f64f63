"""Caches over RDMA: the reader's adapter takes the bytes out of the owner's memory, and no core of the owner works."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from dsuf.kv.arena import Arena
from dsuf.kv.transport.base import Extent, Peer, TransferFailed, TransportUnavailable
from dsuf.kv.transport.rdma import verbs
from dsuf.kv.transport.rdma.link import Rail, RdmaLink
from dsuf.kv.transport.rdma.messages import (
    VERSION,
    Connect,
    Connected,
    Hello,
    Offer,
    OfferedPort,
    decode,
    encode,
    pair_ports,
)
from dsuf.kv.transport.rdma.owner import RdmaOwner
from dsuf.kv.transport.rdma.ports import Gid, find
from dsuf.kv.transport.rdma.queue_pair import QueuePair
from dsuf.kv.transport.rdma.rails import Rails


class RdmaTransport:
    """See `Transport`. Made by `open`, off the event loop; everything else runs in it."""

    name = "rdma"

    def __init__(self, rails: Rails, owner: RdmaOwner) -> None:
        self._rails, self._owner = rails, owner
        self._ended_links: dict[str, list[int]] = {}  # by peer: told with the next Connect

    @classmethod
    def open(cls, arena: Arena, *, ports: tuple[str, ...] | None = None) -> RdmaTransport:
        """Open the devices with a usable port and register the arena on them; slow for a large one.

        Raises TransportUnavailable without pyverbs, a device, or enough lockable memory. With devices whose ports are
        not usable yet it opens, offers nothing, and goes on looking.
        """
        if not any(find(ports)):
            raise TransportUnavailable("this machine has no RDMA device")
        verbs.load()
        problem = verbs.locked_memory_problem(arena.nbytes)
        if problem:
            raise TransportUnavailable(problem)
        rails = Rails(arena, ports)
        return cls(rails, RdmaOwner(rails, arena.address))

    async def start(self) -> None:
        """Watch the ports from now on."""
        await self._rails.start()

    def offer(self) -> bytes | None:
        """See `Transport`."""
        offered = self._rails.offered()
        return encode(Offer(VERSION, offered)) if offered else None

    def report(self) -> list[str]:
        """See `Transport`."""
        return [f"rdma: {line}" for line in self._rails.report()]

    async def answer(self, peer: str, body: bytes) -> bytes:
        """See `Transport`."""
        return await self._owner.answer(peer, body)

    async def expose(self, peer: str, lease: int, extents: Sequence[Extent]) -> bytes:
        """See `Transport`."""
        return await self._owner.expose(peer, lease, extents)

    async def revoke(self, lease: int) -> None:
        """See `Transport`."""
        await self._owner.revoke(lease)

    async def gone(self, peer: str) -> None:
        """See `Transport`."""
        await self._owner.gone(peer)

    async def link(self, peer: Peer) -> RdmaLink:
        """See `Transport`. A queue pair on each pair of ports that reach each other."""
        offer = decode(peer.offer, Offer)
        common = pair_ports(self._rails.offered(), offer.ports) if offer.version == VERSION else []
        if not common:
            theirs = ", ".join(f"{port.name} ({'/'.join(port.kinds)})" for port in offer.ports)
            raise TransportUnavailable(f"rdma: no port here reaches one of {peer.host}: {theirs or 'it has none'}")
        ends: list[tuple[QueuePair, Hello, Gid]] = []
        try:
            for own, _, kind in common:
                ends.append(self._rails.make_pair(own.name, kind, serves=False))
            asked = [(theirs.name, hello) for (_, theirs, _), (_, hello, _) in zip(common, ends, strict=True)]
            ended = self._ended_links.pop(peer.key, [])
            reply = decode(await peer.ask(encode(Connect(asked, ended))), Connected)
            return self._join(peer, common, ends, reply)
        except BaseException:
            for pair, _, _ in ends:
                pair.close()
            raise

    def _join(
        self,
        peer: Peer,
        common: list[tuple[OfferedPort, OfferedPort, str]],
        ends: list[tuple[QueuePair, Hello, Gid]],
        reply: Connected,
    ) -> RdmaLink:
        """The link over the rails that could be joined. Raises TransferFailed when there is none."""
        rails, reasons = [], []
        for index, ((own, theirs, _), (pair, _, gid)) in enumerate(zip(common, ends, strict=True)):
            hello = reply.rails[index] if index < len(reply.rails) else None
            try:
                if hello is None:
                    raise TransferFailed(f"the owner could not use its port {theirs.name}")
                pair.join(gid, hello)
            except TransferFailed as error:
                reasons.append(str(error))
                pair.close()
            else:
                rails.append(Rail(index, f"{own.name}-{theirs.name}", pair, min(own.gbps, theirs.gbps) or 1.0))
        if not rails:
            self._note_end(peer.key, reply.link)
            raise TransferFailed("rdma: " + "; ".join(reasons))
        max_segments = min(rail.pair.device.max_segments for rail in rails)
        on_end = functools.partial(self._note_end, peer.key)
        return RdmaLink(peer, reply.link, reply.address, rails, max_segments, on_end)

    def _note_end(self, key: str, link: int) -> None:
        self._ended_links.setdefault(key, []).append(link)

    async def close(self) -> None:
        """See `Transport`."""
        await self._owner.close()
        await self._rails.close()
