"""The owner's side of RDMA: queue pairs for the links of readers, and windows for their leases.

The arena has no remote access. A lease names ranges; when a link wants to read them, windows over just these are bound
to just its queue pairs, and closed when the lease ends: after that a late READ is refused. The windows of a queue pair
are closed before it is, since destroying one with a window bound to it may stall for a minute.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dsuf.kv.transport.base import Extent, TransferFailed, TransportUnavailable
from dsuf.kv.transport.rdma.messages import Connect, Connected, Hello, Keys, Open, Ticket, decode, encode
from dsuf.kv.transport.rdma.queue_pair import QueuePair, Window
from dsuf.kv.transport.rdma.rails import Rails
from dsuf.kv.transport.rdma.verbs import PIECE_BYTES

log = logging.getLogger(__name__)

BIND_S = 2.0  # binding needs no peer: longer means a sick adapter
MAX_LINKS = 32  # of one peer; more are links that it forgot to end
MAX_KEYS = 12_000  # ranges times rails of one lease: what fits into an answer


@dataclass(eq=False)
class _Served:
    """The owner's end of a link; None where a rail did not come about."""

    peer: str
    pairs: list[QueuePair | None]


@dataclass(eq=False)
class _Lease:
    peer: str
    windows: list[tuple[int, int]]
    opened: dict[int, list[list[Window]]] = field(default_factory=dict)  # by link, then rail
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while windows are bound or closed
    over: bool = False


class RdmaOwner:
    """Answers readers. `address` is where the arena begins in this process."""

    def __init__(self, rails: Rails, address: int) -> None:
        self._rails, self._address = rails, address
        self._links: dict[int, _Served] = {}
        self._leases: dict[int, _Lease] = {}
        self._numbers = itertools.count(1)

    async def answer(self, peer: str, body: bytes) -> bytes:
        """See `Transport`."""
        message = decode(body, Connect | Open)
        return encode(await (self._connect if isinstance(message, Connect) else self._open)(peer, message))

    async def _connect(self, peer: str, message: Connect) -> Connected:
        for number in message.closed:
            if number in self._links and self._links[number].peer == peer:
                await self._end_link(number)
        mine = [number for number, served in self._links.items() if served.peer == peer]
        for number in mine[: max(0, len(mine) + 1 - MAX_LINKS)]:
            await self._end_link(number)
        if len({name for name, _ in message.rails}) != len(message.rails):
            raise TransferFailed("rdma: a port is asked for twice")
        number, served = next(self._numbers), _Served(peer, [])
        self._links[number] = served
        hellos = [self._serve(served, name, hello) for name, hello in message.rails]
        if not any(hellos):
            del self._links[number]
            raise TransferFailed(
                "rdma: none of the ports asked for can be connected to: " + "; ".join(self._rails.report())
            )
        return Connected(number, self._address, hellos)

    def _serve(self, served: _Served, name: str, peer: Hello) -> Hello | None:
        """Our end for one of the reader's; None, with the reason logged, where it cannot be made."""
        served.pairs.append(None)
        try:
            pair, hello, gid = self._rails.make_pair(name, peer.kind, serves=True)
        except (TransferFailed, TransportUnavailable) as error:
            log.warning("rdma: %s", error)
            return None
        try:
            pair.join(gid, peer)
        except TransferFailed as error:
            log.warning("rdma: %s", error)
            pair.close()
            return None
        served.pairs[-1] = pair
        return hello

    async def expose(self, peer: str, lease: int, extents: Sequence[Extent]) -> bytes:
        """See `Transport`. The windows are opened when a link of that peer asks for them."""
        windows = _windows(extents)
        if len(windows) * max(1, len(self._rails.offered())) > MAX_KEYS:
            raise TransferFailed(f"rdma: {len(windows)} ranges need too many keys")
        self._leases[lease] = _Lease(peer, windows)
        return encode(Ticket(lease, windows))

    async def _open(self, peer: str, message: Open) -> Keys:
        lease, served = self._leases.get(message.lease), self._links.get(message.link)
        if lease is None or lease.peer != peer or served is None or served.peer != peer:
            raise TransferFailed("rdma: that lease or link is over")
        async with lease.lock:
            if message.link in self._links and message.link not in lease.opened and not lease.over:
                lease.opened[message.link] = await asyncio.gather(
                    *(_bind(pair, lease.windows) for pair in served.pairs)
                )
            if lease.over or message.link not in lease.opened:
                raise TransferFailed("rdma: that lease or link is over")
            rails = lease.opened[message.link]
            if not any(rails):
                raise TransferFailed("rdma: no rail of the link works any more")
            return Keys([[window.rkey for window in windows] for windows in rails])

    async def revoke(self, lease: int) -> None:
        """See `Transport`."""
        ended = self._leases.pop(lease, None)
        if ended is None:
            return
        ended.over = True
        async with ended.lock:
            for rails in ended.opened.values():
                _close(itertools.chain(*rails))
            ended.opened.clear()

    async def gone(self, peer: str) -> None:
        """See `Transport`."""
        for lease in [number for number, lease in self._leases.items() if lease.peer == peer]:
            await self.revoke(lease)
        for number in [number for number, served in self._links.items() if served.peer == peer]:
            await self._end_link(number)

    async def _end_link(self, number: int) -> None:
        """Windows first: a queue pair that is destroyed with a window bound to it may stall for a minute."""
        served = self._links.pop(number, None)
        for lease in list(self._leases.values()):
            async with lease.lock:
                _close(itertools.chain(*lease.opened.pop(number, [])))
        _close(served.pairs if served else [])

    async def close(self) -> None:
        """End every lease and link."""
        for lease in list(self._leases):
            await self.revoke(lease)
        for number in list(self._links):
            await self._end_link(number)


def _windows(extents: Sequence[Extent]) -> list[tuple[int, int]]:
    """(offset, length), ascending, neighbours joined, each inside one registered piece of the arena."""
    joined: list[list[int]] = []
    for extent in sorted(extents, key=lambda extent: extent.offset):
        if joined and extent.offset <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], extent.end)
        elif extent.length:
            joined.append([extent.offset, extent.end])
    windows = []
    for start, end in joined:
        while start < end:
            cut = min(end, (start // PIECE_BYTES + 1) * PIECE_BYTES)
            windows.append((start, cut - start))
            start = cut
    return windows


async def _bind(pair: QueuePair | None, ranges: Sequence[tuple[int, int]]) -> list[Window]:
    """A window for each range; none, with the reason logged, when the rail is out."""
    if pair is None:
        return []
    try:
        async with asyncio.timeout(BIND_S):
            return await pair.open_windows(ranges)
    except (TransferFailed, TimeoutError) as error:
        log.warning("rdma: no windows on %s: %s", pair.port, error or "binding takes too long")
        return []


def _close(made: Iterable[Window | QueuePair | None]) -> None:
    for one in made:
        if one is not None:
            one.close()
